"""The fingerprint of a law: everything that defines a log-probability, as one short digest and in words.

Two runs with the same fingerprint must agree up to float noise; batch size, device and rank count are not in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

LAW_FILES = re.compile(r"(adapter_)?config\.json|.*\.safetensors|pytorch_model.*\.bin|.*\.ckpt")


def digest(law: Mapping[str, object]) -> str:
    """Twelve hexadecimal digits of the law, independent of the order of its entries."""
    text = json.dumps({key: str(value) for key, value in law.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def hash_files(paths: Iterable[str | os.PathLike]) -> str:
    """Twelve hexadecimal digits of the contents of files, names of folders not counted."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: os.path.basename(path)):
        total.update(os.path.basename(path).encode() + b"\0")
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                total.update(chunk)
    return total.hexdigest()[:12]


def weights_of(folder: str | os.PathLike, code: bool = False) -> str:
    """The hash of the weights and config in a local folder (checkpoint or adapter), and of its code where it runs."""
    names = [name for name in os.listdir(folder) if LAW_FILES.fullmatch(name) or (code and name.endswith(".py"))]
    return hash_files(os.path.join(folder, name) for name in names)


def of_tokenizer(tokenizer: Any) -> str:
    """The hash of everything that a tokenizer of transformers does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """One line in words for each entry in which two laws differ."""
    lines = []
    for key in sorted({*ours, *theirs}):
        mine, other = str(ours.get(key, "not set")), str(theirs.get(key, "not set"))
        if mine != other:
            lines.append(f"{key}: this run {mine}, the other {other}")
    return lines
