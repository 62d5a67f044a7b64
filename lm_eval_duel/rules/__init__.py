"""Unmasking rules: given the predictions at masked positions, which positions to reveal next.

A rule is a frozen dataclass with `__call__(predictions, lanes) -> Decision`. It never sees the targets, so denoiser and
rule define one distribution, for scoring and for sampling (the paper, Definition 3.1 and Table 1). Ties go to the
lowest position. The text form is `name[:param=value]...` and `parse(str(rule)) == rule`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from lm_eval_duel.arguments import MISSING, Argument, declared, unique_keys
from lm_eval_duel.core.decision import NEAR_TIE, Decision
from lm_eval_duel.errors import DuelError, naming, nearest, require_known, unknown
from lm_eval_duel.rules import users
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
from lm_eval_duel.rules.presets import require_covered, require_rule
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
    "with_colons",
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

COMMAS = re.compile(r" *, *(?=[A-Za-z_]\w* *=)")  # before parameters, as among model args

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
    if "::" in text:
        raise DuelError(f"Rule '{text}' has two colons in a row; write {text.replace('::', ':')}.")
    name, *rest = split(text)
    parameters = []
    for part in rest:
        key, _, value = part.partition("=")
        if not key or "=" not in part:
            raise DuelError(f"'{part}' in rule '{text}' is not param=value; write e.g. greedy:k=2.")
        parameters.append((key, value))
    with naming(f"Rule '{text}'"):
        return name, unique_keys(parameters)


def with_colons(text: str) -> str:
    """The text of a rule with a colon in place of each comma before a parameter; a path may have commas."""
    return text if "/" in text else COMMAS.sub(":", text)


def split(text: str) -> list[str]:
    """A rule's text as its name (`module:Name` kept together) and its `param=value` parts.

    Raises DuelError for a comma before a parameter.
    """
    text = str(text)
    if with_colons(text) != text:
        raise DuelError(f"Rule '{text}' has a comma before a parameter; {_advice_on_commas(text)}.")
    name, *rest = text.split(":")
    if rest and "=" not in rest[0] and name not in RULES and name not in ALIASES:
        name = f"{name}:{rest.pop(0)}"
    return [name, *rest]


def _advice_on_commas(text: str) -> str:
    """The advice for a rule with commas, of which some may stand before arguments that are no rule's."""
    name = re.split("[:,]", text)[0].strip()
    if name not in RULES and name not in ALIASES:  # a user's rule may have any parameter
        return f"write {with_colons(text)}"
    rule, *parts = COMMAS.split(text)
    others = []
    for part in parts:
        key, _, _ = part.partition("=")
        if key.strip() in PARAMETERS:
            rule += f":{part}"
        else:
            others.append(part)
    apart = f", and {', '.join(others)} as an argument of its own" if others else ""
    return f"write {rule}{apart}"


def build(name: str, arguments: dict[str, Any]) -> Rule:
    """The rule `name` (or an alias, or `module:Name`) with these parameters; raises DuelError for wrong ones."""
    for parameter in WRAPPERS:
        if parameter in arguments:
            others = {key: value for key, value in arguments.items() if key != parameter}
            return _wrapped(build(name, others), parameter, arguments[parameter])
    rule = find(name)
    parameters = declared(rule)
    users.require_types(rule, set(arguments).difference(parameters))
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
        return users.find(name)
    if name.endswith(".py"):
        raise users.no_class(name)
    require_covered("rule", name)
    known = [*RULES, *ALIASES]
    if name not in known:
        users.require_colon(name)
        if not nearest(name, known):
            require_rule(name)
        raise DuelError(f"{unknown('unmasking rule', name, known)} {users.OWN_NAMES}.")
    return RULES[ALIASES.get(name, name)]


def blockwise(rule: Rule, block: int | None) -> Rule:
    """A rule that `spans_blocks`, confined to the first unfinished block of lanes that hold a whole window."""
    return rule if block is None else SubBlock(rule, block, carries=True)


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
