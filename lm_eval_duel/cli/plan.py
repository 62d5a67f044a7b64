"""`lm-eval-duel plan`: what a run will cost, before any weight is read.

    lm-eval-duel plan GSAI-ML/LLaDA-8B-Base --model_args max_length=2048 --tokens 290000 --documents 62

Every way to score the same windows is a line of one table (estimators/cost.py counts). Only config.json is read and,
for a task, its documents and the tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.console.command_line import FLAGS, STDOUT, Flag, Parser, write_json
from lm_eval_duel.console.tables import plain_table
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options, model_of

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.unloaded import Unloaded
    from lm_eval_duel.estimators.cost import Cost, Layout, Setting

TFLOPS = {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0, "float64": 67.0}  # of an H200, dense
CPU_CORE = {"bfloat16": 0.1, "float16": 0.1, "float32": 0.1, "float64": 0.05}  # of a core with AVX2 at 3 GHz
CALL_TOKENS = 1 << 18  # the largest network call on a GPU (core/budget.py)
HEADER = ("method", "NFE", "calls", "rows", "token-rows", "PFLOP", "time", "kept MiB", "what it gives")
GIVES = {  # and whether the rule's steps are in the counts
    "exact": ("the likelihood", True),
    "chain rule": ("the likelihood", True),
    "prefix": ("another distribution, exactly", True),
    "dual": ("another distribution, exactly", True),
    "two_phase": ("an estimate of exact, with its error", True),
    "elbo": ("a bound, with its error", False),
    "noised_elbo": ("a bound, with its error", False),
    "lattice": ("the sum over all orders", False),
    "beam": ("an estimate of lattice, or a bound", False),
}
PRINTS = """\
Prints one line per way to score the same windows: rule steps (NFE), network calls (at least), rows, token-rows
(positions of the rows that the network evaluates), floating point operations, time, and what a cache keeps for each
block (MiB; for block-causal networks and those with a causal prefix: for each window). Operations are the matrix
products of all layers and attention at every position of a row, and the LM head at masked positions only. With a rule
whose steps are not known in advance (threshold, klass, ...) all counts are upper bounds: one position a step. The time
is that of an H200, with --device cpu that of this machine, or of --tflops. estimator=elbo,mc_samples=... and
estimator=two_phase,sample=... of the model args change these lines. No weights are read.
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
    if options.tasks is not None:
        from lm_eval_duel.tasks import named

        for name in options.tasks:
            named.check(name, options.include_path)
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
    from lm_eval_duel.denoisers import unloaded
    from lm_eval_duel.estimators.checks import check_rule, resolve_block, resolve_grid, rule_for
    from lm_eval_duel.estimators.cost import Setting, sum_over
    from lm_eval_duel.rules import LeftToRight

    run: Options = options.run
    network = {key: value for key, value in run.network.items() if key not in ("cache", "compile")}
    denoiser = unloaded.read(run.pretrained or BUNDLED, network)
    causal = denoiser.attention == "causal"
    rule = LeftToRight() if causal else rule_for(denoiser, run.rule)
    check_rule(denoiser, rule)
    block = resolve_block(denoiser, None if causal and run.block is None else run.block)
    setting = Setting(denoiser, rule, block, resolve_grid(denoiser, run.grid), denoiser.size.kept)
    documents, windows = _windows(options, denoiser, block)
    on_cpu, cores = str(options.device).startswith("cpu"), os.cpu_count() or 1
    rates = {name: rate * cores for name, rate in CPU_CORE.items()} if on_cpu else TFLOPS
    tflops = options.tflops or rates[denoiser.dtype]
    call_tokens = (run.rows or 0) * denoiser.max_length or CALL_TOKENS
    longest = max(window.length for window in windows)

    def described(cost: Callable[[Layout], Cost], keeps: bool) -> dict[str, Any]:
        total, size = sum_over(windows, cost), denoiser.size
        flops = 2.0 * (total.token_rows * size.products + total.pairs * size.pair + total.head * size.head)
        return {
            "blocks": int(total.blocks),
            "nfe": int(total.nfe) or None,
            "calls_at_least": max(int(total.longest), math.ceil(total.weight / call_tokens)),
            "rows": int(total.rows),
            "token_rows": int(total.token_rows),
            "head_positions": total.head,
            "flops": flops,
            "hours": flops / (tflops * 1e12 * options.utilization) / 3600,
            "kept_bytes": size.kept * size.itemsize * longest if keeps else 0,
        }

    methods = {name: described(cost, keeps) for name, cost, keeps in _methods(setting, run)}
    return {
        "network": run.pretrained or BUNDLED,
        "family": denoiser.family,
        "parameters": denoiser.size.parameters,
        "dtype": denoiser.dtype,
        "weight_bytes": denoiser.size.weight_bytes,
        "rule": str(rule),
        "block": block,
        "upper_bound": not setting.is_exact and setting.is_bound,
        "steps_known": setting.is_exact,
        "seed_first": bool(denoiser.shift) and "dual" in methods,
        "documents": documents,
        "windows": sum(windows.values()),
        "length": longest,
        "tokens": sum(window.target * number for window, number in windows.items()),
        "blocks": next(iter(methods.values()))["blocks"],
        "device": "a device" if options.tflops else f"a CPU of {cores} cores" if on_cpu else "an H200",
        "tflops": tflops,
        "utilization": options.utilization,
        "methods": methods,
    }


