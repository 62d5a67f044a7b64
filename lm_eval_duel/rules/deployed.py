"""Rules of published samplers, as in their code; `presets.py` has the sources.

The number of positions that LLaDA's and Dream's reveal follows a schedule of steps, not the network. The parallel ones
reveal at least one position at a step.

Shapes: R lanes, W block width, S steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lm_eval_duel.arguments import PROBABILITY, argument, choice, number, required, whole
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

Algorithm = Literal["entropy", "topk_margin", "maskgit_plus", "confidence_threshold"]
SCORED = {"entropy": Entropy, "topk_margin": Margin, "maskgit_plus": Greedy}  # the rules with these scores
EPS = 1e-3  # where Dream's noise levels end
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")  # tokens that end a turn but not a text
STEPS, TOKEN_ID = whole(1, "a number of steps"), whole(0, "a token id")
OF_ENDS: dict[str, Any] = {"unset": "the tokenizer's", "optional": True, "only_with": ("eos", "conf")}


def even_counts(m: int, steps: int) -> list[int]:
    """The number of positions that each step reveals of m, m // S + (i < m mod S) at step i; steps that reveal none
    left out.
    """
    return [m // steps + (step < m % steps) for step in range(min(steps, m))]


def dream_counts(m: int, steps: int) -> list[int]:
    """The number of positions that each step of Dream reveals of m, without the steps that reveal none."""
    counts, left = [], m
    for share in dream_shares(steps):
        counts.append(int(left * share))  # a product in float32, as in their code
        left -= counts[-1]
    return [count for count in counts if count]


def dream_shares(steps: int) -> torch.Tensor:
    """The share of the masked positions that each of Dream's steps reveals, 1 - t_(i+1) / t_i, at last 1; (S,)."""
    import torch

    level = torch.linspace(1, EPS, steps + 1)  # (S + 1,) float32, as in their code
    share = 1 - level[1:] / level[:-1]  # (S,)
    share[-1] = 1
    return share


@dataclasses.dataclass(frozen=True)
class Scheduled(Rule, speed=("steps",)):
    """A rule that spreads the positions of a block over `steps` steps.

    With m positions and S steps, step i reveals n_i = m // S + (i < m mod S) of them.
    """

    def quota(self, lanes: Lanes) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The number of positions that this step reveals (R, 1), and the memory, which is m."""
        m = first_count(lanes)  # (R, W)
        steps = self.steps  # type: ignore[attr-defined]
        return (m // steps)[:, :1] + (lanes.step[:, None] < (m % steps)[:, :1]), (m,)


def first_count(lanes: Lanes) -> torch.Tensor:
    """The number of positions that were masked at the first step, (R, W), as memory needs it."""
    import torch

    now = lanes.masked.sum(1, keepdim=True).expand_as(lanes.masked)  # (R, W)
    return torch.where((lanes.step == 0)[:, None], now, lanes.memory[0]) if lanes.memory else now


@dataclasses.dataclass(frozen=True)
class Quota(Scheduled, name="quota", label="Quota", reads_step=True):
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
        ids = tokenizer.get_vocab()
        eot = next((ids[token] for token in END_OF_TURN if token in ids), None)
        eos_id = self.eos_id if self.eos_id is not None else tokenizer.eos_token_id
        eot_id = self.eot_id if self.eot_id is not None else eot
        if eos_id is None:
            raise DuelError("The tokenizer names no EOS, which rule quota with eos=conf needs; pass eos_id=<id>.")
        return dataclasses.replace(self, eos_id=eos_id, eot_id=None if eot_id == eos_id else eot_id)

    def check_network(self, denoiser: Any) -> None:
        if self.eos is not None and self.eos_id is None:
            raise DuelError("Rule quota with eos=conf needs the id of EOS: pass eos_id=<id> (and eot_id=<id>).")
        for name in ("eos_id", "eot_id"):
            if (number := getattr(self, name)) is not None and number >= denoiser.vocab_size:
                raise DuelError(
                    f"{name}={number} of rule quota is not an id of this network: it has 0 to "
                    f"{denoiser.vocab_size - 1}."
                )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        count, memory = self.quota(lanes)
        if self.eos is None:
            return Decision(*best(predictions, lanes, predictions.confidence, count), memory)
        score, last = self._without_ends(predictions)
        pick, gap = best(predictions, lanes, score, count)
        # those that come last tie by definition: their order changes only if the most probable token of one does
        gap = gap.masked_fill((pick & last).any(1), math.inf)
        margin = nearest(predictions.log_margin, last & lanes.masked) / LOG_ODDS_SLOPE  # (R,)
        return Decision(pick, gap.minimum(margin.masked_fill(predictions.all_mask, math.inf)), memory)

    def _without_ends(self, predictions: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-odds of P1 / (1 - P_eos - P_eot), and where the most probable token is one of the two; (R, W) each.

        The score is -inf there.
        """
        import torch

        confidence, argmax = predictions.confidence.double(), predictions.argmax  # (R, W)
        rest = confidence.neg().sigmoid()  # (R, W) 1 - P1
        last = torch.zeros_like(predictions.masked)  # (R, W)
        for end in {end for end in (self.eos_id, self.eot_id) if end is not None}:
            p = predictions.log_prob(torch.full_like(argmax, end)).exp()  # (R, W)
            rest = torch.where(argmax == end, rest, rest - p)
            last |= argmax == end
        score = confidence.sigmoid().log() - rest.clamp(min=1e-300).log()
        return score.masked_fill(last, -math.inf), last


