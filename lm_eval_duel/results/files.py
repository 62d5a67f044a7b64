"""The files of a report: report.json and report.csv, their names, and the folder in which they replace earlier ones.

report.json has entries of records under their names; its `files` lists what a report wrote. report.csv has a line for
each value of each method and task, with unrounded numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from lm_eval_duel.console import command_line
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.averages import AveragePair
from lm_eval_duel.results.compare import ComparedRow, Comparison, Speeds
from lm_eval_duel.results.costs import RunCost
from lm_eval_duel.results.gaps import Interval, Pair, difference_unit
from lm_eval_duel.results.rerun import commands, needed
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.standings import RankedMethod, Standing, Standings
from lm_eval_duel.results.table import Note, csv_text

LISTING = "report.json"  # names the files of a report
FORMAT = "lm_eval_duel report"  # by which it is known
MAX_LENGTH = 100  # characters of a task's name in a file name
SUFFIXES = (".html", ".md", ".csv", ".json", ".yaml", ".tex", ".png", ".svg", ".pdf")


def write(folder: str | Path, content: Mapping[str, Any], others: Mapping[str, str | bytes]) -> list[str]:
    """Write `content` as report.json, and the other files; remove those of an earlier report; return the names.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier report.
    """
    names = [LISTING, *others]
    before = earlier(folder)
    foreign = []
    for name in others:
        if name not in before and Path(folder, name).exists():
            foreign.append(name)
    if foreign:
        raise DuelError(
            f"--out {folder} holds {', '.join(foreign)}, which no report there lists as its own: nothing was written. "
            "Name another folder, or move these files."
        )
    listing = command_line.dumps({"format": FORMAT, **content, "files": names}) + "\n"
    with _naming_folder(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in {LISTING: listing, **others}.items():
            content_bytes = text if isinstance(text, bytes) else text.encode()
            part = Path(folder, f"{name}.part")
            part.write_bytes(content_bytes)
            part.replace(Path(folder, name))  # a kill leaves no half file
        for name in before - set(names):
            Path(folder, name).unlink(missing_ok=True)
    return names


def earlier(folder: str | Path) -> set[str]:
    """The files of an earlier report in a folder, as report.json lists them.

    Raises DuelError if report.json is a file of another program.
    """
    listing = Path(folder, LISTING)
    with _naming_folder(folder):
        if not listing.exists():
            return set()
    names: list[str] = []
    with contextlib.suppress(OSError, LookupError, RecursionError, TypeError, ValueError):
        content = json.loads(listing.read_text(encoding="utf-8"))
        if content["format"] == FORMAT:
            names = list(map(str, content["files"]))
    if not names:
        raise DuelError(
            f'{listing} was not written by this command (it has no "format": "{FORMAT}"), so --out {folder} was left '
            "unchanged. Name another folder, or move this file."
        )
    # a listing may be edited: nothing outside the folder is ever removed
    removable = set()
    for name in names:
        if Path(name).name == name and Path(name).suffix in SUFFIXES:
            removable.add(name)
    return removable


@contextlib.contextmanager
def _naming_folder(folder: str | Path) -> Iterator[None]:
    """Raise a DuelError that says what is wrong with the folder of --out, in place of an OSError below it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if isinstance(error, FileNotFoundError):  # by mkdir: the parent exists, but takes no folders, as /proc
            reason = "a folder cannot be made there"
        where = "" if str(error.filename) == str(folder) else f" ({error.filename})"
        raise DuelError(f"Nothing can be written to --out {folder}{where}: {reason}. Name another folder.") from None


def stems(subjects: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """File names of tables and figures, from (task, kind, about), each different even where case is ignored.

    `about`: the model, block and cache that a file is about, or the source of its figures; empty if it is about the
    whole task. A name depends on these three, not on how many there are of a kind: a document that includes a file
    finds it again when results are added.
    """
    used = set[str]()
    for task, kind, about in subjects:
        parts = [kind]
        for part in (task, re.sub(r"[^\w-]+", "_", about).strip("_")):
            if part:
                parts.append(_as_file_name(part))
        stem = "_".join(parts)
        name = stem
        number = 1
        while name.casefold() in used:
            number += 1
            name = f"{stem}_{number}"
        used.add(name.casefold())
        yield name


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w-]", "_", text)[:MAX_LENGTH]  # no dots: LaTeX and people read an extension behind the first


# ---------------------------------------------------------------- report.json

