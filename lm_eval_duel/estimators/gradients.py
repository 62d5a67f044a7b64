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
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from lm_eval_duel.arguments import whole
from lm_eval_duel.core.batch_size import Budget
from lm_eval_duel.core.denoiser import Denoiser, View
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import without_autocast
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator, Replay, fixed_states

ROWS = dataclasses.replace(whole(), nothing=())  # rows of a call; "none" is no number of them
Index: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # (C,) each: window and target position


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
        gradients = ctx.orders.gradients(weights)
        parameter_gradients = [gradients.get(n) for n in range(len(ctx.orders.parameters))]
        return None, *parameter_gradients  # None for `orders`, which is no tensor


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
        cls,
        duel: DuelEstimator,
        windows: Sequence[Window],
        steps: Sequence[Ids],
        batch_size: int,
    ) -> RecordedOrders:
        """The orders of windows, `batch_size` rows in a call.

        Raises:
            DuelError: If orders do not fit their windows, or the network has no gradients.
        """
        denoiser = duel.denoiser
        orders = duel.checked_orders(windows, steps)
        if denoiser.cache is not None:
            raise DuelError(
                f"cache={denoiser.cache} keeps keys and values without their gradients. Use a network without a cache."
            )
        if denoiser.commit_once.self_conditioning:
            raise DuelError(
                "This network reads its own output of the step before, so that gradients pass from step to step, and "
                "differentiable keeps one call at a time. Pass self_conditioning=none."
            )
        rows = ROWS("batch_size", batch_size)
        parameters = list(trainable(denoiser).values())
        if not parameters:
            raise DuelError(
                "No parameter of the network requires a gradient: they are frozen or quantized, or from_model was not "
                "given the module= of a function."
            )
        return cls(duel, windows, orders, parameters, Budget(rows * denoiser.max_length))

    def log_probs(self) -> torch.Tensor:
        """The log-probability of each token, float64; 0 at padding and known positions, (N, T)."""
        log_probs = self._zeros()
        for n, scored in enumerate(self.duel.replay(self.windows, self.orders)):
            token_logprobs = torch.tensor(scored.token_logprobs, dtype=torch.float64)  # (its target,)
            log_probs[n, : len(token_logprobs)] = token_logprobs
            _require_finite(log_probs[n], n)
        return log_probs

    def gradients(self, weights: torch.Tensor) -> dict[int, torch.Tensor]:
        """The gradient of (weights * log_probs).sum(), weights (N, T), for each parameter used, by index."""
        denoiser = self.duel.denoiser
        identities = set(map(id, self.parameters))
        sums: dict[int, torch.Tensor] = {}
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            without_autocast(denoiser),
            denoiser.evaluating(),
            without_hooks(self.parameters),
        ):
            weights = weights.to(self._zeros())
            for group, lanes in self._calls():
                values, index = self._call(group, lanes)
                _require_finite(values, index[0])
                leaves = unknown_leaves(values, identities)
                parts = torch.autograd.grad(
                    values,
                    self.parameters,
                    weights[index].to(values),
                    allow_unused=True,
                )
                # leaves that the call itself has made go with its graph; those that remain are the user's
                del values
                _require_known(leaves)
                for n, part in enumerate(parts):
                    if part is None:
                        continue
                    if n in sums:
                        part = sums[n] + part
                    sums[n] = part
        return sums

    def _calls(self) -> Iterator[tuple[WindowGroup, Lanes]]:
        """The lanes of each network call, and their group."""
        duel = self.duel
        for group in duel.groups(self.windows, range(len(self.windows))):
            rule = Replay(tuple(self.orders[n] for n in group.window_indices))
            for states in fixed_states(duel, group, rule, duel.block_spans(group)):
                cost = int(group.view.cost(states).max())
                size = self.budget.rows(cost)
                for start in range(0, len(states), size):
                    yield group, states.select(slice(start, start + size))

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
        shape = (len(self.windows), longest)
        return torch.zeros(shape, dtype=torch.float64, device=self.duel.denoiser.device)  # (N, T)


def differentiable(
    duel: DuelEstimator,
    windows: Sequence[Window],
    reveal_steps: Sequence[Ids],
    batch_size: int,
) -> torch.Tensor:
    """The log-probability of each token with a graph; see `Duel.differentiable`."""
    orders = RecordedOrders.from_steps(duel, windows, reveal_steps, batch_size)
    log_probs: torch.Tensor = TokenLogProbs.apply(orders, *orders.parameters)
    return log_probs


def log_probs_of(denoiser: Denoiser, view: View, lanes: Lanes, rows: Rows) -> torch.Tensor:
    """log p of the targets at the masked positions of the lanes, with its graph, float64 (C,)."""
    positions, step = view.at_steps(lanes, view.positions(lanes))
    # as in `Predictions`, which works in place and keeps no graph
    logits = denoiser.head(positions.features)  # (U, V)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    excluded = denoiser.excluded.nonzero()[:, 0]  # (E,)
    logits = logits.index_fill(1, excluded, -torch.inf)
    for each in denoiser.filters:
        logits = each(logits, step)
    log_p = logits.log_softmax(1)  # (U, V)
    tokens = rows.targets(lanes)[lanes.masked_at]  # (C,)
    return log_p[positions.row, tokens].double()


def trainable(denoiser: Denoiser) -> dict[int, torch.Tensor]:
    """The tensors that require a gradient, among the attributes and in the modules of a denoiser, by id.

    By id, since the same module may be an attribute of several denoisers, one around the other.
    """
    parameters: dict[int, torch.Tensor] = {}
    for value in vars(denoiser).values():
        if isinstance(value, Denoiser):  # inside a wrapper
            parameters |= trainable(value)
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                parameters[id(tensor)] = tensor
    return parameters


@contextlib.contextmanager
def without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hold back the hooks of parameters (`register_hook`), which `torch.autograd.grad` would run at every call."""
    held_back = []
    for parameter in parameters:
        if parameter._backward_hooks:
            held_back.append((parameter, parameter._backward_hooks))
            parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in held_back:
            parameter._backward_hooks = hooks


def unknown_leaves(values: torch.Tensor, parameters: set[int]) -> list[weakref.ref[torch.Tensor]]:
    """The tensors in the graph of `values` that gather a gradient and are not among `parameters`, given by id.

    Raises:
        DuelError: If `values` have no graph.
    """
    if not values.requires_grad:
        raise DuelError("The network's logits have no gradient: a function calls it under torch.no_grad.")
    nodes = [values.grad_fn]
    seen = set()
    leaves = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in parameters:
            leaves.append(weakref.ref(leaf))
        for following, _ in node.next_functions:
            nodes.append(following)
    return leaves


def _require_known(leaves: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Raise DuelError for a leaf that has outlived its call: it is the user's, and would get no gradient.

    A leaf that the call itself made is gone, such as the embeddings' output under PEFT's gradient checkpointing.
    """
    for reference in leaves:
        leaf = reference()
        if leaf is not None:
            raise DuelError(
                f"The network reads a tensor of the shape {tuple(leaf.shape)} that requires a gradient and would get "
                "none: make it an nn.Parameter of a module, and pass that as module= to from_model."
            )


def _require_finite(log_probs: torch.Tensor, window: torch.Tensor | int) -> None:
    """Raise DuelError for a token of probability 0. `window`: one for all `log_probs` (C,), or one for each (C,)."""
    finite = log_probs.isfinite()
    if not finite.all():
        n = window if isinstance(window, int) else int(window[~finite][0])
        raise DuelError(f"Window {n} has a token of probability 0, so its log_prob has no gradient.", n)
