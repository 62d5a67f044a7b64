"""`generate_until`: Algorithm 1 for the harness's requests, under exactly the spec that is scored.

A request is a prompt and a generation window of `max_gen_toks` positions. Stop strings and the end of text are looked
for after each finished block; where one is found no further block is generated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import MAX_FACTOR, count, number, truth
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.engine.results import Sample
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.checks import check_windows
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.harness.text import Text

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing
KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "num_beams", *LENGTHS)
DEFAULT_LENGTH = 256

_REWEIGHTED = "the spec that is sampled is changed by temperature, top_k and top_p alone"
_LEAST = "a text ends at its first stop string or end of text, however early"
_ONE = "a request has one answer; `repeats:` in the task asks for more"
OTHERS: dict[str, tuple[Any, str]] = {  # settings of other back ends: the value that changes nothing, and why no other
    "num_beams": (1, "a rule has one order and no beams"),
    "num_beam_groups": (1, "a rule has one order and no beams"),
    "length_penalty": (1, "it is of beams, and a rule has one order"),
    "early_stopping": (False, "it is of beams, and a rule has one order"),
    "repetition_penalty": (1, _REWEIGHTED),
    "presence_penalty": (0, _REWEIGHTED),
    "frequency_penalty": (0, _REWEIGHTED),
    "no_repeat_ngram_size": (0, _REWEIGHTED),
    "typical_p": (1, _REWEIGHTED),
    "min_p": (0, _REWEIGHTED),
    "min_length": (0, _LEAST),
    "min_new_tokens": (0, _LEAST),
    "min_tokens": (0, _LEAST),
    "num_return_sequences": (1, _ONE),
    "best_of": (1, _ONE),
    "n": (1, _ONE),
    "max_length": (None, "it would count the prompt too; the positions to generate are max_gen_toks"),
    "stop": (None, "stop strings are `until`"),
    "stop_strings": (None, "stop strings are `until`"),
    "seed": (None, "draws are seeded by the model arg draw_seed"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one request is generated. `temperature`: 0 is decoding, the most probable token at every pick."""

    until: tuple[str, ...] = ()
    length: int = DEFAULT_LENGTH
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # what was asked for and has no effect

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Settings:
        """The settings of a task's `generation_kwargs`; raises DuelError for one that is not known, or is wrong."""
        if not isinstance(asked, Mapping):
            raise DuelError(f"generation_kwargs are names with values, such as max_gen_toks: 64; got {asked!r}.")
        asked = {name: value for name, value in asked.items() if value is not None}
        for name, value in asked.items():
            _require_known(name, value)
        lengths = {name: length for name in LENGTHS if (length := count(name, asked.get(name))) is not None}
        temperature = number(
            "temperature",
            asked.get("temperature"),
            f"0 (decoding) or a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}",
            lambda value: value == 0 or 1 / MAX_FACTOR <= value <= MAX_FACTOR,
        )
        top_k = count("top_k", asked.get("top_k"), least=0) or None  # 0: all, as in transformers
        top_p = number("top_p", asked.get("top_p"), "a probability above 0, at most 1", lambda value: 0 < value <= 1)
        told = truth("do_sample", asked["do_sample"]) if "do_sample" in asked else None
        sampled = bool(temperature) if told is None else told and temperature != 0
        notes = [_unread_lengths(lengths), *([] if sampled else [_unread_draws(told, temperature, top_k, top_p)])]
        return cls(
            until=_stop_strings(asked.get("until", ())),
            length=next(iter(lengths.values()), DEFAULT_LENGTH),
            temperature=(1.0 if temperature is None else temperature) if sampled else 0.0,
            top_k=top_k if sampled else None,
            top_p=1.0 if top_p is None or not sampled else top_p,
            notes=tuple(filter(None, notes)),
        )

    def denoiser(self, plain: Denoiser) -> Denoiser:
        """The network that is sampled from: `plain`, or wrapped where its distributions are changed."""
        if self.temperature in (0.0, 1.0) and self.top_k is None and self.top_p == 1:
            return plain
        return Warped(plain, self.temperature or 1.0, self.top_k, self.top_p)

    @property
    def words(self) -> str:
        """As in the results."""
        if not self.temperature:
            return "decoding"
        parts = [f"temperature={fingerprint.number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p={fingerprint.number(self.top_p)}"] if self.top_p < 1 else []
        return ", ".join(["sampling", *parts])


