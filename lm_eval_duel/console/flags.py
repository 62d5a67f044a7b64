"""A flag of a command, and which words belong to flags that take several.

argparse gives all words behind such a flag to it, so that none is left for `RESULTS`:

report --figures png results        a folder is no format, so it is RESULTS
report --traces a.jsonl results     either may be a trace, so this is an error that gives the command that works
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lm_eval_duel.arguments import MISSING, TRUTH, Argument
from lm_eval_duel.errors import UsageError

LEFT_TO_ARGPARSE = ("-h", "--help", "--")


@dataclasses.dataclass(frozen=True)
class Flag(Argument):
    """An argument of a command: a flag, or, if its name is in capitals, a positional argument."""

    many: bool = False  # several values, separated by spaces
    alone: str | None = None  # the value of a flag that is given without one
    continues: bool = False  # words key=value behind its value belong to it, too: as lm-eval reads them
    shows: str = ""  # what stands for the value in --help; the name in capitals if empty


# ---------------------------------------------------------------- the words behind flags


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a command line by their places. `positional`: those of no flag; `taken`: by each flag.

    `misplaced`: those behind a flag whose values they cannot be, although argparse would take them for these.
    """

    positional: list[int]
    taken: dict[str, list[int]]
    misplaced: list[int]


def positional_first(prog: str, words: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """The words with those in front that a flag before them cannot take.

    Raises UsageError if a flag may have taken the words of a positional argument that must be given.
    """
    if set(words) & set(LEFT_TO_ARGPARSE):
        return list(words)
    placed = _placed(words, flags)
    required = [name for name, flag in flags.items() if name.isupper() and flag.default is MISSING]
    if required and not placed.positional and not placed.misplaced:
        _require_no_taker(prog, required[0], words, placed, flags)
    if not placed.misplaced:
        return list(words)
    places = sorted([*placed.positional, *placed.misplaced])  # argparse wants them all together
    first = [words[n] for n in places]
    rest = [word for n, word in enumerate(words) if n not in places]
    return first + rest


def _placed(words: Sequence[str], flags: Mapping[str, Flag]) -> Words:
    placed = Words([], {}, [])
    takes_paths = any(name.isupper() and flag.many for name, flag in flags.items())
    name = ""  # of the flag that takes the next word; empty if none does
    for n, word in enumerate(words):
        if word.startswith("--"):
            flag_name, equals, _ = word.removeprefix("--").partition("=")
            has_values = flag_name in flags and flags[flag_name].kind is not TRUTH
            name = flag_name if has_values and not equals else ""
        elif not name:
            placed.positional.append(n)
        elif takes_paths and name in placed.taken and _is_path_alone(word, flags[name]):
            placed.misplaced.append(n)
        else:
            placed.taken.setdefault(name, []).append(n)
            name = name if flags[name].many else ""
    return placed


def _is_path_alone(word: str, flag: Flag) -> bool:
    """True for a path that is none of a flag's choices."""
    is_choice = word in flag.kind.choices or word in flag.kind.nothing
    return bool(flag.kind.choices) and not is_choice and Path(word).exists()


def _require_no_taker(prog: str, missing: str, words: Sequence[str], placed: Words, flags: Mapping[str, Flag]) -> None:
    """Raise UsageError if a flag that can do with fewer words took some: the one with several, else the last."""
    takers = {}
    for name, places in placed.taken.items():
        if flags[name].many or flags[name].alone:
            takers[name] = places
    if not takers:
        return
    name = max(takers, key=lambda name: (len(takers[name]) > 1, takers[name]))
    *_, last = takers[name]
    taken = " ".join(words[n] for n in takers[name])
    given = missing  # in the command that works
    rest = list(words)
    if len(takers[name]) > 1 or flags[name].alone:
        given = shlex.quote(rest.pop(last))
    raise UsageError(
        f"{prog.split()[-1]}: {missing} is missing: --{name} took the words behind it ({taken}). Give {missing} "
        f"first: {prog} {given} {shlex.join(rest)}"
    )
