"""Every model arg in one frozen dataclass, checked before anything heavy is imported.

    --model_args pretrained=...,rule=klass,mu=0.9,nu=0.01,block=32

The network's arguments are declared in `denoisers/load_options.py`, the arguments of single estimators in
`estimators/arguments.py`, a rule's parameters on its class, and all others here.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from lm_eval_duel import rules
from lm_eval_duel.arguments import (
    BLOCK,
    CHECKPOINT,
    COUNT,
    OPTIONAL_PATH,
    TEXT,
    Argument,
    Arguments,
    ArgumentType,
    argument,
    choice,
    declared,
    unique_keys,
    whole,
)
from lm_eval_duel.denoisers.load_options import ALIASES, NETWORK_ARGUMENTS, WHOLE_ROW_BOS, NetworkArguments
from lm_eval_duel.errors import DuelError, UsageError, unknown, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.rules import presets

Windows = Literal["independent", "harness"]
Grid = Literal["auto", "target", "row"]
Order = Literal["random", "longest"]


def _batch_size(value: Any) -> int | str:
    """A number of rows, or auto. The harness's auto:N, which measures again N times, is auto here."""
    return "auto" if str(value).split(":")[0] == "auto" else COUNT.convert(value)


def _preset(value: Any) -> str:
    """The name of a preset; raises DuelError for any other, and says of a rule or an estimator how it is given."""
    name = str(value)
    if name in rules.RULES or name in rules.ALIASES:
        raise DuelError(f"'{name}' is a rule, not a preset: write rule={name}.")
    registry.require_not_estimator("preset", name)
    return presets.find(name).name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(NetworkArguments):
    """All model args of one run."""

    pretrained: str | None = argument(
        CHECKPOINT,
        None,
        "the folder of a [checkpoint](checkpoints.md), its name on the hub, or a bundled name",
        unset="demo-mdm",
    )
    tokenizer: str | None = argument(CHECKPOINT, None, "another folder or hub name", unset="the checkpoint's")
    preset: str | None = argument(
        ArgumentType("the name of a preset", _preset),
        None,
        "a [deployed sampler](samplers.md) by name, with the rule, block, cache and thresholds of its authors' code",
    )
    rule: rules.Rule = argument(
        ArgumentType("a rule", lambda value: value if isinstance(value, rules.Rule) else rules.parse(str(value))),
        rules.Greedy(),
        "the [unmasking rule](rules.md); its parameters may be args, too",
    )
    block: int | str | None = argument(
        ArgumentType("a number of positions, none (the whole text), or auto", BLOCK.convert),
        "auto",
        "positions finished before the next ones begin. `none`: the whole text. `auto`: the trained or published "
        "block, else 32",
        none=None,
    )
    grid: Grid = argument(
        choice(Grid),
        "auto",
        "where blocks start counting: at the first scored position or at the row's first. `auto`: `row` for "
        "block-causal networks except [D2F](checkpoints.md#d2f), else `target`",
    )
    windows: Windows = argument(
        choice(Windows),
        "independent",
        "long texts are cut into consecutive windows, each from scratch, as in the paper, or into the `harness`'s "
        "rolling windows",
    )
    estimator: str = argument(
        ArgumentType("the name of an estimator", lambda value: registry.find(str(value)).name),
        "duel",
        "[what is computed](estimators.md)",
    )
    # the arguments that only this estimator reads; None: their defaults
    estimator_args: Arguments = dataclasses.field(default=None)  # type: ignore[assignment]
    draw_seed: int = argument(
        whole(0),
        0,
        "seed of the draws of bounds and estimates, of generated texts, `order=random` and `verify=N`. Noise of random "
        "tokens has its own, `noise_seed`",
    )
    order: Order = argument(
        choice(Order),
        "random",
        "score whole texts in `random` order, for a [running estimate](running.md#running-estimates), or `longest` "
        "first",
        identity=False,
    )
    trace: str | None = argument(
        OPTIONAL_PATH, None, "write a line for each window to this [file](results.md#traces)", identity=False
    )
    verify: int = argument(
        whole(0),
        0,
        "score this many windows again [by the specification](running.md#verify-a-run), in float32",
        identity=False,
    )
    batch_size: int | str = argument(
        ArgumentType("a number of rows, at least 1, or auto", _batch_size),
        "auto",
        "[rows of `max_length`](#batch-size) in a network call. On the command line: `--batch_size`",
        identity=False,
    )
    max_batch_size: int | None = argument(
        COUNT, None, "at most this many rows of `max_length` in a call (more of shorter ones)", identity=False
    )
    device: str | None = argument(
        TEXT,
        None,
        "`cpu`, `cuda`, `cuda:1`. On the command line: `--device`",
        unset="a GPU if there is one",
        identity=False,
    )

    def __post_init__(self) -> None:
        if self.estimator_args is None:
            object.__setattr__(self, "estimator_args", registry.find(self.estimator).record())

    @classmethod
    @usage()
    def parse(cls, arguments: Mapping[str, Any]) -> Options:
        """The options of model args.

        Raises:
            UsageError: one is wrong; the message names it, and the nearest known name.
        """
        require_commas(arguments)
        if arguments.get("rule") == "":
            MODEL_ARGUMENTS["rule"].read("rule", "")  # raises: an empty value is not the name of an unknown rule
        registry.require_not_estimator("rule", str(arguments.get("rule")))

        name = MODEL_ARGUMENTS["preset"].read("preset", arguments.get("preset"))
        preset = None if name is None else presets.find(name)
        preset_args = {} if preset is None else preset.arguments
        estimator_arguments = _estimator_arguments({**preset_args, **arguments})
        readable = {**MODEL_ARGUMENTS, **estimator_arguments}
        if preset is not None:
            arguments = _with_preset(preset, arguments, readable)
        _require_known(arguments, readable)

        readable.pop("rule")  # read together with its parameters
        values = {}
        rule_args = {}
        for key, value in arguments.items():
            if key in readable:
                values[key] = readable[key].read(key, value)
            elif key not in ALIASES:
                rule_args[key] = value
        entry = registry.find(values.get("estimator", "duel"))
        registry.check_rule([*rule_args] if preset is None else ["preset"], entry.name)
        rule = rule_of(rule_args)

        _read_aliases(arguments, values)
        if values.get("windows") == "harness" and values.get("bos") in WHOLE_ROW_BOS:
            raise DuelError(
                f"bos={values['bos']} places the special tokens of each row itself, so it needs windows=independent."
            )
        registry.check_arguments(values, entry.name)
        estimator_args = {key: values.pop(key) for key in estimator_arguments if key in values}
        options = cls(rule=rule, estimator_args=entry.record(**estimator_args), **values)
        entry.check(options)
        _check_cache(options, arguments.get("cache"))
        return options

    def with_tokenizer(self, tokenizer: Any) -> Options:
        """These options with the ids that the rule takes from a tokenizer."""
        rule = self.rule.with_tokenizer(tokenizer)
        return self if rule is self.rule else dataclasses.replace(self, rule=rule)

    @property
    def preset_as_given(self) -> presets.Preset | None:
        """The preset, with the values that these options have for its free args; None without a preset."""
        if self.preset is None:
            return None
        preset = presets.find(self.preset)
        arguments = dict(preset.arguments)
        for key in preset.free:
            is_of_rule = key in rules.PARAMETERS
            arguments[key] = getattr(rules.inner(self.rule) if is_of_rule else self, key)
        return dataclasses.replace(preset, arguments=arguments)

    @property
    def network(self) -> dict[str, Any]:
        """The network arguments, for `denoisers.load`."""
        entry = registry.find(self.estimator)
        network = {name: getattr(self, name) for name in NETWORK_ARGUMENTS}
        if entry.causal:
            network["attention"] = network["attention"] or "causal"
            network["block"] = None
        if entry.own_cache:
            network["cache"] = None  # a setting of the estimator; the network is loaded without
        return network

    @property
    def rows(self) -> int | None:
        """Rows of max_length in a network call; None: as many as the device takes.

        The harness passes batch_size=1 if the user gave none, so 1 means auto, too; max_batch_size=1 asks for one row.
        """
        return None if self.batch_size in ("auto", 1) else self.batch_size


