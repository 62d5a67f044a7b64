"""Task metadata: the model args, and the entries of `--metadata` about a data set and its rows."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT, TEXT, TRUTH, choice
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS
from lm_eval_duel.errors import DuelError, unknown

if TYPE_CHECKING:
    import datasets


def _patterns(key: str, value: Any) -> list[str]:
    """The names of files: one, or a list."""
    patterns = value if isinstance(value, list) else [value]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise DuelError(f"'{key}' names a file, a pattern such as texts/*.jsonl, or a list of these; got {value!r}.")
    return patterns


REMAINDERS = ("keep", "drop", "official")  # of ids that do not fill a row
SCORINGS = ("joint", "marginals", "sequence")  # of variants, see task_configs/proteins/utils.py

READERS = {
    "files": _patterns,
    "scoring": choice(*SCORINGS, convert=lambda value: str(value).lower()),
    "field": TEXT,
    "lines": TRUTH,
    "data_dir": TEXT,
    "rows": COUNT,
    "length": COUNT,
    "framed": TRUTH,
    "insert_eos": TRUTH,
    "remainder": choice(*REMAINDERS, convert=lambda value: str(value).lower()),
    "bos": NETWORK_ARGUMENTS["bos"].read,
}


def read(metadata: dict[str, Any]) -> dict[str, Any]:
    """The entries about a data set and its rows, each converted to its type; None counts as absent.

    Raises DuelError for a misspelt key. Metadata contain the args of any model, so only a near miss can be recognised.
    """
    for key in metadata:
        if key not in READERS and difflib.get_close_matches(key, READERS, n=1, cutoff=0.8):
            raise unknown("key of --metadata", key, READERS)
    return {
        key: reader(key, metadata[key])
        for key, reader in READERS.items()
        if metadata.get(key) is not None and metadata[key] != ""
    }


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
    from lm_eval_duel import denoisers

    try:
        return denoisers.load_tokenizer(metadata)
    except DuelError as error:
        raise DuelError(
            "Token perplexity needs the model's tokenizer; name one with --metadata tokenizer=<folder or hub name>. "
            f"{error}"
        ) from None


def encoded(texts: list[str], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """(text, ids) of each text."""
    for batch in batched(texts, 1000):
        ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(batch, ids, strict=True)


def batched(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` values; the last may be shorter."""
    iterator = iter(values)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
