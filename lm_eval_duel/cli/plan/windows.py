"""How many windows of each layout a plan counts: those of tasks, or of so many tokens."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.key_values import key_values, model_args
from lm_eval_duel.options import Options

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.unloaded import Unloaded
    from lm_eval_duel.estimators.cost import Layout


def windows_of(options: argparse.Namespace, run: Options, denoiser: Unloaded, block: int | None) -> Counter[Layout]:
    """How many windows there are of each layout, and sets `options.documents`."""
    from lm_eval_duel.estimators import cost

    if options.tasks is None:
        return _even(options.tokens, options.documents, denoiser)
    from lm_eval_duel import denoisers
    from lm_eval_duel.text.text import Text

    tokenizer = denoisers.load_tokenizer(vars(run))
    denoiser.mask_id = getattr(tokenizer, "mask_token_id", None) if denoiser.mask_id is None else denoiser.mask_id
    text = Text(tokenizer, denoiser, run.windows, block)
    windows = []
    options.documents = 0
    for requests, kind in _requests(options):
        options.documents += len({request.doc_id for request in requests})
        windows += [window for parts in _cut(text, requests, kind) for window in parts]
    if not any(window.target for window in windows):
        raise DuelError(f"The tasks {options.tasks} have no token to score.")
    return cost.layouts(windows)


def _even(tokens: int, documents: int, denoiser: Unloaded) -> Counter[Layout]:
    """`tokens` in documents of equal length, each cut into windows from scratch."""
    from lm_eval_duel.estimators.cost import Layout

    before = max(denoiser.shift, int(denoiser.bos in ("given", "official")))
    capacity = denoiser.max_length - before
    if capacity < 1:
        raise DuelError(f"--length {denoiser.max_length} leaves no position for text; raise it.")
    result: Counter[Layout] = Counter()
    for length, count_of_length in ((tokens // documents + 1, tokens % documents), (tokens // documents, -1)):
        count_of_length = documents - tokens % documents if count_of_length < 0 else count_of_length
        whole, rest = divmod(length, capacity)
        result[Layout(before, capacity, denoiser.max_length)] += whole * count_of_length
        if rest:
            result[Layout(before, rest, before + rest)] += count_of_length
    return +result


def _requests(options: argparse.Namespace) -> Iterable[tuple[list[Any], str]]:
    """The requests of each task, and their kind."""
    from lm_eval_duel.tasks import named

    arguments = model_args(options.model_args)
    metadata = {**arguments, **key_values("--metadata", options.metadata)}
    for task in named.load_all(names(options.tasks), metadata, options.include_path):
        if task.OUTPUT_TYPE == "generate_until":
            raise DuelError(f"The task {task.config.task} generates text; a plan counts what is scored.")
        task.build_all_requests(limit=options.limit)
        yield task.instances, "rolling" if task.OUTPUT_TYPE == "loglikelihood_rolling" else "continuation"


def names(tasks: str) -> list[str]:
    return [name.strip() for name in tasks.split(",") if name.strip()]


def _cut(text: Any, requests: list[Any], kind: str) -> list[list[Any]]:
    from lm_eval_duel.harness.loglikelihood import continuation_windows, document_windows

    return (document_windows if kind == "rolling" else continuation_windows)(text, requests)
