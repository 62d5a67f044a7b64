"""The lines of a table and the runs behind them.

A *row* is a recipe file (`zero_shot/mdlm_duel`). A *job* is a row on a single task, in a process of its own: if a data
set is missing, only its column is. A *line* is a published figure and the job that measures it; a lattice job measures
several.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.cli.where import where
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.results import published
from lm_eval_duel.tasks import task_folder

GIVEN = "given"  # the folder of recipes with the corrected convention
COPIES = "data_dir"  # the only metadata that choose a place and not a data set


@dataclasses.dataclass(frozen=True)
class Job:
    """A row on a task. `config`: what defines its numbers, as in a --config file. `changed`: what is not the recipe's.

    `other_data`: whether a changed setting makes other rows of the data set, so that no figure can be compared.
    """

    row: str
    task: str
    config: Mapping[str, Any]
    notes: str = ""
    shape: str = ""  # the config.json that the recipe gives, for weights that are on no hub
    batch_size: int | None = None
    changed: tuple[str, ...] = ()
    other_data: bool = False

    @property
    def limit(self) -> int | None:
        return self.config.get("limit")

    @property
    def name(self) -> str:
        """Unique in the folder of its row: other settings have another name."""
        limited = "" if self.limit is None else f"-limit{self.limit}"
        return f"{self.task}{limited}-{_digest(self.config)}"

    def file(self, out: Path, ending: str) -> Path:
        """Its configuration (.yaml) or log (.log)."""
        return out / "runs" / self.row / f"{self.name}{ending}"

    def results(self, out: Path) -> Path:
        """The folder of its results file."""
        return out / "results" / self.row / self.name

    def cache(self, out: Path) -> Path:
        """The path of --use_cache: the same for every --limit."""
        unlimited = {key: value for key, value in self.config.items() if key != "limit"}
        return out / "cache" / self.row / f"{self.task}-{_digest(unlimited)}"

    @property
    def missing_weights(self) -> str:
        """A sentence if `pretrained` is the path of a folder that does not exist."""
        name = str(self.config["model_args"].get("pretrained", ""))
        if not missing_folder(name):
            return ""
        return f"there is no folder {name}; these weights are on no hub. Name yours: --pretrained {name}=FOLDER"


@dataclasses.dataclass(frozen=True)
class Line:
    """A figure to measure. `figure`: as published, None if nothing is published under its name."""

    table: str
    job: Job
    figure: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to measure. `weights`: model args by row, pattern of rows, or the recipe's `pretrained`."""

    folder: Path
    tables: Sequence[str]
    rows: Sequence[str] = ()
    tasks: Sequence[str] = ()
    given: bool = False
    limit: int | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def missing_folder(name: str) -> bool:
    """Whether a checkpoint's name is a path where nothing is; a hub name has one slash at most."""
    return (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not os.path.exists(name)


def tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The published figures of a folder of recipes, by table; raises DuelError for figures without one."""
    of_table: dict[str, list[dict[str, Any]]] = {}
    file = folder / "published.csv"
    for figure in published.read([str(file)]):
        if not (figure["table"] and figure["recipes"]):
            raise DuelError(f"{file}: {figure['model']} on {figure['task']} has no table or no recipes.")
        of_table.setdefault(figure["table"], []).append(figure)
    return of_table


def lines(choice: Choice) -> list[Line]:
    """The lines of a choice, in the order of the published figures; raises DuelError for unknown names."""
    known = tables(choice.folder)
    for table in choice.tables:
        if table not in known:
            raise unknown("table", table, known)
    chosen = []
    for table, row, figures in _rows(choice, known):
        content = recipe(choice.folder, row)
        tasks = [figure["task"] for figure in figures]
        for task in dict.fromkeys(task for name in content["tasks"] for task in members(name) if task in tasks):
            if choice.tasks and task not in choice.tasks:
                continue
            job = _job(choice, row, task, content)
            chosen += [Line(table, job, figure) for figure in figures if figure["task"] == task]
    if not chosen:
        raise DuelError("Nothing is left to measure: no row of these tables has the chosen tasks.")
    _check_used(choice, chosen)
    return chosen


def _rows(choice: Choice, known: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(table, row, its figures) of each chosen row."""
    everything = []
    for table in dict.fromkeys(choice.tables):
        rows: dict[str, list[dict[str, Any]]] = {}
        for figure in known[table]:
            for row in figure["recipes"].split():
                rows.setdefault(row, []).append(figure)
        everything += [(table, row, figures) for row, figures in rows.items()]
    used = set()
    for table, row, figures in everything:
        patterns = [pattern for pattern in choice.rows if _matches(row, pattern)]
        used.update(patterns)
        if choice.rows and not patterns:
            continue
        head, _, last = row.rpartition("/")
        corrected = f"{head}/{GIVEN}/{last}"
        exists = choice.given and (choice.folder / f"{corrected}.yaml").is_file()
        yield table, corrected if exists else row, figures
    for pattern in choice.rows:
        if pattern not in used:
            raise unknown("row", pattern, dict.fromkeys(row for _, row, _ in everything))


def _matches(row: str, pattern: str) -> bool:
    """Whether a pattern names a row, with or without its table."""
    return fnmatch.fnmatchcase(row, pattern) or fnmatch.fnmatchcase(row.rpartition("/")[2], pattern)


def recipe(folder: Path, row: str) -> dict[str, Any]:
    """The content of a recipe file."""
    import yaml

    file = folder / f"{row}.yaml"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content["tasks"], list) or not isinstance(content["model_args"], dict):
            raise KeyError("tasks, model_args")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DuelError(f"{file} is not a recipe ({type(error).__name__}: {' '.join(str(error).split())}).") from None
    return content