def _require_known(name: str, value: Any) -> None:
    """Raise DuelError for a setting that has no meaning here, unless its value is the one that changes nothing."""
    if name in OTHERS:
        harmless, why = OTHERS[name]
        if harmless is None:
            raise DuelError(f"{name} is not a setting here: {why}; got {name}: {value!r}.")
        if value != harmless:
            raise DuelError(f"{name} is {harmless} here: {why}; got {value!r}.")
    elif name not in KNOWN:
        raise unknown("generation setting", name, KNOWN)


def _stop_strings(asked: Any) -> tuple[str, ...]:
    """The stop strings of `until`: one, or a list of them; empty ones stop nothing."""
    texts = [asked] if isinstance(asked, str) else asked
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise DuelError(f"'until' is a text or a list of texts (in YAML, numbers in quotes); got {asked!r}.")
    return tuple(filter(None, texts))


def _unread_lengths(lengths: Mapping[str, int]) -> str:
    """A sentence where one length has two names and two values: the first counts, as in the harness."""
    if len(set(lengths.values())) < 2:
        return ""
    first, *rest = [f"{name}={length}" for name, length in lengths.items()]
    return f"{first} is read and {', '.join(rest)} is not: they are names of one thing"


def _unread_draws(told: bool | None, temperature: float | None, top_k: int | None, top_p: float | None) -> str:
    """A sentence where settings of draws come with decoding, which reads none of them."""
    if told and temperature == 0:
        return "temperature=0 is decoding, although do_sample is true: to sample, give a temperature above 0"
    asked = {"temperature": (temperature, (None, 0, 1)), "top_k": (top_k, (None,)), "top_p": (top_p, (None, 1))}
    unread = [f"{name}={fingerprint.number(value)}" for name, (value, usual) in asked.items() if value not in usual]
    if not unread:
        return ""
    because = "do_sample is false" if told is False else "neither do_sample nor a temperature above 0 is given"
    return (
        f"{' and '.join(unread)} has no effect, since {because}: the most probable token is taken at every pick. "
        "To sample, set do_sample: true"
    )


class Generator:
    """Prompts of equal settings, generated together.

    `key` of a prompt, with the draw seed, is all its randomness: a sample depends on neither batch size nor rank.
    """

    def __init__(self, duel: Duel, text: Text, settings: Settings, seed: int):
        self.text, self.settings, self.seed = text, settings, seed
        denoiser = settings.denoiser(duel.denoiser)
        self.duel = duel if denoiser is duel.denoiser else duel.under(denoiser)
        self.ends = ends(text.tokenizer)

    @property
    def note(self) -> str | None:
        """What to say about this rule where nothing is left to draw."""
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
        """(index, text, window, sample) after each context, as it is finished; the window is that under which the text
        is scored again."""
        samples = self.duel.stream_samples(
            contexts,
            self.settings.length,
            suffix=self.text.suffix,
            do_sample=self.settings.temperature > 0,
            seed=self.seed,
            keys=keys,
            stop=self._stops,
        )
        for n, drawn in samples:
            window = Window(contexts[n], drawn.tokens, tuple(self.text.suffix), drawn.tail)
            yield n, self.cut(drawn.tokens), window, drawn

    def _stops(self, index: int, tokens: tuple[int, ...]) -> bool:
        if not self.ends.isdisjoint(tokens):
            return True
        text = self.text.tokenizer.decode(tokens)
        return any(stop in text for stop in self.settings.until)

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens up to the end of text or the first stop string."""
        end = next((n for n, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.text.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        for stop in self.settings.until:
            text = text.split(stop)[0]
        return text


def ends(tokenizer: Any) -> set[int]:
    """The ids that end a text: all special tokens (EOS, padding, the end of a turn ...) but the one for the unknown."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return (special | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def key_of(task: str | None, document: int | None, request: int, repeat: int) -> int:
    """A 63-bit number of one of a document's requests, and of the time that it is asked."""
    digest = hashlib.sha256(json.dumps([task, document, request, repeat]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
