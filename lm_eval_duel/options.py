"""Every model arg in one frozen dataclass, checked before anything heavy is imported.

    --model_args pretrained=...,rule=klass,mu=0.9,nu=0.01,block=32

The network's arguments are declared in `denoisers/load_options.py`, those of single estimators in
`estimators/registry.py`, a rule's parameters on its class; all others here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lm_eval_duel import rules
from lm_eval_duel.arguments import (
    NOTHING,
    Reader,
    argument,
    at_least,
    block_size,
    checkpoint_name,
    count,
    readers,
    required_choice,
    text,
)
from lm_eval_duel.denoisers.load_options import ALIASES, NETWORK_READERS, WHOLE_ROW_BOS, NetworkArguments
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.rules import presets

Windows = Literal["independent", "harness"]
Grid = Literal["auto", "target", "row"]
Order = Literal["random", "longest"]


def _batch_size(key: str, value: Any) -> int | str:
    if value in NOTHING or str(value).split(":")[0] == "auto":  # auto:N, the harness's way to try again, is auto here
        return "auto"
    try:
        return count(key, value)
    except DuelError:
        raise DuelError(f"'{key}' is a number of rows, at least 1, or auto; got '{value}'.") from None


def _preset(key: str, value: Any) -> str | None:
    return None if (name := text(key, value)) is None else presets.find(name).name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(NetworkArguments):
    """All model args of one run."""

    pretrained: str | None = argument(checkpoint_name)  # a folder or a hub name; None: the bundled demo-mdm
    tokenizer: str | None = argument(checkpoint_name)
    preset: str | None = argument(_preset)  # a deployed sampler, which sets other arguments
    rule: rules.Rule = dataclasses.field(default_factory=rules.Greedy)
    block: int | str | None = argument(block_size, "auto")  # positions, None (the whole target) or "auto"
    grid: Grid = argument(required_choice(*get_args(Grid)), "auto")
    windows: Windows = argument(required_choice(*get_args(Windows)), "independent")
    estimator: str = argument(registry.read_name, "duel")
    estimator_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # those that only this estimator reads
    order: Order = argument(required_choice(*get_args(Order)), "random")  # of whole texts; changes no number
    draw_seed: int = argument(at_least(0, 0), 0)
    trace: str | None = argument(text)
    verify: int = argument(at_least(0, 0), 0)  # windows that are scored again, one row at a time in float32
    batch_size: int | str = argument(_batch_size, "auto")  # rows of max_length in a network call
    max_batch_size: int | None = argument(count)
    device: str | None = argument(text)

    def __post_init__(self) -> None:
        defaults = {name: argument.default for name, argument in registry.find(self.estimator).arguments.items()}
        object.__setattr__(self, "estimator_args", {**defaults, **self.estimator_args})

    @classmethod
    @usage()
    def parse(cls, arguments: Mapping[str, Any]) -> Options:
        """The options of model args.

        Raises:
            UsageError: one is wrong; the message names it, and the nearest known name.
        """
        name = _preset("preset", arguments.get("preset"))
        preset = None if name is None else presets.find(name)
        given = {**(preset.arguments if preset else {}), **arguments}
        own, estimators = readers(cls), _estimator_arguments(given)
        readable = {**own, **{name: argument.read for name, argument in estimators.items()}}
        if preset is not None:
            arguments = _with_preset(preset, arguments, readable)
        known = [*readable, *ALIASES, "rule", *_parameters(arguments)]
        for key in arguments:
            if key not in known and key not in rules.PARAMETERS:
                raise unknown("model arg", key, known)
        rule = _rule({key: value for key, value in arguments.items() if key not in (*readable, *ALIASES)})
        values = {key: readable[key](key, arguments[key]) for key in arguments if key in readable}
        _read_aliases(arguments, values)
        if values.get("windows") == "harness" and values.get("bos") in WHOLE_ROW_BOS:
            raise DuelError(
                f"bos={values['bos']} places the special tokens of each row itself, so it needs windows=independent."
            )
        registry.check_arguments(values, values.get("estimator", "duel"))
        estimator_args = {key: values.pop(key) for key in estimators if key in values}
        options = cls(rule=rule, estimator_args=estimator_args, **values)
        if (check := registry.find(options.estimator).check) is not None:
            check(options)
        _check_cache(options, arguments.get("cache"))
        return options

    def require_preset_fits(self, family: str | None) -> None:
        """Raise DuelError if the preset is not for checkpoints of this family; None is a family not known yet."""
        presets.require_fit(self.preset, family)

    def with_tokenizer(self, tokenizer: Any) -> Options:
        """These options with the ids that the rule takes from a tokenizer."""
        rule = self.rule.with_tokenizer(tokenizer)
        return self if rule is self.rule else dataclasses.replace(self, rule=rule)

    @property
    def network(self) -> dict[str, Any]:
        """The network arguments, for `denoisers.load`."""
        network = {name: getattr(self, name) for name in NETWORK_READERS}
        if registry.find(self.estimator).causal:
            network |= {"attention": network["attention"] or "causal", "block": None}
        if registry.find(self.estimator).own_cache:
            network["cache"] = None
        return network

    @property
    def rows(self) -> int | None:
        """Rows of max_length in a network call; None: as many as the device takes.

        The harness passes batch_size=1 if the user gave none, so 1 is auto too; max_batch_size=1 is one row.
        """
        return None if self.batch_size in ("auto", 1) else self.batch_size


def _check_cache(options: Options, given: Any) -> None:
    """Raise DuelError for `cache`, as given, if it does not go with the estimator or the rule."""
    entry = registry.find(options.estimator)
    if entry.own_cache and str(given).lower() == "none" and given is not None:
        raise DuelError(
            f"estimator={entry.name} estimates the value without a cache; 'cache' is its first phase, dual or prefix. "
            "Leave cache out, or use estimator=duel."
        )
    if options.cache and not entry.own_cache and entry.follows_rule and options.rule.spans_blocks:
        raise DuelError(
            f"across=true of rule klass reads predictions that cache={options.cache} does not compute: those for a "
            "block while the block before is revealed. Leave one of them out."
        )


def names() -> list[str]:
    """Every model arg but the rules' parameters and the harness's aliases."""
    return [*readers(Options), "rule", *registry.arguments()]


def _estimator_arguments(arguments: Mapping[str, Any]) -> dict[str, registry.Argument]:
    """The args that estimators read. A name that rules have, too, is the rule's unless the estimator given reads it."""
    named = registry.ESTIMATORS.get(str(arguments.get("estimator", "duel")))
    own = {} if named is None else named.arguments
    return {key: value for key, value in registry.arguments().items() if key in own or key not in rules.PARAMETERS}


