"""Published figures from a CSV file: shown in separate tables, never ranked, averaged or subtracted.

    model,estimator,rule,block,cache,task,metric,value,stderr,source,note
    MDLM,duel,greedy,4,,duel_ptb_wrapped,token_perplexity,87.57,,"Turok et al. (2026), zero-shot",

The columns model, estimator, task, metric, value and source are needed. An estimator is one of `estimator=`; it says
whether a figure is a bound. `recipes`, separated by spaces, are rows of examples/paper.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, require_known
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results.own_files import reading
from lm_eval_duel.results.table import WORDS, Table, form_of, number

PAPER = "paper"  # on the command line: the paper's tables, which come with the package
PAPER_FILE = Path(__file__).resolve().with_name("published.csv")
NEEDED = ("model", "estimator", "task", "metric", "value", "source")
NAMES = ("model", "estimator", "rule", "block", "cache", "note")  # what a row is
UNCHECKED = (
    "Published figures, as their sources print them. They were not measured here, and their documents and windows were "
    "not checked against the table above."
)


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    """The figures of CSV files; raises DuelError that names the file and line of a wrong one."""
    figures = []
    for name in names:
        file = PAPER_FILE if name == PAPER else Path(name)
        with reading(file, f"what --published takes, a CSV file of figures or {PAPER!r}"):
            reader = csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines())
            if missing := [column for column in NEEDED if column not in (reader.fieldnames or ())]:
                raise DuelError(f"{name} has no column {', '.join(missing)}; needed are {', '.join(NEEDED)}.")
            for line in reader:
                try:
                    figures.append(_figure({key: (line.get(key) or "").strip() for key in (*NAMES, *NEEDED, "stderr")}))
                except (DuelError, ValueError) as error:
                    raise DuelError(f"{name}, line {reader.line_num}: {error}") from None
    return figures


def _figure(line: Mapping[str, str]) -> dict[str, Any]:
    require_known("metric", [line["metric"]], METRICS)
    entry = registry.find(line["estimator"])
    names = {"estimator": entry.name, "display": entry.title, "bound": entry.kind is Kind.UPPER_BOUND}
    error = float(line["stderr"]) if line["stderr"] else None
    return {**line, **names, "value": float(line["value"]), "stderr": error}


def sources(figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each source and metric."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        found.setdefault((figure["source"], figure["metric"]), []).append(figure)
    return [{"source": source, "metric": metric, "figures": of} for (source, metric), of in found.items()]


def table(source: Mapping[str, Any]) -> Table:
    """A source's figures: a column for each task, a row for each model, estimator, rule, block and cache."""
    rows: dict[tuple, dict[str, str]] = {}
    form, tasks = form_of(source["metric"]), dict.fromkeys(figure["task"] for figure in source["figures"])
    for figure in source["figures"]:
        block = "whole target" if figure["block"] == "none" else figure["block"]
        names = {key: figure[key] for key in NAMES} | {"estimator": figure["display"], "block": block}
        row = rows.setdefault(tuple(names.values()), names)
        row[figure["task"]] = number(figure["value"], form, figure["stderr"], figure["bound"])
    heads = (*NAMES[:-1], *tasks, NAMES[-1])
    columns = {head: lambda row, head=head: row.get(head, "") for head in heads}
    return Table.of(f"{source['source']}: {WORDS[source['metric']]}", rows.values(), columns)
