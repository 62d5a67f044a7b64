"""The harness's results_*.json and samples_*.jsonl as plain dataclasses; nothing is compared or computed here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import BUNDLED, TOKENS

MODEL = "duel-mdm"
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names
METRICS = ("token_perplexity", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")  # by preference


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a task: what identifies it, and (nats, units) of each metric (a plain number has one unit)."""

    key: str
    number: int
    values: dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's part of a results file. `documents` is None where samples were not logged; then `missing` says so."""

    name: str
    metrics: dict[str, float]
    identity: dict[str, str]  # effective samples, limit, version, shots, hash
    rolling: bool
    documents: tuple[Document, ...] | None = None
    missing: str = ""

    @property
    def size(self) -> int | None:
        """Documents that were scored."""
        known = self.identity.get("documents")
        return int(known) if known else (None if self.documents is None else len(self.documents))


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file. `law` and `duel` are empty for a stock model of the harness."""

    file: Path
    ours: bool
    pretrained: str
    label: str  # how tables name the model
    key: str  # equal for the same model: weights, else what was loaded
    dtype: str
    fingerprint: str | None
    law: dict[str, str]
    duel: dict[str, Any]
    max_length: int | None
    date: float
    whole_run_seconds: float | None
    tasks: dict[str, Task]

    @property
    def name(self) -> str:
        """The file as messages name it."""
        return str(self.file)

    @property
    def estimator(self) -> str:
        """What the harness's own values of this run are; a stock model is autoregressive."""
        return str(self.duel.get("estimator") or self.law.get("estimator") or "duel") if self.ours else "exact"

    @property
    def rule(self) -> str | None:
        """The rule of a `duel` run."""
        if self.estimator != "duel":
            return None
        return _said(self.duel.get("rule") or self.law.get("rule"))

    @property
    def block(self) -> str:
        """The block as text: a number, or `none` (the whole target)."""
        return (_said(self.duel.get("block")) or _said(self.law.get("block")) or "none") if self.ours else "none"


def _said(value: Any) -> str | None:
    return None if value is None or str(value).lower() in ("none", "") else str(value)


def runs(places: Iterable[str | Path]) -> list[Run]:
    """The runs of result files, and of all below folders; each file once, oldest first."""
    files: dict[Path, None] = {}
    for place in map(Path, places):
        if place.is_dir():
            found = sorted(place.rglob("results_*.json"))
            if not found:
                raise DuelError(
                    f"No results_*.json in {place} or below; lm_eval writes them to the folder of --output_path."
                )
            files |= dict.fromkeys(path.resolve() for path in found)
        elif place.is_file():
            files[place.resolve()] = None
        else:
            raise DuelError(
                f"No file or folder {place}; name results_*.json files of lm_eval, or folders that hold them."
            )
    return _distinct(sorted(map(run, files), key=lambda found: (found.date, found.name)))


