"""Where a comparison of an audit begins to be a problem: just below and just above each bound, on both sides."""

import dataclasses
import logging
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from attends import Attends
from noised_toys import NoisyToy
from toys import Toy

from lm_eval_duel.audit import commit_once, contradictions, estimates, replay, samplers, verify, wrapped_networks
from lm_eval_duel.audit.checked import CheckedWindow, Recomputed
from lm_eval_duel.audit.estimates import SMALL
from lm_eval_duel.audit.from_text import scored_of_row
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.float_noise import PER_WINDOW, nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.filters import Warp
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments, TwoPhaseArguments
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.registry import LOG_MEAN
from lm_eval_duel.estimators.totals import FEW, TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.text.annotated import TokenText

SIDES = (0.0, 0.99, 1.01, -0.99, -1.01)  # in units of the bound


def checked(scores, windows=None):
    """Windows with these scores, each recomputed with the same value."""
    windows = windows or [Window((n,), (0, 1, 2)) for n in range(len(scores))]
    entries = []
    for n, (window, score) in enumerate(zip(windows, scores, strict=True)):
        again = Recomputed(score.log_prob)
        entries.append(CheckedWindow(f"window {n}", window, score.log_prob, again, n, score))
    return entries


# ---------------------------------------------------------------- values that contradict each other


@pytest.mark.parametrize("form", ["count", "ratio"])
@pytest.mark.parametrize("side", SIDES)
def test_a_drawn_bound_beside_the_mean_over_orders(form, side):
    """Four of its errors, which add up as those of independent draws; a ratio may be far below."""
    elbo = Elbo(Toy(), ElboArguments(16, form))
    bound = 4 * math.hypot(0.3, 0.4) + PER_WINDOW
    off = side * bound
    first = Score(-5.0 + off, stderr=0.3)
    second = Score(-7.0, stderr=0.4)

    problems = list(contradictions._elbo(elbo, checked([first, second]), {0: -5.0, 1: -7.0}))
    assert bool(problems) == (side > 1 or (side < -1 and form == "count"))
    if problems:
        assert f"ELBO of 2 windows is {off:+.4f} nats" in problems[0]
        assert f"is {abs(off) / 0.5:.1f} of its" in problems[0]

    # equal windows share their draws
    twice = checked([first, first], [Window((), (0,))] * 2)
    bound_of_one = 4 * 0.3 + PER_WINDOW
    differs = off > bound_of_one or (off < -bound_of_one and form == "count")
    assert bool(list(contradictions._elbo(elbo, twice, {0: -5.0, 1: -5.0}))) == differs

    without_error = checked([dataclasses.replace(first, stderr=None)])
    assert not list(contradictions._elbo(elbo, without_error, {0: -50.0}))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("drawn", [FEW - 1, FEW])
