"""Every change to lm-eval's behaviour, made when a model is loaded, never at import; each is made once.

    what                        why
    Task.build_all_requests     writes on each request when it was built: a model gets the requests of an evaluation one
                                kind at a time, and later ones belong to the next evaluation
                                refuses a task with fewer documents than ranks: lm-eval fails on the ranks without any,
                                with an unrelated error, and the other ranks wait for them
    Task.apply_filters          drops the answers to copies of a rank's last request, which give it as many as another
                                rank has: with `repeats` a majority vote would count them

    CachingLM.__init__          names a --use_cache file that cannot be opened; gives our models all requests, including
                                requests with a cached answer, so that the results count them (see store.py)

    EvaluationTracker.save_results_aggregated
                                writes null for infinite and undefined values, with the reason of each under `nulls`:
                                Infinity is no JSON; and lets the table show large numbers in scientific notation

    evaluator.get_git_commit_hash
                                does not ask git outside a repository, where git prints an error

    metrics.math.exp            is infinite where it overflows: lm-eval ends after scoring, without results
    metrics.weighted_mean       is NaN over no units, for example no words; lm-eval divides by zero

    GeneralConfigTracker.log_experiment_args
                                names the folder of results after the bundled model if no other is named; lm-eval draws
                                a name

    sys.excepthook              prints our errors and Ctrl-C in one line, in lm_eval's own command only

    logger lm_eval.api.task     does not warn that our tasks take --metadata: they do, and docs/tasks.md says which

    TaskManager.__init__        does not read lm-eval's own 14,000 task files, which takes seconds; only while
                                `lm-eval-duel run` runs, and only if all tasks that it names are this package's

    lm_eval.simple_evaluate     keeps its results, of which `lm-eval-duel run` makes its exit code; only while it runs

    (in autoload.py, when the interpreter starts)
    get_model, EvaluatorConfig.process_tasks
                                the error for an unknown model or task names ours if it is close to one of them
    key_val_to_dict             the error for a model name where key=value is expected says to write pretrained=
    EvaluatorConfig.process_tasks
                                loads the tasks of our models before the model (preparation.py): what is wrong with them
                                is known before minutes have gone into weights; ignores a comma behind the last name
    make_table                  the table of results is followed by our own, with the kind and the error of each value

Written against lm-eval 0.4.13. Other models are affected only by the clearer errors and by infinite values.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import os
import sqlite3
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm_eval.api import metrics
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from lm_eval_duel.arguments import unique_keys
from lm_eval_duel.console.command_line import LARGE, key_values, with_nulls
from lm_eval_duel.console.exits import stopped
from lm_eval_duel.core.scores import perplexity
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, too_few_documents
from lm_eval_duel.harness import MODELS
from lm_eval_duel.harness.store import ResponseCache, unreadable
from lm_eval_duel.tasks import task_files

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only
ORIGINAL = "lm_eval_duel_original"  # an attribute of methods that are replaced: lm-eval's own
BUILT = "lm_eval_duel built"  # an attribute of requests: when the harness built them, by time.monotonic_ns


def apply() -> None:
    """Apply every patch that is not in place."""
    _patch(Task, "build_all_requests", _build_all_requests)
    for kind in (Task, ConfigurableTask):  # each has its own
        _patch(kind, "apply_filters", _apply_filters)
    _patch(CachingLM, "__init__", _open_cache)
    _patch(metrics, "weighted_mean", _weighted_mean)
    without_our_advice()

    # Only the name `math` in this module is replaced: math.exp itself is unchanged.
    functions = {**vars(math), "exp": perplexity}
    metrics.math = types.SimpleNamespace(**functions)

    evaluator = sys.modules.get("lm_eval.evaluator")
    if evaluator is not None:
        _patch(evaluator, "get_git_commit_hash", _git_commit)

    loggers = sys.modules.get("lm_eval.loggers")
    if loggers is not None:  # in lm-eval's command, which alone prints the table
        _patch(loggers.EvaluationTracker, "save_results_aggregated", _save_results)
        _patch(loggers.evaluation_tracker.GeneralConfigTracker, "log_experiment_args", _name_model)


def without_our_advice() -> None:
    """Drop lm-eval's warning that a task takes --metadata, which it prints at each start, for this package's tasks."""
    logger = logging.getLogger(Task.__module__)
    if not any(isinstance(present, WithoutOurAdvice) for present in logger.filters):
        logger.addFilter(WithoutOurAdvice())


class WithoutOurAdvice(logging.Filter):
    """Drops the warning "TASK: Custom kwargs can be passed to `--metadata`" for this package's tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = {file.stem for file in task_files()}

    def filter(self, record: logging.LogRecord) -> bool:
        task, is_advice, _ = record.getMessage().partition(": Custom kwargs can be passed")
        return not (is_advice and task in self.ours)


def in_lm_evals_command() -> None:
    """Print DuelErrors and Ctrl-C in one line in lm_eval's own command, as `lm-eval-duel run` does.

    Raises:
        DuelError: If its command line gives a model arg twice, of which lm-eval takes the last value.
    """
    command = Path(sys.argv[0])
    is_script = command.stem in ("lm_eval", "lm-eval")
    is_module = command.parts[-2:] == ("lm_eval", "__main__.py")
    if not (is_script or is_module):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_args", "-a", nargs="*", action="extend", default=[])
    parser.add_argument("--use_cache", "-c")
    options, _ = parser.parse_known_args()
    sys.excepthook = functools.partial(_one_line, options.use_cache)

    pairs: list[tuple[str, Any]] = []
    for text in options.model_args:
        pairs += key_values(text).items()
    unique_keys(pairs)


