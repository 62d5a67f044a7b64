"""Functions that the task YAMLs name: data sets with their token counts, and metrics.

Word, byte and token perplexity of a text with log-likelihood ll (nats): exp(-ll / words), exp(-ll / bytes),
exp(-ll / tokens), each summed over documents before dividing. Tokens are those of the model's own tokenizer; of a
wrapped task, the positions that are scored.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import logging
import lzma
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import count, one_of, truth
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.denoisers.load_options import BOS
from lm_eval_duel.engine.windows import of_row
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.fingerprint import hash_texts, of_tokenizer
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.columns import MADE, TOKENS
from lm_eval_duel.tasks.detokenize import DETOKENIZERS
from lm_eval_duel.tasks.packing import REMAINDERS, Wrapping
from lm_eval_duel.tasks.tokenized_text import TokenText, made

if TYPE_CHECKING:
    import datasets

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only

TEXT = FOLDER / "text"
LENGTH = 1024  # ids of a wrapped row, framing included, unless the metadata say


def task_folder() -> str:
    """The folder of the task YAMLs: inside an installed package, beside the package in a checkout."""
    package = FOLDER.parent
    for folder in (package / "task_configs", package.parent / "task_configs"):
        if folder.is_dir():
            return str(folder)
    raise FileNotFoundError(f"No task_configs in {package} or beside it; install the package again.")


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
    asked, known = _asked(metadata), corpora.find(corpus)
    tokenizer = _tokenizer(metadata)
    raw = corpora.texts(corpus, asked.get("data_dir"), asked.get("rows"))
    texts = list(map(DETOKENIZERS[known.detokenize], raw)) if known.tidied else raw
    records = [{"text": text, TOKENS: len(ids)} for text, ids in _encoded(texts, tokenizer)]
    how = made("document", corpus, of_tokenizer(tokenizer), asked, hash_texts(raw))
    for record in records:
        record[MADE] = how
    if known.tidied:
        for record, text in zip(records, raw, strict=True):
            record["words"], record["bytes"] = sizes(text)
    return {"test": _dataset(records)}


def wrapped(corpus: str, **metadata: Any) -> dict[str, datasets.Dataset]:
    """Rows of a data set as the 110M models are evaluated: detokenized, tokenized, concatenated and cut (`wrapped`).

    `metadata`: as for `documents`, and `length` (1024), `insert_eos` (false), `framed` (true), `remainder` (keep),
    `bos` (given): what they mean is in the README.
    """
    import datasets

    asked = _asked(metadata)
    bos = asked.pop("bos", "given")
    known, place = corpora.find(corpus), (asked.pop("data_dir", None), asked.pop("rows", None))
    tokenizer = _tokenizer(metadata)
    start, end = frame(tokenizer) if asked.get("framed", True) or asked.get("insert_eos") else (0, 0)
    wrapping = Wrapping(**{"length": LENGTH, "bos": start, "eos": end, **asked})
    texts = corpora.texts(corpus, *place)
    if known.detokenize:
        texts = list(map(DETOKENIZERS[known.detokenize], texts))
    row = {"framing": list(wrapping.framing), "bos": bos}
    row["tokenizer"] = [str(tokenizer.name_or_path), of_tokenizer(tokenizer)]
    row[MADE] = made("row", corpus, place, dataclasses.asdict(wrapping), row["tokenizer"][1], bos, hash_texts(texts))
    _TOKENIZERS[row["tokenizer"][1]] = tokenizer
    rows = wrapping.rows(ids for _, ids in _encoded(texts, tokenizer))

    def found() -> Iterator[dict[str, Any]]:
        for ids in rows:
            said = " ".join(map(str, ids))  # the harness keeps all rows: Python's integers would take six times as much
            yield {"ids": said, TOKENS: len(of_row(ids, *wrapping.framing, bos).target), **row}

    parts = [datasets.Dataset.from_list(part) for part in _parts(found(), 4096)]  # compact before the next are made
    if not parts:
        cause = f"{corpus} fills no row of {wrapping.length} tokens; give fewer:"
        raise corpora.WantsMetadata(cause, "--metadata length=...", "--length ...")
    return {"test": datasets.concatenate_datasets(parts)}


def _asked(metadata: dict[str, Any]) -> dict[str, Any]:
    """What metadata say about a data set and its rows, each brought to its type; None is not said.

    Raises DuelError for a misspelt key: metadata hold the args of any model, so only what comes near can be found.
    """
    for key in metadata:
        if key not in METADATA and difflib.get_close_matches(key, METADATA, n=1, cutoff=0.8):
            raise unknown("key of --metadata", key, METADATA)
    return {
        key: read(key, metadata[key])
        for key, read in METADATA.items()
        if metadata.get(key) is not None and metadata[key] != ""
    }


METADATA = {
    "data_dir": lambda key, value: str(value),
    "rows": count,
    "length": count,
    "framed": truth,
    "insert_eos": truth,
    "remainder": lambda key, value: one_of(key, str(value).lower(), REMAINDERS),
    "bos": lambda key, value: one_of(key, str(value).lower(), BOS),
}


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
    """A wrapped row: its ids, and for other models a text of as many tokens as are scored.

    That is the row without its first id, which a stock AR model puts there itself; the whole row where its first id is
    scored too; the row without framing where that is left out, and without the text's first id where that is given.
    """
    name, written = doc["tokenizer"]
    if written not in _TOKENIZERS:
        _TOKENIZERS[written] = _tokenizer({"tokenizer": name})
    ids = [_integer(token) for token in doc["ids"].split()]
    before, after = doc["framing"]
    shown = {"scored": ids, "none": ids[before : len(ids) - after], "first": ids[before + 1 : len(ids) - after]}
    text = _TOKENIZERS[written].decode(shown.get(doc["bos"], ids[1:]), clean_up_tokenization_spaces=False)
    return TokenText(text, ids, (before, after), (name, written), doc["bos"])


_integer = functools.cache(int)  # equal ids of all rows are one object, a fifth of the memory
_TOKENIZERS: dict[str, Any] = {}  # by fingerprint, those of the wrapped tasks of this run


def token_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(nats, scored positions) of one row."""
    return {"token_perplexity": (results[0], doc[TOKENS])}


