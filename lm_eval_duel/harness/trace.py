"""Traces: one JSON line for each window, written as its document is finished, and read back as plain Python.

    {"duel_trace": 1, "fingerprint": ..., "spec": {...}, "tokenizer": ...}           the first line
    {"task": ..., "doc": 0, "request": 0, "window": 0, "context": 1, "ids": [...],
     "starts": [0, 4, ...], "reveal_steps": [...], "token_logprobs": [...],
     "confidence": [...], "margin": [...], "entropy": [...],
     "log_prob": -31.2, "nfe": 8, "near_ties": 0, "values": {"duel": -31.2}}

`ids` are the target's, and `context` the number of given ids before it; `starts` are the target indices where blocks
begin; `steps` count from 0 in every block. `confidence` is the log-odds of P1, `margin` P1 - P2, `entropy` in nats,
each as the token was revealed. `values` is all that the estimator says, in nats, and `stderr` its Monte Carlo error.
JSON has no infinities: null is -infinity among log-probabilities (the line says the "reason") and +infinity as a
confidence; `read` gives them back. What an estimator does not have (the order of an ELBO) is an empty list. A lattice
also has "rules": by name, the same for the order of each rule that it read off. A generated text is a line, too:
"text", how it was "generated", its number among "repeat"s, and as "tail" the positions left when it stopped.

On several ranks there is a file for each; `read` merges them.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval_duel.engine.results import WindowScore
    from lm_eval_duel.engine.windows import Window
    from lm_eval_duel.estimators.base import Estimator
    from lm_eval_duel.estimators.lattice import Path as Order

log = logging.getLogger("lm_eval.duel_mdm")

FORMAT = 1
BEGINNING = '{"duel_trace"'
CHUNK = 1 << 16  # bytes
NAMES = ("task", "doc", "request", "repeat")  # of what a window belongs to
SHOWN = ("confidence", "margin", "entropy")
REMEDY = "Name a file in a folder that can be written."
IMPOSSIBLE = (
    "a token has probability 0 under this spec (as top_k and top_p make it), so the log-likelihood is -infinity"
)


class Writer:
    """The trace of this rank. A file of the same spec is continued; raises DuelError for one of another spec."""

    def __init__(self, path: str, header: dict[str, Any], rank: int = 0, ranks: int = 1):
        self.path = Path(path).absolute()
        mine = place(path, rank, ranks)
        header = {"duel_trace": FORMAT, **header}
        begun = mine.exists() and not _cut_at_once(mine)
        if begun:
            found = _header(mine)
            for key in ("fingerprint", "rules", "lattice_rule_code"):
                if found.get(key) != header.get(key):
                    raise DuelError(
                        f"The trace {mine} was written under another spec ({key} {found.get(key)}; this run's is "
                        f"{header.get(key)}). Name another file, or delete it."
                    )
            with mine.open("r+b") as file:  # a line that was cut off in the middle
                file.truncate(_end_of_lines(file))
        try:
            if not begun:
                mine.parent.mkdir(exist_ok=True)
                mine.write_bytes(b"")
            self._file = mine.open("ab", buffering=0)  # where another writer has the file too, lines stay whole
        except OSError as error:
            raise DuelError(f"The trace {path} cannot be written: {error}. {REMEDY}") from None
        self._waiting: deque[bytes] = deque()  # lines that the disk has not taken
        if not begun:
            self.write([header])

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Write the windows of one document. Where the disk is full they wait in memory, and the run goes on."""
        late = bool(self._waiting)
        self._waiting.extend((json.dumps(finite(record), allow_nan=False) + "\n").encode() for record in records)
        try:
            while self._waiting:
                line = self._waiting[0]
                self._waiting[0] = line[self._file.write(line) :]
                if not self._waiting[0]:
                    self._waiting.popleft()
        except OSError as error:
            if not late:
                name = self._file.name
                log.error("trace %s cannot be written (%s): the run goes on, and lines wait in memory", name, error)

    def settle(self) -> None:
        """Write what waits, or say that it is not written."""
        self.write([])
        if self._waiting:
            log.error("%d lines are not in the trace %s", len(self._waiting), self._file.name)


def place(path: str | Path, rank: int = 0, ranks: int = 1) -> Path:
    """The file of a rank; raises DuelError where it cannot be written, or holds something else than a trace."""
    path = Path(path).absolute()
    mine = _of_rank(path, rank) if ranks > 1 else path
    if path.is_dir() or mine.is_dir():
        raise DuelError(f"The trace {path} is a folder. Name a file in it: trace={path / 'trace.jsonl'}")
    folder = next(folder for folder in mine.parents if folder.exists())
    if len(mine.parents) > 1 and folder not in mine.parents[:2]:  # a misspelt path makes no tree of folders
        raise DuelError(f"There is no folder {mine.parent.parent} for the trace {path}. Make it, or name another file.")
    if not folder.is_dir() or not os.access(mine if mine.exists() else folder, os.W_OK):
        raise DuelError(f"The trace {path} cannot be written in {folder}. {REMEDY}")
    if mine.exists() and not _cut_at_once(mine):
        _header(mine)
    return mine


