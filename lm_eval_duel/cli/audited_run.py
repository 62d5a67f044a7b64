"""A run of the harness, audited: its network, each window, the values of a window against each other, and its totals.

The run scores the first documents of each task together with others: more documents, and the same texts without their
last word. So if one row changes another, it shows in the windows that are audited. The reference scores these alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lm_eval_duel import reference
from lm_eval_duel.audit import network_check
from lm_eval_duel.audit.checked import RUNS_RULE, CheckedWindow, distance
from lm_eval_duel.audit.contradictions import Comparisons, contradictions
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.verify import OTHER_TEXTS
from lm_eval_duel.console.exits import INTERRUPTED, stop
from lm_eval_duel.core import reveal as signals
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.denoisers.vocabulary import about_another_mask
from lm_eval_duel.errors import counted, documentation, told_apart
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.harness import patches
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import Batch, make_request, name
from lm_eval_duel.options import Options, model_args_of
from lm_eval_duel.tasks import named
from lm_eval_duel.text.loading import require_loadable

if TYPE_CHECKING:
    from lm_eval.api.task import Task

log = logging.getLogger("lm_eval.duel_mdm")

NO_PART_OF_A_VALUE = ("device", "batch_size")  # model args that change no number
DOCUMENTS = 2  # the fewest that are scored together; their texts without the last word are added
SAME = 1e-3  # relative difference up to which two standard errors of a total count as equal


@dataclasses.dataclass
class Audit:
    """The findings of an audit."""

    model: str  # sentences on the model that is audited
    network: list[network_check.Finding] = dataclasses.field(default_factory=list)
    not_compared: list[str] = dataclasses.field(default_factory=list)  # as text, with the reason
    documents: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # by task: audited, of all
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)
    comparisons: Comparisons = dataclasses.field(default_factory=Comparisons)  # of values with each other
    lines: list[str] = dataclasses.field(default_factory=list)  # from text to the printed numbers
    printed_numbers: bool = False  # those of a task were compared with its text and the reference
    # Of an argument that may be wrong. They are no failures of the package.
    warnings: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)  # that concern no single window

    @property
    def failures(self) -> list[str]:
        """Everything that differs, as text."""
        failures = []
        windows = []
        for each in self.checked:
            if each.differs:
                windows.append(f"{each.where} ({', '.join(each.problems)})")
        if windows:
            every = counted(len(self.checked), "window")
            verb = "differs" if len(windows) == 1 else "differ"
            failures.append(f"{len(windows)} of {every} {verb}: {'; '.join(windows[:3])}")
        for finding in self.network:
            if finding.differs:
                failures.append(str(finding))
        return [*failures, *self.comparisons.problems, *self.problems]

    @property
    def unchecked(self) -> bool:
        """True if no window could be compared with the reference."""
        return not self._compared_with_the_reference

    @property
    def _compared_with_the_reference(self) -> list[CheckedWindow]:
        """The windows whose value the reference could have contradicted."""
        return [each for each in self.checked if each.independent and not each.all_zero]

    @property
    def verdict(self) -> str:
        """One line: PASS, FAIL or NOTHING CHECKED, of how much, what was compared and what was not."""
        word = "PASS"
        if self.failures:
            word = "FAIL"
        elif self.unchecked:
            word = "NOTHING CHECKED"

        windows = counted(len(self.checked), "window")
        tokens = counted(sum(each.tokens for each in self.checked), "token")
        documents = ""
        if self.documents:
            audited, available = map(sum, zip(*self.documents.values(), strict=True))
            documents = f", {audited} of {counted(available, 'document')}"
        compared = ", ".join(self._compared()) or "nothing"
        not_compared = ", ".join(self._not_compared()) or "nothing"
        differences = f"; {counted(len(self.failures), 'difference')} below" if self.failures else ""
        warnings = f"; {counted(len(self.warnings), 'warning')} above" if self.warnings else ""
        return (
            f"{word}: {windows}, {tokens}{documents}{differences}{warnings}. Compared: {compared}. "
            f"Not compared: {not_compared}. "
            f"{documentation('audit.md')} lists what both sides share, and what no audit sees."
        )

    def interrupted(self, unaudited: Sequence[str]) -> str:
        """The message of an audit that a signal has ended. `unaudited`: the tasks that it has not finished."""
        compared = ", ".join(self._compared()) or "nothing"
        missing = ", ".join(unaudited)
        left = f"the windows and numbers of {missing}" if missing else "values and totals with each other"
        message = f"stopped, so there is no verdict. Compared: {compared}. Not compared: {left}."
        if self.failures:
            message += f" What differs: {'; '.join(self.failures)}."
        return message

    def _compared(self) -> list[str]:
        """The parts of the run that were compared with something independent."""
        compared = []
        windows = self._compared_with_the_reference
        if windows:
            by_tokens = sum(each.log_prob == -math.inf for each in windows)
            alone = f" ({by_tokens} of probability 0, by the single tokens alone)" if by_tokens else ""
            compared.append(f"{counted(len(windows), 'window')} with the reference{alone}")
        compared += [finding.what for finding in self.network]
        compared += dict.fromkeys(self.comparisons.compared)
        if self.printed_numbers:
            compared.append("printed numbers with the text")
        return compared

    def _not_compared(self) -> list[str]:
        """The parts of the run that were not compared, with the reasons."""
        missing = list(self.not_compared)
        by_own_rule = sum(each.again.route == RUNS_RULE for each in self.checked)
        if by_own_rule:
            missing.append(f"how the rule decides (both sides run its own code, in {counted(by_own_rule, 'window')})")
        reasons = Counter[str]()
        for each in self.checked:
            if not each.independent:
                reasons[each.again.why_alone] += 1
            elif each.all_zero:
                reasons["all its probabilities are 0 in the run"] += 1
        for reason, count in reasons.items():
            missing.append(f"{counted(count, 'window')} ({reason})")
        impossible = sum(each.log_prob == -math.inf and not each.all_zero for each in self.checked)
        if impossible:
            missing.append(f"the sums of {counted(impossible, 'window')} of probability 0")
        return missing


def audit(options: argparse.Namespace) -> Audit:
    """Every window of the first documents of each task, scored twice; the network; and each task from its text on."""
    from lm_eval.utils import setup_logging

    setup_logging()
    patches.without_our_advice()  # the tasks are loaded before a model, which drops it, too
    require_loadable(Options.parse({**options.model, "dtype": options.dtype}))
    metadata = {**model_args_of(options), **options.metadata}
    tasks = named.load(options.tasks, metadata, options.include_path, max(options.limit, DOCUMENTS))
    lm = DuelMDM(**{**options.model, "verify": sys.maxsize})

    findings = Audit(audited_model(lm, options.model, options.dtype))
    another_mask = about_another_mask(options.model.get("pretrained", BUNDLED), lm.denoiser.mask_id, lm.tokenizer)
    if another_mask:
        findings.warnings.append(another_mask)
    unaudited = [str(task.config.task) for task in tasks]
    try:
        audit_network(lm, options.no_own_code, findings)
        for task in tasks:
            audit_task(lm, task, options.limit, findings)
            unaudited.remove(str(task.config.task))
        log.info("audit: comparing values and totals with each other")
        findings.comparisons = contradictions(lm.estimator, findings.checked)
        audit_totals(lm, findings)
    except (signals.Interrupted, KeyboardInterrupt) as signal:
        status = signal.code if isinstance(signal, signals.Interrupted) else INTERRUPTED
        stop(status, findings.interrupted(unaudited))
    return findings


def audit_task(lm: DuelMDM, task: Task, limit: int, findings: Audit) -> None:
    """Add the windows of the first `limit` documents of a task, and its printed numbers."""
    available = len(task.eval_docs)
    findings.documents[str(task.config.task)] = (min(limit, available), available)
    findings.not_compared.extend(metrics_not_compared(task))
    by_kind: dict[str, list[Any]] = {}
    for request in task.instances:
        by_kind.setdefault(request.request_type, []).append(request)
    for kind, requests in sorted(by_kind.items()):
        log.info("audit: scoring %s twice (%s)", task.config.task, kind)
        audit_requests(lm, task, requests, limit, findings)


def audited_model(lm: DuelMDM, model_args: Mapping[str, Any], dtype: str) -> str:
    """Sentences on what is audited, its dtype and its fingerprint; `dtype`: that of the run's model args."""
    used = str(lm.options.dtype)
    others = "another dtype" if dtype in ("auto", used) else dtype
    given = {"pretrained": BUNDLED, **model_args, "dtype": used}
    described = ",".join(f"{key}={value}" for key, value in given.items() if key not in NO_PART_OF_A_VALUE)
    return (
        f"Audited by lm_eval_duel {version('lm_eval_duel')}: {described}, fingerprint {lm.fingerprint}. A run in "
        f"{others} has another fingerprint; its verify=N measures how far its numbers are from these."
    )


