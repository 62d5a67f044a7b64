"""Every argument of `Duel` reaches what it is for, or is refused or named by its name."""

import contextlib
import dataclasses
import inspect
import logging
from functools import partial
from typing import ClassVar

import pytest
import tiny
from attends import Attends
from toys import Toy

from lm_eval_duel import (
    Decision,
    Duel,
    DuelError,
    Rule,
    TextEstimate,
    Window,
    compare,
    load,
    load_tokenizer,
    planned_tokens,
)
from lm_eval_duel.core.batch_size import plan
from lm_eval_duel.core.scores import Sample, Score
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS
from lm_eval_duel.estimators import gradients, registry, trajectories
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.library import duel as library
from lm_eval_duel.library import training
from lm_eval_duel.library.ids import HARNESS_ARGS
from lm_eval_duel.rules.scores import Greedy

WINDOWS = [Window((), (0, 1, 2)), Window((1,), (2, 0))]
ORDERS = [(0, 1, 2), (1, 0)]


class Recorder:
    """An estimator that notes what its methods are given."""

    name = "duel"

    def __init__(self):
        self.calls = []

    @contextlib.contextmanager
    def one_run(self):
        yield

    def log_prob(self, *given):
        self.calls.append(given)
        return [Score(0.0)] * 2

    stream = replay = log_prob

    def stream_samples(self, *given, **named):
        self.calls.append((given, named))
        return iter([(1, Sample(-1.0)), (0, Sample(0.0))])


@pytest.fixture
def recorded():
    duel = Duel(Toy())
    duel.estimator = Recorder()
    return duel, duel.estimator.calls


def test_methods_on_ids_pass_every_argument_on(recorded, monkeypatch):
    duel, calls = recorded
    duel.log_prob(WINDOWS)
    duel.stream(WINDOWS)
    duel.replay(WINDOWS, ORDERS)
    assert calls == [(WINDOWS,), (WINDOWS,), (WINDOWS, ORDERS)]
    for module, name, given, passed in (
        (gradients, "differentiable", (WINDOWS, ORDERS, 3), (WINDOWS, ORDERS, 3)),
        (gradients, "differentiable", (WINDOWS, ORDERS), (WINDOWS, ORDERS, 1)),
        (trajectories, "follow", (WINDOWS, ORDERS, {"n": 2}), (WINDOWS, ORDERS, {"n": 2})),
        (trajectories, "follow", (WINDOWS, ORDERS), (WINDOWS, ORDERS, None)),
    ):
        monkeypatch.setattr(module, name, lambda *given: given)
        assert getattr(duel, name)(*given) == (duel.estimator, *passed)


DEFAULTS = {"suffixes": [(), ()], "tail": 0, "do_sample": True, "seed": 0, "keys": None, "stop": None}
OTHERS = {"suffixes": [(2,), (1,)], "tail": 2, "do_sample": False, "seed": 5, "keys": [7, 3], "stop": lambda *_: True}


@pytest.mark.parametrize("method", ["sample", "stream_samples"])
@pytest.mark.parametrize("name", [None, *OTHERS])
def test_samples_are_drawn_with_every_setting(method, name, recorded):
    """And come back in the order of the contexts."""
    duel, calls = recorded
    given = {} if name is None else {name: OTHERS[name]}
    samples = getattr(duel, method)([(), (1,)], 4, **given)
    if method == "sample":
        assert [sample.log_prob for sample in samples] == [0.0, -1.0]
    assert calls == [(([(), (1,)], 4), {**DEFAULTS, **given})]


def test_a_method_and_its_stream_have_the_same_arguments():
    for method, stream in {
        "score": "score_stream",
        "sample": "stream_samples",
        "generate": "generate_stream",
        "log_prob": "stream",
    }.items():
        whole = inspect.signature(getattr(Duel, method)).parameters
        assert whole == inspect.signature(getattr(Duel, stream)).parameters


def test_help_shows_every_keyword_with_its_default():
    """Of the network and of the estimators, as they are declared."""
    loaded = inspect.signature(load).parameters
    pretrained = inspect.signature(Duel.from_pretrained).parameters
    for name, argument in NETWORK_ARGUMENTS.items():
        assert loaded[name].default == argument.default
        assert name == "block" or pretrained[name].default == argument.default
        assert f"    {name} ({argument.shown}): " in load.__doc__
    assert pretrained["rule"].default == "greedy"
    for entry in registry.ENTRIES:
        for name, argument in entry.arguments.items():
            assert f"    {name} ({argument.shown}): " in Duel.from_pretrained.__doc__


