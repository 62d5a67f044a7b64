"""Gradients of exact log-probabilities: the network calls of recorded orders, evaluated again one at a time.

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l | state before t]

The states are token ids, so no gradient passes from one step to another: the gradient of the sum is the sum of the
calls' gradients, and no graph outlives its call. Hooks of parameters see that sum, once, as after one backward pass.

Shapes: N windows, T target positions of the longest window, R lanes, W block width, C masked positions of a call, U
rows of features that the LM head runs on, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from lm_eval_duel import rules
from lm_eval_duel.arguments import COUNT
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import View, without_autocast
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import Budget, WindowGroup
from lm_eval_duel.core.windows import Ids, Window, target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.drawn import BestDrawn
from lm_eval_duel.estimators.duel import DuelEstimator, Replay, fixed_states

Index: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # (C,) each: window and target position
Weights: TypeAlias = "Sequence[float] | Sequence[Sequence[float]] | torch.Tensor"  # of windows, or of their tokens


class TokenLogProbs(torch.autograd.Function):
    """The log-probability of each token, (N, T), as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, orders: RecordedOrders, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.orders = orders
        ctx.save_for_backward(*parameters)
        return orders.log_probs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018 - raises RuntimeError if a parameter was modified since the forward pass
        _, gradients = ctx.orders.gradients(weights)
        return None, *(gradients.get(n) for n in range(len(ctx.orders.parameters)))


