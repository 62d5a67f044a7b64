"""DiT checkpoints in the authors' file layout with random weights, and the network in plain float64 operations."""

import json
import math

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm_eval_duel import denoisers
from lm_eval_duel.audit import plain_networks
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig

WIDTH = 16
LAYERS = 2
HEADS = 2
CONDITION = 8
TOKENS = 12
LENGTH = 16
BLOCK = 4
VOCABULARY = TOKENS + 1
MDLM = {
    "model_type": "mdlm",
    "architectures": ["MDLM"],
    "vocab_size": VOCABULARY,
    "model_length": LENGTH,
    "hidden_dim": WIDTH,
    "cond_dim": CONDITION,
    "n_blocks": LAYERS,
    "n_heads": HEADS,
    "time_conditioning": False,
}
BD3LM = {
    **MDLM,
    "model_type": "bd3lm",
    "architectures": ["BD3LM"],
    "adaln": True,
    "cross_attn": True,
    "causal": False,
    "attn_backend": "flex",
    "var_min": True,
    "block_size": BLOCK,
}
SEDD = {
    "tokens": TOKENS,
    "graph": {"type": "absorb"},
    "model": {
        "hidden_size": WIDTH,
        "cond_dim": CONDITION,
        "length": LENGTH,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
    },
}
T_EPS = 0.05  # 1e-4 in the published files: here a clamp that is seen
GIDD = {
    "architectures": ["DIT"],
    "hidden_size": WIDTH,
    "max_seq_len": LENGTH,
    "model_type": "dit",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "p_uniform": 0.0,
    "t_eps": T_EPS,
    "timestep_cond_dim": CONDITION,
    "vocab_size": VOCABULARY + 3,  # rows of the table may exceed the tokenizer's
}
CONFIGS = {
    "mdlm": MDLM,
    "bidirectional": {**BD3LM, "cross_attn": False},
    "one-block": {**BD3LM, "block_size": LENGTH},
    "bd3lm": BD3LM,
    "sedd-retrained": {**BD3LM, "cross_attn": False, "var_min": False, "time_conditioning": True, "model_type": "sedd"},
    "sedd": SEDD,
    "gidd": GIDD,
    "duo": {**MDLM, "model_type": "DUO", "architectures": ["DUO"], "time_conditioning": None, "var_min": True},
    "udlm": {**MDLM, "model_type": "udlm", "architectures": ["UDLM"], "time_conditioning": True},
    "gidd-uniform": {**GIDD, "p_uniform": 0.2},
    "ar": {**BD3LM, "cross_attn": False, "var_min": False, "causal": True, "adaln": False},
}


def weights(adaptive, prefix, vocabulary):
    """Random tensors under the authors' names."""
    with torch.device("meta"):
        network = DiT(DiTConfig(vocabulary, WIDTH, LAYERS, HEADS, CONDITION, adaptive))
    generator = torch.Generator().manual_seed(8)
    made = {}
    for name, value in network.state_dict().items():
        made[prefix + name] = torch.randn(value.shape, generator=generator) * 0.35
    for end in ("weight", "bias"):  # so that rules with a threshold pick several at once
        made[f"{prefix}output_layer.linear.{end}"] *= 3
    made[f"{prefix}rotary_emb.inv_freq"] = torch.ones(WIDTH // HEADS // 2)  # computed anew, whatever the file says
    return made


def write(folder, kind, **changes):
    """A checkpoint folder of a kind, its config changed: its path, and its tensors in float64."""
    config = {**CONFIGS[kind], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    prefix = "" if kind in ("sedd", "gidd", "gidd-uniform") else "backbone."
    rows = config["tokens"] + 1 if "tokens" in config else config["vocab_size"]
    tensors = weights(kind != "ar", prefix, rows)
    if config.get("var_min"):
        tensors |= {"sampling_eps_min": torch.tensor(1e-3), "sampling_eps_max": torch.tensor(0.999)}
    if kind.startswith("gidd"):
        rotation = torch.ones(1, LENGTH, 3, 1, WIDTH // HEADS)
        tensors |= {"rotary_emb.cos_cached": rotation, "rotary_emb.sin_cached": rotation.clone()}
        words(min(VOCABULARY, rows), mask=True).save_pretrained(folder)
    if kind == "sedd":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), {name.removeprefix("backbone."): value.double() for name, value in tensors.items()}


def words(count, mask=False):
    """A tokenizer of `count` words, <s> the first of them, as GPT-2 has its end of text; [MASK] the last, if asked."""
    names = ["<s>", *"abcdefghijklmnop"[: count - 1 - mask], *["[MASK]"] * mask]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(names)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"mask_token": "[MASK]"} if mask else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", **special)


def opened(folder, kind, changes=None, **asked):
    """The denoiser of such a folder, and its tensors."""
    path, w = write(folder, kind, **(changes or {}))
    return denoisers.load(path, device="cpu", **asked), w


def plain(w, ids, sigma=0.0, seen=None):
    """Logits (L, V) in float64."""
    return plain_networks.dit(w, ids, HEADS, sigma, seen)


def noise_level(kind, ids, count=None, schedule=False):
    """The noise level, or time, that a network is given for a row, of `count` positions if not all."""
    share = sum(token == TOKENS for token in ids) / (count or len(ids))
    if kind == "gidd":
        return min(max(share, T_EPS), 1 - T_EPS)
    if not kind.startswith("sedd"):
        return 0.0
    return -math.log(1 - (1 - 1e-3) * share) if schedule else -math.log(1 - min(max(share, 0.1), 0.9))


def tiny_mdlm(folder):
    """A tiny MDLM and a tokenizer of its words."""
    words(TOKENS).save_pretrained(folder)
    return write(folder, "mdlm")[0]
