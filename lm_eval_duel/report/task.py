"""A task's part of a results file: its perplexities, its accuracies, and what was scored."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from lm_eval_duel.report import samples
from lm_eval_duel.report.fields import Fields
from lm_eval_duel.report.samples import METRICS, WRITTEN, Document


@dataclasses.dataclass(frozen=True)
class Score:
    """An accuracy or another average over documents. `filter`: of the harness, where it is not `none`."""

    metric: str
    filter: str
    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None where samples were not logged; then `missing` says so."""

    name: str
    metrics: dict[str, float]
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    rolling: bool = True
    documents: tuple[Document, ...] | None = None
    missing: str = ""
    scores: tuple[Score, ...] = ()  # what is no perplexity
    output_type: str = "loglikelihood_rolling"

    @property
    def size(self) -> int | None:
        """Documents that were scored."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents))


def task(file: Path, found: Fields, values: Fields, name: str) -> Task:
    config, counted = found.object("config"), found.object("n-samples").object(name)
    documents = counted.count("effective")
    identity = {
        "documents": None if documents is None else str(documents),
        "limit": config.text("limit"),
        "version": found.object("versions").text(name),
        "shots": found.object("n-shot").text(name),
        "hash": found.object("task_hashes").text(name),
    }
    said = {key: value for key, value in identity.items() if value is not None}
    kind = found.object("configs").object(name).text("output_type") or "loglikelihood_rolling"
    metrics = _metrics(values)
    rolling = kind == "loglikelihood_rolling"
    task = Task(name, metrics, said, rolling, scores=_scores(values), output_type=kind)
    if not metrics:
        return task
    when = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name stands before the date
    logged = file.parent / f"samples_{name}_{when[0] if when else file.stem.removeprefix('results_')}.jsonl"
    if not _there(logged):
        return dataclasses.replace(task, missing=f"no samples of {name} beside it (run lm_eval with --log_samples)")
    return dataclasses.replace(task, documents=samples.documents(logged, rolling))


def _there(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a task's name that is no name of a file
        return False


def _metrics(values: Fields) -> dict[str, float]:
    """The perplexities of a task; the first filter's. Those that are null or NaN are left out (`nans`)."""
    found: dict[str, float] = {}
    for key in values:
        if (metric := key.split(",")[0]) not in METRICS or _is_nan(values[key]):
            continue
        value = values.number(key)
        if value < 0 or (value == 0 and metric != "bits_per_byte") or isinstance(values[key], str):
            raise values.wrong(key, values[key], "a perplexity")
        found.setdefault(metric, value)
    return found


def _scores(values: Fields) -> tuple[Score, ...]:
    """The averages of a task that are no perplexity: accuracies, with the harness's standard errors."""
    found = []
    for key in values:
        metric, _, name = key.partition(",")
        if not name or metric in METRICS or metric.endswith("_stderr") or _is_nan(values[key]):
            continue
        if isinstance(values[key], bool) or not isinstance(values[key], int | float):
            continue  # some tasks keep other things here
        said = values.get(f"{metric}_stderr,{name}")
        error = None if said in (None, "N/A") or _is_nan(said) else values.finite(f"{metric}_stderr,{name}", 0)
        found.append(Score(metric, "" if name == "none" else name, values.number(key), error))
    return tuple(found)


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def nans(values: Fields, name: str) -> list[str]:
    """What of a task is not a number."""
    found = [key for key in values if key.split(",")[0] in METRICS and _is_nan(values[key])]
    return [f"{key} of {name} is {'null' if values[key] is None else 'NaN'} in {values.file}" for key in found]
