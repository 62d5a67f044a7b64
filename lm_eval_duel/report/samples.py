"""The harness's samples_*.jsonl: what identifies a document, and its nats."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import MADE, TOKENS

METRICS = ("token_perplexity", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")  # by preference


@dataclasses.dataclass(frozen=True)
class Document:
    """One document of a task: what identifies it, and (nats, units) of each metric (a plain number has one unit)."""

    key: str
    number: int
    values: dict[str, tuple[float, float]]


def documents(file: Path, rolling: bool = True) -> tuple[Document, ...]:
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
        digest = _digest(record, rolling)
        seen[digest] = seen.get(digest, 0) + 1
        found.append(Document(f"{digest}:{seen[digest]}", number, _values(record)))
    return tuple(sorted(found, key=lambda document: document.key))


def _digest(record: dict[str, Any], rolling: bool) -> str:
    """What identifies a document: the harness's hashes of it, of what is scored, and of the prompt before that.

    Our token count is not in it: it differs between tokenizers. Nor is the name of the tokenizer that wrote a row of
    ids: the ids are in it.
    """
    doc, whole = record.get("doc"), record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        apart = {TOKENS, MADE} | ({"tokenizer"} if "ids" in doc else set())
        rest = {key: value for key, value in doc.items() if key not in apart}
        whole = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    scored = [record.get("target_hash"), None if rolling else record.get("prompt_hash")]
    return " ".join(str(part) for part in (whole, *scored) if part)


def _values(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    found = {}
    for metric in METRICS:
        value = record.get(metric)
        if isinstance(value, list) and len(value) == 2:
            found[metric] = (float(value[0]), float(value[1]))
        elif isinstance(value, int | float):
            found[metric] = (float(value), 1.0)
    return found
