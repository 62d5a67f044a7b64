"""`lm-eval-duel report`: results of the harness in, the paper's tables and figures out."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.report import build, cost, figures, gaps, latex, orders, read, rows, tables
from lm_eval_duel.trace import finite

EPILOG = """\
Writes report.md, report.json, LaTeX table bodies (.tex) and, where matplotlib is installed, figures (.png).
Documents, windows, scored positions and tokenizers must be the same in everything that is compared; a difference is
an error that names both files. Intervals need samples: run lm_eval with --log_samples.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="lm-eval-duel report", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results_*.json files, or folders that hold them")
    parser.add_argument("--ar", metavar="RESULT", help="the autoregressive baseline: a file or a folder, as above")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write")
    parser.add_argument("--metric", choices=read.METRICS, help="the perplexity to compare (the first that all have)")
    parser.add_argument(
        "--as-published", action="store_true", help="list other windows, positions and tokenizers instead of refusing"
    )
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE", help="trace files beside those results name")
    return parser.parse_args(arguments)


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the report shows, as one dict."""
    ar = read.runs([options.ar]) if options.ar else []
    runs = read.runs([*options.results, *([options.ar] if options.ar else [])])
    files = {run.file for run in ar}
    for run in ar:
        if not run.autoregressive:
            what = f"estimator={run.estimator}" if run.ours else f"--model {run.model}"
            raise DuelError(
                f"--ar {run.name} is a result of {what}, not of an autoregressive model; name one of `--model hf` (or "
                f"of another autoregressive one of the harness), or of ours with estimator=exact."
            )
    notes = [] if options.ar else ["No --ar: gap closed needs an autoregressive result."]
    notes += [note for run in runs for note in _left_out(run)]
    runs = [run for run in runs if run.tasks and (run.ours or run.autoregressive)]
    if not runs:
        raise DuelError(f"No perplexity ({', '.join(read.METRICS)}) to report: {'; '.join(notes)}")
    ar = [run for run in runs if run.file in files]
    traced, shown = _traces(runs, options.trace, notes)
    found = build.tasks(runs, ar, options, traced)
    return {
        "version": 1,
        "ar": [run.name for run in ar],
        "notes": notes,
        "tasks": found,
        "averages": gaps.averages(found),
        "cost": cost.table(runs, ar, found),
        "traces": shown,
        "results": [
            {"file": run.name, "model": run.label, "ar": run.file in files, "fingerprint": run.fingerprint}
            | {"law": run.law}
            for run in runs
        ],
        "figures": [],
        "files": [],
    }


def _left_out(run: read.Run) -> list[str]:
    """What of a results file stands in no table."""
    if not run.ours and not run.autoregressive:
        return [f"{run.name} is of --model {run.model}, not known to be autoregressive, and is left out."]
    notes = [f"{name} in {run.name} is a group of tasks and is left out." for name in run.groups]
    return notes if run.tasks else [*notes, f"{run.name} holds no perplexity and is left out."]


def _traces(runs: Sequence[read.Run], named: Sequence[str], notes: list[str]) -> tuple[build.Traced, list[dict]]:
    """Nats per document from the traces of runs, and the summary of every trace."""
    if not named and not any(run.duel.get("trace") for run in runs):
        return {}, []
    traces = orders.Traces(named)
    paths: dict[Path, str] = dict.fromkeys(traces.named, "")
    traced = {}
    for run in runs:
        path = traces.of(run)
        if path is None:
            if run.duel.get("trace"):
                notes.append(f"The trace of {run.name} is not at {run.duel['trace']} any more; name it with --trace.")
            continue
        paths[path] = run.label
        traced[run.name] = traces.documents(path)
    shown = []
    for path, label in paths.items():
        law = orders.law_of(traces.law(path))
        summary = orders.summary(traces.load(path), law, str(path))
        said = [label or path.stem, str(law.get("estimator", ""))]
        said += [rows.short(str(law["rule"]))] if law.get("estimator") == "duel" and "rule" in law else []
        summary["label"] = ", ".join(filter(None, [*said, f"block {law['block']}" if "block" in law else ""]))
        shown.append(summary)
    return traced, shown


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report's files; `report` learns their names. Files of an earlier report there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    if figures.available():
        report["figures"] = figures.draw(report, folder)
    else:
        report["notes"].append(figures.MISSING)
    bodies = latex.bodies(report)
    for name, body in bodies.items():
        (folder / name).write_text(body, encoding="utf-8")
    report["folder"] = str(folder)
    report["files"] = ["report.md", "report.json", *bodies, *(figure["file"] for figure in report["figures"])]
    (folder / "report.md").write_text(tables.markdown(report), encoding="utf-8")
    (folder / "report.json").write_text(_json(report), encoding="utf-8")


def _clear(folder: Path) -> None:
    """Remove what the report.json in a folder lists."""
    try:
        listed = json.loads((folder / "report.json").read_text(encoding="utf-8"))["files"]
        names = [Path(str(name)).name for name in listed]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in names:
        if name.endswith((".md", ".tex", ".png", ".json")):
            (folder / name).unlink(missing_ok=True)


def _json(report: dict[str, Any]) -> str:
    """The report as JSON, lists of numbers on one line."""
    text = json.dumps(finite(report), indent=1, allow_nan=False)
    return re.sub(r"\[\s+([-\d.eE,\s]|null)*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Report and print: `lm-eval-duel report`."""
    options = parse(arguments)
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise DuelError(f"--out {folder} is a file; name a folder, which is made if it is not there.")
    report = collect(options)
    write(report, folder)
    print(tables.console(report))
