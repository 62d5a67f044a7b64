"""`lm-eval-duel plan`: what a run will cost, before any weight is read.

    lm-eval-duel plan --model_args pretrained=GSAI-ML/LLaDA-8B-Base,max_length=2048 --tokens 290000 --documents 62

Every way to score the same windows is a line of one table (estimators/cost.py counts). Only config.json is read and,
for a task, its documents and the tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.cli.plan.table import table
from lm_eval_duel.cli.plan.windows import names, windows_of
from lm_eval_duel.command_line import Parser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness.key_values import model_args
from lm_eval_duel.options import Options

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.unloaded import Unloaded
    from lm_eval_duel.estimators.cost import Cost, Layout, Setting

TFLOPS = {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0, "float64": 67.0}  # of an H200, dense
CPU_CORE = {"bfloat16": 0.1, "float16": 0.1, "float32": 0.1, "float64": 0.05}  # of a core with AVX2 at 3 GHz
DEVICES = {"h200": "an H200", "cpu": f"a CPU of {os.cpu_count()} cores"}
DRAWS, SAMPLE = 128, 0.03
CALL_TOKENS = 1 << 18  # the largest network call on a GPU (core/budget.py)
PRINTS = """\
Prints one line per way to score the same windows: rule steps (NFE), network calls (at least), rows, token-rows
(positions of the rows that the network evaluates), floating point operations, time, and what a cache keeps for each
block (MiB; for block-causal networks and those with a causal prefix: for each window). Operations are the matrix
products of all layers and attention at every position of a row, and the LM head at masked positions only. With a rule
whose steps are not known in advance (threshold, klass, ...) all counts are upper bounds: one position a step. No
weights are read.
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """One way to score the windows."""

    method: str
    cost: Cost
    calls: int  # at least
    flops: float
    hours: float
    kept_bytes: int  # for each block, or for each window if clean positions are evaluated once


def lines(setting: Setting, windows: Counter[Layout], options: argparse.Namespace) -> list[Line]:
    """All ways to score these windows that the network supports."""
    from lm_eval_duel.estimators import cost
    from lm_eval_duel.rules import SeedFirst

    denoiser = setting.denoiser
    longest = max(window.length for window in windows)
    kept = denoiser.size.kept * denoiser.size.itemsize * longest
    if denoiser.attention == "causal":
        return [_line("chain rule", cost.sum_over(windows, lambda w: cost.exact(setting, w)), 0, denoiser, options)]
    kept_once = kept if denoiser.by_blocks else 0
    exact = cost.sum_over(windows, lambda w: cost.exact(setting, w))
    result = [_line("exact", exact, kept_once, denoiser, options)]
    uncacheable = denoiser.by_blocks or denoiser.family in ("sedd", "gidd")  # whose noise level changes every key
    if not uncacheable and not setting.rule.spans_blocks:
        under = setting
        if denoiser.shift and not isinstance(setting.rule, SeedFirst):  # which these networks need under a cache
            under = dataclasses.replace(setting, rule=SeedFirst(setting.rule))
        for name in ("prefix", "dual"):
            total = cost.sum_over(windows, lambda w, name=name: cost.cached(under, w, name))
            result.append(_line(name, total, kept, denoiser, options))
        total = cost.sum_over(windows, lambda w: cost.two_phase(under, w, options.sample))
        result.append(_line(f"two_phase {options.sample:g}", total, kept, denoiser, options))
    if denoiser.seeds_blocks:  # the ELBO needs states that this sampler does not have
        return result
    spans = dataclasses.replace(setting, block=denoiser.block)
    total = cost.sum_over(windows, lambda w: cost.elbo(spans, w, options.draws))
    result.append(_line(f"elbo {options.draws}", total, kept_once, denoiser, options))
    if options.lattice and setting.block is not None:
        total = cost.sum_over(windows, lambda w: cost.lattice(setting, w))
        result.append(_line("lattice", total, kept_once, denoiser, options))
    return result


def _line(method: str, total: Cost, kept: int, denoiser: Unloaded, options: argparse.Namespace) -> Line:
    size = denoiser.size
    flops = 2.0 * (total.token_rows * size.products + total.pairs * size.pair + total.head * size.head)
    seconds = flops / (options.tflops * 1e12 * options.utilization)
    calls = max(int(total.longest), math.ceil(total.weight / options.call_tokens))
    return Line(method, total, calls, flops, seconds / 3600, kept)


def main(arguments: list[str]) -> None:
    """Print what a run will cost: `lm-eval-duel plan`."""
    options, run = parse(arguments)
    figures = plan(options, run)
    if options.json:
        from lm_eval_duel.strict_json import dumps

        print(dumps(figures))
    else:
        print(table(figures))


