"""`lm-eval-duel report`: results of the harness in, the paper's tables and figures out."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import strict_json
from lm_eval_duel.command_line import Parser, folder_to_write
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness import trace
from lm_eval_duel.report import (
    accuracy,
    build,
    fields,
    figures,
    gaps,
    latex,
    match,
    read,
    reveal_order,
    run_cost,
    samples,
    tables,
)
from lm_eval_duel.rules.tables import short

FORMAT = "lm_eval_duel report"  # in report.json: that the files it lists are ours to replace

EPILOG = """\
Prints the tables: perplexities of every task, the gap to the autoregressive baseline, and what the runs cost.
Writes report.md, report.json, LaTeX table bodies (.tex) and, where matplotlib is installed, figures (.png).
Documents, windows, scored positions and tokenizers must be the same in everything that is compared; a difference is
an error that names both files. Intervals need samples: run lm_eval with --log_samples.
"""


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; raises UsageError, also for results and traces that are not there."""
    parser = Parser("report", __doc__, EPILOG, "results/duel results/elbo --ar results/ar --out report")
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results_*.json files, or folders that hold them")
    parser.add_argument("--ar", metavar="RESULT", help="the autoregressive baseline: a file or a folder, as above")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write")
    parser.add_argument("--metric", choices=samples.METRICS, help="the perplexity to compare (the first that all have)")
    parser.add_argument(
        "--as-published", action="store_true", help="list other windows, positions and tokenizers instead of refusing"
    )
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE", help="trace files beside those results name")
    options = parser.parse_args(arguments)
    read.files([*options.results, *([] if options.ar is None else [options.ar])])
    for path in options.trace:
        trace.spec(path)
    folder_to_write("--out", options.out)
    return options


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the report shows, as one dict."""
    with usage():
        ar = read.runs([options.ar]) if options.ar else []
        runs = read.runs([*options.results, *([options.ar] if options.ar else [])])
    files = {run.file for run in ar}
    for run in ar:
        if not run.autoregressive:
            what = f"estimator={run.estimator}" if run.ours else f"--model {run.model}"
            raise DuelError(
                f"--ar {run.name} is a result of {what}, not of an autoregressive model; name one of ours "
                f"({match.TWIN}), or one of `--model hf` or of another autoregressive one of the harness."
            )
    notes = [] if options.ar else [f"No --ar: gap closed needs an autoregressive result ({match.TWIN})."]
    notes += [note for run in runs for note in _left_out(run)]
    known = [run for run in runs if run.ours or run.autoregressive]
    accuracies = accuracy.tables(known, [run for run in known if run.file in files])
    runs = [run for run in known if run.tasks]
    if not runs and not accuracies:
        raise DuelError(f"No perplexity ({', '.join(samples.METRICS)}) to report: {'; '.join(notes)}")
    ar = [run for run in runs if run.file in files]
    traced, shown = _traces(runs, options.trace, notes)
    found = build.tasks(runs, ar, options, traced) if runs else {}
    return {
        "format": FORMAT,
        "version": 1,
        "ar": [run.name for run in ar],
        "notes": notes,
        "tasks": found,
        "averages": gaps.averages(found),
        "accuracies": accuracies,
        "cost": run_cost.table(runs, ar, found),
        "traces": shown,
        "results": [
            {"file": run.name, "model": run.label, "ar": run.file in files, "fingerprint": run.fingerprint}
            | {"spec": run.spec}
            for run in known
            if run.tasks or any(task.scores for task in run.others.values())
        ],
        "figures": [],
        "files": [],
    }


def _left_out(run: read.Run) -> list[str]:
    """What of a results file stands in no table."""
    if not run.ours and not run.autoregressive:
        return [f"{run.name} is of --model {run.model}, not known to be autoregressive, and is left out."]
    notes = [f"{name} in {run.name} is a group of tasks and is left out." for name in run.groups]
    notes += [f"{line}, and is left out." for line in run.nans]
    notes += [
        f"{name} in {run.name} holds no perplexity and no accuracy, and is left out."
        for name, task in run.others.items()
        if not task.scores
    ]
    nothing = not (run.tasks or run.others)
    return [*notes, f"{run.name} holds no perplexity and is left out."] if nothing else notes


def _traces(runs: Sequence[read.Run], named: Sequence[str], notes: list[str]) -> tuple[build.Traced, list[dict]]:
    """Nats per document from the traces of runs, and the summary of every trace."""
    if not named and not any(run.duel.get("trace") for run in runs):
        return {}, []
    traces = reveal_order.Traces(named)
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
        spec = reveal_order.spec_of(traces.spec(path))
        summary = reveal_order.summary(traces.load(path), spec, str(path))
        said = [label or path.stem, str(spec.get("estimator", ""))]
        said += [short(str(spec["rule"]))] if spec.get("estimator") == "duel" and "rule" in spec else []
        summary["label"] = ", ".join(filter(None, [*said, f"block {spec['block']}" if "block" in spec else ""]))
        shown.append(summary)
    return traced, shown


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report's files; `report` learns their names. Files of an earlier report there are removed.

    Raises DuelError, and leaves the folder as it is, where a file there is not of an earlier report.
    """
    earlier = _earlier(folder)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place)
        if figures.available():
            report["figures"] = figures.draw(report, made)
        else:
            report["notes"].append(figures.MISSING)
        bodies = latex.bodies(report)
        report["folder"] = str(folder)
        report["files"] = ["report.json", "report.md", *bodies, *(figure["file"] for figure in report["figures"])]
        for name, text in {"report.json": _json(report), "report.md": tables.markdown(report), **bodies}.items():
            (made / name).write_text(text, encoding="utf-8")
        if foreign := [name for name in report["files"] if name not in earlier and (folder / name).exists()]:
            raise DuelError(
                f"--out {folder} holds {', '.join(foreign)}, which no report there lists as its own: nothing was "
                "written. Name another folder, or move what is there."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in report["files"]:  # report.json first: what is written after it is known to be of a report
            shutil.copyfile(made / name, folder / name)
    for name in earlier - set(report["files"]):
        (folder / name).unlink(missing_ok=True)


def _earlier(folder: Path) -> set[str]:
    """The files of an earlier report in a folder; raises DuelError for a report.json that is not of this command."""
    file = folder / "report.json"
    if not file.exists():
        return set()
    try:
        found = fields.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("files"), list):
        raise DuelError(
            f'{file} is not of this command (it has no "format": "{FORMAT}"), so --out {folder} is left as it is. '
            "Name another folder, or move what is there."
        )
    names = [Path(str(name)).name for name in found["files"]]
    return {name for name in names if name.endswith((".md", ".tex", ".png", ".json"))}


def _json(report: dict[str, Any]) -> str:
    """The report as JSON, lists of numbers on one line."""
    text = strict_json.dumps(report)
    return re.sub(r"\[\s+([-\d.eE,\s]|null)*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Report and print: `lm-eval-duel report`."""
    options = parse(arguments)
    _earlier(Path(options.out))
    report = collect(options)
    write(report, Path(options.out))
    print(tables.console(report))
