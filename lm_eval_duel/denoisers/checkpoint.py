"""A checkpoint before any weight is read: what its config.json says that it is.

    Checkpoint          options, config.json, family and tokenizer: made once, and passed down to what reads the network
    find_family         the family of decoders that a config.json belongs to
    unread_entries      entries of a config.json that nothing here reads

Which network a config.json names: recognition.py. None of a checkpoint's code is run; the code of a family that may
edit its tokens is read as text.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lm_eval_duel.arguments import CHECKPOINT
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, refused, vocabulary
from lm_eval_duel.denoisers.hf.families import BY_CLASS, HARMLESS, NAMED, PLAIN, Family
from lm_eval_duel.denoisers.hf.layouts import DIFFUGPT_TRUNK, INSERTING, Config
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS, LoadOptions
from lm_eval_duel.denoisers.recognition import (
    class_names,
    has_random_tokens,
    is_diffusion_gemma,
    is_dit,
    require_supported,
)
from lm_eval_duel.errors import DuelError, UsageError, documentation, random_tokens, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")

DIT_TOKENIZER = "gpt2"  # for the published checkpoints of our own DiT, which come without one
MOVED = ("eurobert",)  # model types that were published with their own code, which is now in transformers
UNKNOWN = "which is known neither to this package nor to transformers"
EDITS = re.compile(r"editing_threshold|edit_threshold")  # in the code of a network that edits revealed tokens


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it describes itself."""

    options: LoadOptions
    config: Config
    family: Family | None = None  # of a decoder; readers of other networks replace it by their own
    tokenizer: PreTrainedTokenizerBase | None = None
    hub_name: str | None = None  # of a downloaded checkpoint, whose `options.name` is the folder of its files

    @classmethod
    def open(cls, name: str = BUNDLED, device: str | None = None, **network: Any) -> Checkpoint:
        """Read the config.json of a folder, a hub name or a bundled name; arguments as for `denoisers.load`.

        Raises:
            DuelError: An argument is wrong, or the config is of a network that is not supported.
        """
        require_known("network argument", network, [*NETWORK_ARGUMENTS, "tokenizer"])
        name = resolve(CHECKPOINT("name", name) or BUNDLED)
        options = LoadOptions(name, hub.pick_device(device), **network)
        options = hub.pin_revision(options)
        config = hub.read_config(options.name, options.revision)
        is_causal = options.attention == "causal"
        require_supported(config, options.name, options.family, is_causal)
        checkpoint = cls(options, config)
        return dataclasses.replace(checkpoint, family=checkpoint._find_family())

    @property
    def name(self) -> str:
        """The folder or hub name."""
        return self.options.name

    @property
    def published_name(self) -> str:
        """The last part of its name on the hub, or of its folder's: some checkpoints say what they are only there."""
        return os.path.basename((self.hub_name or self.name).rstrip("/"))

    @property
    def is_dit(self) -> bool:
        """True for a network that our own DiT runs."""
        return is_dit(self.config, self.name)

    @property
    def has_own_reader(self) -> bool:
        """True for our own DiT and DiffusionGemma: they are of no family of decoders, and run none of their code."""
        return self.is_dit or is_diffusion_gemma(self.config)

    @property
    def family_entry(self) -> Family:
        """The family, which every reader of transformers' networks has set."""
        assert self.family is not None
        return self.family

    @property
    def runs_own_code(self) -> bool:
        """True if its network is made by code in the checkpoint: the user wants it, or nothing else can."""
        if self.has_own_reader:
            return False
        if self.options.backend == "remote":
            return True
        if self.family is not None or self.options.attention == "causal":
            return False
        if not self.config.get("auto_map"):
            return False
        model_type = self.config.get("model_type")
        has_moved = model_type in MOVED and model_type in CONFIG_MAPPING
        return self.options.trust_remote_code or not has_moved

    @property
    def decoder_family(self) -> str | None:
        """The name of its family, if it is one of decoders that is run natively and not autoregressively."""
        is_run_otherwise = self.options.attention == "causal" or self.options.backend == "remote"
        if self.family is None or is_run_otherwise:
            return None
        return self.family.name

    @property
    def has_trained_block(self) -> bool | None:
        """True for a block-causal network; None: not known before it is made."""
        if self.has_own_reader or self.runs_own_code:
            return None
        if self.family is None:
            return False  # a masked LM, or an autoregressive network
        return (self.options.attention or self.family.attention) in ("block_causal", "causal_prefix")

    def _find_family(self) -> Family | None:
        """The family by the options or the config.json; the checkpoint's code, if it has any, is read as text."""
        if self.has_own_reader:
            return None
        code_folder = None
        if self.config.get("auto_map"):
            code_folder = hub.local_folder(self.name, self.options.revision, code_only=True)
        return find_family(self.config, self.options, code_folder)

    def local(self) -> Checkpoint:
        """The checkpoint in a local folder, for readers that do not know the hub; a hub name is downloaded."""
        folder = hub.local_folder(self.name, self.options.revision)
        if folder == self.name:
            return self
        options = dataclasses.replace(self.options, name=folder)
        return dataclasses.replace(self, options=options, hub_name=self.name)

    def native_config(self) -> PretrainedConfig:
        """Its config.json in the config class of transformers; raises DuelError if there is none."""
        model_type = self.config.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise self.unknown()
        config_class = CONFIG_MAPPING[model_type]
        with hub.explained(self.name):
            return config_class.from_dict(self.config)

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Checkpoint:
        """The checkpoint with this tokenizer, else with that of the options, else with its own; a DiT may have none."""
        options = self.options
        trusted = options.trust_remote_code
        if tokenizer is None:
            tokenizer = options.tokenizer
        if isinstance(tokenizer, str):
            tokenizer = vocabulary.load_tokenizer(resolve(tokenizer), trusted, "main")
        elif tokenizer is None and self._has_own_tokenizer():
            tokenizer = vocabulary.load_tokenizer(self.name, trusted, options.revision)
        return dataclasses.replace(self, tokenizer=tokenizer)

    def _has_own_tokenizer(self) -> bool:
        """False for a DiT without a tokenizer. Of other networks it is read in any case: its absence is an error."""
        if not self.is_dit:
            return True
        return vocabulary.has_tokenizer(self.name, self.options.revision)

    def with_family_by_tensors(self) -> Checkpoint:
        """The checkpoint with the family that the names of its tensors show: by its config a DiffuGPT is a GPT-2.

        A GPT-2 on the hub that is to be scored as one (attention=causal) is not downloaded to look.
        """
        if self.family is not None or self.has_own_reader:
            return self
        if self.config.get("model_type") != "gpt2":
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
        gemma = is_diffusion_gemma(self.config)
        # DiffusionGemma's encoder is an autoregressive network, which sees no noise.
        is_encoder = gemma and self.options.attention == "causal"
        if noised and takes_noise == "no" and not is_encoder:
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
        if self.has_own_reader or self.family is not None:
            return
        options = self.options
        needs_own_code = self.runs_own_code
        if options.attention == "causal" and options.trust_remote_code:
            needs_own_code = True
        if needs_own_code:
            is_known = options.trust_remote_code or options.backend == "remote"
        else:
            is_known = self.config.get("model_type") in CONFIG_MAPPING
        if not is_known:
            raise self.unknown()

    def unknown(self, reason: str = UNKNOWN, same_as: str = "") -> DuelError:
        """The error for a network that is not known: what config.json says that it is, and the ways to score it.

        `same_as`: the class of transformers that has its model type, if there is one.
        """
        architectures = self.config.get("architectures")
        classes = ", ".join(dict.fromkeys(class_names({"architectures": architectures})))
        kind = self.config.get("model_type")
        what = f"a {classes}" if classes else "a network of no named class"
        what += f" (model_type {kind!r})" if kind else ", and it has no model_type"
        ways = ["If it has the network of a known family, pass family=<its name>."]
        if same_as:
            edited = f'If it is the same network as {same_as}, set architectures to ["{same_as}"] in its config.json'
            if same_as in PLAIN:
                edited += (
                    ", and pass estimator=ar, or, if it was trained as a masked diffusion model, "
                    "attention=bidirectional with mask_token_id=<id>"
                )
            ways.append(f"{edited}.")
        if self.config.get("auto_map"):
            trusted = "trust_remote_code=true"
            remote = trusted if self.options.attention == "causal" else f"backend=remote,{trusted}"
            ways.append(f"If you trust the code in the checkpoint, pass {remote}.")
        ways.append("If you can make the network yourself, pass it to Duel.from_model.")
        return DuelError(
            f"By its config.json {self.name} is {what}, {reason}. {' '.join(ways)} Families: "
            f"{documentation('checkpoints.md')}."
        )


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
            family = BY_CLASS[name]
            return _family_of_class(family, config, options, folder)
        if name in PLAIN and options.attention != "causal":
            return _family_of_plain_decoder(name, options)
    return None