def _model_arguments() -> dict[str, Argument]:
    """Every model arg except those of single estimators. The network's come last, as tables show them."""
    arguments = declared(Options)
    del arguments["estimator_args"]
    of_network = {}
    for name in NETWORK_ARGUMENTS:
        if name != "block":  # a network argument to which `Options` gives another meaning
            of_network[name] = arguments.pop(name)
    return {**arguments, **of_network}


MODEL_ARGUMENTS: dict[str, Argument] = _model_arguments()


@usage()
def model_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The model args of a command line: NAME, --model_args, --device and --batch_size; raises UsageError."""
    given = with_flags(model_args_of(flags), device=flags.device, batch_size=flags.batch_size)
    Options.parse(given)
    return given


def model_args_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The model args of NAME and --model_args, which tasks read, too; raises DuelError for a checkpoint named twice."""
    name = getattr(flags, "name", None)
    named = [] if name is None else [("pretrained", name)]
    return unique_keys([*named, *flags.model_args.items()])


def with_flags(model_args: Mapping[str, Any], **flags: Any) -> dict[str, Any]:
    """The model args, with those that have a separate flag; raises UsageError for such an arg in --model_args."""
    for key in flags:
        if key in model_args:
            raise UsageError(f"'{key}' is not one of --model_args; pass it as --{key} VALUE.")
    return {**model_args, **flags}


