"""The tasks that a command names: tasks of the harness or of this package, YAML files, or files of text."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import glob
import importlib.util
import logging
import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import at_home
from lm_eval_duel.errors import NEAR, DuelError, UsageError, about_file, first_line, nearest, unknown
from lm_eval_duel.tasks import corpora, files
from lm_eval_duel.tasks.data import files_of_documents, task_files, task_folder
from lm_eval_duel.text.annotated import FILE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

YAML = (".yaml", ".yml")
WORD = re.compile(rb"[\w.-]+")  # nearly all names of tasks are one
NAMED = re.compile(  # the names that a task file gives
    rb"""^["']?(?:task|group|tag)["']?: *["']?([\w.-]+)""", re.MULTILINE
)
OF_THE_HUB = re.compile(r"\bhub\b|huggingface|offline", re.IGNORECASE)  # in an error; not GitHub
OWN_TEXTS = "duel_text"  # the task of files of text
NO_YAML = (".py", ".pyc", ".md")  # files beside those of tasks; some that these include have no ending


def load(
    names: Sequence[str], metadata: dict[str, Any], include_path: str | None = None, limit: int | None = None
) -> list[Task]:
    """Tasks with their data and the requests of their first `limit` documents; a group stands for its tasks.

    Files, folders and patterns of texts are together the task `duel_text`, as in `run`. `include_path`: a folder of the
    user's task files. Raises DuelError for an unknown name, and for a task that generates text.
    """
    for name in names:
        check(name)
    texts, others = parted(names)
    calls: list[tuple[list[str], dict[str, Any]]] = []  # tasks with one set of metadata
    if texts:
        calls.append(([OWN_TEXTS], {**metadata, "files": texts}))
    if others:
        calls.append((others, metadata))

    tasks: list[Task] = []
    for together, settings in calls:
        manager = task_manager(together, settings, include_path)
        with loading():
            tasks += manager.load(together)["tasks"].values()
    for task in tasks:
        if task.OUTPUT_TYPE == "generate_until":
            raise DuelError(f"The task {task.config.task} generates text and has no text to score; leave it out.")
        task.build_all_requests(limit=limit)
        names_of_documents = files_of_documents(task.eval_docs)
        if names_of_documents:
            for request in task.instances:
                request.doc[FILE] = names_of_documents[request.doc_id]
    return tasks


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Turn any error of a data set, its script or a task's own code into a UsageError that says what to do."""
    try:
        yield
    except DuelError as error:
        raise UsageError(str(error)) from None
    except Exception as error:
        raise UsageError(f"{_what_was_loaded(error)} cannot be loaded: {_reason(error)}") from error


def _what_was_loaded(error: Exception) -> str:
    """The task that lm-eval was making when `error` was raised, which it does not name, and the files of its data."""
    from lm_eval.api.task import Task

    config = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Task):
            config = getattr(owner, "config", None)  # a task of the user's own class may have none yet
    if config is None:
        return "The tasks"
    files_of_data = (config.dataset_kwargs or {}).get("data_files")
    return f"The task {config.task} (data_files: {files_of_data})" if files_of_data else f"The task {config.task}"


def _reason(error: Exception) -> str:
    """The reason that tasks cannot be loaded, with what led to the error, and what to do."""
    about_the_hub = _about_the_hub(error)
    if about_the_hub:
        return first_line(error) + about_the_hub
    reason = first_line(error)
    cause = error.__cause__
    if isinstance(cause, Exception):
        reason += f" ({first_line(cause)})"
    if isinstance(error, FileNotFoundError):
        reason += ". Paths in a task's file are relative to the folder in which the command runs."
    return reason


def _about_the_hub(error: Exception) -> str:
    """Sentences on what a data set of the hub needs, if the error may come from there; else an empty text."""
    is_of_the_hub = isinstance(error, ConnectionError) or OF_THE_HUB.search(str(error))
    if not is_of_the_hub:
        return ""
    end = "" if str(error).strip().endswith(".") else "."
    return (
        f"{end} {corpora.needs_hub()} The tasks sotu, sotu_full and sotu_choice come with this package, and duel_text "
        "scores your own files."
    )


