"""`lm-eval-duel show`: one document of a trace in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from typing import Any

from lm_eval_duel import rules
from lm_eval_duel.arguments import MISSING, TEXT, choice, whole
from lm_eval_duel.console.command_line import FLAGS, PATH, Flag, Parser, one_line, plain_table
from lm_eval_duel.core.scores import perplexity
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import BEAM, ESTIMATORS, Kind, of_spec
from lm_eval_duel.harness import trace
from lm_eval_duel.text.annotated import token_texts

EARLY_TO_LATE = (54, 61, 67, 73, 79, 114, 185, 226)  # of the terminal's 256 colours: dark blue to yellow
SURE_TO_SURPRISED = (255, 230, 228, 222, 215, 208, 202, 196)  # white to red
NOTES = {
    Kind.LIKELIHOOD: "",
    Kind.ESTIMATE: " (an estimate)",
    Kind.UPPER_BOUND: " (a bound)",
    Kind.NOT_A_LIKELIHOOD: " (NOT a likelihood: it sees the targets)",
}
MAX_NLL = 8.0  # nats, the reddest
COLUMNS = {  # heading: (key of a record, format)
    "step": ("reveal_steps", "d"),
    "log_prob": ("token_logprobs", ".3f"),
    "p1": ("confidence", ".3f"),
    "margin": ("margin", ".3f"),
    "entropy": ("entropy", ".3f"),
}
PRINTS = """\
Prints each window's log-likelihood and number of steps, then its text with coloured tokens. Without colours (a pipe,
NO_COLOR, --color never) it prints a table with one line per token: position, block, step, log-probability (nats),
probability of the most likely token (p1), margin and entropy.
"""


def show(records: list[dict[str, Any]], tokenizer: Any, by: str, coloured: bool, rule: str | None = None) -> str:
    """The windows of one document, as text for a terminal. `tokenizer` needs `decode(ids)`.

    `rule` selects the order of one rule of a lattice. By default the estimator's order is shown, or the order of
    the first rule if the estimator has none.
    """
    parts, last_step = [], 0
    for record in records:
        pieces, order = token_texts(record["ids"], tokenizer), _order(record, rule)
        shown = record | order
        parts.append(_heading(record) + (f"\nshown: the order of {order['name']}" if order else ""))
        parts.append(_colours(shown, pieces, by) if coloured else _token_table(shown, pieces))
        last_step = max([last_step, *shown["reveal_steps"]])
    if coloured and any(record["ids"] for record in records):
        parts.append(_legend(by, last_step))
    return "\n\n".join(parts)


def _order(record: dict[str, Any], rule: str | None) -> dict[str, Any]:
    """The order of a lattice's rule: the requested one, or the first if the estimator itself has no order."""
    orders = record.get("rules", {})
    if rule is None and (record["reveal_steps"] or not orders):
        return {}
    name = next(iter(orders)) if rule is None else str(rules.parse(rule))
    if name not in orders:
        raise DuelError(f"This trace has no order of {name}; it holds {', '.join(orders) or 'none but its own'}.")
    return {**orders[name], "name": name}


def _heading(record: dict[str, Any]) -> str:
    tokens = len(record["ids"])
    lines = [
        f"document {record.get('doc')} of {one_line(record.get('task'))}, window {record['window']}: {tokens} tokens"
    ]
    lines += [f"request {record['request']}"] if record.get("request") else []
    error, beam = record.get("stderr"), record.get("beam")
    for name, log_prob in record["values"].items():
        estimator = ESTIMATORS.get(name)  # None: a rule
        note = "" if estimator is None else NOTES[estimator.kind]
        if beam is not None:
            sums = BeamBlocks.read(beam)
            note = NOTES[of_spec(name, {BEAM: ""}, sums).kind] + (f" ({sums.remark})" if sums.remark else "")
        lines.append(_value(one_line(name) + note, log_prob, tokens, error))
        error = None
    if record.get("nfe") is not None:
        near_ties = record.get("near_ties")
        lines.append(f"{record['nfe']} steps" + ("" if near_ties is None else f", {near_ties or 'no'} near ties"))
    return "\n".join(lines)


def _value(name: str, log_prob: float, tokens: int, error: float | None) -> str:
    """A window's value under one estimator. `error`: its Monte Carlo standard error, in nats."""
    text = f"{name} {log_prob:.2f}" + ("" if error is None else f" ± {error:.2f}") + " nats"
    if not tokens:
        return text
    value = perplexity(-log_prob / tokens)
    return f"{text}, perplexity {value:.2f}" + ("" if error is None else f" ± {value * error / tokens:.2f}")


