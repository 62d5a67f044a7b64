"""`lm-eval-duel replay`: recorded trajectories, such as rollouts of a server, one line each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel import Window
from lm_eval_duel.arguments import MISSING
from lm_eval_duel.command_line import PATH, STDOUT, Flag, Parser, write_json
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.options import Options
from lm_eval_duel.rules import presets
from lm_eval_duel.tables import plain_table

if TYPE_CHECKING:
    from lm_eval_duel import Denoiser
    from lm_eval_duel.estimators.subsets.sampled_confidence import BestDrawn
    from lm_eval_duel.estimators.trajectories import Trajectory

DRAWN = "sampled_confidence"
KEYS = (("context", "input_ids"), ("target", "output_ids"), ("reveal_steps", "step_maps"))  # ours, SGLang's
PRINTS = """\
Prints a line for each trajectory: its tokens and steps, their log-probability along the recorded order in nats, and at
how many steps the rule picks other positions, with the first such step and the margin of the rule's decision there in
logits. Below 1e-4 it is a near tie, which float noise explains. A server in bfloat16 is noisier; an order that differs
at many steps and by large margins comes from another rule.
With estimator=sampled_confidence (n, tau, steps, confidence, ...) the order is random, and the line has the joint
log-probability of text and order instead, for any block. Under a rule's own order the sum is the likelihood; under
another one it is a diagnostic.
Each line of the file is {"context": [ids], "target": [ids], "reveal_steps": [...]}, and may have "suffix" and "tail".
SGLang's names are read as well: input_ids, output_ids, and step_maps, there or in meta_info. Steps count from any
number, in each block or in the whole text.
"""


def main(arguments: Sequence[str]) -> None:
    """Replay recorded trajectories: `lm-eval-duel replay`."""
    options = parse(arguments)
    from lm_eval_duel.estimators.trajectories import follow
    from lm_eval_duel.text.loading import load_scorer

    recorded = list(read(Path(options.trajectories)))
    if not recorded:
        raise DuelError(f"{options.trajectories} has no trajectory; each line is a JSON object.")
    windows, steps = zip(*recorded, strict=True)
    estimator: Any = load_scorer(options.model).estimator
    drawn = None if options.drawn is None else sampler(options.drawn, estimator.denoiser)
    followed = follow(estimator, windows, steps, drawn)
    if options.json != STDOUT:
        print(table(followed))
    if options.json:
        write_json(options.json, [dataclasses.asdict(each) for each in followed])


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model` (the options of the model); raises UsageError for wrong arguments."""
    options = Parser(
        "replay",
        "Log-probabilities of recorded trajectories, and whether a rule reproduces their order.",
        PRINTS,
        "rollouts.jsonl --model_args pretrained=demo-bd,rule=greedy",
        *("model_args", "device", "json"),
        TRAJECTORIES=Flag(PATH, MISSING, "JSON Lines, one trajectory in each"),
    ).parse_args(arguments)
    model, options.drawn = {**options.model_args, "device": options.device}, None
    preset = presets.find(model["preset"]).arguments if "preset" in model else {}
    if preset.get("estimator") == DRAWN:
        model = {**preset, **{name: value for name, value in model.items() if name != "preset"}}
    if model.get("estimator") == DRAWN:  # the order is given: no rule is asked, and no sum over orders bounds the block
        options.drawn = ConfidenceArguments.popped_from(model)
        model |= {"estimator": "duel", "rule": "left_to_right"}
    options.model = Options.parse(model)
    if options.model.estimator != "duel":
        raise DuelError(f"replay follows orders of estimator=duel or {DRAWN}; got {options.model.estimator}.")
    return options


def read(file: Path) -> Iterator[tuple[Window, list[int]]]:
    """The trajectories of a file. Raises DuelError, naming the line, for any other line."""
    for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entry |= entry.get("meta_info", {})
            if missing := [ours for ours, theirs in KEYS if ours not in entry and theirs not in entry]:
                raise ValueError(f"{missing[0]} is missing")
            context, target, steps = (entry[ours if ours in entry else theirs] for ours, theirs in KEYS)
            yield Window(context, target, entry.get("suffix", ()), entry.get("tail", 0)), steps
        except (ValueError, TypeError, AttributeError) as error:
            raise DuelError(
                f"{file}, line {n}: each line is a JSON object with context, target and reveal_steps ({error})."
            ) from None


def sampler(own: ConfidenceArguments, denoiser: Denoiser) -> BestDrawn:
    """The sampler of the arguments of estimator=sampled_confidence."""
    from lm_eval_duel.estimators.subsets.counts import StepCounts
    from lm_eval_duel.estimators.subsets.drawn import untempered
    from lm_eval_duel.estimators.subsets.sampled_confidence import BestDrawn

    scale = untempered(denoiser) if own.confidence == "untempered" else 1.0
    return BestDrawn(StepCounts.from_arguments(own), own.tau, own.strict, scale)


def table(trajectories: Sequence[Trajectory]) -> str:
    """A line for each trajectory."""
    rows = []
    for n, each in enumerate(trajectories):
        drawn, first = each.log_joint is not None, next(iter(each.differences), None)
        if drawn:
            verdict = "not an order of this sampler" if each.log_joint == float("-inf") else "of text and order"
        elif first is None:
            verdict = "the rule's order"
        else:
            kind = "near ties" if all(step.near_tie for step in each.differences) else "another order"
            margin = "" if first.margin is None else f", margin {first.margin:.2g}"
            verdict = f"{kind}, first at target position {first.block}, step {first.step}{margin}"
        differ = "-" if drawn else str(len(each.differences))
        log_prob = each.log_joint if drawn else each.log_prob
        rows.append((str(n), str(len(each.token_logprobs)), str(each.steps), f"{log_prob:.4f}", differ, verdict))
    return plain_table(["trajectory", "tokens", "steps", "log p", "steps differ", "order"], rows)
