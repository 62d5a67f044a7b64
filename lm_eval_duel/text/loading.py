"""Options in, everything that scores texts out: shared by the harness, the library and the commands."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel import denoisers
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import BUNDLED
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
    name = options.pretrained or BUNDLED
    if options.pretrained is None and os.environ.get("RANK", "0") == "0":
        log.warning(
            "no checkpoint named: scoring with %s, a small bundled demonstration network. Name yours with --model_args "
            "pretrained=<folder or hub name>,...",
            BUNDLED,
        )
    entry = registry.find(options.estimator)
    denoisers.require_estimator(name, entry.name, entry.takes_noise, **options.network)
    tokenizer = denoisers.load_tokenizer(vars(options)) if tokenizer is None else tokenizer
    options = options.with_tokenizer(tokenizer)
    if options.preset is not None:
        presets.require_fit(options.preset, denoisers.find_family(name, **options.network))
    network = denoisers.load(name, device=device or options.device, tokenizer=tokenizer, **options.network)
    estimator = registry.make(network, options, **sizes)
    return Scorer(
        options, tokenizer, network, estimator, TextEncoder(tokenizer, network, options.windows, estimator.block)
    )


def require_loadable(options: Options) -> None:
    """Raise DuelError for what config.json shows to be wrong, without reading any weight."""
    name, entry = options.pretrained or BUNDLED, registry.find(options.estimator)
    denoisers.require_estimator(name, entry.name, entry.takes_noise, **options.network)
    denoisers.find_family(name, **options.network)
