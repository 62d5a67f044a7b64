"""Networks with random weights in the shape of real ones.

Their logits have a standard deviation of 3 nats over the vocabulary and depend on a position and on the
visible tokens. With flat predictions, float noise would decide every pick.

Shapes: L row length, C masked positions, D width, V tokens.
"""

from __future__ import annotations

import math

import torch
import transformers

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig
from lm_eval_duel.denoisers.hf.decoder import Decoder
from lm_eval_duel.denoisers.hf.families import NAMED
from lm_eval_duel.denoisers.hf.native import native_config
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, unknown

PREFIX = "random:"
DITS = {"bidirectional": "mdlm", "block-causal": "bd3lm"}
LLADA = "llada-8b"
SIZES = {"dit": (4, 256, 50257), LLADA: (32, 4096, 126464)}  # layers, width, columns of the logits
LLADA_MASK = 128  # position of [MASK], in columns from the end
SPREAD = 3.0  # standard deviation of the logits over the vocabulary
SHARP = 2.5  # scale of queries and keys, so that attention picks few of many positions
FAINT = 0.2  # scale of the embedding of [MASK], so that predictions at masked positions depend on the visible ones
FEATURES_AT = 128  # positions on which the spread is measured


def make(
    name: str,
    device: torch.device,
    dtype: str = "float32",
    length: int = 256,
    block: int = 32,
    layers: int | None = None,
    width: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
) -> Denoiser:
    """The network `random:bidirectional`, `random:block-causal` (trained on `block`) or `random:llada-8b`.

    Raises DuelError for an unknown name and for invalid sizes.
    """
    kind = name.removeprefix(PREFIX)
    layers, width, vocab = _sizes(name, layers, width, vocab)
    if width < 64 or width % 64:
        raise DuelError(f"The width of {name} must be a multiple of 64, the width of a head; got {width}.")
    generator = torch.Generator(device).manual_seed(seed)
    if kind == LLADA:
        denoiser = _llada(name, device, dtype, length, layers, width, vocab, generator)
        head = denoiser.model.lm_head
    else:
        denoiser = _dit(name, device, dtype, length, layers, width, vocab, block, generator)
        head = denoiser.network.output_layer.linear
    _spread(denoiser, head, generator)
    return denoiser


def least_bytes(
    name: str, layers: int | None, width: int | None, vocab: int | None, dtype: str, **other: object
) -> int:
    """A lower bound on the memory for the weights of `make`'s network."""
    layers, width, vocab = _sizes(name, layers, width, vocab)
    return (12 * layers * width**2 + 2 * vocab * width) * getattr(torch, dtype).itemsize


def _sizes(name: str, layers: int | None, width: int | None, vocab: int | None) -> tuple[int, int, int]:
    """Layers, width and columns of the logits, with defaults for those that are None."""
    kind = name.removeprefix(PREFIX)
    if kind not in (*DITS, LLADA):
        raise unknown("random network", name, [f"{PREFIX}{known}" for known in (*DITS, LLADA)])
    default = SIZES[LLADA if kind == LLADA else "dit"]
    return layers or default[0], width or default[1], vocab or default[2]


@torch.no_grad()
def _dit(
    name: str,
    device: torch.device,
    dtype: str,
    length: int,
    layers: int,
    width: int,
    vocab: int,
    block: int,
    generator: torch.Generator,
) -> Denoiser:
    """Our own DiT, as MDLM or BD3-LM; [MASK] is the last column."""
    family = DITS[name.removeprefix(PREFIX)]
    with torch.device(device):
        network = DiT(DiTConfig(vocab, width, layers, width // 64))
    network = network.to(getattr(torch, dtype)).eval()
    for key, weight in network.named_parameters():
        if "adaLN_modulation" in key:  # small modulation, open gates
            weight.normal_(0, 0.02, generator=generator)
            if key.endswith("bias") and key.startswith("blocks"):
                weight.view(6, width)[[2, 5]] += 1
        elif "norm" not in key:
            _normal(key, weight, generator)
    for layer in network.blocks:
        layer.attn_qkv.weight[: 2 * width] *= SHARP
    network.vocab_embed.embedding[vocab - 1] *= FAINT
    trained = block if family == "bd3lm" else None
    return DiTDenoiser(network, family, length, name, set(range(vocab - 1)), vocab - 1, trained)


class _Vocabulary:
    """The part of a tokenizer that a denoiser uses."""

    def __init__(self, count: int):
        self.count = count

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.count)}


@torch.no_grad()
def _llada(
    name: str,
    device: torch.device,
    dtype: str,
    length: int,
    layers: int,
    width: int,
    vocab: int,
    generator: torch.Generator,
) -> Denoiser:
    """LLaDA-8B's Llama, created on the device."""
    heads = max(1, width // 128)
    family = NAMED["llada"]
    config = {
        "d_model": width,
        "embedding_size": vocab,
        "vocab_size": vocab,
        "max_sequence_length": length,
        "mlp_hidden_size": 3 * width,
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    }
    model_config = transformers.LlamaConfig(**native_config(family, config, family.name), use_cache=False)
    model_config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, dtype)).eval()
    for key, weight in model.named_parameters():
        if "norm" not in key:
            _normal(key, weight, generator)
            if "q_proj" in key or "k_proj" in key:
                weight *= SHARP
    mask_id = vocab - LLADA_MASK if vocab > LLADA_MASK else vocab - 1
    model.get_input_embeddings().weight[mask_id] *= FAINT
    self_tests.rotary_frequencies(model, model_config, name)
    denoiser = Decoder(
        family, {**config, "mask_token_id": mask_id}, LoadOptions(name, device), _Vocabulary(vocab), vocab
    )
    denoiser.set_row_length(length)
    denoiser.take(model)
    return denoiser


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