def finite(value: Any) -> Any:
    """A value for JSON, which has no infinities: null in their place."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


INFINITE = {
    "log_prob": -math.inf,
    "token_logprobs": -math.inf,
    "values": -math.inf,
    "confidence": math.inf,
}  # what a null was


def _infinite(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a trace with the infinities that `finite` took out."""
    restored = dict(line)
    for name, number in INFINITE.items():
        value = line.get(name, [])
        if isinstance(value, dict):
            restored[name] = {key: number if part is None else part for key, part in value.items()}
        elif isinstance(value, list):
            restored |= {name: [number if part is None else part for part in value]} if None in value else {}
        else:
            restored[name] = number if value is None else value
    if "rules" in line:
        restored["rules"] = {name: _infinite(path) for name, path in line["rules"].items()}
    return restored


def record(window: Window, scored: WindowScore, estimator: Estimator) -> dict[str, Any]:
    """One window as a line."""
    start = len(window.context)
    values = estimator.values(scored)
    found = {
        "context": start,
        "ids": list(window.target),
        "starts": [max(0, first - start) for first, _ in estimator.blocks(window)],
        **_path(scored),
        "log_prob": scored.log_prob,
        "values": {name: value.log_prob for name, value in values.items()},
    }
    if paths := getattr(scored, "rules", None):  # of a lattice
        found["rules"] = {name: _path(path) for name, path in paths.items()}
    if not math.isfinite(scored.log_prob):
        found["reason"] = IMPOSSIBLE
    errors = {name: value.stderr for name, value in values.items() if value.stderr is not None}
    return found | ({"stderr": errors[next(iter(values))]} if errors else {})


def _path(scored: WindowScore | Order) -> dict[str, Any]:
    """One order and what was seen on the way."""
    return {
        "reveal_steps": list(scored.reveal_steps),
        "token_logprobs": list(scored.token_logprobs),
        **{name: [float(f"{value:.6g}") for value in getattr(scored, name)] for name in SHOWN},
        "nfe": scored.nfe,
        "near_ties": scored.near_ties,
    }


def read(path: str | Path) -> list[dict[str, Any]]:
    """The windows of a trace, those of all ranks, by task, document, request and window; the last of equal ones.

    Raises DuelError where there is no trace, or parts of it were written under different specs.
    """
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}  # of each request, by window
    for part in _parts(path):
        for line in _lines(part):
            request = tuple(line.get(name) for name in NAMES)
            if line.get("window") == 0:  # a request that was scored again is written whole
                found[request] = {}
            found.setdefault(request, {})[line.get("window")] = line
    requests = sorted(found, key=lambda request: [(value is None, value) for value in request])
    return [line for request in requests for _, line in sorted(found[request].items())]


def spec(path: str | Path) -> dict[str, Any]:
    """The first line of a trace: fingerprint, spec and tokenizer."""
    return _header(_parts(path)[0])


def _of_rank(path: Path, rank: int | str) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _parts(path: str | Path) -> list[Path]:
    """The files of a trace, all of one spec."""
    path = Path(path)
    parts = [path] if path.is_file() else []
    ranks = glob.escape(f"{path.stem}.rank") + "*" + glob.escape(path.suffix)
    parts += sorted(part for part in path.parent.glob(ranks) if part.is_file())
    parts.sort(key=lambda part: part.stat().st_mtime_ns)  # what was written last counts
    if not parts:
        raise DuelError(f"There is no trace {path}; write one with --model_args trace={path.name},...")
    specs = {part: _header(part).get("fingerprint") for part in parts}
    if len(set(specs.values())) > 1:
        said = ", ".join(f"{part.name}: {found}" for part, found in specs.items())
        raise DuelError(f"The files of trace {path} were written under different specs ({said}). Delete the old ones.")
    return parts


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as lines:
        try:
            found = json.loads(lines.readline())
            if found["duel_trace"] != FORMAT:
                raise DuelError(
                    f"{path} is a trace of format {found['duel_trace']}; this release reads {FORMAT}. Write it again."
                )
            hash(found.get("fingerprint"))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise DuelError(f"{path} is no trace: its first line is no spec. Name another file.") from None
    return found


def _cut_at_once(path: Path) -> bool:
    """Whether a file is empty, or holds a part of its first line only."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    return not first.endswith("\n") and first[: len(BEGINNING)] == BEGINNING[: len(first)]


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The windows of one file; a last line that was cut off is left out."""
    with path.open("rb") as lines:
        next(lines)
        for number, line in enumerate(lines, 2):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
                found = _infinite(found) if isinstance(found, dict) else found
            except (TypeError, ValueError) as error:  # no JSON, or no UTF-8
                raise DuelError(f"{path}, line {number} is no window of a trace: {error}.") from None
            if wrong := _wrong(found):
                raise DuelError(f"{path}, line {number} is no window of a trace: {wrong}.")
            yield found


def _wrong(line: Any) -> str | None:
    """What keeps a line from being a window, if anything."""
    if not isinstance(line, dict):
        return "it is no object"
    for name, kinds in (("window", int), ("task", str | None), ("doc", int | None), ("request", int | None)):
        if not isinstance(line.get(name), kinds):
            return f"'{name}' is {line.get(name)!r}"
    for name in ("ids", "starts", "reveal_steps", "token_logprobs", *SHOWN):
        values = line.get(name, [])
        kinds = int if name in ("ids", "starts", "reveal_steps") else int | float
        if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
            return f"'{name}' is no list of numbers"
        if name not in ("ids", "starts") and len(values) not in (0, len(line.get("ids", values))):
            return f"'{name}' has {len(values)} values for {len(line['ids'])} tokens"
    values = line.get("values", {})
    if not isinstance(values, dict) or not all(isinstance(value, int | float) for value in values.values()):
        return "'values' is no object of numbers"
    return None
