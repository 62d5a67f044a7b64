"""Results: a value and what it is worth, the score of one window, a sample, and the counts of a run. No torch."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import counted

IMPOSSIBLE = (  # the reason for an infinite value
    "a token has probability 0 under this spec (for example because of top_k or top_p), so its log-likelihood is "
    "-infinity"
)


WORK = (  # of Counts
    "forwards",
    "rows",
    "lane_steps",
    "rows_checked",
    "rows_differing",
    "decisions",
    "decisions_checked",
    "decisions_differing",
)
STATISTICS = ("confidence", "margin", "entropy")  # of Predictions, in a trace
Sums = TypeVar("Sums", bound="BlockSums")


class Kind(str, enum.Enum):
    """The kinds of values, from the strongest to the weakest.

    They equal the words that every file, table and record has as `kind`. A lower bound of a log-probability is
    an upper bound of a perplexity; both are a "bound".
    """

    LIKELIHOOD = "exact"
    ESTIMATE = "estimate"
    UPPER_BOUND = "bound"
    NO_BOUND = "no bound"
    NOT_A_LIKELIHOOD = "oracle"

    def __str__(self) -> str:
        return self.value

    @property
    def meaning(self) -> str:
        """The kind in a sentence."""
        return MEANINGS[self]

    @property
    def is_bound(self) -> bool:
        """True if its perplexity is an upper bound, which tables write with a less-or-equal sign."""
        return self is Kind.UPPER_BOUND

    @property
    def is_likelihood(self) -> bool:
        """True for a likelihood, and for an estimate or a bound of one."""
        return self is not Kind.NOT_A_LIKELIHOOD


KINDS = tuple(Kind)
MEANINGS = {
    Kind.LIKELIHOOD: "a likelihood",
    Kind.ESTIMATE: "an unbiased estimate of a log-likelihood",
    Kind.UPPER_BOUND: "an upper bound of the perplexity",
    Kind.NO_BOUND: "no bound: elbo_eps above 0 leaves out small noise levels",
    Kind.NOT_A_LIKELIHOOD: "not a likelihood: it sees the targets",
}
RULE_IN_DOUBT = "but in doubt: its rule decided otherwise when it was asked again (decisions_differing)"
DOUBTS = {Kind.NO_BOUND: "neither a likelihood nor a bound", Kind.NOT_A_LIKELIHOOD: "not a likelihood"}


@dataclasses.dataclass(frozen=True)
class Value:
    """A log-likelihood and what it is worth: the one type that knows of estimates, bounds and their errors.

    A value of a window (`Score.value`), or a sum over windows (`Total.value`). It is written to JSON by `describe` and
    read by `read`; a results row holds it as it was written.

    Attributes:
        nats: The log-probability; of a value with noise seeds, the mean over them.
        error: Its standard error over random draws, nats. None: nothing is drawn, or the error is not known.
        kind: What it is.
        note: What limits it, in words that may follow the kind: whose bound it is, or why its error is not known.
        seeds: The log-probability under each noise seed, if several were used. All windows share them, so a sum of
            values is made seed by seed, and its error comes from the spread of these sums.
    """

    nats: float
    error: float | None = None
    kind: Kind = Kind.LIKELIHOOD
    note: str = ""
    seeds: tuple[float, ...] = ()

    @classmethod
    def from_seeds(cls, seeds: Sequence[float], kind: Kind = Kind.UPPER_BOUND, note: str = "") -> Value:
        """The mean over noise seeds, with its standard error; the error of one seed is not known."""
        count = len(seeds)
        mean = math.fsum(seeds) / count
        error = None
        if count > 1 and math.isfinite(mean):
            squares = math.fsum((nats - mean) ** 2 for nats in seeds)
            variance = squares / (count - 1)
            error = math.sqrt(variance / count)
        return cls(mean, error, kind, note, tuple(seeds))

    def with_nats(self, nats: float, error: float | None = None) -> Value:
        """Another value of the same kind and with the same note."""
        return dataclasses.replace(self, nats=nats, error=error)

    def __add__(self, other: Value) -> Value:
        """The sum, which is worth what the weaker of the two is. Its error is not known here: they may share draws."""
        return Value(
            nats=self.nats + other.nats,
            kind=weaker(self.kind, other.kind),
            note=self.note if self.note == other.note else "",
            seeds=tuple(a + b for a, b in zip(self.seeds, other.seeds, strict=True)),
        )

    @property
    def interval_error(self) -> float | None:
        """The error for intervals, which reach 1.96 of it to each side for 95 %.

        The error from a few noise seeds is uncertain itself, so it is scaled by Student's quantile over the normal one:
        by 1.21 for 8 seeds. Without that, intervals of 8 seeds cover 91 %.
        """
        if self.error is None or len(self.seeds) < 2:
            return self.error
        from scipy.special import ndtri, stdtrit  # here, since scipy takes long to import

        student = stdtrit(len(self.seeds) - 1, 0.975)
        normal = ndtri(0.975)
        return self.error * float(student / normal)

    @property
    def is_exact(self) -> bool:
        """True for a likelihood itself: no estimate, bound or oracle."""
        return self.kind is Kind.LIKELIHOOD

    @property
    def is_bound(self) -> bool:
        """True if its kind is that of a bound."""
        return self.kind.is_bound

    @property
    def is_likelihood(self) -> bool:
        """True if its kind is that of a likelihood, or of an estimate or a bound of one."""
        return self.kind.is_likelihood

    @property
    def may_exceed_one(self) -> bool:
        """True for an unbiased estimate: of a single text it may be above a log-probability of 0."""
        return self.kind is Kind.ESTIMATE

    @property
    def word(self) -> str:
        """The kind in a word or two, as in files and tables."""
        return self.kind.value

    @property
    def short_label(self) -> str:
        """The kind in a word or two, and the note, for tables."""
        return f"{self.word} {self.note}".rstrip()

    @property
    def doubt(self) -> str:
        """The reason that a comparison with this value cannot say which is better; empty if it can."""
        return DOUBTS.get(self.kind, "")

    @property
    def label(self) -> str:
        """The kind and the note, for sentences."""
        return f"{self.kind.meaning} {self.note}".rstrip()

    def describe(self) -> dict[str, Any]:
        """The entries of a JSON file. JSON has no infinity: it is null, with the reason."""
        finite = math.isfinite(self.nats)
        entries: dict[str, Any] = {
            "log_prob": self.nats if finite else None,
            "stderr": self.error if finite else None,
            "kind": self.word,
        }
        if self.note:
            entries["note"] = self.note
        if self.seeds:
            entries["seeds"] = [nats if math.isfinite(nats) else None for nats in self.seeds]
        if not finite:
            entries["reason"] = IMPOSSIBLE
        return entries

    @classmethod
    def read(cls, entries: Mapping[str, Any], template: Value | None = None) -> Value | None:
        """The inverse of `describe`. None: there is no value, only a null without a reason.

        `template`: a value with the kind and the note that the estimator's spec implies, for entries without their own.
        """
        nats = entries.get("log_prob")
        if nats is None and entries.get("reason") is None:
            return None
        kind = Kind.LIKELIHOOD
        note = ""
        if entries.get("kind") is not None:
            kind = Kind(entries["kind"])
            note = entries.get("note", "")
        elif template is not None:
            kind = template.kind
            note = template.note
        error = entries.get("stderr")
        return cls(
            nats=_nats_from_json(nats),
            error=None if error is None else float(error),
            kind=kind,
            note=note,
            seeds=tuple(_nats_from_json(each) for each in entries.get("seeds") or ()),
        )


def _nats_from_json(nats: float | None) -> float:
    """A log-probability from JSON, where minus infinity is null."""
    return -math.inf if nats is None else float(nats)


def weaker(one: Kind, other: Kind) -> Kind:
    """The weaker of two kinds, which is that of the sum of such values."""
    return KINDS[max(KINDS.index(one), KINDS.index(other))]


@dataclasses.dataclass(frozen=True)
class BlockSums(abc.ABC):
    """The blocks behind an estimate: sums over the blocks of one window, or of several windows added together."""

    name: ClassVar[str]  # in the results JSON

    def __add__(self: Sums, other: Sums) -> Sums:
        # field by field: numbers are added and tuples joined
        sums = map(operator.add, vars(self).values(), vars(other).values())
        return type(self)(*sums)

    @property
    @abc.abstractmethod
    def error(self) -> float:
        """The estimated standard error, nats, however few blocks were drawn."""

    @property
    @abc.abstractmethod
    def stderr(self) -> float | None:
        """The standard error of the sum of these blocks' values, nats; None: not known."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """The entries of the results JSON."""

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """A summary for the log."""


