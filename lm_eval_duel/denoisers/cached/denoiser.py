"""The cached samplers of Fast-dLLM, with a prefix or a dual cache: a denoiser around a denoiser.

At a block's start the whole row is evaluated once. Later steps evaluate some of its positions, which attend to the kept
keys and values of the others:

    cache=dual      evaluates the block's positions
    cache=prefix    evaluates the positions from the block's start on

With the targets known, what is kept depends only on the targets before the block and on the row's layout, never on the
order in which the block is revealed. So the theorem holds, and all blocks are evaluated side by side. It is another
distribution than without a cache, so the cache is part of the spec.

Shapes: N windows, L row length, R lanes, W block width, M masked positions of a lane, E positions that a lane
evaluates, P rows of a call, A lanes of one row, Q = A E, K kept keys, D features.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lm_eval_duel.core.block_causal import PackedCall, rows_at
from lm_eval_duel.core.denoiser import Denoiser, Positions, View, distinct, masked_positions
from lm_eval_duel.core.float_noise import FLOAT32, random_rows
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.cached.kept_keys import Attentions, CachedStep, NotSteered, Slots, Streams
from lm_eval_duel.denoisers.load_options import CACHES
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import DuelError, first_position_unseen, require_known

# Kept numbers that count as one network token in the cost of a call. On a CPU, more blocks at a time are slower.
CPU_KEPT = 1 << 13
GPU_KEPT = 1 << 17
NEW = 8  # a call begins at most one block for NEW lanes: its keys take memory beside those kept
ROW = 256  # positions of states that share a row
# Lanes of several blocks share a call if it wastes at most one position in WASTE, or has at most SMALL positions.
WASTE = 8
SMALL = 1024


class Cached(Wrapper):
    """A bidirectional denoiser under a prefix or dual cache.

    Raises DuelError, with the reason, for a network that does not support it.
    """

    calls = ("begin", "step", "head")  # network calls that a view makes

    def __init__(self, plain: Denoiser, cache: str):
        require_known("value of cache", [cache], CACHES)
        _require_cacheable(plain, cache)
        super().__init__(plain)
        self.cache = cache
        try:
            self._steering = _steering(plain)
            with torch.inference_mode():
                self.kept = self._try_out()  # numbers kept per position of a row
        except torch.OutOfMemoryError:
            raise
        except (NotSteered, TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
            lines = str(error).splitlines()
            reason = lines[0].rstrip(".") if lines else type(error).__name__
            raise DuelError(
                f"cache={cache} is not possible with this network ({type(_inside(plain)).__name__}): {reason}. "
                "Use cache=none (leave cache out)."
            ) from error

    def features(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        **more: torch.Tensor,
    ) -> torch.Tensor:
        return self.plain.features(ids, real, **more)

    @torch.inference_mode()
    def begin(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Evaluate whole rows at a block's start; see `Streams.begin`."""
        return self._steering.begin(ids, real, columns)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, step: CachedStep) -> torch.Tensor:
        """Evaluate some positions against the kept keys and values; see `Streams.step`."""
        return self._steering.step(ids, step)

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return CachedView(self, rows)

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "cache": self.cache}

    def _try_out(self) -> int:
        """The number of values kept per position; raises NotSteered if a step without a reveal differs from the row."""
        # A row with a masked block in it, evaluated as a whole.
        row = random_rows(self, self_tests.LENGTH)[:1]  # (1, L)
        length = row.shape[1]
        begin = length // 3
        end = max(begin + 1, length - 2)
        row[:, begin:end] = self.mask_id
        columns = torch.arange(length, device=row.device)[None]  # (1, L)
        whole, layers = self.begin(row, None, columns)

        # The same block against the kept keys and values of the positions around it.
        block = columns[:, begin:end]  # (1, Q)
        outside = torch.cat([columns[:, :begin], columns[:, end:]], 1)  # (1, K)
        places = torch.cat([outside, block], 1)  # (1, K + Q)
        past: list[KeysValues] = []
        for keys, values in layers:
            at = outside[0].to(keys.device)
            past.append((keys[:, :, at], values[:, :, at]))
        step = CachedStep(block, None, past, places, block - begin)
        again = self.step(row[:, begin:end], step)

        expected = self.head(whole[0, begin:end]).masked_fill(self.excluded, 0)  # (Q, V)
        logits = self.head(again[0]).masked_fill(self.excluded, 0)  # (Q, V)
        difference = self_tests.difference_of(expected, logits)
        if not difference <= self_tests.noise_alone(self, expected, FLOAT32):
            raise NotSteered("a step of a block in which nothing is revealed differs from the evaluation of the row")

        kept = 0
        for keys, values in layers:  # (1, H, L, D / H) each
            kept += keys.shape[1] * keys.shape[3]
            kept += values.shape[1] * values.shape[3]
        return kept


