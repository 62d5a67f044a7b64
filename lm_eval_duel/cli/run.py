"""`lm-eval-duel run`: lm-eval's own command with this package's model and tasks, and with early argument checks.

lm-eval reads the model args only after it has indexed 14,000 tasks and imported torch. Here they are checked first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import logging
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import at_home, unique_keys
from lm_eval_duel.console.command_line import FLAGS, be_quiet, read_pairs
from lm_eval_duel.console.exits import FAILED, INTERRUPTED, stop, stopped
from lm_eval_duel.errors import UsageError, documentation, nearest, require_known, usage
from lm_eval_duel.harness import MODELS
from lm_eval_duel.harness.autoload import register
from lm_eval_duel.options import Options, with_lm_evals_flags
from lm_eval_duel.results.doubts import verify_doubt
from lm_eval_duel.tasks import named

if TYPE_CHECKING:
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

MODEL = next(iter(MODELS))
VALUE_TYPES: dict[str, tuple[type, ...]] = {  # of keys in a --config file that lm-eval does not check itself
    "model": (str,),
    "tasks": (str, list),
    "include_path": (str, list),
    **dict.fromkeys(("model_args", "gen_kwargs", "metadata"), (dict, str)),
}
TYPE_NAMES = {
    (str,): "a string",
    (str, list): "a string or a list of strings",
    (dict, str): "a mapping or key=value,...",
}
HELP = f"""\
lm-eval's `run`, with --model {MODEL} as the default and this package's tasks available without --include_path.
Name the model first, or in --model_args: NAME,... or pretrained=NAME,...
Prints lm-eval's table of results: token, word and byte perplexity of each task, accuracies, standard errors.
--output_path DIR saves the results with the fingerprint of the scored distribution and the cost of the run.
On several GPUs: accelerate launch --num_processes 8 -m lm_eval_duel run ...; on CPUs torchrun --nproc-per-node 2 ...

example:
  lm-eval-duel run demo-mdm --model_args rule=greedy,block=32 --tasks sotu --limit 4

lm-eval's own arguments, and three more:
  --lines        each line of a .txt or .md file of --tasks is a document
  --field NAME   the column of tables of --tasks that holds the text (default: text)
  --quiet        print results, warnings and errors only
