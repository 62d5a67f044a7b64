"""The entries of three published config.json files that a plan needs, so that it works without the hub."""

from __future__ import annotations

from typing import Any

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
    "kuleshov-group/mdlm-owt": {
        "model_type": "mdlm",
        "cond_dim": 128,
        "hidden_dim": 768,
        "model_length": 1024,
        "n_blocks": 12,
        "n_heads": 12,
        "time_conditioning": False,
        "vocab_size": 50258,
    },
}
