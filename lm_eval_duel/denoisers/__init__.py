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
    """Load the denoiser of a checkpoint.

    Args:
        name: A local folder, a hub name, or a bundled name ("demo-mdm", "demo-bd", "demo-ar").
        device: "cpu", "cuda", "cuda:0", ... None: a GPU if there is one.
        network: `tokenizer` (a folder, a hub name, or a loaded tokenizer), and the model args of the network in
            docs/model_args.md, such as `dtype`, `family` or `cache`. The others are detected.

    Raises:
        DuelError: If an argument is wrong, or the checkpoint cannot be read, does not fill its network exactly, or
            contradicts its config.
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
    """Load the tokenizer of a checkpoint.

    Args:
        arguments: Model args, such as {"pretrained": "demo-mdm"}: `tokenizer` if it is given, else the tokenizer next
            to the weights of `pretrained`, or of its family.

    Raises:
        DuelError: If there is none.
    """
    from lm_eval_duel.denoisers import loading

    return loading.load_tokenizer(arguments)
