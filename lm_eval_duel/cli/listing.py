"""`lm-eval-duel list`: what is declared or installed, as a list or as the table of docs/."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lm_eval_duel import rules
from lm_eval_duel.arguments import MISSING, Argument, choice, declared
from lm_eval_duel.console.command_line import FLAGS, Flag, Parser
from lm_eval_duel.demo import FOLDER, NAMES, resolve
from lm_eval_duel.denoisers import refused
from lm_eval_duel.errors import require_known, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import MODEL_ARGUMENTS
from lm_eval_duel.rules import presets
from lm_eval_duel.tasks import task_folder
from lm_eval_duel.tasks.metadata import KEYS

Rows = list[tuple[str, ...]]  # cells in Markdown; the first is the name, the last a sentence
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def model_args() -> Rows:
    """The model args that do not belong to one estimator or rule."""
    return [(f"`{name}`", _default(arg), arg.meaning) for name, arg in MODEL_ARGUMENTS.items()]


def estimator_args() -> Rows:
    """The model args of single estimators."""
    return _shared({entry.name: entry.arguments for entry in registry.ENTRIES})


def rule_table() -> Rows:
    """The rules: name and aliases, parameters, and what is revealed next."""
    aliases = {name: [alias for alias, meant in rules.ALIASES.items() if meant == name] for name in rules.RULES}
    return [
        (
            " ".join([f"`{name}`", *(f"(`{alias}`)" for alias in aliases[name])]),
            ", ".join(
                f"`{key}`" if p.default is MISSING else f"`{key}={p.shown}`" for key, p in declared(rule).items()
            ),
            " ".join(inspect.getdoc(rule).partition("\n\n")[0].split()),
        )
        for name, rule in rules.RULES.items()
    ]


def parameters() -> Rows:
    """The parameters of rules, and those that go with every rule."""
    return [
        *_shared({name: declared(rule) for name, rule in rules.RULES.items()}),
        *((f"`{name}`", "every rule", _default(arg), arg.meaning) for name, arg in rules.WRAPPER_ARGUMENTS.items()),
    ]


def estimators() -> Rows:
    """The estimators, what they compute, and their model args."""
    return [
        (f"`{entry.name}`", ", ".join(f"`{name}`" for name in entry.arguments), f"{entry.what} ({entry.kind.value})")
        for entry in registry.ENTRIES
    ]


def preset_table() -> Rows:
    """The presets, the model args that each stands for, the checkpoints that it is for, and the code it follows."""
    return [
        (
            f"`{preset.name}`",
            f"`{preset.written_out}`",
            " ".join(preset.families),
            f"{preset.what}. From {preset.source}"
            + (f" ({' and '.join(preset.free)} may be changed)" if preset.free else ""),
        )
        for preset in presets.ENTRIES
    ]


def _default(arg: Argument) -> str:
    default = arg.shown if arg.unset or arg.default is MISSING else f"`{arg.shown}`"
    others = [f"`{name}`" for name in arg.kind.choices if name != arg.shown]
    return f"{default}; {', '.join(others)}" if others else default


def _shared(owners: Mapping[str, Mapping[str, Argument]]) -> Rows:
    """(name, owners, default, meaning) of each argument; owners that declare it alike share a row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for owner, arguments in owners.items():
        for name, arg in arguments.items():
            found.setdefault((name, _default(arg), arg.meaning), []).append(f"`{owner}`")
    return [(f"`{name}`", ", ".join(of), default, meaning) for (name, default, meaning), of in found.items()]


def metadata_keys() -> Rows:
    """The keys of --metadata that the tasks of this package read."""
    return [(f"`{name}`", _default(arg), arg.meaning) for name, arg in KEYS.items()]


