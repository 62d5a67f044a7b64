"""Task metadata: the model args, and the entries of `--metadata` about a data set and its rows."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import (
    CHECKPOINT,
    COUNT,
    OPTIONAL_PATH,
    TEXT,
    TRUTH,
    Arguments,
    ArgumentType,
    argument,
    choice,
    declared,
)
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS
from lm_eval_duel.errors import DuelError, unknown

if TYPE_CHECKING:
    import datasets


REMAINDERS = ("keep", "drop", "official")  # of ids that do not fill a row
SCORINGS = ("joint", "marginals", "sequence")  # of variants, see task_configs/proteins/utils.py


def _patterns(value: Any) -> list[str]:
    """The names of files: one, or a list."""
    patterns = value if isinstance(value, list) else [value]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(value)
    return patterns


def _lower_case(*names: str) -> ArgumentType:
    """One of these names, however it is written."""
    return choice(*names, convert=lambda value: str(value).lower())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskMetadata(Arguments):
    """The entries of `--metadata` about a data set and its rows."""

    files: list[str] | None = argument(
        ArgumentType("a file, a pattern such as texts/*.jsonl, or a list of these", _patterns),
        None,
        "your own files, of `duel_text`, `duel_infill`, `duel_choice` and `proteingym`: a name, a pattern, a folder, "
        "or a list of these",
        unset="required there",
    )
    field: str = argument(TEXT, "text", "the column of your files that holds the text")
    lines: bool = argument(TRUTH, False, "each line of a .txt or .md file is a document")
    data_dir: str | None = argument(
        OPTIONAL_PATH, None, "a folder of local copies of the paper's data sets", unset="the hub"
    )
    rows: int | None = argument(COUNT, None, "how many rows your copy has", unset="all")
    tokenizer: str | None = argument(
        CHECKPOINT, None, "the tokenizer, if the model args do not name it", unset="the model's"
    )
    length: int = argument(
        COUNT, 1024, "ids of a wrapped row, special tokens included", unset="1024 (LM1B in domain 128)"
    )
    framed: bool = argument(TRUTH, True, "put a BOS and an EOS at the ends of each wrapped row ([CLS] for BERT)")
    insert_eos: bool = argument(
        TRUTH,
        False,
        "put an EOS after each document of wrapped rows",
        unset="`false` (`duel_openwebtext_wrapped` and LM1B in domain `true`)",
    )
    remainder: str = argument(
        _lower_case(*REMAINDERS),
        "keep",
        "tokens that do not fill a row: `keep` a short last row, `drop` them, or `official`: pack 1,000 documents at a "
        "time and drop the rest, as the authors' code does",
    )
    bos: str | None = argument(
        NETWORK_ARGUMENTS["bos"].kind,
        None,
        "which positions of a wrapped row are scored. For `--model hf`, set it only if it is not `given`",
        none="none",
        unset="the model arg's, else `given`",
    )
    scoring: str = argument(
        _lower_case(*SCORINGS), "joint", "how `proteingym` scores [a variant](../proteins/README.md)"
    )


KEYS = declared(TaskMetadata)
TOKENIZER = "--metadata tokenizer="  # what the user sets for a model that names none


def read(metadata: dict[str, Any]) -> dict[str, Any]:
    """The entries about a data set and its rows, each converted to its type; None counts as absent.

    Raises DuelError for a misspelt key. Metadata contain the args of any model, so only a near miss can be recognised.
    """
    for key in metadata:
        if key not in KEYS and difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8):
            raise unknown("key", key, KEYS, "of --metadata")
    settings = {}
    for key, arg in KEYS.items():
        value = metadata.get(key)
        if key != "tokenizer" and value is not None and value != "":
            settings[key] = arg.read(key, value)
    return settings


def test_split(records: list[dict[str, Any]]) -> dict[str, datasets.Dataset]:
    """The data set of a task: these documents."""
    import datasets

    return {"test": datasets.Dataset.from_list(records)}


def files_of(settings: dict[str, Any], task: str) -> list[str]:
    """The files that the metadata name; raises DuelError if they name none."""
    if "files" not in settings:
        raise DuelError(f'Task {task} reads your own files; name them: --metadata \'{{"files": "texts/*.jsonl"}}\'.')
    return settings["files"]


def load_tokenizer(metadata: dict[str, Any]) -> Any:
    """The tokenizer that the model args name."""
    from lm_eval_duel.denoisers import loading

    try:
        return loading.load_tokenizer(metadata, TOKENIZER)
    except DuelError as error:
        message = str(error)
        if TOKENIZER not in message:
            message += f" Name another one with {TOKENIZER}<folder or hub name>."
        raise DuelError(f"Token perplexity needs the model's tokenizer. {message}") from None


def encoded(texts: list[str], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """(text, ids) of each text."""
    for batch in batched(texts, 1000):
        ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(batch, ids, strict=True)


def batched(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` values; the last may be shorter."""
    iterator = iter(values)
    batch = list(itertools.islice(iterator, size))
    while batch:
        yield batch
        batch = list(itertools.islice(iterator, size))