def plan(options: argparse.Namespace, run: Options) -> dict[str, Any]:
    """All figures of a plan, by name."""
    from lm_eval_duel.denoisers import unloaded
    from lm_eval_duel.estimators.checks import check_rule, resolve_block, resolve_grid, rule_for
    from lm_eval_duel.estimators.cost import Setting
    from lm_eval_duel.rules import LeftToRight

    network = {key: value for key, value in run.network.items() if key not in ("cache", "compile")}
    name = run.pretrained or BUNDLED
    denoiser = unloaded.read(name, {**network, "max_length": options.length or run.max_length})
    rule = LeftToRight() if denoiser.attention == "causal" else rule_for(denoiser, run.rule)
    check_rule(denoiser, rule)
    block = resolve_block(denoiser, None if denoiser.attention == "causal" and run.block is None else run.block)
    setting = Setting(denoiser, rule, block, resolve_grid(denoiser, run.grid), denoiser.size.kept)
    windows = windows_of(options, run, denoiser, block)
    options.device_name = DEVICES[options.device] if options.tflops is None else "a device"
    if options.tflops is None:
        cpu = CPU_CORE[denoiser.dtype] * (os.cpu_count() or 1)
        options.tflops = cpu if options.device == "cpu" else TFLOPS[denoiser.dtype]
    options.call_tokens = (run.rows or 0) * denoiser.max_length or CALL_TOKENS
    planned = lines(setting, windows, options)
    return {
        "network": name,
        "family": denoiser.family,
        "parameters": denoiser.size.parameters,
        "dtype": denoiser.dtype,
        "weight_bytes": denoiser.size.weight_bytes,
        "rule": str(rule),
        "block": block,
        "upper_bound": not setting.is_exact and setting.is_bound,
        "steps_known": setting.is_exact,
        "seed_first": bool(denoiser.shift) and any(line.method == "dual" for line in planned),
        "documents": options.documents,
        "windows": sum(windows.values()),
        "length": max(window.length for window in windows),
        "tokens": sum(window.target * number for window, number in windows.items()),
        "blocks": int(planned[0].cost.blocks),
        "device": options.device_name,
        "tflops": options.tflops,
        "utilization": options.utilization,
        "methods": {
            line.method: {
                "nfe": int(line.cost.nfe) or None,
                "calls_at_least": line.calls,
                "rows": int(line.cost.rows),
                "token_rows": int(line.cost.token_rows),
                "head_cells": line.cost.head,
                "flops": line.flops,
                "hours": line.hours,
                "kept_bytes": line.kept_bytes,
            }
            for line in planned
        },
    }


@usage()
def parse(arguments: list[str]) -> tuple[argparse.Namespace, Options]:
    """The parsed command line and the model args; raises UsageError."""
    parser = Parser(
        "plan",
        "Count what a run will cost before it starts: windows, steps, network rows, operations, memory and hours.",
        PRINTS,
        "--model_args pretrained=GSAI-ML/LLaDA-8B-Base,max_length=2048 --tokens 290000 --documents 62",
    )
    add = parser.add_argument
    parser.add("model_args", "include_path", "metadata", "limit")
    add("--device", choices=DEVICES, default="h200", help="whose rate the time is for (h200), or give --tflops")
    add("--tasks", help="count the documents of these tasks, YAML files or files of text with the tokenizer")
    add("--tokens", help="instead of --tasks: the number of tokens to score")
    add("--documents", help="how many documents of equal length these tokens are (one)")
    add("--length", help="positions of a window: shorthand for the model arg max_length")
    add("--draws", help=f"draws of the ELBO (mc_samples of the model args, else {DRAWS})")
    add("--sample", type=float, default=SAMPLE, help=f"share of blocks that two_phase scores uncached ({SAMPLE})")
    add("--tflops", type=float, help="the device's dense rate (an H200's: 989 in bfloat16, 67 in float32)")
    add("--utilization", type=float, default=0.5, help="the share of that rate that is reached (0.5)")
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    for name in ("limit", "tokens", "documents", "length", "draws"):
        setattr(options, name, COUNT(f"--{name}", getattr(options, name)))
    run = Options.parse(model_args(options.model_args))
    options.draws = options.draws or run.estimator_args.get("mc_samples") or DRAWS
    options.lattice = registry.find(run.estimator).lattice
    if (options.tasks is None) == (options.tokens is None):
        raise DuelError("Name what is scored: --tasks NAMES, or --tokens N (and --documents M), not both.")
    if options.tasks is None:
        options.documents = options.documents or 1
        if options.tokens < options.documents:
            raise DuelError(f"--tokens {options.tokens} are fewer than --documents {options.documents}.")
    else:
        from lm_eval_duel.tasks import named

        for name in names(options.tasks):
            named.check(name, options.include_path)
    for name, low in (("sample", 0), ("utilization", 0)):
        if not low < getattr(options, name) <= 1:
            raise DuelError(f"--{name} is a share above 0, at most 1; got {getattr(options, name)}.")
    if options.tflops is not None and not 0 < options.tflops < float("inf"):
        raise DuelError(f"--tflops is a rate above 0; got {options.tflops}.")
    return options, run
