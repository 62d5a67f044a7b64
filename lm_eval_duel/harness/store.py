"""The harness's `--use_cache` files, made safe for resuming, and the form in which they hold scores.

The harness writes PATH_rank0.db, PATH_rank1.db, ..., one per process, as pickles. Here these files are

* refused if they were written under another spec, by a lattice that followed other rules, or in another format;
* read by any number of ranks;
* limited to plain numbers and texts: any other record, or one that was cut off, is dropped and scored again;
* safe on a full disk: what cannot be written waits in memory, so the run continues and loses nothing.

A request has one record: its generated text, or the scores of its windows without their orders. So a cached answer
counts in the results of this run, whichever run computed it. lm-eval's own look-up by text alone is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import io
import logging
import math
import pickle
import re
import sqlite3
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel import fingerprint
from lm_eval_duel.core.scores import STATISTICS, Kind, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.options import Options
from lm_eval_duel.rules import SeedFirst
from lm_eval_duel.text.annotated import Gap, TokenText

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")

FORMAT = 2  # of the records
VERSION = "lm_eval_duel format"
SPEC = "lm_eval_duel spec"
RULES = "lattice_rules"  # stored with the spec: the rules that a lattice follows
RULE_CODE = "lattice_rule_code"  # and the code of those that are a user's own
SUSPECT = "lm_eval_duel suspect"  # why the answers may be wrong
WINDOW = "window "  # before the key of a window's score
TIMEOUT = 60  # seconds to wait for a file that another rank is writing
KEYS = 'SELECT key FROM "unnamed"'
READ = 'SELECT value FROM "unnamed" WHERE key = ?'
WRITE = 'REPLACE INTO "unnamed" (key, value) VALUES (?, ?)'
DELETE = 'DELETE FROM "unnamed" WHERE key = ?'


# ---------------------------------------------------------------- scores as plain values

RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Score, TwoPhaseBlocks)}
ORDER = ("reveal_steps", "token_logprobs", *STATISTICS)  # fields of a score that results do not need


def encode(value: Any) -> Any:
    """A score as numbers, texts, tuples and dicts: (its class, the fields that are not at their defaults)."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: encode(part) for key, part in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    fields = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if part != field.default:
            fields[field.name] = encode(part)
    return type(value).__name__, fields


def decode(value: Any) -> Any:
    """The inverse of `encode`; raises one of several errors for a value of another form."""
    if isinstance(value, dict):
        return {key: decode(part) for key, part in value.items()}
    if not (isinstance(value, tuple) and len(value) == 2 and value[0] in RECORDS):
        return value
    name, fields = value
    parts = decode(fields)
    if "kind" in parts:
        parts["kind"] = Kind[parts["kind"]]
    return RECORDS[name](**parts)


def decode_score(record: Any) -> Score | None:
    """The score of a record; None if it is damaged."""
    try:
        score = decode(record)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return score if isinstance(score, Score) else None


def without_order(score: Score) -> Score:
    """A score without its order: what results need of it."""
    blocks = score.blocks
    if blocks is not None:
        empty = type(blocks)()
        blocks = blocks + empty  # adding drops the values of single blocks, not their sums
    others = {name: without_order(other) for name, other in score.others.items()}
    no_order: dict[str, Any] = dict.fromkeys(ORDER, ())
    return dataclasses.replace(score, **no_order, blocks=blocks, others=others)


def encode_request(scores: Sequence[Score]) -> tuple[Any, ...]:
    """The record of a finished request: its log-probability, and its windows without their orders."""
    log_prob = math.fsum(score.log_prob for score in scores)
    return log_prob, [encode(without_order(score)) for score in scores]


def decode_request(record: Any, windows: int) -> list[Score] | None:
    """The scores of a request of `windows` windows; None if the record is inconsistent."""
    try:
        log_prob, values = record
        scores = [decode(value) for value in values]
        consistent = len(scores) == windows and math.fsum(score.log_prob for score in scores) == log_prob
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return scores if consistent else None


# ---------------------------------------------------------------- the answers of one call