@dataclasses.dataclass(frozen=True)
class RecordedOrders:
    """Windows and their orders, as a differentiable function of the network's parameters."""

    duel: DuelEstimator
    windows: Sequence[Window]
    orders: Sequence[tuple[int, ...]]
    parameters: Sequence[torch.Tensor]
    budget: Budget  # of a call with gradients

    @classmethod
    def from_steps(
        cls, duel: DuelEstimator, windows: Sequence[Window], steps: Sequence[Ids], batch_size: int
    ) -> RecordedOrders:
        """Raises DuelError for orders that do not fit their windows, and for a network without gradients."""
        denoiser, orders = duel.denoiser, duel.checked_orders(windows, steps)
        if denoiser.cache is not None:
            raise DuelError(
                f"cache={denoiser.cache} keeps keys and values without their gradients. Use a network without a cache."
            )
        COUNT("batch_size", batch_size)
        if not (parameters := list(trainable(denoiser).values())):
            raise DuelError(
                "No parameter of the network requires a gradient: they are frozen or quantized, or from_model was not "
                "given the module= of a function."
            )
        return cls(duel, windows, orders, parameters, Budget(batch_size * denoiser.max_length))

    def log_probs(self) -> torch.Tensor:
        """The log-probability of each token, float64; 0 at padding and known positions, (N, T)."""
        log_probs = self._zeros()
        for n, scored in enumerate(self.duel.replay(self.windows, self.orders)):
            log_probs[n, : len(scored.token_logprobs)] = torch.tensor(scored.token_logprobs, dtype=torch.float64)
            _require_finite(log_probs[n], n)
        return log_probs

    def gradients(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The log-probs (N, T), and the gradient of (weights * log_probs).sum() for each parameter used, by index."""
        denoiser, known = self.duel.denoiser, {id(parameter) for parameter in self.parameters}
        sums: dict[int, torch.Tensor] = {}
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            without_autocast(denoiser),
            denoiser.evaluating(),
            without_hooks(self.parameters),
        ):
            log_probs = self._zeros()
            weights = weights.to(log_probs)
            for group, lanes in self._calls():
                values, index = self._call(group, lanes)
                _require_finite(values, index[0])
                leaves = unknown_leaves(values, known)
                log_probs[index] = values.detach()
                parts = torch.autograd.grad(values, self.parameters, weights[index].to(values), allow_unused=True)
                del values  # and the leaves that the call has made
                _require_known(leaves)
                for n, part in enumerate(parts):
                    if part is not None:
                        sums[n] = sums[n] + part if n in sums else part
        return log_probs, sums

    def _calls(self) -> Iterator[tuple[WindowGroup, Lanes]]:
        """The lanes of each network call, and their group."""
        duel = self.duel
        for group in duel.groups(self.windows, range(len(self.windows))):
            rule = Replay(tuple(self.orders[n] for n in group.window_indices))
            for state in fixed_states(duel, group, rule, duel.block_spans(group)):
                size = self.budget.rows(int(group.view.cost(state).max()))
                for start in range(0, len(state), size):
                    yield group, state.select(slice(start, start + size))

    def _call(self, group: WindowGroup, lanes: Lanes) -> tuple[torch.Tensor, Index]:
        """The log-probs (C,) of one network call, with its graph, and the tokens that they belong to."""
        window = torch.tensor(group.window_indices, device=group.rows.ids.device)  # (n,)
        view = self.duel.denoiser.open(group.rows)  # a new one: what it keeps belongs to this call's graph
        lane, position = lanes.masked_at  # (C,) each
        target = lanes.columns[lane, position] - lanes.origin[lane]  # (C,)
        values = log_probs_of(self.duel.denoiser, view, lanes, group.rows)  # (C,)
        self.duel.counts.forwards += view.forwards
        self.duel.counts.rows += view.evaluated
        return values, (window[lanes.row[lane]], target)

    def _zeros(self) -> torch.Tensor:
        longest = max((len(window.target) for window in self.windows), default=0)
        return torch.zeros(len(self.windows), longest, dtype=torch.float64, device=self.duel.denoiser.device)  # (N, T)


def differentiable(
    duel: DuelEstimator, windows: Sequence[Window], reveal_steps: Sequence[Ids], batch_size: int
) -> torch.Tensor:
    """The log-probability of each token with a graph; see `Duel.differentiable`."""
    orders = RecordedOrders.from_steps(duel, windows, reveal_steps, batch_size)
    log_probs: torch.Tensor = TokenLogProbs.apply(orders, *orders.parameters)
    return log_probs


def backward(
    duel: DuelEstimator,
    windows: Sequence[Window],
    weights: Weights,
    reveal_steps: Sequence[Ids] | None,
    batch_size: int,
) -> list[float]:
    """Add the gradient of weighted log-probabilities; see `Duel.backward`."""
    plane = token_weights(weights, windows)  # (N, T)
    if reveal_steps is None:
        reveal_steps = [scored.reveal_steps for scored in duel.log_prob(windows)]
    orders = RecordedOrders.from_steps(duel, windows, reveal_steps, batch_size)
    log_probs, gradients = orders.gradients(plane)  # (N, T)
    with torch.inference_mode(False):  # through autograd: hooks run, and `grad` may be a view of DDP's buckets
        used = sorted(gradients)
        torch.autograd.backward([orders.parameters[n] for n in used], [gradients[n] for n in used])
    return log_probs.sum(1).tolist()


def token_weights(weights: Weights, windows: Sequence[Window]) -> torch.Tensor:
    """Weights of windows (N,), or of their tokens (N, T) or one list for each window, as a plane (N, T).

    Raises:
        DuelError: If there is not one for each, or one is not finite.
    """
    longest = max((len(window.target) for window in windows), default=0)
    if len(weights) != len(windows):
        raise DuelError(f"Each window needs a weight; got {len(windows)} windows and {len(weights)} weights.")
    plane = torch.zeros(len(windows), longest, dtype=torch.float64)  # (N, T)
    for n, window in enumerate(windows):
        weight, length = torch.as_tensor(weights[n], dtype=torch.float64), len(window.target)  # () or (T,)
        if weight.dim() and len(weight) not in (length, longest):
            raise DuelError(f"Window {n} has {length} target tokens but {len(weight)} weights.", n)
        plane[n, :length] = weight[:length] if weight.dim() else weight
    if not plane.isfinite().all():
        raise DuelError(f"The weights of backward are finite numbers; got {weights}.")
    return plane


def log_probs_of(denoiser: Denoiser, view: View, lanes: Lanes, rows: Rows) -> torch.Tensor:
    """log p of the targets at the masked positions of the lanes, with its graph, float64 (C,)."""
    positions = view.positions(lanes)
    logits = denoiser.head(positions.features)  # (U, V)
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    log_p = logits.index_fill(1, denoiser.excluded.nonzero()[:, 0], -torch.inf).log_softmax(1)
    return log_p[positions.row, rows.targets(lanes)[lanes.masked_at]].double()


def trainable(denoiser: Denoiser) -> dict[int, torch.Tensor]:
    """The tensors that require a gradient, among the attributes and in the modules of a denoiser, by id."""
    parameters: dict[int, torch.Tensor] = {}
    for value in vars(denoiser).values():
        if isinstance(value, Denoiser):
            parameters |= trainable(value)
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        parameters |= {id(tensor): tensor for tensor in tensors}
    return parameters


@contextlib.contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hold back the hooks of parameters (`register_hook`), which `torch.autograd.grad` would run at every call."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


def unknown_leaves(values: torch.Tensor, known: set[int]) -> list[weakref.ref[torch.Tensor]]:
    """The tensors in the graph of `values` that gather a gradient and are not among those `known`.

    Raises:
        DuelError: If `values` have no graph.
    """
    if not values.requires_grad:
        raise DuelError("The network's logits have no gradient: a function calls it under torch.no_grad.")
    nodes, seen, leaves = [values.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            leaves.append(weakref.ref(leaf))
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _require_known(leaves: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Raise DuelError for a leaf that has outlived its call: it is the user's, and would get no gradient.

    A leaf that the call itself made is gone, such as the embeddings' output under PEFT's gradient checkpointing.
    """
    for reference in leaves:
        if (leaf := reference()) is not None:
            raise DuelError(
                f"The network reads a tensor of the shape {tuple(leaf.shape)} that requires a gradient and would get "
                "none: make it an nn.Parameter of a module, and pass that as module= to from_model."
            )


def _require_finite(log_probs: torch.Tensor, window: torch.Tensor | int) -> None:
    """Raise DuelError for a token of probability 0 in `window`, one for all of log_probs or one for each."""
    if not (finite := log_probs.isfinite()).all():
        n = window if isinstance(window, int) else int(window[~finite][0])
        raise DuelError(f"Window {n} has a token of probability 0, so its log_prob has no gradient.", n)


# ---------------------------------------------------------------- trajectories
# Recorded trajectories: the probability of their tokens along their order, and of the order under a rule or sampler.
#
# An order is followed state by state. A rule is asked at every state what it would pick. For a sampler that selects
# after
# sampling (samplers.py), the joint probability of text and order is a product over steps, so it needs
# no sum over orders, and no limit of the block.


@dataclasses.dataclass(frozen=True)
class Departure:
    """A step at which the rule picks other positions than the recorded ones."""

    block: int  # target position at which the block begins
    step: int
    margin: float | None  # of the rule's decision, in logits; None: the rule does not know

    @property
    def near_tie(self) -> bool:
        """True if float noise explains it."""
        return self.margin is not None and self.margin < NEAR_TIE


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A recorded trajectory under a network. Log-probabilities in nats."""

    log_prob: float  # of the tokens along the order
    token_logprobs: tuple[float, ...]
    steps: int
    differences: tuple[Departure, ...] = ()  # from the rule, in order
    log_joint: float | None = None  # of tokens and order, if a sampler was given


@dataclasses.dataclass(frozen=True)
class _Followed(Replay):
    """Recorded orders; at each state, `rule` says what it would pick, or `sampler` how probable the selection is."""

    rows: Rows
    rule: rules.Rule
    sampler: BestDrawn | None
    differences: dict[tuple[int, int, int], float | None] = dataclasses.field(default_factory=dict)
    log_selection: dict[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_memory", self.sampler is None and self.rule.dense_memory)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        pick = super().__call__(predictions, lanes).pick
        keys = [*zip(lanes.row.tolist(), (lanes.start - lanes.origin).tolist(), lanes.step.tolist(), strict=True)]
        if self.sampler is not None:
            values = self.sampler.log_selection(predictions, lanes, self.rows.targets(lanes), pick)  # (R,)
            self.log_selection.update(zip(keys, values.tolist(), strict=True))
            return rules.Decision.certain(pick)
        decision = self.rule(predictions, lanes)
        margins = [None] * len(keys) if decision.decision_margin is None else decision.decision_margin.tolist()
        for lane in (decision.pick != pick).any(1).nonzero()[:, 0].tolist():
            self.differences[keys[lane]] = margins[lane]
        return rules.Decision(pick, decision.decision_margin, decision.memory)


@torch.inference_mode()
def follow(
    duel: DuelEstimator, windows: Sequence[Window], steps: Sequence[Ids], sampler: BestDrawn | None = None
) -> list[Trajectory]:
    """Follow recorded trajectories, and compare each with the rule of `duel` or with a sampler.

    Args:
        duel: The estimator of a `Duel`.
        windows: Windows.
        steps: The step of each target token, counted from any number, in its block or in the whole text.
        sampler: From `best_drawn`: also compute the joint log-probability of tokens and order.

    Raises:
        DuelError: If a window cannot be scored, or is not revealed block by block.
    """
    orders = [in_blocks(order, windows[n], duel, n) for n, order in enumerate(duel.orders(windows, steps))]
    followed = [Trajectory(0.0, (), 0)] * len(windows)
    for group in duel.groups(windows, range(len(windows))):
        of_group = tuple(orders[n] for n in group.window_indices)
        rule = _Followed(of_group, group.rows, duel.followed, sampler)
        for row, scored in duel.score_blocks(group, duel.block_spans(group), rule):
            window = group.windows[row]
            differences = sorted((key[1:], margin) for key, margin in rule.differences.items() if key[0] == row)
            factors = [value for key, value in rule.log_selection.items() if key[0] == row]
            followed[group.window_indices[row]] = Trajectory(
                log_prob=scored.log_prob,
                token_logprobs=scored.token_logprobs,
                steps=sum(len(set(of_group[row][part])) for part in target_parts(window, duel.blocks(window))),
                differences=tuple(Departure(*key, margin) for key, margin in differences),
                log_joint=None if sampler is None else scored.log_prob + math.fsum(factors),
            )
    return followed


def best_drawn(denoiser: Denoiser, **arguments: Any) -> BestDrawn:
    """The sampler of estimator=sampled_confidence with these arguments, for `follow`."""
    return BestDrawn.from_arguments(denoiser, ConfidenceArguments(**arguments))


def in_blocks(order: Sequence[int], window: Window, duel: DuelEstimator, n: int) -> tuple[int, ...]:
    """The steps of window `n`, numbered from 0 in each block.

    Raises:
        DuelError: If a block is not finished before the next one begins.
    """
    inner = [order[part] for part in target_parts(window, Estimator.blocks(duel, window))]
    if duel.rule.spans_blocks and len(inner) > 1 and all(min(part) == min(order) for part in inner):
        raise DuelError(
            f"Rule {duel.rule} keeps a history over blocks, so the steps of window {n} count over the whole text and "
            "do not restart in each block.",
            n,
        )
    parts = [order[part] for part in target_parts(window, duel.blocks(window))]
    restarts = all(min(part) == min(order) for part in parts)
    if not restarts and any(max(a) >= min(b) for a, b in itertools.pairwise(parts)):
        raise DuelError(
            f"Window {n} is not revealed in blocks of {duel.block}: a block's first step comes before the last one of "
            "the block before. Pass the sampler's own block.",
            n,
        )
    return tuple(sorted(set(part)).index(step) for part in parts for step in part)
