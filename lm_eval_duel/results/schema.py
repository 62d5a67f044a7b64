"""The entries of a results file that are read, and the type of each. Others are left alone.

Reading raises a ValueError, a TypeError or another plain error; `read.reading` adds the name of the file to it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

from lm_eval_duel.core.scores import Kind
from lm_eval_duel.results.runs import Json, text_or_none

Types = dict[str, Callable[[Any], Any]]  # of entries, by name


def typed(entries: Json, types: Types) -> dict[str, Any]:
    """The entries of `types` that are not null, each as its type."""
    read = {}
    for name, read_as in types.items():
        if entries.get(name) is not None:
            read[name] = read_as(entries[name])
    return read


# ---------------------------------------------------------------- types


def number(value: Any) -> float | None:
    """A number, which lm_eval may have written as text, or None for null; raises ValueError for NaN."""
    if value is None:
        return None
    value = float(value)
    if math.isnan(value):
        raise ValueError("a number is NaN")
    return value


def count(value: Any) -> int:
    """A whole number, which lm_eval may have written as text."""
    whole = int(value)
    float(whole)  # an OverflowError here, not in a division later
    return whole


def _numbers(values: list[Any]) -> list[float | None]:
    return list(map(number, values))


def _kind(name: str) -> str:
    """The word for a kind of value; raises ValueError for an unknown one."""
    return Kind(name).value


def _strings(entries: Json | None) -> dict[str, str]:
    strings = {}
    for key, value in (entries or {}).items():
        strings[key] = "none" if value in (None, "None") else str(value)
    return strings


def _counts(entries: Json) -> dict[str, int]:
    """A count of each task."""
    return {name: count(number) for name, number in entries.items()}


def _versions(entries: Json) -> dict[str, str]:
    """The versions of packages; that of one without any is unknown."""
    versions = {}
    for name, version in entries.items():
        versions[name] = str(version or "unknown")
    return versions


def _arguments(given: Json | str | None) -> dict[str, str]:
    """Model args: a mapping, or the text that lm_eval's Python API takes."""
    if not isinstance(given, str):
        return _strings(given)
    arguments = {}
    for part in given.split(","):
        key, equals, value = part.partition("=")
        if equals:
            arguments[key] = value
    return _strings(arguments)


def _date(value: Any) -> float:
    """Seconds since 1970 of a date that exists; raises an ArithmeticError or ValueError for others."""
    seconds = number(value) or 0.0
    datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return seconds


def _texts(values: list[Any]) -> list[str]:
    return list(map(str, values))


def _verify(entries: Json) -> dict[str, Any]:
    return typed(entries, VERIFY)


def _duel(duel: Json) -> dict[str, Any]:
    """The entries of config.duel that are read, and those of its tasks with their values."""
    tasks = {}
    for name, scored in (duel.get("tasks") or {}).items():
        values = {}
        for key, value in scored["values"].items():
            values[key] = _value(value)
        tasks[name] = typed(scored, COUNTS) | {"values": values}
    return typed(duel, DUEL) | {"tasks": tasks}


def _value(value: Json) -> dict[str, Any]:
    """The entries of a value. A log-likelihood of null is minus infinity if a reason is written, else not known."""
    without_number = None if value.get("reason") is None else -math.inf
    return {"log_prob": without_number} | typed(value, VALUE)


# ---------------------------------------------------------------- entries


TASK_COUNTS = ("documents", "windows", "tokens", "longest_document", "unk_tokens")
COUNTS: Types = dict.fromkeys(TASK_COUNTS, count)  # entries of config.duel.tasks.NAME
VALUE: Types = COUNTS | {  # of each of its values; `Value.read` takes them
    "nfe": count,
    **dict.fromkeys(("log_prob", "stderr", "window_stderr"), number),
    **dict.fromkeys(("note", "reason"), str),
    "kind": _kind,
    "seeds": _numbers,
}
VERIFY: Types = {  # entries of config.duel.verify
    **dict.fromkeys(("windows", "not_checked_independently", "differing_windows", "changed_picks"), count),
    "where": str,
}
DUEL: Types = {  # entries of config.duel
    **dict.fromkeys(("estimator", "rule", "block", "dtype", "attention", "weights", "bos", "device"), text_or_none),
    **dict.fromkeys(("pretrained", "trace"), text_or_none),
    **dict.fromkeys(("tokens", "forwards", "rows", "nfe", "longest_document", "row_capacity"), count),
    "cut_contexts": _counts,
    **dict.fromkeys(("answers_from_cache", "ranks", "peak_memory_bytes", "parameters"), count),
    **dict.fromkeys(("decisions_checked", "decisions_differing", "all_mask_starts"), count),
    **dict.fromkeys(("generated", "verify_failed"), _texts),
    "seconds": number,
    "verify": _verify,
    "versions": _versions,
}
CONFIG: Types = {  # entries of config
    **dict.fromkeys(("model", "model_dtype", "model_sha", "use_cache"), str),
    "fingerprint": text_or_none,
    "model_args": _arguments,
    "spec": _strings,
    "duel": _duel,
}
HEADER: Types = {  # entries of the file
    **dict.fromkeys(("model_name", "max_length", "lm_eval_version", "transformers_version"), str),
    "date": _date,
    "total_evaluation_time_seconds": number,
}
