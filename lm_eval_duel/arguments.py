"""Readers of arguments: each takes an argument's name and its value, and returns the value with its type.

lm_eval passes strings and numbers as its own parser made them: `block=32` is an int, `k=-1` a float, `none` a string,
`None` nothing. A wrong value is a DuelError that names the argument and says which values it takes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval_duel.errors import DuelError, unknown

Reader = Callable[[str, Any], Any]  # (name, value as given) -> value
NOTHING = (None, "", "none", "None", "null")
MAX_FACTOR = 1e20  # of logits: a larger one may overflow float32


def argument(read: Reader, default: Any = None) -> Any:
    """A dataclass field that is an argument: how it is read, and its value if it is not given."""
    return dataclasses.field(default=default, metadata={"read": read})


def readers(options: type) -> dict[str, Reader]:
    """The reader of each argument that a dataclass declares with `argument`."""
    return {field.name: field.metadata["read"] for field in dataclasses.fields(options) if "read" in field.metadata}


# ---------------------------------------------------------------- values


def text(key: str, value: Any) -> str | None:
    """A text, or None."""
    return None if value in NOTHING else str(value)


def whole(value: Any) -> int:
    """The integer of an int, a float or a text, to the last digit; ValueError and its like for any other value."""
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    try:
        return int(value)
    except ValueError:  # 1e3
        return int(float(value))


def count(key: str, value: Any, least: int = 1) -> int | None:
    """A whole number from `least` up, or None."""
    if value in NOTHING:
        return None
    try:
        if (number := whole(value)) < least:
            raise ValueError
        return number
    except (ValueError, TypeError, OverflowError):
        raise DuelError(f"'{key}' is a whole number, at least {least}; got '{value}'.") from None


def number(key: str, value: Any, what: str, accepts: Callable[[float], bool]) -> float | None:
    """A number for which `accepts` is true, or None; `what` describes these numbers in the error."""
    if value in NOTHING:
        return None
    try:
        result = float(value)
        if isinstance(value, bool) or not accepts(result):
            raise ValueError
        return result
    except (ValueError, TypeError, OverflowError):
        raise DuelError(f"'{key}' is {what}; got '{value}'.") from None


def truth(key: str, value: Any) -> bool:
    """True or false, as the harness or a person writes them."""
    if str(value).lower() in ("true", "false", "1", "0"):
        return str(value).lower() in ("true", "1")
    raise DuelError(f"'{key}' is true or false, not '{value}'.")


def one_of(key: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of the choices."""
    if value not in choices:
        raise unknown(f"value of {key}", value, choices)
    return value


def block_size(key: str, value: Any) -> int | str | None:
    """A number of positions, None (the whole target) or "auto"."""
    if value in NOTHING:
        return None
    if value == "auto":
        return "auto"
    try:
        return count(key, value)
    except DuelError:
        raise DuelError(f"'{key}' is a number of positions, none (the whole target) or auto; got '{value}'.") from None


def checkpoint_name(key: str, value: Any) -> str | None:
    """A folder or hub name, or None; raises DuelError for a network or tokenizer in memory."""
    if value is None or isinstance(value, (str, int, float, os.PathLike)):  # the harness reads 2024 as a number
        return text(key, value)
    raise DuelError(
        f"'{key}' is a folder or hub name; got an object of the class {type(value).__name__}. Write it "
        f"with save_pretrained(folder) and pass {key}=<folder>, or score a network in memory from Python with "
        "Duel.from_model(model, tokenizer)."
    )


def require_finite(key: str, value: float, *factors: float) -> None:
    """Raise DuelError if logits times `value` or one of `factors` may be infinite in float32."""
    if not all(abs(factor) <= MAX_FACTOR for factor in (value, *factors)):
        least = f"from {1 / MAX_FACTOR:g} " if factors else ""
        raise DuelError(
            f"'{key}' is a number {least}up to {MAX_FACTOR:g}; got {value:g}, by which logits overflow float32."
        )


# ---------------------------------------------------------------- readers of a kind


def choice(*choices: str, default: str | None = None) -> Reader:
    """A reader of one of the choices; none is `default`."""
    return lambda key, value: default if value in NOTHING else one_of(key, value, choices)


def required_choice(*choices: str) -> Reader:
    """A reader of one of the choices, which cannot be none."""
    return lambda key, value: one_of(key, value, choices)


def at_least(least: int, default: int | None = None) -> Reader:
    """A reader of a whole number from `least` up; none is `default`."""

    def read(key: str, value: Any) -> int | None:
        result = count(key, value, least)
        return default if result is None else result

    return read


def number_where(what: str, accepts: Callable[[float], bool], default: float | None = None) -> Reader:
    """A reader of a number for which `accepts` is true; none is `default`."""

    def read(key: str, value: Any) -> float | None:
        result = number(key, value, what, accepts)
        return default if result is None else result

    return read


def text_or_mapping(key: str, value: Any) -> str | Mapping[str, Any] | None:
    """A text or a mapping, or None."""
    return value if isinstance(value, Mapping) else text(key, value)
