"""Self-tests at load: small forwards that find out what a network does, or show that it is not what it should be.

Shapes: R rows, L row length, U cells, D features, V tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.hf.row_effects import scales_by_length, unscaled_length
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

ALL_MASK_TOLERANCE = 1e-4  # of the logits' spread, in float32; rotary networks were seen at 1.5e-6
COARSE_TOLERANCE = 0.05  # the same in bfloat16 or float16, and of quantised weights
BESIDE_TOLERANCE = 1e-3  # where another cell of the call changes: mixtures of experts round anew, and 8 bits scale anew
BESIDE_QUANTIZED = 0.5
ROTARY_TOLERANCE = 1e-5
PADDING_TOLERANCE = {8: 1e-10, 4: 1e-5}  # of padding that is not seen, by bytes of a number; 1e-7 is usual in float32
NOISE_FACTOR = 8  # of the noise that a batch makes, where that is more
MOST_NOISE = 1e-4
LENGTH = 8
REPEATED = 128  # longer than the chunks in which some networks hash


def probe(denoiser: Denoiser, path: str) -> None:
    """Run every self-test; sets what they find out on the denoiser, or raises DuelError."""
    with torch.inference_mode():
        if denoiser.attention == "block_causal":
            _block_causal(denoiser, path)
            return
        rows = tokens(denoiser)  # (R, L)
        logits = _logits(denoiser, rows)  # (R, L, V)
        require_finite(logits, path)
        direction(denoiser, path, rows, logits)
        if denoiser.attention == "bidirectional":
            require_finite(_logits(denoiser, half_masked(denoiser)), path)
            all_mask = torch.full_like(rows[:1], denoiser.mask_id)  # (1, L)
            denoiser.needs_visible = not bool(_logits(denoiser, all_mask).isfinite().all())
            denoiser.relative_positions = ties_when_all_mask(denoiser)
        denoiser.honours_padding = not scales_by_length(denoiser) and (
            denoiser.attention == "causal" or honours_padding(denoiser)
        )


def tokens(denoiser: Denoiser, length: int = LENGTH, rows: int = 2, seed: int = 1) -> torch.Tensor:
    """Rows of arbitrary tokens (R, L)."""
    known = (~denoiser.excluded).nonzero()[:, 0]  # (T,)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(len(known), (rows, min(length, denoiser.max_length)), generator=generator)  # (R, L)
    return known.cpu()[draw].to(denoiser.device)


def _logits(denoiser: Denoiser, rows: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Logits (R, L, V), zero at columns that are no tokens."""
    features = denoiser.features(rows, real)  # (R, L, D)
    found = denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])  # (R, L, V)
    return found.masked_fill(denoiser.excluded, 0)


def require_finite(logits: torch.Tensor, path: str) -> None:
    """Raise DuelError for NaN or infinite logits."""
    if not logits.isfinite().all():
        raise DuelError(f"{path} returns NaN or infinite logits for arbitrary tokens: its weights or dtype are broken.")


