"""`lm-eval-duel audit`: a few documents by the run's own code and by the reference, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.command_line import FLAGS, Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.options import model_of
from lm_eval_duel.tables import plain_table

if TYPE_CHECKING:
    from lm_eval_duel.harness.verify import Checked

PRINTS = """\
Scores the windows of a few documents twice, in float32: as a run does, all blocks side by side in batches, and again by
another route. Prints both numbers in nats, their difference, and how many reveal steps differ. The routes:
  reference                       Algorithm 2 and the rule of lm_eval_duel/reference.py: one row, one step at a time
  reference with the run's rule   the same loop with the rule of the run, which is not among the paper's
  alone                           the estimator of the run, which is not in reference.py, one row in each call
The exit code is 1 if a window without a near tie differs by more than max(1e-4, 1e-6 x tokens) nats, or in its order.
"""


def main(arguments: Sequence[str]) -> None:
    """Audit a checkpoint: `lm-eval-duel audit`. Raises DuelError if a window differs."""
    options = parse(arguments)
    checked = audit(options)
    print(table(checked))
    if not checked:
        raise DuelError("No window was compared.")
    if differing := [each.where for each in checked if each.differs]:
        raise DuelError(f"{len(differing)} of {len(checked)} windows differ: {'; '.join(differing[:3])}.")


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
    """A line for each window, and the largest difference."""
    rows = [
        (
            each.where,
            str(each.tokens),
            f"{each.log_prob:.6f}",
            f"{each.again:.6f}",
            f"{each.difference:.1e}",
            "-" if each.changed_picks is None else str(each.changed_picks),
            "-" if each.near_ties is None else str(each.near_ties),
            each.route + ("  DIFFERS" if each.differs else ""),
        )
        for each in checked
    ]
    head = ["window", "tokens", "run", "again", "difference", "steps differ", "near ties", "route"]
    largest = max((each.difference for each in checked), default=0.0)
    differing = sum(each.differs for each in checked)
    return "\n".join(
        [
            plain_table(head, rows),
            "",
            f"{len(checked)} windows, {sum(each.tokens for each in checked)} tokens. Largest difference: {largest:.2e} "
            f"nats. Windows that differ: {differing}.",
        ]
    )
