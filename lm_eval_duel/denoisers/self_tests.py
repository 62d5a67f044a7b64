"""Self-tests at load: small forward passes that detect properties of a network and check the declared ones.

Shapes: R rows, L row length, B the trained block, D features, V tokens, T of them without [MASK] and padding.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel.core.batch_size import VALUES, free
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import (
    CAUSES,
    COARSE,
    FLOAT32,
    ROUTED,
    difference,
    is_coarse,
    is_routed,
    random_rows,
    spread,
)
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

ALONE = 1e-4  # a difference in float32 where nothing else in the call changes; rotary networks reach 1.5e-6
PADDING_TOLERANCE = {8: 1e-10, 4: 1e-5}  # of padding that is not seen, by item size; 1e-7 is usual in float32
NOISE_FACTOR = 8  # padding may change logits by this many times the noise between batches, if that is more
MOST_NOISE = 1e-4
ROTARY_TOLERANCE = 1e-5  # relative
LENGTH = 8
MANY = 128  # tokens of the rows among which a row is tested: enough to fill an expert's capacity
REPEATED = 128  # positions; longer than the chunks in which some networks hash
KEPT = 1 << 20  # values of a buffer that is restored: larger ones are weights
LENGTHENED = ("dynamic", "longrope")  # rotary types that depend on the row length


def run(denoiser: Denoiser, path: str, refuse: bool = True) -> None:
    """Run the self-tests; sets the detected properties on the denoiser, or with `refuse` raises DuelError."""
    # not inference_mode: a network may keep what it computes here, and be trained afterwards
    with torch.no_grad(), buffers_kept(denoiser):
        if denoiser.by_blocks:
            _by_blocks(denoiser, path)
        else:
            _by_rows(denoiser, path, refuse)


def _by_rows(denoiser: Denoiser, path: str, refuse: bool) -> None:
    """The self-tests of a network that sees whole rows."""
    rows = probe_rows(denoiser)  # (R, L)
    logits = logits_of(denoiser, rows)  # (R, L, V)
    require_dependence(path, rows, logits)
    if refuse:
        require_finite(logits, path)
        require_direction(denoiser, path, rows, logits)
        require_separate_rows(denoiser, path)

    if denoiser.attention == "bidirectional":
        if refuse:
            half = half_masked(denoiser)
            require_finite(logits_of(denoiser, half), path)
        all_mask = torch.full_like(rows[:1], denoiser.mask_id)  # (1, L)
        of_masks = logits_of(denoiser, all_mask)  # (1, L, V)
        denoiser.needs_visible = not bool(of_masks.isfinite().all())
        denoiser.relative_positions = ties_when_all_mask(denoiser)

    if _unscaled_length(denoiser) is not None:  # its frequencies depend on the longest row of a call
        denoiser.honours_padding = False
    elif denoiser.attention == "causal":  # padding is on the right, where it never looks
        denoiser.honours_padding = True
    else:
        denoiser.honours_padding = honours_padding(denoiser)


def probe_rows(denoiser: Denoiser) -> torch.Tensor:
    """Rows of random tokens (R, L) that begin and end with a visible one, with masks between if the network has any."""
    rows = random_rows(denoiser, LENGTH)
    if denoiser.mask_id is not None:
        rows[:, 1:-1:2] = denoiser.mask_id
    return rows


def two_blocks(denoiser: Denoiser, rows: int = 2) -> torch.Tensor:
    """Rows of random tokens (rows, 2 B); those of a network that takes no two blocks are repeated."""
    length = 2 * denoiser.block
    drawn = random_rows(denoiser, length, rows)  # shorter than `length` if the network takes no more
    return drawn.repeat(1, length)[:, :length]


def logits_of(
    denoiser: Denoiser,
    rows: torch.Tensor,
    real: torch.Tensor | None = None,
    wanted: slice = slice(None),
) -> torch.Tensor:
    """Logits (R, L, V) of the `wanted` rows of a call, zero at excluded columns and at positions that are never read.

    MDLM's forward sets visible positions to -1e6, next to which all differences of predictions would look like noise.
    """
    features = _stream(denoiser, rows) if denoiser.by_blocks else denoiser.features(rows, real)
    rows = rows[wanted]  # (R, L)
    features = features[wanted]  # (R, L, D)
    flat = denoiser.head(features.flatten(0, 1))  # (R L, V)
    logits = flat.unflatten(0, features.shape[:2])
    logits = logits.masked_fill(denoiser.excluded, 0)
    if denoiser.attention == "bidirectional" and not denoiser.shift and denoiser.max_length > 2:
        is_visible = rows != denoiser.mask_id  # (R, L)
        logits = logits.masked_fill(is_visible[..., None], 0)
    return logits


def _stream(denoiser: Denoiser, rows: torch.Tensor) -> torch.Tensor:
    """The features (R, L, D) of rows of one masked block, or of a clean one and a masked one."""
    block = denoiser.block
    position = torch.arange(rows.shape[1], device=rows.device)  # (L,)
    number = position // block  # (L,) of each position's block
    seen = number[:, None] >= number  # (L, L)
    if denoiser.attention == "causal_prefix" and len(position) > block:
        seen[:block] = position[:block, None] >= position  # the clean block is causal
    positions = position.expand_as(rows)
    every_seen = seen.expand(len(rows), -1, -1)
    features, _ = denoiser.stream(rows, positions, every_seen, None)
    return features


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
    # Change the last token of each row, and look at the predictions before it.
    tokens = (~denoiser.excluded).nonzero()[:, 0]  # (T,)
    last = rows[:, -1]
    changed = rows.clone()  # (R, L)
    changed[:, -1] = torch.where(last == tokens[0], tokens[-1], tokens[0])
    before = logits_of(denoiser, changed)[:, :-1]
    change = difference_of(before, logits[:, :-1])
    if denoiser.attention == "bidirectional" and change == 0:
        raise DuelError(
            f"{path} is causal: its predictions ignore later tokens. If it is autoregressive, score its "
            "checkpoint with estimator=ar. If its layers start at zero, train it for a few steps first."
        )
    if denoiser.attention == "causal" and not change <= noise_in_company(denoiser, logits):
        raise DuelError(
            f"{path} is not causal: its predictions depend on later tokens. Leave estimator=ar and attention=causal "
            "out."
        )


def honours_padding(denoiser: Denoiser) -> bool:
    """True if a half-masked row has the same logits in a batch with longer ones as alone, up to float noise."""
    row = half_masked(denoiser)  # (1, L)
    length = row.shape[1]
    shorter = sorted({1, length // 2, length - 1} - {0, length})
    if not shorter:
        return False
    lengths = torch.tensor([*shorter, length], device=row.device)  # (R,) the last row is not padded
    real = torch.arange(length, device=row.device) < lengths[:, None]  # (R, L)
    ids = torch.where(real, row, denoiser.mask_id)  # (R, L)
    try:
        together = logits_of(denoiser, ids, real)  # (R, L, V)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError):  # it accepts no attention mask, or one of another form
        return False
    padding_seen = logits_of(denoiser, ids)  # (R, L, V) the same without an attention mask
    alone = [logits_of(denoiser, row[:, :count])[0] for count in shorter]  # (count, V) each

    def effect_of_padding(batch: torch.Tensor) -> float:
        differences = []
        for n, expected in enumerate(alone):
            differences.append(difference_of(expected, batch[n, : len(expected)]))
        return float(torch.tensor(differences).max())  # unlike Python's, torch's max is NaN if one of them is

    effect = effect_of_padding(together)
    if denoiser.quantized or together.dtype.itemsize < 4:
        # Noise is large here, and differs between networks: compare with the effect of padding that is seen.
        return effect < 0.1 * effect_of_padding(padding_seen)
    unpadded = logits_of(denoiser, row)[0]  # (L, V)
    noise = min(difference_of(unpadded, together[-1]), MOST_NOISE)
    tolerance = PADDING_TOLERANCE[together.dtype.itemsize]
    return effect <= max(tolerance, NOISE_FACTOR * noise)


def half_masked(denoiser: Denoiser, length: int = LENGTH) -> torch.Tensor:
    """A row of random tokens with every second one masked (1, L); its first position is visible."""
    row = random_rows(denoiser, length, rows=1)
    row[:, 1::2] = denoiser.mask_id
    return row


def require_repeatable(denoiser: Denoiser, path: str, length: int = REPEATED) -> None:
    """Raise DuelError if a network draws random numbers, as hashed attention does: it is not a function of the row."""
    row = half_masked(denoiser, length)  # (1, L)
    first = logits_of(denoiser, row)
    second = logits_of(denoiser, row)
    difference = difference_of(first, second)
    if not difference <= noise_alone(denoiser, first, FLOAT32):  # a NaN fails, too
        raise DuelError(
            f"{path} returns different logits each time for the same row of {row.shape[1]} positions: it draws random "
            "numbers, as hashed attention does, and gives no text a single likelihood."
        )


def require_separate_rows(denoiser: Denoiser, path: str, tokens: int = MANY) -> None:
    """Raise DuelError if the other rows of a call of `tokens` positions change the logits of a row.

    They are many and equal, so that they fill an expert's capacity.
    """
    row = random_rows(denoiser, LENGTH, rows=1)  # (1, L)
    if denoiser.by_blocks:
        row = two_blocks(denoiser, rows=1)
    # other rows of the call: the same tokens in reverse, and one token (or [MASK]) throughout
    strangers = [row.flip(1), row[:, :1].expand_as(row)]
    if denoiser.mask_id is not None:
        row[:, 1::2] = denoiser.mask_id
        strangers[1] = torch.full_like(row, denoiser.mask_id)
    count = max(3, tokens // row.shape[1] - 1)

    alone = logits_of(denoiser, row)[0]  # (L, V)
    allowed = noise_in_company(denoiser, alone)
    may_choose_others = tokens > MANY and is_routed(denoiser)  # other experts, by the noise of many rows
    if alone.dtype.itemsize < 4 or may_choose_others:
        allowed = ROUTED

    again = logits_of(denoiser, row)[0]  # (L, V)
    if not difference_of(again, alone) <= allowed:
        return  # it draws random numbers, and `require_repeatable` refuses it
    for stranger in strangers:
        call = torch.cat([stranger.expand(count, -1), row])  # (count + 1, L)
        [in_company] = logits_of(denoiser, call, wanted=slice(-1, None))  # (L, V)
        if not difference_of(in_company, alone) <= allowed:
            raise DuelError(
                f"{path} predicts differently for a row alone and for the same row in a batch: the other rows of a "
                f"call change it, as {CAUSES} do. Put every module into eval mode, and make the network a function of "
                "each row."
            )
    denoiser.separate_tokens = max(denoiser.separate_tokens, tokens)


def cover(denoiser: Denoiser, tokens: int) -> None:
    """Repeat the test of separate rows with the `tokens` that a call of the run holds, if they were tested at load."""
    plain = denoiser
    while isinstance(plain, Wrapper):
        plain = plain.plain
    if not plain.splits_head:  # its calls make logits at every position, so they hold fewer
        tokens = min(tokens, VALUES // plain.vocab_size)
    name = str(getattr(plain, "path", "The network"))
    while 0 < plain.separate_tokens < tokens:
        try:
            with torch.inference_mode(), buffers_kept(plain):
                require_separate_rows(plain, name, tokens)
            return
        except torch.OutOfMemoryError:  # neither will a call of the run have as many
            free(plain.device)
            tokens //= 2


def ties_when_all_mask(denoiser: Denoiser, length: int = 32, in_float32: float = ALONE) -> bool:
    """True if a row of masks has the same distribution at every position, up to noise: `in_float32` in that dtype."""
    length = min(length, denoiser.max_length)
    row = torch.full((1, length), denoiser.mask_id, device=denoiser.device)
    logits = logits_of(denoiser, row)[0]  # (L, V)
    first = logits[:1].expand_as(logits)
    return difference_of(logits, first) <= noise_alone(denoiser, logits, in_float32)


def _by_blocks(denoiser: Denoiser, path: str) -> None:
    """Check that a block sees all of itself, and that clean positions see no later block."""
    block = denoiser.block
    kind = denoiser.attention.replace("_", "-")
    unscaled = _unscaled_length(denoiser)
    if unscaled is not None:
        raise DuelError(
            f"The rotary frequencies of {path} change with the longest row of a call, but not up to {unscaled} "
            f"positions: pass max_length={unscaled}."
        )
    rows = two_blocks(denoiser)  # (2, 2 B)
    whole = logits_of(denoiser, rows)  # (2, 2 B, V)
    require_finite(whole, path)
    require_separate_rows(denoiser, path)

    other_block = rows.clone()
    other_block[:, block:] = rows[:, :1]
    changed = logits_of(denoiser, other_block)
    change = difference_of(changed[:, :block], whole[:, :block])
    if not change <= noise_in_company(denoiser, whole):
        raise DuelError(f"{path} is not {kind}: a later block changes the predictions of an earlier one.")

    other_end = rows.clone()
    other_end[:, -1] = denoiser.mask_id
    changed = logits_of(denoiser, other_end)
    change = difference_of(changed[:, block:-1], whole[:, block:-1])
    if block > 1 and change == 0:
        raise DuelError(f"{path} is causal inside its blocks: its predictions ignore later tokens of the block.")

    denoiser.relative_positions = ties_when_all_mask(denoiser, block, FLOAT32)
    denoiser.honours_padding = True  # padding lies in later blocks, or is masked


def rotary_frequencies(model: torch.nn.Module, config: Any, path: str) -> None:
    """Raise DuelError if rotary frequencies are not theta^(-2i/d): some loaders leave them uninitialised."""
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or {}
    kinds = [parameters.get("rope_type"), scaling.get("rope_type"), scaling.get("type")]
    kind = next(filter(None, kinds), "default")
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    buffers = {}
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffers[name] = buffer
    if not buffers or theta is None:
        return
    if kind != "default":
        log.info("Rotary positions of %s are scaled (%s): their frequencies are not checked", path, kind)
        return

    for name, buffer in buffers.items():
        if buffer.is_meta:
            continue
        exponent = torch.arange(len(buffer), dtype=torch.float64) / len(buffer)  # (d / 2,)
        expected = theta**-exponent
        noise = ROTARY_TOLERANCE if buffer.dtype.itemsize >= 4 else 0.01
        if not torch.allclose(buffer.double().cpu(), expected, rtol=noise, atol=0):
            raise DuelError(
                f"The rotary frequencies of {path} ({name}) are not {theta:g}^(-2i/d), so every prediction would be "
                "noise. Leave backend=remote out, or use another release of transformers."
            )


def difference_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of logits (..., V), in units of their spread; NaN if the first ones hold a NaN."""
    return difference(one, other, spread(one))


