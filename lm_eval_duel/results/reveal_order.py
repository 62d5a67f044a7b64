"""Where and when tokens were revealed, from trace files: counts and negative log-likelihood by position and step."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness import trace
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import SEES_TRUTH
from lm_eval_duel.rules.tables import without_defaults

MAX_CELLS, MAX_POINTS = 64, 128  # per side of a heat map, and per curve; longer ones are binned


def summary(records: Iterable[Mapping[str, Any]], spec: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of one trace. `reveals[p, s]` counts tokens at position p of their block revealed at step s."""
    windows, nll, positions, offsets, steps = 0, [], [], [], []
    for record in records:
        windows += 1
        length = len(record.get("token_logprobs") or ())
        starts = sorted(record.get("starts") or [0])
        nll.extend(-value for value in record.get("token_logprobs") or ())
        positions.extend(range(length))
        offsets.extend(p - starts[max(0, bisect.bisect_right(starts, p) - 1)] for p in range(length))
        steps.extend(record.get("reveal_steps") or [-1] * length)
    estimator = registry.ESTIMATORS.get(str(spec.get("estimator")))
    likelihood = estimator is None or estimator.kind.value != SEES_TRUTH
    costs, step, offset = np.array(nll, dtype=np.float64), np.array(steps, dtype=int), np.array(offsets, dtype=int)
    ordered = bool(steps) and min(steps) >= 0
    content: dict[str, Any] = {
        **{key: spec.get(key) for key in ("estimator", "rule", "block")},
        "likelihood": likelihood,
        "flag": "" if likelihood else SEES_TRUTH,
        "windows": windows,
        "tokens": len(nll),
        "ordered": ordered,
        "mean_nll": float(costs.mean()) if nll else None,
        "by_position": _curve(np.array(positions, dtype=int), costs),
        "by_step": _curve(step, costs) if ordered else None,
        "reveals": _reveals(offset, step) if ordered else None,
    }
    if ordered:  # the correlation is 1 for left to right, -1 for right to left, 0 for neither
        constant = offset.std() == 0 or step.std() == 0
        content["left_to_right"] = None if constant else float(np.corrcoef(offset, step)[0, 1])
        content["steps"] = max(steps) + 1
    return content


def _curve(at: np.ndarray, nll: np.ndarray) -> dict[str, Any]:
    """Mean negative log-likelihood and number of tokens in bins of `width` positions (or steps)."""
    width = max(1, math.ceil((int(at.max()) + 1) / MAX_POINTS)) if at.size else 1
    tokens, sums = np.bincount(at // width), np.bincount(at // width, weights=nll)
    mean = [round(float(s / n), 6) if n else None for s, n in zip(sums, tokens, strict=True)]
    return {"width": width, "mean_nll": mean, "tokens": tokens.tolist()}


def _reveals(offsets: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
    width = max(1, math.ceil((max(int(offsets.max()), int(steps.max())) + 1) / MAX_CELLS))
    rows, columns = offsets // width, steps // width
    counts = np.zeros((int(rows.max()) + 1, int(columns.max()) + 1), dtype=np.int64)
    np.add.at(counts, (rows, columns), 1)
    return {"width": width, "counts": counts.tolist()}


# ---------------------------------------------------------------- files


class Traces:
    """The trace files named on the command line or in results, each read once."""

    def __init__(self, named: Sequence[str | Path]):
        self.spec, self.load = trace.spec, functools.cache(trace.read)  # the header, and the windows, of a file
        self.named = [Path(place).resolve() for place in named]

    def find(self, run: Run) -> Path | None:
        """The trace of a run: a named one with the same spec, else its own, at its path or next to the results file."""
        own = [Path(run.duel["trace"])] if run.duel.get("trace") else []
        for path in [*self.named, *own, *(run.file.parent / path.name for path in own)]:
            with contextlib.suppress(DuelError, OSError, ValueError):  # ValueError: not a valid file name
                if self.spec(path).get("fingerprint", "") == run.fingerprint:
                    return path
        return None

    def attach(self, run: Run) -> Run:
        """The run with what its trace holds of each document, if it has a trace: the sums over its windows."""
        if (path := self.find(run)) is None:
            return run
        tasks: dict[str, dict[str, dict[int, float]]] = {}  # task -> value -> document -> nats
        for record in self.load(path):
            for name, nats in (record.get("values") or {}).items():
                documents = tasks.setdefault(str(record["task"]), {}).setdefault(str(name), {})
                document = int(record["doc"])
                documents[document] = documents.get(document, 0.0) + float(nats)
        return dataclasses.replace(run, traced=tasks)

    def summary(self, path: Path, model: str) -> dict[str, Any]:
        """What a report says about a file of a model's windows (empty: of an unknown model)."""
        spec = self.spec(path)["spec"]
        entry = registry.ESTIMATORS.get(str(spec.get("estimator")))
        parts = [model or path.stem, str(spec.get("estimator", ""))]
        parts += [without_defaults(str(spec["rule"]))] if entry and entry.follows_rule and "rule" in spec else []
        parts += [f"block {spec['block']}"] if "block" in spec else []
        parts += [f"cache={spec['cache']}"] if "cache" in spec else []
        label = ", ".join(filter(None, parts))
        return {"file": str(path), "label": label} | summary(self.load(path), spec)
