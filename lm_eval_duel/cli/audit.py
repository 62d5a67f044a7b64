"""`lm-eval-duel audit`: a few documents by the run's own code and by the reference, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.console.command_line import FLAGS, Exit, Flag, Parser, plain_table
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.options import Options, model_of

if TYPE_CHECKING:
    from lm_eval_duel.audit.checked import CheckedWindow
    from lm_eval_duel.audit.own_code import Compared
    from lm_eval_duel.harness.lm import DuelMDM

UNCHECKED = 3  # the exit code if nothing could be compared
PRINTS = """\
Prints three comparisons:
1. The network and the checkpoint's own code (or its class in transformers): log-probabilities at masked positions of a
   few rows.
2. The windows of a few documents, scored twice in float32: by a run, and by lm_eval_duel/reference.py, one row and one
   step at a time, along the run's order. The values must agree to max(1e-4, 1e-6 x tokens) nats, and at each state the
   rule must pick what the run picked, up to ties in the reference's numbers. Nothing that the run reports excuses a
   difference. The routes:
     reference                       the algorithm and the rule (the bound, the sum over orders) of the reference
     reference with the run's rule   the same with the rule of the run, which is not among the paper's
     run alone                       the run's own code, one row in each call: not checked independently
3. The perplexities that each task prints, and those from its raw text: ids by the tokenizer alone, counts, and the sums
   of the reference.
Exit codes: 0 if nothing differs, 1 if something differs, 3 if nothing could be checked.
"""


class Audit(NamedTuple):
    """The findings of an audit."""

    checked: list[CheckedWindow]
    network: Compared | str  # a text: why it was not compared
    dtype: str  # the dtype audited, and its fingerprint
    lines: list[str]  # from text to the printed numbers
    problems: list[str]  # that concern no single window


def main(arguments: Sequence[str]) -> None:
    """Audit a checkpoint: `lm-eval-duel audit`. Raises DuelError if something differs."""
    found = audit(parse(arguments))
    checked, network = found.checked, found.network
    print(found.dtype)
    print(f"network: not compared: {network}." if isinstance(network, str) else network)
    print("\n".join(["", table(checked), "", *found.lines, "", total(checked)]))
    windows = [each.where for each in checked if each.differs]
    problems = [f"{len(windows)} of {len(checked)} windows differ: {'; '.join(windows[:3])}"] if windows else []
    problems += [*found.problems, *([] if isinstance(network, str) or not network.differs else ["the network differs"])]
    if problems:
        raise DuelError(f"{'; '.join(problems)}.")
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
        no_own_code=Flag(TRUTH, False, "do not compare with the checkpoint's own code"),
    ).parse_args(arguments)
    model = model_of(options)
    options.dtype = Options.parse(model).dtype
    options.model = {**model, "dtype": "float64" if model.get("dtype") == "float64" else "float32"}
    return options


def audit(options: argparse.Namespace) -> Audit:
    """Every window of the first documents of each task, scored twice; the network; and each task from its text on."""
    from lm_eval.utils import setup_logging

    from lm_eval_duel.audit import own_code
    from lm_eval_duel.harness.lm import DuelMDM
    from lm_eval_duel.tasks import named
    from lm_eval_duel.text.loading import require_loadable

    setup_logging()
    require_loadable(Options.parse({**options.model, "dtype": options.dtype}))
    metadata = {**options.model_args, **options.metadata}
    tasks = named.load(options.tasks, metadata, options.include_path, options.limit)
    lm = DuelMDM(**{**options.model, "verify": sys.maxsize})
    found = Audit([], "--no_own_code", audited(lm, options.dtype), [], [])
    if not options.no_own_code:
        found = found._replace(network=own_code.compare(lm.options, lm.denoiser, lm.ranks.device))
    for task in tasks:
        for kind in sorted({request.request_type for request in task.instances}):
            audit_requests(lm, task, [request for request in task.instances if request.request_type == kind], found)
    return found


def audited(lm: DuelMDM, dtype: str) -> str:
    """The dtype that is audited and its fingerprint; `dtype`: that of the run's model args."""
    used = str(lm.options.dtype)
    others = "another dtype" if dtype in ("auto", used) else dtype
    return (
        f"Audited in {used}, fingerprint {lm.fingerprint}. A run in {others} has another fingerprint; "
        "its verify=N measures how far its numbers are from these."
    )


def audit_requests(lm: DuelMDM, task: Any, requests: list[Any], found: Audit) -> None:
    """Add the requests of one type of a task to the findings."""
    from lm_eval_duel.audit.checked import distance
    from lm_eval_duel.audit.from_text import FromText
    from lm_eval_duel.harness.scoring import Batch, name

    batch, before = Batch.from_requests(requests), len(lm.evaluation.stats.checked)
    answers = getattr(lm, batch.requests[0].request_type)(batch.requests)
    checked = lm.evaluation.stats.checked[before:]
    found.checked.extend(checked)
    if failures := lm.evaluation.stats.verify_failures:
        found.problems.extend(f"verification failed: {failure.rstrip('.')}" for failure in failures)
        failures.clear()
        return  # some windows have no second score
    special = lm.text.bos, lm.denoiser.max_length, lm.text.prefix, lm.text.suffix
    of_task, items = FromText(str(task.config.task), lm.tokenizer, *special), dict[str, list[Any]]()
    for n, (request, answer) in enumerate(zip(batch.requests, answers, strict=True)):
        windows = [each for each in checked if each.request == n]
        nats, noise = math.fsum(each.again.log_prob for each in windows), math.fsum(each.tolerance for each in windows)
        given = answer[0] if isinstance(answer, tuple) else answer
        if distance(nats, float(given)) > noise:
            found.problems.append(f"the answer to {name(request)} is {given:.4f} nats, not {nats:.4f}")
        if request.request_type == "loglikelihood_rolling":
            of_task.alone += sum(not each.independent for each in windows)
            of_task.noise += noise
            of_task.add(name(request), request.doc, request.args[0], [each.window for each in windows], nats)
            for metric, item in task.process_results(request.doc, [answer]).items():
                items.setdefault(metric, []).append(item)
    if items:
        printed = {metric: task.aggregation()[metric](values) for metric, values in items.items()}
        found.lines.extend(of_task.lines(printed))
        found.problems.extend(of_task.differing(printed))


def table(checked: Sequence[CheckedWindow]) -> str:
    """A line for each window, what differs in it, and why some were not checked."""
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
    return "\n".join([plain_table(head, rows), *notes])


def total(checked: Sequence[CheckedWindow]) -> str:
    """The counts of windows that agree, that differ, and that were not checked."""
    tokens, largest = sum(each.tokens for each in checked), max((each.difference for each in checked), default=0.0)
    differing, alone = sum(each.differs for each in checked), sum(not each.independent for each in checked)
    return (
        f"{len(checked)} windows, {tokens} tokens. Largest difference: {largest:.2e} nats. "
        f"Windows that differ: {differing}. Not checked independently: {alone}."
    )
