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
    return int.from_bytes(digest[:8], "big") >> 1


class Prompt(NamedTuple):
    """One text to generate."""

    generator: Generator
    repeat: int
    window: Window  # the positions to generate, between ids with special tokens
    key: int  # with the draw seed, what a sample depends on
    cache_key: str  # a sample's names its draw, since lm-eval's own key is the same for all repeats


def generate(evaluation: Evaluation, requests: Sequence[Instance]) -> list[str]:
    """The text of each request, from the response cache or generated now. Equal settings are generated together."""
    batch, texts = Batch.from_requests(requests), dict[int, str]()
    prompts = _prompts(evaluation, batch)
    if evaluation.store is not None:
        found = ((n, evaluation.store.find(prompt.cache_key, str)) for n, prompt in enumerate(prompts))
        texts = {n: text for n, text in found if text is not None}
    missing: dict[Generator, list[int]] = {}
    for n, prompt in enumerate(prompts):
        if n not in texts:
            missing.setdefault(prompt.generator, []).append(n)
    tokens = [len(prompt.window.target) for prompt in prompts]
    progress = evaluation.begin("generate_until", tokens, [n for group in missing.values() for n in group])
    with evaluation.computing(), progress.bar:
        for generator, group in missing.items():
            description = _description(evaluation, generator.settings)
            samples = generator.stream([prompts[n].window for n in group], [prompts[n].key for n in group])
            for i, text, window, sample in samples:
                n, prompt = group[i], prompts[group[i]]
                if evaluation.store is not None:
                    evaluation.store.keep(prompt.cache_key, text)  # first: whatever fails below, this text is not lost
                texts[n] = text
                progress.add_window(len(prompt.window.target), sample.nfe)
                progress.finish_request(1)
                progress.bar.set_postfix_str(f"NFE {evaluation.estimator.counts.nfe}")
                about = {"repeat": prompt.repeat, "generated": description, "text": text, "tail": sample.tail}
                evaluation.write_trace(batch.requests[n], [window], [sample], evaluation.sampler, **about)
    return batch.spread([texts[n] for n in range(len(texts))])


def _prompts(evaluation: Evaluation, batch: Batch) -> list[Prompt]:
    """The prompt of each request; raises DuelError, with the request's name, for a wrong setting or prompt."""
    generators: dict[Settings, Generator] = {}
    prompts, notes = [], dict[str, list[str]]()  # warning -> the tasks that it is about
    cut = evaluation.text.cut_contexts
    spec = fingerprint.digest(generation_spec(evaluation)) if evaluation.store is not None else ""
    for request, repeat in zip(batch.requests, batch.repeats, strict=True):
        key = key_of(request.task_name, request.doc_id, request.idx, repeat)
        with naming(name(request)):
            settings = Settings.from_arguments(request.args[1])
            if settings not in generators:
                seed, scored = evaluation.options.draw_seed, evaluation.trace is not None
                generators[settings] = Generator(evaluation.sampler, evaluation.text, settings, seed, scored)
            generator = generators[settings]
            window = generator.prompt(request.args[0])
        evaluation.stats.generated.add(_description(evaluation, settings))
        for note in generator.notes:
            notes.setdefault(note, []).append(str(request.task_name))
        cache_key = request_key("generate_until", request.args, spec, *([str(key)] if settings.temperature else []))
        prompts.append(Prompt(generator, repeat, window, key, cache_key))
    for note, tasks in notes.items():
        log.warning("generation settings of %s: %s", " and ".join(dict.fromkeys(tasks)), note)
    if cut := evaluation.text.cut_contexts - cut:
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
