"""`Duel` for Python: an estimator with a network, texts or token ids in.

    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=32)
    [score] = duel.score(["We the people"])
    [generated] = duel.generate(["We the"], max_new_tokens=64, do_sample=True, seed=0)

Texts get the special tokens and windows of the harness (text/text.py), and so the same numbers. lm_eval is not needed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lm_eval_duel.core.batch_size import GPU_TOKENS, Budget
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.load_options import IN_MEMORY_ARGUMENTS, NETWORK_ARGUMENTS, NetworkArguments
from lm_eval_duel.errors import naming
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.arguments import SEED, TwoPhaseArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.totals import score_documents
from lm_eval_duel.estimators.two_phase import FIRST_CACHE, TwoPhase
from lm_eval_duel.fingerprint import spec_of
from lm_eval_duel.keywords import keywords_of, shows, suggests_names
from lm_eval_duel.library.ids import (
    AUTO,
    DEMO,
    ELSEWHERE,
    GREEDY,
    KEYWORDS,
    SAMPLERS,
    SIZES,
    Default,
    OnIds,
    estimator_options,
    estimators_listing,
    keywords_of_duel,
    made_rule,
    network_listing,
    own_arguments,
    parameters_of_rule,
    require_known_of_model,
    require_name,
    require_network,
    require_rule,
    require_tokenizer,
)
from lm_eval_duel.library.results import GeneratedText, TextEstimate, TextScore, with_doubt
from lm_eval_duel.library.texts import TextOrIds, as_list, one_each, prompt_windows, text_windows
from lm_eval_duel.options import MODEL_ARGUMENTS, Grid, Options, Windows
from lm_eval_duel.rules import Rule
from lm_eval_duel.text.generation import Generator, Settings
from lm_eval_duel.text.loading import load_scorer
from lm_eval_duel.text.text import TextEncoder, unknown_share

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")

Block: TypeAlias = "int | Literal['auto'] | None"


@suggests_names(ELSEWHERE)
class Duel(OnIds):
    """A denoiser, an unmasking rule and a block: one distribution, to score and to sample.

    `log_prob`, `stream`, `sample` and `replay` take token ids. With a tokenizer, which `from_pretrained` loads,
    `score` and `generate` take texts. Another `estimator` than "duel" scores the same windows in another way; methods
    that it does not define raise DuelError.

    Args:
        denoiser: A network, from `load`.
        rule: The unmasking rule, such as "greedy:k=2", or an instance of `Rule`. Parameters of a named rule may be
            keywords, too: rule="greedy", k=2.
        block: The number of positions that are finished before the next ones begin. None: the whole target. "auto":
            the trained or published block, else 32.
        grid: Where blocks start counting: at the first position of the "target" or of the "row". "auto": "row" for
            block-causal networks except D2F, else "target".
        batch_size: Rows of max_length in one network call. None: as many as the device takes, at most `max_batch_size`.
            The `estimator.budget` of another Duel on the same network: both use it. Changes no number.
        traced: Add the confidence, margin and entropy of each token to the scores.
        estimator: The value to compute, as in docs/estimators.md.
        tokenizer: The tokenizer of texts. None: this Duel takes ids only.
        windows: How to cut long texts: "independent", each window from scratch, or "harness", its rolling windows.
        arguments: Parameters of the rule, and arguments of the estimator, such as mc_samples=256, as listed by
            help(Duel.from_pretrained).

    Raises:
        DuelError: If the combination defines no distribution of this network.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | Rule = GREEDY,
        block: Block = AUTO,
        grid: Grid = AUTO,
        batch_size: int | Budget | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        *,
        estimator: str = "duel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        windows: Windows = "independent",
        **arguments: Any,
    ):
        MODEL_ARGUMENTS["windows"].read("windows", windows)
        keywords = {"rule": rule, "block": block, "grid": grid}
        given = [key for key, value in keywords.items() if not isinstance(value, Default)]  # by the user
        require_network(denoiser)
        require_rule(rule)
        require_tokenizer(tokenizer)
        parameters = parameters_of_rule(rule, registry.find(estimator), arguments)
        registry.check_rule([*parameters, *{"rule"}.intersection(given)], estimator)
        rule = made_rule(rule, parameters, tokenizer)
        of_estimator = {key: value for key, value in arguments.items() if key not in parameters}
        options = estimator_options(estimator, of_estimator)
        options = dataclasses.replace(options, rule=rule, block=block, grid=grid, windows=windows)
        made = Estimator.from_options(
            denoiser,
            options,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            traced=traced,
        )
        made.name_ignored_args([*given, *arguments])
        text = None
        if tokenizer is not None:
            text = TextEncoder(tokenizer, denoiser, options.windows, made.block)
        elif windows != "independent":
            log.warning("windows=%s says how texts are cut, and a Duel without a tokenizer takes no texts", windows)
        self._take(denoiser, made, text)

    @classmethod
    @shows(
        [*keywords_of_duel(__init__), *keywords_of(NetworkArguments)],
        f"{network_listing(NETWORK_ARGUMENTS)}\n\n{estimators_listing()}",
    )
    def from_pretrained(
        cls,
        name: str = DEMO,
        *,
        device: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **arguments: Any,
    ) -> Duel:
        """Load a checkpoint with its tokenizer.

        Args:
            name: A local folder, a hub name, or a bundled name ("demo-mdm", "demo-bd", "demo-duo", "demo-ar").
            device: "cpu", "cuda", "cuda:1", ... None: a GPU if there is one.
            tokenizer: A folder, a hub name, or a loaded tokenizer. None: the checkpoint's own.
            rule, block, grid, estimator, windows, batch_size, max_batch_size, traced: As in `Duel`.
            arguments: Model args, as in docs/model_args.md: of the network and of the estimator (estimator="elbo",
                mc_samples=256), both listed below, and parameters of the rule (rule="klass", mu=0.9, nu=0.01).

        Raises:
            DuelError: If an argument is wrong or the checkpoint cannot be read.
        """
        require_name(name, arguments)
        if isinstance(tokenizer, str | os.PathLike):
            arguments["tokenizer"] = os.fspath(tokenizer)
            tokenizer = None
        require_tokenizer(tokenizer)
        sizes = {key: arguments.pop(key) for key in SIZES if key in arguments}
        rule = arguments.get("rule", GREEDY)
        require_rule(rule)
        if isinstance(rule, Rule):
            arguments["rule"] = str(rule)
        options = Options.parse({"pretrained": str(name), **arguments})
        if isinstance(rule, Rule):
            options = dataclasses.replace(options, rule=rule)
        scorer = load_scorer(options, tokenizer=tokenizer, device=device, **sizes)
        scorer.estimator.name_ignored_args(list(arguments))
        duel = cls.__new__(cls)
        duel._take(scorer.denoiser, scorer.estimator, scorer.text)
        return duel

    @classmethod
    @shows(
        [*keywords_of_duel(__init__), *keywords_of(NetworkArguments, IN_MEMORY_ARGUMENTS)],
        f"{network_listing(IN_MEMORY_ARGUMENTS)}\n\n{estimators_listing()}",
    )
    def from_model(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        module: torch.nn.Module | None = None,
        device: torch.device | str | None = None,
        self_tests: bool = True,
        weights: str | None = None,
        autocast: torch.dtype | None = None,
        **arguments: Any,
    ) -> Duel:
        """Wrap a network in memory, such as one that is being trained, without a copy of its weights.

        Each call runs with dropout off. Afterwards, train mode, gradient mode and autocast are restored.

        Args:
            model: A network of transformers, a class that is called with input_ids and attention_mask (LLaDA, Dream),
                a function logits = f(ids, real) as in docs/python_api.md, or a `Denoiser`. DistributedDataParallel
                and torch.compile are unwrapped, PEFT adapters stay; sharded networks (FSDP, DeepSpeed ZeRO-3) are
                refused.
            tokenizer: The tokenizer. None: this Duel takes ids only, and every id but [MASK] is a token.
            module: The module that the function runs, which is put into eval mode. Needed if the function is neither a
                module nor a method of one.
            device: The device of the ids. None: the module's, else the CPU.
            self_tests: Run all self-tests. False: only the tests that detect what numbers depend on.
            weights: The entry for the weights in the spec. None: "in memory", so that the fingerprint does not depend
                on them; "digest": a hash of the weights when the spec is read; or a text, such as "run 7, step 2000".
            autocast: The dtype of autocast during calls. None: no autocast, whatever is active outside.
            rule, block, grid, estimator, windows, batch_size, max_batch_size, traced: As in `Duel`. A `batch_size` of
                None is 2048 tokens on a CPU and 16384 on a GPU.
            arguments: Model args of the network and of the estimator, listed below, and parameters of the rule.

        Raises:
            DuelError: If an argument is wrong, or the network fails a self-test.
        """
        from lm_eval_duel.denoisers.in_memory import from_model

        require_tokenizer(tokenizer)
        entry = registry.find(arguments.get("estimator", "duel"))
        rule = arguments.get("rule", GREEDY)
        require_rule(rule)
        of_duel = {*KEYWORDS, *own_arguments(entry), *parameters_of_rule(rule, entry, arguments)}
        keywords = {key: arguments.pop(key) for key in list(arguments) if key in of_duel}
        given = list(arguments)
        own = ("module", "device", "self_tests", "weights", "autocast")
        known = {*of_duel, *own, *IN_MEMORY_ARGUMENTS}
        require_known_of_model(given, known, f"of Duel.from_model with estimator={entry.name}")
        if entry.causal and not isinstance(model, Denoiser):
            arguments["attention"] = "causal"
        elif isinstance(block := keywords.get("block"), int):
            arguments["block"] = block
        denoiser = from_model(
            model,
            tokenizer,
            module=module,
            device=device,
            self_tests=self_tests,
            weights=weights,
            autocast=autocast,
            **arguments,
        )
        if keywords.get("batch_size") is None and denoiser.device.type != "cpu":
            # no trial of sizes: the training needs the memory
            keywords["batch_size"] = max(1, GPU_TOKENS[0] // denoiser.max_length)
        duel = cls(denoiser, tokenizer=tokenizer, **keywords)
        duel.estimator.name_ignored_args(given)
        if tokenizer is None and arguments.get("bos") is not None:
            log.warning("bos=%s is for texts: without a tokenizer, put special tokens into windows", arguments["bos"])
        return duel

    # ------------------------------------------------------------ text in

    def windows(self, text: str) -> list[Window]:
        """The windows of a text, special tokens included, as `score` scores them. Raises DuelError as `score` does."""
        encoder = self._require_encoder("windows", [text])
        return encoder.document(encoder.encode(text))

    def score(
        self,
        texts: Sequence[str],
        contexts: Sequence[TextOrIds] | None = None,
        suffixes: Sequence[TextOrIds] | None = None,
    ) -> list[TextScore]:
        """Score each text, in order, with the numbers of the harness: log p(text) in nats, perplexity, bits per byte.

        Args:
            texts: Texts.
            contexts, suffixes: The visible text or ids before and after each text. With either, the value is
                log p(text | context, suffix), in one window. Contexts and suffixes that do not fit are truncated at
                their far ends. White space at the end of a context is scored with the text after it; white space
                at the end of a text is shown with its suffix, and not scored. `TextScore.scored` is what was scored,
                and bits per byte count its bytes.

        Raises:
            DuelError: If this Duel has no tokenizer, or a text cannot be scored; the message names it.
        """
        with self.estimator.one_run():
            scores = dict(self.score_stream(texts, contexts, suffixes))
        return [with_doubt(scores[n], self.counts) for n in sorted(scores)]

    def score_stream(
        self,
        texts: Sequence[str],
        contexts: Sequence[TextOrIds] | None = None,
        suffixes: Sequence[TextOrIds] | None = None,
    ) -> Iterator[tuple[int, TextScore]]:
        """Like `score`, but yield (index, score) of each text as it is finished, in any order."""
        texts = as_list(texts, "texts")
        has_contexts = contexts is not None or suffixes is not None
        encoder = self._require_encoder("score", texts, has_contexts)
        contexts_of_texts = one_each(texts, contexts, "contexts")
        suffixes_of_texts = one_each(texts, suffixes, "suffixes")
        around = list(zip(contexts_of_texts, suffixes_of_texts, strict=True)) if has_contexts else None
        documents = text_windows(encoder, texts, around)
        empty = [f"number {n}" for n, each in enumerate(documents) if not each.tokens]
        if empty:
            log.warning(
                "Texts without a scored token, which have no perplexity (their bytes count in bits per byte): %s",
                ", ".join(empty),
            )

        spec = self.spec
        unknown_tokens = 0
        tokens = 0
        windows = [each.windows for each in documents]
        for n, scores in score_documents(windows, self.stream, "Text {}".format):
            unknown = encoder.unknown(documents[n].windows, texts[n])
            unknown_tokens += unknown
            tokens += documents[n].tokens
            score = TextScore.from_scores(
                texts[n],
                documents[n],
                scores,
                self.estimator,
                encoder.tokenizer,
                spec,
                unknown,
                contexts_of_texts[n],
                suffixes_of_texts[n],
            )
            yield n, score
        if unknown_tokens:
            log.warning("%s", unknown_share(unknown_tokens, tokens))

    def estimate(
        self,
        texts: Sequence[str],
        *,
        sample: float = TwoPhaseArguments.sample,
        cache: Literal["dual", "prefix"] = FIRST_CACHE,
        seed: int = 0,
    ) -> list[TextEstimate]:
        """Estimate the value of `score` for each text, with its standard error, for a fraction of the work.

        A two-phase estimate, unbiased in log-probability (docs/estimators.md). Single texts have few sampled blocks;
        `TextEstimate.total(estimates)` is the estimate for all of them. It saves work only for texts of many blocks:
        texts of one or two take longer than under `score`.

        Args:
            texts: Texts.
            sample: The share of blocks that are scored without the cache, too, above 0 and at most 1.
            cache: The cached sampler under which all blocks are scored.
            seed: The seed of the sample.

        Raises:
            DuelError: If this network supports no cache, or as `score`.
        """
        self._sampler("estimate", "duel")
        rule = cast(Rule, self.rule)
        estimator = TwoPhase(
            self.denoiser,
            rule,
            self.block,
            TwoPhaseArguments(sample),
            cache=cache,
            draw_seed=SEED("seed", seed),
            grid=self.grid,
            batch_size=self.estimator.budget,
        )
        texts = as_list(texts, "texts")
        encoder = self._require_encoder("estimate", texts)
        documents = text_windows(encoder, texts)
        spec = spec_of(self.denoiser, estimator, encoder)
        windows = [each.windows for each in documents]
        estimates: dict[int, TextEstimate] = {}
        with estimator.one_run():
            for n, scores in score_documents(windows, estimator.stream, "Text {}".format):
                unknown = encoder.unknown(documents[n].windows, texts[n])
                estimates[n] = TextEstimate.from_scores(texts[n], documents[n], scores, estimator, spec, unknown)
        self.counts.add_work(estimator.counts)
        return [with_doubt(estimates[n], estimator.counts) for n in range(len(texts))]

    # ------------------------------------------------------------ text out

    def generate(
        self,
        prompts: Sequence[TextOrIds],
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        until: str | Sequence[str] = (),
        seed: int = 0,
        keys: Sequence[int] | None = None,
    ) -> list[GeneratedText]:
        """Continue each prompt by Algorithm 1, as under `generate_until` of the harness.

        Args:
            prompts: Texts or ids. A prompt that leaves no room for `max_new_tokens` is cut from the left, with a
                warning.
            suffixes: Visible text or ids after each generated text (infilling).
            max_new_tokens: Positions of the generation window, filled block after block. None: 256, or what the longest
                prompt with its suffix leaves of a shorter row, at least half of it.
            do_sample: Draw tokens. False: take the most probable token at every pick. None: draw if `temperature` is
                above 0.
            temperature, top_k, top_p: Change the distribution that is drawn from, and with it `log_prob`.
            until: Stop strings, looked for after each finished block.
            seed, keys: A draw depends on the seed, the prompt's key and the position only. A prompt's key, a whole
                number, is its index unless `keys` are given.

        Returns:
            The continuations, in the order of `prompts`, each with its own log-probability.

        Raises:
            DuelError: If this Duel has no tokenizer, or a setting or a prompt is wrong.
        """
        with self.estimator.one_run():
            stream = self.generate_stream(
                prompts,
                suffixes=suffixes,
                max_new_tokens=max_new_tokens,
                do_sample=do_sample,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                until=until,
                seed=seed,
                keys=keys,
            )
            texts = dict(stream)
        return [with_doubt(texts[n], self.counts) for n in sorted(texts)]

    def generate_stream(
        self,
        prompts: Sequence[TextOrIds],
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        until: str | Sequence[str] = (),
        seed: int = 0,
        keys: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, GeneratedText]]:
        """Like `generate`, but yield (index, continuation) of each prompt as it is finished, in any order."""
        if isinstance(until, Iterable) and not isinstance(until, str):
            until = list(until)
        arguments = {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "until": until,
        }
        settings = Settings.from_arguments(arguments, SEED("seed", seed))
        prompts = as_list(prompts, "prompts")
        # a single text in place of a list is refused; in a list, prompts given as ids need no check
        texts = prompts if isinstance(prompts, str) else [prompt for prompt in prompts if isinstance(prompt, str)]
        encoder = self._require_encoder("generate", texts, has_contexts=True)
        after = one_each(prompts, suffixes, "suffixes")
        if max_new_tokens is None:
            length = settings.length
            for n, prompt in enumerate(prompts):
                with naming(f"Prompt {n}"):
                    length = min(length, encoder.room(prompt, after[n]))
            settings = dataclasses.replace(settings, length=length)
        generator = Generator(self._sampler("generate", *SAMPLERS), encoder, settings, seed)
        return self._generated(generator, prompts, keys, after)

    def _generated(
        self,
        generator: Generator,
        prompts: Sequence[TextOrIds],
        keys: Sequence[int] | None,
        after: Sequence[TextOrIds],
    ) -> Iterator[tuple[int, GeneratedText]]:
        """(index, continuation) of each prompt as it is finished."""
        encoder = generator.text
        # what this text alone adds to the filters of the network: temperature, top_k, top_p
        changes = generator.duel.denoiser.filters[len(self.denoiser.filters) :]
        spec = spec_of(generator.duel.denoiser, generator.duel, encoder)
        for note in generator.notes:
            log.warning("%s", note)
        encoded = prompt_windows(generator, prompts, after)
        windows = [each.windows[0] for each in encoded]
        with naming("Prompt {}".format):
            for n, text, window, sample in generator.stream(windows, keys):
                generated = GeneratedText.from_sample(
                    prompts[n], text, window, sample, generator.duel, encoder.tokenizer, spec, changes, encoded[n].cut
                )
                yield n, generated