@pytest.mark.parametrize(
    ("method", "given", "named"),
    [
        ("score", {"context": ["a"]}, "contexts"),
        ("sample", {"sed": 1}, "seed"),
        ("sample", {"temperature": 0.5}, "from_pretrained.*temperature.*generate"),
        ("generate", {"rule": "greedy"}, "from_pretrained.*rule"),
        ("replay", {"reveal_step": []}, "reveal_steps"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_nearest_or_with_where_it_belongs(method, given, named):
    with pytest.raises(DuelError, match=rf"Duel\.{method}.*{named}"):
        getattr(Duel(Toy(), block=4), method)([], **given)


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "four"])
def test_the_length_of_a_sample_is_a_positive_whole_number(length):
    with pytest.raises(DuelError, match="'length'"):
        Duel(Toy(), block=4).sample([()], length)


def test_a_whole_number_may_be_a_text():
    duel = Duel(Toy(), block=4)
    [sample] = duel.sample([()], "3")
    assert len(sample.tokens) == 3


def test_every_arg_of_the_harness_is_refused_by_its_name():
    for name in HARNESS_ARGS:
        with pytest.raises(DuelError, match=f"^'{name}'"):
            Duel.from_pretrained("no such checkpoint", **{name: "x"})


def test_an_error_on_arguments_names_the_method_and_the_argument_as_users_know_them():
    for method in ("sample", "replay", "log_prob"):
        with pytest.raises(TypeError, match=rf"Duel\.{method}\("):
            getattr(Duel(Toy(), block=4), method)()
    duel = Duel.from_pretrained("demo-mdm", device="cpu")
    with pytest.raises(DuelError, match=r"\blength of Duel\.sample"):
        duel.sample(["We the"], length=5000)
    with pytest.raises(DuelError, match="max_new_tokens"):
        duel.generate(["We the"], max_new_tokens=5000)


def test_a_name_is_no_network_and_neither_a_function_nor_a_class_is_a_rule():
    for arguments, named in (
        (("demo-mdm",), "from_pretrained"),
        ((Toy(), lambda predictions, lanes: None), "^rule"),
        ((Toy(), Greedy), "^rule"),
    ):
        with pytest.raises(DuelError, match=named):
            Duel(*arguments)
    for rule in (Greedy, None, 3, lambda predictions, lanes: None):
        with pytest.raises(DuelError, match=r"^rule"):
            Duel.from_pretrained("no such checkpoint", rule=rule)
    for make in (partial(Duel, Toy()), Duel.from_pretrained):
        with pytest.raises(DuelError, match=r"^tokenizer.* int"):
            make(tokenizer=3)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"k": 2}, "greedy:k=2"),
        ({"rule": "threshold", "mu": 0.9}, "threshold:mu=0.9"),
        ({"rule": "greedy:k=2", "sub_block": 2}, "greedy:k=2:sub_block=2"),
        ({"rule": f"{__name__}:Every", "step": 2}, f"{__name__}:Every:step=2"),
        ({"estimator": "sampled_confidence", "n": 2}, None),  # its own, not a rule's
    ],
)
def test_parameters_of_a_rule_are_keywords_wherever_a_duel_is_made(given, rule):
    toy = Toy()
    function = partial(Duel.from_model, toy.features, mask_token_id=toy.mask_id, max_length=toy.max_length)
    for make in (partial(Duel, toy), function, partial(Duel.from_pretrained, "demo-mdm")):
        duel = make(block=4, **given)
        assert rule is None or str(duel.rule) == rule


@dataclasses.dataclass(frozen=True)
class Every(Rule):
    """Reveals all, with a parameter of its own."""

    step: int = 1
    name: ClassVar = f"{__name__}:Every"

    def __call__(self, predictions, lanes):
        return Decision(lanes.masked)


def test_a_parameter_has_one_place():
    for rule in ("greedy:k=2", Greedy(2)):
        with pytest.raises(DuelError, match="k"):
            Duel(Toy(), rule, k=2)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"dtype": "float32"}, "in memory"),
        ({"trace": "x"}, "harness"),
        ({"add_bos_token": True}, "bos="),
        ({"preset": "llada"}, "on disk"),
        ({"mu": 0.9}, "'mu' of the rule greedy"),
        ({"device": "gpu"}, "No device 'gpu'"),
    ],
)
def test_a_network_in_memory_has_no_arguments_of_a_checkpoint(given, answer):
    with pytest.raises(DuelError, match=answer):
        Duel.from_model(Toy().features, mask_token_id=3, max_length=8, **given)


@pytest.mark.parametrize("keys", [["a", "b"], 5, [None, 1], [1.2, 1.7], "ab", [1], {1, 2}, {1: 2, 3: 4}])
def test_keys_are_whole_numbers_and_one_for_each_sample(keys):
    with pytest.raises(DuelError, match="key"):
        Duel(Toy(), block=4).sample([(), ()], 2, keys=keys)


def test_one_of_a_kind_is_no_list():
    duel = Duel.from_pretrained("demo-mdm", device="cpu")
    [estimate] = duel.estimate(["We the"], sample=1.0)
    for use in (
        lambda: duel.log_prob(None),
        lambda: TextEstimate.total(estimate),
        lambda: planned_tokens(duel, "We the"),
        lambda: compare(duel.score(["We the"]), duel.score(["We the"])[0]),
    ):
        with pytest.raises(DuelError, match="list"):
            use()
    with pytest.raises(DuelError, match="names"):
        compare(duel.score(["We the"]), duel.score(["We the"]), names=None)
    with pytest.raises(DuelError, match="load_tokenizer"):
        load_tokenizer(None)


