"""Unmasking rules: given the predictions at masked positions, which positions to reveal next.

A rule is a frozen dataclass with `__call__(predictions, lanes) -> Decision`. It never sees the targets, so denoiser and
rule define one distribution, for scoring and for sampling (the paper, Definition 3.1 and Table 1). Ties go to the
lowest position. The text form is `name[:param=value]...` and `parse(str(rule)) == rule`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, TypeGuard

from lm_eval_duel.arguments import MISSING, declared, unique_keys
from lm_eval_duel.core.decision import NEAR_TIE, Decision
from lm_eval_duel.errors import DuelError, naming, require_known, unknown
from lm_eval_duel.rules.base import Rule, in_memory, inner, rank, replaced
from lm_eval_duel.rules.checked import repeat_last, with_checks
from lm_eval_duel.rules.commit_once import CumulativeQuota, ThresholdUntil
from lm_eval_duel.rules.deployed import DinferThreshold, Dream, EntropyThreshold, Factor, Hierarchy, HighOrTopk, Quota
from lm_eval_duel.rules.klass import Klass
from lm_eval_duel.rules.mlx_vlm import CumulativeError, FallingThreshold, ThresholdBound, ThresholdFixed, ThresholdRef
from lm_eval_duel.rules.presets import require_covered
from lm_eval_duel.rules.scores import (
    Entropy,
    EntropyBound,
    Greedy,
    LeftToRight,
    LogMargin,
    Margin,
    Random,
    RightToLeft,
    Threshold,
)
from lm_eval_duel.rules.wrappers import SeedFirst, SubBlock

__all__ = [
    "NEAR_TIE",
    "Decision",
    "Rule",
    "SeedFirst",
    "SubBlock",
    "blockwise",
    "build",
    "find",
    "in_memory",
    "inner",
    "parse",
    "rank",
    "read",
    "repeat_last",
    "replaced",
    "split",
    "with_checks",
]

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        LeftToRight,
        RightToLeft,
        Random,
        Greedy,
        Margin,
        LogMargin,
        Entropy,
        Threshold,
        Klass,
        EntropyBound,
        EntropyThreshold,
        Factor,
        HighOrTopk,
        DinferThreshold,
        Hierarchy,
        ThresholdFixed,
        ThresholdRef,
        ThresholdBound,
        CumulativeError,
        FallingThreshold,
        Quota,
        CumulativeQuota,
        ThresholdUntil,
        Dream,
    )
}  # in the order of tables
ALIASES = {
    "l2r": "left_to_right",
    "confidence": "greedy",
    "prob_margin": "margin",
    "conf_threshold": "threshold",
    "eb": "entropy_bound",
}
WRAPPERS: dict[str, type[SeedFirst] | type[SubBlock]] = {  # from the outermost
    kind.parameter: kind for kind in (SeedFirst, SubBlock)
}
AROUND = {name: declared(kind)[name] for name, kind in WRAPPERS.items()}  # parameters that go with every rule
PARAMETERS = frozenset({*AROUND, *(name for rule in RULES.values() for name in declared(rule))})


def parse(text: str) -> Rule:
    """The rule of a text such as `greedy:k=2` or `my_module:MyRule:alpha=0.5`; raises DuelError for any other text."""
    return build(*read(text))


def read(text: str) -> tuple[str, dict[str, str]]:
    """A rule's name and its parameters as they are written; raises DuelError for a text of another form."""
    name, *rest = split(text)
    for part in rest:
        if part.find("=") < 1:
            raise DuelError(f"'{part}' in rule '{text}' is not param=value; write e.g. greedy:k=2.")
    with naming(f"Rule '{text}'"):
        return name, unique_keys((key, value) for key, _, value in (part.partition("=") for part in rest))


def split(text: str) -> list[str]:
    """A rule's text as its name (`module:Name` kept together) and its `param=value` parts."""
    name, *rest = str(text).split(":")
    if rest and "=" not in rest[0] and name not in RULES and name not in ALIASES:
        name = f"{name}:{rest.pop(0)}"
    return [name, *rest]


