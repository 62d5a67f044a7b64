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
    windows = windows or [Window((n,), (0, 1, 2)) for n in range(len(scores))]
    return [
        CheckedWindow(f"window {n}", window, score.log_prob, Recomputed(score.log_prob), n, score)
        for n, (window, score) in enumerate(zip(windows, scores, strict=True))
    ]


# ---------------------------------------------------------------- values that contradict each other


@pytest.mark.parametrize("form", ["count", "ratio"])
@pytest.mark.parametrize("side", SIDES)
def test_a_drawn_bound_beside_the_mean_over_orders(form, side):
    """Four of its errors, which add up as those of independent draws; a ratio may be far below."""
    elbo = Elbo(Toy(), ElboArguments(16, form))
    errors = [0.3, 0.4]
    bound = 4 * 0.5 + PER_WINDOW
    scores = [Score(-5.0 + side * bound, stderr=errors[0]), Score(-7.0, stderr=errors[1])]
    exact = {0: -5.0, 1: -7.0}
    found = list(contradictions._elbo(elbo, checked(scores), exact))
    assert bool(found) == (side > 1 or (side < -1 and form == "count"))
    if found:
        assert f"ELBO of 2 windows is {side * bound:+.4f} nats" in found[0]
        assert f"is {abs(side) * bound / 0.5:.1f} of its" in found[0]
    twice = checked([scores[0], scores[0]], [Window((), (0,))] * 2)  # equal windows share their draws
    alone = 4 * 0.3 + PER_WINDOW
    expected = side * bound > alone or (side * bound < -alone and form == "count")
    assert bool(list(contradictions._elbo(elbo, twice, {0: -5.0, 1: -5.0}))) == expected
    unknown = checked([dataclasses.replace(scores[0], stderr=None)])
    assert not list(contradictions._elbo(elbo, unknown, {0: -50.0}))


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
    bound = 4 * 0.7 + nats_tolerance(3)
    score = Score(-6.0 + side * bound, blocks=TwoPhaseBlocks(20, sampled=drawn, drawn=drawn, variance=0.49))
    held = contradictions.contradictions(estimator, checked([score], [window]))
    assert bool(held.problems) == (abs(side) > 1 and drawn == FEW)
    assert ("the exact value" in held.compared) == (drawn == FEW)
    if held.problems:
        assert f"of 1 window is {side * bound:+.4f} nats" in held.problems[0]
        assert f"is {abs(side) * bound / 0.7:.1f} of its" in held.problems[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pair", [("elbo_exact", "mixture"), ("mixture", "oracle"), ("greedy:k=1", "oracle")])
def test_the_order_of_values_over_all_orders(pair, side):
    """A rule is held to the oracle if it revealed one position at a time, of those that are not known."""
    low, high = pair
    for known, nfe in (((), 3), ((), 2), ((1,), 2), ((1,), 3)):
        window = Window((), (0, 1, 2), known=known)
        bound = nats_tolerance(3)
        values = {"elbo_exact": -9.0, "mixture": -8.0, "oracle": -7.0, "greedy:k=1": -8.5}
        values[low] = values[high] + side * bound
        rule = Score(values["greedy:k=1"], nfe=nfe, reveal_steps=(0, 1, 2))
        others = {"elbo_exact": Score(values["elbo_exact"]), "oracle": Score(values["oracle"]), "greedy:k=1": rule}
        lattice = Lattice.__new__(Lattice)
        lattice.name = "mixture"
        found = list(contradictions._lattice(lattice, checked([Score(values["mixture"], others=others)], [window])))
        compared = low != "greedy:k=1" or nfe == 3 - len(known)
        assert bool(found) == (side > 1 and compared), (known, nfe)
        assert all(low in problem and high in problem for problem in found)


@pytest.mark.parametrize("side", SIDES)
def test_a_rule_beside_the_best_order(side):
    for known, nfe in (((), 3), ((), 2), ((1,), 2), ((1,), 3), ((), None)):
        window = Window((), (0, 1, 2), known=known)
        score = Score(-5.0 + side * nats_tolerance(3), nfe=nfe)
        found = list(contradictions._below_oracle(checked([score], [window]), {0: -5.0}))
        assert bool(found) == (side > 1 and nfe == 3 - len(known))
        assert all("-5.0000" in problem for problem in found)


# ---------------------------------------------------------------- an order, token by token


@pytest.mark.parametrize("side", SIDES)
def test_a_token_and_the_sum_of_all(side):
    noise = nats_tolerance(3)
    nats = [-1.0, -2.0, -3.0]
    score = Score(-6.0 - side * noise, token_logprobs=(-1.0, -2.0 - side * noise, -3.0))
    found = replay._differing_tokens(nats, score)
    assert found == ([f"token 1 has {-2.0 - side * noise:.4f} nats, not -2.0000"] if abs(side) > 1 else [])
    found = replay._differing_tokens(nats, dataclasses.replace(score, token_logprobs=(-1.0, -2.0, -3.0)))
    assert found == (["its tokens add up to -6.0000 nats"] if abs(side) > 1 else [])


# ---------------------------------------------------------------- noise seeds


@pytest.mark.parametrize("count", [1, 2, 3])
def test_paths_of_noise_seeds_are_added_up(count, monkeypatch):
    """Picks and ties are counted over seeds, values are means, and each difference is named with its seed."""
    seeds = [3, 5, 8][:count]
    tokens = {3: (-1.0, -2.0), 5: (-1.5, -3.0), 8: (-0.5, -2.5)}
    own_orders = {3: None, 5: -5.0, 8: -4.0}
    paths = {
        seed: Recomputed(sum(tokens[seed]), other_picks=seed, ties=1, own_order=own_orders[seed]) for seed in tokens
    }
    window = Window((7,), (0, 1))
    monkeypatch.setattr(
        commit_once, "given_noise", lambda *arguments: SimpleNamespace(seed=arguments[-1], blocks=[[1], [2]])
    )
    monkeypatch.setattr(commit_once, "along_any_order", lambda network, rule, run: paths[network.seed])
    estimator = SimpleNamespace(denoiser=None, block=1, grid="target", rule=None, seeds=seeds)
    estimator.of_seed = lambda seed: SimpleNamespace(log_prob=lambda windows: [Score(0.0, token_logprobs=tokens[seed])])
    values = [sum(tokens[seed]) for seed in seeds]
    mean = sum(values) / count
    error = None
    if count > 1:
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    log_mean = sum(math.log(sum(math.exp(tokens[seed][block]) for seed in seeds) / count) for block in range(2))
    score = Score(mean, stderr=error, seeds=tuple(values), others={LOG_MEAN: Score(log_mean)})
    found = commit_once.over_seeds(estimator, window, score)
    own = sum(
        value if own_orders[seed] is None else own_orders[seed] for seed, value in zip(seeds, values, strict=True)
    )
    assert found.log_prob == pytest.approx(mean) and found.own_order == pytest.approx(own / count)
    assert (found.other_picks, found.ties, found.problems) == (sum(seeds), count, ())

    off = 2 * nats_tolerance(2)
    wrong = {
        f"noise_seed {seeds[-1]}": dataclasses.replace(score, seeds=(*values[:-1], values[-1] + off)),
        LOG_MEAN: dataclasses.replace(score, others={LOG_MEAN: Score(log_mean + off)}),
    }
    if error is not None:
        wrong["stderr"] = dataclasses.replace(score, stderr=error + off)
    for name, each in wrong.items():
        [problem] = commit_once.over_seeds(estimator, window, each).problems
        assert problem.startswith(f"{name} is ")


# ---------------------------------------------------------------- the windows that are verified


def verification(verify_count, rank=0, ranks=1, seed=0, windows=None):
    options = SimpleNamespace(verify=verify_count, draw_seed=seed)
    if windows is None:
        windows = {n: [Window((n,), (0,) * part) for part in range(3)] for n in range(4)}  # the first has no target
    return verify.Verification(options, windows, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 9, 30])
