"""The figures of all arms, and their table.

Every arm runs in full on the same windows. A first run warms up, counts network calls and gives the numbers to compare.
Then the arms take turns, in another order in each repeat; ratios are medians of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.arms import Bench
from benchmarks.loops import Revealed
from lm_eval_duel.console.command_line import plain_table
from lm_eval_duel.core.scores import Score

IDLE_LOAD = 1.0  # a higher load average before the start means that other programs are running
MATRIX = 8192  # rows of the matrix product that measures the chip's peak rate


def measure(bench: Bench) -> dict[str, Any]:
    """All figures of the run, by name."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    repeats = bench.settings.repeats
    arms = [*bench.arms]
    figures: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}
    with tqdm(total=len(arms) * (1 + repeats + (not bench.settings.no_memory)), unit="run") as bar:
        for arm in arms:
            bar.set_description(f"{arm}: warm-up")
            figures[arm], results[arm] = bench.count(arm)
            figures[arm] |= {"seconds": [], "peak_bytes": None}
            bar.update()
        for repeat in range(repeats):
            for arm in _rotated(arms, repeat):
                bar.set_description(f"{arm}: repeat {repeat + 1} of {repeats}")
                figures[arm]["seconds"].append(bench.run(arm)[0])
                bar.update()
        for arm in [] if bench.settings.no_memory else arms:
            bar.set_description(f"{arm}: memory")
            figures[arm]["peak_bytes"] = bench.peak_bytes(arm)
            bar.update()
    remarks = []
    for arm in arms:
        line = bench.arms[arm].line(figures[arm])
        if line:
            remarks.append(f"{arm}: {line}")
    ratios = {f"{arm} / ours": _ratio(figures, arm, "ours") for arm in arms if arm not in ("ours", "forwards")}
    return {
        "arms": figures,
        "ratios": ratios | {"ours / forwards": _ratio(figures, "ours", "forwards")},
        "compared": _compare(results["ours"], results["loop"]),
        "remarks": remarks,
        "tokens": sum(len(window.target) for window in bench.windows),
        "load_before": load,
        **_operations(bench, median(figures["ours"]["seconds"])),
        **_environment(bench),
    }


def _rotated(arms: list[str], turn: int) -> list[str]:
    return arms[turn % len(arms) :] + arms[: turn % len(arms)]


def _ratio(figures: dict[str, dict[str, Any]], numerator: str, denominator: str) -> float:
    pairs = zip(figures[numerator]["seconds"], figures[denominator]["seconds"], strict=True)
    return float(median(a / b for a, b in pairs))


def _compare(scores: Sequence[Score], loop: Revealed) -> dict[str, Any]:
    """The differences between our numbers and the loop's."""
    log_prob = torch.tensor([score.log_prob for score in scores], dtype=torch.float64)  # (N,)
    changed = (loop.reveal_steps != torch.tensor([score.reveal_steps for score in scores])).sum(1)  # (N,)
    difference = (loop.token_logprobs.sum(1) - log_prob).abs()  # (N,)
    same = changed == 0  # (N,)
    near_ties = [score.near_ties for score in scores]
    return {
        "max_abs_diff_nats": float(difference[same].max()) if same.any() else None,
        "near_ties": None if None in near_ties else sum(near_ties),
        "changed_picks": int(changed.sum()),
        "windows_with_changed_picks": int((~same).sum()),
        "nfe": sum(score.nfe for score in scores),
    }


def _operations(bench: Bench, seconds: float) -> dict[str, Any]:
    """On a GPU: matrix and attention operations of the network calls per second of ours, and the chip's peak rate."""
    device = bench.denoiser.device
    if device.type != "cuda":
        return {"flops_per_s": None, "matrix_flops_per_s": None}
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        bench.recording.replay()
    a, b = torch.randn(2, MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    times = [bench.seconds(lambda: [a @ b for _ in range(8)])[0] / 8 for _ in range(4)]
    return {"flops_per_s": counter.get_total_flops() / seconds, "matrix_flops_per_s": 2 * MATRIX**3 / min(times)}


def _environment(bench: Bench) -> dict[str, Any]:
    """The settings, and the network, device and versions of the run."""
    denoiser = bench.denoiser
    device = denoiser.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"threads {torch.get_num_threads()}"
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    packages = ("lm-eval-duel", "torch", "transformers")
    return {
        "settings": _described(bench.settings),
        "loop": bench.title,
        "rule": str(bench.duel.rule),
        "block": bench.duel.block,
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "device": f"{device.type}, {name}",
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
    }


def _described(settings: argparse.Namespace) -> dict[str, Any]:
    names = ("length", "windows", "repeats", "layers", "hidden_size", "vocab", "seed", "no_memory")
    model = settings.model
    return {
        **{name: getattr(settings, name) for name in names},
        **{name: getattr(model, name) for name in ("pretrained", "block", "cache", "compile", "dtype", "estimator")},
        **vars(model.estimator_args),
        "rule": str(model.rule),
        "batch_size": model.rows,
    }


# ---------------------------------------------------------------- as text


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    header = ("arm", "seconds", "tokens/s", "forwards", "rows", "token-rows", "peak MiB")
    rows = []
    for arm, of_arm in figures["arms"].items():
        seconds = median(of_arm["seconds"])
        peak = of_arm["peak_bytes"]
        counts = ["" if of_arm[name] is None else f"{of_arm[name]:,}" for name in ("forwards", "rows", "token_rows")]
        memory = "" if peak is None else f"{peak / 2**20:,.0f}"
        rows.append((arm, f"{seconds:.3f}", f"{figures['tokens'] / seconds:,.0f}", *counts, memory))
    return "\n".join([_title(figures), "", plain_table(header, rows), "", *_below(figures)])


def _title(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    millions = figures["parameters"] / 1e6
    cache = f", cache={settings['cache']}" if settings["cache"] else ""
    return (
        f"{settings['pretrained']}, {millions:,.1f} M parameters, {settings['dtype']} on {figures['device']}: "
        f"{settings['windows']} x {settings['length']} positions, block {figures['block']}, {figures['rule']}{cache}; "
        f"loop: {figures['loop']}; median of {settings['repeats']}"
    )


def _below(figures: dict[str, Any]) -> list[str]:
    """The lines under the table."""
    compared = figures["compared"]
    lines = [f"{name}: {ratio:.2f}" for name, ratio in figures["ratios"].items()]
    if figures["load_before"] > IDLE_LOAD:
        lines.insert(0, f"the load average before the start was {figures['load_before']:.1f}: times are unreliable")
    lines += figures["remarks"]
    difference = compared["max_abs_diff_nats"]
    ties = compared["near_ties"]
    nats = "not known, every window has changed picks" if difference is None else f"{difference:.1e} nats"
    lines.append(
        f"ours and loop: largest difference of a window {nats}; {compared['changed_picks']} changed picks in "
        f"{compared['windows_with_changed_picks']} windows; near ties: {'not known' if ties is None else ties}"
    )
    if figures["flops_per_s"] is not None:
        rate = figures["flops_per_s"] / 1e12
        peak = figures["matrix_flops_per_s"] / 1e12
        lines.append(f"ours: {rate:.1f} TFLOP/s; a bfloat16 matrix product here: {peak:.0f} TFLOP/s")
    return lines
