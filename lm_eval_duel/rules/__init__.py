"""Unmasking rules: given the predictions at masked positions, which positions to reveal next.

A rule is a frozen dataclass with `__call__(predictions, lanes) -> Decision`. It never sees the targets, so denoiser and
rule define one distribution, for scoring and for sampling (the paper, Definition 3.1 and Table 1). Ties go to the
lowest position. The text form is `name[:param=value]...` and `parse(str(rule)) == rule`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, TypeGuard

from lm_eval_duel.arguments import MISSING, Argument, declared, unique_keys
from lm_eval_duel.core.decision import NEAR_TIE, Decision
from lm_eval_duel.errors import DuelError, naming, require_known, unknown
from lm_eval_duel.rules.base import Rule, in_memory, rank
from lm_eval_duel.rules.checked import repeat_last, with_checks
from lm_eval_duel.rules.klass import Klass
from lm_eval_duel.rules.parallel import (
    CumulativeError,
    DinferThreshold,
    EntropyThreshold,
    Factor,
    Hierarchy,
    HighOrTopk,
    ThresholdBound,
    ThresholdFixed,
    ThresholdRef,
)
from lm_eval_duel.rules.presets import require_covered
from lm_eval_duel.rules.scheduled import CumulativeQuota, Dream, FallingThreshold, Quota, ThresholdUntil
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
from lm_eval_duel.rules.wrappers import SeedFirst, SubBlock, inner, replaced

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

# Parameters that go with every rule, as they are rules around it; from the outermost.
WRAPPERS: dict[str, type[SeedFirst] | type[SubBlock]] = {
    SeedFirst.parameter: SeedFirst,
    SubBlock.parameter: SubBlock,
}
WRAPPER_ARGUMENTS = {name: declared(wrapper)[name] for name, wrapper in WRAPPERS.items()}
PARAMETERS = frozenset(WRAPPERS).union(*(declared(rule) for rule in RULES.values()))


# ---------------------------------------------------------------- from text


def parse(text: str) -> Rule:
    """The rule of a text such as `greedy:k=2` or `my_module:MyRule:alpha=0.5`; raises DuelError for any other text."""
    return build(*read(text))


def read(text: str) -> tuple[str, dict[str, str]]:
    """A rule's name and its parameters as they are written; raises DuelError for a text of another form."""
    name, *rest = split(text)
    parameters = []
    for part in rest:
        key, _, value = part.partition("=")
        if not key or "=" not in part:
            raise DuelError(f"'{part}' in rule '{text}' is not param=value; write e.g. greedy:k=2.")
        parameters.append((key, value))
    with naming(f"Rule '{text}'"):
        return name, unique_keys(parameters)


def split(text: str) -> list[str]:
    """A rule's text as its name (`module:Name` kept together) and its `param=value` parts."""
    name, *rest = str(text).split(":")
    if rest and "=" not in rest[0] and name not in RULES and name not in ALIASES:
        name = f"{name}:{rest.pop(0)}"
    return [name, *rest]


def build(name: str, arguments: dict[str, Any]) -> Rule:
    """The rule `name` (or an alias, or `module:Name`) with these parameters; raises DuelError for wrong ones."""
    for parameter in WRAPPERS:
        if parameter in arguments:
            others = {key: value for key, value in arguments.items() if key != parameter}
            return _wrapped(build(name, others), parameter, arguments[parameter])
    rule = find(name)
    parameters = declared(rule)
    require_known("parameter", arguments, parameters, f"of the rule {name}")
    _require_complete(name, arguments, parameters)
    values = {}
    for key, value in arguments.items():
        values[key] = parameters[key].read(key, value, f" of rule '{name}'")
    return rule(**values)


def _wrapped(rule: Rule, parameter: str, text: Any) -> Rule:
    """The rule inside the wrapper that has this parameter, unless its value switches the wrapper off."""
    value = WRAPPER_ARGUMENTS[parameter].read(parameter, text)
    if not value:
        return rule
    if rule.spans_blocks:
        raise DuelError(
            f"across=true of rule {rule.name} keeps its history over blocks, so it does not go with {parameter}."
        )
    return WRAPPERS[parameter](rule, value)


def _require_complete(name: str, arguments: dict[str, Any], parameters: dict[str, Argument]) -> None:
    """Raise DuelError with an example, if a parameter without a default is missing."""
    missing = []
    for key, parameter in parameters.items():
        if key not in arguments and parameter.default is MISSING:
            missing.append(key)
    if not missing:
        return
    example = name
    hints = ""
    for key, parameter in parameters.items():
        if key in arguments:
            example += f":{key}={arguments[key]}"
        elif key in missing:
            example += f":{key}={parameter.example or key.upper()}"
            if parameter.help:
                hints += f" {key}: {parameter.help}."
    raise DuelError(f"Rule '{name}' needs {', '.join(missing)}, e.g. {example}.{hints}")


def find(name: str) -> type[Rule]:
    """The class of a rule's name, alias, or `module:Name` of the user's own."""
    if ":" in name:
        return _users_rule(name)
    if name.endswith(".py"):
        raise _no_class(name)
    require_covered("rule", name)
    if name not in (*RULES, *ALIASES) and _is_module(name):
        raise _no_class(name)
    require_known("unmasking rule", [name], [*RULES, *ALIASES])
    return RULES[ALIASES.get(name, name)]


def blockwise(rule: Rule, block: int | None) -> Rule:
    """A rule that `spans_blocks`, confined to the first unfinished block of lanes that hold a whole window."""
    return rule if block is None else SubBlock(rule, block, carries=True)


# ---------------------------------------------------------------- a user's own