def task_manager(
    names: Iterable[str], metadata: dict[str, Any] | None = None, include_path: str | None = None
) -> TaskManager:
    """lm-eval's index of tasks, with this package's and those in the folder `include_path`.

    lm-eval's own 14,000 task files take seconds to read; they are read only if one of `names` may be theirs. Raises
    DuelError for a name that is no task's.
    """
    from lm_eval.tasks import TaskManager

    names = [*names]
    folders = with_our_tasks([include_path] if include_path else [])
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if holds(manager, names):
        return manager
    for name in not_mentioned(manager, names):
        raise _unknown(name, [*manager.all_tasks, *_names_of_lm_eval()], include_path)
    manager = TaskManager(include_path=folders, metadata=metadata)
    for name in names:
        if not is_yaml(name) and name not in manager.all_tasks:
            raise _unknown(name, manager.all_tasks, include_path)
    return manager


def _unknown(name: str, known: Iterable[str], include_path: str | None) -> DuelError:
    """The error for an unknown task, with the nearest names, and what of the user's folder cannot be read."""
    message = str(unknown("task", name, known))
    message = message.split(" Known:")[0]  # there are thousands
    message += " lm-eval-duel list tasks lists those of this package; --include_path DIR adds yours."
    return DuelError(message + unreadable([include_path] if include_path else []))


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


def tasks_in(folders: Iterable[str | Path]) -> TaskManager:
    """The index of the tasks in these folders alone, without lm-eval's warnings: it makes another one that warns."""
    from lm_eval.tasks import TaskManager

    existing = [str(folder) for folder in folders if Path(folder).is_dir()]
    log = logging.getLogger("lm_eval.tasks._index")  # where it warns of files that it passes over, and of equal names
    was_disabled = log.disabled
    log.disabled = True
    try:
        return TaskManager(include_path=existing, include_defaults=False)
    finally:
        log.disabled = was_disabled


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


def check(name: str) -> None:
    """Raise DuelError for a file or a pattern that does not exist or cannot be read, before anything is loaded."""
    if is_yaml(name):
        matches = [name] if Path(name).is_file() else sorted(glob.glob(name))
        if not matches:
            raise DuelError(f"--tasks {name}: there is no such file.")
        for file in matches:
            problem = _why_unreadable(Path(file))
            if problem:
                raise DuelError(f"--tasks {name}:{problem}")
    if is_text(name):
        files.find([name])


def split(tasks: str | Sequence[str]) -> list[str]:
    """The names of tasks, in one text or in several."""
    names: list[str] = []
    if isinstance(tasks, str):
        tasks = [tasks]
    for text in tasks:
        for name in text.split(","):
            if name.strip():  # nothing follows a last comma
                names.append(at_home(name.strip()))
    return names


def is_yaml(name: str) -> bool:
    """True if `name` is a task's file."""
    return Path(name).suffix in YAML


