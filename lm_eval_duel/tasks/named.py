"""The tasks that a command names: tasks of the harness or of this package, YAML files, or files of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError, about_file, nearest, unknown
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
    calls: list[tuple[list[str], dict[str, Any]]] = []  # tasks with one set of metadata
    others = []
    for name in names:
        if is_text(name):
            calls.append((["duel_text"], {**metadata, "files": name}))
        else:
            others.append(name)
    if others:
        calls.append((others, metadata))

    tasks: list[Task] = []
    for together, settings in calls:
        manager = task_manager(together, settings, include_path)
        for name in together:
            if not is_yaml(name) and name not in manager.all_tasks:
                message = str(unknown("task", name, manager.all_tasks))
                message = message.split(" Known:")[0]  # there are thousands
                message += " lm-eval-duel list tasks lists those of this package; --include_path DIR adds yours."
                raise DuelError(message + unreadable([include_path] if include_path else []))
        tasks += manager.load(together)["tasks"].values()
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

    folders = with_our_tasks([include_path] if include_path else [])
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if holds(manager, names):
        return manager
    return TaskManager(include_path=folders, metadata=metadata)


def with_our_tasks(folders: Iterable[str]) -> list[str]:
    """This package's folder of tasks, and the user's, without those inside one before them.

    lm-eval warns of every task that it finds twice.
    """
    kept = [task_folder()]
    for folder in folders:
        path = Path(folder).resolve()
        if not any(path.is_relative_to(Path(other).resolve()) for other in kept):
            kept.append(folder)
    return kept


def nearest_in(folders: Iterable[str | Path], names: Iterable[str]) -> list[str]:
    """The names of tasks in these folders that are nearest to misspelt ones."""
    from lm_eval.tasks import TaskManager

    existing = [str(folder) for folder in folders if Path(folder).is_dir()]
    if not existing:
        return []
    tasks = TaskManager(include_path=existing, include_defaults=False).all_tasks
    near: list[str] = []
    for name in names:
        near += nearest(name, tasks)[:1]
    return near


def holds(manager: TaskManager, names: Iterable[str]) -> bool:
    """True if all of these tasks, tags and groups are in the index, with all members of the groups."""
    index = manager._index  # its public name, `task_index`, is lm-eval 0.4's only
    unread = [*names]
    read = set()
    while unread:
        name = unread.pop()
        if name not in index:
            return False
        config = index[name].cfg or {}
        members = config.get("task")
        is_group = isinstance(members, list)
        if is_group and name not in read:
            for member in members:
                if isinstance(member, dict):  # written out in the group's file
                    member = member.get("group") or member.get("task")
                unread.append(str(member))
        read.add(name)
    return True


def unreadable(folders: Iterable[str | Path]) -> str:
    """Sentences about the user's folders and task files that lm-eval passed over, each with a space before it.

    lm-eval leaves out a folder that does not exist, and a task file whose `include` does not, and then finds no task.
    """
    from lm_eval.tasks._yaml_loader import load_yaml
    from yaml import YAMLError

    text = ""
    for folder in folders:
        if not Path(folder).is_dir():
            text += f" There is no folder {folder} (--include_path)."
        for file in sorted(Path(folder).rglob("*.yaml")):
            try:
                load_yaml(file, resolve_func=False)
            except OSError as error:
                text += f" {file} includes a file that cannot be read: {about_file(error)}"
            except (ValueError, YAMLError) as error:
                text += f" {file} cannot be read: {' '.join(str(error).split())}."
    return text


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