def test_the_number_of_windows_that_are_drawn(count, ranks):
    """N over all ranks, the first ranks one more; on each only windows with a target, at most all of them."""
    shares = [verification(count, rank, ranks).drawn for rank in range(ranks)]
    for rank, share in enumerate(shares):
        assert len(share) == min(8, count // ranks + (1 if rank < count % ranks else 0))
        assert all(part > 0 for _, part in share)
    if count == 8 and ranks == 2:
        assert shares[0] != shares[1] and shares[0] != verification(count, 0, 2, seed=1).drawn
    assert not verification(count, windows={}).drawn


@pytest.mark.parametrize("off", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_a_comparison_of_drawn_windows(off, coarse, fails_at, monkeypatch, caplog):
    """In the order of requests; one that differs is an error unless the run is coarse; company is left out."""
    caplog.set_level(logging.INFO)
    drawn = verification(30)
    tasks = ["task", "task", verify.COMPANY, "other"]
    requests = [SimpleNamespace(task_name=name, doc_id=10 + n, idx=n) for n, name in enumerate(tasks)]
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
    found = drawn.compare(requests, SimpleNamespace(denoiser=SimpleNamespace(coarse=coarse)))
    places = [(0, ""), (1, ", option 1"), (3, ", option 3")]
    expected = [f"task {tasks[n]}, document {10 + n}{option}, window {part}" for n, option in places for part in (1, 2)]
    assert [each.where for each in found] == expected[:fails_at]
    levels = {record.levelname for record in caplog.records if record.getMessage().startswith("verify: ")}
    if found:
        wrong = any(n in off for n in range(len(found)))
        assert levels == {"ERROR" if wrong and not coarse else "INFO"}
    failed = f"verify failed after {len(found)} of 8 windows; scores are unaffected: KeyError: 'broken'"
    assert (failed in caplog.text) == (fails_at is not None)
    assert drawn.failure == ("KeyError: 'broken'" if fails_at is not None else "")


# ---------------------------------------------------------------- what an audit recomputes with


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("steps", range(1, 10))
def test_an_even_schedule_gives_its_first_steps_one_more(size, steps):
    counts = [samplers.scheduled("even", steps)(size, size, t) for t in range(steps)]
    assert sum(counts) == size and max(counts) - min(counts) <= 1
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
    window = Window((0,) * context, (1,) * target, (2,))
    network = OneRow(Toy(length=12), window, block, grid)
    size = block or target
    zero = context if grid == "target" or block is None else 0
    for position in range(context, context + target):
        columns = [c for c in range(12) if (c - zero) // size == (position - zero) // size and c < context + target]
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
        assert again.log_prob == pytest.approx(score.log_prob, abs=1e-9) and not again.problems
    else:
        assert f"more than {SMALL}" in again


def test_weights_of_drawn_blocks_are_one_over_the_share():
    estimator = TwoPhase(Attends(), "greedy", 2, TwoPhaseArguments(0.5))
    window = Window((), (0, 1, 2, 0, 1, 1, 2, 2))
    [score] = estimator.log_prob([window])
    network = OneRow(estimator.denoiser, window, 2, "target")
    assert estimates.value(estimator, network, window, score).problems == ()
    drawn = next(n for n, weight in enumerate(score.blocks.weights) if weight)
    weights = [2.5 if n == drawn else weight for n, weight in enumerate(score.blocks.weights)]
    blocks = dataclasses.replace(score.blocks, weights=tuple(weights))
    again = estimates.value(estimator, network, window, dataclasses.replace(score, blocks=blocks))
    assert f"weight of block {drawn} is 2.5, not 2" in again.problems


def test_draws_of_the_first_windows_are_looked_at_once_each(monkeypatch):
    windows = [Window((), (n % 3, n // 3 % 3, n // 9 % 3, n // 27)) for n in range(contradictions.DRAWN_WINDOWS + 4)]
    twice = [window for window in windows for _ in range(2)]
    asked = []
    monkeypatch.setattr(contradictions, "STATES", 0)
    monkeypatch.setattr(contradictions, "draw_statistics", lambda estimator, given: asked.extend(given) or {})
    held = contradictions.contradictions(Elbo(Toy(), ElboArguments(16)), checked([Score(-1.0)] * len(twice), twice))
    assert asked == windows[: contradictions.DRAWN_WINDOWS] and "draws" not in held.compared


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_block_with_a_tie_is_checked_if_its_values_agree(off, monkeypatch):
    """Where they do not, the run may have taken the other way: then the window is not checked."""
    estimator = TwoPhase(Attends(), "greedy", 4, TwoPhaseArguments(1.0))
    window = Window((), (0, 1, 2, 0))
    [score] = estimator.log_prob([window])
    values = {"cached": score.blocks.cached[0], "uncached": score.blocks.uncached[0]}

    def of_block(network, F, n):
        F.tied = True
        return values["cached" if network.denoiser is estimator.phases["cached"].denoiser else "uncached"] + off

    monkeypatch.setattr(estimates, "_of_block", of_block)
    again = estimates.value(estimator, OneRow(estimator.denoiser, window, 4, "target"), window, score)
    if off:
        assert "ties" in again
    else:
        assert again.problems == () and again.log_prob == pytest.approx(score.log_prob)


@pytest.mark.parametrize("between", [1.5, 3.5, 4.5])
@pytest.mark.parametrize("best", [max, min])
@pytest.mark.parametrize("picked", [0, 1])
def test_a_pick_is_a_tie_if_logits_within_it_give_the_pick(between, best, picked):
    """Each of two tokens of each of two positions may move by a near tie, up or down: four of them lie between."""

    def pick(log_P, M):
        return [best(M, key=lambda ell: float(log_P[ell, 0] - log_P[ell, 1]))]

    logits = torch.tensor([[1.0, 0.0, -9.0], [1.0 + between * NEAR_TIE, 0.0, -9.0]], dtype=torch.float64)
    log_P = logits.log_softmax(1)
    own = pick(log_P, [0, 1])
    assert replay.in_a_tie(pick, log_P, [0, 1], [picked]) == (own == [picked] or between < 4)


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
