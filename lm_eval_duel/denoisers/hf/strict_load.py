"""Checks that the tensors of a checkpoint fill a network exactly; errors list everything that is wrong at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

SHOWN = 10  # names shown for each kind of fault
LOGGERS = ("transformers.modeling_utils", "transformers.utils.loading_report")
REPORTS = ("LOAD REPORT", "newly initialized", "were not used when initializing")

Shape = tuple[int, ...]


def require_equal(
    what: str, expected: Mapping[str, Shape], actual: Mapping[str, Shape], name: Callable[[str], str] = str
) -> None:
    """Raise DuelError, starting with `what`, unless a file has the tensors that a network expects; `name`: in it."""
    misshapen = [
        f"{name(key)} is {actual[key]}, not {shape}"
        for key, shape in sorted(expected.items())
        if actual.get(key, shape) != shape
    ]
    require_none(what, map(name, expected.keys() - actual), map(name, actual.keys() - expected), misshapen)


def require_none(what: str, missing: Iterable[str], unknown: Iterable[str] = (), misshapen: Iterable[str] = ()) -> None:
    """Raise DuelError, starting with `what`, if any tensor is missing, unknown or of another shape."""
    kinds = {"missing": sorted(set(missing)), "unknown": sorted(set(unknown)), "of another shape": sorted(misshapen)}
    parts = [
        f"{len(lines)} {kind}: {', '.join(lines[:SHOWN])}{', ...' if len(lines) > SHOWN else ''}"
        for kind, lines in kinds.items()
        if lines
    ]
    if parts:
        raise DuelError(f"{what}: {'; '.join(parts)}.")


def misshapen(report: Mapping[str, Any]) -> list[str]:
    """The tensors of another shape in a loading report of transformers; some versions leave their shapes out."""
    return [
        key if isinstance(key, str) else f"{key[0]} is {tuple(key[1])}, not {tuple(key[2])}"
        for key in report["mismatched_keys"]
    ]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' reports of tensors that do not fit, but not of those that it cannot convert."""

    def passes(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "CONVERSION" in text or not any(words in text for words in REPORTS)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
