"""Golden texts: what stands between numbers is compared as text, numbers by value.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import dataclasses
import enum
import json
import math
import os
import re
import zlib
from pathlib import Path

import numpy as np

from lm_eval_duel.errors import DuelError

TESTS = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
NOISE = 1e-12  # what may stand for 0
RECORD = "LM_EVAL_DUEL_RECORD" in os.environ
NUDGE = 0.0 if RECORD else 1e-12  # relative: the last digits, which differ between CPUs and libraries


def check(file, text, within=1e-8):
    """Assert that a text is that of a golden file, its numbers but for the share `within` of them."""
    if RECORD:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    wanted = file.read_text(encoding="utf-8")
    assert NUMBER.sub("#", text) == NUMBER.sub("#", wanted), file.name
    apart = []
    for number, recorded in zip(NUMBER.findall(text), NUMBER.findall(wanted), strict=True):
        if not math.isclose(float(number), float(recorded), rel_tol=within, abs_tol=NOISE):
            apart.append((number, recorded))
    assert not apart, (file.name, apart)


def check_lines(test, name, lines, within=1e-8):
    """Assert that lines are those of golden/NAME.txt beside a test file, whose first line says how it is made."""
    file = Path(test).resolve()
    made = f"Made by `LM_EVAL_DUEL_RECORD=1 pytest tests/{file.relative_to(TESTS).as_posix()}`.\n"
    check(file.parent / "golden" / f"{name}.txt", "\n".join([made, *lines]) + "\n", within)


def answer(call, *args, **more):
    """What a call returns, or the numbers in its error."""
    try:
        return call(*args, **more)
    except DuelError as error:
        return f"error with {' '.join(NUMBER.findall(str(error)))}"


def listed(name, value):
    """A value as lines of a golden file: `name: value`; parts of a record stand below it, but for those at their
    defaults.
    """
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if _is_set(value, field)]
        value = {field.name: getattr(value, field.name) for field in fields}
    if not isinstance(value, dict):
        return [f"{name}: {_shown(value)}"]
    lines = [f"{name}:"]
    for key, part in value.items():
        lines += [f"    {line}" for line in listed(key, part)]
    return lines


def _is_set(record, field):
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = getattr(record, field.name)
    if isinstance(value, float) and isinstance(default, float):
        return abs(value - default) > NOISE
    return value != default


def _shown(value):
    """A number in ten digits, numbers with spaces between them, and anything else as it is printed."""
    if isinstance(value, list | tuple):
        parts = []
        for part in value:
            shown = _shown(part)
            parts.append(f"({shown})" if isinstance(part, list | tuple) else shown)
        return " ".join(parts)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return f"{0.0 if abs(value) <= NOISE else value:.10g}"
    return str(value)


def entry(file, name, value):
    """True if JSON is the entry `name` of a golden file that holds several."""
    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if RECORD:
        entries[name] = value
        file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return entries[name] == value


def without(value, names):
    """JSON without the entries of these names, however deep."""
    if isinstance(value, dict):
        return {key: without(part, names) for key, part in value.items() if key not in names}
    if isinstance(value, list):
        return [without(part, names) for part in value]
    return value


def nudged(value):
    """JSON with another CPU's floats: each is off by `NUDGE`, up or down. Equal floats stay equal."""
    if isinstance(value, dict):
        return {key: nudged(part) for key, part in value.items()}
    if isinstance(value, list):
        return [nudged(part) for part in value]
    return value * (1 + NUDGE * _sign(value)) if isinstance(value, float) else value


def _sign(value):
    return 1 if zlib.crc32(repr(value).encode()) % 2 else -1


def nudge_results(folder):
    """Nudge what was computed in the results files and samples below a folder, and in traces."""
    for file in folder.rglob("*.json*"):
        if file.suffix == ".jsonl":
            records = map(json.loads, file.read_text().splitlines())
            lines = [json.dumps(nudged(record)) + "\n" for record in records]
            file.write_text("".join(lines))
        else:
            content = json.loads(file.read_text())
            content["results"] = nudged(content["results"])
            content["config"]["duel"] = nudged(content["config"]["duel"])
            file.write_text(json.dumps(content))


def nudge_functions(setattr=setattr, by=NUDGE):
    """Nudge what the functions of `math` and numpy return that statistics are made with."""
    for module, names in (
        (math, ("exp", "log", "sqrt", "hypot", "fsum")),
        (np, ("exp", "log", "sqrt", "percentile", "var", "mean", "std")),
    ):
        for name in names:
            setattr(module, name, _nudging(getattr(module, name), by))


def _nudging(call, by):
    def wrapper(*args, **kwargs):
        value = call(*args, **kwargs)
        if isinstance(value, np.ndarray):
            return value * (1 + by * (2 * (np.arange(value.size).reshape(value.shape) % 2) - 1))
        return value * (1 + by * _sign(value))

    return wrapper
