"""Exact likelihoods during training: `training_metrics` for any loop, `DuelCallback` for transformers' Trainer.

metrics = training_metrics(model, tokenizer, texts, rules=["greedy"], block=32)
trainer.add_callback(DuelCallback(trainer, texts, rules=["greedy"], block=32, every=500))
"""

from __future__ import annotations

import bisect
import inspect
import logging
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lm_eval_duel.arguments import COUNT, RAW, Argument, has_index
from lm_eval_duel.core.scores import ratio
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.load_options import IN_MEMORY_ARGUMENTS, LoadOptions
from lm_eval_duel.errors import DuelError, documentation, require_known
from lm_eval_duel.estimators import cost
from lm_eval_duel.estimators.arguments import TwoPhaseArguments
from lm_eval_duel.keywords import passed_on, shows
from lm_eval_duel.library.duel import Block, Duel
from lm_eval_duel.library.ids import network_listing, require_rule
from lm_eval_duel.library.texts import as_list
from lm_eval_duel.options import MODEL_ARGUMENTS
from lm_eval_duel.rules import Rule, parse, with_colons

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lm_eval.duel_mdm")
ScoredText: TypeAlias = tuple[int, float, int]  # (number of the text, log_prob, bytes)
_named_choices: set[tuple[int, int, int]] = set()  # (texts that fit, texts, budget) of warnings

# names in the signatures of `training_metrics` and `Duel.from_model` that `**arguments` may not hold
NOT_ARGUMENTS = {
    "arguments",
    "estimator",
    "model",
    "network",
    "rule",
    "texts",
    "tokenizer",
    "traced",
}
# arguments on which no number depends, or that say what the network is; they are not part of a metric's name
UNLABELLED = (
    "attention",
    "batch_size",
    "device",
    "family",
    "mask_token_id",
    "max_batch_size",
    "module",
    "self_tests",
    "shift_logits",
    "weights",
)


@shows(
    passed_on(Duel.from_model, without=NOT_ARGUMENTS),
    network_listing(IN_MEMORY_ARGUMENTS),
    required=("model", "tokenizer", "texts"),
)
def training_metrics(
    model: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Sequence[str] = (),
    *,
    rules: Sequence[str | Rule] = ("greedy",),
    block: Block = "auto",
    sample: float | None = None,
    token_budget: int | None = None,
    name: str = "duel",
    **arguments: Any,
) -> dict[str, float]:
    """Compute the bits per byte of `texts` under each rule, with the standard error, by the names that a loop logs:

        duel/greedy/bits_per_byte           -sum log2 p(text) / sum of UTF-8 bytes
        duel/greedy/bits_per_byte_stderr    over texts (ratio of sums, delta method); with two texts or more

    These are values of the samplers themselves, no bounds. Arguments that define another number are part of the name:
    "greedy,block=8", "greedy,cache=dual,temperature=0.7". Arguments that describe the network are not (attention,
    family, mask_token_id, shift_logits), nor are `texts` and `token_budget`, which choose what is scored: keep them the
    same to compare numbers.

    If torch.distributed is initialized, every rank must call this. Each scores a share of the texts, and all get the
    same numbers. An error on one rank is raised on all.

    Args:
        model, tokenizer, block, arguments: As in `Duel.from_model`.
        texts: Held-out texts, the same at each call.
        rules: Rules, such as "greedy:k=2", or instances of `Rule`.
        sample: The share of blocks for a two-phase estimate (docs/estimators.md) instead of the exact value; the names
            are then "greedy,two_phase".
        token_budget: The most tokens that the network may evaluate, over all ranks and rules, as `planned_tokens`
            counts them. The first texts that fit are scored, and a warning says how many.
        name: The first part of the names.

    Raises:
        DuelError: As `Duel.from_model` and `Duel.score`, or if not even the first text fits the budget.
    """
    _check_network_and_tokenizer(model, tokenizer)
    qualifiers = check_arguments(texts, rules, block=block, sample=sample, token_budget=token_budget, **arguments)
    texts = list(texts)
    budget = COUNT("token_budget", token_budget)
    rank = 0
    world = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        world = torch.distributed.get_world_size()

    def score() -> list[list[ScoredText]]:
        """The scores of this rank's share of the texts, for each rule."""
        duels = _duels(model, tokenizer, rules, block, arguments)
        chosen = texts
        if budget is not None:
            chosen = texts[: _fitting(duels, texts, sample, budget)]
        numbers = range(rank, len(chosen), world)
        return [_scored(duel, chosen, numbers, sample) for duel in duels]

    scores_of_ranks = _gathered(score, world)
    metrics = {}
    for place, rule in enumerate(rules):
        scored: list[ScoredText] = []
        for scores_of_rules in scores_of_ranks:
            scored += scores_of_rules[place]
        scored.sort()  # in the order of texts, so that the sums are the same for every number of ranks
        method = ",".join([str(rule), *qualifiers])
        prefix = f"{name}/{method}/bits_per_byte"
        bits = []
        sizes = []
        for _, log_prob, size in scored:
            bits.append(-log_prob / math.log(2))
            sizes.append(size)
        metrics[prefix] = math.nan
        if any(sizes):
            metrics[prefix], stderr = ratio(bits, sizes)
            if stderr is not None:
                metrics[f"{prefix}_stderr"] = stderr
    return metrics


