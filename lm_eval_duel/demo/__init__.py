"""The bundled demonstration checkpoints, how they were trained (`train.py`), and the sample text."""

from __future__ import annotations

from pathlib import Path

BUNDLED = "demo-mdm"  # scored if no checkpoint is named
NAMES = ("demo-mdm", "demo-bd", "demo-ar")
FOLDER = Path(__file__).resolve().parent


def resolve(name: str) -> str:
    """The folder of a bundled checkpoint's name; any other name as it is."""
    return str(FOLDER / name) if name in NAMES else name
