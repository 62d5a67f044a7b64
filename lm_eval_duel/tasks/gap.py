"""A continuation that knows the text after it.

To the harness it is a `str`. duel-mdm reads the suffix and shows it to the network.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Gap(str):
    """The text of a gap. `suffix`: what follows it, visible and not scored."""

    suffix: str

    def __new__(cls, text: str, suffix: str) -> Gap:
        self = super().__new__(cls, text)
        self.suffix = suffix
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Gap, (str(self), self.suffix)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the suffix, for the key of a response cache."""
        return hashlib.sha256(json.dumps(["suffix", self.suffix]).encode()).hexdigest()[:16]
