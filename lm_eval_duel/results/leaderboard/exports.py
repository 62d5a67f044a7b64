"""What others read: Every Eval Ever (schema 0.3.0) and the hub's `.eval_results`, as files by name.

Only measured likelihoods and bounds are exported, never the oracle and never published figures. The hub has one number
for a model and a benchmark, without room for "at most", so it gets no bounds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.leaderboard.board import KINDS, label
from lm_eval_duel.results.report_files import safe_name
from lm_eval_duel.results.stats import DRAWS
from lm_eval_duel.results.table import WORDS, form_of, number

SCHEMA = "0.3.0"
EEE, HUB = "exports/every_eval_ever/data", "exports/eval_results"
Board = Mapping[str, Any]
Row = Mapping[str, Any]


def _part(name: str) -> str:
    """A name as part of a path."""
    return safe_name(name).strip(".") or "unknown"


# ---------------------------------------------------------------- Every Eval Ever


def every_eval_ever(board: Board, organization: str) -> dict[str, str]:
    """A file for each row: the record of https://evalevalai.com, `data/COLLECTION/DEVELOPER/MODEL/UUID.json`."""
    created = f"{time.time():.0f}"
    files = {}
    for row in board["rows"]:
        results = list(_results(board, row))
        if row["kind"] == "oracle" or not results:
            continue
        identity = _uuid(row)
        developer, _, model = row["pretrained"].strip("/").rpartition("/")
        developer = developer.rpartition("/")[2]
        record = {
            "schema_version": SCHEMA,
            "evaluation_id": f"lm_eval_duel-{identity[:8]}/{row['pretrained']}/{created}",
            "evaluation_timestamp": row["date"],
            "retrieved_timestamp": created,
            "source_metadata": {
                "source_name": "lm_eval_duel",
                "source_type": "evaluation_run",
                "source_organization_name": organization,
                "evaluator_relationship": "other",
            },
            "eval_library": {
                "name": "lm_eval",
                "version": row["versions"].get("lm_eval", "unknown"),
                "additional_details": dict(row["versions"]),
            },
            "model_info": _model_info(row, developer),
            "evaluation_results": results,
        }
        name = "/".join(map(_part, ("lm_eval_duel", developer or "unknown", model)))
        files[f"{EEE}/{name}/{identity}.json"] = json.dumps(record, indent=1, allow_nan=False) + "\n"
    return files


def _uuid(row: Row) -> str:
    """A random-looking UUID that is the same for the same results."""
    what = json.dumps([row["files"], row["fingerprint"], row["model"], label(row)])
    return str(uuid.UUID(bytes=hashlib.sha256(what.encode("utf-8", "replace")).digest()[:16], version=4))


def _model_info(row: Row, developer: str) -> dict[str, Any]:
    details = {"deployment_type": "self_deployed", "model_availability": "unknown", "dtype": row["dtype"]}
    if row["parameters"]:
        details["parameters"] = str(row["parameters"])
    info = {"name": row["model"], "id": row["pretrained"], "additional_details": details}
    return info | ({"developer": developer} if developer else {})


def _results(board: Board, row: Row) -> Iterator[dict[str, Any]]:
    """A result for each task and metric with a finite value."""
    for column in board["columns"]:
        cell = row["cells"].get(column["id"])
        if cell is None:
            continue
        yield from _result(row, column, cell, board["metric"], cell["value"], cell["stderr"], cell["interval"])
        if board["metric"] != "bits_per_byte" and cell["bits_per_byte"] is not None:
            bits, error = cell["bits_per_byte"], cell["bits_per_byte_stderr"]
            yield from _result(row, column, cell, "bits_per_byte", bits, error, None)


