"""Prompts in, texts out, by Algorithm 1: shared by `generate_until` and the library. It needs no lm-eval.

After each finished block the text is searched for stop strings and the end of text; once one is there, no further block
is generated. Settings have the harness's names. Settings of other back ends are refused where they would matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import COUNT, MAX_FACTOR, SHARE, TRUTH, number, whole
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Sample
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.denoisers.filters import ties, warped
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.checks import check_windows
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.text.text import TextEncoder

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms
KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "num_beams", *LENGTHS)
DEFAULT_LENGTH = 256
TEMPERATURE = number(
    f"0 (argmax) or a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}",
    lambda value: value == 0 or 1 / MAX_FACTOR <= value <= MAX_FACTOR,
)

OTHERS = {  # settings of other back ends: the value that has no effect, and why no other is taken
    name: (neutral, why)
    for neutral, why, names in (
        (1, "a rule follows one order", "num_beams num_beam_groups length_penalty"),
        (False, "a rule follows one order", "early_stopping"),
        (1, "only temperature, top_k and top_p change the distribution", "repetition_penalty typical_p"),
        (0, "only temperature, top_k and top_p change the distribution", "presence_penalty frequency_penalty"),
        (0, "only temperature, top_k and top_p change the distribution", "no_repeat_ngram_size min_p"),
        (0, "a text ends at its first stop string or end of text", "min_length min_new_tokens min_tokens"),
        (1, "a request has one answer; set `repeats:` in the task to draw several", "num_return_sequences best_of n"),
        (None, "it would count the prompt too; set max_gen_toks, the positions to generate", "max_length"),
        (None, "name stop strings in `until`", "stop stop_strings"),
        (None, "set the model arg draw_seed", "seed"),
    )
    for name in names.split()
}


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
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Settings:
        """The settings of `generation_kwargs`; raises DuelError for an unknown setting or a wrong value."""
        if not isinstance(arguments, Mapping):
            raise DuelError(f"generation_kwargs are names with values, such as max_gen_toks: 64; got {arguments!r}.")
        arguments = {name: value for name, value in arguments.items() if value is not None}
        for name, value in arguments.items():
            if name not in OTHERS and name not in KNOWN:
                raise unknown("generation setting", name, KNOWN)
            if name in OTHERS and value != OTHERS[name][0]:
                neutral, why = OTHERS[name]
                must = "is not a setting" if neutral is None else f"must be {neutral}"
                raise DuelError(f"{name} {must} here: {why}; got {value!r}.")
        lengths = {name: length for name in LENGTHS if (length := COUNT(name, arguments.get(name))) is not None}
        temperature = TEMPERATURE("temperature", arguments.get("temperature"))
        top_k = whole(0)("top_k", arguments.get("top_k")) or None  # 0: all, as in transformers
        top_p = SHARE("top_p", arguments.get("top_p"))
        do_sample = TRUTH("do_sample", arguments.get("do_sample"))
        sampled = bool(temperature) if do_sample is None else do_sample and temperature != 0
        notes = []
        if len(set(lengths.values())) > 1:
            first, *rest = [f"{name}={length}" for name, length in lengths.items()]
            notes.append(f"{first} is used and {', '.join(rest)} is ignored: they are synonyms")
        if not sampled and (note := _ignored_sampling(do_sample, temperature, top_k, top_p)):
            notes.append(note)
        until = arguments.get("until", ())
        until = [until] if isinstance(until, str) else until
        if not isinstance(until, (list, tuple)) or not all(isinstance(text, str) for text in until):
            raise DuelError(f"'until' is a text or a list of texts (in YAML, numbers in quotes); got {until!r}.")
        return cls(
            until=tuple(filter(None, until)),  # an empty text stops nothing
            length=next(iter(lengths.values()), DEFAULT_LENGTH),
            temperature=(1.0 if temperature is None else temperature) if sampled else 0.0,
            top_k=top_k if sampled else None,
            top_p=1.0 if top_p is None or not sampled else top_p,
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
        parts = [f"temperature={fingerprint.number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p={fingerprint.number(self.top_p)}"] if self.top_p < 1 else []
        return ", ".join(["sampling", *parts])


def _ignored_sampling(do_sample: bool | None, temperature: float | None, top_k: int | None, top_p: float | None) -> str:
    """A note on settings of sampling that have no effect, since nothing is sampled; empty if there is none."""
    if do_sample and temperature == 0:
        return "temperature=0 takes the most probable token, although do_sample is true: to sample, raise it above 0"
    values = {"temperature": (temperature, (None, 0, 1)), "top_k": (top_k, (None,)), "top_p": (top_p, (None, 1))}
    ignored = [f"{name}={fingerprint.number(value)}" for name, (value, usual) in values.items() if value not in usual]
    if not ignored:
        return ""
    because = "do_sample is false" if do_sample is False else "neither do_sample nor a temperature above 0 is set"
    return (
        f"{' and '.join(ignored)} {'have' if len(ignored) > 1 else 'has'} no effect, since {because}: "
        "the most probable token is taken at every pick. To sample, set do_sample: true"
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
        self.duel = duel if denoiser is duel.denoiser else duel.with_denoiser(denoiser)
        self.ends = end_tokens(text.tokenizer)

    @property
    def notes(self) -> list[str]:
        """Warnings: settings without effect, and that all positions tie, so that the rule has nothing to choose by."""
        tie = ties(self.duel.denoiser, self.duel.rule) if self.settings.temperature else None
        return [note for note in (*self.settings.notes, tie) if note]

    def prompt(self, before: str | Ids, after: str | Ids = "") -> Window:
        """The window to fill between two texts or ids; raises DuelError if it cannot be generated."""
        window = self.text.prompt(before, self.settings.length, after)
        check_windows(self.duel.denoiser, self.duel.block, self.duel.grid, [window], generating=True)
        return window

    def stream(self, prompts: Sequence[Window], keys: Sequence[int]) -> Iterator[tuple[int, str, Window, Sample]]:
        """(index, text, window, sample) of each prompt, as it is finished.

        Scoring `window` again gives the sample's log-probability.
        """
        samples = self.duel.stream_samples(
            [prompt.context for prompt in prompts],
            self.settings.length,
            suffixes=[prompt.suffix for prompt in prompts],
            do_sample=self.settings.temperature > 0,
            seed=self.seed,
            keys=keys,
            stop=self._stops,
            scored=self.scored,
        )
        for n, sample in samples:
            window = Window(prompts[n].context, sample.tokens, prompts[n].suffix, sample.tail)
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
