"""Traces: a JSON line for each window, written as its request is finished, and read back as plain Python.

    {"duel_trace": 1, "fingerprint": ..., "spec": {...}, "pretrained": ..., "tokenizer": ...}      the first line
    {"task": ..., "doc": 0, "request": 0, "sha256": ..., "window": 0, "context": 1, "ids": [...],
     "starts": [0, 4, ...], "reveal_steps": [...], "token_logprobs": [...],
     "confidence": [...], "margin": [...], "entropy": [...],
     "log_prob": -31.2, "nfe": 8, "near_ties": 0, "values": {"duel": -31.2}}

`sha256` is a digest of the request's text, since a trace that is continued may have another text at the same number.
`ids` are the target's, after `context` visible ids; `starts` are the target indices where blocks begin; `reveal_steps`
count from 0 in every block. `confidence` is the log-odds of P1, `margin` is P1 - P2 and `entropy` is in nats, each at
the step at which the token was revealed. `values` are all log-probabilities of the estimator, and `stderr` is its Monte
Carlo error. JSON has no infinities: null is -infinity among log-probabilities (the line has the "reason") and +infinity
as a confidence; `read` restores them. What an estimator does not have (the order of an ELBO) is an empty list. The line
of a lattice also has "rules": by name, the order of each rule that it followed. A two-phase estimate has "two_phase":
the log-prob of each block under the cache, its weight, and, if the weight is not 0, the log-prob without the cache. A
generated text has "text", how it was "generated", the number of its "repeat", and as "tail" the positions left when it
stopped.

Each rank writes its own file; `read` merges them.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console.command_line import finite
from lm_eval_duel.core.scores import IMPOSSIBLE
from lm_eval_duel.core.windows import target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import LATTICE
from lm_eval_duel.estimators.totals import TwoPhaseBlocks

if TYPE_CHECKING:
    from lm_eval_duel.core.scores import Score
    from lm_eval_duel.core.windows import Window
    from lm_eval_duel.estimators.base import Estimator

log = logging.getLogger("lm_eval.duel_mdm")

FORMAT = 1
BEGINNING = '{"duel_trace"'
REQUEST = ("task", "doc", "request", "repeat")  # identify the request of a window
STATISTICS = ("confidence", "margin", "entropy")


class Writer:
    """The trace of this rank; raises DuelError for a file that cannot be written, or is not a trace.

    It is opened before a checkpoint is read; `begin` writes its first line, which describes the checkpoint. A last line
    that was cut off is dropped. Lines are written whole, so two runs may share a file; on a full disk they wait.

    If one process resumes a run of several, the files of their ranks hold the windows so far. It makes its own file
    only with the first window that it scores.
    """

    def __init__(self, path: str | Path, rank: int = 0, ranks: int = 1):
        self.path = Path(path).absolute()
        self.waiting: deque[bytes] = deque()  # lines that the disk has not taken
        file = self.path
        if ranks > 1:
            file = self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        self.place = file
        self.header: dict[str, Any] | None = None  # the first line, until it is written
        self.resumes_ranks = ranks == 1 and not file.exists() and bool(_files_of_ranks(self.path))
        self.file: FileIO | None = None
        self.written: dict[str, Any] | None = None  # the first line of a trace that is continued
        try:
            if file.exists() and not _is_cut_header(file):
                self.written = _header(file)
            file.parent.mkdir(exist_ok=True)  # one folder: a misspelt path makes no tree of them
            self.file = file.open("ab", buffering=0)
            if file.stat().st_size:
                with file.open("rb") as lines, mmap(lines.fileno(), 0, access=ACCESS_READ) as content:
                    end_of_last_line = content.rfind(b"\n") + 1
                self.file.truncate(end_of_last_line)
            elif self.resumes_ranks:  # the file can be made; it is made again with the first window
                self.file.close()
                self.file = None
                file.unlink()
        except OSError as error:
            remedy = "Name a file in a folder that can be written."
            raise DuelError(f"The trace {path} cannot be written: {error}. {remedy}") from None

    def begin(self, header: dict[str, Any]) -> None:
        """Write the first line, or continue a trace of the same spec; raises DuelError for one of another."""
        if self.written is None:
            self.header = {"duel_trace": FORMAT, **header}
            if not self.resumes_ranks:
                self._write_header()
            return
        for key in ("fingerprint", "rules", "lattice_rule_code"):
            if self.written.get(key) != header.get(key):
                raise DuelError(
                    f"The trace {self.place} was written under another spec ({key} {self.written.get(key)}; "
                    f"this run's is {header.get(key)}). Name another file, or delete it."
                )

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Write the windows of one request, after the lines that wait."""
        lines = list(records)
        if lines:
            self._write_header()
        self._write_lines(lines)

    def _write_header(self) -> None:
        """Write the first line, if it is not written."""
        if self.header is not None:
            header = self.header
            self.header = None
            self._write_lines([header])

    def _write_lines(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines after those that wait."""
        was_full = bool(self.waiting)
        for each in lines:
            line = json.dumps(finite(each), allow_nan=False)
            self.waiting.append(f"{line}\n".encode())
        try:
            if self.waiting and self.file is None:
                self.file = self.place.open("ab", buffering=0)
            while self.waiting:
                assert self.file is not None
                text = self.waiting[0]
                written = self.file.write(text)
                if written < len(text):  # a disk that fills up takes a part of a line
                    self.waiting[0] = text[written:]
                else:
                    self.waiting.popleft()
        except OSError as error:
            if not was_full:
                log.error(
                    "%s cannot be written (%s): the run continues, and lines wait in memory until there is room",
                    self.place,
                    error,
                )

    def flush(self) -> None:
        """Write the lines that wait, or log how many are lost if the run ends now."""
        self.write([])
        if self.waiting:
            log.error("%d lines could not be written to %s", len(self.waiting), self.place)


INFINITE = {  # what null stands for
    "log_prob": -math.inf,
    "token_logprobs": -math.inf,
    "values": -math.inf,
    "confidence": math.inf,
}


def _with_infinities(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a trace with the infinities that were written as null."""
    restored = dict(line)
    for name, infinity in INFINITE.items():
        if name in line:
            restored[name] = _replace_null(line[name], infinity)
    if "rules" in line:
        restored["rules"] = {rule: _with_infinities(order) for rule, order in line["rules"].items()}
    return restored


def _replace_null(value: Any, infinity: float) -> Any:
    """A value, or the values of a list or dict, with an infinity in place of null."""
    if isinstance(value, dict):
        return {key: infinity if part is None else part for key, part in value.items()}
    if isinstance(value, list):
        return [infinity if part is None else part for part in value]
    return infinity if value is None else value


def record(window: Window, score: Score, estimator: Estimator) -> dict[str, Any]:
    """The line of a window."""
    parts = target_parts(window, estimator.blocks(window))
    values = {estimator.name: score.log_prob}
    rules = {}
    for name, other in score.others.items():
        values[name] = other.log_prob
        if name not in LATTICE:  # a rule's value has an order
            rules[name] = _order(other)
    line = {
        "context": len(window.context),
        "ids": list(window.target),
        "starts": [part.start for part in parts],
        **_order(score),
        "log_prob": score.log_prob,
        "values": values,
    }
    if rules:
        line["rules"] = rules
    blocks = score.blocks
    if isinstance(blocks, TwoPhaseBlocks) and blocks.count:
        line["two_phase"] = {
            "cached": list(blocks.cached),
            "weights": list(blocks.weights),
            "uncached": list(blocks.uncached),
        }
    if not math.isfinite(score.log_prob):
        line["reason"] = IMPOSSIBLE
    if score.stderr is not None:
        line["stderr"] = score.stderr
    return line


def _order(score: Score) -> dict[str, Any]:
    """One order and its statistics, in six digits."""
    statistics = {}
    for name in STATISTICS:
        values = getattr(score, name)
        statistics[name] = [float(f"{value:.6g}") for value in values]
    return {
        "reveal_steps": list(score.reveal_steps),
        "token_logprobs": list(score.token_logprobs),
        **statistics,
        "nfe": score.nfe,
        "near_ties": score.near_ties,
    }


def read(path: str | Path) -> list[dict[str, Any]]:
    """The windows of a trace, of all ranks, by task, document, request and window; of equal ones the last.

    Of several texts with one number, each has its windows: those of the text that was scored last come last. Raises
    DuelError if there is no trace, or its files have different specs.
    """
    requests: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}  # windows of each request and text
    for file in _files(path):
        for line in _lines(file):
            request = (*request_of(line), line.get("sha256"))
            number = line["window"]
            if number == 0:  # a request that was scored again is written completely
                requests.pop(request, None)
            requests.setdefault(request, {})[number] = line

    def none_last(request: tuple[Any, ...]) -> list[tuple[bool, Any]]:
        return [(value is None, value) for value in request[: len(REQUEST)]]

    windows = []
    for request in sorted(requests, key=none_last):  # a stable sort: texts stay in the order of their scoring
        lines = requests[request]
        for number in sorted(lines):
            windows.append(lines[number])
    return windows


