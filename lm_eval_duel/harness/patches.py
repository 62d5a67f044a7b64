"""Every change to lm-eval's behaviour, made when a model is loaded (never at import); applying them twice is harmless.

    what                        why
    Task.build_all_requests     ends the evaluation before, since a model cannot tell: it gets requests of one kind at a
                                time, and lm-eval asks for its results on rank 0 alone, and not after a failure
                                refuses a task with fewer documents than ranks: lm-eval fails on the ranks without any,
                                with an unrelated error, and the other ranks wait for them
    Task.process_instances      (0.5 only) keeps the first answer to a request that was repeated to give all ranks
                                equally many requests, as 0.4.13 does: 0.5.0.dev1 scores all of them
    torch_gather_object         (0.5 only) gathers by our model's `gather_object`, as 0.4.13 does: with the function of
                                0.5.0.dev1 the statistics of the other ranks would be lost
    TaskManager.load            (0.5 only) imports the functions of a YAML file that --tasks names, as 0.4.13 does:
                                0.5.0.dev1 leaves their names, so that a task is scored without its own data and metrics
    CachingLM.__init__          names a --use_cache file that cannot be opened; and gives our models all requests, also
                                those with a cached answer, so that the results count them (see cache.py)

    make_table                  prints the Monte Carlo and sampling errors of our estimators under the table of results

    sys.excepthook              prints our errors in one line, in lm_eval's own command only

    TaskManager.__init__        does not read lm-eval's own 14,000 task files, which takes seconds; only while
                                `lm-eval-duel run` runs, and only if all tasks that it names are this package's

Written against lm-eval 0.4.13 and 0.5.0.dev1 (see requests.py). Other models are affected only by the clearer errors
and by what is for 0.5 only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm_eval import evaluator, utils
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from lm_eval_duel.errors import DuelError, too_few_documents
from lm_eval_duel.harness.cache import ResponseCache, unreadable

FUNCTIONS = {"custom_dataset", "process_docs", "process_results", "class", "aggregation", "metric", "sampler"}
FUNCTIONS |= {"doc_to_text", "doc_to_target", "doc_to_choice", "doc_to_image", "doc_to_audio"}  # keys of a task's YAML

answering: weakref.WeakSet[Any] = weakref.WeakSet()  # our models that take part in the evaluation under way


def apply() -> None:
    """Apply every patch that is not in place."""
    _patch(Task, "build_all_requests", _build_all_requests)
    if hasattr(Task, "process_instances"):
        _patch(Task, "process_instances", _process_instances)
        _patch(TaskManager, "load", _load_tasks)
        _patch(evaluator, "torch_gather_object", _gather_object)
    _patch(CachingLM, "__init__", _open_cache)
    if not hasattr(utils.make_table, "lm_eval_duel_original"):
        _patch_make_table(utils.make_table)


def print_errors_in_one_line() -> None:
    """In lm_eval's own command, as in `lm-eval-duel run`, a DuelError is one line; elsewhere it keeps its traceback."""
    command = Path(sys.argv[0])
    if command.stem in ("lm_eval", "lm-eval") or command.parts[-2:] == ("lm_eval", "__main__.py"):
        sys.excepthook = _one_line


