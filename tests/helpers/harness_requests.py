"""Requests as the harness sends them to a model."""

from lm_eval.api.instance import Instance


def ask(kind, *arguments, doc=None):
    return [Instance(kind, doc or {}, args, 0, metadata=("toy", n, 1)) for n, args in enumerate(arguments)]
