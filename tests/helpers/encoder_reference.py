"""Published masked language models in small: real configs and file layouts, random weights.

Their networks are transformers' own, which `logits` calls with one row at a time, in float64; EuroBERT's is `plain`.
"""

import json

import decoder_reference
import torch
import transformers
from decoder_reference import LLAMA, remote, without
from safetensors.torch import save_file

from lm_eval_duel.audit import plain_networks as plain

RESIDUES = list("LAGVSERTIDPKQNFYMHWC")
VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, *"XBUZO.-", "<null_1>", "<mask>"]
PROTEIN_MASK = 32
ESM = {
    "architectures": ["EsmForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "emb_layer_norm_before": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 16,
    "intermediate_size": 24,
    "is_folding_model": False,
    "layer_norm_eps": 1e-5,
    "mask_token_id": PROTEIN_MASK,
    "model_type": "esm",
    "max_position_embeddings": 66,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "vocab_size": 33,
}
DPLM = {"architectures": ["EsmForDPLM"], "dplm_type": "dplm_esm", "hidden_dropout_prob": 0.1}
PROTEIN_CASES = {"esm-2": {}, "dplm": DPLM}


def esm(folder, **entries):
    """A checkpoint as facebook/esm2_* has it, with the tensors that its class does not use; its path and logits."""
    config = transformers.EsmConfig(**without(ESM, "architectures", "model_type"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, value in transformers.EsmForMaskedLM(config).state_dict().items():
        if not value.is_floating_point() or name.endswith("inv_freq"):
            continue
        draw = torch.randn(value.shape, generator=generator)
        if value.dim() == 1:
            is_near_one = "norm" in name.lower() and not name.endswith("bias")
            tensors[name] = draw * 0.2 + is_near_one
        else:
            tensors[name] = draw * (0.5 if "embeddings" in name else 0.3)
    table = "esm.embeddings.word_embeddings.weight"
    tensors[table][1] = 0  # padding
    tensors["lm_head.decoder.weight"] = tensors[table].clone()
    tensors |= {
        "esm.embeddings.position_embeddings.weight": torch.randn(66, 16),
        "esm.embeddings.position_ids": torch.arange(66)[None],
        "esm.contact_head.regression.weight": torch.randn(1, 4),
        "esm.contact_head.regression.bias": torch.randn(1),
    }
    for n in range(2):
        rotary = f"esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq"
        tensors[rotary] = 1e4 ** -(torch.arange(4) / 4)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    special = {"tokenizer_class": "EsmTokenizer", "do_lower_case": False, "model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps({**ESM, **entries}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = transformers.EsmForMaskedLM.from_pretrained(folder, dtype=torch.float32).double().eval()

    @torch.no_grad()
    def logits(ids):
        return model(input_ids=torch.tensor([ids])).logits[0]

    return str(folder), logits


def eurobert(folder):
    """A checkpoint as EuroBERT/EuroBERT-* has it, whose config still names code of its own."""
    entries = {"head_dim": 4, "mask_token": "[MASK]", "model_type": "eurobert", "pad_token_id": 0}
    config = remote("EuroBertForMaskedLM", LLAMA, **entries, rope_theta=250_000)
    case = decoder_reference.Case(config)
    path, w = decoder_reference.write(folder, case)
    return path, lambda ids: plain.logits(case.net, w, ids)
