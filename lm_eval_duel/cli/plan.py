"""`lm-eval-duel plan`: what a run will cost, by the formulas of estimators/cost.py. Only config.json is read and, for a
task, its documents and the tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.console.command_line import FLAGS, STDOUT, Flag, Parser, plain_table, write_json
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.tasks import named

RATES = Path(__file__).with_name("device_rates.json")  # dense TFLOP/s of matrix products, by dtype
CALL_TOKENS = 1 << 18  # the largest network call on a GPU (core/budget.py)
HEADER = ("method", "NFE", "calls", "rows", "token-rows", "PFLOP", "time", "kept MiB", "what it gives")
PRINTS = """\
Prints one line per way to score the same windows: rule steps (NFE), network calls (at least), rows, token-rows
(positions of the rows that the network evaluates), floating point operations, time, and what a cache keeps for each
block (MiB; for block-causal networks and those with a causal prefix: for each window). Operations are the matrix
products of all layers and attention at every position of a row, and the LM head at masked positions only. The time is
that of an H200, with --device cpu that of this machine, or of --tflops. mc_samples= and sample= of the model args
change the lines elbo and two_phase. No weights are read.
"""


@usage()
def parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed command line, with `run`, the model args; raises UsageError."""
    options = Parser(
        "plan",
        "Count what a run will cost before it starts: windows, steps, network rows, operations, memory and hours.",
        PRINTS,
        "GSAI-ML/LLaDA-8B-Base --model_args max_length=2048 --tokens 290000 --documents 62",
        *("NAME", "model_args", "device", "batch_size", "include_path", "metadata", "limit"),
        *("tflops", "utilization", "json"),
        tasks=dataclasses.replace(FLAGS["tasks"], default=None),
        tokens=Flag(COUNT, None, "instead of --tasks: the number of tokens to score"),
        documents=Flag(COUNT, 1, "how many documents of equal length these tokens make up"),
    ).parse_args(arguments)
    options.run = Options.parse(model_of(options))
    if (options.tasks is None) == (options.tokens is None):
        raise DuelError("Name what is scored: --tasks NAMES, or --tokens N (and --documents M), not both.")
    if options.tasks is None and options.tokens < options.documents:
        raise DuelError(f"--tokens {options.tokens} are fewer than --documents {options.documents}.")
    for name in options.tasks or ():
        named.check(name)
    return options


