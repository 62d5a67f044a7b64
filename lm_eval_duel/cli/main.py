"""`lm-eval-duel`: which commands there are, and where."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

from lm_eval_duel.command_line import PROGRAM, ends
from lm_eval_duel.errors import UsageError, unknown

COMMANDS = {  # name: (module below lm_eval_duel whose `main` it is, what it does)
    "run": ("cli.run", "evaluate tasks: lm-eval's run, with this package's model as the default and its tasks known"),
    "inspect": ("cli.inspect", "print what a checkpoint is taken for (family, mask, block ...) and score one text"),
    "report": ("report", "turn lm_eval results into tables and figures: perplexities, the gap to an AR baseline"),
    "sweep": ("sweep", "compare unmasking rules at several speeds: likelihood of a task's text, quality of samples"),
    "show": ("cli.show", "print one document of a trace, its tokens coloured by reveal step or by nats"),
    "bench": ("bench", "measure speed and memory against the textbook loop, on windows of random tokens"),
    "data": ("tasks.check", "data check: load the benchmarks' data sets and print what is in them"),
    "where": ("cli.where", "print the absolute path of the tasks, the recipes or a bundled checkpoint"),
}
PACKAGES = ("lm_eval", "torch", "transformers")


def version() -> str:
    """This release, and those of the packages that a number depends on; none of them is imported."""
    found = {}
    for name in ("lm_eval_duel", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    others = ", ".join(f"{name} {found[name]}" for name in PACKAGES)
    return f"{PROGRAM} {found['lm_eval_duel']} ({others}, Python {sys.version.split()[0]})"


def overview() -> str:
    """The commands, one line each."""
    wide = max(map(len, COMMANDS))
    return "\n".join(
        [
            "Exact likelihood of masked diffusion language models, through lm-evaluation-harness.",
            "",
            f"usage: {PROGRAM} COMMAND ...",
            "",
            *(f"  {name:{wide}}  {text}" for name, (_, text) in COMMANDS.items()),
            "",
            f"{PROGRAM} COMMAND --help says what a command prints, with an example; {PROGRAM} --version the releases.",
            "Exit codes: 0; 1 if something failed while the command worked; 2 if an argument is wrong.",
            "",
            "example:",
            f"  {PROGRAM} run --model_args rule=greedy,block=32 --tasks sotu --limit 4",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lm-eval-duel`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    with ends(own=name != "run"):
        if name in ("-h", "--help"):
            print(overview())
        elif name == "--version":
            print(version())
        elif name in COMMANDS:
            importlib.import_module(f"lm_eval_duel.{COMMANDS[name][0]}").main(arguments[1:])
        elif name.startswith("-"):
            raise UsageError(f"'{name}' comes after a command: {PROGRAM} run {name} ...")
        else:
            raise UsageError(str(unknown("command", name, COMMANDS)))
