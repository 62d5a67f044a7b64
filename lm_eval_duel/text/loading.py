"""Options in, everything that scores texts out: shared by the harness, the library and the commands."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.loading import load_network, without_weights
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import resolve_block, resolve_grid
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

    `tokenizer` and `device` override the options; `sizes`: see `Estimator.from_options`.

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
    with _naming_preset(options, checkpoint):
        network = load_network(checkpoint, tokenizer)
    estimator = Estimator.from_options(network, options, **sizes)
    text = TextEncoder(tokenizer, network, options.windows, estimator.block)
    return Scorer(options, tokenizer, network, estimator, text)


class WithoutWeights(NamedTuple):
    """A model before its weights are read."""

    options: Options  # with the ids that the rule takes from the tokenizer
    tokenizer: PreTrainedTokenizerBase
    text: TextEncoder | None  # None: only the network says how long its rows are, or its own code would have to run


def require_loadable(options: Options) -> WithoutWeights:
    """Check everything that needs no weight.

    The network is made without its weights, from config.json and the tokenizer; weights on the hub are downloaded. The
    checkpoint's own code does not run. Nothing is logged: loading the network logs the same lines.

    Raises:
        DuelError: as `load_scorer`, for what config.json, the tokenizer and the options show to be wrong.
    """
    was_disabled = log.disabled
    log.disabled = True
    try:
        checkpoint = _described(options, options.device)
        with hub.explained(checkpoint.name):
            checkpoint = checkpoint.with_tokenizer().with_family_by_tensors()
            text = None
            if not checkpoint.runs_own_code:
                text = _described_text(options, checkpoint)
            tokenizer = checkpoint.text_tokenizer()
            return WithoutWeights(options.with_tokenizer(tokenizer), tokenizer, text)
    finally:
        log.disabled = was_disabled


def _described_text(options: Options, checkpoint: Checkpoint) -> TextEncoder | None:
    """The encoder of texts for a network that is made without its weights; None if the length of its rows is not known.

    Raises DuelError if the network does not take the options, their preset, their block or their grid.
    """
    with _naming_preset(options, checkpoint):
        network = without_weights(checkpoint)
    presets.require_fit(options.preset_as_given, network.family, network.block is not None)
    block = None
    if "block" in registry.find(options.estimator).takes:
        block = resolve_block(network, options.block)
    resolve_grid(network, options.grid)
    if not hasattr(network, "max_length"):
        return None
    return TextEncoder(checkpoint.text_tokenizer(), network, options.windows, block)


@contextlib.contextmanager
def _naming_preset(options: Options, checkpoint: Checkpoint) -> Iterator[None]:
    """Name the preset in the error of a network of another kind, which refuses an arg that the user has not typed."""
    try:
        yield
    except DuelError as error:
        preset = options.preset_as_given
        if preset is None or checkpoint.decoder_family is not None:
            raise
        reason = f"this network is refused with it: {error}".rstrip(".")
        raise presets.another_network(preset, reason, checkpoint.has_trained_block) from error


def _described(options: Options, device: str | None) -> Checkpoint:
    """The checkpoint of the options, which is of a known network and of one that the estimator is for."""
    network = {**options.network, "tokenizer": options.tokenizer}
    checkpoint = Checkpoint.open(options.pretrained or BUNDLED, device, **network)
    entry = registry.find(options.estimator)
    checkpoint.require_estimator(entry.name, entry.takes_noise)
    checkpoint.require_known_network()
    preset = options.preset_as_given
    if preset is not None:
        presets.require_fit(preset, checkpoint.decoder_family, checkpoint.has_trained_block)
    return checkpoint
