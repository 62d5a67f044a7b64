"""This process among the others of accelerate or torchrun, in the words of the harness."""

from __future__ import annotations

import os
from typing import Any

import torch
from lm_eval.api.model import TemplateLM


class Ranked(TemplateLM):
    """A model of the harness that knows its rank. Requests are shared out by the harness; none is sent from here."""

    accounts: list[Any] | None = None  # of all ranks, as last gathered

    def join_ranks(self, device: str | None) -> str | None:
        """Join the other processes, if there are any; the device of this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return device
        from accelerate import Accelerator

        on_cpu = not torch.cuda.is_available() or str(device).startswith("cpu")
        self.accelerator = Accelerator(cpu=on_cpu)
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        return str(self.accelerator.device)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.gather(tensor) if self.world_size > 1 else tensor

    def account(self) -> Any:
        """What this rank computed and what it cost."""
        raise NotImplementedError

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`; their accounts travel along, with no collective of their own."""
        if self.world_size == 1:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object((obj, self.account()), gathered, dst=dst)
        if gathered is None:
            return None
        objects, self.accounts = map(list, zip(*gathered, strict=True))
        return objects

    def barrier(self) -> None:
        if self.world_size > 1:
            self.accelerator.wait_for_everyone()