def _methods(setting: Setting, run: Options) -> Iterator[tuple[str, Callable[[Layout], Cost], bool]]:
    """Each way to score windows that the network supports: its name, its cost, and whether keys are kept."""
    from lm_eval_duel.estimators import cost
    from lm_eval_duel.estimators.arguments import BeamArguments, ElboArguments, NoisedElboArguments, TwoPhaseArguments
    from lm_eval_duel.rules import SeedFirst

    denoiser, by_blocks = setting.denoiser, setting.denoiser.by_blocks
    if (trained := denoiser.noised) is not None:
        own = NoisedElboArguments(**run.estimator_args) if run.estimator == "noised_elbo" else NoisedElboArguments()
        asked = own.self_conditioning if own.self_conditioning != "auto" else trained.self_conditioning
        steps = own.steps or trained.steps or math.inf
        passes = {"none": 1, "twice": 2, "chain": steps if steps < math.inf else 1}[asked]
        draws, canvas = own.mc_samples, denoiser.block
        yield (
            f"noised_elbo {draws}",
            lambda window: cost.noised(setting, window, draws, int(passes), canvas),
            False,
        )
        return
    if denoiser.attention == "causal":
        yield "chain rule", lambda window: cost.exact(setting, window), False
        return
    yield "exact", lambda window: cost.exact(setting, window), by_blocks
    changing_keys = denoiser.family in ("sedd", "gidd")  # their noise level changes every key
    if not (by_blocks or changing_keys or setting.rule.spans_blocks):
        under = setting
        if denoiser.shift and not isinstance(setting.rule, SeedFirst):  # which these networks need under a cache
            under = dataclasses.replace(setting, rule=SeedFirst(setting.rule))
        yield "prefix", lambda window: cost.cached(under, window, "prefix"), True
        yield "dual", lambda window: cost.cached(under, window, "dual"), True
        share = run.estimator_args.get("sample", TwoPhaseArguments.sample)
        yield f"two_phase {share:g}", lambda window: cost.two_phase(under, window, share), True
    if denoiser.seeds_blocks:  # the ELBO needs states that this sampler does not have
        return
    draws = run.estimator_args.get("mc_samples", ElboArguments.mc_samples)
    spans = dataclasses.replace(setting, block=denoiser.block)
    yield f"elbo {draws}", lambda window: cost.elbo(spans, window, draws), by_blocks
    entry = registry.find(run.estimator)
    own = entry.own(**run.estimator_args)
    if setting.block is None or not (entry.lattice or isinstance(own, BeamArguments)):
        return
    if isinstance(own, BeamArguments) and not own.all_sets:
        for count in sorted({1 if own.tolerance else len(own.sizes), len(own.sizes)}):  # at most: beams share sets
            sets = sum(own.sizes[:count])
            yield f"beam {own.sizes[count - 1]}", lambda window, n=sets: cost.lattice(setting, window, n), by_blocks
    else:
        yield "lattice", lambda window: cost.lattice(setting, window), by_blocks


# ---------------------------------------------------------------- the windows


