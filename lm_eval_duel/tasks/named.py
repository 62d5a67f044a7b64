"""The task that a command names: one of the harness or of this package, a YAML file, or files of text."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.tasks import own_text
from lm_eval_duel.tasks.bundled import task_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

YAML = (".yaml", ".yml")


def load(name: str, metadata: dict[str, Any], include_path: str | None = None) -> Task:
    """The task of a name, of a YAML file, or of texts (a file, a folder or a pattern), with its data.

    `include_path`: a folder of the user's task files. Raises DuelError if there is no such task, or it is a group.
    """
    check(name, include_path)
    if is_text(name):
        name, metadata = "duel_text", {**metadata, "files": name}
    manager = task_manager([name], metadata, include_path)
    if not is_yaml(name) and name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, n=1)
        raise DuelError(f"No task '{name}'.{f' Did you mean {near[0]}?' if near else ''} All: lm_eval ls tasks.")
    if not is_yaml(name) and name not in manager.all_subtasks:  # before the data of its tasks are loaded
        raise DuelError(f"'{name}' is a group of tasks; name one task.")
    loaded = manager.load([name])
    if loaded["groups"] or len(loaded["tasks"]) != 1:
        raise DuelError(f"{name} is not the file of one task; name one with a line 'task: NAME'.")
    return next(iter(loaded["tasks"].values()))


def load_all(names: Sequence[str], metadata: dict[str, Any], include_path: str | None = None) -> list[Task]:
    """The tasks of names, YAML files and texts as for `load`; a group stands for its tasks."""
    files = [name for name in names if is_yaml(name) or is_text(name)]
    others = [name for name in names if name not in files]
    tasks = [load(name, metadata, include_path) for name in files]
    if others:
        manager = task_manager(others, metadata, include_path)
        for name in others:
            if name not in manager.all_tasks:
                raise DuelError(str(unknown("task", name, manager.all_tasks)).split(" Known:")[0])
        tasks += manager.load(others)["tasks"].values()
    return tasks


def requests(
    names: Sequence[str], metadata: dict[str, Any], include_path: str | None = None, limit: int | None = None
) -> list[Any]:
    """The requests of the first documents of tasks; raises DuelError for a task that generates text."""
    return [request for task in built(names, metadata, include_path, limit) for request in task.instances]


def built(
    names: Sequence[str], metadata: dict[str, Any], include_path: str | None = None, limit: int | None = None
) -> list[Task]:
    """Tasks with the requests of their first documents; raises DuelError for a task that generates text."""
    tasks = load_all(names, metadata, include_path)
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
    index, unread, read = manager._index, [*names], set()  # `task_index` in lm-eval 0.4 alone
    while unread:
        if (name := unread.pop()) not in index:
            return False
        members = (index[name].cfg or {}).get("task")
        if name not in read and isinstance(members, list):  # a group; inline members are in no index
            unread += [str((m.get("group") or m.get("task")) if isinstance(m, dict) else m) for m in members]
        read.add(name)
    return True


def check(name: str, include_path: str | None = None) -> None:
    """Raise DuelError for files and folders that do not exist, before anything is loaded."""
    if include_path is not None and not Path(include_path).is_dir():
        raise DuelError(f"--include_path {include_path}: there is no such folder.")
    if is_yaml(name) and not Path(name).is_file():
        raise DuelError(f"--tasks {name}: there is no such file.")
    if is_text(name):
        own_text.find([name])


def is_yaml(name: str) -> bool:
    """True if `name` is that of a task's file."""
    return Path(name).suffix in YAML


def is_text(name: str) -> bool:
    """True if `name` is a file, a folder or a pattern of texts: tasks have no dots and no slashes in their names."""
    return Path(name).suffix in own_text.FORMATS or ("/" in name and Path(name).is_dir())
