"""`lm-eval-duel audit`: a few documents by the run's own code and by the reference, side by side."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.command_line import Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness.key_values import key_values, model_args
from lm_eval_duel.options import Options
from lm_eval_duel.tables import plain_table

if TYPE_CHECKING:
    from lm_eval_duel.harness.verify import Checked

DOCUMENTS = 3
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
    checked = audit(options.model, options.tasks, options.documents, options.metadata, options.include_path)
    print(table(checked))
    if not checked:
        raise DuelError("No window was compared.")
    if differing := [each.where for each in checked if each.differs]:
        raise DuelError(f"{len(differing)} of {len(checked)} windows differ: {'; '.join(differing[:3])}.")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the arguments of the model); raises UsageError for wrong arguments."""
    parser = Parser(
        "audit",
        "Compare this package's numbers with its specification (lm_eval_duel/reference.py) on your checkpoint.",
        PRINTS,
        "--model_args pretrained=demo-mdm,rule=greedy,block=32 --tasks sotu --documents 1",
    )
    add = parser.add_argument
    parser.add("model_args", "include_path", "metadata", "device", "batch_size")
    add("--tasks", required=True, help="names of tasks, YAML files or files of text, separated by commas")
    add("--documents", default=DOCUMENTS, help=f"of each task, from the first one ({DOCUMENTS})")
    options = parser.parse_args(arguments)
    options.documents = COUNT("--documents", options.documents)
    model = model_args(options.model_args)
    dtype = "float64" if model.get("dtype") == "float64" else "float32"
    options.model = {**model, "dtype": dtype, "device": options.device, "batch_size": options.batch_size}
    options.metadata = {**model, **key_values("--metadata", options.metadata)}
    options.tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    Options.parse(options.model)
    return options


def audit(
    model: dict[str, Any], tasks: Sequence[str], documents: int, metadata: dict[str, Any], include_path: str | None
) -> list[Checked]:
    """Every window of the first `documents` of each task, scored twice. `model`: model args."""
    from lm_eval.utils import setup_logging

    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.tasks import named

    setup_logging()
    requests = []
    for task in named.load_all(tasks, metadata, include_path):
        if task.OUTPUT_TYPE == "generate_until":
            raise DuelError(f"The task {task.config.task} generates text; an audit compares scores.")
        task.build_all_requests(limit=documents)
        requests += task.instances
    lm = DuelMDM(**{**model, "verify": sys.maxsize})
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
