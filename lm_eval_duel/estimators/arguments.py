"""The arguments of single estimators, a record for each, with checks of values that do not go together. No torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.arguments import (
    BLOCK,
    COUNT,
    POSITIVE,
    PROBABILITY,
    TRUTH,
    Arguments,
    ArgumentType,
    argument,
    choice,
    declared,
    number,
    whole,
)
from lm_eval_duel.errors import DuelError

ELBO_FORMS = ("count", "ratio", "score_entropy")
LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets
FOLLOWED = ("sampled_confidence", "sampled_order")  # samplers that draw their order
SCORED_ORDERS = ("entropy", "topk_margin")
SEED = dataclasses.replace(whole(0), nothing=())  # of draws; "none" is refused, since a seed is needed


@dataclasses.dataclass(frozen=True)
class EstimatorArguments(Arguments):
    """Base of the arguments of an estimator, which its constructor takes. An estimator without any takes none."""

    def describe(self) -> dict[str, object]:
        """The entries of the spec: the arguments that define a number and have a value."""
        spec: dict[str, object] = {}
        for name, arg in declared(self).items():
            value = getattr(self, name)
            if arg.identity and value is not None:
                spec[name] = _in_spec(value)
        return spec


def _in_spec(value: Any) -> object:
    """A value as it stands in a spec: a truth value as a user types it, a number in its fewest digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return fingerprint.number(value)
    return value


