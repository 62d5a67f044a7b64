"""Every estimator on toys that can be enumerated: the lattice against all orders, the ELBO against all masked sets."""

import itertools
import math
import statistics

import dit_reference
import pytest
import torch
from toys import BlockCausal, Causal, Rotary, Small, Toy

from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import REPLICATES, Elbo, replicates
from lm_eval_duel.estimators.subsets.lattice import Lattice

NETWORKS = {
    "bidirectional": lambda: Toy(length=9, seed=1),
    "no padding": lambda: Toy(length=9, seed=2, honours_padding=False),
    "rotary": lambda: Rotary(length=9, seed=3),
    "block-causal": lambda: BlockCausal(block=4, length=9, seed=4),
}
WINDOWS = [
    Window((1,), (0, 2, 1, 1, 2, 0, 1)),
    Window((), (0, 2, 1, 2, 2)),
    Window((2, 1), (1,)),
    Window((), (2, 2, 0, 1), suffix=()),
    Window((), ()),
]
INFILLING = [Window((1,), (0, 2, 1, 1), suffix=(2,)), Window((0,), (2, 2, 0, 1), tail=2), *WINDOWS]
STATE_ONLY = [
    "left_to_right:k=1",
    "right_to_left:k=3",
    "random:k=1:seed=3",
    "greedy:k=1",
    "greedy:k=2",
    "margin:k=1",
    "log_margin:k=1",
    "entropy:k=1",
    "threshold:mu=0.5",
    "entropy_bound:gamma=0.7",
]


def close(network):
    """Float64 agrees to 1e-9; the rotary toy has noise of about that planted."""
    return 1e-6 if network == "rotary" else 1e-9


def every_order(denoiser, window, block):
    """For each block of a window, the nats of each order of its positions, by replaying them."""
    duel = DuelEstimator(denoiser, block=block)
    spans = [(max(0, s - len(window.context)), s + w - len(window.context)) for s, w in duel.blocks(window)]
    found = []
    for begin, end in spans:
        steps = []
        for order in itertools.permutations(range(end - begin)):
            steps.append([0] * len(window.target))
            for first, last in spans:
                steps[-1][first:last] = range(last - first)
            steps[-1][begin:end] = order
        replayed = duel.replay([window] * len(steps), steps)
        found.append([math.fsum(each.token_logprobs[begin:end]) for each in replayed])
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_lattice_is_the_enumeration_of_all_orders(network):
    toy = NETWORKS[network]()
    windows = WINDOWS if network == "block-causal" else INFILLING
    for window, found in zip(windows, Lattice(toy, 4).log_prob(windows), strict=True):
        orders = every_order(toy, window, 4)
        assert found.others["oracle"].log_prob == pytest.approx(sum(max(o) for o in orders), abs=close(network))
        mean = sum(math.fsum(o) / len(o) for o in orders)
        assert found.others["elbo_exact"].log_prob == pytest.approx(mean, abs=close(network))
        mixture = sum(math.log(math.fsum(math.exp(v) for v in o) / len(o)) for o in orders)
        assert found.log_prob == pytest.approx(mixture, abs=close(network))


@pytest.mark.parametrize(
    ("network", "block"), [("bidirectional", 2), ("no padding", 4), ("rotary", 4), ("block-causal", 4)]
)
def test_lattice_reads_off_every_state_only_rule(network, block):
    toy = NETWORKS[network]()
    windows = WINDOWS if network == "block-causal" else INFILLING
    rules = STATE_ONLY[list(NETWORKS).index(network) % 2 :: 2]
    scored = Lattice(toy, block, follow=rules, batch_size=1).log_prob(windows)
    for rule in rules:
        for mine, theirs in zip(scored, DuelEstimator(toy, rule, block).log_prob(windows), strict=True):
            path = mine.others[rule]
            assert path.reveal_steps == theirs.reveal_steps
            assert path.token_logprobs == pytest.approx(theirs.token_logprobs, abs=close(network))
            assert (path.nfe, path.near_ties) == (theirs.nfe, theirs.near_ties)
            mean, oracle = (mine.others[name].log_prob for name in ("elbo_exact", "oracle"))
            assert mean <= mine.log_prob + close(network) and mine.log_prob <= oracle + close(network)
            if ":k=1" in rule:
                assert path.log_prob <= oracle + close(network)


