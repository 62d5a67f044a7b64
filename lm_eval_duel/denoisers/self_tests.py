"""Self-tests at load: small forward passes that detect properties of a network and check the declared ones.

Shapes: R rows, L row length, B the trained block, D features, V tokens, T of them without [MASK] and padding.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import is_routed
from lm_eval_duel.core.reveal import VALUES, free
from lm_eval_duel.denoisers import user_module
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

# differences of logits, in units of their standard deviation
ALL_MASK_TOLERANCE = 1e-4  # float32; rotary networks reach 1.5e-6
LOW_PRECISION_TOLERANCE = 0.05  # bfloat16, float16 and quantized weights
BATCH_TOLERANCE = 1e-3  # when another position changes: mixtures of experts and 8-bit scales round differently
BATCH_TOLERANCE_QUANTIZED = 0.5
PADDING_TOLERANCE = {8: 1e-10, 4: 1e-5}  # of padding that is not seen, by item size; 1e-7 is usual in float32
NOISE_FACTOR = 8  # of the noise between batches, if that is larger
MOST_NOISE = 1e-4
ROTARY_TOLERANCE = 1e-5  # relative
LENGTH = 8
MANY = 128  # tokens of the rows among which a row is tested: enough to fill an expert's capacity
REPEATED = 128  # positions; longer than the chunks in which some networks hash
LENGTHENED = ("dynamic", "longrope")  # rotary types that depend on the row length


def run(denoiser: Denoiser, path: str, refuse: bool = True) -> None:
    """Run the self-tests; sets the detected properties on the denoiser, or with `refuse` raises DuelError."""
    # not inference_mode: a network may keep what it computes here, and be trained afterwards
    with torch.no_grad(), user_module.buffers_kept(denoiser):
        if denoiser.by_blocks:
            _by_blocks(denoiser, path)
            return
        rows = probe_rows(denoiser)  # (R, L)
        logits = logits_of(denoiser, rows)  # (R, L, V)
        require_dependence(path, rows, logits)
        if refuse:
            require_finite(logits, path)
            require_direction(denoiser, path, rows, logits)
            require_separate_rows(denoiser, path)
        if denoiser.attention == "bidirectional":
            if refuse:
                require_finite(logits_of(denoiser, half_masked(denoiser)), path)
            all_mask = torch.full_like(rows[:1], denoiser.mask_id)  # (1, L)
            denoiser.needs_visible = not bool(logits_of(denoiser, all_mask).isfinite().all())
            denoiser.relative_positions = ties_when_all_mask(denoiser)
        denoiser.honours_padding = _unscaled_length(denoiser) is None and (
            denoiser.attention == "causal" or honours_padding(denoiser)
        )


def random_rows(denoiser: Denoiser, length: int = LENGTH, rows: int = 2, seed: int = 1) -> torch.Tensor:
    """Rows of random tokens (R, L), the same for the same seed."""
    tokens = (~denoiser.excluded).nonzero()[:, 0]  # (T,)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(len(tokens), (rows, min(length, denoiser.max_length)), generator=generator)  # (R, L)
    return tokens.cpu()[draw].to(denoiser.device)


def probe_rows(denoiser: Denoiser) -> torch.Tensor:
    """Rows of random tokens (R, L) that begin and end with a visible one, with masks between if the network has any."""
    rows = random_rows(denoiser)
    if denoiser.mask_id is not None:
        rows[:, 1:-1:2] = denoiser.mask_id
    return rows


def logits_of(
    denoiser: Denoiser, rows: torch.Tensor, real: torch.Tensor | None = None, of: slice = slice(None)
) -> torch.Tensor:
    """Logits (R, L, V) of the rows `of` a call, zero at excluded columns, and at visible positions that are never used.

    MDLM's forward sets them to -1e6 there, next to which all differences between predictions would look like noise.
    """
    features = _stream(denoiser, rows) if denoiser.by_blocks else denoiser.features(rows, real)
    rows, features = rows[of], features[of]  # (R, L), (R, L, D)
    logits = denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2]).masked_fill(denoiser.excluded, 0)
    if denoiser.attention == "bidirectional" and not denoiser.shift and denoiser.max_length > 2:
        logits = logits.masked_fill((rows != denoiser.mask_id)[..., None], 0)
    return logits


def _stream(denoiser: Denoiser, rows: torch.Tensor) -> torch.Tensor:
    """The features (R, L, D) of rows of one masked block, or of a clean one and a masked one."""
    position = torch.arange(rows.shape[1], device=rows.device)  # (L,)
    seen = position[:, None] // denoiser.block >= position // denoiser.block  # (L, L)
    if denoiser.attention == "causal_prefix" and len(position) > denoiser.block:
        seen[: denoiser.block] = position[: denoiser.block, None] >= position
    return denoiser.stream(rows, position.expand_as(rows), seen.expand(len(rows), -1, -1), None)[0]


def require_finite(logits: torch.Tensor, path: str) -> None:
    """Raise DuelError for NaN or infinite logits."""
    if not logits.isfinite().all():
        raise DuelError(f"{path} returns NaN or infinite logits for arbitrary tokens: its weights or dtype are broken.")


def require_dependence(path: str, rows: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise DuelError if two different rows (R, L) have the same logits (R, L, V): nothing can be detected then."""
    if torch.equal(logits[0], logits[1]) and not torch.equal(rows[0], rows[1]):
        raise DuelError(
            f"{path} predicts the same for every row, as an untrained network whose head starts at zero. Train it for "
            "a few steps first."
        )


