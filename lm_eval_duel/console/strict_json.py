"""JSON that any reader accepts: infinities and NaN, which JSON does not have, become null."""

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


def dumps(content: Mapping[str, Any]) -> str:
    """A dict as JSON. Its key `nulls` lists where infinities and NaN became null, and what each of them was."""
    nulls = dict(_nulls(content, ""))
    return json.dumps(finite({**content, "nulls": nulls} if nulls else content), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """A value with null in place of infinities and NaN."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if _is_nonfinite(value) else value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _nulls(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, reason) of every number that JSON does not have."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from _nulls(part, f"{path}.{key}" if path else str(key))
    if _is_nonfinite(value):
        yield path, REASONS.get(value, NAN)
