"""Unmasking rules: given the predictions at hidden positions, which positions to reveal next.

A rule is a frozen dataclass with `__call__(predictions, lanes) -> Decision`; it never sees the truth, so the pair
(denoiser, rule) defines one law for scoring and for sampling (the paper, Definition 3.1 and Table 1). Ties go to the
lowest position. The text form is `name[:param=value]...` and `parse(str(rule)) == rule`.

Shapes: R lanes, W block width, C hidden cells, V tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.hashing import hashed

if TYPE_CHECKING:
    import torch


class Decision(NamedTuple):
    """What a rule decided in one step.

    `lead`: how far each lane's decision is from changing, in units of logits (infinite for an order that does not
    depend on the network; None: not known). `memory`: tensors with leading (R, W), handed to the next step.
    """

    pick: torch.Tensor  # (R, W) bool
    lead: torch.Tensor | None = None  # (R,)
    memory: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Base of all rules. Subclasses are frozen dataclasses whose fields are the rule's parameters."""

    name: ClassVar[str] = ""
    state_only: ClassVar[bool] = True  # no memory, and does not read `step`
    dense_memory: ClassVar[bool] = False  # keeps (R, W, V) between steps: the planner counts it

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        raise NotImplementedError

    def __str__(self) -> str:
        values = (f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))
        return ":".join([self.name or f"{type(self).__module__}:{type(self).__qualname__}", *values])


# ---------------------------------------------------------------- orders that do not depend on the network


@dataclasses.dataclass(frozen=True)
class _FixedOrder(Rule):
    k: int = 1

    def __post_init__(self) -> None:
        _check(self, "k", self.k >= 1, "a count of positions, at least 1")

    def _decide(self, pick: torch.Tensor) -> Decision:
        import torch

        return Decision(pick, torch.full((len(pick),), math.inf, dtype=torch.float64, device=pick.device))


