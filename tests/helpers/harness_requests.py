"""Requests as the harness sends them to a model, and answers as it logs them, in all supported releases."""

from lm_eval.api import task

from lm_eval_duel.harness.requests import make_request

IS_0_5 = hasattr(task, "LoglikelihoodTask")  # the release of lm-eval


def ask(kind, *arguments, doc=None, task="toy"):
    return [make_request(kind, doc or {}, args, task, n) for n, args in enumerate(arguments)]


def text_log_prob(sample):
    """The log-likelihood of a whole text in a record of samples_*.jsonl, which 0.5 nests: [[[log_prob, False]]]."""
    value = sample["filtered_resps"][0]
    while isinstance(value, list | tuple):
        value = value[0]
    return float(value)


def choice_answers(sample):
    """The (log-likelihood, is_greedy) of each option in a record; 0.5 keeps the repeats of each in a list."""
    return [answer[0] if isinstance(answer[0], list | tuple) else answer for answer in sample["filtered_resps"]]
