"""How the processes of a group compute the experts of a layer together (`ep_size`): by the leader's routing.

Every process runs the router on the same tokens, but on its own device. If float noise made two of them choose another
expert for a token, an expert's part would be summed twice or not at all. So they all take the choice of the first.

Shapes: N tokens of a call, K experts of a token, D features.
"""

from __future__ import annotations

import torch
from torch import distributed
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementationInterface

NAME = "duel_all_reduce"  # of the implementation, for transformers' DistributedConfig


class LeaderRouted(AllReduceEP):
    """transformers' implementation for processes with the same tokens, with the routing of the group's first one."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted outputs (N, D) of the experts of each token; the arguments are (N, D), (N, K), (N, K)."""
        return super().__call__(hidden_states, self._of_leader(top_k_index), self._of_leader(top_k_weights))

    def _of_leader(self, routing: torch.Tensor) -> torch.Tensor:
        routing = routing.contiguous()
        group = self.ep_mesh.get_group()
        distributed.broadcast(routing, src=distributed.get_global_rank(group, 0), group=group)
        return routing


EPImplementationInterface.register(NAME, LeaderRouted)