def _check_network_and_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise DuelError if there is no tokenizer, or if it stands in the model's place."""
    if _is_tokenizer(tokenizer):
        return
    if _is_tokenizer(model):
        raise DuelError(
            "training_metrics takes the network first, then its tokenizer: training_metrics(model, tokenizer, texts); "
            f"got a {type(model).__name__} as the network."
        )
    got = "None" if tokenizer is None else f"a {type(tokenizer).__name__}"
    raise DuelError(f"training_metrics needs the tokenizer of the network, as its second argument; got {got}.")


def _is_tokenizer(value: Any) -> bool:
    return callable(getattr(value, "get_vocab", None))


def check_arguments(
    texts: Any,
    rules: Any = ("greedy",),
    sample: float | None = None,
    token_budget: int | None = None,
    *,
    caller: str = "training_metrics",
    keywords: Collection[str] = (),
    **arguments: Any,
) -> list[str]:
    """Check the arguments, and return the parts of the metrics' names besides the rule, such as "block=8".

    Args:
        texts, rules, sample, token_budget, arguments: As in `training_metrics`.
        caller: The function that was called, for errors.
        keywords: Those that it takes besides.

    Raises:
        DuelError: For arguments of `training_metrics` that are wrong for every network.
    """
    from lm_eval_duel.denoisers import in_memory

    _require_list(caller, "texts", texts)
    _require_list(caller, "rules", rules)
    for n, text in enumerate(texts):
        if not isinstance(text, str):
            raise DuelError(f"{caller} takes a list of texts; number {n} is of the class {type(text).__name__}.")
    if not any(texts):
        raise DuelError(f"{caller} got empty texts only, which have no bits per byte; pass texts with characters.")
    for rule in rules:
        require_rule(rule)
        if isinstance(rule, str):
            parse(rule)
    names = {
        *inspect.signature(training_metrics).parameters,
        *inspect.signature(Duel.from_model).parameters,
        *IN_MEMORY_ARGUMENTS,
    }
    estimator = arguments.get("estimator")
    if estimator == "ar":
        raise DuelError(
            f"{caller} scores masked diffusion models: save a causal network, and score its checkpoint with "
            "estimator=ar."
        )
    if estimator is not None:
        raise DuelError(
            f"{caller} has no argument 'estimator': it scores the sampler of each rule. For another one, call "
            f"Duel.from_model(model, tokenizer, estimator={estimator!r}).score(texts)."
        )
    require_known("argument", arguments, (names - NOT_ARGUMENTS) | {*keywords}, f"of {caller}")
    qualifiers = []
    if sample is not None:
        TwoPhaseArguments(sample)
        if arguments.get("cache"):
            raise DuelError(
                f"sample={sample:g} estimates the value without a cache, and cache={arguments['cache']} scores the "
                "cached sampler; leave one of them out."
            )
        qualifiers.append("two_phase")
    COUNT("token_budget", token_budget)
    in_memory.require_dtype(arguments.get("autocast"))
    of_network = {key: value for key, value in arguments.items() if key in IN_MEMORY_ARGUMENTS}
    LoadOptions("model", torch.device("cpu"), **of_network)  # its checks alone are wanted
    for key, value in sorted(arguments.items()):
        if key in UNLABELLED:
            continue
        argument = MODEL_ARGUMENTS.get(key, Argument(RAW))
        read = argument.read(key, value)
        if read == argument.default:
            continue
        text = "+".join(map(str, read)) if isinstance(read, tuple) else str(read)
        qualifiers.append(f"{key}={text.removeprefix('torch.')}")
    return qualifiers


