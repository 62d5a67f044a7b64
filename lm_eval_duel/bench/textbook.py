"""The reference that `bench` compares with: Algorithm 2 of the paper as printed.

"As printed" means what the authors' code does: all windows together, block after block, with the LM head and a float32
log-softmax over the whole (R, L, V) tensor at every step. `KeptKeys` also keeps the keys and values of clean blocks,
for block-causal networks; `KeptRow` is the loop under a prefix or dual cache, for bidirectional ones.

Shapes: N windows, L row length, T target positions, R lanes, W block width, B trained block, C masked positions,
D features, V tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.view import KeysValues
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.cached.kept_keys import Places, Replaced, Step
from lm_eval_duel.errors import DuelError

SATURATED = -0.1  # above this log P1, 1 - P1 would cancel in float32 and is summed from the other tokens


class BlockPredictions:
    """The statistics that rules read (see `denoisers.predictions`), computed from log-probabilities of whole blocks."""

    def __init__(self, log_p: torch.Tensor, masked: torch.Tensor, all_mask: torch.Tensor):
        self.log_p = log_p  # (R, W, V)
        self.masked = masked  # (R, W) bool
        self.all_mask = all_mask  # (R,) bool

    @cached_property
    def _first(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_p.max(2)  # (R, W) each

    @property
    def argmax(self) -> torch.Tensor:
        return self._first[1]

    @cached_property
    def confidence(self) -> torch.Tensor:
        first, token = self._first
        others = torch.log(-torch.expm1(first))  # (R, W)
        sure = first > SATURATED  # (R, W)
        if sure.any():
            rest = self.log_p[sure].scatter(1, token[sure][:, None], -math.inf)  # (c, V)
            others[sure] = rest.logsumexp(1)
        return first - others

    @cached_property
    def log_margin(self) -> torch.Tensor:
        two = self.log_p.topk(2, dim=2).values  # (R, W, 2)
        return two[..., 0] - two[..., 1]

    @property
    def margin(self) -> torch.Tensor:
        return self.confidence.double().sigmoid() * -torch.expm1(-self.log_margin.double())

    @cached_property
    def entropy(self) -> torch.Tensor:
        return torch.special.entr(self.log_p.exp()).sum(2)  # (R, W)

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log p of `tokens` (R, W) in nats, float64 (R, W)."""
        return self.log_p.gather(2, tokens[..., None])[..., 0].double()

    def dense(self) -> torch.Tensor:
        return self.log_p[self.masked]  # (C, V)


@dataclasses.dataclass(frozen=True)
class Loop:
    """The result of a textbook loop. Positions that were not reached hold NaN and -1."""

    token_logprobs: torch.Tensor  # (N, T) float64
    reveal_steps: torch.Tensor  # (N, T)
    forwards: int
    rows: int
    token_rows: int  # positions evaluated, summed over network calls
    nfe: int  # rule steps, summed over windows


