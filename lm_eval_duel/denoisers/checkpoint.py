"""A checkpoint before any weight is read: its options, its config.json, its family and its tokenizer.

It is made once, and passed down to whatever reads the network. None of a checkpoint's code is run here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lm_eval_duel.arguments import CHECKPOINT
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, identity, vocabulary
from lm_eval_duel.denoisers.hf import families
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.identity import Config
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS, LoadOptions
from lm_eval_duel.errors import DuelError, random_tokens, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIT_TOKENIZER = "gpt2"  # of the published checkpoints of our own DiT, which have none
MOVED = ("eurobert",)  # model types that were published with their own code, which is now in transformers


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it describes itself."""

    options: LoadOptions
    config: Config
    family: Family | None = None  # of decoders; another reader puts its own in its place
    tokenizer: PreTrainedTokenizerBase | None = None

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
        identity.require_supported(checkpoint.config, options.name, options.family, options.attention == "causal")
        return dataclasses.replace(checkpoint, family=checkpoint._find_family())

    @property
    def name(self) -> str:
        """The folder or hub name."""
        return self.options.name

    @property
    def is_dit(self) -> bool:
        """True for a network that our own DiT runs."""
        return identity.is_dit(self.config, self.name)

    @property
    def is_alone(self) -> bool:
        """True for networks that only one reader takes: our own DiT and DiffusionGemma."""
        return self.is_dit or identity.is_diffusion_gemma(self.config)

    @property
    def layout(self) -> Family:
        """The family, which every reader of transformers' networks has set."""
        assert self.family is not None
        return self.family

    @property
    def runs_own_code(self) -> bool:
        """True if its network is made by code in the checkpoint: the user wants it, or nothing else can."""
        if self.is_alone or self.options.backend == "remote":
            return not self.is_alone
        moved = self.config.get("model_type") in MOVED and self.config["model_type"] in CONFIG_MAPPING
        own = self.config.get("auto_map") and (self.options.trust_remote_code or not moved)
        return bool(own) and self.family is None and self.options.attention != "causal"

    @property
    def decoder_family(self) -> str | None:
        """The name of its family, if it is one of decoders that is run natively and not autoregressively."""
        causal = self.options.attention == "causal"
        return None if self.family is None or causal or self.options.backend == "remote" else self.family.name

    def _find_family(self) -> Family | None:
        """The family by the options or the config.json; the checkpoint's code, if it has any, is read as text."""
        if self.is_alone:
            return None
        has_code = bool(self.config.get("auto_map"))
        code = hub.local_folder(self.name, self.options.revision, code_only=True) if has_code else None
        return families.find(self.config, self.options, code)

    def local(self) -> Checkpoint:
        """The checkpoint in a local folder, for readers that do not know the hub; a hub name is downloaded."""
        folder = hub.local_folder(self.name, self.options.revision)
        return dataclasses.replace(self, options=dataclasses.replace(self.options, name=folder))

    def native_config(self) -> PretrainedConfig:
        """Its config.json in the config class of transformers; raises DuelError if there is none."""
        if self.config.get("model_type") not in CONFIG_MAPPING:
            raise self.unknown()
        with hub.explained(self.name):
            return CONFIG_MAPPING[self.config["model_type"]].from_dict(self.config)

    def with_tokenizer(self) -> Checkpoint:
        """The checkpoint with the tokenizer of the options, else its own; a DiT may have none."""
        options, tokenizer = self.options, self.options.tokenizer
        if tokenizer is None and not (self.is_dit and not vocabulary.has_tokenizer(self.name, options.revision)):
            tokenizer = vocabulary.load_tokenizer(self.name, options.trust_remote_code, options.revision)
        elif isinstance(tokenizer, str):
            tokenizer = vocabulary.load_tokenizer(resolve(tokenizer), options.trust_remote_code, "main")
        return dataclasses.replace(self, tokenizer=tokenizer)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of its texts: that of `with_tokenizer`, else GPT-2's, which the published DiTs use."""
        tokenizer = self.with_tokenizer().tokenizer
        if tokenizer is None:
            tokenizer = vocabulary.load_tokenizer(DIT_TOKENIZER, self.options.trust_remote_code, "main")
        return tokenizer

    def require_estimator(self, estimator: str, takes_noise: str) -> None:
        """Raise DuelError if an estimator is not for the noise of this network."""
        noised, causal = identity.noise(self.config), identity.is_diffusion_gemma(self.config)
        if noised and takes_noise == "no" and not (causal and self.options.attention == "causal"):
            raise random_tokens(self.name, estimator, causal)
        if takes_noise == "only" and not noised:
            raise DuelError(
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
        classes = ", ".join(dict.fromkeys(identity.class_names({"architectures": self.config.get("architectures")})))
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
            f"By its config.json {self.name} is {what}, {reason}. {' '.join(ways)} Families: docs/checkpoints.md."
        )
