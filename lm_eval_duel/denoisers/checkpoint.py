"""A checkpoint before any weight is read: what its config.json says that it is.

    Checkpoint          options, config.json, family and tokenizer: made once, and passed down to what reads the network
    model_names, ...    which network a config.json names, and what its noise is
    find_family         the family of decoders that a config.json belongs to
    unread_entries      entries of a config.json that nothing here reads

A network is recognised by class names, a model type, and entries that name its noise, never by its sizes. None of a
checkpoint's code is run; the code of a family that may edit its tokens is read as text.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lm_eval_duel.arguments import CHECKPOINT, PROBABILITY
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, refused, vocabulary
from lm_eval_duel.denoisers.hf.families import BY_CLASS, HARMLESS, NAMED, PLAIN, Family
from lm_eval_duel.denoisers.hf.layouts import DIFFUGPT_TRUNK, INSERTING, Config
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS, LoadOptions
from lm_eval_duel.errors import DuelError, UsageError, documentation, random_tokens, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")

DIT_TOKENIZER = "gpt2"  # of the published checkpoints of our own DiT, which have none
MOVED = ("eurobert",)  # model types that were published with their own code, which is now in transformers
EDITS = re.compile(r"editing_threshold|edit_threshold")  # in the code of a network that edits revealed tokens

# Names of networks in lower case
GEMMA = ("diffusiongemmaforblockdiffusion", "diffusion_gemma")
UNIFORM = ("duo", "udlm")  # under uniform noise
GIDD = "dit"  # its model type
DIT_NAMES = {"mdlm", "bd3lm", "sedd"}  # our own DiT, besides UNIFORM and GIDD
DIT_LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # entries of such a config
DIT_SECTIONS = ("graph", "model", "tokens")  # of the config of SEDD's authors, which names no class

# Kinds of noise
ABSORBING = ("absorbing_state", "absorbing", "absorb", "masked", "mask")
RANDOM = ("uniform", "uniform_state")
HYBRID = ("hybrid", "gidd")
LINEAR = ("loglinear", "log-linear", "log_linear")


def _entries(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The entries that name the noise or what the output means, and their values for these kinds of noise."""
    named = dict.fromkeys(("diffusion", "graph", "forward_process"), kinds)
    return {**named, "noise": LINEAR, "noise_type": (*LINEAR, *kinds), "parameterization": outputs}


