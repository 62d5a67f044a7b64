"""`lm-eval-duel list`: what is declared or installed, as a list or as the table of docs/."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence

from lm_eval_duel import rules
from lm_eval_duel.arguments import MISSING, Argument, choice, declared
from lm_eval_duel.console.command_line import FLAGS, Flag, Parser
from lm_eval_duel.demo import FOLDER, NAMES, resolve
from lm_eval_duel.denoisers import refused
from lm_eval_duel.errors import nearest, require_known, unknown, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import MODEL_ARGUMENTS
from lm_eval_duel.rules import presets, users
from lm_eval_duel.tasks import task_files, task_folder
from lm_eval_duel.tasks.metadata import KEYS

Rows = list[tuple[str, ...]]  # cells in Markdown; the first is the name, the last a sentence
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
INDENT = "    "


# ---------------------------------------------------------------- arguments


def model_args() -> Rows:
    """The model args that do not belong to one estimator or rule."""
    return _arguments(MODEL_ARGUMENTS)


def estimator_args() -> Rows:
    """The model args of single estimators."""
    return _merged_rows({entry.name: entry.arguments for entry in registry.ENTRIES})


def metadata_keys() -> Rows:
    """The keys of --metadata that the tasks of this package read."""
    return _arguments(KEYS)


def _arguments(declarations: Mapping[str, Argument]) -> Rows:
    rows = []
    for name, arg in declarations.items():
        rows.append((_code(name), _default(arg), arg.meaning))
    return rows


def _default(arg: Argument) -> str:
    """The default of an argument, and the other names that it takes."""
    is_described = bool(arg.unset) or arg.default is MISSING
    parts = [arg.shown if is_described else _code(arg.shown)]
    others = []
    for name in arg.kind.choices:
        if name != arg.shown:
            others.append(_code(name))
    if others:
        parts.append(", ".join(others))
    return "; ".join(parts)


def _merged_rows(owners: Mapping[str, Mapping[str, Argument]]) -> Rows:
    """(name, owners, default, meaning) of each argument. Owners with the same declaration of it share a row."""
    declarations: dict[tuple[str, str, str], list[str]] = {}
    for owner, arguments in owners.items():
        for name, arg in arguments.items():
            declaration = (name, _default(arg), arg.meaning or arg.kind.words)  # a user's rule may have no help
            declarations.setdefault(declaration, []).append(_code(owner))
    rows = []
    for (name, default, meaning), sharing in declarations.items():
        rows.append((_code(name), ", ".join(sharing), default, meaning))
    return rows


def _code(text: str) -> str:
    return f"`{text}`"


# ---------------------------------------------------------------- rules, estimators, presets


def rule_table(shown: Mapping[str, type[rules.Rule]] = rules.RULES) -> Rows:
    """Rules: name and aliases, parameters, and what is revealed next."""
    rows = []
    for name, rule in shown.items():
        names = [_code(name)]
        for alias, meant in rules.ALIASES.items():
            if meant == name:
                names.append(f"({_code(alias)})")
        parameters = []
        for key, arg in declared(rule).items():
            with_default = key if arg.default is MISSING else f"{key}={arg.shown}"
            parameters.append(_code(with_default))
        rows.append((" ".join(names), ", ".join(parameters), _first_paragraph(rule)))
    return rows


def _first_paragraph(rule: type[rules.Rule]) -> str:
    """The first paragraph of a rule's docstring, in one line."""
    text = inspect.cleandoc(rule.__doc__ or "")
    if not text or text.startswith(f"{rule.__name__}("):  # the signature, which a dataclass puts there
        return "its class has no docstring"
    first_paragraph, _, _ = text.partition("\n\n")
    return " ".join(first_paragraph.split())


def parameters(shown: Mapping[str, type[rules.Rule]] = rules.RULES) -> Rows:
    """The parameters of rules, and those that go with every rule."""
    rows = _merged_rows({name: declared(rule) for name, rule in shown.items()})
    for name, arg in rules.WRAPPER_ARGUMENTS.items():
        rows.append((_code(name), "every rule", _default(arg), arg.meaning))
    return rows