def noise_alone(denoiser: Denoiser, logits: torch.Tensor, in_float32: float = ALONE) -> float:
    """The difference that is float noise where nothing else in the call changes; `in_float32` in that dtype.

    The dtype is that of the logits: a user's function may return coarser ones than its weights.
    """
    if is_coarse(denoiser) or logits.dtype.itemsize < 4:
        return COARSE
    return in_float32


def noise_in_company(denoiser: Denoiser, logits: torch.Tensor) -> float:
    """The difference that is float noise where another position of the call changes, as for `float_noise.tolerance`."""
    if denoiser.quantized:  # the scales of 8 bits are made for all rows of a call together
        return ROUTED
    return noise_alone(denoiser, logits, FLOAT32)


def _unscaled_length(denoiser: Denoiser) -> int | None:
    """The length up to which rotary frequencies are constant, as in Phi-3's long versions; None if they always are."""
    config = getattr(getattr(denoiser, "model", None), "config", None)
    sections = []
    for name in ("rope_parameters", "rope_scaling"):
        section = getattr(config, name, None) or {}
        by_layer_type = [part for part in section.values() if isinstance(part, dict)]
        sections += [section, *by_layer_type]
    kinds = {section.get("rope_type") or section.get("type") for section in sections}
    if kinds.isdisjoint(LENGTHENED):
        return None

    lengths = [section.get("original_max_position_embeddings") for section in sections]
    for name in ("original_max_position_embeddings", "max_position_embeddings"):
        lengths.append(getattr(config, name, None))
    unscaled = min(filter(None, lengths), default=0)
    return unscaled if denoiser.max_length > unscaled else None


# ---------------------------------------------------------------- what calls leave behind


def module_of(model: Any) -> torch.nn.Module | None:
    """The module that every call runs, if it can be known."""
    if isinstance(model, torch.nn.Module):
        return model
    if isinstance(model, Denoiser):
        with contextlib.suppress(NotImplementedError):
            return model.layers
    owner = getattr(model, "__self__", None)  # of a bound method
    return owner if isinstance(owner, torch.nn.Module) else None


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The modules of a network that can be found, including the modules that a function refers to."""
    module = module_of(model)
    if module is not None:
        return [module]
    values = []
    if isinstance(model, Denoiser):
        values += vars(model).values()
    function = getattr(model, "function", model)
    if inspect.isfunction(function):
        scope = inspect.getclosurevars(function)
        values += [*scope.nonlocals.values(), *scope.globals.values()]
    return [value for value in values if isinstance(value, torch.nn.Module)]


@contextlib.contextmanager
def buffers_kept(model: Any) -> Iterator[None]:
    """Restore the buffers that calls of a network change, such as running statistics."""
    kept = []
    for module in modules_of(model):
        for buffer in module.buffers():
            if buffer.numel() <= KEPT and not buffer.is_meta:
                kept.append((buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)
