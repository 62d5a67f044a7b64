"""The arguments of the estimators over sets of positions, and which of them go together. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_duel.arguments import COUNT, POSITIVE, PROBABILITY, TRUTH, Argument, Kind, choice
from lm_eval_duel.errors import DuelError

LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets
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


CONFIDENCE = {
    "n": Argument(COUNT, None, "draws that are kept at a step; 1 if `steps` is not given either"),
    "steps": Argument(COUNT, None, "steps of a block, instead of `n` and `tau`"),
    "schedule": Argument(choice("even", "dream"), "even", "how `steps` spread over a block, `even` or as Dream's"),
    "tau": Argument(PROBABILITY, None, "draws of at least this probability are kept"),
    "confidence": Argument(
        choice("untempered", "tempered"), "untempered", "which probability of a draw counts, if there is a temperature"
    ),
    "strict": Argument(TRUTH, True, "draws above `tau` are kept, not those at it"),
}  # of sampled_confidence
ORDER = {
    "alg": Argument(
        Kind("how positions are drawn", _order, ("origin", *SCORED_ORDERS, "random")),
        "origin",
        "how positions are drawn",
    ),
    "steps": Argument(COUNT, 512, "steps of a block"),  # Dream's own default
    "alg_temp": Argument(POSITIVE, None, "temperature of the positions' scores, with `alg=entropy` or `topk_margin`"),
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
    return read


def check_block(name: str, block: int | None, only: bool = False) -> None:
    """Raise DuelError for a block that is too large for estimator `name`, which evaluates all sets of its positions.

    `only`: the network has no other block.
    """
    if block is None or block > LATTICE_BLOCK:
        raise DuelError(
            f"estimator={name} evaluates all revealed sets of a block, at most {LATTICE_BLOCK} positions (4,095 "
            f"sets); the block in force is {'the whole target' if block is None else block}. "
            + ("This network has only this block." if only else "Use block=4, or 8 at 8.5 times the cost.")
        )
