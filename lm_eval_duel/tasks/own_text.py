"""Texts of the user's own files: a document a file, a line, or a row of a table."""

from __future__ import annotations

import glob
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_duel.demo import NAMES
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.tasks import files

PLAIN = (".txt", ".md")
FORMATS = (*PLAIN, *files.FORMATS)
STDIN = "-"


class OwnText(NamedTuple):
    """One document. `name`: its file, and its line or row if the file holds several."""

    name: str
    text: str


def find(patterns: Sequence[str]) -> list[Path]:
    """The files of names, of patterns such as texts/*.jsonl, and of folders, each once, in the order of the patterns.

    A folder that `datasets` saved (`save_to_disk`) counts as a file. Raises DuelError for a name that matches no file,
    for a file of another format, and for a saved folder with several splits.
    """
    matching: dict[Path, None] = {}
    for pattern in patterns:
        if (Path(pattern) / files.SPLITS).exists():
            splits = ", ".join(sorted(str(file.parent) for file in Path(pattern).glob(f"*/{files.SAVED}")))
            raise DuelError(f"{pattern} holds several splits of a data set; name one of them: {splits}.")
        if (Path(pattern) / files.SAVED).exists():
            matching[Path(pattern)] = None
            continue
        if Path(pattern).is_dir():
            matches = sorted(file for file in Path(pattern).iterdir() if file.suffix in FORMATS)
            wanted = f"a folder with {', '.join(FORMATS)} files"
        else:
            exact = Path(pattern).exists()  # a name may hold the characters of a pattern
            matches = [Path(pattern)] if exact else [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            wanted = "a file, a folder, or a pattern such as 'texts/*.jsonl'"
        if not matches:
            model = " A model is named by --model_args." if pattern in NAMES else ""
            raise DuelError(f"{pattern} matches no file; name {wanted}.{model}")
        for file in matches:
            if file.suffix not in FORMATS:
                raise DuelError(f"{file} is not {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; convert it to one of them.")
            matching[file] = None
    return list(matching)


def texts(patterns: Sequence[str], field: str = "text", lines: bool = False) -> list[OwnText]:
    """The documents of files. `field`: the column of a table; `lines`: each line of a plain file that is not blank.

    Each file is read once, also if two patterns match it. Raises DuelError if a file cannot be read, has no such
    column, or there is no document at all.
    """
    sources: dict[Path | None, None] = {}  # None: standard input
    for pattern in patterns:
        sources |= dict.fromkeys([None] if pattern == STDIN else find([pattern]))
    documents: list[OwnText] = []
    for file in sources:
        if file is None:
            documents += _documents("stdin", sys.stdin.buffer.read(), lines)
        elif file.suffix in PLAIN:
            documents += _documents(str(file), file.read_bytes(), lines)
        else:
            documents += [OwnText(name, text_column(name, row, field)) for name, row in rows([str(file)])]
    if not documents:
        raise DuelError(f"{', '.join(patterns)}: no text to score; the files are empty.")
    return documents


def rows(patterns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of each row of tables (.jsonl, .json, .parquet, .csv)."""
    for file in find(patterns):
        if file.suffix in PLAIN:
            raise DuelError(f"{file} has no columns; this task reads .jsonl, .json, .parquet or .csv.")
        for number, row in enumerate(files.records(file), 1):
            yield f"{file}:{number}", row


def column(name: str, row: dict[str, Any], key: str) -> Any:
    """The entry of a row; raises DuelError, with the nearest column, if there is none."""
    if key in row and row[key] is None:
        raise DuelError(f"{name}: column '{key}' is null; leave this row out.")
    if key not in row:
        raise DuelError(f"{name}: {unknown('column', key, [column for column in row if row[column] is not None])}")
    return row[key]


def text_column(name: str, row: dict[str, Any], key: str) -> str:
    """The entry of a row, which must be a text."""
    if not isinstance(text := column(name, row, key), str):
        raise DuelError(f"{name}: column '{key}' holds {type(text).__name__}, not text; name another one.")
    return text


def _documents(name: str, content: bytes, lines: bool) -> list[OwnText]:
    """The documents of UTF-8 text, with or without a byte order mark; line ends become \\n."""
    try:
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise DuelError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it.") from None
    if lines:
        return [OwnText(f"{name}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [OwnText(name, text)] if text else []
