"""Every change to lm-eval's behaviour, made when a model is loaded (never at import); applying them twice is harmless.

    what                        why
    Task.build_all_requests     counts evaluations: a model cannot tell otherwise where one ends and the next begins
                                refuses a task with fewer documents than ranks: lm-eval fails on the ranks without any,
                                with an unrelated error, and the other ranks wait for them
    Task.process_instances      (0.5 only) keeps the first answer to a request that was repeated to give all ranks
                                equally many requests, as 0.4.13 does: 0.5.0.dev1 scores all of them
    CachingLM.__init__          names a --use_cache file that cannot be opened; and gives our models all requests, also
                                those with a cached answer, so that the results count them (see cache.py)

    TaskManager.__init__        does not read lm-eval's own 14,000 task files, which takes seconds; only while
                                `lm-eval-duel run` runs, and only if all tasks that it names are this package's

Written against lm-eval 0.4.13 and 0.5.0.dev1 (see versions.py). Other models are affected only by the clearer errors,
and by the first answer under 0.5.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.task import Task

from lm_eval_duel.errors import DuelError, too_few_documents
from lm_eval_duel.harness.cache import ANSWER_TYPES, ResponseCache, unreadable

_builds = 0  # calls of Task.build_all_requests


def apply() -> None:
    """Apply every patch that is not in place."""
    _patch(Task, "build_all_requests", _build_all_requests)
    if hasattr(Task, "process_instances"):
        _patch(Task, "process_instances", _process_instances)
    _patch(CachingLM, "__init__", _open_cache)


@contextlib.contextmanager
def without_default_tasks() -> Iterator[None]:
    """A TaskManager that is made meanwhile does not read lm-eval's own task files."""
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__

    def read_others(self: TaskManager, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "include_defaults": False})

    TaskManager.__init__ = read_others
    try:
        yield
    finally:
        TaskManager.__init__ = original


def evaluation() -> int:
    """A number that changes as soon as lm-eval builds the requests of another evaluation."""
    return _builds


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`."""
    original = getattr(owner, name)
    if hasattr(original, "lm_eval_duel_original"):
        return

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **options: Any) -> Any:
        return replacement(original, self, *args, **options)

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
    global _builds
    _builds += 1
    if world_size > 1:
        _require_documents(task, limit, samples, world_size)
    return original(task, limit=limit, samples=samples, world_size=world_size, **options)


def _process_instances(original: Callable[..., None], task: Task) -> None:
    for request in task.instances:
        del request.resps[request.repeats or 1 :]
    original(task)


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
    if isinstance(caching.dbdict, ResponseCache):
        lm.cache_hook = CacheHook(None)
        for kind in ANSWER_TYPES:
            setattr(caching, kind, functools.partial(_forward, caching, kind))


def _forward(caching: CachingLM, kind: str, requests: list[Any], **options: Any) -> list[Any]:
    """The model's own answers to all requests. It uses the cache only while it is called through it."""
    caching.lm.cache_hook = caching.get_cache_hook()
    try:
        return getattr(caching.lm, kind)(requests, **options)
    finally:
        caching.lm.cache_hook = CacheHook(None)
        caching.dbdict.commit()
