"""Reads local data sets: a file, a folder of files, or a folder saved by `datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    import pyarrow

SAVED = "dataset_info.json"  # which `datasets` writes next to the data that it saves


def files(folder: Path) -> list[Path]:
    """The data files in a folder."""
    return sorted(file for file in folder.iterdir() if file.suffix in FORMATS)


def table(place: str) -> pyarrow.Table:
    """The rows of a file, of a folder of files, or of a folder saved by `datasets`.

    They are read directly: `datasets` would write a second copy into its cache, and may find an old one there.
    """
    import pyarrow

    path = Path(place)
    try:
        if (path / SAVED).exists():
            import datasets

            return datasets.load_from_disk(place).with_format("arrow")[:]
        parts = [FORMATS[file.suffix](file) for file in (files(path) if path.is_dir() else [path])]
        return pyarrow.concat_tables(parts, promote_options="default")
    except Exception as error:  # of any reader: truncated, another format, not readable
        reason = str(error).splitlines() or [""]
        raise DuelError(f"{place} cannot be read ({type(error).__name__}: {reason[0]}): load it again.") from None


def _parquet(file: Path) -> pyarrow.Table:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file)


def _json(file: Path) -> pyarrow.Table:
    """One record per line, or one list of records."""
    import pyarrow

    return pyarrow.Table.from_pylist(json_records(file))


def json_records(file: Path) -> list[Any]:
    """The records of a file with one on each line, or with one list of records."""
    with open(file, encoding="utf-8-sig") as content:
        first = content.read(1)
        content.seek(0)
        return json.load(content) if first == "[" else [json.loads(line) for line in content if line.strip()]


FORMATS = {".parquet": _parquet, ".jsonl": _json, ".json": _json}  # readers, by file name extension