def _one_line(
    use_cache: str | None, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    wants_traceback = os.environ.get("LMEVAL_LOG_LEVEL", "").upper() == "DEBUG"
    if wants_traceback or not issubclass(kind, DuelError | KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    message = stopped(use_cache) if issubclass(kind, KeyboardInterrupt) else str(error)
    print(f"lm_eval: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def without_default_tasks() -> Iterator[None]:
    """Within this context, a new TaskManager does not read lm-eval's own task files."""
    original = TaskManager.__init__
    TaskManager.__init__ = functools.partialmethod(original, include_defaults=False)
    try:
        yield
    finally:
        TaskManager.__init__ = original


@contextlib.contextmanager
def kept_results() -> Iterator[list[dict[str, Any]]]:
    """Within this context, the results of each evaluation are added to the list: lm-eval's command returns none."""
    import lm_eval

    original = lm_eval.simple_evaluate
    kept: list[dict[str, Any]] = []

    @functools.wraps(original)
    def evaluate(*arguments: Any, **options: Any) -> Any:
        results = original(*arguments, **options)
        if results is not None:  # on the first rank
            kept.append(results)
        return results

    lm_eval.simple_evaluate = evaluate
    try:
        yield kept
    finally:
        lm_eval.simple_evaluate = original


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`."""
    original = getattr(owner, name)
    if hasattr(original, ORIGINAL):
        return

    @functools.wraps(original)
    def patched(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    setattr(patched, ORIGINAL, original)
    setattr(owner, name, patched)


def _build_all_requests(
    original: Callable[..., Any],
    task: Task,
    *,
    limit: int | None = None,
    samples: list[int] | None = None,
    world_size: int = 1,
    **options: Any,
) -> Any:
    count = len(samples) if samples else len(task.eval_docs)
    if limit and not samples:
        count = min(count, int(limit))
    if world_size > 1 and count < world_size:
        raise too_few_documents(f"Task {task.config.task}", count, world_size)
    original(task, limit=limit, samples=samples, world_size=world_size, **options)
    now = time.monotonic_ns()
    for request in getattr(task, "_instances", None) or ():
        setattr(request, BUILT, now)


def _apply_filters(original: Callable[..., Any], task: Task) -> Any:
    for request in task.instances:
        wanted = request.repeats or 1
        del request.resps[wanted:]  # the answers to copies
    return original(task)


def _git_commit(original: Callable[[], Any]) -> Any:
    from lm_eval.loggers.utils import get_commit_from_path

    command = ["git", "rev-parse", "--git-dir"]
    try:
        in_repository = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # there is no git: lm-eval then reads the folder's own files
        in_repository = True
    return original() if in_repository else get_commit_from_path(os.getcwd())


def _save_results(original: Callable[..., None], tracker: Any, results: dict[str, Any], **options: Any) -> None:
    written = with_nulls(results)
    original(tracker, results=written, **options)
    for name in written.keys() - results.keys():  # entries that lm-eval has added
        results[name] = written[name]
    of_tasks = results.get("results", {})
    of_groups = results.get("groups", {})
    for entries in (*of_tasks.values(), *of_groups.values()):
        for name, value in entries.items():
            if isinstance(value, float) and abs(value) >= LARGE:
                entries[name] = LargeNumber(value)  # the table is printed after this


def _weighted_mean(original: Callable[..., float], items: Any) -> float:
    items = list(items)
    return original(items) if any(size for _, size in items) else math.nan


class LargeNumber(float):
    """A number that lm-eval's table, which asks for four decimals, shows in scientific notation."""

    def __format__(self, form: str) -> str:
        return format(float(self), ".4e")


def _name_model(
    original: Callable[..., None], tracker: Any, model_source: str, model_args: Any, **options: Any
) -> None:
    original(tracker, model_source=model_source, model_args=model_args, **options)
    if model_source in MODELS and "pretrained" not in model_args:
        tracker.model_name = BUNDLED
        tracker.model_name_sanitized = BUNDLED


def _open_cache(original: Callable[..., None], caching: CachingLM, lm: Any, cache_db: str, *args: Any) -> None:
    try:
        original(caching, lm, cache_db, *args)
    except (sqlite3.Error, OSError) as error:
        if os.path.isfile(cache_db):
            raise unreadable(cache_db, error) from error
        raise DuelError(
            f"The --use_cache file {cache_db} cannot be made: {error}. Name a path in a folder that can be written."
        ) from error
    if isinstance(lm.cache_hook.dbdict, ResponseCache):
        caching.dbdict = lm.cache_hook.dbdict
        lm.cache_hook = CacheHook(None)
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(caching, kind, functools.partial(_forward, caching, kind))


def _forward(caching: CachingLM, kind: str, requests: list[Any], **options: Any) -> list[Any]:
    """The model's own answers to all requests. The model uses the cache only in calls that come through `caching`."""
    caching.lm.cache_hook = caching.get_cache_hook()
    try:
        answers: list[Any] = getattr(caching.lm, kind)(requests, **options)
        return answers
    finally:
        caching.lm.cache_hook = CacheHook(None)
        caching.dbdict.flush()