def audit_network(lm: DuelMDM, left_out: bool, findings: Audit) -> None:
    """Add the comparisons of the network, or the reasons that there are none."""
    if left_out:
        findings.not_compared.append("the network (--no_own_code)")
        return
    log.info("audit: comparing the network with other code")
    findings.network, reasons = network_check.compare(lm.options, lm.denoiser, lm.ranks.device)
    compared = [finding for finding in findings.network if isinstance(finding, network_check.Compared)]
    if not compared:  # the weights alone say nothing of what the network computes
        findings.not_compared.append(f"the network ({'; '.join(reasons)})")


# ---------------------------------------------------------------- windows, and from text to the printed numbers


def audit_requests(lm: DuelMDM, task: Any, requests: Sequence[Any], limit: int, findings: Audit) -> None:
    """Add the requests of one type of a task: those of the first `limit` documents, with the others as company."""
    audited_requests: list[Any] = []
    others: list[Any] = []
    for request in requests:
        if request.doc_id < limit:
            audited_requests.append(request)
        else:
            others.append(request)

    # The audited requests come first, so their answers and checks do, too.
    batch = Batch.from_requests(audited_requests)
    together = [*batch.requests, *company(audited_requests, others)]
    kind = batch.requests[0].request_type
    checked_before = len(lm.evaluation.stats.checked)
    answers = getattr(lm, kind)(together)[: len(batch.requests)]
    stats = lm.evaluation.stats
    checked = stats.checked[checked_before:]
    findings.checked.extend(checked)
    if stats.verify_failures:
        for failure in stats.verify_failures:
            findings.problems.append(f"verification failed: {failure.rstrip('.')}")
        stats.verify_failures.clear()
        return  # some windows have no second score

    by_request: dict[int, list[CheckedWindow]] = {}
    for each in checked:
        by_request.setdefault(each.request, []).append(each)
    for n, (request, answer) in enumerate(zip(batch.requests, answers, strict=True)):
        windows = by_request.get(n, [])
        nats = math.fsum(each.again.log_prob for each in windows)
        tokens = sum(each.tokens for each in windows)
        printed = float(answer[0] if isinstance(answer, tuple) else answer)  # with is_greedy, or alone
        if distance(nats, printed) > nats_tolerance(tokens):
            of_run, expected = told_apart(printed, nats)
            findings.problems.append(f"{name(request)}: the answer is {of_run} nats, not {expected}")
    if kind == "loglikelihood_rolling":
        audit_text(lm, task, batch.requests, answers, by_request, findings)