def task_list() -> Rows:
    """The tasks and groups of this package, and what their file says first."""
    found = []
    for file in sorted(Path(task_folder()).rglob("[!_]*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
        found.append((f"`{file.stem}`", file.parent.name, " ".join(line.removeprefix("# ") for line in comment)))
    return found


def folder_list() -> Rows:
    """The parts that are installed, and the path of each."""
    places = {"tasks": task_folder(), "results": str(FOLDER / "results"), **{name: resolve(name) for name in NAMES}}
    return [(f"`{name}`", place) for name, place in places.items()]


def refused_list() -> Rows:
    """The checkpoints that are refused, why, and what works instead."""
    return [(entry.checkpoint, entry.why, entry.instead) for entry in refused.ENTRIES]


Table = tuple[tuple[str, ...], Callable[[], Rows]]
TABLES: dict[str, tuple[Table, ...]] = {
    "args": (
        (("arg", "default", "meaning"), model_args),
        (("arg of an estimator", "estimator", "default", "meaning"), estimator_args),
    ),
    "rules": (
        (("rule", "parameters", "reveals next"), rule_table),
        (("parameter", "rules", "default", "meaning"), parameters),
    ),
    "estimators": ((("estimator", "args", "what"), estimators),),
    "presets": ((("preset", "model args", "checkpoints", "what"), preset_table),),
    "refused": ((("checkpoint", "refused because", "what works instead"), refused_list),),
    "tasks": ((("task", "folder", "what"), task_list),),
    "metadata": ((("key", "default", "meaning"), metadata_keys),),
    "folders": ((("what", "path"), folder_list),),
}
PRINTS = """\
args        the model args: default and meaning of each
rules       the unmasking rules and their parameters
estimators  the estimators and their model args
presets     the deployed samplers that have a name, and the model args of each
refused     the checkpoints that are refused, why, and what works instead
tasks       the tasks of this package; --include_path takes their folder
metadata    the keys of --metadata that these tasks take
folders     the paths of the installed tasks, results and bundled networks; with one NAME, its path alone
With --markdown, the table of the documentation.
"""


def markdown(what: str) -> str:
    """The first table of a list, as docs/ have it."""
    header, rows = TABLES[what][0]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, tuple("---" for _ in header), *rows()))


def listing(what: str, names: Sequence[str] = ()) -> str:
    """The tables of a list for the terminal. Raises DuelError for an unknown name.

    `names`: only these rows, and for a rule those of its parameters.
    """
    tables = [[tuple(_without_markdown(cell) for cell in row) for row in rows()] for _, rows in TABLES[what]]
    known = {word.strip("()"): row for table in reversed(tables) for row in table for word in row[0].split()}
    require_known(what.removesuffix("s"), names, known)
    chosen = {known[name] for name in names}
    width = min(shutil.get_terminal_size().columns, 120)
    parts = []
    for number, table in enumerate(tables):
        wanted = [{row[0], *(row[1].split(", ") if number else ())} for row in table]
        kept = [row for row, by in zip(table, wanted, strict=True) if not names or row in chosen or by & set(names)]
        parts += ["\n".join(_entry(row, width) for row in kept)] if kept else []
    if what == "tasks":
        parts.append(f"--include_path {task_folder()}")
    return "\n\n".join(parts)


def _entry(row: tuple[str, ...], width: int) -> str:
    name, *cells, meaning = row
    first = "  ".join([name, *(f"[{cell}]" for cell in cells if cell)])
    return f"{first}\n{textwrap.indent(textwrap.fill(meaning, width - 4), '    ')}"


def _without_markdown(text: str) -> str:
    return LINK.sub(r"\1", text).replace("`", "")


@usage()
def main(arguments: Sequence[str]) -> None:
    """Print what is declared or installed: `lm-eval-duel list`."""
    options = Parser(
        "list",
        "List model args, rules, estimators, presets, tasks, their metadata, or folders.",
        PRINTS,
        "rules klass",
        "markdown",
        WHAT=Flag(choice(*TABLES), MISSING, "the list"),
        NAMES=FLAGS["NAMES"],
    ).parse_args(list(arguments))
    if options.markdown:
        print(markdown(options.what))
    elif options.what == "folders" and len(options.names) == 1:
        places = {name.strip("`"): place for name, place in folder_list()}
        require_known("folder", options.names, places)
        print(places[options.names[0]])  # alone, for $(...)
    else:
        print(listing(options.what, options.names))