def request_of(window: Mapping[str, Any]) -> tuple[Any, ...]:
    """The task and the numbers by which the request of a window is known."""
    return tuple(window.get(name) for name in REQUEST)


def files(place: str) -> list[str]:
    """The traces in a folder, or of a file; the files of several ranks are one trace. Raises DuelError without any.

    Other *.jsonl files of a folder are left out, with a warning.
    """
    if not Path(place).is_dir():
        return [place]
    traces: dict[str, None] = {}
    for path in sorted(Path(place).glob("*.jsonl")):
        try:
            _header(path)
        except DuelError:
            log.warning("%s is left out: it is not a trace, or one of another format", path)
        else:
            of_all_ranks = re.sub(r"\.rank\d+(?=\.jsonl$)", "", str(path))
            traces[of_all_ranks] = None
    if not traces:
        raise DuelError(f"{place} holds no trace; write a trace with --model_args trace=FILE.jsonl,...")
    return list(traces)


def spec(path: str | Path) -> dict[str, Any]:
    """The first line of a trace: fingerprint, spec, and the names of the model and its tokenizer."""
    return _header(_files(path)[0])


def _files(path: str | Path) -> list[Path]:
    """The files of a trace, all of one spec, the one that was written last at the end."""
    path = Path(path)
    candidates = [path, *_files_of_ranks(path)]
    files = [file for file in candidates if file.is_file()]
    files.sort(key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise DuelError(f"There is no trace {path}; write one with --model_args trace={path.name},...")

    fingerprints = set()
    listed = []
    for file in files:
        fingerprint = _header(file).get("fingerprint")
        fingerprints.add(fingerprint)
        listed.append(f"{file.name}: {fingerprint}")
    if len(fingerprints) > 1:
        raise DuelError(f"The files of trace {path} have different specs ({', '.join(listed)}). Delete the old ones.")
    return files


def _files_of_ranks(path: Path) -> list[Path]:
    """The files beside a trace that several processes have written."""
    of_a_rank = glob.escape(f"{path.stem}.rank") + "*" + glob.escape(path.suffix)
    return sorted(path.parent.glob(of_a_rank))


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as lines:
        try:
            header = json.loads(lines.readline())
            written = header["duel_trace"]
        except (ValueError, KeyError, TypeError):
            raise DuelError(f"{path} is not a trace: its first line has no spec. Name another file.") from None
    if written != FORMAT:
        raise DuelError(f"{path} is a trace of format {written}; this release reads {FORMAT}. Write it again.")
    return header


def _is_cut_header(path: Path) -> bool:
    """True if a file is empty, or has only the beginning of a trace's first line."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    return not first.endswith("\n") and first[: len(BEGINNING)] == BEGINNING[: len(first)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The windows of one file, without a last line that was cut off."""
    with path.open("rb") as lines:
        next(lines)
        for number, text in enumerate(lines, 2):
            if not text.endswith(b"\n"):
                return
            try:
                yield _window(json.loads(text))
            except (TypeError, ValueError, KeyError, AttributeError) as error:  # not JSON, not UTF-8, not whole
                raise DuelError(f"{path}, line {number} is not a window of a trace: {error!r}.") from None


def _window(line: dict[str, Any]) -> dict[str, Any]:
    """A line that is whole and consistent, with its infinities; raises one of several errors for another."""
    line = _with_infinities(line)
    kinds = {"window": int, "task": str | None, "doc": int | None, "request": int | None, "sha256": str | None}
    for name, kind in kinds.items():
        if not isinstance(line.get(name), kind):
            raise ValueError(f"{name} is {line.get(name)!r}")

    ids = line.get("ids", [])
    of_tokens = [line.get(name, []) for name in ("reveal_steps", "token_logprobs", *STATISTICS)]
    for entries in of_tokens:
        if len(entries) not in (0, len(ids)):  # empty: the estimator has no such values
            raise ValueError("its lists differ in length")
    starts = line.get("starts", [])
    values = line.get("values", {}).values()
    for number in itertools.chain(ids, starts, *of_tokens, values):
        if not isinstance(number, int | float):
            raise ValueError("its lists and values hold numbers")
    return line
