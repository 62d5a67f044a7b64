"""Gradients of exact log-probabilities: the states of known orders, evaluated again one call at a time.

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l | state before t]

The states are token ids, so no gradient passes from one step to another: the gradient of the sum is the sum of the
steps' gradients. Each call is followed by its own `backward`, and no graph outlives it.

Shapes: N windows, R lanes, W block width, C masked positions, U rows of features that the LM head runs on, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lm_eval_duel.core.budget import Budget
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.reveal import without_autocast
from lm_eval_duel.core.view import View
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.fixed_orders import Replay, fixed_states


def accumulate(
    estimator: Estimator,
    windows: Sequence[Window],
    weights: Sequence[float],
    orders: Sequence[tuple[int, ...]],
    batch_size: int,
) -> list[float]:
    """See `Duel.backward`; `orders` are checked already."""
    if estimator.denoiser.cache is not None:
        raise DuelError(
            f"cache={estimator.denoiser.cache} keeps keys and values without their gradients. Use a network without a "
            "cache."
        )
    if batch_size < 1:
        raise DuelError(f"batch_size is the number of rows in a call with gradients, at least 1; got {batch_size}.")
    budget = Budget(batch_size * estimator.denoiser.max_length)
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(estimator.denoiser):
        log_probs = torch.zeros(len(windows), dtype=torch.float64)  # (N,)
        for group in estimator.groups(windows, range(len(windows))):
            indices = group.window_indices
            weight = torch.tensor([weights[n] for n in indices], dtype=torch.float64, device=group.rows.ids.device)
            sums = torch.zeros_like(weight)  # (n,)
            rule = Replay(tuple(orders[n] for n in indices))
            for state in fixed_states(estimator, group, rule, estimator.block_spans(group)):
                size = budget.rows(int(group.view.cost(state).max()))
                for start in range(0, len(state), size):
                    lanes = state.select(slice(start, start + size))
                    view = estimator.denoiser.open(group.rows)  # a new one: what it keeps belongs to this call's graph
                    log_prob = log_prob_of(estimator.denoiser, view, lanes, group.rows)  # (R,)
                    _require_gradient(log_prob, lanes, indices)
                    (weight[lanes.row] * log_prob).sum().backward()
                    sums.index_add_(0, lanes.row, log_prob.detach())
                    estimator.counts.forwards += view.forwards
                    estimator.counts.rows += view.evaluated
            log_probs[torch.tensor(indices)] = sums.cpu()
    return log_probs.tolist()


def log_prob_of(denoiser: Denoiser, view: View, lanes: Lanes, rows: Rows) -> torch.Tensor:
    """log p of the targets at the masked positions of each lane, summed, with its graph, float64 (R,)."""
    positions = view.positions(lanes)
    logits = denoiser.head(positions.features)  # (U, V)
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    log_p = logits.index_fill(1, denoiser.excluded.nonzero()[:, 0], -torch.inf).log_softmax(1)
    token = rows.targets(lanes)[lanes.masked]  # (C,)
    values = log_p[positions.row, token].double()  # (C,)
    return values.new_zeros(len(lanes)).index_add(0, lanes.masked.nonzero()[:, 0], values)


def _require_gradient(log_prob: torch.Tensor, lanes: Lanes, window_indices: Sequence[int]) -> None:
    """Raise DuelError for log-probs (R,) that have no gradient."""
    if not log_prob.requires_grad:
        raise DuelError(
            "The network's logits have no gradient: its parameters are frozen or quantized (requires_grad is False), "
            "or a function calls it under torch.no_grad."
        )
    if not log_prob.isfinite().all():
        index = window_indices[int(lanes.row[(~log_prob.isfinite()).nonzero()[0]])]
        raise DuelError(f"Window {index} has a token of probability 0, so its log_prob has no gradient.", index)