class WholeRow:
    """Shows the network the whole row at every step: earlier blocks, the block as revealed so far, then [MASK]."""

    def __init__(self, denoiser: Denoiser, rows: Rows, block: int | None):
        self.denoiser, self.block = denoiser, block
        self.forwards = self.rows = self.token_rows = 0
        self.excluded = denoiser.excluded.nonzero()[:, 0]
        length, causal = rows.ids.shape[1], denoiser.attention == "block_causal"
        self.prefix = denoiser.attention == "causal_prefix"
        zero = int(rows.origin[0]) if self.prefix or denoiser.anchor == "target" else 0  # blocks count from here
        if denoiser.by_blocks and denoiser.last_block == "fill":
            length += -(length - zero) % block
        self.targets = rows.ids
        self.ids = torch.where(rows.visible, rows.ids, denoiser.mask_id)  # (N, L)
        self.ids = torch.nn.functional.pad(self.ids, (0, length - self.ids.shape[1]), value=denoiser.mask_id)
        self.positions = torch.arange(length, device=rows.ids.device)  # (L,)
        of_block = ((self.positions - zero) // (block or length)).clamp(min=-1)  # (L,); -1: a context that is one block
        self.seen = of_block[:, None] >= of_block if causal else None  # (L, L)

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        """Log-probabilities of one block in each lane's row, (R, W, V)."""
        ids = self.ids[lanes.row]  # (R, L)
        if self.prefix:
            return self._after_prefix(ids, int(lanes.start[0]), lanes.masked.shape[1])
        if self.seen is None:
            features = self.denoiser.features(ids, None)  # (R, L, D)
        else:
            places, seen = self.positions.expand_as(ids), self.seen.expand(len(ids), -1, -1)
            features = self.denoiser.stream(ids, places, seen, None)[0]  # (R, L, D)
        self.count(ids)
        begin = int(lanes.start[0]) - self.denoiser.shift
        if begin < 0:  # the first position is visible: its prediction is never read
            features, begin = torch.cat([features[:, :1], features], dim=1), 0  # (R, 1 + L, D)
        return self.log_softmax(features)[:, begin : begin + lanes.masked.shape[1]]

    def _after_prefix(self, ids: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """Log-probabilities (R, W, V) of the block at `start` of rows (R, L) whose prefix is causal."""
        query, key = self.positions[:, None], self.positions  # (L, 1), (L,)
        seen = (query >= key) | ((query >= start) & (key < start + self.block))  # (L, L)
        features, _ = self.denoiser.stream(ids, key.expand_as(ids), seen.expand(len(ids), -1, -1), None)  # (R, L, D)
        self.count(ids)
        own = features[:, start : start + width]  # (R, W, D)
        if self.denoiser.seeds_blocks:
            own = torch.cat([features[:, start - 1 : start], own[:, 1:]], dim=1)
        return self.log_softmax(own)

    def count(self, ids: torch.Tensor) -> None:
        """Count a network call on `ids`."""
        self.forwards += 1
        self.rows += len(ids)
        self.token_rows += ids.numel()

    def log_softmax(self, features: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (R, Q, V) of features (R, Q, D), in float32 or better; -inf at excluded columns."""
        logits = self.denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])  # (R, Q, V)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.index_fill_(2, self.excluded, -math.inf).log_softmax(2)

    def reveal(self, lanes: Lanes, pick: torch.Tensor) -> None:
        """Show the targets at `pick` (R, W)."""
        lane, position = pick.nonzero().unbind(1)
        row, column = lanes.row[lane], lanes.start[lane] + position  # (c,)
        self.ids[row, column] = self.targets[row, column]

    def finish(self, start: int) -> None:
        """Called when the block that starts at column `start` has been revealed in every row."""


class KeptKeys(WholeRow):
    """Shows a block-causal network only the current block, against the kept keys and values of earlier blocks."""

    def __init__(self, denoiser: Denoiser, rows: Rows, block: int):
        super().__init__(denoiser, rows, block)
        self.cache: list[KeysValues] = []  # one per layer, (N, H, L, D / H) each
        self.edge: torch.Tensor | None = None  # (N, 1, D) features of the last clean column
        for start in range(0, int(rows.origin[0]) // block * block, block):
            self.finish(start)

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        start, everywhere = int(lanes.start[0]), len(lanes) == len(self.ids)
        row = slice(None) if everywhere else lanes.row
        features, _ = self._stream(row, start)  # (R, B, D)
        if self.denoiser.shift:
            edge = features[:, :1] if self.edge is None else self.edge[row]  # (R, 1, D)
            features = torch.cat([edge, features[:, :-1]], dim=1)
        return self.log_softmax(features)[:, : lanes.masked.shape[1]]

    def finish(self, start: int) -> None:
        end = start + self.block
        if end >= self.ids.shape[1]:
            return  # the last block
        self.ids[:, start:end] = self.targets[:, start:end]
        features, new = self._stream(slice(None), start)
        if not self.cache:
            length = len(self.positions)
            self.cache = [tuple(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in layer) for layer in new]
        for (keys, values), (k, v) in zip(self.cache, new, strict=True):
            keys[:, :, start:end], values[:, :, start:end] = k, v
        self.edge = features[:, -1:]

    def _stream(self, row: slice | torch.Tensor, start: int) -> tuple[torch.Tensor, list[KeysValues]]:
        """Features (R, B, D) of the visible state of the block at `start`, and its keys and values."""
        ids = self.ids[row, start : start + self.block]  # (R, B)
        places = self.positions[start : start + self.block].expand_as(ids)
        seen = ids.new_ones(*ids.shape, start + ids.shape[1], dtype=torch.bool)  # (R, B, K + B)
        past = [(k[row, :, :start], v[row, :, :start]) for k, v in self.cache] if start else None
        self.count(ids)
        return self.denoiser.stream(ids, places, seen, past)


class KeptRow(WholeRow):
    """Fast-dLLM's loops: the whole row at a block's start, then the block's positions only (dual) or all from its start
    on.

    The keys and values of the positions that are evaluated replace the kept ones.
    """

    def __init__(self, denoiser: Cached, rows: Rows, block: int | None):
        super().__init__(denoiser, rows, block)
        self.start = -1  # first column of the block whose start has been evaluated
        self.kept: list[KeysValues] = []

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        start, width = int(lanes.start[0]), lanes.masked.shape[1]
        ids, every = self.ids[lanes.row], self.positions[None]  # (R, L), (1, L)
        shift = self.denoiser.shift
        if self.start != start:
            self.start = start
            self.count(ids)
            features, self.kept = self.denoiser.begin(ids, None, every.expand_as(ids))  # (R, L, D)
            return self.log_softmax(features)[:, start - shift : start - shift + width]
        stop = start + width if self.denoiser.cache == "dual" else ids.shape[1]
        own = every[:, start:stop].expand(len(ids), -1)  # (R, Q)
        places = Places(own, torch.ones_like(own, dtype=torch.bool))
        past = [Replaced(keys, values, places) for keys, values in self.kept]
        self.count(own)
        step = Step(own, None, past, every, own - start)
        features = self.denoiser.step(ids[:, start:stop], step)  # (R, Q, D)
        if shift:  # the first position is revealed, so its prediction is never read
            features = torch.cat([features[:, :1], features[:, :-1]], dim=1)
        return self.log_softmax(features)[:, :width]


@torch.inference_mode()
def one_by_one(
    denoiser: Cached,
    rule: rules.Rule,
    block: int | None,
    grid: str,
    windows: Sequence[Window],
    max_steps: int | None = None,
) -> Loop:
    """The cached loop as deployed: one window, one block, one step at a time, for `max_steps` steps of each at most."""
    loops = [algorithm2(KeptRow, denoiser, rule, block, grid, [window], max_steps) for window in windows]
    sums = [sum(getattr(loop, name) for loop in loops) for name in ("forwards", "rows", "token_rows", "nfe")]
    token_logprobs, reveal_steps = (
        torch.cat([getattr(loop, name) for loop in loops]) for name in ("token_logprobs", "reveal_steps")
    )
    return Loop(token_logprobs, reveal_steps, *sums)


@torch.inference_mode()
def algorithm2(
    loop_class: type[WholeRow],
    denoiser: Denoiser,
    rule: rules.Rule,
    block: int | None,
    grid: str,
    windows: Sequence[Window],
    max_steps: int | None = None,
) -> Loop:
    """Algorithm 2 over windows of one layout, all together, block after block, for `max_steps` steps at most."""
    check(denoiser, windows)
    rows = Rows.from_windows(windows, denoiser.device)
    row = torch.arange(len(windows), device=denoiser.device)  # (N,)
    network = loop_class(denoiser, rows, block)
    token_logprobs = torch.full(rows.ids.shape, math.nan, dtype=torch.float64, device=denoiser.device)  # (N, L)
    reveal_steps = torch.full_like(rows.ids, -1)  # (N, L)
    steps = nfe = 0
    origin, target = len(windows[0].context), len(windows[0].target)
    for start, width in blocks(origin, target, block, grid):
        lanes = Lanes.fresh(rows, row, torch.full_like(row, start), torch.full_like(row, width))
        targets = rows.ids[:, start : start + width]  # (N, W)
        while len(lanes) and steps != max_steps:
            all_mask = lanes.masked.all(1) & (lanes.start == 0) & denoiser.relative_positions  # (R,)
            log_p = network.log_p(lanes)  # (R, W, V)
            if start == 0 and all_mask.any():
                log_p = torch.where(all_mask[:, None, None], log_p[:, :1], log_p)
            predictions = BlockPredictions(log_p, lanes.masked, all_mask)
            decision = rule(predictions, lanes)
            if isinstance(decision, torch.Tensor):
                decision = rules.Decision(decision)
            tokens, pick = targets[lanes.row], decision.pick  # (R, W)
            lane, position = pick.nonzero().unbind(1)  # (c,)
            at = lanes.row[lane], start + position
            token_logprobs[at] = predictions.log_prob(tokens)[pick]
            reveal_steps[at] = lanes.step[lane]
            network.reveal(lanes, pick)
            steps, nfe = steps + 1, nfe + len(lanes)
            lanes = lanes.reveal(pick, tokens, decision.memory)
            if not (masked := lanes.masked.any(1)).all():
                lanes = lanes.select(masked)
        if steps == max_steps:
            break
        network.finish(start)
    span = slice(origin, origin + target)
    counts = network.forwards, network.rows, network.token_rows, nfe
    return Loop(token_logprobs[:, span].cpu(), reveal_steps[:, span].cpu(), *counts)


def check(denoiser: Denoiser, windows: Sequence[Window]) -> None:
    """Raise DuelError for a network that the textbook loop does not support, and for windows of different layouts."""
    if denoiser.attention == "causal":
        raise DuelError("bench compares ways of unmasking; an autoregressive network scores a window in one pass.")
    if type(denoiser).open is not Denoiser.open and not isinstance(denoiser, Cached):
        raise DuelError(
            f"bench's textbook loop does not support {type(denoiser).__name__}, which does more than one plain network "
            "call per step (noise level or guidance): use another network."
        )
    if len({(len(w.context), len(w.target), w.suffix, w.tail) for w in windows}) != 1 or windows[0].length != len(
        windows[0].context + windows[0].target
    ):
        raise DuelError("The textbook loop needs windows of one length and layout, without tail and suffix.")
