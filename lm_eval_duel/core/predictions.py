"""Predictions: the distributions at masked positions, as the statistics that rules and scoring need.

From here on distributions are clean: log-softmax in float32 or better over the true vocabulary, with [MASK] and
padding columns at probability zero.

Shapes: R lanes, W block width, C masked positions, U rows of features that the LM head runs on, D features, V tokens,
E excluded columns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lm_eval_duel.errors import DuelError, NotFinite

CPU_VALUES, CPU_ROWS = 1 << 20, 64  # logits at once: as many as fit a CPU's cache, but enough rows for a fast matmul
CACHED_VALUES = 1 << 17  # logits at once: half of one CPU core's cache
GPU_VALUES = 1 << 26  # 256 MiB of float32
RUN = 64  # columns per run when looking for the largest: a CPU's argmax handles one value at a time, its amax sixteen


class Top(NamedTuple):
    """The most probable token of each distribution and its decision_margin."""

    token: torch.Tensor  # (U,)
    logit: torch.Tensor  # (U,)
    confidence: torch.Tensor  # (U,) log P1 - log(1 - P1)
    log_margin: torch.Tensor  # (U,) log P1 - log P2


class LaneLogits(NamedTuple):
    """The logits at all masked positions of some lanes. Positions known to be equal share a row."""

    lanes: slice
    row: torch.Tensor  # (c,) the row of logits of each masked position, in the order of masked.nonzero()
    logits: torch.Tensor  # (u, V)


class Predictions:
    """The distributions at the masked positions of `lanes`, as the statistics that rules and scoring need.

    Each statistic is (R, W), NaN (or -1 for ids) where nothing is masked. The head runs in chunks under a memory bound.
    A single chunk is kept; with several, each statistic beyond the top tokens takes another pass. Name the tokens whose
    probability you will need first (`expect`): they are read in the same pass.
    """

    def __init__(
        self,
        masked: torch.Tensor,
        all_mask: torch.Tensor,
        features: torch.Tensor,
        position: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        excluded: torch.Tensor,
        columns: torch.Tensor | None = None,
        masked_at: tuple[torch.Tensor, ...] | None = None,
    ):
        self.masked = masked  # (R, W) bool
        self.all_mask = (
            all_mask  # (R,) bool: nothing in the row is visible, so all its positions share one distribution
        )
        self._features = features  # (U, D)
        self._cell = position  # (C,) the feature row of each masked position, in the order of masked.nonzero()
        self._head = head
        self._excluded = excluded  # (V,) bool: [MASK] and padding columns
        self._columns = excluded.nonzero()[:, 0] if columns is None else columns  # (E,)
        self._at = masked.nonzero().unbind(1) if masked_at is None else masked_at  # (C,) lane and position of each
        on_cpu = features.device.type == "cpu"
        self._chunk = max(CPU_ROWS, CPU_VALUES // len(excluded)) if on_cpu else max(1, GPU_VALUES // len(excluded))
        self._expected: torch.Tensor | None = None  # (C,) a token of each masked position
        self._expected_logit: torch.Tensor | None = None  # (C,)
        self._kept: torch.Tensor | None = None  # (U, V)
        self._whole: Predictions | None = None  # those that these are a part of

    # ------------------------------------------------------------ a part of them

    def among(self, masked: torch.Tensor) -> Predictions:
        """The same predictions at `masked` alone, (R, W), a part of the masked positions; nothing is computed again."""
        return self._part(masked, masked[self._at], self._at, self.all_mask)

    def of_lane(self, lane: int, width: int) -> Predictions:
        """The same predictions in one lane alone, cut to `width`; nothing is computed again."""
        keep = self._at[0] == lane  # (C,)
        at = (torch.zeros_like(self._at[0]), self._at[1])
        return self._part(self.masked[lane : lane + 1, :width], keep, at, self.all_mask[lane : lane + 1])

    def _part(
        self, masked: torch.Tensor, keep: torch.Tensor, at: tuple[torch.Tensor, ...], all_mask: torch.Tensor
    ) -> Predictions:
        """Predictions at `masked`, which are those of my masked positions to `keep` (C,), `at` (lane, position) of
        `masked`.
        """
        rows, position = self._cell[keep].unique(return_inverse=True)  # (u,), (c,)
        top = Top(*(values[rows] for values in self._top))
        part = copy.copy(self)
        for name in [name for name, value in vars(Predictions).items() if isinstance(value, cached_property)]:
            vars(part).pop(name, None)
        part.masked, part.all_mask, part._cell, part._at = (
            masked,
            all_mask,
            position,
            tuple(plane[keep] for plane in at),
        )
        part._features, part.__dict__["_top"] = self._features[rows], top
        part._kept = None if self._kept is None else self._kept[rows]
        part._expected = None if self._expected is None else self._expected[keep]
        part._expected_logit = None if self._expected_logit is None else self._expected_logit[keep]
        part._whole = self._whole or self
        return part

    @property
    def whole(self) -> Predictions:
        """The predictions at all positions that are masked, where a rule around a rule has narrowed them."""
        return self._whole or self

    # ------------------------------------------------------------ statistics

    @cached_property
    def confidence(self) -> torch.Tensor:
        """log P1 - log(1 - P1), P1 the top token's probability: monotone in P1 and never saturated, (R, W)."""
        return self._plane(self._top.confidence)

    @cached_property
    def log_margin(self) -> torch.Tensor:
        """log P1 - log P2, (R, W)."""
        return self._plane(self._top.log_margin)

    @cached_property
    def margin(self) -> torch.Tensor:
        """P1 - P2, without cancellation, float64 (R, W)."""
        p1 = self._top.confidence.double().sigmoid()  # (U,)
        return self._plane(p1 * -torch.expm1(-self._top.log_margin.double()))

    @cached_property
    def argmax(self) -> torch.Tensor:
        """The most probable token, the lowest id of equals, (R, W)."""
        return self._plane(self._top.token)

    @cached_property
    def entropy(self) -> torch.Tensor:
        """The entropy in nats, (R, W)."""

        def entropy(logits: torch.Tensor, top: Top) -> torch.Tensor:
            log_p = _log_p(logits, top)  # (u, V)
            return torch.where(log_p > -math.inf, -log_p * log_p.exp(), 0.0).sum(1)  # (u,)

        return self._plane(self._scan(entropy))

    @cached_property
    def log_sum(self) -> torch.Tensor:
        """The log of the sum of exp(logit) over the vocabulary, float64 (R, W)."""
        # log P1 = -softplus(-confidence)
        return self._plane(self._top.logit.double() + F.softplus(-self._top.confidence.double()))

    # ------------------------------------------------------------ features

    @property
    def features(self) -> torch.Tensor:
        """The input of the LM head at each masked position, in the order of `masked.nonzero()`, (C, D).

        For a network whose head is not split off these are its logits, with those of [MASK] and padding (C, V).

        Raises:
            DuelError: under classifier-free guidance, where a position has two inputs of the head.
        """
        return self._one_input()[self._cell]

    def apply(self, function: Callable[..., torch.Tensor], *planes: torch.Tensor) -> torch.Tensor:
        """The value of `function(features, *values)` at each masked position, (R, W); NaN where nothing is masked.

        `function` gets the features (U, D) and the values (U,) of each of `planes` (R, W), and returns (U,). It is
        called once for all positions that are known to be equal, so that these tie exactly. `planes` must be equal
        where features are, as statistics of the predictions are, and `function` must not modify its arguments.

        Raises:
            DuelError: under classifier-free guidance, where a position has two inputs of the head.
        """
        features = self._one_input()
        position = self._cell.new_empty(len(features))  # (U,) a masked position with each row of features
        position[self._cell] = torch.arange(len(self._cell), device=position.device)
        return self._plane(function(features, *(plane[self.masked][position] for plane in planes)))

    def _one_input(self) -> torch.Tensor:
        if self._features.dim() != 2:
            raise DuelError(
                "Under cfg_scale the logits of a position are made of two inputs of the LM head, with and without the "
                "context, so a rule cannot read its features. Leave cfg_scale out, or use another rule."
            )
        return self._features  # (U, D)

    # ------------------------------------------------------------ whole distributions

    def expect(self, tokens: torch.Tensor) -> None:
        """Name the tokens (R, W) at masked positions whose probabilities will be needed, before any statistic."""
        self._expected = tokens[self._at]

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log p of `tokens` (R, W) in nats, float64 (R, W); NaN where a token is -1 or nothing is masked."""
        wanted, ids = self.masked & (tokens >= 0), tokens[self._at]  # (R, W), (C,)
        self._top  # noqa: B018 - its pass over the logits reads the expected ones
        if self._expected_logit is not None and torch.equal(torch.where(ids < 0, ids, self._expected), ids):
            return self._at_hidden(self._expected_logit, self._cell, self.masked).masked_fill(~wanted, math.nan)
        among = (ids >= 0).nonzero()[:, 0]  # (c,)
        position = self._cell[among]  # (c,)
        parts = [logits.gather(1, token[:, None])[:, 0] for token, logits in self._logits_at(position, ids[among])]
        return self._at_hidden(torch.cat(parts), position, wanted)

    def _at_hidden(self, logit: torch.Tensor, position: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """log p at the `wanted` positions (R, W) from logits (c,) at the feature rows `position` (c,), float64 (R,
        W).
        """
        top = self._top
        # log P1 = -softplus(-confidence), exact for P1 close to 1 too
        values = logit.double() - top.logit[position].double() - F.softplus(-top.confidence[position].double())
        plane = torch.full(self.masked.shape, math.nan, dtype=torch.float64, device=values.device)
        return plane.masked_scatter(wanted, values)

    def draw(self, u: torch.Tensor) -> torch.Tensor:
        """The smallest id whose cumulative probability exceeds `u` (R, W) times the last one; -1 where u is NaN."""
        wanted = self.masked & ~u.isnan()  # (R, W)
        level_of = u[self._at]  # (C,)
        among = (~level_of.isnan()).nonzero()[:, 0]  # (c,)
        drawn = []
        for level, logits in self._logits_at(self._cell[among], level_of[among]):
            cumulative = logits.double().softmax(1).cumsum(1)  # (c, V)
            total = cumulative[:, -1:].contiguous()  # (c, 1)
            above = torch.searchsorted(cumulative, level[:, None] * total, right=True)  # (c, 1)
            last = torch.searchsorted(cumulative, total)  # (c, 1) the product may round up to the total
            drawn.append(above.minimum(last)[:, 0])
        return torch.full_like(self.masked, -1, dtype=torch.int64).masked_scatter(wanted, torch.cat(drawn))

    def dense(self) -> torch.Tensor:
        """All log-probabilities (C, V), in the order of `masked.nonzero()`."""
        return self._scan(_log_p)[self._cell]

    def by_lanes(self) -> Iterator[LaneLogits]:
        """The logits of all lanes, some lanes at a time, so that the positions of a lane can be compared exactly.

        A quarter of the usual chunk, since the caller will need several float64 planes as large as the logits.
        """
        counts = self.masked.sum(1)  # (R,)
        lanes = max(1, self._chunk // 4 // max(1, int(counts.max())))
        positions = self._cell.split([int(part.sum()) for part in counts.split(lanes)])
        for first, position in zip(range(0, len(counts), lanes), positions, strict=True):
            rows, row = position.unique(return_inverse=True)  # (u,), (c,)
            logits = self._clean(self._features[rows]) if self._kept is None else self._kept[rows]
            yield LaneLogits(slice(first, first + lanes), row, logits)

    # ------------------------------------------------------------ the head

    @cached_property
    def _top(self) -> Top:
        self._scan()
        return self.__dict__["_top"]

    def _scan(self, statistic: Callable[[torch.Tensor, Top], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One pass over the logits: top tokens, expected tokens, and `statistic(logits, top)` of each row, (U, ...)."""
        tops, values = [], []
        borders = self._borders() if self._expected is not None and self._expected_logit is None else None
        for n, (begin, logits) in enumerate(self._chunks()):
            top = top_of(logits)
            tops.append(top)
            if statistic is not None:
                values.append(statistic(logits, top))
            if borders is not None:
                positions = borders[n]  # (c,) masked positions whose feature rows are in this chunk
                expected = logits[self._cell[positions] - begin, self._expected[positions]]  # (c,)
                if self._expected_logit is None:
                    self._expected_logit = expected.new_empty(len(self._cell))
                self._expected_logit[positions] = expected
        if "_top" not in self.__dict__:
            self.__dict__["_top"] = top = Top(*(torch.cat(part) for part in zip(*tops, strict=True)))
            finite = top.logit.isfinite() & ~top.confidence.isnan()  # (U,)
            if not finite.all():
                position = (self._cell == (~finite).nonzero()[0]).nonzero()[0]
                raise NotFinite(
                    "The weights are broken or the dtype is too narrow (float16 overflows; try dtype=float32): "
                    "the network returned NaN or infinite logits.",
                    lane=int(self.masked.nonzero()[position, 0]),
                )
        return torch.cat(values) if values else None

    def _borders(self) -> list[torch.Tensor]:
        """The masked positions of each chunk of feature rows."""
        if len(self._features) <= self._chunk:
            return [torch.arange(len(self._cell), device=self._cell.device)]
        ascending, order = self._cell.sort()  # (C,)
        starts = torch.arange(self._chunk, len(self._features), self._chunk, device=order.device)
        return list(order.tensor_split(torch.searchsorted(ascending, starts).cpu()))

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The logits of all U feature rows, chunk by chunk, with each chunk's first row; a single chunk is kept."""
        count = len(self._features)
        if self._kept is not None:
            yield 0, self._kept
            return
        for begin in range(0, count, self._chunk):
            logits = self._clean(self._features[begin : begin + self._chunk])
            if count <= self._chunk:
                self._kept = logits
            yield begin, logits

    def _logits_at(self, position: torch.Tensor, extra: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(values of `extra`, logits) at the feature rows `position` (c,), in chunks; at least one."""
        for begin in range(0, max(1, len(position)), self._chunk):
            part = slice(begin, begin + self._chunk)
            at = position[part]
            yield extra[part], self._kept[at] if self._kept is not None else self._clean(self._features[at])

    @torch.inference_mode()
    def _clean(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (u, V) in float32 or better, -inf at excluded columns."""
        logits = self._head(features)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        elif logits.data_ptr() == features.data_ptr():  # the features are the logits: the head is not split off
            logits = logits.clone()
        return logits.index_fill_(1, self._columns, -math.inf)

    def _plane(self, values: torch.Tensor) -> torch.Tensor:
        """(U,) per feature row -> (R, W) per position."""
        fill = math.nan if values.is_floating_point() else -1
        plane = torch.full(self.masked.shape, fill, dtype=values.dtype, device=values.device)
        return plane.masked_scatter(self.masked, values[self._cell])


@torch.inference_mode()
def top_of(logits: torch.Tensor) -> Top:
    """The top tokens of logits (u, V), which are modified in place and restored."""
    token, first, second = two_largest(logits)  # (u, 1), (u,), (u,)
    logits.scatter_(1, token, -math.inf)
    log_sum = _log_sum(logits, second)  # (u,)
    logits.scatter_(1, token, first[:, None])
    others = torch.where(second == -math.inf, second, second + log_sum)
    return Top(token[:, 0], first, first - others, first - second)


def _log_sum(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """log sum exp(logit - largest) of each row of logits (u, V), given the `largest` (u,) of each, (u,)."""
    if logits.device.type != "cpu":
        return -F.log_softmax(logits, 1).amax(1)  # one fused kernel; its largest entry is minus the log of the sum
    from_largest = largest.clamp(min=torch.finfo(logits.dtype).min)[:, None]  # (u, 1) -inf if there is no other token
    rows = max(1, CACHED_VALUES // logits.shape[1])  # several times faster than logsumexp
    parts = zip(logits.split(rows), from_largest.split(rows), strict=True)
    return torch.cat([(part - top).exp_().sum(1) for part, top in parts]).log()


def two_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The column of the largest logit of each row, the first of equals (u, 1), and the two largest values (u,).

    Takes the largest value of each run of columns, then searches the best run only: one pass over the logits.
    """
    width = logits.shape[1] // RUN * RUN  # columns in whole runs
    rest = torch.arange(width, logits.shape[1], device=logits.device).expand(len(logits), -1)
    near, others = rest, logits.new_full((len(logits), 1), -math.inf)  # columns near the largest; other runs' largest
    if width:
        runs = logits[:, :width].unflatten(1, (-1, RUN)).amax(2)  # (u, G)
        best = runs.argmax(1, keepdim=True)  # (u, 1)
        near = torch.cat([best * RUN + torch.arange(RUN, device=logits.device), rest], 1)  # (u, RUN + ...)
        others = runs.scatter_(1, best, -math.inf)
    values = logits.gather(1, near)
    at = values.argmax(1, keepdim=True)  # (u, 1)
    token, first = near.gather(1, at), values.gather(1, at)[:, 0]
    second = values.scatter(1, at, -math.inf).amax(1).maximum(others.amax(1))
    return token, first, second


def _log_p(logits: torch.Tensor, top: Top) -> torch.Tensor:
    """Log-probabilities (u, V), exact near probability 1 too: log P1 = -softplus(-confidence)."""
    return logits - top.logit[:, None] - F.softplus(-top.confidence[:, None])
