"""The command line of `sweep` and its settings, checked before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence

from lm_eval_duel import rules
from lm_eval_duel.arguments import COUNT, whole
from lm_eval_duel.command_line import Parser, add_figures, figure_width, folder_to_write
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.harness.key_values import key_values, model_args
from lm_eval_duel.options import Options
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
        name, *parts = rules.split(str(self.rule))
        fields = dataclasses.fields(rules.inner(self.rule))
        defaults = {field.name: str(field.default) for field in fields if field.name != "k"}
        changed = [part for part in parts if defaults.get(part.partition("=")[0]) != part.partition("=")[2]]
        return ":".join([name, *changed])


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line, with `settings` and `pairs`; raises UsageError for wrong arguments."""
    parser = Parser(
        "sweep",
        "Compare unmasking rules at several speeds: likelihood of a task's text and quality of samples.",
        EPILOG,
        "--model_args pretrained=demo-mdm,block=16 --tasks sotu --rules greedy,margin --k 1,2,4 --limit 4 --out sweep",
    )
    add = parser.add_argument
    parser.add("model_args", "include_path", "metadata", "limit", "device", "batch_size")
    add(
        "--tasks",
        required=True,
        metavar="TASK",
        help="what is scored: a task (of type loglikelihood_rolling), its YAML file, or a file or folder of texts",
    )
    add("--rules", default="", help="greedy,margin,left_to_right,...")
    add("--k", default="1", help="positions per step, for each rule: 1,2,4,8 (1)")
    add("--mu", default="", help="values of the threshold rule: 0.5,0.9")
    add("--samples", default="0", help="samples per setting (0)")
    add("--length", default="128", help="tokens per sample (128)")
    add("--scorer", help="an autoregressive model for generative perplexity: a bundled name, a folder or a hub name")
    add(
        "--mauve",
        action="store_true",
        help="compute MAUVE of the samples against the task's text (needs the extra mauve)",
    )
    add("--mauve_model", default="gpt2-large", help="the model that computes MAUVE's features (gpt2-large)")
    add(
        "--kl",
        default="k=1",
        help="settings between which KL is computed: names as in the table, all, none (those with k=1)",
    )
    add("--elbo", nargs="?", const="128", metavar="DRAWS", help="also compute the Monte Carlo ELBO (128 draws)")
    add("--out", required=True, metavar="DIR", help="folder to write to")
    add_figures(parser)
    options = parser.parse_args(arguments)

    options.width = figure_width(options.width)
    for name, least in (("samples", 0), ("length", 1), ("limit", 1), ("elbo", 1)):
        setattr(options, name, whole(least)(f"--{name}", getattr(options, name)))
    options.samples = options.samples or 0
    options.settings = settings(options.rules, options.k, options.mu)
    if not options.samples and (options.scorer or options.mauve):
        raise DuelError("--scorer and --mauve need samples; choose their number: --samples 48.")
    options.pairs = pairs(options.kl, options.settings)
    if options.mauve and importlib.util.find_spec("mauve") is None:
        raise DuelError(MISSING_MAUVE)
    if "," in options.tasks:
        raise DuelError(
            f"A sweep takes one task; got --tasks {options.tasks}. Run it once per task, each with its own --out."
        )
    if not options.tasks:
        raise DuelError("--tasks is empty; name the task whose text is scored.")
    named.check(options.tasks, options.include_path)
    folder_to_write("--out", options.out)
    key_values("--metadata", options.metadata)
    _check_model(options)
    return options


def _check_model(options: argparse.Namespace) -> None:
    """Raise DuelError for wrong model args, and for those that the sweep sets itself."""
    arguments = model_args(options.model_args)
    for name in OURS:
        if name in arguments:
            raise DuelError(f"'{name}' in --model_args is set by the sweep; use --rules, --k and --mu.")
    for name in ("batch_size", "device"):
        if name in arguments:
            raise DuelError(f"'{name}' is not one of --model_args; pass it as --{name} VALUE.")
    Options.parse({**arguments, "batch_size": options.batch_size, "device": options.device})


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
    default = [f"{f.name}={f.default}" for f in dataclasses.fields(plain) if f.default is not dataclasses.MISSING]
    return ":".join(part for part in str(rule).split(":") if part not in (*speed, *default))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
