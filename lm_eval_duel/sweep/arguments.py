"""The command line of `sweep` and its settings, checked before anything is loaded.

A setting is a rule with all its parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Sequence

from lm_eval_duel import rules
from lm_eval_duel.arguments import CHECKPOINT, COUNT, TRUTH, declared, whole
from lm_eval_duel.command_line import NAMES, Flag, Parser
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.options import model_of
from lm_eval_duel.rules import Rule
from lm_eval_duel.rules.tables import without_defaults
from lm_eval_duel.tasks import named

EPILOG = """\
Prints a table of the settings: perplexity of the task's text, steps per token, and quality of samples.
A setting is a rule with one k, `threshold` with one mu, or a rule without k (entropy_bound:gamma=0.1).
Writes sweep.md, sweep.json and, if matplotlib is installed, a figure. Finished work is saved as it completes: run the
same command to continue an interrupted sweep. With torchrun or accelerate, all processes share the work.
"""
OURS = ("rule", "estimator", "lattice_rules", "trace", *sorted(rules.PARAMETERS))  # model args that the sweep sets


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `settings` and `pairs`; raises UsageError for wrong arguments."""
    options = Parser(
        "sweep",
        "Compare unmasking rules at several speeds: likelihood of a task's text and quality of samples.",
        EPILOG,
        "demo-mdm --model_args block=16 --tasks sotu --rules greedy,margin --k 1,2,4 --limit 4 --out sweep",
        *("NAME", "model_args", "device", "batch_size", "tasks", "include_path", "metadata", "limit"),
        *("out", "figures", "width"),
        length=Flag(COUNT, 128, "tokens of a sample, and of the pieces of the task's text beside them", shows="N"),
        rules=Flag(NAMES, (), "rules to compare: greedy,margin,left_to_right,..."),
        k=Flag(NAMES, ("1",), "positions per step, for each rule: 1,2,4,8", unset="1"),
        mu=Flag(NAMES, (), "values of the threshold rule: 0.5,0.9"),
        samples=Flag(whole(0), 0, "samples per setting", shows="N"),
        scorer=Flag(CHECKPOINT, None, "an autoregressive model for generative perplexity", shows="NAME"),
        mauve=Flag(TRUTH, False, "compute MAUVE of the samples against the task's text (needs the extra mauve)"),
        mauve_model=Flag(CHECKPOINT, "gpt2-large", "the model that computes MAUVE's features", shows="NAME"),
        kl=Flag(
            NAMES,
            ("k=1",),
            "settings between which KL is computed: names as in the table, all, none, or k=1: those with it",
            unset="k=1",
            none=(),
        ),
        elbo=Flag(COUNT, None, "also compute the Monte Carlo ELBO; without a number, 128", alone="128", shows="DRAWS"),
    ).parse_args(arguments)
    options.settings = settings(options.rules, options.k, options.mu)
    if not options.samples and (options.scorer or options.mauve):
        raise DuelError("--scorer and --mauve need samples; choose their number: --samples 48.")
    options.kl = between(options.kl, options.settings)
    if options.mauve and importlib.util.find_spec("mauve") is None:
        raise DuelError(
            "--mauve needs the package mauve-text, which is not installed: pip install 'lm-eval-duel[mauve]'."
        )
    if len(options.tasks) != 1:
        raise DuelError(
            f"A sweep takes one task; got --tasks {','.join(options.tasks)}. Run it once per task, each with its own "
            "--out."
        )
    (options.tasks,) = options.tasks
    named.check(options.tasks, options.include_path)
    for name in OURS:
        if name in options.model_args:
            raise DuelError(f"'{name}' in --model_args is set by the sweep; use --rules, --k and --mu.")
    model_of(options)
    return options


def settings(named: Sequence[str], ks: Sequence[str], mus: Sequence[str]) -> list[Rule]:
    """The settings of `--rules`, `--k` and `--mu`, each once; raises DuelError for a wrong one."""
    counts = [COUNT("--k", k) for k in ks]
    texts = []
    for text in named:
        rule = rules.find(rules.split(text)[0])
        if rule is rules.RULES["threshold"] and ":" not in text:
            raise DuelError("Pass thresholds with --mu 0.5,0.9, not in --rules.")
        texts += [f"{text}:k={k}" for k in counts] if "k" in declared(rule) else [text]
    texts += [f"threshold:mu={mu}" for mu in mus]
    if not texts:
        raise DuelError("Nothing to compare: name rules (--rules greedy,margin,left_to_right) or thresholds (--mu).")
    return distinct(map(rules.parse, texts))


def distinct(settings: Iterable[Rule]) -> list[Rule]:
    """Each setting once."""
    return [*{str(setting): setting for setting in settings}.values()]


def k_of(setting: Rule) -> int | None:
    """The positions per step of a rule that has such a parameter."""
    return getattr(rules.inner(setting), "k", None)


def name_of(setting: Rule) -> str:
    """The name in tables: the rule without default parameters, but with k."""
    return without_defaults(str(setting), keep="k")


def cap(setting: Rule, block: int | None) -> Rule:
    """A setting with its k limited to the block, which is then revealed in one step."""
    k = k_of(setting)
    return setting if block is None or k is None or k <= block else rules.replaced(setting, k=block)


def between(names: Sequence[str], settings: Sequence[Rule]) -> list[Rule]:
    """The settings that the names of `--kl` stand for."""
    stand_for: dict[str, list[Rule]] = {"all": [*settings], "k=1": [rule for rule in settings if k_of(rule) == 1]}
    stand_for |= {name: [rule] for rule in settings for name in (str(rule), name_of(rule))}
    for name in names:
        if name not in stand_for:
            raise unknown("setting of --kl", name, map(name_of, settings))
    chosen = {str(rule) for name in names for rule in stand_for[name]}
    return [rule for rule in settings if str(rule) in chosen]
