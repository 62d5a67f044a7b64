"""Our own DiT: the network behind MDLM, BD3-LM, SEDD and the MDLM authors' AR baseline.

Written from the published description of the architecture: float32, scaled dot product attention. None of a
checkpoint's code is run. The parameters have the names of the authors' files:

    vocab_embed.embedding, sigma_map.mlp.{0,2}, blocks.N.{norm1,attn_qkv,attn_out,norm2,mlp.{0,2},adaLN_modulation},
    output_layer.{norm_final,linear,adaLN_modulation}

Shapes: R rows, L row length, K keys, M columns asked for, D width, H heads, V tokens.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

from lm_eval_duel.core.network import KeysValues, joined, take
from lm_eval_duel.errors import DuelError

FREQUENCIES = 256  # of the time embedding


@dataclasses.dataclass(frozen=True)
class DiTConfig:
    """The shape of a DiT."""

    vocab_size: int  # [MASK] included
    width: int
    layers: int
    heads: int
    condition: int = 128  # width of the time condition
    adaptive: bool = True  # layers are modulated by the time condition (all but the AR baseline)
    time: bool = False  # the network reads the noise level; otherwise the time condition is of level 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise DuelError(f"{self.heads} heads do not divide a width of {self.width} into even parts.")


def rotary(positions: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation at `positions` (R, L), (R, 1, L, head) each."""
    index = torch.arange(0, head, 2, device=positions.device, dtype=torch.float32)  # (head / 2,)
    frequency = 10_000.0 ** -(index / head)
    angle = positions[:, None, :, None].float() * frequency  # (R, 1, L, head / 2)
    angle = torch.cat([angle, angle], dim=3)  # (R, 1, L, head)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys (R, H, L, head), halves against each other (NeoX)."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


class TimeEmbedding(nn.Module):
    """The condition (R, condition) of a noise level sigma (R,)."""

    def __init__(self, condition: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(FREQUENCIES, condition),
            nn.SiLU(),
            nn.Linear(condition, condition),
        )

    def forward(self, sigma: torch.Tensor) -> torch.Tensor:
        half = FREQUENCIES // 2
        steps = torch.arange(half, device=sigma.device, dtype=torch.float32) / half  # (half,)
        angle = sigma.float()[:, None] * torch.exp(-math.log(10_000) * steps)  # (R, half)
        wave = torch.cat([angle.cos(), angle.sin()], dim=1)  # (R, 256)
        return F.silu(self.mlp(wave.to(self.mlp[0].weight.dtype)))


