"""The part of `Duel` for token ids: scores, samples, recorded orders and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from lm_eval_duel import fingerprint
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Counts, IndexedScores, Sample, WindowScore
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import gradients, registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.sampling import Stop
from lm_eval_duel.rules import Rule
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

SAMPLERS = tuple(entry.name for entry in registry.ENTRIES if entry.decodes)
FIXED_ORDERS = ("duel", "ar")  # a window has one order


class OnIds:
    """The part of `Duel` that needs no tokenizer."""

    denoiser: Denoiser
    estimator: Estimator
    _text: Text | None  # what turns texts into windows
    _spec: dict[str, str] | None

    def _take(self, denoiser: Denoiser, estimator: Estimator, text: Text | None) -> None:
        self.denoiser, self.estimator, self._text = denoiser, estimator, text
        self._spec: dict[str, str] | None = None

    # ------------------------------------------------------------ what it is

    @property
    def spec(self) -> dict[str, str]:
        """A description of everything that defines a number; with a tokenizer, equal to the harness's spec.

        For a network in memory, it says "in memory" for the weights, or what `from_model` was given.
        """
        if self._spec is None or not self.denoiser.fixed_weights:
            parts = (self.denoiser, self.estimator, *(() if self._text is None else (self._text,)))
            self._spec = fingerprint.spec_of(*parts)
        return self._spec

    @property
    def fingerprint(self) -> str:
        """The spec as a short digest."""
        return fingerprint.digest(self.spec)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, if this Duel takes texts."""
        return None if self._text is None else self._text.tokenizer

    @property
    def rule(self) -> Rule | None:
        """The unmasking rule; None: the estimator follows none."""
        entry = registry.find(self.estimator.name)
        return getattr(self.estimator, "rule", None) if entry.follows_rule or entry.causal else None

    @property
    def block(self) -> int | None:
        """Positions of a block; None: the whole target."""
        return self.estimator.block

    @property
    def grid(self) -> str:
        """The position that blocks count from, "target" or "row"."""
        return self.estimator.grid

    @property
    def counts(self) -> Counts:
        """The counts of the work so far: windows, tokens, network calls, rows, near ties."""
        return self.estimator.counts

    def __repr__(self) -> str:
        dtype = self.spec.get("dtype")
        network = self.spec["denoiser"] + (f" ({dtype})" if dtype else "")
        parts = {"rule": self.rule, "block": self.block, "grid": self.grid, "network": network}
        if self.estimator.name != "duel":
            parts = {"estimator": self.estimator.name, **parts}
        words = ", ".join(f"{key}={value}" for key, value in parts.items() if key != "rule" or value is not None)
        return f"Duel({words}, fingerprint={self.fingerprint})"

    # ------------------------------------------------------------ ids in

    def log_prob(self, windows: Sequence[Window]) -> list[WindowScore]:
        """The score of each window, in order. Raises DuelError, naming it, for one that cannot be scored."""
        return self.estimator.log_prob(windows)

    def stream(self, windows: Sequence[Window]) -> IndexedScores:
        """(index, score) of each window as it is finished, in any order."""
        return self.estimator.stream(windows)

    def sample(self, contexts: Sequence[Ids], length: int, **settings: Any) -> list[Sample]:
        """`length` tokens after each context (Algorithm 1), each with its own score. Settings: see `stream_samples`."""
        samples = dict(self.stream_samples(contexts, length, **settings))
        return [samples[n] for n in range(len(contexts))]

    def stream_samples(
        self,
        contexts: Sequence[Ids],
        length: int,
        *,
        suffixes: Sequence[Ids] | None = None,
        tail: int = 0,
        do_sample: bool = True,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """(index, sample) of each context as it is finished.

        `suffixes`: what stands visible after each sample (infilling). With a tokenizer, contexts and suffixes may be
        texts, which get the checkpoint's special tokens; ids are the whole row as they are.

        A draw depends on (`seed`, key, position) only; `keys` defaults to the index of each context.
        `do_sample=False`: the most probable token at every pick. `stop(index, tokens)` is called after each finished
        block: if it returns true, no further block is drawn, and the sample's `tail` counts the positions left.
        """
        return self._sampler("sample", *SAMPLERS).stream_samples(
            contexts, length, suffixes=suffixes, tail=tail, do_sample=do_sample, seed=seed, keys=keys, stop=stop
        )

    def replay(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[WindowScore]:
        """The score of recorded orders, given as `WindowScore.reveal_steps`.

        A diagnostic: the result is a likelihood only if a rule produced the order.
        """
        return self._sampler("replay", *FIXED_ORDERS).replay(windows, steps)

    def differentiable(
        self, windows: Sequence[Window], reveal_steps: Sequence[Ids], batch_size: int = 1
    ) -> torch.Tensor:
        """The log-probability of each token along recorded orders, for any loss: a tensor with a graph.

        Memory is that of one network call, for any number of steps. The forward pass is `replay`; the backward pass
        evaluates the calls again, one at a time. Dropout is off.

        Args:
            windows: Windows.
            reveal_steps: The order of each, as `sample` and `log_prob` return it.
            batch_size: Rows of max_length in one call with gradients, which take more memory than one without.

        Returns:
            float64 (N, T), in nats; 0 behind the end of a target shorter than T, and at known positions.

        Raises:
            DuelError: If a window cannot be scored, an order is not one of its window, or the network gives no
                gradients (quantized weights, frozen parameters, a cache).
        """
        duel = self._sampler("differentiable", *FIXED_ORDERS)
        return gradients.differentiable(duel, windows, reveal_steps, batch_size)

    def backward(
        self,
        windows: Sequence[Window],
        weights: gradients.Weights,
        reveal_steps: Sequence[Ids] | None = None,
        batch_size: int = 1,
    ) -> list[float]:
        """Add the gradient of the weighted sum of log-probabilities to the parameters' `grad`.

        As `(weights * differentiable(windows, reveal_steps)).sum().backward()`, in one pass. Where a change of the
        network would change an order, log_prob jumps; everywhere else this is its exact gradient.

        Args:
            windows: Windows.
            weights: Of each window (N,), or of its tokens: (N, T), or a list for each window. Optimizers minimize: to
                raise log_prob, its weight is negative.
            reveal_steps: The order of each window. None: found first, by scoring the windows.
            batch_size: As in `differentiable`.

        Returns:
            log_prob of each window, in nats.

        Raises:
            DuelError: As in `differentiable`.
        """
        duel = self._sampler("backward", *FIXED_ORDERS)
        return gradients.backward(duel, windows, weights, reveal_steps, batch_size)

    def _sampler(self, method: str, *estimators: str) -> DuelEstimator:
        """The estimator, if it is one of `estimators`; otherwise raises DuelError for `method`."""
        if self.estimator.name not in estimators:
            raise DuelError(
                f"Duel.{method} needs estimator={' or '.join(estimators)}; this Duel has "
                f"estimator={self.estimator.name}."
            )
        return cast(DuelEstimator, self.estimator)
