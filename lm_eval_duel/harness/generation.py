"""`generate_until`: prompts in, texts out, by Algorithm 1 under exactly the spec that is scored.

    requests -> Settings and prompts -> samples (text/generation.py) -> texts, cut at the first stop string

A request is a prompt and `max_gen_toks` positions to generate.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_eval_duel import fingerprint
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import naming
from lm_eval_duel.harness.requests import Batch, name
from lm_eval_duel.harness.scoring import Evaluation
from lm_eval_duel.harness.store import request_key
from lm_eval_duel.text.generation import Generator, Settings, end_tokens

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


def key_of(task: str | None, document: int | None, request: int, repeat: int) -> int:
    """The 63-bit key of a sample: one repeat of one of a document's requests."""
    digest = hashlib.sha256(json.dumps([task, document, request, repeat]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # not negative as an int64


class Prompt(NamedTuple):
    """One text to generate."""

    generator: Generator
    repeat: int
    window: Window  # the positions to generate, between ids with special tokens
    key: int  # with the draw seed, what a sample depends on
    cache_key: str  # for a sampled text it includes `key`: lm-eval's own key is the same for all repeats


def generate(evaluation: Evaluation, requests: Sequence[Instance]) -> list[str]:
    """The text of each request, from the response cache or generated now. Equal settings are generated together."""
    batch = Batch.from_requests(requests)
    prompts = _prompts(evaluation, batch)
    texts = _kept_texts(evaluation, prompts)
    remaining = [n for n in range(len(prompts)) if n not in texts]
    groups: dict[Generator, list[int]] = {}
    for n in remaining:
        groups.setdefault(prompts[n].generator, []).append(n)

    tokens = [len(prompt.window.target) for prompt in prompts]
    progress = evaluation.begin("generate_until", tokens, remaining)
    steps = 0

    with evaluation.computing(), progress.bar:
        for generator, group in groups.items():
            windows = [prompts[n].window for n in group]
            keys = [prompts[n].key for n in group]
            for index, text, window, sample in generator.stream(windows, keys):
                n = group[index]
                if evaluation.store is not None:
                    evaluation.store.keep(prompts[n].cache_key, text)  # first: whatever fails below, it is not lost
                texts[n] = text
                progress.add_window(tokens[n], sample.nfe)
                progress.finish_request(1)
                steps += sample.nfe or 0
                progress.bar.set_postfix_str(f"NFE {steps}")
                about = {
                    "repeat": prompts[n].repeat,
                    "generated": _description(evaluation, generator.settings),
                    "text": text,
                    "tail": sample.tail,
                }
                evaluation.write_trace(batch.requests[n], [window], [sample], evaluation.sampler, **about)
    return batch.spread([texts[n] for n in range(len(texts))])


def _kept_texts(evaluation: Evaluation, prompts: Sequence[Prompt]) -> dict[int, str]:
    """The texts that an earlier run has generated, by the index of their prompt."""
    texts: dict[int, str] = {}
    if evaluation.store is None:
        return texts
    for n, prompt in enumerate(prompts):
        text = evaluation.store.find(prompt.cache_key, str)
        if text is not None:
            texts[n] = text
    return texts


def _prompts(evaluation: Evaluation, batch: Batch) -> list[Prompt]:
    """The prompt of each request; raises DuelError, with the request's name, for a wrong setting or prompt."""
    generators: dict[Settings, Generator] = {}
    prompts: list[Prompt] = []
    tasks_of: dict[str, list[str]] = {}  # of each warning: the tasks that it is about
    cut_before = evaluation.text.cut_contexts
    spec = ""  # it is part of the keys of a response cache
    if evaluation.store is not None:
        spec = fingerprint.digest(generation_spec(evaluation))
    for request, repeat in zip(batch.requests, batch.repeats, strict=True):
        key = key_of(request.task_name, request.doc_id, request.idx, repeat)
        with naming(name(request)):
            settings = Settings.from_arguments(request.args[1])
            if settings not in generators:
                seed = evaluation.options.draw_seed
                is_scored = evaluation.trace is not None  # log-probabilities go nowhere else
                generators[settings] = Generator(evaluation.sampler, evaluation.text, settings, seed, is_scored)
            generator = generators[settings]
            window = generator.prompt(request.args[0])
        evaluation.stats.generated.add(_description(evaluation, settings))
        for note in generator.notes:
            tasks_of.setdefault(note, []).append(str(request.task_name))
        draw = [str(key)] if settings.temperature else []
        cache_key = request_key("generate_until", request.args, spec, *draw)
        prompts.append(Prompt(generator, repeat, window, key, cache_key))

    for note, tasks in tasks_of.items():
        log.warning("generation settings of %s: %s", " and ".join(dict.fromkeys(tasks)), note)
    cut = evaluation.text.cut_contexts - cut_before
    if cut:
        log.warning("%d prompts were truncated from the left to make room for max_gen_toks positions", cut)
    return prompts


def _description(evaluation: Evaluation, settings: Settings) -> str:
    """A description of how texts are generated, for the results."""
    sampler = evaluation.sampler
    if sampler is evaluation.estimator:
        return settings.description
    parts = [settings.description, f"rule={sampler.rule}", f"block={sampler.block}"]
    if sampler.denoiser.noise_training is not None:
        parts.append(f"noise_seed={sampler.noise_seed}")
    return ", ".join(parts)


def generation_spec(evaluation: Evaluation) -> dict[str, str]:
    """The spec of generated texts: that of the sampler, the seed, and how ids become text."""
    sampler = evaluation.sampler
    tokenizer = evaluation.text.tokenizer
    return {
        **fingerprint.spec_of(sampler.denoiser, sampler, evaluation.text),
        "draw_seed": str(evaluation.options.draw_seed),
        "ends": str(sorted(end_tokens(tokenizer))),
        "clean_up": str(bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))),
    }