def at_columns(plane: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The rows `columns` (R, M) of a plane that all heads share, (R, 1, L, ...) -> (R, 1, M, ...)."""
    return take(plane[:, 0], columns)[:, None]


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift, of (R, L, D) with (R, 1, D)."""
    return torch.addcmul(shift, x, 1 + scale)


class Block(nn.Module):
    """Attention and MLP, each modulated and gated by the condition if the network is adaptive."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )
        self.adaLN_modulation = nn.Linear(config.condition, 6 * width) if config.adaptive else None

    def split(self, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        """Split (R, L, parts x D) into queries, keys, values, (R, H, L, head) each."""
        return x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(
        self,
        y: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        past: KeysValues | None,
        columns: torch.Tensor | None,
    ) -> tuple[torch.Tensor, KeysValues]:
        """The output of attention at all positions or at `columns` (R, M), (R, L or M, D); and keys and values."""
        if columns is None:
            q, k, v = self.split(self.attn_qkv(y), 3)
            q = rotate(q, cos, sin)
        else:  # queries are needed at a few positions only, keys and values at all
            width = y.shape[2]
            weight = self.attn_qkv.weight
            k, v = self.split(F.linear(y, weight[width:]), 2)
            (q,) = self.split(F.linear(take(y, columns), weight[:width]), 1)
            q = rotate(q, at_columns(cos, columns), at_columns(sin, columns))
            if mask is not None and mask.shape[2] > 1:
                mask = at_columns(mask, columns)
        k = rotate(k, cos, sin)
        keys_values = (k, v)  # of this call, which a cache keeps
        k, v = joined(past, k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)  # (R, H, L, head)
        return self.attn_out(mixed.transpose(1, 2).flatten(2)), keys_values

    def forward(
        self,
        x: torch.Tensor,
        condition: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        past: KeysValues | None,
        columns: torch.Tensor | None,
        keys: bool,
    ) -> tuple[torch.Tensor, KeysValues | None]:
        """The output at all positions or at `columns` (R, M); with `keys`, also the keys and values of all."""
        plain = self.adaLN_modulation is None
        modulation = None if plain else self.adaLN_modulation(condition)[:, None].chunk(6, dim=2)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation or [None] * 6  # (R, 1, D) each

        y = self.norm1(x) if plain else modulate(self.norm1(x), shift, scale)  # (R, L, D)
        y, keys_values = self.attend(y, cos, sin, mask, causal, past, columns)
        if not keys:
            keys_values = None  # their memory is free before the MLP, which takes the most
        x = x if columns is None else take(x, columns)
        x = x + y if plain else torch.addcmul(x, gate, y)

        y = self.norm2(x) if plain else modulate(self.norm2(x), shift_mlp, scale_mlp)
        y = self.mlp(y)
        return x + y if plain else torch.addcmul(x, gate_mlp, y), keys_values


class Output(nn.Module):
    """The final norm, modulated, and the head."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm_final = nn.LayerNorm(config.width, bias=False)
        self.linear = nn.Linear(config.width, config.vocab_size)
        self.adaLN_modulation = nn.Linear(config.condition, 2 * config.width) if config.adaptive else None

    def features(self, x: torch.Tensor, condition: torch.Tensor | None) -> torch.Tensor:
        """The input of the head, (R, L, D)."""
        x = self.norm_final(x)
        if self.adaLN_modulation is None:
            return x
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=2)  # (R, 1, D) each
        return modulate(x, shift, scale)


class DiT(nn.Module):
    """The network from ids to the input of its LM head."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.vocab_embed = nn.ParameterDict({"embedding": torch.zeros(config.vocab_size, config.width)})
        self.sigma_map = TimeEmbedding(config.condition) if config.adaptive else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_layer = Output(config)

    def condition(self, sigma: torch.Tensor) -> torch.Tensor | None:
        """The time condition (R, condition) of noise levels (R,); of level 0 if the network ignores time."""
        if self.sigma_map is None:
            return None
        if not self.config.time:
            sigma = torch.zeros_like(sigma)
        return self.sigma_map(sigma)

    def forward(
        self,
        ids: torch.Tensor,
        sigma: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        positions: torch.Tensor | None = None,
        past: list[KeysValues] | None = None,
        columns: torch.Tensor | None = None,
        keys: bool = False,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The input of the LM head (R, L, D) for ids (R, L) at noise levels (R or 1,).

        `mask` (R or 1, 1, L or 1, K): True at keys that are seen. `positions` (R, L): 0..L-1 by default. `past`: keys
        and values of each layer, which go before this call's own. `columns` (R, M): return these only, (R, M, D), and
        skip other queries in the last layer; not with `causal`. `keys`: also return each layer's keys and values.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]  # (1, L)
        condition = self.condition(sigma)
        x = F.embedding(ids, self.vocab_embed["embedding"])  # (R, L, D)
        cos, sin = rotary(positions, self.config.width // self.config.heads)
        cos = cos.to(x.dtype)
        sin = sin.to(x.dtype)
        last = len(self.blocks) - 1
        keys_values = []
        for n, block in enumerate(self.blocks):
            before = None if past is None else past[n]
            only = columns if n == last else None
            x, layer = block(x, condition, cos, sin, mask, causal, before, only, keys)
            if keys:
                keys_values.append(layer)
        return self.output_layer.features(x, condition), keys_values
