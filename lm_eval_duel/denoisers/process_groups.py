"""`tp_plan=auto`: which processes of a launch hold one network together, checked before torch is imported.

torchrun --nproc-per-node 8, tp_size=4        group 0: processes 0 1 2 3        group 1: processes 4 5 6 7
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.load_options import NetworkArguments

ALONE = ("device_map", "load_in_8bit", "load_in_4bit", "peft", "cache", "compile")


def check(arguments: NetworkArguments) -> None:
    """Raise DuelError for arguments that a network split over processes does not support."""
    if arguments.tp_plan is None:
        if arguments.tp_size is not None:
            raise DuelError(
                f"tp_size={arguments.tp_size} is the number of processes that hold one network together; it needs "
                "tp_plan=auto."
            )
        return
    for name in ALONE:
        if value := getattr(arguments, name):
            shown = "parallelize, device_map" if name == "device_map" else f"{name}={str(value).lower()}"
            raise DuelError(
                f"tp_plan=auto splits every layer over processes, which does not work together with {shown}; leave "
                "one of them out."
            )
    if arguments.backend == "remote":
        raise DuelError(
            "tp_plan=auto needs a network in transformers' own classes, and backend=remote runs a checkpoint's own "
            "code; leave one of them out."
        )


def size(arguments: NetworkArguments) -> int:
    """How many processes hold one network; 1: each holds its own.

    Raises DuelError if the processes of this launch do not form groups of that size.
    """
    if arguments.tp_plan is None:
        return 1
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = arguments.tp_size or processes
    if processes == 1:
        raise DuelError(
            "tp_plan=auto splits a network over the processes of a launch, and this is a single process. Start one "
            f"for each GPU: torchrun --nproc-per-node {arguments.tp_size or 'N'} -m lm_eval ..."
        )
    if processes % wanted:
        raise DuelError(
            f"tp_size={wanted}: {processes} processes do not form groups of {wanted}. Start a multiple of {wanted}."
        )
    return wanted


def local_device() -> str:
    """The GPU of this process, in the order of the processes of its machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