def test_near_ties_in_a_lattice_are_those_of_the_rule():
    """On a nearly flat network some steps are near ties and others are not."""
    toy, rules = Toy(length=9, seed=1, scale=3e-4), ["greedy:k=1", "margin:k=1", "entropy:k=1"]
    scored = Lattice(toy, 2, follow=rules).log_prob(INFILLING)
    for rule in rules:
        found = [score.others[rule] for score in scored]
        expected = DuelEstimator(toy, rule, 2).log_prob(INFILLING)
        assert [path.near_ties for path in found] == [score.near_ties for score in expected]
        assert 0 < sum(path.near_ties for path in found) < sum(path.nfe for path in found)


@pytest.mark.parametrize("grid", ["target", "row"])
def test_the_mixture_is_a_likelihood_and_the_others_are_not(grid):
    toy = Toy(length=6)
    scored = Lattice(toy, 3, grid=grid).log_prob([Window((1,), s) for s in itertools.product(range(3), repeat=4)])
    mass = [math.fsum(math.exp(s.others[name].log_prob) for s in scored) for name in ("elbo_exact", "oracle")]
    assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-9) and mass[0] < 1 < mass[1]


def test_the_value_asked_for_and_where_it_comes_from():
    toy, window = Toy(length=9, seed=1), WINDOWS[0]
    best, mean, mixture = (
        Lattice(toy, 4, value=value, traced=True).log_prob([window])[0] for value in ("oracle", "elbo_exact", "mixture")
    )
    assert (mean.log_prob, mixture.log_prob) == tuple(best.others[name].log_prob for name in ("elbo_exact", "mixture"))
    replayed = DuelEstimator(toy, block=4, traced=True).replay([window], [best.reveal_steps])[0]
    assert replayed.log_prob == pytest.approx(best.log_prob, abs=1e-9)
    for name in ("token_logprobs", "confidence", "margin", "entropy"):
        assert getattr(best, name) == pytest.approx(getattr(replayed, name), abs=1e-9)
    assert math.fsum(mean.token_logprobs) == pytest.approx(mean.log_prob, abs=1e-9)
    assert mixture.token_logprobs == mixture.reveal_steps == mean.reveal_steps == ()


@pytest.mark.parametrize("block", [1, 4, 8])
def test_states_are_evaluated_once_each(block):
    """2^m - 1 states of a block of m positions: 15 of four, whatever is asked of them."""
    lattice = Lattice(Toy(length=12, seed=1), block, follow=STATE_ONLY)
    target = (0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0, 2)
    lattice.log_prob([Window((), target), Window((), target)])
    whole, rest = divmod(12, block)
    assert lattice.counts.rows == whole * (2**block - 1) + (2**rest - 1)
    if block == 4:  # and all orders, each in its own pass, are six times as many
        duel = DuelEstimator(Toy(length=12, seed=1), block=4)
        for order in itertools.permutations(range(4)):
            duel.replay([Window((), target)], [order * 3])
        assert duel.counts.rows > 6 * lattice.counts.rows