def estimators() -> Rows:
    """The estimators, what they compute, and their model args."""
    rows = []
    for entry in registry.ENTRIES:
        arguments = ", ".join(_code(name) for name in entry.arguments)
        rows.append((_code(entry.name), arguments, f"{entry.what} ({entry.kind.value})"))
    return rows


def preset_table() -> Rows:
    """The presets, the model args that each stands for, the checkpoints that it is for, and the code it follows."""
    rows = []
    for preset in presets.ENTRIES:
        what = f"{preset.what}. From {preset.source}"
        if preset.free:
            what += f" ({' and '.join(preset.free)} may be changed)"
        rows.append((_code(preset.name), _code(preset.written_out), " ".join(preset.families), what))
    return rows


# ---------------------------------------------------------------- what is installed


def task_list() -> Rows:
    """The tasks and groups of this package, and what their file says first."""
    rows = []
    for file in task_files():
        lines = file.read_text(encoding="utf-8").splitlines()
        first_comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
        description = " ".join(line.removeprefix("# ") for line in first_comment)
        rows.append((_code(file.stem), file.parent.name, description))
    return rows


def folders() -> dict[str, str]:
    """The parts that are installed, and the path of each."""
    paths = {"tasks": task_folder(), "results": str(FOLDER / "results")}
    for name in NAMES:  # the bundled networks
        paths[name] = resolve(name)
    return paths


def folder_list() -> Rows:
    """The parts that are installed, as rows."""
    return [(_code(name), place) for name, place in folders().items()]


def refused_list() -> Rows:
    """The checkpoints that are refused, why, and what works instead."""
    return [(entry.checkpoint, entry.why, entry.instead) for entry in refused.ENTRIES]


