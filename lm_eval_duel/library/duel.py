"""`Duel` for Python: the estimator of `estimators/duel.py`, with text in and text out.

    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=32)
    [score] = duel.score(["We the people"])
    [generated] = duel.generate(["We the"], max_new_tokens=64, do_sample=True, seed=0)

Special tokens and windows are those of the harness (harness/text.py), so the numbers are too. lm_eval is not needed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from lm_eval_duel import denoisers, fingerprint
from lm_eval_duel.core.budget import GPU_TOKENS
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import duel as estimator
from lm_eval_duel.estimators.base import IndexedScores
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.harness.generation import Generator, Settings
from lm_eval_duel.harness.text import Text
from lm_eval_duel.library.results import GeneratedText, TextEstimate, TextScore
from lm_eval_duel.options import Options, Windows
from lm_eval_duel.rules import Rule, parse, presets

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")

Block: TypeAlias = "int | Literal['auto'] | None"
Grid: TypeAlias = Literal["auto", "target", "row"]

UNSET = {"rule": "greedy", "block": "auto", "grid": "auto"}  # the defaults of `from_pretrained`
HARNESS_ARGS = ("estimator", "trace", "verify", "lattice_rules", "draw_seed", "parallelize")  # not args of a Duel


class Duel(estimator.Duel):
    """A denoiser, an unmasking rule and a block: one distribution, to score and to sample.

    Made from a denoiser, it takes token ids: `log_prob`, `stream`, `sample`, `replay`. With a tokenizer, as
    `from_pretrained` has it, it also takes texts: `score`, `generate`.

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
        tokenizer: Turns texts into ids. None: this Duel takes ids only.
        windows: How long texts are cut, "independent" (each window from scratch) or "harness" (its rolling windows).

    Raises:
        DuelError: If the combination defines no distribution of this network.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | Rule = "greedy",
        block: Block = "auto",
        grid: Grid = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        windows: Windows = "independent",
    ):
        super().__init__(denoiser, rule, block, grid, batch_size, max_batch_size, traced)
        if windows not in get_args(Windows):
            raise unknown("value of windows", windows, get_args(Windows))
        self._spec: dict[str, str] | None = None
        self._text = None if tokenizer is None else Text(tokenizer, denoiser, windows, self.block)

    @classmethod
    def from_pretrained(
        cls,
        name: str = "demo-mdm",
        *,
        rule: str | Rule = "greedy",
        block: Block = "auto",
        grid: Grid = "auto",
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
                mask_token_id, max_length, family, attention, shift_logits, temperature, peft, device_map, ... A rule's
                parameters may stand here as well (rule="klass", mu=0.9, nu=0.01).

        Raises:
            DuelError: If an argument is wrong or the checkpoint cannot be read.
        """
        for key in HARNESS_ARGS:
            if key in network:
                raise DuelError(
                    f"'{key}' is a model arg of the harness's model; Duel.from_pretrained does not take it."
                )
        settings = {"rule": str(rule), "block": block, "grid": grid}
        if network.get("preset"):  # it sets what is not given
            settings = {key: value for key, value in settings.items() if value != UNSET[key]}
        arguments = {"pretrained": name, "windows": windows, **settings, **network}
        if tokenizer is None or isinstance(tokenizer, str):
            options = Options.parse({**arguments, "tokenizer": tokenizer})
            tokenizer = denoisers.load_tokenizer(vars(options))
        else:
            options = Options.parse(arguments)
        if options.estimator != "duel":
            raise DuelError(f"preset={options.preset} has estimator={options.estimator}, which is not that of a Duel.")
        if options.preset is not None:
            options.require_preset_fits(denoisers.find_family(name, **options.network))
        denoiser = denoisers.load(name, device=device, tokenizer=tokenizer, **options.network)
        presets.require_fit(options.preset, denoiser.family)
        return cls(
            denoiser,
            options.rule.with_tokenizer(tokenizer) if isinstance(rule, str) else rule,
            block=cast("Block", options.block),
            grid=options.grid,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            traced=traced,
            tokenizer=tokenizer,
            windows=windows,
        )

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        rule: str | Rule = "greedy",
        block: Block = "auto",
        grid: Grid = "auto",
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
                a function logits = f(ids, real) as in docs/training.md, or a `Denoiser`. DistributedDataParallel,
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
                top_k, top_p, exclude_ids, cfg_scale, as in docs/model_args.md.

        Raises:
            DuelError: If an argument is wrong, or the network fails a self-test.
        """
        from lm_eval_duel.denoisers.in_memory import from_model  # imports transformers

        network |= {"block": block} if isinstance(block, int) else {}
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
        parsed = parse(rule) if isinstance(rule, str) else rule
        parsed = parsed.with_tokenizer(tokenizer) if isinstance(rule, str) and tokenizer is not None else parsed
        return cls(denoiser, parsed, block, grid, batch_size, None, traced, tokenizer=tokenizer, windows=windows)

    # ------------------------------------------------------------ what it is

    @property
    def spec(self) -> dict[str, str]:
        """Everything that defines a number, in words. With a tokenizer, it equals the spec in the harness's results.

        For a network in memory, it says "in memory" for the weights, or what `from_model` was given.
        """
        if self._spec is None or not self.denoiser.fixed_weights:
            self._spec = self._describe_all()
        return self._spec

    def _describe_all(self) -> dict[str, str]:
        parts: list[fingerprint.Described] = [self.denoiser, self]
        if self._text is not None:
            parts.append(self._text)
        return fingerprint.spec_of(*parts)

    @property
    def fingerprint(self) -> str:
        """The spec as a short digest."""
        return fingerprint.digest(self.spec)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What turns texts into ids, if this Duel takes texts."""
        return None if self._text is None else self._text.tokenizer

    def __repr__(self) -> str:
        dtype = self.spec.get("dtype")
        network = self.spec["denoiser"] + (f" ({dtype})" if dtype else "")
        parts = {"rule": self.rule, "block": self.block, "grid": self.grid, "network": network}
        words = ", ".join(f"{key}={value}" for key, value in parts.items())
        return f"Duel({words}, fingerprint={self.fingerprint})"

    def with_denoiser(self, denoiser: Denoiser) -> Duel:
        twin = cast(Duel, super().with_denoiser(denoiser))
        twin._spec = None  # that of the other network
        return twin

    # ------------------------------------------------------------ text in

    def windows(self, text: str) -> list[Window]:
        """What `score` scores of a text: its windows, special tokens included. Raises DuelError as `score` does."""
        text_side = self._require_text("windows", [text])
        return text_side.document(text_side.encode(text))

    def score(self, texts: Sequence[str]) -> list[TextScore]:
        """The score of each text, in order: the same numbers as in the harness.

        Special tokens stand where the checkpoint's convention puts them. Long texts are cut into windows, and every
        token is scored once.

        Raises:
            DuelError: If this Duel has no tokenizer, or a text cannot be scored; the message names it.
        """
        scores = dict(self.score_stream(texts))
        return [scores[n] for n in range(len(texts))]

    def score_stream(self, texts: Sequence[str]) -> Iterator[tuple[int, TextScore]]:
        """(index, score) of each text as it is finished, in any order."""
        tokenizer = self._require_text("score", texts).tokenizer
        for n, length, windows, scores in self._score_texts("score", texts, self.stream):
            yield n, TextScore.from_scores(texts[n], length, windows, scores, tokenizer)

    def estimate(
        self,
        texts: Sequence[str],
        *,
        sample: float | None = None,
        precision: float | None = None,
        cache: Literal["dual", "prefix"] = "dual",
        seed: int = 0,
    ) -> list[TextEstimate]:
        """A two-phase estimate of what `score` gives for each text, and the standard error: a fraction of the work.

        Single texts have few sampled blocks; `TextEstimate.total(estimates)` is the estimate for all of them.

        Args:
            texts: Texts.
            sample: The share of blocks that are scored without the cache, too (0.05).
            precision: Instead: the relative standard error of the perplexity of all texts together.
            cache: The cached sampler under which all blocks are scored.
            seed: Of the sample.

        Raises:
            DuelError: If this network supports no cache, or for what `score` raises it.
        """
        rows = None if self.denoiser.fixed_weights else max(1, self.budget.tokens // self.denoiser.max_length)
        amount: dict[str, Any] = {"sample": sample, "precision": precision, "seed": seed}
        estimator = TwoPhase(self.denoiser, self.rule, self.block, self.grid, cache=cache, batch_size=rows, **amount)
        estimator.uncached.budget = self.budget
        estimates = {
            n: TextEstimate.from_scores(texts[n], length, scores)
            for n, length, _, scores in self._score_texts("estimate", texts, estimator.stream)
        }
        return [estimates[n] for n in range(len(texts))]

    def _score_texts(
        self, method: str, texts: Sequence[str], stream: Callable[[Sequence[Window]], IndexedScores]
    ) -> Iterator[tuple[int, int, list[Window], list[WindowScore]]]:
        """(index, tokens, windows, their scores) of each text as it is finished, in any order."""
        text_side = self._require_text(method, texts)
        lengths: list[int] = []
        windows: list[list[Window]] = []
        for n, text in enumerate(texts):
            with _naming("Text", n):
                ids = text_side.encode(text)
                lengths.append(len(ids))
                windows.append(text_side.document(ids))
        owners = [(n, place) for n, parts in enumerate(windows) for place in range(len(parts))]
        unfinished: list[dict[int, Any]] = [{} for _ in texts]  # scores of each text's windows so far
        for n, parts in enumerate(windows):
            if not parts:
                yield n, lengths[n], [], []
        with _naming("Text", [n for n, _ in owners]):
            for index, score in stream([windows[n][place] for n, place in owners]):
                n, place = owners[index]
                unfinished[n][place] = score
                if len(unfinished[n]) == len(windows[n]):
                    scores = [unfinished[n][place] for place in range(len(windows[n]))]
                    yield n, lengths[n], windows[n], scores

    # ------------------------------------------------------------ text out

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 256,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        until: str | Sequence[str] = (),
        seed: int = 0,
        keys: Sequence[int] | None = None,
    ) -> list[GeneratedText]:
        """A continuation of each prompt (Algorithm 1), as the harness's `generate_until` writes it.

        Args:
            prompts: Texts. One that does not fit beside `max_new_tokens` is cut from the left, with a warning.
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
        texts = dict(self._generate_stream(prompts, settings, seed, keys))
        return [texts[n] for n in range(len(prompts))]

    def _generate_stream(
        self, prompts: Sequence[str], settings: Settings, seed: int, keys: Sequence[int] | None
    ) -> Iterator[tuple[int, GeneratedText]]:
        text_side = self._require_text("generate", prompts)
        generator = Generator(self, text_side, settings, seed)
        for note in filter(None, (*settings.notes, generator.note)):
            log.warning("%s", note)
        contexts = []
        cut_before = text_side.cut_contexts
        for n, prompt in enumerate(prompts):
            with _naming("Prompt", n):
                contexts.append(generator.context(prompt))
        if cut := text_side.cut_contexts - cut_before:
            log.warning("%d prompts were cut from the left to leave room for max_new_tokens=%d", cut, settings.length)
        with _naming("Prompt", range(len(prompts))):
            for n, text, window, sample in generator.stream(contexts, range(len(prompts)) if keys is None else keys):
                yield n, GeneratedText.from_sample(prompts[n], text, window, sample, text_side.tokenizer)

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


@contextlib.contextmanager
def _naming(kind: str, owner: int | Sequence[int]) -> Iterator[None]:
    """Put the number of the text before an error; `owner`: that number, or those of all windows."""
    try:
        yield
    except DuelError as error:
        if isinstance(owner, int):
            raise DuelError(f"{kind} {owner}: {error}") from None
        if error.window is not None:
            error.args = (f"{kind} {owner[error.window]}: {error}",)
        raise
