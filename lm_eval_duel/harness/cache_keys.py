"""Keys of the response cache. lm-eval's own key is a hash of a request's text alone.

A key here also covers the token ids of texts that carry them, the text after a gap and, for generated texts, the spec
and the draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval_duel.tasks.gap import Gap
from lm_eval_duel.tasks.tokenized_text import TokenText


def request_key(kind: str, arguments: Iterable[Any], generation: str) -> str:
    """The key of a request. `generation`: the fingerprint of generated texts."""
    from lm_eval.api.model import hash_args

    arguments = list(arguments)
    parts = [hash_args(kind, arguments)]
    parts += [argument.digest for argument in arguments if isinstance(argument, TokenText | Gap)]
    parts += [generation] if kind == "generate_until" else []
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()


def sample_key(generation: str, arguments: Iterable[Any], draw: int) -> str:
    """The key of a sample: its spec, its request, and the number that seeds its draw."""
    content = json.dumps(["sample", generation, *arguments, draw], default=str)
    return "sample " + hashlib.sha256(content.encode()).hexdigest()


def is_sampled(settings: Mapping[str, Any]) -> bool:
    """Whether generation settings ask for a sample. Repeats of such a request differ, but lm-eval's key is the same."""
    do_sample = settings.get("do_sample")
    return bool(settings.get("temperature")) if do_sample is None else bool(do_sample)