ROW = (  # entries of a row alone
    *("model", "name", "estimator", "rule", "block", "cache", "qualifiers", "unknown", "eps"),
    "kind=score.word",
    *("value", "stderr", "stderr_bound", "stderr_reason", "metrics", "nfe_per_token"),
    *("dtype=run.config.dtype", "fingerprint=run.config.fingerprint", "ar", "nfe", "tokens", "file=run.name"),
    "doubts=run.doubts",
)
COMPARED = (  # of a row among others
    *("interval", "window_stderr", "reason=about_interval", "best", "gap", "gap_interval"),
    *("gap_closed=closed.percent", "gap_closed_stderr=closed.stderr", "gap_closed_interval=closed.interval"),
    *("distinguishable=closed.distinguishable", "gap_closed_reason=closed.reason", "gap_closed_of=closed.of"),
)
AVERAGE_PAIR = ("names", "metric", "difference", "interval", "reason", "verdict", "verdict_reason")
PAIR = ("names", "difference", "interval", "difference_unit", "reason", "verdict")
COST = (
    *("model=run.label", "estimator=run.config.estimator", "name", "rule=run.config.rule"),
    *("block=run.config.block", "cache=run.config.cache"),
    *("ar=baseline", "tasks=time.tasks", "cached=run.cached", "tokens=time.tokens"),
    "seconds_per_token=time.seconds_per_token",
    *("whole_run_seconds=time.whole_run", "file=run.name"),
    *("times_elbo=over_elbo.value", "times_elbo_reason=over_elbo.reason"),
    *("times_ar=over_ar.value", "times_ar_reason=over_ar.reason"),
)
COUNTS = ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")  # entries of config.duel
METHOD = (
    *("label", "kind", "remarks", "fingerprint", "parameters", "versions", "date", "device"),
    *("nfe_per_token", "seconds_per_token", "seconds_reason"),
)
RUN = (
    *("model=label", "estimator=config.estimator", "rule=config.rule", "block=config.block", "cache=config.cache"),
    *("dtype=config.dtype", "file=name", "doubts"),
)


