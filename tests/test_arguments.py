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
ENDS = [  # a kind, a value, and what it is read as
    *((arguments.PROBABILITY, value, value) for value in (0.0, 1.0, 0.5)),
    *((arguments.PROBABILITY, value, REFUSED) for value in (-1e-9, 1.0000001, math.nan, True, "a")),
    *((arguments.SHARE, value, value) for value in (1e-9, 1.0)),
    *((arguments.SHARE, value, REFUSED) for value in (0, 1.0000001, -0.5, math.nan)),
    *((arguments.POSITIVE, value, value) for value in (1e-300, 1e300)),
    *((arguments.POSITIVE, value, REFUSED) for value in (0, -1, math.inf, math.nan)),
    *((arguments.NOT_NEGATIVE, value, value) for value in (0.0, 2.5, math.inf)),
    *((arguments.NOT_NEGATIVE, value, REFUSED) for value in (-1e-9, math.nan, False)),
    *((arguments.NUMBER, value, value) for value in (-1.5, math.inf)),
    *((arguments.NUMBER, value, REFUSED) for value in (math.nan, True)),
    *((arguments.COUNT, value, 1) for value in (1, 1.0, "1", "1e0")),
    *((arguments.COUNT, value, REFUSED) for value in (0, -1, 1.5, "1.5", True, 2**63, math.inf)),
    *((arguments.INTEGER, value, value) for value in (-(2**63) + 1, 0, 2**63 - 1)),
    *((arguments.INTEGER, value, REFUSED) for value in (-(2**63), 2**63)),
    *((whole(2, most=4), value, value) for value in (2, 4)),
    *((whole(2, most=4), value, REFUSED) for value in (1, 5)),
    *((arguments.TRUTH, value, True) for value in (True, "true", "True", 1, "1")),
    *((arguments.TRUTH, value, False) for value in (False, "false", "FALSE", 0, "0")),
    *((arguments.TRUTH, value, REFUSED) for value in ("yes", 2, "", 0.5)),
    *((arguments.BLOCK, value, expected) for value, expected in (("auto", "auto"), ("4", 4), (4.0, 4))),
    *((arguments.BLOCK, value, REFUSED) for value in (0, "Auto", -1)),
    (either("all", arguments.COUNT), "all", "all"),
    (choice("a", "b"), "b", "b"),
    (choice("a", "b"), "c", REFUSED),
    *((arguments.TEXT, value, str(value)) for value in (0, False, " ", "0")),
    (arguments.TEXT, "", REFUSED),
    (arguments.RAW, "", ""),
    (arguments.RAW, "none", "none"),
    *((arguments.CHECKPOINT, value, str(value)) for value in (2024, "a/b")),
    (arguments.CHECKPOINT, object(), REFUSED),
    *(
        (kind, nothing, None)
        for kind in (arguments.COUNT, arguments.TEXT)
        for nothing in (None, "none", "None", "null")
    ),
]


@pytest.mark.parametrize(("kind", "value", "expected"), ENDS)
def test_the_ends_of_a_kind(kind, value, expected):
    if expected is REFUSED:
        with pytest.raises(DuelError, match=r"x'? of y"):
            kind("x", value, " of y")
        return
    found = kind("x", value, " of y")
    assert found == expected and type(found) is type(expected)


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
        found = arg.read("x", value)
        assert found == expected and type(found) is type(expected)


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
    assert Example("b", "0", "1") == Example("b", 0, 1.0) and Example("c", 7).rest == 7
    assert Example(share=0).share == 0.0 and Example("b", None).rest == 3
    for wrong, named in (({"rest": 0}, "way=b or way=c"), ({"rest": 4}, "'rest'"), ({"share": 2}, "'share'")):
        with pytest.raises(DuelError, match=named):
            Example(**wrong)


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
    assert {key: getattr(options, key) for key in expected} == expected


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
    assert {key: network[key] for key in expected} == expected


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
    assert {key: readable[key] for key in declared} == declared


@pytest.mark.parametrize("name", presets.PRESETS)
def test_what_a_preset_lets_change_is_as_given(name):
    """And everything else is the preset's."""
    preset = presets.find(name)
    for key in preset.free:
        if not isinstance(preset.arguments.get(key), int) or isinstance(preset.arguments[key], bool):
            continue
        changed = Options.parse({"preset": name, key: 2 * preset.arguments[key]})
        written_out = Options.parse({**preset.arguments, key: 2 * preset.arguments[key]})
        assert dataclasses.replace(changed, preset=None) == written_out
        assert written_out != Options.parse(preset.arguments)
    assert dataclasses.replace(Options.parse({"preset": name}), preset=None) == Options.parse(preset.arguments)


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
        found = declared[name].read(name, value)
        assert found == expected and type(found) is type(expected)
