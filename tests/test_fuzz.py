"""Random batches against the textbook loop, the same ones every time; windows, blocks and groups."""

import dataclasses
import functools
import itertools
import math
import random
from typing import get_args

import pytest
import textbook
import torch
from laws import slow_but
from toys import BlockCausal, Causal, Rotary, RotaryBlocks, Toy

from lm_eval_duel import rules
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import block_causal, predictions
from lm_eval_duel.core import lanes as queue
from lm_eval_duel.core.lanes import blocks, groups
from lm_eval_duel.core.windows import Window, independent
from lm_eval_duel.denoisers.load_options import BOS, LastBlock
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.options import Grid

# ---------------------------------------------------------------- batches against the textbook loop

LENGTH = 12
TOKENS = 4  # ids 0..3; the mask is 4
UNUSED = 1  # id 5, which is no token
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
    more = {}
    if issubclass(KINDS[kind], BlockCausal):
        more["block"] = 1 if kind == "causal, shifted" else block
    network = KINDS[kind](tokens=TOKENS, length=LENGTH, seed=block, unused=UNUSED, **more)
    network.honours_padding = "padding seen" not in kind
    network.shift = int("shifted" in kind)
    network.last_block = last_block
    network.noise = 1e-12
    if kind == "causal, shifted":
        network.attention = "causal"
        network.mask_id = None
    if head != "smooth":
        codes = torch.tensor(CODES[head], dtype=torch.float64)
        network.codes = torch.nn.functional.pad(codes, (0, 1 + UNUSED), value=9)
    return network