def members(task: str) -> list[str]:
    """The tasks of one of our groups; any other task is alone."""
    import yaml

    file = Path(task_folder()) / "benchmarks" / f"{task}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content["task"] if "group" in content else [task]


def _job(choice: Choice, row: str, task: str, content: Mapping[str, Any]) -> Job:
    arguments, metadata = content["model_args"], content.get("metadata") or {}
    own: dict[str, Any] = {}
    for name, replaced in choice.weights.items():
        if name == arguments.get("pretrained") or _matches(row, name):
            own |= replaced
    other = {key: value for key, value in choice.metadata.items() if metadata.get(key) != value and key != COPIES}
    config = {
        "model": content.get("model", "duel-mdm"),
        "model_args": {**arguments, **own},
        "tasks": [task],
        "metadata": {**metadata, **choice.metadata},
    }
    if choice.limit is not None:
        config["limit"] = choice.limit
    changed = [f"{key}={value}" for key, value in {**own, **other}.items()]
    notes, shape = _comment(choice.folder, row)
    return Job(row, task, config, notes, shape, content.get("batch_size"), tuple(changed), bool(other))


def _check_used(choice: Choice, chosen: Sequence[Line]) -> None:
    """Raise DuelError for weights that no chosen row uses."""
    rows = dict.fromkeys(line.job.row for line in chosen)
    names = {str(recipe(choice.folder, row)["model_args"].get("pretrained")): None for row in rows}
    for name in choice.weights:
        if name not in names and not any(_matches(row, name) for row in rows):
            raise unknown("row or checkpoint", name, [*rows, *names])


def _comment(folder: Path, row: str) -> tuple[str, str]:
    """What a recipe file says about its convention, without the first sentence, which names the figure; and the
    config.json in it."""
    comment = []
    for line in (folder / f"{row}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    if f"/{GIVEN}/" not in row:
        end = next((n for n, line in enumerate(comment, 1) if line.endswith(".")), len(comment))
        comment = comment[end:]
    text = " ".join(line for line in comment if not line.startswith("{"))
    return text, next((line for line in comment if line.startswith("{")), "")


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]


def folder(name: str | None) -> Path:
    """The folder of recipes: this package's, or another with a published.csv."""
    if name is None:
        return Path(where("recipes"))
    if not (Path(name) / "published.csv").is_file():
        raise DuelError(f"--recipes {name}: there is no published.csv in it.")
    return Path(name)
