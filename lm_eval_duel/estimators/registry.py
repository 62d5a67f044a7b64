"""The estimators, one entry each: what `estimator=` takes, and all that options, runs and reports know about them.

To add one, write its class (`base.Estimator`) and add its entry to `ENTRIES`. Nothing here imports torch: the class is
imported when an estimator is made (`Estimator.from_options`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from lm_eval_duel import rules
from lm_eval_duel.arguments import Argument, Arguments, declared
from lm_eval_duel.core.scores import Kind, Value
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.arguments import (
    CommitOnceArguments,
    ConfidenceArguments,
    ElboArguments,
    LatticeArguments,
    NoisedElboArguments,
    OrderArguments,
    SeedsArguments,
    TwoPhaseArguments,
    check_block,
)
from lm_eval_duel.rules import presets

LOG_MEAN = "log_mean_exp"  # the other value of a mean over noise seeds
Options: TypeAlias = Any  # lm_eval_duel.options.Options, which imports this file


@dataclasses.dataclass(frozen=True)
class MonteCarlo:
    """A description of what is random in the values of an estimator."""

    value: str  # what such a value is, in the log
    units: str  # what is drawn
    least: int  # with fewer of them there is no standard error
    error: str  # which error that is
    argument: str = ""  # the model arg that says how many are drawn, if one does
    no_error: str = "the results have none"  # why a report may lack the error

    def unknown(self, spec: Mapping[str, Any]) -> str:
        """The reason that a value with this spec has no standard error."""
        count = str(spec.get(self.argument, ""))
        few = count.isdecimal() and int(count) < self.least
        reason = self.no_error
        if few:
            reason = f"{self.argument}={count}; it takes {self.least} or more"
        return f"{self.error} error not known ({reason})"


@dataclasses.dataclass(frozen=True)
class OtherValue:
    """A value that the scores of an estimator hold besides its own (`Score.others`), and that has no row of a table."""

    name: str  # its key in `others` and in the results file
    title: str  # "the log of the mean probability over noise seeds"
    kind: Kind  # says in which direction it errs
    what: str  # what its nats are, such as "a lower bound of the log-likelihood"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One estimator.

    `target`: its class, as module:Class. `takes`: the options that its constructor takes, besides grid and batch size.
    `record`: the model args that it reads and others do not; `ignored_args`: those that it does not read.
    `label_args`: the entries of its spec that label a run, since values that differ in one of them are not comparable;
    `named`: the format of such an entry in the name of a row, "{}" for key=value. `others`: what scores hold besides.
    `check` raises DuelError for options that it cannot follow.
    """

    name: str  # as typed
    display: str  # in tables
    what: str  # a description
    kind: Kind
    target: str
    takes: tuple[str, ...]
    record: type[Arguments] = Arguments
    ignored_args: tuple[str, ...] = ()
    decodes: bool = False  # its `is_greedy` says what decoding would write
    follows_rule: bool = False  # its value is that of `rule`, or an estimate of it
    monte_carlo: MonteCarlo | None = None  # None: its values depend on no random numbers
    label_args: tuple[str, ...] = ()  # not the number of draws
    named: str = "{}"
    others: tuple[OtherValue, ...] = ()
    causal: bool = False  # the network is read as an autoregressive one, whose blocks have one position
    process: Callable[[Mapping[str, Any]], str] = lambda spec: ""  # whose bound it is: words that follow the kind
    takes_noise: str = "no"  # networks whose noise is random tokens, not masks: "no", "only" or "both"
    lattice: bool = False  # one run computes the values of all lattice estimators, and of the rules that it follows
    check: Callable[[Options], None] = lambda options: None
    own_cache: bool = False  # `cache` is a setting of the estimator; the network is loaded without
    whole_texts: str = ""  # why it scores whole texts only, no continuations (loglikelihood); empty: it scores both

    @property
    def arguments(self) -> dict[str, Argument]:
        """The model args that it reads and others do not, by name."""
        return declared(self.record)

    @property
    def is_drawn(self) -> bool:
        """True if its values depend on random numbers, and so have an error."""
        return self.monte_carlo is not None

    def unknown_error(self, error: float | None, spec: Mapping[str, Any]) -> str:
        """The reason that a value with this error and spec has none; empty if it has one, or nothing is drawn."""
        if self.monte_carlo is None or error is not None:
            return ""
        return self.monte_carlo.unknown(spec)

    def qualifiers(self, spec: Mapping[str, Any]) -> list[str]:
        """The remarks on a value with this spec that names of rows hold besides its rule, block and cache."""
        qualifiers = []
        if self.kind.is_bound and least_level(spec):
            qualifiers.append(f"eps={least_level(spec):g}: no bound")
        for key in self.label_args:
            if key in spec:
                qualifiers.append(self.named.format(f"{key}={spec[key]}"))
        return qualifiers

    @property
    def title(self) -> str:
        """The name in tables; one of no likelihood says so."""
        return self.display if self.kind.is_likelihood else f"{self.display} ({self.kind.meaning})"