def with_lm_evals_flags(model_args: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model args, with those that are flags of lm-eval's command; None among its settings: not given.

    Raises UsageError for an arg that is given as a flag, too. --batch_size always is: lm-eval's default is 1.
    """
    flags = {}
    for key in ("batch_size", "max_batch_size", "device"):
        if settings.get(key) is not None:
            flags[key] = settings[key]
    return with_flags(model_args, **flags)


def _check_cache(options: Options, given: Any) -> None:
    """Raise DuelError for `cache`, as given, if it does not go with the estimator or the rule."""
    entry = registry.find(options.estimator)
    without = given is not None and str(given).lower() == "none"  # cache=none; None: not given
    if entry.own_cache and without:
        raise DuelError(
            f"estimator={entry.name} estimates the value without a cache; 'cache' is that of its first phase, dual or "
            "prefix. Leave cache out, or use estimator=duel."
        )
    if options.cache and not entry.own_cache and entry.follows_rule and options.rule.spans_blocks:
        raise DuelError(
            f"across=true of rule klass reads predictions that cache={options.cache} does not compute: those for a "
            "block while the block before is revealed. Leave one of them out."
        )


def _estimator_arguments(arguments: Mapping[str, Any]) -> dict[str, registry.Argument]:
    """The args that estimators read. A name that rules have, too, is the rule's unless the estimator given reads it."""
    chosen = registry.ESTIMATORS.get(str(arguments.get("estimator", "duel")))  # a wrong name is refused when it is read
    chosen_args = {} if chosen is None else chosen.arguments
    readable = {**registry.arguments(), **chosen_args}  # where estimators share a name, the chosen one's declaration
    return {key: value for key, value in readable.items() if key in chosen_args or key not in rules.PARAMETERS}


def require_commas(arguments: Mapping[str, Any]) -> None:
    """Raise DuelError for a value that holds another model arg behind a space."""
    names = {*MODEL_ARGUMENTS, *registry.arguments(), *rules.PARAMETERS}
    for key, value in arguments.items():
        written = f"{key}={value}"
        behind = re.search(r"(?<![\s,])\s+(\w+)=", written) if isinstance(value, str) else None
        if behind and behind[1] in names:
            separated = re.sub(r"\s+(?=\w+=)", ",", written).strip(",")
            raise DuelError(f"Model args are separated by commas, without spaces: {separated}; got '{written}'.")


def _require_known(arguments: Mapping[str, Any], readable: Mapping[str, Argument]) -> None:
    """Raise UsageError for an arg that is neither readable nor a parameter of a rule; suggest the nearest name."""
    rule_class = rules.find(rules.split(arguments.get("rule", "greedy"))[0])
    names = [*readable, *ALIASES, *declared(rule_class)]
    for key in arguments:
        if key not in names and key not in rules.PARAMETERS:
            raise unknown("model arg", key, names)


def _with_preset(
    preset: presets.Preset, arguments: Mapping[str, Any], readable: Mapping[str, Argument]
) -> dict[str, Any]:
    """The args of a preset and those given; raises DuelError for one that contradicts the preset."""
    settings = dict(preset.arguments)
    if "rule" in arguments and "rule" in settings:
        # the preset's own rule may be written out, with other values of its free parameters
        given_rule = rule_of(
            {key: value for key, value in arguments.items() if key == "rule" or key in rules.PARAMETERS}
        )
        free_keys = [key for key in preset.free if key in rules.PARAMETERS and key in settings]
        preset_rule_args = {key: settings.pop(key) for key in ("rule", *free_keys)}  # the given rule takes their place
        preset_rule = rule_of(preset_rule_args)
        inner = rules.inner(given_rule)
        free = {key: getattr(inner, key, None) for key in free_keys}
        if inner.name != preset_rule.name or rules.replaced(preset_rule, **free) != given_rule:
            raise presets.conflict(preset, "rule", arguments["rule"])
    elif "rule" in arguments:
        raise presets.conflict(preset, "rule", arguments["rule"])
    else:
        # a preset that names no rule is a sampler, whose own parameters are args of its estimator
        changeable = preset.free if "rule" in settings else readable
        for key in arguments:
            if key in rules.PARAMETERS and key not in changeable:
                raise presets.conflict(preset, key, arguments[key])

    # every other setting must be the preset's, unless it is free
    for key, value in settings.items():
        if key in preset.free or key not in arguments or key not in readable:
            continue
        if readable[key].read(key, arguments[key]) != readable[key].read(key, value):
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


def rule_of(arguments: Mapping[str, Any]) -> rules.Rule:
    """The rule of `rule=` and of the parameters given as separate model args."""
    name, inside = rules.read(str(arguments.get("rule", "greedy")))
    outside = [(key, value) for key, value in arguments.items() if key != "rule"]
    return rules.build(name, unique_keys([*inside.items(), *outside]))  # raises for a parameter in both places