def _family_of_class(
    family: Family,
    config: Config,
    options: LoadOptions,
    folder: str | None,
) -> Family:
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
    """The family of a network in an autoregressive class of transformers, by the user's `attention` or by its name."""
    if options.attention is not None:
        return Family("decoder", PLAIN[name])
    if family := _by_name(options.name, "diffullama", "diffullama"):
        return family
    raise autoregressive(options.name, name)


def autoregressive(name: str, classes: str) -> UsageError:
    """The error for a checkpoint whose class is an autoregressive one of transformers."""
    if classes in PLAIN:
        attention = ", or attention=bidirectional with mask_token_id=<id>"
    else:
        attention = f" (attention=bidirectional is for {', '.join(PLAIN)})"
    return UsageError(
        f"By its config.json {name} is a {classes}, autoregressive: add estimator=ar. If it was trained as a masked "
        f"diffusion model, pass family=<its family>{attention}. Families: {documentation('checkpoints.md')}."
    )


def _by_name(path: str, word: str, family: str) -> Family | None:
    """The family `family`, if the name of a checkpoint or an adapter holds `word`; else None."""
    name = os.path.basename(path.rstrip("/")).lower()
    if family not in NAMED or word not in name:
        return None
    log.warning("By its name %s is taken as %s; its config does not say. Set family= to decide", path, family)
    return NAMED[family]


