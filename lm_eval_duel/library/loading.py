"""From the keywords of `Duel` to options, and from options to a network with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel import denoisers
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import MODEL_ARGUMENTS, Options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNSET = {"rule": "greedy", "block": "auto", "grid": "auto", "estimator": "duel"}  # the defaults of `from_pretrained`
HARNESS_ARGS = ("trace", "verify", "order", "parallelize")  # not args of a Duel


def load_pretrained(
    name: str,
    tokenizer: str | PreTrainedTokenizerBase | None,
    device: str | None,
    sampler: Mapping[str, Any],
    **arguments: Any,
) -> tuple[Denoiser, Options, PreTrainedTokenizerBase]:
    """A checkpoint, the options of `arguments` and of `sampler` (rule, block, grid, estimator), and the tokenizer."""
    for key in HARNESS_ARGS:
        if key in arguments:
            raise DuelError(f"'{key}' is a model arg of the harness's model; Duel.from_pretrained does not take it.")
    if arguments.get("preset"):  # it sets what is not given
        sampler = {key: value for key, value in sampler.items() if value != UNSET[key]}
    arguments = {"pretrained": name, **sampler, **arguments}
    if tokenizer is None or isinstance(tokenizer, str):
        options = Options.parse({**arguments, "tokenizer": tokenizer})
        tokenizer = denoisers.load_tokenizer(vars(options))
    else:
        options = Options.parse(arguments)
    if options.preset is not None:
        options.require_preset_fits(denoisers.find_family(name, **options.network))
    denoiser = denoisers.load(name, device=device, tokenizer=tokenizer, **options.network)
    return denoiser, options.with_tokenizer(tokenizer), tokenizer


def own_arguments(entry: registry.Entry) -> list[str]:
    """The arguments of an estimator, besides those of every one."""
    return [*entry.arguments, "draw_seed", *(["cache"] if entry.own_cache else [])]


def estimator_options(estimator: str, arguments: Mapping[str, Any]) -> Options:
    """The options of an estimator, given as keywords of Python."""
    entry = registry.find(estimator)
    registry.check_arguments(arguments, entry.name)
    for key in arguments:
        if key not in own_arguments(entry):
            raise unknown(f"argument of estimator={entry.name}", key, own_arguments(entry))
    read = {**MODEL_ARGUMENTS, **entry.arguments}
    values = {key: read[key].read(key, value) for key, value in arguments.items()}
    own = {key: values.pop(key) for key in entry.arguments if key in values}
    return Options(estimator=entry.name, estimator_args=own, **values)