def _require_list(caller: str, what: str, values: Any) -> None:
    """Raise DuelError unless the texts or rules are a list, or something like one, that is not empty."""
    advice = ""
    if isinstance(values, str):
        came = f"the text {values!r}"
        wanted = [values]
        if what == "rules":
            wanted = [part.strip() for part in with_colons(values).split(",")]
        advice = f" Write {what}={wanted!r}."
    elif not has_index(values):
        came = f"a {type(values).__name__}"
    elif not len(values):
        came = "none"
    else:
        return
    raise DuelError(f"{caller} takes a list of {what}, with at least one; got {came}.{advice}")


def planned_tokens(duel: Duel, texts: Sequence[str], sample: float | None = None) -> int:
    """Count the tokens (positions of rows) that the network evaluates to score `texts`, at most, without running it.

    A window of L positions takes ceil(m / k) rows of L for each block of m, or with cache="dual" one row of L and then
    rows of m; see docs/running.md. Rules without k count as k=1. Padding is not counted.

    Args:
        duel: A Duel with estimator="duel".
        texts: The texts to score.
        sample: Count a two-phase estimate with this share of sampled blocks.

    Raises:
        DuelError: If the estimator is another one, or a text cannot be scored.
    """
    if not isinstance(duel, Duel):
        raise DuelError(
            f"planned_tokens takes a Duel, such as Duel.from_model(model, tokenizer); got a {type(duel).__name__}."
        )
    texts = as_list(texts, "texts")
    if isinstance(texts, str):
        raise DuelError("planned_tokens takes a list of texts; got one text. Write planned_tokens(duel, [text]).")
    rule = duel.rule
    if rule is None or duel.estimator.name != "duel":
        raise DuelError(f"planned_tokens needs estimator=duel; this Duel has estimator={duel.estimator.name}.")
    setting = cost.Setting(duel.denoiser, rule, duel.block, duel.grid)
    if sample is not None:
        count: cost.Count = partial(setting.two_phase, share=TwoPhaseArguments(sample).sample)
    elif duel.denoiser.cache is not None:
        count = partial(setting.cached, cache=duel.denoiser.cache)
    else:
        count = setting.exact
    windows: list[Window] = []
    for text in texts:
        windows += duel.windows(text)
    layouts = cost.layouts(windows)
    return int(cost.sum_over(layouts, count).token_rows)


def _require_trainer(trainer: Any) -> None:
    """Raise DuelError unless this is a Trainer, of which `DuelCallback` needs these attributes."""
    needed = ("args", "model", "control", "log", "processing_class")
    if all(hasattr(trainer, name) for name in needed) and hasattr(trainer.args, "eval_strategy"):
        return
    got = "nothing"
    if isinstance(trainer, type):
        got = f"the class {trainer.__name__}"
    elif trainer is not None:
        got = f"a {type(trainer).__name__}"
    raise DuelError(
        "DuelCallback needs a Trainer of transformers, through which it logs: "
        f"trainer.add_callback(DuelCallback(trainer, texts, every=500)); got {got}. In another loop (Lightning, "
        f"accelerate, your own), log training_metrics(model, tokenizer, texts) ({documentation('training.md')})."
    )


