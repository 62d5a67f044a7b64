"""Methods of `Duel` on token ids: scores, samples, recorded orders and gradients; and what its keywords stand for."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.arguments import TRUTH, Arguments, declared, whole
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Counts, IndexedScores, Sample, Score
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.denoisers.load_options import ALIASES, NETWORK_ARGUMENTS, WHOLE_ROW_BOS
from lm_eval_duel.errors import DuelError, UsageError, documentation, naming, require_known, unknown
from lm_eval_duel.estimators import gradients, registry, trajectories
from lm_eval_duel.estimators.arguments import SEED
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator, Stop
from lm_eval_duel.estimators.trajectories import Trajectory
from lm_eval_duel.keywords import listing, suggests_names
from lm_eval_duel.library.texts import TextOrIds, as_list, one_each
from lm_eval_duel.options import MODEL_ARGUMENTS, Options, rule_of
from lm_eval_duel.rules import Rule
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger("lm_eval.duel_mdm")

SAMPLERS = tuple(entry.name for entry in registry.ENTRIES if entry.decodes)
FIXED_ORDERS = ("duel", "ar")  # a window has one order
LENGTH = dataclasses.replace(whole(1, "a number of positions"), nothing=())
WARPERS = ("temperature", "top_k", "top_p")  # arguments of the network and of `Duel.generate`


def _elsewhere() -> dict[str, str]:
    """Keywords that methods of `Duel` do not take, since they belong to the Duel, and where to pass each."""
    remedies = {}
    for name in MODEL_ARGUMENTS:
        remedy = f"Pass it where the Duel is made, as in Duel.from_pretrained(NAME, {name}=...)"
        if name in WARPERS:
            remedy += ", or call Duel.generate, which takes it"
        remedies[name] = f"{remedy}."
    return remedies


ELSEWHERE = _elsewhere()


@suggests_names(ELSEWHERE)
class OnIds:
    """Methods of `Duel` that need no tokenizer."""

    denoiser: Denoiser
    estimator: Estimator
    _encoder: TextEncoder | None  # the encoder of texts
    _spec: dict[str, str] | None

    def _take(self, denoiser: Denoiser, estimator: Estimator, text: TextEncoder | None) -> None:
        self.denoiser = denoiser
        self.estimator = estimator
        self._encoder = text
        self._spec: dict[str, str] | None = None

    # ------------------------------------------------------------ what it is

    @property
    def spec(self) -> dict[str, str]:
        """Everything that defines a number, by name; with a tokenizer, the spec of the harness.

        The weights of a network in memory are "in memory", or the `weights` that `from_model` was given.
        """
        if self._spec is None or not self.denoiser.fixed_weights:
            parts: list[Any] = [self.denoiser, self.estimator]
            if self._encoder is not None:
                parts.append(self._encoder)
            self._spec = fingerprint.spec_of(*parts)
        return self._spec

    @property
    def fingerprint(self) -> str:
        """A short digest of the spec."""
        return fingerprint.digest(self.spec)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, if this Duel takes texts."""
        return None if self._encoder is None else self._encoder.tokenizer

    @property
    def rule(self) -> Rule | None:
        """The unmasking rule, or None if the estimator follows none."""
        entry = registry.find(self.estimator.name)
        if not entry.follows_rule and not entry.causal:
            return None
        return getattr(self.estimator, "rule", None)

    @property
    def block(self) -> int | None:
        """The number of positions of a block, or None for the whole target."""
        return self.estimator.block

    @property
    def grid(self) -> str:
        """The position from which blocks count: "target", the first of the target, or "row", the first of the row."""
        return self.estimator.grid

    @property
    def counts(self) -> Counts:
        """Counts of the work so far: windows, tokens, network calls, rows, near ties."""
        return self.estimator.counts

    def __repr__(self) -> str:
        parts = []
        if self.estimator.name != "duel":
            parts.append(f"estimator={self.estimator.name}")
        if self.rule is not None:
            parts.append(f"rule={self.rule}")
        parts.append(f"block={self.block}")  # None, too, which means the whole target
        parts.append(f"grid={self.grid}")
        network = self.spec["denoiser"]
        if "dtype" in self.spec:
            network += f" ({self.spec['dtype']})"
        parts.append(f"network={network}")
        parts.append(f"fingerprint={self.fingerprint}")
        return f"Duel({', '.join(parts)})"

    # ------------------------------------------------------------ ids in

    def log_prob(self, windows: Sequence[Window]) -> list[Score]:
        """Score each window: log p(target | context, suffix) under the estimator, in nats (Algorithm 2).

        Returns:
            The scores, in the order of `windows`.

        Raises:
            DuelError: If a window cannot be scored; the message names it, and nothing has been scored.
        """
        return self.estimator.log_prob(windows)

    def stream(self, windows: Sequence[Window]) -> IndexedScores:
        """Like `log_prob`, but yield (index, score) of each window as it is finished, in any order."""
        return self.estimator.stream(windows)

    def sample(
        self,
        contexts: Sequence[TextOrIds],
        length: int,
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        tail: int = 0,
        do_sample: bool = True,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> list[Sample]:
        """Draw `length` tokens after each context (Algorithm 1), each sample with its own exact log-probability.

        Tokens come from the distribution that `log_prob` scores, a temperature of the network included.

        Args:
            contexts: Visible ids before each sample. With a tokenizer, contexts and suffixes may be texts, which get
                the checkpoint's special tokens; ids are used unchanged.
            length: Positions to draw, at least 1.
            suffixes: Visible ids or texts after each sample (infilling). None: nothing.
            tail: [MASK] positions after the `length` drawn ones, which are never revealed.
            do_sample: Draw tokens. False: take the most probable token at every pick.
            seed, keys: A draw depends on the seed, the context's key and the position only. None: the key is the index.
            stop: `stop(index, tokens)` is called after each finished block. If it returns True, no further block is
                drawn, and the sample's `tail` counts the positions left.

        Returns:
            The samples, in the order of `contexts`.

        Raises:
            DuelError: If the estimator cannot sample, or a context is wrong or does not fit into a row.
        """
        with self.estimator.one_run():
            stream = self.stream_samples(
                contexts,
                length,
                suffixes=suffixes,
                tail=tail,
                do_sample=do_sample,
                seed=seed,
                keys=keys,
                stop=stop,
            )
            samples = dict(stream)
        return [samples[n] for n in sorted(samples)]

    def stream_samples(
        self,
        contexts: Sequence[TextOrIds],
        length: int,
        *,
        suffixes: Sequence[TextOrIds] | None = None,
        tail: int = 0,
        do_sample: bool = True,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
    ) -> Iterator[tuple[int, Sample]]:
        """Like `sample`, but yield (index, sample) of each context as it is finished, in any order."""
        if isinstance(contexts, str):
            raise DuelError("Duel.sample takes a list of contexts; got one text. Write duel.sample([text], length).")
        contexts = as_list(contexts, "contexts")
        length = LENGTH("length", length)
        SEED("seed", seed)  # checked only: the sampler refuses a text, which this would read
        do_sample = TRUTH("do_sample", do_sample)
        if stop is not None and not callable(stop):
            raise DuelError(f"stop is a function stop(index, tokens); got {stop!r:.80}. generate takes stop strings.")
        befores: list[Ids] = []
        afters: list[Ids] = []
        given_suffixes = one_each(contexts, suffixes, "suffixes", ())
        for n, (before, after) in enumerate(zip(contexts, given_suffixes, strict=True)):
            if isinstance(before, str) or isinstance(after, str):
                encoder = self._require_encoder("sample", [], has_contexts=True)
                with naming(f"Context {n}"):
                    window = encoder.prompt(before, length, after)
                before, after = window.context, window.suffix
            befores.append(before)
            afters.append(after)
        sampler = self._sampler("sample", *SAMPLERS)
        return sampler.stream_samples(
            befores, length, suffixes=afters, tail=tail, do_sample=do_sample, seed=seed, keys=keys, stop=stop
        )

    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Score windows along recorded orders: the sum of log P(token) at the step that reveals it, in nats.

        This is a diagnostic: the value is a likelihood only if a rule produced the order. So its kind is "oracle".

        Args:
            windows: Windows.
            reveal_steps: The order of each, as `sample` and `log_prob` return it: a step for each target token, which
                counts from 0 in every block.

        Raises:
            DuelError: If a window cannot be scored, or an order does not fit its window.
        """
        return self._sampler("replay", *FIXED_ORDERS).replay(windows, reveal_steps)

    def differentiable(
        self,
        windows: Sequence[Window],
        reveal_steps: Sequence[Ids],
        batch_size: int = 1,
    ) -> torch.Tensor:
        """The log-probability of each token along recorded orders, as a tensor with a graph, for any loss.

        The forward pass is `replay`. The backward pass evaluates the network calls again, one at a time, so that
        memory is bounded by one call, for any number of steps. Dropout is off.

        Args:
            windows: Windows.
            reveal_steps: The order of each, as `sample` and `log_prob` return it.
            batch_size: Rows of max_length in one call with gradients, which take more memory than one without.

        Returns:
            float64 (N, T), in nats; 0 after the end of a target shorter than T, and at known positions.

        Raises:
            DuelError: If a window cannot be scored, an order does not fit its window, or the network gives no
                gradients (quantized weights, frozen parameters, a cache).
        """
        duel = self._sampler("differentiable", *FIXED_ORDERS)
        return gradients.differentiable(duel, windows, reveal_steps, batch_size)

    def follow(
        self,
        windows: Sequence[Window],
        reveal_steps: Sequence[Ids],
        sampler: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """Follow recorded trajectories: tokens and the steps that revealed them, under this rule or under a sampler.

        Args:
            windows: Windows.
            reveal_steps: The step of each target token, counted from any number, in its block or in the whole text.
            sampler: Arguments of estimator=sampled_confidence, such as {"n": 1}, of a sampler that draws a token at
                every position and keeps the most probable ones. The joint log-probability of text and order under it
                is then computed, too, for blocks of any size.

        Returns:
            For each window, the log-probability along its order, in nats; the steps at which the rule picks other
            positions (`differences`), or the joint log-probability under the sampler (`log_joint`).

        Raises:
            DuelError: If a window cannot be scored, or is not revealed block by block.
        """
        return trajectories.follow(self._sampler("follow", *FIXED_ORDERS), windows, reveal_steps, sampler)

    def _sampler(self, method: str, *estimators: str) -> DuelEstimator:
        """The estimator, if it is one of `estimators`; otherwise raises DuelError for `method`."""
        if self.estimator.name not in estimators:
            raise DuelError(
                f"Duel.{method} needs estimator={' or '.join(estimators)}; this Duel has "
                f"estimator={self.estimator.name}."
            )
        return cast(DuelEstimator, self.estimator)

    def _require_encoder(self, method: str, texts: Sequence[str], has_contexts: bool = False) -> TextEncoder:
        """The encoder of texts; raises DuelError if there is none, or if `texts` are not texts.

        `has_contexts`: contexts go before the texts, so `bos` must not say which positions of a whole row are scored.
        """
        if self._encoder is None:
            raise DuelError(
                f"Duel.{method} takes texts, and this Duel has no tokenizer. Make it with Duel.from_pretrained(name), "
                "or pass tokenizer=load_tokenizer(name). For token ids use log_prob and sample."
            )
        if isinstance(texts, str):
            raise DuelError(f"Duel.{method} takes a list of texts; got one text. Write duel.{method}([text]).")
        for n, text in enumerate(texts):
            if not isinstance(text, str):
                got = type(text).__name__
                raise DuelError(
                    f"Duel.{method} takes a list of texts; number {n} is of the class {got}. For token ids use "
                    "log_prob and sample."
                )
        bos = self._encoder.bos
        if has_contexts and bos in WHOLE_ROW_BOS:
            raise UsageError(
                f"bos={bos} scores whole texts from the row's first position on, so Duel.{method} has no room for a "
                "context or suffix. Make the Duel with bos='given' or 'none', or score texts without them."
            )
        return self._encoder


SIZES = ("batch_size", "max_batch_size", "traced")
KEYWORDS = ("rule", "block", "grid", "estimator", "windows", *SIZES)  # with which every Duel is made


class Default(str):
    """The default of a keyword of `Duel`, which differs from the same value given by the user."""


DEMO: Any = Default("demo-mdm")
GREEDY: Any = Default("greedy")
AUTO: Any = Default("auto")
HARNESS_ARGS = ("trace", "verify", "order", "parallelize")  # not args of a Duel


def keywords_of_duel(constructor: Callable[..., None]) -> list[inspect.Parameter]:
    """The `KEYWORDS` as parameters, with their defaults in the constructor."""
    parameters = inspect.signature(constructor).parameters
    return [parameters[name] for name in KEYWORDS]


def estimators_listing() -> str:
    """The arguments of estimators in lines of a docstring."""
    records: dict[type[Arguments], list[str]] = {}  # the estimators that read each
    for entry in registry.ENTRIES:
        if entry.arguments:
            records.setdefault(entry.record, []).append(entry.name)
    lists = [listing("Of every estimator, with its default:", {"draw_seed": MODEL_ARGUMENTS["draw_seed"]})]
    for record, names in records.items():
        title = f"Arguments of estimator={' or '.join(names)}, with their defaults:"
        lists.append(listing(title, declared(record)))
    return "\n\n".join(lists)


def network_listing(names: Iterable[str]) -> str:
    """The model args of the network that have these names in lines of a docstring, without the `KEYWORDS`."""
    arguments = {name: NETWORK_ARGUMENTS[name] for name in names if name not in KEYWORDS}
    return listing("Model args of the network, with their defaults:", arguments)


def require_rule(rule: Any) -> None:
    """Raise DuelError unless this is the text of a rule, or an instance."""
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise DuelError(f"rule is the class {rule.__name__}; pass an instance: rule={rule.__name__}(...).")
    if not isinstance(rule, str | Rule):
        page = documentation("adding.md")
        raise DuelError(f"rule must be a name, such as 'greedy', or an instance of Rule ({page}); got {rule!r}.")
    registry.require_not_estimator("rule", str(rule))


def parameters_of_rule(rule: str | Rule, entry: registry.Entry, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rule among the arguments; a name that the estimator has, too, is the estimator's."""
    names = {*rules.PARAMETERS}
    if isinstance(rule, str):
        names |= declared(rules.find(rules.split(rule)[0])).keys()  # a rule of the user's has others
    names -= {*own_arguments(entry)}
    return {key: value for key, value in arguments.items() if key in names}


def made_rule(rule: str | Rule, parameters: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Rule:
    """The rule of a text and of parameters given apart from it, or an instance, which has its own."""
    if isinstance(rule, str):
        made = rule_of({"rule": rule, **parameters})
        return made if tokenizer is None else made.with_tokenizer(tokenizer)
    if parameters:
        raise DuelError(f"rule is an instance of Rule: set its {' and '.join(parameters)} where it is made.")
    return rule


def require_known_of_model(given: Iterable[str], known: Collection[str], of: str) -> None:
    """Raise DuelError for an argument that `Duel.from_model` does not take."""
    _require_not_of_harness(given, "Duel.from_model")
    for key in given:
        if key in ALIASES:  # add_bos_token; the other one is of the harness
            raise DuelError(f"'{key}' is a word of the harness; write bos='given' or bos='none'.")
        if key not in known and key in MODEL_ARGUMENTS:
            raise DuelError(f"'{key}' is for a checkpoint on disk, and this network is in memory: leave it out.")
    require_known("argument", given, known, of)


def require_name(name: Any, arguments: Mapping[str, Any]) -> None:
    """Raise DuelError if this is no checkpoint's name, or if the arguments of `from_pretrained` are not its own."""
    if "pretrained" in arguments and not isinstance(name, Default):
        raise DuelError(f"Two checkpoints are named, {name} and pretrained={arguments['pretrained']}; name one.")
    if not isinstance(name, str | os.PathLike):
        raise DuelError(f"Duel.from_pretrained takes the folder or the name of a checkpoint; got {name!r}.")
    _require_not_of_harness(arguments, "Duel.from_pretrained")


def _require_not_of_harness(given: Iterable[str], function: str) -> None:
    """Raise DuelError for an argument that only a run has."""
    for key in given:
        if key in HARNESS_ARGS:
            raise DuelError(f"'{key}' is a model arg of the harness's model; {function} does not take it.")


def require_network(denoiser: Any) -> None:
    """Raise DuelError if this is the name of a network, or a network that is no denoiser."""
    if isinstance(denoiser, str):
        raise DuelError(f"denoiser must be a loaded network; got {denoiser!r}. Use Duel.from_pretrained({denoiser!r}).")
    if not hasattr(denoiser, "family"):
        got = type(denoiser).__name__
        raise DuelError(f"denoiser must be a Denoiser; got {got}. For a network use Duel.from_model(model, tokenizer).")


def require_tokenizer(tokenizer: Any) -> None:
    """Raise DuelError unless this is a loaded tokenizer, or None."""
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        got = repr(tokenizer) if isinstance(tokenizer, str) else f"an object of the class {type(tokenizer).__name__}"
        raise DuelError(f"tokenizer must be a tokenizer of transformers, such as load_tokenizer(NAME); got {got}.")


def own_arguments(entry: registry.Entry) -> list[str]:
    """The arguments that this estimator has and not every other."""
    names = [*entry.arguments, "draw_seed"]
    return [*names, "cache"] if entry.own_cache else names


def estimator_options(estimator: str, arguments: Mapping[str, Any]) -> Options:
    """The options of an estimator, given as keywords of Python."""
    entry = registry.find(estimator)
    registry.check_arguments(arguments, entry.name)
    known = own_arguments(entry)
    for key, value in arguments.items():
        if key in known:
            continue
        if key in NETWORK_ARGUMENTS:
            raise DuelError(
                f"'{key}' is an argument of the network: pass it where the network is loaded, as in "
                f"load(NAME, {key}={value!r}), or to Duel.from_pretrained."
            )
        raise unknown("argument", key, [*KEYWORDS, "tokenizer", *known], f"of Duel with estimator={entry.name}")
    return Options.parse({"estimator": entry.name, **arguments})