"""


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's `run`. Wrong arguments raise UsageError before anything heavy is imported."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(HELP)
        arguments = ["--help"]
    with usage():
        arguments, of_texts = _named(arguments)
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    sys.argv = ["lm-eval", "run", *arguments]
    cli = HarnessCLI()
    _name_our_default(cli)
    register()
    with usage():
        args = _parsed(cli)
        _complete(args)
        names = _check(args)
        named.require_texts(of_texts, names, has_own=len(args.include_path) > 1)  # the first are this package's
    try:
        with _task_files(names, args.include_path):
            _execute(cli, args)
    except KeyboardInterrupt:  # before or after the scoring, which ends with a message of its own
        stop(INTERRUPTED, stopped(args.use_cache))
    except ValueError as error:
        if str(error).startswith("Tasks not found: "):  # raised once all tasks are indexed
            raise UsageError(_tasks_not_found(str(error), args.include_path)) from None
        raise


def _execute(cli: HarnessCLI, args: argparse.Namespace) -> None:
    """Let lm-eval run, print and save; then end with an error if `verify` found a difference."""
    from lm_eval_duel.harness import patches

    with patches.kept_results() as results:
        cli.execute(args)
    for content in results:
        differing = verify_doubt(content["config"].get("duel", {}))
        if differing:
            stop(FAILED, differing)


def _named(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments as lm-eval takes them, without NAME, --quiet, --lines and --field; and what the last two say.

    Raises UsageError for wrong model args.

    lm-eval itself reads the model args after a second of imports.
    """
    name = None
    rest = arguments
    if not arguments[0].startswith("-"):
        name = arguments[0]
        rest = arguments[1:]
    parser = argparse.ArgumentParser("run", add_help=False, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("-M", "--model")
    parser.add_argument("-a", "--model_args", nargs="+", action="extend", default=[])
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--field")
    ours, rest = parser.parse_known_args(rest)
    if ours.quiet:
        be_quiet()
    of_texts = _of_texts(ours.lines, ours.field)
    if of_texts:
        rest += ["--metadata", json.dumps(of_texts)]
    model = [] if ours.model is None else ["--model", ours.model]
    if not (name or ours.model_args):
        return [*model, *rest], of_texts
    pairs: list[tuple[str, Any]] = []
    if name:
        pairs.append(("pretrained", FLAGS["NAME"].read("NAME", name)))
    pairs += read_pairs("model_args", ours.model_args).items()
    given = unique_keys(pairs)
    if ours.model in (None, *MODELS):
        Options.parse(given)
    return [*model, "--model_args", json.dumps(given), *rest], of_texts


def _of_texts(lines: bool, field: str | None) -> dict[str, Any]:
    """The flags that say how files of text are read, as metadata of tasks."""
    metadata: dict[str, Any] = {}
    if lines:
        metadata["lines"] = True
    if field is not None:
        metadata["field"] = field
    return metadata


def _task_files(names: list[str], folders: list[str]) -> contextlib.AbstractContextManager[None]:
    """Keep lm-eval from reading its own task files, which takes seconds, if none of the named tasks needs them.

    Raises UsageError for a name that is no task's.
    """
    manager = named.tasks_in(folders)
    if named.holds(manager, names):
        from lm_eval_duel.harness import patches

        return patches.without_default_tasks()
    missing = named.not_mentioned(manager, names)
    if missing:
        raise UsageError(f"Tasks not found: {', '.join(missing)}.{named.advice(missing, folders)}")
    return contextlib.nullcontext()


def _parsed(cli: HarnessCLI) -> argparse.Namespace:
    """Parse the command line as lm-eval does; an error of argparse becomes a UsageError."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return cli.parse_args()
    except SystemExit as error:
        if not error.code:
            print(f"\ndocumentation: {documentation()}")
            raise
        _, _, last_line = stderr.getvalue().strip().rpartition("\n")  # argparse prints the usage before it
        _, _, message = last_line.partition("error: ")
        message = re.sub(r"invalid functools\.partial\(.*\) value", "invalid value", message)
    except ValueError as error:  # from JSON
        message = " ".join(str(error).split())
    raise UsageError(f"run: {message}{_nearest_flag(cli, message)} See lm-eval-duel run --help.") from None


def _name_our_default(cli: HarnessCLI) -> None:
    """Say in lm-eval's help that --model is ours by default: its own default is hf."""
    with contextlib.suppress(AttributeError, KeyError):  # lm-eval's parser is private
        flag = cli._subparsers.choices["run"]._option_string_actions["--model"]
        flag.help = f"Model name (default: {MODEL})"


def _nearest_flag(cli: HarnessCLI, message: str) -> str:
    """Suggest the argument of lm-eval that is nearest to an unknown one, or end the sentence of `message`."""
    first_word, *_ = message.removeprefix("unrecognized arguments: ").split(" ")
    wrong, _, _ = first_word.partition("=")
    with contextlib.suppress(AttributeError, KeyError):  # lm-eval's parser is private
        options = cli._subparsers.choices["run"]._option_string_actions
        flags = [option for option in options if option.startswith("--")]
        near = nearest(wrong, flags)
        if near:
            return f". Did you mean {near[0]}?"
    return "" if message.endswith(".") else "."


def _complete(args: argparse.Namespace) -> None:
    """Fill in this package's model and tasks, keeping what a --config file sets (a flag would override it)."""
    config = {} if args.config is None else _load_config(args.config)
    if args.model is None:
        args.model = config.get("model") or MODEL
    folders = args.include_path or config.get("include_path") or []
    if isinstance(folders, str):
        folders = [folders]
    for key in ("output_path", "use_cache"):
        place = getattr(args, key, None)
        if place:
            setattr(args, key, at_home(place))
    args.include_path = named.with_our_tasks(FLAGS["include_path"].read("--include_path", each) for each in folders)
    _take_texts(args)


def _take_texts(args: argparse.Namespace) -> None:
    """Replace files of text among the tasks by the task `duel_text`, which reads them."""
    names = named.split(args.tasks or "")
    for name in names:
        named.check(name)
    texts, others = named.parted(names)
    if not texts:
        if args.tasks:
            args.tasks = ",".join(others)
        return
    metadata = getattr(args, "metadata", None) or {}
    if "files" in metadata:
        raise UsageError(f"--metadata names files, and --tasks {texts[0]} does too; name them in one place.")
    args.tasks = ",".join([*others, "duel_text"])
    args.metadata = {**metadata, "files": texts}


def _load_config(file: str) -> dict[str, Any]:
    """The content of a --config file; raises UsageError for one that lm-eval would not accept."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    try:
        config = EvaluatorConfig.load_yaml_config(file)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--config {file}: {' '.join(str(error).split())}") from None
    keys = [field.name for field in dataclasses.fields(EvaluatorConfig)]
    require_known("key", config, keys, f"of --config {file}")
    for key, types in VALUE_TYPES.items():
        value = config.get(key)
        if value is not None and not _has_type(value, types):
            raise UsageError(f"--config {file}: '{key}' must be {TYPE_NAMES[types]}; got {value!r}.")
    return config


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    """True for a value of one of the types; a list has strings only."""
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return False
    return isinstance(value, types)


def _check(args: argparse.Namespace) -> list[str]:
    """The names of the tasks; raises UsageError for settings that lm-eval or the model would reject."""
    config = _as_lm_eval_reads(args)
    if not config.tasks:
        raise UsageError("No task to run; name one or several: --tasks sotu.")
    names = named.split(config.tasks)
    from lm_eval.api.registry import model_registry

    if config.model not in model_registry and nearest(config.model, MODELS):
        raise UsageError(f"Unknown --model '{config.model}'. Did you mean {MODEL}?")
    if config.model not in MODELS:
        return names
    given = with_lm_evals_flags(config.model_args, dataclasses.asdict(config))
    if getattr(args, "trust_remote_code", False):
        given["trust_remote_code"] = True
    Options.parse(given)
    return names


def _as_lm_eval_reads(args: argparse.Namespace) -> EvaluatorConfig:
    """lm-eval's settings, built silently from a copy: lm-eval builds and logs them again when the command runs."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    args = copy.deepcopy(args)
    args.trust_remote_code = False  # true imports datasets
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return EvaluatorConfig.from_cli(args)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # also for a value of the wrong type in --config
        raise UsageError(f"run: {' '.join(str(error).split())}") from None
    finally:
        logging.disable(before)


def _tasks_not_found(message: str, folders: list[str]) -> str:
    """lm-eval's message about unknown tasks, to which autoload.py has added the nearest, with the way to all of them.

    `folders`: of tasks, the first of them this package's.
    """
    commands = [f"lm_eval ls tasks --include_path {folder}" for folder in folders]  # a command takes one folder
    own = " For tasks of your own, add --include_path FOLDER." if len(folders) == 1 else ""
    return f"{message}{own} All: {'; '.join(commands)}"
