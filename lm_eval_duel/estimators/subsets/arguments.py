"""What the estimators over sets of positions take, checked without torch."""

from __future__ import annotations

import math
from typing import Any

from lm_eval_duel.errors import DuelError, unknown

LATTICE_BLOCK = 12  # the most positions of a block whose sets are all evaluated: 4,095 sets
CONFIDENCES = ("untempered", "tempered")  # which probability of a drawn token decides whether it is kept
SCHEDULES = ("even", "dream")  # how many draws are kept at each of `steps` steps
ORDERS = ("origin", "entropy", "topk_margin", "random")  # how positions are drawn
SCORED_ORDERS = ("entropy", "topk_margin")
ORDER_STEPS = 512  # Dream's own default


def check_step_counts(n: int | None, tau: float | None, steps: int | None, schedule: str) -> None:
    """Raise DuelError unless n, tau and steps go together."""
    if schedule not in SCHEDULES:
        raise unknown("value of schedule", schedule, SCHEDULES)
    for name, value in (("n", n), ("tau", tau)):
        if steps is not None and value is not None:
            raise DuelError(
                f"'steps' (got {steps}) says how many draws are kept at each step, and so does '{name}' (got {value}); "
                "leave one out."
            )
    if steps is None and schedule != SCHEDULES[0]:
        raise DuelError(f"schedule={schedule} spreads a block over a number of steps; pass steps=<number>, too.")


def read_order(value: Any) -> str:
    """How positions are drawn, from the value of a model arg."""
    if value == "maskgit_plus":
        raise DuelError(
            "alg=maskgit_plus scores a position by the token drawn there, so the order depends on every draw. Without "
            "alg_temp its likelihood is that of estimator=sampled_confidence,confidence=tempered,schedule=dream,"
            "steps=<number>; with alg_temp it has no closed form."
        )
    return str(value)


def check_order(alg: str, alg_temp: float | None) -> None:
    """Raise DuelError unless `alg` is one of `ORDERS`, and has a temperature if and only if it needs one."""
    if read_order(alg) not in ORDERS:
        raise unknown("value of alg", alg, ORDERS)
    by_score = alg in SCORED_ORDERS
    if by_score and alg_temp is None:
        raise DuelError(
            f"alg={alg} draws positions at a temperature, e.g. alg_temp=0.2. Without one, a rule chooses them: "
            f"estimator=duel,rule=dream:alg={alg}:steps=<number>."
        )
    if alg_temp is not None and not by_score:
        raise DuelError(f"'alg_temp' (got {alg_temp:g}) is read with alg={' and alg='.join(SCORED_ORDERS)} only.")
    if alg_temp is not None and not 0 < alg_temp < math.inf:
        raise DuelError(f"'alg_temp' is a number above 0; got {alg_temp:g}.")
