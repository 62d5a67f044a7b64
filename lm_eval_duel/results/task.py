"""A task's part of a results file: perplexities, accuracies, and which documents were scored."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.results import samples
from lm_eval_duel.results.consistency import number
from lm_eval_duel.results.samples import METRICS, OTHER_NAMES, WRITTEN, Document

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Score:
    """An accuracy or another average over documents. `filter`: the harness's filter, empty for `none`."""

    metric: str
    filter: str
    value: float
    stderr: float | None

    @property
    def name(self) -> str:
        return f"{self.metric} ({self.filter})" if self.filter else self.metric


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None if samples were not logged; `missing` then says so.

    `key`: what the file calls it, see `keys`.
    """

    name: str
    metrics: dict[str, float]  # perplexities, each of the first filter that has it
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    documents: tuple[Document, ...] | None = None
    missing: str = ""
    scores: tuple[Score, ...] = ()  # metrics other than perplexity
    output_type: str = "loglikelihood_rolling"
    key: str = ""

    @property
    def rolling(self) -> bool:
        return self.output_type == "loglikelihood_rolling"

    @property
    def size(self) -> int | None:
        """Number of scored documents."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents))

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if they are known."""
        if self.documents is None or any("token_perplexity" not in document.values for document in self.documents):
            return None
        return {document.key: document.values["token_perplexity"][1] for document in self.documents}


def keys(results: Json, groups: Collection[str]) -> dict[str, str]:
    """The tasks of a results file, and what the file calls them.

    lm-eval 0.5 calls a task of a group GROUP::TASK. It evaluates a task of two groups twice: equal values are shown
    once, and different ones (a group may change its tasks) under the names in the file.
    """
    entries, same = results["results"], dict[str, list[str]]()
    for key in entries:
        if key not in groups:
            name = results["configs"][key].get("task") if "::" in key else None
            same.setdefault(name or key, []).append(key)
    tasks = {}
    for name, alike in same.items():
        values = [[item for item in entries[key].items() if _is_value(item[0])] for key in alike]
        tasks |= {name: alike[0]} if all(other == values[0] for other in values) else {key: key for key in alike}
    return tasks


def _is_value(key: str) -> bool:
    """Whether an entry of a task is that of a metric; standard errors are random."""
    return "," in key and not key.partition(",")[0].endswith("_stderr")


def task(file: Path, results: Json, name: str, key: str, documents_of_file: tuple[Document, ...] | None = None) -> Task:
    """Task `name` of the results file, which calls it `key`. `documents_of_file`: those that the file itself holds."""
    values, config = results["results"][key], results.get("configs", {}).get(key, {})
    identity = {
        "documents": results.get("n-samples", {}).get(key, {}).get("effective"),
        "limit": results["config"].get("limit"),
        "version": results.get("versions", {}).get(key),
        "shots": results.get("n-shot", {}).get(key),
        "hash": results.get("task_hashes", {}).get(key),
    }
    identity = {key: str(value) for key, value in identity.items() if value is not None}
    metrics: dict[str, float] = {}
    for of_filter in perplexities(values).values():
        metrics = {**of_filter, **metrics}
    output_type = str(config.get("output_type") or Task.output_type)
    task = Task(name, metrics, identity, scores=tuple(_scores(values)), output_type=output_type, key=key)
    if not metrics or documents_of_file is not None:
        return dataclasses.replace(task, documents=documents_of_file)
    date = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name precedes the date
    logged = file.parent / f"samples_{key}_{date[0] if date else file.stem.removeprefix('results_')}.jsonl"
    if not os.path.isfile(logged):  # False, too, if the task's name is not a valid file name
        return dataclasses.replace(task, missing=f"no samples of {name} next to it (run lm_eval with --log_samples)")
    return dataclasses.replace(task, documents=samples.documents(logged, task.rolling))


def perplexities(values: Json) -> dict[str, dict[str, float]]:
    """filter -> metric -> perplexity. Those that are null or NaN are left out (see `nans`)."""
    by_filter: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        metric, _, name = key.partition(",")
        if metric in METRICS and not _is_nan(value):
            by_filter.setdefault(name, {})[metric] = float(value)
    return by_filter


def _scores(values: Json) -> Iterator[Score]:
    """The other averages of a task, such as accuracies, with the harness's standard errors."""
    for key, value in values.items():
        metric, _, name = key.partition(",")
        number_of = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if name and number_of and metric not in (*METRICS, *OTHER_NAMES) and _is_value(key):  # tasks store other things
            error = values.get(f"{metric}_stderr,{name}")
            error = None if error == "N/A" or _is_nan(error) else number(error)
            yield Score(metric, "" if name == "none" else name, float(value), error)


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def nans(values: Json, name: str, file: Path) -> list[str]:
    """Sentences about the metrics of a task that are null or NaN."""
    keys = [key for key in values if key.split(",")[0] in METRICS and _is_nan(values[key])]
    return [f"{key} of {name} is {'null' if values[key] is None else 'NaN'} in {file}" for key in keys]
