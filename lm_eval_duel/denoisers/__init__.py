"""Denoisers: every family of checkpoints behind one contract (`core/network.py`).

Importing this package imports neither torch nor transformers: they are imported by the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_eval_duel.core.denoiser import Denoiser


def load(name: str = "demo-mdm", *, device: str | None = None, **network: Any) -> Denoiser:
    """The denoiser of a local folder, a hub name or a bundled name.

    Args:
        name: a folder, a hub name, or one of the bundled `demo-mdm`, `demo-bd` and `demo-ar`.
        device: `cpu`, `cuda`, `cuda:0`, ...; None picks a GPU if there is one.
        network: `tokenizer` (a folder, a hub name, or a loaded tokenizer) and the arguments of
            `load_options.NetworkArguments`. What is not given is detected.

    Raises:
        DuelError: an argument is wrong, or the checkpoint cannot be read, does not fill its network exactly, or is not
            what its config says.
    """
    from lm_eval_duel.denoisers import loading

    return loading.load(name, device=device, **network)


def find_family(name: str, **network: Any) -> str | None:
    """The decoder family of a checkpoint by its config.json, before any weight is read; None for all other networks.

    Raises:
        DuelError: as `load`, for what the config shows.
    """
    from lm_eval_duel.denoisers import loading

    return loading.find_family(name, **network)


def require_estimator(name: str, estimator: str, takes_noise: bool, **network: Any) -> None:
    """Check that an estimator is for the noise of a checkpoint, by its config.json, before any weight is read.

    Raises:
        DuelError: it is not; the message names those that are.
    """
    from lm_eval_duel.denoisers import loading

    loading.require_estimator(name, estimator, takes_noise, **network)


def load_tokenizer(arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that model args name: `tokenizer`, else the one next to the weights or of the family.

    Raises:
        DuelError: there is none.
    """
    from lm_eval_duel.denoisers import loading

    return loading.load_tokenizer(arguments)