class CachedView(View):
    """A cached denoiser opened on a group of rows: whole rows as blocks begin, then parts of them."""

    def __init__(self, denoiser: Cached, rows: Rows):
        super().__init__(denoiser, rows)
        self._slots = Slots(rows.ids.shape[1], rows.ids.device)
        self._contents: tuple[torch.Tensor, torch.Tensor] | None = None  # (N, L + 1), (N,) hashes

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """The positions that a later step evaluates, or its kept positions if these take more memory."""
        positions = lanes.width  # (R,)
        if self.denoiser.cache == "prefix":
            positions = self.rows.length[lanes.row] - lanes.start
        numbers = self.rows.ids.shape[1] * self.denoiser.kept  # of a slot: all slots are as long as the longest row
        numbers_per_token = CPU_KEPT if lanes.row.device.type == "cpu" else GPU_KEPT
        kept_tokens = -(-numbers // numbers_per_token)  # rounded up
        return positions.clamp(min=kept_tokens)

    def commit(self, lanes: Lanes) -> None:
        super().commit(lanes)
        self._contents = None

    def positions(self, lanes: Lanes) -> Positions:
        identity = self._identity(lanes)  # (R,)
        revealed = (lanes.tokens >= 0) & ~lanes.masked  # (R, W)
        ids = torch.where(revealed, lanes.tokens, self.denoiser.mask_id)  # (R, W)
        # Lanes that are equal in all that the network sees are evaluated once.
        first, number = distinct(identity, ids, lanes.masked)
        are_distinct = len(first) == len(lanes)
        base = lanes if are_distinct else lanes.select(first)
        try:
            positions = self._evaluate_block(base, ids[first], revealed[first], identity[first])
        except torch.OutOfMemoryError:
            self._slots.drop()  # they may be what fills the memory; fewer lanes need fewer slots
            raise
        if are_distinct:
            return positions
        return positions.spread(lanes, base, number)

    def _identity(self, lanes: Lanes) -> torch.Tensor:
        """A hash of what determines the kept keys of each lane: the row at the block's start, and the block, (R,)."""
        rows = self.rows
        if self._contents is None:
            columns = torch.arange(rows.ids.shape[1], device=rows.ids.device)  # (L,)
            token_hash = hashed(rows.ids, columns)  # (N, L)
            before = torch.nn.functional.pad(token_hash.cumsum(1), (1, 0))  # (N, L + 1) sums, which wrap
            target_end = (rows.origin + rows.target)[:, None]  # (N, 1)
            in_suffix = rows.visible & (columns >= target_end)  # (N, L)
            self._contents = before, (token_hash * in_suffix).sum(1)
        before, after = self._contents
        row = lanes.row
        shown = before[row, lanes.start.maximum(lanes.origin)]  # (R,)
        return hashed(shown, after[row], lanes.start, lanes.origin, lanes.width, rows.length[row])

    def _hold(self, lanes: Lanes, identity: torch.Tensor) -> torch.Tensor:
        """The slot of each lane's block, filled, (R,)."""
        first, block_of_lane = distinct(identity)  # (n,), (R,): several lanes may be states of one block
        slots, missing = self._slots.arrange(identity[first])  # (n,) each
        if missing.any():
            begins = first[missing]
            blocks = lanes.select(begins)
            empty = slots[missing]
            # a call of whole rows takes no more than a call of these lanes may
            allowed = int(self.cost(lanes).sum())
            longest = int(self.rows.length[blocks.row].max())
            rows = max(1, min(allowed // longest, len(lanes) // NEW))
            for part in torch.arange(len(blocks), device=slots.device).split(rows):
                self._begin(blocks.select(part), empty[part], identity[begins[part]])
        return slots[block_of_lane]

    def _begin(self, blocks: Lanes, slot: torch.Tensor, identity: torch.Tensor) -> None:
        """Evaluate the whole rows of `blocks` as the blocks begin, and keep the result in `slot`."""
        fresh = dataclasses.replace(blocks, tokens=torch.full_like(blocks.tokens, -1))
        ids, _, real = self._input(fresh)  # (P, L) each
        position = torch.arange(blocks.masked.shape[1], device=ids.device)  # (W,)
        predicted_at = blocks.start[:, None] + position - self.denoiser.shift  # (P, W)
        columns = predicted_at.clamp(0, ids.shape[1] - 1)
        features, layers = self.denoiser.begin(ids, self._padding(real), columns)
        self.forwards += 1
        self.evaluated += len(ids)
        self._slots.fill(slot, identity, features, layers)

    def _evaluate_block(
        self,
        lanes: Lanes,
        ids: torch.Tensor,
        revealed: torch.Tensor,
        identity: torch.Tensor,
    ) -> Positions:
        """The input of the head at the masked positions of lanes whose blocks show `ids` (R, W)."""
        slot = self._hold(lanes, identity)  # (R,)
        last = self._slots.features.shape[1] - 1
        position = masked_positions(lanes).clamp(max=last)  # (R, M) those not masked are not read
        features = self._slots.features[slot[:, None], position]  # (R, M, D) as the blocks began

        # A block that was revealed in part is evaluated again. A context inside a block does not count.
        in_target = lanes.columns >= lanes.origin[:, None]  # (R, W)
        begun = (revealed & in_target).any(1)  # (R,)
        if begun.any():
            shift = self.denoiser.shift
            first_masked = lanes.masked[:, :shift].any(1)  # (R,)
            if shift and (first_masked & begun).any():
                # it is predicted from the position before the block, which later steps do not evaluate
                raise first_position_unseen(self.denoiser.cache)
            for part in self._parts(lanes, begun, slot):
                features[part] = self._step(lanes.select(part), ids[part], slot[part], position[part])

        given = self.rows.visible[lanes.row].any(1)  # (R,) a context or a suffix
        shows_token = given | (lanes.start > lanes.origin) | revealed.any(1)  # (R,)
        all_mask = ~shows_token & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, lambda lane, n: features[lane, n])

    def _parts(
        self,
        lanes: Lanes,
        begun: torch.Tensor,
        slot: torch.Tensor,
    ) -> Iterator[torch.Tensor]:
        """The lanes (r,) of each network call.

        Under a prefix cache they begin at nearly the same column. Under a dual cache, lanes that share a slot (R,) have
        a call of their own, in which they stand side by side. The other lanes then read their kept keys in place, if
        their slots follow each other. In one call for all lanes, some slots would be read in several rows, so all keys
        would be copied.
        """
        order = begun.nonzero()[:, 0]  # (n,)
        if self.denoiser.cache == "dual":
            shared = slot[order].bincount()[slot[order]] > 1  # (n,)
            for part in (order[shared], order[~shared]):
                if len(part):
                    yield part
            return
        # a call begins at the column of its first lane, so the later a lane begins, the more of its row is wasted
        order = order[lanes.start[order].argsort(stable=True)]
        start = lanes.start[order].tolist()
        end = int(self.rows.length[lanes.row[order]].max())
        first = 0  # of the call, in `order`
        for n, column in enumerate(start):
            positions = (n + 1 - first) * (end - start[first])
            wasted = column - start[first]  # of this lane
            if wasted * WASTE > end - column and positions > SMALL:
                yield order[first:n]
                first = n
        yield order[first:]

    def _step(
        self,
        lanes: Lanes,
        ids: torch.Tensor,
        slot: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """The input of the head at `position` (R, M) of the lanes' blocks, (R, M, D), in one network call.

        The states of a block stand side by side in one row of the call, behind the kept keys that they share:

            | kept: all positions that are not evaluated | state 1 | state 2 | ...
        """
        at = self._columns(lanes, ids)
        # under a prefix cache a state is about as long as its row, so it has a row of the call to itself
        abreast = max(1, ROW // ids.shape[1]) if self.denoiser.cache == "dual" else 1
        call = PackedCall.from_slots(slot, at.start, at.is_own, at.kept, abreast)
        is_alone = call.lane.shape[1] == 1  # in its row, where every position sees the same
        seen = torch.cat([at.kept, at.is_own], 1)[call.lane] if is_alone else call.seen  # (P, 1 or Q, K + Q)

        # the positions of the call's keys: the kept ones, then its own
        kept_count = at.kept.shape[1]
        kept_columns = torch.arange(kept_count, device=slot.device)  # (K,)
        positions = call.columns.clamp(max=at.row_length - 1)  # (P, Q)
        places = torch.cat([kept_columns.expand(len(positions), -1), positions], 1)  # (P, K + Q)

        # where in its part of the call the logits of each masked position are read
        read_at = (lanes.start - at.start)[:, None] + position - self.denoiser.shift  # (R, M)
        read_at = read_at.clamp(0, at.ids.shape[1] - 1)  # out of range only where nothing is masked

        step = CachedStep(
            positions,
            seen=None if seen.all() else seen,
            past=rows_at(self._slots.layers, slot[call.lane[:, 0]], kept_count),
            places=places,
            columns=call.queries(read_at),
        )
        values = self.denoiser.step(at.ids[call.lane].flatten(1), step)  # (P, A M, D)
        self.forwards += 1
        self.evaluated += len(positions)
        return call.by_lane(values)

    def _columns(self, lanes: Lanes, ids: torch.Tensor) -> StepColumns:
        """The columns of a step of lanes whose blocks show `ids` (R, W)."""
        length = self.rows.length[lanes.row]  # (R,)
        longest = int(length.max())
        if self.denoiser.cache == "dual":
            start = lanes.start  # (R,)
            end = lanes.start + lanes.width  # (R,)
            kept_count = longest
        else:  # all lanes of a call are evaluated from the same column on, to the end of their rows
            first = int(lanes.start.min())
            start = torch.full_like(lanes.start, first)
            end = length
            kept_count = int(lanes.start.max())
            rows, _, _ = self._input(lanes)  # (R, L)
            ids = rows[:, first:]  # (R, E)

        column = start[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (R, E)
        is_own = (column >= lanes.start[:, None]) & (column < end[:, None])  # (R, E)
        kept_column = torch.arange(kept_count, device=ids.device)  # (K,)
        before_block = kept_column < lanes.start[:, None]  # (R, K)
        after_block = (kept_column >= end[:, None]) & (kept_column < length[:, None])  # (R, K)
        return StepColumns(ids, start, is_own, before_block | after_block, longest)


class StepColumns(NamedTuple):
    """The columns that lanes evaluate in a step after the first, and those whose kept keys and values they see.

        row             c c c  t t  m t  m m  s s      context, a finished block, the lane's block `m t`, later ones
        cache=dual      k k k  k k  e e  k k  k k      k: kept, e: evaluated
        cache=prefix    k k k  k k  e e  e e  e e

    Under a prefix cache a call begins at the block of its first lane. Columns from there to a later lane's block are
    evaluated for nothing: that lane sees the kept ones.
    """

    ids: torch.Tensor  # (R, E) what the evaluated columns show
    start: torch.Tensor  # (R,) the first of them
    is_own: torch.Tensor  # (R, E) bool: it belongs to the lane, and is seen
    kept: torch.Tensor  # (R, K) bool: the lane sees what is kept of column k
    row_length: int  # of the longest row


def under_cache(denoiser: Denoiser, cache: str) -> Denoiser:
    """`denoiser` with its network under a cache; guidance and temperature stay around it."""
    if not isinstance(denoiser, Wrapper):
        return Cached(denoiser, cache)
    twin = copy.copy(denoiser)
    twin.plain = under_cache(denoiser.plain, cache)
    twin.cache = cache
    return twin


def _require_cacheable(plain: Denoiser, cache: str) -> None:
    """Raise DuelError, with the reason, for a kind of network that does not support a cache."""
    if isinstance(plain, Wrapper):
        raise DuelError(
            f"cache={cache} wraps the plain network; guidance and temperature wrap the cached one: "
            f"{type(plain).__name__}(Cached(network, ...), ...)."
        )
    if plain.attention != "bidirectional":
        reason = (
            f"is for bidirectional networks; this one is {plain.attention} and keeps its clean keys and values anyway"
        )
    elif plain.needs_visible:
        reason = (
            "does not go with a network that scales its input by the masked share of the row (token_dropout of ESM)"
        )
    elif type(plain).open is not Denoiser.open:
        reason = f"does not go with a {plain.family} network: its noise level, and so every key, changes at each step"
    else:
        return
    raise DuelError(f"cache={cache} {reason}. Leave cache out.")


def _steering(plain: Denoiser) -> Streams | Attentions:
    """A driver for the way in which this network takes kept keys and values; raises NotSteered if it takes none."""
    if getattr(plain, "steers_attention", False):
        return Attentions(plain)
    if type(_inside(plain)).stream is Denoiser.stream:
        raise NotSteered("it takes no keys and values from outside")
    return Streams(plain)


def _inside(plain: Denoiser) -> Denoiser:
    """The denoiser that a network in memory wraps; any other unchanged."""
    inside: Denoiser = getattr(plain, "plain", plain)
    return inside
