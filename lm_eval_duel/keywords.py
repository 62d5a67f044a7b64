"""Calls that take keywords: what help() and notebooks show of them, and the answer to an unknown one. No torch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

from lm_eval_duel.arguments import MISSING, Argument, Arguments, declared
from lm_eval_duel.errors import DuelError, unknown

Made = TypeVar("Made", bound=Callable[..., Any])
Methods = TypeVar("Methods")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")  # of Markdown
WIDTH = 100  # characters


def shows(
    keywords: Iterable[inspect.Parameter],
    description: str = "",
    required: Collection[str] = (),
) -> Callable[[Made], Made]:
    """A decorator of functions that pass on `**arguments`: their signature has `keywords`, too.

    `description`: follows the docstring. `required`: parameters that are shown without their default, which the
    function refuses with an error of its own.
    """

    def decorate(function: Made) -> Made:
        *named, rest = inspect.signature(function).parameters.values()
        taken = {parameter.name for parameter in named}
        shown = []
        for parameter in named:
            if parameter.name in required:
                parameter = parameter.replace(default=inspect.Parameter.empty)
            shown.append(parameter)
        for keyword in keywords:
            if keyword.name not in taken:
                shown.append(keyword.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                taken.add(keyword.name)
        function.__signature__ = inspect.Signature([*shown, rest])  # type: ignore[attr-defined]
        describe(function, description)
        return function

    return decorate


def describe(documented: Any, description: str) -> None:
    """Add a description below the docstring of a function or class; under `python -OO` there is none."""
    if documented.__doc__ and description:
        documented.__doc__ = f"{inspect.cleandoc(documented.__doc__)}\n\n{description}"


def keywords_of(record: type[Arguments], names: Iterable[str] | None = None) -> list[inspect.Parameter]:
    """The arguments of a record as keywords, with their types and defaults. `names`: of these alone."""
    types = {field.name: field.type for field in dataclasses.fields(record)}
    arguments = declared(record)
    keywords = []
    for name in arguments if names is None else names:
        default = arguments[name].default
        if default is MISSING:
            default = inspect.Parameter.empty
        keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        keywords.append(keyword)
    return keywords


def passed_on(function: Callable[..., Any], without: Collection[str] = ()) -> list[inspect.Parameter]:
    """The keyword-only parameters of a function, for one that passes its `**arguments` on to it."""
    keywords = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in without:
            keywords.append(parameter)
    return keywords


def listing(title: str, arguments: Mapping[str, Argument]) -> str:
    """Arguments in lines of a docstring, with their defaults and meanings."""
    lines = [title]
    for name, argument in arguments.items():
        meaning = LINK.sub(r"\1", argument.meaning)
        line = f"{name} ({argument.shown}): {meaning}."
        lines.append(textwrap.fill(line, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(lines)


def suggests_names(elsewhere: Mapping[str, str]) -> Callable[[type[Methods]], type[Methods]]:
    """A decorator of `Duel` and of its parts: their public methods answer an unknown keyword with the nearest one.

    `elsewhere`: keywords that something else takes, and what to do with each.
    """

    def decorate(methods: type[Methods]) -> type[Methods]:
        for name, method in list(vars(methods).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                method.__qualname__ = f"Duel.{name}"  # in Python's own errors on arguments
                setattr(methods, name, _with_known_keywords(method, elsewhere))
        return methods

    return decorate


def known_keywords(function: Made) -> Made:
    """A decorator of functions: an unknown keyword is a DuelError with the nearest one."""
    return cast(Made, _with_known_keywords(function, {}))


def _with_known_keywords(method: Callable[..., Any], elsewhere: Mapping[str, str]) -> Callable[..., Any]:
    """The function or method, with a DuelError for keywords that it does not have."""
    known = list(inspect.signature(method).parameters)
    if known[0] == "self":
        del known[0]

    @functools.wraps(method)
    def checked(*positional: Any, **keywords: Any) -> Any:
        for name, value in keywords.items():
            if name in known:
                continue
            if name in elsewhere:
                raise DuelError(
                    f"{method.__qualname__} takes {', '.join(known)}; got {name}={value}. {elsewhere[name]}"
                )
            raise unknown("argument", name, known, f"of {method.__qualname__}")
        return method(*positional, **keywords)

    return checked