def run(file: Path) -> Run:
    """One results file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        config, results = found["config"], found["results"]
        model, arguments = config["model"], config.get("model_args") or {}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DuelError(
            f"{file} is not a results file of lm_eval ({type(error).__name__}: {error}); name the results_*.json "
            "that --output_path wrote."
        ) from None
    if not isinstance(arguments, dict):  # the Python API keeps the text
        arguments = dict(part.split("=", 1) for part in str(arguments).split(",") if "=" in part)
    ours, law, duel = model == MODEL, config.get("law") or {}, config.get("duel") or {}
    pretrained = str(arguments.get("pretrained") or (BUNDLED if ours else found.get("model_name") or model))
    dtype = _said(duel.get("dtype")) or _said(law.get("dtype")) or _said(config.get("model_dtype")) or "unknown"
    length = law.get("max_length") or found.get("max_length")
    seconds = found.get("total_evaluation_time_seconds")
    return Run(
        file=file,
        ours=ours,
        pretrained=pretrained,
        label=_last(pretrained),
        key=str((duel.get("weights") or law.get("weights")) if ours else pretrained),
        dtype=dtype.removeprefix("torch."),
        fingerprint=config.get("fingerprint"),
        law={key: "none" if value in (None, "None") else str(value) for key, value in law.items()},
        duel=duel,
        max_length=int(length) if str(length).isdigit() else None,
        date=float(found.get("date") or 0),
        whole_run_seconds=None if seconds is None else float(seconds),
        tasks={name: _task(file, found, name, values) for name, values in results.items() if _scores(values)},
    )


def _last(pretrained: str) -> str:
    return pretrained.rstrip("/").split("/")[-1] or pretrained


def _distinct(found: list[Run]) -> list[Run]:
    """The same runs; where two models would have one label, with what sets them apart beside it."""
    keys: dict[str, dict[str, str]] = {}
    for one in found:
        keys.setdefault(one.label, {}).setdefault(one.key, one.pretrained)
    labels = {}
    for label, models in keys.items():
        apart = {key: "/".join(Path(name).parts[-2:]) for key, name in models.items()}
        if len(set(apart.values())) < len(models):
            apart = {key: f"{label} ({key[:8]})" for key in models}
        labels |= {(label, key): label if len(models) == 1 else apart[key] for key in models}
    return [dataclasses.replace(one, label=labels[one.label, one.key]) for one in found]


def _scores(values: Any) -> bool:
    return isinstance(values, dict) and any(key.split(",")[0] in METRICS for key in values)


def _task(file: Path, found: dict[str, Any], name: str, values: dict[str, Any]) -> Task:
    metrics: dict[str, float] = {}
    for key, value in values.items():
        metric = key.split(",")[0]
        if metric in METRICS and isinstance(value, int | float):
            metrics.setdefault(metric, float(value))
    config, counted = found.get("config", {}), found.get("n-samples", {}).get(name, {})
    identity = {
        "documents": counted.get("effective"),
        "limit": config.get("limit"),
        "version": found.get("versions", {}).get(name),
        "shots": found.get("n-shot", {}).get(name),
        "hash": found.get("task_hashes", {}).get(name),
    }
    said = {key: str(value) for key, value in identity.items() if value is not None}
    rolling = found.get("configs", {}).get(name, {}).get("output_type", "loglikelihood_rolling")
    when = WRITTEN.search(file.stem)  # --output_path may be a folder, or a file whose name stands before the date
    samples = file.with_name(f"samples_{name}_{when[0] if when else file.stem.removeprefix('results_')}.jsonl")
    task = Task(name, metrics, said, rolling == "loglikelihood_rolling")
    if not samples.is_file():
        return dataclasses.replace(task, missing=f"no samples of {name} beside it (run lm_eval with --log_samples)")
    return dataclasses.replace(task, documents=_documents(samples))


def _documents(file: Path) -> tuple[Document, ...]:
    """The documents of a samples file, sorted; equal texts are told apart by their order."""
    first: dict[int, dict[str, Any]] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                first.setdefault(int(record["doc_id"]), record)  # one line a filter: the values are the same
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise DuelError(
                    f"{file}, line {number} is not a sample of lm_eval ({error}); log them again."
                ) from None
    seen: dict[str, int] = {}
    found = []
    for number, record in sorted(first.items()):
        digest = _digest(record)
        seen[digest] = seen.get(digest, 0) + 1
        found.append(Document(f"{digest}:{seen[digest]}", number, _values(record)))
    return tuple(sorted(found, key=lambda document: document.key))


def _digest(record: dict[str, Any]) -> str:
    """What identifies a document: the harness's hash, but not of our token count, which differs between tokenizers."""
    doc = record.get("doc")
    if isinstance(doc, dict) and TOKENS in doc:
        rest = {key: value for key, value in doc.items() if key != TOKENS}
        return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    return str(record.get("doc_hash") or record["doc_id"])


def _values(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    found = {}
    for metric in METRICS:
        value = record.get(metric)
        if isinstance(value, list) and len(value) == 2:
            found[metric] = (float(value[0]), float(value[1]))
        elif isinstance(value, int | float):
            found[metric] = (float(value), 1.0)
    return found