# ---------------------------------------------------------------- notes and checks


def _process(spec: Mapping[str, Any]) -> str:
    steps = spec.get("steps", "inf")
    if steps == "inf":
        steps = "infinitely many"
    return f"of ancestral sampling in {steps} steps"


def _given_the_noise(spec: Mapping[str, Any]) -> str:
    if "noise_seed" not in spec:
        return ""
    return f"given the noise of seed {spec['noise_seed']}"


def _over_seeds(spec: Mapping[str, Any]) -> str:
    return f"in expectation over noise, from {spec.get('noise_seeds', 'some')} seeds"


def _check_sets(options: Options) -> None:
    if options.block != "auto":
        check_block(options.estimator, options.block)


def _check_noised(options: Options) -> None:
    for name in ("cache", "cfg_scale", "exclude_ids", "temperature", "top_k", "top_p"):
        if getattr(options, name):
            raise DuelError(f"estimator=noised_elbo bounds the network's own process, without '{name}'; leave it out.")


def _check_two_phase(options: Options) -> None:
    impossible = "a text of probability 0 has no differences"
    reasons = {
        "top_k": impossible,
        "top_p": impossible,
        "compile": "its layers take no kept keys",
    }
    for name, reason in reasons.items():
        if getattr(options, name):
            raise DuelError(f"estimator=two_phase does not support {name}: {reason}. Use estimator=duel.")
    if options.backend == "remote":
        raise DuelError("estimator=two_phase cannot cache a checkpoint's code (backend=remote). Use estimator=duel.")


def _lattice(name: str, display: str, what: str, kind: Kind) -> Entry:
    target = "lm_eval_duel.estimators.lattice:Lattice"
    takes = ("estimator", "rule", "block")  # the class has three names
    return Entry(name, display, what, kind, target, takes, LatticeArguments, lattice=True, check=_check_sets)


# ---------------------------------------------------------------- the entries

ENTRIES = (  # in the order of tables
    Entry(
        "ar",
        "AR",
        "the chain rule of an autoregressive network, one of ours or any causal language model of transformers",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.duel:Autoregressive",
        (),
        ignored_args=("rule", "block", "grid"),
        decodes=True,
        causal=True,
    ),
    Entry(
        "elbo",
        "ELBO",
        "the Monte Carlo ELBO under random unmasking",
        Kind.UPPER_BOUND,
        "lm_eval_duel.estimators.elbo:Elbo",
        ("draw_seed",),
        ElboArguments,
        monte_carlo=MonteCarlo("ELBO", "draws", 16, "Monte Carlo", argument="mc_samples"),
        ignored_args=("rule", "block"),
    ),
    Entry(
        "noised_elbo",
        "Noised ELBO",
        "the Monte Carlo bound of ancestral sampling in `steps` steps, for networks whose noise is random tokens",
        Kind.UPPER_BOUND,
        "lm_eval_duel.estimators.noised_elbo:NoisedElbo",
        ("draw_seed",),
        NoisedElboArguments,
        monte_carlo=MonteCarlo("noised ELBO", "draws", 16, "Monte Carlo", argument="mc_samples"),
        label_args=("steps", "prediction", "self_conditioning"),
        process=_process,
        takes_noise="only",
        ignored_args=("block", "grid", "last_block"),
        check=_check_noised,
    ),
    _lattice(
        "elbo_exact",
        "ELBO, all orders",
        "the mean over all orders inside blocks, which is what `elbo` with `elbo_block` = block estimates",
        Kind.UPPER_BOUND,
    ),
    _lattice(
        "mixture", "Mixture of orders", "the exact likelihood of uniformly random order inside blocks", Kind.LIKELIHOOD
    ),
    Entry(
        "duel",
        "DUEL",
        "the exact likelihood of the sampler that unmasks by `rule`; where the noise is random tokens, given the "
        "noise of `noise_seed`",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.duel:DuelEstimator",
        ("rule", "block"),
        CommitOnceArguments,
        follows_rule=True,
        decodes=True,
        label_args=("noise_seed",),  # another seed is another distribution
        process=_given_the_noise,
        takes_noise="both",
    ),
    Entry(
        "duel_seeds",
        "DUEL over noise",
        "the mean of `duel` over noise seeds, for networks whose noise is random tokens",
        Kind.UPPER_BOUND,
        "lm_eval_duel.estimators.duel_seeds:DuelSeeds",
        ("rule", "block"),
        SeedsArguments,
        follows_rule=True,
        monte_carlo=MonteCarlo("mean over noise seeds", "seeds", 2, "noise", argument="noise_seeds"),
        label_args=("noise_seed", "prediction", "self_conditioning", "temperatures"),
        process=_over_seeds,
        takes_noise="only",
        others=(
            OtherValue(
                LOG_MEAN,
                "the log of the mean probability over noise seeds",
                Kind.UPPER_BOUND,
                "a lower bound of the log-likelihood in expectation over noise",
            ),
        ),
    ),
    Entry(
        "sampled_confidence",
        "Select after sampling",
        "the exact likelihood of a sampler that selects after sampling",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.sampled_confidence:SampledConfidence",
        ("block",),
        ConfidenceArguments,
        label_args=("n", "steps", "schedule", "tau", "confidence", "strict"),
        ignored_args=("rule",),
        decodes=True,
        check=_check_sets,
    ),
    Entry(
        "sampled_order",
        "Sampled order",
        "the exact likelihood of a sampler that draws the positions",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.sampled_order:SampledOrder",
        ("block",),
        OrderArguments,
        label_args=("alg", "steps", "alg_temp"),
        ignored_args=("rule",),
        check=_check_sets,
    ),
    Entry(
        "two_phase",
        "DUEL estimate",
        "an unbiased estimate of `duel`, with its standard error, for a fraction of the work",
        Kind.ESTIMATE,
        "lm_eval_duel.estimators.two_phase:TwoPhase",
        ("rule", "block", "cache", "draw_seed"),
        TwoPhaseArguments,
        follows_rule=True,
        monte_carlo=MonteCarlo(
            "two-phase estimate", "drawn blocks", 8, "sampling", no_error="fewer than 8 drawn blocks: raise sample"
        ),
        label_args=("sample",),
        named="two-phase, {}",
        check=_check_two_phase,
        own_cache=True,
        whole_texts=(
            "estimator=two_phase estimates a sum over many blocks. A single option has few sampled blocks, or none, so "
            "comparing options would compare noise. Use estimator=duel for this task, without cache or with cache=dual."
        ),
    ),
    _lattice("oracle", "Oracle", "the best order of each block", Kind.NOT_A_LIKELIHOOD),
)
ESTIMATORS: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
LATTICE = tuple(entry.name for entry in ENTRIES if entry.lattice)