def metrics_not_compared(task: Any) -> list[str]:
    """The metrics that a task prints of continuations: their answers are compared, the metrics are not."""
    kinds = {request.request_type for request in task.instances}
    if kinds == {"loglikelihood_rolling"}:
        return []
    return [f"{', '.join(task.aggregation())} of {task.config.task}"]


def audit_text(
    lm: DuelMDM,
    task: Any,
    requests: Sequence[Any],
    answers: Sequence[Any],
    by_request: dict[int, list[CheckedWindow]],
    findings: Audit,
) -> None:
    """Add the numbers that a task prints of whole texts, beside those from the texts themselves."""
    texts = FromText(
        str(task.config.task),
        lm.tokenizer,
        lm.text.bos,
        lm.denoiser.max_length,
        lm.text.prefix,
        lm.text.suffix,
        vocabulary=lm.denoiser.token_count,
        at_most=lm.estimator.value_template.is_bound,
    )
    items: dict[str, list[Any]] = {}  # by metric: what the task aggregates, of each document
    for n, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        checked = by_request.get(n, [])
        texts.alone += sum(not each.independent for each in checked)
        windows = [each.window for each in checked]
        nats = math.fsum(each.right_log_prob for each in checked)
        texts.add(name(request), request.doc, request.args[0], windows, nats)
        for metric, item in task.process_results(request.doc, [answer]).items():
            items.setdefault(metric, []).append(item)

    aggregation = task.aggregation()
    printed = {}
    for metric, of_documents in items.items():
        printed[metric] = aggregation[metric](of_documents)
    total = lm.evaluation.total().tasks[texts.task].total
    drawn = registry.find(lm.estimator.name).is_drawn
    if texts.alone:
        findings.not_compared.append(f"printed perplexities of {texts.task}")
    else:
        findings.printed_numbers = True
    findings.lines.extend(texts.lines(printed, total.value, drawn))
    findings.problems.extend(texts.differing(printed))
    findings.warnings.extend(texts.warnings(printed, total.perplexity_stderr))


