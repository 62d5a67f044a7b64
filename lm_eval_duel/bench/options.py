"""The command line of `bench`, checked before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from lm_eval_duel import rules
from lm_eval_duel.arguments import COUNT
from lm_eval_duel.command_line import Parser, file_to_write
from lm_eval_duel.denoisers.load_options import DTYPES, Cache
from lm_eval_duel.errors import DuelError, UsageError, unknown, usage

TWO_PHASE = "two_phase"  # the estimate of --estimator two_phase
ARMS = ("loop", "ours", "forwards", "uncached", TWO_PHASE)
CACHES = (*get_args(Cache), "none")
COUNTS = ("layers", "width", "vocab", "length", "windows", "k", "repeats", "batch_size")
LARGEST_SEED = 2**63 - 1  # the largest that torch accepts

HELP = {
    "pretrained": "a folder, demo-mdm, demo-bd, or random:bidirectional|block-causal|llada-8b",
    "layers": "layers of a random network (4; llada-8b: 32)",
    "width": "width of a random network (256; llada-8b: 4096)",
    "vocab": "vocabulary of a random network, [MASK] included (50257; llada-8b: 126464)",
    "length": "positions per window",
    "block": "a number, none (the whole window) or auto (the checkpoint's, or 32); random:block-causal is built for it",
    "cache": "score under a prefix or dual cache (bidirectional networks)",
    "estimator": "duel, or two_phase: also time the two-phase estimate of the same value",
    "sample": "share of blocks that the two-phase estimate scores without the cache (0.05)",
    "windows": "number of windows",
    "rule": "as in model args: greedy, threshold:mu=0.9, ...",
    "k": "shorthand for the rule's k=",
    "device": "cpu, cuda, ...",
    "dtype": "float32, bfloat16, float16 or float64",
    "repeats": "how often each arm is timed; medians are printed",
    "batch_size": "windows per network call of ours (default: as many as fit)",
    "seed": "seed of random weights and tokens",
    "no_memory": "skip measuring peak memory",
    "json": "also write the figures to this file",
    "peak_of": argparse.SUPPRESS,
}
PRINTS = """\
Prints a table with one line per arm: the loop that people run with such a network, this package ("ours"), and the
network calls of ours alone ("forwards", the floor). Each has seconds, tokens/s, network calls, rows, token-rows and
peak memory, all for the same windows. Below the table: ratios, and how far the numbers of ours and of the loop are
apart, in nats and in picks. --cache adds ours without the cache, --estimator two_phase the two-phase estimate.
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command, one field per flag."""

    pretrained: str = "random:bidirectional"
    layers: int | None = None
    width: int | None = None
    vocab: int | None = None
    length: int = 128
    block: str = "auto"
    cache: str | None = None
    estimator: str = "duel"
    sample: float | None = None
    windows: int = 2
    rule: str = "greedy"
    k: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    repeats: int = 3
    batch_size: int | None = None
    seed: int = 0
    no_memory: bool = False
    json: str | None = None
    peak_of: str | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DuelError(f"--{name} must be at least 1; got {value}.")
        if self.vocab == 1:
            raise DuelError(f"--vocab must be at least 2, [MASK] and one token; got {self.vocab}.")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise DuelError(f"--seed must be an integer from 0 to {LARGEST_SEED}; got {self.seed}.")
        if self.block not in ("auto", "none"):
            try:
                COUNT("--block", self.block)
            except DuelError:
                raise DuelError(f"--block must be a number of positions, auto or none; got '{self.block}'.") from None
        if self.dtype not in DTYPES[1:]:
            raise unknown("dtype", self.dtype, DTYPES[1:])
        if self.cache not in (None, *CACHES):
            raise unknown("value of --cache", self.cache, CACHES)
        if self.estimator not in ("duel", TWO_PHASE):
            raise unknown("value of --estimator", self.estimator, ("duel", TWO_PHASE))
        if self.estimator == TWO_PHASE and self.cache not in (None, "none"):
            raise DuelError("--estimator two_phase has its own first phase, under cache=dual; leave --cache out.")
        if self.sample is not None and (self.estimator != TWO_PHASE or not 0 < self.sample <= 1):
            raise DuelError(f"--sample is a share above 0, at most 1, of --estimator two_phase; got {self.sample:g}.")
        if self.peak_of not in (None, *ARMS):
            raise unknown("arm", self.peak_of, ARMS)
        rule = rules.parse(self.rule_text)
        if rule.spans_blocks:
            raise DuelError(f"bench runs loops over single blocks; rule {self.rule_text} keeps a history over them.")
        if isinstance(rules.inner(rule), rules.ModuleRule):
            raise DuelError(
                f"bench compares with a loop that keeps logits alone, and rule {self.rule_text} may read the input of "
                "the LM head. Use another rule."
            )

    @property
    def rule_text(self) -> str:
        """The rule with --k applied."""
        return self.rule if self.k is None else f"{self.rule}:k={self.k}"

    @property
    def positions(self) -> int | None:
        """The number of --block; None for auto and none."""
        return None if self.block in ("auto", "none") else COUNT("--block", self.block)

    def words(self) -> list[str]:
        """The equivalent command line."""
        words = []
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value is not False:
                words += [f"--{name}", *([] if value is True else [str(value)])]
        return words


def _type(field: dataclasses.Field[Any]) -> type:
    return next((kind for kind in (int, float) if kind.__name__ in str(field.type)), str)


@usage()
def parse(arguments: Sequence[str]) -> Settings:
    """The settings from the command line; raises UsageError."""
    parser = Parser(
        "bench",
        "Measure speed and memory against the loops that people run, on the same windows in the same process.",
        PRINTS,
        "--pretrained random:block-causal --vocab 8192 --length 1024 --block 4",
    )
    for field in dataclasses.fields(Settings):
        flag, text = f"--{field.name}", HELP[field.name]
        if field.type == "bool":
            parser.add_argument(flag, action="store_true", help=text)
            continue
        if field.default is not None:
            text = f"{text} ({field.default})"
        parser.add_argument(flag, type=_type(field), default=field.default, help=text)
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.json is not None and file_to_write("--json", settings.json).is_file():
        raise UsageError(f"--json {settings.json} exists, and would be overwritten; delete it, or name another file.")
    return settings
