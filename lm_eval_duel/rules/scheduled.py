"""Rules with a number of steps, as in published samplers; `presets.py` names the sources.

The number of positions that a step reveals, or the bound that they have to pass, follows a schedule:

    quota                m // S + (i < m mod S) of m positions at step i of S          LLaDA, Fast-dLLM
    cumulative_quota     ceil((i + 1) m / S) of them after step i, and all above tau   diffusers
    dream                a share of those that are left, by noise levels               Dream
    threshold_until      all above mu, and at the last step all                        mlx-vlm
    falling_threshold    all above a bound that falls from step to step                mlx-vlm

Shapes: R lanes, W block width, S steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lm_eval_duel.arguments import PROBABILITY, argument, choice, required, whole
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import (
    LOG_ODDS_SLOPE,
    Decision,
    Rule,
    Thresholded,
    best,
    log_odds,
    near_probability,
    nearest,
    sure_or_best,
)
from lm_eval_duel.rules.scores import Entropy, Greedy, Margin

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

STEPS = whole(1, "a number of steps")
# The steps of a rule that may wait. With more steps than positions most of them reveal nothing, and each of them is a
# network call.
WAITING_STEPS = whole(1, "a number of steps", most=4096)
TOKEN_ID = whole(0, "a token id")
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")  # tokens that end a turn but not a text
OF_ENDS: dict[str, Any] = {
    "unset": "the tokenizer's",
    "optional": True,
    "only_with": ("eos", "conf"),
}


def first_count(lanes: Lanes) -> torch.Tensor:
    """The number of positions that were masked at a block's first step, the same at every position, (R, W).

    A rule keeps it as its memory, which is why it is a plane.
    """
    import torch

    masked_now = lanes.masked.sum(1, keepdim=True).expand_as(lanes.masked)  # (R, W)
    if not lanes.memory:
        return masked_now
    fresh = (lanes.step == 0)[:, None]  # (R, 1)
    return torch.where(fresh, masked_now, lanes.memory[0])


# ---------------------------------------------------------------- quotas


def even_counts(m: int, steps: int) -> list[int]:
    """The number of positions that each step reveals of m, which is m // S + (i < m mod S) at step i.

    Steps that reveal none are left out.
    """
    return [m // steps + (step < m % steps) for step in range(min(steps, m))]


@dataclasses.dataclass(frozen=True)
class Scheduled(Rule, speed=("steps",)):
    """The base class of rules that spread the positions of a block over `steps` steps.

    With m positions and S steps, step i reveals n_i = m // S + (i < m mod S) of them.
    """

    def quota(self, lanes: Lanes) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The number of positions that this step reveals (R, 1), and the memory, which is m."""
        m = first_count(lanes)  # (R, W)
        total = m[:, :1]  # (R, 1)
        steps = self.steps  # type: ignore[attr-defined]
        return total // steps + (lanes.step[:, None] < total % steps), (m,)