class Answers:
    """The answers to the requests of one call, saved as they are finished.

    A long document has many windows, so the score of each is kept until its request is saved: an interrupted run loses
    only the windows in flight. Without a response cache nothing is found and nothing is kept.
    """

    def __init__(
        self,
        store: ResponseCache | None,
        estimator: Estimator,
        kind: str,
        requests: Sequence[Instance],
        windows: Sequence[Sequence[Window]],
    ):
        self.store = store
        self.windows = windows
        self.keys: list[str] = []
        self.needed: Counter[Window] = Counter()  # of a window: how many unfinished requests wait for its record
        if store is None:
            return
        self.keys = [request_key(kind, request.args) for request in requests]
        for n in range(len(requests)):
            self.needed.update(self._parts(n))
        # What is part of a score and not of the spec: its fields, whether it has the statistics of a trace, and the
        # rules that a lattice follows.
        fields = [field.name for field in dataclasses.fields(Score)]
        rules = [str(rule) for rule in getattr(estimator, "rules", ())]
        self.contents = str((fields, estimator.traced, *rules))

    def saved(self) -> Iterator[tuple[int, list[Score]]]:
        """(index, scores of its windows) of each request that an earlier run has finished."""
        if self.store is None:
            return
        for n, key in enumerate(self.keys):
            record = self.store.find(key, tuple)
            if record is None:
                continue
            scores = decode_request(record, len(self.windows[n]))
            if scores is None:
                self.store.drop()
                continue
            self._finish(n)
            yield n, scores

    def kept(self, requests: Iterable[int]) -> dict[Window, Score]:
        """The scores of windows of these requests that an earlier run has kept."""
        scores: dict[Window, Score] = {}
        if self.store is None:
            return scores
        for n in requests:
            for window in self._parts(n) - scores.keys():
                record = self.store.find(self.key(window), tuple)
                if record is None:
                    continue
                score = decode_score(record)
                if score is None:
                    self.store.drop()
                else:
                    scores[window] = score
        return scores

    def keep(self, window: Window, score: Score) -> None:
        """Keep the score of a window until its requests are saved, unless they have only this window."""
        if self.store is not None and window in self.needed:
            self.store.keep(self.key(window), encode(score))

    def save(self, n: int, scores: Sequence[Score]) -> None:
        """Save a finished request, and delete the scores of its windows that no other request waits for."""
        if self.store is None:
            return
        self.store.keep(self.keys[n], encode_request(scores))
        self.store.forget([self.key(window) for window in self._finish(n)])

    def _parts(self, n: int) -> set[Window]:
        """The windows of a request that are kept one by one. A single window needs no record beside its request's."""
        windows = self.windows[n]
        return {*windows} if len(windows) > 1 else set()

    def _finish(self, n: int) -> list[Window]:
        """Note that a request is finished; returns its windows that no unfinished request needs."""
        windows = self._parts(n)
        self.needed.subtract(windows)
        return [window for window in windows if not self.needed[window]]

    def key(self, window: Window) -> str:
        """The key of a window's score."""
        return WINDOW + hashlib.sha256(f"{self.contents} {window}".encode()).hexdigest()


def request_key(kind: str, arguments: Iterable[Any], *more: str) -> str:
    """The key of a request: lm-eval's own key, a hash of its text, and everything else that its answer depends on.

    That is: the token ids of a text that carries them, the text after a gap, and `more`. For a generated text, `more`
    is the fingerprint of its spec and, if it is sampled, the number that seeds the draw.
    """
    from lm_eval.api.model import hash_args

    arguments = list(arguments)
    parts: list[str] = [hash_args(kind, arguments)]
    for argument in arguments:
        if isinstance(argument, TokenText | Gap):
            parts.append(argument.digest)
    parts += more
    if len(parts) == 1:
        return parts[0]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def followed_rules(estimator: Estimator) -> dict[str, str]:
    """The rules whose orders a lattice reads off, with the code of custom ones: in the results, but not in the spec."""
    rules = getattr(estimator, "rules", None)
    if rules is None:
        return {}
    specs: list[dict[str, str]] = [rule.describe() for rule in rules]
    followed = {RULES: "+".join(spec["rule"] for spec in specs)}
    codes = [spec["rule_code"] for spec in specs if "rule_code" in spec]
    if codes:
        followed[RULE_CODE] = "+".join(codes)
    return followed


