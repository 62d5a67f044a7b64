"""The harness's `--use_cache` files, made safe for resuming.

The harness writes PATH_rank0.db, PATH_rank1.db, ..., one per process, as pickles. Here these files are

* refused if they were written under another spec, or by a lattice that followed other rules;
* read by any number of ranks;
* limited to plain numbers and texts: any other record, or one that was cut off, is dropped and scored again;
* safe on a full disk: what cannot be written waits in memory, so the run continues and loses nothing.

A request has one record: its text, or the contribution of each window to the results. So a cached answer counts in the
results of this run, whichever run computed it. lm-eval's own look-up by text alone is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import pickle
import re
import sqlite3
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.errors import DuelError
from lm_eval_duel.text.annotated import Gap, TokenText

log = logging.getLogger("lm_eval.duel_mdm")

SPEC = "lm_eval_duel spec"
RULES, RULE_CODE = "lattice_rules", "lattice_rule_code"  # stored with the spec: the rules that a lattice follows
SUSPECT = "lm_eval_duel suspect"  # why the answers may be wrong
TIMEOUT = 60  # seconds to wait for a file that another rank is writing
KEYS = 'SELECT key FROM "unnamed"'
READ = 'SELECT value FROM "unnamed" WHERE key = ?'
WRITE = 'REPLACE INTO "unnamed" (key, value) VALUES (?, ?)'
DELETE = 'DELETE FROM "unnamed" WHERE key = ?'


def request_key(kind: str, arguments: Iterable[Any], *more: str) -> str:
    """The key of a request: lm-eval's own key, a hash of its text, and everything else that its answer depends on.

    That is: the token ids of a text that carries them, the text after a gap, and `more`. For a generated text, `more`
    is the fingerprint of its spec and, if it is sampled, the number that seeds the draw.
    """
    from lm_eval.api.model import hash_args

    arguments = list(arguments)
    parts = [hash_args(kind, arguments)]
    parts += [argument.digest for argument in arguments if isinstance(argument, TokenText | Gap)]
    parts += more
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ResponseCache:
    """The records of this rank's file, and of the other ranks' files at the time when it is opened.

    `follows`: the rules that a lattice follows, which must be equal like the spec. `generation`: the fingerprint of
    generated texts. Raises DuelError for a file of another spec, or one that cannot be read.
    """

    def __init__(self, path: str, spec: Mapping[str, str], follows: Mapping[str, str], generation: str):
        self.path, self.generation = Path(path), generation
        self.waiting: dict[str, Any] = {}  # records that the disk has not taken
        self.broken: set[Path] = set()  # files with records that cannot be read
        self.holders: dict[str, tuple[Path, sqlite3.Connection]] = {}  # another rank's file that holds a key
        for other in self._other_files():
            holder = other, _open(other)
            self.holders |= dict.fromkeys(_checked_keys(*holder, spec, follows), holder)
        self.file = _open(self.path)
        self.file.execute("PRAGMA synchronous = OFF")  # as the harness has it: a killed process loses nothing
        own = _checked_keys(self.path, self.file, spec, follows)
        self.has_answers = bool(own or self.holders)
        self.keep(SPEC, {**spec, **follows})

    def find(self, key: str, kind: type) -> Any:
        """The record of a key, from the file of any rank; None if there is none that is intact and of this `kind`."""
        if key in self.waiting:
            return self.waiting[key]
        for path, file in filter(None, ((self.path, self.file), self.holders.get(key))):
            try:
                row = file.execute(READ, (key,)).fetchone()
            except sqlite3.Error as error:
                if path == self.path:
                    raise unreadable(path, error) from error
                row = ()
            if isinstance(value := _read(row), kind):
                return value
            if row is not None:
                self.drop(path)
        return None

    def drop(self, path: Path | None = None) -> None:
        """Log, once per file, that one of its records is not used. `path`: this rank's file by default."""
        path = path or self.path
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
            self.keep(*self.waiting.popitem())
        if self.waiting:
            log.error("%d answers are not in %s: the next run scores them again", len(self.waiting), self.path)

    def _other_files(self) -> list[Path]:
        """The files of other ranks, also of an earlier run with more ranks."""
        if (parts := re.fullmatch(r"(.*_rank)\d+(\.db)", self.path.name, re.DOTALL)) is None:
            return []
        pattern = re.compile(re.escape(parts[1]) + r"\d+" + re.escape(parts[2]))
        files = self.path.absolute().parent.iterdir()
        return sorted(file for file in files if pattern.fullmatch(file.name) and file.name != self.path.name)


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


def _checked_keys(
    path: Path, file: sqlite3.Connection, spec: Mapping[str, str], follows: Mapping[str, str]
) -> list[str]:
    """The keys of answers and windows in a file; raises DuelError if they are of another spec, or of none."""
    keys = [key for (key,) in _select(file, path, KEYS) if key != SPEC]
    stored = next(map(_read, _select(file, path, READ, SPEC)), None)
    if not isinstance(stored, dict):  # missing or damaged
        if keys:
            raise DuelError(
                f"The --use_cache file {path} holds answers of another model (it has no spec of duel-mdm). "
                "Name another file, or delete this one."
            )
    elif stored != (ours := {**spec, **follows}):
        theirs = fingerprint.digest({key: value for key, value in stored.items() if key not in (RULES, RULE_CODE)})
        changed = "; ".join(fingerprint.differences(ours, stored))
        raise DuelError(
            f"The --use_cache file {path} was written under another spec ({theirs}, this run is "
            f"{fingerprint.digest(spec)}): {changed}. Name another file, or delete this one."
        )
    if SUSPECT in keys:
        reason = next(map(_read, _select(file, path, READ, SUSPECT)), None)
        raise DuelError(
            f"The answers in the --use_cache file {path} are suspect ({fingerprint.digest(spec)}): {reason} Once that "
            "is mended, delete the file or name another one."
        )
    return keys
