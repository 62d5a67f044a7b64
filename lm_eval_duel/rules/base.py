"""The base classes of rules, and the functions that rules share.

Shapes: R lanes, W block width, C masked positions, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import PROBABILITY, Argument, Arguments, argument, declaration, required, whole
from lm_eval_duel.core.decision import Decision
from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

# class attributes: what a rule reads, and whether it may wait
READS = ("fixed", "state_only", "reads_step", "may_pick_none")
# the L1 norm of d(log-odds)/d(logits), and of d(log P1 - log P2)/d(logits)
LOG_ODDS_SLOPE = 2.0


@dataclasses.dataclass(frozen=True)
class Rule(Arguments):
    """The base class of unmasking rules. Subclasses are frozen dataclasses whose fields are the rule's parameters.

    `rule(predictions, lanes)` returns a `Decision`. It must be a function of a lane's own predictions, masked
    positions, step and memory. docs/adding.md shows how to write one.
    """

    name: ClassVar[str] = ""  # as typed
    adaptive: ClassVar[bool] = False  # the number of steps depends on the text
    adaptive_with: ClassVar[str] = ""  # a parameter with which the number depends on the text, as `key=value`
    # parameters that may set its speed; rules that differ in nothing else are one family
    speed: ClassVar[tuple[str, ...]] = ("k", "mu", "gamma")

    # What the rule reads. A subclass that overrides `__call__` declares these again.
    # fixed: no predictions, which are None if all steps are evaluated at once
    fixed: ClassVar[bool] = False
    # state_only: neither memory nor `step`, so that the pick depends on the revealed tokens alone
    state_only: ClassVar[bool] = False
    reads_step: ClassVar[bool] = False  # the number of steps taken in the block
    may_pick_none: ClassVar[bool] = False  # may pick nothing while its `step` or memory moves on

    dense_memory: ClassVar[bool] = False  # keeps (R, W, V) between steps, which the budget counts

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Set class attributes, as in `class MyRule(Rule, name="my_rule", state_only=True)`."""
        super().__init_subclass__()
        if "__call__" in vars(cls):  # what another `__call__` reads is not inherited
            attributes = {**dict.fromkeys(READS, False), **attributes}
        for attribute, value in attributes.items():
            is_property = isinstance(getattr(cls, attribute), property)  # of `Around`, which is kept
            if attribute not in vars(cls) and not is_property:  # the class body has precedence
                setattr(cls, attribute, value)

    @property
    def _owner(self) -> str:
        return f" of rule '{self.name}'"

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        """Pick the masked positions of each lane to reveal next."""
        raise NotImplementedError

    @property
    def spans_blocks(self) -> bool:
        """True if the memory outlives a block, so that the blocks of a window are one chain."""
        return False

    @property
    def built_in(self) -> bool:
        """True for a rule of this package, False for a user's own."""
        return type(self).__module__.startswith("lm_eval_duel.")

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the rule reads, for the fingerprint."""
        return ()

    def describe(self) -> dict[str, str]:
        """The entries of the spec: its text, and the hashes of the files that it reads and of a user's own code."""
        entries = {"rule": str(self)}
        if self.files:
            entries["rule_files"] = fingerprint.hash_contents(self.files)
        if not self.built_in:
            entries["rule_code"] = fingerprint.code_of(type(self))
        return entries

    def with_tokenizer(self, tokenizer: Any) -> Rule:
        """The rule with the ids that it takes from a tokenizer, if any; raises DuelError for missing ids."""
        return self

    def after_first(self) -> Rule:
        """The rule that follows once `seed_first` has revealed a block's first position alone."""
        return self

    def check_network(self, denoiser: Any) -> None:
        """Raise DuelError for a network that this rule cannot follow."""

    def __str__(self) -> str:
        name = self.name
        if not self.built_in:
            name = f"{type(self).__module__}:{type(self).__qualname__}"
        parts = [name]
        for field in dataclasses.fields(self):
            declared = declaration(field)
            value = getattr(self, field.name)
            if declared.optional and value == field.default:
                continue
            parts.append(f"{field.name}={_canonical(declared, value)}")
        return ":".join(parts)


@dataclasses.dataclass(frozen=True)
class Counted(Rule, speed=("k",)):
    """The base class of rules that reveal k positions at every step, or all that are left in the block."""

    k: int = argument(whole(1, "a number of positions"), 1, "positions revealed at each step")


