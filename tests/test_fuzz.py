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
    found.last_block = last_block
    found.noise = 1e-12
    if kind == "causal, shifted":
        found.attention = "causal"
        found.mask_id = None
    if head != "smooth":
        found.codes = torch.nn.functional.pad(torch.tensor(CODES[head], dtype=torch.float64), (0, 1 + UNUSED), value=9)
    return found


def fits(toy, block, grid, window):
    """Whether a window has a value under a spec."""
    end = len(window.context) + len(window.target)
    unseen = toy.attention == "causal" or (toy.attention == "block_causal" and window.length > -(-end // block) * block)
    return (
        not (window.target and len(window.context) < toy.shift)
        and not (window.target and window.suffix and unseen)
        and (not window.tail or (block and (end if grid == "row" else len(window.target)) % block == 0))
    )


LEFT_OUT = {"dream"}  # see test_published.py


def some_rule(chance, head):
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
        "floor": [0.0, *(chance.random() for _ in range(3))],
        "low": [0.1, *(chance.random() / 2 for _ in range(3))],
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
    # where probabilities round to 1, the authors' code has ties that the rules do not have; dream: test_published.py
    name = chance.choice(
        [*(textbook.PAPER if head == "saturated" else [name for name in rules.RULES if name not in LEFT_OUT]), "klass"]
    )
    parameters = {each.name: chance.choice(values[each.name]) for each in dataclasses.fields(rules.find(name))}
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
        target = chance.choice([0, LENGTH, *(chance.randint(1, LENGTH) for _ in range(8))])
        context = chance.choice([0, chance.randint(0, LENGTH - target)])
        room = LENGTH - target - context
        suffix, tail = (chance.choice([0, chance.randint(0, room)]) for _ in range(2))
        end = context + target
        window = Window(text[:context], text[context:end], text[end : end + min(suffix, room - tail)], tail)
        if fits(toy, block, grid, window):
            return window


@pytest.mark.parametrize("seed", slow_but(range(300), range(36)))
def test_a_random_batch_is_the_textbook_loop_window_by_window(seed, monkeypatch):
    chance = random.Random(seed)
    head = chance.choice(["smooth", *CODES])
    network = toy(chance.choice([*KINDS]), chance.randint(1, 6), chance.choice(get_args(LastBlock)), head)
    rule, grid, block = (
        some_rule(chance, head),
        chance.choice(get_args(Grid)),
        chance.choice([None, *range(1, LENGTH + 2)]),
    )
    if network.attention == "causal":
        rule = rules.LeftToRight(getattr(rule, "k", 1))
        block = 1
    elif network.attention == "block_causal":
        block = network.block
        grid = "row"
    sizes = {  # whatever is cut into pieces, in other pieces
        (queue, "GROUP"): [4096, 1, 2],
        (block_causal, "STRETCH"): [256, 1, 3, 7],
        (block_causal, "CLEAN"): [512, 1, 5],
        (predictions, "CPU_VALUES"): [1 << 20, 1],
        (predictions, "CPU_ROWS"): [64, 1, 2, 5],
    }
    for place, choices in sizes.items():
        monkeypatch.setattr(*place, chance.choice(choices))
    spec = {name: chance.choice([None, 1, 2, 3]) for name in ("batch_size", "max_batch_size")}
    if network.attention == "causal" and chance.random() < 0.5:
        duel = Autoregressive(network, **spec)
    else:
        duel = DuelEstimator(network, rule, block, grid=grid, traced=chance.random() < 0.5, **spec)
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
        assert not CheckedWindow("", window, scored.log_prob, audited).problems and not audited.ties
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


@pytest.mark.parametrize("bos", BOS)
def test_every_id_of_a_document_is_in_one_row_and_scored_by_the_convention(bos):
    """Rows of any length, with any framing."""
    for ids, length, before, after in itertools.product([range(0), range(7), range(40)], (1, 2, 5, 12), (0, 2), (0, 1)):
        prefix, suffix = ((), ()) if bos in ("none", "first") else ((900,) * before, (901,) * after)
        if length <= len(prefix) + len(suffix):
            with pytest.raises(DuelError, match="leaves no position for text"):
                independent(ids, length, prefix, suffix, bos)
            continue
        windows = independent(ids, length, prefix, suffix, bos)
        rows = [window.context + window.target + window.suffix for window in windows]
        texts = [row[len(prefix) : len(row) - len(suffix)] for row in rows]
        assert all(0 < window.length == len(row) <= length for window, row in zip(windows, rows, strict=True))
        assert all(len(row) == length for row in rows[:-1]) and [token for text in texts for token in text] == [*ids]
        for window, row, text in zip(windows, rows, texts, strict=True):
            assert row == (*prefix, *text, *suffix) and window.target == scored(row, len(prefix), len(suffix), bos)
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


def test_blocks_cover_a_target_once_in_order_and_begin_on_the_grid():
    for grid, block in itertools.product(get_args(Grid)[1:], (None, 1, 2, 3, 7, 25)):
        for origin, target in itertools.product((0, 1, 2, 5, 20), (0, 1, 6, 20)):
            found = blocks(origin, target, block, grid)
            columns = [column for start, width in found for column in range(start, start + width)]
            assert [column for column in columns if column >= origin] == [*range(origin, origin + target)]
            assert columns == sorted({*columns}) and all(width <= (block or target) for _, width in found)
            assert all(start + width > origin for start, width in found)
            assert not block or all((start - (origin if grid == "target" else 0)) % block == 0 for start, _ in found)


@pytest.mark.parametrize("same", [True, False])
def test_groups_hold_each_window_that_has_a_target_once_the_longest_first(same):
    for count in range(9):
        windows = [Window((0,) * (n % 3), (0,) * (n * n % 5)) for n in range(count)]
        lengths = [[windows[n].length for n in group] for group in groups(windows, same)]
        every = [n for group in groups(windows, same) for n in group]
        assert sorted(every) == [n for n, window in enumerate(windows) if window.target]
        assert [n for each in lengths for n in each] == sorted((n for each in lengths for n in each), reverse=True)
        assert not same or all(len({*each}) == 1 for each in lengths)
