"""Measurements beyond the arms: where the host waits for the device, and the gradient of a long window.

python benchmarks/device.py DEVICE NAME LAYERS WIDTH VOCAB TOKENS

NAME is a random network, in bfloat16 on a GPU. Prints JSON. DEVICE=sim is the device that the tests simulate: it counts
waits by kind, on any machine, and its times mean nothing.
"""

import collections
import json
import sys
import time
import warnings
from pathlib import Path

import torch

DEVICE, NAME, *SIZES = sys.argv[1:]
if DEVICE == "sim":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    import simulated_device

    simulated_device.register()  # before the package is imported
    torch.Generator = type("Generator", (torch.Generator,), {"__new__": lambda cls, *_: super(cls, cls).__new__(cls)})

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.random_network import RandomNetwork  # noqa: E402
from lm_eval_duel import Duel, Window  # noqa: E402
from lm_eval_duel.core import reveal as budget  # noqa: E402

DTYPE = "bfloat16" if DEVICE.startswith("cuda") else "float32"
READS = 200  # of which the time of one is taken


def waits(duel: Duel, windows: list[Window]) -> dict[str, int]:
    """How often the host waits for the device while it scores, by line of code; on the simulated one, by kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if DEVICE.startswith("cuda"):
            torch.cuda.set_sync_debug_mode("warn")
        try:
            duel.log_prob(windows)
        finally:
            if DEVICE.startswith("cuda"):
                torch.cuda.set_sync_debug_mode("default")
    lines = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return dict(collections.Counter(lines or _simulated()).most_common())


def _simulated() -> dict[str, int]:
    return simulated_device.synchronisations if DEVICE == "sim" else {}


def timed(work: object) -> float:
    """Seconds, with the device idle before and after."""
    _wait()
    began = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if DEVICE.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    if DEVICE == "sim":
        budget.GPU_TOKENS = 16, 64  # no trial of large calls
    layers, width, vocab, tokens = map(int, SIZES)
    sizes = {"layers": layers, "width": width, "vocab": vocab, "length": tokens}
    denoiser = RandomNetwork(NAME, DTYPE, **sizes).make(torch.device(DEVICE))
    duel = Duel(denoiser, rule="greedy", block=32)
    window = Window((), tuple(n % (vocab // 2) for n in range(tokens)))
    short = [Window((), window.target[n : n + 64]) for n in range(0, min(tokens, 512), 64)]
    duel.log_prob(short)  # warms up, and finds how much a call holds
    if DEVICE == "sim":
        simulated_device.synchronisations.clear()
    before, by_line = duel.counts.forwards, waits(duel, short)
    plane = torch.ones(64, device=DEVICE)
    launch = timed(lambda: [plane.sum() for _ in range(READS)]) / READS
    read = timed(lambda: [plane.sum().item() for _ in range(READS)]) / READS
    calls = duel.counts.forwards - before
    figures = {
        "waits": by_line,
        "network_calls": calls,
        "waits_per_call": sum(by_line.values()) / calls,
        "seconds_of_a_read": read - launch,
        "seconds": timed(lambda: duel.log_prob(short)),
        "seconds_saved_by_one_read_less_a_call": calls * (read - launch),  # an estimate: waits drain the queue, too
    }
    if DEVICE != "sim":
        denoiser.layers.requires_grad_(True)
        if DEVICE.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
            weights = torch.cuda.memory_allocated()
        order = tuple(n % 32 for n in range(tokens))  # one token a step in each block: as many calls as tokens
        figures["gradient_tokens"] = tokens
        figures["gradient_seconds"] = timed(lambda: duel.differentiable([window], [order]).sum().backward())
        if DEVICE.startswith("cuda"):
            figures["gradient_peak_bytes"] = torch.cuda.max_memory_allocated() - weights
    print(json.dumps(figures, indent=1))


main()
