"""The data sets of the tasks, as documents whose tokens are counted or as wrapped rows, and their metrics.

The texts are bundled (State of the Union addresses), the paper's (corpora.py), or the user's own (files.py). Wrapped
rows are concatenated documents, cut to one length, as the 110M models are evaluated:

    documents    a b c | d e | f g h i j         rows of 6, from [B] to [E], with an [E] after each document
    stream       a b c E d e E f g h i j E
    rows         B a b c E E | B d e E f E | ... 4 ids of the stream each
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.windows import from_row
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import of_tokenizer
from lm_eval_duel.tasks import corpora, files, metadata
from lm_eval_duel.tasks.metadata import batched, encoded, load_tokenizer, test_split
from lm_eval_duel.text.annotated import FILE, TokenText, count_units

if TYPE_CHECKING:
    import datasets

TEXT = FOLDER / "text"
TOKENS = "duel_tokens"  # a column of the documents: their tokens, which are checked when they are scored
UNCOUNTED = "The documents have no column %s, and this model does not count tokens: there is no token_perplexity"
ROW_SETTINGS = ("length", "framed", "insert_eos", "remainder")  # metadata
LENGTH = 1024  # default number of ids of a wrapped row, special tokens included
_TOKENIZERS: dict[str, Any] = {}  # of the wrapped tasks of this run, by fingerprint
_integer = functools.cache(int)  # equal ids of all rows are one object, which takes a fifth of the memory
BATCH = 1000  # documents that the authors' code wraps at a time (the default of datasets.map)
log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


# ---------------------------------------------------------------- bundled texts


def task_folder() -> str:
    """The folder of the task YAMLs: inside an installed package, next to the package in a checkout."""
    package = FOLDER.parent
    for folder in (package / "task_configs", package.parent / "task_configs"):
        if folder.is_dir():
            return str(folder)
    raise FileNotFoundError(f"No task_configs in {package} or next to it; install the package again")


def task_files() -> list[Path]:
    """The YAML files of tasks and groups, each with its name. Files that others include, `_*`, are left out."""
    return sorted(Path(task_folder()).rglob("[!_]*.yaml"))


def sotu(**metadata: Any) -> dict[str, datasets.Dataset]:
    """36 whole-sentence passages of the State of the Union addresses of 2001-2021."""
    return bundled("sotu.jsonl", load_tokenizer(metadata))


def sotu_full(**metadata: Any) -> dict[str, datasets.Dataset]:
    """All State of the Union addresses of 2001-2021."""
    return bundled("sotu_full.jsonl.xz", load_tokenizer(metadata))


def sotu_choice(**metadata: Any) -> dict[str, datasets.Dataset]:
    """40 questions: which of four sentences continues the passage."""
    return bundled("sotu_choice.jsonl")


def bundled(name: str, tokenizer: Any = None) -> dict[str, datasets.Dataset]:
    """The records of a bundled file; with a tokenizer, the number of tokens of each text."""
    open_text = lzma.open if name.endswith(".xz") else open
    with open_text(TEXT / name, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    if tokenizer is not None:
        texts = [record["text"] for record in records]
        for record, (_, ids) in zip(records, encoded(texts, tokenizer), strict=True):
            record[TOKENS] = len(ids)
    return test_split(records)


# ---------------------------------------------------------------- the paper's data sets, and the user's own texts


def documents(corpus: str, **model_args: Any) -> dict[str, datasets.Dataset]:
    """The texts of a data set of `corpora`, each a document, with its tokens counted.

    `model_args`: the model args, and `data_dir` (a local copy), `rows` (how many it has).
    """
    settings = metadata.read(model_args)
    source = corpora.find(corpus)
    raw = corpora.texts(corpus, settings.get("data_dir"), settings.get("rows"))
    texts = raw
    if source.tidied:
        detokenize = corpora.DETOKENIZERS[source.detokenize]
        texts = [detokenize(text) for text in raw]
    return _documents(raw, texts, load_tokenizer(model_args))


def wrapped(corpus: str, **model_args: Any) -> dict[str, datasets.Dataset]:
    """The rows of a data set as the 110M models are evaluated: detokenized, tokenized, concatenated and cut.

    `model_args`: as for `documents`, and `length` (1024), `insert_eos` (false), `framed` (true), `remainder` (keep) and
    `bos` (given), which task_configs/benchmarks/README.md explains.
    """
    settings = metadata.read(model_args)
    source = corpora.find(corpus)
    texts = corpora.texts(corpus, settings.get("data_dir"), settings.get("rows"))
    if source.detokenize:
        detokenize = corpora.DETOKENIZERS[source.detokenize]
        texts = [detokenize(text) for text in texts]
    return _rows(texts, settings, load_tokenizer(model_args), corpus)


def own_documents(**model_args: Any) -> dict[str, datasets.Dataset]:
    """The user's own texts, each a document, with its tokens counted.

    `model_args`: the model args, and `files`, `field` (text), `lines` (false), which docs/tasks.md explains.
    """
    settings = metadata.read(model_args)
    documents = _own_texts(settings, "duel_text")
    texts = [document.text for document in documents]
    split = _documents(texts, texts, load_tokenizer(model_args))
    # lm-eval writes a digest of each document, by which reports pair the documents of two runs. The name of its file
    # must not be part of it: a text is the same in another folder. So the column is there, but hidden.
    shown = split["test"].column_names
    named = split["test"].add_column(FILE, [document.name for document in documents])
    return {"test": named.with_format(columns=shown)}


def files_of_documents(documents: datasets.Dataset | list[dict[str, Any]]) -> list[str]:
    """The file of each of the user's own texts, and its line or row if the file holds several.

    Empty for documents that `own_documents` has not read.
    """
    if FILE not in getattr(documents, "column_names", ()):
        return []
    return list(documents.with_format(None)[FILE])


def own_rows(**model_args: Any) -> dict[str, datasets.Dataset]:
    """The user's own texts as rows. `model_args`: as for `own_documents` and `wrapped`."""
    settings = metadata.read(model_args)
    texts = [document.text for document in _own_texts(settings, "duel_text_wrapped")]
    return _rows(texts, settings, load_tokenizer(model_args), "duel_text_wrapped")


