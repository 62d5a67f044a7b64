"""Functions that the task YAMLs name: data sets with their token counts, and metrics.

Word, byte and token perplexity of a text with log-likelihood ll (nats): exp(-ll / words), exp(-ll / bytes),
exp(-ll / tokens), each summed over documents before dividing. Tokens are those of the model's own tokenizer.
"""

from __future__ import annotations

import json
import lzma
import re
from typing import TYPE_CHECKING, Any

from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import TOKENS

if TYPE_CHECKING:
    import datasets

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
        "token_perplexity": (nats, doc[TOKENS]),
    }


def _documents(name: str, metadata: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """The texts of a file, each with its number of tokens by the tokenizer that the model args ask for."""
    from lm_eval_duel import denoisers

    try:
        tokenizer = denoisers.load_tokenizer(metadata)
    except DuelError as error:
        raise DuelError(
            "Token perplexity needs the model's tokenizer; name one with --metadata tokenizer=<folder or hub name>. "
            f"{error}"
        ) from error
    records = _read(name)
    for record in records:
        record[TOKENS] = len(tokenizer(record["text"], add_special_tokens=False, verbose=False)["input_ids"])
    return {"test": _dataset(records)}


def _read(name: str) -> list[dict[str, Any]]:
    opener = lzma.open if name.endswith(".xz") else open
    with opener(TEXT / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _dataset(records: list[dict[str, Any]]) -> datasets.Dataset:
    import datasets

    return datasets.Dataset.from_list(records)