def _users_rule(name: str) -> type[Rule]:
    """The class of `module:Name` or `path/to/file.py:Name`."""
    module_name, class_name = name.split(":")
    is_file = module_name.endswith(".py")
    if not class_name or not (is_file or all(module_name.split("."))):
        raise DuelError(f"'{name}' is not a rule: write module:Name, path/to/file.py:Name, or a rule's name.")
    if is_file:
        folder, module_name = _folder_and_module(module_name)
    else:
        folder = os.getcwd()  # a console script has its own folder in sys.path instead
    module = _imported(name, folder, module_name)
    rule = getattr(module, class_name, None)
    if rule is None:
        raise unknown("rule", class_name, _rules_of(module), f"in '{module_name}'")
    if not _is_rule(rule):
        raise DuelError(f"'{name}' must be a subclass of lm_eval_duel.rules.Rule with @dataclass(frozen=True).")
    return rule


def _is_module(name: str) -> bool:
    """True for a user's module, in this folder or on the path: not one of Python itself, and no dotted name."""
    if not name.isidentifier() or name in sys.stdlib_module_names:
        return False
    return os.path.isfile(f"{name}.py") or importlib.util.find_spec(name) is not None


def _no_class(name_of_module: str) -> DuelError:
    """The error for a rule's file or module without the rule's name. It lists the rules in it, if it imports."""
    what = "module"
    folder = os.getcwd()
    module_name = name_of_module
    if name_of_module.endswith(".py"):
        what = "file"
        folder, module_name = _folder_and_module(name_of_module)
    try:
        known = _rules_of(_imported(name_of_module, folder, module_name))
    except Exception:  # the error of the file itself is shown once a rule in it is named
        known = []
    name = "Name"
    listed = ""
    if known:
        name = known[0]
        listed = f" Rules in it: {', '.join(known)}."
    return DuelError(f"'{name_of_module}' is a {what}, not a rule: write {name_of_module}:{name}.{listed}")


def _folder_and_module(file: str) -> tuple[str, str]:
    """The folder of a Python file and the name of its module; raises DuelError if that name has another meaning."""
    path = os.path.abspath(os.path.expanduser(file))
    folder, module = os.path.split(path.removesuffix(".py"))
    if not os.path.isfile(path):
        raise DuelError(f"No file '{file}' for the rule; write path/to/file.py:Name.")
    if module in sys.modules or module in sys.stdlib_module_names:
        other = importlib.util.find_spec(module)
        if other is not None and os.path.abspath(other.origin or "") != path:
            raise DuelError(f"'{module}' is also the module {other.origin}; give the rule's file {file} another name.")
    return folder, module


def _imported(name: str, folder: str, module_name: str) -> ModuleType:
    """The module of rule `name`, which may be in `folder`."""
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # if neither the rule's module nor a package around it is missing, the module imports another one that is
        is_missing = bool(error.name) and f"{module_name}.".startswith(f"{error.name}.")
        if not is_missing:
            raise
        raise DuelError(
            f"No module '{module_name}' for rule '{name}'; put it in this folder or on PYTHONPATH."
        ) from None
    finally:
        sys.path.remove(folder)


def _rules_of(module: ModuleType) -> list[str]:
    """The names of the rules that a module defines."""
    names = []
    for name, value in vars(module).items():
        if _is_rule(value) and value.__module__ == module.__name__:
            names.append(name)
    return names


def _is_rule(value: Any) -> TypeGuard[type[Rule]]:
    return isinstance(value, type) and issubclass(value, Rule)


# ---------------------------------------------------------------- in tables
# Names and order of rules by text alone: the rules of results need not be installed.


def kind(text: str) -> type[Rule]:
    """The class of a rule of this package; `Rule` itself for a user's rule."""
    return RULES.get(text.split(":")[0], Rule)


def is_rule(text: str) -> bool:
    """True if a text is a rule: of this package, or module:Name of a user's."""
    name, *rest = text.split(":")
    return name in RULES or (bool(name) and bool(rest) and rest[0].isidentifier())


def without_defaults(text: str, keep: str = "") -> str:
    """The text of a rule without parameters at their defaults, except `keep`: `greedy`, `klass:mu=0.9:nu=0.01`."""
    name, *parameters = text.split(":")
    if name not in RULES:
        return text
    defaults = set()
    for field in dataclasses.fields(RULES[name]):
        if field.name != keep:
            defaults.add(f"{field.name}={field.default}")
    kept = [parameter for parameter in parameters if parameter not in defaults]
    return ":".join([name, *kept])


def family(text: str) -> tuple[str, float]:
    """A rule without the parameter that sets its speed, and that parameter's value (1 if there is none).

    Of a rule that has several such parameters, it is the first of `Rule.speed`: rules that differ in another are of
    different families.
    """
    name, *parameters = text.split(":")
    values = {}
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        values[key] = value
    for key in kind(text).speed:
        value = values.get(key, "")
        if _is_number(value):
            others = [parameter for parameter in parameters if parameter != f"{key}={value}"]
            return ":".join([name, *others]), float(value)
    return text, 1.0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def sort_key(text: str | None) -> tuple[int, str, float]:
    """The sort key of a rule: in the order of `RULES`, then by family and speed."""
    name, speed = family(text or "")
    first = name.split(":")[0]
    place = [*RULES, first].index(first)  # a user's rules come after all of `RULES`
    return (place, name, speed)


def adaptive(text: str) -> bool:
    """True if the number of a rule's steps depends on the text."""
    rule = kind(text)
    if rule.adaptive_with and rule.adaptive_with in text.split(":"):
        return True
    return rule.adaptive
