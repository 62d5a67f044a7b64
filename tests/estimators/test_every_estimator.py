"""Laws of every estimator: its definition in `reference.py`, the company of a window, and what it refuses."""

import copy
import math
from functools import partial

import pytest
import torch
from attends import Attends
from laws import numbers, slow_but
from noised_toys import Conditioned, NoisyToy
from toys import BlockCausal, Causal, Rotary, Toy

from lm_eval_duel.audit.checked import ALONE, REFERENCE, RUNS_RULE, CheckedWindow
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import (
    ConfidenceArguments,
    ElboArguments,
    LatticeArguments,
    NoisedElboArguments,
    OrderArguments,
    TwoPhaseArguments,
)
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.sampled_order import SampledOrder
from lm_eval_duel.estimators.two_phase import TwoPhase


class Tied(Toy):
    """Few distributions, so that draws of different positions tie exactly and often."""

    codes = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


WINDOWS = [
    Window((1,), (2, 0, 1, 1, 2)),
    Window((1, 2, 0), (2, 1, 0, 2), (1, 0)),
    Window((), (0, 1, 2, 0, 1, 0, 2)),
    Window((), ()),
]
PLAIN = [window for window in WINDOWS if not window.suffix]
TOY = Toy(length=12)
BLOCKS = BlockCausal(3, length=12)
ROTARY = Rotary(length=12)
ATTENDS = Attends(length=12)
WARM = warped(TOY, 0.7)
HOT = warped(TOY, 1.3)
WARM_BLOCKS = warped(BLOCKS, 0.7)
CONFIDENCE = SampledConfidence
ORDER = SampledOrder
ESTIMATORS = {
    "duel": partial(DuelEstimator, TOY, "greedy", 3),
    "duel, rows": partial(DuelEstimator, TOY, "threshold:mu=0.45", 3, grid="row", traced=True),
    "duel, block-causal": partial(DuelEstimator, BLOCKS, "margin:k=2", "auto"),
    "duel, rotary": partial(DuelEstimator, ROTARY, "entropy", None),
    "duel, cache": partial(DuelEstimator, Cached(ATTENDS, "dual"), "left_to_right:k=2", 3),
    "duel, memory": partial(DuelEstimator, TOY, "klass:mu=0.4:nu=0.3:history=2", 4),
    "elbo": partial(Elbo, TOY, ElboArguments(16), draw_seed=3),
    "elbo in blocks": partial(Elbo, TOY, ElboArguments(16, elbo_block=3)),
    "elbo by ratio": partial(Elbo, TOY, ElboArguments(16, "ratio")),
    "elbo, few draws": partial(Elbo, TOY, ElboArguments(4)),
    "elbo, block-causal": partial(Elbo, BLOCKS, ElboArguments(16)),
    "all orders": partial(Lattice, TOY, 4, LatticeArguments("greedy+threshold:mu=0.5"), estimator="mixture"),
    "all orders, block-causal": partial(Lattice, BLOCKS, "auto", estimator="elbo_exact"),
    "all orders, rotary": partial(Lattice, ROTARY, 3, estimator="oracle"),
    "confidence": partial(CONFIDENCE, WARM, 3),
    "confidence, no temperature": partial(CONFIDENCE, TOY, 4),
    "confidence, 2 at a time": partial(CONFIDENCE, WARM, 4, ConfidenceArguments(n=2, confidence="tempered")),
    "confidence, all at once": partial(CONFIDENCE, WARM, 3, ConfidenceArguments(n=4)),
    "confidence, threshold": partial(CONFIDENCE, WARM, 3, ConfidenceArguments(tau=0.4, n=1)),
    "confidence, at least 2": partial(CONFIDENCE, WARM, 4, ConfidenceArguments(n=2, tau=0.45, confidence="tempered")),
    "confidence, hot": partial(CONFIDENCE, HOT, 3, ConfidenceArguments(tau=0.5, confidence="tempered")),
    "confidence, at the threshold": partial(CONFIDENCE, TOY, 4, ConfidenceArguments(tau=0.3, n=2, strict=False)),
    "confidence, even steps": partial(CONFIDENCE, WARM, 4, ConfidenceArguments(steps=3)),
    "confidence, more steps than positions": partial(CONFIDENCE, WARM, 3, ConfidenceArguments(steps=5)),
    "confidence, steps of dream": partial(
        CONFIDENCE, WARM, 4, ConfidenceArguments(steps=3, schedule="dream", confidence="tempered")
    ),
    "confidence, rotary": partial(CONFIDENCE, ROTARY, 3),
    "confidence, block-causal": partial(CONFIDENCE, WARM_BLOCKS, "auto", arguments=ConfidenceArguments(n=2)),
    "confidence, ties": partial(CONFIDENCE, Tied(length=12), 4),
    "confidence, ties of two": partial(CONFIDENCE, Tied(length=12), 4, ConfidenceArguments(n=2, tau=0.45)),
    "confidence, cache": partial(CONFIDENCE, Cached(ATTENDS, "dual"), 3),
    "order, origin": partial(ORDER, TOY, 4, OrderArguments(alg="origin", steps=3)),
    "order, origin, block-causal": partial(ORDER, WARM_BLOCKS, "auto", arguments=OrderArguments(alg="origin", steps=1)),
    "order, random": partial(ORDER, TOY, 4, OrderArguments(alg="random", steps=3)),
    "order, random, more steps than positions": partial(ORDER, WARM, 3, OrderArguments(alg="random", steps=7)),
    "order, entropy": partial(ORDER, TOY, 4, OrderArguments(alg="entropy", steps=3, alg_temp=0.3)),
    "order, entropy, hot": partial(ORDER, WARM, 4, OrderArguments(alg="entropy", steps=2, alg_temp=2.0)),
    "order, margin": partial(ORDER, TOY, 3, OrderArguments(alg="topk_margin", steps=5, alg_temp=0.2)),
    "order, margin, block-causal": partial(
        ORDER, WARM_BLOCKS, "auto", arguments=OrderArguments(alg="topk_margin", steps=2, alg_temp=0.2)
    ),
    "order, entropy, rotary": partial(ORDER, ROTARY, 3, OrderArguments(alg="entropy", steps=2, alg_temp=0.3)),
    "two phases": partial(TwoPhase, ATTENDS, "greedy", 2, TwoPhaseArguments(0.5), draw_seed=1),
    "two phases, rows": partial(TwoPhase, ATTENDS, "threshold:mu=0.45", 3, TwoPhaseArguments(0.3), grid="row"),
    "two phases, prefix": partial(TwoPhase, ATTENDS, "margin:k=2", 3, TwoPhaseArguments(1.0), cache="prefix"),
    "two phases, left to right": partial(TwoPhase, ATTENDS, "left_to_right:k=2", 3, TwoPhaseArguments(1.0)),
    "random tokens": partial(NoisedElbo, NoisyToy(length=12), NoisedElboArguments(32), draw_seed=2),
    "random tokens, no limit": partial(NoisedElbo, NoisyToy(length=12), NoisedElboArguments(32, math.inf)),
    "random tokens, denoiser": partial(
        NoisedElbo, NoisyToy(length=12, prediction="denoiser", timed=False), NoisedElboArguments(32)
    ),
    "random tokens, conditioned": partial(
        NoisedElbo, Conditioned(length=12), NoisedElboArguments(16, 3, self_conditioning="chain")
    ),
    "random tokens and masks": partial(
        NoisedElbo, NoisyToy(length=12, share=0.2, prediction="denoiser"), NoisedElboArguments(32)
    ),
    "random tokens and masks, no limit": partial(
        NoisedElbo, NoisyToy(length=12, share=0.2), NoisedElboArguments(32, math.inf)
    ),
    "random tokens, denoiser, no limit": partial(
        NoisedElbo, NoisyToy(length=12, prediction="denoiser"), NoisedElboArguments(4, math.inf)
    ),
}
ROUTES = {"duel, memory": RUNS_RULE, "random tokens, conditioned": ALONE}