def parted(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The files, folders and patterns of texts among names of tasks, and the other names."""
    texts = []
    others = []
    for name in names:
        if is_text(name):
            texts.append(name)
        else:
            others.append(name)
    return texts, others


def is_text(name: str) -> bool:
    """True if `name` is a file, a folder or a pattern of texts: tasks have no dots and no slashes in their names."""
    return files.ending(name) in files.FORMATS or ("/" in name and Path(name).is_dir())


def metadata_of_texts(options: argparse.Namespace, texts: Sequence[str] = ()) -> dict[str, Any]:
    """The metadata that --lines and --field stand for.

    `texts`: files of text that another flag names. Raises UsageError if there are none, and no task reads any.
    """
    metadata: dict[str, Any] = {}
    if options.lines:
        metadata["lines"] = True
    if options.field != files.DEFAULT_FIELD:
        metadata["field"] = options.field
    if not texts:
        require_texts(metadata, options.tasks or (), has_own=options.include_path is not None)
    return metadata


def require_texts(settings: Iterable[str], tasks: Sequence[str], has_own: bool) -> None:
    """Raise UsageError for settings of files of text, such as `lines`, if none of the tasks reads such files.

    `has_own`: there is a folder of the user's own tasks. These may, as may tasks that are named by their YAML files or
    the folder of these.
    """
    flags = [f"--{setting}" for setting in settings]
    if not flags or any(_may_read_texts(name, has_own) for name in tasks):
        return
    verb = "are" if len(flags) > 1 else "is"
    without = f"--tasks {','.join(tasks)} reads none" if tasks else "none is named"
    raise UsageError(
        f"{' and '.join(flags)} {verb} about files of text, and {without}. Name a file or a folder of texts, such as "
        f"--tasks notes.txt, or leave {' and '.join(flags)} out."
    )


def _may_read_texts(name: str, has_own: bool) -> bool:
    if is_text(name) or is_yaml(name) or Path(name).is_dir():
        return True
    if name.startswith(OWN_TEXTS) or fnmatch.fnmatch(OWN_TEXTS, name):  # lm-eval takes patterns such as duel_*
        return True
    return has_own and name not in {file.stem for file in task_files()}


# ---------------------------------------------------------------- names that are no task's


def not_mentioned(manager: TaskManager, names: Iterable[str]) -> list[str]:
    """Those of `names` that are neither in the index of `manager` nor a word of lm-eval's own task files.

    They are no tasks. This takes a second, where lm-eval parses its files for several. A name that is a word there may
    be none either. Paths and patterns are left out.
    """
    unknown_names = []
    for name in names:
        is_word = WORD.fullmatch(name.encode()) is not None
        if is_word and not is_yaml(name) and not Path(name).is_dir() and name not in manager._index:
            unknown_names.append(name)
    if not unknown_names:
        return []

    words: set[bytes] = set()
    for content in _files_of_lm_eval():
        words.update(WORD.findall(content))
    return [name for name in unknown_names if name.encode() not in words]


def _files_of_lm_eval() -> Iterator[bytes]:
    """The contents of lm-eval's task files, and of the files that they include."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None  # it is required
    for folder, _, names in os.walk(Path(spec.origin).parent / "tasks"):
        for name in names:
            if not name.endswith(NO_YAML):
                with contextlib.suppress(OSError):
                    yield Path(folder, name).read_bytes()


def _names_of_lm_eval() -> set[str]:
    """The names of tasks, groups and tags that stand in lm-eval's task files: nearly all, to suggest one."""
    names = set()
    for content in _files_of_lm_eval():
        for name in NAMED.findall(content):
            names.add(name.decode())
    return names


def advice(missing: Sequence[str], folders: Sequence[str | Path]) -> str:
    """Sentences on tasks that lm-eval does not find, each with a space before it. `folders`: of the user's tasks."""
    our_tasks = {file.stem for file in task_files()}
    ours = []
    others = []
    for name in missing:
        if name in our_tasks:
            ours.append(name)
        else:
            others.append(name)

    near = nearest_in(folders, others)
    sentences = f" Did you mean {', '.join(near)}?" if near else ""
    sentences += unreadable(folders)
    if ours:
        what = "are tasks" if len(ours) > 1 else "is a task"
        sentences += (
            f" {', '.join(ours)} {what} of lm_eval_duel: add the folder of its tasks, --include_path $(lm-eval-duel "
            "list folders tasks)."
        )
    return sentences


def nearest_in(folders: Iterable[str | Path], names: Sequence[str]) -> list[str]:
    """The tasks nearest to misspelt names: of these folders, or else of lm-eval."""
    near: list[str] = []
    known = tasks_in(folders).all_tasks if names else []
    of_lm_eval: set[str] = set()
    for name in names:
        matches = nearest(name, known)
        if not matches:
            of_lm_eval = of_lm_eval or _names_of_lm_eval()
            matches = difflib.get_close_matches(name, of_lm_eval, 1, NEAR)  # hundreds begin alike
        near += matches[:1]
    return near


def unreadable(folders: Iterable[str | Path]) -> str:
    """Sentences about the user's folders and task files that lm-eval passed over, each with a space before it.

    lm-eval leaves out a folder that does not exist, and a task file whose `include` does not, and then finds no task.
    """
    text = ""
    for folder in folders:
        if not Path(folder).is_dir():
            text += f" There is no folder {folder} (--include_path)."
        for file in sorted(Path(folder).rglob("*.yaml")):
            text += _why_unreadable(file)
    return text


def _why_unreadable(file: Path) -> str:
    """A sentence on a task file that cannot be read, with a space before it; empty for one that can."""
    from lm_eval.tasks._yaml_loader import load_yaml
    from yaml import YAMLError

    try:
        load_yaml(file, resolve_func=False)
    except OSError as error:
        return f" {file} includes a file that cannot be read: {about_file(error)}"
    except (ValueError, YAMLError) as error:
        return f" {file} cannot be read: {' '.join(str(error).split())}."
    return ""
