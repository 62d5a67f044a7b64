"""Measurements on a device beyond the arms. Each prints JSON:

    python benchmarks/device.py DEVICE readme [--limit 1]
    python benchmarks/device.py DEVICE waits|memory|gradient LAYERS WIDTH VOCAB TOKENS

The networks are random ones of LLaDA's shape, in bfloat16 on a GPU. DEVICE=sim is the device that the tests simulate:
it counts waits by kind, on any machine, and its times mean nothing.
"""

import collections
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

DEVICE, PART, *WORDS = sys.argv[1:]
if DEVICE == "sim":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    import simulated_device

    simulated_device.register()  # before the package is imported
    torch.Generator = type("Generator", (torch.Generator,), {"__new__": lambda cls, *_: super(cls, cls).__new__(cls)})

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.random_network import RandomNetwork  # noqa: E402
from lm_eval_duel import Duel, Window  # noqa: E402
from lm_eval_duel.core import batch_size as budget  # noqa: E402

CUDA = DEVICE.startswith("cuda")
DTYPE = "bfloat16" if CUDA else "float32"
README = 54.7721  # token perplexity of the README's command
TOLERANCE = 1e-4  # in nats a token: the law's for float32, with room for a few near ties decided otherwise
READS = 200  # of which the time of one is taken


def readme() -> dict[str, object]:
    """The README's command on the device, and whether it prints the README's number."""
    command = "-m lm_eval --model duel-mdm --model_args rule=greedy,block=32 --include_path task_configs --tasks sotu"
    done = subprocess.run(
        [sys.executable, *command.split(), "--device", DEVICE, *WORDS], capture_output=True, text=True, check=False
    )
    line = next((line for line in done.stdout.splitlines() if "token_perplexity" in line), done.stderr[-2000:])
    value = _first_decimal(line)
    printed = {"line": line, "token_perplexity": value}
    if WORDS:  # --limit: of fewer documents than the README's number
        return printed
    return printed | {"wanted": README, "equal": value is not None and _is_readme(value)}


def _first_decimal(line: str) -> float | None:
    """The first cell of a line of lm_eval's table that is a number with decimals."""
    for cell in line.split("|"):
        number = re.fullmatch(r"\d+\.\d+", cell.strip())
        if number is not None:
            return float(number[0])
    return None


def _is_readme(value: float) -> bool:
    difference = torch.tensor(value / README).log().abs()  # nats a token
    return bool(difference < TOLERANCE)


def waits(duel: Duel, windows: list[Window]) -> dict[str, object]:
    """How often the host waits for the device while it scores, by line, and what one read less a call would gain."""
    duel.log_prob(windows)  # warms up, and finds how much a call holds
    if DEVICE == "sim":
        simulated_device.synchronisations.clear()
    before = duel.counts.forwards
    by_line = _waits_by_line(duel, windows)
    calls = duel.counts.forwards - before
    plane = torch.ones(64, device=DEVICE)
    launch = timed(lambda: [plane.sum() for _ in range(READS)]) / READS
    read = timed(lambda: [plane.sum().item() for _ in range(READS)]) / READS
    return {
        "waits": by_line,
        "network_calls": calls,
        "waits_per_call": sum(by_line.values()) / calls,
        "seconds_of_a_read": read - launch,
        "seconds": timed(lambda: duel.log_prob(windows)),
        "seconds_saved_by_one_read_less_a_call": calls * (read - launch),  # an estimate: waits drain the queue, too
    }


def _waits_by_line(duel: Duel, windows: list[Window]) -> dict[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            duel.log_prob(windows)
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
    lines = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    if DEVICE == "sim":
        return dict(simulated_device.synchronisations)
    return dict(collections.Counter(lines).most_common())


def memory(duel: Duel, windows: list[Window]) -> dict[str, object]:
    """The numbers with the batch found by trial, and once more when calls of that size do not fit."""
    wanted = [score.log_prob for score in duel.log_prob(windows)]
    figures: dict[str, object] = {"windows": len(windows), "network_calls": duel.counts.forwards}
    if not CUDA:
        return {**figures, "memory": "not limited on this device"}
    figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    held = torch.cuda.memory_allocated()
    enough = held + (torch.cuda.max_memory_allocated() - held) // 4  # a quarter of what a call took
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(enough / torch.cuda.get_device_properties(DEVICE).total_memory)
    before = duel.counts.forwards
    log_probs = [score.log_prob for score in duel.log_prob(windows)]
    differences = [abs(a - b) for a, b in zip(log_probs, wanted, strict=True)]
    return {**figures, "calls_with_a_quarter": duel.counts.forwards - before, "max_abs_diff_nats": max(differences)}


def gradient(duel: Duel, window: Window) -> dict[str, object]:
    """An exact gradient of a long window."""
    duel.denoiser.layers.requires_grad_(True)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() if CUDA else 0
    count = len(window.target)
    order = tuple(n % 32 for n in range(count))  # one token a step in each block: as many calls as tokens

    def work() -> None:
        duel.differentiable([window], [order])[0].sum().backward()

    figures: dict[str, object] = {"tokens": count, "seconds": timed(work)}
    if CUDA:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated() - weights
    return figures


def timed(work: Callable[[], object]) -> float:
    """Seconds, with the device idle before and after."""
    _wait()
    began = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def main() -> None:
    if PART == "readme":
        figures = readme()
        print(json.dumps(figures, indent=1))
        sys.exit(not (figures["equal"] or WORDS))  # with --limit it is another number
    if DEVICE == "sim":
        budget.GPU_TOKENS = 16, 64  # no trial of large calls
    layers, width, vocab, tokens = map(int, WORDS)
    network = RandomNetwork("random:llada-8b", DTYPE, length=tokens, layers=layers, width=width, vocab=vocab)
    duel = Duel(network.make(torch.device(DEVICE)), rule="greedy", block=32)
    window = Window((), tuple(n % (vocab // 2) for n in range(tokens)))
    short = [Window((), window.target[n : n + 64]) for n in range(0, min(tokens, 512), 64)]
    parts = {
        "waits": lambda: waits(duel, short),
        "memory": lambda: memory(duel, short),
        "gradient": lambda: gradient(duel, window),
    }
    figures = parts[PART]()
    print(json.dumps(figures, indent=1))


main()
