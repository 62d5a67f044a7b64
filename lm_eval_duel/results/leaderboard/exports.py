"""What others read: Every Eval Ever (schema 0.3.0) and the hub's `.eval_results`, as files by name.

Only measured likelihoods and bounds are exported, never the oracle and never published figures. The hub has one number
for a model and a benchmark, without room for "at most", so it gets no bounds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.leaderboard.board import Board, BoardRow
from lm_eval_duel.results.leaderboard.columns import TaskColumn
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.report_files import safe_name
from lm_eval_duel.results.stats import DRAWS
from lm_eval_duel.results.table import WORDS, form_of, number

SCHEMA = "0.3.0"
EEE, HUB = "exports/every_eval_ever/data", "exports/eval_results"
BITS = "bits_per_byte"


def _part(name: str) -> str:
    """A name as part of a path."""
    return safe_name(name).strip(".") or "unknown"


def _results(board: Board, row: BoardRow) -> Iterator[tuple[TaskColumn, Row]]:
    """A row's finite results, and their columns."""
    for column in board.columns:
        if column.id in row.results and math.isfinite(row.results[column.id].value):
            yield column, row.results[column.id]


# ---------------------------------------------------------------- Every Eval Ever


def every_eval_ever(board: Board, organization: str) -> dict[str, str]:
    """A file for each row: the record of https://evalevalai.com, `data/COLLECTION/DEVELOPER/MODEL/UUID.json`."""
    created = f"{time.time():.0f}"
    files = {}
    for row in board.rows:
        results = [
            _result(row, column, result, metric)
            for column, result in _results(board, row)
            for metric in dict.fromkeys([result.metric, BITS])
            if metric in result.metrics
        ]
        if row.kind == "oracle" or not results:
            continue
        # random-looking, but the same for the same results
        seed = hashlib.sha256(json.dumps([row.files, row.fingerprint, row.model, row.label]).encode())
        identity = str(uuid.UUID(bytes=seed.digest()[:16], version=4))
        path, _, model = row.pretrained.strip("/").rpartition("/")
        developer = path.rpartition("/")[2]
        details = {"deployment_type": "self_deployed", "model_availability": "unknown", "dtype": row.first.run.dtype}
        details |= {"parameters": str(row.parameters)} if row.parameters else {}
        info = {"name": row.model, "id": row.pretrained, "additional_details": details}
        record = {
            "schema_version": SCHEMA,
            "evaluation_id": f"lm_eval_duel-{identity[:8]}/{row.pretrained}/{created}",
            "evaluation_timestamp": row.date,
            "retrieved_timestamp": created,
            "source_metadata": {
                "source_name": "lm_eval_duel",
                "source_type": "evaluation_run",
                "source_organization_name": organization,
                "evaluator_relationship": "other",
            },
            "eval_library": {
                "name": "lm_eval",
                "version": row.versions.get("lm_eval", "unknown"),
                "additional_details": row.versions,
            },
            "model_info": info | ({"developer": developer} if developer else {}),
            "evaluation_results": results,
        }
        name = "/".join(map(_part, ("lm_eval_duel", developer or "unknown", model)))
        files[f"{EEE}/{name}/{identity}.json"] = json.dumps(record, indent=1, allow_nan=False) + "\n"
    return files


