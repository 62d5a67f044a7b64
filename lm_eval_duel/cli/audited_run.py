"""A run of the harness, audited: its network, each window, the values of a window beside each other, and its totals.

The run scores the first documents of each task together with strangers: more documents, and the same texts without
their last word. So a fault by which one row changes another one shows in the windows that are audited. The reference
scores these alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.audit import network_check
from lm_eval_duel.audit.checked import CheckedWindow, distance
from lm_eval_duel.audit.contradictions import Held, contradictions
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.recompute import COMPANY
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import Batch, make_request, name
from lm_eval_duel.options import Options
from lm_eval_duel.tasks import named
from lm_eval_duel.text.loading import require_loadable

STRANGERS = 2  # documents that are scored together, at least; their texts without the last word come on top
SAME = 1e-3  # relative: two standard errors of a total that are equal


@dataclasses.dataclass
class Audit:
    """The findings of an audit."""

    dtype: str  # the dtype audited, and its fingerprint
    network: list[network_check.Finding] = dataclasses.field(default_factory=list)
    not_compared: list[str] = dataclasses.field(default_factory=list)  # in words, with the reason
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)
    held: Held = dataclasses.field(default_factory=Held)  # values beside each other
    lines: list[str] = dataclasses.field(default_factory=list)  # from text to the printed numbers
    notes: list[str] = dataclasses.field(default_factory=list)  # no fault of the package, but odd
    problems: list[str] = dataclasses.field(default_factory=list)  # that concern no single window

    @property
    def failures(self) -> list[str]:
        """Everything that differs, in words."""
        windows = [each.where for each in self.checked if each.differs]
        found = [f"{len(windows)} of {len(self.checked)} windows differ: {'; '.join(windows[:3])}"] if windows else []
        found += [str(each) for each in self.network if each.differs]
        return [*found, *self.held.problems, *self.problems]

    @property
    def unchecked(self) -> bool:
        """True if no window could be compared with the reference."""
        return not any(each.independent for each in self.checked)

    @property
    def verdict(self) -> str:
        """One line: PASS or FAIL, of how much, what was compared and what was not."""
        tokens = sum(each.tokens for each in self.checked)
        independent = sum(each.independent for each in self.checked)
        compared = [f"{independent} windows with the reference"] if independent else []
        compared += [each.what for each in self.network]
        compared += dict.fromkeys(self.held.compared)
        compared += ["printed numbers with the text"] * bool(self.lines)
        missing = list(self.not_compared)
        reasons = Counter(each.again.why_alone for each in self.checked if not each.independent)
        missing += [f"{count} windows ({reason})" for reason, count in reasons.items()]
        word = "FAIL" if self.failures else "NOTHING CHECKED" if self.unchecked else "PASS"
        line = f"{word}: {len(self.checked)} windows, {tokens} tokens. "
        line += f"Compared: {', '.join(compared) or 'nothing'}. Not compared: {', '.join(missing) or 'nothing'}."
        return f"{line} Note: {'; '.join(self.notes)}." if self.notes else line


def audit(options: argparse.Namespace) -> Audit:
    """Every window of the first documents of each task, scored twice; the network; and each task from its text on."""
    from lm_eval.utils import setup_logging

    setup_logging()
    require_loadable(Options.parse({**options.model, "dtype": options.dtype}))
    metadata = {**options.model_args, **options.metadata}
    tasks = named.load(options.tasks, metadata, options.include_path, max(options.limit, STRANGERS))
    lm = DuelMDM(**{**options.model, "verify": sys.maxsize})
    found = Audit(audited(lm, options.dtype))
    if options.no_own_code:
        found.not_compared.append("the network (--no_own_code)")
    else:
        found.network, reasons = network_check.compare(lm.options, lm.denoiser, lm.ranks.device)
        if not any(isinstance(each, network_check.Compared) for each in found.network):
            found.not_compared.append(f"the network ({'; '.join(reasons)})")
    for task in tasks:
        for kind in sorted({request.request_type for request in task.instances}):
            requests = [request for request in task.instances if request.request_type == kind]
            audit_requests(lm, task, requests, options.limit, found)
    found.held = contradictions(lm.estimator, found.checked)
    check_totals(lm, found)
    return found


def audited(lm: DuelMDM, dtype: str) -> str:
    """The dtype that is audited and its fingerprint; `dtype`: that of the run's model args."""
    used = str(lm.options.dtype)
    others = "another dtype" if dtype in ("auto", used) else dtype
    return (
        f"Audited in {used}, fingerprint {lm.fingerprint}. A run in {others} has another fingerprint; "
        "its verify=N measures how far its numbers are from these."
    )


