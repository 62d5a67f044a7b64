"""The user's own files: names and patterns -> files -> rows of tables, or texts.

    .txt .md                a document, or with `lines` a document for each line
    .jsonl .json .csv       a row for each record; all cells of a .csv file are text
    .parquet .arrow         a row for each record; also a folder that `datasets` saved

Names may end in .gz, and case does not matter. Files are read directly: `datasets` would write a second copy into its
cache, and may find an old one there.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_duel.arguments import at_home
from lm_eval_duel.demo import model_hint
from lm_eval_duel.errors import DuelError, counted, nearest, unknown

PLAIN = (".txt", ".md")
SAVED = "dataset_info.json"  # `save_to_disk` writes it next to a data set
SPLITS = "dataset_dict.json"  # and this next to several splits of one
PACKED = ".gz"
STDIN = "-"
DEFAULT_FIELD = "text"  # the column of texts
NOT_BLANK = re.compile(r"\S")
OUTPUTS = ('"format": "lm_eval_duel', '"checkpoint":', "model,estimator,")  # at the start of --json and --csv files
FEW_COLUMNS = 4  # with more, the only column of texts may be a name or a date
LISTED = 5  # at most this many files that are not read are named
log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


class OwnText(NamedTuple):
    """One document. `name`: its file, and its line or row if the file holds several."""

    name: str
    text: str


# ---------------------------------------------------------------- names -> files


def ending(file: str | Path) -> str:
    """The format of a file by its name: the ending in lower case, without .gz."""
    return Path(Path(file).name.lower().removesuffix(PACKED)).suffix


def tables(folder: Path) -> list[Path]:
    """The files with rows in a folder."""
    return sorted(file for file in folder.iterdir() if ending(file) in TABLES)


def find(patterns: Sequence[str]) -> list[Path]:
    """The files of names, of patterns such as texts/*.jsonl, and of folders, each once, in the order of the patterns.

    A folder that `datasets` saved (`save_to_disk`) counts as a file. Raises DuelError for a name that matches no file,
    for a file of another format, and for a saved folder with several splits.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        for file in _matches(pattern):
            if not (file / SAVED).exists() and ending(file) not in FORMATS:
                raise DuelError(f"{file} is not {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; convert it to one of them.")
            files[file] = None
    return list(files)


def _matches(pattern: str) -> list[Path]:
    """The files of one name, pattern or folder; raises DuelError if there are none."""
    path = Path(at_home(pattern))
    if (path / SPLITS).exists():
        splits = ", ".join(sorted(str(file.parent) for file in path.glob(f"*/{SAVED}")))
        raise DuelError(f"{pattern} holds several splits of a data set; name one of them: {splits}.")
    if path.is_dir() and not (path / SAVED).exists():
        files = sorted(file for file in path.iterdir() if ending(file) in FORMATS and file.is_file())
        wanted = f"a folder with {', '.join(FORMATS)} files"
    else:
        files = [path]
        if not path.exists():  # first, because a name may hold the characters of a pattern
            files = [Path(name) for name in sorted(glob.glob(at_home(pattern), recursive=True))]
        wanted = "a file, a folder, or a pattern such as 'texts/*.jsonl'"
    if not files:
        raise DuelError(f"{pattern} matches no file; name {wanted}.{model_hint([pattern])}")
    return files


def left_out(pattern: str) -> str:
    """A sentence on what a folder holds besides its files of text; empty if there is nothing else."""
    folder = Path(at_home(pattern))
    if not folder.is_dir() or (folder / SAVED).exists():
        return ""
    names = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            names.append(f"{entry.name}/")
        elif ending(entry) not in FORMATS:
            names.append(entry.name)
    if not names:
        return ""
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return f"{folder}: not read: {listed} (files of {', '.join(FORMATS)} are)"


def check_outputs(patterns: Sequence[str], outputs: Mapping[str, str | None]) -> None:
    """Raise DuelError for an output that would overwrite what these commands have not written, or be read as a text.

    `patterns`: of the texts. `outputs`: by the flags that name them; None: not written.
    """
    inputs = [pattern for pattern in patterns if pattern != STDIN]
    sources = {file.resolve() for file in find(inputs)}
    folders = {Path(at_home(pattern)).resolve() for pattern in inputs if Path(at_home(pattern)).is_dir()}
    for flag, name in outputs.items():
        if name is None:
            continue
        output = Path(name).resolve()
        if output in sources:
            raise DuelError(f"{flag} {name} would overwrite the texts of that file; name another one.")
        if output.is_file() and not _is_an_output(output):
            raise DuelError(
                f"{flag} {name} exists, and no earlier call has written it; name another file after {flag}."
            )
        if output.parent in folders and ending(output) in FORMATS:
            raise DuelError(
                f"{flag} {name} would be one of the texts next time, since all files of its folder are read; name a "
                "file elsewhere."
            )


def _is_an_output(file: Path) -> bool:
    """True for an empty file, and for one that a command has written with --json or --csv."""
    with file.open(encoding="utf-8", errors="replace") as content:
        start = content.read(100)
    return not start or any(mark in start for mark in OUTPUTS)


