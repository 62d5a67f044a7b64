"""How fast, and in how much memory, against Algorithm 2 as printed, on the same windows in the same process.

    python -m lm_eval_duel bench --pretrained random:block-causal --length 1024 --block 4

Arms: `textbook` (every step evaluates whole rows, full logits), `textbook_kv` (block-causal networks: keys of clean
blocks kept, still one block at a time), `ours` (`Duel.log_prob`), `forwards` (the network calls of `ours` alone: the
floor). They take turns, each after a few steps of its own, in another order in each repeat; ratios are medians of
ratios within a repeat.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lm_eval_duel.bench.arms import LOOPS, Bench, Recording
from lm_eval_duel.bench.options import ARMS, Settings
from lm_eval_duel.bench.textbook import Loop
from lm_eval_duel.engine.results import WindowScore

LONG = 60  # seconds: a textbook run that would take longer is scaled
SCALED_FROM = 8  # steps
IDLE = 1.0  # load average before the start, above which something else may take part of the time
MATRIX = 8192  # rows of the matrix product that the chip's rate is measured with


# ---------------------------------------------------------------- the figures


def measure(bench: Bench) -> dict[str, Any]:
    """Every figure of the run, by name."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    recording, scored = bench.record()
    nfe, steps, most = sum(result.nfe for result in scored), bench.steps(scored), bench.settings.textbook_steps
    for name in bench.loops:  # warm-up, the second time to see what a step costs
        bench.loop(name, most=1)
        one, _ = bench.seconds(partial(bench.loop, name, most=1))
        if name == "textbook" and most is None and one * steps > LONG:
            most = SCALED_FROM
    recording.replay(SCALED_FROM)
    scaled = most is not None and most < steps

    arms = {name: partial(bench.loop, name) for name in bench.loops}
    if scaled:
        arms["textbook"] = partial(bench.loop, "textbook", most=most)
    arms |= {"ours": partial(bench.duel.log_prob, bench.windows), "forwards": recording.replay}
    warm = {name: partial(bench.loop, name, most=SCALED_FROM if name == "textbook_kv" else 1) for name in bench.loops}
    warm["ours"] = partial(bench.duel.log_prob, bench.windows[:2])
    warm["forwards"] = partial(recording.replay, SCALED_FROM)
    times: dict[str, list[float]] = {name: [] for name in arms}
    loops: dict[str, Loop] = {}
    for repeat in range(bench.settings.repeats):
        turn = repeat % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            warm[name]()  # an arm before it leaves memory as it needed it
            seconds, result = bench.seconds(arms[name])
            if name in LOOPS:
                loops[name] = result
            if name == "textbook" and scaled:
                seconds *= nfe / result.evaluations
            times[name].append(seconds)

    def ratio(above: str, below: str) -> float | None:
        if above not in times:
            return None
        return median(a / b for a, b in zip(times[above], times[below], strict=True))

    calls = {name: (loop.forwards, loop.rows) for name, loop in loops.items()}
    if scaled:
        calls["textbook"] = (steps, nfe)
    calls["ours"] = calls["forwards"] = (recording.forwards, recording.rows)
    figures: dict[str, Any] = {f"{name}_s": median(times[name]) if name in times else None for name in ARMS}
    figures |= {
        "ratio_textbook": ratio("textbook", "ours"),
        "ratio_textbook_kv": ratio("textbook_kv", "ours"),
        "overhead": ratio("ours", "forwards") - 1,
        "textbook_over": {name: ratio("textbook", name) for name in arms},
        "seconds": times,
        "calls": calls,
        "nfe": nfe,
        "load_before": load,
        "tokens": sum(len(window.target) for window in bench.windows),
        "textbook_scaled": f"scaled from {most} of {steps} steps" if scaled else None,
    }
    full = [name for name in bench.loops if name != "textbook" or not scaled]
    figures |= _compare(bench, scored, full[0], loops[full[0]]) if full else _compare_few(bench)
    figures |= {f"peak_bytes_{name}": None for name in (*LOOPS, "ours")}
    if not bench.settings.no_memory:
        figures |= {f"peak_bytes_{name}": bench.peak_bytes(name) for name in (*bench.loops, "ours")}
    return figures | _operations(bench, recording, figures["ours_s"]) | _setting(bench)


def _compare_few(bench: Bench) -> dict[str, Any]:
    """Numbers of ours against those of the textbook loop on windows short enough for it."""
    windows = bench.cut(LONG)
    return _compare(bench, bench.duel.log_prob(windows), "textbook", bench.loop("textbook", windows))


