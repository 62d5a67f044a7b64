"""Everything that an evaluation needs besides its weights, looked at before they are read, which may take minutes.

lm-eval's command loads the model, opens the response cache and loads the tasks, in this order. For our models the tasks
are loaded first, as soon as lm-eval has found their names:

    arguments of lm-eval      there is a task and a document, and results can be written
    config.json, tokenizer    text/loading.py: nothing contradicts the model args; a chat template, if wanted
    --use_cache               its folder can be written to; no file was written under other model args
    tasks                     loaded once, for lm-eval to take; the estimator answers their kind of request; a row has
                              room for the context or the text to generate
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lm_eval_duel.console.command_line import FLAGS, is_writable_folder, key_values, process
from lm_eval_duel.errors import DuelError, UsageError, naming, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness import patches
from lm_eval_duel.harness.store import require_same_args
from lm_eval_duel.options import Options, with_lm_evals_flags
from lm_eval_duel.tasks import named
from lm_eval_duel.text.generation import Settings
from lm_eval_duel.text.loading import require_loadable
from lm_eval_duel.text.text import TextEncoder, find_chat_template

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.tasks import TaskManager

CONTINUATIONS = ("loglikelihood", "multiple_choice")  # tasks that ask for the likelihood of a text after another one


@usage()
def prepare(config: EvaluatorConfig, manager: TaskManager) -> None:
    """Load the tasks, which `manager` then hands to lm-eval; raises UsageError for what would end the run later."""
    patches.in_lm_evals_command()
    patches.without_our_advice()
    _check_arguments(config)
    model_args = config.model_args or {}
    if isinstance(model_args, str):
        model_args = key_values(model_args)
    options = Options.parse(with_lm_evals_flags(model_args, dataclasses.asdict(config)))
    described = require_loadable(options)
    options = described.options
    if config.apply_chat_template:
        find_chat_template(described.tokenizer, config.apply_chat_template)
    if config.use_cache is not None:
        cache = Path(config.use_cache)
        for file in sorted(cache.parent.glob(f"{cache.name}_rank*.db")):
            require_same_args(file, options)

    _seed(config.seed or ())
    with named.loading():
        loaded = manager.load(config.tasks)
    for task in loaded["tasks"].values():
        _require_answers(task, options.estimator)
        settings = _generation_settings(task, config.gen_kwargs)
        if described.text is not None:
            _require_room(task, described.text, settings)
    _hand_over(manager, loaded)


def _check_arguments(config: EvaluatorConfig) -> None:
    """Raise UsageError for arguments of lm-eval that it takes, and fails over once a model is loaded or has scored."""
    if not config.tasks:
        raise UsageError(
            "No task to run; name one or several: --tasks sotu. A folder stands for the task files (.yaml) in it; to "
            "score the texts in it instead, add a slash to its name."
        )
    if config.limit is not None and config.limit <= 0:
        raise UsageError(
            f"--limit is a number of documents, or below 1 a share of them; got {config.limit:g}. Leave it out for all."
        )
    cache = config.use_cache
    is_folder = cache is not None and (cache.endswith(("/", os.sep)) or Path(cache).is_dir())
    if is_folder:
        raise UsageError(
            f"--use_cache is the beginning of a file's name, to which _rank0.db is added; got the folder "
            f"{cache}. Add a name to it: {Path(cache, 'cache')}."
        )
    if cache is not None:
        beginning, rank, _ = cache.rpartition("_rank")  # of the name that _require_writable makes
        if rank and Path(cache).is_file():
            raise UsageError(
                f"--use_cache is the beginning of a file's name, to which _rank0.db is added; got the file {cache} "
                f"itself. To go on with its answers: --use_cache {beginning}"
            )
        _require_writable(Path(cache))
    if config.output_path:
        output = Path(config.output_path)
        folder = output.parent if output.suffix == ".json" else output
        FLAGS["out"].read("--output_path", str(folder))


def _require_writable(cache: Path) -> None:
    """Raise UsageError if this process cannot write its file of a --use_cache path."""
    rank, _ = process()
    file = cache.with_name(f"{cache.name}_rank{rank}.db")
    if file.exists() and not os.access(file, os.W_OK):
        raise UsageError(f"The --use_cache file {file} cannot be written to: name another one, or change its mode.")
    if not is_writable_folder(str(cache.parent)):
        raise UsageError(
            f"--use_cache {cache}: the folder {cache.parent} cannot be written to. Name a path in one that can."
        )


def _seed(seeds: Any) -> None:
    """Seed random numbers as lm-eval does before it loads tasks: some of them shuffle their documents."""
    setters: tuple[Callable[[Any], object], ...] = (random.seed, np.random.seed, torch.manual_seed)
    for set_seed, seed in zip(setters, seeds, strict=False):
        if seed is not None:
            set_seed(seed)


def _require_answers(task: Task, estimator: str) -> None:
    """Raise DuelError if an estimator has no answer to the requests of a task."""
    reason = registry.find(estimator).whole_texts
    if reason and task.OUTPUT_TYPE in CONTINUATIONS:
        raise DuelError(f"Task {task.config.task} compares or scores continuations. {reason}")


def _generation_settings(task: Task, more: Any) -> Settings | None:
    """The settings of a task that generates, if its file has them; raises DuelError for wrong ones.

    `more`: those of --gen_kwargs, which come on top.
    """
    if task.OUTPUT_TYPE != "generate_until" or not isinstance(task.config.generation_kwargs, dict):
        return None
    settings = dict(task.config.generation_kwargs)
    if isinstance(more, str):
        more = key_values(more)
    if more:
        settings |= more
    with naming(f"Task {task.config.task}"):
        return Settings.from_arguments(settings)


def _require_room(task: Task, text: TextEncoder, settings: Settings | None) -> None:
    """Raise DuelError if a row has no place for the contexts of a task, or for the text to generate."""
    with naming(f"Task {task.config.task}"):
        if settings is not None:
            text.prompt("", settings.length)
        elif task.OUTPUT_TYPE in CONTINUATIONS:
            text.continuation([], [])


def _hand_over(manager: TaskManager, loaded: Any) -> None:
    """Let the next `load` of a manager return these tasks, with random numbers where loading them has left these."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()

    def load(_: Any) -> Any:
        del manager.load  # the next call is that of the class again
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        return loaded

    manager.load = load
