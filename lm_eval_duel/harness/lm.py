"""`duel-mdm`, the model that lm-evaluation-harness sees: a network, an estimator and a tokenizer."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM

from lm_eval_duel import fingerprint
from lm_eval_duel.console.command_line import key_values
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.denoisers.filters import tie_warning
from lm_eval_duel.errors import DuelError, unchained, usage
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness import patches, stats
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.generation import generate, generation_spec
from lm_eval_duel.harness.scoring import Evaluation, TextLogLikelihood
from lm_eval_duel.harness.store import RULE_CODE, ResponseCache, followed_rules
from lm_eval_duel.options import Options, with_lm_evals_flags
from lm_eval_duel.results import trace
from lm_eval_duel.results.doubts import rule_doubt
from lm_eval_duel.results.runs import SCHEMA
from lm_eval_duel.text.loading import load_scorer
from lm_eval_duel.text.text import find_chat_template

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook

    from lm_eval_duel.estimators.base import Estimator

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


class DuelMDM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Exact likelihood of a masked diffusion model under a deterministic unmasking rule, and its bounds and baselines.

    Takes the model args of `Options`; raises UsageError for a wrong one before the checkpoint is read, and for a
    checkpoint that cannot be scored with them.
    """

    @usage()
    def __init__(self, **arguments: Any):
        super().__init__()
        patches.in_lm_evals_command()  # first: it decides how an error of the next line is printed
        options = Options.parse(arguments)
        patches.apply()

        self.ranks = Ranks.join(options.device)
        self._rank = self.ranks.rank
        self._world_size = self.ranks.world_size
        self.all_gather = self.ranks.all_gather
        self.barrier = self.ranks.barrier

        self.trace: trace.Writer | None = None
        if options.trace is not None:  # opened now: a file that cannot be written ends the run before it loads
            self.trace = trace.Writer(options.trace, self.rank, self.world_size)

        scorer = load_scorer(options, device=self.ranks.device)
        self.options = scorer.options  # with the ids that the rule takes from the tokenizer
        self.tokenizer = scorer.tokenizer
        self.denoiser = scorer.denoiser
        self.text = scorer.text
        self._device = self.denoiser.device
        self._chat_template: str | None = None  # of --apply_chat_template

        self.evaluation = self._new_evaluation(scorer.estimator)
        if self.trace is not None:
            tokenizer = options.tokenizer or options.pretrained or BUNDLED
            self.trace.begin(self._trace_header(tokenizer))
        if self.rank == 0:
            self._log_spec(arguments)

    def _log_spec(self, arguments: dict[str, Any]) -> None:
        """Log what the numbers depend on, and which of the given arguments they do not."""
        note = tie_warning(self.denoiser, self.options.rule) if self.estimator.decodes else None
        if note:
            log.warning("%s", note)
        self.estimator.name_ignored_args(arguments)
        log.info("fingerprint %s", self.fingerprint)
        lines = [f"  {key}={value}" for key, value in self.spec.items()]
        log.debug("its spec:\n%s", "\n".join(lines))

    @classmethod
    @unchained()
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> DuelMDM:
        """The model of `key=value,...`; raises DuelError for a key with two values, of which lm-eval takes the last."""
        return cls.create_from_arg_obj(key_values(arg_string), additional_config)

    @classmethod
    @unchained()
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> DuelMDM:
        """The model of a dict. `additional_config`: --batch_size, --max_batch_size and --device, None if not given.

        Raises UsageError for an argument that both give.
        """
        patches.in_lm_evals_command()  # first: it decides how an error of the next line is printed
        return cls(**with_lm_evals_flags(arg_dict, additional_config or {}))

    # ------------------------------------------------------------ requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and True if argmax decoding under the same rule would generate it.

        With an empty context only special tokens are visible, and a BOS if the network is causal; an empty continuation
        is (0.0, True). A context too long for the row is truncated from the left; a continuation too long is an error.
        `is_greedy` is always False if the estimator has no decoding.
        """
        self._require_continuations()
        if not self.estimator.decodes:
            log.warning(
                "estimator=%s cannot decode, so is_greedy is always False: metrics that use it (such as the acc of "
                "lambada) are meaningless here; log-likelihood metrics are valid",
                self.estimator.name,
            )
        return self._begin(requests, disable_tqdm).loglikelihood(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TextLogLikelihood]:
        """log p of whole texts, with each token in exactly one window; an empty text is 0.0."""
        return self._begin(requests, disable_tqdm).loglikelihood_rolling(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A text after each prompt, by Algorithm 1 under the rule and block that are scored.

        A sample is seeded by (draw_seed, task, document, request, repeat). Temperature 0 takes the argmax of each pick.
        """
        return generate(self._begin(requests, disable_tqdm), requests)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of ids: (texts, context ids, continuation ids)."""
        self._require_continuations()
        windows = [self.text.continuation(context, target) for _, context, target in requests]
        return [(score.log_prob, score.is_greedy) for score in self.estimator.log_prob(windows)]

    # ------------------------------------------------------------ evaluations

    def _begin(self, requests: list[Instance], disable_tqdm: bool) -> Evaluation:
        """The evaluation that these requests belong to, ready to answer them; a new one if the last is over."""
        if not self.evaluation.owns(requests):
            self.evaluation = self._new_evaluation(self.estimator)
        self.evaluation.ask(self.cache_hook.dbdict, show_progress=not disable_tqdm)
        return self.evaluation

    def _new_evaluation(self, estimator: Estimator) -> Evaluation:
        return Evaluation(self.options, self.text, estimator, self.ranks, self.trace)

    @property
    def estimator(self) -> Estimator:
        """The estimator of the evaluation under way, with its counts."""
        return self.evaluation.estimator

    def _trace_header(self, tokenizer: str) -> dict[str, Any]:
        rules = [str(rule) for rule in getattr(self.estimator, "rules", ())]
        header = {
            "fingerprint": self.fingerprint,
            "spec": self.spec,
            "pretrained": self.options.pretrained or BUNDLED,
            "tokenizer": tokenizer,
            "rules": rules,
        }
        followed = followed_rules(self.estimator)
        if RULE_CODE in followed:  # not part of a lattice's spec
            header[RULE_CODE] = followed[RULE_CODE]
        return header

    def _require_continuations(self) -> None:
        """Raise DuelError if the estimator scores whole texts only."""
        reason = registry.find(self.options.estimator).whole_texts
        if reason:
            raise DuelError(reason)

    @unchained()
    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache; raises DuelError if it was written under another spec."""
        if cache_hook.dbdict is not None:
            path = cache_hook.dbdict.filename
            cache_hook.dbdict.close()  # `ResponseCache` opens the same file
            store = ResponseCache(path, self.spec, followed_rules(self.estimator))
            cache_hook.dbdict = store
            if store.has_answers:
                log.warning(
                    "answers in the --use_cache file are not computed again. They count in the results, but cost and "
                    "verify cover only what this run computes"
                )
        super().set_cache_hook(cache_hook)

    # ------------------------------------------------------------ results

    @cached_property
    def spec(self) -> dict[str, str]:
        """Everything that defines a number, by name."""
        return fingerprint.spec_of(self.denoiser, self.estimator, self.text)

    @property
    def generation_spec(self) -> dict[str, str]:
        """The spec of generated texts."""
        return generation_spec(self.evaluation)

    @property
    def fingerprint(self) -> str:
        """The digest of the spec."""
        return fingerprint.digest(self.spec)

    def get_model_info(self) -> dict[str, Any]:
        """The entries of the results JSON: the spec, its fingerprint, and the statistics of all ranks."""
        total = self.evaluation.total()
        for line in total.log_lines():
            log.info("%s", line)
        vocabulary = self.denoiser.token_count
        for line in [*total.warnings(), *total.unigram_warnings(vocabulary)]:
            log.warning("%s", line)
        duel = {
            "schema": SCHEMA,
            "pretrained": self.options.pretrained or BUNDLED,
            "estimator": self.estimator.name,
            "rule": self.spec.get("rule"),
            "block": self.estimator.block,
            "family": self.denoiser.family,
            "attention": self.denoiser.attention,
            "dtype": self.spec.get("dtype"),
            "weights": self.spec.get("weights"),
            "parameters": stats.parameters(self.denoiser),
            "bos": self.text.bos,
            "row_capacity": self.text.capacity,
            "device": str(self.denoiser.device),
            "versions": stats.versions(),
            "trace": str(self.trace.path) if self.trace else None,
            **total.describe(),
            "errors": total.errors(),
        }
        if self.denoiser.unread_entries:
            duel["unread_config"] = list(self.denoiser.unread_entries)
        followed = followed_rules(self.estimator)
        if RULE_CODE in followed:  # not part of a lattice's spec
            duel[RULE_CODE] = followed[RULE_CODE]
        decided_otherwise = rule_doubt(duel)
        if decided_otherwise:
            log.warning("%s", decided_otherwise)
        return {"fingerprint": self.fingerprint, "spec": self.spec, "duel": duel}

    # ------------------------------------------------------------ ranks

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`."""
        return self.evaluation.gather(obj, dst)

    # ------------------------------------------------------------ text

    @property
    def eot_token_id(self) -> int | None:
        return self.text.end

    @property
    def prefix_token_id(self) -> int | None:
        return self.text.start

    @property
    def max_length(self) -> int:
        """Positions in a row, special tokens included."""
        return self.denoiser.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text alone; special tokens are added to windows, not to texts."""
        return self.text.encode(string, bool(add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the format of the tokenizer's chat template; raises UsageError if it has none."""
        template = self._chat_template or find_chat_template(self.tokenizer, True)
        text = self.tokenizer.apply_chat_template(
            chat_history,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)  # since it is not tokenized
        return text

    @unchained()
    def chat_template(self, chat_template: bool | str = False) -> str:
        """The chat template, for the results; `chat_template`: its name, if the tokenizer has several.

        lm-eval asks for it before the first conversation, and passes the name here alone, so it is remembered.
        """
        if not chat_template:
            return ""
        self._chat_template = find_chat_template(self.tokenizer, chat_template)
        return self._chat_template
