"""The command line: `python -m lm_eval_duel` and `lm-eval-duel`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from lm_eval_duel._autoload import register
from lm_eval_duel.demo import NAMES, resolve
from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import task_folder

PACKAGE = Path(__file__).resolve().parent
OWN = ("bench", "data", "report", "show", "sweep")  # commands that read their own arguments


def run(arguments: list[str]) -> None:
    """lm-eval's own `run` with this package's model registered and its tasks known, without the site hook."""
    register()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    if not any(argument.split("=")[0] in ("--model", "-M", "--config", "-C") for argument in arguments):
        arguments = ["--model", "duel-mdm", *arguments]
    sys.argv = ["lm-eval", "run", *arguments]
    cli = HarnessCLI()
    args = cli.parse_args()
    theirs = getattr(args, "include_path", None) or _configured(getattr(args, "config", None))
    args.include_path = [task_folder(), *([theirs] if isinstance(theirs, str) else theirs or [])]
    cli.execute(args)


def _configured(file: str | None) -> str | list[str] | None:
    """The include_path of a --config file, which the command line's would replace."""
    if not file:
        return None
    import yaml

    return (yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}).get("include_path")


def where(name: str) -> str:
    """The absolute path of `tasks`, `recipes` or of a bundled checkpoint."""
    if name == "recipes":
        return str(PACKAGE / "recipes")
    return task_folder() if name == "tasks" else resolve(name)


def inspect(name: str, model_args: str) -> str:
    """What a checkpoint is taken for, as a table."""
    from lm_eval.utils import setup_logging, simple_parse_args_string

    from lm_eval_duel.inspection import inspect as found

    setup_logging()
    lines = found(name, simple_parse_args_string(model_args))
    wide = max(len(word) for word, _ in lines)
    return "\n".join(f"{word:{wide}}  {value}" for word, value in lines)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lm-eval-duel`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="lm-eval-duel",
        description="Exact likelihood of masked diffusion language models, through lm-evaluation-harness.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "run",
        help="lm-eval's run, with --model duel-mdm as default and this package's tasks known",
        add_help=False,
    )
    commands.add_parser(
        "bench", help="speed and memory against the textbook loop, on windows of random tokens", add_help=False
    )
    commands.add_parser(
        "data", help="data check: loads the benchmarks' data sets and prints what is in them", add_help=False
    )
    commands.add_parser("report", help="results of the harness in, the paper's tables and figures out", add_help=False)
    commands.add_parser("show", help="one document of a trace, tokens coloured by reveal step or nats", add_help=False)
    commands.add_parser(
        "sweep", help="rules at several speeds: likelihood of a task's text, quality of samples", add_help=False
    )
    path = commands.add_parser(
        "where", help="print the absolute path of the tasks, the recipes or a bundled checkpoint"
    )
    path.add_argument("name", choices=["tasks", "recipes", *NAMES])
    guess = commands.add_parser(
        "inspect", help="print what a checkpoint is taken for (family, mask, block, framing ...) and score one text"
    )
    guess.add_argument("name", help="a folder, a hub name or a bundled name")
    guess.add_argument("--model_args", default="", help="as for lm_eval, to override a guess: block=8,bos=none,...")
    if arguments[:1] == ["run"]:
        run(arguments[1:])
        return
    try:
        if arguments and arguments[0] in OWN:
            importlib.import_module(f"lm_eval_duel.{arguments[0]}").main(arguments[1:])
            return
        parsed = parser.parse_args(arguments)
        print(where(parsed.name) if parsed.command == "where" else inspect(parsed.name, parsed.model_args))
    except DuelError as error:
        sys.exit(f"lm-eval-duel: {error}")


if __name__ == "__main__":
    main()