@dataclasses.dataclass(frozen=True)
class Quota(Scheduled, name="quota", reads_step=True):
    """The most confident positions, m // S + (i < m mod S) of a block's m at step i of S (LLaDA, Fast-dLLM).

    `eos=conf` is LLaDA's `confidence_eos_eot_inf`, which changes the order only: a position whose most probable token
    is `eos_id` or `eot_id` comes last, and the confidence of the others is P1 / (1 - P_eos - P_eot). Ids that are not
    given are the tokenizer's.
    """

    steps: int = required(STEPS, "steps of a block", 32)
    eos: str | None = argument(
        choice("conf"),
        None,
        "`conf`: positions that predict the end of the text or turn come last (LLaDA)",
        optional=True,
    )
    eos_id: int | None = argument(TOKEN_ID, None, "the id of EOS, with `eos=conf`", **OF_ENDS)
    eot_id: int | None = argument(TOKEN_ID, None, "the id of the end of a turn, with `eos=conf`", **OF_ENDS)

    def with_tokenizer(self, tokenizer: Any) -> Rule:
        if self.eos is None:
            return self
        eos_id = self.eos_id
        if eos_id is None:
            eos_id = tokenizer.eos_token_id
        if eos_id is None:
            raise DuelError("The tokenizer names no EOS, which rule quota with eos=conf needs; pass eos_id=<id>.")
        eot_id = self.eot_id
        if eot_id is None:
            ids = tokenizer.get_vocab()
            known = [ids[token] for token in END_OF_TURN if token in ids]
            eot_id = known[0] if known else None
        # where one token ends both, it is counted once
        return dataclasses.replace(self, eos_id=eos_id, eot_id=None if eot_id == eos_id else eot_id)

    def check_network(self, denoiser: Any) -> None:
        if self.eos is not None and self.eos_id is None:
            raise DuelError("Rule quota with eos=conf needs the id of EOS: pass eos_id=<id> (and eot_id=<id>).")
        for name, token in (("eos_id", self.eos_id), ("eot_id", self.eot_id)):
            if token is not None and token >= denoiser.vocab_size:
                raise DuelError(
                    f"{name}={token} of rule quota is not an id of this network: it has 0 to {denoiser.vocab_size - 1}."
                )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        count, memory = self.quota(lanes)
        if self.eos is None:
            pick, margin = best(predictions, lanes, predictions.confidence, count)
            return Decision(pick, margin, memory)
        score, last = self._without_ends(predictions)
        pick, gap = best(predictions, lanes, score, count)
        # positions that come last tie by definition: their order changes only if the most probable token of one does
        gap = gap.masked_fill((pick & last).any(1), math.inf)
        change = nearest(predictions.log_margin, last & lanes.masked) / LOG_ODDS_SLOPE  # (R,) of such a token
        change = change.masked_fill(predictions.all_mask, math.inf)
        return Decision(pick, gap.minimum(change), memory)

    def _without_ends(self, predictions: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-odds of P1 / (1 - P_eos - P_eot), and where the most probable token is one of the two; (R, W) each.

        The score is -inf there.
        """
        import torch

        confidence = predictions.confidence.double()  # (R, W)
        argmax = predictions.argmax  # (R, W)
        rest = confidence.neg().sigmoid()  # (R, W) 1 - P1, from which P_eos and P_eot are taken
        last = torch.zeros_like(predictions.masked)  # (R, W)
        ends = dict.fromkeys((self.eos_id, self.eot_id))  # in this order: floats are subtracted
        for end in ends:
            if end is None:
                continue
            p = predictions.log_prob(torch.full_like(argmax, end)).exp()  # (R, W)
            is_top = argmax == end  # (R, W) its probability is P1, which `rest` does not contain
            rest = torch.where(is_top, rest, rest - p)
            last |= is_top
        score = confidence.sigmoid().log() - rest.clamp(min=1e-300).log()
        return score.masked_fill(last, -math.inf), last


@dataclasses.dataclass(frozen=True)
class CumulativeQuota(
    Rule,
    name="cumulative_quota",
    adaptive=True,
    speed=("steps", "tau"),
    reads_step=True,
    may_pick_none=True,
):
    """The most confident positions, until ceil((i + 1) m / S) of a block's m are revealed after step i of S; and all
    with P1 > tau (diffusers' BlockRefinementScheduler on DiffusionGemma).

    A step reveals nothing if earlier ones were ahead of the quota and no position passes tau. Where the noise is random
    tokens, the next step shows other noise, so waiting changes the predictions. m does not count a tail.
    """

    steps: int = required(WAITING_STEPS, "steps of a block", 48)
    tau: float = required(PROBABILITY, "the probability above which positions are revealed", 0.95)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        m = first_count(lanes)  # (R, W)
        total = m[:, :1]  # (R, 1)
        revealed = total - lanes.masked.sum(1, keepdim=True)  # (R, 1)
        steps_taken = lanes.step[:, None] + 1  # (R, 1) with this one
        due = -(-steps_taken * total // self.steps)  # (R, 1) rounded up
        needed = (due.minimum(total) - revealed).clamp(min=0)  # (R, 1)
        confidence = predictions.confidence  # (R, W)
        top, gap = best(predictions, lanes, confidence, needed)
        high = lanes.masked & (confidence > log_odds(self.tau))  # (R, W)

        # If as many positions pass tau as are needed, tau alone decides, not their order. Else the order of the best
        # decides, and whether one of the others passes tau.
        tau_decides = high.sum(1) >= needed[:, 0]  # (R,)
        near_tau = near_probability(confidence, lanes.masked, self.tau)  # (R,)
        near_tau_of_others = near_probability(confidence, lanes.masked & ~top, self.tau)  # (R,)
        margin = near_tau.where(tau_decides, gap.minimum(near_tau_of_others))  # (R,)
        return Decision(top | high, margin, (m,))


# ---------------------------------------------------------------- Dream


Algorithm = Literal["entropy", "topk_margin", "maskgit_plus", "confidence_threshold"]
SCORED = {"entropy": Entropy, "topk_margin": Margin, "maskgit_plus": Greedy}  # the rules with these scores
EPS = 1e-3  # where Dream's noise levels end


def dream_shares(steps: int) -> torch.Tensor:
    """The share of the masked positions that each of Dream's steps reveals, 1 - t_(i+1) / t_i, at last 1; (S,)."""
    import torch

    level = torch.linspace(1, EPS, steps + 1)  # (S + 1,) float32, as in their code
    kept = level[1:] / level[:-1]  # (S,)
    share = 1 - kept
    share[-1] = 1
    return share


def dream_counts(m: int, steps: int) -> list[int]:
    """The number of positions that each step of Dream reveals of m, without the steps that reveal none."""
    counts = []
    left = m
    for share in dream_shares(steps):
        count = int(left * share)  # a product in float32, as in their code
        left -= count
        if count:
            counts.append(count)
    return counts


def _algorithm(value: Any) -> Any:
    if value == "origin":
        raise DuelError(
            "alg=origin of rule 'dream' reveals positions at random, so a text has many orders. Its exact "
            "likelihood is estimator=sampled_order,alg=origin,steps=<number>."
        )
    return value


@dataclasses.dataclass(frozen=True)
class Dream(Rule, name="dream", speed=("steps",), reads_step=True, adaptive_with="alg=confidence_threshold"):
    """Dream's diffusion_generate, whose number of positions follows its noise levels.

    With t_i from 1 to 0.001 in equal steps and m positions left, step i reveals int(m (1 - t_(i+1) / t_i)) of them, the
    last step all. `alg`: by least entropy, largest P1 - P2 (`topk_margin`) or largest P1 (`maskgit_plus`). Steps that
    reveal nothing, as the first one mostly does, are skipped: they neither change a prediction nor count as steps.

    After a block's first position (`seed_first`) the schedule starts at step 1, as in Fast-dLLM's block sampler.

    With `alg=confidence_threshold` (Fast-dLLM's copy) a step may reveal M / steps of a block's M positions, and as many
    more as earlier steps left over. Of that many best positions it reveals the best, and the others if P1 >= tau.
    """

    first_step: ClassVar[int] = 0
    alg: Algorithm = required(choice(Algorithm, convert=_algorithm), "how positions are ordered", "entropy")
    steps: int = required(STEPS, "steps of a block", 32)
    tau: float | None = argument(
        PROBABILITY,
        None,
        "the probability of `alg=confidence_threshold`, which needs it",
        optional=True,
        only_with=("alg", "confidence_threshold"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alg == "confidence_threshold" and self.tau is None:
            raise DuelError("Rule 'dream' with alg=confidence_threshold needs tau, e.g. tau=0.9.")

    def after_first(self) -> Rule:
        if self.alg == "confidence_threshold":
            return self
        if self.steps == 1:
            raise DuelError(
                "Rule 'dream' with seed_first=true takes its first step for a block's first position, so it needs at "
                "least steps=2: with one step the authors' code leaves the other positions masked."
            )
        return SeededDream(self.alg, self.steps)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        if self.alg == "confidence_threshold":
            return self._threshold(predictions, lanes)
        count, following = self._next_step(lanes)
        score, slope = SCORED[self.alg].score(predictions)  # (R, W)
        return Decision(*best(predictions, lanes, score, count, slope), (following,))

    def _next_step(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """The next step that reveals positions: how many (R, 1), and the number of the step after it (R, W)."""
        import torch

        left = lanes.masked.sum(1, keepdim=True)  # (R, 1)
        begin = torch.zeros_like(left)  # (R, 1)
        if lanes.memory:
            begin = lanes.memory[0][:, :1]
        shares = dream_shares(self.steps).to(left.device)  # (S,)
        count = (left.float() * shares).long()  # (R, S)
        step = torch.arange(self.steps, device=left.device)  # (S,)
        is_later = step >= begin.clamp(min=self.first_step)  # (R, S)
        candidates = (count > 0) & is_later  # (R, S)
        chosen = candidates.long().argmax(1, keepdim=True)  # (R, 1) the first of them
        return count.gather(1, chosen), (chosen + 1).expand_as(lanes.masked)

    def _threshold(self, predictions: Predictions, lanes: Lanes) -> Decision:
        """The decision of `alg=confidence_threshold`."""
        m = first_count(lanes)  # (R, W)
        undivided = m % self.steps > 0  # (R, W)
        if undivided.any():
            raise DuelError(
                f"Rule {self} needs a number of positions that its steps divide, as in the authors' code; a block has "
                f"{int(m[undivided][0])}. Use another number of steps."
            )
        total = m[:, :1]  # (R, 1)
        revealed = total - lanes.masked.sum(1, keepdim=True)  # (R, 1)
        due = total // self.steps * (lanes.step[:, None] + 1)  # (R, 1) that may be revealed by now
        candidates, gap = best(predictions, lanes, predictions.confidence, due - revealed)
        single, first_gap = best(predictions, lanes, predictions.confidence, 1)
        away = predictions.confidence.double() - log_odds(self.tau or 0.0)  # (R, W)
        pick = candidates & (single | (away >= 0))  # (R, W)
        distance = nearest(away, candidates & ~single) / LOG_ODDS_SLOPE  # (R,)
        margin = gap.minimum(first_gap).minimum(distance)  # (R,)
        return Decision(pick, margin, (m,))


@dataclasses.dataclass(frozen=True)
class SeededDream(Dream):
    """Dream's schedule from its second step on."""

    first_step: ClassVar[int] = 1


# ---------------------------------------------------------------- thresholds


@dataclasses.dataclass(frozen=True)
class ThresholdUntil(Thresholded, name="threshold_until", speed=("mu", "steps"), reads_step=True):
    """All positions with P1 >= mu, or else the most confident one; at the last of `steps` steps all that are left
    (mlx-vlm on DiffusionGemma)."""

    steps: int = required(STEPS, "steps of a block", 48)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        confidence = predictions.confidence  # (R, W)
        sure = lanes.masked & (confidence >= log_odds(self.mu))  # (R, W)
        distance = near_probability(confidence, lanes.masked, self.mu)  # (R,)
        pick, margin = sure_or_best(predictions, lanes, sure, distance)
        is_last = lanes.step >= self.steps - 1  # (R,)
        pick = pick | (lanes.masked & is_last[:, None])  # (R, W)
        return Decision(pick, margin.masked_fill(is_last, math.inf))


@dataclasses.dataclass(frozen=True)
class FallingThreshold(Rule, name="falling_threshold", adaptive=True, speed=("mu",), reads_step=True):
    """All positions with P1 > mu_i at step i of a block, or else the single most confident one, where
    mu_i = mu - (mu - low) i / (steps - 1) falls to `low` and stays there (mlx-vlm's LLaDA2 with `min_threshold`).
    """

    mu: float = required(PROBABILITY, "the bound of P1 at a block's first step", 0.95)
    low: float = required(PROBABILITY, "the bound of P1 at step `steps`, at most mu", 0.5)
    steps: int = argument(STEPS, 32, "the steps over which the bound falls")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.mu:
            raise DuelError(f"Rule '{self.name}' needs low of at most mu={self.mu}; it is {self.low}.")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        progress = (lanes.step.double() / max(1, self.steps - 1)).clamp(max=1)  # (R,)
        bound = self.mu - (self.mu - self.low) * progress  # (R,) of P1
        away = predictions.confidence.double() - bound.logit()[:, None]  # (R, W) in log-odds
        sure = lanes.masked & (away > 0)  # (R, W)
        distance = nearest(away, lanes.masked) / LOG_ODDS_SLOPE  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance))
