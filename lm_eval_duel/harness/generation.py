"""`generate_until`: prompts in, texts out, by Algorithm 1 under exactly the spec that is scored.

    requests -> Settings and prompts -> samples (DuelEstimator.stream_samples) -> texts, cut at the first stop string

A request is a prompt and `max_gen_toks` positions to generate. After each finished block the text is searched for stop
strings and the end of text; once one is there, no further block is generated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.scores import Sample
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.checks import check_windows
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness import cache_keys
from lm_eval_duel.harness.requests import Batch, named
from lm_eval_duel.harness.run import Finished, Run
from lm_eval_duel.text.generation_settings import Settings
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


class Generator:
    """Generates texts under equal settings.

    A sample depends on the draw seed and its prompt's key only, on neither batch size nor rank. `scored`: the samples'
    log-probabilities are needed.
    """

    def __init__(self, duel: DuelEstimator, text: Text, settings: Settings, seed: int, scored: bool = True):
        self.text, self.settings, self.seed, self.scored = text, settings, seed, scored
        denoiser = settings.denoiser(duel.denoiser)
        self.duel = duel if denoiser is duel.denoiser else duel.with_denoiser(denoiser)
        self.ends = end_tokens(text.tokenizer)

    @property
    def note(self) -> str | None:
        """A warning if under these settings all positions tie, so that the rule has nothing to choose by."""
        return self.duel.denoiser.ties(self.duel.rule) if self.settings.temperature else None

    def context(self, prompt: str) -> tuple[int, ...]:
        """The ids before a generation; raises DuelError for a prompt that cannot be continued."""
        context = tuple(self.text.prompt(prompt, self.settings.length))
        window = Window(context, (0,) * self.settings.length, tuple(self.text.suffix))
        check_windows(self.duel.denoiser, self.duel.block, self.duel.grid, [window], generating=True)
        return context

    def stream(
        self, contexts: Sequence[tuple[int, ...]], keys: Sequence[int]
    ) -> Iterator[tuple[int, str, Window, Sample]]:
        """(index, text, window, sample) of each context, as it is finished. Scoring `window` again gives the sample's
        log-probability."""
        samples = self.duel.stream_samples(
            contexts,
            self.settings.length,
            suffix=self.text.suffix,
            do_sample=self.settings.temperature > 0,
            seed=self.seed,
            keys=keys,
            stop=self._stops,
            scored=self.scored,
        )
        for n, sample in samples:
            window = Window(contexts[n], sample.tokens, tuple(self.text.suffix), sample.tail)
            yield n, self.cut(sample.tokens), window, sample

    def _stops(self, index: int, tokens: tuple[int, ...]) -> bool:
        if not self.ends.isdisjoint(tokens):
            return True
        text = self.text.tokenizer.decode(tokens)
        return any(stop in text for stop in self.settings.until)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, up to the end of text or the first stop string."""
        end = next((n for n, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.text.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        for stop in self.settings.until:
            text = text.split(stop)[0]
        return text


def end_tokens(tokenizer: Any) -> set[int]:
    """The ids that end a text: all special tokens (EOS, padding, end of turn, ...) except the one for unknown words."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return (special | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def key_of(task: str | None, document: int | None, request: int, repeat: int) -> int:
    """The 63-bit key of a sample: one repeat of one of a document's requests."""
    digest = hashlib.sha256(json.dumps([task, document, request, repeat]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------- requests


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One text to generate."""

    n: int  # the request's index
    repeat: int
    length: int  # positions to generate
    context: tuple[int, ...]  # ids, special tokens included
    key: int  # with the draw seed, what a sample depends on
    cache_key: str | None  # None: there is no cache


class Generation:
    """Requests for texts. Each step of the loop in lm.py is a method; `n` is a request's index."""

    kind = "generate_until"
    label = ""
    so_far = None

    def __init__(self, run: Run, batch: Batch):
        self.run, self.estimator, self.requests = run, run.sampler, batch.requests
        self.order = range(len(batch.requests))
        self.groups = _grouped(run, batch)
        self.prompts = {prompt.n: prompt for _, prompts in self.groups for prompt in prompts}

    def size(self, n: int) -> int:
        """The positions to generate."""
        return self.prompts[n].length

    def cached(self) -> Iterator[tuple[int, str]]:
        """(n, text) of each request with a text in the response cache."""
        for prompt in self.prompts.values():
            if prompt.cache_key is not None and (text := self.run.store.find(prompt.cache_key, str)) is not None:
                yield prompt.n, text

    def finished(self, remaining: Sequence[int]) -> Iterator[Finished]:
        """Each of the other requests, as its text is finished; those with the same settings side by side."""
        wanted, bar = set(remaining), self.run.progress.bar
        for generator, prompts in self.groups:
            missing = [prompt for prompt in prompts if prompt.n in wanted]
            contexts, keys = [prompt.context for prompt in missing], [prompt.key for prompt in missing]
            description = _description(self.run, generator.settings)
            for i, text, window, sample in generator.stream(contexts, keys):
                prompt = missing[i]
                self.run.progress.add_window(prompt.length)
                bar.set_postfix_str(f"NFE {self.estimator.counts.nfe}")
                about = {"repeat": prompt.repeat, "generated": description, "text": text, "tail": sample.tail}
                yield Finished(prompt.n, text, [window], [sample], about=about)

    def save(self, done: Finished) -> None:
        """Save a text, if there is a response cache."""
        if (key := self.prompts[done.n].cache_key) is None:
            self.run.cache.add_partial(self.kind, self.requests[done.n].args, done.answer)
        else:
            self.run.store[key] = done.answer

    def count(self, done: Finished) -> None:
        """A text contributes to no total."""

    def after(self) -> None:
        """Texts are not verified."""

    def reply(self, n: int, text: str) -> str:
        """A text as it is."""
        return text


def _grouped(run: Run, batch: Batch) -> list[tuple[Generator, list[Prompt]]]:
    """The prompts by their settings; raises DuelError, with the request's name, for a wrong setting or prompt."""
    generators: dict[Settings, Generator] = {}
    groups: dict[Settings, list[Prompt]] = {}
    notes: dict[str, list[str]] = {}  # warning -> the tasks that it is about
    cut = run.text.cut_contexts
    for n, (request, repeat) in enumerate(zip(batch.requests, batch.repeats, strict=True)):
        key = key_of(request.task_name, request.doc_id, request.idx, repeat)
        with named(request):
            settings = Settings.from_arguments(request.args[1])
            if settings not in generators:
                seed, scored = run.options.draw_seed, run.trace is not None
                generators[settings] = Generator(run.sampler, run.text, settings, seed, scored)
            generator = generators[settings]
            context = generator.context(request.args[0])
        run.stats.generated.add(_description(run, settings))
        for note in filter(None, (*settings.notes, generator.note)):
            notes.setdefault(note, []).append(str(request.task_name))
        prompt = Prompt(n, repeat, settings.length, context, key, _cache_key(run, request, key))
        groups.setdefault(settings, []).append(prompt)
    for note, tasks in notes.items():
        log.warning("generation settings of %s: %s", " and ".join(dict.fromkeys(tasks)), note)
    if cut := run.text.cut_contexts - cut:
        log.warning("%d prompts were truncated from the left to make room for max_gen_toks positions", cut)
    return [(generators[settings], prompts) for settings, prompts in groups.items()]


def _description(run: Run, settings: Settings) -> str:
    """How texts are generated, for the results."""
    rule = "" if run.estimator.decodes else f", rule={run.sampler.rule}, block={run.sampler.block}"
    return settings.description + rule


def _cache_key(run: Run, request: Instance, key: int) -> str | None:
    """The key of a text. A sample's names its draw, since lm-eval's own key is the same for all repeats."""
    if run.store is None:
        return None
    if cache_keys.is_sampled(request.args[1]):
        return cache_keys.sample_key(run.store.generation, request.args, key)
    return cache_keys.request_key("generate_until", request.args, run.store.generation)
