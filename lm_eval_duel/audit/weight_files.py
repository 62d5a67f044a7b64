"""The tensors and the config.json of a checkpoint's folder, read without `denoisers/`.

`audit` compares the network of a run with one written out (plain_networks.py) on these tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
RECOMPUTED = ("rotary_emb", "inv_freq", "sampling_eps", "noise.")  # in names of tensors that no forward pass reads


class Unknown(Exception):
    """Raised for a checkpoint whose network is not written out here; the text says why."""


class Files(Mapping[str, Tensor]):
    """The tensors in the weight files of a folder. Each is read when it is asked for: all at once may not fit.

    `used`: the names that were asked for.
    """

    def __init__(self, folder: str):
        self.files: dict[str, Any] = {}  # the open file of each tensor: opening one reads names and places only
        self.pickled: dict[str, Tensor] = {}
        paths = []
        for name in sorted(os.listdir(folder)):
            if not name.startswith("adapter_"):
                paths.append(os.path.join(folder, name))

        for path in paths:
            if path.endswith(".safetensors"):
                file = safe_open(path, "pt")
                self.files |= dict.fromkeys(file.keys(), file)
        for path in paths:
            if path.endswith(".bin") and not self.files:
                self.pickled |= torch.load(path, "cpu", weights_only=True, mmap=True)
        if not self.files and not self.pickled:
            raise Unknown("its weights are neither in safetensors nor in .bin files")
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        if key in self.pickled:
            return self.pickled[key]
        tensor: Tensor = self.files[key].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        yield from self.files
        yield from self.pickled

    def __len__(self) -> int:
        return len(self.files) + len(self.pickled)

    def __contains__(self, key: object) -> bool:
        return key in self.files or key in self.pickled


class WithoutPrefix(Mapping[str, Tensor]):
    """Tensors by their names without a prefix."""

    def __init__(self, tensors: Tensors, prefix: str):
        self.tensors = tensors
        self.names = {key.removeprefix(prefix): key for key in tensors}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[self.names[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, key: object) -> bool:
        return key in self.names


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a folder."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return dict(json.load(file))


def first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of these entries that a config has and that is not null."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def weights_in(files: Files) -> list[str]:
    """The names of the tensors that a forward pass reads."""
    names = []
    for key in files:
        if not any(part in key for part in RECOMPUTED):
            names.append(key)
    return names
