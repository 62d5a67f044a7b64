"""The harness's `--use_cache` files as a resumed run needs them: of one law, of any number of ranks, safe to read.

The harness writes PATH_rank0.db, PATH_rank1.db, ..., one for each process, keyed by a request's letters alone, as
pickles. Here the same files

* are refused where they were written under another law;
* tell apart texts of equal letters with other ids, generated texts of other laws, and samples;
* are found whatever the number of ranks was that wrote them;
* are read as plain numbers and texts: a record that holds anything else, or was cut off, is dropped and scored again;
* may run out of disk: what could not be written waits in memory, so the run goes on and loses nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
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
from lm_eval_duel.token_text import TokenText

log = logging.getLogger("lm_eval.duel_mdm")

LAW = "lm_eval_duel law"
SAMPLE = "a sample: kept under a key of its own"
RESULTS = {
    ("lm_eval_duel.ledger", "Scored"),
    ("lm_eval_duel.elbo", "Bound"),
    ("lm_eval_duel.lattice", "Ordered"),
    ("lm_eval_duel.lattice", "Path"),
}
PATIENCE = 60  # seconds to wait for a file that another rank is writing


class ResponseCache(SqliteDict):
    """The harness's dict of answers, after `adopt`: the same object and the same file of this rank."""

    def adopt(self, law: Mapping[str, str]) -> ResponseCache:
        """Take over a dict that the harness has opened; raises DuelError where it, or another rank's, is of another law
        or cannot be read."""
        self.__class__ = ResponseCache
        self.waiting: dict[str, Any] = {}  # what the disk has not taken
        self.dropped = 0
        self.elsewhere: dict[str, sqlite3.Connection] = {}  # which other file holds a key
        self.conn.log.setLevel(logging.CRITICAL + 1)  # it writes out whole stacks; what is wrong is said here
        own = SqliteDict.__len__(self)
        _require(law, self.find(LAW), own > 0, self.filename)
        for path in self._others():
            other = _open(path)
            keys = {key for (key,) in _select(other, path, 'SELECT key FROM "unnamed"')}
            values = _select(other, path, 'SELECT value FROM "unnamed" WHERE key = ?', LAW)
            _require(law, next((_read(value) for (value,) in values), None), bool(keys), path)
            self.elsewhere |= dict.fromkeys(keys - {LAW}, other)
        self.found = bool(own > 1 or self.elsewhere)  # there are answers from before
        self[LAW] = dict(law)
        return self

    def find(self, key: str) -> Any:
        """The answer kept under `key`, here or by another rank; None where there is none, or none that can be read."""
        if key in self.waiting:
            return self.waiting[key]
        for blob in self._blobs(key):
            if (value := _read(blob)) is not None:
                return value
            self._drop()
        return None

    def __contains__(self, key: str) -> bool:
        return key != SAMPLE and self.find(key) is not None

    def __getitem__(self, key: str) -> Any:
        if (value := self.find(key)) is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if key != SAMPLE:
            self.waiting[key] = value
            self._write()

    def _write(self) -> None:
        """Write what waits; where the disk does not take it, it goes on waiting."""
        late = len(self.waiting) > 1
        try:
            for key, value in self.waiting.items():
                row = (key, self.encode(value))
                self.conn.execute(f'REPLACE INTO "{self.tablename}" (key, value) VALUES (?, ?)', row)
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

    def forget(self, keys: Iterable[str]) -> None:
        """Delete what is kept under these keys, where it can be."""
        for key in keys:
            self.waiting.pop(key, None)
            with contextlib.suppress(sqlite3.Error):
                self.conn.execute(f'DELETE FROM "{self.tablename}" WHERE key = ?', (key,))
        self._settle()

    def _settle(self) -> None:
        """Let the other thread run into what else cannot be written, so that no later call hears of it."""
        for _ in range(2):
            with contextlib.suppress(sqlite3.Error):
                self.conn.commit()
                self.conn.check_raise_error()

    def commit(self, blocking: bool = True) -> None:
        """The harness's last word after each kind of requests."""
        if self.waiting:
            self._write()
        if self.waiting:
            log.error("%d answers are not in %s: the next run scores them again", len(self.waiting), self.filename)

    def _blobs(self, key: str) -> Iterator[bytes]:
        select = f'SELECT value FROM "{self.tablename}" WHERE key = ?'
        try:
            yield from (blob for (blob,) in self.conn.select(select, (key,)))
        except sqlite3.Error as error:
            raise _unreadable(self.filename, error) from error
        if (other := self.elsewhere.get(key)) is not None:
            yield from (blob for (blob,) in other.execute('SELECT value FROM "unnamed" WHERE key = ?', (key,)))

    def _drop(self) -> None:
        if not self.dropped:
            log.warning(
                "%s has a record that was cut off or is no answer: it is dropped, and its request scored again",
                self.filename,
            )
        self.dropped += 1

    def _others(self) -> list[Path]:
        """The files of other ranks, those of an earlier run with more of them included."""
        mine = Path(self.filename)
        if (parts := re.fullmatch(r"(.*_rank)\d+(\.db)", mine.name, re.DOTALL)) is None:
            return []
        named = re.compile(re.escape(parts[1]) + r"\d+" + re.escape(parts[2]))
        return sorted(path for path in mine.parent.iterdir() if named.fullmatch(path.name) and path.name != mine.name)


