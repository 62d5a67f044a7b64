"""The figures of a plan as text."""

from __future__ import annotations

from typing import Any

from lm_eval_duel.tables import plain_table

HEADER = ("method", "NFE", "calls", "rows", "token-rows", "PFLOP", "time", "kept MiB", "what it gives")
GIVES = {
    "exact": "the likelihood",
    "chain rule": "the likelihood",
    "prefix": "another distribution, exactly",
    "dual": "another distribution, exactly",
    "two_phase": "an estimate of exact, with its error",
    "elbo": "a bound, with its error",
    "lattice": "all orders: oracle, mean and mixture",
}


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    most = "" if figures["steps_known"] else "<= " if figures["upper_bound"] else "~ "
    rows = []
    for method, line in figures["methods"].items():
        bound = "" if method.startswith(("elbo", "lattice")) else most
        numbers = [line["nfe"], line["calls_at_least"], line["rows"], line["token_rows"]]
        cells = ["" if number is None else f"{bound}{number:,}" for number in numbers]
        mebibytes = line["kept_bytes"] / 2**20
        kept = f"{mebibytes:,.0f}" if mebibytes >= 1 else short(mebibytes) if mebibytes else ""
        work = [f"{bound}{short(line['flops'] / 1e15)}", f"{bound}{hours_as_text(line['hours'])}"]
        rows.append(
            [method, *cells, *work, kept, next(text for name, text in GIVES.items() if method.startswith(name))]
        )
    notes = []
    if not figures["steps_known"]:
        notes.append(
            "The steps of this rule are not known in advance: all but elbo are upper bounds (one position a step)."
            if figures["upper_bound"]
            else "This rule may reveal nothing at a step, so its steps have no bound: all but elbo assume one position "
            "a step."
        )
    if figures["seed_first"]:
        notes.append("prefix, dual and two_phase with seed_first=true, which this network needs under a cache.")
    return "\n".join([*_heading(figures), "", plain_table(HEADER, rows), *([""] if notes else []), *notes])


def _heading(figures: dict[str, Any]) -> list[str]:
    documents = f"{figures['documents']:,} documents, " if figures["documents"] else ""
    return [
        f"{figures['network']} ({figures['family']}): {short(figures['parameters'] / 1e6)} M parameters, "
        f"{_memory(figures['weight_bytes'])} in {figures['dtype']}; {figures['rule']}, block "
        f"{figures['block'] or 'none'}",
        f"{documents}{figures['tokens']:,} tokens in {figures['windows']:,} windows of at most {figures['length']:,} "
        f"positions, {figures['blocks']:,} blocks",
        f"time: on {figures['device']}, at {figures['utilization']:.0%} of {figures['tflops']:,.4g} TFLOP/s",
    ]


def short(number: float) -> str:
    """Three significant digits without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:#.2g}" if number < 1 else f"{number:.2f}"


def _memory(count: float) -> str:
    """Bytes as GiB or MiB."""
    return f"{short(count / 2**30)} GiB" if count >= 2**30 else f"{short(count / 2**20)} MiB"


def hours_as_text(hours: float) -> str:
    """Hours, minutes or seconds."""
    if hours >= 1:
        return f"{short(hours)} h"
    return f"{short(60 * hours)} min" if 60 * hours >= 1 else f"{short(3600 * hours)} s"
