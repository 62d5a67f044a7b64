"""`lm-eval-duel audit`: a few documents by the run's own code and by the reference, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.command_line import FLAGS, Exit, Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.options import model_of
from lm_eval_duel.tables import plain_table

if TYPE_CHECKING:
    from lm_eval_duel.audit.checked import Checked

UNCHECKED = 3  # the exit code if nothing could be compared
PRINTS = """\
Scores the windows of a few documents twice, in float32: as a run does, all blocks side by side in batches, and by
lm_eval_duel/reference.py, one row and one step at a time. The run's order is followed through the reference: the values
along it must agree to max(1e-4, 1e-6 x tokens) nats, and at each state the rule must pick what the run picked, or be
within a tie there, in the reference's numbers. Nothing that the run reports excuses a difference. The routes:
  reference                       the algorithm and the rule (or the bound, or the sum over orders) of the reference
  reference with the run's rule   the same with the rule of the run, which is not among the paper's
  run alone                       the run's own code, one row in each call: not checked independently
Exit codes: 0 if nothing differs, 1 if something differs, 3 if nothing could be checked.
"""


def main(arguments: Sequence[str]) -> None:
    """Audit a checkpoint: `lm-eval-duel audit`. Raises DuelError if something differs."""
    options = parse(arguments)
    checked = audit(options)
    print(table(checked))
    if differing := [each.where for each in checked if each.differs]:
        raise DuelError(f"{len(differing)} of {len(checked)} windows differ: {'; '.join(differing[:3])}.")
    if not any(each.independent for each in checked):
        message = "Nothing was checked: no window could be compared with the reference."
        print(message, file=sys.stderr)
        raise Exit(UNCHECKED, message)


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the arguments of the model); raises UsageError for wrong arguments."""
    options = Parser(
        "audit",
        "Compare this package's numbers with its specification (lm_eval_duel/reference.py) on your checkpoint.",
        PRINTS,
        "demo-mdm --model_args rule=greedy,block=32 --tasks sotu --limit 1",
        *("NAME", "model_args", "device", "batch_size", "tasks", "include_path", "metadata"),
        limit=dataclasses.replace(FLAGS["limit"], default=3, unset=""),
    ).parse_args(arguments)
    model = model_of(options)
    options.model = {**model, "dtype": "float64" if model.get("dtype") == "float64" else "float32"}
    return options


def audit(options: argparse.Namespace) -> list[Checked]:
    """Every window of the first documents of each task, scored twice."""
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.tasks import named

    setup_logging()
    metadata = {**options.model_args, **options.metadata}
    requests = named.requests(options.tasks, metadata, options.include_path, options.limit)
    lm = DuelMDM(**{**options.model, "verify": sys.maxsize})
    for kind, of_kind in itertools.groupby(sorted(requests, key=request_type), request_type):
        getattr(lm, kind)(list(of_kind))
    return lm.run.stats.checked


def request_type(request: Any) -> str:
    return str(request.request_type)


def table(checked: Sequence[Checked]) -> str:
    """A line for each window, what differs in it, and the count of what agrees, differs and was not checked."""
    rows = []
    for each in checked:
        again = each.again
        counts = ["-" if count is None else str(count) for count in (again.other_picks, again.ties)]
        values = (f"{value:.6f}" for value in (each.log_prob, again.log_prob))
        mark = "  DIFFERS" if each.differs else ""
        rows.append((each.where, str(each.tokens), *values, f"{each.difference:.1e}", *counts, again.route + mark))
    head = ["window", "tokens", "run", "again", "difference", "other picks", "ties", "route"]
    notes = [f"{each.where}: {'; '.join(each.problems)}" for each in checked if each.differs]
    reasons = Counter(each.again.why_alone for each in checked if not each.independent)
    notes += [f"Not checked independently: {count} windows, since {reason}." for reason, count in reasons.items()]
    largest = max((each.difference for each in checked), default=0.0)
    tokens = sum(each.tokens for each in checked)
    total = (
        f"{len(checked)} windows, {tokens} tokens. Largest difference: {largest:.2e} nats. "
        f"Windows that differ: {sum(each.differs for each in checked)}. Not checked independently: {reasons.total()}."
    )
    return "\n".join([plain_table(head, rows), "", *notes, total])
