"""Requests as the harness sends them to a model, and answers as it logs them."""

from lm_eval.api.model import CachingLM

from lm_eval_duel.harness.requests import make_request


def ask(kind, *arguments, doc=None, task="toy"):
    return [make_request(kind, doc or {}, args, task, n) for n, args in enumerate(arguments)]


def cached(model, folder, rank=0):
    """The model as the harness wraps it, with the response cache of one rank."""
    return CachingLM(model, str(folder / f"c_rank{rank}.db"))


def text_log_prob(sample):
    """The log-likelihood of a whole text in a record of samples_*.jsonl: a number, or (number, is_greedy)."""
    value = sample["filtered_resps"][0]
    while isinstance(value, list | tuple):
        value = value[0]
    return float(value)


def choice_answers(sample):
    """The (log-likelihood, is_greedy) of each option in a record."""
    return sample["filtered_resps"]