def made(name, **more):
    """The estimator, and windows that its network can score."""
    estimator = ESTIMATORS[name](**more)
    return estimator, PLAIN if estimator.denoiser.attention == "block_causal" else WINDOWS


LIKE_OTHERS = {
    "elbo, few draws",
    "confidence",
    "confidence, all at once",
    "confidence, hot",
    "confidence, even steps",
    "order, origin",
    "order, random",
    "order, entropy",
    "order, margin",
    "two phases",
    "two phases, left to right",
    "random tokens, denoiser",
    "random tokens and masks",
    "random tokens, denoiser, no limit",
    "random tokens",
    "random tokens, no limit",
}


@pytest.mark.parametrize("name", slow_but(ESTIMATORS, ESTIMATORS.keys() - LIKE_OTHERS))
def test_it_equals_its_definition(name):
    """As `reference.py` has it, window by window (law 19)."""
    estimator, windows = made(name)
    for window, score in zip(windows, estimator.log_prob(windows), strict=True):
        recomputed = recompute(estimator, window, score)
        checked = CheckedWindow(name, window, score.log_prob, recomputed)
        assert recomputed.route == (ROUTES.get(name, REFERENCE) if window.target else REFERENCE)
        assert not checked.problems, checked
        assert checked.difference < (1e-7 if "rotary" in name else 1e-9)