def _own_texts(settings: dict[str, Any], task: str) -> list[files.OwnText]:
    patterns = metadata.files_of(settings, task)
    field = settings.get("field", files.DEFAULT_FIELD)
    lines = settings.get("lines", False)
    documents = files.texts(patterns, field, lines, "--metadata field=")
    files.warn_of_unused(patterns, field, lines)
    [first, *others] = documents
    if not (others or lines) and files.ending(first.name) in files.PLAIN and "\n" in first.text:
        log.info("%s is one document; with --lines (in --metadata: lines=true), each line is one", first.name)
    return documents


def _documents(raw: list[str], texts: list[str], tokenizer: Any) -> dict[str, datasets.Dataset]:
    """`texts` as documents. Where they differ from the `raw` ones, words and bytes are counted in those."""
    records = []
    for raw_text, (text, ids) in zip(raw, encoded(texts, tokenizer), strict=True):
        record = {"text": text, TOKENS: len(ids)}
        if texts is not raw:
            record |= count_units(raw_text)._asdict()
        records.append(record)
    return test_split(records)


def _rows(texts: list[str], settings: dict[str, Any], tokenizer: Any, corpus: str) -> dict[str, datasets.Dataset]:
    """`texts`, concatenated and cut into rows by `settings`, of which others may be for other tasks of the run."""
    import datasets

    bos = settings.get("bos", "given")
    ends = {"bos": 0, "eos": 0}  # not used without special tokens, which a tokenizer may lack
    if settings.get("framed", True) or settings.get("insert_eos"):
        start, end = _start_and_end(tokenizer)
        ends = {"bos": start, "eos": end}
    of_rows = {key: settings[key] for key in ROW_SETTINGS if key in settings}
    wrapping = Wrapping(length=of_rows.pop("length", LENGTH), **ends, **of_rows)
    digest = of_tokenizer(tokenizer)
    _TOKENIZERS[digest] = tokenizer
    shared = {
        "special_tokens": list(wrapping.special_tokens),
        "bos": bos,
        "tokenizer": [str(tokenizer.name_or_path), digest],
    }

    def records() -> Iterator[dict[str, Any]]:
        for ids in wrapping.rows(ids for _, ids in encoded(texts, tokenizer)):
            window = from_row(ids, *wrapping.special_tokens, bos)
            text = " ".join(map(str, ids))  # lm-eval keeps all rows, and Python's integers take six times the memory
            yield {"ids": text, TOKENS: len(window.target), **shared}

    # a compact table of a few thousand rows at a time: all rows as Python objects would not fit
    tables = [datasets.Dataset.from_list(batch) for batch in batched(records(), 4096)]
    if not tables:
        raise DuelError(
            f"{corpus} does not fill one row of {wrapping.length} tokens; choose a shorter one: --metadata length=..."
        )
    return {"test": datasets.concatenate_datasets(tables)}