MASKING = _entries(ABSORBING, ("subs", "sedd", "ar"))
REPLACING = _entries(RANDOM, ("mean", "d3pm"))  # Duo and UDLM
MIXED = {  # GIDD's masks and random tokens
    **_entries(HYBRID, (*HYBRID, "linear")),
    "noise": (*HYBRID, "linear"),
    "noise_type": HYBRID,
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it describes itself."""

    options: LoadOptions
    config: Config
    family: Family | None = None  # of decoders; another reader puts its own in its place
    tokenizer: PreTrainedTokenizerBase | None = None
    hub_name: str | None = None  # if it was downloaded: `options.name` is the folder of its files then

    @classmethod
    def open(cls, name: str = BUNDLED, device: str | None = None, **network: Any) -> Checkpoint:
        """Read the config.json of a folder, a hub name or a bundled name; arguments as for `denoisers.load`.

        Raises:
            DuelError: An argument is wrong, or the config is of a network that is not supported.
        """
        require_known("network argument", network, [*NETWORK_ARGUMENTS, "tokenizer"])
        name = resolve(CHECKPOINT("name", name) or BUNDLED)
        options = hub.pin_revision(LoadOptions(name, hub.pick_device(device), **network))
        checkpoint = cls(options, hub.read_config(options.name, options.revision))
        require_supported(checkpoint.config, options.name, options.family, options.attention == "causal")
        return dataclasses.replace(checkpoint, family=checkpoint._find_family())

    @property
    def name(self) -> str:
        """The folder or hub name."""
        return self.options.name

    @property
    def published_name(self) -> str:
        """The name by which it may be known: that on the hub, or of its own folder."""
        return os.path.basename((self.hub_name or self.name).rstrip("/"))

    @property
    def is_dit(self) -> bool:
        """True for a network that our own DiT runs."""
        return is_dit(self.config, self.name)

    @property
    def is_alone(self) -> bool:
        """True for networks that only one reader takes: our own DiT and DiffusionGemma."""
        return self.is_dit or is_diffusion_gemma(self.config)

    @property
    def layout(self) -> Family:
        """The family, which every reader of transformers' networks has set."""
        assert self.family is not None
        return self.family

    @property
    def runs_own_code(self) -> bool:
        """True if its network is made by code in the checkpoint: the user wants it, or nothing else can."""
        if self.is_alone:
            return False
        if self.options.backend == "remote":
            return True
        if not self.config.get("auto_map") or self.family is not None or self.options.attention == "causal":
            return False
        moved = self.config.get("model_type") in MOVED and self.config["model_type"] in CONFIG_MAPPING
        return self.options.trust_remote_code or not moved

    @property
    def decoder_family(self) -> str | None:
        """The name of its family, if it is one of decoders that is run natively and not autoregressively."""
        if self.family is None or self.options.attention == "causal" or self.options.backend == "remote":
            return None
        return self.family.name

    def _find_family(self) -> Family | None:
        """The family by the options or the config.json; the checkpoint's code, if it has any, is read as text."""
        if self.is_alone:
            return None
        has_code = bool(self.config.get("auto_map"))
        code = hub.local_folder(self.name, self.options.revision, code_only=True) if has_code else None
        return find_family(self.config, self.options, code)

    def local(self) -> Checkpoint:
        """The checkpoint in a local folder, for readers that do not know the hub; a hub name is downloaded."""
        folder = hub.local_folder(self.name, self.options.revision)
        if folder == self.name:
            return self
        return dataclasses.replace(self, options=dataclasses.replace(self.options, name=folder), hub_name=self.name)

    def native_config(self) -> PretrainedConfig:
        """Its config.json in the config class of transformers; raises DuelError if there is none."""
        if self.config.get("model_type") not in CONFIG_MAPPING:
            raise self.unknown()
        with hub.explained(self.name):
            return CONFIG_MAPPING[self.config["model_type"]].from_dict(self.config)

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Checkpoint:
        """The checkpoint with this tokenizer, else with that of the options, else with its own; a DiT may have none."""
        options = self.options
        tokenizer = options.tokenizer if tokenizer is None else tokenizer
        if isinstance(tokenizer, str):
            tokenizer = vocabulary.load_tokenizer(resolve(tokenizer), options.trust_remote_code, "main")
        elif tokenizer is None and (not self.is_dit or vocabulary.has_tokenizer(self.name, options.revision)):
            tokenizer = vocabulary.load_tokenizer(self.name, options.trust_remote_code, options.revision)
        return dataclasses.replace(self, tokenizer=tokenizer)

    def with_family_by_tensors(self) -> Checkpoint:
        """The checkpoint with the family that the names of its tensors tell: by its config a DiffuGPT is a GPT-2.

        A GPT-2 of the hub that is to be scored as one is not downloaded for that.
        """
        if self.family is not None or self.is_alone or self.config.get("model_type") != "gpt2":
            return self
        if self.options.attention == "causal" and not os.path.isdir(self.name):
            return self
        names = hub.tensor_names(self.local().name)
        return dataclasses.replace(self, family=family_by_tensors(self.config, names))

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of its texts: that of `with_tokenizer`, else GPT-2's, which the published DiTs use."""
        tokenizer = self.with_tokenizer().tokenizer
        if tokenizer is None:
            tokenizer = vocabulary.load_tokenizer(DIT_TOKENIZER, self.options.trust_remote_code, "main")
        return tokenizer

    def require_estimator(self, estimator: str, takes_noise: str) -> None:
        """Raise UsageError if an estimator is not for the noise of this network."""
        noised = has_random_tokens(self.config)
        gemma = is_diffusion_gemma(self.config)  # whose encoder is autoregressive
        if noised and takes_noise == "no" and not (gemma and self.options.attention == "causal"):
            raise random_tokens(self.name, estimator, gemma)
        if takes_noise == "only" and not noised:
            raise UsageError(
                f"estimator={estimator} is for networks whose noise is random tokens; by its config {self.name} is "
                "not one. Use estimator=elbo, or leave estimator out."
            )

    def require_known_network(self) -> None:
        """Raise DuelError if nothing here reads this network, before its tokenizer or a weight is read."""
        if self.is_dit and self.options.dtype not in ("auto", "float32"):
            raise DuelError(
                f"MDLM, BD3-LM, SEDD and the AR baseline run in float32, not {self.options.dtype}; leave dtype out."
            )
        if self.is_alone or self.family is not None:
            return
        if self.runs_own_code or (self.options.attention == "causal" and self.options.trust_remote_code):
            if self.options.trust_remote_code or self.options.backend == "remote":
                return
            raise self.unknown()
        if self.config.get("model_type") not in CONFIG_MAPPING:
            raise self.unknown()

    def unknown(self, reason: str = "which is not known here") -> DuelError:
        """The error for a network that is not known: what config.json says that it is, and the ways to score it."""
        classes = ", ".join(dict.fromkeys(class_names({"architectures": self.config.get("architectures")})))
        kind = self.config.get("model_type")
        what = f"a {classes}" if classes else "a network of no named class"
        what += f" (model_type {kind!r})" if kind else ", and it has no model_type"
        ways = ["If it has the network of a known family, pass family=<its name>."]
        if self.config.get("auto_map"):
            trusted = "trust_remote_code=true"
            remote = trusted if self.options.attention == "causal" else f"backend=remote,{trusted}"
            ways.append(f"If you trust the code in the checkpoint, pass {remote}.")
        ways.append("If you can make the network yourself, pass it to Duel.from_model.")
        return DuelError(
            f"By its config.json {self.name} is {what}, {reason}. {' '.join(ways)} Families: "
            f"{documentation('checkpoints.md')}."
        )


# ---------------------------------------------------------------- the network that a config names


def class_names(config: Config) -> list[str]:
    """Class names in `architectures` and in `auto_map`, whose values are module.Class or lists of them."""
    names = list(config.get("architectures") or [])
    for entry in (config.get("auto_map") or {}).values():
        values = entry if isinstance(entry, list) else [entry]
        for value in values:
            if value:
                names.append(str(value).rsplit(".", 1)[-1])
    return names


def model_names(config: Config) -> list[str]:
    """The names of the network itself: its model type and its classes, without the config's and the tokenizer's."""
    auto_map = config.get("auto_map") or {}
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel")}
    names = class_names({"architectures": config.get("architectures"), "auto_map": models})
    if config.get("model_type"):
        names.append(str(config["model_type"]))
    return names


def has_random_tokens(config: Config) -> bool:
    """True if the noise of a network is random tokens, by its names, or for GIDD by its `p_uniform`."""
    names = [name.lower() for name in model_names(config)]
    return not {*UNIFORM, *GEMMA}.isdisjoint(names) or (GIDD in names and bool(_p_uniform(config)))


def _p_uniform(config: Config) -> float:
    """The share of random tokens in the noise, 0 if the config does not say."""
    return float(PROBABILITY("p_uniform", config.get("p_uniform"), " in config.json") or 0.0)


def _kinds(name: str, key: str, entry: Any) -> list[str]:
    """The kinds of noise that an entry names: a string, or a section with a type or a name. A number names none."""
    if not isinstance(entry, Mapping):
        return [entry] if isinstance(entry, str) else []
    kinds = [str(entry[field]) for field in ("type", "name") if entry.get(field) is not None]
    if not kinds:
        raise DuelError(f"The config.json of {name} has a {key} without a type or a name, so its noise is not known.")
    return kinds


def is_diffusion_gemma(config: Config) -> bool:
    """True if a network is DiffusionGemma, whose encoder is an autoregressive network as well."""
    return any(name.lower() in GEMMA for name in model_names(config))


def is_dit(config: dict[str, Any], path: str) -> bool:
    """True if a config.json belongs to one of these families; raises DuelError if its names contradict its entries."""
    names = model_names(config)
    lower = {name.lower() for name in names}
    if lower and (lower <= DIT_NAMES or (len(lower) == 1 and lower <= {GIDD, *UNIFORM})):
        return True
    if not names and all(key in config for key in DIT_SECTIONS):
        return True
    if lower & {*DIT_NAMES, *UNIFORM} or all(key in config for key in DIT_LAYOUT):
        says = f"names {', '.join(dict.fromkeys(names))}" if names else "names neither a class nor a model type"
        raise DuelError(
            f"The config.json of {path} {says}. Networks with our own DiT are recognised by their names alone "
            f"({', '.join((*sorted(DIT_NAMES), GIDD, *UNIFORM))}): if it is one, say so in model_type."
        )
    return False


def require_supported(config: Config, name: str, family: str | None = None, causal: bool = False) -> None:
    """Raise DuelError if the config.json of `name` describes a network that is not supported.

    `family`: given by the user, if any; then class names and the model type refuse nothing. `causal`: the network is
    scored as an autoregressive one.
    """
    if family is None:
        _require_covered(name, model_names(config), causal)
    names = [given.lower() for given in model_names(config)]
    if GIDD not in names and (share := _p_uniform(config)):
        raise DuelError(
            f"The config.json of {name} has p_uniform={share:g}, an entry of GIDD, but no name of GIDD. If the network "
            f"is a GIDD, set model_type to {GIDD}."
        )
    if is_diffusion_gemma(config):
        return
    random = has_random_tokens(config)
    entries = MASKING
    if random:
        entries = MIXED if GIDD in names else REPLACING
    for key, values in entries.items():
        for kind in _kinds(name, key, config.get(key)):
            if kind.lower() not in values:
                supported = "this family" if random else "masked diffusion"
                raise DuelError(
                    f"The config.json of {name} has {key}={kind}, and {supported} has {key}={values[0]}. A network "
                    "that was trained with other noise, or whose output means something else, would get a wrong number."
                )


def _require_covered(name: str, names: Collection[str], causal: bool) -> None:
    """Raise DuelError if a checkpoint `name`, whose config.json has these class names and model type, is refused.

    `causal`: it is scored as an autoregressive network, so what its name says does not count.
    """
    lower = {each.lower() for each in names}
    folder = os.path.basename(name.rstrip("/"))
    for entry in refused.ENTRIES:
        for kind in entry.classes:
            if kind.lower() in lower:
                raise entry.error(name, kind)
        if entry.named and not causal and re.search(entry.named, folder, re.IGNORECASE):
            raise entry.error(name, entry.checkpoint)


# ---------------------------------------------------------------- families of decoders


def find_family(config: Config, options: LoadOptions, folder: str | None) -> Family | None:
    """The family in the options, else by the class names in config.json; None if there is none.

    `folder`: holds the checkpoint's code, which is only read. Raises DuelError for a network that looks autoregressive
    if nothing says it was trained as a diffusion model, and for one that edits revealed tokens.
    """
    if options.family is not None:
        require_known("family", [options.family], NAMED)
        return _adapted(NAMED[options.family], config)
    for name in class_names(config):
        if name in BY_CLASS:
            return _family_of_class(BY_CLASS[name], config, options, folder)
        if name in PLAIN and options.attention != "causal":
            return _family_of_plain_decoder(name, options)
    return None


def _family_of_class(family: Family, config: Config, options: LoadOptions, folder: str | None) -> Family:
    """The family whose class a config names, or another one that has the same class by the checkpoint's name."""
    adapted = _adapted(family, config)
    if family.name == "llada2":
        _require_no_edits(family, config, options.name, folder)
    if options.attention is not None:
        return adapted
    lora = _by_name(options.peft or "", "d2f", f"d2f-{family.name}")
    block_causal = _by_name(options.name, "bd3lm", f"{family.name}-bd3lm")
    return block_causal or lora or adapted


def _family_of_plain_decoder(name: str, options: LoadOptions) -> Family:
    """The family of a network whose class is an autoregressive one of transformers, which the user or its name says."""
    if options.attention is not None:
        return Family("decoder", PLAIN[name])
    if family := _by_name(options.name, "diffullama", "diffullama"):
        return family
    raise autoregressive(options.name, name)


def autoregressive(name: str, classes: str) -> UsageError:
    """The error for a checkpoint that looks autoregressive."""
    return UsageError(
        f"By its config.json {name} is a {classes}, autoregressive: add estimator=ar. If it was trained as a masked "
        "diffusion model, pass family=<its family>, or attention=bidirectional with mask_token_id=<id>. "
        f"Families: {documentation('checkpoints.md')}."
    )


def _by_name(path: str, word: str, family: str) -> Family | None:
    """The family that the name of a checkpoint or an adapter says, if it holds `word`; else None."""
    if family not in NAMED or word not in os.path.basename(path.rstrip("/")).lower():
        return None
    log.warning("By its name %s is taken as %s; its config does not say. Set family= to decide", path, family)
    return NAMED[family]


def _require_no_edits(family: Family, config: Config, path: str, folder: str | None) -> None:
    """Raise DuelError if the code in a folder, or the config, says that revealed tokens are edited."""
    code = Path(folder).glob("*.py") if folder else ()
    edits = any(EDITS.search(file.read_text("utf-8", "replace")) for file in code)
    inserts = any(config.get(key) is not None for key in INSERTING)
    if not (edits or inserts):
        return
    remedy = "To score it without these edits, pass family=llada2."
    if changed := family.unreleased(config):
        remedy = f"Without these edits it is not supported either: its network is another one ({', '.join(changed)})."
    raise DuelError(
        f"{path} edits revealed tokens when it generates (LLaDA2.1 and later), {refused.NO_ORDER}. {remedy}"
    )


def family_by_tensors(config: Config, names: Iterable[str]) -> Family | None:
    """The family whose files have tensors of these names, although their config is another network's, or None."""
    if config.get("model_type") == "gpt2" and any(name.startswith(DIFFUGPT_TRUNK) for name in names):
        return _adapted(NAMED["diffugpt"], config)
    return None


def _adapted(family: Family, config: Config) -> Family:
    """The family with the fields that a config decides."""
    return dataclasses.replace(family, **family.adapt(config))


# ---------------------------------------------------------------- entries that nothing reads


def unread_entries(config: Config, read: Collection[str]) -> tuple[str, ...]:
    """The entries of a config.json that are neither null, nor among `read`, nor known to change no number."""
    return tuple(key for key in sorted(config) if config[key] is not None and key not in read and key not in HARMLESS)


def name_unread(config: Config, unread: Collection[str], name: str, family: str, refuse: bool = False) -> None:
    """Name entries that are not read in one warning; with `refuse`, raise DuelError."""
    if not unread:
        return
    entries = ", ".join(f"{key}={_short(config, key)}" for key in unread)
    if refuse:
        raise DuelError(
            f"The config.json of {name} has entries that the family {family} does not read here: {entries}. If none of "
            f"them changes its network, pass family={family}."
        )
    log.warning(
        "The config.json of %s has entries that its network (%s) does not read here: %s. If one of them changes the "
        "network, every number is wrong",
        name,
        family,
        entries,
    )


def _short(config: Config, key: str) -> str:
    """The value of an entry, or of a.b inside a section a, in at most 40 characters."""
    value: Any = config
    parts = [key] if key in config else key.split(".")
    for part in parts:
        value = value[part]
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
