"""Requests as the harness sends them to a model, and answers as it logs them."""

from lm_eval_duel.harness.requests import make_request


def ask(kind, *arguments, doc=None, task="toy"):
    return [make_request(kind, doc or {}, args, task, n) for n, args in enumerate(arguments)]


def text_log_prob(sample):
    """The log-likelihood of a whole text in a record of samples_*.jsonl: a number, or (number, is_greedy)."""
    value = sample["filtered_resps"][0]
    while isinstance(value, list | tuple):
        value = value[0]
    return float(value)


def choice_answers(sample):
    """The (log-likelihood, is_greedy) of each option in a record."""
    return sample["filtered_resps"]
