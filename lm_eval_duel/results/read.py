"""Results files of the harness and of `score --json`, and their samples, read as the records of `runs`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.console.command_line import NAN, REASONS
from lm_eval_duel.core.scores import METRICS, perplexity
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.results import schema, stats
from lm_eval_duel.results.runs import (
    MODEL,
    ROLLING,
    SCHEMA,
    Config,
    Documents,
    Header,
    Json,
    Run,
    Task,
    average_name,
    model_label,
    name_of_files,
    parts_of_average,
    pretrained_of,
    sums,
)
from lm_eval_duel.results.table import Note
from lm_eval_duel.tasks.data import TOKENS

SCORE = "lm_eval_duel score"  # the format of a file of `score --json`
SCORE_VERSION = 1
RESULTS = "a results file of lm_eval or of score --json"
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names
AGAIN = "Run the task again, or leave the file out."
SAME = 1e-6  # relative difference up to which two values are one
OTHER_NAMES = ("bits_per_residue", "residue_perplexity")  # of bits_per_byte and byte_perplexity, for proteins
UNITS = {"token_perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}


# ---------------------------------------------------------------- files


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs in result files and below folders; each file once, oldest first, with labels that distinguish models.

    Files of `score` have no date. They come first, as they are named, so that one which is named last changes no name
    of a table.
    """
    every_run: list[Run] = []
    for file in files(places):
        every_run += from_file(file)
    return distinguish(sorted(every_run, key=lambda run: run.header.date))


def files(places: Iterable[str | Path]) -> list[Path]:
    """The result files among files and below folders, each once; raises DuelError for a place without any.

    The harness writes results_DATE.json, or NAME_DATE.json for --output_path NAME.json. Files of `score --json`, whose
    names the user chose, are known by their first lines.
    """
    paths: list[Path] = []
    for place in map(Path, places):
        if place.is_file():
            paths.append(place)
            continue
        inside = []
        for file in sorted(place.rglob("*.json")):
            if _is_named_as_results(file) or _has_scores(file):
                inside.append(file)
        if not inside:
            missing = f"No file or folder {place}"
            if place.is_dir():
                missing = f"No results_*.json (or *_DATE.json) and no file of score --json in {place} or below"
            raise DuelError(
                f"{missing}; name results_*.json files of lm_eval, folders that hold them, or files of score --json."
            )
        paths += inside
    each_once: dict[Path, Path] = {}
    for path in paths:  # named as the user does: a report then tells no more of the user's folders than the command
        each_once.setdefault(path.resolve(), path)
    return list(each_once.values())


def _is_named_as_results(file: Path) -> bool:
    return file.name.startswith("results_") or WRITTEN.search(file.stem) is not None


def _has_scores(file: Path) -> bool:
    with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as content:
        return f'"format": "{SCORE}"' in content.read(100)
    return False  # a folder, or a file that may not be read


def from_file(file: Path) -> list[Run]:
    """The run of a results file; a file of `score --compare` has one for each model.

    Raises DuelError for any other file, for entries that lm_eval does not write, and for values that are NaN or
    contradict each other.
    """
    with reading(file, RESULTS):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("format") != SCORE:
            return [run_of(file, content)]
        if content["version"] != SCORE_VERSION:
            raise ValueError(f"its version is {content['version']}, and this release reads {SCORE_VERSION}")
        models = [read_of_score(file, content)]
        for n, model in enumerate(content.get("compared", []), 2):
            models.append(read_of_score(Path(f"{file}#{n}"), model))
        return models


@contextlib.contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Raise a DuelError that names the file if an entry of it is missing or of another type."""
    try:
        yield
    except DuelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DuelError(
            f"{file} is not {what}, or is not whole ({type(error).__name__}: {str(error)[:120]}). Write it again, or "
            "leave it out."
        ) from None


def distinguish(runs: Sequence[Run]) -> list[Run]:
    """The runs, where different models of one label have longer ones: with the folder, else the weights' digest."""
    models: dict[str, dict[str, Run]] = {}  # of each label, a run of each model
    for run in runs:
        models.setdefault(run.label, {}).setdefault(run.key, run)

    labels: dict[str, str] = {}  # by the key of a model
    for label, of_label in models.items():
        if len(of_label) > 1:
            labels |= _longer_labels(label, of_label)

    named = []
    for run in runs:
        named.append(dataclasses.replace(run, label=labels.get(run.key, run.label)))
    return named


