"""Predictions: the distributions at masked positions, as the statistics that rules and scoring need.

Distributions are clean: log-softmax in float32 or better over the true vocabulary, with [MASK] and padding columns at
probability zero. Whole distributions are large (1 GiB for 2,048 positions and 128,000 tokens), so they are made in
chunks, and read in few passes.

Shapes: R lanes, W block width (r and w in a part of them), C masked positions, c some of them, U rows of features that
the LM head runs on, u some of them, D features, V tokens, E excluded columns, S statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.logits import ON_DEMAND, Top, log_p1, top_of
from lm_eval_duel.core.network import LogitFilter
from lm_eval_duel.errors import DuelError, NotFinite

# Logits at once
CPU_VALUES = 1 << 20  # as many as fit a CPU's cache,
CPU_ROWS = 64  # but enough rows for a fast matmul
GPU_VALUES = 1 << 26  # 256 MiB of float32

NOISE = 1e-6  # relative, of float32: the number of rows in a call changes statistics by so much


class Predictions:
    """The distributions at the masked positions of some lanes, as the statistics that rules and scoring need.

    Each statistic is (R, W), NaN (or -1 for ids) where nothing is masked. Nothing is computed before it is asked for.
    Positions that are known to have equal distributions share a row of features, so U <= C. The head runs in chunks
    under a memory bound; a single chunk is kept. With several, one pass gives the top tokens and the probabilities of
    the `targets`, and entropies take another pass if they are not asked for first.

    Args:
        masked: (R, W) bool.
        all_mask: (R,) bool: one token is everywhere, [MASK], so all positions share one distribution.
        features: (U, D) the input of the LM head.
        row: (C,) the row of features of each masked position, in the order of `masked.nonzero()`.
        head: From features (u, D) to logits (u, V).
        excluded: (V,) bool: [MASK] and padding columns.
        targets: (R, W) tokens whose log-probs will be needed at masked positions. None: they are not known.
        columns: (E,) `excluded` as indices.
        masked_at: (C,) each: lane and position of each masked position.
        carried: (R, W, ...) each: what the network reads at the next step.
        filters: Functions of clean logits, applied in order.
        step: (U,) the step of each row of features, for filters that read it.
    """

    def __init__(
        self,
        masked: torch.Tensor,
        all_mask: torch.Tensor,
        features: torch.Tensor,
        row: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        excluded: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        columns: torch.Tensor | None = None,
        masked_at: tuple[torch.Tensor, ...] | None = None,
        carried: tuple[torch.Tensor, ...] = (),
        filters: Sequence[LogitFilter] = (),
        step: torch.Tensor | None = None,
    ):
        self.masked = masked
        self.all_mask = all_mask
        self.carried = carried
        self._features = features
        self._row = row
        self._head = head
        self._excluded = excluded
        self._columns = excluded.nonzero()[:, 0] if columns is None else columns  # (E,)
        if masked_at is None:
            masked_at = masked.nonzero().unbind(1)
        self._at = masked_at  # (C,) each: lane and position
        self._targets = None if targets is None else targets[self._at]  # (C,)
        self._filters = tuple(filters)
        self._step = step
        vocabulary = len(excluded)
        self._chunk = max(1, GPU_VALUES // vocabulary)  # rows of logits at once
        if features.device.type == "cpu":
            self._chunk = max(CPU_ROWS, CPU_VALUES // vocabulary)
        self._logits_kept: torch.Tensor | None = None  # (U, V) all logits, if they are a single chunk
        self._computed: dict[str, torch.Tensor] = {}  # the statistics of the passes so far, by name
        self._part_of: Predictions | None = None

    # ------------------------------------------------------------ parts

    def narrowed(self, masked: torch.Tensor) -> Predictions:
        """The same predictions at `masked` (R, W) alone, some of the masked positions; nothing is computed again."""
        return self._part(masked, masked[self._at], self._at, self.all_mask)

    def in_lane(self, lane: int, width: int) -> Predictions:
        """The same predictions in one lane alone, cut to `width`; nothing is computed again."""
        lane_of, position = self._at  # (C,) each
        only = slice(lane, lane + 1)
        at = (torch.zeros_like(lane_of), position)  # (C,) each, as if it were lane 0
        return self._part(self.masked[only, :width], lane_of == lane, at, self.all_mask[only])

    def with_lane_elsewhere(self, lane: int) -> Predictions:
        """The same predictions in `lane`; at the masked positions of all other lanes stand those of `lane`, in turn.

        All shapes are the same, so what is computed from `lane` alone is equal to the last bit.
        """
        in_lane = self._at[0] == lane  # (C,)
        rows = self._row[in_lane]  # (c,)
        turn = torch.arange(len(self._row), device=rows.device) % len(rows)  # (C,)
        row = torch.where(in_lane, self._row, rows[turn])
        others = self._from_rows(slice(None), row, self._at, self.masked, self.all_mask)
        for name in vars(self):
            if isinstance(getattr(Predictions, name, None), cached_property):
                getattr(others, name)  # computed now, so that a rule that reads it does the same operations as before
        return others

    def with_noise(self, seed: int) -> Predictions:
        """The same predictions with other float noise: each row of features and its statistics times nearly 1.

        Positions that are known to have equal distributions still have equal statistics.
        """
        noisy = self._from_rows(slice(None), self._row, self._at, self.masked, self.all_mask)
        number = torch.arange(len(self._features), device=self._row.device)  # (U,)
        factor = 1 + NOISE * (2 * uniform(number, seed) - 1)  # (U,)
        noisy._features = _scaled(self._features, factor)
        noisy._logits_kept = None  # made again from these features
        for name, values in noisy._computed.items():
            if values.is_floating_point():
                noisy._computed[name] = _scaled(values, factor)
        return noisy

    @property
    def unfiltered(self) -> Predictions:
        """The predictions at the same positions without filters.

        Float noise in the features changes them by float noise, which is not so where a filter truncates.
        """
        if not self._filters:
            return self
        inputs = (self.masked, self.all_mask, self._features, self._row, self._head, self._excluded)
        return Predictions(*inputs, columns=self._columns, masked_at=self._at)

    def compared(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """The statistics of one lane that rules and scores read, (S, W) float64.

        They are the log-odds, the margin, the log of the sum, and the log-probs of `tokens` (1, W), without filters:
        where distributions are truncated, by top-p say, float noise may move a token across the border, and every
        statistic with it.
        """
        alone = self.in_lane(lane, tokens.shape[1]).unfiltered
        log_prob = alone.log_prob(tokens)  # (1, W)
        planes = (alone.confidence, alone.log_margin, alone.log_sum, log_prob)
        return torch.stack([plane[0].double() for plane in planes])  # (S, W)

    def _part(
        self, masked: torch.Tensor, keep: torch.Tensor, at: tuple[torch.Tensor, ...], all_mask: torch.Tensor
    ) -> Predictions:
        """The predictions at some of the masked positions, those to `keep` (C,) bool.

        `masked` (r, w): these positions in the lanes of the part. `at` (C,) each: the lane and position of every masked
        position of the whole, as the part counts them.
        """
        rows, row = self._row[keep].unique(return_inverse=True)  # (u,), (c,)
        at = tuple(plane[keep] for plane in at)  # (c,) each
        part = self._from_rows(rows, row, at, masked, all_mask)
        if self._targets is not None:
            part._targets = self._targets[keep]
        if "target" in self._computed:
            part._computed["target"] = self._computed["target"][keep]
        part._part_of = self.whole
        return part

    def _from_rows(
        self,
        rows: torch.Tensor | slice,
        row: torch.Tensor,
        at: tuple[torch.Tensor, ...],
        masked: torch.Tensor,
        all_mask: torch.Tensor,
    ) -> Predictions:
        """Predictions from some `rows` (u,) of the features, without targets; what was computed of them is kept.

        The other arguments are those of `Predictions`; `row` (c,) counts within `rows`, and `at` is `masked_at`.
        """
        self._statistic("logit")  # the first pass over the logits, which this object and the new one then share
        selected = Predictions(
            masked,
            all_mask,
            self._features[rows],
            row,
            self._head,
            self._excluded,
            columns=self._columns,
            masked_at=at,
            filters=self._filters,
            step=None if self._step is None else self._step[rows],
        )
        for name, values in self._computed.items():
            if name != "target":  # logits of targets are by masked position, all other statistics by row of features
                selected._computed[name] = values[rows]
        selected._logits_kept = None if self._logits_kept is None else self._logits_kept[rows]
        return selected

    @property
    def whole(self) -> Predictions:
        """The predictions at all masked positions, before a rule such as `sub_block` narrowed them."""
        return self._part_of or self

    # ------------------------------------------------------------ statistics

    @cached_property
    def confidence(self) -> torch.Tensor:
        """log P1 - log(1 - P1), P1 the top token's probability: monotone in P1 and never saturated, (R, W)."""
        return self._plane(self._statistic("confidence"))

    @cached_property
    def log_margin(self) -> torch.Tensor:
        """log P1 - log P2, (R, W)."""
        return self._plane(self._statistic("log_margin"))

    @cached_property
    def margin(self) -> torch.Tensor:
        """P1 - P2, without cancellation, float64 (R, W)."""
        p1 = self._top.confidence.double().sigmoid()  # (U,)
        share = -torch.expm1(-self._top.log_margin.double())  # (U,) 1 - P2 / P1
        return self._plane(p1 * share)

    @cached_property
    def argmax(self) -> torch.Tensor:
        """The most probable token, the lowest id of equals, (R, W)."""
        return self._plane(self._statistic("token"))

    @cached_property
    def entropy(self) -> torch.Tensor:
        """The entropy in nats, (R, W)."""
        return self._plane(self._statistic("entropy"))

    @cached_property
    def log_sum(self) -> torch.Tensor:
        """The log of the sum of exp(logit) over the vocabulary, float64 (R, W)."""
        # log P1 = logit of the top token - log of the sum
        return self._plane(self._top.logit.double() - log_p1(self._top.confidence.double()))

    # ------------------------------------------------------------ features

    @property
    def features(self) -> torch.Tensor:
        """The input of the LM head at each masked position, in the order of `masked.nonzero()`, (C, D).

        For a network whose head is not split off these are its logits (C, V), [MASK] and padding included.

        Raises:
            DuelError: Under classifier-free guidance, where a position has two inputs of the head.
        """
        return self._one_input()[self._row]

    def apply(self, function: Callable[..., torch.Tensor], *planes: torch.Tensor) -> torch.Tensor:
        """The value of `function(features, *values)` at each masked position, (R, W); NaN where nothing is masked.

        `function` gets the features (U, D) and the values (U,) of each of `planes` (R, W), and returns (U,). It is
        called once for all positions that are known to be equal, so that these tie exactly. `planes` must be equal
        where features are, as statistics of the predictions are, and `function` must not modify its arguments.

        Raises:
            DuelError: Under classifier-free guidance, where a position has two inputs of the head.
        """
        features = self._one_input()
        position = self._row.new_zeros(len(features))  # (U,) a masked position with each row of features
        position[self._row] = torch.arange(len(self._row), device=position.device)
        values = [plane[self.masked][position] for plane in planes]  # (U,) each
        return self._plane(function(features, *values))

    def _one_input(self) -> torch.Tensor:
        if self._features.dim() != 2:
            raise DuelError(
                "Under cfg_scale the logits of a position are made of two inputs of the LM head, with and without the "
                "context, so a rule cannot read its features. Leave cfg_scale out, or use another rule."
            )
        return self._features  # (U, D)

    # ------------------------------------------------------------ whole distributions

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log p of `tokens` (R, W) in nats, float64 (R, W); NaN where a token is -1 or nothing is masked."""
        wanted = self.masked & (tokens >= 0)  # (R, W)
        ids = tokens[self._at]  # (C,)
        if self._targets is not None and torch.equal(torch.where(ids < 0, ids, self._targets), ids):
            # all of them are targets, whose logits were read in the first pass
            logit = self._statistic("target")  # (C,)
            log_prob = self._at_masked(logit, self._row, self.masked)  # (R, W)
            return log_prob.masked_fill(~wanted, math.nan)
        given = (ids >= 0).nonzero()[:, 0]  # (c,)
        row = self._row[given]  # (c,)
        ids = ids[given]  # (c,)
        logits_of_parts = []
        for part in self._parts(len(row)):
            logits = self._logits(row[part])  # (u, V)
            logits_of_parts.append(logits.gather(1, ids[part, None])[:, 0])
        return self._at_masked(torch.cat(logits_of_parts), row, wanted)

    def _at_masked(self, logit: torch.Tensor, row: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """log p at the `wanted` positions from their logits (c,) and rows of features (c,), float64 (R, W)."""
        top = self._top
        log_p = logit.double() - top.logit[row].double() + log_p1(top.confidence[row].double())  # (c,)
        plane = torch.full(self.masked.shape, math.nan, dtype=torch.float64, device=log_p.device)
        return plane.masked_scatter(wanted, log_p)

    def sample(self, u: torch.Tensor) -> torch.Tensor:
        """Tokens (R, W) from uniform numbers `u` (R, W), by inverse transform sampling; -1 where u is NaN."""
        wanted = self.masked & ~u.isnan()  # (R, W)
        level = u[self._at]  # (C,)
        given = (~level.isnan()).nonzero()[:, 0]  # (c,)
        row = self._row[given]  # (c,)
        level = level[given]  # (c,)
        sampled = []
        for part in self._parts(len(row)):
            p = self._logits(row[part]).double().softmax(1)  # (c, V)
            cumulative = p.cumsum(1)  # (c, V)
            # the first id whose sum exceeds the level, a share of the last sum, which is 1 up to rounding
            total = cumulative[:, -1:].contiguous()  # (c, 1)
            above = torch.searchsorted(cumulative, level[part, None] * total, right=True)  # (c, 1)
            # a level just below 1 may round up to the total, which no sum exceeds
            last = torch.searchsorted(cumulative, total)  # (c, 1) the last token of positive probability
            sampled.append(above.minimum(last)[:, 0])
        tokens = torch.full_like(self.masked, -1, dtype=torch.int64)  # (R, W)
        return tokens.masked_scatter(wanted, torch.cat(sampled))

    def dense(self) -> torch.Tensor:
        """All log-probabilities (C, V), in the order of `masked.nonzero()`."""
        # not kept: it is as large as the logits
        return self._statistic("log_p", kept=False)[self._row]

    def by_lanes(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The logits of a few lanes at a time: (the lanes, the row of logits of each masked position (c,), (u, V)).

        All positions of a lane are together, so that they can be compared exactly; those known to be equal share a
        row.
        """
        counts = self.masked.sum(1)  # (R,)
        largest = max(1, int(counts.max()))
        # a quarter of the usual chunk: the caller will need several float64 planes as large as the logits
        lanes_at_once = max(1, self._chunk // 4 // largest)
        sizes = [int(part.sum()) for part in counts.split(lanes_at_once)]
        first = 0
        for positions in self._row.split(sizes):
            rows, row = positions.unique(return_inverse=True)  # (u,), (c,)
            yield slice(first, first + lanes_at_once), row, self._logits(rows)
            first += lanes_at_once

    # ------------------------------------------------------------ passes over the logits

    @property
    def _top(self) -> Top:
        return Top(*map(self._statistic, Top._fields))

    def _statistic(self, name: str, kept: bool = True) -> torch.Tensor:
        """A statistic by name: of `Top`, the entropy (U,), the log-probs (U, V), or the logit of each target (C,)."""
        if name in self._computed:
            return self._computed[name]
        statistics = self._later_pass(name) if self._computed else self._first_pass(name)
        value = statistics[name] if kept else statistics.pop(name)
        self._computed |= statistics
        return value

    def _first_pass(self, name: str) -> dict[str, torch.Tensor]:
        """The statistics that every step needs, the logit of each target, and the statistic `name`, in one pass."""
        targets = self._targets
        positions_of_parts = [] if targets is None else self._positions_of_parts()
        parts: list[dict[str, torch.Tensor]] = []  # the statistics of each chunk, by name
        for n, part in enumerate(self._parts(len(self._features))):
            logits = self._logits(part)  # (u, V)
            top = top_of(logits)
            part_statistics = top._asdict()
            if name in ON_DEMAND:
                part_statistics[name] = ON_DEMAND[name](logits, top)
            if targets is not None:
                positions = positions_of_parts[n]  # (c,)
                row = self._row[positions] - part.start  # (c,) in the chunk
                part_statistics["target"] = logits[row, targets[positions]]  # (c,)
            parts.append(part_statistics)

        statistics = {}
        for key in parts[0]:
            statistics[key] = torch.cat([part_statistics[key] for part_statistics in parts])
        if targets is not None:  # back into the order of masked positions
            logit = statistics["target"]  # (C,)
            order = torch.cat(positions_of_parts)  # (C,)
            statistics["target"] = torch.empty_like(logit).index_copy_(0, order, logit)
        self._require_finite(statistics["logit"], statistics["confidence"])
        return statistics

    def _later_pass(self, name: str) -> dict[str, torch.Tensor]:
        """A statistic that the first pass did not read, by name, in another pass."""
        values = []
        for part in self._parts(len(self._features)):
            top = Top(*(self._computed[field][part] for field in Top._fields))
            values.append(ON_DEMAND[name](self._logits(part), top))
        return {name: torch.cat(values)}

    def _require_finite(self, logit: torch.Tensor, confidence: torch.Tensor) -> None:
        """Raise NotFinite, with the lane, for a row of logits without a finite largest one, or with a NaN."""
        finite = logit.isfinite() & ~confidence.isnan()  # (U,)
        if not finite.all():
            broken = (~finite).nonzero()[0]  # (1,) a row of features
            position = (self._row == broken).nonzero()[0]
            raise NotFinite(
                "The weights are broken or the dtype is too narrow (float16 overflows; try dtype=float32): "
                "the network returned NaN or infinite logits.",
                lane=int(self._at[0][position]),
            )

    def _parts(self, count: int) -> list[slice]:
        """`count` rows of logits in chunks. There is always one, though it may be empty."""
        return [slice(begin, begin + self._chunk) for begin in range(0, max(1, count), self._chunk)]

    def _positions_of_parts(self) -> list[torch.Tensor]:
        """The masked positions whose rows of features are in each chunk."""
        if len(self._features) <= self._chunk:
            return [torch.arange(len(self._row), device=self._row.device)]
        ascending, order = self._row.sort()  # (C,)
        starts = torch.arange(self._chunk, len(self._features), self._chunk, device=order.device)
        borders = torch.searchsorted(ascending, starts)
        return list(order.tensor_split(borders.cpu()))  # it takes borders on the CPU only

    @torch.inference_mode()
    def _logits(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """The logits at some rows of features (u, V), in float32 or better, -inf at excluded columns."""
        if self._logits_kept is not None:
            return self._logits_kept[rows]
        # a single chunk is computed whole, whichever rows are asked for, and kept for the next call
        single = len(self._features) <= self._chunk
        features = self._features if single else self._features[rows]
        logits = self._head(features)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        elif logits.data_ptr() == features.data_ptr():  # the features are the logits: the head is not split off
            logits = logits.clone()
        logits.index_fill_(1, self._columns, -math.inf)
        step = self._step if single or self._step is None else self._step[rows]
        for each in self._filters:
            logits = each(logits, step)
        if not single:
            return logits
        self._logits_kept = logits
        return logits[rows]

    def _plane(self, values: torch.Tensor) -> torch.Tensor:
        """(U,) per feature row -> (R, W) per position."""
        fill = math.nan if values.is_floating_point() else -1
        plane = torch.full(self.masked.shape, fill, dtype=values.dtype, device=values.device)
        return plane.masked_scatter(self.masked, values[self._row])


def _scaled(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`values` (U, ...) times `factor` (U,), in the dtype of the values."""
    ones = (1,) * (values.dim() - 1)
    return values * factor.to(values.dtype).view(-1, *ones)
