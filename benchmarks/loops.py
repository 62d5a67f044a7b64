"""The loops that people run today, to compare with: Algorithm 2, one block after another.

| network | loop | whose code does so |
|---|---|---|
| bidirectional | `WholeRow` | the paper's, MDLM's, LLaDA's |
| the same under a cache | `KeptRow` | Fast-dLLM's |
| with blocks that are clean once revealed | `KeptKeys` | BD3-LM's, SDAR's, Fast-dLLM v2's |

All windows advance together, under `KeptRow` one at a time. At every step the LM head and a float32 log-softmax cover
all positions of the call.

Shapes: N windows, L row length, T target positions, R lanes, W block width, B trained block, C masked positions,
Q positions of a call, K kept columns, D features, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from lm_eval_duel import rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator


class Revealed(NamedTuple):
    """What a loop returns."""

    token_logprobs: torch.Tensor  # (N, T) float64
    reveal_steps: torch.Tensor  # (N, T)


class WholeRow:
    """Evaluates the whole row at every step: earlier blocks, the block as revealed so far, then [MASK]."""

    title = "whole rows"

    def __init__(self, denoiser: Denoiser, rows: Rows, block: int):
        self.denoiser = denoiser
        self.block = block
        self.targets = rows.ids  # (N, L)
        self.excluded = denoiser.excluded.nonzero()[:, 0]
        self.ids = torch.where(rows.visible, rows.ids, denoiser.mask_id)  # (N, L)
        self.positions = torch.arange(rows.ids.shape[1], device=rows.ids.device)  # (L,)

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        """Log-probabilities of one block in each lane's row, (R, W, V)."""
        begin = int(lanes.start[0]) - self.denoiser.shift
        features = self.denoiser.features(self.ids[lanes.row], None)  # (R, L, D)
        if begin < 0:  # the first position is visible: its prediction is never read
            features = torch.cat([features[:, :1], features], dim=1)  # (R, 1 + L, D)
            begin = 0
        return self.log_softmax(features)[:, begin : begin + lanes.masked.shape[1]]

    def log_softmax(self, features: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (R, Q, V) of features (R, Q, D), in float32 or better; -inf at excluded columns."""
        logits = self.denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])  # (R, Q, V)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.index_fill_(2, self.excluded, -math.inf).log_softmax(2)

    def reveal(self, row: torch.Tensor, column: torch.Tensor) -> None:
        """Show the targets at (row, column), (c,) each."""
        self.ids[row, column] = self.targets[row, column]

    def finish(self, start: int) -> None:
        """Called when the block that starts at column `start` has been revealed in every row."""


class KeptKeys(WholeRow):
    """Evaluates the current block against the kept keys and values of the clean text before it."""

    title = "kept keys"

    def __init__(self, denoiser: Denoiser, rows: Rows, block: int):
        super().__init__(denoiser, rows, block)
        self.causal = denoiser.attention == "causal_prefix"
        origin = int(rows.origin[0])
        length = rows.ids.shape[1]
        from_target = self.causal or denoiser.anchor == "target"
        if denoiser.last_block == "fill":
            length += -(length - origin * from_target) % block
            self.ids = torch.nn.functional.pad(self.ids, (0, length - len(self.positions)), value=denoiser.mask_id)
            self.positions = torch.arange(length, device=rows.ids.device)
        self.cache: list[KeysValues] = []  # one per layer, (N, H, L, D / H) each
        self.edge: torch.Tensor | None = None  # (N, 1, D) features of the last clean column
        if from_target and origin:
            self._keep(0, origin)
        else:
            for start in range(0, origin // block * block, block):
                self.finish(start)

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        start = int(lanes.start[0])
        everywhere = len(lanes) == len(self.ids)
        row = slice(None) if everywhere else lanes.row
        features, _ = self._stream(row, start, start + self.block)  # (R, B, D)
        if self.denoiser.shift or self.denoiser.seeds_blocks:
            edge = features[:, :1] if self.edge is None else self.edge[row]  # (R, 1, D)
            own = features[:, :-1] if self.denoiser.shift else features[:, 1:]
            features = torch.cat([edge, own], dim=1)
        return self.log_softmax(features)[:, : lanes.masked.shape[1]]

    def finish(self, start: int) -> None:
        if start + self.block < len(self.positions):  # not the last block
            self._keep(start, start + self.block)

    def _keep(self, start: int, stop: int) -> None:
        """Evaluate clean columns and keep their keys and values."""
        self.ids[:, start:stop] = self.targets[:, start:stop]
        features, new = self._stream(slice(None), start, stop, causal=self.causal)
        if not self.cache:
            length = len(self.positions)
            self.cache = [tuple(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in layer) for layer in new]
        for (keys, values), (k, v) in zip(self.cache, new, strict=True):
            keys[:, :, start:stop], values[:, :, start:stop] = k, v
        self.edge = features[:, -1:]

    def _stream(
        self, row: slice | torch.Tensor, start: int, stop: int, causal: bool = False
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Features (R, Q, D) of columns start..stop, and their keys and values."""
        ids = self.ids[row, start:stop]  # (R, Q)
        places = self.positions[start:stop].expand_as(ids)  # (R, Q)
        seen = ids.new_ones(*ids.shape, start + ids.shape[1], dtype=torch.bool)  # (R, Q, K + Q)
        past = [(k[row, :, :start], v[row, :, :start]) for k, v in self.cache] if start else None
        return self.denoiser.stream(ids, places, seen.tril(start) if causal else seen, past)


class KeptRow(WholeRow):
    """Evaluates the whole row at a block's start, then the block alone (dual) or all from its start on (prefix).

    The positions that are evaluated attend to the kept keys and values of the others.
    """

    title = "cached, one window at a time"
    denoiser: Cached

    def __init__(self, denoiser: Denoiser, rows: Rows, block: int):
        super().__init__(denoiser, rows, block)
        self.start = -1  # first column of the block whose start has been evaluated
        self.kept: list[KeysValues] = []

    def log_p(self, lanes: Lanes) -> torch.Tensor:
        start = int(lanes.start[0])
        width = lanes.masked.shape[1]
        ids = self.ids[lanes.row]  # (1, L)
        every = self.positions[None]  # (1, L)
        shift = self.denoiser.shift
        if self.start != start:
            self.start = start
            features, self.kept = self.denoiser.begin(ids, None, every)  # (1, L, D)
            return self.log_softmax(features)[:, start - shift : start - shift + width]
        own = every[:, start : start + width if self.denoiser.cache == "dual" else None]  # (1, Q)
        outside = torch.cat([every[:, :start], every[:, start + own.shape[1] :]], dim=1)  # (1, K)
        past = [(keys[:, :, outside[0]], values[:, :, outside[0]]) for keys, values in self.kept]
        step = CachedStep(own, None, past, torch.cat([outside, own], dim=1), own - start)
        features = self.denoiser.step(ids[:, own[0]], step)  # (1, Q, D)
        if shift:  # the first position is revealed, so its prediction is never read
            features = torch.cat([features[:, :1], features[:, :-1]], dim=1)
        return self.log_softmax(features)[:, :width]


def loop_for(denoiser: Denoiser) -> type[WholeRow]:
    """The loop that people run with such a network.

    Raises:
        DuelError: there is none for it.
    """
    if denoiser.attention == "causal":
        raise DuelError("The arms are ways of unmasking; an autoregressive network scores a window in one pass.")
    if isinstance(denoiser, Cached):
        return KeptRow
    if type(denoiser).open is not Denoiser.open:
        raise DuelError(
            f"The loop does not support {type(denoiser).__name__}, which does more than one plain network call per "
            "step (noise level or guidance): use another network."
        )
    return WholeRow if denoiser.attention == "bidirectional" else KeptKeys


@torch.inference_mode()
def algorithm2(duel: DuelEstimator, windows: Sequence[Window]) -> Revealed:
    """The distribution of `duel` by its network's loop, over windows of one layout without tail and suffix."""
    if loop_for(duel.denoiser) is not KeptRow:
        return _together(duel, windows)
    alone = [_together(duel, [window]) for window in windows]
    return Revealed(*(torch.cat(planes) for planes in zip(*alone, strict=True)))


def _together(duel: DuelEstimator, windows: Sequence[Window]) -> Revealed:
    """All windows side by side, block after block."""
    denoiser = duel.denoiser
    rows = Rows.from_windows(windows, denoiser.device)
    origin = len(windows[0].context)
    target = len(windows[0].target)
    row = torch.arange(len(windows), device=denoiser.device)  # (N,)
    network = loop_for(denoiser)(denoiser, rows, duel.block or target)
    token_logprobs = torch.full(rows.ids.shape, math.nan, dtype=torch.float64, device=denoiser.device)  # (N, L)
    reveal_steps = torch.full_like(rows.ids, -1)  # (N, L)
    places = blocks(origin, target, duel.block, duel.grid)
    for start, width in tqdm(places, "blocks", leave=False, disable=None):  # shown on a terminal only
        lanes = Lanes.fresh(rows, row, torch.full_like(row, start), torch.full_like(row, width))
        targets = rows.ids[:, start : start + width]  # (N, W)
        while len(lanes):
            predictions = _predictions(denoiser, network.log_p(lanes), lanes)
            decision = duel.rule(predictions, lanes)
            if isinstance(decision, torch.Tensor):
                decision = rules.Decision(decision)
            tokens = targets[lanes.row]  # (R, W)
            pick = decision.pick  # (R, W)
            lane, position = pick.nonzero().unbind(1)  # (c,)
            at = lanes.row[lane], start + position
            token_logprobs[at] = predictions.log_prob(tokens)[pick]
            reveal_steps[at] = lanes.step[lane]
            network.reveal(*at)
            lanes = lanes.reveal(pick, tokens, decision.memory)
            if not (masked := lanes.masked.any(1)).all():
                lanes = lanes.select(masked)
        network.finish(start)
    return Revealed(token_logprobs[:, origin:].cpu(), reveal_steps[:, origin:].cpu())


def _predictions(denoiser: Denoiser, log_p: torch.Tensor, lanes: Lanes) -> Predictions:
    """Predictions from log-probabilities (R, W, V) in place of features."""
    all_mask = lanes.masked.all(1) & (lanes.start == 0) & denoiser.relative_positions  # (R,)
    if all_mask.any():  # nothing is visible: an exact tie
        log_p = torch.where(all_mask[:, None, None], log_p[:, :1], log_p)
    rows = log_p[lanes.masked]  # (C, V)
    own = torch.arange(len(rows), device=rows.device)  # (C,)
    return Predictions(lanes.masked, all_mask, rows, own, torch.clone, denoiser.excluded)