def _compare(bench: Bench, ours: Sequence[WindowScore], name: str, loop: Loop) -> dict[str, Any]:
    """Numbers of ours against those of a loop that ran in full."""
    log_prob = torch.tensor([result.log_prob for result in ours], dtype=torch.float64)  # (N,)
    moved = (loop.reveal_steps != torch.tensor([result.reveal_steps for result in ours])).sum(1)  # (N,)
    away, same = (loop.nats.sum(1) - log_prob).abs(), moved == 0  # (N,)
    close = [result.near_ties for result in ours]
    known = None not in close
    return {
        "compared": {"with": name, "windows": len(ours), "positions": loop.nats.shape[1]},
        "max_abs_diff_nats": float(away[same].max()) if same.any() else None,
        "near_ties": sum(close) if known else None,
        "windows_with_close_picks": sum(count > 0 for count in close) if known else None,
        "picks_moved": int(moved.sum()),
        "windows_with_picks_moved": int((~same).sum()),
    }


def _operations(bench: Bench, recording: Recording, seconds: float) -> dict[str, Any]:
    """On a GPU: operations of matrix products and attention in `forwards`, a second of `ours`; and the chip's rate."""
    device = bench.denoiser.device
    figures = {"network_tokens": recording.tokens, "flops_per_s": None, "matrix_flops_per_s": None}
    if device.type != "cuda":
        return figures
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        recording.replay()
    a, b = torch.randn(2, MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    times = [bench.seconds(lambda: [a @ b for _ in range(8)])[0] / 8 for _ in range(4)]
    return figures | {
        "flops_per_s": counter.get_total_flops() / seconds,
        "matrix_flops_per_s": 2 * MATRIX**3 / min(times),
    }


def _setting(bench: Bench) -> dict[str, Any]:
    """What was run on what."""
    device, denoiser = bench.denoiser.device, bench.denoiser
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"threads {torch.get_num_threads()}"
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    packages = ("lm-eval-duel", "torch", "transformers")
    return {
        "settings": dataclasses.asdict(bench.settings),
        "rule": str(bench.duel.rule),
        "block": bench.duel.block,
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "device": f"{device.type}, {name}",
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
    }


# ---------------------------------------------------------------- the table


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [("arm", "seconds", "tokens/s", "forwards", "rows", "NFE", "peak MiB", "textbook / arm", "")]
    for arm in ARMS:
        seconds, peak = figures[f"{arm}_s"], figures.get(f"peak_bytes_{arm}")
        if seconds is None:
            continue
        forwards, rows = figures["calls"][arm]
        lines.append(
            (
                arm,
                f"{seconds:.3f}",
                f"{figures['tokens'] / seconds:,.0f}",
                f"{forwards:,}",
                f"{rows:,}",
                "" if arm == "forwards" else f"{figures['nfe']:,}",
                "" if peak is None else f"{peak / 2**20:,.0f}",
                f"{figures['textbook_over'][arm]:.2f}",
                (figures["textbook_scaled"] or "") if arm == "textbook" else "",
            )
        )
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for first, *middle, last in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(middle, wide[1:], strict=False)]
        rows.append("  ".join([f"{first:{wide[0]}}", *cells, last]).rstrip())
    return "\n".join([_head(figures), "", *rows, "", *_foot(figures)])


def _head(figures: dict[str, Any]) -> str:
    said, millions = figures["settings"], figures["parameters"] / 1e6
    return (
        f"{said['pretrained']}, {millions:,.1f} M parameters, {said['dtype']} on {figures['device']}: "
        f"{said['windows']} x {said['length']} positions, block {figures['block']}, {figures['rule']}; "
        f"median of {said['repeats']}, of ratios within a repeat"
    )


def _foot(figures: dict[str, Any]) -> list[str]:
    away, close, compared = figures["max_abs_diff_nats"], figures["near_ties"], figures["compared"]
    lines = [f"overhead of ours over its network calls alone: {figures['overhead']:+.1%}"]
    if figures["load_before"] > IDLE:
        lines.insert(0, f"load average {figures['load_before']:.1f} before the start: times are unsteady")
    if figures["ratio_textbook_kv"] is not None:
        lines.append(f"textbook_kv / ours: {figures['ratio_textbook_kv']:.2f}")
    known = f"{close} close picks in {figures['windows_with_close_picks']} windows"
    nats = "every window has moved picks" if away is None else f"at most {away:.1e} nats apart where no pick moved"
    lines.append(
        f"ours and {compared['with']} in full on {compared['windows']} x {compared['positions']} positions: "
        f"{nats}; {'close picks not known' if close is None else known}; "
        f"{figures['picks_moved']} picks moved in {figures['windows_with_picks_moved']} windows"
    )
    if figures["flops_per_s"] is not None:
        rate, chip = figures["flops_per_s"] / 1e12, figures["matrix_flops_per_s"] / 1e12
        lines.append(f"ours: {rate:.1f} TFLOP/s, {rate / chip:.0%} of the {chip:.0f} of a bfloat16 matrix product here")
    return lines


def run(settings: Settings) -> None:
    """Measure and print: `lm-eval-duel bench`."""
    bench = Bench(settings)
    if settings.peak_of is not None:
        print(bench.own_peak_bytes(settings.peak_of))
        return
    figures = measure(bench)
    print(table(figures))
    if settings.json:
        from lm_eval_duel.strict_json import dumps

        Path(settings.json).write_text(dumps(figures) + "\n", encoding="utf-8")