def company(audited_requests: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Requests to score together with those that are audited: others of the task, and the same texts, shortened.

    They belong to a task of their own, which is not audited.
    """
    arguments = [request.args for request in others]
    for request in audited_requests:
        *context, text = request.args
        words = text.split()
        # A gap, or a text with its ids, is a subclass of str; a slice of it is a plain text.
        if type(text) is str and len(words) > 1:
            before_last_word = text[: text.rstrip().rindex(words[-1])]
            arguments.append((*context, before_last_word))
    kind = audited_requests[0].request_type
    requests = []
    for n, each in enumerate(arguments):
        requests.append(make_request(kind, {}, each, OTHER_TEXTS, n))
    return requests


# ---------------------------------------------------------------- totals


def audit_totals(lm: DuelMDM, findings: Audit) -> None:
    """Add what differs between the totals of each task in the results and those of its audited windows."""
    total = lm.evaluation.total()
    for line in total.log_lines():
        log.info("%s", line)
    for line in total.warnings():  # the unigram's stand beside the verdict
        log.warning("%s", line)
    tasks = total.describe()["tasks"]
    by_task: dict[str, list[CheckedWindow]] = {}
    for each in findings.checked:
        task = each.where.split(",")[0].removeprefix("task ")
        by_task.setdefault(task, []).append(each)
    for task, windows in by_task.items():
        if task not in tasks:
            continue
        problems = totals_problems(lm.estimator, windows, tasks[task]["values"])
        named_problems = [f"the results of {task} have {problem}" for problem in problems]
        findings.comparisons.add("totals and their errors", named_problems)


def totals_problems(estimator: Estimator, windows: Sequence[CheckedWindow], values: dict[str, Any]) -> Iterator[str]:
    """Differences in a task's sum, its error over random draws, and its error over windows, as text."""
    scores = [each.score for each in windows if each.score is not None]
    if len(scores) < len(windows) or estimator.name not in values:
        return
    value = values[estimator.name]
    nats = [score.log_prob for score in scores]
    tokens = [each.tokens for each in windows]

    log_prob = -math.inf if value["log_prob"] is None else value["log_prob"]  # JSON has no infinity
    yield from _differing("log_prob", log_prob, math.fsum(nats), nats_tolerance(sum(tokens)))

    error = _error_over_draws(windows, scores)
    if error is not None and value["stderr"] is not None:
        yield from _differing("stderr", value["stderr"], error, SAME * error)

    if value["window_stderr"] is not None and len(windows) > 1:
        error = _error_over_windows(nats, tokens)
        yield from _differing("window_stderr", value["window_stderr"], error, SAME * error + 1e-4)


def _error_over_windows(nats: Sequence[float], tokens: Sequence[int]) -> float:
    """The standard error of a sum of log-probabilities, as that of the ratio to tokens, if windows are independent.

    With n windows and the rate r = sum(nats) / sum(tokens): sqrt(n / (n - 1) * sum((nats_i - r * tokens_i)^2)). Written
    apart from `core.scores.ratio`, which the run uses.
    """
    count = len(nats)
    rate = math.fsum(nats) / sum(tokens)
    squares = []
    for log_prob, size in zip(nats, tokens, strict=True):
        squares.append((log_prob - rate * size) ** 2)
    return math.sqrt(count / (count - 1) * math.fsum(squares))


def _error_over_draws(windows: Sequence[CheckedWindow], scores: Sequence[Score]) -> float | None:
    """The standard error of the sum of scores; None if one of them has none.

    Noise seeds are shared by all windows, so the sum is made for each seed. Other draws are shared by equal windows
    alone: the errors of these add up, and those of different windows are independent.
    """
    seeds = [score.seeds for score in scores]
    if all(seeds):
        totals = [math.fsum(values) for values in zip(*seeds, strict=True)]  # of each seed
        if len(totals) < 2:
            return None
        _, error = reference.mean_and_error(totals, len(totals))
        return error

    copies = Counter(each.window for each in windows)
    errors = {}  # of different windows
    for each, score in zip(windows, scores, strict=True):
        if score.stderr is None:
            return None
        errors[each.window] = copies[each.window] * score.stderr
    return math.hypot(*errors.values())


def _differing(what: str, value: float, expected: float, noise: float) -> Iterator[str]:
    if not distance(value, expected) <= noise:
        yield f"a {what} of {value:.10g}, not {expected:.10g}"
