"""The harness's samples_*.jsonl: the documents and their log-likelihoods."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.results.own_files import whole
from lm_eval_duel.tasks.columns import MADE, TOKENS

OTHER_NAMES = ("bits_per_residue", "residue_perplexity")  # of bits_per_byte and byte_perplexity, for proteins
TARGET_ZERO = hashlib.sha256(b"0").hexdigest()
WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT[\d.:-]+$")  # the date at the end of the harness's file names


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a task: its key, and (nats, units) of each metric (a plain number counts as one unit)."""

    key: str
    number: int
    values: dict[str, tuple[float, float]]


def documents(file: Path, rolling: bool = True) -> tuple[Document, ...]:
    """The documents of a samples file, sorted by key."""
    first: dict[int, dict[str, Any]] = {}
    with whole(file, "samples of lm_eval"):
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                record = json.loads(line)
                first.setdefault(int(record["doc_id"]), record)  # one line per filter, with equal values
        return numbered((n, _digest(record, rolling), _values(record)) for n, record in sorted(first.items()))


def numbered(documents: Iterable[tuple[int, str, dict[str, tuple[float, float]]]]) -> tuple[Document, ...]:
    """Documents from (number, digest of the text, values), sorted by key; equal texts are counted in order."""
    seen = Counter[str]()
    result = []
    for number, digest, values in documents:
        seen[digest] += 1
        result.append(Document(f"{digest}:{seen[digest]}", number, values))
    return tuple(sorted(result, key=lambda document: document.key))


def _digest(record: dict[str, Any], rolling: bool) -> str:
    """Identifies a document by the harness's hashes of the document, of the scored text and of the prompt before it.

    Our token count is not part of it, since it differs between tokenizers. Neither is the name of the tokenizer that
    wrote a row of ids: the ids are. lm-eval 0.5 logs 0 as the target of a text, whose last argument is the text.
    """
    doc, name = record.get("doc"), record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        apart = {TOKENS, MADE} | ({"tokenizer"} if "ids" in doc else set())
        rest = {key: value for key, value in doc.items() if key not in apart}
        name = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    target, requests = record.get("target_hash"), list((record.get("arguments") or {}).values())
    if target == TARGET_ZERO and len(requests) == 1:  # of lm-eval 0.5; of several requests it is the right option
        text = list(requests[0].values())[-1]
        target = hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else target
    return " ".join(str(part) for part in (name, target, None if rolling else record.get("prompt_hash")) if part)


def _values(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(nats, units) of each metric."""
    values = {}
    for metric in METRICS:
        if (value := record.get(metric)) is not None:
            nats, units = map(float, value if isinstance(value, list) else (value, 1.0))
            if math.isnan(nats) or not 0 <= units < math.inf:
                raise ValueError(f"{metric} of document {record['doc_id']} is {value}")
            values[metric] = (nats, units)
    return values
