"""What the harness asks to be written: prompts in, texts out, under the spec that is scored; and chat templates.

requests -> prompts -> generation.py -> texts
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from typing import TYPE_CHECKING

from tqdm import tqdm

from lm_eval_duel.harness import cache_keys
from lm_eval_duel.harness import requests as instances
from lm_eval_duel.harness.answers import Answering

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.estimators.duel import Duel
    from lm_eval_duel.harness.generation import Generator, Settings

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only


class Writing(Answering):
    """A model of the harness that generates, too."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each prompt, under the rule and block that are scored (Algorithm 1).

        A sample is seeded by (draw_seed, task, document, request, repeat); temperature 0 is decoding.
        """
        asked = self.asked(requests)
        self._duel.counts = self.estimator.counts
        answers: list[str | None] = [None] * len(asked.requests)
        groups = self._groups(asked, answers)  # every request is checked before the first text is written
        left = sum(len(group) for _, group in groups)
        self.say_found(len(answers) - left, left)
        total = sum(generator.settings.length * len(group) for generator, group in groups)
        with tqdm(total=total, desc="generate_until", unit="tok", disable=disable_tqdm or self.rank != 0) as bar:
            for generator, group in groups:
                self._generate(generator, group, answers, bar)
        return asked.spread(answers)

    def _groups(self, asked: instances.Asked, answers: list[str | None]) -> list[tuple[Generator, list[Prompt]]]:
        """The prompts to continue, by their settings; those that a cache has answered go into `answers`.

        Raises DuelError, with the request's name, for a setting or a prompt that is wrong.
        """
        from lm_eval_duel.harness.generation import Generator, Settings, key_of

        generators: dict[Settings, Generator] = {}
        groups: dict[Settings, list[Prompt]] = {}
        notes: dict[str, list[str]] = {}  # what to say once, with the tasks that it is about
        cut = self.text.cut_contexts
        for n, (request, repeat) in enumerate(zip(asked.requests, asked.repeats, strict=True)):
            key = key_of(request.task_name, request.doc_id, request.idx, repeat)
            with instances.naming(request):
                settings = Settings.of(request.args[1])
                if settings not in generators:
                    generators[settings] = Generator(self._duel, self.text, settings, self.options.draw_seed)
                generator = generators[settings]
                context = generator.context(request.args[0])
            self.cost.generated.add(self._words(settings))
            for note in filter(None, (*settings.notes, generator.note)):
                notes.setdefault(note, []).append(str(request.task_name))
            prompt = Prompt(n, request, repeat, context, key, self._cache_key(request, key))
            if (kept := self._kept(prompt)) is not None:
                answers[n] = kept
            else:
                groups.setdefault(settings, []).append(prompt)
        for note, tasks in notes.items():
            log.warning("generation settings of %s: %s", " and ".join(dict.fromkeys(tasks)), note)
        if cut := self.text.cut_contexts - cut:
            log.warning("%d prompts were cut from the left to leave room for what is generated (max_gen_toks)", cut)
        return [(generators[settings], group) for settings, group in groups.items()]

    def _generate(self, generator: Generator, group: list[Prompt], answers: list[str | None], bar: tqdm) -> None:
        """The texts of prompts of one kind of settings, put into `answers`."""
        settings, words = generator.settings, self._words(generator.settings)

        def progress() -> str:
            done = sum(answer is not None for answer in answers)
            return f"{done} of {len(answers)} generate_until requests of this rank"

        with self.answering([prompt.request for prompt in group], progress):
            contexts, keys = [prompt.context for prompt in group], [prompt.key for prompt in group]
            for n, text, window, drawn in generator.stream(contexts, keys):
                prompt = group[n]
                answers[prompt.place] = text
                bar.update(settings.length)
                bar.set_postfix_str(f"NFE {self._duel.counts.nfe}")
                said = {"repeat": prompt.repeat, "generated": words, "text": text, "tail": drawn.tail}
                self.write_trace(prompt.request, [window], [drawn], said, self._duel)
                if prompt.cached is None:
                    self.cache_hook.add_partial("generate_until", prompt.request.args, text)
                else:
                    self.cache_hook.dbdict[prompt.cached] = text

    def _words(self, settings: Settings) -> str:
        """How texts are generated, as in the results."""
        under = "" if self.estimator.decodes else f", rule={self._duel.rule}, block={self._duel.block}"
        return settings.words + under

    def _cache_key(self, request: Instance, key: int) -> str | None:
        """Under which a text is kept; a sample's says which draw it is: the harness's repeats would be one."""
        if (store := self.cache_hook.dbdict) is None:
            return None
        if cache_keys.is_sampled(request.args[1]):
            return cache_keys.of_sample(store.generating, request.args, key)
        return cache_keys.of("generate_until", request.args)

    def _kept(self, prompt: Prompt) -> str | None:
        """The text that another run has written, or this one before it was interrupted."""
        kept = None if prompt.cached is None else self.cache_hook.dbdict.find(prompt.cached)
        return kept if isinstance(kept, str) else None

    @cached_property
    def _duel(self) -> Duel:
        """What generates: the estimator, or where it decodes nothing the rule beside it."""
        from lm_eval_duel.estimators import registry as switch

        if self.estimator.decodes:
            return self.estimator
        return switch.make(self.denoiser, dataclasses.replace(self.options, estimator="duel"))

    # ------------------------------------------------------------ chat templates

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text, for the results; `chat_template`: its name, where the tokenizer has several."""
        if chat_template is False or chat_template is None:
            return ""
        return self.tokenizer.get_chat_template(None if chat_template is True else chat_template)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One text to write."""

    place: int  # among the answers
    request: Instance
    repeat: int
    context: tuple[int, ...]  # its ids, special tokens included
    key: int  # with the draw seed, all the randomness of a sample
    cached: str | None  # the key under which its text is kept; None: it is not
