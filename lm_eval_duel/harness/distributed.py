"""The ranks of accelerate or torchrun.

With N ranks, the harness gives every Nth document to a rank. `Ranks.deal` shares out the texts of `score`.
No rank waits for another one while it computes. Ranks exchange only numbers and results, over gloo also on GPUs: its
TCP connections notice at once that a process has ended, on any machine.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import heapq
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lm_eval_duel.core import reveal as signals
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

TIMEOUT = datetime.timedelta(weeks=52)  # a rank that has finished waits for the slowest one, however long that takes


class Ranks(NamedTuple):
    """This process among all of one launch. `device`: as given, or the one that accelerate chose for this rank."""

    device: str | None = None
    rank: int = 0
    world_size: int = 1
    group: Any = None

    @classmethod
    def join(cls, device: str | None) -> Ranks:
        """Join the other processes, if there are any."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            was_launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
            if was_launched:
                log.warning(
                    "accelerate launch has started one process, not --num_processes: on CPUs it starts no others. Use "
                    "torchrun --nproc-per-node N -m lm_eval_duel run ..."
                )
            return cls(device)
        from accelerate import Accelerator

        others = int(os.environ["WORLD_SIZE"]) - 1
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        on_cpu = not torch.cuda.is_available() or str(device).startswith("cpu")
        try:
            accelerator = Accelerator(cpu=on_cpu)
        except RuntimeError as error:
            rank = os.environ.get("RANK")
            reason = str(error).splitlines()[0]
            raise DuelError(
                f"This process (RANK={rank}) could not join the other {others} at {address}: are all machines up, and "
                f"is that address the first one's? ({reason})"
            ) from error
        group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
        atexit.register(_leave, group)
        return cls(str(accelerator.device), accelerator.process_index, accelerator.num_processes, group)

    def deal(self, costs: Sequence[float]) -> list[int]:
        """The indices of the items that this rank computes, in order. `costs`: of all items, the same on all ranks.

        The most expensive items are dealt first, each to the rank with the least work so far (ties: to the lowest).
        """
        work = [(0.0, rank) for rank in range(self.world_size)]  # a heap: the rank with the least is first
        most_expensive_first = sorted(range(len(costs)), key=lambda n: -costs[n])
        mine = []
        for n in most_expensive_first:
            total, rank = work[0]
            heapq.heapreplace(work, (total + costs[n], rank))
            if rank == self.rank:
                mine.append(n)
        return sorted(mine)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, concatenated."""
        if self.world_size == 1:
            return tensor
        part = torch.atleast_1d(tensor.cpu())
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        with self.waiting():
            torch.distributed.all_gather(parts, part, group=self.group)
        return torch.cat(parts).to(tensor.device)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`; None on the others."""
        if self.world_size == 1:
            return [obj]
        objects = [None] * self.world_size if self.rank == dst else None
        with self.waiting():
            torch.distributed.gather_object(obj, objects, dst=dst, group=self.group)
        return objects

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            with self.waiting():
                torch.distributed.barrier(self.group)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Turn the error that another rank has ended into one that says so."""
        try:
            yield
        except RuntimeError as error:
            signals.check()  # the launcher has stopped all ranks
            raise DuelError(
                f"Rank {self.rank} of {self.world_size} waited for the other ranks, and one of them has ended: look "
                "for that rank's error, which is the cause. Finished work is kept (of an evaluation: with --use_cache) "
                f"and the same command resumes the run. ({str(error).splitlines()[0]})"
            ) from error


def _leave(group: Any) -> None:
    """Close the connections. If Python's exit closes them, finished processes are sometimes aborted (torch 2.13)."""
    if not torch.distributed.is_initialized():
        return
    is_gloo = torch.distributed.get_backend() == "gloo"
    # NCCL's groups might wait for a lost process, so only ours is closed.
    torch.distributed.destroy_process_group(None if is_gloo else group)
