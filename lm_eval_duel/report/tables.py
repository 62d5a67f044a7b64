"""The report as Markdown: report.md, and the text that the command prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from lm_eval_duel.estimators.registry import find
from lm_eval_duel.report import cells, pairs
from lm_eval_duel.report.cells import Entry, shown
from lm_eval_duel.report.gaps import UNCLEAR
from lm_eval_duel.report.headline import WORDS, fixed, number
from lm_eval_duel.report.markdown import Footnotes, bullets, listed, plain, spaced
from lm_eval_duel.tables import markdown_table, one_line

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample", "precision"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
AVERAGED = "the average includes tasks whose gap closed is not distinguishable from 0; without them it is too high"
SINGLE = "Each 95 % interval is for its pair alone: of twenty pairs of equal rows, about one is called different."


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# How far from autoregressive?"]
    parts += [listed(line for task in report["tasks"].values() for line in task["headlines"])]
    parts += [bullets(report["notes"])]
    for name, task in report["tasks"].items():
        documents = "" if task["documents"] is None else f", {task['documents']} documents"
        parts += [
            f"## {plain(name)}: {WORDS[task['metric']]}{documents}",
            values(task),
            *_figures(report, name, "perplexity"),
        ]
        if task["differences"]:
            title = "Compared as published, although these differ" if task["as_published"] else "These differ"
            parts += [f"**{title}:**", bullets(task["differences"])]
        if any(find(entry["estimator"]).follows_rule and not entry["ar"] for entry in task["rows"]):
            parts += ["### Gap to the autoregressive model", gaps(task)]
        unit = pairs.unit(task["metric"])
        if any(entry["cache_cost"] for entry in task["rows"]):
            parts += [f"### Cost of the cache, nats per {unit}", cache_costs(task)]
        if task["pairs"]:
            parts += [f"### Paired differences, nats per {unit}", differences(task), SINGLE]
        for sweep in task["rules"]:
            parts += [f"### Rules against NFE: {plain(sweep['title'])}", rules(task, sweep)]
        parts += [*_figures(report, name, "rules"), "### Notes", bullets(task["notes"])]
    if len(report["tasks"]) > 1 and any_closed(report):
        parts += ["## Gap closed over tasks, %", averages(report)]
    for table in report["accuracies"]:
        parts += [f"## {plain(_accuracy_title(table))}", accuracies(table)]
    if report["cost"]:
        parts += ["## Cost", cost(report["cost"])]
    if report["traces"]:
        parts += ["## Reveal orders, from traces", traces(report["traces"]), *_figures(report, "traces", "trace")]
    parts += ["## Files", files(report["results"])]
    return spaced(parts)


def values(task: Mapping[str, Any]) -> str:
    """Perplexity of every row with its interval or standard error, or a footnote that says why it has neither."""
    metric, notes = task["metric"], Footnotes()
    head = ["model", "estimator", "rule", "block", "cache", WORDS[metric], "95 % interval", "s.e. (Monte Carlo)"]
    other = [] if metric == "bits_per_byte" else ["bits_per_byte"]
    lines = []
    for entry, cache in zip(task["rows"], cells.caches(task["rows"]), strict=True):
        others = [cells.value(entry, m) if m in entry["metrics"] else "" for m in other]
        error = notes.mark(entry["stderr_reason"]) if entry["stderr"] is None else f"{entry['stderr']:.2g}"
        labels = [plain(entry["model"]), cells.method(entry), cells.rule(entry), cells.block(entry), cache]
        lines.append([*labels, shown(entry, metric), cells.interval(entry, metric, notes), error, *others])
    return notes.under(markdown_table([*head, *(WORDS[m] for m in other)], lines))


def cache_costs(task: Mapping[str, Any]) -> str:
    """Each row under a cache next to the one without, and their paired difference: above 0, the cache costs."""
    entries, metric, notes = task["rows"], task["metric"], Footnotes()
    lines = []
    for entry in entries:
        if (cost := entry["cache_cost"]) is None:
            continue
        labels = [plain(entry["model"]), cells.method(entry), cells.rule(entry), cells.block(entry)]
        without = "" if cost["second"] is None else cells.value(entries[cost["second"]], metric)
        difference = f"{cells.nats(cost['difference'])} {notes.mark(cost['reason'])}".strip()
        values = [without, cells.value(entry, metric), difference, cells.nats_between(cost), plain(cost["verdict"])]
        lines.append([*labels, plain(entry["cache"]), *values])
    values = ["cache=none", "with the cache", "cost", "95 % interval", "verdict"]
    return notes.under(markdown_table(["model", "estimator", "rule", "block", "cache", *values], lines))


def differences(task: Mapping[str, Any]) -> str:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""
    entries, caches, notes = task["rows"], cells.caches(task["rows"]), Footnotes()
    lines = []
    for pair in task["pairs"]:
        first, second = (entries[pair[key]] for key in ("first", "second"))
        same = [first[key] == second[key] for key in ("model", "block", "cache")]
        shared = [plain(first["model"]), cells.block(first), caches[pair["first"]]]
        labels = [label if equal else "" for label, equal in zip(shared, same, strict=True)]
        mark = notes.mark(pair["reason"])
        names = " - ".join(map(plain, pair["names"]))
        difference = f"{cells.nats(pair['difference'])} {mark}".strip()
        lines.append([*labels, names, difference, cells.nats_between(pair), plain(pair["verdict"])])
    head = ["model", "block", "cache", "first - second", "difference", "95 % interval", "verdict"]
    return notes.under(markdown_table(head, lines))


def gaps(task: Mapping[str, Any]) -> str:
    """For each DUEL row: ELBO, DUEL, their gaps to the AR model, and gap closed."""
    entries, metric, notes = task["rows"], task["metric"], Footnotes()
    lines = []
    duels = [entry for entry in entries if find(entry["estimator"]).follows_rule and not entry["ar"]]
    for entry, cache in zip(duels, cells.caches(duels), strict=True):
        elbo = entries[entry["elbo"]] if entry["elbo"] is not None else None
        closed = UNCLEAR if entry["distinguishable"] is False else cells.percent(entry["gap_closed"])
        between = cells.between(entry["gap_closed_interval"], lambda value: fixed(value, 1), " %")
        if not between and entry["gap_closed_stderr"] is not None:
            closed += f" +- {fixed(entry['gap_closed_stderr'], 1)}"
        mark = notes.mark(entry["gap_closed_reason"])
        lines.append(
            [
                plain(entry["model"]),
                ", ".join(filter(None, [cells.rule(entry), plain(entry["aside"])])),
                cells.block(entry),
                cache,
                "" if elbo is None else shown(elbo, metric),
                shown(entry, metric),
                "" if elbo is None else cells.gap(elbo, metric),
                cells.gap(entry, metric),
                cells.between(entry["gap_interval"], lambda value: number(value, metric)),
                closed if between else " ".join(filter(None, [closed, mark])),
                " ".join([between, mark]).strip() if between else "",
            ]
        )
    labels = ["model", "rule", "block", "cache"]
    head = ["ELBO", "DUEL", "ELBO's gap", "DUEL's gap", "95 % interval", "gap closed", "95 % interval"]
    return notes.under(markdown_table([*labels, *head], lines))


def rules(task: Mapping[str, Any], sweep: Mapping[str, Any]) -> str:
    """The perplexity and NFE of each rule."""
    lines = []
    for family in sweep["families"]:
        for point in family["points"]:
            entry = task["rows"][point["index"]]
            suffix = " (adaptive)" if family["adaptive"] else ""
            value = number(entry["value"], task["metric"])
            lines.append([f"{cells.rule(entry)}{suffix}", f"{entry['nfe_per_token']:.3f}", value])
    return markdown_table(["rule", "NFE per token", f"DUEL, {WORDS[task['metric']]}"], lines)


def averages(report: Mapping[str, Any]) -> str:
    """Gap closed, one column per task, and the average."""
    names, notes = list(report["tasks"]), Footnotes()
    lines = []
    for row in report["averages"]:
        closed = [
            UNCLEAR if n in row["unclear"] else _closed(row["tasks"].get(n), row["stderrs"].get(n)) for n in names
        ]
        mean = UNCLEAR if row["average_unclear"] else _closed(row["average"], row["average_stderr"])
        mark = notes.mark(AVERAGED) if row["unclear"] and mean else ""
        mean = f"{mean} (of {row['averaged']}) {mark}".strip() if mean else ""
        lines.append([plain(row["model"]), plain(row["name"]), *closed, mean])
    return notes.under(markdown_table(["model", "estimator", *map(plain, names), "average"], lines))


def any_closed(report: Mapping[str, Any]) -> bool:
    """Whether gap closed is known on any task."""
    return any(value is not None for row in report["averages"] for value in row["tasks"].values())


def _closed(value: float | None, error: float | None) -> str:
    return "" if value is None else fixed(value, 1) + ("" if error is None else f" +- {fixed(error, 1)}")


def accuracies(table: Mapping[str, Any]) -> str:
    """Metrics other than perplexity, with the harness's standard errors."""
    metrics, notes = table["metrics"], Footnotes()
    lines = []
    for entry, cache in zip(table["rows"], cells.caches(table["rows"]), strict=True):
        mark = notes.mark(entry["reason"])
        scores = [f"{_score(entry['scores'].get(metric))} {mark}".strip() for metric in metrics]
        labels = [plain(entry["model"]), plain(entry["name"]), cells.rule(entry), plain(entry["block"] or ""), cache]
        lines.append([*labels, *scores])
    return notes.under(markdown_table(["model", "estimator", "rule", "block", "cache", *map(plain, metrics)], lines))


