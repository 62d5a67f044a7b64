"""The tasks that a command names: tasks of the harness or of this package, YAML files, or files of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.tasks import files
from lm_eval_duel.tasks.data import task_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

YAML = (".yaml", ".yml")


def load(
    names: Sequence[str], metadata: dict[str, Any], include_path: str | None = None, limit: int | None = None
) -> list[Task]:
    """Tasks with their data and the requests of their first `limit` documents; a group stands for its tasks.

    A file, a folder or a pattern of texts is the task `duel_text`. `include_path`: a folder of the user's task files.
    Raises DuelError for an unknown name, and for a task that generates text.
    """
    for name in names:
        check(name)
    others = [name for name in names if not is_text(name)]
    parts = [(["duel_text"], {**metadata, "files": name}) for name in names if is_text(name)]
    tasks: list[Task] = []
    for part, settings in [*parts, (others, metadata)] if others else parts:
        manager = task_manager(part, settings, include_path)
        for name in part:
            if not is_yaml(name) and name not in manager.all_tasks:
                raise DuelError(str(unknown("task", name, manager.all_tasks)).split(" Known:")[0])
        tasks += manager.load(part)["tasks"].values()
    for task in tasks:
        if task.OUTPUT_TYPE == "generate_until":
            raise DuelError(f"The task {task.config.task} generates text and has no text to score; leave it out.")
        task.build_all_requests(limit=limit)
    return tasks


def task_manager(
    names: Iterable[str], metadata: dict[str, Any] | None = None, include_path: str | None = None
) -> TaskManager:
    """lm-eval's index of tasks, with this package's and those in the folder `include_path`.

    lm-eval's own 14,000 task files take seconds to read; they are read only if one of `names` may be theirs.
    """
    from lm_eval.tasks import TaskManager

    folders = [task_folder(), *([include_path] if include_path else [])]
    own = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    return own if holds(own, names) else TaskManager(include_path=folders, metadata=metadata)


def holds(manager: TaskManager, names: Iterable[str]) -> bool:
    """True if all of these tasks, tags and groups are in the index, with all members of the groups."""
    index = manager._index  # `task_index` in lm-eval 0.4 alone
    unread = [*names]
    read = set()
    while unread:
        if (name := unread.pop()) not in index:
            return False
        members = (index[name].cfg or {}).get("task")
        if name not in read and isinstance(members, list):  # a group; inline members are in no index
            unread += [str((m.get("group") or m.get("task")) if isinstance(m, dict) else m) for m in members]
        read.add(name)
    return True


def check(name: str) -> None:
    """Raise DuelError for a file or a pattern that does not exist, before anything is loaded."""
    if is_yaml(name) and not Path(name).is_file():
        raise DuelError(f"--tasks {name}: there is no such file.")
    if is_text(name):
        files.find([name])


def is_yaml(name: str) -> bool:
    """True if `name` is a task's file."""
    return Path(name).suffix in YAML


def is_text(name: str) -> bool:
    """True if `name` is a file, a folder or a pattern of texts: tasks have no dots and no slashes in their names."""
    return files.ending(name) in files.FORMATS or ("/" in name and Path(name).is_dir())
