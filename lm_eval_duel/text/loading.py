"""Options in, everything that scores texts out: shared by the harness, the library and the commands."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.loading import load_network
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger("lm_eval.duel_mdm")


class Scorer(NamedTuple):
    """The parts that score texts. `options`: as given, with the ids that the rule takes from the tokenizer."""

    options: Options
    tokenizer: PreTrainedTokenizerBase
    denoiser: Denoiser
    estimator: Estimator
    text: TextEncoder


def load_scorer(
    options: Options,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | None = None,
    **sizes: Any,
) -> Scorer:
    """The tokenizer, the network, the estimator and the `TextEncoder` of the options, read in this order.

    `tokenizer` and `device` override the options; `sizes`: see `registry.make`.

    Raises:
        DuelError: the checkpoint cannot be read, or the options define no distribution of this network.
    """
    if options.pretrained is None and os.environ.get("RANK", "0") == "0":
        log.warning(
            "no checkpoint named: scoring with %s, a small bundled demonstration network. Name yours with --model_args "
            "pretrained=<folder or hub name>,...",
            BUNDLED,
        )
    checkpoint = _described(options, device or options.device)
    tokenizer = checkpoint.text_tokenizer() if tokenizer is None else tokenizer
    options = options.with_tokenizer(tokenizer)  # a rule may name tokens

    if options.preset is not None:
        presets.require_fit(options.preset, checkpoint.decoder_family)
    try:
        network = load_network(checkpoint, tokenizer)
    except DuelError as error:
        if options.preset is None or checkpoint.decoder_family is not None:
            raise
        # a network of another kind, which refuses an arg that the preset has set and the user has not seen
        raise presets.another_network(
            options.preset, f"this network is refused with it: {error}".rstrip(".")
        ) from error
    estimator = registry.make(network, options, **sizes)
    text = TextEncoder(tokenizer, network, options.windows, estimator.block)
    return Scorer(options, tokenizer, network, estimator, text)


def require_loadable(options: Options) -> None:
    """Raise DuelError for what config.json shows to be wrong, without reading any weight."""
    _described(options, "cpu")


def _described(options: Options, device: str | None) -> Checkpoint:
    """The checkpoint of the options, which is of a known network and of one that the estimator is for."""
    network = {**options.network, "tokenizer": options.tokenizer}
    checkpoint = Checkpoint.open(options.pretrained or BUNDLED, device, **network)
    entry = registry.find(options.estimator)
    checkpoint.require_estimator(entry.name, entry.takes_noise)
    checkpoint.require_known_network()
    return checkpoint