def sizes(text: str) -> tuple[int, int]:
    """Words and bytes of a text, as the harness counts them."""
    return len(re.split(r"\s+", text)), len(text.encode("utf-8"))


def perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(nats, units) of one document for each metric of a loglikelihood_rolling task.

    Data of a user have no token counts: duel-mdm says with its answer which text it scored and of how many tokens.
    Where no one counted (another model's answer to such data), there is no token perplexity, and a warning says so.
    """
    (nats,) = results
    text = getattr(nats, "text", doc.get("text"))
    if text is None:
        raise DuelError(
            f"This document has no column 'text', in which words and bytes are counted; it has {', '.join(doc)}. Name "
            "the column that is scored 'text' in the data."
        )
    words, size = (doc["words"], doc["bytes"]) if TOKENS in doc and "words" in doc else sizes(text)
    found = {"word_perplexity": (nats, words), "byte_perplexity": (nats, size), "bits_per_byte": (nats, size)}
    if (tokens := doc.get(TOKENS, getattr(nats, "tokens", None))) is None:
        _warn_uncounted()
        return found
    return {**found, "token_perplexity": (nats, tokens)}


@functools.cache
def _warn_uncounted() -> None:
    log.warning(
        "The documents of this task have no column %s, and this model does not count tokens: there is no "
        "token_perplexity",
        TOKENS,
    )


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
        cause = "Token perplexity needs the model's tokenizer; name one with"
        name = f"<folder or hub name>. {error}"
        raise corpora.WantsMetadata(cause, f"--metadata tokenizer={name}", f"--tokenizer {name}") from None


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