def _require_no_edits(
    family: Family,
    config: Config,
    path: str,
    folder: str | None,
) -> None:
    """Raise DuelError if the code in a folder, or the config, says that revealed tokens are edited."""
    edits = any(config.get(key) is not None for key in INSERTING)
    if folder is not None:
        for file in Path(folder).glob("*.py"):
            code = file.read_text("utf-8", "replace")
            edits = edits or EDITS.search(code) is not None
    if not edits:
        return
    remedy = "To score it without these edits, pass family=llada2."
    if changed := family.unreleased(config):
        remedy = f"Without these edits it is not supported either: its network is another one ({', '.join(changed)})."
    raise DuelError(
        f"{path} edits revealed tokens when it generates (LLaDA2.1 and later), {refused.NO_ORDER}. {remedy}"
    )


def family_by_tensors(config: Config, names: Iterable[str]) -> Family | None:
    """The family whose files have tensors of these names, although their config is another network's, or None."""
    if config.get("model_type") != "gpt2":
        return None
    has_trunk = any(name.startswith(DIFFUGPT_TRUNK) for name in names)
    return _adapted(NAMED["diffugpt"], config) if has_trunk else None


def _adapted(family: Family, config: Config) -> Family:
    """The family with the fields that a config decides."""
    return dataclasses.replace(family, **family.adapt(config))


# ---------------------------------------------------------------- entries that nothing reads


def unread_entries(config: Config, read: Collection[str]) -> tuple[str, ...]:
    """The entries of a config.json that are neither null, nor among `read`, nor known to change no number."""
    unread = []
    for key in sorted(config):
        is_covered = key in read or key in HARMLESS
        if config[key] is not None and not is_covered:
            unread.append(key)
    return tuple(unread)


def name_unread(
    config: Config,
    unread: Collection[str],
    name: str,
    family: str,
    refuse: bool = False,
) -> None:
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
    path = [key] if key in config else key.split(".")
    for part in path:
        value = value[part]
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
