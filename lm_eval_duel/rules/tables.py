"""Names and order of rules in tables and figures, by text: the rules of results need not be installed."""

from __future__ import annotations

import dataclasses

from lm_eval_duel.rules import RULES, Rule


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
    defaults = {f"{field.name}={field.default}" for field in dataclasses.fields(RULES[name]) if field.name != keep}
    return ":".join([name, *(parameter for parameter in parameters if parameter not in defaults)])


def family(text: str) -> tuple[str, float]:
    """A rule without the parameter that sets its speed, and that parameter's value (1 if there is none)."""
    name, *parameters = text.split(":")
    speed, kept = 1.0, [name]
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        try:
            speed = float(value if key in kind(text).speed else "")
        except ValueError:
            kept.append(parameter)
    return ":".join(kept), speed


def sort_key(text: str | None) -> tuple[int, str, float]:
    """The sort key of a rule: in the order of `RULES`, then by family and speed."""
    name, speed = family(text or "")
    first = name.split(":")[0]
    return ([*RULES, first].index(first), name, speed)


def label(text: str) -> str:
    """A rule's name in tables of a paper, or its name as typed."""
    return kind(text).label or text.split(":")[0]


def adaptive(text: str) -> bool:
    """True if the number of a rule's steps depends on the text."""
    return kind(text).adaptive
