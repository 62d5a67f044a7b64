"""Functions that the task YAMLs name: data sets with their token counts, and metrics.

Word, byte and token perplexity of a text with log-likelihood ll (nats): exp(-ll / words), exp(-ll / bytes),
exp(-ll / tokens), each summed over documents before dividing. Tokens are those of the model's own tokenizer.
"""

from __future__ import annotations

import json
import lzma
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lm_eval_duel.demo import FOLDER, resolve
from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

TEXT = FOLDER / "text"


def sotu(**metadata: Any) -> dict[str, datasets.Dataset]:
    """36 whole-sentence passages of the State of the Union addresses of 2001-2021."""
    return _documents("sotu.jsonl", metadata)


def sotu_full(**metadata: Any) -> dict[str, datasets.Dataset]:
    """All State of the Union addresses of 2001-2021."""
    return _documents("sotu_full.jsonl.xz", metadata)


def sotu_choice(**metadata: Any) -> dict[str, datasets.Dataset]:
    """40 questions: which of four sentences continues the passage."""
    return {"test": _dataset(_read("sotu_choice.jsonl"))}


def perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(nats, units) of one document for each metric of a loglikelihood_rolling task."""
    (nats,) = results
    words, size = len(re.split(r"\s+", doc["text"])), len(doc["text"].encode("utf-8"))
    return {
        "word_perplexity": (nats, words),
        "byte_perplexity": (nats, size),
        "bits_per_byte": (nats, size),
        "token_perplexity": (nats, doc["n_tokens"]),
    }


def _documents(name: str, metadata: dict[str, Any]) -> dict[str, datasets.Dataset]:
    tokenizer = _tokenizer(
        str(metadata.get("tokenizer") or metadata.get("pretrained") or metadata.get("model") or "demo-mdm"),
        str(metadata.get("trust_remote_code", False)).lower() == "true",
        str(metadata.get("revision") or "main"),
    )
    records = _read(name)
    for record in records:
        record["n_tokens"] = len(tokenizer(record["text"], add_special_tokens=False, verbose=False)["input_ids"])
    return {"test": _dataset(records)}


@lru_cache
def _tokenizer(name: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, by the same rule as the harness's RULER tasks: tokenizer, pretrained, model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        raise DuelError(
            f"Token perplexity needs the model's tokenizer, and '{name}' has none to load. Name one with "
            f"--metadata tokenizer=<folder or hub name>. ({error})"
        ) from error


def _read(name: str) -> list[dict[str, Any]]:
    opener = lzma.open if name.endswith(".xz") else open
    with opener(TEXT / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _dataset(records: list[dict[str, Any]]) -> datasets.Dataset:
    import datasets

    return datasets.Dataset.from_list(records)