def _windows(options: argparse.Namespace, denoiser: Unloaded, block: int | None) -> tuple[int, Counter[Layout]]:
    """The number of documents, and how many windows there are of each layout."""
    from lm_eval_duel.estimators import cost

    if options.tasks is None:
        return options.documents, _even(options.tokens, options.documents, denoiser)
    from lm_eval_duel import denoisers
    from lm_eval_duel.harness.loglikelihood import continuation_windows, document_windows
    from lm_eval_duel.tasks import named
    from lm_eval_duel.text.text import Text

    tokenizer = denoisers.load_tokenizer(vars(options.run))
    denoiser.mask_id = getattr(tokenizer, "mask_token_id", None) if denoiser.mask_id is None else denoiser.mask_id
    text = Text(tokenizer, denoiser, options.run.windows, block)
    metadata = {**options.model_args, **options.metadata}
    requests = named.requests(options.tasks, metadata, options.include_path, options.limit)
    whole = [request for request in requests if request.request_type == "loglikelihood_rolling"]
    parts = [request for request in requests if request.request_type != "loglikelihood_rolling"]
    cut = [*document_windows(text, whole), *continuation_windows(text, parts)]
    layouts = cost.layouts(window for windows in cut for window in windows)
    if not layouts:
        raise DuelError(f"The tasks {', '.join(options.tasks)} have no token to score.")
    return len({(request.task_name, request.doc_id) for request in requests}), layouts


def _even(tokens: int, documents: int, denoiser: Unloaded) -> Counter[Layout]:
    """`tokens` in documents of equal length, each cut into windows from scratch."""
    from lm_eval_duel.estimators.cost import Layout

    before = max(denoiser.shift, int(denoiser.bos in ("given", "official")))
    capacity = denoiser.max_length - before
    if capacity < 1:
        raise DuelError(f"max_length={denoiser.max_length} leaves no position for text; raise it.")
    result: Counter[Layout] = Counter()
    short, longer = divmod(tokens, documents)
    for length, count in ((short + 1, longer), (short, documents - longer)):
        whole, rest = divmod(length, capacity)
        result[Layout(before, capacity, denoiser.max_length)] += whole * count
        if rest:
            result[Layout(before, rest, before + rest)] += count
    return +result


# ---------------------------------------------------------------- as text


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    most = "" if figures["steps_known"] else "<= " if figures["upper_bound"] else "~ "
    rows = []
    for method, line in figures["methods"].items():
        gives, counts_steps = GIVES[method if method in GIVES else method.split()[0]]
        bound = most if counts_steps else ""
        numbers = [line["nfe"], line["calls_at_least"], line["rows"], line["token_rows"]]
        cells = ["" if number is None else f"{bound}{number:,}" for number in numbers]
        mebibytes = line["kept_bytes"] / 2**20
        kept = f"{mebibytes:,.0f}" if mebibytes >= 1 else _short(mebibytes) if mebibytes else ""
        work = [f"{bound}{_short(line['flops'] / 1e15)}", f"{bound}{hours_as_text(line['hours'])}"]
        rows.append([method, *cells, *work, kept, gives])
    weights = figures["weight_bytes"]
    memory = f"{_short(weights / 2**30)} GiB" if weights >= 2**30 else f"{_short(weights / 2**20)} MiB"
    lines = [
        f"{figures['network']} ({figures['family']}): {_short(figures['parameters'] / 1e6)} M parameters, {memory} in "
        f"{figures['dtype']}; {figures['rule']}, block {figures['block'] or 'none'}",
        f"{figures['documents']:,} documents, {figures['tokens']:,} tokens in {figures['windows']:,} windows of at "
        f"most {figures['length']:,} positions, {figures['blocks']:,} blocks",
        f"time: on {figures['device']}, at {figures['utilization']:.0%} of {figures['tflops']:,.4g} TFLOP/s",
        "",
        plain_table(HEADER, rows),
    ]
    notes = []
    if not figures["steps_known"]:
        notes.append(
            "The steps of this rule are not known in advance: all but elbo are upper bounds (one position a step)."
            if figures["upper_bound"]
            else "This rule may reveal nothing at a step, so its steps have no bound: all but elbo assume one position "
            "a step."
        )
    if figures["seed_first"]:
        notes.append("prefix, dual and two_phase with seed_first=true, which this network needs under a cache.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _short(number: float) -> str:
    """Three significant digits without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:#.2g}" if number < 1 else f"{number:.2f}"


def hours_as_text(hours: float) -> str:
    """Hours, minutes or seconds."""
    if hours >= 1:
        return f"{_short(hours)} h"
    return f"{_short(60 * hours)} min" if 60 * hours >= 1 else f"{_short(3600 * hours)} s"