def _result(
    row: Row, column: Row, cell: Row, metric: str, value: float, error: float | None, interval: list[float] | None
) -> Iterator[dict[str, Any]]:
    if not math.isfinite(value):
        return
    uncertainty: dict[str, Any] = {}
    if error is not None:
        uncertainty["standard_error"] = {"value": error, "method": "of the estimate itself (Monte Carlo or sampled)"}
    if interval is not None and all(map(math.isfinite, interval)):
        method = "bootstrap over documents, percentiles"
        uncertainty["confidence_interval"] = {"lower": interval[0], "upper": interval[1]}
        uncertainty["confidence_interval"] |= {"confidence_level": 0.95, "method": method}
        uncertainty["num_bootstrap_samples"] = DRAWS
        uncertainty |= {"num_samples": column["documents"]} if column["documents"] else {}
    parameters = {k: row[k] for k in ("estimator", "rule", "block", "cache") if row[k]}
    yield {
        "evaluation_result_id": f"{column['task']}/{column['id']}/{metric}/{row['fingerprint'] or 'unknown'}",
        "evaluation_name": column["task"],
        "source_data": _source(row, column),
        "metric_config": {
            "evaluation_description": f"{WORDS[metric]}; {label(row)}: {KINDS[row['kind']]}",
            "metric_id": metric,
            "metric_name": WORDS[metric],
            "metric_kind": "bits_per_byte" if metric == "bits_per_byte" else "perplexity",
            "metric_unit": "bits" if metric == "bits_per_byte" else "perplexity",
            "metric_parameters": {**parameters, "upper_bound": row["kind"] == "bound"},
            "lower_is_better": True,
            "score_type": "continuous",
            "min_score": 0.0 if metric == "bits_per_byte" else 1.0,
            "max_score": "Infinity",
        },
        "score_details": {"score": value, **({"uncertainty": uncertainty} if uncertainty else {})},
        "generation_config": {
            "additional_details": {
                "fingerprint": row["fingerprint"],
                "command": "; ".join(row["commands"]),
                **{f"spec.{key}": value for key, value in row["spec"].items()},
            }
        },
    }


def _source(row: Row, column: Row) -> dict[str, Any]:
    """The data set: of the hub if the task names one, otherwise by the name of its task."""
    dataset = row["datasets"].get(column["task"], {})
    source: dict[str, Any] = {"dataset_name": column["task"]}
    if dataset.get("path", "").count("/") != 1 or dataset["path"].startswith((".", "/")):
        return source | {"source_type": "other"}
    source |= {"source_type": "hf_dataset", "hf_repo": dataset["path"]}
    source |= {"hf_split": dataset["split"]} if "split" in dataset else {}
    return source | ({"samples_number": column["documents"]} if column["documents"] else {})


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

    tasks = {column["task"] for column in board["columns"]}
    for task in wanted:
        if task not in tasks:
            raise DuelError(f"--benchmark {task}: no result has this task; they have {', '.join(sorted(tasks))}.")
    entries: dict[str, list[dict[str, Any]]] = {}
    for row in board["rows"]:
        for column in board["columns"]:
            cell = row["cells"].get(column["id"])
            if column["task"] in wanted and cell and row["ranked"] and math.isfinite(cell["value"]):
                name = f"{HUB}/{_part(row['pretrained'])}/.eval_results/{_part(column['task'])}.yaml"
                entries.setdefault(name, []).append(_entry(board, row, column, cell, *wanted[column["task"]]))
    return {name: yaml.safe_dump(entry, sort_keys=False, allow_unicode=True) for name, entry in entries.items()}


def _entry(board: Board, row: Row, column: Row, cell: Row, dataset: str, task_id: str) -> dict[str, Any]:
    notes = [f"{WORDS[board['metric']]}, lower is better", label(row), KINDS[row["kind"]]]
    if cell["stderr"] is not None:
        notes.append(f"standard error {number(cell['stderr'], form_of(board['metric']))}")
    elif cell["stderr_reason"]:
        notes.append(cell["stderr_reason"])
    if cell["interval"] is not None:
        low, high = (number(end, form_of(board["metric"])) for end in cell["interval"])
        notes.append(f"95 % interval over {column['documents'] or 'its'} documents {low} to {high}")
    notes += [f"fingerprint {row['fingerprint']}"] if row["fingerprint"] else []
    notes.append(f"lm_eval_duel {row['versions'].get('lm_eval_duel', 'unknown')}")
    entry: dict[str, Any] = {"dataset": {"id": dataset, "task_id": task_id}, "value": cell["value"]}
    return entry | ({"date": row["date"]} if row["date"] else {}) | {"notes": "; ".join(notes)}