@dataclasses.dataclass(frozen=True)
class LeftToRight(_FixedOrder):
    """The k first hidden positions."""

    name: ClassVar[str] = "left_to_right"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return self._decide(lanes.hidden & (lanes.hidden.cumsum(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class RightToLeft(_FixedOrder):
    """The k last hidden positions."""

    name: ClassVar[str] = "right_to_left"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return self._decide(lanes.hidden & (lanes.hidden.flip(1).cumsum(1).flip(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class Random(_FixedOrder):
    """The k hidden positions with the smallest hash(seed, target index): random to the eye, deterministic, so exact."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        index = lanes.columns - lanes.origin[:, None]  # (R, W)
        key = torch.where(lanes.hidden, hashed(index, self.seed), torch.iinfo(torch.int64).max)  # (R, W)
        return self._decide(lanes.hidden & (_rank(key) < self.k))


# ---------------------------------------------------------------- the k best by one score


@dataclasses.dataclass(frozen=True)
class _Best(Rule):
    k: int = 1

    def __post_init__(self) -> None:
        _check(self, "k", self.k >= 1, "a count of positions, at least 1")


@dataclasses.dataclass(frozen=True)
class Greedy(_Best):
    """The k largest P1 (the top token's probability), compared as log-odds, which do not saturate."""

    name: ClassVar[str] = "greedy"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return Decision(*_best(predictions, lanes, predictions.confidence, self.k))


@dataclasses.dataclass(frozen=True)
class Margin(_Best):
    """The k largest P1 - P2, a difference of probabilities, as in the paper."""

    name: ClassVar[str] = "margin"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        margin = predictions.margin
        rest = predictions.confidence.neg().sigmoid()  # (R, W) 1 - P1
        p1 = predictions.confidence.sigmoid()  # (R, W)
        p2 = (p1 - margin).clamp(min=0)  # (R, W)
        # the L1 norm of d(P1 - P2)/d(logits): how fast the margin can move
        slope = p1 * (rest + p2) + p2 * (1 - p2 + p1) + margin * (rest - p2)
        return Decision(*_best(predictions, lanes, margin, self.k, slope))


@dataclasses.dataclass(frozen=True)
class LogMargin(_Best):
    """The k largest log P1 - log P2 (what the authors' code for 8B models runs under the name of margin)."""

    name: ClassVar[str] = "log_margin"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return Decision(*_best(predictions, lanes, predictions.log_margin, self.k))


@dataclasses.dataclass(frozen=True)
class Entropy(_Best):
    """The k smallest entropies."""

    name: ClassVar[str] = "entropy"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        entropy = predictions.entropy
        return Decision(*_best(predictions, lanes, -entropy, self.k, 2 * entropy))


# ---------------------------------------------------------------- as many as are safe


@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    """All with P1 >= mu, else the single most confident (Wu et al. 2025)."""

    name: ClassVar[str] = "threshold"
    mu: float

    def __post_init__(self) -> None:
        _check(self, "mu", 0 <= self.mu <= 1, "a probability from 0 to 1")

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        sure = lanes.hidden & (predictions.confidence >= _log_odds(self.mu))  # (R, W)
        distance = _nearest(predictions.confidence - _log_odds(self.mu), lanes.hidden)  # (R,)
        single, gap = _best(predictions, lanes, predictions.confidence, 1)
        some = sure.any(1)  # (R,)
        pick = torch.where(some[:, None], sure, single)  # (R, W)
        return Decision(pick, torch.where(some, distance, distance.minimum(gap)))


@dataclasses.dataclass(frozen=True)
class Klass(Rule):
    """P1 >= mu now and KL <= nu in each of the last `history` steps, else the single most confident (Kim et al. 2025).

    `kl=paper`: KL(previous, current); `kl=authors`: KL(current, previous), as in the authors' code. The first step of
    a block has no previous predictions and counts as unstable.
    """

    name: ClassVar[str] = "klass"
    state_only: ClassVar[bool] = False
    dense_memory: ClassVar[bool] = True
    mu: float
    nu: float
    history: int = 1
    kl: str = "paper"

    def __post_init__(self) -> None:
        _check(self, "mu", 0 <= self.mu <= 1, "a probability from 0 to 1")
        _check(self, "nu", self.nu >= 0, "a divergence in nats, at least 0")
        _check(self, "history", self.history >= 1, "a count of steps, at least 1")
        if self.kl not in ("paper", "authors"):
            raise unknown("value of kl for rule klass", self.kl, ["paper", "authors"])

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        hidden = lanes.hidden
        dense = predictions.dense()  # (C, V)
        current = dense.new_zeros(*hidden.shape, dense.shape[1])  # (R, W, V)
        current[hidden] = dense
        divergence = dense.new_full(hidden.shape, math.inf)  # (R, W)
        stable = torch.zeros_like(hidden, dtype=torch.int64)  # (R, W) steps in a row with KL <= nu
        if lanes.memory:
            previous, stable_before = lanes.memory
            seen = hidden & (lanes.step > 0)[:, None]  # (R, W)
            before, now = previous[seen], current[seen]  # (cells, V)
            divergence[seen] = _kl(before, now) if self.kl == "paper" else _kl(now, before)
            stable = torch.where(seen & (divergence <= self.nu), stable_before + 1, 0)
        ready = hidden & (predictions.confidence >= _log_odds(self.mu)) & (stable >= self.history)  # (R, W)
        single, gap = _best(predictions, lanes, predictions.confidence, 1)
        some = ready.any(1)  # (R,)
        distance = _nearest(predictions.confidence - _log_odds(self.mu), hidden)  # (R,)
        # near KL = nu a divergence moves by at most about 2 sqrt(2 KL) for each unit of logits
        slope = 2 * (2 * divergence.clamp(min=max(self.nu, 1e-12))).sqrt()
        near_nu = ((divergence - self.nu) / slope).nan_to_num(nan=math.inf, posinf=math.inf)
        distance = distance.minimum(_nearest(near_nu, hidden))
        pick = torch.where(some[:, None], ready, single)  # (R, W)
        return Decision(pick, torch.where(some, distance, distance.minimum(gap)), (current, stable))


@dataclasses.dataclass(frozen=True)
class EntropyBound(Rule):
    """Ascending (entropy, position) while the sum of the entropies before it is at most gamma (Ben-Hamu et al. 2025)."""

    name: ClassVar[str] = "entropy_bound"
    gamma: float

    def __post_init__(self) -> None:
        _check(self, "gamma", self.gamma >= 0, "a sum of entropies in nats, at least 0")

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        hidden = lanes.hidden
        entropy = torch.where(hidden, predictions.entropy.double(), math.inf)  # (R, W)
        ascending, order = entropy.sort(dim=1, stable=True)
        spent = ascending.cumsum(1).roll(1, 1)  # (R, W) the sum of those before
        spent[:, 0] = 0
        inside = hidden.gather(1, order) & (spent <= self.gamma)  # (R, W) a prefix
        pick = torch.zeros_like(hidden).scatter(1, order, inside)  # (R, W)

        count = inside.sum(1, keepdim=True)  # (R, 1)
        last, following = count - 1, count.clamp(max=hidden.shape[1] - 1)
        more = count[:, 0] < hidden.sum(1)  # (R,) some stay hidden
        below = (self.gamma - spent.gather(1, last)) / (2 * spent.gather(1, last))
        above = (spent.gather(1, following) - self.gamma) / (2 * spent.gather(1, following))
        gap = (ascending.gather(1, following) - ascending.gather(1, last)) / (2 * ascending.gather(1, following))
        gap = torch.where(predictions.blank[:, None], math.inf, gap)
        below = torch.where(count > 1, below, math.inf)[:, 0]  # the first is always taken
        rest = torch.where(more, above.minimum(gap)[:, 0], math.inf)
        return Decision(pick, below.minimum(rest).nan_to_num(nan=0.0, posinf=math.inf))


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        LeftToRight,
        RightToLeft,
        Random,
        Greedy,
        Margin,
        LogMargin,
        Threshold,
        Klass,
        EntropyBound,
        Entropy,
    )
}
ALIASES = {
    "l2r": "left_to_right",
    "confidence": "greedy",
    "prob_margin": "margin",
    "conf_threshold": "threshold",
    "eb": "entropy_bound",
}
PARAMETERS = frozenset(field.name for rule in RULES.values() for field in dataclasses.fields(rule))


# ---------------------------------------------------------------- text form


def parse(text: str) -> Rule:
    """The rule of a text such as `greedy:k=2` or `my_module:MyRule:alpha=0.5`; raises DuelError for a wrong one."""
    name, *rest = split(text)
    arguments = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise DuelError(f"'{part}' in rule '{text}' is not param=value; write e.g. greedy:k=2.")
        if key in arguments:
            raise DuelError(f"Rule '{text}' gives {key} twice.")
        arguments[key] = value
    return build(name, arguments)


def split(text: str) -> list[str]:
    """A rule's text as its name (`module:Name` kept together) and its `param=value` parts."""
    name, *rest = str(text).split(":")
    if rest and "=" not in rest[0]:
        name = f"{name}:{rest.pop(0)}"
    return [name, *rest]


def build(name: str, arguments: dict[str, Any]) -> Rule:
    """The rule `name` (or an alias, or `module:Name`) with its parameters; raises DuelError for wrong ones."""
    rule = find(name)
    fields = {field.name: field for field in dataclasses.fields(rule)}
    for key in arguments:
        if key not in fields:
            takes = ", ".join(fields) or "no arguments"
            raise DuelError(f"Rule '{name}' does not take '{key}'; it takes: {takes}.")
    missing = [
        key
        for key, field in fields.items()
        if key not in arguments and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DuelError(f"Rule '{name}' needs {' and '.join(missing)}, e.g. {name}:{':'.join(f'{m}=0.9' for m in missing)}.")
    return rule(**{key: _convert(name, fields[key], value) for key, value in arguments.items()})


def find(name: str) -> type[Rule]:
    """The class of a rule's name, alias, or `module:Name` of the user's own."""
    if ":" in name:
        return _custom(name)
    resolved = ALIASES.get(name, name)
    if resolved not in RULES:
        raise unknown("unmasking rule", name, [*RULES, *ALIASES])
    return RULES[resolved]


def _custom(name: str) -> type[Rule]:
    module_name, class_name = name.split(":")
    sys.path.insert(0, os.getcwd())  # the console script has its own folder there instead
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise DuelError(f"No module '{module_name}' for rule '{name}'; put it in this folder or on PYTHONPATH.") from None
    finally:
        sys.path.remove(os.getcwd())
    rule = getattr(module, class_name, None)
    if rule is None:
        raise unknown(f"class in module '{module_name}'", class_name, [n for n in vars(module) if not n.startswith("_")])
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise DuelError(f"'{name}' must be a subclass of lm_eval_duel.rules.Rule with @dataclass(frozen=True).")
    return rule


def _convert(name: str, field: dataclasses.Field, value: Any) -> Any:
    """A parameter's value from text or a number, by the field's type."""
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    try:
        if kind == "int":
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else int(float(value))
        if kind == "float":
            if isinstance(value, bool) or math.isnan(float(value)):
                raise ValueError
            return float(value)
        if kind == "bool":
            return {"true": True, "false": False}[str(value).lower()]
        return str(value)
    except (ValueError, KeyError, OverflowError, TypeError):
        raise DuelError(f"'{field.name}' of rule '{name}' must be {kind}, not '{value}'.") from None


def _check(rule: Rule, name: str, good: bool, what: str) -> None:
    if not good:
        raise DuelError(f"'{name}' of rule '{rule.name}' is {what}; got {getattr(rule, name)}.")


# ---------------------------------------------------------------- shared by the rules


def _log_odds(p: float) -> float:
    return math.inf if p >= 1 else -math.inf if p <= 0 else math.log(p) - math.log1p(-p)


def _rank(key: torch.Tensor) -> torch.Tensor:
    """The place of each cell in ascending (key, position), (R, W)."""
    import torch

    order = key.sort(dim=1, stable=True).indices
    places = torch.arange(key.shape[1], device=key.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _best(
    predictions: Any, lanes: Any, score: torch.Tensor, k: int, slope: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k hidden cells with the largest score (R, W) bool, and the lead (R,).

    The lead is the gap between the worst picked and the best left, over the score's steepest slope in logits at those
    two. A blank start is an exact tie by definition, so the order inside it is no close pick.
    """
    import torch

    hidden = lanes.hidden
    lowest = torch.finfo(score.dtype).min
    key = torch.where(hidden, score.clamp(min=lowest), -math.inf)  # (R, W)
    pick = hidden & (_rank(-key) < k)  # (R, W)
    worst, worst_at = torch.where(pick, key, math.inf).min(1)  # (R,)
    best, best_at = torch.where(hidden & ~pick, key, -math.inf).max(1)  # (R,)
    gap = worst - best
    if slope is not None:
        rows = torch.arange(len(gap), device=gap.device)
        gap = gap / slope[rows, worst_at].maximum(slope[rows, best_at].nan_to_num(nan=0.0))
        gap = gap.nan_to_num(nan=0.0, posinf=math.inf)
    return pick, torch.where(predictions.blank, math.inf, gap).double()


def _nearest(distance: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The smallest absolute distance over hidden cells, (R,)."""
    import torch

    return torch.where(hidden, distance.abs(), math.inf).min(1).values.double()


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) of log-probabilities (cells, V), in nats, (cells,)."""
    import torch

    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(1)