def test_an_estimate_beside_its_value(side, drawn):
    """Four of its errors, once enough blocks were drawn for one."""
    window = Window((5,), (0, 1, 2))
    estimator = TwoPhase.__new__(TwoPhase)
    estimator.arguments = TwoPhaseArguments(0.5)
    estimator.blocks = lambda window: []
    estimator.weights = lambda windows: torch.zeros(1, 0)
    exact = SimpleNamespace(log_prob=lambda windows: [Score(-6.0) for _ in windows])
    estimator.phases = {"uncached": exact}
    off = side * (4 * 0.7 + nats_tolerance(3))
    blocks = TwoPhaseBlocks(20, sampled=drawn, drawn=drawn, variance=0.49)
    score = Score(-6.0 + off, blocks=blocks)

    comparisons = contradictions.contradictions(estimator, checked([score], [window]))

    assert bool(comparisons.problems) == (abs(side) > 1 and drawn == FEW)
    assert ("the exact value" in comparisons.compared) == (drawn == FEW)
    if comparisons.problems:
        assert f"of 1 window is {off:+.4f} nats" in comparisons.problems[0]
        assert f"is {abs(off) / 0.7:.1f} of its" in comparisons.problems[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pair", [("elbo_exact", "mixture"), ("mixture", "oracle"), ("greedy:k=1", "oracle")])
def test_the_order_of_values_over_all_orders(pair, side):
    """A rule is held to the oracle if it revealed one position at a time, of those that are not known."""
    low, high = pair
    lattice = Lattice.__new__(Lattice)
    lattice.name = "mixture"
    values = {"elbo_exact": -9.0, "mixture": -8.0, "oracle": -7.0, "greedy:k=1": -8.5}
    values[low] = values[high] + side * nats_tolerance(3)

    for known, nfe in (((), 3), ((), 2), ((1,), 2), ((1,), 3)):
        window = Window((), (0, 1, 2), known=known)
        others = {
            "elbo_exact": Score(values["elbo_exact"]),
            "oracle": Score(values["oracle"]),
            "greedy:k=1": Score(values["greedy:k=1"], nfe=nfe, reveal_steps=(0, 1, 2)),
        }
        score = Score(values["mixture"], others=others)

        problems = list(contradictions._lattice(lattice, checked([score], [window])))

        one_at_a_time = nfe == 3 - len(known)
        compared = low != "greedy:k=1" or one_at_a_time
        assert bool(problems) == (side > 1 and compared), (known, nfe)
        for problem in problems:
            assert low in problem
            assert high in problem


@pytest.mark.parametrize("side", SIDES)
def test_a_rule_beside_the_best_order(side):
    """A rule that reveals one position at a time has no more than the oracle."""
    for known, nfe in (((), 3), ((), 2), ((1,), 2), ((1,), 3), ((), None)):
        window = Window((), (0, 1, 2), known=known)
        score = Score(-5.0 + side * nats_tolerance(3), nfe=nfe)

        problems = list(contradictions._below_oracle(checked([score], [window]), {0: -5.0}))

        one_at_a_time = nfe == 3 - len(known)
        assert bool(problems) == (side > 1 and one_at_a_time)
        for problem in problems:
            assert "-5.0000" in problem


# ---------------------------------------------------------------- an order, token by token


@pytest.mark.parametrize("side", SIDES)
def test_a_token_and_the_sum_of_all(side):
    off = side * nats_tolerance(3)
    differs = abs(side) > 1
    nats = [-1.0, -2.0, -3.0]

    score = Score(-6.0 - off, token_logprobs=(-1.0, -2.0 - off, -3.0))
    expected = [f"position 1 of the target (counted from 0) has {-2.0 - off:.5f} nats, not -2.00000"] if differs else []
    assert replay._differing_tokens(nats, score) == expected

    score = Score(-6.0 - off, token_logprobs=(-1.0, -2.0, -3.0))
    expected = ["its tokens add up to -6.0000 nats"] if differs else []
    assert replay._differing_tokens(nats, score) == expected


# ---------------------------------------------------------------- noise seeds


@pytest.mark.parametrize("count", [1, 2, 3])
def test_paths_of_noise_seeds_are_added_up(count, monkeypatch):
    """Picks and ties are counted over seeds, values are means, and each difference is named with its seed."""
    tokens = {3: (-1.0, -2.0), 5: (-1.5, -3.0), 8: (-0.5, -2.5)}
    along_own_order = {3: None, 5: -5.0, 8: -4.0}  # None: as along the run's order
    seeds = list(tokens)[:count]
    paths = {}
    for seed in seeds:
        nats = sum(tokens[seed])
        paths[seed] = Recomputed(nats, other_picks=seed, ties=1, own_order=along_own_order[seed])

    def given_noise(*arguments):
        return SimpleNamespace(seed=arguments[-1], blocks=[[1], [2]])

    def with_seed(seed):
        score = Score(0.0, token_logprobs=tokens[seed])
        return SimpleNamespace(log_prob=lambda windows: [score])

    monkeypatch.setattr(commit_once, "given_noise", given_noise)
    monkeypatch.setattr(commit_once, "along_any_order", lambda network, rule, run: paths[network.seed])
    window = Window((7,), (0, 1))
    estimator = SimpleNamespace(denoiser=None, block=1, grid="target", rule=None, seeds=seeds, with_seed=with_seed)

    values = [sum(tokens[seed]) for seed in seeds]
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else None
    log_mean = 0.0
    for block in range(2):
        log_mean += math.log(statistics.fmean(math.exp(tokens[seed][block]) for seed in seeds))
    score = Score(mean, stderr=error, seeds=tuple(values), others={LOG_MEAN: Score(log_mean)})
    own_orders = [along_own_order[seed] or sum(tokens[seed]) for seed in seeds]

    again = commit_once.over_seeds(estimator, window, score)
    assert again.log_prob == pytest.approx(mean)
    assert again.own_order == pytest.approx(statistics.fmean(own_orders))
    assert again.other_picks == sum(seeds)
    assert again.ties == count
    assert again.problems == ()

    off = 2 * nats_tolerance(2)
    wrong_scores = {
        f"noise_seed {seeds[-1]}": dataclasses.replace(score, seeds=(*values[:-1], values[-1] + off)),
        LOG_MEAN: dataclasses.replace(score, others={LOG_MEAN: Score(log_mean + off)}),
    }
    if error is not None:
        wrong_scores["stderr"] = dataclasses.replace(score, stderr=error + off)
    for name, wrong in wrong_scores.items():
        [problem] = commit_once.over_seeds(estimator, window, wrong).problems
        assert problem.startswith(f"{name} is ")


# ---------------------------------------------------------------- the windows that are verified


def verification(verify_count, rank=0, ranks=1, seed=0, windows=None):
    """Of four requests with three windows each, the first of which has no target."""
    options = SimpleNamespace(verify=verify_count, draw_seed=seed)
    if windows is None:
        windows = {}
        for request in range(4):
            windows[request] = [Window((request,), (0,) * length) for length in range(3)]
    return verify.Verification(options, windows, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 9, 30])