# ---------------------------------------------------------------- files -> texts


def texts(
    patterns: Sequence[str], field: str = DEFAULT_FIELD, lines: bool = False, setting: str = "--field "
) -> list[OwnText]:
    """The documents of files; what a folder holds besides is named in a warning.

    `field`: the column of a table. `lines`: each line of a plain file that is not blank is a document. `setting`: what
    the user sets to name the column, for the error. A file that two patterns match is read once, which a warning says.
    Raises DuelError if a file cannot be read, has no such column, or there is no document at all.
    """
    sources: dict[Path | None, None] = {}  # None: standard input
    for pattern in patterns:
        for file in [None] if pattern == STDIN else find([pattern]):
            if file in sources:
                log.warning("%s is named twice, and read once", "standard input" if file is None else file)
            sources[file] = None
        note = left_out(pattern)
        if note:
            log.warning("%s", note)
    documents: list[OwnText] = []
    for file in sources:
        if file is None:
            documents += _documents("stdin", sys.stdin.buffer.read(), lines)
        elif ending(file) in PLAIN:
            with _reading(file):
                content = _open(file).read()
            documents += _documents(str(file), content, lines)
        else:
            for name, row in rows([str(file)]):
                documents.append(OwnText(name, text_column(name, row, field, setting)))
    if not documents:
        raise DuelError(f"{', '.join(patterns)}: no text to score; the files are empty.")
    return documents


def warn_of_unused(patterns: Sequence[str], field: str, lines: bool) -> None:
    """Log a warning for a user who sets `lines` or `field`, if no file of these names is read by it."""
    plain_texts = 0
    with_columns = 0
    for pattern in patterns:
        if pattern == STDIN:
            plain_texts += 1
            continue
        for file in find([pattern]):
            if ending(file) in PLAIN:
                plain_texts += 1
            else:
                with_columns += 1
    plain = " and ".join(PLAIN)
    if lines and not plain_texts:
        log.warning(
            "'lines' changes nothing here: it splits %s files, and each row of another file is a document by itself",
            plain,
        )
    if field != DEFAULT_FIELD and not with_columns:
        log.warning("'field' changes nothing here: it names a column, and %s files have none", plain)


def _documents(name: str, content: bytes, lines: bool) -> list[OwnText]:
    """The documents of UTF-8 text, with or without a byte order mark.

    Line ends become \\n. One line end at the end of the file is left out: editors write it, and it is no text.
    """
    try:
        text = _decoded(io.BytesIO(content)).read()
    except UnicodeDecodeError as error:
        raise DuelError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it.") from None
    text = text.removesuffix("\n")
    if not lines:
        return [OwnText(name, text)] if text else []
    documents = []
    blank = 0
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            documents.append(OwnText(f"{name}:{n}", line))
        else:
            blank += 1
    if blank and documents:  # a file without any is an error
        log.warning("%s: %s left out", name, counted(blank, "blank line"))
    return documents


# ---------------------------------------------------------------- files -> rows


