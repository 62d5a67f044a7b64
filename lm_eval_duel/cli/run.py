"""`lm-eval-duel run`: lm-eval's own command with this package's model and tasks, its arguments checked at once.

lm-eval looks at model args after it has indexed 14,000 tasks and imported torch. Here they are read before that.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import difflib
import io
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel._autoload import MODELS, register
from lm_eval_duel.errors import UsageError, unknown, usage
from lm_eval_duel.options import Options
from lm_eval_duel.tasks import task_folder

if TYPE_CHECKING:
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

MODEL = next(iter(MODELS))
KINDS: dict[str, tuple[type, ...]] = {  # of values in a --config file that lm-eval would only stumble over
    "model": (str,),
    "tasks": (str, list),
    "include_path": (str, list),
    **dict.fromkeys(("model_args", "gen_kwargs", "metadata"), (dict, str)),
}
WORDS = {(str,): "a text", (str, list): "a text or a list of texts", (dict, str): "a mapping, or key=value,..."}
HELP = f"""\
lm-eval's `run`, with --model {MODEL} as the default and this package's tasks known without --include_path.
Prints lm-eval's table of results: token, word and byte perplexity of each task, accuracies, standard errors.
--output_path DIR keeps them, with the fingerprint of the distribution that was scored and what it cost.

example:
  lm-eval-duel run --model_args pretrained=demo-mdm,rule=greedy,block=32 --tasks sotu --limit 4

lm-eval's own arguments:
"""


def main(arguments: Sequence[str]) -> None:
    """lm-eval's `run`; raises UsageError for arguments that are wrong, before anything heavy is imported."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(HELP)
        arguments = ["--help"]
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    sys.argv = ["lm-eval", "run", *arguments]
    cli = HarnessCLI()
    register()
    with usage():
        args = _parsed(cli)
        _complete(args)
        _check(args)
    try:
        cli.execute(args)
    except ValueError as error:
        if str(error).startswith("Tasks not found: "):  # known once all tasks are indexed
            raise UsageError(_no_task(str(error))) from None
        raise


def _parsed(cli: HarnessCLI) -> argparse.Namespace:
    """lm-eval's reading of the command line; what argparse has to say about it is a UsageError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return cli.parse_args()
    except SystemExit as ended:
        if not ended.code:
            raise
        message = (said.getvalue().strip().splitlines() or ["error: "])[-1].partition("error: ")[2]
        message = re.sub(r"invalid functools\.partial\(.*\) value", "invalid value", message)
    except ValueError as error:  # of JSON
        message = " ".join(str(error).split())
    raise UsageError(f"run: {message}{_near(cli, message)} See lm-eval-duel run --help.") from None


def _near(cli: HarnessCLI, message: str) -> str:
    """The nearest of lm-eval's arguments to one that it does not know."""
    wrong = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
    with contextlib.suppress(AttributeError, KeyError):  # its parser is not public
        known = [flag for flag in cli._subparsers.choices["run"]._option_string_actions if flag.startswith("--")]
        if near := difflib.get_close_matches(wrong, known, n=1):
            return f". Did you mean {near[0]}?"
    return "" if message.endswith(".") else "."


def _complete(args: argparse.Namespace) -> None:
    """Fill in this package's model and its tasks. What a --config file says, the command line would replace."""
    configured = {} if args.config is None else _configured(args.config)
    if args.model is None:
        args.model = configured.get("model") or MODEL
    theirs = args.include_path or configured.get("include_path") or []
    theirs = [theirs] if isinstance(theirs, str) else theirs
    for folder in theirs:
        if not Path(folder).is_dir():
            raise UsageError(f"--include_path {folder}: there is no such folder.")
    args.include_path = [task_folder(), *theirs]


def _configured(file: str) -> dict[str, Any]:
    """A --config file; raises UsageError for one that lm-eval would not take."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    try:
        found = EvaluatorConfig.load_yaml_config(file)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--config {file}: {' '.join(str(error).split())}") from None
    known = [field.name for field in dataclasses.fields(EvaluatorConfig)]
    for key in found:
        if key not in known:
            raise unknown(f"key of --config {file}", key, known)
    for key, value in found.items():
        kinds = KINDS.get(key)
        texts = not isinstance(value, list) or all(isinstance(one, str) for one in value)
        if kinds and value is not None and not (isinstance(value, kinds) and texts):
            raise UsageError(f"--config {file}: '{key}' is {WORDS[kinds]}; got {value!r}.")
    return found


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for what lm-eval or the model would refuse."""
    config = _as_lm_eval_reads(args)
    if not config.tasks:
        raise UsageError("No task to run; name one or several: --tasks sotu.")
    from lm_eval.api.registry import model_registry

    if config.model not in model_registry and difflib.get_close_matches(str(config.model), MODELS, n=1):
        raise UsageError(f"Unknown --model '{config.model}'. Did you mean {MODEL}?")
    if config.model not in MODELS:
        return
    given = {"batch_size": config.batch_size, "max_batch_size": config.max_batch_size, "device": config.device}
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key in config.model_args:
            raise UsageError(f"'{key}' is an argument of its own, not one of --model_args: --{key} VALUE.")
    trusted = {"trust_remote_code": True} if getattr(args, "trust_remote_code", False) else {}
    Options.parse({**config.model_args, **trusted, **given})


def _as_lm_eval_reads(args: argparse.Namespace) -> EvaluatorConfig:
    """lm-eval's settings, made of a copy and without a word: it makes them again, and says what it has to say, when
    the command is executed."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    args = copy.deepcopy(args)
    args.trust_remote_code = False  # true imports datasets
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return EvaluatorConfig.from_cli(args)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # of a value of another type in --config, too
        raise UsageError(f"run: {' '.join(str(error).split())}") from None
    finally:
        logging.disable(before)


def _no_task(message: str) -> str:
    """lm-eval's message about tasks that it does not know, with the nearest of ours."""
    names = {file.stem for file in Path(task_folder()).rglob("[!_]*.yaml")}
    missing = message.removeprefix("Tasks not found: ").split(", ")
    near = [name for one in missing for name in difflib.get_close_matches(one, names, n=1)]
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return f"{message}.{hint} All: lm_eval ls tasks --include_path {task_folder()}"