def test_lattice_in_small_pieces_and_out_of_memory():
    windows = WINDOWS + [Window((0,), (1, 2, 0, n % 3, n // 3)) for n in range(4)]
    whole = Lattice(Toy(length=9), 4, follow=["greedy"]).log_prob(windows)
    for toy, batch in ((Toy(length=9), 1), (Small(5, length=9), 8), (Toy(length=9, honours_padding=False), 3)):
        pieces = Lattice(toy, 4, batch_size=batch, follow=["greedy"]).log_prob(windows)
        for one, other in zip(whole, pieces, strict=True):
            assert one.others["greedy:k=1"].reveal_steps == other.others["greedy:k=1"].reveal_steps
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)
            for name, value in one.others.items():
                assert value.log_prob == pytest.approx(other.others[name].log_prob, abs=1e-9)


def test_what_the_lattice_refuses():
    for named, network, block, more in (
        ("4,095 sets.*32", Toy(), "auto", {}),
        ("the whole target", Toy(), None, {}),
        ("estimator=ar", Causal(), 1, {}),
        ("klass:.*memory", Toy(), 4, {"follow": ["klass:mu=0.9:nu=0.1"]}),
    ):
        with pytest.raises(DuelError, match=named):
            Lattice(network, block, **more)


# ---------------------------------------------------------------- the Monte Carlo ELBO


def by_hand(toy, window):
    """The ELBO over the whole target, every masked set enumerated: the mean over sizes of m / l times the mean over
    sets of that size of the sum of log-probs."""
    m, start = len(window.target), len(window.context)
    row = torch.tensor([*window.context, *window.target, *[toy.mask_id] * window.tail, *window.suffix])
    total = 0.0
    for size in range(1, m + 1):
        parts = []
        for masked in itertools.combinations(range(start, start + m), size):
            ids = row.clone()
            ids[list(masked)] = toy.mask_id
            logits = toy.head(toy.features(ids[None], None))[0].masked_fill(toy.excluded, -math.inf).log_softmax(-1)
            parts.append(math.fsum(float(logits[p, row[p]]) for p in masked))
        total += m / size * math.fsum(parts) / len(parts)
    return total / m


@pytest.mark.parametrize("form", ["count", "ratio"])
def test_elbo_is_the_mean_over_hidden_sets(form):
    toy = Toy(length=9, seed=5)
    windows = [w for w in INFILLING if w.target and not w.tail]
    for scored, window in zip(Elbo(toy, form=form, samples=512).log_prob(windows), windows, strict=True):
        assert abs(scored.log_prob - by_hand(toy, window)) < 4 * scored.stderr + 1e-9
        assert math.fsum(scored.token_logprobs) == pytest.approx(scored.log_prob, abs=1e-9)
        assert scored.stderr > 1e-3 or (form == "count" and len(window.target) == 1)


@pytest.mark.parametrize("network", NETWORKS)
def test_elbo_by_blocks_lands_on_the_mean_over_orders(network):
    """Law 7."""
    toy = NETWORKS[network]()
    windows = WINDOWS if network == "block-causal" else INFILLING
    exact = Lattice(toy, 4, value="elbo_exact").log_prob(windows)
    for bound, mean in zip(Elbo(toy, 4, samples=256).log_prob(windows), exact, strict=True):
        assert abs(bound.log_prob - mean.log_prob) < 4 * bound.stderr + close(network)


def test_elbo_stderr_is_the_spread_over_seeds():
    toy, window = Toy(length=9, seed=1), WINDOWS[0]
    for form in ("count", "ratio"):
        runs = [Elbo(toy, form=form, samples=64, seed=seed).log_prob([window])[0] for seed in range(30)]
        spread = torch.tensor([run.log_prob for run in runs], dtype=torch.float64).std()
        said = torch.tensor([run.stderr for run in runs], dtype=torch.float64).square().mean().sqrt()
        assert 0.75 < spread / said < 1.33


def test_intervals_of_the_elbo_cover():
    """Law 20, with 16 draws. Of eight the interval is too short, as for eight of anything: Student's t."""
    toy = Toy(length=10, seed=3)
    windows = [
        Window((1,), text, (2,)) for text in itertools.islice(itertools.product(range(3), repeat=8), 0, 6561, 800)
    ]
    exact, held = Lattice(toy, 8, value="elbo_exact").log_prob(windows), []
    for seed in range(10):
        scores = Elbo(toy, form="count", samples=16, seed=seed).log_prob(windows)
        held += [abs(a.log_prob - b.log_prob) <= 1.96 * a.stderr for a, b in zip(scores, exact, strict=True)]
    assert sum(held) >= 0.9 * len(held)


def draws_of(scored, both, alone):
    """The draws behind a bound of two positions: `both` are masked, or one, whose log-prob counts twice.

    The number of each kind is the one that adds up to each position's share of the bound.
    """
    draws = 8
    for n, m in itertools.product(range(draws + 1), repeat=2):
        k = draws - n - m
        shares = [(k * both[i] + 2 * times * alone[i]) / draws for i, times in enumerate((n, m))]
        if k >= 0 and shares == pytest.approx(scored.token_logprobs, abs=1e-12):
            return [sum(both)] * k + [2 * alone[0]] * n + [2 * alone[1]] * m
    raise AssertionError("no draws have these shares")


def test_elbo_and_its_error_by_hand():
    """Eight draws are eight replicates: the mean of their values, and the standard error of a mean."""
    toy, window = Toy(length=4, seed=1), Window((1,), (0, 2))
    shown = [DuelEstimator(toy, block=2).replay([window], [steps])[0] for steps in ([0, 0], [1, 0], [0, 1])]
    both, alone = shown[0].token_logprobs, (shown[1].token_logprobs[0], shown[2].token_logprobs[1])
    for seed in range(4):
        [scored] = Elbo(toy, samples=8, form="count", seed=seed).log_prob([window])
        draws = draws_of(scored, both, alone)
        assert scored.log_prob == pytest.approx(statistics.fmean(draws), abs=1e-12)
        assert scored.stderr == pytest.approx(statistics.stdev(draws) / math.sqrt(8), abs=1e-12)


def test_elbo_depends_on_seed_and_ids_only():
    windows = [w for w in INFILLING if w.target and not w.tail]
    for form in ("count", "ratio"):
        runs = [
            Elbo(toy, form=form, samples=16, batch_size=batch).log_prob(windows[::direction])[::direction]
            for toy, batch, direction in (
                (Toy(length=9), 1, 1),
                (Toy(length=9), 64, -1),
                (Small(3, length=9), 16, 1),
            )
        ]
        alone = [Elbo(Toy(length=9), form=form, samples=16).log_prob([window])[0] for window in windows]
        for run in runs:
            for one, other in zip(run, alone, strict=True):
                assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)
                assert one.stderr == pytest.approx(other.stderr, abs=1e-9)
        other = Elbo(Toy(length=9), form=form, samples=16, seed=1).log_prob(windows)
        assert all(
            abs(a.log_prob - b.log_prob) > 1e-6 for a, b in zip(alone, other, strict=True) if len(a.token_logprobs) > 1
        )


def test_elbo_counts_draws_and_says_when_its_error_is_not_known():
    toy, window = Toy(length=9), WINDOWS[0]
    for samples, parts in ((1, 1), (7, 1), (8, 8), (12, 12), (13, 13), (64, 16), (100, 20), (128, 16), (17, 17)):
        assert replicates(samples) == parts and samples % parts == 0
        bound = Elbo(toy, samples=samples).log_prob([window])[0]
        assert (bound.stderr is None) == (samples < REPLICATES)
    elbo = Elbo(toy, samples=64, form="count", batch_size=4)
    elbo.log_prob([window])
    assert elbo.counts.rows <= 64 and elbo.counts.windows == 1 and elbo.counts.tokens == 7


def test_a_truth_of_no_probability_is_no_nan():
    """A suppressed token: every bound is -inf, as the likelihood is, and no error of it is known."""

    class Suppressed(Toy):
        def features(self, ids, real):
            x = super().features(ids, real)
            x[..., 2] = -math.inf
            return x

    window, other = Window((), (0, 2, 1, 1)), Window((), (0, 1, 1, 1))
    toy = Suppressed(length=4)
    for estimator in (DuelEstimator(toy, block=4), Elbo(toy), Elbo(toy, 4, samples=8), Lattice(toy, 4)):
        suppressed, fine = estimator.log_prob([window, other])
        assert suppressed.log_prob == -math.inf and math.isfinite(fine.log_prob)
    assert Elbo(toy).log_prob([window])[0].stderr is None


def test_what_the_elbo_refuses():
    for named, network, more in (
        ("estimator=ar", Causal(), {}),
        ("score_entropy.*SEDD", Toy(), {"form": "score_entropy"}),
        ("'counts'.*count", Toy(), {"form": "counts"}),
        ("mc_samples", Toy(), {"samples": 0}),
        ("blocks of 4", NETWORKS["block-causal"](), {"block": None}),
    ):
        with pytest.raises(DuelError, match=named):
            Elbo(network, **more)


def score_entropy_by_hand(w, window, steps=40):
    """SEDD's loss over all masked sets and a fine grid of t, from the description of Lou et al. alone."""
    start, m, tokens = len(window.context), len(window.target), dit_reference.TOKENS
    row = torch.tensor([*window.context, *window.target])
    total = 0.0
    for n in range(steps):
        t = (n + 0.5) / steps
        sigma = -math.log1p(-(1 - 1e-3) * t)
        rate = (1 - 1e-3) / (1 - (1 - 1e-3) * t)  # d sigma / dt
        chance, r = 1 - math.exp(-sigma), 1 / math.expm1(sigma)
        for size in range(1, m + 1):
            for masked in itertools.combinations(range(start, start + m), size):
                ids = row.clone()
                ids[list(masked)] = tokens
                logits = dit_reference.plain(w, ids.tolist(), sigma)[:, :tokens]
                scores = logits - math.log(math.expm1(sigma)) - math.log(tokens)
                weight = chance**size * (1 - chance) ** (m - size) * rate / steps
                for p in masked:
                    loss = scores[p].exp().sum() - r * scores[p, row[p]] + r * (math.log(r) - 1)
                    total -= weight * float(loss)
    return total


def test_sedd_has_its_own_bound(tmp_path):
    denoiser, w = dit_reference.opened(tmp_path, "sedd")
    windows = [Window((0,), (3, 1)), Window((2, 4), (1, 0, 2))]
    for scored, window in zip(Elbo(denoiser, samples=512).log_prob(windows), windows, strict=True):
        assert abs(scored.log_prob - score_entropy_by_hand(w, window)) < 4 * scored.stderr
    assert Elbo(denoiser).describe()["elbo_form"] == "score_entropy"
    assert Elbo(denoiser, 4).describe()["elbo_form"] == "count"
    with pytest.raises(DuelError, match="masks positions of the whole target; use elbo_block=none"):
        Elbo(denoiser, 4, form="score_entropy")


# ---------------------------------------------------------------- specs across estimators


@pytest.mark.parametrize("network", NETWORKS)
def test_one_token_targets_have_one_value(network):
    """Law 12."""
    toy = NETWORKS[network]()
    block = 4
    windows = [Window((1,), (t,)) for t in range(3)] + [Window((2, 0, 1, 1), (t,)) for t in range(3)]
    one = [scored.log_prob for scored in DuelEstimator(toy, "left_to_right", block).log_prob(windows)]
    for rule in ("greedy", "margin", "threshold:mu=0.3", "klass:mu=0.5:nu=0.1", "entropy_bound:gamma=1"):
        for size in (block,) if network == "block-causal" else (2, None):
            assert [s.log_prob for s in DuelEstimator(toy, rule, size).log_prob(windows)] == pytest.approx(
                one, abs=close(network)
            )
    assert [s.log_prob for s in Elbo(toy, samples=1).log_prob(windows)] == pytest.approx(one, abs=close(network))
    for scored, value in zip(Lattice(toy, block).log_prob(windows), one, strict=True):
        every = [each.log_prob for each in (scored, *scored.others.values())]
        assert every == pytest.approx([value] * 3, abs=close(network))
