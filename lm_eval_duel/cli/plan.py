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
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.console.command_line import FLAGS, STDOUT, Flag, Parser, write_json
from lm_eval_duel.console.tables import plain_table
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.options import Options, model_of

RATES = {  # dense TFLOP/s of matrix products: of data sheets, none measured yet (benchmarks/gpu.sh)
    "an H200": {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0, "float64": 67.0},
    "a CPU core": {"bfloat16": 0.1, "float16": 0.1, "float32": 0.1, "float64": 0.05},  # with AVX2 at 3 GHz
}
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
        from lm_eval_duel.tasks import named

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
    from lm_eval_duel.denoisers import unloaded
    from lm_eval_duel.estimators import checks, cost
    from lm_eval_duel.rules import LeftToRight

    run: Options = options.run
    tokenizer = denoisers.load_tokenizer(vars(run)) if options.tasks else None
    denoiser, size = unloaded.read(run.pretrained or BUNDLED, run.network, tokenizer)
    causal = denoiser.attention == "causal"
    rule = LeftToRight() if causal else checks.rule_for(denoiser, run.rule)
    checks.check_rule(denoiser, rule)
    block = checks.resolve_block(denoiser, None if causal and run.block is None else run.block)
    setting = cost.Setting(denoiser, rule, block, checks.resolve_grid(denoiser, run.grid), size.kept)
    if options.tasks:
        documents, windows = _of_tasks(options, denoiser, tokenizer, block)
    else:
        documents, windows = options.documents, _of_equal_documents(options, denoiser)
    longest = max(window.length for window in windows)
    device, tflops = _device(options, size.dtype)
    figures = {
        "network": run.pretrained or BUNDLED,
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
    for method in _methods(setting, run):
        total = cost.sum_over(windows, method.cost)
        flops = 2.0 * (total.token_rows * size.products + total.pairs * size.pair + total.head * size.head)
        call_tokens = (run.rows or 0) * denoiser.max_length or CALL_TOKENS
        lines[method.name] = {
            "gives": method.gives,
            "counts_steps": method.counts_steps,
            "nfe": int(total.nfe) or None,
            "calls_at_least": max(int(total.longest), math.ceil(total.weight / call_tokens)),
            "rows": int(total.rows),
            "token_rows": int(total.token_rows),
            "flops": flops,
            "hours": flops / (tflops * 1e12 * options.utilization) / 3600,
            "kept_bytes": method.kept * size.itemsize * longest,
        }
        figures.setdefault("blocks", int(total.blocks))
        logits = 4 * denoiser.vocab_size * min(denoiser.block or longest, longest) if method.self_conditioning else 0
    figures |= {"canvas_logits_bytes": logits, "seed_first": bool(denoiser.shift) and "dual" in lines}
    return figures | {"methods": lines}


def _device(options: argparse.Namespace, dtype: str) -> tuple[str, float]:
    """The device of the plan, and its TFLOP/s."""
    if options.tflops:
        return "a device", options.tflops
    if str(options.device).startswith("cpu"):
        cores = os.cpu_count() or 1
        return f"a CPU of {cores} cores", RATES["a CPU core"][dtype] * cores
    return "an H200", RATES["an H200"][dtype]


class Method(NamedTuple):
    """A way to score the windows: a line of the table."""

    name: str
    cost: partial[Any]  # of a window
    gives: str
    kept: int = 0  # numbers per position
    counts_steps: bool = False  # it takes the rule's steps
    self_conditioning: bool = False


def _methods(setting: Any, run: Options) -> Iterator[Method]:
    from lm_eval_duel.estimators import cost
    from lm_eval_duel.estimators.arguments import BeamArguments, ElboArguments, NoisedElboArguments, TwoPhaseArguments
    from lm_eval_duel.rules import SeedFirst

    denoiser, own, kept, bound = setting.denoiser, run.estimator_args, setting.kept, "a bound, with its error"
    if (trained := denoiser.noised) is not None:
        noise = NoisedElboArguments(**own) if run.estimator == "noised_elbo" else NoisedElboArguments()
        asked = trained.self_conditioning if noise.self_conditioning == "auto" else noise.self_conditioning
        steps = noise.steps or trained.steps or math.inf
        passes = {"none": 1, "twice": 2, "chain": int(steps) if steps < math.inf else 1}[asked]
        draws = partial(cost.noised, setting, samples=noise.mc_samples, passes=passes, canvas=denoiser.block)
        yield Method(f"noised_elbo {noise.mc_samples}", draws, bound, self_conditioning=asked != "none")
        return
    causal, clean = denoiser.attention == "causal", kept if denoiser.by_blocks else 0
    yield Method("chain rule" if causal else "exact", partial(cost.exact, setting), "the likelihood", clean, True)
    # the noise level of SEDD and GIDD changes every key
    if not (causal or denoiser.by_blocks or setting.rule.spans_blocks or denoiser.family in ("sedd", "gidd")):
        under = setting
        if denoiser.shift and not isinstance(setting.rule, SeedFirst):  # which these networks need under a cache
            under = setting._replace(rule=SeedFirst(setting.rule))
        for cache in ("prefix", "dual"):
            cached = partial(cost.cached, under, cache=cache)
            yield Method(cache, cached, "another distribution, exactly", kept, True)
        share = own.get("sample", TwoPhaseArguments.sample)
        both = partial(cost.two_phase, under, share=share)
        yield Method(f"two_phase {share:g}", both, "an estimate of exact, with its error", kept, True)
    if causal or denoiser.seeds_blocks:  # no ELBO: this sampler lacks the states that it needs
        return
    samples, spans = own.get("mc_samples", ElboArguments.mc_samples), setting._replace(block=denoiser.block)
    yield Method(f"elbo {samples}", partial(cost.elbo, spans, samples=samples), bound, clean)
    entry = registry.find(run.estimator)
    beams = entry.own(**own)
    is_beam = isinstance(beams, BeamArguments)
    if setting.block is not None and is_beam and not beams.all_sets:
        most = len(beams.sizes)
        for count in sorted({1 if beams.tolerance else most, most}):  # at most: beams share sets
            sets = partial(cost.lattice, setting, beam=sum(beams.sizes[:count]))
            yield Method(f"beam {beams.sizes[count - 1]}", sets, "an estimate of lattice, or a bound", clean)
    elif setting.block is not None and (entry.lattice or is_beam):
        yield Method("lattice", partial(cost.lattice, setting), "the sum over all orders", clean)


def _of_equal_documents(options: argparse.Namespace, denoiser: Any) -> Counter[Any]:
    """The number of windows of each layout, for documents of equal length that are cut one by one."""
    from lm_eval_duel.estimators.cost import Layout

    before = max(denoiser.shift, int(denoiser.bos in ("given", "official")))
    if (capacity := denoiser.max_length - before) < 1:
        raise DuelError(f"max_length={denoiser.max_length} leaves no position for text; raise it.")
    found: Counter[Layout] = Counter()
    short, longer = divmod(options.tokens, options.documents)
    for length, count in ((short + 1, longer), (short, options.documents - longer)):
        whole, rest = divmod(length, capacity)
        found[Layout(before, capacity, denoiser.max_length)] += whole * count
        found[Layout(before, rest, before + rest)] += count * bool(rest)
    return +found


def _of_tasks(
    options: argparse.Namespace, denoiser: Any, tokenizer: Any, block: int | None
) -> tuple[int, Counter[Any]]:
    """The number of documents of the tasks, and the number of their windows of each layout."""
    from lm_eval_duel.estimators.cost import layouts
    from lm_eval_duel.harness.loglikelihood import continuation_windows, document_windows
    from lm_eval_duel.tasks import named
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
    most, rows = "" if figures["steps_known"] else "<= " if figures["upper_bound"] else "~ ", []
    for method, line in figures["methods"].items():
        bound, kept = most if line["counts_steps"] else "", line["kept_bytes"] / 2**20
        numbers = [line[name] for name in ("nfe", "calls_at_least", "rows", "token_rows")]
        cells = ["" if number is None else f"{bound}{number:,}" for number in numbers]
        cells += [f"{bound}{_short(line['flops'] / 1e15)}", f"{bound}{_time(line['hours'])}"]
        rows.append([method, *cells, (f"{kept:,.0f}" if kept >= 1 else _short(kept)) if kept else "", line["gives"]])
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
    ]
    notes = []
    if most:
        bound = "have no bound" if most == "~ " else "are at most that"
        notes.append(f"{most}one position a step is counted: this rule's steps depend on the text, and {bound}.")
    if figures["seed_first"]:
        notes.append("prefix, dual and two_phase with seed_first=true, which this network needs under a cache.")
    if dense := figures["canvas_logits_bytes"]:
        notes.append(f"Self-conditioning takes all logits of a canvas, {dense / 1e6:,.0f} MB for each row of a call.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _short(number: float) -> str:
    """Three significant digits without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:#.2g}" if number < 1 else f"{number:.2f}"


def _time(hours: float) -> str:
    """Hours, minutes or seconds."""
    count, unit = next(((n, unit) for n, unit in ((hours, "h"), (60 * hours, "min")) if n >= 1), (3600 * hours, "s"))
    return f"{_short(count)} {unit}"
