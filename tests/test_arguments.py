"""Kinds of arguments at the ends of their ranges, and what stands for no value. Nothing is loaded."""

import dataclasses
import math

import pytest

from lm_eval_duel import arguments
from lm_eval_duel import options as options_module
from lm_eval_duel.arguments import Argument, Arguments, argument, choice, either, whole
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets

REFUSED = object()


def kept(kind, *values):
    """Each value is read as itself."""
    return [(kind, value, value) for value in values]


def refused(kind, *values):
    return [(kind, value, REFUSED) for value in values]


def read_as(expected, kind, *values):
    return [(kind, value, expected) for value in values]


def as_text(kind, *values):
    return [(kind, value, str(value)) for value in values]


ENDS = [  # a kind, a value, and what it is read as
    *kept(arguments.PROBABILITY, 0.0, 1.0, 0.5),
    *refused(arguments.PROBABILITY, -1e-9, 1.0000001, math.nan, True, "a"),
    *kept(arguments.SHARE, 1e-9, 1.0),
    *refused(arguments.SHARE, 0, 1.0000001, -0.5, math.nan),
    *kept(arguments.POSITIVE, 1e-300, 1e300),
    *refused(arguments.POSITIVE, 0, -1, math.inf, math.nan),
    *kept(arguments.NOT_NEGATIVE, 0.0, 2.5, math.inf),
    *refused(arguments.NOT_NEGATIVE, -1e-9, math.nan, False),
    *kept(arguments.NUMBER, -1.5, math.inf),
    *refused(arguments.NUMBER, math.nan, True),
    *read_as(1, arguments.COUNT, 1, 1.0, "1", "1e0"),
    *refused(arguments.COUNT, 0, -1, 1.5, "1.5", True, 2**63, math.inf),
    *kept(arguments.INTEGER, -(2**63) + 1, 0, 2**63 - 1),
    *refused(arguments.INTEGER, -(2**63), 2**63),
    *kept(whole(2, most=4), 2, 4),
    *refused(whole(2, most=4), 1, 5),
    *read_as(True, arguments.TRUTH, True, "true", "True", 1, "1"),
    *read_as(False, arguments.TRUTH, False, "false", "FALSE", 0, "0"),
    *refused(arguments.TRUTH, "yes", 2, "", 0.5),
    *read_as("auto", arguments.BLOCK, "auto"),
    *read_as(4, arguments.BLOCK, "4", 4.0),
    *refused(arguments.BLOCK, 0, "Auto", -1),
    *kept(either("all", arguments.COUNT), "all"),
    *kept(choice("a", "b"), "b"),
    *refused(choice("a", "b"), "c"),
    *as_text(arguments.TEXT, 0, False, " ", "0"),
    *refused(arguments.TEXT, ""),
    *kept(arguments.RAW, "", "none"),
    *as_text(arguments.CHECKPOINT, 2024, "a/b"),
    *refused(arguments.CHECKPOINT, object()),
    *read_as(None, arguments.COUNT, None, "none", "None", "null"),
    *read_as(None, arguments.TEXT, None, "none", "None", "null"),
]


def check_same(value, expected):
    """Assert that a value is the expected one, and of its type: 1 is not True, and 1.0 is not 1."""
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(("kind", "value", "expected"), ENDS)
def test_the_ends_of_a_kind(kind, value, expected):
    if expected is REFUSED:
        with pytest.raises(DuelError, match=r"x'? of y"):
            kind("x", value, " of y")
    else:
        check_same(kind("x", value, " of y"), expected)


@pytest.mark.parametrize(
    ("arg", "value", "expected"),
    [
        (Argument(arguments.COUNT, 3), None, 3),
        (Argument(arguments.COUNT, 3), "none", 3),
        (Argument(arguments.COUNT, 3, none=None), "none", None),
        (Argument(arguments.COUNT, None), "none", None),
        (Argument(arguments.NUMBER, 1.5, none=0.0), None, 0.0),
        (Argument(arguments.NUMBER, 1.5), 0, 0.0),
        (Argument(arguments.TRUTH, True), "false", False),
        (Argument(arguments.COUNT, arguments.MISSING), "none", REFUSED),
    ],
)
def test_what_none_means(arg, value, expected):
    if expected is REFUSED:
        with pytest.raises(DuelError, match="'x'"):
            arg.read("x", value)
    else:
        check_same(arg.read("x", value), expected)


@pytest.mark.parametrize(
    ("arg", "shown"),
    [
        (Argument(arguments.COUNT, 0), "0"),
        (Argument(arguments.NUMBER, 0.0), "0.0"),
        (Argument(arguments.TRUTH, False), "false"),
        (Argument(arguments.TRUTH, True), "true"),
        (Argument(arguments.COUNT, None), "none"),
        (Argument(arguments.COUNT, ()), "none"),
        (Argument(arguments.COUNT, 0, unset="as many as fit"), "as many as fit"),
        (Argument(arguments.COUNT, arguments.MISSING), "required"),
    ],
)
def test_a_default_is_shown_as_a_user_types_it(arg, shown):
    assert arg.shown == shown


def test_the_meaning_says_what_changes_no_number():
    assert Argument(arguments.COUNT, 1, "rows").meaning == "rows"
    assert Argument(arguments.COUNT, 1, "rows", identity=False).meaning == "rows. Changes no number"


