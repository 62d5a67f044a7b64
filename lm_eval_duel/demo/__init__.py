"""The bundled demonstration checkpoints and the sample text.

`scripts/train_demo.py` and `scripts/cut_demo.py`, which made them, are in the repository but not in the wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

BUNDLED = "demo-mdm"  # scored if no checkpoint is named
NAMES = ("demo-mdm", "demo-bd", "demo-duo", "demo-ar")
FOLDER = Path(__file__).resolve().parent
MODEL_ARG = re.compile(r"[a-z_]+=")  # the start of a word that was meant as one


def resolve(name: str) -> str:
    """The folder of a bundled checkpoint; any other name is returned unchanged."""
    return str(FOLDER / name) if name in NAMES else name


def model_hint(words: Iterable[str]) -> str:
    """A sentence for the error about `words`, if a bundled network or a model arg is where none is expected."""
    words = list(words)
    if any(MODEL_ARG.match(word) for word in words):
        return " Model args follow --model_args and are separated by commas: --model_args NAME,rule=margin,block=4."
    return "" if set(NAMES).isdisjoint(words) else " A model is named by --model_args."
