"""`duel-mdm`, the model that lm-evaluation-harness sees: a network, an estimator, a tokenizer, and which spec they are.

How requests are answered is in answers.py and writing.py.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval_duel import fingerprint
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import unchained
from lm_eval_duel.harness.cache import RULE_CODE, RULES, ResponseCache
from lm_eval_duel.harness.writing import Writing
from lm_eval_duel.options import Options

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook

    from lm_eval_duel.denoisers.base import Denoiser
    from lm_eval_duel.harness.run_stats import Cost
    from lm_eval_duel.harness.trace import Writer

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only


class DuelMDM(Writing):
    """Exact likelihood of a masked diffusion model under a deterministic unmasking rule, and what it is compared with.

    Takes the model args of `Options`; raises DuelError for a wrong one before the checkpoint is read.
    """

    @unchained()
    def __init__(self, **arguments: Any):
        super().__init__()
        self.options = options = Options.parse(arguments)
        # transformers is imported once the arguments are known to be good
        from lm_eval_duel import denoisers
        from lm_eval_duel.estimators import registry as switch
        from lm_eval_duel.harness import trace
        from lm_eval_duel.harness.text import Text

        self._where = self.join_ranks(options.device)
        if options.trace is not None:
            trace.place(options.trace, self.rank, self.world_size)
        if options.pretrained is None and self.rank == 0:
            log.info(
                "no pretrained= given: scoring with demo-mdm, the small bundled demonstration checkpoint. "
                "Name yours with --model_args pretrained=<folder or hub name>,..."
            )
        self.tokenizer = denoisers.load_tokenizer(vars(options))
        self.denoiser = self._load()
        self._device = self.denoiser.device
        self.estimator = switch.make(self.denoiser, options)
        self.text = Text(self.tokenizer, self.denoiser, options.windows, self.estimator.block)
        self.begin()
        self.trace = self._open_trace()
        if self.rank == 0:
            if self.estimator.decodes and (note := self.denoiser.ties(options.rule)):
                log.warning("%s", note)
            if unread := switch.unread(arguments, options.estimator):
                log.info("estimator=%s does not read %s", options.estimator, " and ".join(unread))
            log.info("spec %s: %s", self.fingerprint, ", ".join(f"{key}={value}" for key, value in self.spec.items()))

    def _load(self, **other: Any) -> Denoiser:
        """The network asked for, or with other args."""
        from lm_eval_duel import denoisers

        asked = {**self.options.network, **other}
        return denoisers.load(self.options.pretrained or BUNDLED, device=self._where, tokenizer=self.tokenizer, **asked)

    def fine(self) -> Denoiser:
        if self.spec.get("dtype") in ("float32", "float64"):
            return self.denoiser
        return self._load(dtype="float32", compile=False)

    # ------------------------------------------------------------ what this spec is

    @cached_property
    def spec(self) -> dict[str, str]:
        """Everything that defines a number, in words."""
        return fingerprint.spec_of(self.denoiser, self.estimator, self.text)

    @property
    def generating(self) -> dict[str, str]:
        """The spec of generated texts: the rule's where the estimator has none, the seed, and how ids become text."""
        from lm_eval_duel.harness.generation import ends

        asked = {"estimator": "duel", "block": str(self.options.block), "grid": self.options.grid}
        asked |= fingerprint.of_rule(self.options.rule)
        spec = self.spec if self.estimator.decodes else {**self.spec, **asked}
        return {
            **spec,
            "draw_seed": str(self.options.draw_seed),
            "ends": str(sorted(ends(self.tokenizer))),
            "clean_up": str(bool(getattr(self.tokenizer, "clean_up_tokenization_spaces", False))),
        }

    @property
    def follows(self) -> dict[str, str]:
        """What is in the results and not in the spec: the rules that a lattice reads off, and the code of own ones."""
        if (rules := getattr(self.estimator, "rules", None)) is None:
            return {}
        described = [fingerprint.of_rule(rule) for rule in rules]
        codes = [each["rule_code"] for each in described if "rule_code" in each]
        return {
            RULES: "+".join(each["rule"] for each in described),
            **({RULE_CODE: "+".join(codes)} if codes else {}),
        }

    @property
    def fingerprint(self) -> str:
        """The spec as a short digest."""
        return fingerprint.digest(self.spec)

    def get_model_info(self) -> dict[str, Any]:
        """For the results JSON: the spec, its fingerprint, and what it cost, on all ranks."""
        from lm_eval_duel.harness.run_stats import Cost, versions

        total = Cost(ranks=0)
        for account in self.accounts or [self.account()]:
            total.merge(account)
        if total.close:
            log.info("%s", total.close)
        for bound in total.bounds:
            eps = self.options.estimator_args.get("elbo_eps")
            log.info("ELBO (%s) of %s", "elbo_eps above 0: no bound" if eps else "a bound", bound)
        if total.ranks > 1:
            log.info("%s", total.balance)
            if total.verified.windows:
                log.info("on all ranks, %s", total.verified.words)
        spec, denoiser = self.spec, self.denoiser
        return {
            "fingerprint": self.fingerprint,
            "spec": spec,
            "duel": {
                "pretrained": self.options.pretrained or BUNDLED,
                "estimator": self.estimator.name,
                "rule": spec.get("rule"),
                "block": self.estimator.block,
                "family": denoiser.family,
                "attention": denoiser.attention,
                "dtype": spec.get("dtype"),
                "weights": spec.get("weights"),
                "bos": self.text.bos,
                "row_capacity": self.text.capacity,
                "device": str(denoiser.device),
                "versions": versions(),
                "trace": str(self.trace.path) if self.trace else None,
                **total.describe(),
            },
        }

    def account(self) -> Cost:
        """What this rank computed and what it cost."""
        from lm_eval_duel.harness.run_stats import Share, peak_memory

        sums = dataclasses.asdict(self.estimator.counts)
        sums |= {name: getattr(self.text, name) for name in ("cut_contexts", "merged_borders")}
        share = Share(sums["rows"], sums["tokens"], self.cost.seconds)
        return dataclasses.replace(
            self.cost,
            counts=sums | self.cost.counts,
            peak_memory=peak_memory(self.denoiser.device),
            shares=[share],
        )

    @unchained()
    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache, unless it was written under another spec (it keys on the text only)."""
        if cache_hook.dbdict is not None:
            generating = fingerprint.digest(self.generating)
            store = ResponseCache.adopt(cache_hook.dbdict, self.spec, self.follows, generating)
            if store.found:
                log.warning(
                    "answers found in the --use_cache file are not computed again: config.duel.tasks counts them, and "
                    "cost, verify and a trace are of what this run computes"
                )
        super().set_cache_hook(cache_hook)

    def _open_trace(self) -> Writer | None:
        """The trace asked for; raises DuelError where there is one of another spec."""
        if self.options.trace is None:
            return None
        from lm_eval_duel.harness.trace import Writer

        name = self.options.tokenizer or self.options.pretrained or BUNDLED
        header = {"fingerprint": self.fingerprint, "spec": self.spec, "tokenizer": name}
        header["rules"] = [str(rule) for rule in getattr(self.estimator, "rules", ())]  # that a lattice reads off
        header |= {key: code for key, code in self.follows.items() if key == RULE_CODE}
        return Writer(self.options.trace, header, self.rank, self.world_size)

    # ------------------------------------------------------------ what the harness asks about text

    @property
    def eot_token_id(self) -> int | None:
        return self.text.end

    @property
    def prefix_token_id(self) -> int | None:
        return self.text.start

    @property
    def max_length(self) -> int:
        """Positions in a row, framing tokens included."""
        return self.denoiser.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text alone; framing tokens are added to windows, not to texts."""
        return self.text.encode(string, bool(add_special_tokens))
