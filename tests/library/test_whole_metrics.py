"""Metrics during training, a second time by hand: names, sums and errors, texts of a budget, steps of a callback.

No network: what a score, a plan or a log returns is given.
"""

import bisect
import logging
import math
import statistics
from types import SimpleNamespace

import pytest
import tiny
import torch
from simulated_ranks import use_rank

from lm_eval_duel import DuelCallback, DuelError, training_metrics
from lm_eval_duel.library import training

TEXTS = ["", "a", "\u00e9", "a b", "a b c", "d e f g"]
NATS = {"": 0.0, "a": -1.0, "\u00e9": -2.5, "a b": -3.0, "a b c": -7.0, "d e f g": -math.inf}
TOKENIZER = SimpleNamespace(get_vocab=dict)  # it is asked for, and not read without a network


@pytest.fixture
def no_network(monkeypatch):
    """`NATS` of every text under the first rule, twice that under the second, one more under the others."""

    def duels(model, tokenizer, rules, block, arguments):
        return [Given(n) for n in range(len(rules))]

    monkeypatch.setattr(training, "_duels", duels)


class Given:
    """What stands for the `Duel` of the n-th rule."""

    def __init__(self, n):
        self.n = n

    def score(self, texts, **_):
        return [SimpleNamespace(log_prob=self.nats(text)) for text in texts]

    estimate = score

    def nats(self, text):
        if self.n < 2:
            return (self.n + 1) * NATS[text]
        return NATS[text] - 1


