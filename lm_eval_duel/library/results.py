"""The results of `Duel.score` and `Duel.generate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from lm_eval_duel.core import scores as rates
from lm_eval_duel.core.scores import Counts, Kind, Plain, Sample, Score
from lm_eval_duel.core.windows import Ids, Window, as_ids
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.totals import Total, TwoPhaseBlocks
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.library.display import Display, shown_text, shown_value
from lm_eval_duel.library.texts import EncodedText
from lm_eval_duel.text.annotated import Units, count_units, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lm_eval_duel.estimators.base import Estimator


@dataclasses.dataclass(frozen=True, repr=False)
class TextScore(Display):
    """The score of one text. `repr` is one line; a notebook shows the tokens, coloured by log-probability.

    `tokens` are the scored tokens as pieces of text. Joined, they are the text, as far as the tokenizer can decode it.
    `token_logprobs` and `reveal_steps` have an entry for each; steps count from 0 in every block.
    """

    shown: ClassVar = ("log_prob", "perplexity", "bits_per_byte")
    internal: ClassVar = ("window_scores", "sums")
    computed: ClassVar = ("errors", "no_error")

    text: str
    log_prob: float  # nats, summed over windows
    stderr: float | None  # nats, the Monte Carlo or sampling error of log_prob; None: not drawn, or not known
    bound: bool  # log_prob is a lower bound of the log-likelihood, so the perplexity is an upper bound
    kind: str  # exact, estimate, bound, no bound or oracle
    perplexity: float  # per scored token; NaN for a text without any
    bits_per_byte: float  # per UTF-8 byte of `scored`; NaN for an empty text
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    reveal_steps: tuple[int, ...]
    nfe: int | None  # rule steps, summed over blocks
    near_ties: int | None  # steps whose order float noise could change; None: the rule does not say
    windows: tuple[Window, ...] = dataclasses.field(repr=False)  # what was scored, special tokens included
    window_scores: tuple[Score, ...] = dataclasses.field(repr=False)
    sums: Total = dataclasses.field(repr=False)  # over windows; equal windows of several texts share one error
    spec: dict[str, str] = dataclasses.field(repr=False)  # of the Duel: everything that defines the number
    unk_tokens: int = 0  # text that the tokenizer does not know; with any, bits_per_byte is no likelihood of the text
    context: str | tuple[int, ...] = ""  # visible before the text, as given
    suffix: str | tuple[int, ...] = ""  # visible after it
    cut: bool = False  # the context or the suffix did not fit the row, and only its end or beginning was visible
    note: str = ""  # what limits the value, such as "of ancestral sampling in 48 steps"
    scored: str = ""  # what was scored: `text`, but for white space at its borders with context and suffix
    fingerprint: str = ""  # the digest of the spec

    @property
    def errors(self) -> dict[str, float]:
        """The standard errors of a drawn value, by name (delta method); empty if there are none, or not known."""
        return _errors(self)

    @property
    def no_error(self) -> str:
        """The reason that the error of a drawn value is not known; empty if it is, or if nothing is drawn."""
        if not self.tokens:
            return ""
        return registry.find(self.spec["estimator"]).unknown_error(self.stderr, self.spec)

    @property
    def units(self) -> Units:
        """Words and bytes of the text that was scored."""
        return count_units(self.scored, between=bool(self.context or self.suffix))

    @classmethod
    def from_scores(
        cls,
        text: str,
        encoded: EncodedText,
        scores: Sequence[Score],
        estimator: Estimator,
        tokenizer: PreTrainedTokenizerBase,
        spec: dict[str, str],
        unknown: int = 0,
        context: str | Ids = "",
        suffix: str | Ids = "",
    ) -> TextScore:
        """The score of a text from the scores of its windows."""
        windows = encoded.windows
        total = Total.from_scores(windows, scores, estimator.name)
        value = estimator.value_template.with_nats(total.log_prob, total.stderr)
        notes = [value.note, _up_to(spec, unknown), encoded.cut]
        target_ids: list[int] = []
        for window in windows:
            target_ids += window.target
        token_logprobs: list[float] = []
        reveal_steps: list[int] = []
        for score in scores:
            token_logprobs += score.token_logprobs
            reveal_steps += score.reveal_steps
        return cls(
            text=text,
            log_prob=total.log_prob,
            stderr=total.stderr,
            bound=value.is_bound,
            kind=value.word,
            cut=bool(encoded.cut),
            note=estimator.counts.with_doubt(" ".join(filter(None, notes))),
            perplexity=_perplexity(total.log_prob, total.tokens),
            bits_per_byte=_bits_per_byte(total.log_prob, count_units(encoded.scored).bytes),
            tokens=tuple(token_texts(target_ids, tokenizer)),
            token_logprobs=tuple(token_logprobs),
            reveal_steps=tuple(reveal_steps),
            nfe=total.nfe,
            near_ties=total.near_ties,
            windows=tuple(windows),
            window_scores=tuple(scores),
            sums=total,
            spec=spec,
            unk_tokens=unknown,
            context=context if isinstance(context, str) else as_ids(context),
            suffix=suffix if isinstance(suffix, str) else as_ids(suffix),
            scored=encoded.scored,
            fingerprint=digest(spec),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class TextEstimate(Plain):
    """A two-phase estimate of the score of a text, or of several (`total`).

    `stderr` is its sampling standard error, or None if fewer than 8 blocks were drawn. It does not include the
    variation between texts.
    """

    internal: ClassVar = ("windows", "window_scores", "sums")
    computed: ClassVar = ("perplexity", "bits_per_byte", "errors", "kind", "fingerprint")

    text: str | None  # None: several
    tokens: int
    bytes: int  # UTF-8
    log_prob: float  # nats
    stderr: float | None  # nats
    blocks: int
    sampled_blocks: int  # scored without the cache, too
    correlation: float | None  # of a block's log-probs with and without the cache, over sampled blocks
    windows: tuple[Window, ...] = dataclasses.field(repr=False)
    window_scores: tuple[Score, ...] = dataclasses.field(repr=False)
    sums: Total = dataclasses.field(repr=False)  # over windows; equal windows have one error
    spec: dict[str, str] = dataclasses.field(repr=False)  # everything that defines the number
    unk_tokens: int = 0  # scored tokens for text that the tokenizer does not know
    kind: ClassVar[str] = Kind.ESTIMATE.value  # as in `TextScore`
    note: str = ""  # what puts the value in doubt

    @property
    def fingerprint(self) -> str:
        """The digest of the spec."""
        return digest(self.spec)

    def __repr__(self) -> str:
        values = [
            "several texts" if self.text is None else shown_text(self.text),
            shown_value("log_prob", self.log_prob, self.stderr),
            shown_value("perplexity", self.perplexity, self.errors.get("perplexity")),
            counted(self.tokens, "token"),
            f"{self.sampled_blocks} of {self.blocks} blocks sampled",
        ]
        if self.stderr is None:
            values.append("error not known")
        return f"TextEstimate({', '.join([*values, f'{self.kind} {self.note}'.rstrip()])})"

    @property
    def units(self) -> Units:
        """Words and bytes of the text; raises DuelError for a total of several."""
        if self.text is None:
            raise DuelError("A total of several texts has no word count: count the words of each text.")
        return count_units(self.text)

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / tokens), NaN without tokens."""
        return _perplexity(self.log_prob, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """-log_prob in bits per UTF-8 byte, NaN for an empty text."""
        return _bits_per_byte(self.log_prob, self.bytes)

    @property
    def errors(self) -> dict[str, float]:
        """The standard errors, by name, as in `TextScore`."""
        return _errors(self)

    @classmethod
    def from_scores(
        cls,
        text: str,
        encoded: EncodedText,
        scores: Sequence[Score],
        estimator: Estimator,
        spec: dict[str, str],
        unknown: int = 0,
    ) -> TextEstimate:
        """The estimate of a text from the scores of its windows."""
        sums = Total.from_scores(encoded.windows, scores, estimator.name)
        size = count_units(encoded.scored).bytes
        estimate = cls._from_sums(text, size, encoded.windows, scores, sums, spec)
        return dataclasses.replace(estimate, unk_tokens=unknown, note=_up_to(spec, unknown))

    @classmethod
    def total(cls, estimates: Sequence[TextEstimate]) -> TextEstimate:
        """The estimate of several texts together. Equal texts have one sample, which the error takes into account.

        Raises DuelError for what is no estimate, and if there is none.
        """
        if not isinstance(estimates, Iterable):
            got = type(estimates).__name__
            raise DuelError(f"TextEstimate.total takes a list of estimates; got an object of the class {got}.")
        estimates = list(estimates)
        if not estimates:
            raise DuelError("TextEstimate.total takes at least one estimate, as Duel.estimate returns; got none.")
        for estimate in estimates:
            if not isinstance(estimate, TextEstimate):
                got = type(estimate).__name__
                raise DuelError(f"TextEstimate.total takes estimates, as Duel.estimate returns; got a {got}.")
        windows: list[Window] = []
        scores: list[Score] = []
        for estimate in estimates:
            windows += estimate.windows
            scores += estimate.window_scores
        size = sum(estimate.bytes for estimate in estimates)
        sums = Total.from_parts(estimate.sums for estimate in estimates)
        several = cls._from_sums(None, size, windows, scores, sums, estimates[0].spec)
        unknown = sum(estimate.unk_tokens for estimate in estimates)
        notes = dict.fromkeys(estimate.note for estimate in estimates)
        return dataclasses.replace(several, unk_tokens=unknown, note="; ".join(filter(None, notes)))

    @classmethod
    def _from_sums(
        cls,
        text: str | None,
        size: int,
        windows: Sequence[Window],
        scores: Sequence[Score],
        sums: Total,
        spec: dict[str, str],
    ) -> TextEstimate:
        """An estimate from the sums over its windows; `size`: the bytes of the text."""
        blocks = cast(TwoPhaseBlocks, sums.blocks or TwoPhaseBlocks())
        return cls(
            text=text,
            tokens=sums.tokens,
            bytes=size,
            log_prob=sums.log_prob,
            stderr=sums.stderr if sums.windows else 0.0,
            blocks=blocks.count,
            sampled_blocks=blocks.sampled,
            correlation=blocks.correlation,
            windows=tuple(windows),
            window_scores=tuple(scores),
            sums=sums,
            spec=spec,
        )


@dataclasses.dataclass(frozen=True, repr=False)
class GeneratedText(Display):
    """A generated text with its own log-probability, which is exact.

    `text` ends before the first stop string or end-of-text token. The other fields cover everything that was
    generated, up to the end of the block in which it stopped. `Duel.log_prob([window])` gives `log_prob` again, unless
    `temperature`, `top_k` or `top_p` changed the distribution.
    """

    shown: ClassVar = ("log_prob",)
    computed: ClassVar = ("fingerprint",)

    prompt: str | Ids
    text: str
    log_prob: float  # nats, of all `tokens` given the prompt
    stderr: float | None  # nats, of an estimate
    kind: str  # of log_prob: exact, estimate, bound, no bound or oracle
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    reveal_steps: tuple[int, ...]
    nfe: int | None
    near_ties: int | None
    window: Window
    spec: dict[str, str] = dataclasses.field(repr=False)  # everything that defines log_prob, such as a temperature
    note: str = ""  # what limits log_prob, or changed its distribution, such as "under temperature=0.7"

    @property
    def fingerprint(self) -> str:
        """The digest of the spec."""
        return digest(self.spec)

    @classmethod
    def from_sample(
        cls,
        prompt: str | Ids,
        text: str,
        window: Window,
        sample: Sample,
        estimator: Estimator,
        tokenizer: PreTrainedTokenizerBase,
        spec: dict[str, str],
        changes: Sequence[object] = (),
        cut: str = "",
    ) -> GeneratedText:
        """The text of a sample, and the window under which it is scored again.

        `changes`: what changed the network's distribution for this text alone, such as a temperature. `cut`: a note, if
        the prompt was.
        """
        total = Total.from_score(window, sample, estimator.name)
        template = estimator.value_template
        under = f"under {', '.join(map(str, changes))}" if changes else ""
        return cls(
            prompt=prompt,
            text=text,
            log_prob=sample.log_prob,
            stderr=total.stderr,
            kind=template.word,
            note=estimator.counts.with_doubt(" ".join(filter(None, [template.note, under, cut]))),
            tokens=tuple(token_texts(sample.tokens, tokenizer)),
            token_logprobs=sample.token_logprobs,
            reveal_steps=sample.reveal_steps,
            nfe=sample.nfe,
            near_ties=sample.near_ties,
            window=window,
            spec=spec,
        )


Result = TypeVar("Result", TextScore, TextEstimate, GeneratedText)


def with_doubt(result: Result, counts: Counts) -> Result:
    """The result, whose note says if the run's checks of a user's rule put it in doubt, even those after it."""
    return dataclasses.replace(result, note=counts.with_doubt(result.note))


def _up_to(spec: dict[str, str], unknown: int) -> str:
    """A note on what the tokenizer does not tell apart: texts that differ in it alone have one value, their sum."""
    lost = [spec.get("normalises", ""), "[UNK]" if unknown else ""]
    words = ", ".join(filter(None, lost))
    return f"up to {words}" if words else ""


def _perplexity(log_prob: float, tokens: int) -> float:
    """The perplexity per token, NaN without tokens."""
    if not tokens:
        return math.nan
    return rates.perplexity(-log_prob / tokens)


def _errors(result: TextScore | TextEstimate) -> dict[str, float]:
    """The standard errors of log_prob and of what is computed from it (delta method)."""
    if result.stderr is None or not result.log_prob:
        return {}
    relative = result.stderr / abs(result.log_prob)
    return {
        "log_prob": result.stderr,
        "perplexity": result.perplexity * result.stderr / result.sums.tokens,
        "bits_per_byte": result.bits_per_byte * relative,
    }


def _bits_per_byte(log_prob: float, size: int) -> float:
    """-log_prob in bits per byte, NaN for an empty text."""
    if not size:
        return math.nan
    # a log_prob of 0.0 gives 0.0, and -log_prob would give -0.0
    return (0.0 - log_prob) / math.log(2) / size