# ---------------------------------------------------------------- the files


class ResponseCache:
    """The records of this rank's file, and of the other ranks' files at the time when it is opened.

    `follows`: the rules that a lattice follows, which must be equal, as the spec must. Raises DuelError for a file of
    another spec, or one that cannot be read.
    """

    def __init__(self, path: str, spec: Mapping[str, str], follows: Mapping[str, str]):
        self.path = Path(path)
        self.waiting: dict[str, Any] = {}  # records that the disk has not taken
        self.broken: set[Path] = set()  # files with records that cannot be read
        self.holders: dict[str, tuple[Path, sqlite3.Connection]] = {}  # another rank's file that holds a key
        for other in self._other_files():
            file = _open(other)
            for key in _checked_keys(other, file, spec, follows):
                self.holders[key] = other, file
        self.file = _open(self.path)
        # as in the harness: a killed process loses nothing, a power cut may
        self.file.execute("PRAGMA synchronous = OFF")
        keys = _checked_keys(self.path, self.file, spec, follows)
        self.has_answers = bool(keys or self.holders)
        self.keep(SPEC, {**spec, **follows})
        self.keep(VERSION, FORMAT)

    def find(self, key: str, kind: type) -> Any:
        """The record of a key, from the file of any rank; None if there is none that is intact and of this `kind`."""
        if key in self.waiting:
            return self.waiting[key]
        places = [(self.path, self.file)]
        if key in self.holders:
            places.append(self.holders[key])
        for path, file in places:
            try:
                row = file.execute(READ, (key,)).fetchone()
            except sqlite3.Error as error:
                if path == self.path:
                    raise unreadable(path, error) from error
                row = ()  # another rank may be gone, and its disk with it: dropped below, as a damaged record
            value = _read(row)
            if isinstance(value, kind):
                return value
            if row is not None:
                self.drop(path)
        return None

    def drop(self, path: Path | None = None) -> None:
        """Log, once per file, that one of its records is not used. `path`: this rank's file by default."""
        if path is None:
            path = self.path
        if path not in self.broken:
            log.warning("%s has a truncated or invalid record: it is dropped and scored again", path)
        self.broken.add(path)

    def keep(self, key: str, value: Any) -> None:
        """Write a record of plain values, after the records that wait. On a full disk it waits, too."""
        was_full = bool(self.waiting)
        self.waiting[key] = value
        try:
            with self.file:
                records = [(name, pickle.dumps(record)) for name, record in self.waiting.items()]
                self.file.executemany(WRITE, records)
        except sqlite3.Error as error:
            if not was_full:
                log.error(
                    "%s cannot be written (%s): the run continues, and answers wait in memory until there is room",
                    self.path,
                    error,
                )
            return
        if was_full:
            log.info("%s is writable again: the %d answers that waited are saved", self.path, len(self.waiting))
        self.waiting.clear()

    def suspect(self, reason: str) -> None:
        """Note that the answers may be wrong: they are not used any more, and not deleted."""
        self.keep(SUSPECT, reason)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete records, as far as possible."""
        for key in keys:
            self.waiting.pop(key, None)
        with contextlib.suppress(sqlite3.Error), self.file:
            self.file.executemany(DELETE, [(key,) for key in keys])

    def flush(self) -> None:
        """Write the records that wait, or log how many answers are lost if the run ends now."""
        if self.waiting:
            key, value = self.waiting.popitem()
            self.keep(key, value)  # and with it all others that wait
        if self.waiting:
            log.error("%d answers are not in %s: the next run scores them again", len(self.waiting), self.path)

    def _other_files(self) -> list[Path]:
        """The files of other ranks, also of an earlier run with more ranks."""
        parts = re.fullmatch(r"(.*_rank)\d+(\.db)", self.path.name, re.DOTALL)
        if parts is None:
            return []
        pattern = re.compile(re.escape(parts[1]) + r"\d+" + re.escape(parts[2]))
        files = []
        for file in self.path.absolute().parent.iterdir():
            if pattern.fullmatch(file.name) and file.name != self.path.name:
                files.append(file)
        return sorted(files)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers only: a pickle could name any code to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def _read(row: Any) -> Any:
    """The value of a record; None if it is missing, damaged or not a plain value."""
    try:
        return _PlainUnpickler(io.BytesIO(bytes(row[0]))).load()
    except Exception:  # a truncated pickle can raise anything
        return None


def _open(path: Path) -> sqlite3.Connection:
    """Open a rank's file, made by the harness. A write that a killed process left unfinished is rolled back."""
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=TIMEOUT, check_same_thread=False)


