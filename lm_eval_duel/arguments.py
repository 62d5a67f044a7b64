"""Arguments, declared once: model args, arguments of estimators, parameters of rules and flags of commands.

    block: int | str | None = argument(BLOCK, "auto", "positions that are finished before the next ones are begun")

An `Argument` says which values are taken, what stands for no value, one line of help, and whether the value defines a
number (and so changes the fingerprint). Reading, errors, the lists of `lm-eval-duel list`, the tables
in docs/ and the test of the fingerprint come from it.

lm_eval passes strings and numbers as its own parser made them: `block=32` is an int, `k=-1` a float, `none` a string,
`None` nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, get_args

from lm_eval_duel.errors import DuelError, unknown

NOTHING = (None, "none", "None", "null")
MAX_FACTOR = 1e20  # of logits: with a larger one they may overflow float32
INTEGERS = 2**63  # integers of tensors are smaller
MISSING = dataclasses.MISSING
KEY = "argument"  # in the metadata of a dataclass field


def has_order(values: Any) -> bool:
    """True for several values in an order: a list, an array, a column of a table, a generator."""
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set)


def has_index(values: Any) -> bool:
    """True for values with a length that are found by their number, as in a list: no generator and no set."""
    return hasattr(values, "__len__") and hasattr(values, "__getitem__")


@dataclasses.dataclass(frozen=True)
class ArgumentType:
    """The values that an argument takes. `convert` raises ValueError or its like for any other value."""

    words: str  # completes "'block' is ..."
    convert: Callable[[Any], Any]
    choices: tuple[str, ...] = ()  # what `convert` may return; empty: anything
    nothing: tuple[Any, ...] = NOTHING

    def __call__(self, name: str, value: Any, of: str = "") -> Any:
        """The value with its type, None for nothing; `of`: whose argument it is, for the error.

        Raises:
            DuelError: any other value; the message names the argument and what it takes.
        """
        if getattr(value, "ndim", 0):  # of an array, `==` and `in` below would be arrays, too
            raise DuelError(f"'{name}'{of} is {self.words}; got an object of the class {type(value).__name__}.")
        if value == "" and self.nothing is NOTHING:
            raise DuelError(
                f"'{name}'{of} is {self.words}; got an empty value, as from a shell variable that is not set. Leave "
                f"'{name}' out for the default."
            )
        if value in self.nothing:
            return None
        try:
            result = self.convert(value)
        except DuelError:
            raise
        except (ValueError, TypeError, OverflowError):
            plain = isinstance(value, (str, int, float, list, tuple, dict, set, bytes))
            got = f"'{value}'" if plain else f"an object of the class {type(value).__name__}"
            raise DuelError(f"'{name}'{of} is {self.words}; got {got}.") from None
        if self.choices and result not in self.choices:
            raise unknown(f"value of {name}{of}", value, self.choices)
        return result


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument. `default` is MISSING for one that must be given."""

    kind: ArgumentType
    default: Any = None
    help: str = ""  # one line, in Markdown
    _: dataclasses.KW_ONLY
    none: Any = ...  # what `none` means; ...: the default
    unset: str = ""  # a description of the default, if it is not a value
    identity: bool = True  # the value defines a number, so it changes the fingerprint
    example: Any = None  # a value for messages, of an argument that must be given
    optional: bool = False  # the text of a rule leaves it out at its default
    only_with: tuple[str, ...] = ()  # another argument and its values with which this one is read

    def read(self, name: str, value: Any, of: str = "") -> Any:
        """The value with its type; raises DuelError for a wrong one, see `ArgumentType`."""
        result = self.kind(name, value, of)
        if result is not None:
            return result
        if (result := self.default if self.none is ... else self.none) is MISSING:
            raise DuelError(f"'{name}'{of} is {self.kind.words}; got '{value}'.")
        return result

    @property
    def shown(self) -> str:
        """The default, as a user types it."""
        if self.unset or self.default is MISSING:
            return self.unset or "required"
        value = "none" if self.default in (None, ()) else self.default
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def meaning(self) -> str:
        """The help, and that the value changes no number, if so."""
        return self.help if self.identity else f"{self.help}. Changes no number"