def main(arguments: list[str]) -> None:
    """Print what a run will cost: `lm-eval-duel plan`."""
    options = parse(arguments)
    figures = plan(options)
    if options.json != STDOUT:
        print(table(figures))
    if options.json:
        write_json(options.json, figures)


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a plan, by name."""
    from lm_eval_duel import denoisers
    from lm_eval_duel.denoisers import loading as unloaded
    from lm_eval_duel.estimators import base as checks
    from lm_eval_duel.estimators import cost
    from lm_eval_duel.rules import LeftToRight

    run: Options = options.run
    network = run.pretrained or BUNDLED
    tokenizer = denoisers.load_tokenizer(vars(run)) if options.tasks else None
    denoiser, size = unloaded.read(network, run.network, tokenizer)
    causal = denoiser.attention == "causal"
    rule = LeftToRight() if causal else checks.rule_for(denoiser, run.rule)
    checks.check_rule(denoiser, rule)
    block = checks.resolve_block(denoiser, None if causal and run.block is None else run.block)
    setting = cost.Setting(denoiser, rule, block, checks.resolve_grid(denoiser, run.grid), size.kept)
    if options.tasks:
        documents, windows = _read_tasks(options, denoiser, tokenizer, block)
    else:
        documents = options.documents
        windows = cost.layouts_of_equal_documents(denoiser, options.tokens, documents)
    longest = max(window.length for window in windows)
    device, tflops = _device(options, size.dtype)
    figures = {
        "network": network,
        "family": denoiser.family,
        "parameters": size.parameters,
        "dtype": size.dtype,
        "weight_bytes": size.weight_bytes,
        "rule": str(rule),
        "block": block,
        "steps_known": setting.is_exact,
        "upper_bound": not setting.is_exact and not rule.may_pick_none,
        "documents": documents,
        "windows": sum(windows.values()),
        "length": longest,
        "tokens": sum(window.target * number for window, number in windows.items()),
        "device": device,
        "tflops": tflops,
        "utilization": options.utilization,
    }
    lines, logits = {}, 0
    for method in cost.methods(setting, registry.find(run.estimator), run.estimator_args):
        total = cost.sum_over(windows, method.cost)
        flops = 2.0 * (total.token_rows * size.products + total.pairs * size.pair + total.head * size.head)
        call_tokens = (run.rows or 0) * denoiser.max_length or CALL_TOKENS
        lines[method.name] = {
            "gives": method.gives,
            "counts_steps": total.nfe > 0,
            "nfe": total.nfe or None,
            "calls_at_least": max(int(total.longest), math.ceil(total.weight / call_tokens)),
            "rows": total.rows,
            "token_rows": total.token_rows,
            "flops": flops,
            "hours": flops / (tflops * 1e12 * options.utilization) / 3600,
            "kept_bytes": method.kept * size.itemsize * longest,
        }
        figures.setdefault("blocks", total.blocks)
        logits = 4 * denoiser.vocab_size * min(denoiser.block or longest, longest) if method.self_conditioning else 0
    figures |= {"canvas_logits_bytes": logits, "seed_first": bool(denoiser.shift) and "dual" in lines}
    return figures | {"methods": lines}


def _device(options: argparse.Namespace, dtype: str) -> tuple[str, float]:
    """The device of the plan, and its TFLOP/s."""
    if options.tflops:
        return "a device", options.tflops
    rates = json.loads(RATES.read_text(encoding="utf-8"))
    if str(options.device).startswith("cpu"):
        cores = os.cpu_count() or 1
        return f"a CPU of {cores} cores", rates["a CPU core"][dtype] * cores
    return "an H200", rates["an H200"][dtype]


def _read_tasks(
    options: argparse.Namespace, denoiser: Any, tokenizer: Any, block: int | None
) -> tuple[int, Counter[Any]]:
    """The number of documents of the tasks, and the number of their windows of each layout."""
    from lm_eval_duel.estimators.cost import layouts
    from lm_eval_duel.harness.loglikelihood import continuation_windows, document_windows
    from lm_eval_duel.text.text import TextEncoder

    text = TextEncoder(tokenizer, denoiser, options.run.windows, block)
    metadata = {**options.model_args, **options.metadata}
    tasks = named.load(options.tasks, metadata, options.include_path, options.limit)
    requests = [request for task in tasks for request in task.instances]
    whole = [request for request in requests if request.request_type == "loglikelihood_rolling"]
    parts = [request for request in requests if request.request_type != "loglikelihood_rolling"]
    cut = [*document_windows(text, whole), *continuation_windows(text, parts)]
    if not (found := layouts(window for windows in cut for window in windows)):
        raise DuelError(f"The tasks {', '.join(options.tasks)} have no token to score.")
    return len({(request.task_name, request.doc_id) for request in requests}), found


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    most, rows = "" if figures["steps_known"] else "≤ " if figures["upper_bound"] else "~ ", []
    for method, line in figures["methods"].items():
        kept = line["kept_bytes"] / 2**20
        cells = [f"{line[key]:,}" if line[key] else "" for key in ("nfe", "calls_at_least", "rows", "token_rows")]
        cells += [_short(line["flops"] / 1e15), _time(line["hours"])]
        cells = [f"{most}{cell}" if cell and line["counts_steps"] else cell for cell in cells]
        rows.append([method, *cells, f"{kept:,.0f}" if kept >= 1 else _short(kept) if kept else "", line["gives"]])
    weights = figures["weight_bytes"] / 2**20
    memory = f"{_short(weights / 1024)} GiB" if weights >= 1024 else f"{_short(weights)} MiB"
    lines = [
        f"{figures['network']} ({figures['family']}): {_short(figures['parameters'] / 1e6)} M parameters, {memory} in "
        f"{figures['dtype']}; {figures['rule']}, block {figures['block'] or 'none'}",
        f"{figures['documents']:,} documents, {figures['tokens']:,} tokens in {figures['windows']:,} windows of at "
        f"most {figures['length']:,} positions, {figures['blocks']:,} blocks",
        f"time: on {figures['device']}, at {figures['utilization']:.0%} of {figures['tflops']:,.4g} TFLOP/s",
        "",
        plain_table(HEADER, rows),
        "",
    ]
    if most:
        bound = "have no bound" if most == "~ " else "are at most that"
        lines.append(f"{most}one position a step is counted: this rule's steps depend on the text, and {bound}.")
    if figures["seed_first"]:
        lines.append("prefix, dual and two_phase with seed_first=true, which this network needs under a cache.")
    if dense := figures["canvas_logits_bytes"]:
        lines.append(f"Self-conditioning takes all logits of a canvas, {dense / 1e6:,.0f} MB for each row of a call.")
    return "\n".join(lines).rstrip()


def _short(number: float) -> str:
    """Three significant digits without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:#.2g}" if number < 1 else f"{number:.2f}"


def _time(hours: float) -> str:
    """Hours, minutes or seconds."""
    count, unit = (hours, "h") if hours >= 1 else (60 * hours, "min") if 60 * hours >= 1 else (3600 * hours, "s")
    return f"{_short(count)} {unit}"
