"""Measure speed and memory against Algorithm 2 as printed, on the same windows in the same process.

    lm-eval-duel bench --pretrained random:block-causal --length 1024 --block 4

Arms: `textbook` (whole rows and full logits at every step), `textbook_kv` (block-causal networks only: keeps the keys
of clean blocks, still one block at a time), `ours` (`Duel.log_prob`) and `forwards` (the network calls of `ours`
alone, a lower bound). With `--cache prefix` or `dual`, ours runs under that cache, and there are two more arms:
`textbook_cached` (the deployed loop: one window, one block, one step at a time against kept keys) and `uncached` (ours
without a cache). The arms take turns, each after a short warm-up, in a different order in each repeat. Ratios are
medians of the ratios within a repeat.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lm_eval_duel.bench import syncs
from lm_eval_duel.bench.arms import Bench, Recording
from lm_eval_duel.bench.options import ARMS, CACHED, TWO_PHASE, Settings
from lm_eval_duel.bench.table import table
from lm_eval_duel.bench.textbook import Loop
from lm_eval_duel.core.scores import WindowScore

MAX_SECONDS = 60  # a textbook run that would take longer is scaled up from a few steps
SCALED_STEPS = 8
MATRIX = 8192  # rows of the matrix product that measures the chip's peak rate


# ---------------------------------------------------------------- the figures


@dataclasses.dataclass(frozen=True)
class Arm:
    """What an arm runs and how it is warmed up. `scale`: the factor of its seconds, given what the run returned."""

    run: Callable[[], Any]
    warm_up: Callable[[], Any]
    scale: Callable[[Any], float] = lambda result: 1.0


def measure(bench: Bench) -> dict[str, Any]:
    """All figures of the run, by name."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    recording, scores = bench.record()
    nfe, steps = sum(score.nfe for score in scores), bench.steps(scores)
    max_steps = _textbook_steps(bench, steps)
    recording.replay(SCALED_STEPS)
    scaled = max_steps is not None and max_steps < steps
    blocks = sum(len(bench.duel.blocks(window)) for window in bench.windows)
    uncached_blocks = _uncached_blocks(bench, blocks) if CACHED in bench.loops else blocks
    arms = _arms(bench, recording)
    if scaled:
        run = partial(bench.loop, "textbook", max_steps=max_steps)
        arms["textbook"] = dataclasses.replace(arms["textbook"], run=run, scale=lambda loop: nfe / loop.nfe)
    if CACHED in bench.loops:
        arms["uncached"] = _uncached(bench, blocks, uncached_blocks)
    if bench.two_phase is not None:
        score = bench.two_phase.log_prob
        arms[TWO_PHASE] = Arm(partial(score, bench.windows), partial(score, bench.windows[:1]))
    times, results = _take_turns(bench, arms)
    loops: dict[str, Loop] = {name: results[name] for name in bench.loops}

    figures: dict[str, Any] = {f"{name}_s": median(times[name]) if name in times else None for name in ARMS}
    figures |= _ratios(times) | _calls(bench, recording, loops, nfe, steps if scaled else None)
    figures["two_phase_sample"] = None if bench.two_phase is None else _sample(bench, figures)
    figures |= {
        "seconds": times,
        "host_syncs": syncs.figures(arms["ours"].run, recording.replay, recording.forwards),
        "nfe": nfe,
        "load_before": load,
        "tokens": sum(len(window.target) for window in bench.windows),
        "textbook_scaled": f"scaled from {max_steps} of {steps} steps" if scaled else None,
        "uncached_scaled": f"scaled from {uncached_blocks} of {blocks} blocks" if uncached_blocks < blocks else None,
    }
    full = [CACHED] if CACHED in loops else [name for name in bench.loops if name != "textbook" or not scaled]
    figures |= _compare(bench, scores, full[0], loops[full[0]]) if full else _compare_short(bench)
    figures |= {f"peak_bytes_{name}": None for name in ARMS if name != "forwards"}
    if not bench.settings.no_memory:
        figures |= {f"peak_bytes_{name}": bench.peak_bytes(name) for name in arms if name != "forwards"}
    return figures | _operations(bench, recording, figures["ours_s"]) | _environment(bench)


def _textbook_steps(bench: Bench, steps: int) -> int | None:
    """How many of its `steps` the textbook loop takes; None: all. Also the first call of every loop."""
    max_steps = bench.settings.textbook_steps
    for name in bench.loops:  # the second call measures the cost of a step
        bench.loop(name, max_steps=1)
        per_step, _ = bench.seconds(partial(bench.loop, name, max_steps=1))
        if name == "textbook" and max_steps is None and per_step * steps > MAX_SECONDS:
            max_steps = SCALED_STEPS
    return max_steps


def _arms(bench: Bench, recording: Recording) -> dict[str, Arm]:
    """The loops in full, ours and its network calls."""
    arms = {}
    for name in bench.loops:
        first = SCALED_STEPS if name == "textbook_kv" else 1
        arms[name] = Arm(partial(bench.loop, name), partial(bench.loop, name, max_steps=first))
    duel = bench.duel.log_prob
    arms["ours"] = Arm(partial(duel, bench.windows), partial(duel, bench.windows[:2]))
    arms["forwards"] = Arm(recording.replay, partial(recording.replay, SCALED_STEPS))
    return arms