@dataclasses.dataclass(frozen=True)
class ElboArguments(EstimatorArguments):
    """Arguments of the Monte Carlo ELBO."""

    mc_samples: int = argument(COUNT, 128, "draws of a window")
    elbo_form: str = argument(choice("auto", *ELBO_FORMS), "auto", "how masked positions are drawn and weighted")
    elbo_block: int | str | None = argument(
        BLOCK, "auto", "positions that are drawn together; `auto`: the trained block, else all", none=None
    )
    elbo_eps: float = argument(
        number("a share from 0 (nothing left out) to below 1", lambda x: 0 <= x < 1),
        0.0,
        "leave out noise levels below this, as the authors' evaluations do; the value is then no bound",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elbo_eps and self.elbo_form == "count":
            raise DuelError(
                "'elbo_eps' is the least ratio, of elbo_form=ratio, and counts have none: add elbo_form=ratio, or "
                "leave elbo_eps out."
            )

    def describe(self) -> dict[str, object]:
        # these two stand in the spec even as none and 0.0
        return {**super().describe(), "elbo_block": self.elbo_block, "elbo_eps": self.elbo_eps}


def _steps(value: Any) -> float:
    """A number of steps, or inf."""
    return math.inf if str(value).lower() in ("inf", "infinity") else COUNT.convert(value)


@dataclasses.dataclass(frozen=True)
class NoisedElboArguments(EstimatorArguments):
    """Arguments of the bound under random tokens."""

    mc_samples: int = argument(COUNT, 128, "draws of a window")
    steps: float | None = argument(
        ArgumentType("a number of steps, or inf", _steps),
        None,
        "steps of the ancestral sampler; `inf`: the limit",
        unset="the network's: 48 for DiffusionGemma, else `inf`",
    )
    prediction: str = argument(
        choice("auto", "denoiser", "plugin"),
        "auto",
        "the network's output is the `denoiser`'s distribution of the clean token, or a `plugin` for the clean token "
        "in the posterior. `auto`: as in training",
    )
    self_conditioning: str = argument(
        choice("auto", "none", "twice", "chain"),
        "auto",
        "input of the network's own output: `none`; `twice`, for the same noisy text; `chain`, of the step before. "
        "`auto`: as in training",
        none="none",
    )


def _temperatures(value: Any) -> tuple[float, float, int]:
    """The first and the last temperature, and the number of steps between them, of a text such as 0.8:0.4:48."""
    first, last, steps = value if isinstance(value, tuple) else str(value).split(":")
    return POSITIVE.convert(first), POSITIVE.convert(last), COUNT.convert(steps)


@dataclasses.dataclass(frozen=True)
class CommitOnceArguments(EstimatorArguments):
    """Arguments of samplers that commit tokens once, for networks whose noise is random tokens."""

    noise_seed: int | None = argument(
        whole(0), None, "seed of the noise that masked positions show, if it is random tokens", unset="0"
    )
    prediction: str = argument(
        choice("auto", "denoiser", "leave_one_out"),
        "auto",
        "DiffusionGemma: the noise token that a position shows may be its clean one (`denoiser`, as in its samplers), "
        "or is known to be noise (`leave_one_out`)",
    )
    self_conditioning: str = argument(
        choice("auto", "none", "chain"),
        "auto",
        "input of the network's own output at the step before (`chain`), or `none`. `auto`: as in training",
        none="none",
    )
    temperatures: tuple[float, float, int] | None = argument(
        ArgumentType("FIRST:LAST:STEPS, such as 0.8:0.4:48", _temperatures),
        None,
        "DiffusionGemma: temperature LAST + (FIRST - LAST) (STEPS - i) / STEPS at step i, also of its own output",
        unset="1",
    )


@dataclasses.dataclass(frozen=True)
class SeedsArguments(CommitOnceArguments):
    """Arguments of the mean over noise seeds."""

    noise_seeds: int = argument(whole(2, "a number of seeds"), 8, "noise seeds, from `noise_seed` on")


@dataclasses.dataclass(frozen=True)
class TwoPhaseArguments(EstimatorArguments):
    """Arguments of the two-phase estimator."""

    sample: float = argument(
        number("a share of blocks above 0, at most 1", lambda x: 0 < x <= 1),
        0.05,
        "share of blocks that are also scored without the cache",
    )


def _rules(value: Any) -> tuple[rules.Rule, ...]:
    """Rules, or their texts, or one text such as greedy+margin:k=2; each rule is state-only."""
    given = value if isinstance(value, list | tuple) else str(value).split("+")
    parsed = []
    for each in given:
        rule = each if isinstance(each, rules.Rule) else rules.parse(str(each))
        if not rule.state_only:
            raise DuelError(
                f"lattice_rules takes rules that read the revealed tokens alone; {rule} has a memory, or its class "
                "does not declare `state_only = True`. Score it in another run: estimator=duel,rule=..."
            )
        parsed.append(rule)
    return tuple(parsed)


@dataclasses.dataclass(frozen=True)
class LatticeArguments(EstimatorArguments):
    """Arguments of the estimators over all orders."""

    lattice_rules: tuple[rules.Rule, ...] | None = argument(
        ArgumentType("state-only rules, such as greedy+margin:k=2", _rules),
        None,
        "rules whose value the lattice also gives, such as `greedy+margin`",
        none=(),
        unset="the rule, if it is state-only",
        identity=False,
    )


@dataclasses.dataclass(frozen=True)
class ConfidenceArguments(EstimatorArguments):
    """Arguments of samplers that select after sampling."""

    n: int | None = argument(COUNT, None, "candidates kept at a step; 1 if `steps` is not given either")
    steps: int | None = argument(COUNT, None, "steps of a block, instead of `n` and `tau`")
    schedule: str = argument(choice("even", "dream"), "even", "how `steps` spread over a block, `even` or as Dream's")
    tau: float | None = argument(PROBABILITY, None, "candidates above this probability are kept")
    confidence: str = argument(
        choice("untempered", "tempered"),
        "untempered",
        "the probability of a candidate before or after the temperature decides",
    )
    strict: bool = argument(TRUTH, True, "candidates at exactly `tau` are not kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "tau"):
            value = getattr(self, name)
            if self.steps is not None and value is not None:
                raise DuelError(f"'steps' ({self.steps}) and '{name}' ({value}) exclude each other; leave one out.")
        if self.steps is None and self.schedule == "dream":
            raise DuelError("schedule=dream spreads a block over a number of steps; pass steps=<number>, too.")
        if self.steps is None and self.n is None:
            object.__setattr__(self, "n", 1)

    def describe(self) -> dict[str, object]:
        spec = super().describe()
        if self.steps is None:
            del spec["schedule"]
        if self.tau is None:
            del spec["strict"]
        return spec


def _order(value: Any) -> str:
    """The way in which positions are drawn, from the value of a model arg."""
    if value == "maskgit_plus":
        raise DuelError(
            "alg=maskgit_plus scores a position by its candidate: without alg_temp use estimator=sampled_confidence,"
            "confidence=tempered,schedule=dream,steps=<number>; with alg_temp it has no closed form."
        )
    return str(value)


@dataclasses.dataclass(frozen=True)
class OrderArguments(EstimatorArguments):
    """Arguments of samplers that draw positions."""

    alg: str = argument(
        ArgumentType("how positions are drawn", _order, ("origin", *SCORED_ORDERS, "random")),
        "origin",
        "how positions are drawn",
    )
    steps: int = argument(COUNT, 512, "steps of a block")  # Dream's own default
    alg_temp: float | None = argument(
        POSITIVE,
        None,
        "temperature of the positions' scores, with `alg=entropy` or `topk_margin`",
        only_with=("alg", *SCORED_ORDERS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alg in SCORED_ORDERS and self.alg_temp is None:
            raise DuelError(
                f"alg={self.alg} draws positions at a temperature, e.g. alg_temp=0.2. Without one, a rule chooses "
                f"them: estimator=duel,rule=dream:alg={self.alg}:steps=<number>."
            )


def check_block(name: str, block: int | None, only: bool = False) -> None:
    """Raise DuelError for a block that is too large for estimator `name`, which evaluates all sets of its positions.

    `only`: the network has no other block.
    """
    if block is not None and block <= LATTICE_BLOCK:
        return
    cost = ""
    in_force = "the whole target"
    if block is not None:
        cost = f", here {2**block - 1:,}"
        in_force = str(block)
    instead = "Use block=4 (15 rows), or 8 (255 rows)."
    if only:
        instead = "This network has only this block."
    if name in FOLLOWED:
        instead += " The joint probability of one text and its order needs no such sum: Duel.follow gives it."
    raise DuelError(
        f"estimator={name} evaluates a network row for each set of masked positions of a block: 2^m - 1 for m "
        f"positions{cost}. It takes at most {LATTICE_BLOCK} positions ({2**LATTICE_BLOCK - 1:,} rows); the block in "
        f"force is {in_force}. {instead}"
    )