def _longer_labels(label: str, models: Mapping[str, Run]) -> dict[str, str]:
    """Different labels of models that share one, by the key of each."""
    with_folder = {}
    for key, run in models.items():
        with_folder[key] = "/".join(Path(run.pretrained).parts[-2:])
    if len(set(with_folder.values())) == len(models):
        return with_folder
    return {key: f"{label} ({key[:8]})" for key in models}  # folders of one name, too


# ---------------------------------------------------------------- a run


def run_of(file: Path, content: Json, documents: Documents | None = None) -> Run:
    """The run of a results file's content. `documents`: of its tasks, instead of samples next to the file."""
    _check_schema(file, content["config"].get("duel") or {})
    config = Config(**schema.typed(content["config"], schema.CONFIG))
    header = Header(**schema.typed(content, schema.HEADER))
    if config.estimator not in ESTIMATORS:
        raise DuelError(f"{file}: {unknown('estimator', config.estimator, ESTIMATORS)}")

    groups = set(content.get("groups") or {})
    for name, parts in (content.get("group_subtasks") or {}).items():
        if parts:  # lm-eval lists a task that is no group with no parts
            groups.add(name)

    tasks = []
    for name in content["results"]:
        if name not in groups:
            tasks.append(_task(file, content, config, name, documents))
    # those with a perplexity first, as the file has them, then the others by name
    tasks.sort(key=lambda task: "" if task.metrics else task.name)

    run = Run(
        file=file,
        content=content,
        config=config,
        header=header,
        every_task={task.name: task for task in tasks},
        groups=sorted(groups & content["results"].keys()),
        label=model_label(pretrained_of(config, header)),
    )
    _check(run)
    return run


def _check_schema(file: Path, duel: Json) -> None:
    """Raise DuelError for `config.duel` of another schema. Results of other models have none."""
    if duel and duel.get("schema") != SCHEMA:
        raise DuelError(
            f"{file} has results of schema {duel.get('schema', 'unknown')}, and this release reads {SCHEMA}. Run the "
            "task again, or read the file with the release that wrote it (config.duel.versions)."
        )


def _task(file: Path, content: Json, config: Config, name: str, documents: Documents | None) -> Task:
    """A task of a results file's content."""
    counts = content.get("n-samples", {}).get(name, {})
    available = counts.get("original")
    output_type = str(content.get("configs", {}).get(name, {}).get("output_type") or ROLLING)
    entries = content["results"][name]
    metrics = _perplexities(name, entries, content.get("nulls", {}))
    missing = Note()
    if documents is None and metrics:  # the samples of averages are read if they are compared: `document_scores`
        records = samples(file, name)
        if records is None:
            missing = Note(f"no samples of {name}", "run lm_eval with --log_samples")
        else:
            documents = _documents(records, output_type == ROLLING)
    return Task(
        name=name,
        output_type=output_type,
        identity=_identity(name, content),
        entry=config.duel["tasks"].get(name, {}),
        available=None if available is None else schema.count(available),
        metrics=metrics,
        scores=_averages(entries),
        documents=documents,
        missing=missing,
    )


def _identity(name: str, content: Json) -> dict[str, str]:
    """The entries of a file that say which documents a task has."""
    written = {
        "documents": content.get("n-samples", {}).get(name, {}).get("effective"),
        "limit": content["config"].get("limit"),
        "version": content.get("versions", {}).get(name),
        "shots": content.get("n-shot", {}).get(name),
        "hash": content.get("task_hashes", {}).get(name),
    }
    identity = {}
    for key, value in written.items():
        if value is not None:
            identity[key] = str(value)
    return identity


def _perplexities(name: str, entries: Json, nulls: Json) -> dict[str, float]:
    """The perplexities of a task. `nulls`: why an entry of the file is null, by its path.

    An entry is called METRIC,FILTER.
    """
    metrics: dict[str, float] = {}
    for entry, value in entries.items():
        metric, _, _ = entry.partition(",")
        if metric not in METRICS:
            continue
        if value is None:
            why = nulls.get(f"results.{name}.{entry}")
            if why == NAN:
                continue  # the texts have no such unit
            if why != REASONS[math.inf]:
                raise ValueError(f"{entry} of {name} is null")
            value = math.inf
        value = float(value)
        if math.isnan(value):
            raise ValueError(f"{entry} of {name} is NaN")
        metrics.setdefault(metric, value)  # that of the first filter
    return metrics


