"""One document of a trace in the terminal, so that a person sees how the model reads it.

python -m lm_eval_duel show TRACE --doc N --by step|nats

Tokens are coloured by the step at which they were revealed in their block, or by their nats. Where there are no colours
(a pipe, NO_COLOR) each token is a line with its numbers instead.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from lm_eval_duel import rules
from lm_eval_duel.command_line import Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators.registry import ESTIMATORS, Kind, canonical
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.token_text import token_texts

EARLY_TO_LATE = (54, 61, 67, 73, 79, 114, 185, 226)  # of the terminal's 256 colours: dark blue to yellow
SURE_TO_SURPRISED = (255, 230, 228, 222, 215, 208, 202, 196)  # white to red
NOTES = {
    Kind.LIKELIHOOD: "",
    Kind.UPPER_BOUND: " (a bound)",
    Kind.NOT_A_LIKELIHOOD: " (NOT a likelihood: it sees the truth)",
}
MOST_NATS = 8.0  # the reddest
NEEDED = ("ids", "starts", "reveal_steps", "token_logprobs", "values")
PRINTS = """\
Prints the document's windows: their log-likelihood and steps, then the text, each token coloured. Without colours (a
pipe, NO_COLOR, --color never) each token is a line: position, block, step, nats, P1, margin, entropy.
"""


def show(records: list[dict[str, Any]], tokenizer: Any, by: str, coloured: bool, rule: str | None = None) -> str:
    """The windows `records` of one document, as text for a terminal. `tokenizer` has `decode(ids)`.

    `rule`: of a lattice, whose order is shown; None: the estimator's own, or where it has none the first rule's.
    """
    parts, last = [], 0
    for record in records:
        pieces, order = token_texts(record["ids"], tokenizer), _order(record, rule)
        shown = record | order
        parts.append(_heading(record) + (f"\nshown: the order of {order['name']}" if order else ""))
        parts.append(_colours(shown, pieces, by) if coloured else _lines(shown, pieces))
        last = max([last, *shown["reveal_steps"]])
    if coloured and any(record["ids"] for record in records):
        parts.append(_legend(by, last))
    return "\n\n".join(parts)


def _order(record: dict[str, Any], rule: str | None) -> dict[str, Any]:
    """The order of a lattice rule, where it is asked for, or where the estimator has no order of its own."""
    found = record.get("rules", {})
    if rule is None and (record["reveal_steps"] or not found):
        return {}
    name = next(iter(found)) if rule is None else str(rules.parse(rule))
    if name not in found:
        raise DuelError(f"This trace has no order of {name}; it holds {', '.join(found) or 'none but its own'}.")
    return {**found[name], "name": name}


def _heading(record: dict[str, Any]) -> str:
    tokens = len(record["ids"])
    said = [f"document {record.get('doc')} of {record.get('task')}, window {record['window']}: {tokens} tokens"]
    if record.get("request"):
        said.append(f"request {record['request']}")
    error = record.get("stderr")
    for name, nats in record["values"].items():
        said.append(_value(name, nats, tokens, error))
        error = None
    if record.get("nfe") is not None:
        said.append(f"{record['nfe']} steps, {record.get('near_ties') or 'no'} close picks")
    return "\n".join(said)


def _value(name: str, nats: float, tokens: int, error: float | None) -> str:
    """What an estimator says of a window; `error`: its Monte Carlo error, nats."""
    estimator = ESTIMATORS.get(canonical(name))  # None: a rule
    note = "" if estimator is None else NOTES[estimator.kind]
    said = f"{name}{note} {nats:.2f}" + ("" if error is None else f" +- {error:.2f}") + " nats"
    if not tokens:
        return said
    rate = -nats / tokens
    perplexity = math.exp(rate) if rate < 700 else math.inf
    return f"{said}, perplexity {perplexity:.2f}" + ("" if error is None else f" +- {perplexity * error / tokens:.2f}")


def _colours(record: dict[str, Any], pieces: list[str], by: str) -> str:
    values, most, palette = _scale(record, by)
    if not values:
        return f"(no {by} in this trace)\n" + "".join(pieces)
    shown = []
    for piece, value in zip(pieces, values, strict=True):
        colour = palette[round((len(palette) - 1) * min(1.0, value / most))]
        ink = 15 if palette is EARLY_TO_LATE and colour in palette[:3] else 16
        shown.append("\n".join(f"\x1b[48;5;{colour};38;5;{ink}m{line}\x1b[0m" for line in piece.split("\n")))
    return "".join(shown)


def _scale(record: dict[str, Any], by: str) -> tuple[list[float], float, tuple[int, ...]]:
    """What is coloured, its largest value, and the colours."""
    if by == "nats":
        return [-value for value in record["token_logprobs"]], MOST_NATS, SURE_TO_SURPRISED
    return record["reveal_steps"], max([1, *record["reveal_steps"]]), EARLY_TO_LATE


def _legend(by: str, last: int) -> str:
    palette, ends = (
        (SURE_TO_SURPRISED, ("0 nats", f"{MOST_NATS:g} or more"))
        if by == "nats"
        else (EARLY_TO_LATE, ("revealed first in its block", f"last (step {last})"))
    )
    return f"{ends[0]} " + "".join(f"\x1b[48;5;{colour}m  \x1b[0m" for colour in palette) + f" {ends[1]}"


def _lines(record: dict[str, Any], pieces: list[str]) -> str:
    """A table: position, block, step, nats, P1, margin, entropy, token."""
    rows, block = [("at", "block", "step", "nats", "P1", "margin", "entropy", "token")], -1
    starts = set(record["starts"])
    for n, piece in enumerate(pieces):
        block += n in starts

        def number(name: str, form: str, n: int = n) -> str:
            return format(record[name][n], form) if record.get(name) else ""

        sure = record.get("confidence")
        p1 = f"{1 / (1 + math.exp(-min(max(sure[n], -700), 700))):.3f}" if sure else ""
        cells = (
            number("reveal_steps", "d"),
            number("token_logprobs", ".3f"),
            p1,
            number("margin", ".3f"),
            number("entropy", ".3f"),
        )
        rows.append((str(n), str(block), *cells, repr(piece)[1:-1]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*(f"{c:>{w}}" for c, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows
    )


def main(arguments: list[str]) -> None:
    """`python -m lm_eval_duel show`."""
    asked = parse(arguments)
    records = _chosen(asked.trace, asked.task, asked.doc, asked.request)
    from lm_eval_duel import denoisers

    name = asked.tokenizer or trace.spec(asked.trace).get("tokenizer")
    if not name:
        raise DuelError(f"{asked.trace} does not say whose tokens it holds; name a folder or hub name: --tokenizer.")
    tokenizer = denoisers.load_tokenizer({"tokenizer": name})
    free = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    coloured = free if asked.color == "auto" else asked.color == "always"
    try:
        print(show(records, tokenizer, asked.by, coloured, asked.rule))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, DuelError):
            raise
        raise DuelError(f"{asked.trace} is damaged: a line is not what a trace holds ({error!r}).") from None


@usage()
def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; raises UsageError."""
    parser = Parser(
        "show",
        "One document of a trace, tokens coloured by reveal step or by nats.",
        PRINTS,
        "trace.jsonl --doc 3 --by nats",
    )
    parser.add_argument("trace", help="a file written with --model_args trace=FILE.jsonl")
    parser.add_argument("--doc", type=int, default=0, help="the document's number (default: 0)")
    parser.add_argument("--task", help="the task, where the trace has several")
    parser.add_argument(
        "--request", type=int, default=0, help="of a multiple choice document: which answer (default: 0)"
    )
    parser.add_argument("--by", choices=["step", "nats"], default="step", help="what the colours say (default: step)")
    parser.add_argument("--rule", help="of a lattice: whose order is shown, e.g. greedy (default: the first)")
    parser.add_argument("--tokenizer", help="a folder or hub name, where the trace's own is no longer there")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    asked = parser.parse_args(arguments)
    if asked.rule is not None:
        rules.parse(asked.rule)
    trace.spec(asked.trace)
    return asked


def _chosen(path: str, task: str | None, doc: int, request: int) -> list[dict[str, Any]]:
    """The windows asked for; raises DuelError that says what there is."""
    records = trace.read(path)
    if not records:
        raise DuelError(f"{path} holds no window yet.")
    tasks = sorted({str(record.get("task")) for record in records})
    if task is None and len(tasks) > 1:
        raise DuelError(f"{path} holds the tasks {', '.join(tasks)}; name one with --task.")
    task = task or (tasks[0] if tasks else None)
    mine = [record for record in records if str(record.get("task")) == task]
    docs = sorted({record["doc"] for record in mine if isinstance(record.get("doc"), int)})
    found = [record for record in mine if record.get("doc") == doc and (record.get("request") or 0) == request]
    if not found:
        there = (
            f"documents {docs[0]} to {docs[-1]} of task {task}" if docs else f"the tasks {', '.join(tasks) or 'none'}"
        )
        of = f"document {doc} of task {task}" + (f", request {request}" if request else "")
        raise DuelError(f"{path} has no {of}; it holds {there}.")
    for record in found:
        if missing := [name for name in NEEDED if name not in record]:
            raise DuelError(f"A window of document {doc} in {path} has no {' and no '.join(missing)}; write it again.")
    return found
