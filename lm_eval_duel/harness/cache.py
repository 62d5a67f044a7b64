"""The harness's `--use_cache` files, made safe for resuming.

The harness writes PATH_rank0.db, PATH_rank1.db, ..., one per process, as pickles. The same files are

* refused if they were written under another spec, or by a lattice that followed other rules;
* read whatever number of ranks wrote them;
* limited to plain numbers and texts: any other record, or one that was cut off, is dropped and scored again;
* safe on a full disk: what could not be written waits in memory, so the run continues and loses nothing.

The harness looks up answers by text, without saying whose they are. So our models get all requests and look up answers
themselves: a cached answer is counted for the requests of this run, whichever run computed it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import re
import sqlite3
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlitedict import SqliteDict

from lm_eval_duel import fingerprint
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.cache_keys import request_key

log = logging.getLogger("lm_eval.duel_mdm")

SPEC = "lm_eval_duel spec"
RULES, RULE_CODE = "lattice_rules", "lattice_rule_code"  # stored with the spec: the rules that a lattice follows
DOCUMENTS = "documents "  # before the kind of requests: which documents a run has, and in which order it takes them
VALUES = "account "  # before the key of an answer: what each of the request's windows contributed
TIMEOUT = 60  # seconds to wait for a file that another rank is writing
ANSWER_TYPES = {"loglikelihood": tuple, "loglikelihood_rolling": float, "generate_until": str}
READ = 'SELECT value FROM "unnamed" WHERE key = ?'
WRITE = 'REPLACE INTO "unnamed" (key, value) VALUES (?, ?)'
DELETE = 'DELETE FROM "unnamed" WHERE key = ?'


class ResponseCache(SqliteDict):
    """The harness's dict of answers after `adopt`: the same object and the same file of this rank."""

    def adopt(self, spec: Mapping[str, str], follows: Mapping[str, str], generation: str) -> ResponseCache:
        """Take over a dict that the harness has opened, for answers of this spec.

        `follows`: what else must be equal, because it is in a run's results. `generation`: the fingerprint of
        generated texts. Raises DuelError if this rank's file or another's is of another spec, or cannot be read.
        """
        self.__class__ = ResponseCache
        self.generation = generation
        self.waiting: dict[str, Any] = {}  # records that the disk has not taken
        self.broken: set[str] = set()  # files with records that cannot be read
        self.elsewhere: dict[str, tuple[sqlite3.Connection, Path]] = {}  # the other rank's file that holds a key
        self.conn.log.setLevel(logging.CRITICAL + 1)  # it logs whole tracebacks; errors are reported here instead
        own = len({key for (key,) in self._own('SELECT key FROM "unnamed"') if not key.startswith(DOCUMENTS)})
        _require(spec, follows, self.find(SPEC), own > 0, self.filename)
        for path in self._other_files():
            other = _open(path)
            keys = {key for (key,) in _select(other, path, 'SELECT key FROM "unnamed"')}
            _require(spec, follows, next(map(_read, _select(other, path, READ, SPEC)), None), bool(keys), path)
            answered = {key for key in keys - {SPEC} if not key.startswith(DOCUMENTS)}
            self.elsewhere |= dict.fromkeys(answered, (other, path))
        self.has_answers = bool(own > 1 or self.elsewhere)
        self[SPEC] = {**spec, **follows}
        return self

    def find(self, key: str, kind: type | None = None) -> Any:
        """The value of `key`, from any rank's file; None if there is none that is intact and of this `kind`."""
        if key in self.waiting:
            return self.waiting[key]
        for path, row in self._rows(key):
            value = _read(row)
            if value is not None and (kind is None or isinstance(value, kind)):
                return value
            self.drop(path)
        return None

    def drop(self, path: str | Path | None = None) -> None:
        """Log, once per file, that one of its records is not used. `path`: this rank's file by default."""
        path = str(path or self.filename)
        if path not in self.broken:
            log.warning("%s has a truncated or invalid record: it is dropped and scored again", path)
        self.broken.add(path)

    # ------------------------------------------------------------ answers of requests

    def answer(self, kind: str, arguments: Iterable[Any]) -> Any:
        """The answer to a request; None if it has none."""
        return self.find(request_key(kind, arguments, self.generation), ANSWER_TYPES[kind])

    def values(self, kind: str, arguments: Iterable[Any]) -> Any:
        """What `keep` stored with the answer; None if it stored nothing."""
        return self.find(VALUES + request_key(kind, arguments, self.generation))

    def keep(self, kind: str, arguments: Iterable[Any], answer: Any, values: Any) -> None:
        """Store an answer and, before it, the plain `values` that its windows contributed."""
        key = request_key(kind, arguments, self.generation)
        self[VALUES + key] = values
        self[key] = answer

    def forget(self, keys: Iterable[str]) -> None:
        """Delete records, as far as possible."""
        for key in keys:
            self.waiting.pop(key, None)
            with contextlib.suppress(sqlite3.Error):
                self.conn.execute(DELETE, (key,))
        self._settle()

    # ------------------------------------------------------------ the harness's use of the dict

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def __getitem__(self, key: str) -> Any:
        if (value := self.find(key)) is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self.waiting[key] = value
        self._write()

    def commit(self, blocking: bool = True) -> None:
        """Called last for each kind of requests."""
        if self.waiting:
            self._write()
        if self.waiting:
            log.error("%d answers are not in %s: the next run scores them again", len(self.waiting), self.filename)

    # ------------------------------------------------------------ files

    def _write(self) -> None:
        """Write the records that wait. If the disk does not take them, they keep waiting."""
        was_full = len(self.waiting) > 1
        try:
            for key, value in self.waiting.items():
                self.conn.execute(WRITE, (key, self.encode(value)))
            self.conn.commit()
            self.conn.check_raise_error()  # of SqliteDict's thread, which has done all of this by now
        except sqlite3.Error as error:
            self._settle()
            if not was_full:
                log.error(
                    "%s cannot be written (%s): the run continues, and answers wait in memory until there is room",
                    self.filename,
                    error,
                )
            return
        if was_full:
            log.info("%s is writable again: the %d answers that waited are saved", self.filename, len(self.waiting))
        self.waiting.clear()

    def _settle(self) -> None:
        """Let SqliteDict's thread meet its remaining errors now, so that no later call raises them."""
        for _ in range(2):
            with contextlib.suppress(sqlite3.Error):
                self.conn.commit()
                self.conn.check_raise_error()

    def _own(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            return list(self.conn.select(query, values))
        except sqlite3.Error as error:
            raise unreadable(self.filename, error) from error

    def _rows(self, key: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """(file, row) of each record of a key."""
        yield from ((self.filename, row) for row in self._own(READ, key))
        if key in self.elsewhere:
            other, path = self.elsewhere[key]
            try:
                yield from ((str(path), row) for row in other.execute(READ, (key,)))
            except sqlite3.Error as error:
                if str(path) not in self.broken:
                    log.warning("%s cannot be read (%s): its answers are scored again", path, error)
                self.broken.add(str(path))

    def _other_files(self) -> list[Path]:
        """The files of other ranks, also those of an earlier run with more ranks."""
        mine = Path(self.filename)
        if (parts := re.fullmatch(r"(.*_rank)\d+(\.db)", mine.name, re.DOTALL)) is None:
            return []
        pattern = re.compile(re.escape(parts[1]) + r"\d+" + re.escape(parts[2]))
        return sorted(path for path in mine.parent.iterdir() if pattern.fullmatch(path.name) and path.name != mine.name)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers only: a pickle could name any code to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def _read(row: tuple[Any, ...]) -> Any:
    """The value of a record; None if it is damaged or not a plain value."""
    try:
        return _PlainUnpickler(io.BytesIO(bytes(row[0]))).load()
    except Exception:  # a truncated pickle can raise anything
        return None


def _open(path: Path) -> sqlite3.Connection:
    """Another rank's file. Not read-only: what it was writing when it was killed is rolled back here."""
    return sqlite3.connect(f"file:{urllib.parse.quote(str(path.absolute()))}?mode=rw", uri=True, timeout=TIMEOUT)


def contents(path: Path) -> dict[str, Any]:
    """The spec, the orders of documents and the answers in a file, by key; raises DuelError if it cannot be read."""
    try:
        connection = _open(path)
        rows = _select(connection, path, "SELECT key, value FROM \"unnamed\" WHERE key NOT LIKE 'account %'")
        connection.close()
    except sqlite3.Error as error:
        raise unreadable(path, error) from error
    return {key: _read((value,)) for key, value in rows if not key.startswith("window ")}


def _select(connection: sqlite3.Connection, path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        if "no such table" in str(error):  # its rank has just started
            return []
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> DuelError:
    """The error for a file that cannot be read."""
    return DuelError(f"The --use_cache file {path} cannot be read ({error}). Delete it: its answers are scored again.")


def _require(spec: Mapping[str, str], follows: Mapping[str, str], stored: Any, answers: bool, path: str | Path) -> None:
    """Raise DuelError if a file has answers of another spec, or answers without a spec."""
    if not isinstance(stored, dict):  # missing or damaged
        stored = None
    if stored is None and answers:
        raise DuelError(
            f"The --use_cache file {path} holds answers of another model (it has no spec of duel-mdm). "
            "Name another file, or delete this one."
        )
    if stored is not None and stored != (ours := {**spec, **follows}):
        theirs = fingerprint.digest({key: value for key, value in stored.items() if key not in (RULES, RULE_CODE)})
        changed = "; ".join(fingerprint.differences(ours, stored))
        raise DuelError(
            f"The --use_cache file {path} was written under another spec ({theirs}, this run is "
            f"{fingerprint.digest(spec)}): {changed}. Name another file, or delete this one."
        )