def test_what_an_estimator_does_not_read_is_named_if_it_was_given(caplog):
    """The defaults of keywords are not given; the same values by the user are."""
    for given in ({}, {"rule": "greedy"}, {"block": "auto"}, {"grid": "target"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Duel(Toy(), estimator="elbo", mc_samples=16, **given)
        named = [name for name in ("rule", "block", "grid") if f"does not read {name}" in caplog.text]
        assert named == list(given)


def test_what_only_texts_have_is_named_if_there_is_no_tokenizer(caplog):
    arguments = {"mask_token_id": 4, "max_length": 8}
    for tokenizer in (tiny.tokenizer(length=8), None):
        caplog.clear()
        Duel.from_model(Toy(tokens=39, length=8).features, tokenizer, bos="given", windows="harness", **arguments)
        for name in ("bos=given", "windows=harness"):
            assert (name in caplog.text) == (tokenizer is None)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_spec_is_read_again_while_weights_may_change(fixed):
    toy = Toy()
    toy.fixed_weights = fixed
    read = []
    toy.describe = lambda: read.append(1) or {"denoiser": f"read {len(read)} times"}
    duel = Duel(toy)
    specs = {duel.spec["denoiser"] for _ in range(3)}
    assert (len(specs) == 1) == fixed
    assert (duel.fingerprint == duel.fingerprint) == fixed


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_an_estimate_keeps_the_size_of_calls_of_a_network_in_memory(fixed, batch_size, monkeypatch):
    """Its device has no memory for trials; of another one the size of calls under the cache is found anew."""
    toy = Attends(tokens=39)
    toy.fixed_weights = fixed
    duel = Duel(toy, "margin", 2, "row", batch_size=batch_size, tokenizer=tiny.tokenizer(framed=False))
    made = []

    class Recorded(TwoPhase):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(library, "TwoPhase", Recorded)
    duel.estimate(["a"], sample=0.3, cache="prefix", seed=9)
    [estimator] = made
    assert estimator.denoiser is toy
    assert str(estimator.rule) == "margin:k=1"
    assert estimator.block == 2
    assert estimator.grid == "row"
    assert estimator.arguments.sample == 0.3
    assert estimator.cache == "prefix"
    assert estimator.draw_seed == 9

    budget = duel.estimator.budget
    assert estimator.budget is budget
    assert estimator.phases["uncached"].budget is budget
    found_anew = plan(toy, 2, "row", None, None).tokens
    rows = max(1, budget.tokens // toy.max_length)
    assert estimator.phases["cached"].budget.tokens == (found_anew if fixed else rows * toy.max_length)


# ---------------------------------------------------------------- metrics during training


def test_all_rules_of_a_score_share_network_and_sizes():
    toy = Toy(tokens=39, length=8)
    arguments = {"mask_token_id": 4, "grid": "row", "windows": "harness", "batch_size": 3, "bos": "given"}
    duels = training._duels(toy.features, tiny.tokenizer(length=8), ["greedy", "margin:k=2"], 3, arguments)
    first, second = duels
    assert str(first.rule) == "greedy:k=1"
    assert str(second.rule) == "margin:k=2"
    assert first.denoiser is second.denoiser
    assert first.estimator.budget is second.estimator.budget
    assert first.estimator.budget.tokens == 3 * 8
    for duel in duels:
        assert duel.block == 3
        assert duel.grid == "row"
        assert duel.spec["windows"] == "harness"


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_planned_tokens_are_the_positions_of_a_run(cache, monkeypatch):
    """Of texts without an equal row, one row a call."""
    toy = Attends(tokens=33, length=16)
    toy.bos = "none"
    duel = Duel(Cached(toy, cache) if cache else toy, "greedy:k=2", 4, tokenizer=tiny.tokenizer(framed=False))
    positions = []
    stream = Attends.stream

    def counting(denoiser, ids, *more):
        positions.append(ids.numel())
        return stream(denoiser, ids, *more)

    monkeypatch.setattr(Attends, "stream", counting)
    duel.estimator.use_single_rows()
    texts = ["a b c d e f g h", "i j k l m n o p q r s t", "u v w x"]
    duel.score(texts)
    assert planned_tokens(duel, texts) == sum(positions)
    assert planned_tokens(duel, []) == 0


def test_arguments_of_the_network_are_refused_once_it_is_loaded():
    for arguments in ({"cache": "dual"}, {"dtype": "float32"}, {"estimator": "elbo", "cache": "dual"}):
        with pytest.raises(DuelError, match=r"'(cache|dtype)'.*load"):
            Duel(Toy(), **arguments)