# ---------------------------------------------------------------- lists


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
rules       the unmasking rules and their parameters; with FILE.py, those of your own
estimators  the estimators and their model args
presets     the deployed samplers that have a name, and the model args of each
refused     the checkpoints that are refused, why, and what works instead
tasks       the tasks of this package; --include_path takes their folder
metadata    the keys of --metadata that these tasks take
folders     the paths of the installed tasks, results and bundled networks; with one NAME, its path alone
With NAMES, only these; a part of a name stands for all names that contain it.
With --markdown, the table of the documentation.
"""


def markdown(what: str) -> str:
    """The first table of a list, as docs/ have it."""
    header, rows = TABLES[what][0]
    line = ["---"] * len(header)
    lines = []
    for row in (header, line, *rows()):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def listing(what: str, names: Sequence[str] = ()) -> str:
    """The tables of a list for the terminal. Raises DuelError for an unknown name.

    `names`: only these rows, and for a rule those of its parameters. A rule may be the user's own.
    """
    every_table = [rows() for _, rows in TABLES[what]]
    own_rules: Mapping[str, type[rules.Rule]] = {}
    if what == "rules":
        names, own_rules = _own_rules(names)
        every_table = [rule_table(rules.RULES | own_rules), parameters(rules.RULES | own_rules)]
    tables = [[_without_markdown(row, own_rules) for row in table] for table in every_table]
    if names:
        names = _known_names(what, names, tables[0])
        tables = _named(what, names, tables)

    width = min(shutil.get_terminal_size().columns, 120)
    parts = []
    for table in tables:
        if table:
            parts.append("\n".join(_entry(row, width) for row in table))
    if what == "tasks":
        parts.append(f"--include_path {task_folder()}")
    if what == "presets":
        parts.append(_try_presets(names) if names else _no_presets(width))
    return "\n\n".join(parts)


def _own_rules(names: Sequence[str]) -> tuple[list[str], dict[str, type[rules.Rule]]]:
    """The names without parameters, and the classes of those that are the user's own, as FILE.py:CLASS.

    A file stands for all rules in it.
    """
    without_parameters: list[str] = []
    for text in names:
        name, *_ = rules.split(text)
        without_parameters += users.names_in(name) if name.endswith(".py") else [name]
    own_rules = {}
    for name in without_parameters:
        if any(sign in name for sign in ":./"):
            own_rules[name] = rules.find(name)
    return without_parameters, own_rules


def _known_names(what: str, names: Sequence[str], table: Rows) -> list[str]:
    """The names, with those of a table in place of a word that is a part of them; others are as they were."""
    names_of_rows: list[str] = []
    for row in table:
        names_of_rows += row[0].split()
    result = []
    for name in names:
        if name in names_of_rows:
            result.append(name)
            continue
        matches = []
        for each in names_of_rows:
            if len(name) > 2 and name.lower() in each.lower():  # one or two letters are a part of nearly all
                matches.append(each.strip("()"))  # aliases stand in parentheses
        if what == "presets":
            presets.require_covered("preset", name)
            for preset in presets.ENTRIES:
                if name in preset.families:
                    matches.append(preset.name)
        result += matches or [name]
    return result


def _no_presets(width: int) -> str:
    """The samplers that are no presets."""
    text = (
        f"These samplers cannot be scored, so they are not presets: {', '.join(presets.REFUSED)}. With a NAME: the "
        "reason, or for a preset the command that tries its rule on a bundled network."
    )
    return textwrap.fill(text, width, break_on_hyphens=False)


def _try_presets(names: Sequence[str]) -> str:
    """The commands that try the rule of each preset on a bundled network."""
    lines = ["To try the same rule on a bundled network:"]
    distinct = list(dict.fromkeys(names))
    for name in distinct:
        model_args = presets.find(name).for_demo
        if len(distinct) > 1:
            lines.append(name)
        lines.append(f"{INDENT}lm-eval-duel run demo-mdm --model_args {model_args} --tasks sotu --limit 2")
    return "\n".join(lines)


def _named(what: str, names: Sequence[str], tables: Sequence[Rows]) -> list[Rows]:
    """The rows of these names, which may be aliases, and in a second table those that belong to them.

    Raises DuelError for an unknown name.
    """
    by_name: dict[str, tuple[str, ...]] = {}
    for table in reversed(tables):  # a rule comes before a parameter of its name
        for row in table:
            for word in row[0].split():  # a name, and its aliases in brackets
                by_name[word.strip("()")] = row
    for name in names:
        if name not in by_name:
            known = {word.strip("()") for row in tables[0] for word in row[0].split()}
            known |= {*nearest(name, by_name)}  # of a rule's parameters only those that may be meant
            raise unknown(what.removesuffix("s"), name, known)

    chosen = {by_name[name] for name in names}
    first, *others = tables
    kept_tables = [[row for row in first if row in chosen]]
    for table in others:
        kept = []
        for row in table:
            name, owners, *_ = row
            labels = {name, *owners.split(", ")}
            if row in chosen or not labels.isdisjoint(names):
                kept.append(row)
        kept_tables.append(kept)
    return kept_tables


def _entry(row: tuple[str, ...], width: int) -> str:
    """A row for the terminal: its cells in a line, and the last, a sentence, indented below them."""
    name, *cells, meaning = row
    parts = [name]
    for cell in cells:
        if cell:
            parts.append(f"[{cell}]")
    first_line = "  ".join(parts)
    filled = textwrap.fill(meaning, width - len(INDENT))
    return f"{first_line}\n{textwrap.indent(filled, INDENT)}"


def _without_markdown(row: tuple[str, ...], own_rules: Container[str] = ()) -> tuple[str, ...]:
    """The cells for the terminal. The last cell of the user's `own_rules` is a docstring, which stays as written."""
    cells = []
    for cell in row:
        without_links = LINK.sub(r"\1", cell)
        cells.append(without_links.replace("`", ""))
    if cells[0] in own_rules:
        cells[-1] = row[-1]
    return tuple(cells)


@usage()
def main(arguments: Sequence[str]) -> None:
    """Print what is declared or installed: `lm-eval-duel list`. Without arguments, print what there is to list."""
    if not arguments:
        print(PRINTS, end="")
        return
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
        places = folders()
        require_known("folder", options.names, places)
        print(places[options.names[0]])  # alone, for $(...)
    else:
        print(listing(options.what, options.names))
