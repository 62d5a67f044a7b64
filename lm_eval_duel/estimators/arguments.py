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
    number,
    whole,
)
from lm_eval_duel.errors import DuelError

ELBO_FORMS = ("count", "ratio", "score_entropy")
LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets
BEAM_BLOCK = 48  # the most positions of a block of which a beam evaluates some sets
FIRST_BEAM, LARGEST_BEAM = 32, 1024  # sets of each size: the first K, and the largest one if none is given
TOLERANCE = 0.05  # nats, of a beam of a given size
REPETITIONS = 8  # the fewest for a standard error
SCORED_ORDERS = ("entropy", "topk_margin")


@dataclasses.dataclass(frozen=True)
class ElboArguments(Arguments):
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
            raise DuelError("'elbo_eps' is the least ratio, of elbo_form=ratio; counts have none. Leave one out.")


def _steps(value: Any) -> float:
    """A number of steps, or inf."""
    return math.inf if str(value).lower() in ("inf", "infinity") else COUNT.convert(value)


@dataclasses.dataclass(frozen=True)
class NoisedElboArguments(Arguments):
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


@dataclasses.dataclass(frozen=True)
class TwoPhaseArguments(Arguments):
    """Arguments of the two-phase estimator."""

    sample: float = argument(
        number("a share of blocks above 0, at most 1", lambda x: 0 < x <= 1),
        0.05,
        "share of blocks that are also scored without the cache",
    )


def _rules(value: Any) -> tuple[rules.Rule, ...]:
    """Rules of a text such as greedy+margin:k=2, each of which is state-only."""
    parsed = value if isinstance(value, tuple) else tuple(rules.parse(text) for text in str(value).split("+"))
    for rule in parsed:
        if not rule.state_only:
            raise DuelError(
                f"lattice_rules takes rules that read the revealed tokens alone; {rule} has a memory, or its class "
                "does not declare `state_only = True`. Score it in another run: estimator=duel,rule=..."
            )
    return parsed


@dataclasses.dataclass(frozen=True)
class LatticeArguments(Arguments):
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
class BeamArguments(Arguments):
    """The sets of each size to evaluate: without `beam` and `tolerance`, all of them."""

    beam: int | None = argument(
        whole(2 * REPETITIONS, "a number of sets"),
        None,
        "sets of each size that are evaluated, instead of all; an estimate, or a lower bound",
    )
    tolerance: float | None = argument(
        POSITIVE,
        None,
        "nats of error in a block: the sets double until it is reached, up to `beam` (1024)",
    )
    repetitions: int = argument(
        whole(REPETITIONS, "a number of repetitions"),
        REPETITIONS,
        "independent sums of a beam, whose mean is its estimate",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        repetitions = self.repetitions
        if (most := self.beam or LARGEST_BEAM) < 2 * repetitions:
            raise DuelError(f"A beam has at least two sets for each repetition; got {repetitions=} and {most} sets.")
        if self.all_sets and repetitions != REPETITIONS:
            raise DuelError(f"'repetitions' (got {repetitions}) belong to a beam; pass beam= or tolerance=, too.")

    @property
    def all_sets(self) -> bool:
        """True if every set is evaluated, so that the sum is exact."""
        return self.beam is None and self.tolerance is None

    @property
    def sums(self) -> int:
        """The number of sums: the bound, and each repetition."""
        return 1 if self.all_sets else 1 + self.repetitions

    @property
    def most(self) -> int:
        """The largest number of sets of a size."""
        return self.sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of sets of each beam in order, which doubles from beam to beam.

        Without a tolerance to reach, there are three beams, the fewest for an error.
        """
        if self.all_sets:
            return (1 << LATTICE_BLOCK,)
        most = self.beam or LARGEST_BEAM
        least, count = (0, 3) if self.tolerance is None else (FIRST_BEAM, most.bit_length())
        halved = [most >> n for n in range(count)]
        return tuple(size for size in reversed(halved) if size == most or size >= max(2 * self.repetitions, least))

    def describe(self, seed: int) -> dict[str, object]:
        """The beam's entries of the spec."""
        if self.all_sets:
            return {}
        tolerance = {} if self.tolerance is None else {"tolerance": fingerprint.number(self.tolerance)}
        return {"beam": self.most, **tolerance, "repetitions": self.repetitions, "draw_seed": seed}


@dataclasses.dataclass(frozen=True)
class ConfidenceArguments(BeamArguments):
    """Arguments of samplers that select after sampling."""

    n: int | None = argument(COUNT, None, "draws kept at a step; 1 if `steps` is not given either")
    steps: int | None = argument(COUNT, None, "steps of a block, instead of `n` and `tau`")
    schedule: str = argument(choice("even", "dream"), "even", "how `steps` spread over a block, `even` or as Dream's")
    tau: float | None = argument(PROBABILITY, None, "draws above this probability are kept")
    confidence: str = argument(
        choice("untempered", "tempered"),
        "untempered",
        "the probability of a draw before or after the temperature decides",
    )
    strict: bool = argument(TRUTH, True, "draws at exactly `tau` are not kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "tau"):
            value = getattr(self, name)
            if self.steps is not None and value is not None:
                raise DuelError(f"'steps' ({self.steps}) and '{name}' ({value}) exclude each other; leave one out.")
        if self.steps is None and self.schedule == "dream":
            raise DuelError("schedule=dream spreads a block over a number of steps; pass steps=<number>, too.")


def _order(value: Any) -> str:
    """The way in which positions are drawn, from the value of a model arg."""
    if value == "maskgit_plus":
        raise DuelError(
            "alg=maskgit_plus scores a position by its draw: without alg_temp use estimator=sampled_confidence,"
            "confidence=tempered,schedule=dream,steps=<number>; with alg_temp it has no closed form."
        )
    return str(value)


@dataclasses.dataclass(frozen=True)
class OrderArguments(BeamArguments):
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


def check_block(name: str, own: Arguments, block: int | None, only: bool = False) -> None:
    """Raise DuelError for a block that is too large for estimator `name`, which evaluates sets of its positions.

    `own`: its arguments; `only`: the network has no other block.
    """
    some = isinstance(own, BeamArguments) and not own.all_sets
    most = BEAM_BLOCK if some else LATTICE_BLOCK
    if block is not None and block <= most:
        return
    sets = "some revealed sets" if some else f"all {2**most - 1:,} sets"
    less = "This network has only this block." if only else "Use block=4, or 8 at 8.5 times the cost."
    if isinstance(own, BeamArguments) and not some:
        less += f" tolerance=0.05 evaluates some of the sets, of blocks of at most {BEAM_BLOCK} positions."
    raise DuelError(
        f"estimator={name} evaluates {sets} of a block, at most {most} positions; "
        f"the block in force is {'the whole target' if block is None else block}. {less}"
    )
