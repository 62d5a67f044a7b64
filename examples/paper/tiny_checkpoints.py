"""Tiny checkpoints with random weights, in the layouts of MDLM, BD3-LM and LLaDA, for `reproduce.py --try`.

Each comes with a tokenizer of single characters, and with the bundled text in place of its data set.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm_eval_duel.audit.plain_networks import LLADA
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig

LENGTH = 64  # tokens of a row
CHARACTERS = 200  # of a text
LAYERS = 2
HEADS = 2
WIDTH = 32  # of a token's vector
INNER = 48  # of LLaDA's feed-forward layers
CONDITION = 8  # of the DiT's vector of the noise level


def bundled_texts() -> list[str]:
    """The beginnings of the texts of the bundled task."""
    lines = (FOLDER / "text" / "sotu.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"][:CHARACTERS] for line in lines]


def write_data(file: Path, columns: Sequence[str]) -> None:
    """Write the bundled texts as a data set that has each of them in every column."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for text in bundled_texts():
            out.write(json.dumps(dict.fromkeys(columns, text)) + "\n")


def write_checkpoint(folder: Path, layout: str) -> None:
    """Write a checkpoint of a layout, "mdlm", "bd3lm" or "llada", with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = sorted(set("".join(bundled_texts())))
    vocabulary = {token: number for number, token in enumerate(["<s>", "?", *characters])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>", unk_token="?")
    tokenizer.save_pretrained(folder)

    if layout == "llada":
        config, shapes = llada(len(vocabulary))
    else:
        config, shapes = dit(layout, len(vocabulary))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def dit(layout: str, tokens: int) -> tuple[dict[str, Any], Mapping[str, Sequence[int]]]:
    """config.json and the shapes of the tensors of MDLM or BD3-LM. [MASK] is the last row of the embedding."""
    config: dict[str, Any] = {
        "model_type": layout,
        "architectures": [layout.upper()],
        "vocab_size": tokens + 1,
        "time_conditioning": False,
        "model_length": LENGTH,
        "hidden_dim": WIDTH,
        "cond_dim": CONDITION,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
    }
    if layout == "bd3lm":
        config |= {"adaln": True, "cross_attn": True, "causal": False, "var_min": False, "block_size": 4}
    with torch.device("meta"):  # shapes without numbers
        network = DiT(DiTConfig(tokens + 1, WIDTH, LAYERS, HEADS, CONDITION, True))
    return config, {f"backbone.{name}": tensor.shape for name, tensor in network.state_dict().items()}


def llada(tokens: int) -> tuple[dict[str, Any], Mapping[str, Sequence[int]]]:
    """config.json and the shapes of the tensors of LLaDA. [MASK] is the last row of the embedding."""
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "vocab_size": tokens,
        "embedding_size": tokens + 1,
        "mask_token_id": tokens,
        "d_model": WIDTH,
        "mlp_hidden_size": INNER,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "max_sequence_length": 2048,
        "rope_theta": 500_000.0,
        "include_bias": False,
        "weight_tying": False,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "alibi": False,
    }
    whole = {"table": (tokens + 1, WIDTH), "last": (WIDTH,), "head": (tokens + 1, WIDTH)}
    layer = {
        "before mix": (WIDTH,),
        "before feed": (WIDTH,),
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, WIDTH),
        "v": (WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "gate": (INNER, WIDTH),
        "up": (INNER, WIDTH),
        "down": (WIDTH, INNER),
    }
    shapes: dict[str, Sequence[int]] = {f"{LLADA[part]}.weight": shape for part, shape in whole.items()}
    for number in range(LAYERS):
        for part, shape in layer.items():
            shapes[f"{LLADA[part].format(n=number)}.weight"] = shape
    return config, shapes
