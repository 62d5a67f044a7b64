"""The command line of `sweep`, and its settings: checked before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence

from lm_eval_duel import rules
from lm_eval_duel.arguments import count
from lm_eval_duel.command_line import Parser, folder_to_write
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.harness.key_values import key_values
from lm_eval_duel.options import Options

EPILOG = """\
Prints a table of the settings: perplexity of the task's text, steps a token, and what samples are like.
Settings: every rule with every k, `threshold` with every mu; a rule that takes no k (entropy_bound:gamma=0.1) is one.
Writes sweep.md, sweep.json, sweep.png (where matplotlib is installed), and as it goes on what is finished: the same
command again goes on from there.
"""
MISSING_MAUVE = "--mauve needs the package mauve-text, which is not installed: pip install 'lm-eval-duel[mauve]'."
OURS = ("rule", "estimator", "lattice_rules", "trace", *sorted(rules.PARAMETERS))  # model args that the sweep sets


@dataclasses.dataclass(frozen=True)
class Setting:
    """One rule with its parameters; `family`: the line of the figure that it stands on."""

    rule: rules.Rule
    family: str
    k: int | None = None

    @property
    def name(self) -> str:
        """As in tables: the rule without parameters that stand at their defaults, but k."""
        name, *parts = rules.split(str(self.rule))
        fields = dataclasses.fields(rules.inner(self.rule))
        defaults = {field.name: str(field.default) for field in fields if field.name != "k"}
        said = [part for part in parts if defaults.get(part.partition("=")[0]) != part.partition("=")[2]]
        return ":".join([name, *said])


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `settings` are made of its rules. Raises UsageError for what is known to be wrong."""
    parser = Parser(
        "sweep",
        "Unmasking rules at several speeds: likelihood of a task's text, and quality of samples.",
        EPILOG,
        "--model_args pretrained=demo-mdm,block=16 --tasks sotu --rules greedy,margin --k 1,2,4 --limit 4 --out sweep",
    )
    add = parser.add_argument
    add("--model_args", default="", help="as for lm_eval, without a rule: pretrained=...,block=16")
    add("--tasks", required=True, metavar="TASK", help="whose text is scored: one loglikelihood_rolling task")
    add("--rules", default="", help="greedy,margin,left_to_right,...")
    add("--k", default="1", help="positions a step, for each rule: 1,2,4,8 (1)")
    add("--mu", default="", help="thresholds, a setting each: 0.5,0.9")
    add("--samples", default="0", help="of each setting (0)")
    add("--length", default="128", help="of a sample, in tokens (128)")
    add("--scorer", help="an autoregressive model for generative perplexity: a bundled name, a folder or a hub name")
    add("--mauve", action="store_true", help="MAUVE of the samples against the task's text (extra: mauve)")
    add("--mauve_model", default="gpt2-large", help="whose features MAUVE compares (gpt2-large)")
    add("--kl", default="k=1", help="between which settings: names as in the table, all, none (those with k=1)")
    add("--elbo", nargs="?", const="128", metavar="DRAWS", help="the Monte Carlo ELBO too, of so many draws (128)")
    add("--out", required=True, metavar="DIR", help="where to write")
    add("--limit", help="the first documents only")
    add("--device", help="cpu, cuda, ... (a GPU where there is one)")
    add("--batch_size", default="auto", help="rows of max_length in a network call (auto)")
    add("--metadata", default="", help="of the task, as for lm_eval: length=...,data_dir=...")
    asked = parser.parse_args(arguments)

    for name, least in (("samples", 0), ("length", 1), ("limit", 1), ("elbo", 1)):
        setattr(asked, name, count(f"--{name}", getattr(asked, name), least))
    asked.samples = asked.samples or 0
    asked.settings = settings(asked.rules, asked.k, asked.mu)
    if not asked.samples and (asked.scorer or asked.mauve):
        raise DuelError("--scorer and --mauve judge samples; say how many: --samples 48.")
    asked.pairs = pairs(asked.kl, asked.settings)
    if asked.mauve and importlib.util.find_spec("mauve") is None:
        raise DuelError(MISSING_MAUVE)
    if "," in asked.tasks:
        raise DuelError(f"A sweep is of one task; got --tasks {asked.tasks}. Run it once for each, with another --out.")
    if not asked.tasks:
        raise DuelError("--tasks is empty; name the task whose text is scored.")
    folder_to_write("--out", asked.out)
    key_values("--metadata", asked.metadata)
    _check_model(asked)
    return asked


