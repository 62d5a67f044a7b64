"""Predictions: the distributions at hidden cells, as the statistics that rules and scoring ask for.

Past this room distributions are clean: log-softmax in float32 or better over the true vocabulary, with [MASK] and
padding columns at probability zero.

Shapes: R lanes, W block width, C hidden cells, U cells the head is run at, D features, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lm_eval_duel.errors import DuelError, NotFinite

HEAD_VALUES = 1 << 26  # logits held at once: 256 MiB of float32


class Predictions:
    """The distributions at the hidden cells of `lanes`, as the statistics that rules and scoring ask for.

    Each statistic is (R, W), NaN (or -1 for ids) where nothing is hidden. The head runs in chunks of at most
    `HEAD_VALUES` logits; when one chunk holds them all it is kept, else it is run again at the cells asked for.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        blank: torch.Tensor,
        features: torch.Tensor,
        cell: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        excluded: torch.Tensor,
    ):
        self.hidden = hidden  # (R, W) bool
        self.blank = blank  # (R,) bool: the row shows nothing, so all its cells share one distribution
        self._features = features  # (U, D)
        self._cell = cell  # (C,) the feature row of each hidden cell, in the order of hidden.nonzero()
        self._head = head
        self._excluded = excluded  # (V,) bool: [MASK] and padding columns
        self._kept: torch.Tensor | None = None

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
        parts = []
        for at, logits in self._chunks():
            log_p = self._log_p(logits, at)  # (u, V)
            parts.append(torch.where(log_p > -math.inf, -log_p * log_p.exp(), 0.0).sum(1))  # (u,)
        return self._plane(torch.cat(parts))

    # ------------------------------------------------------------ whole distributions

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log p of `tokens` (R, W) in nats, float64 (R, W); NaN where a token is -1 or nothing is hidden."""
        wanted = self.hidden & (tokens >= 0)  # (R, W)
        cell = self._cell[wanted[self.hidden]]  # (c,)
        values = torch.cat(
            [
                logits.gather(1, ids[:, None])[:, 0].double() - self._top.logit[at].double()
                for at, ids, logits in self._logits_at(cell, tokens[wanted])
            ]
        )  # (c,) how far below the top token
        # log P1 = -softplus(-confidence), exact also where P1 is close to 1
        values = values - F.softplus(-self._top.confidence[cell].double())
        return torch.full(self.hidden.shape, math.nan, dtype=torch.float64, device=values.device).masked_scatter(
            wanted, values
        )

    def draw(self, u: torch.Tensor) -> torch.Tensor:
        """The smallest id whose cumulative probability exceeds `u` (R, W) times the last one; -1 where u is NaN."""
        wanted = self.hidden & ~u.isnan()  # (R, W)
        cell = self._cell[wanted[self.hidden]]  # (c,)
        drawn = []
        for _, level, logits in self._logits_at(cell, u[wanted]):
            cumulative = logits.double().softmax(1).cumsum(1)  # (c, V)
            total = cumulative[:, -1:].contiguous()  # (c, 1)
            above = torch.searchsorted(cumulative, level[:, None] * total, right=True)  # (c, 1)
            last = torch.searchsorted(cumulative, total)  # (c, 1) the product may round up to the total
            drawn.append(above.minimum(last)[:, 0])
        return torch.full_like(self.hidden, -1, dtype=torch.int64).masked_scatter(wanted, torch.cat(drawn))

    def dense(self) -> torch.Tensor:
        """All log-probabilities (C, V), in the order of `hidden.nonzero()`."""
        return torch.cat([self._log_p(logits, at) for at, logits in self._chunks()])[self._cell]

    # ------------------------------------------------------------ the head

    class _Top(NamedTuple):
        token: torch.Tensor  # (U,)
        logit: torch.Tensor  # (U,)
        confidence: torch.Tensor  # (U,)
        log_margin: torch.Tensor  # (U,)

    @cached_property
    def _top(self) -> _Top:
        parts = []
        for at, logits in self._chunks():
            token = logits.argmax(1, keepdim=True)  # (u, 1) the first of equals
            first = logits.gather(1, token)  # (u, 1)
            self._require(first[:, 0].isfinite(), at.start)
            logits.scatter_(1, token, -math.inf)
            second = logits.amax(1)  # (u,)
            others = logits.logsumexp(1)  # (u,)
            logits.scatter_(1, token, first)
            parts.append((token[:, 0], first[:, 0], first[:, 0] - others, first[:, 0] - second))
        top = self._Top(*(torch.cat(part) for part in zip(*parts, strict=True)))
        self._require(~top.confidence.isnan(), 0)
        return top

    def _require(self, good: torch.Tensor, begin: int) -> None:
        """Raise NotFinite for the lane of the first feature row from `begin` on that is not good."""
        if not good.all():
            cell = (self._cell == begin + int((~good).nonzero()[0])).nonzero()[0]
            lane = int(self.hidden.nonzero()[cell, 0])
            raise NotFinite("The network returned NaN or infinite logits.", lane=lane)

    def _clean(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (u, V) in float32 or better, -inf at excluded columns."""
        logits = self._head(features)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.masked_fill(self._excluded, -math.inf)

    @property
    def _chunk(self) -> int:
        return max(1, HEAD_VALUES // len(self._excluded))

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The logits of all U feature rows, chunk by chunk; a single chunk is kept."""
        count = len(self._features)
        if self._kept is not None:
            yield slice(0, count), self._kept
            return
        for begin in range(0, count, self._chunk):
            logits = self._clean(self._features[begin : begin + self._chunk])
            if count <= self._chunk:
                self._kept = logits
            yield slice(begin, begin + self._chunk), logits

    def _logits_at(
        self, cell: torch.Tensor, extra: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(feature rows, values of `extra`, logits) at the feature rows `cell` (c,), in chunks; at least one."""
        for begin in range(0, max(1, len(cell)), self._chunk):
            part = slice(begin, begin + self._chunk)
            at = cell[part]
            logits = self._kept[at] if self._kept is not None else self._clean(self._features[at])
            yield at, extra[part], logits

    def _log_p(self, logits: torch.Tensor, at: slice) -> torch.Tensor:
        """Log-probabilities (u, V) of the feature rows `at`, exact near 1 too: log P1 = -softplus(-confidence)."""
        below = logits - self._top.logit[at, None]  # (u, V)
        return below - F.softplus(-self._top.confidence[at, None])

    def _plane(self, values: torch.Tensor) -> torch.Tensor:
        """(U,) per feature row -> (R, W) per cell."""
        fill = math.nan if values.is_floating_point() else -1
        plane = torch.full(self.hidden.shape, fill, dtype=values.dtype, device=values.device)
        return plane.masked_scatter(self.hidden, values[self._cell])


def excluded_columns(tokens: set[int], mask_id: int, vocab_size: int, path: str, device: torch.device) -> torch.Tensor:
    """The columns that are no token of the vocabulary, [MASK] among them, (V,) bool.

    Raises DuelError where the tokenizer has an id that the network of `path` does not predict.
    """
    known = sorted(tokens - {mask_id})
    if known[-1] >= vocab_size:
        raise DuelError(
            f"The tokenizer has ids up to {known[-1]} but {path} predicts {vocab_size}: "
            "they do not belong together; pass tokenizer=<the right one>."
        )
    excluded = torch.ones(vocab_size, dtype=torch.bool, device=device)  # (V,)
    excluded[known] = False
    return excluded