def _with_preset(
    preset: presets.Preset, arguments: Mapping[str, Any], readable: Mapping[str, Reader]
) -> dict[str, Any]:
    """The args of a preset and those given; raises DuelError for one that contradicts the preset."""
    settings = dict(preset.arguments)
    if "rule" in arguments and "rule" in settings:
        given = _rule({key: value for key, value in arguments.items() if key == "rule" or key in rules.PARAMETERS})
        own = _rule({key: settings.pop(key) for key in ("rule", *preset.free) if key in settings})
        free = {key: getattr(rules.inner(given), key, None) for key in preset.free}
        if str(rules.inner(given).name) != own.name or rules.replaced(own, **free) != given:
            raise presets.conflict(preset, "rule", arguments["rule"])
    elif "rule" in settings:
        for key in arguments:
            if key in rules.PARAMETERS and key not in preset.free:
                raise presets.conflict(preset, key, arguments[key])
    for key, value in settings.items():
        if key in preset.free or key not in arguments or key not in readable:
            continue
        if readable[key](key, arguments[key]) != readable[key](key, value):
            raise presets.conflict(preset, key, arguments[key])
    return {**settings, **arguments}


def _read_aliases(arguments: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Enter the arguments that are given under the harness's names into `values`."""
    for alias, (name, read) in ALIASES.items():
        if alias not in arguments or (value := read(alias, arguments[alias])) is None:
            continue
        if values.get(name) not in (None, value):
            raise DuelError(f"{alias}={arguments[alias]} means {name}={value}, but {name}={values[name]} is given.")
        values[name] = value


def _parameters(arguments: Mapping[str, Any]) -> list[str]:
    """The parameters of the rule that is named."""
    return [field.name for field in dataclasses.fields(rules.find(rules.split(arguments.get("rule", "greedy"))[0]))]


def _rule(arguments: Mapping[str, Any]) -> rules.Rule:
    """The rule of `rule=` and of the parameters given as model args of their own."""
    text = str(arguments.get("rule", "greedy"))
    name, inside = rules.read(text)
    outside = {key: value for key, value in arguments.items() if key != "rule"}
    for key in outside:
        if key in inside:
            raise DuelError(f"'{key}' is given twice: in rule={text} and as a model arg.")
    return rules.build(name, inside | outside)