def entries(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Entries of a record, as `name` or `name=attributes`."""
    result = {}
    for written in names:
        name, _, attributes = written.partition("=")
        value = attrgetter(attributes or name)(record)
        result[name] = str(value) if isinstance(value, Note) else value
    return result


def comparison(task: Comparison) -> dict[str, Any]:
    """A task of report.json; rows refer to each other by their numbers."""
    numbers: dict[Row | None, int | None] = {None: None}  # a row may refer to none
    for n, each in enumerate(task.rows):
        numbers[each.row] = n
    rows = []
    for each in task.rows:
        references = {
            "elbo": numbers[each.closed.elbo],
            "cache_cost": _pair(each.cache_cost, numbers),
            "task_rank": each.place and each.place.rank,
            "next_lower": _pair(each.place and each.place.next_lower, numbers),
            "lowest": _pair(each.place and each.place.lowest, numbers),
        }
        rows.append(_row(each) | references)
    return {
        "metric": task.metric,
        "documents": task.documents,
        "available_documents": task.available,
        "rows": rows,
        "rules": [_speeds(speeds, numbers) for speeds in task.rules],
        "pairs": [_pair(pair, numbers) for pair in task.pairs],
        "differences": task.differences,
        "as_published": task.as_published,
        "notes": task.notes,
    }


def _row(each: ComparedRow) -> dict[str, Any]:
    """A row of report.json, but for its references to other rows."""
    row = each.row
    stderrs = {}
    for metric in row.metrics:
        stderrs[metric] = row.error(row.score.error, metric)
    return entries(row, ROW) | entries(each, COMPARED) | {"stderrs": stderrs}


def _pair(pair: Pair | None, numbers: Mapping[Row | None, int | None]) -> dict[str, Any] | None:
    if pair is None:
        return None
    return {"first": numbers[pair.first], "second": numbers[pair.second]} | entries(pair, PAIR)


def _speeds(speeds: Speeds, numbers: Mapping[Row | None, int | None]) -> dict[str, Any]:
    families = {}
    for name, points in speeds.families.items():
        families[name] = [numbers[each.row] for each in points]
    return {
        "title": speeds.title,
        "elbo": numbers[speeds.elbo],
        "ar": numbers[speeds.ar],
        "oracle": numbers[speeds.oracle],
        "families": families,
    }


def accuracies(runs: Sequence[Run], name: str, baselines: Collection[Run]) -> list[dict[str, Any]]:
    """The averages of a task other than perplexities, of each run that has any."""
    results = []
    for run in runs:
        scores = {metric: {"value": value, "stderr": error} for metric, (value, error) in run.scores(name).items()}
        if scores:
            identity = run.every_task[name].identity
            results.append(entries(run, RUN) | {"ar": run in baselines, "identity": identity, "scores": scores})
    return results


def average_pair(pair: AveragePair, listed: Sequence[Run]) -> dict[str, Any]:
    """A pair of averages; it refers to runs by their numbers among those of `accuracies`."""
    numbers = {"first": listed.index(pair.first.run), "second": listed.index(pair.second.run)}
    return numbers | entries(pair, AVERAGE_PAIR)


def cost(cost: RunCost) -> dict[str, Any]:
    return entries(cost, COST) | {key: cost.run.config.duel.get(key) for key in COUNTS}


def ranking(standings: Standings, tasks: Mapping[str, Comparison]) -> dict[str, Any]:
    """The methods over tasks. `rows`: the number of the row that a task has of a method."""
    rows = []
    for standing in standings.rows:
        method = standing.method
        numbers = {}
        for name, each in method.rows.items():
            numbers[name] = tasks[name].rows.index(each)
        rows.append(
            entries(method.named, ("model", "estimator", "rule", "block", "cache"))
            | entries(method, METHOD)
            | entries(standing, ("main", "mean", "mean_rank", "rank"))
            | {"rows": numbers, "commands": commands(method), "needed": needed(method)}
        )
    return entries(standings, ("mean_of", "metric", "by")) | {"rows": rows}


# ---------------------------------------------------------------- report.csv

SOURCE = ("seconds_per_token", "device", "fingerprint", "date")  # of the run of a line
SIZES = ("documents=size", "available_documents=available")  # of a task
BITS = "bits_per_byte"


def csv_of(standings: Standings, published: Iterable[Mapping[str, Any]] = ()) -> str:
    """report.csv. `published`: the lines of figures of others."""
    means = ("mean", "mean_rank") if standings.mean_of else ()
    lines = []
    for standing in standings.rows:
        method = standing.method
        names = _names(standing)
        places = entries(standing, ("rank",)) | names | entries(standing, means)
        without_places = dict.fromkeys(places) | names  # ranks and means are of perplexities
        for task, each in method.rows.items():
            alone = dataclasses.replace(method, rows={task: each}, scored={})
            lines.append(places | _perplexity(task, each) | _source(method, alone))
        for task, run in method.scored.items():
            alone = dataclasses.replace(method, rows={}, scored={task: run})
            for average in _averages(task, run):
                lines.append(without_places | average | _source(method, alone))
    return csv_text([*lines, *published])


def _names(standing: Standing) -> dict[str, Any]:
    """The columns that name the method of a line."""
    named = standing.method.named
    return {
        **entries(named, ("model", "estimator")),
        **entries(standing.method, ("kind",)),
        **entries(named, ("rule", "block", "cache")),
        **entries(standing.method, ("remarks",)),
    }


def _source(method: RankedMethod, alone: RankedMethod) -> dict[str, Any]:
    """The columns on where a line comes from. `alone`: the method with the run of this line alone."""
    [run] = alone.runs
    return {"dtype": run.config.dtype} | entries(alone, SOURCE) | entries(method, ("parameters",))


def _perplexity(task: str, each: ComparedRow) -> dict[str, Any]:
    """The perplexity of a method on a task, with its errors, gap and gap closed."""
    row = each.row
    return {
        "task": task,
        **entries(row, ("metric", "value")),
        **_ends("interval", each.interval),
        **entries(row, ("stderr", "stderr_reason")),
        **entries(each, ("window_stderr", "reason=about_interval")),
        **_places(each),
        **entries(each, ("gap",)),
        **_ends("gap_interval", each.gap_interval),
        **entries(each, ("gap_closed=closed.percent", "gap_closed_stderr=closed.stderr")),
        **_ends("gap_closed_interval", each.closed.interval),
        **entries(each, ("distinguishable=closed.distinguishable", "gap_closed_reason=closed.reason")),
        **entries(each, ("gap_closed_of=closed.of",)),
        **entries(row, ("nfe", "tokens", "nfe_per_token")),
        **entries(row.run.tasks[row.task], SIZES),
        **entries(row, ("file=run.name",)),
        "doubts": "; ".join(row.run.doubts),
        BITS: row.metrics.get(BITS),
        f"{BITS}_monte_carlo_stderr": row.error(row.score.error, BITS),
    }


def _places(each: ComparedRow) -> dict[str, Any]:
    """The rank on the task, and the paired differences from the next lower value and from the lowest."""
    cells: dict[str, Any] = {"task_rank": each.place and each.place.rank}
    cells["difference_unit"] = each.place and difference_unit(each.row.metric)
    for name in ("next_lower", "lowest"):
        pair = each.place and getattr(each.place, name)
        cells[f"from_{name}"] = pair and pair.difference
        cells |= _ends(f"from_{name}_interval", pair and pair.interval)
        cells[f"from_{name}_verdict"] = pair and pair.verdict
        cells[f"from_{name}_reason"] = pair and str(pair.reason)  # why it has no verdict, if that does not say it
    return cells


def _averages(task: str, run: Run) -> Iterator[dict[str, Any]]:
    """The other averages of a run. Their standard errors are over documents."""
    for metric, (value, error) in run.scores(task).items():
        yield {
            **{"task": task, "metric": metric, "value": value, "documents_stderr": error},
            **entries(run.every_task[task], SIZES),
            "file": run.name,
            "doubts": "; ".join(run.doubts),
        }


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Two columns for an interval, empty without one."""
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
