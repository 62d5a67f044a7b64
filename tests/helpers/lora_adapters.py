"""LoRA adapters with random factors, as peft writes them."""

import json

import torch
from own import LAYERS
from safetensors.torch import save_file

from lm_eval_duel.denoisers.hf.weights import ADAPTER_PREFIX as PREFIX

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "elsewhere",
    "r": 3,
    "lora_alpha": 6,
}
NATIVE_MODULES = []
for layer in range(LAYERS):
    NATIVE_MODULES += [f"model.layers.{layer}.self_attn.q_proj", f"model.layers.{layer}.mlp.down_proj"]


def adapter(folder, tensors, modules, rank=3, ranks=(), **entries):
    """An adapter of `modules`; `ranks`: those of modules by the end of their names."""
    generator = torch.Generator().manual_seed(11)
    factors = {}
    for module in modules:
        rows, columns = tensors[f"{module}.weight"].shape
        r = rank
        for end, rank_of_end in dict(ranks).items():
            if module.endswith(end):
                r = rank_of_end
        for name, shape in {"A": (r, columns), "B": (rows, r)}.items():
            factors[f"{PREFIX}{module}.lora_{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
    names = {module.rsplit(".", 1)[-1] for module in modules}
    config = {**CONFIG, "target_modules": sorted(names), **entries}

    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return str(folder)
