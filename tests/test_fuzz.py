"""Random cases: model args, rules, whole batches against the textbook loop, windows. The same cases every time."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import sys
import types
from importlib.machinery import PathFinder
from typing import get_args
from unittest.mock import patch

import pytest
import textbook
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from lm_eval._cli.utils import MergeDictAction
from lm_eval.utils import simple_parse_args_string
from toys import BlockCausal, Causal, Rotary, RotaryBlocks, Toy

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core import block_causal, lanes, predictions
from lm_eval_duel.core.lanes import blocks, groups
from lm_eval_duel.core.windows import Window, conditional, independent, of_row
from lm_eval_duel.denoisers.load_options import BOS, DTYPES, Attention, Backend, LastBlock, Sigma
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.registry import ELBO_FORMS, ESTIMATORS
from lm_eval_duel.options import MODEL_ARGUMENTS, Grid, Options, Windows
from lm_eval_duel.text.text import Text

GRIDS, WINDOWS = get_args(Grid), get_args(Windows)

# ---------------------------------------------------------------- texts of rules

RULES = [*rules.RULES, *rules.ALIASES]
WORDS = st.text(max_size=8) | st.text("abk_:=+,.-1 ", max_size=12)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.floats(0, 1),
    st.floats(),
    st.sampled_from([-1.0, 1e3, math.nan, math.inf, 10**400, 2**53 + 1]),
)
FINITE = NUMBERS.filter(lambda number: not abs(number) > 1e300)  # a text may be an infinity where an int is none


@st.composite
def rule_texts(draw):
    """Mostly a rule with parameters that it has and values that may be right."""
    names = (
        st.sampled_from(RULES) | st.sampled_from(["gredy", "custom_rules:Stalls", "nowhere:Rule", ".x:Y", ""]) | WORDS
    )
    name = draw(names)
    known = [field.name for field in dataclasses.fields(rules.find(name))] if name in RULES else ["mu", "k"]
    parts = [
        draw(st.one_of(WORDS, *[st.just(f"{key}={draw(NUMBERS | WORDS)}")] * 4))
        for key in known
        if draw(st.integers(0, 5))
    ]
    return ":".join([name, *parts])


def check_rule(data):
    """A text is a rule that writes itself the same, or a DuelError that says something."""
    text = data.draw(rule_texts())
    if (rule := parsed(rules.parse, text)) is not None:
        assert rules.parse(str(rule)) == rule == rules.parse(text)
        assert str(rules.parse(str(rule))) == str(rule)


def parsed(parse, *arguments):
    """What `parse` makes of its arguments, or None where it refuses them in words."""
    try:
        return parse(*arguments)
    except DuelError as error:
        assert str(error)
        return None


# ---------------------------------------------------------------- model args

CHOSEN = {
    "rule": RULES,
    "grid": GRIDS,
    "windows": WINDOWS,
    "estimator": [*ESTIMATORS],
    "elbo_form": ELBO_FORMS,
    "dtype": DTYPES,
    "bos": BOS,
    "attention": get_args(Attention),
    "last_block": get_args(LastBlock),
    "sigma": get_args(Sigma),
    "backend": get_args(Backend),
}
FIELDS = [field.name for field in dataclasses.fields(Options) if field.name != "estimator_args"]
KEYS = sorted({*MODEL_ARGUMENTS, *registry.arguments(), "add_bos_token", *rules.PARAMETERS})
LITERALS = st.sampled_from(
    ["", "none", "None", "null", "auto", "auto:4", "true", "0.5", "-1", "٣", "1_0", "torch.int8"]
)
VALUES = st.recursive(
    NUMBERS | NUMBERS.map(str) | st.booleans() | st.none() | LITERALS | WORDS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.text(max_size=2) | inner.map(str), inner)
    ),
    max_leaves=3,
)


@st.composite
def misspelt(draw):
    """A known key with one letter too many, too few, or wrong."""
    key = draw(st.sampled_from([key for key in KEYS if len(key) > 3 and key not in rules.PARAMETERS]))
    at, letter = draw(st.integers(0, len(key) - 1)), draw(st.sampled_from("aesz_"))
    return draw(st.sampled_from(sorted(one_edit(key, at, letter))))


def one_edit(key, at, letter):
    before, after = key[:at], key[at:]
    return {
        before + letter + after,
        before + after[1:],
        before + letter + after[1:],
    }


@st.composite
def model_args(draw):
    """Mostly known keys, with values that may be right; a few at a time, so that some are all right."""
    arguments = {}
    for key in draw(st.lists(st.sampled_from(KEYS) | st.sampled_from(KEYS) | misspelt() | WORDS, max_size=4)):
        likely = st.sampled_from(CHOSEN[key]) if key in CHOSEN else NUMBERS
        arguments[key] = draw(likely | likely | rule_texts() | VALUES if key == "rule" else likely | VALUES)
    return arguments


def said(options):
    """Options as model args again, those that are not the default."""
    plain = Options()
    arguments = {name: getattr(options, name) for name in FIELDS if getattr(options, name) != getattr(plain, name)}
    arguments |= {key: value for key, value in options.estimator_args.items() if key != "lattice_rules"}
    if (follow := options.estimator_args.get("lattice_rules")) is not None:
        arguments["lattice_rules"] = "+".join(map(str, follow)) or "none"
    return {**arguments, "rule": str(options.rule)}


def check_arguments(data):
    """Model args are Options, or a DuelError that says something; and Options said again are the same Options."""
    arguments = data.draw(model_args())
    before = repr(arguments)
    options = parsed(Options.parse, arguments)
    assert parsed(Options.parse, arguments) == options and repr(arguments) == before
    if options is not None:
        assert Options.parse(said(options)) == options
        assert rules.parse(str(options.rule)) == options.rule


def check_unknown(data):
    """An unknown key is refused and, where it is a misspelt one, a key that is as near is named."""
    key = data.draw(misspelt())
    if key in KEYS:
        return
    with pytest.raises(DuelError, match=re.escape(f"Unknown model arg '{key}'.")) as error:
        Options.parse({key: data.draw(VALUES)})
    hint = re.search(r"Did you mean (\w+)\?", str(error.value))
    assert hint and hint[1] in KEYS
    assert any(key in one_edit(hint[1], at, letter) for at in range(len(hint[1]) + 1) for letter in {*key})


def check_sides(data):
    """Parameters mean the same inside the rule's text and beside it."""
    name = data.draw(st.sampled_from(RULES))
    values = {key.name: data.draw(FINITE | WORDS) for key in dataclasses.fields(rules.find(name))}
    inside = {key for key in values if data.draw(st.booleans()) and not {*":,"} & {*str(values[key])}}
    text = ":".join([name, *(f"{key}={values[key]}" for key in values if key in inside)])
    beside = {key: value for key, value in values.items() if key not in inside}
    one, other = parsed(Options.parse, {"rule": text, **beside}), parsed(Options.parse, {"rule": name, **values})
    assert one == other


