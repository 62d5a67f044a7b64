"""Networks with random weights in the shape of real ones.

Their logits have a standard deviation of 3 nats over the vocabulary and depend on a position and on the
visible tokens. With flat predictions, float noise would decide every pick.

Shapes: L row length, C masked positions, D width, V tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.dit import checkpoint
from lm_eval_duel.denoisers.hf import decoder as decoder_checkpoint
from lm_eval_duel.denoisers.hf.families import NAMED
from lm_eval_duel.denoisers.hub import default_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, unknown

PREFIX = "random:"
DITS = {"bidirectional": "mdlm", "block-causal": "bd3lm"}
LLADA = "llada-8b"
DEFAULTS = {"dit": (4, 256, 50257), LLADA: (32, 4096, 126464)}  # layers, width, columns of the logits
LLADA_MASK = 128  # position of [MASK], in columns from the end
SPREAD = 3.0  # standard deviation of the logits over the vocabulary
SHARP = 2.5  # scale of queries and keys, so that attention picks few of many positions
FAINT = 0.2  # scale of the embedding of [MASK], so that predictions at masked positions depend on the visible ones
FEATURES_AT = 128  # positions on which the spread is measured


@dataclasses.dataclass(frozen=True)
class RandomNetwork:
    """A network to build: `random:bidirectional`, `random:block-causal` (trained on `block`) or `random:llada-8b`.

    Layers, width and columns of the logits that are None have the default of their kind. Raises DuelError for an
    unknown name and for invalid sizes.
    """

    name: str
    dtype: str = "float32"
    length: int = 256
    block: int = 32
    layers: int | None = None
    width: int | None = None
    vocab: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*DITS, LLADA):
            raise unknown("random network", self.name, [f"{PREFIX}{known}" for known in (*DITS, LLADA)])
        for field, default in zip(("layers", "width", "vocab"), DEFAULTS.get(self.kind, DEFAULTS["dit"]), strict=True):
            object.__setattr__(self, field, getattr(self, field) or default)
        if self.width < 64 or self.width % 64:
            raise DuelError(
                f"The width of {self.name} must be a multiple of 64, the width of a head; got {self.width}."
            )
        if self.kind == "block-causal" and self.block >= self.length:
            raise DuelError(
                f"{self.name} needs rows longer than its block of {self.block}; got {self.length} positions."
            )

    @property
    def kind(self) -> str:
        return self.name.removeprefix(PREFIX)

    @property
    def least_bytes(self) -> int:
        """A lower bound on the memory for the weights."""
        return (12 * self.layers * self.width**2 + 2 * self.vocab * self.width) * getattr(torch, self.dtype).itemsize

    @property
    def mask_id(self) -> int:
        return self.vocab - (LLADA_MASK if self.kind == LLADA and self.vocab > LLADA_MASK else 1)

    def make(self, device: torch.device) -> Denoiser:
        """The denoiser, on a device."""
        denoiser = self._unfilled(LoadOptions(self.name, device))
        generator = torch.Generator(device).manual_seed(self.seed)
        with torch.device(device), default_dtype(getattr(torch, self.dtype)):
            network = denoiser.build().eval()
        if self.kind == LLADA:
            _randomise_llama(network, self.mask_id, generator)
            self_tests.rotary_frequencies(network, network.config, self.name)
        else:
            _randomise_dit(network, self.mask_id, generator)
        denoiser.take(network)
        head = network.lm_head if self.kind == LLADA else network.output_layer.linear
        _spread(denoiser, head, generator)
        return denoiser

    def _unfilled(self, options: LoadOptions) -> Any:
        """The denoiser as a config.json describes it, without weights."""
        if self.kind == LLADA:
            heads = max(1, self.width // 128)
            config: dict[str, Any] = {
                "d_model": self.width,
                "embedding_size": self.vocab,
                "vocab_size": self.vocab,
                "max_sequence_length": self.length,
                "mlp_hidden_size": 3 * self.width,
                "n_heads": heads,
                "n_kv_heads": heads,
                "n_layers": self.layers,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "mask_token_id": self.mask_id,
            }
            return decoder_checkpoint.unfilled(Checkpoint(options, config, NAMED["llada"], _Vocabulary(self.vocab)))
        config = {
            "model_type": DITS[self.kind],
            "vocab_size": self.vocab,
            "hidden_dim": self.width,
            "n_blocks": self.layers,
            "n_heads": self.width // 64,
            "model_length": self.length,
            "block_size": self.block,
            "cross_attn": self.kind == "block-causal",
        }
        return checkpoint.unfilled(Checkpoint(options, config))


class _Vocabulary:
    """The part of a tokenizer that a denoiser uses."""

    mask_token_id = None

    def __init__(self, count: int):
        self.count = count

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.count)}


@torch.no_grad()
def _randomise_dit(network: Any, mask_id: int, generator: torch.Generator) -> None:
    width = network.config.width
    for key, weight in network.named_parameters():
        if "adaLN_modulation" in key:  # small modulation, open gates
            weight.normal_(0, 0.02, generator=generator)
            if key.endswith("bias") and key.startswith("blocks"):
                weight.view(6, width)[[2, 5]] += 1
        elif "norm" not in key:
            _normal(key, weight, generator)
    for layer in network.blocks:
        layer.attn_qkv.weight[: 2 * width] *= SHARP
    network.vocab_embed.embedding[mask_id] *= FAINT


@torch.no_grad()
def _randomise_llama(model: Any, mask_id: int, generator: torch.Generator) -> None:
    for key, weight in model.named_parameters():
        if "norm" not in key:
            _normal(key, weight, generator)
            if "q_proj" in key or "k_proj" in key:
                weight *= SHARP
    model.get_input_embeddings().weight[mask_id] *= FAINT


def _normal(key: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Initialise a weight to keep unit variance, embeddings to unit variance, biases to 0."""
    table = "embed" in key
    if weight.dim() == 1:
        weight.zero_()
    else:
        weight.normal_(0, 1 if table else 1 / math.sqrt(weight.shape[1]), generator=generator)


@torch.no_grad()
def _spread(denoiser: Denoiser, head: torch.nn.Linear, generator: torch.Generator) -> None:
    """Scale the head so that the logits of a half-masked row have the standard deviation SPREAD."""
    length = min(denoiser.max_length, FEATURES_AT)
    ids = torch.randint(denoiser.vocab_size, (1, length), device=denoiser.device, generator=generator)  # (1, L)
    masked = slice(min(1, length - 1), None, 2)
    ids[:, masked] = denoiser.mask_id
    if denoiser.attention == "block_causal":
        of_block = torch.arange(length, device=ids.device) // denoiser.block  # (L,)
        seen = of_block[:, None] >= of_block  # (L, L)
        positions = torch.arange(length, device=ids.device)[None]  # (1, L)
        features = denoiser.stream(ids, positions, seen[None], None)[0]  # (1, L, D)
    else:
        features = denoiser.features(ids, None)  # (1, L, D)
    logits = denoiser.head(features[0, masked])  # (C, V)
    head.weight *= SPREAD / float(logits.float().std(1).mean())