def _algorithm(value: Any) -> Any:
    if value == "origin":
        raise DuelError(
            "alg=origin of rule 'dream' reveals positions at random, so a text has many orders. Its exact "
            "likelihood is estimator=sampled_order,alg=origin,steps=<number>."
        )
    return value


@dataclasses.dataclass(frozen=True)
class Dream(Rule, name="dream", label="Dream", speed=("steps",), reads_step=True):
    """Dream's diffusion_generate, whose number of positions follows its noise levels.

    With t_i from 1 to 0.001 in equal steps and m positions left, step i reveals int(m (1 - t_(i+1) / t_i)) of them, the
    last step all. `alg`: by least entropy, largest P1 - P2 (`topk_margin`) or largest P1 (`maskgit_plus`). Steps that
    reveal nothing, as the first one mostly does, are skipped: they neither change a prediction nor count as steps.

    After a block's first position (`seed_first`) the schedule starts at step 1, as in Fast-dLLM's block sampler.

    `alg=confidence_threshold` (Fast-dLLM's copy) gives each step M / steps of the M positions, and those that earlier
    steps passed over. The most confident of these many is revealed, and the others if P1 >= tau.
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
        count, index = self._next_step(lanes)
        score, slope = SCORED[self.alg].score(predictions)  # (R, W)
        return Decision(*best(predictions, lanes, score, count, slope), (index,))

    def _next_step(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of positions revealed by the next step that reveals any (R, 1), and the number of the step after
        it.
        """
        import torch

        device, left = lanes.masked.device, lanes.masked.sum(1, keepdim=True)  # (R, 1)
        begin = lanes.memory[0][:, :1] if lanes.memory else torch.zeros_like(left)  # (R, 1)
        count = (left.float() * dream_shares(self.steps).to(device)).long()  # (R, S)
        step = torch.arange(self.steps, device=device)  # (S,)
        index = ((count > 0) & (step >= begin.clamp(min=self.first_step))).long().argmax(1, keepdim=True)  # (R, 1)
        return count.gather(1, index), (index + 1).expand_as(lanes.masked)

    def _threshold(self, predictions: Predictions, lanes: Lanes) -> Decision:
        m = first_count(lanes)  # (R, W)
        if (m % self.steps).any():
            raise DuelError(
                f"Rule {self} needs a number of positions that its steps divide, as in the authors' code; a block has "
                f"{int(m[(m % self.steps) > 0][0])}. Use another number of steps."
            )
        total = m[:, :1]  # (R, 1)
        left = lanes.masked.sum(1, keepdim=True)  # (R, 1)
        due = total // self.steps * (lanes.step[:, None] + 1)  # (R, 1) that may be revealed by now
        candidates, gap = best(predictions, lanes, predictions.confidence, due - (total - left))
        single, first_gap = best(predictions, lanes, predictions.confidence, 1)
        away = predictions.confidence.double() - log_odds(self.tau or 0.0)  # (R, W)
        distance = away.abs().masked_fill(~candidates | single, math.inf).amin(1) / 2  # (R,)
        return Decision(candidates & (single | (away >= 0)), gap.minimum(first_gap).minimum(distance), (m,))