def rows(patterns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of each row of tables; raises DuelError if one cannot be read."""
    for file in find(patterns):
        if ending(file) in PLAIN:
            raise DuelError(f"{file} has no columns; this task reads .jsonl, .json, .parquet or .csv.")
        for number, row in _numbered(file):
            yield f"{file}:{number}", row


def records(path: Path) -> list[dict[str, Any]]:
    """The rows of a file or of all files of a folder; raises DuelError if they cannot be read."""
    files = [path]
    if path.is_dir() and not (path / SAVED).exists():
        files = tables(path)
    rows = []
    for file in files:
        rows += [row for _, row in _numbered(file)]
    return rows


def column(name: str, row: dict[str, Any], key: str, setting: str = "") -> Any:
    """The entry of a row; raises DuelError, with the nearest column, if there is none.

    `setting`: what the user sets to name the column; empty if its name is fixed.
    """
    if key not in row:
        filled = [column for column in row if row[column] is not None]
        if not setting:  # the task asks for it, not the user
            raise DuelError(f"{name}: this task needs a column '{key}'; there are {', '.join(filled) or 'none'}.")
        of_texts = [column for column in filled if isinstance(row[column], str)]
        only_text = of_texts if len(of_texts) == 1 and len(filled) <= FEW_COLUMNS else []
        likely, *_ = nearest(key, filled) or only_text or ["COLUMN"]
        raise DuelError(f"{name}: {unknown('column', key, filled)} Name it by {setting}{likely}.")
    if row[key] is None:
        raise DuelError(f"{name}: column '{key}' is null; leave this row out.")
    return row[key]


def text_column(name: str, row: dict[str, Any], key: str, setting: str = "") -> str:
    """The entry of a row, which must be a text. `setting`: see `column`."""
    text = column(name, row, key, setting)
    if not isinstance(text, str):
        raise DuelError(f"{name}: column '{key}' holds {type(text).__name__}, not text; name another one.")
    return text


def _numbered(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of each row of a file; its number is its line in .jsonl and .csv, else its place, both from 1."""
    read = _saved if (file / SAVED).exists() else TABLES[ending(file)]
    with _reading(file):
        numbered = list(read(file))
    for number, row in numbered:
        if not isinstance(row, dict):
            raise DuelError(f"{file}:{number} is not a JSON object with columns; got {type(row).__name__}.")
        yield number, row


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise a DuelError that names the file for any error of a reader."""
    try:
        yield
    except DuelError:
        raise
    except Exception as error:  # truncated, another format, not readable
        reason = str(error).splitlines() or [""]
        raise DuelError(f"{file} cannot be read ({type(error).__name__}: {reason[0]}). It may be incomplete.") from None


def _open(file: Path) -> Any:
    """The bytes of a file, unpacked."""
    return gzip.open(file) if file.name.lower().endswith(PACKED) else open(file, "rb")


def _decoded(content: Any, newline: str | None = None) -> io.TextIOWrapper:
    """Bytes as UTF-8 text, without a byte order mark."""
    return io.TextIOWrapper(content, encoding="utf-8-sig", newline=newline)


Rows = Iterator[tuple[int, Any]]


def _saved(folder: Path) -> Rows:
    import datasets

    return enumerate(datasets.load_from_disk(str(folder)).to_list(), 1)


def _parquet(file: Path) -> Rows:
    import pyarrow.parquet

    with _open(file) as content:
        return enumerate(pyarrow.parquet.read_table(content).to_pylist(), 1)


def _arrow(file: Path) -> Rows:
    import pyarrow

    if file.name.lower().endswith(PACKED):
        content = pyarrow.BufferReader(_open(file).read())
    else:
        content = pyarrow.memory_map(str(file))
    with content as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:  # the format of files, also called Feather
            table = pyarrow.ipc.open_file(source).read_all()
        return enumerate(table.to_pylist(), 1)


def _csv(file: Path) -> Rows:
    """Records of text. Python's reader takes line breaks and any number of characters inside a quoted cell."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with _decoded(_open(file), newline="") as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            repeated = {name for name in header if header.count(name) > 1}
            if repeated:
                raise DuelError(f"{file} has several columns {', '.join(sorted(repeated))}; rename them.")
            numbered = []
            line = reader.line_num + 1  # where a record begins: one with line breaks in its cells takes several lines
            for cells in reader:
                if cells and len(cells) != len(header):
                    raise DuelError(f"{file}:{line} has {len(cells)} cells, and the header has {len(header)}.")
                if cells:  # not a blank line
                    numbered.append((line, dict(zip(header, cells, strict=True))))
                line = reader.line_num + 1
    finally:
        csv.field_size_limit(before)
    return iter(numbered)


def _json(file: Path) -> Rows:
    """One record per line, records of several lines, or one list of records, also as the entry {"data": [...]}."""
    with _decoded(_open(file)) as content:
        lines = content.readlines()
    try:
        return iter(_json_lines(file, lines))
    except DuelError as broken_line:  # not one record per line, or a broken one: read the text as a whole
        try:
            values = list(_values("".join(lines)))
        except json.JSONDecodeError as error:
            if ending(file) == ".jsonl" and _has_record_a_line(lines):
                raise broken_line from None
            raise _not_json(file, error.lineno, error.colno, error) from None
    if len(values) == 1:
        values = _unwrapped(values[0])
    return enumerate(values, 1)


def _json_lines(file: Path, lines: Sequence[str]) -> list[tuple[int, Any]]:
    """(line, record) of each line that is not blank; raises DuelError if one of them is not a value of its own."""
    numbered = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            numbered.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise _not_json(file, number, error.pos + 1, error) from None
    if len(numbered) == 1:  # the whole file in one line
        [(_, value)] = numbered
        return list(enumerate(_unwrapped(value), 1))
    return numbered


def _has_record_a_line(lines: Sequence[str]) -> bool:
    """True if a broken file seems to have one record per line, rather than a list or records over several lines."""
    if "".join(lines).lstrip().startswith("["):
        return False
    for line in lines:
        with suppress(json.JSONDecodeError):
            if isinstance(json.loads(line), dict):
                return True
    return False


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one after the other."""
    decoder = json.JSONDecoder()
    start = NOT_BLANK.search(text)
    while start:
        value, end = decoder.raw_decode(text, start.start())
        yield value
        start = NOT_BLANK.search(text, end)


def _not_json(file: Path, line: int, column: int, error: json.JSONDecodeError) -> DuelError:
    what = error.msg.removesuffix(" at")  # json's own place would follow
    return DuelError(f"{file}:{line} is not JSON ({what} at character {column}); repair this line.")


def _unwrapped(value: Any) -> list[Any]:
    """The records of one value: its entry "data" or its only entry, if that is a list of records; a list; or itself."""
    if isinstance(value, list):
        return value
    inner = None
    if isinstance(value, dict):
        inner = value.get("data")
        if not inner and len(value) == 1:
            [inner] = value.values()
    if isinstance(inner, list) and inner and all(isinstance(record, dict) for record in inner):
        return inner
    return [value]


TABLES: dict[str, Callable[[Path], Rows]] = {  # readers of rows, by ending
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
}
FORMATS = (*PLAIN, *TABLES)
