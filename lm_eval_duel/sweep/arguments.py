"""The command line of `sweep` and its settings, checked before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence

from lm_eval_duel import rules
from lm_eval_duel.arguments import CHECKPOINT, COUNT, RAW, TRUTH, whole
from lm_eval_duel.command_line import Flag, Parser
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.options import model_of
from lm_eval_duel.tasks import named

EPILOG = """\
Prints a table of the settings: perplexity of the task's text, steps per token, and quality of samples.
A setting is a rule with one k, `threshold` with one mu, or a rule without k (entropy_bound:gamma=0.1).
Writes sweep.md, sweep.json and, if matplotlib is installed, a figure. Finished work is saved as it completes: run the
same command to continue an interrupted sweep. With torchrun or accelerate, all processes share the work.
"""
MISSING_MAUVE = "--mauve needs the package mauve-text, which is not installed: pip install 'lm-eval-duel[mauve]'."
OURS = ("rule", "estimator", "lattice_rules", "trace", *sorted(rules.PARAMETERS))  # model args that the sweep sets


@dataclasses.dataclass(frozen=True)
class Setting:
    """A rule with its parameters. `family`: its line in the figure."""

    rule: rules.Rule
    family: str
    k: int | None = None

    @property
    def name(self) -> str:
        """The name in tables: the rule without default parameters, but with k."""
        return _without_defaults(self.rule, keep="k")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `settings` and `pairs`; raises UsageError for wrong arguments."""
    options = Parser(
        "sweep",
        "Compare unmasking rules at several speeds: likelihood of a task's text and quality of samples.",
        EPILOG,
        "demo-mdm --model_args block=16 --tasks sotu --rules greedy,margin --k 1,2,4 --limit 4 --out sweep",
        *("NAME", "model_args", "device", "batch_size", "tasks", "include_path", "metadata", "limit"),
        *("length", "out", "figures", "width"),
        rules=Flag(RAW, "", "rules to compare: greedy,margin,left_to_right,..."),
        k=Flag(RAW, "1", "positions per step, for each rule: 1,2,4,8"),
        mu=Flag(RAW, "", "values of the threshold rule: 0.5,0.9"),
        samples=Flag(whole(0), 0, "samples per setting", shows="N"),
        scorer=Flag(CHECKPOINT, None, "an autoregressive model for generative perplexity", shows="NAME"),
        mauve=Flag(TRUTH, False, "compute MAUVE of the samples against the task's text (needs the extra mauve)"),
        mauve_model=Flag(CHECKPOINT, "gpt2-large", "the model that computes MAUVE's features", shows="NAME"),
        kl=Flag(
            RAW, "k=1", "settings between which KL is computed: names as in the table, all, none, or k=1: those with it"
        ),
        elbo=Flag(COUNT, None, "also compute the Monte Carlo ELBO; without a number, 128", alone="128", shows="DRAWS"),
    ).parse_args(arguments)
    options.settings = settings(options.rules, options.k, options.mu)
    if not options.samples and (options.scorer or options.mauve):
        raise DuelError("--scorer and --mauve need samples; choose their number: --samples 48.")
    options.pairs = pairs(options.kl, options.settings)
    if options.mauve and importlib.util.find_spec("mauve") is None:
        raise DuelError(MISSING_MAUVE)
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


def settings(named: str, ks: str, mus: str) -> list[Setting]:
    """The settings of `--rules`, `--k` and `--mu`; raises DuelError for a wrong one."""
    result = []
    counts = [COUNT("--k", k) for k in _parts(ks)]
    for text in _parts(named):
        rule = rules.find(rules.split(text)[0])
        if rule is rules.RULES["threshold"] and ":" not in text:
            raise DuelError("Pass thresholds with --mu 0.5,0.9, not in --rules.")
        if not any(field.name == "k" for field in dataclasses.fields(rule)):
            result.append(Setting(rules.parse(text), _family(rules.parse(text))))
            continue
        parsed = [(rules.parse(f"{text}:k={k}"), k) for k in counts]
        result += [Setting(rule, _family(rule), k) for rule, k in parsed]
    for mu in _parts(mus):
        result.append(Setting(rules.parse(f"threshold:mu={mu}"), "threshold"))
    if not result:
        raise DuelError("Nothing to compare: name rules (--rules greedy,margin,left_to_right) or thresholds (--mu).")
    return list({str(setting.rule): setting for setting in result}.values())


def capped(settings: Sequence[Setting], block: int | None) -> tuple[list[Setting], list[str]]:
    """The settings with every k limited to the block (which is then revealed in one step), and a note about it."""
    largest = max((setting.k or 0 for setting in settings), default=0)
    if block is None or largest <= block:
        return list(settings), []
    kept = {str(setting.rule): setting for setting in (cap(setting, block) for setting in settings)}
    return list(kept.values()), [
        f"A k above the block of {block} reveals the whole block in one step: it is listed as k={block}."
    ]


def cap(setting: Setting, block: int | None) -> Setting:
    """A setting with its k limited to the block."""
    if block is None or not setting.k or setting.k <= block:
        return setting
    return dataclasses.replace(setting, rule=rules.replaced(setting.rule, k=block), k=block)


def pairs(text: str, settings: Sequence[Setting]) -> list[str]:
    """The names of the settings between which KL is computed."""
    if text == "none":
        return []
    if text in ("all", "k=1"):
        return [setting.name for setting in settings if text == "all" or setting.k == 1]
    names = {alias: setting.name for setting in settings for alias in (setting.name, str(setting.rule))}
    for name in _parts(text):
        if name not in names:
            raise unknown("setting of --kl", name, [setting.name for setting in settings])
    return [names[name] for name in _parts(text)]


def _family(rule: rules.Rule) -> str:
    """A rule without its speed and default parameters, however it was typed: one line of the figure."""
    plain = rules.inner(rule)
    speed = [f"{name}={getattr(plain, name)}" for name in plain.speed if hasattr(plain, name)]
    return ":".join(part for part in _without_defaults(rule).split(":") if part not in speed)


def _without_defaults(rule: rules.Rule, keep: str = "") -> str:
    """A rule's text, also of a rule of the user's own, without parameters at their defaults other than `keep`."""
    fields = dataclasses.fields(rules.inner(rule))
    default = [f"{field.name}={field.default}" for field in fields if field.name != keep]
    return ":".join(part for part in str(rule).split(":") if part not in default)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