def _averages(entries: Json) -> dict[str, tuple[float, float | None]]:
    """The averages of a task other than perplexities, with their standard errors."""
    averages = {}
    for entry, value in entries.items():
        metric, comma, filtered = entry.partition(",")
        is_average = comma and not metric.endswith("_stderr") and type(value) in (int, float)
        if not is_average or metric in (*METRICS, *OTHER_NAMES) or math.isnan(value):
            continue
        error = entries.get(f"{metric}_stderr,{filtered}")
        is_unknown = error == "N/A" or error != error  # NaN, for the mean of one document
        averages[average_name(metric, filtered)] = float(value), None if is_unknown else schema.number(error)
    return averages


def _check(run: Run) -> None:
    """Raise an error if log_prob, tokens and perplexity of a task do not agree, or give no probability."""
    for key in ("elbo_eps", "mc_samples", "noise_seed"):
        if run.spec.get(key, "none") != "none":
            schema.number(run.spec[key])  # raises ValueError for what is not a number
    if run.config.ours and "version" not in run.spec:
        raise ValueError("its spec has no version")
    for task in run.tasks.values():
        _check_task(run, task)


def _check_task(run: Run, task: Task) -> None:
    """Raise an error if entries of a task disagree. A partial run's log-likelihoods are of other documents."""
    values = {} if task.partial else task.entry.get("values", {})
    log_probs = {}
    for key, value in values.items():
        if value["log_prob"] is not None:
            log_probs[key] = value["log_prob"]

    log_prob = log_probs.get(run.config.estimator)
    printed = task.metrics.get("token_perplexity")
    tokens = task.entry.get("tokens")
    if tokens and log_prob is not None and printed is not None:
        implied = perplexity(-log_prob / tokens)
        if not math.isclose(printed, implied, rel_tol=SAME):
            raise DuelError(
                f"{run.name} contradicts itself: token_perplexity of {task.name} is {printed:.10g}, but its log_prob "
                f"and tokens make it {implied:.10g}. {AGAIN}"
            )

    # A perplexity, an exp, is never 0, even if an estimate is above probability 1. Bits are 0 at probability 1.
    for metric, value in task.metrics.items():
        if value < 0 or (value == 0 and metric != "bits_per_byte"):
            raise _impossible(run, metric, task)
    for key, nats in log_probs.items():
        if nats > 0:
            raise _impossible(run, f"log_prob of {key}", task)


def _impossible(run: Run, what: str, task: Task) -> DuelError:
    return DuelError(f"{run.name}: {what} of {task.name} is impossible: a probability is at most 1. {AGAIN}")


# ---------------------------------------------------------------- of `score`


def read_of_score(file: Path, content: Json) -> Run:
    """A model of a file of `score --json`, as lm_eval would have written it. Its task is called `score`.

    `scored` of its content names the file that was scored.
    """
    documents = samples_of_score(content["documents"])
    results = {}
    for metric, of_documents in documents.values.items():
        results[metric] = stats.value(metric, *sums(of_documents))
    config = {
        "model": MODEL,
        "fingerprint": content["fingerprint"],
        "spec": content["spec"],
        "duel": {**content["duel"], "pretrained": content["pretrained"]},
    }
    as_of_lm_eval = {
        "format": SCORE,
        "scored": name_of_files(str(entry["document"]) for entry in content["documents"]),
        "config": config,
        "results": {"score": results},
        "n-samples": {"score": {"effective": len(documents.numbers), "original": content.get("available_documents")}},
    }
    return run_of(file, as_of_lm_eval, documents)


# ---------------------------------------------------------------- samples


def samples(results: Path, task: str) -> list[dict[str, Any]] | None:
    """The samples of a task next to a results file; None if there are none."""
    if not has_samples(results, task):
        return None
    file = _samples_file(results, task)
    with reading(file, "samples of lm_eval"):
        lines = file.read_text(encoding="utf-8").split("\n")
        return list(map(json.loads, filter(str.strip, lines)))


def has_samples(results: Path, task: str) -> bool:
    """True if the samples of a task are next to a results file."""
    return os.path.isfile(_samples_file(results, task))  # False, too, if the task's name is not a valid file name


def _samples_file(results: Path, task: str) -> Path:
    date = WRITTEN.search(results.stem)  # --output_path may be a folder, or a file whose name precedes the date
    stamp = date[0] if date else results.stem.removeprefix("results_")
    return results.parent / f"samples_{task}_{stamp}.jsonl"


