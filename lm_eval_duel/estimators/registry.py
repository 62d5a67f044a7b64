"""The estimators, one entry each: what `estimator=` takes, and all that options, runs and reports know about them.

To add one, write its class (`base.Estimator`) and add its entry to `ENTRIES`. Nothing here imports torch: the class is
imported when an estimator is made.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel import rules
from lm_eval_duel.arguments import NOTHING, Reader, at_least, block_size, choice, count, number_where, truth
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.sampled_arguments import (
    ORDER_STEPS,
    ORDERS,
    SCHEDULES,
    check_order,
    check_step_counts,
    read_order,
)
from lm_eval_duel.rules import presets

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.estimators.base import Estimator
    from lm_eval_duel.options import Options

ELBO_FORMS = ("count", "ratio", "score_entropy")
CONFIDENCES = ("untempered", "tempered")  # which probability of a drawn token decides whether it is kept
SAMPLE = 0.05  # share of the blocks of a two-phase estimate that are also scored without the cache
NO_BOUND = "no bound: elbo_eps above 0 leaves out small noise levels"
LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets


class Kind(enum.Enum):
    """What the value of an estimator is."""

    LIKELIHOOD = "a likelihood"
    ESTIMATE = "an unbiased estimate of a log-likelihood"
    UPPER_BOUND = "an upper bound of the perplexity"
    NOT_A_LIKELIHOOD = "not a likelihood: it sees the targets"


@dataclasses.dataclass(frozen=True)
class Argument:
    """A model arg that only some estimators read."""

    read: Reader
    default: Any = None


@dataclasses.dataclass(frozen=True)
class MonteCarlo:
    """What is random in the values of an estimator, in words."""

    value: str  # what such a value is, in the log
    units: str  # what is drawn; with fewer than 8 of them there is no standard error
    error: str  # which error that is
    argument: str = ""  # the model arg that says how many are drawn, if one does
    no_error: str = "the results have none"  # why a report may lack the error


@dataclasses.dataclass(frozen=True)
class Entry:
    """One estimator.

    `target`: its class, as module:Class. `settings`: the other keywords of the class than grid and batch size, from
    the options. `arguments`: the model args that it reads and others do not; `ignored_args`: those that it does not
    read. `named`: how names of rows hold an argument, such as "{}" for key=value. `check` raises DuelError for options
    that it cannot follow.
    """

    name: str  # as typed
    display: str  # in tables
    kind: Kind
    target: str
    settings: Callable[[Options], dict[str, Any]]
    arguments: Mapping[str, Argument] = dataclasses.field(default_factory=dict)
    ignored_args: tuple[str, ...] = ()
    decodes: bool = False  # its `is_greedy` says what decoding would write
    follows_rule: bool = False  # its value is that of `rule`, or an estimate of it
    drawn: MonteCarlo | None = None  # None: its values depend on no random numbers
    named: str = ""  # empty: names of rows hold no arguments
    causal: bool = False  # the network is read as an autoregressive one, whose blocks have one position
    lattice: bool = False  # one run computes the values of all lattice estimators, and of the rules that it follows
    check: Callable[[Options], None] | None = None
    own_cache: bool = False  # `cache` is a setting of the estimator; the network is loaded without
    whole_texts: str = ""  # why it scores whole texts only, no continuations (loglikelihood); empty: it scores both

    @property
    def title(self) -> str:
        """The name in tables; one of no likelihood says so."""
        return f"{self.display} ({self.kind.value})" if self.kind is Kind.NOT_A_LIKELIHOOD else self.display


# ---------------------------------------------------------------- arguments and settings


def _rules(key: str, value: Any) -> tuple[rules.Rule, ...]:
    """Rules of a text such as greedy+margin:k=2, each of which is state-only."""
    parsed = () if value in NOTHING else tuple(rules.parse(text) for text in str(value).split("+"))
    for rule in parsed:
        rules.check_state_only(rule)
    return parsed


ELBO_ARGUMENTS = {
    "mc_samples": Argument(at_least(1, 128), 128),  # draws of a window
    "elbo_form": Argument(choice("auto", *ELBO_FORMS, default="auto"), "auto"),
    "elbo_block": Argument(block_size, "auto"),
    "elbo_eps": Argument(number_where("a share from 0 (nothing left out) to below 1", lambda x: 0 <= x < 1, 0.0), 0.0),
}
TWO_PHASE_ARGUMENTS = {  # one of them; neither: sample=0.05
    "sample": Argument(number_where("a share of blocks above 0, at most 1", lambda x: 0 < x <= 1)),
    "precision": Argument(number_where("a relative standard error between 0 and 1", lambda x: 0 < x < 1)),
}
LATTICE_ARGUMENTS = {"lattice_rules": Argument(_rules)}  # None: the rule, if it is state-only

SAMPLED_ARGUMENTS = {
    "n": Argument(count),  # draws that are kept at a step; neither n nor steps: 1
    "steps": Argument(count),  # of a block
    "schedule": Argument(choice(*SCHEDULES, default=SCHEDULES[0]), SCHEDULES[0]),
    "tau": Argument(number_where("a probability from 0 to 1", lambda x: 0 <= x <= 1)),
    "confidence": Argument(choice(*CONFIDENCES, default=CONFIDENCES[0]), CONFIDENCES[0]),
    "strict": Argument(truth, True),
}


ORDER_ARGUMENTS = {
    "alg": Argument(read_order, ORDERS[0]),
    "steps": Argument(at_least(1, ORDER_STEPS), ORDER_STEPS),  # of a block
    "alg_temp": Argument(number_where("a number above 0", lambda x: 0 < x < math.inf)),
}


def _check_elbo(options: Options) -> None:
    if options.estimator_args["elbo_eps"] and options.estimator_args["elbo_form"] == "count":
        raise DuelError("'elbo_eps' is the least ratio, of elbo_form=ratio; counts have none. Leave one out.")


def _elbo_settings(options: Options) -> dict[str, Any]:
    arguments = options.estimator_args
    return {
        "block": arguments["elbo_block"],
        "samples": arguments["mc_samples"],
        "form": arguments["elbo_form"],
        "eps": arguments["elbo_eps"],
        "seed": options.draw_seed,
    }


def _check_lattice(options: Options) -> None:
    if options.block is None or (isinstance(options.block, int) and options.block > LATTICE_BLOCK):
        raise DuelError(
            f"estimator={options.estimator} evaluates all revealed sets of a block, so block is at most "
            f"{LATTICE_BLOCK}; got {'none' if options.block is None else options.block}. "
            "block=4 takes 15 states a block."
        )


def _check_sampled(options: Options) -> None:
    _check_lattice(options)
    check_step_counts(*(options.estimator_args[name] for name in ("n", "tau", "steps", "schedule")))


def _check_sampled_order(options: Options) -> None:
    _check_lattice(options)
    check_order(options.estimator_args["alg"], options.estimator_args["alg_temp"])


def check_amount(sample: float | None, precision: float | None) -> None:
    """Raise DuelError unless at most one of the two is given, and in range."""
    if sample is not None and precision is not None:
        raise DuelError(
            f"'sample' (got {sample:g}) is the share of blocks scored without the cache, and 'precision' (got "
            f"{precision:g}) finds that share; leave one out."
        )
    if sample is not None and not 0 < sample <= 1:
        raise DuelError(f"'sample' is a share of blocks above 0, at most 1; got {sample}.")
    if precision is not None and not 0 < precision < 1:
        raise DuelError(f"'precision' is a relative standard error of perplexity between 0 and 1; got {precision}.")


def _check_two_phase(options: Options) -> None:
    check_amount(options.estimator_args["sample"], options.estimator_args["precision"])
    for name in ("top_k", "top_p", "compile"):
        if getattr(options, name):
            why = "its layers take no kept keys" if name == "compile" else "a text of probability 0 has no differences"
            raise DuelError(f"estimator=two_phase does not support {name}: {why}. Use estimator=duel.")
    if options.backend == "remote":
        raise DuelError(
            "estimator=two_phase needs a network whose attention this package knows, for its cached phase, and "
            "backend=remote runs a checkpoint's own code. Use estimator=duel."
        )


def _two_phase_settings(options: Options) -> dict[str, Any]:
    return {
        "rule": options.rule,
        "block": options.block,
        "cache": options.cache or "dual",
        "sample": options.estimator_args["sample"],
        "precision": options.estimator_args["precision"],
        "seed": options.draw_seed,
    }


def _lattice_settings(options: Options) -> dict[str, Any]:
    follow = options.estimator_args["lattice_rules"]
    if follow is None:
        follow = (options.rule,) if options.rule.state_only else ()
    return {"block": options.block, "value": options.estimator, "follow": follow}


def _lattice(name: str, display: str, kind: Kind) -> Entry:
    return Entry(
        name,
        display,
        kind,
        "lm_eval_duel.estimators.lattice:Lattice",
        _lattice_settings,
        LATTICE_ARGUMENTS,
        lattice=True,
        check=_check_lattice,
    )


# ---------------------------------------------------------------- the entries

ENTRIES = (  # in the order of tables
    Entry(
        "ar",
        "AR",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.duel:Autoregressive",
        lambda options: {},
        ignored_args=("rule", "block"),
        decodes=True,
        causal=True,
    ),
    Entry(
        "elbo",
        "ELBO",
        Kind.UPPER_BOUND,
        "lm_eval_duel.estimators.elbo:Elbo",
        _elbo_settings,
        ELBO_ARGUMENTS,
        drawn=MonteCarlo("ELBO", "draws", "Monte Carlo", argument="mc_samples"),
        ignored_args=("rule", "block"),
        check=_check_elbo,
    ),
    _lattice("elbo_exact", "ELBO, all orders", Kind.UPPER_BOUND),
    _lattice("mixture", "Mixture of orders", Kind.LIKELIHOOD),
    Entry(
        "duel",
        "DUEL",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.duel:DuelEstimator",
        lambda options: {"rule": options.rule, "block": options.block},
        follows_rule=True,
        decodes=True,
    ),
    Entry(
        "sampled_confidence",
        "Select after sampling",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.sampled_confidence:SampledConfidence",
        lambda options: {"block": options.block, **options.estimator_args},
        SAMPLED_ARGUMENTS,
        named="{}",
        ignored_args=("rule",),
        decodes=True,
        check=_check_sampled,
    ),
    Entry(
        "sampled_order",
        "Sampled order",
        Kind.LIKELIHOOD,
        "lm_eval_duel.estimators.sampled_order:SampledOrder",
        lambda options: {"block": options.block, **options.estimator_args},
        ORDER_ARGUMENTS,
        ignored_args=("rule",),
        check=_check_sampled_order,
    ),
    Entry(
        "two_phase",
        "DUEL estimate",
        Kind.ESTIMATE,
        "lm_eval_duel.estimators.two_phase:TwoPhase",
        _two_phase_settings,
        TWO_PHASE_ARGUMENTS,
        follows_rule=True,
        drawn=MonteCarlo(
            "two-phase estimate", "drawn blocks", "sampling", no_error="fewer than 8 drawn blocks: raise sample"
        ),
        named="two-phase, {}",
        check=_check_two_phase,
        own_cache=True,
        whole_texts=(
            "estimator=two_phase estimates a sum over many blocks. A single option has few sampled blocks, or none, so "
            "comparing options would compare noise. Use estimator=duel for this task, without cache or with cache=dual."
        ),
    ),
    _lattice("oracle", "Oracle", Kind.NOT_A_LIKELIHOOD),
)
ESTIMATORS: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
LATTICE = tuple(entry.name for entry in ENTRIES if entry.lattice)


def find(name: str) -> Entry:
    """The entry of an estimator's name; raises DuelError for any other name."""
    if (entry := ESTIMATORS.get(name)) is None:
        raise unknown("estimator", name, ESTIMATORS)
    return entry