def test_the_number_of_windows_that_are_drawn(count, ranks):
    """N over all ranks, the first ranks one more; on each only windows with a target, at most all of them."""
    shares = [verification(count, rank, ranks).drawn for rank in range(ranks)]

    for rank, share in enumerate(shares):
        wanted = count // ranks + (1 if rank < count % ranks else 0)
        assert len(share) == min(8, wanted)
        assert all(part > 0 for _, part in share)
    if count == 8 and ranks == 2:
        with_another_seed = verification(count, 0, 2, seed=1).drawn
        assert shares[0] != shares[1]
        assert shares[0] != with_another_seed
    assert not verification(count, windows={}).drawn


@pytest.mark.parametrize("off", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_a_comparison_of_drawn_windows(off, coarse, fails_at, monkeypatch, caplog):
    """In the order of requests; one that differs is an error unless the run is coarse; company is left out."""
    caplog.set_level(logging.INFO)
    drawn = verification(30)
    requests = [
        SimpleNamespace(task_name="task", doc={}, doc_id=10, idx=0),
        SimpleNamespace(task_name="task", doc={}, doc_id=11, idx=1),
        SimpleNamespace(task_name=verify.OTHER_TEXTS, doc={}, doc_id=12, idx=2),
        SimpleNamespace(task_name="other", doc={}, doc_id=13, idx=3),
    ]
    for request in (3, 1, 2, 0):
        drawn.keep(request, [Score(-1.0) for _ in range(3)])
    done = []

    def recompute(estimator, window, score):
        if len(done) == fails_at:
            raise KeyError("broken")
        done.append(window)
        return Recomputed(-1.0, problems=("p",) if len(done) - 1 in off else ())

    monkeypatch.setattr(verify, "float32_estimator", lambda *_: None)
    monkeypatch.setattr(verify, "recompute", recompute)
    compared = drawn.compare(requests, SimpleNamespace(denoiser=SimpleNamespace(coarse=coarse)))

    every_place = [
        "task task, document 10, window 1",
        "task task, document 10, window 2",
        "task task, document 11, option 1, window 1",
        "task task, document 11, option 1, window 2",
        "task other, document 13, option 3, window 1",
        "task other, document 13, option 3, window 2",
    ]
    assert [checked_window.where for checked_window in compared] == every_place[:fails_at]

    if compared:
        summaries = [record for record in caplog.records if record.getMessage().startswith("verify: ")]
        levels = {record.levelname for record in summaries}
        some_differ = any(n in off for n in range(len(compared)))
        assert levels == {"ERROR" if some_differ and not coarse else "INFO"}

    fails = fails_at is not None
    failure = f"verify failed after {len(compared)} of 8 windows; scores are unaffected: KeyError: 'broken'"
    assert (failure in caplog.text) == fails
    assert drawn.failure == ("KeyError: 'broken'" if fails else "")


# ---------------------------------------------------------------- what an audit recomputes with


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("steps", range(1, 10))
def test_an_even_schedule_gives_its_first_steps_one_more(size, steps):
    schedule = samplers.scheduled("even", steps)
    counts = [schedule(size, size, t) for t in range(steps)]

    assert sum(counts) == size
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("steps", range(1, 10))
def test_a_schedule_of_dream_keeps_the_share_of_its_times(steps):
    times = torch.linspace(1, 1e-3, steps + 1)  # float32, as in their code
    left = 20
    for t in range(steps):
        expected = left if t == steps - 1 else int(left * (1 - times[t + 1] / times[t]))
        assert samplers.scheduled("dream", steps)(20, left, t) == expected
        left -= expected
    assert left == 0


@pytest.mark.parametrize("grid", ["row", "target"])
@pytest.mark.parametrize("block", [1, 3, 4, 9, None])
@pytest.mark.parametrize(("context", "target"), [(0, 6), (2, 6), (3, 5), (1, 1)])
def test_the_span_of_a_block_by_hand(grid, block, context, target):
    """The columns that share a position's block, up to the end of the target."""
    window = Window((0,) * context, (1,) * target, (2,))
    network = OneRow(Toy(length=12), window, block, grid)
    size = block or target
    zero = context if grid == "target" or block is None else 0
    end = context + target

    for position in range(context, end):
        number = (position - zero) // size
        columns = [column for column in range(end) if (column - zero) // size == number]
        assert network.span(position) == (columns[0], columns[-1] + 1)


@pytest.mark.parametrize("bos", ["given", "official"])
@pytest.mark.parametrize("suffix", [(), (2, 1)])
def test_the_masked_share_by_hand(bos, suffix):
    """Of the row; in the authors' way, of the positions that are neither context, suffix nor known."""
    window = Window((1, 0), (0, 1, 2, 0), suffix, known=(1,))
    toy = NoisyToy(length=12)
    toy.bos = bos
    network = commit_once.GivenNoise(toy, window, None, "target", 0)
    row = torch.tensor(network.x)
    row[[2, 5]] = network.m
    positions = 3 if bos == "official" else 6 + len(suffix)
    assert float(network.share(row, 2)) == 2 / positions


@pytest.mark.parametrize("bos", ["given", "official", "scored", "first", "auto"])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_the_ids_that_are_scored_of_a_row_of_a_task(bos, before, after):
    """All of a row; without its first or its last id; or without all special tokens, and the first id after them."""
    ids = list(range(6))
    row = TokenText("text", ids, (before, after))
    expected = {
        "scored": ids,
        "given": ids[1:],
        "official": ids[:-1],
        "first": ids[before + 1 : 6 - after],
        "auto": ids[before : 6 - after],
    }
    assert scored_of_row(row, bos) == expected[bos]


@pytest.mark.parametrize(("size", "by_reference"), [(1, True), (SMALL, True), (SMALL + 1, False)])
def test_sums_over_orders_reach_to_small_blocks(size, by_reference):
    lattice = Lattice(Toy(tokens=2), size, LatticeArguments(), estimator="mixture")
    window = Window((), (0, 1, 1, 0, 1, 0, 0, 1)[:size])
    [score] = lattice.log_prob([window])

    again = estimates.value(lattice, OneRow(lattice.denoiser, window, size, "target"), window, score)

    if by_reference:
        assert again.log_prob == pytest.approx(score.log_prob, abs=1e-9)
        assert not again.problems
    else:
        assert f"more than {SMALL}" in again


def test_weights_of_drawn_blocks_are_one_over_the_share():
    estimator = TwoPhase(Attends(), "greedy", 2, TwoPhaseArguments(0.5))
    window = Window((), (0, 1, 2, 0, 1, 1, 2, 2))
    [score] = estimator.log_prob([window])
    network = OneRow(estimator.denoiser, window, 2, "target")
    assert estimates.value(estimator, network, window, score).problems == ()

    weights = list(score.blocks.weights)
    drawn = weights.index(2.0)
    weights[drawn] = 2.5
    blocks = dataclasses.replace(score.blocks, weights=tuple(weights))
    wrong = dataclasses.replace(score, blocks=blocks)

    again = estimates.value(estimator, network, window, wrong)
    assert f"weight of block {drawn} is 2.5000, not 2.0000" in again.problems


def test_draws_of_the_first_windows_are_looked_at_once_each(monkeypatch):
    windows = []
    twice = []
    for n in range(contradictions.DRAWN_WINDOWS + 4):
        window = Window((), (n % 3, n // 3 % 3, n // 9 % 3, n // 27))
        windows.append(window)
        twice += [window, window]
    asked = []

    def draw_statistics(estimator, given):
        asked.extend(given)
        return {}

    monkeypatch.setattr(contradictions, "STATES", 0)
    monkeypatch.setattr(contradictions, "draw_statistics", draw_statistics)
    elbo = Elbo(Toy(), ElboArguments(16))
    comparisons = contradictions.contradictions(elbo, checked([Score(-1.0)] * len(twice), twice))

    assert asked == windows[: contradictions.DRAWN_WINDOWS]
    assert "draws" not in comparisons.compared


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_block_with_a_tie_is_checked_if_its_values_agree(off, monkeypatch):
    """Where they do not, the run may have taken the other way: then the window is not checked."""
    estimator = TwoPhase(Attends(), "greedy", 4, TwoPhaseArguments(1.0))
    window = Window((), (0, 1, 2, 0))
    [score] = estimator.log_prob([window])
    cached_network = estimator.phases["cached"].denoiser

    def of_block(network, F, n):
        F.tied = True
        blocks = score.blocks.cached if network.denoiser is cached_network else score.blocks.uncached
        return blocks[0] + off

    monkeypatch.setattr(estimates, "_of_block", of_block)
    again = estimates.value(estimator, OneRow(estimator.denoiser, window, 4, "target"), window, score)

    if off:
        assert "ties" in again
    else:
        assert again.problems == ()
        assert again.log_prob == pytest.approx(score.log_prob)


@pytest.mark.parametrize("between", [1.5, 3.5, 4.5])
@pytest.mark.parametrize("best", [max, min])
@pytest.mark.parametrize("picked", [0, 1])
def test_a_pick_is_a_tie_if_logits_within_it_give_the_pick(between, best, picked):
    """Each of two tokens of each of two positions may move by a near tie, up or down: four of them lie between."""

    def pick(log_P, M):
        margins = [float(log_P[ell, 0] - log_P[ell, 1]) for ell in M]
        return [M[margins.index(best(margins))]]

    logits = torch.tensor([[1.0, 0.0, -9.0], [1.0 + between * NEAR_TIE, 0.0, -9.0]], dtype=torch.float64)
    log_P = logits.log_softmax(1)
    is_the_rules = pick(log_P, [0, 1]) == [picked]

    assert replay.in_a_tie(pick, log_P, [0, 1], [picked]) == (is_the_rules or between < 4)


@pytest.mark.parametrize("replicates", [1, 2, 4, 8])
@pytest.mark.parametrize("side", [None, *SIDES])
def test_the_error_of_draws_is_recomputed(replicates, side):
    """From replicates of draws, if there are two or more; a run that has none differs."""
    values = [-3.0, -5.0, -4.0, -4.5, -2.0, -6.0, -3.5, -4.25]
    noise = nats_tolerance(4)
    stderr = None
    if replicates > 1:
        of_replicates = [statistics.fmean(values[n::replicates]) for n in range(replicates)]
        error = statistics.stdev(of_replicates) / math.sqrt(replicates)
        stderr = None if side is None else error + side * noise

    again = estimates._monte_carlo(values, replicates, Score(-4.0, stderr=stderr), noise)

    assert again.log_prob == pytest.approx(statistics.fmean(values))
    assert bool(again.problems) == (replicates > 1 and (side is None or abs(side) > 1))


@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.75, 0.76, 1e-9])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_warp_of_the_audit_keeps_the_tokens_of_a_run(top_k, top_p, temperature):
    """Where a share is reached exactly; those of a run are held by test_truncation_by_hand."""
    p = torch.tensor([[0.125, 0.5, 0.125, 0.25], [0.25, 0.125, 0.5, 0.125]], dtype=torch.float64)
    warp = Warp(temperature, top_k, top_p)
    logits = temperature * p.log()
    torch.testing.assert_close(wrapped_networks.warped(warp, logits), warp(logits, None))
