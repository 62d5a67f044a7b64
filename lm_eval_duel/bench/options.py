"""The command line of `bench`, checked before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import rules
from lm_eval_duel.arguments import COUNT, TRUTH, choice, whole
from lm_eval_duel.command_line import STDOUT, Flag, Parser
from lm_eval_duel.errors import DuelError, UsageError, usage
from lm_eval_duel.options import Options, model_of

TWO_PHASE = "two_phase"  # the estimate of estimator=two_phase
ARMS = ("loop", "ours", "forwards", "uncached", TWO_PHASE)
READ = (
    "pretrained",
    "rule",
    "block",
    "cache",
    "compile",
    "dtype",
    "estimator",
    "estimator_args",
    "device",
    "batch_size",
)
DEFAULTS = {"pretrained": "random:bidirectional", "dtype": "float32"}
FLAGS = {
    "layers": Flag(COUNT, None, "layers of a random network", unset="4; llada-8b: 32"),
    "hidden_size": Flag(COUNT, None, "width of a random network", unset="256; llada-8b: 4096"),
    "vocab": Flag(
        whole(2, "a number of tokens"),
        None,
        "vocabulary of a random network, [MASK] included",
        unset="50257; llada-8b: 126464",
    ),
    "windows": Flag(COUNT, 2, "number of windows"),
    "repeats": Flag(COUNT, 3, "how often each arm is timed; medians are printed"),
    "seed": Flag(whole(0), 0, "seed of random weights and tokens"),
    "no_memory": Flag(TRUTH, False, "skip measuring peak memory"),
    "peak_of": Flag(choice(*ARMS), None, argparse.SUPPRESS),
}
PRINTS = """\
The model is a checkpoint or a random network: random:bidirectional (the default), random:block-causal, which is built
for its block, or random:llada-8b. The model args are rule, block, cache, compile, dtype (float32), estimator
and sample.
Prints a table with one line per arm: the loop that people run with such a network, this package ("ours"), and the
network calls of ours alone ("forwards", the floor). Each has seconds, tokens/s, network calls, rows, token-rows and
peak memory, all for the same windows. Below the table: ratios, and how far the numbers of ours and of the loop are
apart, in nats and in picks. cache=dual adds ours without the cache, estimator=two_phase the two-phase estimate.
"""


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model`, the model args, and `words`, what was given; raises UsageError."""
    settings = Parser(
        "bench",
        "Measure speed and memory against the loops that people run, on the same windows in the same process.",
        PRINTS,
        "random:block-causal --model_args block=4 --vocab 8192 --length 1024",
        *("NAME", "model_args", "device", "batch_size", "length", "json"),
        **FLAGS,
    ).parse_args(arguments)
    model = settings.model = Options.parse({**DEFAULTS, **model_of(settings)})
    settings.words = [*arguments]
    for field in dataclasses.fields(Options):
        if field.name not in READ and getattr(model, field.name) != field.default:
            raise UsageError(f"bench does not read '{field.name}'; leave it out.")
    if model.estimator not in ("duel", TWO_PHASE):
        raise UsageError(f"bench measures estimator=duel or {TWO_PHASE}; got {model.estimator}.")
    if model.estimator == TWO_PHASE and model.cache:
        raise DuelError("estimator=two_phase has its own first phase, under cache=dual; leave cache out.")
    if settings.json not in (None, STDOUT) and Path(settings.json).exists():
        raise UsageError(f"--json {settings.json}: this file exists; name another one.")
    if model.rule.spans_blocks:
        raise DuelError(
            f"bench's loops reveal one block at a time, and rule {model.rule} has a history that spans blocks. Use "
            "another rule."
        )
    if isinstance(rules.inner(model.rule), rules.ModuleRule):
        raise DuelError(
            f"bench's loops hand logits to a rule, and rule {model.rule} may read the input of the LM head. Use "
            "another rule."
        )
    return settings


def described(settings: argparse.Namespace) -> dict[str, Any]:
    """The settings, for JSON."""
    model = settings.model
    return {
        **{name: getattr(settings, name) for name in ("length", *FLAGS) if name != "peak_of"},
        **{name: getattr(model, name) for name in ("pretrained", "block", "cache", "compile", "dtype", "estimator")},
        **model.estimator_args,
        "rule": str(model.rule),
        "batch_size": model.rows,
    }
