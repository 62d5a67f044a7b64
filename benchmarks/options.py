"""The command line of `python -m benchmarks`, checked before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel import rules
from lm_eval_duel.console.command_line import STDOUT, key_values
from lm_eval_duel.errors import UsageError, usage
from lm_eval_duel.options import Options

READ = {"pretrained", "rule", "block", "cache", "estimator", "estimator_args"}
READ |= {"compile", "dtype", "device", "batch_size"}
WHAT = "Measure speed and memory against the loops that people run, on the same windows in the same process."
EPILOG = """\
The model is a checkpoint or a random network: random:bidirectional (the default), random:block-causal, which is built
for its block, or random:llada-8b. Each arm has seconds, tokens/s, network calls, rows, token-rows and peak memory, all
for the same windows: the loop that people run with such a network, this package ("ours"), and the network calls of ours
alone ("forwards", the floor). Below the table: ratios, and the differences between ours and the loop, in
nats and in picks. cache=dual adds ours without the cache, estimator=two_phase the two-phase estimate, and
estimator=noised_elbo the bound under random tokens, with the same weights, and its network calls alone.
"""


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `model`, the model args, and `words`, what was given; raises UsageError."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=WHAT, epilog=EPILOG)
    parser.add_argument("name", nargs="?", default="random:bidirectional")
    parser.add_argument("--model_args", type=key_values, default={}, help="rule, block, cache, compile, dtype, ...")
    parser.add_argument("--device")
    parser.add_argument("--batch_size", default="auto", help="rows in a network call")
    parser.add_argument("--length", type=int, default=128, help="positions of a window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="how often each arm is timed; medians are printed")
    parser.add_argument("--layers", type=int, help="of a random network (4; llada-8b: 32)")
    parser.add_argument("--hidden_size", type=int, help="of a random network (256; llada-8b: 4096)")
    parser.add_argument("--vocab", type=int, help="of a random network, with [MASK] (50257; llada-8b: 126464)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
    parser.add_argument("--no_memory", action="store_true", help="skip peak memory")
    parser.add_argument("--json", metavar="FILE", nargs="?", const=STDOUT, help="write the figures, or print them")
    parser.add_argument("--peak_of", help=argparse.SUPPRESS)  # the peak memory of one arm, in its own process
    settings = parser.parse_args(arguments)
    given = {"pretrained": settings.name, "dtype": "float32", **settings.model_args}
    model = settings.model = Options.parse(given | {"device": settings.device, "batch_size": settings.batch_size})
    settings.words = [*arguments]
    for field in dataclasses.fields(Options):
        if field.name not in READ and getattr(model, field.name) != field.default:
            raise UsageError(f"The benchmark does not read '{field.name}'; leave it out.")
    if min(settings.length, settings.windows, settings.repeats) < 1:
        raise UsageError("--length, --windows and --repeats are at least 1.")
    if settings.json not in (None, STDOUT) and Path(settings.json).exists():
        raise UsageError(f"--json {settings.json}: this file exists; name another one.")
    if model.rule.spans_blocks or rules.inner(model.rule).files:
        raise UsageError(
            f"The loops reveal one block at a time and hand logits to a rule, and rule {model.rule} has a history that "
            "spans blocks or may read the input of the LM head. Use another rule."
        )
    return settings