def find(name: str) -> Entry:
    """The entry of an estimator's name; raises DuelError for any other, and says of a rule's how rules are given."""
    if not isinstance(name, str):
        raise DuelError(f"'estimator' is the name of an estimator, such as 'duel'; got {name!r:.80}.")
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    text = rules.with_colons(name)
    first, _, rest = text.partition(":")
    if first in ESTIMATORS:
        raise DuelError(f"'{name}' is not a name alone: write estimator={first}, and {rest} as an argument of its own.")
    if first in rules.RULES or first in rules.ALIASES or ":" in text:
        raise DuelError(f"'{name}' is a rule, not an estimator: write rule={text}.")
    if name in presets.PRESETS:
        raise DuelError(f"'{name}' is a preset, not an estimator: write preset={name}.")
    raise unknown("estimator", name, ESTIMATORS)


def require_not_estimator(what: str, text: str) -> None:
    """Raise DuelError if the text of a rule or a preset names an estimator. `what`: the argument."""
    name, *_ = rules.split(rules.with_colons(text))  # that of a user's rule is module:Name
    if name.lower() in ESTIMATORS:
        raise DuelError(f"'{name}' is an estimator, not a {what}: write estimator={name.lower()}.")


def arguments() -> dict[str, Argument]:
    """The model args that only some estimators read, by name."""
    declarations: dict[str, Argument] = {}
    for entry in ESTIMATORS.values():
        declarations |= entry.arguments
    return declarations


def check_arguments(given: Mapping[str, Any], estimator: str) -> None:
    """Raise DuelError for a model arg that another estimator reads, and this one does not."""
    for key in given:
        readers = [entry.name for entry in ESTIMATORS.values() if key in entry.arguments]
        if readers and estimator not in readers:
            raise DuelError(
                f"'{key}' is read by estimator={' or '.join(readers)} only, and this run has estimator={estimator}. "
                "Leave it out, or change the estimator."
            )


def check_rule(given: Collection[str], estimator: str) -> None:
    """Raise DuelError if arguments of a rule are `given` and the network's noise is random tokens."""
    if given and find(estimator).takes_noise == "only" and not find(estimator).follows_rule:
        raise DuelError(
            f"estimator={estimator} bounds ancestral sampling, in which no position is unmasked, so no rule applies. "
            f"Leave {' and '.join(given)} out."
        )


def least_level(spec: Mapping[str, Any]) -> float:
    """The noise level below which the bound with this spec leaves out terms; above 0 it is no bound."""
    eps = spec.get("elbo_eps", "none")
    return 0.0 if eps == "none" else float(eps)


def value_template(estimator: str, spec: Mapping[str, Any]) -> Value:
    """The kind of an estimator's values with this spec and the note on them, as a `Value` whose nats are not known."""
    entry = find(estimator)
    if entry.kind.is_bound and least_level(spec):
        return Value(math.nan, kind=Kind.NO_BOUND)
    return Value(math.nan, kind=entry.kind, note=entry.process(spec))
