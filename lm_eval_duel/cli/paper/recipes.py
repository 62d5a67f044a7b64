"""The lines of a table and the runs behind them.

A *row* is a recipe file (`zero_shot/mdlm_duel`), a *job* a row on one task: without its data, only that is missing.
A *line* is a published figure and the job that measures it; a lattice job measures several.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.results import published, read
from lm_eval_duel.tasks import task_folder

COPIES = "data_dir"  # the only metadata that choose a place and not a data set


@dataclasses.dataclass(frozen=True)
class Job:
    """A row on a task. `config`: what defines its numbers, as in a --config file. `out`: the folder of the command.

    `changed`: what is not the recipe's. `other_data`: a change makes other rows, so that no figure can be compared.
    """

    row: str
    task: str
    config: Mapping[str, Any]
    out: Path
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
        return f"{self.task}-limit{self.limit}-{_digest(self.config)}" if self.limit else self.unlimited

    @property
    def unlimited(self) -> str:
        """The name without --limit."""
        return f"{self.task}-{_digest({key: value for key, value in self.config.items() if key != 'limit'})}"

    def path(self, kind: str, ending: str = "") -> Path:
        """Of its configuration and log (`runs`), its `results`, or its `cache`, which every --limit shares."""
        return self.out / kind / self.row / f"{self.unlimited if kind == 'cache' else self.name}{ending}"

    @property
    def finished(self) -> Path | None:
        """The newest results file that is whole."""
        for file in sorted(self.path("results").rglob("results_*.json"), reverse=True):
            with contextlib.suppress(DuelError):
                if self.task in read.run(file).tasks:
                    return file
        return None

    @property
    def missing_weights(self) -> str:
        """A sentence if `pretrained` is the path of a folder that does not exist."""
        name = str(self.config["model_args"].get("pretrained", ""))
        if not missing_folder(name):
            return ""
        return f"there is no folder {name}; these weights are on no hub. Name yours: --weights {name}=FOLDER"


@dataclasses.dataclass(frozen=True)
class Line:
    """A published figure, and the job that measures it."""

    job: Job
    figure: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The path of the job's configuration; lines of one job share it."""
        return self.job.path("runs")


def missing_folder(name: str) -> bool:
    """Whether a checkpoint's name is a path where nothing is; a hub name has one slash at most."""
    return (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not os.path.exists(name)


def jobs(lines: Iterable[Line]) -> dict[Path, Job]:
    """The jobs of lines, each once, by the path of its configuration."""
    return {line.path: line.job for line in lines}


def lines(options: argparse.Namespace) -> list[Line]:
    """The lines of a command, in the order of the published figures; raises DuelError for unknown names."""
    figures = published.read([str(options.recipes / "published.csv")])
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for table in dict.fromkeys(options.table):
        if table not in (known := dict.fromkeys(figure["table"] for figure in figures)):
            raise unknown("table", table, known)
        for figure in figures:
            for row in figure["recipes"].split() if figure["table"] == table else ():
                rows.setdefault((table, row), []).append(figure)
    for pattern in options.rows:
        if not any(_matches(row, pattern) for _, row in rows):
            raise unknown("row", pattern, dict.fromkeys(row for _, row in rows))
    chosen, checkpoints = [], {}
    for (_, row), of_row in rows.items():
        if options.rows and not any(_matches(row, pattern) for pattern in options.rows):
            continue
        recipe = _recipe(options.recipes, row, options.given)
        for task in dict.fromkeys(task for name in recipe["tasks"] for task in _members(name)):
            of_task = [figure for figure in of_row if figure["task"] == task]
            if of_task and (not options.tasks or task in options.tasks):
                checkpoints[str(recipe["model_args"].get("pretrained"))] = None
                job = _job(options, recipe, task)
                chosen += [Line(job, figure) for figure in of_task]
    if not chosen:
        raise DuelError("Nothing is left to measure: no row of these tables has the chosen tasks.")
    for name in options.weights:
        if name not in checkpoints and not any(_matches(line.job.row, name) for line in chosen):
            raise unknown("row or checkpoint", name, [*checkpoints, *(line.job.row for line in chosen)])
    return chosen


def _matches(row: str, pattern: str) -> bool:
    """Whether a pattern names a row, with or without its table."""
    return fnmatch.fnmatchcase(row, pattern) or fnmatch.fnmatchcase(row.rpartition("/")[2], pattern)


def _recipe(folder: Path, row: str, given: bool) -> dict[str, Any]:
    """A recipe file, its row, and what its comment says: `notes`, without the first sentence, which names the figure,
    and `shape`, the config.json in it. `given`: that of the corrected convention, if there is one.
    """
    import yaml

    head, _, last = row.rpartition("/")
    corrected = given and (folder / head / "given" / f"{last}.yaml").is_file()
    row = f"{head}/given/{last}" if corrected else row
    file = folder / f"{row}.yaml"
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        if not isinstance(content["tasks"], list) or not isinstance(content["model_args"], dict):
            raise TypeError("tasks are a list, model_args a mapping")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DuelError(f"{file} is not a recipe ({type(error).__name__}: {' '.join(str(error).split())}).") from None
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = [line.removeprefix("#").strip() for line in comments]
    shape = next((line for line in comment if line.startswith("{")), "")
    if "/given/" not in row:
        comment = comment[next((n for n, line in enumerate(comment, 1) if line.endswith(".")), len(comment)) :]
    return {**content, "row": row, "notes": " ".join(line for line in comment if line != shape), "shape": shape}


def _members(task: str) -> list[str]:
    """The tasks of one of our groups; any other task is alone."""
    import yaml

    file = Path(task_folder()) / "benchmarks" / f"{task}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content["task"] if "group" in content else [task]


def _job(options: argparse.Namespace, recipe: Mapping[str, Any], task: str) -> Job:
    arguments, metadata = recipe["model_args"], recipe.get("metadata") or {}
    own: dict[str, Any] = {}
    for name, replaced in options.weights.items():
        if name == arguments.get("pretrained") or _matches(recipe["row"], name):
            own |= replaced
    other = {key: value for key, value in options.metadata.items() if metadata.get(key) != value and key != COPIES}
    config = {
        "model": recipe.get("model", "duel-mdm"),
        "model_args": {**arguments, **own},
        "tasks": [task],
        "metadata": {**metadata, **options.metadata},
        **({} if options.limit is None else {"limit": options.limit}),
    }
    changed = tuple(f"{key}={value}" for key, value in {**own, **other}.items())
    said = recipe["notes"], recipe["shape"], recipe.get("batch_size")
    return Job(recipe["row"], task, config, Path(options.out), *said, changed, bool(other))


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:8]
