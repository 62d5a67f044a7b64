"""Routing by block (LLaDA2.2): the tokens of a block share a set of experts, and each token chooses among these.

Let s = sigmoid(router logits) and b the router's correction, in float32. A block allows the `capacity` experts with the
largest max over its tokens of s + b. A token takes its k largest s + b among the allowed experts, with weights s that
sum to 1 (if k > 1), times the router's factor. Equal experts are taken from the lowest. Groups of experts play no part
(SGLang 0.5.23, srt/models/llada2.py).

Positions are in one block if each sees the other. This holds for a block-causal network's clean blocks and for the
blocks in progress, whatever else is in the call, so no block is routed by another one's tokens.

Shapes: P rows of a call, Q positions of a row, K kept keys, T = P Q tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lm_eval_duel.errors import DuelError

EPS = 1e-20  # in the sum of a token's weights, as in the router of transformers


def install(model: Any, capacity: int) -> None:
    """Route every layer with experts by block; raises DuelError for a capacity that the network cannot have."""
    gates = []
    for module in model.modules():
        if hasattr(module, "experts") and hasattr(module, "gate"):
            gates.append(module.gate)
    for gate in gates:
        experts = len(gate.weight)
        if not gate.top_k <= capacity <= experts:
            raise DuelError(
                f"expert_capacity must be from num_experts_per_tok={gate.top_k} to num_experts={experts}; the "
                f"config.json has {capacity}."
            )
    routing = BlockRouting(capacity)
    model.base_model.register_forward_pre_hook(routing.enter, with_kwargs=True)
    for gate in gates:
        gate.register_forward_hook(routing.route)


class BlockRouting:
    """The blocks of the call in progress, and the choice of experts in them."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.block: torch.Tensor | None = None  # (T,) a number for each token's block

    def enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the blocks of a call from its attention mask (P or 1, 1, Q, K + Q), 0 where a query sees a key."""
        ids = kwargs["input_ids"]  # (P, Q)
        mask = kwargs["attention_mask"]
        queries = ids.shape[1]
        # The kept keys are left out: their tokens were routed when they were evaluated.
        seen = mask[:, 0, :, -queries:] == 0  # (P or 1, Q, Q)
        self.block = blocks_of(seen, len(ids))

    def route(
        self,
        gate: Any,
        args: tuple[Any, ...],
        output: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """The output of a router, with experts chosen by block."""
        hidden = args[0].flatten(0, -2)  # (T, D)
        logits = F.linear(hidden.float(), gate.weight.float())  # (T, E)
        scores = logits.sigmoid()  # (T, E)
        # The correction balances the load: it decides which experts run, and is not part of their weights.
        corrected = scores + gate.e_score_correction_bias  # (T, E)

        assert self.block is not None  # `enter` came first
        block = self.block.to(scores.device)
        chosen = choose(corrected, block, self.capacity, gate.top_k)  # (T, k)
        weights = scores.gather(1, chosen)  # (T, k)
        if gate.top_k > 1:
            weights = weights / (weights.sum(1, keepdim=True) + EPS)
        weights = weights * gate.routed_scaling_factor

        if len(output) == 3:  # transformers 5
            return logits, weights, chosen
        return chosen, weights


def blocks_of(seen: torch.Tensor, rows: int) -> torch.Tensor:
    """A number for the block of each token, (T,), given which queries see which of a call's own keys (P or 1, Q, Q).

    The number is the index, among all tokens of the call, of the block's first position.
    """
    length = seen.shape[1]
    mutual = seen & seen.transpose(1, 2)  # (P or 1, Q, Q)
    # Padding, and a position of a short last block, may see nothing: it is a block of its own.
    mutual |= torch.eye(length, dtype=torch.bool, device=seen.device)
    first = mutual.long().argmax(2)  # (P or 1, Q) in its row: argmax takes the first of equal ones
    before = torch.arange(rows, device=seen.device) * length  # (P,)
    number = before[:, None] + first  # (P, Q)
    return number.flatten()


def choose(
    scores: torch.Tensor,
    block: torch.Tensor,
    capacity: int,
    count: int,
) -> torch.Tensor:
    """The `count` experts of each token (T, count), given corrected scores (T, E) and the blocks (T,)."""
    number, block_of_token = block.unique(return_inverse=True)  # (blocks,), (T,)

    # An expert is as good for a block as the largest score that any of its tokens gives it.
    best = scores.new_full((len(number), scores.shape[1]), -torch.inf)  # (blocks, E)
    into = block_of_token[:, None].expand_as(scores)  # (T, E)
    best = best.scatter_reduce(0, into, scores, "amax")

    shared = lowest_first(best)[:, :capacity]  # (blocks, capacity)
    allowed = torch.zeros_like(best, dtype=torch.bool)  # (blocks, E)
    allowed.scatter_(1, shared, True)
    among_allowed = scores.masked_fill(~allowed[block_of_token], -torch.inf)  # (T, E)
    return lowest_first(among_allowed)[:, :count]


def lowest_first(scores: torch.Tensor) -> torch.Tensor:
    """Experts in descending order of their scores, equal ones from the lowest."""
    return scores.sort(dim=1, descending=True, stable=True).indices