def _select(file: sqlite3.Connection, path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        return file.execute(query, values).fetchall()
    except sqlite3.Error as error:
        if "no such table" in str(error):  # its rank has just started
            return []
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> DuelError:
    """Make the error for a file that cannot be read."""
    return DuelError(f"The --use_cache file {path} cannot be read ({error}). Delete it: its answers are scored again.")


def require_same_args(path: Path, options: Options) -> None:
    """Raise DuelError for a file of answers under another estimator, rule, block or other windows than the options'.

    This is known before the network is loaded; the whole spec is compared when the file is opened (`_checked_keys`).
    """
    file = _open(path)
    try:
        stored = _stored(file, path, SPEC)
    finally:
        file.close()
    if not isinstance(stored, dict):
        return  # it is empty, or refused when it is opened
    ours = {"estimator": options.estimator, "windows": options.windows}
    follows_rule = registry.find(options.estimator).follows_rule
    wrapped = str(SeedFirst(options.rule))  # networks with `seeds_blocks` are scored with it
    if follows_rule and stored.get("rule") != wrapped:
        ours["rule"] = str(options.rule)
    if isinstance(options.block, int) and "block" in stored:
        ours["block"] = str(options.block)
    theirs = {key: stored.get(key) for key in ours}
    if theirs != ours:
        changed = "; ".join(fingerprint.differences(ours, theirs))
        raise DuelError(
            f"The --use_cache file {path} was written under another spec: {changed}. Name another file, or delete this "
            "one."
        )


def _checked_keys(
    path: Path, file: sqlite3.Connection, spec: Mapping[str, str], follows: Mapping[str, str]
) -> list[str]:
    """The keys of answers and windows in a file; raises DuelError if they are of another spec, or of none."""
    keys = [key for (key,) in _select(file, path, KEYS) if key not in (SPEC, VERSION)]
    ours = {**spec, **follows}
    stored = _stored(file, path, SPEC)
    if not isinstance(stored, dict):  # missing or damaged
        if not keys:
            return keys
        raise DuelError(
            f"The --use_cache file {path} holds answers of another model (it has no spec of duel-mdm). "
            "Name another file, or delete this one."
        )
    if stored != ours:
        theirs = dict(stored)
        theirs.pop(RULES, None)
        theirs.pop(RULE_CODE, None)
        changed = "; ".join(fingerprint.differences(ours, stored))
        raise DuelError(
            f"The --use_cache file {path} was written under another spec ({fingerprint.digest(theirs)}, this run is "
            f"{fingerprint.digest(spec)}): {changed}. Name another file, or delete this one."
        )
    version = _stored(file, path, VERSION)
    if keys and version != FORMAT:
        raise DuelError(
            f"The --use_cache file {path} has records of format {version or 1}, and this release reads {FORMAT}. Name "
            "another file, or delete this one: its answers are scored again."
        )
    if SUSPECT in keys:
        raise DuelError(
            f"The answers in the --use_cache file {path} are suspect ({fingerprint.digest(spec)}): "
            f"{_stored(file, path, SUSPECT)} Once that is mended, delete the file or name another one."
        )
    return keys


def _stored(file: sqlite3.Connection, path: Path, key: str) -> Any:
    """The value of one of this package's own keys, such as SPEC; None if it is missing or damaged."""
    rows = _select(file, path, READ, key)
    return _read(rows[0]) if rows else None