class DuelCallback:
    """A callback of transformers' Trainer that logs `training_metrics` through the Trainer (wandb, TensorBoard, ...).

    It scores the network at each evaluation of the Trainer, and every `every` steps. All ranks share the work.

    Args:
        trainer: The Trainer, whose model is scored.
        texts, rules, block, sample, token_budget, name, arguments: As in `training_metrics`. Texts are needed.
        every: Steps between two scores, besides the Trainer's evaluations. None: only at its evaluations.
        tokenizer: The tokenizer. None: the Trainer's processing class.

    Raises:
        DuelError: If it would never score, or an argument is wrong for every network. A later error, such as a network
            that is refused, ends the training.
    """

    @shows(passed_on(training_metrics), required=("trainer", "texts"))
    def __init__(
        self,
        trainer: Any = None,
        texts: Sequence[str] = (),
        *,
        every: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **arguments: Any,
    ):
        _require_trainer(trainer)
        every = COUNT("every", every)
        check_arguments(texts, caller="DuelCallback", keywords=("every", "tokenizer"), **arguments)
        strategy = trainer.args.eval_strategy  # an enum of transformers, or its text
        evaluates = str(getattr(strategy, "value", strategy)) != "no"
        if every is None and not evaluates:
            raise DuelError("The Trainer never evaluates (eval_strategy='no'), so pass every=<steps> to DuelCallback.")
        self.tokenizer = trainer.processing_class if tokenizer is None else tokenizer
        if not _is_tokenizer(self.tokenizer):
            raise DuelError(
                "DuelCallback needs a tokenizer, and the Trainer's processing_class is "
                f"{'None' if self.tokenizer is None else type(self.tokenizer).__name__}: pass tokenizer=."
            )
        self.trainer = trainer
        self.texts = list(texts)
        self.every = every
        self.arguments = arguments
        self._last: int | None = None  # the step that was scored last

    def __getattr__(self, event: str) -> Callable[..., None]:
        """Ignore the Trainer's other events."""
        if not event.startswith("on_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {event!r}")
        return lambda *arguments, **more: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Forget the last step that was scored."""
        self._last = None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Score every `every` steps."""
        if self.every is not None and state.global_step % self.every == 0:
            self.score(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Score at the Trainer's evaluations."""
        self.score(state.global_step)

    def score(self, step: int) -> None:
        """Score the texts with the current weights and log the numbers, at most once a step."""
        if step == self._last:
            return
        self._last = step
        metrics = training_metrics(self.trainer.model, self.tokenizer, self.texts, **self.arguments)
        control = self.trainer.control
        loss_is_due = control.should_log
        self.trainer.log(metrics)
        # logging resets it, and the Trainer logs its loss later in this step
        control.should_log = loss_is_due


# ---------------------------------------------------------------- the work of a rank


def _duels(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    rules: Sequence[str | Rule],
    block: Block,
    arguments: dict[str, Any],
) -> list[Duel]:
    """A Duel for each rule, on one denoiser.

    They are made anew for each score, since what self-tests detect depends on the weights.
    """
    first = Duel.from_model(model, tokenizer, rule=rules[0], block=block, **arguments)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": first.estimator.budget}
    shared |= {key: arguments[key] for key in ("grid", "windows") if key in arguments}
    duels = [first]
    for rule in rules[1:]:
        duels.append(Duel(first.denoiser, rule, first.block, **shared))
    return duels


def _scored(
    duel: Duel,
    texts: Sequence[str],
    numbers: Sequence[int],
    sample: float | None,
) -> list[ScoredText]:
    """The texts with these numbers, scored, or estimated from a `sample` of blocks."""
    texts_of_rank = [texts[n] for n in numbers]
    if sample is None:
        log_probs = [score.log_prob for score in duel.score(texts_of_rank)]
    else:
        log_probs = [estimate.log_prob for estimate in duel.estimate(texts_of_rank, sample=sample)]
    scored = []
    for n, text, log_prob in zip(numbers, texts_of_rank, log_probs, strict=True):
        scored.append((n, log_prob, len(text.encode())))
    return scored


def _fitting(duels: Sequence[Duel], texts: Sequence[str], sample: float | None, budget: int) -> int:
    """The number of first texts that fit the budget; equal windows are scored, and counted, once."""

    def tokens(count: int) -> int:
        return sum(planned_tokens(duel, texts[:count], sample) for duel in duels)

    fitting = bisect.bisect_right(range(1, len(texts) + 1), budget, key=tokens)
    if not fitting:
        raise DuelError(
            f"The first text takes {tokens(1)} network tokens, more than token_budget={budget}. Pass a shorter text, a "
            "larger budget, or cache='dual'."
        )
    if fitting < len(texts):
        choice = (fitting, len(texts), budget)
        # a training loop makes the same choice each time, and is warned of it once
        level = logging.INFO if choice in _named_choices else logging.WARNING
        _named_choices.add(choice)
        log.log(level, "%d of %d texts fit token_budget=%d (%d network tokens)", *choice, tokens(fitting))
    return fitting


def _gathered(work: Callable[[], Any], world: int) -> list[Any]:
    """The results of `work` on all ranks, gathered on each; an error on one is raised on all."""
    if world == 1:
        return [work()]
    result = None
    error = None
    reason = None
    try:
        result = work()
    except Exception as raised:  # not raised yet, since the other ranks wait for this one
        error = raised
        reason = f"{type(raised).__name__}: {raised}"
    of_ranks: list[Any] = [None] * world
    torch.distributed.all_gather_object(of_ranks, (result, reason))
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(of_ranks):
        if other is not None:
            raise DuelError(f"Rank {rank} could not score its texts: {other}")
    return [result for result, _ in of_ranks]