def _colours(record: dict[str, Any], pieces: list[str], by: str) -> str:
    if by == "nll":
        values, most, palette = [-value for value in record["token_logprobs"]], MAX_NLL, SURE_TO_SURPRISED
    else:
        values, most, palette = record["reveal_steps"], max([1, *record["reveal_steps"]]), EARLY_TO_LATE
    if not values:
        return f"(no {by} in this trace)\n" + "".join(pieces)
    shown = []
    for piece, value in zip(pieces, values, strict=True):
        colour = palette[round((len(palette) - 1) * min(1.0, value / most))]
        ink = 15 if palette is EARLY_TO_LATE and colour in palette[:3] else 16
        shown.append("\n".join(f"\x1b[48;5;{colour};38;5;{ink}m{line}\x1b[0m" for line in piece.split("\n")))
    return "".join(shown)


def _legend(by: str, last_step: int) -> str:
    palette, first, last = EARLY_TO_LATE, "revealed first in its block", f"last (step {last_step})"
    if by == "nll":
        palette, first, last = SURE_TO_SURPRISED, "nll 0", f"{MAX_NLL:g} nats or more"
    return f"{first} " + "".join(f"\x1b[48;5;{colour}m  \x1b[0m" for colour in palette) + f" {last}"


def _token_table(record: dict[str, Any], pieces: list[str]) -> str:
    """One line per token: its position, block, step, statistics (empty if the trace lacks them) and text."""
    columns = {key: record.get(key) or [] for key, _ in COLUMNS.values()}
    log_odds = (min(max(value, -700), 700) for value in columns["confidence"])
    columns["confidence"] = [1 / (1 + math.exp(-value)) for value in log_odds]
    rows, block, starts = [], -1, set(record["starts"])
    for n, piece in enumerate(pieces):
        block += n in starts
        cells = [format(columns[key][n], form) if columns[key] else "" for key, form in COLUMNS.values()]
        rows.append([str(n), str(block), *cells, repr(piece)[1:-1]])
    return plain_table(["position", "block", *COLUMNS, "token"], rows)


def main(arguments: list[str]) -> None:
    """Print one document of a trace: `lm-eval-duel show`."""
    options = parse(arguments)
    records = _windows(options.trace, options.task, options.doc, options.request)
    from lm_eval_duel import denoisers

    name = options.tokenizer or trace.spec(options.trace).get("tokenizer")
    if not name:
        raise DuelError(f"{options.trace} does not name its tokenizer; pass a folder or a hub name with --tokenizer.")
    tokenizer = denoisers.load_tokenizer({"tokenizer": name})
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    coloured = terminal if options.color == "auto" else options.color == "always"
    print(show(records, tokenizer, options.by, coloured, options.rule))


@usage()
def parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError."""
    options = Parser(
        "show",
        "Print one document of a trace, its tokens coloured by reveal step or by negative log-likelihood.",
        PRINTS,
        "trace.jsonl --doc 3 --by nll",
        TRACE=Flag(PATH, MISSING, "a file written with --model_args trace=FILE.jsonl"),
        doc=Flag(whole(0), 0, "number of the document"),
        task=Flag(TEXT, None, "name of the task, if the trace holds several"),
        request=Flag(whole(0), 0, "number of the answer, in a multiple-choice document"),
        by=Flag(choice("step", "nll"), "step", "what the colours show"),
        rule=Flag(TEXT, None, "in a trace of a lattice, the rule whose order is shown", unset="the first"),
        tokenizer=dataclasses.replace(FLAGS["tokenizer"], unset="the trace's own"),
        color=Flag(choice("auto", "always", "never"), "auto", "whether tokens are coloured"),
    ).parse_args(arguments)
    if options.rule is not None:
        rules.parse(options.rule)
    trace.spec(options.trace)
    return options


def _windows(path: str, task: str | None, doc: int, request: int) -> list[dict[str, Any]]:
    """The windows of one document; raises DuelError that lists what the trace holds."""
    records = trace.read(path)
    if not records:
        raise DuelError(f"{path} holds no window yet.")
    tasks = sorted({str(record.get("task")) for record in records})
    listed = one_line(", ".join(tasks))
    if task is None and len(tasks) > 1:
        raise DuelError(f"{path} holds the tasks {listed}; name one with --task.")
    task = task or tasks[0]
    of_task = [record for record in records if str(record.get("task")) == task]
    windows = [r for r in of_task if r.get("doc") == doc and (r.get("request") or 0) == request]
    if not windows:
        docs = sorted({record["doc"] for record in of_task if isinstance(record.get("doc"), int)})
        available = f"documents {docs[0]} to {docs[-1]} of task {task}" if docs else f"the tasks {listed}"
        wanted = f"document {doc} of task {task}" + (f", request {request}" if request else "")
        raise DuelError(one_line(f"{path} has no {wanted}; it holds {available}."))
    return windows
