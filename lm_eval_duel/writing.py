"""What the harness asks to be written: prompts in, texts out, under the law that is scored; and chat templates.

requests -> prompts -> generation.py -> texts
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from typing import TYPE_CHECKING

from tqdm import tqdm

from lm_eval_duel import cache_keys, instances
from lm_eval_duel.answers import Answering
from lm_eval_duel.windows import Window

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.duel import Duel
    from lm_eval_duel.generation import Generator, Settings
    from lm_eval_duel.ledger import Drawn

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only


class Writing(Answering):
    """A model of the harness that generates, too."""

    generated: set[str]  # in words, how

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each prompt, under the rule and block that are scored (Algorithm 1).

        A sample is seeded by (draw_seed, task, document, request, repeat); temperature 0 is decoding.
        """
        asked = instances.asked(requests)
        answers: list[str | None] = [None] * len(asked.requests)
        groups = self._groups(asked, answers)  # every request is checked before the first text is written
        total = sum(generator.settings.length * len(group) for generator, group in groups)
        with tqdm(total=total, desc="generate_until", unit="tok", disable=disable_tqdm or self.rank != 0) as bar:
            for generator, group in groups:
                self._generate(generator, group, answers, bar)
        return asked.spread(answers)

    def _groups(self, asked: instances.Asked, answers: list[str | None]) -> list[tuple[Generator, list[Prompt]]]:
        """The prompts to continue, by their settings; those that a cache has answered go into `answers`.

        Raises DuelError, with the request's name, for a setting or a prompt that is wrong.
        """
        from lm_eval_duel.generation import Generator, Settings, key_of

        generators: dict[Settings, Generator] = {}
        groups: dict[Settings, list[Prompt]] = {}
        notes: dict[str, list[str]] = {}  # what to say once, with the tasks that it is about
        cut = self.text.cut_contexts
        for n, (request, repeat) in enumerate(zip(asked.requests, asked.repeats, strict=True)):
            key = key_of(request.task_name, request.doc_id, request.idx, repeat)
            with instances.naming(request):
                settings = Settings.of(request.args[1])
                cached = self._sample_key(request, key)
                if (kept := self._kept(cached)) is not None:
                    answers[n] = kept
                    continue
                if settings not in generators:
                    generators[settings] = Generator(self._duel, self.text, settings, self.options.draw_seed)
                generator = generators[settings]
                context = generator.context(request.args[0])
            groups.setdefault(settings, []).append(Prompt(n, request, repeat, key, cached, context))
            for note in filter(None, (*settings.notes, generator.note)):
                notes.setdefault(note, []).append(str(request.task_name))
        for note, tasks in notes.items():
            log.warning("generation settings of %s: %s", " and ".join(dict.fromkeys(tasks)), note)
        if cut := self.text.cut_contexts - cut:
            log.warning("%d prompts were cut from the left to leave room for what is generated (max_gen_toks)", cut)
        return [(generators[settings], group) for settings, group in groups.items()]

    def _generate(self, generator: Generator, group: list[Prompt], answers: list[str | None], bar: tqdm) -> None:
        """The texts of prompts of one kind of settings, put into `answers`."""
        settings = generator.settings
        under = "" if self.estimator.decodes else f", rule={self._duel.rule}, block={self._duel.block}"
        self.generated.add(settings.words + under)

        def done(n: int, text: str, window: Window, drawn: Drawn) -> None:
            prompt = group[n]
            answers[prompt.place] = text
            bar.update(settings.length)
            bar.set_postfix_str(f"NFE {self._duel.counts.nfe}")
            said = {"repeat": prompt.repeat, "generated": settings.words + under, "text": text, "tail": drawn.tail}
            self.write_trace(prompt.request, [window], [drawn], said, self._duel)
            self.cache_hook.add_partial("generate_until", prompt.request.args, text)
            if prompt.cached is not None:
                self.cache_hook.dbdict[prompt.cached] = text

        def progress() -> str:
            done = sum(answer is not None for answer in answers)
            return f"{done} of {len(answers)} generate_until requests of this rank"

        with self.answering([prompt.request for prompt in group], progress):
            generator([prompt.context for prompt in group], [prompt.key for prompt in group], done)

    def _sample_key(self, request: Instance, key: int) -> str | None:
        """Under which a text is kept where the harness itself does not find it again: its repeats would be one."""
        store = self.cache_hook.dbdict
        if store is None or not cache_keys.is_sampled(request.args[1]):
            return None
        return cache_keys.of_sample(store.generating, request.args, key)

    def _kept(self, cached: str | None) -> str | None:
        """The sample that an interrupted run has drawn."""
        return None if cached is None else self.cache_hook.dbdict.find(cached)

    @cached_property
    def _duel(self) -> Duel:
        """What generates: the estimator, or where it decodes nothing the rule beside it."""
        from lm_eval_duel import switch

        if self.estimator.decodes:
            return self.estimator
        duel = switch.make(self.denoiser, dataclasses.replace(self.options, estimator="duel"))
        duel.counts = self.estimator.counts
        return duel

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
    key: int  # with the draw seed, all the randomness of a sample
    cached: str | None  # the key under which a sample is kept; None: it is not
    context: tuple[int, ...]  # its ids, framing tokens included
