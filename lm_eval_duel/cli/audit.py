"""`lm-eval-duel audit`: a few documents by the run's own code and by the reference, side by side."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.console.command_line import FLAGS, Flag, Parser, plain_table
from lm_eval_duel.console.exits import FAILED, stop
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.tasks import named

if TYPE_CHECKING:
    from lm_eval_duel.audit.checked import CheckedWindow

UNCHECKED = 3  # the exit code if nothing could be compared
PRINTS = """\
Prints, in float32:
1. The network, by its log-probabilities at masked positions of a few rows: compared with the checkpoint's own code (or
   its class in transformers), and with the same network written out in float64 on the tensors of the files (DiT, and
   decoders in the layout of Llama, Qwen, LLaDA, ...). The weights, compared with the files.
2. The windows of a few documents, scored twice: by a run, together with other texts, and by
   lm_eval_duel/reference.py, one row and one step at a time, along the run's order. The values must agree to
   max(1e-4, 1e-6 x tokens) nats, and at each state the rule must pick what the run picked, up to ties in the
   reference's numbers. Nothing that the run reports excuses a difference. The routes:
     reference                       the algorithm and the rule (the bound, the sum over orders) of the reference
     reference with the run's rule   the same with the run's own rule, which is not one of the paper's
     run alone                       the run's own code, one row in each call: not checked independently
3. The perplexities that each task prints, compared with those from its raw text (ids by the tokenizer alone, counts,
   and the reference's sums); the errors of totals; values that contradict each other; the distribution of random draws.
4. Warnings of an argument that is probably wrong, such as the [MASK]: a perplexity above that of a unigram.
5. One line: PASS, FAIL or NOTHING CHECKED, of how many windows and tokens, what was compared, and what was not.
Exit codes: 0 for PASS, 1 for FAIL, 3 if no window could be checked, 2 for everything that kept `audit` from a verdict:
a wrong argument, a checkpoint or a text that cannot be read, a rule that fails.
"""


def main(arguments: Sequence[str]) -> None:
    """Audit a checkpoint: `lm-eval-duel audit`. Raises Exit if something differs, or if nothing could be checked."""
    options = parse(arguments)

    from lm_eval_duel.cli.audited_run import audit

    findings = audit(options)
    lines = [findings.model, *map(str, findings.network), "", table(findings.checked), "", *findings.lines, ""]
    lines += [f"WARNING: {warning}." for warning in findings.warnings]
    print("\n".join(lines))
    print(findings.verdict)
    if findings.failures:
        stop(FAILED, f"{'; '.join(findings.failures)}.")
    if findings.unchecked:
        stop(UNCHECKED, "Nothing was checked: no window could be compared with the reference.")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the arguments of the model); raises UsageError for wrong arguments."""
    options = Parser(
        "audit",
        "Compare this package's numbers with its specification (lm_eval_duel/reference.py) on your checkpoint.",
        PRINTS,
        "demo-mdm --model_args rule=greedy,block=32 --tasks sotu --limit 1",
        *("NAME", "model_args", "device", "batch_size", "tasks", "include_path", "metadata", "field", "lines"),
        limit=dataclasses.replace(FLAGS["limit"], default=3, unset=""),
        no_own_code=Flag(TRUTH, False, "do not compare with the checkpoint's own code"),
    ).parse_args(arguments)
    options.metadata = named.metadata_of_texts(options) | options.metadata
    model = model_of(options)
    if model.get("pretrained"):
        _require_no_results(str(model["pretrained"]))
    options.dtype = Options.parse(model).dtype  # of the run, for the record
    # The comparison needs numbers that are nearly exact, so a coarser dtype is not used.
    options.model = {**model, "dtype": "float64" if model.get("dtype") == "float64" else "float32"}
    return options


def _require_no_results(name: str) -> None:
    """Raise DuelError if the model is a results file, or a folder of results."""
    path = Path(name)
    is_file = path.suffix == ".json" and path.is_file()
    is_folder = path.is_dir() and not (path / "config.json").exists() and any(path.rglob("results_*.json"))
    if is_file or is_folder:
        raise DuelError(
            f"audit takes a model, not results such as {name}: name the checkpoint that they are of, and its model "
            "args. It scores a few documents anew."
        )


def table(checked: Sequence[CheckedWindow]) -> str:
    """A line for each window, what differs in it, and why some were not checked."""
    rows = []
    notes = []
    for each in checked:
        again = each.again
        rows.append(
            (
                each.where,
                str(each.tokens),
                f"{each.log_prob:.6f}",
                f"{again.log_prob:.6f}",
                f"{each.difference:.1e}",
                _count(again.other_picks),
                _count(again.ties),
                f"{again.route}  DIFFERS" if each.differs else again.route,
            )
        )
        if each.differs:
            notes.append(f"{each.where}: {'; '.join(each.problems)}")
    head = ["window", "tokens", "run", "again", "difference", "other picks", "ties", "route"]
    return "\n".join([plain_table(head, rows), *notes])


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)
