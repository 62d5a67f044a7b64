"""JSON that any reader takes: null, with a reason, for what JSON has no number for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

REASONS = {
    math.inf: "infinite: a text has probability 0, or the number is too large",
    -math.inf: "minus infinity: a text has probability 0",
}
NAN = "not a number"


def dumps(found: Mapping[str, Any]) -> str:
    """A dict as JSON; `nulls` in it says of each null that was no number where it stands and what it was."""
    nulls = dict(_nulls(found, ""))
    return json.dumps(finite({**found, "nulls": nulls} if nulls else found), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """A value with null for infinities and NaN."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if _odd(value) else value


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _nulls(value: Any, place: str) -> Iterator[tuple[str, str]]:
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from _nulls(part, f"{place}.{key}" if place else str(key))
    if _odd(value):
        yield place, REASONS.get(value, NAN)
