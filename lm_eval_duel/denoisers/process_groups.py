"""Which processes of a launch hold one network together (`tp_plan`, `ep_size`), checked before torch is imported.

torchrun --nproc-per-node 8, tp_size=4        group 0: processes 0 1 2 3        group 1: processes 4 5 6 7
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lm_eval_duel.errors import DuelError

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.load_options import NetworkArguments

ALONE = ("device_map", "load_in_8bit", "load_in_4bit", "peft", "cache", "compile")


def is_shared(arguments: NetworkArguments) -> bool:
    """Whether several processes hold one network together."""
    return arguments.tp_plan is not None or arguments.ep_size is not None


def in_words(arguments: NetworkArguments) -> str:
    """The argument that makes processes hold one network together."""
    return f"ep_size={arguments.ep_size}" if arguments.tp_plan is None else "tp_plan=auto"


def check(arguments: NetworkArguments) -> None:
    """Raise DuelError for arguments that a network split over processes does not support."""
    tp_size, ep_size = arguments.tp_size, arguments.ep_size
    if tp_size is not None and arguments.tp_plan is None:
        raise DuelError(
            f"tp_size={tp_size} is the number of processes that hold one network together; it needs tp_plan=auto."
        )
    if tp_size is not None and ep_size not in (None, tp_size):
        raise DuelError(
            f"tp_size={tp_size} and ep_size={ep_size}: transformers places the experts of a network on the processes "
            "that split its other layers, if these score the same texts. Leave tp_size out, or pass the same number."
        )
    if not is_shared(arguments):
        return
    what = "tp_plan=auto splits every layer over processes"
    if arguments.tp_plan is None:
        what = f"ep_size={ep_size} places experts on different processes"
    for name in ALONE:
        if value := getattr(arguments, name):
            shown = "parallelize, device_map" if name == "device_map" else f"{name}={str(value).lower()}"
            raise DuelError(f"{what}, which does not work together with {shown}; leave one of them out.")
    if arguments.backend == "remote":
        raise DuelError(
            f"{in_words(arguments)} needs a network in transformers' own classes, and backend=remote runs a "
            "checkpoint's own code; leave one of them out."
        )


def size(arguments: NetworkArguments) -> int:
    """How many processes hold one network; 1: each holds its own.

    Raises DuelError if the processes of this launch do not form groups of that size.
    """
    if not is_shared(arguments):
        return 1
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    given = arguments.tp_size or arguments.ep_size
    wanted = given or processes
    if processes == 1:
        raise DuelError(
            f"{in_words(arguments)} splits a network over the processes of a launch, and this is a single process. "
            f"Start one for each GPU: torchrun --nproc-per-node {given or 'N'} -m lm_eval ..."
        )
    if processes % wanted:
        name = "tp_size" if arguments.tp_size else "ep_size"
        raise DuelError(
            f"{name}={wanted}: {processes} processes do not form groups of {wanted}. Start a multiple of {wanted}."
        )
    return wanted


def sizes(arguments: NetworkArguments) -> dict[str, int]:
    """The sizes of a group by the names of their arguments; empty if each process holds a network of its own."""
    names = {"tp_size": arguments.tp_plan, "ep_size": arguments.ep_size}
    return {name: size(arguments) for name, value in names.items() if value is not None}


def local_device() -> str:
    """The GPU of this process, in the order of the processes of its machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