def fits(toy, block, grid, window):
    """Whether a window has a value under a spec."""
    end = len(window.context) + len(window.target)

    if window.target and len(window.context) < toy.shift:
        return False  # nothing predicts the first token

    if window.target and window.suffix:
        if toy.attention == "causal":
            return False
        if toy.attention == "block_causal" and window.length > -(-end // block) * block:
            return False  # the suffix reaches beyond the last block of the target, which sees no further

    if window.tail:
        if not block:
            return False
        before_tail = end if grid == "row" else len(window.target)
        return before_tail % block == 0
    return True


LEFT_OUT = {"dream"}  # see test_published.py


def some_rule(chance, head):
    """A rule with parameters that are right, and no number that a network may give for a border.

    Not nu=0 either: of two steps with equal predictions the divergence is 0 but for the last bit, which depends on
    where in a batch a position stands (a CPU takes several at a time, and those that are left one by one).
    """

    def below(*bounds):
        """A positive number up to each of the bounds."""
        return [chance.uniform(1e-9, bound) for bound in bounds]

    def probabilities(count, most=1):
        return [chance.random() * most for _ in range(count)]

    nats = [math.inf, *below(0.01, 0.3, 1, 4)]
    values = {
        "k": [1, 1, 1, 2, 2, 3, 4, 100, 2**62],
        "seed": [0, chance.getrandbits(63) - 2**62],
        "mu": [0.0, 1.0, 1 - 1e-14, *probabilities(5)],
        "nu": nats,
        "gamma": [0.0, *nats],
        "history": [1, 1, 2, 3],
        "kl": ["paper", "authors"],
        "floor": [0.0, *probabilities(3)],
        "low": [0.1, *probabilities(3, most=0.5)],
        "tau": [0.999, *probabilities(5)],
        "f": below(0.1, 1, 4),
        "n": [1, 1, 2, 3, 100],
        "variant": ["a", "b", "c"],
        "steps": [1, 2, 3, 5, 2**62],
        "strict": [True, False],
        "inclusive": [True, False],
        "across": [False],
        "eos": [None],
        "eos_id": [None],
        "eot_id": [None],
    }
    names = [name for name in rules.RULES if name not in LEFT_OUT]
    if head == "saturated":  # probabilities round to 1: the authors' code has ties that the rules do not have
        names = [*textbook.PAPER]
    name = chance.choice([*names, "klass"])

    parameters = {}
    for field in dataclasses.fields(rules.find(name)):
        parameters[field.name] = chance.choice(values[field.name])
    if name == "cumulative_quota":  # every step is a network call, also one that reveals nothing
        parameters["steps"] = chance.choice([1, 2, 3, 5, 40])
    if name == "falling_threshold":
        parameters["low"] = min(parameters["low"], parameters["mu"])
    if name == "threshold_bound":
        parameters["floor"] = min(parameters["floor"], parameters["mu"])
    return rules.build(name, parameters)


def some_window(chance, toy, block, grid, texts):
    """A window of one of the texts that fits."""
    while True:
        text = chance.choice(texts)
        lengths = [chance.randint(1, LENGTH) for _ in range(8)]
        target = chance.choice([0, LENGTH, *lengths])
        context = chance.choice([0, chance.randint(0, LENGTH - target)])
        room = LENGTH - target - context
        suffix = chance.choice([0, chance.randint(0, room)])
        tail = chance.choice([0, chance.randint(0, room)])

        end = context + target
        end_of_suffix = end + min(suffix, room - tail)
        window = Window(text[:context], text[context:end], text[end:end_of_suffix], tail)
        if fits(toy, block, grid, window):
            return window


SIZES = {  # whatever is cut into pieces, and other sizes of the pieces
    (queue, "GROUP"): [4096, 1, 2],
    (block_causal, "STRETCH"): [256, 1, 3, 7],
    (block_causal, "CLEAN"): [512, 1, 5],
    (predictions, "CPU_VALUES"): [1 << 20, 1],
    (predictions, "CPU_ROWS"): [64, 1, 2, 5],
}


@pytest.mark.parametrize("seed", slow_but(range(300), range(24)))
def test_a_random_batch_is_the_textbook_loop_window_by_window(seed, monkeypatch):
    """Law 5: orders and values are those of the textbook loop. Law 19: they are those of an audit's recomputation."""
    chance = random.Random(seed)
    head = chance.choice(["smooth", *CODES])
    network = toy(chance.choice([*KINDS]), chance.randint(1, 6), chance.choice(get_args(LastBlock)), head)
    rule = some_rule(chance, head)
    grid = chance.choice(get_args(Grid))
    block = chance.choice([None, *range(1, LENGTH + 2)])
    if network.attention == "causal":
        rule = rules.LeftToRight(getattr(rule, "k", 1))
        block = 1
    elif network.attention == "block_causal":
        block = network.block
        grid = "row"
    for (module, name), choices in SIZES.items():
        monkeypatch.setattr(module, name, chance.choice(choices))

    sizes = {
        "batch_size": chance.choice([None, 1, 2, 3]),
        "max_batch_size": chance.choice([None, 1, 2, 3]),
    }
    if network.attention == "causal" and chance.random() < 0.5:
        duel = Autoregressive(network, **sizes)
    else:
        duel = DuelEstimator(network, rule, block, grid=grid, traced=chance.random() < 0.5, **sizes)
    texts = [chance.choices(range(TOKENS), k=LENGTH) for _ in range(2)]
    windows = [some_window(chance, network, block, duel.grid, texts) for _ in range(chance.randint(1, 6))]

    for window, scored in zip(windows, duel.log_prob(windows), strict=True):
        log_prob, steps, nats, greedy, nfe = by_the_textbook(network, duel.rule, block, duel.grid, window)
        assert (scored.reveal_steps, scored.nfe, scored.is_greedy) == (steps, nfe, greedy), (rule, windows)
        assert scored.token_logprobs == pytest.approx(nats, abs=1e-9, rel=0)
        assert scored.log_prob == pytest.approx(log_prob, abs=1e-9, rel=0)

        if network.relative_positions and window.suffix and network.block:
            continue  # the audit counts a suffix as visible in blocks that do not see it
        audited = recompute(duel, window, scored)
        assert not CheckedWindow("", window, scored.log_prob, audited).problems
        assert not audited.ties
        assert audited.log_prob == pytest.approx(scored.log_prob, abs=1e-9, rel=0)


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


DOCUMENTS = (range(0), range(7), range(40))


@pytest.mark.parametrize("bos", BOS)
def test_every_id_of_a_document_is_in_one_row_and_scored_by_the_convention(bos):
    """Rows of any length, with any framing."""
    for ids, length, before, after in itertools.product(DOCUMENTS, (1, 2, 5, 12), (0, 2), (0, 1)):
        framed = bos not in ("none", "first")
        prefix = (900,) * before if framed else ()
        suffix = (901,) * after if framed else ()
        if length <= len(prefix) + len(suffix):
            with pytest.raises(DuelError, match="leaves no position for text"):
                independent(ids, length, prefix, suffix, bos)
            continue

        windows = independent(ids, length, prefix, suffix, bos)

        rows = [window.context + window.target + window.suffix for window in windows]
        written = []  # the ids of all rows without their frames
        for window, row in zip(windows, rows, strict=True):
            text = row[len(prefix) : len(row) - len(suffix)]
            written += text
            assert row == (*prefix, *text, *suffix)
            assert 0 < window.length == len(row) <= length
            assert window.target == scored(row, len(prefix), len(suffix), bos)
            if bos in ("given", "none"):
                assert window.context == prefix
                assert window.suffix == suffix
        assert written == [*ids]
        for row in rows[:-1]:
            assert len(row) == length


def scored(row, before, after, bos):
    """The part of a framed row that is scored by a convention."""
    return {
        "given": row[before : len(row) - after],
        "none": row,
        "scored": row[: len(row) - after],
        "official": row[:-1],
        "first": row[1:],
    }[bos]


def test_blocks_cover_a_target_once_in_order_and_begin_on_the_grid():
    for grid, block in itertools.product(get_args(Grid)[1:], (None, 1, 2, 3, 7, 25)):
        for origin, target in itertools.product((0, 1, 2, 5, 20), (0, 1, 6, 20)):
            zero = origin if grid == "target" else 0  # where the grid begins

            spans = blocks(origin, target, block, grid)

            columns = []
            for start, width in spans:
                assert width <= (block or target)
                assert start + width > origin
                if block:
                    assert (start - zero) % block == 0
                columns += range(start, start + width)
            assert columns == sorted({*columns})
            assert [column for column in columns if column >= origin] == [*range(origin, origin + target)]


@pytest.mark.parametrize("same", [True, False])
def test_groups_hold_each_window_that_has_a_target_once_the_longest_first(same):
    """`same`: all windows of a group have one length."""
    for count in range(9):
        windows = [Window((0,) * (n % 3), (0,) * (n * n % 5)) for n in range(count)]

        grouped = []
        for group in groups(windows, same):
            grouped += group
            if same:
                assert len({windows[n].length for n in group}) == 1

        assert sorted(grouped) == [n for n, window in enumerate(windows) if window.target]
        lengths = [windows[n].length for n in grouped]
        assert lengths == sorted(lengths, reverse=True)
