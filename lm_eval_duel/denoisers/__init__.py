"""Denoisers: every family of checkpoints behind one contract (`core/network.py`).

Importing this package imports neither torch nor transformers: the names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.loading import load as load
    from lm_eval_duel.denoisers.loading import load_tokenizer as load_tokenizer

__all__ = ["load", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lm_eval_duel.denoisers import loading

    return getattr(loading, name)