def adopt(store: SqliteDict, law: Mapping[str, str], generating: str) -> ResponseCache:
    """The harness's open dict, for answers of this law; `generating`: the digest of the law of generated texts."""
    keep_apart(generating)
    return ResponseCache.adopt(store, law)


def sample_key(generating: str, arguments: Iterable[Any], drawn: int) -> str:
    """The key of a sample: its law, its request, and the number that is all its randomness."""
    said = json.dumps(["sample", generating, *arguments, drawn], default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def keep_apart(generating: str) -> None:
    """Let the keys of the harness, made of letters only, tell texts of other ids and generated texts of other laws.

    Keys of plain texts stay what they are.
    """
    plain = getattr(harness.hash_args, "plain", harness.hash_args)

    def hash_args(attr: str, args: Iterable[Any]) -> str:
        args = list(args)
        more = [arg.digest for arg in args if isinstance(arg, TokenText)]
        if attr == "generate_until":
            if args[1].get("do_sample") or (args[1].get("do_sample") is None and args[1].get("temperature")):
                return SAMPLE
            more.append(generating)
        return plain(attr, [*args, *more])

    hash_args.plain = plain
    harness.hash_args = hash_args


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, what holds them, and results of windows; a pickle could name any code to run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RESULTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no answer")


def _read(blob: Any) -> Any:
    """What a record holds; None where that is no plain value."""
    try:
        return _Plain(io.BytesIO(bytes(blob))).load()
    except Exception:  # a pickle that was cut off raises whatever its last bytes happen to mean
        return None


def _open(path: Path) -> sqlite3.Connection:
    """Another rank's file. Not read-only: what it was writing when it was killed is rolled back here."""
    return sqlite3.connect(f"file:{urllib.parse.quote(str(path.absolute()))}?mode=rw", uri=True, timeout=PATIENCE)


def _select(connection: sqlite3.Connection, path: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # its rank has just begun
            return []
        raise _unreadable(path, error) from error
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> DuelError:
    return DuelError(f"The --use_cache file {path} cannot be read ({error}). Delete it: its answers are scored again.")


def _require(law: Mapping[str, str], stored: Any, answers: bool, path: str | Path) -> None:
    """Raise DuelError where a file has answers of another law, or of none."""
    if stored is None and answers:
        raise DuelError(
            f"The --use_cache file {path} holds answers of another model (it has no law of duel-mdm). "
            "Name another file, or delete this one."
        )
    if stored is not None and stored != law:
        changed = "; ".join(fingerprint.differences(law, stored))
        raise DuelError(
            f"The --use_cache file {path} was written under another law ({fingerprint.digest(stored)}, this run is "
            f"{fingerprint.digest(law)}): {changed}. Name another file, or delete this one."
        )
