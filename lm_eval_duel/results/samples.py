"""Documents and their log-likelihoods: from the harness's samples_*.jsonl, from `score --json`, and from traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import trace
from lm_eval_duel.results.own_files import reading
from lm_eval_duel.tasks.columns import MADE, TOKENS

OTHER_NAMES = ("bits_per_residue", "residue_perplexity")  # of bits_per_byte and byte_perplexity, for proteins
UNITS = {"token_perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names
Values = dict[str, tuple[float, float]]  # document -> (nats, units)


@dataclasses.dataclass
class Documents:
    """The documents of a task by key, which is equal for equal texts. A plain number of nats counts as one unit."""

    numbers: dict[str, int]  # sorted by key
    values: dict[str, Values]  # of each metric


def of_harness(results: Path, task: str, rolling: bool) -> tuple[Documents | None, str]:
    """The samples of a task next to a results file, or None and the reason."""
    date = WRITTEN.search(results.stem)  # --output_path may be a folder, or a file whose name precedes the date
    file = results.parent / f"samples_{task}_{date[0] if date else results.stem.removeprefix('results_')}.jsonl"
    if not os.path.isfile(file):  # False, too, if the task's name is not a valid file name
        return None, f"no samples of {task} next to it (run lm_eval with --log_samples)"
    with reading(file, "samples of lm_eval"):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        first = {int(record["doc_id"]): record for record in reversed(records)}  # one a filter, with equal values
        return _numbered((n, _digest(record, rolling), record) for n, record in sorted(first.items())), ""


def of_score(documents: Iterable[Mapping[str, Any]]) -> Documents:
    """The documents of a file of `score --json`. A log_prob of null is minus infinity."""
    entries, records = list(documents), []
    counted = {unit for unit in UNITS.values() if any(entry[unit] for entry in entries)}  # an empty text has none
    for n, entry in enumerate(entries):
        nats = -math.inf if entry["log_prob"] is None else entry["log_prob"]
        values = {metric: (nats, entry[unit]) for metric, unit in UNITS.items() if unit in counted}
        records.append((n, str(entry["sha256"]), values))
    return _numbered(records)


def _numbered(records: Iterable[tuple[int, str, Mapping[str, Any]]]) -> Documents:
    """Documents from (number, digest of the text, record), sorted by key; equal texts are counted in order."""
    seen, keyed = Counter[str](), {}
    for n, digest, record in records:
        seen[digest] += 1
        keyed[f"{digest}:{seen[digest]}"] = n, record
    result = Documents({}, {})
    for key, (n, record) in sorted(keyed.items()):
        result.numbers[key] = n
        for metric in METRICS:
            if (value := record.get(metric)) is not None:
                nats, units = map(float, value if isinstance(value, list | tuple) else (value, 1.0))
                if math.isnan(nats) or not 0 <= units < math.inf:
                    raise ValueError(f"{metric} of document {n} is {value}")
                result.values.setdefault(metric, {})[key] = nats, units
    return result


def _digest(record: Mapping[str, Any], rolling: bool) -> str:
    """Identifies a document by the harness's hashes of the document, of the scored text and of the prompt before it.

    Our token count is not part of it, since it differs between tokenizers. Neither is the name of the tokenizer that
    wrote a row of ids: the ids are.
    """
    doc, name = record.get("doc"), record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        ignored = {TOKENS, MADE} | ({"tokenizer"} if "ids" in doc else set())
        rest = {key: value for key, value in doc.items() if key not in ignored}
        name = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    parts = name, record.get("target_hash"), None if rolling else record.get("prompt_hash")
    return " ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------- traces


class Traces:
    """The trace files that the command line or results name, each read once."""

    def __init__(self, named: Iterable[str | Path]):
        self.named = [Path(place).resolve() for place in named]
        self.read = functools.cache(trace.read)  # the windows of a file

    def find(self, fingerprint: str | None, written: str | None, results: Path) -> Path | None:
        """The trace of a run: a named one with its spec, else the one that it has `written`, also next to `results`."""
        places = [Path(written), results.parent / Path(written).name] if written else []
        for path in [*self.named, *places]:
            with contextlib.suppress(DuelError, OSError, ValueError):  # ValueError: not a valid file name
                if trace.spec(path).get("fingerprint", "") == fingerprint:
                    return path
        return None

    def values(self, path: Path) -> dict[tuple[str, str], dict[int, float]]:
        """(task, value) -> document -> nats: the sums over windows."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for record in self.read(path):
            for name, nats in (record.get("values") or {}).items():
                documents, document = found.setdefault((str(record["task"]), str(name)), {}), int(record["doc"])
                documents[document] = documents.get(document, 0.0) + float(nats)
        return found
