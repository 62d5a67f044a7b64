"""Published masked language models in small: real configs and file layouts, random weights, and their networks in
float64, written from their description: one row, head by head.

    ESM-2, DPLM    embeddings times 0.88 / (1 - masked share), 0 at masked cells; pre-norm layers with biases
    EuroBERT       the decoders' network (`plain`), everything visible
    mmBERT         two of three layers see a window only; they have a rotary base of their own; GeGLU
"""

import json
import math

import decoder_reference
import plain
import tiny
import torch
from decoder_reference import LLAMA, remote
from safetensors.torch import save_file

D, HEADS, WIDE, LAYERS = 16, 2, 24, 2
RESIDUES = list("LAGVSERTIDPKQNFYMHWC")
VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, *"XBUZO.-", "<null_1>", "<mask>"]
PROTEIN_MASK = 32
PROTEIN_CASES = {
    "esm-2": {},
    "dplm": {
        "architectures": ["EsmForDPLM"],
        "dplm_type": "dplm_esm",
        "hidden_dropout_prob": 0.1,
        "_name_or_path": "facebook/esm2_t30_150M_UR50D",
    },
}


def protein_ids(sequence):
    return tuple(VOCABULARY.index(letter) for letter in sequence)


def is_norm(name):
    return "norm" in name.lower() and not name.endswith("bias")


def random(shapes, seed=3):
    """Tensors of these shapes: norms near 1, biases near 0."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        draw = torch.randn(shape, generator=generator)
        scale = 0.5 if "embeddings" in name else 0.3
        made[name] = draw * 0.2 + is_norm(name) if len(shape) == 1 else draw * scale
    return made


def write(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), {name: value.double() for name, value in tensors.items() if value.is_floating_point()}


def affine(w, name, x):
    """A linear layer, with its bias if the file has one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w, name, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def turn(x, theta):
    """Pairs (i, i + half) of a head (L, H), turned by the cell's position."""
    half, out = x.shape[1] // 2, x.clone()
    for i in range(half):
        angle = torch.arange(len(x), dtype=torch.float64) * theta ** (-i / half)
        out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return out


def attend(q, k, v, theta, sees):
    """Heads side by side, (L, D) each."""
    heads = []
    for h in range(HEADS):
        own = slice(h * D // HEADS, (h + 1) * D // HEADS)
        match = turn(q[:, own], theta) @ turn(k[:, own], theta).T / math.sqrt(D / HEADS)
        heads.append(match.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, own])
    return torch.cat(heads, 1)


# ---------------------------------------------------------------- ESM-2 and DPLM


