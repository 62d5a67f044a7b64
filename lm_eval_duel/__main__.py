"""The command line: `python -m lm_eval_duel` and `lm-eval-duel`."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path

from lm_eval_duel.command_line import PROGRAM, Parser, ends, key_values
from lm_eval_duel.demo import NAMES, resolve
from lm_eval_duel.errors import UsageError, unknown
from lm_eval_duel.options import Options
from lm_eval_duel.tasks import task_folder

PACKAGE = Path(__file__).resolve().parent
COMMANDS = {
    "run": "evaluate tasks: lm-eval's run, with this package's model as the default and its tasks known",
    "inspect": "print what a checkpoint is taken for (family, mask, block, special tokens ...) and score one text",
    "report": "turn lm_eval results into tables and figures: perplexities, the gap to the autoregressive baseline",
    "sweep": "compare unmasking rules at several speeds: likelihood of a task's text, quality of samples",
    "show": "print one document of a trace, its tokens coloured by reveal step or by nats",
    "bench": "measure speed and memory against the textbook loop, on windows of random tokens",
    "data": "data check: load the benchmarks' data sets and print what is in them",
    "where": "print the absolute path of the tasks, the recipes or a bundled checkpoint",
}
PACKAGES = ("lm_eval", "torch", "transformers")


def where(name: str) -> str:
    """The absolute path of `tasks`, `recipes` or of a bundled checkpoint."""
    if name == "recipes":
        return str(PACKAGE / "recipes")
    return task_folder() if name == "tasks" else resolve(name)


def find(arguments: list[str]) -> None:
    """Print an absolute path: `lm-eval-duel where`."""
    parser = Parser(
        "where",
        "Where the tasks, the recipes or a bundled checkpoint are installed.",
        "Prints one absolute path.",
        "demo-mdm",
    )
    parser.add_argument("name", choices=["tasks", "recipes", *NAMES], metavar="NAME", help="one of %(choices)s")
    print(where(parser.parse_args(arguments).name))


def inspect(arguments: list[str]) -> None:
    """Print what a checkpoint is taken for, as a table: `lm-eval-duel inspect`."""
    parser = Parser(
        "inspect",
        "What a checkpoint is taken for, before anything is evaluated with it.",
        "Prints a table: family, mask token, attention, block, special tokens, padding, and the score of one text.",
        "demo-mdm --model_args block=8,rule=margin",
    )
    parser.add_argument("name", help="a folder, a hub name or a bundled name")
    parser.add_argument("--model_args", default="", help="as for lm_eval, to override a guess: block=8,bos=none,...")
    asked = parser.parse_args(arguments)
    said = key_values("--model_args", asked.model_args)
    if "pretrained" in said or Options.parse({**said, "pretrained": asked.name}).pretrained is None:
        raise UsageError(f"inspect: name the checkpoint once, first: {PROGRAM} inspect demo-mdm --model_args block=8.")
    from lm_eval.utils import setup_logging

    from lm_eval_duel.inspection import inspect as found

    setup_logging()
    lines = found(asked.name, said)
    wide = max(len(word) for word, _ in lines)
    print("\n".join(f"{word:{wide}}  {value}" for word, value in lines))


def bench(arguments: list[str]) -> None:
    """Measure speed and memory, once the arguments are known to be good: `lm-eval-duel bench`."""
    from lm_eval_duel import bench_options

    settings = bench_options.parse(arguments)
    from lm_eval_duel.bench import main as measure

    measure(settings)


HERE = {"where": find, "inspect": inspect, "bench": bench}  # the others are modules of their names


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
            *(f"  {name:{wide}}  {text}" for name, text in COMMANDS.items()),
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
        elif name in HERE:
            HERE[name](arguments[1:])
        elif name in COMMANDS:
            importlib.import_module(f"lm_eval_duel.{name}").main(arguments[1:])
        elif name.startswith("-"):
            raise UsageError(f"'{name}' comes after a command: {PROGRAM} run {name} ...")
        else:
            raise UsageError(str(unknown("command", name, COMMANDS)))


if __name__ == "__main__":
    main()
