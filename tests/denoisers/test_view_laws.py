"""Caches, guidance, excluded ids and causal prefixes on toys: the laws of the design, and their logits written out."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
from attends import Attends, reference
from close import check, close_nats, exact
from laws import slow_but
from textbook import score
from toys import BlockCausal, CausalPrefix, Rotary, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core import block_causal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import excluding, warped
from lm_eval_duel.denoisers.wrappers import Guided

WINDOWS = [
    Window((), (0, 1, 2, 0, 1, 0, 2)),
    Window((2,), (1, 1, 2, 0, 1)),
    Window((1, 2, 0), (2, 1), (1, 0)),
    Window((1, 2), (2, 1, 0, 0, 0, 1), (2,)),
    Window((), (0, 1, 2, 0, 1, 0, 2), (0,)),
    Window((2,), (0, 1, 2, 0), tail=3),
    Window((), (1, 1), (0, 2), tail=2),
    Window((0,), (1, 1), (0, 2), tail=2),
]
BLOCKWISE = [
    Window((1,), (2, 0, 1, 1, 2)),
    Window((0, 2, 1, 1), (1,)),
    Window((0, 2), (0, 0, 1), (2,)),
    Window((2, 2, 1, 0, 1), (2, 1, 0, 0, 1, 1, 2)),
    Window((0,), (1, 2), tail=3),
]
SHAPES = [(2, "target"), (3, "row"), (None, "target")]  # of other sizes: test_fuzz.py
ALONE = [(3, "row"), (None, "target"), (2, "auto")]  # windows are scored alone, too; test_company.py has more of it
RULES = ["greedy:k=1", "margin:k=2", "threshold:mu=0.45", "klass:mu=0.4:nu=0.3"]


class Subject(NamedTuple):
    """A network, and the logits (L, V) of `ids` by definition, for `window, block, grid`; none: samplers alone."""

    network: Any
    logits: Any = None

    @property
    def seeded(self):
        """The first token of a block is revealed alone."""
        return bool(self.network.shift) or self.network.seeds_blocks

    @property
    def shapes(self):
        return SHAPES if not self.network.block else [(2, "auto")]

    def windows(self, block, grid):
        """The windows that have a value; other tokens for those that a network excludes."""
        for window in BLOCKWISE if self.network.block else WINDOWS:
            if self.seeded and not window.context:
                continue
            if window.tail and not self._ends_on_a_border(window, block, grid):
                continue
            yield Window(
                self._of_the_vocabulary(window.context),
                self._of_the_vocabulary(window.target),
                self._of_the_vocabulary(window.suffix),
                window.tail,
            )

    def _ends_on_a_border(self, window, block, grid):
        """Of blocks; there is none where the block is the whole target."""
        whole = len(window.target) + (len(window.context) if grid == "row" else 0)
        return block is not None and whole % block == 0

    def _of_the_vocabulary(self, ids):
        return tuple(3 if self.network.excluded[token] else token for token in ids)


def whole_row(toy):
    """The network's own logits."""

    def logits(ids):
        return toy.head(toy.features(ids[None], None)[0]).roll(toy.shift, 0)

    return lambda window, block, grid: logits


def cached(cache, **options):
    """A network under a cache, and the states that stand still written out."""
    toy = Attends(length=10, **options)
    return Subject(Cached(toy, cache), lambda *where: reference(toy, toy.network, cache, *where))


def guided(toy, scale):
    """unconditional + (1 + scale) (conditional - unconditional); nothing is given in the unconditional row."""

    def logits_of(window, block, grid):
        begin = len(window.context)
        end = window.length - len(window.suffix)

        def both(ids):
            bare = ids.clone()
            bare[:begin] = toy.mask_id
            bare[end:] = toy.mask_id
            conditional = toy.features(ids[None], None)[0]
            unconditional = toy.features(bare[None], None)[0]
            return unconditional + (1 + scale) * (conditional - unconditional)

        return both

    return Subject(Guided(toy, scale), logits_of)


def causal_prefix(first_token, last_block="fill"):
    """A causal prefix up to the block of the first mask, and bidirectional attention in it."""
    toy = CausalPrefix(first_token, length=14)
    toy.last_block = last_block

    def logits_of(window, block, grid):
        origin = len(window.context)

        def logits(ids):
            row = ids.tolist()
            first_mask = row.index(toy.mask_id, origin)
            block_start = origin + (first_mask - origin) // 2 * 2
            return toy.logits(row, block_start)

        return logits

    return Subject(toy, logits_of)


def without_one(subject):
    """Without token 1, by the excluded columns of the network."""
    return subject._replace(network=excluding(subject.network, [1]))


