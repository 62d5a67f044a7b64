"""The arguments of the estimators over sets of positions, and which of them go together. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_duel.arguments import COUNT, POSITIVE, PROBABILITY, TRUTH, Argument, Kind, choice, whole
from lm_eval_duel.errors import DuelError

LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets
BEAM_BLOCK = 48  # the most positions of a block of which a beam evaluates some sets
FIRST_BEAM, LARGEST_BEAM = 32, 1024  # sets of each size: the first K, and the largest one if none is given
TOLERANCE = 0.05  # nats, of a beam of a given size
REPETITIONS = 8  # the fewest for two standard errors
SCORED_ORDERS = ("entropy", "topk_margin")


def _order(value: Any) -> str:
    """How positions are drawn, from the value of a model arg."""
    if value == "maskgit_plus":
        raise DuelError(
            "alg=maskgit_plus scores a position by the token drawn there, so the order depends on every draw. Without "
            "alg_temp its likelihood is that of estimator=sampled_confidence,confidence=tempered,schedule=dream,"
            "steps=<number>; with alg_temp it has no closed form."
        )
    return str(value)


BEAM = {
    "beam": Argument(
        whole(2 * REPETITIONS, f"a number of sets, at least {2 * REPETITIONS}"),
        None,
        "sets of a block that are evaluated, of each size, instead of all; an estimate, or a bound",
    ),
    "tolerance": Argument(
        POSITIVE, None, "nats for a block: the sets double, up to `beam` (1024), until it is reached"
    ),
    "repetitions": Argument(
        whole(REPETITIONS, f"a number of repetitions, at least {REPETITIONS}"),
        REPETITIONS,
        "independent sums of a beam: the first half decides whether a block has converged, the others are its estimate",
    ),
}
CONFIDENCE = {
    "n": Argument(COUNT, None, "draws that are kept at a step; 1 if `steps` is not given either"),
    "steps": Argument(COUNT, None, "steps of a block, instead of `n` and `tau`"),
    "schedule": Argument(choice("even", "dream"), "even", "how `steps` spread over a block, `even` or as Dream's"),
    "tau": Argument(PROBABILITY, None, "draws of at least this probability are kept"),
    "confidence": Argument(
        choice("untempered", "tempered"), "untempered", "which probability of a draw counts, if there is a temperature"
    ),
    "strict": Argument(TRUTH, True, "draws above `tau` are kept, not those at it"),
    **BEAM,
}  # of sampled_confidence
ORDER = {
    "alg": Argument(
        Kind("how positions are drawn", _order, ("origin", *SCORED_ORDERS, "random")),
        "origin",
        "how positions are drawn",
    ),
    "steps": Argument(COUNT, 512, "steps of a block"),  # Dream's own default
    "alg_temp": Argument(POSITIVE, None, "temperature of the positions' scores, with `alg=entropy` or `topk_margin`"),
    **BEAM,
}  # of sampled_order


def read_confidence(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of sampled_confidence; raises DuelError for wrong ones, or unless n, tau and steps go together."""
    read = {name: argument.read(name, values[name]) for name, argument in CONFIDENCE.items()}
    steps = read["steps"]
    for name in ("n", "tau"):
        if steps is not None and read[name] is not None:
            raise DuelError(
                f"'steps' (got {steps}) says how many draws are kept at each step, and so does '{name}' (got "
                f"{read[name]}); leave one out."
            )
    if steps is None and read["schedule"] == "dream":
        raise DuelError("schedule=dream spreads a block over a number of steps; pass steps=<number>, too.")
    read_beam(read)
    return read


def read_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of sampled_order; raises DuelError for wrong ones, or a temperature that is missing or not read."""
    read = {name: argument.read(name, values[name]) for name, argument in ORDER.items()}
    alg, by_score = read["alg"], read["alg"] in SCORED_ORDERS
    if by_score and read["alg_temp"] is None:
        raise DuelError(
            f"alg={alg} draws positions at a temperature, e.g. alg_temp=0.2. Without one, a rule chooses them: "
            f"estimator=duel,rule=dream:alg={alg}:steps=<number>."
        )
    if read["alg_temp"] is not None and not by_score:
        raise DuelError(
            f"'alg_temp' (got {read['alg_temp']:g}) is read with alg={' and alg='.join(SCORED_ORDERS)} only."
        )
    read_beam(read)
    return read


def read_beam(read: Mapping[str, Any]) -> bool:
    """Whether these arguments ask for a beam; raises DuelError for repetitions without one or of one set."""
    most, repetitions = read["beam"] or LARGEST_BEAM, read["repetitions"]
    if most < 2 * repetitions:
        raise DuelError(f"A beam has at least two sets for each repetition; got {repetitions=} and {most} sets.")
    if read["beam"] is None and read["tolerance"] is None:
        if repetitions != REPETITIONS:
            raise DuelError(f"'repetitions' (got {repetitions}) are those of a beam; pass beam= or tolerance=, too.")
        return False
    return True


def sizes(beam: int | None, tolerance: float | None) -> list[int]:
    """The first and the last number of sets of each size; one number if it does not grow; none without a beam."""
    if beam is None and tolerance is None:
        return []
    most = beam or LARGEST_BEAM
    return [most] if tolerance is None else sorted({min(FIRST_BEAM, most), most})


def check_block(name: str, block: int | None, only: bool = False, beam: bool | None = None) -> None:
    """Raise DuelError for a block that is too large for estimator `name`, which evaluates all sets of its positions.

    `only`: the network has no other block. `beam`: some of the sets are enough; None: the estimator has no beam.
    """
    most, which, sets = (
        (BEAM_BLOCK, "some", "") if beam else (LATTICE_BLOCK, "all", f" ({2**LATTICE_BLOCK - 1:,} sets)")
    )
    if block is None or block > most:
        less = "This network has only this block." if only else "Use block=4, or 8 at 8.5 times the cost."
        if beam is False:
            less += f" tolerance=0.05 evaluates some of the sets, of blocks of at most {BEAM_BLOCK} positions."
        raise DuelError(
            f"estimator={name} evaluates {which} revealed sets of a block, at most {most} positions{sets}; "
            f"the block in force is {'the whole target' if block is None else block}. {less}"
        )