def _result(row: BoardRow, column: TaskColumn, result: Row, metric: str) -> dict[str, Any]:
    """A metric of a result, with the data set of the hub if its task names one."""
    counted = {} if column.documents is None else {"samples": column.documents}
    uncertainty: dict[str, Any] = {}
    if (error := result.stderrs[metric]) is not None:
        uncertainty["standard_error"] = {"value": error, "method": "of the estimate itself (Monte Carlo or sampled)"}
    if metric == result.metric and result.interval is not None and all(map(math.isfinite, result.interval)):
        low, high = result.interval
        interval = {"lower": low, "upper": high, "confidence_level": 0.95}
        uncertainty["confidence_interval"] = interval | {"method": "bootstrap over documents, percentiles"}
        uncertainty["num_bootstrap_samples"] = DRAWS
        uncertainty |= {f"num_{key}": count for key, count in counted.items()}
    dataset, source = row.datasets.get(column.task, {}), {"dataset_name": column.task, "source_type": "other"}
    if re.fullmatch(r"[^./][^/]*/[^/]*", dataset.get("path", "")):
        source |= {"source_type": "hf_dataset", "hf_repo": dataset["path"]}
        source |= {"hf_split": dataset["split"]} if "split" in dataset else {}
        source |= {f"{key}_number": count for key, count in counted.items()}
    named = {key: getattr(row, key) for key in ("estimator", "rule", "block", "cache") if getattr(row, key)}
    kind, unit, least = (BITS, "bits", 0.0) if metric == BITS else ("perplexity", "perplexity", 1.0)
    about = {"fingerprint": row.fingerprint, "command": "; ".join(row.commands)}
    return {
        "evaluation_result_id": f"{column.task}/{column.id}/{metric}/{row.fingerprint or 'unknown'}",
        "evaluation_name": column.task,
        "source_data": source,
        "metric_config": {
            "evaluation_description": f"{WORDS[metric]}; {row.label}: {row.about}",
            "metric_id": metric,
            "metric_name": WORDS[metric],
            "metric_kind": kind,
            "metric_unit": unit,
            "metric_parameters": named | {"upper_bound": row.kind == "bound"},
            "lower_is_better": True,
            "score_type": "continuous",
            "min_score": least,
            "max_score": "Infinity",
        },
        "score_details": {"score": result.metrics[metric], **({"uncertainty": uncertainty} if uncertainty else {})},
        "generation_config": {
            "additional_details": about | {f"spec.{key}": value for key, value in row.spec.items()},
        },
    }


# ---------------------------------------------------------------- the hub


def benchmarks(texts: list[str]) -> dict[str, tuple[str, str]]:
    """task -> (data set of the hub, task id), from `TASK=OWNER/DATASET:TASK_ID`; raises DuelError for another form."""
    registered = {}
    for text in texts:
        task, equals, place = text.partition("=")
        dataset, colon, task_id = place.partition(":")
        if not (task and equals and colon and task_id and dataset.count("/") == 1 and all(dataset.split("/"))):
            raise DuelError(
                f"--benchmark {text}: write TASK=OWNER/DATASET:TASK_ID, the benchmark data set of the hub and a task "
                "of its eval.yaml, for example wikitext=Salesforce/wikitext:wikitext-2."
            )
        registered[task] = dataset, task_id
    return registered


def eval_results(board: Board, wanted: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """A YAML file for each model and task that `wanted` gives a benchmark: copy `.eval_results` into its repository."""
    import yaml

    tasks = {column.task for column in board.columns}
    for task in wanted:
        if task not in tasks:
            raise DuelError(f"--benchmark {task}: no result has this task; they have {', '.join(sorted(tasks))}.")
    entries: dict[str, list[dict[str, Any]]] = {}
    for row in board.rows:
        for column, result in _results(board, row):
            if column.task in wanted and row.ranked:
                name = f"{HUB}/{_part(row.pretrained)}/.eval_results/{_part(column.task)}.yaml"
                entries.setdefault(name, []).append(_entry(row, column, result, *wanted[column.task]))
    return {name: yaml.safe_dump(entry, sort_keys=False, allow_unicode=True) for name, entry in entries.items()}


def _entry(row: BoardRow, column: TaskColumn, result: Row, dataset: str, task_id: str) -> dict[str, Any]:
    form = form_of(result.metric)
    notes = [f"{WORDS[result.metric]}, lower is better", row.label, row.about, result.stderr_reason]
    if result.stderr is not None:
        notes.append(f"standard error {number(result.stderr, form)}")
    if result.interval is not None:
        low, high = (number(end, form) for end in result.interval)
        notes.append(f"95 % interval over {column.documents or 'its'} documents {low} to {high}")
    notes += [f"fingerprint {row.fingerprint}"] if row.fingerprint else []
    notes.append(f"lm_eval_duel {row.versions.get('lm_eval_duel', 'unknown')}")
    entry: dict[str, Any] = {"dataset": {"id": dataset, "task_id": task_id}, "value": result.value}
    return entry | ({"date": row.date} if row.date else {}) | {"notes": "; ".join(filter(None, notes))}
