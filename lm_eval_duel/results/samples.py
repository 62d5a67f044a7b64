"""Documents and their log-likelihoods, from the harness's samples_*.jsonl and from `score --json`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.core.rates import METRICS
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

    @property
    def tokens(self) -> dict[str, float] | None:
        """The number of tokens of each document, if that of every one is known."""
        known = self.values.get("token_perplexity", {})
        return None if len(known) < len(self.numbers) else {key: units for key, (_, units) in known.items()}


def of_harness(results: Path, task: str, rolling: bool) -> tuple[Documents | None, str]:
    """The samples of a task next to a results file, or None and the reason."""
    date = WRITTEN.search(results.stem)  # --output_path may be a folder, or a file whose name precedes the date
    file = results.parent / f"samples_{task}_{date[0] if date else results.stem.removeprefix('results_')}.jsonl"
    if not os.path.isfile(file):  # False, too, if the task's name is not a valid file name
        return None, f"no samples of {task} next to it (run lm_eval with --log_samples)"
    with reading(file, "samples of lm_eval"):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        return _documents(records, rolling), ""


def of_score(entries: Sequence[Mapping[str, Any]]) -> Documents:
    """The documents of a file of `score --json`. A log_prob of null is minus infinity."""
    counted = {metric: unit for metric, unit in UNITS.items() if any(entry[unit] for entry in entries)}
    records = []
    for n, entry in enumerate(entries):
        nats = -math.inf if entry["log_prob"] is None else entry["log_prob"]
        values = {metric: (nats, entry[unit]) for metric, unit in counted.items()}  # an empty text has none
        records.append({"doc_id": n, "doc_hash": str(entry["sha256"]), **values})
    return _documents(records, rolling=True)


def _documents(records: Sequence[Mapping[str, Any]], rolling: bool) -> Documents:
    """The documents of samples, sorted by key; equal texts are counted in order."""
    first = {int(record["doc_id"]): record for record in reversed(records)}  # one a filter, with equal values
    seen, keyed = Counter[str](), {}
    for n, record in sorted(first.items()):
        digest = _digest(record, rolling)
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
