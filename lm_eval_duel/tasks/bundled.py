"""The bundled texts: State of the Union addresses of 2001-2021, and a few proteins."""

from __future__ import annotations

import json
import lzma
from typing import TYPE_CHECKING, Any

from lm_eval_duel.demo import FOLDER
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metadata import encoded, load_tokenizer, test_split

if TYPE_CHECKING:
    import datasets

TEXT = FOLDER / "text"


def task_folder() -> str:
    """The folder of the task YAMLs: inside an installed package, next to the package in a checkout."""
    package = FOLDER.parent
    for folder in (package / "task_configs", package.parent / "task_configs"):
        if folder.is_dir():
            return str(folder)
    raise FileNotFoundError(f"No task_configs in {package} or next to it; install the package again.")


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
    with (lzma.open if name.endswith(".xz") else open)(TEXT / name, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    if tokenizer is not None:
        for record, (_, ids) in zip(records, encoded([record["text"] for record in records], tokenizer), strict=True):
            record[TOKENS] = len(ids)
    return test_split(records)