# ---------------------------------------------------------------- model args as texts, through the harness's parsers

TEXTS = st.text("ab1.:=+-'\"[]{}() nN,e", max_size=8) | LITERALS | NUMBERS.map(str) | WORDS
SAME = st.sampled_from(["true", "False", "none", "None", "auto", "4", "0.5", "1e3", "nan", "a:b", "x+y", "w", "-3"])


class CommandLine(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


CLI = CommandLine()
CLI.add_argument("--model_args", nargs="+", action=MergeDictAction)


def command_line(text):
    return CLI.parse_args([f"--model_args={text}"]).model_args or {}


def harness(parser, text):
    """What one of the harness's parsers makes of a text, or None where it makes nothing of it."""
    try:
        return parser(text)
    except Exception:
        return None


def check_text(data):
    """Whatever the harness's parsers make of a text, it is Options or a DuelError."""
    keys = st.sampled_from(KEYS) | st.sampled_from(KEYS) | WORDS
    pairs = data.draw(st.lists(st.tuples(keys, TEXTS | rule_texts() | st.sampled_from(RULES)), max_size=4))
    text = ",".join(f"{key}={value}" for key, value in pairs)
    for parser in (simple_parse_args_string, command_line):
        if (arguments := harness(parser, text)) is not None:
            parsed(Options.parse, arguments)


def check_forms(data):
    """Both command lines and JSON mean the same, but for text with a sign: the harness makes another number of it."""
    pairs = data.draw(st.dictionaries(st.sampled_from(KEYS), SAME, max_size=3))
    pairs |= {key: data.draw(st.sampled_from(CHOSEN[key])) for key in pairs if key in CHOSEN}
    numbers = {"block", "mc_samples", "top_k", "k", "mu"}
    pairs = {key: value for key, value in pairs.items() if value != "-3" or key in numbers}
    text = ",".join(f"{key}={value}" for key, value in pairs.items())
    arguments = simple_parse_args_string(text)
    forms = [arguments, command_line(text), command_line(json.dumps(arguments)) if arguments else {}]
    one, *others = [parsed(Options.parse, form) for form in forms]
    assert all(other == one for other in others)


# ---------------------------------------------------------------- batches against the textbook loop

LENGTH, TOKENS, UNUSED = 12, 4, 1  # ids: tokens 0..3, the mask 4, and 5, which is no token
CODES = {  # no two of them are equal in another order: such ties are of the mathematics, not of the numbers
    "ties": [[0, 0, 0, 0], [1.5, 1.5, -1, 0], [2, -1, 0.5, -0.3], [0.1, 0.7, 0.3, -2]],
    "saturated": [[45, 0, 3, 1], [0, 52.5, 2, 2], [-20, -21, 20, 21.5], [1, 2, 30, -4]],
}
KINDS = {
    "bidirectional": Toy,
    "bidirectional, padding seen": Toy,
    "bidirectional, shifted": Toy,
    "bidirectional, padding seen, shifted": Toy,
    "bidirectional, rotary": Rotary,
    "block-causal": BlockCausal,
    "block-causal, shifted": BlockCausal,
    "block-causal, rotary": RotaryBlocks,
    "causal": Causal,
    "causal, shifted": BlockCausal,
}


@functools.cache
def toy(kind, block, last_block, head):
    """A toy network; `head`: "smooth", or one of few distributions, so that positions tie."""
    more = {"block": 1 if kind == "causal, shifted" else block} if issubclass(KINDS[kind], BlockCausal) else {}
    found = KINDS[kind](tokens=TOKENS, length=LENGTH, seed=block, unused=UNUSED, **more)
    found.honours_padding = "padding seen" not in kind
    found.shift = int("shifted" in kind)
    found.last_block, found.noise = last_block, 1e-12
    if kind == "causal, shifted":
        found.attention, found.mask_id = "causal", None
    if head != "smooth":
        found.codes = torch.nn.functional.pad(torch.tensor(CODES[head], dtype=torch.float64), (0, 1 + UNUSED), value=9)
    return found


def lawful(toy, rule, block, grid):
    """Whether a network can follow a rule in these blocks."""
    if toy.attention == "causal":
        return rule.name == "left_to_right" and block in ("auto", 1)
    if toy.attention == "block_causal":
        return grid != "target" and block in ("auto", toy.block)
    return block in ("auto", None) or block >= 1


def fits(toy, block, grid, window):
    """Whether a window has a value under a spec."""
    end = len(window.context) + len(window.target)
    given = {*window.context, *window.suffix}
    unseen = toy.attention == "causal" or (toy.attention == "block_causal" and window.length > -(-end // block) * block)
    return (
        window.length <= toy.max_length
        and given <= {*range(toy.vocab_size)} - {toy.mask_id}
        and {*window.target} <= {*range(TOKENS)}
        and not (window.target and len(window.context) < toy.shift)
        and not (window.target and window.suffix and unseen)
        and (not window.tail or (block and (end if grid == "row" else len(window.target)) % block == 0))
    )


ELSEWHERE = (  # in tests/rules: a tie, a schedule, files
    *("hierarchy", "dream", "pc", "learned", "learned_threshold"),
)


def some_rule(chance):
    """A rule with parameters that are right, and no number that a network may give for a border.

    Not nu=0 either: of two steps with equal predictions the divergence is 0 but for the last bit, which depends on
    where in a batch a position stands (a CPU takes several at a time, and those that are left one by one).
    """
    nats = [math.inf, *(chance.uniform(1e-9, most) for most in (0.01, 0.3, 1, 4))]
    values = {
        "k": [1, 1, 1, 2, 2, 3, 4, 100, 2**62],
        "seed": [0, chance.getrandbits(63) - 2**62],
        "mu": [0.0, 1.0, 1 - 1e-14, *(chance.random() for _ in range(5))],
        "nu": nats,
        "gamma": [0.0, *nats],
        "history": [1, 1, 2, 3],
        "kl": ["paper", "authors"],
        "tau": [0.999, *(chance.random() for _ in range(5))],
        "f": [chance.uniform(1e-9, most) for most in (0.1, 1, 4)],
        "n": [1, 1, 2, 3, 100],
        "variant": ["a", "b", "c"],
        "steps": [1, 2, 3, 5, 2**62],
        "strict": [True, False],
        "inclusive": [True, False],
        "across": [False],
        **{name: [None] for name in ("eos", "eos_id", "eot_id")},
    }
    name = chance.choice([*(name for name in rules.RULES if name not in ELSEWHERE), "klass"])
    return rules.build(
        name, {each.name: chance.choice(values[each.name]) for each in dataclasses.fields(rules.find(name))}
    )


def some_windows(chance, toy, block, grid):
    """A few windows of two texts, equal ones and equal beginnings among them; most of them fit."""
    texts, found = [chance.choices(range(TOKENS), k=LENGTH) for _ in range(2)], []
    for _ in range(chance.randint(1, 6)):
        text, target = chance.choice(texts), chance.choice([0, LENGTH, *(chance.randint(1, LENGTH) for _ in range(8))])
        context = chance.choice([0, chance.randint(0, LENGTH - target)])
        room = LENGTH - target - context
        suffix, tail = (chance.choice([0, chance.randint(0, room)]) for _ in range(2))
        window = Window(text[:context], text[context : context + target], text[context:][:suffix], tail)
        if chance.random() < 0.02:
            part, wrong = chance.choice(["context", "target", "suffix"]), chance.choice([-1, 3, 4, 5, 6])
            found.append(dataclasses.replace(window, **{part: (*getattr(window, part)[1:], wrong)}))
        else:
            found.append(window if chance.random() < 0.02 else mended(toy, block, grid, window))
    return chance.sample(found, len(found))


def mended(toy, block, grid, window):
    """A window that fits, as like this one as can be."""
    if len(window.context) < toy.shift:
        window = dataclasses.replace(window, context=window.target[: toy.shift], target=window.target[toy.shift :])
    without = [{}, {"tail": 0}, {"suffix": ()}, {"tail": 0, "suffix": ()}]
    likely = (dataclasses.replace(window, **change) for change in without)
    return next(window for window in likely if fits(toy, block, grid, window))


def check_batch(data):
    """A random batch under a random spec is the textbook loop window by window, or is refused where it is no spec."""
    chance = data.draw(st.randoms(use_true_random=True))  # one draw, or most cases would be parts of earlier ones
    heads, ends = ["smooth", *CODES], get_args(LastBlock)
    network = toy(chance.choice([*KINDS]), chance.randint(1, 6), chance.choice(ends), chance.choice(heads))
    rule, grid = some_rule(chance), chance.choice(GRIDS)
    block = chance.choice(["auto", None, network.block or 1, *(chance.randint(2, LENGTH + 1) for _ in range(7))])
    if chance.random() < 0.05:
        block = chance.choice([0, -1, 1, network.block])
    elif network.attention == "causal":
        rule, block = rules.LeftToRight(getattr(rule, "k", 1)), chance.choice(["auto", 1])
    elif network.attention == "block_causal":
        block, grid = chance.choice(["auto", network.block]), chance.choice(["auto", "row"])
    rows = [None, 1, 2, 3]
    spec = {"grid": grid, "batch_size": chance.choice(rows), "max_batch_size": chance.choice(rows)}
    spec["traced"] = chance.random() < 0.5
    note(f"{network.attention} {rule} block={block} {spec}")
    make = functools.partial(DuelEstimator, network, rule, block)
    if not lawful(network, rule, block, grid):
        with pytest.raises(DuelError, match=r"\w"):
            make(**spec)
        return
    if network.attention == "causal" and chance.random() < 0.5:
        make = functools.partial(Autoregressive, network)
    duel = make(**spec)
    auto = network.block or {"causal": 1}.get(network.attention, 32)
    block = auto if block == "auto" else block
    grid = {"block_causal": "row"}.get(network.attention, "target") if grid == "auto" else grid
    windows = some_windows(chance, network, block, grid)
    note(windows)

    sizes = {  # whatever is cut into pieces, in other pieces
        (lanes, "GROUP"): [4096, 1, 2],
        (block_causal, "STRETCH"): [256, 1, 3, 7],
        (block_causal, "CLEAN"): [512, 1, 5],
        (predictions, "CPU_VALUES"): [1 << 20, 1],
        (predictions, "CPU_ROWS"): [64, 1, 2, 5],
    }
    with contextlib.ExitStack() as stack:
        for place, choices in sizes.items():
            stack.enter_context(patch.object(*place, chance.choice(choices)))
        if wrong := [n for n, window in enumerate(windows) if not fits(network, block, grid, window)]:
            with pytest.raises(DuelError, match=rf"^Window {wrong[0]} ") as error:
                duel.log_prob(windows)
            assert error.value.window == wrong[0]
            return
        scores = sorted(duel.stream(windows), key=lambda indexed: indexed[0])
    assert [n for n, _ in scores] == [*range(len(windows))]
    for window, (_, scored) in zip(windows, scores, strict=True):
        log_prob, steps, nats, greedy, nfe = by_the_textbook(network, duel.rule, block, grid, window)
        assert (scored.reveal_steps, scored.nfe, scored.is_greedy) == (steps, nfe, greedy)
        assert scored.token_logprobs == pytest.approx(nats, abs=1e-9, rel=0)
        assert scored.log_prob == pytest.approx(log_prob, abs=1e-9, rel=0)


def by_the_textbook(network, rule, block, grid, window):
    def logits_of(ids):
        logits = network.head(network.features(ids[None], None)[0])  # (L, V)
        return logits.roll(network.shift, 0)

    return textbook.score(
        logits_of,
        TOKENS,  # stands for what is masked, in a causal network too
        network.excluded,
        rule,
        block,
        window,
        grid,
        tie_when_all_mask=network.relative_positions,
        sees=network.last_block if network.attention == "block_causal" else None,
    )


# ---------------------------------------------------------------- windows

FRAMINGS = st.lists(st.integers(900, 909), max_size=3).map(tuple)


def check_independent(data):
    """Every id of a document is in exactly one row, in order, and in its target but where the convention gives it."""
    ids, length = range(data.draw(st.integers(0, 40))), data.draw(st.integers(0, 12))
    bos = data.draw(st.sampled_from(BOS))
    prefix, suffix = ((), ()) if bos in ("none", "first") else (data.draw(FRAMINGS), data.draw(FRAMINGS))
    if length <= len(prefix) + len(suffix):
        with pytest.raises(DuelError, match="leaves no position for text"):
            independent(ids, length, prefix, suffix, bos)
        return
    windows = independent(ids, length, prefix, suffix, bos)
    rows = [window.context + window.target + window.suffix for window in windows]
    assert all(0 < window.length == len(row) <= length for window, row in zip(windows, rows, strict=True))
    assert all(len(row) == length for row in rows[:-1])
    assert all(row == (*prefix, *row[len(prefix) : len(row) - len(suffix)], *suffix) for row in rows)
    assert [token for row in rows for token in row[len(prefix) : len(row) - len(suffix)]] == [*ids]
    for window, row in zip(windows, rows, strict=True):
        assert window.target == scored(row, len(prefix), len(suffix), bos)
        if bos in ("given", "none"):
            assert (window.context, window.suffix) == (prefix, suffix)


def scored(row, before, after, bos):
    """What of a framed row is scored, by a convention."""
    return {
        "given": row[before : len(row) - after],
        "none": row,
        "scored": row[: len(row) - after],
        "official": row[:-1],
        "first": row[1:],
    }[bos]


def check_row(data):
    """A row that is cut already is one window, of all of it or of what is inside its framing."""
    row = tuple(range(data.draw(st.integers(0, 12))))
    before = data.draw(st.integers(0, len(row)))
    after = data.draw(st.integers(0, len(row) - before))
    bos = data.draw(st.sampled_from(BOS))
    window = of_row(row, before, after, bos)
    kept = row[before : len(row) - after] if bos in ("none", "first") else row
    assert window.context + window.target + window.suffix == kept
    assert window.target == {"given": kept[1:], "official": kept[:-1], "first": kept[1:]}.get(bos, kept)


def check_conditional(data):
    """A continuation is scored whole, after as much of its context as there is place for."""
    context, target = range(data.draw(st.integers(0, 15))), range(100, 100 + data.draw(st.integers(0, 15)))
    framing, suffix, length = data.draw(FRAMINGS), data.draw(FRAMINGS), data.draw(st.integers(0, 20))
    room = length - len(framing) - len(suffix)
    if room < max(1, len(target)):
        with pytest.raises(DuelError, match="max_length"):
            conditional(context, target, length, framing, suffix)
        return
    window, cut = conditional(context, target, length, framing, suffix)
    assert (window.target, window.suffix, window.tail) == (tuple(target), suffix, 0)
    assert window.context == (*framing, *context[cut:])
    assert cut == max(0, len(context) + len(target) - room) and window.length <= length


def check_blocks(data):
    """Blocks cover a target once, in order, and begin on the grid; groups hold each window that has a target once."""
    origin, target = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    block, grid = data.draw(st.none() | st.integers(1, 25)), data.draw(st.sampled_from(["target", "row"]))
    found = blocks(origin, target, block, grid)
    columns = [column for start, width in found for column in range(start, start + width)]
    assert [column for column in columns if column >= origin] == [*range(origin, origin + target)]
    assert columns == sorted({*columns}) and all(width <= (block or target) for _, width in found)
    assert all(start + width > origin for start, width in found)
    if block:
        assert all((start - (origin if grid == "target" else 0)) % block == 0 for start, _ in found)
    sizes = data.draw(st.lists(st.tuples(*[st.integers(0, 4)] * 2), max_size=8))
    windows = [Window((0,) * context, (0,) * target) for context, target in sizes]
    same = data.draw(st.booleans())
    grouped = groups(windows, same)
    assert sorted(n for group in grouped for n in group) == [n for n, window in enumerate(windows) if window.target]
    lengths = [[windows[n].length for n in group] for group in grouped]
    assert [n for each in lengths for n in each] == sorted((n for each in lengths for n in each), reverse=True)
    assert not same or all(len({*each}) == 1 for each in lengths)


# ---------------------------------------------------------------- texts

PROSE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text("the of\n. ,é", max_size=60)


@functools.cache
def tokenizer():
    return denoisers.load_tokenizer({})


@functools.cache
def text_side(length, bos, scheme):
    """The text side of a toy network with a tokenizer that is real."""
    network = Toy(length=length)
    network.bos, network.mask_id = bos, tokenizer().mask_token_id
    return Text(tokenizer(), network, scheme, None)


def check_document(data):
    """Every token of a text is in one row, and all are scored but those that the convention gives."""
    length, scheme = data.draw(st.integers(3, 20)), data.draw(st.sampled_from(WINDOWS))
    bos = data.draw(st.sampled_from(BOS if scheme == "independent" else ["given", "none"]))
    text = data.draw(PROSE)
    side = text_side(length, bos, scheme)
    ids, windows = side.encode(text), side.windows(text, len(side.encode(text)))
    assert all(window.length <= length for window in windows)
    if bos in ("given", "none"):
        assert [token for window in windows for token in window.target] == ids
    else:
        rows = [window.context + window.target + window.suffix for window in windows]
        assert [token for row in rows for token in row[len(side.prefix) :]] == ids
        given = {"official": len(windows), "first": len(windows), "scored": 0}[bos]
        assert sum(len(window.target) for window in windows) == sum(map(len, rows)) - given


def check_pair(data):
    """A context and its continuation, encoded, are the text of both."""
    side = text_side(60, "given", "independent")
    context, continuation = data.draw(PROSE), data.draw(PROSE)
    before, after = side.encode_pair(context, continuation)
    assert tokenizer().decode(before + after) == context + continuation
    assert bool(after) == bool(continuation)


# ---------------------------------------------------------------- how many

CASES = {  # part: (cases of a plain run, cases of a long one)
    check_rule: (20, 150),
    check_arguments: (60, 500),
    check_unknown: (10, 80),
    check_sides: (20, 150),
    check_text: (30, 250),
    check_forms: (20, 150),
    check_batch: (150, 2500),
    check_independent: (10, 100),
    check_row: (5, 50),
    check_conditional: (5, 50),
    check_blocks: (5, 50),
    check_document: (10, 100),
    check_pair: (5, 50),
}
NAMES = {"argvalues": CASES, "ids": lambda part: part.__name__.removeprefix("check_")}


SAME_EVERY_TIME = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def import_module(name):
    """Import what a rule's text names, unless a module happens to be called so: running it is no case."""
    top = name.split(".")[0]
    there = top and (top in {*sys.modules, *sys.stdlib_module_names} or PathFinder.find_spec(top))
    if there and name != "test_laws":
        raise ModuleNotFoundError(name=name)
    return importlib.import_module(name)


def run(part, cases, number):
    """Run `cases` random cases of a part, the same ones whenever `number` is."""
    ran = itertools.count()

    @seed(number)
    @settings(SAME_EVERY_TIME, max_examples=cases)
    @given(st.data())
    def case(data):
        part(data)
        next(ran)

    with patch.object(rules, "importlib", types.SimpleNamespace(import_module=import_module)):
        case()
    count = next(ran)
    print(f"{part.__name__}: {count} cases")
    assert count >= cases


@pytest.mark.parametrize("part", **NAMES)
def test_random_cases(part):
    run(part, CASES[part][0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", **NAMES)
def test_many_random_cases(part):
    run(part, CASES[part][1], 1)


def test_that_there_are_many():
    few, many = (sum(cases) for cases in zip(*CASES.values(), strict=True))
    assert few >= 300 and many >= 2000