def direction(denoiser: Denoiser, path: str, rows: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise DuelError where what comes later changes a causal network's prediction, or not a bidirectional one's."""
    if rows.shape[1] < 2:
        return
    changed = rows.clone()
    changed[:, -1] = rows[:, 0] if (rows[:, 0] != rows[:, -1]).all() else (~denoiser.excluded).nonzero()[0, 0]
    if (changed == rows).all():
        changed[:, -1] = (~denoiser.excluded).nonzero()[-1, 0]
    moved = differ(_logits(denoiser, changed)[:, :-1], logits[:, :-1])
    if denoiser.attention == "bidirectional" and moved == 0:
        raise DuelError(
            f"{path} is causal: its predictions ignore what comes later, so it is no masked diffusion model. "
            "If it is autoregressive, score it with estimator=ar."
        )
    if denoiser.attention == "causal" and moved > _beside(denoiser, logits):
        raise DuelError(
            f"{path} is not causal: its predictions change with what comes later, so it has no autoregressive "
            "likelihood. Leave estimator=ar and attention=causal out."
        )


def honours_padding(denoiser: Denoiser) -> bool:
    """Whether a row has the same logits beside longer ones as alone, up to float noise.

    The rows are padded as in a batch, and half masked: what padding does may depend on the masked cells of a row.
    """
    row = half_masked(denoiser)  # (1, L)
    length = row.shape[1]
    counts = sorted({1, length // 2, length - 1} - {0, length})
    if not counts:
        return False
    real = torch.arange(length, device=row.device) < torch.tensor([*counts, length], device=row.device)[:, None]
    ids = torch.where(real, row, denoiser.mask_id)  # (R, L)
    try:
        together = _logits(denoiser, ids, real)  # (R, L, V)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):  # it takes no attention mask, or one of another form
        return False
    unmasked = _logits(denoiser, ids)  # (R, L, V)
    alone = [_logits(denoiser, row[:, :count])[0] for count in counts]  # (count, V) each
    leaks = torch.tensor([differ(one, both[: len(one)]) for one, both in zip(alone, together, strict=False)])
    if denoiser.quantized or together.dtype.itemsize < 4:  # noise is large, and differs between networks
        effects = torch.tensor([differ(one, both[: len(one)]) for one, both in zip(alone, unmasked, strict=False)])
        return bool(leaks.max() < 0.1 * effects.max())
    noise = min(differ(_logits(denoiser, row)[0], together[-1]), MOST_NOISE)  # of a row that is not padded
    return bool(leaks.max() <= max(PADDING_TOLERANCE[together.dtype.itemsize], NOISE_FACTOR * noise))


def half_masked(denoiser: Denoiser, length: int = LENGTH) -> torch.Tensor:
    """A row of arbitrary tokens with every second one masked (1, L); its first cell is visible."""
    row = tokens(denoiser, length, rows=1)
    row[:, 1::2] = denoiser.mask_id
    return row


def require_repeatable(denoiser: Denoiser, path: str, length: int = REPEATED) -> None:
    """Raise DuelError if a network draws random numbers, as hashed attention does: then it is no function of a row."""
    row = half_masked(denoiser, length)  # (1, L)
    first = _logits(denoiser, row)
    if not differ(first, _logits(denoiser, row)) <= tolerance(denoiser, first, BESIDE_TOLERANCE):
        raise DuelError(
            f"{path} returns other logits each time for the same row of {row.shape[1]} positions: its forward pass "
            "draws random numbers, as hashed attention does. No text has one likelihood under it, so it is refused."
        )


def ties_when_all_mask(denoiser: Denoiser) -> bool:
    """Whether a row of masks has one distribution at every cell."""
    row = torch.full((1, min(32, denoiser.max_length)), denoiser.mask_id, device=denoiser.device)
    logits = _logits(denoiser, row)[0]  # (L, V)
    return differ(logits, logits[:1].expand_as(logits)) <= tolerance(denoiser, logits)


def _block_causal(denoiser: Denoiser, path: str) -> None:
    """A block must see itself whole, and no later block."""
    block = denoiser.block
    if scales_by_length(denoiser):
        raise DuelError(
            f"The rotary frequencies of {path} change with the longest row of a call, so the values of a block would "
            f"depend on the blocks evaluated beside it. Pass max_length={unscaled_length(denoiser)}: up to there they "
            "are constant."
        )
    rows = tokens(denoiser, 2 * block).repeat(1, 2 * block)[:, : 2 * block]  # (2, 2 B)
    position = torch.arange(2 * block, device=rows.device)
    seen = position[:, None] // block >= position // block  # (2 B, 2 B)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        features, _ = denoiser.stream(ids, position.expand_as(ids), seen.expand(len(ids), -1, -1), None)
        found = denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])  # (R, 2 B, V)
        return found.masked_fill(denoiser.excluded, 0)

    whole = logits(rows)
    require_finite(whole, path)
    later, own = rows.clone(), rows.clone()
    later[:, block:] = rows[:, :1]
    own[:, block - 1] = denoiser.mask_id
    if differ(logits(later)[:, :block], whole[:, :block]) > _beside(denoiser, whole):
        raise DuelError(f"{path} is not block-causal: a later block changes the predictions of an earlier one.")
    if block > 1 and differ(logits(own)[:, : block - 1], whole[:, : block - 1]) == 0:
        raise DuelError(f"{path} is causal inside its blocks: its predictions ignore what comes later in the block.")
    masks = torch.full((1, block), denoiser.mask_id, device=rows.device)
    inside = torch.ones(1, block, block, dtype=torch.bool, device=rows.device)
    features, _ = denoiser.stream(masks, position[None, :block], inside, None)
    all_mask = denoiser.head(features[0]).masked_fill(denoiser.excluded, 0)  # (B, V)
    denoiser.relative_positions = differ(all_mask, all_mask[:1].expand_as(all_mask)) <= tolerance(
        denoiser, all_mask, BESIDE_TOLERANCE
    )
    denoiser.honours_padding = True  # it lies in later blocks, or is left out of what is seen


def rotary_frequencies(model: torch.nn.Module, config: Any, path: str) -> None:
    """Raise DuelError where rotary frequencies are not theta^(-2i/d): some loaders leave them uninitialised."""
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    found = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not found or theta is None:
        return
    if kind != "default":
        log.info("rotary positions of %s are scaled (%s): their frequencies are not checked", path, kind)
        return
    for name, buffer in found:
        if buffer.is_meta:
            continue
        right = theta ** -(torch.arange(len(buffer), dtype=torch.float64) / len(buffer))  # (d / 2,)
        noise = ROTARY_TOLERANCE if buffer.dtype.itemsize >= 4 else 0.01
        if not torch.allclose(buffer.double().cpu(), right, rtol=noise, atol=0):
            raise DuelError(
                f"The rotary frequencies of {path} ({name}) are not {theta:g}^(-2i/d): they were not loaded or "
                "computed right, and every prediction would be noise. Leave backend=remote "
                "out, or use another transformers."
            )


def tolerance(denoiser: Denoiser, logits: torch.Tensor, fine: float = ALL_MASK_TOLERANCE) -> float:
    """The difference of logits, in units of their spread, that is noise of this network; `fine`: in float32."""
    return COARSE_TOLERANCE if denoiser.quantized or logits.dtype.itemsize < 4 else fine


def _beside(denoiser: Denoiser, logits: torch.Tensor) -> float:
    """The same where another cell of a call changes."""
    return BESIDE_QUANTIZED if denoiser.quantized else tolerance(denoiser, logits, BESIDE_TOLERANCE)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of logits, in units of their spread."""
    return float((a.double() - b.double()).abs().max() / a.double().std().clamp(min=1e-12))