def read_name(key: str, value: Any) -> str:
    """The name of an estimator, from the value of a model arg."""
    if not isinstance(value, str) or value not in ESTIMATORS:
        raise unknown(f"value of {key}", value, ESTIMATORS)
    return value


def arguments() -> dict[str, Argument]:
    """The model args that only some estimators read, by name."""
    return {name: argument for entry in ESTIMATORS.values() for name, argument in entry.arguments.items()}


def check_arguments(given: Mapping[str, Any], estimator: str) -> None:
    """Raise DuelError for a model arg that another estimator reads, and this one does not."""
    for key in given:
        readers = [entry.name for entry in ESTIMATORS.values() if key in entry.arguments]
        if readers and estimator not in readers:
            raise DuelError(
                f"'{key}' is read by estimator={' or '.join(readers)} only, and this run has estimator={estimator}. "
                "Leave it out, or change the estimator."
            )


def ignored_args(given: Mapping[str, Any], estimator: str) -> list[str]:
    """The model args given that this estimator does not read, as if only `estimator` was changed in a command."""
    return [key for key in find(estimator).ignored_args if key in given]


def kind_of(estimator: str, spec: Mapping[str, Any]) -> str:
    """What the values of an estimator with this spec are: a likelihood, an estimate, a bound, or none of these."""
    kind = find(estimator).kind
    return NO_BOUND if kind is Kind.UPPER_BOUND and float(spec.get("elbo_eps", 0)) else kind.value


def make(denoiser: Denoiser, options: Options, **sizes: Any) -> Estimator:
    """The estimator that the options name; raises DuelError if there is none of its kind for this network.

    `sizes`: batch_size, max_batch_size and traced, if they are not those of the options.
    """
    presets.require_fit(options.preset, denoiser.family)
    entry = find(options.estimator)
    own = {"batch_size": options.rows, "max_batch_size": options.max_batch_size, "traced": options.trace is not None}
    module, name = entry.target.split(":")
    return getattr(importlib.import_module(module), name)(
        denoiser,
        grid=options.grid,
        **{**own, **sizes},
        **entry.settings(options),
    )