def short_of_memory(whole):
    def features(self, ids, *rest, **more):
        if len(ids) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, ids, *rest, **more)

    return features


FAST = (
    "duel, memory",
    "duel, block-causal",
    "elbo by ratio",
    "elbo, block-causal",
    "all orders",
    "confidence, at least 2",
    "order, entropy, hot",
    "two phases",
    "random tokens, denoiser, no limit",
)


@pytest.mark.parametrize("name", slow_but(ESTIMATORS, FAST))
def test_neither_company_nor_order_nor_memory_changes_a_number(name, monkeypatch):
    """Law 8. Equal windows are scored once."""
    make = ESTIMATORS[name]
    estimator, windows = made(name)
    *together, again = estimator.log_prob([*windows, windows[0]])
    rows = estimator.counts.rows
    expected = pytest.approx(numbers(together), abs=1e-7, nan_ok=True)
    assert again == together[0]

    estimator = make()
    estimator.log_prob(windows)
    assert estimator.counts.rows == rows

    alone = []
    for window in windows:
        alone += estimator.log_prob([window])
    assert numbers(alone) == expected

    backwards = make(batch_size=1).log_prob(windows[::-1])
    assert numbers(backwards[::-1]) == expected

    network = getattr(estimator.denoiser, "plain", estimator.denoiser)
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "CPU_VALUES", 8)
        patch.setattr(predictions, "CPU_ROWS", 8)  # positions a chunk of the head
        patch.setattr(network, "honours_padding", False)
        patch.setattr(estimator.denoiser, "honours_padding", False)
        assert numbers(make(batch_size=3).log_prob(windows)) == expected

    for call in {"features", "stream"} & {*dir(network)}:
        monkeypatch.setattr(type(network), call, short_of_memory(getattr(type(network), call)))
    assert numbers(make().log_prob(windows)) == expected


def test_the_value_that_is_asked_for_is_among_the_others():
    windows = [Window((1,), (0, 2, 1, 1, 2, 0, 1))]
    values = {}
    others = {}
    for name in ("oracle", "elbo_exact", "mixture"):
        [score] = Lattice(TOY, 4, estimator=name).log_prob(windows)
        values[name] = score.log_prob
        others[name] = {other: part.log_prob for other, part in score.others.items()}

    for name, value in values.items():
        assert {**others[name], name: value} == pytest.approx(values)
        assert name not in others[name]


class Suppressed(Toy):
    """A network that gives token 2 no probability."""

    def features(self, ids, real):
        return super().features(ids, real).index_fill(2, torch.tensor([2]), -math.inf)


@pytest.mark.parametrize(
    "make",
    [
        partial(DuelEstimator, rule="greedy", block="auto"),
        Elbo,
        partial(Elbo, arguments=ElboArguments(8, elbo_block=4)),
        partial(Lattice, block=4),
    ],
)
def test_a_truth_of_no_probability_is_no_nan(make):
    """Its value is -inf, of which no error is known."""
    suppressed, fine = make(Suppressed(length=4)).log_prob([Window((), (0, 2, 1, 1)), Window((), (0, 1, 1, 1))])
    assert math.isfinite(fine.log_prob)
    assert suppressed.log_prob == -math.inf
    assert suppressed.stderr is None


# ---------------------------------------------------------------- what is refused

