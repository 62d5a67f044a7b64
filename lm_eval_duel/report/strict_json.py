"""JSON that every parser accepts: numbers that JSON cannot represent become null, with a reason."""

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


def dumps(document: Mapping[str, Any]) -> str:
    """A dict as JSON. Its entry `nulls` gives the place and the reason of each number that became null."""
    nulls = dict(_nulls(document, ""))
    return json.dumps(finite({**document, "nulls": nulls} if nulls else document), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """A value with None for infinities and NaN."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if _not_finite(value) else value


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _nulls(value: Any, place: str) -> Iterator[tuple[str, str]]:
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from _nulls(part, f"{place}.{key}" if place else str(key))
    if _not_finite(value):
        yield place, REASONS.get(value, NAN)
