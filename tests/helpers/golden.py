"""Golden texts: what stands between numbers is compared as text, numbers by value.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import json
import math
import os
import re
import zlib

import numpy as np

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
RECORD = "LM_EVAL_DUEL_RECORD" in os.environ
NUDGE = 0.0 if RECORD else 1e-12  # relative: the last digits, which differ between CPUs and libraries


def check(file, text):
    """Assert that a text is that of a golden file, its numbers within 1e-8."""
    if RECORD:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    wanted = file.read_text(encoding="utf-8")
    assert NUMBER.sub("#", text) == NUMBER.sub("#", wanted), file.name
    pairs = zip(NUMBER.findall(text), NUMBER.findall(wanted), strict=True)
    apart = [pair for pair in pairs if not math.isclose(*map(float, pair), rel_tol=1e-8, abs_tol=1e-12)]
    assert not apart, (file.name, apart)


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
            lines = map(json.loads, file.read_text().splitlines())
            file.write_text("".join(json.dumps(nudged(line)) + "\n" for line in lines))
        else:
            content = json.loads(file.read_text())
            config = content["config"] | {"duel": nudged(content["config"]["duel"])}
            file.write_text(json.dumps(content | {"results": nudged(content["results"]), "config": config}))


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