SUBJECTS = {
    "prefix": cached("prefix"),
    "dual": cached("dual"),
    "shifted": Subject(toy := Attends(length=10, shift=1), whole_row(toy)),
    "shifted, prefix": cached("prefix", shift=1),
    "shifted, dual": cached("dual", shift=1),
    "guided": guided(Toy(length=10), 2.0),
    "guided less": guided(Toy(length=10, honours_padding=False), -0.5),
    "guided, all-mask starts tie": guided(Rotary(length=10), 0.8),
    "causal prefix": causal_prefix("causal"),
    "causal prefix, cut": causal_prefix("causal", "cut"),
    "causal prefix, own first token": causal_prefix("block"),
    "excluding": without_one(Subject(toy := Toy(tokens=4, length=10), whole_row(toy))),
    "excluding, dual": without_one(cached("dual", tokens=4)),
    "excluding, guided": without_one(guided(Toy(tokens=4, length=10), 0.5)),
    "excluding, block-causal": without_one(Subject(BlockCausal(tokens=4, length=10))),
    "excluding, top two": Subject(warped(excluding(Toy(tokens=4, length=10), [1]), 0.7, 2)),
}
EACH = [(name, rule) for n, name in enumerate(SUBJECTS) for rule in RULES[n % 2 :: 2]]
FAST = [EACH[2 * n + n // 2 % 2] for n in range(len(SUBJECTS))]
LIKE_OTHERS = ("shifted, prefix", "guided", "excluding, dual", "excluding, guided")
BY_SUMS = (*LIKE_OTHERS, "guided less", "causal prefix, cut", "excluding, block-causal", "excluding, top two")
SUMMED = [case for case in FAST if case[0] in BY_SUMS]  # the textbook loop is compared under the others
COMPARED = [(name, rule) for name, rule in EACH if SUBJECTS[name].logits]


def duel_of(name, rule, block, grid, **more):
    rule = f"{rule}:seed_first=true" if SUBJECTS[name].network.shift else rule
    return Duel(SUBJECTS[name].network, rule, block, grid, **more)


@pytest.mark.parametrize(("name", "rule"), slow_but(COMPARED, [case for case in FAST if case[0] not in LIKE_OTHERS]))
def test_lanes_equal_the_textbook_loop(name, rule, monkeypatch):
    """Together, alone, without padding, and clean rows in pieces."""
    subject = SUBJECTS[name]
    close = close_nats if "tie" in name else exact
    network = subject.network
    parsed = rules.parse(rule)
    parsed = rules.SeedFirst(parsed) if subject.seeded else parsed
    for block, grid in subject.shapes:
        windows = list(subject.windows(block, grid))
        by_the_textbook = []
        for window in windows:
            expected = score(
                subject.logits(window, block, grid),
                network.mask_id,
                network.excluded,
                parsed,
                block,
                window,
                "target" if grid == "auto" else grid,
                tie_when_all_mask=network.relative_positions,
                sees=network.last_block if network.block else None,
            )
            by_the_textbook.append(expected)

        calls = [(256, None)]
        if (block, grid) in ALONE:
            calls.append((3, 1))
        if network.block:
            calls.append((4, None))
        for pieces, batch_size in calls:
            monkeypatch.setattr(block_causal, "STRETCH", pieces)
            monkeypatch.setattr(block_causal, "CLEAN", pieces)
            duel = duel_of(name, rule, block, grid, batch_size=batch_size)
            for scored, expected in zip(duel.log_prob(windows), by_the_textbook, strict=True):
                check(scored, expected, close)


class Enumerated(NamedTuple):
    """A case whose texts are all `length` long."""

    block: int | None
    grid: str
    length: int
    context: tuple = ()
    suffix: tuple = ()
    tail: int = 0


ANY_SHAPE = [
    Enumerated(2, "target", 4),
    Enumerated(3, "row", 3, context=(0,), suffix=(2, 0)),
    Enumerated(None, "target", 3, context=(2, 0), suffix=(2,)),
    Enumerated(2, "target", 2, context=(0, 2), suffix=(2,), tail=2),
]
BY_BLOCKS = [  # of two
    Enumerated(2, "auto", 4),
    Enumerated(2, "auto", 3, context=(0, 2), suffix=(2,)),
    Enumerated(2, "auto", 2, context=(0, 2), tail=2),
]


@pytest.mark.parametrize(("name", "rule"), slow_but(EACH, SUMMED))
def test_sums_to_one_and_samples_are_scored_as_drawn(name, rule):
    """Laws 1 and 2, with and without context, suffix and tail."""
    subject = SUBJECTS[name]
    network = subject.network
    within = 1e-6 if "tie" in name else 1e-9
    tokens = (~network.excluded).nonzero()[:, 0].tolist()
    for case in BY_BLOCKS if network.block else ANY_SHAPE:
        if subject.seeded and not case.context:
            continue
        duel = duel_of(name, rule, case.block, case.grid)

        texts = itertools.product(tokens, repeat=case.length)
        scores = duel.log_prob([Window(case.context, text, case.suffix, case.tail) for text in texts])
        total = math.fsum(math.exp(score.log_prob) for score in scores)
        assert total == pytest.approx(1, abs=within)

        contexts = [case.context] * 3
        if not network.block and not case.tail:
            contexts += [(2,), (0, 2)]
        suffixes = [case.suffix] * len(contexts)
        drawn = duel.sample(contexts, case.length, seed=3, suffixes=suffixes, tail=case.tail)
        as_drawn = []
        for context, sample in zip(contexts, drawn, strict=True):
            as_drawn.append(Window(context, sample.tokens, case.suffix, case.tail))
        for sample, scored in zip(drawn, duel.log_prob(as_drawn), strict=True):
            assert scored.reveal_steps == sample.reveal_steps
            assert scored.nfe == sample.nfe
            assert scored.is_greedy == sample.is_greedy
            assert scored.token_logprobs == pytest.approx(sample.token_logprobs, abs=within)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_is_another_distribution(cache):
    plain = Duel(Attends(length=10), "greedy", 3).log_prob(WINDOWS[:5])
    cached_scores = Duel(SUBJECTS[cache].network, "greedy", 3).log_prob(WINDOWS[:5])

    differences = [abs(one.log_prob - two.log_prob) for one, two in zip(plain, cached_scores, strict=True)]
    assert max(differences) > 1e-3
