"""Law 22: a window's value depends on no other window, on no schedule, and on every field of the window itself.

Windows that differ in one field are scored in one call, under every grid and cache and in network calls of a few
tokens, in which windows leave a call and come back. Each value is that of the window alone.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from attends import Attends
from laws import numbers, slow_but, strings
from toys import BlockCausal, Causal, CausalPrefix, Rotary, Toy

from lm_eval_duel import Duel
from lm_eval_duel.core.batch_size import Budget
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.totals import Total

LENGTH = 14
NETWORKS = {
    "bidirectional": Toy(length=LENGTH),
    "no padding": Toy(length=LENGTH, honours_padding=False),
    "rotary": Rotary(length=LENGTH),
    "guided": Guided(Toy(length=LENGTH), 0.7),
    "prefix cache": Cached(Attends(length=LENGTH), "prefix"),
    "dual cache": Cached(Attends(length=LENGTH), "dual"),
    "guided dual cache": Guided(Cached(Attends(length=LENGTH), "dual"), 0.7),
    "block-causal": BlockCausal(3, length=LENGTH + 1),
    "causal prefix": CausalPrefix(block=3, length=LENGTH + 1),
    "causal": Causal(length=LENGTH),
}
CASES = []  # a network and its grid
for name, network in NETWORKS.items():
    if network.block:
        CASES.append((name, "auto"))
    elif network.attention == "causal":
        CASES.append((name, "target"))  # all blocks have one position
    else:
        CASES += [(name, "target"), (name, "row")]
RULES = ["greedy:k=1", "left_to_right:k=2", "klass:mu=0.4:nu=0.3", "random:k=1:seed=0"]
BASES = [
    Window((1, 0, 2, 1), (2, 0, 1, 1, 2, 0, 1)),  # with grid=row a block begins inside the context
    Window((1, 2), (2, 1, 0, 0), (1, 0)),
    Window((0,), (1, 1, 0, 2, 2)),
    Window((0,), (1, 1, 2, 0, 1, 2), known=(1, 4)),
    Window((2, 1), (0, 1, 2, 0)),
]


def changed(ids, place):
    """Ids with another token at a place."""
    other = list(ids)
    other[place] = (other[place] + 1) % 3
    return tuple(other)


def neighbours(window):
    """The window, and windows that differ from it in one field."""
    fields = {
        "context": [changed(window.context, 0), changed(window.context, -1), (0, *window.context), window.context[1:]],
        "target": [changed(window.target, 0), changed(window.target, -1), (*window.target, 0)],
        "suffix": [changed(window.suffix, -1) if window.suffix else (1,), (*window.suffix, 2), (0, *window.suffix)],
        "tail": [1, 2, 3],
        "known": [(0,), (1,), (1, 2)],
    }
    yield window
    for field, values in fields.items():
        for value in values:
            yield dataclasses.replace(window, **{field: value})


def scorable(duel, bases=BASES):
    """The neighbours of the windows that have a value under `duel`."""
    windows = {}  # each once, in order
    for base in bases:
        windows |= dict.fromkeys(neighbours(base))
    accepted = []
    for window in windows:
        try:
            duel.estimator.check([window])
        except DuelError:
            continue
        accepted.append(window)
    return accepted


def duel_of(name, rule, grid="auto", tokens=None):
    """The exact estimator of a network; `tokens`: of one network call."""
    network = NETWORKS[name]
    if network.attention == "causal":
        duel = Duel(network, estimator="ar")
    else:
        if network.seeds_blocks and "klass" in rule:
            rule = "threshold:mu=0.45"
        duel = Duel(network, rule, network.block or 3, grid)
    if tokens:
        duel.estimator.budget = Budget(tokens)
    return duel


FAST = [("bidirectional", "row"), ("prefix cache", "target"), ("dual cache", "row")]
FAST += [("block-causal", "auto"), ("causal prefix", "auto"), ("causal", "target")]


@pytest.mark.parametrize(("name", "grid"), slow_but(CASES, FAST))
def test_windows_that_differ_in_one_field_keep_their_values(name, grid):
    rule = RULES[CASES.index((name, grid)) % 3]
    duel = duel_of(name, rule, grid)
    windows = scorable(duel, BASES[:2] if grid == "row" else BASES[1:3])
    assert len(windows) >= 10

    together = duel.log_prob(windows)

    for window, score in zip(windows, together, strict=True):
        alone = duel.log_prob([window])
        assert numbers([score]) == pytest.approx(numbers(alone), abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("tokens", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(NETWORKS, ("dual cache", "block-causal", "causal prefix")))
def test_calls_of_a_few_tokens_change_nothing(name, tokens):
    """Windows leave a call before they are finished, and what was kept for them is computed anew or still theirs."""
    for rule in RULES[::2]:  # with and without a memory
        windows = scorable(duel_of(name, rule), BASES[1:2])
        in_one_call = duel_of(name, rule).log_prob(windows)
        in_small_calls = duel_of(name, rule, tokens=tokens).log_prob(windows)
        assert numbers(in_small_calls) == pytest.approx(numbers(in_one_call), abs=1e-7, nan_ok=True), rule


CONTEXTS = [(1, 0), (1,), (2, 1, 0), (0, 1, 1, 2), (1, 1)]


@pytest.mark.parametrize("name", ["dual cache", "block-causal", "causal prefix"])
def test_a_window_that_leaves_a_call_and_comes_back_is_itself(name, monkeypatch):
    """Memory runs out at some call, so that half of the lanes wait, while the others go on to their next blocks."""
    duel = duel_of(name, "threshold:mu=0.6")
    expected = [sample.tokens for sample in duel.sample(CONTEXTS, 9, seed=4)]
    kind = type(getattr(duel.denoiser, "plain", duel.denoiser))
    whole = kind.stream
    for failing in range(3, 12, 2):
        calls = itertools.count(1)

        def short_of_memory(self, *arguments, calls=calls, failing=failing):
            if next(calls) == failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "stream", short_of_memory)
            samples = duel_of(name, "threshold:mu=0.6").sample(CONTEXTS, 9, seed=4)
        assert [sample.tokens for sample in samples] == expected, failing


ESTIMATORS = [
    ("elbo", "bidirectional", {"mc_samples": 16}),
    ("elbo", "block-causal", {"mc_samples": 16}),
    ("mixture", "bidirectional", {}),
    ("mixture", "block-causal", {}),
    ("two_phase", "two phases", {"sample": 0.5}),
    ("sampled_confidence", "bidirectional", {}),
]
OF_EACH_LOOP = [ESTIMATORS[0], *ESTIMATORS[3:]]  # draws, sums over orders, two phases, sets


@pytest.mark.parametrize(("estimator", "name", "more"), slow_but(ESTIMATORS, OF_EACH_LOOP))
def test_every_estimator_tells_windows_apart(estimator, name, more):
    network = NETWORKS[name] if name in NETWORKS else Attends(length=LENGTH)
    block = "auto" if network.block or estimator == "elbo" else 3

    def duel(tokens=None):
        made = Duel(network, block=block, estimator=estimator, **more)
        if tokens:
            made.estimator.budget = Budget(tokens)
        return made

    windows = scorable(duel(), BASES[2:3])
    assert len(windows) >= 8
    values = []  # of each window alone
    for window in windows:
        [alone] = duel().log_prob([window])
        values.append(alone.log_prob)

    together = duel().log_prob(windows)
    assert [score.log_prob for score in together] == pytest.approx(values, abs=1e-9)

    in_small_calls = duel(tokens=4).log_prob(windows)
    assert [score.log_prob for score in in_small_calls] == pytest.approx(values, abs=1e-9)


# ---------------------------------------------------------------- memory


DENSE = [*itertools.product((1, 3, 10), ("bidirectional", "dual cache", "block-causal"))]


@pytest.mark.parametrize(("lanes", "name"), slow_but(DENSE, [DENSE[1], DENSE[3], DENSE[5]]))
def test_dense_distributions_stay_within_the_budget(name, lanes, monkeypatch):
    """R x W x V of what a rule reads and remembers, counted where it is made; one lane always fits."""
    network = NETWORKS[name]
    made = []
    dense = Predictions.dense

    def counted(self):
        made.append(self.masked.numel() * network.vocab_size)
        return dense(self)

    monkeypatch.setattr(Predictions, "dense", counted)
    block = network.block or 5
    duel = Duel(network, "klass:mu=0.4:nu=0.3", block)
    plane = block * network.vocab_size
    duel.estimator.budget = Budget(10_000, values=lanes * 4 * plane)

    duel.log_prob([Window((1,), text) for text in strings(3, 6)[:10]])

    assert plane <= max(made) <= lanes * plane


# ---------------------------------------------------------------- sums


def test_errors_of_windows_that_differ_in_one_field_are_independent():
    """Equal windows share their draws, so their errors add up; those of other windows add as hypot."""
    duel = Duel(Toy(length=LENGTH), estimator="elbo", mc_samples=16)
    for window in (BASES[1], dataclasses.replace(BASES[1], tail=0)):
        for other in scorable(duel, [window]):
            first, second = duel.log_prob([window, other])
            error = Total.from_scores([window, other], [first, second], "elbo").stderr
            expected = math.hypot(first.stderr, second.stderr)
            if other == window:
                expected = first.stderr + second.stderr
            assert error == pytest.approx(expected), other


def test_a_generated_text_depends_on_no_other_prompt():
    """Small calls, prompts of which blocks finish at different times: Algorithm 1 draws what it draws alone."""
    for name in ("bidirectional", "dual cache", "block-causal"):
        alone = []
        for n, context in enumerate(CONTEXTS):
            [sample] = duel_of(name, "threshold:mu=0.45").sample([context], 6, seed=4, keys=[n])
            alone.append(sample.tokens)
        for tokens in (None, 2):
            together = duel_of(name, "threshold:mu=0.45", tokens=tokens).sample(CONTEXTS, 6, seed=4)
            assert [sample.tokens for sample in together] == alone, (name, tokens)
