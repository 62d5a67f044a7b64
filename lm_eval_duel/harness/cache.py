"""The harness's `--use_cache` files as a resumed run needs them: of one spec, of any number of ranks, safe to read.

The harness writes PATH_rank0.db, PATH_rank1.db, ..., one for each process, as pickles. Here the same files

* are refused where they were written under another spec, or by a lattice that followed other rules;
* are found whatever the number of ranks was that wrote them;
* hold plain numbers and texts: a record of anything else, or one that was cut off, is dropped and scored again;
* may run out of disk: what could not be written waits in memory, so the run goes on and loses nothing.

The harness looks for answers by their letters, and does not say whose they are. So a model of this package gets all
requests and looks for itself: what it finds is counted for the requests of this run, whoever asked before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import re
import sqlite3
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval.api import model as harness
from sqlitedict import SqliteDict

from lm_eval_duel import fingerprint
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.cache_keys import Key

log = logging.getLogger("lm_eval.duel_mdm")

SPEC = "lm_eval_duel spec"
RULES, RULE_CODE = "lattice_rules", "lattice_rule_code"  # beside the spec: what a lattice follows, and its own code
ACCOUNT = "account "  # before the key of an answer: what a request with this answer came to
PATIENCE = 60  # seconds to wait for a file that another rank is writing
ANSWERS = {"loglikelihood": tuple, "loglikelihood_rolling": float, "generate_until": str}
READ = 'SELECT value FROM "unnamed" WHERE key = ?'
WRITE = 'REPLACE INTO "unnamed" (key, value) VALUES (?, ?)'
DELETE = 'DELETE FROM "unnamed" WHERE key = ?'


class ResponseCache(SqliteDict):
    """The harness's dict of answers, after `adopt`: the same object and the same file of this rank."""

    def adopt(self, spec: Mapping[str, str], follows: Mapping[str, str], generating: str) -> ResponseCache:
        """Take over a dict that the harness has opened, for answers of this spec.

        `follows`: what else is in the results of a run, and must be equal. `generating`: the digest of the spec of
        generated texts. Raises DuelError where the file, or another rank's, is of another spec or cannot be read.
        """
        self.__class__ = ResponseCache
        self.generating = generating
        self.waiting: dict[str, Any] = {}  # what the disk has not taken
        self.broken: set[str] = set()  # files with records that cannot be read
        self.elsewhere: dict[str, tuple[sqlite3.Connection, Path]] = {}  # which other file holds a key
        self.conn.log.setLevel(logging.CRITICAL + 1)  # it writes out whole stacks; what is wrong is said here
        own = self._own('SELECT COUNT(*) FROM "unnamed"')[0][0]
        _require(spec, follows, self.find(SPEC), own > 0, self.filename)
        for path in self._others():
            other = _open(path)
            keys = {key for (key,) in _select(other, path, 'SELECT key FROM "unnamed"')}
            _require(spec, follows, next(map(_read, _select(other, path, READ, SPEC)), None), bool(keys), path)
            self.elsewhere |= dict.fromkeys(keys - {SPEC}, (other, path))
        self.found = bool(own > 1 or self.elsewhere)  # there are answers from before
        self[SPEC] = {**spec, **follows}
        return self

    def find(self, key: str) -> Any:
        """What is kept under `key`, here or by another rank; None where there is nothing, or nothing that is right."""
        kind = None
        if isinstance(key, Key):
            key, kind = key.under(self.generating), ANSWERS[key.kind]
        if key in self.waiting:
            return self.waiting[key]
        for path, row in self._rows(key):
            value = _read(row)
            if value is not None and (kind is None or isinstance(value, kind)):
                return value
            self.drop(path)
        return None

    def drop(self, path: str | Path | None = None) -> None:
        """Say, once for each file, that what it holds is not used; without `path`, this rank's."""
        path = str(path or self.filename)
        if path not in self.broken:
            log.warning("%s has a record that was cut off or is no answer: it is dropped and scored again", path)
        self.broken.add(path)

    def note(self, key: Key, account: Any) -> None:
        """Keep beside an answer what a request with this answer came to: plain values."""
        self[ACCOUNT + key.under(self.generating)] = account

    def account(self, key: Key) -> Any:
        """What `note` kept; None where there is nothing."""
        return self.find(ACCOUNT + key.under(self.generating))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete what is kept under these keys, where it can be."""
        for key in keys:
            self.waiting.pop(key, None)
            with contextlib.suppress(sqlite3.Error):
                self.conn.execute(DELETE, (key,))
        self._settle()

    # ------------------------------------------------------------ what the harness does with its dict

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def __getitem__(self, key: str) -> Any:
        if (value := self.find(key)) is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(key, Key):
            key = key.under(self.generating)
        self.waiting[key] = value
        self._write()

    def commit(self, blocking: bool = True) -> None:
        """The harness's last word after each kind of requests."""
        if self.waiting:
            self._write()
        if self.waiting:
            log.error("%d answers are not in %s: the next run scores them again", len(self.waiting), self.filename)

    # ------------------------------------------------------------ files

    def _write(self) -> None:
        """Write what waits; where the disk does not take it, it goes on waiting."""
        late = len(self.waiting) > 1
        try:
            for key, value in self.waiting.items():
                self.conn.execute(WRITE, (key, self.encode(value)))
            self.conn.commit()
            self.conn.check_raise_error()  # of the other thread, which has done all of this now
        except sqlite3.Error as error:
            self._settle()
            if not late:
                log.error(
                    "%s cannot be written (%s): the run goes on, and answers wait in memory until there is room",
                    self.filename,
                    error,
                )
            return
        if late:
            log.info("%s is written again: %d answers that waited are in it", self.filename, len(self.waiting))
        self.waiting.clear()

    def _settle(self) -> None:
        """Let the other thread run into what else cannot be written, so that no later call hears of it."""
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
                    log.warning("%s cannot be read (%s): what it holds is scored again", path, error)
                self.broken.add(str(path))

    def _others(self) -> list[Path]:
        """The files of other ranks, those of an earlier run with more of them included."""
        mine = Path(self.filename)
        if (parts := re.fullmatch(r"(.*_rank)\d+(\.db)", mine.name, re.DOTALL)) is None:
            return []
        named = re.compile(re.escape(parts[1]) + r"\d+" + re.escape(parts[2]))
        return sorted(path for path in mine.parent.iterdir() if named.fullmatch(path.name) and path.name != mine.name)


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and what holds them; a pickle could name any code to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no answer")


