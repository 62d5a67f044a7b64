"""`generate_until`: Algorithm 1 for the harness's requests, under exactly the law that is scored.

A request is a prompt and a generation window of `max_gen_toks` positions. Stop strings and the end of text are looked
for after each finished block; where one is found no further block is generated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.tempered import Tempered
from lm_eval_duel.duel import Duel
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.fingerprint import number
from lm_eval_duel.ledger import Drawn
from lm_eval_duel.options import count, truth
from lm_eval_duel.text import Text
from lm_eval_duel.windows import Window

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing
KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "num_beams", *LENGTHS)
DEFAULT_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one request is generated. `temperature`: 0 is decoding, the most probable token at every pick."""

    until: tuple[str, ...] = ()
    length: int = DEFAULT_LENGTH
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Settings:
        """The settings of a task's `generation_kwargs`; raises DuelError for one that is not known, or is wrong."""
        for name in asked:
            if name not in KNOWN:
                raise unknown("generation setting", name, KNOWN)
        if asked.get("num_beams") not in (None, 1):
            raise DuelError(f"num_beams is 1 here: a rule has one order and no beams; got {asked['num_beams']}.")
        lengths = [asked[name] for name in LENGTHS if asked.get(name) is not None]  # the first counts
        until = asked.get("until") or ()
        temperature = asked.get("temperature")
        sampled = asked.get("do_sample")
        sampled = float(temperature or 0) > 0 if sampled is None else truth("do_sample", sampled)
        return cls(
            until=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            length=count("max_gen_toks", lengths[0]) if lengths else DEFAULT_LENGTH,
            temperature=(1.0 if temperature is None else float(temperature)) if sampled else 0.0,
            top_k=int(asked["top_k"]) if sampled and asked.get("top_k") else None,
            top_p=float(asked["top_p"]) if sampled and asked.get("top_p") is not None else 1.0,
        )

    def denoiser(self, plain: Denoiser) -> Denoiser:
        """The network that is sampled from: `plain`, or wrapped where its distributions are changed."""
        if self.temperature in (0.0, 1.0) and self.top_k is None and self.top_p == 1:
            return plain
        return Tempered(plain, self.temperature or 1.0, self.top_k, self.top_p)

    @property
    def words(self) -> str:
        """As in the results."""
        if not self.temperature:
            return "decoding"
        parts = [f"temperature={number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        return ", ".join(["sampling", *parts, *([f"top_p={number(self.top_p)}"] if self.top_p < 1 else [])])


class Generator:
    """Prompts of equal settings, generated together.

    `key` of a prompt, with the draw seed, is all its randomness: a sample depends on neither batch size nor rank.
    """

    def __init__(self, duel: Duel, text: Text, settings: Settings, seed: int):
        self.text, self.settings, self.seed = text, settings, seed
        denoiser = settings.denoiser(duel.denoiser)
        self.duel = duel if denoiser is duel.denoiser else duel.under(denoiser)
        self.ends = ends(text.tokenizer)

    def stream(self, contexts: Sequence[list[int]], keys: Sequence[int]) -> Iterator[tuple[int, str, Window, Drawn]]:
        """(index, text, window, sample) after the ids of each prompt, as it is finished; the window is that under which
        the text is scored again."""
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
            window = Window(tuple(contexts[n]), drawn.tokens, tuple(self.text.suffix), drawn.tail)
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
