"""This process among the others of accelerate or torchrun, in the words of the harness.

Documents are shared out by the harness, every nth to rank n. No rank waits for another while it answers requests. What
they tell each other, a few numbers and the results, goes over gloo, GPUs or not: TCP notices at once, on any machine,
where a process has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task

from lm_eval_duel.errors import DuelError

PATIENCE = datetime.timedelta(weeks=52)  # a rank that is done waits for the slowest one, however long that takes


class Ranked(TemplateLM):
    """A model of the harness that knows its rank."""

    accounts: list[Any] | None = None  # of all ranks, as last gathered

    def join_ranks(self, device: str | None) -> str | None:
        """Join the other processes, if there are any; the device of this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return device
        from accelerate import Accelerator

        on_cpu = not torch.cuda.is_available() or str(device).startswith("cpu")
        try:
            accelerator = Accelerator(cpu=on_cpu)
        except RuntimeError as error:
            raise DuelError(
                f"This process (RANK={os.environ.get('RANK')}) could not join the other "
                f"{int(os.environ['WORLD_SIZE']) - 1} at {os.environ.get('MASTER_ADDR')}:"
                f"{os.environ.get('MASTER_PORT')}: are all machines up, and is that address the first one's? "
                f"({str(error).splitlines()[0]})"
            ) from error
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self._group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        refuse_idle_ranks()
        return str(accelerator.device)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        mine = torch.atleast_1d(tensor.cpu())
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._waiting():
            torch.distributed.all_gather(found, mine, group=self._group)
        return torch.cat(found).to(tensor.device)

    def account(self) -> Any:
        """What this rank computed and what it cost."""
        raise NotImplementedError

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`; their accounts travel along, with no collective of their own."""
        if self.world_size == 1:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        with self._waiting():
            torch.distributed.gather_object((obj, self.account()), gathered, dst=dst, group=self._group)
        if gathered is None:
            return None
        objects, self.accounts = map(list, zip(*gathered, strict=True))
        return objects

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._waiting():
                torch.distributed.barrier(self._group)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Say what it means that another rank does not answer."""
        try:
            yield
        except RuntimeError as error:
            raise DuelError(
                f"Rank {self.rank} of {self.world_size} waited for the others and one of them has ended: its own error "
                "is the cause. With --use_cache nothing that was finished is lost: the same command goes on from "
                f"there. ({str(error).splitlines()[0]})"
            ) from error


def refuse_idle_ranks() -> None:
    """Let every rank refuse a task that has fewer documents than there are ranks.

    The harness fails on the ranks that get none, with another error, and the others wait for them.
    """
    plain = getattr(Task.build_all_requests, "plain", Task.build_all_requests)

    def build_all_requests(
        self: Task, *, limit: int | None = None, samples: list[int] | None = None, world_size: int = 1, **more: Any
    ) -> None:
        count = len(samples) if samples else len(self.eval_docs)
        count = min(count, int(limit)) if limit and not samples else count
        if count < world_size:
            raise DuelError(
                f"Task {self.config.task} has {count} document{'s' * (count != 1)} here and this run has {world_size} "
                f"processes: each needs at least one. Start at most {count} (--num_processes {count} of accelerate "
                f"launch, --nproc-per-node {count} of torchrun), or raise --limit."
            )
        plain(self, limit=limit, samples=samples, world_size=world_size, **more)

    build_all_requests.plain = plain
    Task.build_all_requests = build_all_requests