@dataclasses.dataclass(frozen=True)
class Example(Arguments):
    """`rest` is read with way=b or way=c only."""

    way: str = argument(choice("a", "b", "c"), "a", "a way")
    rest: int = argument(whole(0), 3, "the rest", only_with=("way", "b", "c"))
    share: float = argument(arguments.PROBABILITY, 0.5, "a share")


def test_fields_are_read_and_checked():
    assert Example() == Example("a", 3, 0.5)
    assert Example("b", "0", "1") == Example("b", 0, 1.0)
    assert Example("c", 7).rest == 7
    assert Example(share=0).share == 0.0
    assert Example("b", None).rest == 3

    with pytest.raises(DuelError, match="way=b or way=c"):
        Example(rest=0)
    with pytest.raises(DuelError, match="'rest'"):
        Example(rest=4)
    with pytest.raises(DuelError, match="'share'"):
        Example(share=2)


@pytest.mark.parametrize(
    ("pairs", "named"), [([("a", 1), ("b", 2), ("a", 1)], "a=1 and a=1"), ([("a", 1), ("a", None)], "a=1 and a=None")]
)
def test_a_key_has_one_value(pairs, named):
    with pytest.raises(DuelError, match=named):
        arguments.unique_keys(pairs)
    assert arguments.unique_keys(pairs[:1]) == {"a": 1}


# ---------------------------------------------------------------- model args


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"rows": None, "batch_size": "auto", "max_batch_size": None}),
        ({"batch_size": 1}, {"rows": None}),  # what lm-eval says if the user said nothing
        ({"batch_size": "1"}, {"rows": None}),
        ({"batch_size": 2}, {"rows": 2}),
        ({"batch_size": "auto:4"}, {"rows": None, "batch_size": "auto"}),
        ({"max_batch_size": 1}, {"rows": None, "max_batch_size": 1}),
        ({"block": None}, {"block": None}),
        ({"block": "none"}, {"block": None}),
        ({"verify": 0, "draw_seed": 0}, {"verify": 0, "draw_seed": 0}),
    ],
)
def test_sizes_and_nothing(given, expected):
    options = Options.parse(given)

    for key, value in expected.items():
        assert getattr(options, key) == value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"block": 4, "cache": "dual"}, {"block": 4, "cache": "dual"}),
        ({"estimator": "ar", "block": 4}, {"block": None, "attention": "causal"}),
        ({"estimator": "two_phase", "cache": "prefix"}, {"cache": None}),
        ({"preset": "llada", "max_length": 9}, {"max_length": 9}),
    ],
)
def test_args_of_the_network(given, expected):
    """An estimator with a cache of its own loads a network without one, and the chain rule has no blocks."""
    network = Options.parse(given).network

    for key, value in expected.items():
        assert network[key] == value


@pytest.mark.parametrize("key", ["device", "batch_size"])
@pytest.mark.parametrize("value", [0, "", None, "cpu"])
def test_an_arg_with_a_flag_of_its_own_is_refused_among_the_others(key, value):
    from lm_eval_duel.options import with_flags

    with pytest.raises(DuelError, match=f"--{key}"):
        with_flags({"block": 4, key: value}, device="cuda", batch_size="auto")
    assert with_flags({"block": 4}, device=None, batch_size=3) == {"block": 4, "device": None, "batch_size": 3}


@pytest.mark.parametrize("estimator", registry.ESTIMATORS)
def test_an_argument_that_estimators_share_is_that_of_the_one_given(estimator):
    """Its default and its kind are as that estimator declares them."""
    declared = registry.find(estimator).arguments

    readable = options_module._estimator_arguments({"estimator": estimator})

    for key, argument_of_estimator in declared.items():
        assert readable[key] == argument_of_estimator


@pytest.mark.parametrize("name", presets.PRESETS)
def test_what_a_preset_lets_change_is_as_given(name):
    """And everything else is the preset's."""
    preset = presets.find(name)
    unchanged = Options.parse(preset.arguments)

    by_name = Options.parse({"preset": name})
    assert dataclasses.replace(by_name, preset=None) == unchanged

    for key in preset.free:
        value = preset.arguments.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        changed = Options.parse({"preset": name, key: 2 * value})
        written_out = Options.parse({**preset.arguments, key: 2 * value})
        assert dataclasses.replace(changed, preset=None) == written_out
        assert written_out != unchanged


@dataclasses.dataclass(frozen=True)
class Plain:
    """Fields of a user's own rule: a name, a type and a default."""

    count: int = 3
    bound: "float | None" = 0.5
    flag: bool = True
    words: str = "x"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", "7", 7),
        ("count", "none", 3),
        ("count", "0", 0),
        ("count", "1.5", REFUSED),
        ("bound", "none", None),
        ("bound", "0", 0.0),
        ("bound", "x", REFUSED),
        ("flag", "false", False),
        ("flag", "none", True),
        ("words", "none", "none"),
        ("words", "", ""),
    ],
)
def test_a_type_says_what_a_field_takes(name, value, expected):
    declared = arguments.declared(Plain)
    if expected is REFUSED:
        with pytest.raises(DuelError, match=name):
            declared[name].read(name, value)
    else:
        check_same(declared[name].read(name, value), expected)
