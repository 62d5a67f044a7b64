"""A task's part of a results file: perplexities, accuracies, and which documents were scored."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.core.rates import perplexity
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import samples
from lm_eval_duel.results.own_files import number
from lm_eval_duel.results.samples import METRICS, OTHER_NAMES, WRITTEN, Document

SAME = 1e-6  # relative difference up to which two values are one
Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Score:
    """An accuracy or another average over documents. `name`: the metric, and the harness's filter unless it is none."""

    metric: str
    name: str
    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None if samples were not logged; `missing` then says so.

    `key`: what the file calls it, see `keys`.
    """

    name: str
    key: str
    metrics: dict[str, float]  # perplexities, each of the first filter that has it
    scores: tuple[Score, ...]  # metrics other than perplexity
    nans: tuple[str, ...]  # sentences about perplexities that are null or NaN
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    output_type: str
    documents: tuple[Document, ...] | None = None
    missing: str = ""

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


def keys(content: Json, groups: Collection[str]) -> dict[str, str]:
    """The tasks of a results file, and what the file calls them.

    lm-eval 0.5 calls a task of a group GROUP::TASK. It evaluates a task of two groups twice: equal values are shown
    once, and different ones (a group may change its tasks) under the names in the file.
    """
    keys = dict[str, list[str]]()
    for key in content["results"]:
        if key not in groups:
            name = content["configs"][key].get("task") if "::" in key else None
            keys.setdefault(name or key, []).append(key)
    tasks = {}
    for name, alike in keys.items():
        values = [{k: v for k, v in content["results"][key].items() if _is_value(k)} for key in alike]
        tasks |= {name: alike[0]} if all(other == values[0] for other in values) else {key: key for key in alike}
    return tasks


def _is_value(key: str) -> bool:
    """Whether an entry of a task is that of a metric; standard errors are random."""
    return "," in key and not key.partition(",")[0].endswith("_stderr")


def task(file: Path, content: Json, name: str, key: str, documents: tuple[Document, ...] | None) -> Task:
    values, config = content["results"][key], content.get("configs", {}).get(key, {})
    identity = {
        "documents": content.get("n-samples", {}).get(key, {}).get("effective"),
        "limit": content["config"].get("limit"),
        "version": content.get("versions", {}).get(key),
        "shots": content.get("n-shot", {}).get(key),
        "hash": content.get("task_hashes", {}).get(key),
    }
    metrics: dict[str, float] = {}
    scores, nans = [], []
    for entry, value in values.items():
        metric, _, filtered = entry.partition(",")
        unknown = value is None or (isinstance(value, float) and math.isnan(value))
        if metric in METRICS and unknown:
            nans.append(f"{entry} of {name} is {'null' if value is None else 'NaN'} in {file}")
        elif metric in METRICS:
            metrics.setdefault(metric, float(value))
        elif not (unknown or metric in OTHER_NAMES) and _is_value(entry) and type(value) in (int, float):
            error = values.get(f"{metric}_stderr,{filtered}")  # or "N/A", or NaN
            error = None if error == "N/A" or error != error else number(error)
            shown = metric if filtered == "none" else f"{metric} ({filtered})"
            scores.append(Score(metric, shown, float(value), error))
    result = Task(
        name=name,
        key=key,
        metrics=metrics,
        scores=tuple(scores),
        nans=tuple(nans),
        identity={key: str(value) for key, value in identity.items() if value is not None},
        output_type=str(config.get("output_type") or "loglikelihood_rolling"),
        documents=documents,
    )
    if not metrics or documents is not None:
        return result
    date = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name precedes the date
    logged = file.parent / f"samples_{key}_{date[0] if date else file.stem.removeprefix('results_')}.jsonl"
    if not os.path.isfile(logged):  # False, too, if the task's name is not a valid file name
        missing = f"no samples of {name} next to it (run lm_eval with --log_samples)"
        return dataclasses.replace(result, missing=missing)
    return dataclasses.replace(result, documents=samples.documents(logged, result.rolling))


def check(file: Path, task: Task, scored: Json, estimator: str) -> None:
    """Raise DuelError if a task of a file contradicts itself.

    `scored`: its entry in config.duel.tasks, if that covers all of its documents. `estimator`: that of its metrics.
    """
    implied = {}  # metric -> what else says it, and the value
    if "bits_per_byte" in task.metrics:
        by_bits = perplexity(task.metrics["bits_per_byte"] * math.log(2))
        implied["byte_perplexity"] = "bits_per_byte makes it", by_bits
    values = scored.get("values", {}).items()
    log_probs = {key: value["log_prob"] for key, value in values if value["log_prob"] is not None}
    if scored.get("tokens") and estimator in log_probs:
        by_nats = perplexity(-log_probs[estimator] / scored["tokens"])
        implied["token_perplexity"] = "its log_prob and tokens make it", by_nats
    for metric, (what, value) in implied.items():
        if metric in task.metrics and not math.isclose(task.metrics[metric], value, rel_tol=SAME):
            raise DuelError(
                f"{file} contradicts itself: {metric} of {task.name} is {task.metrics[metric]:.10g}, but {what} "
                f"{value:.10g}. Run the task again, or leave the file out."
            )
    impossible = [(key, value) for key, value in task.metrics.items() if value < 0 or (not value and "bits" not in key)]
    impossible += [(f"log_prob of {key}", nats) for key, nats in log_probs.items() if nats > 0]
    for what, value in impossible:
        raise DuelError(
            f"{file}: {what} of {task.name} is {value:g}, and a probability is at most 1. Run the task again, or "
            "leave the file out."
        )