def build(name: str, arguments: dict[str, Any]) -> Rule:
    """The rule `name` (or an alias, or `module:Name`) with these parameters; raises DuelError for wrong ones."""
    for parameter, wrapper in WRAPPERS.items():
        if parameter in arguments:
            following = build(name, {key: value for key, value in arguments.items() if key != parameter})
            value = AROUND[parameter].read(parameter, arguments[parameter])
            if not value:
                return following
            if following.spans_blocks:
                raise DuelError(
                    f"across=true of rule {following.name} keeps its history over blocks, so it does not go with "
                    f"{parameter}."
                )
            return wrapper(following, value)
    rule = find(name)
    parameters = declared(rule)
    require_known(f"parameter of rule {name}", arguments, parameters)
    missing = [key for key, parameter in parameters.items() if key not in arguments and parameter.default is MISSING]
    if missing:
        values = {key: parameters[key].example or key.upper() for key in missing} | arguments
        example = ":".join([name, *(f"{key}={values[key]}" for key in parameters if key in values)])
        hints = "".join(f" {key}: {parameters[key].help}." for key in missing if parameters[key].help)
        raise DuelError(f"Rule '{name}' needs {', '.join(missing)}, e.g. {example}.{hints}")
    return rule(**{key: parameters[key].read(key, value, f" of rule '{name}'") for key, value in arguments.items()})


def find(name: str) -> type[Rule]:
    """The class of a rule's name, alias, or `module:Name` of the user's own."""
    if ":" in name:
        return _custom(name)
    require_covered("rule", name)
    require_known("unmasking rule", [name], [*RULES, *ALIASES])
    return RULES[ALIASES.get(name, name)]


def _folder_and_module(file: str) -> tuple[str, str]:
    """The folder of a Python file and the name of its module; raises DuelError if that name has another meaning."""
    path = os.path.abspath(os.path.expanduser(file))
    folder, module = os.path.split(path.removesuffix(".py"))
    if not os.path.isfile(path):
        raise DuelError(f"No file '{file}' for the rule; write path/to/file.py:Name.")
    other = importlib.util.find_spec(module) if module in sys.modules or module in sys.stdlib_module_names else None
    if other is not None and os.path.abspath(other.origin or "") != path:
        raise DuelError(f"'{module}' is also the module {other.origin}; give the rule's file {file} another name.")
    return folder, module


def blockwise(rule: Rule, block: int | None) -> Rule:
    """A rule that `spans_blocks`, on lanes that hold a whole window: inside the first unfinished block of it."""
    return rule if block is None else SubBlock(rule, block, carries=True)


def _is_rule(kind: Any) -> TypeGuard[type[Rule]]:
    return isinstance(kind, type) and issubclass(kind, Rule)


def _custom(name: str) -> type[Rule]:
    module_name, class_name = name.split(":")
    if not class_name or not (module_name.endswith(".py") or all(module_name.split("."))):
        raise DuelError(f"'{name}' is not a rule: write module:Name, path/to/file.py:Name, or a rule's name.")
    folder = os.getcwd()  # a console script has its own folder in sys.path instead
    if module_name.endswith(".py"):
        folder, module_name = _folder_and_module(module_name)
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise DuelError(
            f"No module '{module_name}' for rule '{name}'; put it in this folder or on PYTHONPATH."
        ) from None
    finally:
        sys.path.remove(folder)
    if (rule := getattr(module, class_name, None)) is None:
        known = [n for n, kind in vars(module).items() if _is_rule(kind) and kind.__module__ == module.__name__]
        raise unknown(f"rule in '{module_name}'", class_name, known)
    if not _is_rule(rule):
        raise DuelError(f"'{name}' must be a subclass of lm_eval_duel.rules.Rule with @dataclass(frozen=True).")
    return rule