def by_hand(texts, factor):
    """Bits per byte, and the error over texts: the deviations of each text from the common rate."""
    bits = [-factor * NATS[text] / math.log(2) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    rate = sum(bits) / sum(sizes)
    texts_with_bytes = len(sizes) - sizes.count(0)
    if texts_with_bytes < 2 or math.isinf(rate):
        return [rate]

    deviations = []
    for bits_of_text, size in zip(bits, sizes, strict=True):
        if size:
            deviations.append(bits_of_text - rate * size)
    return [rate, statistics.stdev(deviations) * math.sqrt(texts_with_bytes) / sum(sizes)]


@pytest.mark.parametrize("count", range(2, len(TEXTS) + 1))  # the first text is empty
def test_sums_and_errors(count, no_network):
    texts = TEXTS[:count]

    metrics = training_metrics(
        None, TOKENIZER, texts, rules=["greedy", "margin:k=2"], name="held-out", sample=0.5, block=4
    )

    expected = {}
    for rule, factor in (("greedy", 1), ("margin:k=2", 2)):
        name = f"held-out/{rule},two_phase,block=4/bits_per_byte"
        rate, *error = by_hand(texts, factor)
        expected[name] = rate
        if error:
            expected[f"{name}_stderr"] = error[0]
    assert metrics == pytest.approx(expected)
    assert list(metrics) == list(expected)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_number_of_ranks_has_the_same_metrics(world, no_network, monkeypatch):
    """A rank scores every world-th text, from its own on."""
    whole = training_metrics(None, TOKENIZER, TEXTS[:5], block=4)
    shares = {}

    for rank in range(world):
        use_rank(monkeypatch, rank, world, shares)
        metrics = training_metrics(None, TOKENIZER, TEXTS[:5], block=4)

    assert metrics == pytest.approx(whole, rel=1e-12), "the last rank knows all shares"
    if world > 1:
        for rank, ([scores], error) in shares.items():
            assert error is None
            assert [n for n, _, _ in scores] == list(range(rank, 5, world))


TOKENS = [4, 1, 7, 2]  # of each text, and of each of two rules


@pytest.mark.parametrize("budget", range(1, 2 * sum(TOKENS) + 2))
def test_the_first_texts_that_fit_a_budget(budget, monkeypatch, caplog):
    """All ranks and rules count; a text that just fits is scored."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(training, "planned_tokens", lambda duel, texts, sample: sum(TOKENS[: len(texts)]))
    texts = ["a"] * len(TOKENS)
    totals = [8, 10, 24, 28]  # of the first texts, under both rules
    fitting = bisect.bisect_right(totals, budget)

    if not fitting:
        with pytest.raises(DuelError, match=rf" 8 network tokens, .*token_budget={budget}\. "):
            training._fitting([None, None], texts, None, budget)
        return
    assert training._fitting([None, None], texts, None, budget) == fitting
    if fitting == 4:
        assert not caplog.records
    else:
        message = f"{fitting} of 4 texts fit token_budget={budget} ({totals[fitting - 1]} network tokens)"
        assert message in caplog.text


LABELS = {  # what the metrics' names say of arguments that differ from their defaults
    "cache": ("dual", "cache=dual"),
    "cfg_scale": (0.5, "cfg_scale=0.5"),
    "temperature": ("0.7", "temperature=0.7"),
    "top_k": (5, "top_k=5"),
    "top_p": (0.9, "top_p=0.9"),
    "exclude_ids": ([9, 7], "exclude_ids=7+9"),
    "max_length": (16, "max_length=16"),
    "bos": ("none", "bos=none"),
    "last_block": ("cut", "last_block=cut"),
    "grid": ("row", "grid=row"),
    "windows": ("harness", "windows=harness"),
    "autocast": (torch.bfloat16, "autocast=bfloat16"),
    "attention": ("bidirectional", None),
    "family": ("llada", None),
    "mask_token_id": (4, None),
    "shift_logits": (True, None),
    "batch_size": (2, None),
    "max_batch_size": (2, None),
    "self_tests": (False, None),
    "weights": ("digest", None),
    "device": ("cpu", None),
    "module": (None, None),
}


def test_names_say_what_changes_a_number():
    together = {}
    labels = ["block=8"]
    for name, (value, label) in LABELS.items():
        alone = training.check_arguments(["a"], **{name: value})
        if label is None:
            assert alone == [], name
            continue
        assert alone == [label], name
        if name != "cache":  # two phases have a cache of their own
            together[name] = value
            labels.append(label)
    assert training.check_arguments(["a"], sample=0.5, block=8, **together) == ["two_phase", *sorted(labels)]


class Logs:
    """What `DuelCallback` needs of a Trainer; its `log` resets `should_log`, as transformers' does."""

    def __init__(self, due):
        self.args = SimpleNamespace(eval_strategy="steps")
        self.processing_class = tiny.tokenizer()
        self.model = object()
        self.control = SimpleNamespace(should_log=due)
        self.logged = []

    def log(self, metrics):
        self.logged.append(metrics)
        self.control.should_log = False


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("every", [None, 1, 3, 4])
def test_the_steps_of_a_callback(every, due, monkeypatch):
    """Each `every` steps and at each evaluation, once a step; a loss that is due stays due."""
    trainer = Logs(due)
    callback = DuelCallback(trainer, ["a"], every=every, rules=["margin"], block=4)
    asked = []

    def metrics(*given, **arguments):
        asked.append((given, arguments))
        return {"step": state.global_step}

    monkeypatch.setattr(training, "training_metrics", metrics)
    state = SimpleNamespace(global_step=0)
    evaluated = (4, 5, 8)
    expected = []
    for _ in range(2):  # a second training counts anew
        callback.on_train_begin(trainer.args, state, trainer.control)
        for step in range(1, 10):
            state.global_step = step
            callback.on_step_end(trainer.args, state, trainer.control)
            if step in evaluated:
                callback.on_evaluate(trainer.args, state, trainer.control)
                assert trainer.control.should_log == due
            if step in evaluated or (every and step % every == 0):
                expected.append(step)

    assert [logs["step"] for logs in trainer.logged] == expected
    for given, arguments in asked:
        assert given == (trainer.model, trainer.processing_class, ["a"])
        assert arguments == {"rules": ["margin"], "block": 4}
