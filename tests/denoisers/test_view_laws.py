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
        other = lambda ids: tuple(3 if self.network.excluded[token] else token for token in ids)  # noqa: E731
        for window in BLOCKWISE if self.network.block else WINDOWS:
            whole = len(window.target) + (len(window.context) if grid == "row" else 0)
            if len(window.context) >= self.seeded and not (window.tail and whole % (block or whole + 1)):
                yield Window(other(window.context), other(window.target), other(window.suffix), window.tail)


def whole_row(toy):
    """The network's own logits."""
    return lambda window, block, grid: lambda ids: toy.head(toy.features(ids[None], None)[0]).roll(toy.shift, 0)


def cached(cache, **options):
    toy = Attends(length=10, **options)
    return Subject(Cached(toy, cache), lambda *where: reference(toy, toy.network, cache, *where))


def guided(toy, scale):
    """unconditional + (1 + scale) (conditional - unconditional); nothing is given in the unconditional row."""

    def logits_of(window, block, grid):
        begin, end = len(window.context), window.length - len(window.suffix)

        def both(ids):
            bare = ids.clone()
            bare[:begin] = bare[end:] = toy.mask_id
            conditional, unconditional = (toy.features(row[None], None)[0] for row in (ids, bare))
            return unconditional + (1 + scale) * (conditional - unconditional)

        return both

    return Subject(Guided(toy, scale), logits_of)


def causal_prefix(first_token, last_block="fill"):
    toy = CausalPrefix(first_token, length=14)
    toy.last_block = last_block

    def logits_of(window, block, grid):
        origin = len(window.context)
        begin = lambda ids: origin + (ids.index(toy.mask_id, origin) - origin) // 2 * 2  # noqa: E731
        return lambda ids: toy.logits(ids.tolist(), begin(ids.tolist()))

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
        wanted = [
            score(
                subject.logits(window, block, grid),
                *(network.mask_id, network.excluded, parsed, block, window, grid.replace("auto", "target")),
                tie_when_all_mask=network.relative_positions,
                sees=network.last_block if network.block else None,
            )
            for window in windows
        ]
        calls = [(256, None)]
        if (block, grid) in ALONE:
            calls.append((3, 1))
        if network.block:
            calls.append((4, None))
        for pieces, batch_size in calls:
            monkeypatch.setattr(block_causal, "STRETCH", pieces)
            monkeypatch.setattr(block_causal, "CLEAN", pieces)
            duel = duel_of(name, rule, block, grid, batch_size=batch_size)
            for scored, expected in zip(duel.log_prob(windows), wanted, strict=True):
                check(scored, expected, close)


@pytest.mark.parametrize(("name", "rule"), slow_but(EACH, SUMMED))
def test_sums_to_one_and_samples_are_scored_as_drawn(name, rule):
    subject = SUBJECTS[name]
    network = subject.network
    within = 1e-6 if "tie" in name else 1e-9
    cases = [(2, "target", 4, {}), (3, "row", 3, {"context": (0,), "suffix": (2, 0)})]
    cases += [(None, "target", 3, {"context": (2, 0), "suffix": (2,)})]
    cases += [(2, "target", 2, {"context": (0, 2), "suffix": (2,), "tail": 2})]
    if network.block:
        cases = [(2, "auto", 4, {}), (2, "auto", 3, {"context": (0, 2), "suffix": (2,)})]
        cases += [(2, "auto", 2, {"context": (0, 2), "tail": 2})]
    tokens = (~network.excluded).nonzero()[:, 0].tolist()
    for block, grid, length, more in cases:
        if len(more.get("context", ())) < subject.seeded:
            continue
        duel = duel_of(name, rule, block, grid)
        rest = {"context": (), "suffix": (), "tail": 0, **more}
        scored = duel.log_prob([Window(target=text, **rest) for text in itertools.product(tokens, repeat=length)])
        assert math.fsum(math.exp(each.log_prob) for each in scored) == pytest.approx(1, abs=within)
        contexts = [rest.pop("context")] * 3 + [(2,), (0, 2)] * (not network.block and not rest["tail"])
        drawn = duel.sample(contexts, length, seed=3, suffixes=[rest["suffix"]] * len(contexts), tail=rest["tail"])
        windows = [Window(context, each.tokens, **rest) for context, each in zip(contexts, drawn, strict=True)]
        for one, other in zip(drawn, duel.log_prob(windows), strict=True):
            assert (one.reveal_steps, one.nfe, one.is_greedy) == (other.reveal_steps, other.nfe, other.is_greedy)
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=within)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_is_another_distribution(cache):
    networks = Attends(length=10), SUBJECTS[cache].network
    plain, other = (Duel(network, "greedy", 3).log_prob(WINDOWS[:5]) for network in networks)
    assert max(abs(one.log_prob - two.log_prob) for one, two in zip(plain, other, strict=True)) > 1e-3