BLOCK = partial(BlockCausal, block=4, length=9)
CAUSAL = Causal()
TRUNCATED = warped(Toy(), 0.7, top_k=2)
UNMASKED = copy.copy(NoisyToy(share=0.0))
UNMASKED.noise_training = None
NOISY = NoisyToy()
CERTAIN = Window((), (0, 1, 2, 0, 1, 2))
KNOWN = Window((), (0, 2, 1, 1), known=(1, 2))
REFUSED = (
    ("4,095 rows.*32", partial(Lattice, TOY, "auto")),
    ("the whole target", partial(Lattice, TOY, None)),
    ("estimator=ar", partial(Lattice, CAUSAL, 1)),
    ("klass:.*memory", lambda: LatticeArguments("klass:mu=0.9:nu=0.1")),
    ("estimator=ar", partial(Elbo, CAUSAL)),
    ("score_entropy.*SEDD", partial(Elbo, TOY, ElboArguments(elbo_form="score_entropy"))),
    ("blocks of 4", partial(Elbo, BLOCK(), ElboArguments(elbo_block=None))),
    ("sampled_confidence", partial(CONFIDENCE, TOY, "auto")),
    (r"at most 12 positions .*Duel\.follow", partial(CONFIDENCE, TOY, 16)),
    ("65,535", partial(ORDER, TOY, 16)),
    ("estimator=ar", partial(CONFIDENCE, CAUSAL, 1)),
    ("confidence=untempered", partial(CONFIDENCE, TRUNCATED, 2)),
    ("confidence=untempered", lambda: CONFIDENCE(TOY, 2).with_denoiser(TRUNCATED)),
    ("'steps' .* 'n'", partial(ConfidenceArguments, steps=2, n=2)),
    ("'steps' .* 'tau'", partial(ConfidenceArguments, steps=2, tau=0.5)),
    ("schedule=dream .*steps=", partial(ConfidenceArguments, schedule="dream")),
    (r"Duel\.replay", lambda: CONFIDENCE(TOY, 2).replay([Window((), (0,))], [(0,)])),
    ("sampled_order", partial(ORDER, TOY, "auto")),
    ("estimator=ar", partial(ORDER, CAUSAL, 1)),
    ("rule=dream:alg=entropy", partial(OrderArguments, alg="entropy")),
    ("'alg_temp' .*alg=entropy", partial(OrderArguments, alg_temp=0.2)),
    ("estimator=sampled_confidence", partial(OrderArguments, alg="maskgit_plus")),
    ("needs a cache.*block_causal network.*Use estimator=duel.*demo-mdm", partial(TwoPhase, BLOCK(), "greedy", "auto")),
    ("needs a cache.*causal network.*Use estimator=ar", partial(TwoPhase, CAUSAL, "left_to_right", "auto")),
    ("needs a cached first phase.*it takes no keys.*Use estimator=duel", partial(TwoPhase, TOY, "greedy", "auto")),
    ("is under cache=dual. Pass the network without it", partial(TwoPhase, Cached(ATTENDS, "dual"), "greedy", "auto")),
    (
        "seed_first=true, which is another rule, or use estimator=duel",
        partial(TwoPhase, Attends(shift=1), "greedy", "auto"),
    ),
    ("one chain.*use estimator=duel", partial(TwoPhase, ATTENDS, "klass:mu=0.9:nu=0.1:kl=authors:across=true", 32)),
    ("cache 'duel'. Did you mean dual", partial(TwoPhase, ATTENDS, "greedy", "auto", cache="duel")),
    (
        "Window 0 has a block of probability 0",
        lambda: TwoPhase(warped(Attends(length=10), top_k=1), "greedy", 3, TwoPhaseArguments(1.0)).log_prob([CERTAIN]),
    ),
    ("self_conditioning=twice", partial(NoisedElbo, NOISY, NoisedElboArguments(self_conditioning="twice"))),
    ("steps", lambda: NoisedElboArguments(steps=0)),
    ("plugin", lambda: NoisedElboArguments(prediction="plug")),
    (
        "no limit",
        partial(NoisedElbo, NoisyToy(prediction="denoiser", timed=False), NoisedElboArguments(8, math.inf)),
    ),
    ("chain", partial(NoisedElbo, Conditioned(), NoisedElboArguments(steps=math.inf, self_conditioning="chain"))),
    ("estimator=elbo", partial(NoisedElbo, UNMASKED)),
    ("tail", lambda: NoisedElbo(NOISY).log_prob([Window((), (1,), tail=1)])),
    ("noised_elbo.*estimator=duel", partial(Elbo, NOISY)),
    ("estimator=ar; got rule=greedy", partial(DuelEstimator, CAUSAL, "greedy", "auto")),
    ("estimator=ar; got block=", partial(DuelEstimator, CAUSAL, "left_to_right", 4)),
    ("elbo", lambda: Elbo(TOY).log_prob([KNOWN])),
    ("bidirectional", lambda: DuelEstimator(BLOCK(), "greedy", "auto").log_prob([KNOWN])),
    ("cfg_scale", lambda: DuelEstimator(Guided(TOY, 1.5), "greedy", block=2).log_prob([KNOWN])),
    ("cfg_scale", lambda: DuelEstimator(warped(Guided(TOY, 1.5), 0.5), "greedy", block=2).log_prob([KNOWN])),
)


def test_what_is_refused(subtests):
    for named, call in REFUSED:
        with subtests.test(named), pytest.raises(DuelError, match=named):
            call()
