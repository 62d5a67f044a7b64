"""Every model arg in one frozen dataclass, checked before anything heavy is imported.

    --model_args pretrained=...,rule=klass,mu=0.9,nu=0.01,block=32

The harness hands over strings and numbers as its own parser made them (`block=32` an int, `k=-1` a float, `none` a
string, `None` nothing), so each value is brought to its type here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval_duel import rules
from lm_eval_duel.errors import DuelError, unknown, usage

WINDOWS = ("independent", "harness")
LATTICE = ("elbo_exact", "mixture", "oracle")  # estimators that evaluate every revealed set of a block
LATTICE_BLOCK = 12  # its most cells: 4,095 sets
ESTIMATORS = ("duel", "elbo", *LATTICE, "exact")
BUNDLED = "demo-mdm"  # scored when no checkpoint is named
TOKENS = "duel_tokens"  # the column in which this package's tasks count a document's tokens, checked when it is scored
MADE = "duel_made"  # the column that says how a document was made
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
GRIDS = ("auto", "target", "row")
LARGEST = 1e20  # factor of logits: more may overflow float32
OF_ROWS = ("scored", "official", "first")  # values of bos that say which positions of a whole row are scored
CHOICES = {
    "bos": ("given", "scored", "official", "none", "first"),
    "attention": ("bidirectional", "block_causal", "causal"),
    "last_block": ("fill", "cut"),
    "sigma": ("clamped", "schedule"),
    "backend": ("native", "remote"),
}
ELBO_FORMS = ("count", "ratio", "score_entropy")
UNREAD = {"elbo": ("rule", "block"), "exact": ("rule", "block")}  # args that an estimator does not read
ONLY = {  # which estimators have a use for an arg
    "mc_samples": ("elbo",),
    "elbo_form": ("elbo",),
    "elbo_block": ("elbo",),
    "elbo_eps": ("elbo",),
    "lattice_rules": LATTICE,
}
NETWORK = (  # what is handed on to denoisers.load
    "dtype",
    "revision",
    "trust_remote_code",
    "mask_token_id",
    "max_length",
    "bos",
    "family",
    "attention",
    "block",
    "shift_logits",
    "last_block",
    "sigma",
    "backend",
    "cfg_scale",
    "temperature",
    "top_k",
    "top_p",
    "peft",
    "device_map",
    "load_in_8bit",
    "load_in_4bit",
    "compile",
)
NOTHING = (None, "", "none", "None", "null")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for; the README has a table of these."""

    pretrained: str | None = None  # a folder, a hub name, demo-mdm; None: the bundled demo-mdm
    rule: rules.Rule = dataclasses.field(default_factory=rules.Greedy)
    block: int | str | None = "auto"  # positions, None (the whole target) or "auto"
    grid: str = "auto"
    windows: str = "independent"
    estimator: str = "duel"
    mc_samples: int = 128  # draws of a window, of the Monte Carlo ELBO; and what follows
    elbo_form: str = "auto"
    elbo_block: int | str | None = "auto"
    elbo_eps: float = 0.0
    draw_seed: int = 0
    lattice_rules: tuple[rules.Rule, ...] | None = None  # None: the rule, where it is state-only
    trace: str | None = None
    verify: int = 0  # windows scored once more, one row at a time in float32
    batch_size: int | str = "auto"  # rows of max_length in a network call
    max_batch_size: int | None = None
    device: str | None = None
    dtype: str = "auto"
    max_length: int | None = None
    revision: str = "main"
    trust_remote_code: bool = False
    tokenizer: str | None = None
    mask_token_id: int | None = None
    bos: str | None = None  # what follows: detected where None
    family: str | None = None
    attention: str | None = None
    shift_logits: bool | None = None
    last_block: str = "fill"
    sigma: str | None = None
    backend: str | None = None
    cfg_scale: float | None = None
    temperature: float | None = None  # of the network that is scored; and what follows
    top_k: int | None = None
    top_p: float | None = None
    peft: str | None = None
    device_map: str | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    compile: bool = False

    @classmethod
    @usage()
    def parse(cls, arguments: dict[str, Any]) -> Options:
        """The options of model args; raises UsageError that names the wrong one, the nearest name and what is known."""
        share = _number("a share from 0 (nothing left out) to below 1", lambda x: 0 <= x < 1)
        scale = _number("a number >= 0 (0: no guidance)", lambda x: 0 <= x < float("inf"))
        readers = {
            "pretrained": checkpoint_name,
            "block": _block,
            "grid": lambda key, value: one_of(key, value, GRIDS),
            "windows": lambda key, value: one_of(key, value, WINDOWS),
            "estimator": lambda key, value: one_of(key, value, ESTIMATORS),
            "mc_samples": lambda key, value: count(key, value) or cls.mc_samples,
            "elbo_form": lambda key, value: _choice("auto", *ELBO_FORMS)(key, value) or "auto",
            "elbo_block": _block,
            "elbo_eps": lambda key, value: share(key, value) or 0.0,
            "draw_seed": lambda key, value: count(key, value, least=0) or 0,
            "lattice_rules": _rules,
            "trace": _text,
            "verify": lambda key, value: count(key, value, least=0) or 0,
            "batch_size": _batch_size,
            "max_batch_size": count,
            "device": _text,
            "dtype": _dtype,
            "max_length": count,
            "revision": lambda key, value: str(value) if value not in NOTHING else "main",
            "trust_remote_code": truth,
            "tokenizer": checkpoint_name,
            "mask_token_id": lambda key, value: count(key, value, least=0),
            "bos": lambda key, value: one_of(key, str(value).lower(), CHOICES["bos"]),  # `none` may come as None
            "add_bos_token": lambda key, value: "given" if truth(key, value) else "none",
            "family": _text,
            "attention": _choice(*CHOICES["attention"]),
            "shift_logits": lambda key, value: None if value in NOTHING else truth(key, value),
            "last_block": lambda key, value: one_of(key, value, CHOICES["last_block"]),
            "sigma": _choice(*CHOICES["sigma"]),
            "backend": _choice(*CHOICES["backend"]),
            "cfg_scale": lambda key, value: scale(key, value) or None,
            "temperature": _number("a number above 0", lambda x: 0 < x < float("inf")),
            "top_k": count,
            "top_p": _number("a probability above 0, at most 1", lambda x: 0 < x <= 1),
            "peft": checkpoint_name,
            "device_map": _text,
            "parallelize": lambda key, value: "auto" if value not in NOTHING and truth(key, value) else None,
            "load_in_8bit": truth,
            "load_in_4bit": truth,
            "compile": truth,
        }
        known = {*readers, "rule", *rules.PARAMETERS, *_takes(arguments)}
        for key in arguments:
            if key not in known:
                raise unknown("model arg", key, [*readers, "rule", *_takes(arguments)])
        rule = _rule({key: value for key, value in arguments.items() if key not in readers})
        values = {key: readers[key](key, arguments[key]) for key in arguments if key in readers}
        if (temperature := values.get("temperature")) is not None:
            require_finite("temperature", temperature, 1 / temperature)
        require_finite("cfg_scale", values.get("cfg_scale") or 0)
        if (other := values.pop("add_bos_token", None)) is not None and values.setdefault("bos", other) != other:
            raise DuelError(
                f"add_bos_token={arguments['add_bos_token']} is bos={other}, but bos={values['bos']} is given."
            )
        if (other := values.pop("parallelize", None)) is not None:
            if values.get("device_map") not in (None, other):
                raise DuelError(f"parallelize=true is device_map=auto, but device_map={values['device_map']} is given.")
            values["device_map"] = other
        if values.get("windows") == "harness" and values.get("bos") in OF_ROWS:
            raise DuelError(f"bos={values['bos']} frames rows of its own; it goes with windows=independent only.")
        options = cls(rule=rule, **values)
        options._check_estimator(values)
        return options

    def _check_estimator(self, given: Mapping[str, Any]) -> None:
        """Raise DuelError for an arg that the estimator has no use for, or a block too large for it."""
        for key, estimators in ONLY.items():
            if key in given and self.estimator not in estimators:
                raise DuelError(
                    f"'{key}' is of estimator={' or '.join(estimators)}, and this is estimator={self.estimator}: "
                    "leave it out, or say that estimator."
                )
        if self.elbo_eps and self.elbo_form == "count":
            raise DuelError("'elbo_eps' is the least ratio, of elbo_form=ratio; counts have none. Leave one out.")
        large = self.block is None or (isinstance(self.block, int) and self.block > LATTICE_BLOCK)
        if self.estimator in LATTICE and large:
            raise DuelError(
                f"estimator={self.estimator} evaluates all revealed sets of a block, so block is at most "
                f"{LATTICE_BLOCK}; got {'none' if self.block is None else self.block}. block=4 takes 15 states a block."
            )

    @property
    def network(self) -> dict[str, Any]:
        """What is said about the checkpoint, for `denoisers.load`."""
        said = {name: getattr(self, name) for name in NETWORK}
        if self.estimator == "exact":  # of an autoregressive network, whose blocks are of one
            said |= {"attention": said["attention"] or "causal", "block": None}
        return said

    @property
    def rows(self) -> int | None:
        """Rows of max_length in a network call; None: as many as the device takes.

        The harness says batch_size=1 when the user said nothing, so 1 is auto too; max_batch_size=1 is one row.
        """
        return None if self.batch_size in ("auto", 1) else self.batch_size