def argument(kind: ArgumentType, default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an argument; `more`: other fields of `Argument`."""
    return dataclasses.field(default=default, metadata={KEY: Argument(kind, default, help, **more)})


def required(kind: ArgumentType, help: str, example: Any) -> Any:
    """A dataclass field that is an argument without a default."""
    return argument(kind, MISSING, help, example=example)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Base of dataclasses whose fields are arguments. Making one reads them, and raises DuelError for a wrong one."""

    def __post_init__(self) -> None:
        arguments = {field.name: field.metadata[KEY] for field in dataclasses.fields(self) if KEY in field.metadata}
        for name, arg in arguments.items():
            value = getattr(self, name)
            if value is not arg.default:
                object.__setattr__(self, name, arg.read(name, value, self._owner))  # the dataclass is frozen
        for name, arg in arguments.items():
            if not arg.only_with or getattr(self, name) == arg.default:
                continue
            other, *values = arg.only_with
            if getattr(self, other) not in values:
                wanted = " or ".join(f"{other}={value}" for value in values)
                raise DuelError(f"'{name}'{self._owner} is read with {wanted} only; add {wanted}, or leave it out.")

    @property
    def _owner(self) -> str:
        """Whose arguments they are, for errors."""
        return ""


def declared(options: Any) -> dict[str, Argument]:
    """The arguments of a dataclass, by name: those that it declares, and those that the types of other fields imply."""
    return {field.name: declaration(field) for field in dataclasses.fields(options) if field.init}


def declaration(field: dataclasses.Field[Any]) -> Argument:
    """The argument of a dataclass field, which in a user's own rule is only a name, a type and a default."""
    if KEY in field.metadata:
        return field.metadata[KEY]
    name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    kinds = {**ANNOTATED, "None": TEXT, "Optional": TEXT}
    kind = next((kind for word, kind in kinds.items() if re.search(rf"\b{word}\b", name)), RAW)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Argument(kind, default, none=None if "None" in name or "Optional" in name else ...)


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs as a dict; raises DuelError for a key with two values."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuelError(f"'{key}' is given twice, as {key}={result[key]} and {key}={value}. Leave one of them out.")
        result[key] = value
    return result


# ---------------------------------------------------------------- kinds


def whole(least: int | None = 1, what: str = "a whole number", most: int | None = None) -> ArgumentType:
    """Whole numbers from `least` to `most`, of an int, a float or a text, to the last digit."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError(value)
        try:
            result = int(value)
        except ValueError:  # 1e3
            result = int(float(value))
        too_small = least is not None and result < least
        too_large = most is not None and result > most
        if abs(result) >= INTEGERS or too_small or too_large:
            raise ValueError(value)
        return result

    bounds = [f"at least {least}"] if least is not None else []
    bounds += [f"at most {most}"] if most is not None else []
    return ArgumentType(", ".join([what, *bounds]), convert)


def number(words: str, accepts: Callable[[float], bool] = lambda x: not math.isnan(x)) -> ArgumentType:
    """Numbers for which `accepts` is true; `words` describes them."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not accepts(result := float(value)):
            raise ValueError(value)
        return result

    return ArgumentType(words, convert)


def path(words: str, accepts: Callable[[str], Any] = bool) -> ArgumentType:
    """Paths for which `accepts` is true, read by `at_home`; `words` describes them. None alone stands for no value."""

    def convert(value: Any) -> str:
        if not accepts(result := at_home(value)):
            raise ValueError(value)
        return result

    return ArgumentType(words, convert, nothing=(None,))


def choice(*names: Any, convert: Callable[[Any], Any] = lambda value: value) -> ArgumentType:
    """The type of arguments that take one of these names, or of the names in a Literal."""
    names = get_args(names[0]) or names
    return ArgumentType(" or ".join(names), convert, names)


def either(word: str, kind: ArgumentType) -> ArgumentType:
    """A word, or a value of `kind`."""
    return ArgumentType(f"{kind.words}, or {word}", lambda value: value if value == word else kind.convert(value))


def _truth(value: Any) -> bool:
    if (text := str(value).lower()) not in ("true", "false", "1", "0"):
        raise ValueError(value)
    return text in ("true", "1")


def _name(value: Any) -> str:
    if isinstance(value, (str, int, float, os.PathLike)):  # the harness reads 2024 as a number
        return at_home(value)
    raise TypeError(value)


def at_home(path: Any) -> str:
    """A path with `~` as the home folder, which a shell writes out only at the start of a word."""
    return os.path.expanduser(str(path))


TEXT = ArgumentType("a text", str)
OPTIONAL_PATH = ArgumentType("a path", at_home)  # `none` stands for no value, as of most arguments
RAW = ArgumentType("a text", str, nothing=(None,))
TRUTH = ArgumentType("true or false", _truth)
COUNT = whole(1)
INTEGER = whole(None)
NUMBER = number("a number")
PROBABILITY = number("a probability from 0 to 1", lambda x: 0 <= x <= 1)
SHARE = number("a probability above 0, at most 1", lambda x: 0 < x <= 1)
POSITIVE = number("a number above 0", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = number("a number, at least 0", lambda x: x >= 0)
BLOCK = either("auto", whole(1, "a number of positions"))  # none: the whole target
ANNOTATED = {"int": INTEGER, "float": NUMBER, "bool": TRUTH}
CHECKPOINT = ArgumentType(
    "a folder or a hub name (write a network in memory with save_pretrained(folder), or score it with "
    "Duel.from_model(model, tokenizer))",
    _name,
)