@dataclasses.dataclass(frozen=True)
class SeededDream(Dream):
    """Dream's schedule from its second step on."""

    first_step: ClassVar[int] = 1


Variant = Literal["a", "b", "c"]
SLACK = 1e-5  # in dInfer's threshold: how far below the largest probability still counts as the largest


@dataclasses.dataclass(frozen=True)
class EntropyThreshold(
    Rule, name="entropy_threshold", label="Entropy Thresh.", adaptive=True, speed=("tau",), state_only=True
):
    """All positions with entropy <= tau, and always the one with the least (dParallel, d3LLM)."""

    tau: float = required(
        number("an entropy in nats, at least 0", lambda x: 0 <= x < math.inf), "the largest entropy", 0.5
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        entropy = predictions.entropy.double()  # (R, W)
        sure = lanes.masked & (entropy <= self.tau)  # (R, W)
        slope = 2 * entropy.clamp(min=max(self.tau, 1e-12))  # (R, W) how fast an entropy near tau can move
        distance = nearest((entropy - self.tau) / slope, lanes.masked)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance, -entropy, 2 * entropy))


@dataclasses.dataclass(frozen=True)
class Factor(Rule, name="factor", label="Factor", adaptive=True, speed=("f",), state_only=True):
    """The most confident positions, c_1 >= c_2 >= ..., as many as 1 + the number of ranks r >= 2 with
    c_r >= 1 - f / (r + 1) (Fast-dLLM's factor: Wu et al. 2025, section 3.3).

    The published codes differ at the end of a block. With k the count and m masked positions, `variant` is "a"
    (Fast-dLLM, dInfer, PC-Sampler): m if k = m - 1; "b" (dllm): k; "c" (d2Cache): with > for >=, m - 1 if k = m >= 2.
    """

    f: float = required(number("a number above 0", lambda x: x > 0), "the factor f of the rule", 1.0)
    variant: Variant = argument(
        choice(Variant), "a", "borders as in `a`: Fast-dLLM, dInfer, PC-Sampler; `b`: dllm; `c`: d2Cache"
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        confidence = torch.where(masked, predictions.confidence.double(), -math.inf)  # (R, W)
        descending = confidence.sort(dim=1, descending=True).values[:, 1:]  # (R, W - 1) ranks 2, 3, ...
        bound = descending.new_tensor([log_odds(1 - self.f / (r + 1)) for r in range(2, masked.shape[1] + 1)])
        some = masked.sum(1, keepdim=True)  # (R, 1) m
        ranked = torch.arange(1, masked.shape[1], device=masked.device) < some  # (R, W - 1)
        enough = descending > bound if self.variant == "c" else descending >= bound  # (R, W - 1)
        k = 1 + (enough & ranked).sum(1, keepdim=True)  # (R, 1)
        if self.variant == "a":
            k = torch.where(k == some - 1, some, k)
        elif self.variant == "c":
            k = torch.where((k == some) & (some >= 2), some - 1, k)
        pick, gap = best(predictions, lanes, predictions.confidence, k)
        if masked.shape[1] == 1:
            return Decision(pick, gap)
        return Decision(pick, gap.minimum(nearest(descending - bound, ranked) / LOG_ODDS_SLOPE))


@dataclasses.dataclass(frozen=True)
class HighOrTopk(Rule, name="high_or_topk", label="High or Top-k", adaptive=True, speed=("tau",), state_only=True):
    """All positions with P1 > tau if there are at least n of them, else the n most confident ones (LLaDA2)."""

    n: int = required(whole(1, "a number of positions"), "the least number of positions revealed at a step", 1)
    tau: float = required(PROBABILITY, "the probability above which positions are revealed", 0.9)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        high = lanes.masked & (predictions.confidence > log_odds(self.tau))  # (R, W)
        distance = near_probability(predictions.confidence, lanes.masked, self.tau)  # (R,)
        top, gap = best(predictions, lanes, predictions.confidence, self.n)
        enough = high.sum(1) >= self.n  # (R,)
        pick = torch.where(enough[:, None], high, top)  # (R, W)
        return Decision(pick, torch.where(enough, distance, distance.minimum(gap)))


@dataclasses.dataclass(frozen=True)
class DinferThreshold(Thresholded, name="dinfer_threshold", label="dInfer Thresh.", state_only=True):
    """All positions with P1 >= min(mu, the largest P1 - 1e-5), as in dInfer.

    Unlike `threshold`, it reveals every position that is as confident as the best one: a whole block at an all-mask
    start, where all positions tie.
    """

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked, confidence = lanes.masked, predictions.confidence.double()  # (R, W)
        p = torch.where(masked, confidence.sigmoid(), -1.0)  # (R, W)
        top, top_at = p.max(1, keepdim=True)  # (R, 1)
        bound = (top - SLACK).clamp(max=self.mu)  # (R, 1)
        pick = masked & (p >= bound)  # (R, W)

        fixed = top[:, 0] - SLACK > self.mu  # (R,) mu decides, not the largest P1
        slope = 2 * p * (1 - p)  # (R, W) the L1 norm of dP1/d(logits)
        others = torch.ones_like(masked).scatter(1, top_at, False) & masked  # (R, W)
        near_top = nearest((p - bound) / slope.maximum(slope.gather(1, top_at)), others)  # (R,)
        near_top = near_top.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(predictions.all_mask, math.inf)
        return Decision(pick, torch.where(fixed, near_probability(confidence, masked, self.mu), near_top))


@dataclasses.dataclass(frozen=True)
class Hierarchy(Rule, name="hierarchy", label="Hierarchy", adaptive=True, speed=("tau",), state_only=True):
    """The best position of each run of neighbouring masked ones, if P1 > low; all with P1 > tau; and always the best.

    This is dInfer's HierarchyDecoder: equal best positions of a run are all revealed, not the lowest alone.
    """

    low: float = argument(PROBABILITY, 0.4, "the probability above which the best of a run is revealed")
    tau: float | None = argument(PROBABILITY, None, "the probability above which every position is revealed")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        confidence = torch.where(masked, predictions.confidence.double(), -math.inf)  # (R, W)
        begins = masked & ~torch.nn.functional.pad(masked[:, :-1], (1, 0))  # (R, W)
        run = torch.where(masked, begins.cumsum(1), 0)  # (R, W) 1, 2, ...; 0 outside
        runs = confidence.new_full((len(masked), masked.shape[1] + 1), -math.inf)  # (R, W + 1)
        peak = runs.scatter_reduce(1, run, confidence, "amax").gather(1, run)  # (R, W) the best of the position's run
        first = masked & (confidence == peak)  # (R, W)
        sure = first & (confidence > log_odds(self.low))  # (R, W)
        distance = nearest(confidence - log_odds(self.low), first)  # (R,)
        if self.tau is not None:
            sure |= masked & (confidence > log_odds(self.tau))
            distance = distance.minimum(nearest(confidence - log_odds(self.tau), masked))

        count = torch.zeros_like(runs).scatter_add(1, run, first.double()).gather(1, run)  # (R, W) best ones of the run
        second = masked & (~first | (count > 1)) & (peak > log_odds(self.low))  # (R, W)
        gap = nearest(peak - confidence, second).masked_fill(predictions.all_mask, math.inf)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance.minimum(gap) / LOG_ODDS_SLOPE))