def unread(arguments: Mapping[str, Any], estimator: str) -> list[str]:
    """The args given that this estimator does not read, as when only `estimator` was changed in a command."""
    return [key for key in UNREAD.get(estimator, ()) if key in arguments]


def tokenizer_source(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(name, revision) of the tokenizer that model args ask for: `tokenizer`, else `pretrained`, else `model`."""
    if (name := checkpoint_name("tokenizer", arguments.get("tokenizer"))) is not None:
        return name, "main"
    names = [checkpoint_name(key, arguments.get(key)) for key in ("pretrained", "model")]
    name = names[0] or names[1] or BUNDLED
    return name, str(arguments.get("revision") or "main")


def _takes(arguments: dict[str, Any]) -> list[str]:
    """The parameters of the rule that is named."""
    return [field.name for field in dataclasses.fields(rules.find(rules.split(arguments.get("rule", "greedy"))[0]))]


def _rule(arguments: dict[str, Any]) -> rules.Rule:
    """The rule of `rule=` and of the parameters beside it."""
    text = str(arguments.get("rule", "greedy"))
    name, inside = rules.read(text)
    beside = {key: value for key, value in arguments.items() if key != "rule"}
    for key in beside:
        if key in inside:
            raise DuelError(f"'{key}' is given twice: in rule={text} and beside it.")
    return rules.build(name, inside | beside)


def _rules(key: str, value: Any) -> tuple[rules.Rule, ...]:
    """Rules of a text such as greedy+margin:k=2, each of which reads the state alone."""
    named = () if value in NOTHING else tuple(rules.parse(text) for text in str(value).split("+"))
    for rule in named:
        rules.check_state_only(rule)
    return named


def _text(key: str, value: Any) -> str | None:
    return None if value in NOTHING else str(value)


def checkpoint_name(key: str, value: Any) -> str | None:
    """A folder or hub name, or nothing; raises DuelError for a network or tokenizer in memory."""
    if value is None or isinstance(value, (str, int, float, os.PathLike)):  # the harness reads 2024 as a number
        return _text(key, value)
    raise DuelError(
        f"'{key}' is a folder or hub name; got an object of the class {type(value).__name__}. Networks and tokenizers "
        f"in memory are not supported yet: write it with save_pretrained(folder) and pass {key}=<folder>."
    )


def _dtype(key: str, value: Any) -> str:
    name = str(value).removeprefix("torch.") if value not in NOTHING else "auto"
    return one_of(key, name, DTYPES)


def truth(key: str, value: Any) -> bool:
    """Yes or no, as the harness or a person writes them."""
    if str(value).lower() in ("true", "false", "1", "0"):
        return str(value).lower() in ("true", "1")
    raise DuelError(f"'{key}' is true or false, not '{value}'.")


def count(key: str, value: Any, least: int = 1) -> int | None:
    """A whole number, or nothing."""
    if value in NOTHING:
        return None
    try:
        if (number := rules.whole(value)) < least:
            raise ValueError
        return number
    except (ValueError, TypeError, OverflowError):
        raise DuelError(f"'{key}' is a whole number, at least {least}; got '{value}'.") from None


def _block(key: str, value: Any) -> int | str | None:
    if value in NOTHING:
        return None
    if value == "auto":
        return "auto"
    try:
        return count(key, value)
    except DuelError:
        raise DuelError(f"'{key}' is a number of positions, none (the whole target) or auto; got '{value}'.") from None


def _batch_size(key: str, value: Any) -> int | str:
    if value in NOTHING or str(value).split(":")[0] == "auto":  # auto:N, the harness's way to try again, is auto here
        return "auto"
    try:
        return count(key, value)
    except DuelError:
        raise DuelError(f"'{key}' is a number of rows, at least 1, or auto; got '{value}'.") from None


def _choice(*known: str) -> Callable[[str, Any], str | None]:
    """A reader of one of `known`, or of nothing."""
    return lambda key, value: None if value in NOTHING else one_of(key, value, known)


def _number(what: str, inside: Callable[[float], bool]) -> Callable[[str, Any], float | None]:
    """A reader of a number for which `inside` is true, or of nothing; `what` says which numbers these are."""
    return lambda key, value: number(key, value, what, inside)


def number(key: str, value: Any, what: str, inside: Callable[[float], bool]) -> float | None:
    """A number for which `inside` is true, or nothing; `what` says which numbers these are."""
    if value in NOTHING:
        return None
    try:
        found = float(value)
        if isinstance(value, bool) or not inside(found):
            raise ValueError
        return found
    except (ValueError, TypeError, OverflowError):
        raise DuelError(f"'{key}' is {what}; got '{value}'.") from None


def require_finite(key: str, value: float, *factors: float) -> None:
    """Raise DuelError if logits times `value` or one of `factors` may be infinite in float32."""
    if not all(abs(factor) <= LARGEST for factor in (value, *factors)):
        least = f"from {1 / LARGEST:g} " if factors else ""
        raise DuelError(
            f"'{key}' is a number {least}up to {LARGEST:g}; got {value:g}, by which logits overflow float32."
        )


def one_of(key: str, value: Any, known: tuple[str, ...]) -> str:
    """One of the values that are known."""
    if value not in known:
        raise unknown(f"value of {key}", value, known)
    return value
