"""The harness's samples_*.jsonl: the documents and their log-likelihoods."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.fields import parse
from lm_eval_duel.tasks.columns import MADE, TOKENS

METRICS = ("token_perplexity", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")  # by preference
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
    """The documents of a samples file, sorted by key; equal texts are numbered in order."""
    first: dict[int, dict[str, Any]] = {}
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    record = _record(f"{file}, line {number}", line)
                    first.setdefault(record["doc_id"], record)  # one line per filter, with equal values
    except (OSError, UnicodeDecodeError) as error:
        raise DuelError(f"{file} cannot be read ({type(error).__name__}: {error}); log the samples again.") from None
    seen: dict[str, int] = {}
    result = []
    for number, record in sorted(first.items()):
        digest = _digest(record, rolling)
        seen[digest] = seen.get(digest, 0) + 1
        result.append(Document(f"{digest}:{seen[digest]}", number, record["values"]))
    return tuple(sorted(result, key=lambda document: document.key))


def _record(place: str, line: str) -> dict[str, Any]:
    """A checked line with the `values` of its metrics. `place`: file and line, for messages."""
    try:
        record = parse(line)
        record = {**record, "doc_id": int(record["doc_id"])}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DuelError(f"{place} is not a sample of lm_eval ({error}); log them again.") from None
    return {**record, "values": _values(place, record)}


def _digest(record: dict[str, Any], rolling: bool) -> str:
    """Identifies a document by the harness's hashes of the document, of the scored text and of the prompt before it.

    Our token count is not part of it, since it differs between tokenizers. Neither is the name of the tokenizer that
    wrote a row of ids: the ids are.
    """
    doc, whole = record.get("doc"), record.get("doc_hash") or record["doc_id"]
    if isinstance(doc, dict) and TOKENS in doc:
        apart = {TOKENS, MADE} | ({"tokenizer"} if "ids" in doc else set())
        rest = {key: value for key, value in doc.items() if key not in apart}
        whole = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    scored = [_target_hash(record), None if rolling else record.get("prompt_hash")]
    return " ".join(str(part) for part in (whole, *scored) if part)


def _target_hash(record: dict[str, Any]) -> Any:
    """The harness's hash of the scored text. lm-eval 0.5 logs 0 as the target of a text; its last argument is the text.

    Multiple choice logs the number of the right option in every release.
    """
    logged, arguments = record.get("target_hash"), record.get("arguments")
    if logged == TARGET_ZERO and isinstance(arguments, dict) and len(arguments) == 1:
        (request,) = arguments.values()
        text = list(request.values())[-1] if isinstance(request, dict) and request else None
        return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else logged
    return logged


def _values(place: str, record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(nats, units) of each metric; raises DuelError for anything but numbers, and for negative or infinite units."""
    values = {}
    for metric in METRICS:
        value = record.get(metric)
        pair = value if isinstance(value, list) else [value, 1.0]
        if value is None:
            continue
        numeric = len(pair) == 2 and all(isinstance(part, int | float) and not isinstance(part, bool) for part in pair)
        try:
            nats, units = map(float, pair if numeric else (math.nan, math.nan))
        except OverflowError:
            nats = math.nan
        if math.isnan(nats) or not 0 <= units < math.inf:
            shown = json.dumps(value)[:60]
            raise DuelError(f"{place}: {metric} is {shown}, not nats and a number of units; log the samples again.")
        values[metric] = (nats, units)
    return values