def _start_and_end(tokenizer: Any) -> tuple[int, int]:
    """The ids at the ends of a row: BOS and EOS, or if there is neither (BERT) [CLS] twice, as in the authors' code."""
    eos = tokenizer.eos_token_id
    start = tokenizer.bos_token_id
    if start is None:
        start = tokenizer.cls_token_id
    if start is None:
        start = eos
    if start is None:
        raise DuelError("This tokenizer has no BOS, EOS or [CLS] for the ends of rows; use --metadata framed=false.")
    end = start if eos is None else eos
    return start, end


def token_text(doc: dict[str, Any]) -> TokenText:
    """A wrapped row: its ids, and for other models a text of as many tokens as are scored.

    By `bos`, that text is the whole row (scored), the row without special tokens (none), the same without its first id
    (first), or else the row without its first id, which a stock AR model adds itself.
    """
    name, digest = doc["tokenizer"]
    if digest not in _TOKENIZERS:
        _TOKENIZERS[digest] = load_tokenizer({"tokenizer": name})
    ids = [_integer(token) for token in doc["ids"].split()]
    before, after = doc["special_tokens"]
    inside = ids[before : len(ids) - after]
    shown = {"scored": ids, "none": inside, "first": inside[1:]}  # ids of the text, by `bos`
    decoded_ids = shown.get(doc["bos"], ids[1:])
    text = _TOKENIZERS[digest].decode(decoded_ids, clean_up_tokenization_spaces=False)
    return TokenText(text, ids, (before, after), (name, digest), doc["bos"])


# ---------------------------------------------------------------- wrapped rows


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """The settings of wrapped documents.

    `length`: ids of a row, special tokens included. `framed`: rows begin with `bos` and end with `eos`. `insert_eos`:
    an `eos` after each document.

    `remainder`: what to do with ids that do not fill a row: "keep" (the last row is short), "drop", or "official":
    documents are wrapped 1,000 at a time and the remainder of each batch is dropped, as in the authors' code.
    """

    length: int
    bos: int
    eos: int
    framed: bool = True
    insert_eos: bool = False
    remainder: str = "keep"

    def __post_init__(self) -> None:
        if self.length <= 2 * self.framed:
            raise DuelError(f"length={self.length} leaves no position for text in a row; raise it.")

    @property
    def special_tokens(self) -> tuple[int, int]:
        """The number of special tokens at a row's beginning and at its end."""
        return (1, 1) if self.framed else (0, 0)

    def rows(self, documents: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        """The rows of the documents' ids."""
        waiting: list[int] = []  # ids that do not fill a row yet
        size = self.length - sum(self.special_tokens)
        for count, document in enumerate(documents, 1):
            waiting += document
            if self.insert_eos:
                waiting.append(self.eos)
            whole = len(waiting) // size * size
            for start in range(0, whole, size):
                yield self._row(waiting[start : start + size])
            del waiting[:whole]
            if self.remainder == "official" and count % BATCH == 0:
                waiting.clear()
        if waiting and self.remainder == "keep":
            yield self._row(waiting)

    def _row(self, ids: list[int]) -> list[int]:
        return [self.bos, *ids, self.eos] if self.framed else list(ids)


# ---------------------------------------------------------------- metrics of a document: (log-likelihood, units)


def token_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, scored positions) of a row."""
    (log_prob,) = results
    return {"token_perplexity": (log_prob, doc[TOKENS])}


def perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, units) of a document, for each metric of a loglikelihood_rolling task.

    duel-mdm's answer tells which text it scored, and how many tokens: special tokens among them if they are scored. For
    another model the task counts the tokens of the text. A user's own data do not count tokens: then there is no token
    perplexity, and a warning says so.
    """
    (log_prob,) = results
    text = getattr(log_prob, "text", doc.get("text"))
    if text is None:
        raise DuelError(
            f"This document has no column 'text', in which words and bytes are counted; it has {', '.join(doc)}. Name "
            "the column that is scored 'text' in the data."
        )
    if TOKENS in doc and "words" in doc:  # counted before the text was detokenized
        words = doc["words"]
        size = doc["bytes"]
    else:
        words, size = count_units(text)
    units = {"word_perplexity": words, "byte_perplexity": size, "bits_per_byte": size}
    tokens = getattr(log_prob, "tokens", doc.get(TOKENS))
    if tokens is None:
        from lm_eval.utils import warning_once

        warning_once(log, UNCOUNTED, TOKENS)
    else:
        units["token_perplexity"] = tokens
    return {metric: (log_prob, count) for metric, count in units.items()}
