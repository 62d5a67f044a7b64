"""`lm-eval-duel`: the list of commands and the entry point."""

from __future__ import annotations

import importlib
import sys
import textwrap
from importlib import metadata

from lm_eval_duel.console.command_line import plain_table, process
from lm_eval_duel.console.exits import FAILED, PROGRAM, WRONG, errors_as_exit_codes, print_on_any_console
from lm_eval_duel.errors import UsageError, documentation, unknown

COMMANDS = {  # name: (module below lm_eval_duel with its `main`, what it does)
    "run": ("cli.run", "evaluate tasks: lm-eval's run, with this package's model as the default and its tasks known"),
    "inspect": ("cli.inspect", "show how a checkpoint is read, and with texts, how long scoring them takes here"),
    "score": ("cli.score", "score your own texts: log-probability, perplexity and bits per byte of each document"),
    "generate": ("cli.generate", "draw texts under the rule that is scored, each with its log-probability"),
    "report": ("cli.report", "tables, figures and a page of lm_eval results: perplexities, differences, gaps"),
    "audit": ("cli.audit", "compare the numbers of a few documents with the specification, reference.py, in float32"),
    "list": ("cli.listing", "list model args, rules, estimators, presets, tasks, or the folders of what is installed"),
}
SHARED = ("run", "score")  # commands in which all processes of a launch take part
PACKAGES = ("lm_eval", "torch", "transformers")


def version() -> str:
    """The versions of this package and of those that the numbers depend on, without importing them."""
    others = [f"{name} {_version_of(name)}" for name in PACKAGES]
    python, *_ = sys.version.split()
    return f"{PROGRAM} {_version_of('lm_eval_duel')} ({', '.join(others)}, Python {python})"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def overview() -> str:
    """The commands, one line each."""
    rows = [(name, text) for name, (_, text) in COMMANDS.items()]
    listed = plain_table([], rows)
    return f"""\
Exact likelihood of masked diffusion language models, through lm-evaluation-harness.

usage: {PROGRAM} COMMAND ...

{textwrap.indent(listed, "  ")}

{PROGRAM} COMMAND --help explains a command and gives an example. {PROGRAM} --version prints versions.
Exit codes: 0 done, 1 begun and failed, 2 not begun (an argument, a path, a checkpoint or a data set is wrong), 130
stopped by Ctrl-C. Of `audit`: 0 PASS, 1 FAIL, 2 whatever kept it from a verdict, 3 nothing could be checked.
Documentation: {documentation()}

example:
  {PROGRAM} run demo-mdm --model_args rule=greedy,block=32 --tasks sotu --limit 4"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lm-eval-duel`."""
    if arguments is None:
        arguments = sys.argv[1:]
    name = arguments[0] if arguments else "--help"
    rank, processes = process()
    print_on_any_console()
    failed = WRONG if name == "audit" else FAILED  # of which 1 is its FAIL
    with errors_as_exit_codes(name != "run", failed):
        if rank and name not in SHARED:
            print(f"{PROGRAM}: process {rank} of {processes} has nothing to do: the first does it.", file=sys.stderr)
        elif name in ("-h", "--help"):
            print(overview())
        elif name == "--version":
            print(version())
        elif name in COMMANDS:
            module, _ = COMMANDS[name]
            importlib.import_module(f"lm_eval_duel.{module}").main(arguments[1:])
        elif name.startswith("-"):
            raise UsageError(f"'{name}' comes after a command: {PROGRAM} run {name} ...")
        else:
            raise UsageError(str(unknown("command", name, COMMANDS)))
