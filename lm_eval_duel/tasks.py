"""Functions that the task YAMLs name: data sets with their token counts, and metrics.

Word, byte and token perplexity of a text with log-likelihood ll (nats): exp(-ll / words), exp(-ll / bytes),
exp(-ll / tokens), each summed over documents before dividing. Tokens are those of the model's own tokenizer; of a
wrapped task, the positions that are scored.
"""

from __future__ import annotations

import itertools
import json
import lzma
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel import corpora
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.detokenize import DETOKENIZERS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import of_tokenizer
from lm_eval_duel.options import TOKENS
from lm_eval_duel.token_text import TokenText
from lm_eval_duel.windows import of_row
from lm_eval_duel.wrapped import Wrapping

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


def documents(corpus: str, **metadata: Any) -> dict[str, datasets.Dataset]:
    """The texts of a data set of `corpora`, each a document, with its tokens counted.

    `metadata`: the model args, and `data_dir` (a local copy), `rows` (how many it holds).
    """
    tokenizer = _tokenizer(metadata)
    texts = corpora.texts(corpus, metadata.get("data_dir"), metadata.get("rows"))
    return {"test": _dataset([{"text": text, TOKENS: len(ids)} for text, ids in _encoded(texts, tokenizer)])}


def wrapped(corpus: str, **metadata: Any) -> dict[str, datasets.Dataset]:
    """Rows of a data set as the 110M models are evaluated: detokenized, tokenized, concatenated and cut (`wrapped`).

    `metadata`: as for `documents`, and `length` (1024), `insert_eos` (false), `framed` (true), `remainder` (keep),
    `bos` (given): what they mean is in the README.
    """
    import datasets

    tokenizer = _tokenizer(metadata)
    known = corpora.find(corpus)
    texts = corpora.texts(corpus, metadata.get("data_dir"), metadata.get("rows"))
    if known.detokenize:
        texts = list(map(DETOKENIZERS[known.detokenize], texts))
    start, end = frame(tokenizer)
    said = {key: metadata[key] for key in ("framed", "insert_eos", "remainder") if metadata.get(key) is not None}
    wrapping = Wrapping(int(metadata.get("length") or 1024), start, end, **said)
    bos = str(metadata.get("bos") or "given").lower()
    row = {"framing": list(wrapping.framing), "tokenizer": [str(tokenizer.name_or_path), of_tokenizer(tokenizer)]}
    _TOKENIZERS[row["tokenizer"][1]] = tokenizer
    rows = wrapping.rows(ids for _, ids in _encoded(texts, tokenizer))

    def found() -> Iterator[dict[str, Any]]:
        for ids in rows:
            yield {"ids": ids, TOKENS: len(of_row(ids, *wrapping.framing, bos).target), **row}

    parts = [datasets.Dataset.from_list(part) for part in _parts(found(), 4096)]  # compact before the next are made
    if not parts:
        raise DuelError(f"{corpus} fills no row of {wrapping.length} tokens; give fewer: --metadata length=...")
    return {"test": datasets.concatenate_datasets(parts)}


def frame(tokenizer: Any) -> tuple[int, int]:
    """The ids at the beginning and the end of a framed row: BOS and EOS, or as the authors' code has it for BERT, which
    has neither, [CLS] at both ends."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = tokenizer.cls_token_id if start is None else start
    start = end if start is None else start
    if start is None:
        raise DuelError("This tokenizer has no BOS, EOS or [CLS] to frame rows with; say --metadata framed=false.")
    return start, start if end is None else end


def token_text(doc: dict[str, Any]) -> TokenText:
    """A wrapped row: its ids, and for other models the text of all but its first."""
    name, written = doc["tokenizer"]
    if written not in _TOKENIZERS:
        _TOKENIZERS[written] = _tokenizer({"tokenizer": name})
    text = _TOKENIZERS[written].decode(doc["ids"][1:], clean_up_tokenization_spaces=False)
    return TokenText(text, doc["ids"], tuple(doc["framing"]), (name, written))


_TOKENIZERS: dict[str, Any] = {}  # by fingerprint, those of the wrapped tasks of this run


def token_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(nats, scored positions) of one row."""
    return {"token_perplexity": (results[0], doc[TOKENS])}


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
    """The texts of a bundled file, each with its number of tokens by the tokenizer that the model args ask for."""
    tokenizer, records = _tokenizer(metadata), _read(name)
    for record, (_, ids) in zip(records, _encoded([r["text"] for r in records], tokenizer), strict=True):
        record[TOKENS] = len(ids)
    return {"test": _dataset(records)}


def _tokenizer(metadata: dict[str, Any]) -> Any:
    """The tokenizer that the model args ask for."""
    from lm_eval_duel import denoisers

    try:
        return denoisers.load_tokenizer(metadata)
    except DuelError as error:
        raise DuelError(
            "Token perplexity needs the model's tokenizer; name one with --metadata tokenizer=<folder or hub name>. "
            f"{error}"
        ) from error


def _encoded(texts: list[str], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Each text with its ids."""
    for part in _parts(iter(texts), 1000):
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(part, ids, strict=True)


def _parts(found: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while part := list(itertools.islice(found, size)):
        yield part


def _read(name: str) -> list[dict[str, Any]]:
    opener = lzma.open if name.endswith(".xz") else open
    with opener(TEXT / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _dataset(records: list[dict[str, Any]]) -> datasets.Dataset:
    import datasets

    return datasets.Dataset.from_list(records)
