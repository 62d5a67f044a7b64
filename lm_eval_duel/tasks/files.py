"""Reads the rows of a file, of a folder of files, or of a folder saved by `datasets`.

They are read directly: `datasets` would write a second copy into its cache, and may find an old one there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError

SAVED, SPLITS = "dataset_info.json", "dataset_dict.json"  # `save_to_disk` writes them next to a data set, and splits


def files(folder: Path) -> list[Path]:
    """The data files in a folder."""
    return sorted(file for file in folder.iterdir() if file.suffix in FORMATS)


def records(path: Path) -> list[dict[str, Any]]:
    """The rows; raises DuelError if they cannot be read."""
    try:
        if (path / SAVED).exists():
            import datasets

            return datasets.load_from_disk(str(path)).to_list()
        rows = [row for file in (files(path) if path.is_dir() else [path]) for row in FORMATS[file.suffix](file)]
    except Exception as error:  # of any reader: truncated, another format, not readable
        reason = str(error).splitlines() or [""]
        raise DuelError(f"{path} cannot be read ({type(error).__name__}: {reason[0]}). It may be incomplete.") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DuelError(f"{path}:{number} is not a JSON object with columns; got {type(row).__name__}.")
    return rows


def _parquet(file: Path) -> list[Any]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


def _csv(file: Path) -> list[Any]:
    import pyarrow.csv

    return pyarrow.csv.read_csv(file).to_pylist()


def _arrow(file: Path) -> list[Any]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all().to_pylist()
        except pyarrow.ArrowInvalid:  # the format of files, also called Feather
            return pyarrow.ipc.open_file(source).read_all().to_pylist()


def _json(file: Path) -> list[Any]:
    """One record per line, or one list of records. Columns may hold values of several types."""
    with open(file, encoding="utf-8-sig") as content:
        first = content.read(1)
        content.seek(0)
        return json.load(content) if first == "[" else [json.loads(line) for line in content if line.strip()]


FORMATS = {  # readers, by file name extension
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
}
