"""What a rule is, and what rules share.

Shapes: R lanes, W block width, C hidden cells, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    import torch


INTEGERS = 2**63  # where those of tensors end
LOG_ODDS_SLOPE = 2.0  # the L1 norm of d(log-odds)/d(logits), and of d(log P1 - log P2)/d(logits)


class Decision(NamedTuple):
    """What a rule decided in one step.

    `lead`: how far each lane's decision is from changing, in units of logits (infinite for an order that does not
    depend on the network; None: not known). `memory`: tensors with leading (R, W), handed to the next step as
    `lanes.memory`: zeros in lanes at step 0, and an empty tuple where all lanes are at step 0.
    """

    pick: torch.Tensor  # (R, W) bool
    lead: torch.Tensor | None = None  # (R,)
    memory: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of all rules. Subclasses are frozen dataclasses whose fields are the rule's parameters."""

    name: ClassVar[str] = ""
    dense_memory: ClassVar[bool] = False  # keeps (R, W, V) between steps: the planner counts it
    fixed: ClassVar[bool] = False  # reads no predictions (it may get None): with the truth known all steps go at once

    state_only: ClassVar[bool] = False  # no memory and no look at `step`: a pick depends on what is revealed alone

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that decides anew says anew what it reads."""
        super().__init_subclass__(**options)
        if "__call__" in vars(cls):
            for said in ("fixed", "state_only"):
                if said not in vars(cls):
                    setattr(cls, said, False)

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        raise NotImplementedError

    def __str__(self) -> str:
        values = (f"{field.name}={_plain(field, getattr(self, field.name))}" for field in dataclasses.fields(self))
        own = type(self).__module__.startswith(__package__)
        return ":".join([self.name if own else f"{type(self).__module__}:{type(self).__qualname__}", *values])


@dataclasses.dataclass(frozen=True)
class Counted(Rule):
    """A rule that picks k positions at every step, or what is left in the block."""

    k: int = 1

    def __post_init__(self) -> None:
        check(self, "k", 1 <= self.k < INTEGERS and self.k == int(self.k), "a count of positions, at least 1")


def kind_of(field: dataclasses.Field) -> str:
    """The type of a rule's parameter, or of what it may be besides None: int, float, bool or str."""
    declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return next((kind for kind in ("int", "float", "bool") if re.search(rf"\b{kind}\b", declared)), "str")


def _plain(field: dataclasses.Field, value: Any) -> Any:
    """A parameter as a number of Python of its type: equal ones have one text, whatever they were given as."""
    kind = {"int": int, "float": float, "bool": bool}.get(kind_of(field))
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # None, or what the rule makes of another type
        if kind is not None and not isinstance(value, str) and kind(value) == value:
            return kind(value)
    return value


def certain(pick: torch.Tensor) -> Decision:
    """The decision for a pick (R, W) that does not depend on the network: nothing can change it."""
    import torch

    return Decision(pick, torch.full((len(pick),), math.inf, dtype=torch.float64, device=pick.device))


def check(rule: Rule, name: str, good: bool, what: str) -> None:
    if not good:
        raise DuelError(f"'{name}' of rule '{rule.name}' is {what}; got {getattr(rule, name)}.")


def log_odds(p: float) -> float:
    return math.inf if p >= 1 else -math.inf if p <= 0 else math.log(p) - math.log1p(-p)


def rank(key: torch.Tensor) -> torch.Tensor:
    """The place of each cell in ascending (key, position), (R, W)."""
    import torch

    order = key.sort(dim=1, stable=True).indices
    places = torch.arange(key.shape[1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def best(
    predictions: Any, lanes: Any, score: torch.Tensor, k: int, slope: torch.Tensor | float = LOG_ODDS_SLOPE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k hidden cells with the largest score (R, W) bool, and the lead (R,).

    The lead is the gap between the worst picked and the best left, over the score's steepest slope in logits at those
    two. A all_mask start is an exact tie by definition, so the order inside it is no close pick.
    """
    import torch

    hidden = lanes.hidden
    lowest = torch.finfo(score.dtype).min
    key = torch.where(hidden, score.clamp(min=lowest), -math.inf)  # (R, W)
    pick = hidden & (rank(-key) < k)  # (R, W)
    worst, worst_at = torch.where(pick, key, math.inf).min(1)  # (R,)
    best, best_at = torch.where(hidden & ~pick, key, -math.inf).max(1)  # (R,)
    gap = worst - best
    if isinstance(slope, float):
        gap = gap / slope
    else:
        rows = torch.arange(len(gap), device=gap.device)
        gap = gap / slope[rows, worst_at].maximum(slope[rows, best_at].nan_to_num(nan=0.0))
        gap = gap.nan_to_num(nan=0.0, posinf=math.inf)
    return pick, torch.where(predictions.all_mask, math.inf, gap).double()


def nearest(distance: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The smallest absolute distance over hidden cells, (R,)."""
    import torch

    return torch.where(hidden, distance.abs(), math.inf).min(1).values.double()


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) of log-probabilities (cells, V), in nats, (cells,)."""
    import torch

    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(1)
