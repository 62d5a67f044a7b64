"""The lattice and the ELBO on toys that can be enumerated; their definitions are in test_every_estimator.py."""

import itertools
import math
import statistics

import dit_reference
import pytest
import torch
from laws import slow_but, strings
from toys import BlockCausal, Rotary, Toy

from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import REPLICATES, Elbo, replicates
from lm_eval_duel.estimators.lattice import Lattice

NETWORKS = {
    "bidirectional": lambda: Toy(length=9, seed=1),
    "nearly flat": lambda: Toy(length=9, seed=1, scale=3e-4),
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


def fitting(network):
    return WINDOWS if network == "block-causal" else INFILLING


def close(network):
    """Float64 agrees to 1e-9; the rotary toy has noise of about that planted."""
    return 1e-6 if network == "rotary" else 1e-9


@pytest.mark.parametrize("network", slow_but(NETWORKS, ("nearly flat", "rotary", "block-causal")))
def test_lattice_reads_off_every_state_only_rule(network):
    """Law 6: each rule's path is that of the rule itself, and mean <= mixture <= oracle >= every one-at-a-time rule."""
    toy = NETWORKS[network]()
    block = 4 if network == "block-causal" else 2
    windows = fitting(network)
    rules = STATE_ONLY[list(NETWORKS).index(network) % 2 :: 2]
    within = close(network)

    mixtures = Lattice(toy, block, LatticeArguments(rules), batch_size=1).log_prob(windows)

    near_ties = 0
    steps = 0
    for mixture in mixtures:
        oracle = mixture.others["oracle"].log_prob
        assert mixture.others["elbo_exact"].log_prob <= mixture.log_prob + within
        assert mixture.log_prob <= oracle + within
        for rule in rules:
            if ":k=1" in rule:
                assert mixture.others[rule].log_prob <= oracle + within
        for rule in rules[1:4]:
            near_ties += mixture.others[rule].near_ties
            steps += mixture.others[rule].nfe
    if network == "nearly flat":
        assert 0 < near_ties < steps, "some steps are near ties and others are not"

    for rule in rules:
        by_rule = DuelEstimator(toy, rule, block).log_prob(windows)
        for mixture, expected in zip(mixtures, by_rule, strict=True):
            path = mixture.others[rule]
            assert path.reveal_steps == expected.reveal_steps
            assert path.token_logprobs == pytest.approx(expected.token_logprobs, abs=within)
            assert path.nfe == expected.nfe
            assert path.near_ties == expected.near_ties


@pytest.mark.parametrize("grid", ["target", "row"])
def test_the_mixture_is_a_likelihood_and_the_others_are_not(grid):
    """Over all texts, the probabilities of the mixture sum to 1; those of the mean to less, of the oracle to more."""
    toy = Toy(length=6)
    windows = [Window((1,), text) for text in strings(3, 4)]

    mixtures = Lattice(toy, 3, grid=grid).log_prob(windows)

    def mass(name):
        return math.fsum(math.exp(mixture.others[name].log_prob) for mixture in mixtures)

    assert math.fsum(math.exp(mixture.log_prob) for mixture in mixtures) == pytest.approx(1, abs=1e-9)
    assert mass("elbo_exact") < 1 < mass("oracle")


def test_where_a_value_comes_from():
    toy = Toy(length=9, seed=1)
    windows = [WINDOWS[0]]

    [best] = Lattice(toy, 4, estimator="oracle", traced=True).log_prob(windows)
    [mean] = Lattice(toy, 4, estimator="elbo_exact", traced=True).log_prob(windows)
    [mixture] = Lattice(toy, 4, estimator="mixture", traced=True).log_prob(windows)

    [replayed] = DuelEstimator(toy, "greedy", block=4, traced=True).replay(windows, [best.reveal_steps])
    assert replayed.log_prob == pytest.approx(best.log_prob, abs=1e-9)
    for name in ("token_logprobs", "confidence", "margin", "entropy"):
        assert getattr(best, name) == pytest.approx(getattr(replayed, name), abs=1e-9)
    assert math.fsum(mean.token_logprobs) == pytest.approx(mean.log_prob, abs=1e-9)
    assert mean.reveal_steps == ()
    assert mixture.token_logprobs == ()
    assert mixture.reveal_steps == ()


@pytest.mark.parametrize("block", [1, 4, 8])
def test_states_are_evaluated_once_each(block):
    """2^m - 1 states of a block of m positions: 15 of four, whatever is asked of them."""
    lattice = Lattice(Toy(length=12, seed=1), block, LatticeArguments(STATE_ONLY))
    target = (0, 1, 2, 2, 1, 0, 0, 1, 1, 2, 0, 2)
    lattice.log_prob([Window((), target), Window((), target)])
    whole, rest = divmod(12, block)
    assert lattice.counts.rows == whole * (2**block - 1) + (2**rest - 1)


# ---------------------------------------------------------------- the Monte Carlo ELBO


@pytest.mark.parametrize(
    ("network", "block", "form"),
    [
        ("bidirectional", 4, "count"),
        ("nearly flat", 4, "count"),
        ("no padding", 4, "count"),
        ("rotary", 4, "count"),
        ("block-causal", 4, "count"),
        ("bidirectional", 8, "count"),
        ("bidirectional", 8, "ratio"),
    ],
)
def test_elbo_lands_on_the_mean_over_orders(network, block, form):
    """Law 7. One block of 8 is the whole target, which has no tail then."""
    toy = NETWORKS[network]()
    windows = [window for window in fitting(network) if window.target]
    if block == 8:
        windows = [window for window in windows if not window.tail]

    bounds = Elbo(toy, ElboArguments(512, form, block if block == 4 else None)).log_prob(windows)

    means = Lattice(toy, block, estimator="elbo_exact").log_prob(windows)
    for window, bound, mean in zip(windows, bounds, means, strict=True):
        assert abs(bound.log_prob - mean.log_prob) < 4 * bound.stderr + close(network)
        assert math.fsum(bound.token_logprobs) == pytest.approx(bound.log_prob, abs=1e-9)
        assert bound.stderr > 1e-9 or len(window.target) == 1


def test_elbo_stderr_is_the_spread_over_seeds():
    toy = Toy(length=9, seed=1)
    for form in ("count", "ratio"):
        values = []
        variances = []
        for seed in range(30):
            [score] = Elbo(toy, ElboArguments(64, form), draw_seed=seed).log_prob([WINDOWS[0]])
            values.append(score.log_prob)
            variances.append(score.stderr**2)

        spread = statistics.stdev(values)
        stderr = math.sqrt(statistics.mean(variances))
        assert 0.75 < spread / stderr < 1.33


def test_intervals_of_the_elbo_cover():
    """Law 20, with 16 draws, the fewest that have an error."""
    toy = Toy(length=10, seed=3)
    windows = [Window((1,), text, (2,)) for text in strings(3, 8)[::800]]
    exact = Lattice(toy, 8, estimator="elbo_exact").log_prob(windows)

    covered = []
    for seed in range(10):
        scores = Elbo(toy, ElboArguments(16, "count"), draw_seed=seed).log_prob(windows)
        for score, mean in zip(scores, exact, strict=True):
            covered.append(abs(score.log_prob - mean.log_prob) <= 1.96 * score.stderr)

    assert sum(covered) >= 0.9 * len(covered)


def test_elbo_counts_draws_and_says_when_its_error_is_not_known():
    toy = Toy(length=9)
    window = WINDOWS[0]
    for samples, parts in ((1, 1), (8, 1), (15, 1), (16, 16), (17, 17), (24, 24), (64, 16), (100, 20), (128, 16)):
        assert replicates(samples) == parts
        assert samples % parts == 0
        [bound] = Elbo(toy, ElboArguments(samples)).log_prob([window])
        assert (bound.stderr is None) == (samples < REPLICATES)

    elbo = Elbo(toy, ElboArguments(64, "count"), batch_size=4)
    elbo.log_prob([window])
    assert elbo.counts.rows <= 64
    assert elbo.counts.windows == 1
    assert elbo.counts.tokens == 7


def score_entropy_by_hand(w, window, steps=40):
    """SEDD's loss over all masked sets and a fine grid of t, from the description of Lou et al. alone."""
    start = len(window.context)
    m = len(window.target)
    tokens = dit_reference.TOKENS
    row = torch.tensor([*window.context, *window.target])
    total = 0.0
    for n in range(steps):
        t = (n + 0.5) / steps
        sigma = -math.log1p(-(1 - 1e-3) * t)
        rate = (1 - 1e-3) / (1 - (1 - 1e-3) * t)  # d sigma / dt
        chance = 1 - math.exp(-sigma)
        r = 1 / math.expm1(sigma)
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
    bounds = Elbo(denoiser, ElboArguments(512)).log_prob(windows)
    for bound, window in zip(bounds, windows, strict=True):
        assert abs(bound.log_prob - score_entropy_by_hand(w, window)) < 4 * bound.stderr

    assert Elbo(denoiser).describe()["elbo_form"] == "score_entropy"
    assert Elbo(denoiser, ElboArguments(elbo_block=4)).describe()["elbo_form"] == "count"
    with pytest.raises(DuelError, match="masks positions of the whole target; use elbo_block=none"):
        Elbo(denoiser, ElboArguments(elbo_block=4, elbo_form="score_entropy"))
    # divided by a temperature, its logits are no scores of its noising process
    cold = warped(denoiser, 0.7)
    assert Elbo(cold).describe()["elbo_form"] == "count"
    with pytest.raises(DuelError, match="score_entropy"):
        Elbo(cold, ElboArguments(elbo_form="score_entropy"))