def _read(row: tuple[Any, ...]) -> Any:
    """What a record holds; None where that is no plain value."""
    try:
        return _Plain(io.BytesIO(bytes(row[0]))).load()
    except Exception:  # a pickle that was cut off raises whatever its last bytes happen to mean
        return None


def _open(path: Path) -> sqlite3.Connection:
    """Another rank's file. Not read-only: what it was writing when it was killed is rolled back here."""
    return sqlite3.connect(f"file:{urllib.parse.quote(str(path.absolute()))}?mode=rw", uri=True, timeout=PATIENCE)


def _select(connection: sqlite3.Connection, path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        if "no such table" in str(error):  # its rank has just begun
            return []
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> DuelError:
    return DuelError(f"The --use_cache file {path} cannot be read ({error}). Delete it: its answers are scored again.")


def _require(spec: Mapping[str, str], follows: Mapping[str, str], stored: Any, answers: bool, path: str | Path) -> None:
    """Raise DuelError where a file has answers of another spec, or of none."""
    if not isinstance(stored, dict):  # none, or a damaged one
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


_open_harness = getattr(harness.CachingLM.__init__, "plain", harness.CachingLM.__init__)


def _opened(self: harness.CachingLM, lm: Any, cache_db: str, *more: Any, **others: Any) -> None:
    """The harness opens its file before anybody else sees it: one that is broken, or cannot be made, is named."""
    remedy = "Name a path in a folder that can be written."
    if os.path.isdir(cache_db):
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: it is a folder. {remedy}")
    try:
        _open_harness(self, lm, cache_db, *more, **others)
    except sqlite3.Error as error:
        if os.path.exists(cache_db):
            raise unreadable(cache_db, error) from error
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: {error}. {remedy}") from error
    except OSError as error:
        raise DuelError(f"The --use_cache file {cache_db} cannot be made: {error}. {remedy}") from error
    if isinstance(self.dbdict, ResponseCache):
        lm.cache_hook = harness.CacheHook(None)
        for kind in ANSWERS:
            setattr(self, kind, functools.partial(_answer, self, kind))


def _answer(self: harness.CachingLM, kind: str, requests: list[Any], **more: Any) -> list[Any]:
    """The model's answers to all requests: it looks in this file itself, and only while it is asked through it."""
    self.lm.cache_hook = self.get_cache_hook()
    try:
        return getattr(self.lm, kind)(requests, **more)
    finally:
        self.lm.cache_hook = harness.CacheHook(None)
        self.dbdict.commit()


_opened.plain = _open_harness
harness.CachingLM.__init__ = _opened
