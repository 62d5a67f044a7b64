"""Keys of the harness's response cache, which knows a request by its letters alone.

Here a key also says which token ids, which spec of generated texts and which draw an answer is of. To any other model's
cache it is the text that it always was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.api import model as harness

from lm_eval_duel.tasks.tokenized_text import TokenText


class Key(str):
    """The harness's key of a request, and what it leaves out."""

    kind: str  # loglikelihood, loglikelihood_rolling, generate_until
    texts: tuple[str, ...]  # digests of texts that carry their own ids

    def under(self, generating: str) -> str:
        """The key in a cache of duel-mdm; `generating`: the digest of the spec of generated texts."""
        more = [*self.texts, *([generating] if self.kind == "generate_until" else [])]
        return hashlib.sha256("\n".join([self, *more]).encode()).hexdigest() if more else str(self)


def of(kind: str, arguments: Iterable[Any]) -> Key:
    """The key of a request."""
    arguments = list(arguments)
    key = Key(_plain(kind, arguments))
    key.kind = kind
    key.texts = tuple(argument.digest for argument in arguments if isinstance(argument, TokenText))
    return key


def of_sample(generating: str, arguments: Iterable[Any], drawn: int) -> str:
    """The key of a sample: its spec, its request, and the number that is all its randomness."""
    said = json.dumps(["sample", generating, *arguments, drawn], default=str)
    return "sample " + hashlib.sha256(said.encode()).hexdigest()


def is_sampled(settings: Mapping[str, Any]) -> bool:
    """Whether a request is one that the harness's own key cannot stand for: its repeats differ."""
    said = settings.get("do_sample")
    return bool(settings.get("temperature")) if said is None else bool(said)


_plain = getattr(harness.hash_args, "plain", harness.hash_args)


def _extended(attr: str, args: Iterable[Any]) -> Key:
    return of(attr, args)


_extended.plain = _plain
harness.hash_args = _extended