def audit_requests(lm: DuelMDM, task: Any, requests: Sequence[Any], limit: int, found: Audit) -> None:
    """Add the requests of one type of a task to the findings: of the first `limit` documents, the rest is company."""
    batch = Batch.from_requests([request for request in requests if request.doc_id < limit])
    before = len(lm.evaluation.stats.checked)
    company = list(strangers(requests, limit))
    answers = getattr(lm, batch.requests[0].request_type)([*batch.requests, *company])[: len(batch.requests)]
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
        found.notes.extend(of_task.odd(printed))


def strangers(requests: Sequence[Any], limit: int) -> list[Any]:
    """Requests to be scored beside those of the first `limit` documents, under a task that is not audited."""
    company = [request.args for request in requests if request.doc_id >= limit]
    for request in requests:
        *before, text = request.args
        if request.doc_id < limit and type(text) is str and len(text.split()) > 1:
            company.append((*before, text[: text.rstrip().rindex(text.split()[-1])]))
    kind = requests[0].request_type
    return [make_request(kind, {}, arguments, COMPANY, n) for n, arguments in enumerate(company)]


def check_totals(lm: DuelMDM, found: Audit) -> None:
    """Add what differs between the totals of each task in the results and those of its audited windows."""
    tasks = lm.get_model_info()["duel"]["tasks"]
    for task in {each.where.split(",")[0].removeprefix("task ") for each in found.checked} & tasks.keys():
        windows = [each for each in found.checked if each.where.startswith(f"task {task},")]
        values = tasks[task]["values"]
        for told, problem in _totals(lm.estimator, windows, values):
            if told:
                found.problems.append(f"the results of {task} have {problem}")
        found.held.hold("totals and their errors", [])


def _totals(estimator: Estimator, windows: Sequence[CheckedWindow], values: dict[str, Any]) -> list[tuple[bool, str]]:
    """(whether it differs, in words) of the sum, its drawn error, and its error over windows."""
    scores = [each.score for each in windows if each.score is not None]
    if len(scores) < len(windows) or estimator.name not in values:
        return []
    told = values[estimator.name]
    nats = [score.log_prob for score in scores]
    found = [_differs("log_prob", told["log_prob"], math.fsum(nats), sum(each.tolerance for each in windows))]
    copies = Counter(each.window for each in windows)
    errors = {each.window: score.stderr for each, score in zip(windows, scores, strict=True)}
    known = [copies[window] * error for window, error in errors.items() if error is not None]
    if len(known) == len(errors) and told["stderr"] is not None:
        error = math.hypot(*known)
        found.append(_differs("stderr", told["stderr"], error, SAME * error))
    tokens = [each.tokens for each in windows]
    if told["window_stderr"] is not None and len(windows) > 1:
        rate, count = math.fsum(nats) / sum(tokens), len(windows)
        spread = math.fsum((value - rate * size) ** 2 for value, size in zip(nats, tokens, strict=True))
        error = math.sqrt(count / (count - 1) * spread)
        found.append(_differs("window_stderr", told["window_stderr"], error, SAME * error + 1e-4))
    return found


def _differs(what: str, told: float | None, right: float, noise: float) -> tuple[bool, str]:
    return told is None or not distance(told, right) <= noise, f"a {what} of {told}, not {right:.6g}"
