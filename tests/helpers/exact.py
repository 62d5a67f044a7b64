"""Tiny checkpoints for golden numbers: their weights are whole numbers of 1/512, the same on every machine.

torch's random numbers differ in their last bits between CPUs. Load these with dtype=float64.
"""

from pathlib import Path

import dit_reference
import numpy as np
import tiny
import torch
from safetensors.torch import load_file, save_file


def _drawn(tensors):
    """Other values for named tensors: those that scale a normalised row are about 1, the others about 0."""
    draw = np.random.default_rng(7)
    values = {}
    for name, tensor in sorted(tensors.items()):
        whole = torch.from_numpy(draw.integers(-128, 129, tensor.shape)).to(tensor.dtype)
        is_scale = "norm" in name.lower() and name.endswith("weight")
        values[name] = whole / 512 + 1 if is_scale else whole / 256
    return values


def language_model(folder, family, length):
    """A checkpoint of a family of `tiny`, whose rows have `length` positions; returns its path."""
    model = tiny.network(family, length=length)
    with torch.no_grad():
        for name, value in _drawn(dict(model.named_parameters())).items():
            model.get_parameter(name).copy_(value)
        model.get_input_embeddings().weight[0].zero_()
    model.save_pretrained(folder)
    tiny.tokenizer(framed=family in tiny.MASKED_LMS, length=length).save_pretrained(folder)
    return str(folder)


def dit(folder, kind):
    """A checkpoint of a kind of `dit_reference`, of twelve words; returns its path."""
    dit_reference.write(folder, kind)
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    frequencies = {name: value for name, value in tensors.items() if "inv_freq" in name}
    save_file({**_drawn(tensors), **frequencies}, file, metadata={"format": "pt"})
    dit_reference.words(dit_reference.TOKENS).save_pretrained(folder)
    return str(folder)
