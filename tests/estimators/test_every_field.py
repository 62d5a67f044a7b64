"""All that an estimator says of windows: the fields of the scores and of their sum, the counts of the run, the spec.

The networks are toys in float64. Values are proven by their definitions elsewhere. Here nothing changes unseen that
stands beside them: labels, errors, steps, near ties, calls. Near ties are those below half a logit, so that there are
many: a count that is always 0 would show nothing.
"""

from functools import partial

import golden
from attends import Attends
from noised_toys import Conditioned, NoisyToy
from test_every_estimator import ESTIMATORS
from toys import Causal, RotaryBlocks, Toy

from lm_eval_duel.core import decision
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.arguments import (
    CommitOnceArguments,
    ElboArguments,
    LatticeArguments,
    NoisedElboArguments,
    SeedsArguments,
    TwoPhaseArguments,
)
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.duel_seeds import DuelSeeds
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.estimators.two_phase import TwoPhase


class Relative(Attends):
    """A row of masks alone ties exactly, by definition."""

    relative_positions = True


TOY = Toy(length=12)
RELATIVE = Relative(length=12)
NOISY = NoisyToy(length=12)
NOISY.noise_training = NOISY.noise_training._replace(note="the share of noise")
CONDITIONED = Conditioned(length=12)
OFFICIAL = NoisyToy(length=12, share=0.25)
OFFICIAL.bos = "official"
OFFICIAL.relative_positions = True
MORE = {  # besides those of `ESTIMATORS`
    "ar": partial(Autoregressive, Causal(length=12)),
    "duel, rotary blocks": partial(DuelEstimator, RotaryBlocks(block=3, length=12), "greedy:k=2", "auto"),
    "duel, sub-blocks": partial(DuelEstimator, TOY, "entropy_bound:gamma=0.9:sub_block=2:seed_first=true", 4),
    "duel, no block": partial(DuelEstimator, TOY, "cumulative_quota:steps=3:tau=0.6", None, traced=True),
    "duel, given the noise": partial(DuelEstimator, NOISY, "greedy", 3, CommitOnceArguments(noise_seed=2)),
    "duel, given masks and noise": partial(DuelEstimator, OFFICIAL, "margin", 3, CommitOnceArguments(noise_seed=0)),
    "over 2 seeds": partial(DuelSeeds, OFFICIAL, "greedy", 3, SeedsArguments(noise_seeds=2)),
    "over 12 seeds": partial(
        DuelSeeds, NoisyToy(length=12, scale=0.1), "greedy:k=3", 3, SeedsArguments(noise_seeds=12)
    ),
    "over 3 seeds": partial(DuelSeeds, CONDITIONED, "threshold:mu=0.5", 3, SeedsArguments(noise_seeds=3)),
    "over 10 seeds": partial(DuelSeeds, NOISY, "greedy:k=2", 3, SeedsArguments(noise_seeds=10, noise_seed=4)),
    "elbo, 15 draws": partial(Elbo, TOY, ElboArguments(15, elbo_block=2), grid="row"),
    "elbo, 17 draws": partial(Elbo, TOY, ElboArguments(17, "ratio", elbo_eps=0.01)),
    "oracle, traced": partial(Lattice, TOY, 3, LatticeArguments("greedy:k=2+margin"), estimator="oracle", traced=True),
    "two phases, relative": partial(TwoPhase, RELATIVE, "greedy", 2, TwoPhaseArguments(0.5), draw_seed=3),
    "random tokens, 15 draws": partial(NoisedElbo, NOISY, NoisedElboArguments(15)),
}
NAMES = (
    *("duel", "duel, rows", "duel, block-causal", "duel, rotary", "duel, cache", "duel, memory"),
    *("elbo", "elbo, block-causal", "all orders", "all orders, block-causal"),
    *("confidence", "confidence, threshold", "confidence, even steps", "order, origin", "order, random"),
    *("order, margin", "random tokens, no limit", "random tokens, conditioned"),
)
WINDOWS = [
    Window((1,), (2, 0, 1, 1, 2)),
    Window((1, 2, 0), (2, 1, 0, 2), (1, 0)),
    Window((2,), (0, 2, 1)),
    Window((), (1,)),
    Window((), ()),
]


OF_SUMS = ("windows", "tokens", "is_greedy", "near_ties", "perplexity", "perplexity_stderr")


def all_of(estimator):
    """All that an estimator says of these windows, the first of which comes twice."""
    windows = WINDOWS
    if estimator.denoiser.attention != "bidirectional":
        windows = [window for window in windows if not window.suffix]
    if estimator.denoiser.attention == "causal":
        windows = [window for window in windows if window.context or not window.target]
    scores = estimator.log_prob([*windows, windows[0]])
    assert scores[-1] == scores[0]
    for phase in estimator.counts.phases.values():
        phase.seconds = 0.0

    entries = {"spec": estimator.describe(), "counts": estimator.counts}
    for n, score in enumerate(scores[:-1]):
        entries[f"window {n}"] = score
    total = Total.from_scores([*windows, windows[0]], scores, estimator.name)
    for name, part in total.named.items():
        entries[name] = part.describe()
        for key in OF_SUMS:
            entries[name][key] = getattr(part, key)
    entries["in the log"] = total.summary(registry.find(estimator.name).monte_carlo)
    entries["of one window"] = Total.from_scores(windows[:1], scores[:1], "one").describe()
    return entries


def test_it_is_as_recorded(monkeypatch):
    monkeypatch.setattr(decision, "NEAR_TIE", 0.5)
    lines = []
    for name in [*NAMES, *MORE]:
        lines += golden.listed(name, all_of({**ESTIMATORS, **MORE}[name]()))
    golden.check_lines(__file__, "every_field", lines, within=1e-6)