def esm(folder, positions=66, **entries):
    """A checkpoint as facebook/esm2_* has it, with the tensors that its class does not use; its path and tensors."""
    layer = {f"attention.self.{name}": (D, D) for name in ("query", "key", "value")}
    layer |= {"attention.output.dense": (D, D), "intermediate.dense": (WIDE, D), "output.dense": (D, WIDE)}
    shapes = {"esm.embeddings.word_embeddings.weight": (33, D), "lm_head.dense.weight": (D, D), "lm_head.bias": (33,)}
    shapes |= {
        f"{name}.{part}": (D,)
        for name in ("lm_head.layer_norm", "esm.encoder.emb_layer_norm_after")
        for part in ("weight", "bias")
    } | {"lm_head.dense.bias": (D,)}
    for n in range(LAYERS):
        of = f"esm.encoder.layer.{n}."
        for name, shape in layer.items():
            shapes |= {f"{of}{name}.weight": shape, f"{of}{name}.bias": shape[:1]}
        for name in ("attention.LayerNorm", "LayerNorm"):
            shapes |= {f"{of}{name}.weight": (D,), f"{of}{name}.bias": (D,)}
    tensors = random(shapes)
    tensors["esm.embeddings.word_embeddings.weight"][1] = 0  # padding
    tensors["lm_head.decoder.weight"] = tensors["esm.embeddings.word_embeddings.weight"].clone()
    tensors |= {
        "esm.embeddings.position_embeddings.weight": torch.randn(positions, D),
        "esm.embeddings.position_ids": torch.arange(positions)[None],
        "esm.contact_head.regression.weight": torch.randn(1, LAYERS * HEADS),
        "esm.contact_head.regression.bias": torch.randn(1),
    }
    half = D // HEADS // 2
    tensors |= {
        f"esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq": 1e4 ** -(torch.arange(half) / half)
        for n in range(LAYERS)
    }
    config = {
        "architectures": ["EsmForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": None,
        "emb_layer_norm_before": False,
        "esmfold_config": None,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": D,
        "initializer_range": 0.02,
        "intermediate_size": WIDE,
        "is_folding_model": False,
        "layer_norm_eps": 1e-5,
        "mask_token_id": PROTEIN_MASK,
        "max_position_embeddings": positions,
        "model_type": "esm",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "torch_dtype": "float32",
        "transformers_version": "4.25.0.dev0",
        "use_cache": True,
        "vocab_list": None,
        "vocab_size": 33,
        **entries,
    }
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    special = {"tokenizer_class": "EsmTokenizer", "do_lower_case": False, "model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return write(folder, config, tensors)


def esm_logits(w, ids, eps=1e-5):
    """Logits (L, 33) of a row without padding."""
    masked = torch.tensor([token == PROTEIN_MASK for token in ids])  # (L,)
    scale = (1 - 0.15 * 0.8) / (1 - masked.double().mean())
    x = w["esm.embeddings.word_embeddings.weight"][list(ids)] * ~masked[:, None] * scale  # (L, D)
    everywhere = torch.ones(len(ids), len(ids), dtype=torch.bool)
    for n in range(LAYERS):
        of = f"esm.encoder.layer.{n}."
        y = layer_norm(w, f"{of}attention.LayerNorm", x, eps)
        q, k, v = (affine(w, f"{of}attention.self.{name}", y) for name in ("query", "key", "value"))
        x = x + affine(w, f"{of}attention.output.dense", attend(q, k, v, 10_000.0, everywhere))
        y = gelu(affine(w, f"{of}intermediate.dense", layer_norm(w, f"{of}LayerNorm", x, eps)))
        x = x + affine(w, f"{of}output.dense", y)
    x = layer_norm(w, "esm.encoder.emb_layer_norm_after", x, eps)
    x = layer_norm(w, "lm_head.layer_norm", gelu(affine(w, "lm_head.dense", x)), eps)
    return x @ w["lm_head.decoder.weight"].T + w["lm_head.bias"]


# ---------------------------------------------------------------- encoders of text: EuroBERT and mmBERT

WINDOW = 8  # of mmBERT's local layers


def eurobert(folder):
    """A checkpoint as EuroBERT/EuroBERT-* has it, whose config still names code of its own."""
    config = {
        **remote("EuroBertForMaskedLM", "EuroBertConfig", AutoModelForMaskedLM="modeling_eurobert.EuroBertForMaskedLM"),
        **LLAMA,
        "bos_token_id": 2,
        "clf_pooling": "late",
        "eos_token_id": 3,
        "head_dim": 4,
        "mask_token": "[MASK]",
        "mask_token_id": 4,
        "model_type": "eurobert",
        "pad_token": "[PAD]",
        "pad_token_id": 0,
        "rope_theta": 250_000,
    }
    net = plain.Net(head=4, theta=250_000.0, eps=1e-5)
    path, w = decoder_reference.write(folder, decoder_reference.Case(config, net))
    return path, lambda ids: plain.logits(net, w, ids, plain.everywhere(len(ids)))


def mmbert(folder):
    """A checkpoint as jhu-clsp/mmBERT-* has it: ModernBERT with other sizes, rotary bases and vocabulary."""
    shapes = {"model.embeddings.tok_embeddings.weight": (tiny.ROWS, D), "decoder.bias": (tiny.ROWS,)}
    shapes |= {f"{name}.weight": (D,) for name in ("model.embeddings.norm", "model.final_norm", "head.norm")}
    shapes["head.dense.weight"] = (D, D)
    for n in range(3):
        of = f"model.layers.{n}."
        shapes |= {f"{of}attn.Wqkv.weight": (3 * D, D), f"{of}attn.Wo.weight": (D, D), f"{of}mlp_norm.weight": (D,)}
        shapes |= {f"{of}mlp.Wi.weight": (2 * WIDE, D), f"{of}mlp.Wo.weight": (D, WIDE)}
        shapes |= {f"{of}attn_norm.weight": (D,)} if n else {}
    config = {
        "architectures": ["ModernBertForMaskedLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_pooling": "mean",
        "cls_token_id": 2,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "eos_token_id": 3,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000,
        "hidden_activation": "gelu",
        "hidden_size": D,
        "intermediate_size": WIDE,
        "layer_norm_eps": 1e-5,
        "local_attention": WINDOW,
        "local_rope_theta": 50_000,
        "mask_token_id": 4,
        "max_position_embeddings": 64,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "position_embedding_type": "sans_pos",
        "repad_logits_with_grad": False,
        "sep_token_id": 3,
        "sparse_pred_ignore_index": -100,
        "sparse_prediction": False,
        "torch_dtype": "float32",
        "transformers_version": "4.48.0",
        "vocab_size": tiny.ROWS,
    }
    tiny.tokenizer(length=64).save_pretrained(folder)
    path, w = write(folder, config, random(shapes))
    return path, lambda ids: mmbert_logits(w, ids)


def mmbert_logits(w, ids, eps=1e-5):
    """Logits (L, V) of a row without padding."""
    place = torch.arange(len(ids))
    near = (place[:, None] - place).abs() <= WINDOW // 2  # (L, L)
    x = layer_norm(w, "model.embeddings.norm", w["model.embeddings.tok_embeddings.weight"][list(ids)], eps)
    for n in range(3):
        of = f"model.layers.{n}."
        y = layer_norm(w, f"{of}attn_norm", x, eps) if n else x
        q, k, v = affine(w, f"{of}attn.Wqkv", y).chunk(3, 1)
        theta, sees = (50_000.0, near) if n % 3 else (160_000.0, torch.ones_like(near))
        x = x + affine(w, f"{of}attn.Wo", attend(q, k, v, theta, sees))
        inner, gate = affine(w, f"{of}mlp.Wi", layer_norm(w, f"{of}mlp_norm", x, eps)).chunk(2, 1)
        x = x + affine(w, f"{of}mlp.Wo", gelu(inner) * gate)
    x = layer_norm(w, "model.final_norm", x, eps)
    x = layer_norm(w, "head.norm", gelu(affine(w, "head.dense", x)), eps)
    return x @ w["model.embeddings.tok_embeddings.weight"].T + w["decoder.bias"]


ENCODERS = {"eurobert": eurobert, "mmbert": mmbert}
