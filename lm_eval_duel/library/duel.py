"""`Duel` for Python: an estimator with a network, texts or token ids in.

    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=32)
    [score] = duel.score(["We the people"])
    [generated] = duel.generate(["We the"], max_new_tokens=64, do_sample=True, seed=0)

Texts get the special tokens and windows of the harness (text/text.py), and so the same numbers. lm_eval is not needed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from lm_eval_duel.core.budget import GPU_TOKENS
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Sample
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError, naming, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.arguments import TwoPhaseArguments
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.library.ids import SAMPLERS, OnIds
from lm_eval_duel.library.keywords import (
    AUTO,
    DUEL,
    GREEDY,
    Default,
    estimator_options,
    own_arguments,
    pretrained_options,
)
from lm_eval_duel.library.results import GeneratedText, TextEstimate, TextScore
from lm_eval_duel.library.texts import TextOrIds, generate_texts, one_each, score_texts
from lm_eval_duel.options import Windows
from lm_eval_duel.rules import Rule, parse
from lm_eval_duel.text.generation import Generator, Settings
from lm_eval_duel.text.loading import load_scorer
from lm_eval_duel.text.text import Text, unknown_share

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")

Block: TypeAlias = "int | Literal['auto'] | None"
Grid: TypeAlias = Literal["auto", "target", "row"]


class Duel(OnIds):
    """A denoiser, an unmasking rule and a block: one distribution, to score and to sample.

    Made from a denoiser, it takes token ids: `log_prob`, `stream`, `sample`, `replay`. With a tokenizer, as
    `from_pretrained` has it, it also takes texts: `score`, `generate`. Under another `estimator` than "duel" it scores
    the same windows in another way; what that estimator does not define raises DuelError.

    Args:
        denoiser: A network, from `load`.
        rule: The unmasking rule, such as "greedy:k=2", or an instance of `Rule`.
        block: Positions that are finished before the next ones are begun. None: the whole target. "auto": the trained
            or published block, else 32.
        grid: Where blocks count from, the first target position or the first position of the row. "auto": "row" for
            block-causal networks, else "target".
        batch_size: Rows of max_length in one network call. None: what the device takes. Changes no number.
        max_batch_size: At most this many.
        traced: Scores carry the confidence, margin and entropy of each token.
        estimator: What is computed, as in docs/estimators.md: "duel", "ar", "elbo", "elbo_exact", "mixture", "oracle",
            "sampled_confidence", "sampled_order" or "two_phase".
        tokenizer: Turns texts into ids. None: this Duel takes ids only.
        windows: How long texts are cut, "independent" (each window from scratch) or "harness" (its rolling windows).
        arguments: Arguments of the estimator, such as mc_samples=256 or draw_seed=1.

    Raises:
        DuelError: If the combination defines no distribution of this network.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | Rule = GREEDY,
        block: Block = "auto",
        grid: Grid = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        *,
        estimator: str = "duel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        windows: Windows = "independent",
        **arguments: Any,
    ):
        if windows not in get_args(Windows):
            raise unknown("value of windows", windows, get_args(Windows))
        registry.check_rule([] if isinstance(rule, Default) else ["rule"], estimator)
        if isinstance(rule, str):
            rule = parse(rule) if tokenizer is None else parse(rule).with_tokenizer(tokenizer)
        options = estimator_options(estimator, arguments)
        options = dataclasses.replace(options, rule=rule, block=block, grid=grid, windows=windows)
        made = registry.make(denoiser, options, batch_size=batch_size, max_batch_size=max_batch_size, traced=traced)
        text = None if tokenizer is None else Text(tokenizer, denoiser, options.windows, made.block)
        self._take(denoiser, made, text)

    @classmethod
    def from_pretrained(
        cls,
        name: str = "demo-mdm",
        *,
        rule: str | Rule = GREEDY,
        block: Block = AUTO,
        grid: Grid = AUTO,
        estimator: str = DUEL,
        windows: Windows = "independent",
        device: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        **network: Any,
    ) -> Duel:
        """A checkpoint with its tokenizer: a local folder, a hub name, or a bundled name.

        Args:
            name: The checkpoint.
            device: None picks a GPU if there is one.
            tokenizer: A folder, a hub name, or a loaded tokenizer. None: the checkpoint's own.
            network: The model args of the network, as in docs/model_args.md: dtype, revision, trust_remote_code, bos,
                mask_token_id, max_length, family, attention, shift_logits, temperature, peft, device_map, ... The
                parameters of a rule (rule="klass", mu=0.9, nu=0.01) and of an estimator (estimator="elbo",
                mc_samples=256) may stand here as well.

        Raises:
            DuelError: If an argument is wrong or the checkpoint cannot be read.
        """
        sampler = {
            "rule": rule if isinstance(rule, str) else str(rule),
            "block": block,
            "grid": grid,
            "estimator": estimator,
        }
        loaded = tokenizer if not isinstance(tokenizer, str) else None
        named = {"tokenizer": tokenizer} if isinstance(tokenizer, str) else {}
        options = pretrained_options(name, sampler, {"windows": windows, **named, **network})
        if not isinstance(rule, str):
            options = dataclasses.replace(options, rule=rule)
        sizes = {"batch_size": batch_size, "max_batch_size": max_batch_size, "traced": traced}
        scorer = load_scorer(options, tokenizer=loaded, device=device, **sizes)
        duel = cls.__new__(cls)
        duel._take(scorer.denoiser, scorer.estimator, scorer.text)
        return duel

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        rule: str | Rule = GREEDY,
        block: Block = "auto",
        grid: Grid = "auto",
        estimator: str = "duel",
        windows: Windows = "independent",
        batch_size: int | None = None,
        traced: bool = False,
        module: torch.nn.Module | None = None,
        device: torch.device | str | None = None,
        self_tests: bool = True,
        weights: str | None = None,
        autocast: torch.dtype | None = None,
        **network: Any,
    ) -> Duel:
        """A network in memory, such as one that is being trained. Its weights are not copied.

        Each call runs with dropout off, and leaves train mode, gradient mode and autocast as they were.

        Args:
            model: A network of transformers, a class that is called with input_ids and attention_mask (LLaDA, Dream),
                a function logits = f(ids, real) as in docs/python_api.md, or a `Denoiser`. DistributedDataParallel,
                torch.compile and PEFT around it are seen through; sharded networks (FSDP, DeepSpeed ZeRO-3) are
                refused.
            tokenizer: None: this Duel takes ids only, and every id but [MASK] is a token.
            batch_size: Rows of max_length in one call. None: 2048 tokens on a CPU, 16384 on a GPU.
            module: The module that the function runs, to be put into eval mode; needed if it is not the function
                itself or the owner of the method.
            device: Of the ids. None: that of the module, else the CPU.
            self_tests: False: only the tests that detect what numbers depend on.
            weights: What the spec says of the weights: None: "in memory", so that the fingerprint does not depend on
                them; "digest": a hash of what they are when the spec is read; or a text, such as "run 7, step 2000".
            autocast: The dtype to which calls are cast. None: none, whatever is in force outside.
            network: mask_token_id, max_length, attention, shift_logits, bos, last_block, family, cache, temperature,
                top_k, top_p, exclude_ids, cfg_scale, as in docs/model_args.md; and the estimator's own arguments.

        Raises:
            DuelError: If an argument is wrong, or the network fails a self-test.
        """
        from lm_eval_duel.denoisers.in_memory import from_model  # imports transformers

        entry = registry.find(estimator)
        arguments = {key: network.pop(key) for key in own_arguments(entry) if key in network}
        network |= {"block": block} if isinstance(block, int) and not entry.causal else {}
        network |= {"attention": "causal"} if entry.causal else {}
        denoiser = from_model(
            model,
            tokenizer,
            module=module,
            device=device,
            self_tests=self_tests,
            weights=weights,
            autocast=autocast,
            **network,
        )
        if batch_size is None and denoiser.device.type != "cpu":  # no trial: the training needs the memory
            batch_size = max(1, GPU_TOKENS[0] // denoiser.max_length)
        text: dict[str, Any] = {"tokenizer": tokenizer, "windows": windows}
        return cls(denoiser, rule, block, grid, batch_size, None, traced, estimator=estimator, **text, **arguments)

    # ------------------------------------------------------------ text in

    def windows(self, text: str) -> list[Window]:
        """The windows of a text that `score` scores, special tokens included. Raises DuelError as `score` does."""
        text_side = self._require_text("windows", [text])
        return text_side.document(text_side.encode(text))

    def score(
        self,
        texts: Sequence[str],
        contexts: Sequence[TextOrIds] | None = None,
        suffixes: Sequence[TextOrIds] | None = None,
    ) -> list[TextScore]:
        """The score of each text, in order: the same numbers as in the harness.

        Special tokens stand where the checkpoint's convention puts them. Long texts are cut into windows, and every
        token is scored once.

        Args:
            texts: Texts.
            contexts, suffixes: What stands visible before and after each text, as text or ids. With either, the value
                is log p(text | context, suffix), in one window. Contexts and suffixes that do not fit are truncated at
                their far ends. White space at the end of a context is scored with the text after it.

        Raises:
            DuelError: If this Duel has no tokenizer, or a text cannot be scored; the message names it.
        """
        scores = dict(self.score_stream(texts, contexts, suffixes))
        return [scores[n] for n in range(len(texts))]

    def score_stream(
        self,
        texts: Sequence[str],
        contexts: Sequence[TextOrIds] | None = None,
        suffixes: Sequence[TextOrIds] | None = None,
    ) -> Iterator[tuple[int, TextScore]]:
        """(index, score) of each text as it is finished, in any order. Arguments and errors: see `score`."""
        text_side = self._require_text("score", texts)
        if empty := [str(n) for n, text in enumerate(texts) if not text]:
            log.warning("no perplexity is defined for a text without tokens (nan): text %s", ", ".join(empty))
        before, after = one_each(texts, contexts, "contexts"), one_each(texts, suffixes, "suffixes")
        missing = tokens = 0
        for n, length, windows, scores in score_texts(text_side, texts, self.stream, contexts, suffixes):
            absent = text_side.unknown(windows, texts[n])
            missing, tokens = missing + absent, tokens + length
            given = (absent, before[n], after[n])
            yield (
                n,
                TextScore.from_scores(texts[n], length, windows, scores, self.estimator, text_side.tokenizer, *given),
            )
        if missing:
            log.warning("%s", unknown_share(missing, tokens))

    def estimate(
        self,
        texts: Sequence[str],
        *,
        sample: float = TwoPhaseArguments.sample,
        cache: Literal["dual", "prefix"] = "dual",
        seed: int = 0,
    ) -> list[TextEstimate]:
        """A two-phase estimate of what `score` gives for each text, and the standard error: a fraction of the work.

        Single texts have few sampled blocks; `TextEstimate.total(estimates)` is the estimate for all of them.

        Args:
            texts: Texts.
            sample: The share of blocks that are scored without the cache, too.
            cache: The cached sampler under which all blocks are scored.
            seed: Of the sample.

        Raises:
            DuelError: If this network supports no cache, or for what `score` raises it.
        """
        self._sampler("estimate", "duel")
        rule, budget = cast(Rule, self.rule), self.estimator.budget
        rows = None if self.denoiser.fixed_weights else max(1, budget.tokens // self.denoiser.max_length)
        estimator = TwoPhase(
            self.denoiser, rule, self.block, grid=self.grid, batch_size=rows, cache=cache, sample=sample, seed=seed
        )
        estimator.phases["uncached"].budget = budget
        estimates = {
            n: TextEstimate.from_scores(texts[n], length, windows, scores, estimator)
            for n, length, windows, scores in score_texts(
                self._require_text("estimate", texts), texts, estimator.stream
            )
        }
        return [estimates[n] for n in range(len(texts))]

    # ------------------------------------------------------------ text out

    def generate(self, prompts: Sequence[TextOrIds], **settings: Any) -> list[GeneratedText]:
        """A continuation of each prompt, in order. Settings and errors: see `generate_stream`."""
        texts = dict(self.generate_stream(prompts, **settings))
        return [texts[n] for n in range(len(prompts))]

    def generate_stream(
        self,
        prompts: Sequence[TextOrIds],
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        max_new_tokens: int = 256,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        until: str | Sequence[str] = (),
        seed: int = 0,
        keys: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, GeneratedText]]:
        """(index, continuation) of each prompt as it is finished (Algorithm 1), as `generate_until` writes it.

        Args:
            prompts: Texts or ids. One that leaves no room for `max_new_tokens` is cut from the left, with a warning.
            suffixes: What stands visible after each generated text, as text or ids (infilling).
            max_new_tokens: Positions of the generation window, filled block after block.
            do_sample: Draw tokens; False: the most probable token at every pick. None: draw if `temperature` is
                above 0.
            temperature, top_k, top_p: Change the distribution that is drawn from, and with it `log_prob`.
            until: Stop strings. They are looked for after each finished block.
            seed, keys: A draw depends on the seed, the prompt's key and the position only. A prompt's key is its index
                unless `keys` are given.

        Raises:
            DuelError: If this Duel has no tokenizer, or a setting or a prompt is wrong.
        """
        settings = Settings.from_arguments(
            {
                "max_new_tokens": max_new_tokens,
                "do_sample": do_sample,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "until": until if isinstance(until, str) else list(until),
            }
        )
        written = prompts if isinstance(prompts, str) else [prompt for prompt in prompts if isinstance(prompt, str)]
        text_side = self._require_text("generate", written)
        generator = Generator(self._sampler("generate", *SAMPLERS), text_side, settings, seed)
        return generate_texts(generator, prompts, range(len(prompts)) if keys is None else keys, suffixes)

    def stream_samples(
        self,
        contexts: Sequence[TextOrIds],
        length: int,
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        **settings: Any,
    ) -> Iterator[tuple[int, Sample]]:
        """See `OnIds.stream_samples`."""
        befores: list[Ids] = []
        afters: list[Ids] = []
        for n, (before, after) in enumerate(zip(contexts, one_each(contexts, suffixes, "suffixes", ()), strict=True)):
            if isinstance(before, str) or isinstance(after, str):
                with naming(f"Context {n}"):
                    window = self._require_text("sample", []).prompt(before, length, after)
                before, after = window.context, window.suffix
            befores.append(before)
            afters.append(after)
        return super().stream_samples(befores, length, suffixes=afters, **settings)

    def _require_text(self, method: str, texts: Sequence[str]) -> Text:
        """The text side; raises DuelError if there is none, or if `texts` are not texts."""
        if self._text is None:
            raise DuelError(
                f"Duel.{method} takes texts, and this Duel has no tokenizer. Make it with Duel.from_pretrained(name), "
                "or pass tokenizer=load_tokenizer({'pretrained': name}). For token ids use log_prob and sample."
            )
        if isinstance(texts, str):
            raise DuelError(f"Duel.{method} takes a list of texts; got one text. Write duel.{method}([text]).")
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                raise DuelError(
                    f"Duel.{method} takes a list of texts; number {n} is of the class {type(text).__name__}. For token "
                    "ids use log_prob and sample."
                )
        return self._text
