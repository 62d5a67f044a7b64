"""Prompts in, texts out, by Algorithm 1: shared by `generate_until` and the library. It needs no lm-eval.

After each finished block the text is searched for stop strings and the end of text; once one is there, no further block
is generated. Settings have the harness's names. Settings of other back ends are refused where they would matter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import (
    COUNT,
    MAX_FACTOR,
    SHARE,
    TRUTH,
    Arguments,
    ArgumentType,
    argument,
    declared,
    number,
    whole,
)
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Sample
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.denoisers.filters import tie_warning, warped
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.checks import check_windows
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.text.text import TextEncoder

DEFAULT_LENGTH = 256


def _texts(value: Any) -> tuple[str, ...]:
    """One text or several, as a tuple; an empty one stops nothing and is left out."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return tuple(text for text in texts if text)


STOPS = ArgumentType("a text or a list of texts (in YAML, numbers in quotes)", _texts, nothing=(None,))
TEMPERATURE = number(
    f"0 (argmax) or a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}",
    lambda value: value == 0 or 1 / MAX_FACTOR <= value <= MAX_FACTOR,
)


@dataclasses.dataclass(frozen=True)
class GenerationArguments(Arguments):
    """The entries of `generation_kwargs` that are read. None: not given."""

    until: tuple[str, ...] = argument(STOPS, (), "stop strings, looked for after each finished block")
    do_sample: bool | None = argument(TRUTH, None, "draw tokens", unset="if a temperature above 0 is set")
    temperature: float | None = argument(TEMPERATURE, None, "divides the logits", unset="1")
    top_k: int | None = argument(whole(0), None, "draw from the k most probable tokens", unset="all, as with 0")
    top_p: float | None = argument(SHARE, None, "draw from the fewest tokens with this probability", unset="1")
    max_gen_toks: int | None = argument(COUNT, None, "positions to generate", unset=str(DEFAULT_LENGTH))
    max_new_tokens: int | None = argument(COUNT, None, "the same")
    max_tokens: int | None = argument(COUNT, None, "the same")
    max_completion_tokens: int | None = argument(COUNT, None, "the same")

    @property
    def lengths(self) -> dict[str, int]:
        """The given names of the number of positions."""
        given = {name: getattr(self, name) for name in LENGTHS}
        return {name: length for name, length in given.items() if length is not None}


KNOWN = tuple(declared(GenerationArguments))
LENGTHS = KNOWN[KNOWN.index("max_gen_toks") :]  # synonyms; the first that is given counts

ONE_ORDER = "a rule follows one order"
THREE_ALONE = "only temperature, top_k and top_p change the distribution"
ENDS = "a text ends at its first stop string or end of text"
ONE_ANSWER = "a request has one answer; set `repeats:` in the task to draw several"
OF_OTHER_BACK_ENDS = {  # the value of each setting that has no effect, and why no other is taken
    "num_beams": (1, ONE_ORDER),
    "num_beam_groups": (1, ONE_ORDER),
    "length_penalty": (1, ONE_ORDER),
    "early_stopping": (False, ONE_ORDER),
    "repetition_penalty": (1, THREE_ALONE),
    "typical_p": (1, THREE_ALONE),
    "presence_penalty": (0, THREE_ALONE),
    "frequency_penalty": (0, THREE_ALONE),
    "no_repeat_ngram_size": (0, THREE_ALONE),
    "min_p": (0, THREE_ALONE),
    "min_length": (0, ENDS),
    "min_new_tokens": (0, ENDS),
    "min_tokens": (0, ENDS),
    "num_return_sequences": (1, ONE_ANSWER),
    "best_of": (1, ONE_ANSWER),
    "n": (1, ONE_ANSWER),
    "max_length": (None, "it would count the prompt too; set max_gen_toks, the positions to generate"),
    "stop": (None, "name stop strings in `until`"),
    "stop_strings": (None, "name stop strings in `until`"),
    "seed": (None, "set the model arg draw_seed"),
}


