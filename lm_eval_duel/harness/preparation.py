"""Everything that an evaluation needs besides its weights, looked at before they are read, which may take minutes.

lm-eval's command loads the model, opens the response cache and loads the tasks, in this order. For our models the tasks
are loaded first, as soon as lm-eval has found their names:

    arguments of lm-eval      there is a task and a document, and results can be written
    config.json, tokenizer    text/loading.py: nothing contradicts the model args; a chat template, if wanted
    --use_cache               no file was written under other model args
    tasks                     loaded once, for lm-eval to take; the estimator answers their kind of request
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

from lm_eval_duel.console.command_line import FLAGS, key_values
from lm_eval_duel.errors import DuelError, UsageError, first_line, naming, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness import patches
from lm_eval_duel.harness.store import require_same_args
from lm_eval_duel.options import Options, with_lm_evals_flags
from lm_eval_duel.text.generation import Settings
from lm_eval_duel.text.loading import require_loadable
from lm_eval_duel.text.text import find_chat_template

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.tasks import TaskManager

CONTINUATIONS = ("loglikelihood", "multiple_choice")  # tasks that ask for the likelihood of a text after another one


def prepare(config: EvaluatorConfig, manager: TaskManager) -> None:
    """Load the tasks, which `manager` then hands to lm-eval; raises DuelError for what would end the run later."""
    patches.in_lm_evals_command()
    patches.without_our_advice()
    _check_arguments(config)
    model_args = config.model_args or {}
    if isinstance(model_args, str):
        model_args = key_values(model_args)
    options = Options.parse(with_lm_evals_flags(model_args, dataclasses.asdict(config)))
    options, tokenizer = require_loadable(options)
    if config.apply_chat_template:
        find_chat_template(tokenizer, config.apply_chat_template)
    if config.use_cache is not None:
        cache = Path(config.use_cache)
        for file in sorted(cache.parent.glob(f"{cache.name}_rank*.db")):
            require_same_args(file, options)

    _seed(config.seed or ())
    try:
        loaded = manager.load(config.tasks)
    except DuelError:
        raise
    except Exception as error:  # of a data set, its script or a task's own code
        raise DuelError(f"The tasks cannot be loaded: {first_line(error)}") from error
    for task in loaded["tasks"].values():
        _require_answers(task, options.estimator)
        _check_generation(task, config.gen_kwargs)
    _hand_over(manager, loaded)


@usage()
def _check_arguments(config: EvaluatorConfig) -> None:
    """Raise UsageError for arguments of lm-eval that it takes, and fails over once a model is loaded or has scored."""
    if not config.tasks:
        raise UsageError(
            "--tasks names no task: there is no YAML file of a task in that folder. To score the texts in it, add a "
            "slash to its name."
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
    if config.output_path:
        output = Path(config.output_path)
        folder = output.parent if output.suffix == ".json" else output
        FLAGS["out"].read("--output_path", str(folder))


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


def _check_generation(task: Task, more: Any) -> None:
    """Raise DuelError for wrong settings of a task that generates. `more`: those of --gen_kwargs, which come on top."""
    if task.OUTPUT_TYPE != "generate_until" or not isinstance(task.config.generation_kwargs, dict):
        return
    settings = dict(task.config.generation_kwargs)
    if isinstance(more, str):
        more = key_values(more)
    if more:
        settings |= more
    with naming(f"Task {task.config.task}"):
        Settings.from_arguments(settings)


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
