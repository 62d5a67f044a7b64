"""Published figures from a CSV file: shown in tables of their own, never ranked, averaged or subtracted.

    model,estimator,rule,block,cache,task,metric,value,stderr,source,note
    MDLM,duel,greedy,4,,duel_ptb_wrapped,token_perplexity,87.57,,"Turok et al. (2026), zero-shot",

The columns model, estimator, task, metric, value and source are needed. An estimator is one of `estimator=`; it says
whether a figure is a bound. `table` and `recipes` (separated by spaces) are for examples/paper.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import number
from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.results.own_files import whole

PAPER = "paper"  # on the command line: the paper's tables, which come with the package
PAPER_FILE = Path(__file__).resolve().with_name("published.csv")
POSITIVE = dataclasses.replace(number("a number from 0 up", lambda x: 0 <= x < math.inf), nothing=())
NEEDED = ("model", "estimator", "task", "metric", "value", "source")
OPTIONAL = ("rule", "block", "cache", "stderr", "note", "table", "recipes")
UNCHECKED = (
    "Published figures, as their sources print them. They were not measured here, and their documents and windows were "
    "not checked against the table above."
)
KINDS = {
    registry.Kind.LIKELIHOOD: "exact",
    registry.Kind.UPPER_BOUND: "bound",
    registry.Kind.NOT_A_LIKELIHOOD: "oracle",
}


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    """The figures of CSV files; raises DuelError that names the file and line of a wrong one."""
    return [figure for name in names for figure in _file(PAPER_FILE if name == PAPER else Path(name), name)]


def _file(file: Path, name: str) -> list[dict[str, Any]]:
    with whole(file, f"what --published takes, a CSV file of figures or {PAPER!r}"):
        reader = csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines(), strict=True)
        figures = []
        try:
            header = reader.fieldnames or ()
            if other := [column for column in header if column not in (*NEEDED, *OPTIONAL)]:
                raise unknown("column", other[0], (*NEEDED, *OPTIONAL))
            if missing := [column for column in NEEDED if column not in header]:
                raise DuelError(f"there is no column {', '.join(missing)}; needed are {', '.join(NEEDED)}.")
            figures += map(_figure, reader)
        except (DuelError, csv.Error) as error:
            raise DuelError(f"{name}, line {reader.line_num}: {error}") from None
    return figures


def _figure(line: Mapping[Any, Any]) -> dict[str, Any]:
    """A checked figure."""
    if None in line or None in line.values():
        raise DuelError("there are more or fewer cells than the first line has columns.")
    entries = {column: line.get(column, "").strip() for column in (*NEEDED, *OPTIONAL)}
    if empty := [column for column in NEEDED if not entries[column]]:
        raise DuelError(f"{empty[0]} is empty.")
    if entries["metric"] not in METRICS:
        raise unknown("metric", entries["metric"], METRICS)
    entry = registry.find(entries["estimator"])
    return entries | {
        "estimator": entry.name,
        "display": entry.display,
        "kind": KINDS.get(entry.kind, "estimate"),
        "value": POSITIVE("value", entries["value"]),
        "printed": entries["value"],
        "stderr": POSITIVE("stderr", entries["stderr"]) if entries["stderr"] else None,
    }


def tables(figures: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table for each source and metric: the tasks it has, and a row for each model, estimator, rule, block, cache."""
    sources: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in figures:
        key = figure["source"], figure["metric"]
        table = sources.setdefault(key, {"source": key[0], "metric": key[1], "tasks": [], "rows": {}})
        if figure["task"] not in table["tasks"]:
            table["tasks"].append(figure["task"])
        names = {k: figure[k] for k in ("model", "estimator", "display", "kind", "rule", "block", "cache", "note")}
        row = table["rows"].setdefault(tuple(names.values()), names | {"cells": {}})
        if figure["task"] in row["cells"]:
            raise DuelError(
                f"Published figures: {figure['task']} of {figure['model']} ({figure['estimator']} "
                f"{figure['rule']} {figure['block']}) is given twice in {figure['source']}. Leave one out, or "
                "tell them apart with a note."
            )
        row["cells"][figure["task"]] = {"value": figure["value"], "stderr": figure["stderr"]}
    return [table | {"rows": [*table["rows"].values()]} for table in sources.values()]
