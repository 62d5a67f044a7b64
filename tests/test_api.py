"""The public API: names, signatures and fields, as golden/api.txt has them.

`python tests/test_api.py` writes the file anew. What changes there is in CHANGELOG.md.
"""

import dataclasses
import difflib
import inspect
from pathlib import Path

import lm_eval_duel

FILE = Path(__file__).parent / "golden" / "api.txt"


def members(kind):
    """The public methods and properties that a class of the package defines, itself or in a base of the package."""
    public = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("lm_eval_duel"):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_"):
                public[name] = value
    return public


def signature(function):
    """The parameters of a function, without annotations, whose text differs between versions of Python."""
    parameters = inspect.signature(function).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def of_class(name, kind):
    """The lines of a class: its constructor, its fields, its methods and properties."""
    lines = [f"class {name}"]
    if dataclasses.is_dataclass(kind):
        lines += [f"    field {field.name}" for field in dataclasses.fields(kind)]
    else:
        lines.append(f"    constructor {signature(kind.__init__)}")
    for member, value in sorted(members(kind).items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function):
            lines.append(f"    {member}{signature(function)}")
        elif isinstance(value, property) or type(value).__name__ == "cached_property":
            lines.append(f"    property {member}")
    return lines


def api():
    """The public API as text."""
    lines = []
    for name in lm_eval_duel.__all__:
        value = getattr(lm_eval_duel, name)
        lines += of_class(name, value) if inspect.isclass(value) else [f"{name}{signature(value)}"]
    return "\n".join(lines) + "\n"


def test_the_public_api_is_the_pinned_one():
    pinned = FILE.read_text(encoding="utf-8")
    now = api()
    difference = difflib.unified_diff(pinned.splitlines(), now.splitlines(), "pinned", "now", lineterm="", n=1)
    assert pinned == now, "\n".join(difference)


if __name__ == "__main__":
    FILE.write_text(api(), encoding="utf-8")