def require_direction(denoiser: Denoiser, path: str, rows: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise DuelError if a causal network looks ahead, or a bidirectional one does not."""
    if rows.shape[1] < 2:
        return
    changed, tokens = rows.clone(), (~denoiser.excluded).nonzero()[:, 0]  # (R, L), (T,)
    changed[:, -1] = torch.where(rows[:, -1] == tokens[0], tokens[-1], tokens[0])
    difference = relative_difference(logits_of(denoiser, changed)[:, :-1], logits[:, :-1])
    if denoiser.attention == "bidirectional" and difference == 0:
        raise DuelError(
            f"{path} is causal: its predictions ignore later tokens. If it is autoregressive, score it with "
            "estimator=ar. If its layers start at zero, train it for a few steps first."
        )
    if denoiser.attention == "causal" and difference > _batch_tolerance(denoiser, logits):
        raise DuelError(
            f"{path} is not causal: its predictions depend on later tokens. Leave estimator=ar and attention=causal "
            "out."
        )


def honours_padding(denoiser: Denoiser) -> bool:
    """True if a half-masked row has the same logits in a batch with longer ones as alone, up to float noise."""
    row = half_masked(denoiser)  # (1, L)
    length = row.shape[1]
    counts = sorted({1, length // 2, length - 1} - {0, length})
    if not counts:
        return False
    real = torch.arange(length, device=row.device) < torch.tensor([*counts, length], device=row.device)[:, None]
    ids = torch.where(real, row, denoiser.mask_id)  # (R, L)
    try:
        together = logits_of(denoiser, ids, real)  # (R, L, V)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):  # it accepts no attention mask, or one of another form
        return False
    unmasked = logits_of(denoiser, ids)  # (R, L, V)
    alone = [logits_of(denoiser, row[:, :count])[0] for count in counts]  # (count, V) each

    def effect(batch: torch.Tensor) -> float:
        pairs = zip(alone, batch, strict=False)  # the last row of the batch is not padded
        return float(torch.tensor([relative_difference(row, padded[: len(row)]) for row, padded in pairs]).max())

    if denoiser.quantized or together.dtype.itemsize < 4:  # noise is large and differs between networks
        return effect(together) < 0.1 * effect(unmasked)
    noise = min(relative_difference(logits_of(denoiser, row)[0], together[-1]), MOST_NOISE)
    return effect(together) <= max(PADDING_TOLERANCE[together.dtype.itemsize], NOISE_FACTOR * noise)


def half_masked(denoiser: Denoiser, length: int = LENGTH) -> torch.Tensor:
    """A row of random tokens with every second one masked (1, L); its first position is visible."""
    row = random_rows(denoiser, length, rows=1)
    row[:, 1::2] = denoiser.mask_id
    return row


def require_repeatable(denoiser: Denoiser, path: str, length: int = REPEATED) -> None:
    """Raise DuelError if a network draws random numbers, as hashed attention does: it is not a function of the row."""
    row = half_masked(denoiser, length)  # (1, L)
    first = logits_of(denoiser, row)
    if not relative_difference(first, logits_of(denoiser, row)) <= tolerance(denoiser, first, BATCH_TOLERANCE):
        raise DuelError(
            f"{path} returns different logits each time for the same row of {row.shape[1]} positions: it draws random "
            "numbers, as hashed attention does, and gives no text a single likelihood."
        )


def require_separate_rows(denoiser: Denoiser, path: str, tokens: int = MANY) -> None:
    """Raise DuelError if the other rows of a call of `tokens` positions change the logits of a row.

    They are many and equal, so that they fill an expert's capacity.
    """
    length = 2 * denoiser.block if denoiser.by_blocks else LENGTH
    row = random_rows(denoiser, length, rows=1)  # (1, L)
    row = row.repeat(1, length)[:, :length] if denoiser.by_blocks else row
    strangers = [row.flip(1), row[:, :1].expand_as(row)]
    if denoiser.mask_id is not None:
        row[:, 1::2] = denoiser.mask_id
        strangers[1] = torch.full_like(row, denoiser.mask_id)
    alone, count = logits_of(denoiser, row)[0], max(3, tokens // row.shape[1] - 1)
    allowed = _batch_tolerance(denoiser, alone) if alone.dtype.itemsize >= 4 else BATCH_TOLERANCE_QUANTIZED
    if tokens > MANY and is_routed(denoiser):  # among many rows, noise may choose other experts
        allowed = BATCH_TOLERANCE_QUANTIZED
    if not relative_difference(logits_of(denoiser, row)[0], alone) <= allowed:
        return  # it draws random numbers, and `require_repeatable` refuses it
    for stranger in strangers:
        call = torch.cat([stranger.expand(count, -1), row])  # (count + 1, L)
        among = logits_of(denoiser, call, of=slice(-1, None))[0]  # (L, V)
        if not relative_difference(among, alone) <= allowed:
            raise DuelError(
                f"{path} predicts differently for a row alone and for the same row in a batch: its rows influence "
                "each other, as in a mixture of experts with a capacity, or batch normalisation in training mode. Put "
                "every module into eval mode, and switch the capacity off."
            )
    denoiser.separate_tokens = max(denoiser.separate_tokens, tokens)


def cover(denoiser: Denoiser, tokens: int) -> None:
    """Repeat the test of separate rows with the `tokens` that a call of the run holds, if they were tested at load."""
    plain = denoiser
    while isinstance(plain, Wrapper):
        plain = plain.plain
    if not plain.splits_head:  # its calls hold fewer
        tokens = min(tokens, VALUES // plain.vocab_size)
    while 0 < plain.separate_tokens < tokens:
        try:
            with torch.inference_mode(), user_module.buffers_kept(plain):
                require_separate_rows(plain, str(getattr(plain, "path", "The network")), tokens)
            return
        except torch.OutOfMemoryError:  # neither will a call of the run have as many
            free(plain.device)
            tokens //= 2


def ties_when_all_mask(denoiser: Denoiser, length: int = 32, fine: float = ALL_MASK_TOLERANCE) -> bool:
    """True if a row of masks has the same distribution at every position, up to noise, which is `fine` in float32."""
    row = torch.full((1, min(length, denoiser.max_length)), denoiser.mask_id, device=denoiser.device)
    logits = logits_of(denoiser, row)[0]  # (L, V)
    return relative_difference(logits, logits[:1].expand_as(logits)) <= tolerance(denoiser, logits, fine)


def _by_blocks(denoiser: Denoiser, path: str) -> None:
    """Check that a block sees all of itself, and that clean positions see no later block."""
    block, kind = denoiser.block, denoiser.attention.replace("_", "-")
    if (unscaled := _unscaled_length(denoiser)) is not None:
        raise DuelError(
            f"The rotary frequencies of {path} change with the longest row of a call, but not up to {unscaled} "
            f"positions: pass max_length={unscaled}."
        )
    rows = random_rows(denoiser, 2 * block).repeat(1, 2 * block)[:, : 2 * block]  # (2, 2 B)
    whole = logits_of(denoiser, rows)  # (2, 2 B, V)
    require_finite(whole, path)
    require_separate_rows(denoiser, path)
    later, own = rows.clone(), rows.clone()
    later[:, block:] = rows[:, :1]
    own[:, -1] = denoiser.mask_id
    if relative_difference(logits_of(denoiser, later)[:, :block], whole[:, :block]) > _batch_tolerance(denoiser, whole):
        raise DuelError(f"{path} is not {kind}: a later block changes the predictions of an earlier one.")
    if block > 1 and relative_difference(logits_of(denoiser, own)[:, block:-1], whole[:, block:-1]) == 0:
        raise DuelError(f"{path} is causal inside its blocks: its predictions ignore later tokens of the block.")
    denoiser.relative_positions = ties_when_all_mask(denoiser, block, BATCH_TOLERANCE)
    denoiser.honours_padding = True  # padding lies in later blocks, or is masked


def rotary_frequencies(model: torch.nn.Module, config: Any, path: str) -> None:
    """Raise DuelError if rotary frequencies are not theta^(-2i/d): some loaders leave them uninitialised."""
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not buffers or theta is None:
        return
    if kind != "default":
        log.info("Rotary positions of %s are scaled (%s): their frequencies are not checked", path, kind)
        return
    for name, buffer in buffers:
        if buffer.is_meta:
            continue
        expected = theta ** -(torch.arange(len(buffer), dtype=torch.float64) / len(buffer))  # (d / 2,)
        noise = ROTARY_TOLERANCE if buffer.dtype.itemsize >= 4 else 0.01
        if not torch.allclose(buffer.double().cpu(), expected, rtol=noise, atol=0):
            raise DuelError(
                f"The rotary frequencies of {path} ({name}) are not {theta:g}^(-2i/d), so every prediction would be "
                "noise. Leave backend=remote out, or use another release of transformers."
            )


def tolerance(denoiser: Denoiser, logits: torch.Tensor, fine: float = ALL_MASK_TOLERANCE) -> float:
    """The relative difference of logits that counts as noise of this network. `fine`: the one in float32."""
    return LOW_PRECISION_TOLERANCE if denoiser.quantized or logits.dtype.itemsize < 4 else fine


def _batch_tolerance(denoiser: Denoiser, logits: torch.Tensor) -> float:
    """The tolerance where another position of the call changes."""
    return BATCH_TOLERANCE_QUANTIZED if denoiser.quantized else tolerance(denoiser, logits, BATCH_TOLERANCE)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of logits, in units of their standard deviation."""
    return float((a.double() - b.double()).abs().max() / a.double().std().clamp(min=1e-12))


def _unscaled_length(denoiser: Denoiser) -> int | None:
    """The length up to which rotary frequencies are constant, as in Phi-3's long versions; None if they always are."""
    config = getattr(getattr(denoiser, "model", None), "config", None)
    sections = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    sections += [part for section in sections for part in section.values() if isinstance(part, dict)]  # per layer type
    if not any((section.get("rope_type") or section.get("type")) in LENGTHENED for section in sections):
        return None
    names = ("original_max_position_embeddings", "max_position_embeddings")
    lengths = [section.get(names[0]) for section in sections] + [getattr(config, name, None) for name in names]
    unscaled = min((length for length in lengths if length), default=0)
    return unscaled if denoiser.max_length > unscaled else None
