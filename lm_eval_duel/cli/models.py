"""The models of `score --compare`. One rule holds: a model inherits from --model_args what it does not set.

A rule comes with its parameters, and a preset with its rule, block, grid and cache. Arguments of --model_args that do
not apply to a model's estimator are ignored, and named. A conflict is an error that says what to set.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lm_eval_duel.console.command_line import FLAGS
from lm_eval_duel.errors import DuelError, naming
from lm_eval_duel.estimators.registry import ESTIMATORS, Entry, find
from lm_eval_duel.options import Options, require_commas
from lm_eval_duel.rules import PARAMETERS, RULES, presets

OF_CHECKPOINT = (  # model args that describe one checkpoint, and may be wrong for another
    *("tokenizer", "revision", "family", "peft", "backend", "trust_remote_code", "mask_token_id", "exclude_ids"),
    *("attention", "shift_logits", "sigma", "first_token", "last_block"),
)


class OtherModel(NamedTuple):
    """A model of --compare. `inherited`: the names of its args that --model_args set."""

    text: str  # as given
    args: dict[str, Any]
    inherited: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # args of --model_args that do not apply to its estimator

    @property
    def note(self) -> str:
        """A sentence on what is ignored; empty if nothing is."""
        if not self.ignored:
            return ""
        estimator = self.args.get("estimator", "duel")
        return f"--compare {self.text}: estimator={estimator} ignores {', '.join(self.ignored)} of --model_args"

    @contextlib.contextmanager
    def naming_conflicts(self) -> Iterator[None]:
        """Name the model in an error, and which of the args that the error names are inherited, so have to be set."""
        try:
            yield
        except DuelError as error:
            if not self.text:  # the model of --model_args
                raise
            message = f"--compare {self.text}: {error}"
            named = []
            values = []
            for key in self.inherited:
                if re.search(rf"\b{key}\b", str(error)):
                    named.append(key)
                    values.append(f"{key}={self.args[key]}")
            if named:
                listed = ", ".join(values)
                message += f" This model has {listed} from --model_args: set {' and '.join(named)} here, too."
            raise type(error)(message) from None


def other_model(text: str, first: Mapping[str, Any]) -> OtherModel:
    """The model that --compare names; `first`: the model args of --model_args. Raises DuelError for wrong ones."""
    given = _given(text)
    shared = _written_out(first)
    replaced = _replaced(given)
    first_estimator = _estimator_of(shared)
    estimator = _estimator_of(shared | _written_out(given))

    inherited = {}
    ignored = []
    for key, value in shared.items():
        if key in replaced:
            continue
        if _applies(key, estimator, first_estimator):
            inherited[key] = value
        else:
            ignored.append(key)

    checkpoint = first.get("pretrained")
    if given.get("pretrained", checkpoint) != checkpoint:
        _require_own(text, inherited)

    model = OtherModel(text, inherited | given, tuple(inherited), tuple(ignored))
    with model.naming_conflicts():
        Options.parse(model.args)
    return model


def _given(text: str) -> dict[str, Any]:
    """The model args of --compare; raises DuelError for a text that is something else."""
    if text.endswith(","):
        raise DuelError(
            f"--compare {text}: nothing follows the last comma; separate model args by commas without spaces."
        )
    name, _, _ = text.partition(",")
    if name in RULES:
        raise DuelError(f"--compare {text}: this is a rule, not a checkpoint. Did you mean rule={text}?")
    if name in presets.PRESETS and not os.path.isdir(name):
        raise DuelError(f"--compare {text}: this is a preset, not a checkpoint. Did you mean preset={text}?")
    if name in ESTIMATORS and not os.path.isdir(name):
        raise DuelError(f"--compare {text}: this is an estimator, not a checkpoint. Did you mean estimator={text}?")
    given: dict[str, Any] = FLAGS["model_args"].read("--compare", text)
    with naming(f"--compare {text}"):
        require_commas(given)
    return given


def _written_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model args, with those of a preset in place of its name."""
    name = model.get("preset")
    written = {} if name is None else dict(presets.find(str(name)).arguments)
    written.update(model)  # a preset lets some of its arguments be changed
    written.pop("preset", None)
    return written


def _estimator_of(model: Mapping[str, Any]) -> Entry:
    return find(str(model.get("estimator", "duel")))


def _replaced(given: Mapping[str, Any]) -> set[str]:
    """The args of --model_args that a model of --compare replaces."""
    replaced = {*given, "trace"}  # a file has one trace
    if "rule" in given:
        replaced |= PARAMETERS
    if "preset" in given:
        replaced |= {"rule", *PARAMETERS, "block", "grid", "cache", *_written_out(given)}
    return replaced


def _applies(key: str, estimator: Entry, first_estimator: Entry) -> bool:
    """True if an estimator takes an arg of --model_args. `first_estimator`: the one that --model_args name."""
    if key in estimator.arguments:
        return True
    if key in first_estimator.arguments:
        return False
    if key in ("rule", *PARAMETERS):
        unmasks = estimator.takes_noise != "only" or estimator.follows_rule
        return unmasks and "rule" not in estimator.ignored_args
    if estimator.causal and key == "cache":
        return False
    return key not in estimator.ignored_args


def _require_own(text: str, inherited: Mapping[str, Any]) -> None:
    """Raise DuelError if another checkpoint would inherit args that describe the first one."""
    values = []
    ways = []
    for name, value in inherited.items():
        if name in OF_CHECKPOINT:
            values.append(f"{name}={value}")
            ways.append(f"{name}=none")
    if values:
        verb = "describe" if len(values) > 1 else "describes"
        raise DuelError(
            f"--compare {text}: {' and '.join(values)} of --model_args {verb} its own checkpoint. Say what this one "
            f"has, such as {','.join(ways)} for the default."
        )
