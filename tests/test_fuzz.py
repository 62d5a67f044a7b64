"""Random cases: whole batches against the textbook loop, and windows. The same cases every time."""

import contextlib
import dataclasses
import functools
import itertools
import math
from typing import get_args
from unittest.mock import patch

import pytest
import textbook
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from toys import BlockCausal, Causal, Rotary, RotaryBlocks, Toy

from lm_eval_duel import rules
from lm_eval_duel.core import block_causal, predictions, queue
from lm_eval_duel.core.lanes import blocks
from lm_eval_duel.core.queue import groups
from lm_eval_duel.core.windows import Window, independent
from lm_eval_duel.denoisers.load_options import BOS, LastBlock
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.options import Grid

GRIDS = get_args(Grid)

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


ELSEWHERE = ("hierarchy", "dream")  # in tests/rules: a tie, a schedule


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
        (queue, "GROUP"): [4096, 1, 2],
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


# ---------------------------------------------------------------- how many


def run(part, cases, number):
    """Run `cases` random cases of a part, the same ones whenever `number` is."""
    ran = itertools.count()

    @seed(number)
    @settings(
        derandomize=True, database=None, deadline=None, max_examples=cases, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def case(data):
        part(data)
        next(ran)

    case()
    assert next(ran) >= cases


@pytest.mark.parametrize(("part", "cases"), [(check_batch, 25), (check_independent, 15), (check_blocks, 10)])
def test_random_cases(part, cases):
    run(part, cases, 0)


@pytest.mark.slow
def test_many_random_batches():
    run(check_batch, 250, 1)
