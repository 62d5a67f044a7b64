"""Arguments of the form `key=value,...`, read as lm_eval reads them."""

from __future__ import annotations

import json
from typing import Any

from lm_eval_duel.errors import UsageError


def key_values(flag: str, text: str) -> dict[str, Any]:
    """The `key=value,...` or JSON object of an argument, with values converted as lm_eval does it."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise UsageError(f"{flag} is key=value,... or a JSON object; got '{text}' ({error}).") from None
    from lm_eval.utils import simple_parse_args_string  # late: it takes a second, and JSON does not need it

    return simple_parse_args_string(text)


def model_args(text: str, name: str | None = None) -> dict[str, Any]:
    """The model args of a command: `pretrained=NAME,...`, `NAME,...`, or a `name` given by itself."""
    first, _, rest = text.partition(",")
    if text and "=" not in first and not text.lstrip().startswith("{"):
        text = f"pretrained={first},{rest}" if rest else f"pretrained={first}"
    given = key_values("--model_args", text)
    if name is None:
        return given
    if "pretrained" in given:
        raise UsageError(f"The model is named twice: {name} and pretrained={given['pretrained']}; leave one out.")
    return {"pretrained": name, **given}
