"""The options that the keywords of `Duel` stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_duel import rules
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options


class Default(str):
    """The default of a keyword of `from_pretrained`, which differs from the same value given by the user."""


GREEDY: Any = Default("greedy")
AUTO: Any = Default("auto")
DUEL: Any = Default("duel")
HARNESS_ARGS = ("trace", "verify", "order", "parallelize")  # not args of a Duel


def own_arguments(entry: registry.Entry) -> list[str]:
    """The arguments that this estimator has and not every other."""
    return [*entry.arguments, "draw_seed", *(["cache"] if entry.own_cache else [])]


def estimator_options(estimator: str, arguments: Mapping[str, Any]) -> Options:
    """The options of an estimator, given as keywords of Python."""
    entry = registry.find(estimator)
    registry.check_arguments(arguments, entry.name)
    for key, value in arguments.items():
        if key in rules.PARAMETERS and key not in own_arguments(entry):
            raise DuelError(f"'{key}' is a parameter of the rule: name it there, as in rule=\"NAME:{key}={value}\".")
        if key not in own_arguments(entry):
            raise unknown(f"argument of estimator={entry.name}", key, own_arguments(entry))
    return Options.parse({"estimator": entry.name, **arguments})
