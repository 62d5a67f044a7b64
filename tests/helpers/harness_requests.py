"""Requests as the harness sends them to a model."""

from lm_eval_duel.harness import versions


def ask(kind, *arguments, doc=None):
    return [versions.request(kind, doc or {}, args, "toy", n) for n, args in enumerate(arguments)]
