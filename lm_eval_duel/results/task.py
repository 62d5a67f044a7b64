"""A task's part of a results file: perplexities, accuracies, and which documents were scored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lm_eval_duel.results import samples
from lm_eval_duel.results.fields import Fields
from lm_eval_duel.results.samples import METRICS, OTHER_NAMES, WRITTEN, Document


@dataclasses.dataclass(frozen=True)
class Score:
    """An accuracy or another average over documents. `filter`: the harness's filter, empty for `none`."""

    metric: str
    filter: str
    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None if samples were not logged; `missing` then says so.

    `key`: what the file calls it, see `keys`.
    """

    name: str
    metrics: dict[str, float]
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    rolling: bool = True
    documents: tuple[Document, ...] | None = None
    missing: str = ""
    scores: tuple[Score, ...] = ()  # metrics other than perplexity
    output_type: str = "loglikelihood_rolling"
    key: str = ""

    @property
    def size(self) -> int | None:
        """Number of scored documents."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents))


def keys(results: Fields, groups: Collection[str]) -> dict[str, str]:
    """The tasks of a results file, and what the file calls them.

    lm-eval 0.5 calls a task of a group GROUP::TASK. It evaluates a task of two groups twice: equal values are shown
    once, and different ones (a group may change its tasks) under the names in the file.
    """
    entries, configs = results.object("results"), results.object("configs")
    same: dict[str, list[str]] = {}
    for key in entries:
        if key not in groups:
            name = configs.object(key).text("task") if "::" in key else None
            same.setdefault(name or key, []).append(key)
    tasks = {}
    for name, alike in same.items():
        values = [[pair for pair in entries.object(key).items() if _is_value(pair[0])] for key in alike]
        tasks |= {name: alike[0]} if all(other == values[0] for other in values) else {key: key for key in alike}
    return tasks


def _is_value(key: str) -> bool:
    """Whether an entry of a task is that of a metric; standard errors are random."""
    return "," in key and not key.partition(",")[0].endswith("_stderr")


def task(
    file: Path, results: Fields, name: str, key: str, documents_of_file: tuple[Document, ...] | None = None
) -> Task:
    """Task `name` of the results file, which calls it `key`. `documents_of_file`: those that the file itself holds."""
    config, values = results.object("config"), results.object("results").object(key)
    documents = results.object("n-samples").object(key).count("effective")
    identity = {
        "documents": None if documents is None else str(documents),
        "limit": config.text("limit"),
        "version": results.object("versions").text(key),
        "shots": results.object("n-shot").text(key),
        "hash": results.object("task_hashes").text(key),
    }
    identity = {key: value for key, value in identity.items() if value is not None}
    output_type = results.object("configs").object(key).text("output_type") or "loglikelihood_rolling"
    metrics = _metrics(values)
    rolling = output_type == "loglikelihood_rolling"
    task = Task(name, metrics, identity, rolling, scores=_scores(values), output_type=output_type, key=key)
    if not metrics or documents_of_file is not None:
        return dataclasses.replace(task, documents=documents_of_file)
    date = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name precedes the date
    samples_file = file.parent / f"samples_{key}_{date[0] if date else file.stem.removeprefix('results_')}.jsonl"
    if not _exists(samples_file):
        return dataclasses.replace(task, missing=f"no samples of {name} next to it (run lm_eval with --log_samples)")
    return dataclasses.replace(task, documents=samples.documents(samples_file, rolling))


def _exists(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # the task's name is not a valid file name
        return False


def perplexities(values: Fields) -> dict[str, dict[str, float]]:
    """filter -> metric -> perplexity. Those that are null or NaN are left out (see `nans`)."""
    by_filter: dict[str, dict[str, float]] = {}
    for key in values:
        metric, _, name = key.partition(",")
        if metric not in METRICS or _is_nan(values[key]):
            continue
        value = values.number(key)
        if value < 0 or (value == 0 and metric != "bits_per_byte") or isinstance(values[key], str):
            raise values.wrong(key, values[key], "a perplexity")
        by_filter.setdefault(name, {})[metric] = value
    return by_filter


def _metrics(values: Fields) -> dict[str, float]:
    """The perplexities of a task, each from the first filter that has it."""
    metrics: dict[str, float] = {}
    for of_filter in perplexities(values).values():
        metrics = {**of_filter, **metrics}
    return metrics


def _scores(values: Fields) -> tuple[Score, ...]:
    """The other averages of a task, such as accuracies, with the harness's standard errors."""
    scores = []
    for key in values:
        metric, _, name = key.partition(",")
        if not name or metric in (*METRICS, *OTHER_NAMES) or metric.endswith("_stderr") or _is_nan(values[key]):
            continue
        if isinstance(values[key], bool) or not isinstance(values[key], int | float):
            continue  # some tasks store other things here
        stored = values.get(f"{metric}_stderr,{name}")
        error = None if stored in (None, "N/A") or _is_nan(stored) else values.finite(f"{metric}_stderr,{name}", 0)
        scores.append(Score(metric, "" if name == "none" else name, values.number(key), error))
    return tuple(scores)


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def nans(values: Fields, name: str) -> list[str]:
    """Sentences about the metrics of a task that are null or NaN."""
    keys = [key for key in values if key.split(",")[0] in METRICS and _is_nan(values[key])]
    return [f"{key} of {name} is {'null' if values[key] is None else 'NaN'} in {values.file}" for key in keys]
