"""`score --json` files, read as results of one task, `score`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lm_eval_duel.results.fields import Fields
from lm_eval_duel.results.samples import Document

FORMAT, TASK = "lm_eval_duel score", "score"
UNITS = {"token_perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}


def is_score(content: Any) -> bool:
    """Whether the JSON of a file is that of `score --json`."""
    return isinstance(content, Mapping) and content.get("format") == FORMAT


def as_results(content: Fields) -> tuple[dict[str, Any], tuple[Document, ...]]:
    """The content as lm_eval writes results, and the documents; raises DuelError for an entry of another type."""
    documents, seen, totals = [], dict[str, int](), dict.fromkeys(("tokens", "words", "bytes"), 0)
    log_prob = 0.0
    for number, entry in enumerate(content.list("documents")):
        line = Fields(entry, content.file, f"documents.{number}")
        nats = line.number("log_prob")
        nats = -math.inf if nats is None else nats
        key = line.text("sha256") or ""
        seen[key] = seen.get(key, 0) + 1
        counts = {unit: line.count(unit) or 0 for unit in totals}
        values = {metric: (nats, float(counts[unit])) for metric, unit in UNITS.items() if counts[unit]}
        documents.append(Document(f"{key}:{seen[key]}", number, values))
        log_prob += nats
        totals = {unit: total + counts[unit] for unit, total in totals.items()}
    rates = {metric: -log_prob / totals[unit] for metric, unit in UNITS.items() if totals[unit]}
    metrics = {
        f"{metric},none": rate / math.log(2) if metric == "bits_per_byte" else math.exp(min(rate, 700.0))
        for metric, rate in rates.items()
    }
    count = len(documents)
    config = {"model": "duel-mdm", "model_args": {"pretrained": content.text("pretrained")}}
    config |= {key: content.get(key) for key in ("fingerprint", "spec", "duel")}
    results = {
        "results": {TASK: metrics},
        "config": config,
        "configs": {TASK: {"task": TASK, "output_type": "loglikelihood_rolling"}},
        "n-samples": {TASK: {"original": count, "effective": count}},
    }
    return results, tuple(sorted(documents, key=lambda document: document.key))