def _read(arguments: Mapping[str, Any]) -> GenerationArguments:
    """The entries that are read; raises DuelError for an unknown one, a wrong value, or one that acts elsewhere."""
    if not isinstance(arguments, Mapping):
        raise DuelError(f"generation_kwargs are names with values, such as max_gen_toks: 64; got {arguments!r}.")
    read = {}
    for name, value in arguments.items():
        if name in KNOWN:
            read[name] = value
            continue
        if name not in OF_OTHER_BACK_ENDS:
            raise unknown("generation setting", name, KNOWN)
        neutral, why = OF_OTHER_BACK_ENDS[name]
        if value not in (None, neutral):
            must = "is not a setting" if neutral is None else f"must be {neutral}"
            raise DuelError(f"{name} {must} here: {why}; got {value!r}.")
    return GenerationArguments(**read)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one generated request. `temperature=0` takes the most probable token at every pick."""

    until: tuple[str, ...] = ()
    length: int = DEFAULT_LENGTH
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # settings that were given without effect

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], seed: int = 0) -> Settings:
        """The settings of `generation_kwargs`; raises DuelError for an unknown setting or a wrong value.

        `seed`: of these texts alone, which has no effect if nothing is drawn.
        """
        given = _read(arguments)
        notes = []
        if len({*given.lengths.values()}) > 1:
            first, *rest = [f"{name}={length}" for name, length in given.lengths.items()]
            notes.append(f"{first} is used and {', '.join(rest)} is ignored: they are synonyms")
        length = next(iter(given.lengths.values()), DEFAULT_LENGTH)

        wants_samples = bool(given.temperature) if given.do_sample is None else given.do_sample
        if not wants_samples or given.temperature == 0:
            note = _ignored_sampling(given, seed)
            if note:
                notes.append(note)
            return cls(given.until, length, notes=tuple(notes))
        return cls(
            given.until,
            length,
            temperature=1.0 if given.temperature is None else given.temperature,
            top_k=given.top_k or None,  # 0: all, as in transformers
            top_p=1.0 if given.top_p is None else given.top_p,
            notes=tuple(notes),
        )

    def denoiser(self, plain: Denoiser) -> Denoiser:
        """The network that is sampled: `plain`, filtered if the settings change its distributions."""
        if self.temperature in (0.0, 1.0) and self.top_k is None and self.top_p == 1:
            return plain
        return warped(plain, self.temperature or 1.0, self.top_k, self.top_p)

    @property
    def description(self) -> str:
        """A description for the results."""
        if not self.temperature:
            return "argmax"
        parts = ["sampling", f"temperature={fingerprint.number(self.temperature)}"]
        if self.top_k is not None:
            parts.append(f"top_k={self.top_k}")
        if self.top_p < 1:
            parts.append(f"top_p={fingerprint.number(self.top_p)}")
        return ", ".join(parts)


def _ignored_sampling(given: GenerationArguments, seed: int) -> str:
    """A note on settings of sampling that have no effect, since nothing is sampled; empty if there is none."""
    if given.do_sample and given.temperature == 0:
        return "temperature=0 takes the most probable token, although do_sample is true: to sample, raise it above 0"
    without_effect = {"temperature": (None, 0, 1), "top_k": (None, 0), "top_p": (None, 1)}
    ignored = []
    for name, values in without_effect.items():
        value = getattr(given, name)
        if value not in values:
            ignored.append(f"{name}={fingerprint.number(value)}")
    if seed:
        ignored.append(f"seed={seed}")
    if not ignored:
        return ""
    verb = "have" if len(ignored) > 1 else "has"
    because = "neither do_sample nor a temperature above 0 is set"
    if given.do_sample is False:
        because = "do_sample is false"
    return (
        f"{' and '.join(ignored)} {verb} no effect, since {because}: the most probable token is taken at every pick. "
        "To sample, set do_sample: true"
    )


class Generator:
    """Generates texts under equal settings.

    A sample depends on the draw seed and its prompt's key only, on neither batch size nor rank. `scored`: the samples'
    log-probabilities are needed.
    """

    def __init__(self, duel: DuelEstimator, text: TextEncoder, settings: Settings, seed: int, scored: bool = True):
        self.text = text
        self.settings = settings
        self.seed = seed
        self.scored = scored
        denoiser = settings.denoiser(duel.denoiser)
        self.duel = duel
        if denoiser is not duel.denoiser:
            self.duel = duel.with_denoiser(denoiser)
        self.ends = end_tokens(text.tokenizer)

    @property
    def notes(self) -> list[str]:
        """Warnings: settings without effect, and that all positions tie, so that the rule has nothing to choose by."""
        notes = [*self.settings.notes]
        if self.settings.temperature:
            tie = tie_warning(self.duel.denoiser, self.duel.rule)
            if tie:
                notes.append(tie)
        return notes

    def prompt(self, before: str | Ids, after: str | Ids = "") -> Window:
        """The window to fill between two texts or ids; raises DuelError if it cannot be generated."""
        window = self.text.prompt(before, self.settings.length, after)
        check_windows(self.duel.denoiser, self.duel.block, self.duel.grid, [window], generating=True)
        return window

    def stream(
        self, prompts: Sequence[Window], keys: Sequence[int] | None
    ) -> Iterator[tuple[int, str, Window, Sample]]:
        """(index, text, window, sample) of each prompt, as it is finished.

        Scoring `window` again gives the sample's log-probability.
        """
        contexts = [prompt.context for prompt in prompts]
        suffixes = [prompt.suffix for prompt in prompts]
        samples = self.duel.stream_samples(
            contexts,
            self.settings.length,
            suffixes=suffixes,
            do_sample=self.settings.temperature > 0,
            seed=self.seed,
            keys=keys,
            stop=self._stops,
            scored=self.scored,
        )
        for n, sample in samples:
            window = Window(contexts[n], sample.tokens, suffixes[n], sample.tail)
            yield n, self.cut(sample.tokens), window, sample

    def _stops(self, index: int, tokens: tuple[int, ...]) -> bool:
        """True if no further block is needed after these tokens."""
        if not self.ends.isdisjoint(tokens):
            return True
        text = self.text.tokenizer.decode(tokens)
        return any(stop in text for stop in self.settings.until)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, up to the end of text or the first stop string."""
        before_end = list(itertools.takewhile(lambda token: token not in self.ends, tokens))
        text = self.text.tokenizer.decode(before_end, skip_special_tokens=False)
        for stop in self.settings.until:
            text = text.split(stop)[0]
        return text


def end_tokens(tokenizer: Any) -> set[int]:
    """The ids that end a text: all special tokens (EOS, padding, end of turn, ...) except the one for unknown words."""
    special = set(tokenizer.all_special_ids)
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:  # chat models have some that no attribute names
            special.add(token)
    return special - {tokenizer.unk_token_id}