class Plain:
    """The plain values of a dataclass."""

    internal: ClassVar[tuple[str, ...]] = ()  # fields that are left out, since others have their content
    computed: ClassVar[tuple[str, ...]] = ()  # properties that are values, too

    def to_dict(self) -> dict[str, Any]:
        """All values by name, as numbers, texts, lists and dicts. Infinite and undefined numbers stay floats."""
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        values = {}
        for name in (*fields, *self.computed):
            if name not in self.internal:
                values[name] = _plain(getattr(self, name))
        return values


def _plain(value: Any) -> Any:
    """A value without classes of this package."""
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, Kind):
        return value.value
    if isinstance(value, Window | BlockSums):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


@dataclasses.dataclass(frozen=True)
class Score(Plain):
    """The score of one window.

    `reveal_steps` and `token_logprobs` have an entry for each target token: the step that revealed it, counted from 0
    in every block, and its log-probability at that step, in nats. They are -1 and 0 at known positions, and empty if
    there is no single order.
    """

    log_prob: float  # nats, the sum over the target
    is_greedy: bool = False  # every token was the argmax when it was revealed
    reveal_steps: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    nfe: int | None = None  # rule steps, summed over blocks; None: more than one order
    near_ties: int | None = None  # steps whose pick float noise could change; None: the rule does not know
    # steps at which the row showed only [MASK], so that all masked positions tied exactly
    all_mask_starts: int = 0
    # if `traced`, per target token when it was revealed: the log-odds of P1, P1 - P2, and the entropy in nats
    confidence: tuple[float, ...] = ()
    margin: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    kind: Kind = Kind.LIKELIHOOD  # of `log_prob`
    # nats, the Monte Carlo error of `log_prob`; None: nothing is drawn, or it is not known
    stderr: float | None = None
    note: str = ""  # what limits `log_prob`, as in `Value`
    seeds: tuple[float, ...] = ()  # nats, under each noise seed, as in `Value`
    blocks: BlockSums | None = None  # of a two-phase estimate
    # the window's other values, by name
    others: Mapping[str, Score] = dataclasses.field(default_factory=dict)

    @property
    def value(self) -> Value:
        """`log_prob` and what it is worth."""
        return Value(self.log_prob, self.stderr, self.kind, self.note, self.seeds)

    def __repr__(self) -> str:
        """One line, without the values of tokens."""
        error = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        tokens = "no value of single tokens"
        if self.token_logprobs:
            tokens = counted(len(self.token_logprobs), "token")
        parts = [
            f"log_prob={self.log_prob:.4f}{error}",
            f"is_greedy={self.is_greedy}",
            f"nfe={self.nfe}",
            f"near_ties={self.near_ties}",
            tokens,
            self.value.short_label,
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Sample(Score):
    """A sample, or an argmax decoding, with its own score: `log_prob` is the log-probability of `tokens`."""

    tokens: tuple[int, ...] = ()
    tail: int = 0  # positions never revealed: generation stopped early, or the prompt had a tail


IndexedScores: TypeAlias = Iterator[tuple[int, Score]]  # (index, score) of each window as it is finished


@dataclasses.dataclass(frozen=True)
class Ties:
    """The ties of a window, which are a fact of its text, whichever run has scored it. Named as in `Score`."""

    near_ties: int | None
    all_mask_starts: int


@dataclasses.dataclass
class PhaseCounts:
    """The cost of one phase of an estimate."""

    forwards: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Counts:
    """The counts of what has been computed, over all calls."""

    windows: int = 0
    tokens: int = 0  # of targets
    nfe: int | None = 0  # None: more than one order
    forwards: int = 0  # network calls
    rows: int = 0  # rows evaluated
    lane_steps: int = 0  # steps of lanes
    rows_checked: int = 0  # lanes that were evaluated again alone
    rows_differing: int = 0  # those whose predictions differed by more than noise
    decisions: int = 0  # calls of a user's rule with a real choice
    decisions_checked: int = 0  # those of them that were asked again
    decisions_differing: int = 0  # those of the checked ones that differed
    near_ties: int | None = 0  # None: the rule does not know
    near_tie_windows: int | None = 0  # windows that have any
    all_mask_starts: int = 0
    phases: dict[str, PhaseCounts] = dataclasses.field(default_factory=dict)  # of a two-phase estimate

    def with_doubt(self, note: str) -> str:
        """The note of a value of this run, with the doubt in the user's rule, if there is any."""
        if not self.decisions_differing or RULE_IN_DOUBT in note:
            return note
        return ", ".join(filter(None, [note, RULE_IN_DOUBT]))

    def add_work(self, other: Counts) -> None:
        """Add what another count has of calls and checks, and none of its windows."""
        for name in WORK:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add(self, score: Score, tokens: int) -> None:
        """Add one finished window of `tokens` target tokens."""
        self.windows += 1
        self.tokens += tokens
        self.nfe = known_sum(self.nfe, score.nfe)
        self.add_ties(score)

    def add_ties(self, window: Score | Ties) -> None:
        """Add the ties of a window."""
        self.all_mask_starts += window.all_mask_starts
        self.near_ties = known_sum(self.near_ties, window.near_ties)
        has_near_ties = None if window.near_ties is None else int(window.near_ties > 0)
        self.near_tie_windows = known_sum(self.near_tie_windows, has_near_ties)


def known_sum(a: int | None, b: int | None) -> int | None:
    """The sum, or None if one of the numbers is not known."""
    return None if a is None or b is None else a + b


# ---------------------------------------------------------------- per unit


METRICS = ("token_perplexity", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")  # by preference


def perplexity(nll: float) -> float:
    """exp of a negative log-likelihood per unit; infinite if it is too large for a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def ratio(values: Sequence[float], sizes: Sequence[float]) -> tuple[float, float | None]:
    """The ratio of two sums over texts, and its standard error over the n texts of a size above 0.

        rate = sum values / sum sizes,   stderr = sqrt(n / (n - 1) sum (value - rate size)^2) / sum sizes

    The error is None for n < 2, and for an infinite sum. The sum of sizes is above 0.
    """
    count = sum(size > 0 for size in sizes)  # an empty text says nothing about others
    total = math.fsum(sizes)
    rate = math.fsum(values) / total
    if count < 2 or not math.isfinite(rate):
        return rate, None
    squares = [(value - rate * size) ** 2 for value, size in zip(values, sizes, strict=True)]
    spread = count / (count - 1) * math.fsum(squares)
    return rate, math.sqrt(spread) / total