def _one_line(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, DuelError) and os.environ.get("LMEVAL_LOG_LEVEL", "").upper() != "DEBUG":
        print(f"lm_eval: {error}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


@contextlib.contextmanager
def without_default_tasks() -> Iterator[None]:
    """A TaskManager that is made meanwhile does not read lm-eval's own task files."""
    original = TaskManager.__init__

    def read_others(self: TaskManager, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "include_defaults": False})

    TaskManager.__init__ = read_others
    try:
        yield
    finally:
        TaskManager.__init__ = original


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`, or a function by `replacement(original, ...)`."""
    original = getattr(owner, name)
    if hasattr(original, "lm_eval_duel_original"):
        return

    @functools.wraps(original)
    def patched(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    patched.lm_eval_duel_original = original
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
    answering.clear()
    if world_size > 1:
        _require_documents(task, limit, samples, world_size)
    return original(task, limit=limit, samples=samples, world_size=world_size, **options)


def _patch_make_table(function: Any) -> None:
    """Change the function itself: the harness's command has taken it by name before it makes a model."""

    def patched(*args: Any, **options: Any) -> str:  # runs among the names of lm_eval.utils
        from lm_eval_duel.harness.patches import _make_table

        return _make_table(make_table.lm_eval_duel_original, *args, **options)  # noqa: F821

    original = types.FunctionType(function.__code__, function.__globals__, "make_table", function.__defaults__)
    function.__code__, function.__defaults__, function.lm_eval_duel_original = patched.__code__, None, original


def _make_table(
    original: Callable[..., str], results: dict[str, Any], column: str = "results", *rest: Any, **options: Any
) -> str:
    table = original(results, column, *rest, **options)
    lines = results.get("config", {}).get("duel", {}).get("errors", []) if column == "results" else []
    return "\n".join([table.rstrip("\n"), "", *lines]) if lines else table


def _process_instances(original: Callable[..., None], task: Task) -> None:
    for request in task.instances:
        del request.resps[request.repeats or 1 :]
    original(task)


def _gather_object(original: Callable[..., Any], obj: Any, *, dst: int = 0, **options: Any) -> list[Any] | None:
    model = next(iter(answering), None)
    return original(obj, dst=dst, **options) if model is None else model.gather_object(obj, dst)


def _load_tasks(original: Callable[..., Any], manager: TaskManager, specs: Any, *args: Any, **options: Any) -> Any:
    specs = specs if isinstance(specs, list) else [specs]
    return original(manager, [_with_functions(spec) for spec in specs], *args, **options)


def _with_functions(content: Any, key: str = "") -> Any:
    """A task's YAML with `!function module.name`, read as FOLDER/module.name, replaced by the function."""
    if isinstance(content, dict):
        return {key: _with_functions(value, key) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_functions(item) for item in content]
    if key not in FUNCTIONS or not isinstance(content, str):
        return content
    folder, name = os.path.split(content)
    if not (os.path.isabs(folder) and os.path.isdir(folder) and re.fullmatch(r"\w+(\.\w+)+", name)):
        return content
    from lm_eval.tasks._yaml_loader import _import_func_in_yml

    return _import_func_in_yml(name, Path(folder))


def _require_documents(task: Task, limit: int | None, samples: list[int] | None, world_size: int) -> None:
    count = len(samples) if samples else len(task.eval_docs)
    count = min(count, int(limit)) if limit and not samples else count
    if count < world_size:
        raise too_few_documents(f"Task {task.config.task}", count, world_size)


def _open_cache(original: Callable[..., None], caching: CachingLM, lm: Any, cache_db: str, *args: Any) -> None:
    remedy = "Name a path in a folder that can be written."
    if os.path.isdir(cache_db):
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: it is a folder. {remedy}")
    try:
        original(caching, lm, cache_db, *args)
    except sqlite3.Error as error:
        if os.path.exists(cache_db):
            raise unreadable(cache_db, error) from error
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: {error}. {remedy}") from error
    except OSError as error:
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: {error}. {remedy}") from error
    if isinstance(lm.cache_hook.dbdict, ResponseCache):
        caching.dbdict, lm.cache_hook = lm.cache_hook.dbdict, CacheHook(None)
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(caching, kind, functools.partial(_forward, caching, kind))


def _forward(caching: CachingLM, kind: str, requests: list[Any], **options: Any) -> list[Any]:
    """The model's own answers to all requests. It uses the cache only while it is called through it."""
    caching.lm.cache_hook = caching.get_cache_hook()
    try:
        return getattr(caching.lm, kind)(requests, **options)
    finally:
        caching.lm.cache_hook = CacheHook(None)
        caching.dbdict.flush()