@dataclasses.dataclass(frozen=True)
class Thresholded(Rule, adaptive=True, speed=("mu",)):
    """The base class of rules with a probability `mu` that decides how many positions they reveal at a step."""

    mu: float = required(PROBABILITY, "the least P1 at which positions are revealed", 0.9)


def in_memory(rule: Rule) -> Iterator[str]:
    """The parameters of a rule that hold a module or a tensor, which the text of a rule cannot hold."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
        if "torch" in packages:
            yield field.name
        elif isinstance(value, Rule):
            yield from in_memory(value)


def _canonical(declared: Argument, value: Any) -> Any:
    """A parameter with its declared type, so that equal values have one text: 0.5 for torch.tensor(0.5)."""
    with contextlib.suppress(DuelError, TypeError, ValueError, OverflowError):  # a value of another type
        return value if value is None else declared.kind.convert(value)
    return value


def file_version(path: str) -> tuple[int, int] | None:
    """A key that changes when a file is written again; None if the file cannot be read.

    A rule may cache what it has read of a file under this key.
    """
    try:
        entry = os.stat(path)
    except (OSError, ValueError):
        return None
    return entry.st_mtime_ns, entry.st_size


def log_odds(p: float) -> float:
    """log p - log(1 - p)."""
    if p <= 0:
        return -math.inf
    if p >= 1:
        return math.inf
    return math.log(p) - math.log1p(-p)


def rank(key: torch.Tensor) -> torch.Tensor:
    """The rank of each position, from 0, in ascending order of (key, position), (R, W)."""
    import torch

    order = key.sort(dim=1, stable=True).indices
    places = torch.arange(key.shape[1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def best(
    predictions: Predictions,
    lanes: Lanes,
    score: torch.Tensor,
    k: int | torch.Tensor,
    slope: torch.Tensor | float = LOG_ODDS_SLOPE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k masked positions with the largest score (R, W) bool, and the decision's margin (R,).

    `k` is a number, or one for each lane (R, 1). The margin is the gap between the worst position picked and the best
    one left, over the score's steepest slope in logits at those two. An all-mask start is an exact tie by definition,
    so its order is not a near tie.
    """
    import torch

    masked = lanes.masked
    lowest = torch.finfo(score.dtype).min
    key = torch.where(masked, score.clamp(min=lowest), -math.inf)  # (R, W)
    pick = masked & (rank(-key) < k)  # (R, W)
    worst, worst_at = torch.where(pick, key, math.inf).min(1)  # (R,) of those picked
    next_best, next_at = torch.where(masked & ~pick, key, -math.inf).max(1)  # (R,) of those left
    gap = worst - next_best
    if isinstance(slope, float):
        gap = gap / slope
    else:
        rows = torch.arange(len(gap), device=gap.device)  # (R,)
        slope_of_worst = slope[rows, worst_at]  # (R,)
        slope_of_next = slope[rows, next_at].nan_to_num(nan=0.0)  # (R,) NaN if none is left
        steepest = slope_of_worst.maximum(slope_of_next)
        gap = (gap / steepest).nan_to_num(nan=0.0, posinf=math.inf)
    return pick, torch.where(predictions.all_mask, math.inf, gap).double()


def sure_or_best(
    predictions: Predictions,
    lanes: Lanes,
    sure: torch.Tensor,
    distance: torch.Tensor,
    score: torch.Tensor | None = None,
    slope: torch.Tensor | float = LOG_ODDS_SLOPE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions `sure` (R, W), or the best one of a lane that has none; and the decision's margin (R,).

    `distance` (R,): how far the nearest position is from becoming, or ceasing to be, sure. `score` (R, W) says which
    one is best; None: the confidence.
    """
    import torch

    if score is None:
        score = predictions.confidence
    single, gap = best(predictions, lanes, score, 1, slope)
    has_sure = sure.any(1)  # (R,)
    pick = torch.where(has_sure[:, None], sure, single)  # (R, W)
    # where the best one is picked, the pick changes if a position becomes sure, or if another one becomes the best
    return pick, torch.where(has_sure, distance, distance.minimum(gap))


def nearest(distance: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """The smallest absolute distance over masked positions, (R,)."""
    import torch

    return torch.where(masked, distance.abs(), math.inf).min(1).values.double()


def near_probability(confidence: torch.Tensor, masked: torch.Tensor, p: float) -> torch.Tensor:
    """The change of logits after which the P1 of some masked position crosses the probability p, (R,)."""
    return nearest(confidence - log_odds(p), masked) / LOG_ODDS_SLOPE


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) of log-probabilities (positions, V), in nats, (positions,)."""
    import torch

    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(1)