def samples_of_score(entries: Sequence[Mapping[str, Any]]) -> Documents:
    """The documents of a file of `score --json`. A log_prob of null is minus infinity."""
    counted_units = set()
    for entry in entries:
        for unit in UNITS.values():
            if entry[unit]:
                counted_units.add(unit)

    records = []
    for n, entry in enumerate(entries):
        nats = -math.inf if entry["log_prob"] is None else entry["log_prob"]
        record: dict[str, Any] = {"doc_id": n, "doc_hash": str(entry["sha256"]), "prompt_hash": str(entry["sha256"])}
        for metric, unit in UNITS.items():
            if unit in counted_units:  # texts without a single word have no perplexity per word
                record[metric] = nats, entry[unit]
        records.append(record)
    return _documents(records, rolling=True)


def _keyed(records: Sequence[Mapping[str, Any]], rolling: bool) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """The number and the first record of each document, sorted by key; equal texts are counted in order."""
    first: dict[int, Mapping[str, Any]] = {}
    for record in records:  # lm-eval writes a document once for each filter
        first.setdefault(int(record["doc_id"]), record)

    # A key is DIGEST:1, and DIGEST:2 for the second copy of a text, so that two runs have their copies in pairs.
    seen = Counter[str]()
    keyed = {}
    for n, record in sorted(first.items()):
        digest = _digest(record, rolling)
        seen[digest] += 1
        keyed[f"{digest}:{seen[digest]}"] = n, record
    return dict(sorted(keyed.items()))


def document_scores(run: Run, name: str) -> dict[str, dict[str, float]]:
    """The score of each document of a task, by the average that is their mean; other averages are left out.

    Raises DuelError if the samples are not whole.
    """
    with reading(run.file, RESULTS):
        return _document_scores(samples(run.file, name) or [], run.every_task[name])


def _document_scores(records: Iterable[Mapping[str, Any]], task: Task) -> dict[str, dict[str, float]]:
    of_filters: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        of_filters.setdefault(record.get("filter", "none"), []).append(record)
    keyed = {filtered: _keyed(of_filter, task.rolling) for filtered, of_filter in of_filters.items()}

    document_scores = {}
    for average, (value, _) in task.scores.items():
        metric, filtered = parts_of_average(average)
        scores = {}
        for key, (_, record) in keyed.get(filtered, {}).items():
            if type(record.get(metric)) in (bool, int, float):
                scores[key] = float(record[metric])
        if scores and math.isclose(math.fsum(scores.values()) / len(scores), value, abs_tol=1e-9):
            document_scores[average] = scores
    return document_scores


def _documents(records: Sequence[Mapping[str, Any]], rolling: bool) -> Documents:
    """The documents of samples, sorted by key. Their values are equal for all filters."""
    documents = Documents({}, {})
    for key, (n, record) in _keyed(records, rolling).items():
        documents.numbers[key] = n
        if rolling and record.get("prompt_hash"):
            documents.texts[n] = str(record["prompt_hash"])[: stats.KEY]
        for metric in METRICS:
            if record.get(metric) is not None:
                documents.values.setdefault(metric, {})[key] = _nats_and_units(record[metric], metric, n)
    return documents


def _nats_and_units(value: Any, metric: str, n: int) -> tuple[float, float]:
    """The value of a document in a metric. A plain number of nats counts as one unit."""
    nats, units = value if isinstance(value, list | tuple) else (value, 1.0)
    nats = float(nats)
    units = float(units)
    if math.isnan(nats) or not 0 <= units < math.inf:
        raise ValueError(f"{metric} of document {n} is {value}")
    return nats, units


def _digest(record: Mapping[str, Any], rolling: bool) -> str:
    """Identifies a document by the harness's hashes of the document, of the scored text and of the prompt before it.

    Our token count is not part of it, since it differs between tokenizers. Neither is the name of the tokenizer that
    wrote a row of ids: the ids are.
    """
    doc = record.get("doc")
    name = record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        ignored = {TOKENS, "tokenizer"} if "ids" in doc else {TOKENS}
        identifying = {key: value for key, value in doc.items() if key not in ignored}
        text = json.dumps(identifying, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()
    parts = [name, record.get("target_hash")]
    if not rolling:
        parts.append(record.get("prompt_hash"))
    return " ".join(map(str, filter(None, parts)))
