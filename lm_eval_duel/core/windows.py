"""Windows: the ids of a row, visible or scored. No text, no torch.

A row is laid out as

    | context | target      | tail        | suffix |
      visible   scored        [MASK]s       visible
                              never revealed
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from torch import Tensor

Ids: TypeAlias = "Sequence[int] | Tensor"  # token ids: a list, a tuple, or a tensor of one dimension


def as_ids(ids: Ids) -> tuple[int, ...]:
    """Token ids as a tuple of ints; raises DuelError for anything but whole numbers in one dimension."""
    shape = getattr(ids, "shape", None)
    if shape is not None and len(shape) != 1:
        raise DuelError(f"Token ids are a list, or a tensor of one dimension; got one of the shape {tuple(shape)}.")
    try:
        # with a shape it is a tensor or an array
        values = list(ids) if shape is None else ids.tolist()  # type: ignore[union-attr]
        if float in map(type, values):
            values = [_whole(token) for token in values]
        # `index` raises TypeError for a text and for a float, even for 5.0
        return tuple(map(operator.index, values))
    except (TypeError, ValueError):
        raise DuelError(f"Token ids are whole numbers in a list, a tuple or a tensor; got {ids!r:.80}.") from None


def _whole(token: Any) -> Any:
    """An int for a float such as 5.0, and anything else unchanged."""
    if isinstance(token, float) and token.is_integer():
        return int(token)
    return token


def _tail(positions: Any) -> int:
    """The number of [MASK] positions after a target; raises DuelError for anything but a whole number, at least 0."""
    try:
        count = operator.index(positions)
    except TypeError:
        count = None
    if count is None or count < 0:
        raise DuelError(f"A window's tail is a number of [MASK] positions, at least 0; got {positions!r:.80}.")
    return count


@dataclasses.dataclass(frozen=True, init=False)
class Window:
    """One row to score: log p(target | context, suffix).

    Args:
        context, suffix: Visible ids before and after the target.
        target: The ids to score.
        tail: [MASK] positions after the target, which are shown and never revealed. With a target that ends on a block
            border, the value is then the probability that a longer generation starts with the target.
        known: Indices of target positions that are visible from the first step and not scored: the value is
            log p(other positions | known ones). Their log-probability is 0 and their reveal step -1.

    Ids may be lists, tuples or tensors; they are stored as tuples.

    Raises:
        DuelError: If ids are not whole numbers, `tail` is negative, or `known` names no or all target positions.
    """

    context: tuple[int, ...]
    target: tuple[int, ...]
    suffix: tuple[int, ...] = ()
    tail: int = 0
    known: tuple[int, ...] = ()

    def __init__(
        self,
        context: Ids,
        target: Ids,
        suffix: Ids = (),
        tail: int = 0,
        known: Ids = (),
    ):
        target_ids = as_ids(target)
        indices = tuple(sorted(set(as_ids(known))))
        if indices:
            outside = indices[0] < 0 or indices[-1] >= len(target_ids)
            if outside or len(indices) == len(target_ids):
                raise DuelError(
                    f"known takes indices of target positions, 0 to {len(target_ids) - 1}, but not all of them; got "
                    f"{list(indices)}."
                )
        parts = {
            "context": as_ids(context),
            "target": target_ids,
            "suffix": as_ids(suffix),
            "tail": _tail(tail),
            "known": indices,
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def length(self) -> int:
        """The number of positions in the row."""
        return len(self.context) + len(self.target) + self.tail + len(self.suffix)

    @property
    def scored_tokens(self) -> int:
        """The number of target tokens that are scored: per token means per one of these."""
        return len(self.target) - len(self.known)

    @property
    def key(self) -> int:
        """A 63-bit hash of the ids, on which the random numbers of this window depend, besides a seed."""
        parts: tuple[Any, ...] = (self.context, self.target, self.suffix, self.tail)
        if self.known:  # left out if empty: bundled results were made with such keys
            parts = (*parts, self.known)
        text = repr(parts)
        digest = hashlib.sha256(text.encode()).digest()
        # one bit less than 8 bytes, so that it is positive in torch's int64
        return int.from_bytes(digest[:8], "big") >> 1


def target_parts(window: Window, spans: Iterable[tuple[int, int]]) -> list[slice]:
    """The target positions of each block, given as (first column, width)."""
    context = len(window.context)
    parts = []
    for start, width in spans:
        begin = start - context
        end = begin + width
        parts.append(slice(max(0, begin), end))  # a first block may begin inside the context
    return parts


def target_capacity(
    max_length: int,
    context: Sequence[int] = (),
    suffix: Sequence[int] = (),
) -> int:
    """The number of target positions that fit into a row with these special tokens."""
    special = len(context) + len(suffix)
    capacity = max_length - special
    if capacity < 1:
        raise DuelError(
            f"max_length={max_length} leaves no position for text after {special} special tokens; raise it."
        )
    return capacity


def framed(
    prefix: Sequence[int],
    ids: Sequence[int],
    suffix: Sequence[int],
    bos: str = "given",
) -> Window:
    """The window of the row prefix | ids | suffix. `bos` says which positions are scored (a dot is context).

        row          [B] a b c [S]
        given         .  a b c  .       special tokens are context (as with "none", which has none)
        scored       [B] a b c  .       the BOS is masked, too, and part of the target
        official     [B] a b c  .       the authors' code: every position but the last, which is context
        first             .  b c        no special tokens, and the first id is context: the authors' code for Llama3

    Without a suffix, "official" makes the last id of the text context, so that id is never scored.
    """
    row = (*prefix, *ids, *suffix)
    if bos == "first":
        return Window(tuple(ids[:1]), tuple(ids[1:]))
    if bos == "official":
        return Window((), row[:-1], row[-1:])
    if bos == "scored":
        return Window((), (*prefix, *ids), tuple(suffix))
    return Window(tuple(prefix), tuple(ids), tuple(suffix))


def from_row(ids: Sequence[int], before: int, after: int, bos: str) -> Window:
    """The window of a row as a data set holds it, with `before` and `after` special tokens (a dot is context).

    row          [B] a b c [E]          without special tokens  a b c d
    given         .  a b c [E]                                  . b c d     the first id is context
    official     [B] a b c  .                                   a b c .     the authors' code: the last id is context
    scored       [B] a b c [E]                                  a b c d
    none          a b c                                         a b c d     special tokens left out
    first         . b c                                         . b c d     the same, and the first id is context
    """
    row = tuple(ids)
    if bos == "given":
        return Window(row[:1], row[1:])
    if bos == "official":
        return Window((), row[:-1], row[-1:])
    if bos == "scored":
        return Window((), row)
    text = row[before : len(row) - after]
    if bos == "first":
        return Window(text[:1], text[1:])
    return Window((), text)


def independent(
    ids: Sequence[int],
    max_length: int,
    prefix: Sequence[int] = (),
    suffix: Sequence[int] = (),
    bos: str = "given",
) -> list[Window]:
    """A document as consecutive windows, each scored from scratch (the paper's way).

        ids          a b c d e f g h          max_length 5, prefix [C], suffix [S]
        rows         C a b c S | C d e f S | C g h S

    Every id is in exactly one target, except that `bos="official"` and `"first"` leave out one in each row. The last
    window may be shorter than the others. An empty document has no window.
    """
    capacity = target_capacity(max_length, prefix, suffix)
    windows = []
    for start in range(0, len(ids), capacity):
        window = framed(prefix, ids[start : start + capacity], suffix, bos)
        windows.append(window)
    return windows


def rolling(
    ids: Sequence[int],
    first: int,
    capacity: int,
    suffix: Sequence[int] = (),
) -> list[Window]:
    """A document as lm-eval cuts it: windows of `capacity` targets, each after the id before it.

        ids          a b c d e f g h          first P, capacity 3
        windows      P | a b c                context | target
                         c | d e f
                             e f | g h        the last window is filled up with context

    Every id is in exactly one target. `first` is the context of the first window.
    """
    windows = []
    for start in range(0, len(ids), capacity):
        end = min(start + capacity, len(ids))
        target = ids[start:end]
        context: Sequence[int] = [first]
        if start:
            # a full window has capacity + 1 positions, so a short last target has more context
            context = ids[end - capacity - 1 : start]
        windows.append(Window(tuple(context), tuple(target), tuple(suffix)))
    return windows


def infilled(
    context: Sequence[int],
    target: Sequence[int],
    after: Sequence[int],
    max_length: int,
    framing: Sequence[int] = (),
    suffix: Sequence[int] = (),
) -> tuple[Window, int]:
    """The window framing | context | target | after | suffix, cut to fit, and how many ids were cut.

    Ids are cut at the far ends, the beginning of `context` and the end of `after`. The two keep equally many ids,
    unless one of them needs less than half of the room. Raises DuelError if the target alone is too long: a scored
    token is never dropped.
    """
    capacity = target_capacity(max_length, framing, suffix)
    if len(target) > capacity:
        raise DuelError(
            f"A continuation of {len(target)} tokens does not fit a row of max_length={max_length} "
            f"({capacity} positions besides special tokens). Raise max_length if the network allows it, or shorten it."
        )
    room = capacity - len(target)
    left = min(len(context), max(room // 2, room - len(after)))
    right = min(len(after), room - left)
    visible_before = (*framing, *context[len(context) - left :])
    visible_after = (*after[:right], *suffix)
    window = Window(visible_before, tuple(target), visible_after)
    return window, len(context) - left + len(after) - right