def _check_model(asked: argparse.Namespace) -> None:
    """Raise DuelError for model args that are wrong, or that the sweep sets."""
    arguments = key_values("--model_args", asked.model_args)
    for name in OURS:
        if name in arguments:
            raise DuelError(f"'{name}' in --model_args: a sweep sets it itself; use --rules, --k and --mu.")
    for name in ("batch_size", "device"):
        if name in arguments:
            raise DuelError(f"'{name}' is an argument of its own, not one of --model_args: --{name} VALUE.")
    Options.parse({**arguments, "batch_size": asked.batch_size, "device": asked.device})


def settings(named: str, ks: str, mus: str) -> list[Setting]:
    """The settings of `--rules`, `--k` and `--mu`; raises DuelError for a wrong one."""
    found = []
    counts = [count("--k", k) for k in _parts(ks)]
    for text in _parts(named):
        rule = rules.find(rules.split(text)[0])
        if rule is rules.RULES["threshold"] and ":" not in text:
            raise DuelError("Thresholds are named with --mu 0.5,0.9, not in --rules.")
        if not any(field.name == "k" for field in dataclasses.fields(rule)):
            found.append(Setting(rules.parse(text), _family(rules.parse(text))))
            continue
        parsed = [(rules.parse(f"{text}:k={k}"), k) for k in counts]
        found += [Setting(rule, _family(rule), k) for rule, k in parsed]
    for mu in _parts(mus):
        found.append(Setting(rules.parse(f"threshold:mu={mu}"), "threshold"))
    if not found:
        raise DuelError("Nothing to compare: name rules (--rules greedy,margin,left_to_right) or thresholds (--mu).")
    return list({str(setting.rule): setting for setting in found}.values())


def capped(found: Sequence[Setting], block: int | None) -> tuple[list[Setting], list[str]]:
    """The settings with no k above the block, where all of it is revealed in one step anyhow; and what was changed."""
    largest = max((setting.k or 0 for setting in found), default=0)
    if block is None or largest <= block:
        return list(found), []
    kept = {str(setting.rule): setting for setting in (cap(setting, block) for setting in found)}
    return list(kept.values()), [
        f"k above the block of {block} reveals all of it in one step: k={block} stands for it."
    ]


def cap(setting: Setting, block: int | None) -> Setting:
    """A setting with no k above the block."""
    if block is None or not setting.k or setting.k <= block:
        return setting
    return dataclasses.replace(setting, rule=rules.replaced(setting.rule, k=block), k=block)


def pairs(text: str, found: Sequence[Setting]) -> list[str]:
    """The names between which KL is asked for."""
    if text == "none":
        return []
    if text in ("all", "k=1"):
        return [setting.name for setting in found if text == "all" or setting.k == 1]
    names = {alias: setting.name for setting in found for alias in (setting.name, str(setting.rule))}
    for name in _parts(text):
        if name not in names:
            raise unknown("setting of --kl", name, [setting.name for setting in found])
    return [names[name] for name in _parts(text)]


def _family(rule: rules.Rule) -> str:
    """A rule without what sets its speed, and without defaults, whatever its user typed: one line of the figure."""
    plain = rules.inner(rule)
    speed = [f"{name}={getattr(plain, name)}" for name in plain.speed if hasattr(plain, name)]
    default = [f"{f.name}={f.default}" for f in dataclasses.fields(plain) if f.default is not dataclasses.MISSING]
    return ":".join(part for part in str(rule).split(":") if part not in (*speed, *default))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
