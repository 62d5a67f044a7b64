"""The entries of published config.json files that a plan needs, so that it works without the hub."""

from __future__ import annotations

from typing import Any

GPT2_SIZE = {  # of the OpenWebText checkpoints of MDLM's and BD3-LM's authors
    "cond_dim": 128,
    "hidden_dim": 768,
    "model_length": 1024,
    "n_blocks": 12,
    "n_heads": 12,
    "vocab_size": 50258,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Base": {
        "architectures": ["LLaDAModelLM"],
        "d_model": 4096,
        "embedding_size": 126464,
        "mask_token_id": 126336,
        "max_sequence_length": 4096,
        "mlp_hidden_size": 12288,
        "n_heads": 32,
        "n_kv_heads": 32,
        "n_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 126464,
    },
    "Dream-org/Dream-v0-Base-7B": {
        "architectures": ["DreamModel"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "mask_token_id": 151666,
        "max_position_embeddings": 131072,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    },
    "kuleshov-group/mdlm-owt": {"model_type": "mdlm", "time_conditioning": False, **GPT2_SIZE},
    "kuleshov-group/ar-noeos-owt": {"model_type": "mdlm", "causal": True, "adaln": False, **GPT2_SIZE},
    "louaaron/sedd-small": {
        "graph": {"type": "absorb"},
        "model": {"cond_dim": 128, "hidden_size": 768, "length": 1024, "n_blocks": 12, "n_heads": 12},
        "tokens": 50257,
    },
    **{
        f"kuleshov-group/bd3lm-owt-block_size{block}": {
            "model_type": "bd3lm",
            "block_size": block,
            "cross_attn": True,
            **GPT2_SIZE,
        }
        for block in (4, 8, 16)
    },
}