def _uncached(bench: Bench, blocks: int, count: int) -> Arm:
    """Ours without a cache, on `count` of the `blocks`."""
    windows = bench.windows if count == blocks else [bench.last_blocks(count)]
    warm_up = partial(bench.uncached.log_prob, [bench.last_blocks(1)])
    return Arm(partial(bench.uncached.log_prob, windows), warm_up, lambda scores: blocks / count)


def _take_turns(bench: Bench, arms: dict[str, Arm]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each arm in every repeat, and what it returned last."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    results = {}
    for repeat in range(bench.settings.repeats):
        turn = repeat % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            arms[name].warm_up()  # the previous arm leaves the allocator in another state
            seconds, results[name] = bench.seconds(arms[name].run)
            times[name].append(seconds * arms[name].scale(results[name]))
    return times, results


def _ratios(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the ratios of two arms within a repeat; None for an arm that did not run."""

    def ratio(numerator: str, denominator: str) -> float | None:
        if numerator not in times:
            return None
        return median(a / b for a, b in zip(times[numerator], times[denominator], strict=True))

    names = {"textbook": "textbook", "textbook_kv": "textbook_kv", "textbook_cached": CACHED, "uncached": "uncached"}
    return {f"ratio_{key}": ratio(name, "ours") for key, name in names.items()} | {
        "two_phase_over_ours": ratio(TWO_PHASE, "ours"),
        "overhead": ratio("ours", "forwards") - 1,
        "textbook_over": {name: ratio("textbook", name) for name in times},
    }


def _calls(
    bench: Bench, recording: Recording, loops: dict[str, Loop], nfe: int, scaled_to: int | None
) -> dict[str, dict[str, Any]]:
    """(forwards, rows) and token-rows of each arm. `scaled_to`: the steps of a textbook loop that was cut short."""
    calls: dict[str, tuple[int | None, int]] = {name: (loop.forwards, loop.rows) for name, loop in loops.items()}
    token_rows = {name: loop.token_rows for name, loop in loops.items()}
    every = nfe * bench.settings.length  # whole rows at each step
    if scaled_to is not None:
        calls["textbook"], token_rows["textbook"] = (scaled_to, nfe), every
    calls["ours"] = calls["forwards"] = (recording.forwards, recording.rows)
    token_rows["ours"] = token_rows["forwards"] = recording.tokens
    if CACHED in loops:
        calls["uncached"], token_rows["uncached"] = (None, nfe), every
    return {"calls": calls, "token_rows": token_rows}


def _sample(bench: Bench, figures: dict[str, Any]) -> dict[str, Any]:
    """What the two-phase estimate sampled. Its calls and token-rows are added to those of the arms."""
    before = bench.two_phase.counts.forwards
    phases = bench.two_phase_sample()
    rows = phases.cached_rows + phases.uncached_rows
    figures["calls"][TWO_PHASE] = bench.two_phase.counts.forwards - before, rows
    figures["token_rows"][TWO_PHASE] = phases.cached_token_rows + phases.uncached_token_rows
    return {"blocks": phases.blocks, "sampled": phases.sampled, "log_prob_stderr": phases.stderr}


def _uncached_blocks(bench: Bench, blocks: int) -> int:
    """How many of the blocks to score without a cache: all, or as many as take about half a minute."""
    seconds, _ = bench.seconds(partial(bench.uncached.log_prob, [bench.last_blocks(1)]))
    if seconds * blocks <= MAX_SECONDS:
        return blocks
    return max(1, min(int(MAX_SECONDS / 2 / seconds), blocks // len(bench.windows)))


def _compare_short(bench: Bench) -> dict[str, Any]:
    """Compare our numbers with the textbook loop's, on windows short enough for it."""
    windows = bench.cut(MAX_SECONDS)
    return _compare(bench, bench.duel.log_prob(windows), "textbook", bench.loop("textbook", windows))


def _compare(bench: Bench, scores: Sequence[WindowScore], name: str, loop: Loop) -> dict[str, Any]:
    """Compare our numbers with those of a loop that ran in full."""
    log_prob = torch.tensor([score.log_prob for score in scores], dtype=torch.float64)  # (N,)
    changed = (loop.reveal_steps != torch.tensor([score.reveal_steps for score in scores])).sum(1)  # (N,)
    difference, same = (loop.token_logprobs.sum(1) - log_prob).abs(), changed == 0  # (N,)
    near_ties = [score.near_ties for score in scores]
    known = None not in near_ties
    return {
        "compared": {"with": name, "windows": len(scores), "positions": loop.token_logprobs.shape[1]},
        "max_abs_diff_nats": float(difference[same].max()) if same.any() else None,
        "near_ties": sum(near_ties) if known else None,
        "windows_with_near_ties": sum(count > 0 for count in near_ties) if known else None,
        "changed_picks": int(changed.sum()),
        "windows_with_changed_picks": int((~same).sum()),
    }


def _operations(bench: Bench, recording: Recording, seconds: float) -> dict[str, Any]:
    """On a GPU: matrix and attention operations of `forwards` per second of `ours`, and the chip's peak rate."""
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


def _environment(bench: Bench) -> dict[str, Any]:
    """The settings, and the network, device and versions of the run."""
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