def _score(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{score['value']:.4f} +- " + ("?" if score["stderr"] is None else f"{score['stderr']:.4f}")


def _accuracy_title(table: Mapping[str, Any]) -> str:
    documents = "" if table["documents"] is None else f", {table['documents']} documents"
    return f"{table['task']}: {', '.join(table['metrics'])}, +- standard error{documents}{table['apart']}"


def cost(entries: Sequence[Entry]) -> str:
    """Time, network calls and memory of each run."""
    head = ["model", "estimator", "rule", "block", "cache", "s per token", "forwards", "rows", "peak MiB"]
    notes = Footnotes()
    lines = []
    for entry, cache in zip(entries, cells.caches(entries), strict=True):
        peak, seconds = entry["peak_memory_bytes"], entry["seconds_per_token"]
        ratios = [
            f"{'' if entry[key] is None else format(entry[key], '.3g')} {notes.mark(entry[f'{key}_reason'])}".strip()
            for key in ("times_elbo", "times_ar")
        ]
        lines.append(
            [
                plain(entry["model"]),
                plain(f"{entry['name']} ({entry['flag']})" if entry["flag"] else entry["name"]),
                cells.rule(entry),
                cells.block(entry),
                cache,
                "" if seconds is None else f"{seconds:.3g}",
                *("" if entry[key] is None else f"{entry[key]:,}" for key in ("forwards", "rows")),
                "" if peak is None else f"{peak / 2**20:,.0f}",
                *ratios,
                "" if entry["whole_run_seconds"] is None else f"{entry['whole_run_seconds']:.1f}",
            ]
        )
    return notes.under(markdown_table([*head, "x ELBO", "x AR", "whole run, s"], lines))


def traces(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Each trace in a few numbers; report.json has the arrays."""
    lines = []
    for trace in summaries:
        means = trace["by_step"]["mean_nll"] if trace["by_step"] else None
        order = trace.get("left_to_right")
        lines.append(
            [
                plain(trace["label"]),
                f"{trace['windows']:,}",
                f"{trace['tokens']:,}",
                "" if trace["mean_nll"] is None else f"{trace['mean_nll']:.3f}",
                "" if means is None else f"{means[0]:.3f}",
                "" if means is None else f"{means[-1]:.3f}",
                "no order" if not trace["ordered"] else "" if order is None else fixed(order, 2, "+"),
                trace["flag"],
            ]
        )
    header = ["trace", "windows", "tokens", "nll per token", "first step", "last step", "position x step", " "]
    legend = (
        "nll: negative log-likelihood, in nats. position x step: correlation of a token's position in its block with "
        "its step; +1 is left to right, -1 right to left."
    )
    return f"{markdown_table(header, lines)}\n\n{legend}"


def files(results: Sequence[Mapping[str, Any]]) -> str:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(result["file"]) for result in results])
    lines = []
    for result in results:
        spec = ", ".join(f"{key}={result['spec'][key]}" for key in SPEC if result["spec"].get(key, "none") != "none")
        name = f"{result['model']} (AR baseline)" if result["ar"] else result["model"]
        lines.append(
            list(map(plain, [os.path.relpath(result["file"], folder), name, result["fingerprint"] or "", spec]))
        )
    return f"Below {plain(folder)}:\n\n{markdown_table(['file', 'model', 'fingerprint', 'spec'], lines)}"


def console(report: Mapping[str, Any]) -> str:
    """The text that the command prints: headlines, perplexities, and the names of the files."""
    parts = [line.replace("**", "") for task in report["tasks"].values() for line in task["headlines"]]
    for name, task in report["tasks"].items():
        parts += [f"{one_line(name)}, {WORDS[task['metric']]}", values(task)]
        if any(entry["cache_cost"] for entry in task["rows"]):
            parts += [
                f"cost of the cache on {one_line(name)}, nats per {pairs.unit(task['metric'])}",
                cache_costs(task),
            ]
        if task["pairs"]:
            unit = pairs.unit(task["metric"])
            parts += [f"paired differences on {one_line(name)}, nats per {unit}", differences(task)]
        parts += ["\n".join(f"differs: {difference}" for difference in task["differences"])]
    for table in report["accuracies"]:
        parts += [one_line(_accuracy_title(table)), accuracies(table)]
    parts += ["\n".join(map(one_line, report["notes"])), f"wrote to {report['folder']}: {', '.join(report['files'])}"]
    return spaced(parts).rstrip("\n")


def _figures(report: Mapping[str, Any], about: str, kind: str) -> list[str]:
    figures = [figure for figure in report["figures"] if (figure["about"], figure["kind"]) == (about, kind)]
    return [
        f"{'' if figure['file'].endswith('.pdf') else '!'}[{plain(figure['title'])}]({quote(figure['file'])})"
        for figure in figures
    ]
