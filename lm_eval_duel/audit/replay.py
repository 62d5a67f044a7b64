"""A run's order of a window through the reference: the values along it, and the rule at each of its states.

The order is the run's; every number is the reference's. Where the rule of the reference picks otherwise than the run,
the pick is either wrong or within a tie: then some change of the reference's own logits by at most `NEAR_TIE` gives the
run's pick. So a tie at one step excuses neither a value nor a later pick, and nothing that the run reports excuses it.

A rule that the reference does not have is the run's own: runs_rule.py.

Shapes: L row length, V tokens.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.audit.checked import Recomputed, distance
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.errors import told_apart

PAPER: dict[type[rules.Rule], Callable[..., reference.Rule]] = {
    rules.LeftToRight: lambda rule: reference.left_to_right(rule.k),
    rules.Greedy: lambda rule: reference.greedy(rule.k),
    rules.Margin: lambda rule: reference.margin(rule.k),
    rules.Entropy: lambda rule: reference.entropy(rule.k),
    rules.Threshold: lambda rule: reference.threshold(rule.mu),
    rules.Klass: lambda rule: reference.klass(rule.mu, rule.nu),
}
# Changes of logits within a tie: how those of the positions that the run picked move, how those of the others do, and
# whether the top one of each position moves alone.
TIES = [
    (picked * NEAR_TIE, others * NEAR_TIE, top_alone)
    for picked, others, top_alone in itertools.product((1, -1), (1, -1), (True, False))
]


def rule_of(rule: rules.Rule) -> Callable[..., reference.Rule] | None:
    """The reference's own rule for a rule of the paper; None for other rules."""
    make = PAPER.get(type(rule))
    if make is None or getattr(rule, "strict", False):
        return None
    if isinstance(rule, rules.Klass) and not _as_printed(rule):
        return None
    return lambda: make(rule)


def _as_printed(rule: rules.Klass) -> bool:
    """True for KLASS as the paper prints it: one step of history, KL(previous || current), within a block."""
    return rule.history == 1 and rule.kl == "paper" and not rule.across


def along_the_order(
    network: OneRow,
    make: Callable[[], reference.Rule],
    score: Score,
    may_pick_none: bool = False,
) -> Recomputed:
    """The run's order through the reference: every value along it, and the rule's pick at every state.

    `make`: makes the rule. `may_pick_none`: at some steps it reveals nothing.
    """
    target = range(network.origin, network.end)
    steps = dict(zip(target, score.reveal_steps, strict=True))
    if any(steps[ell] < 0 for ell in network.scored):
        return Recomputed(math.nan, problems=("the recorded order does not reveal every position",))
    followed = Followed(network, steps, make())
    path = network.path(followed)
    # Where the rule picks otherwise, the reference's own order has another value. It is reported, not compared: the
    # values along the run's order are.
    own_order = None
    if followed.other_picks or followed.ties:
        own_order = network.path(make()).ll

    nats = [path.log_p.get(ell, 0.0) for ell in target]  # 0: known positions, which are not scored
    problems = _differing_tokens(nats, score)
    is_either = followed.is_greedy and followed.top_tokens_tie  # argmax may decide both ways
    if followed.is_greedy != score.is_greedy and not is_either:
        problems.append(f"is_greedy is {score.is_greedy}")
    if score.nfe is not None and score.nfe != len(path.sigma) and not may_pick_none:
        problems.append(f"its order has {len(path.sigma)} steps, not {score.nfe}")
    return Recomputed(
        path.ll,
        other_picks=followed.other_picks,
        first_other_pick=followed.first_other_pick,
        ties=followed.ties,
        own_order=own_order,
        problems=tuple(problems),
    )


def _differing_tokens(nats: Sequence[float], score: Score) -> list[str]:
    """The token that differs most from the reference's nats, if it does; and the sum of the run's tokens."""
    noise = nats_tolerance(len(nats))
    problems = []
    distances = [distance(again, run) for again, run in zip(nats, score.token_logprobs, strict=True)]
    worst = distances.index(max(distances))
    if distances[worst] > noise:
        run, again = told_apart(score.token_logprobs[worst], nats[worst])
        problems.append(f"position {worst} of the target (counted from 0) has {run} nats, not {again}")
    total = math.fsum(score.token_logprobs)
    if distance(total, score.log_prob) > noise:
        problems.append(f"its tokens add up to {total:.4f} nats")
    return problems


# ---------------------------------------------------------------- the rule at each state, and what is a tie


class StepRule(abc.ABC):
    """A rule that may be asked several times at a step, and remembers what it was asked first."""

    @abc.abstractmethod
    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]: ...

    @abc.abstractmethod
    def advance(self) -> None:
        """Go on to the next step."""


class Followed:
    """A recorded order as a rule of the reference: `steps` of the positions, counted from 0 in each block.

    `F` is asked at each state. `other_picks` counts where it picks otherwise, `ties` where that is within a tie.
    """

    def __init__(self, network: OneRow, steps: dict[int, int], F: reference.Rule):
        self.network = network
        self.steps = steps
        self.F = F
        self.step = 0
        self.other_picks = 0
        self.first_other_pick = ""
        self.ties = 0
        self.is_greedy = True
        self.top_tokens_tie = False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = [ell for ell in M if self.steps[ell] == self.step]
        of_rule = self.F(log_P, M)
        if {*of_rule} != {*picked}:
            # Where all positions are equal because the network has relative positions, the lowest is first: no tie.
            decided = self.network.relative_positions and all_equal(log_P, M)
            if not decided and in_a_tie(self.F, log_P, M, picked):
                self.ties += 1
            else:
                self.other_picks += 1
                if not self.first_other_pick:
                    self.first_other_pick = self._described(M, picked, of_rule)
        if isinstance(self.F, StepRule):
            self.F.advance()
        for ell in picked:
            self._compare_with_top(log_P[ell], self.network.x[ell])
        self.step = 0 if len(picked) == len(M) else self.step + 1
        return picked

    def _described(self, M: list[int], picked: list[int], of_rule: list[int]) -> str:
        """A state in words: its step, and the positions of the target that the run and the rule reveal there."""
        first = self.network.origin
        [block] = [n for n, positions in enumerate(self.network.blocks) if M[0] in positions]
        revealed = ", ".join(str(ell - first) for ell in sorted(picked)) or "none"
        wanted = ", ".join(str(ell - first) for ell in sorted(of_rule)) or "none"
        return (
            f"at step {self.step} of block {block}: position {revealed} of the target, not {wanted}; all counted from 0"
        )

    def _compare_with_top(self, log_p: torch.Tensor, token: int) -> None:
        """Note it if a token is not the most probable one of its position, with log-probabilities log_p (V,)."""
        first, *rest = log_p.topk(min(2, len(log_p))).values.tolist()
        behind = first - float(log_p[token])
        if behind >= NEAR_TIE:
            self.is_greedy = False
        elif rest and first - rest[0] < NEAR_TIE:  # either of two tokens may count as the top one
            self.top_tokens_tie = True


def all_equal(log_P: torch.Tensor, M: list[int]) -> bool:
    """True if all masked positions have one distribution."""
    return bool((log_P[M] == log_P[M[0]]).all())


def in_a_tie(F: reference.Rule, log_P: torch.Tensor, M: list[int], picked: list[int]) -> bool:
    """True if some change of the logits within a tie makes F pick `picked`."""
    for by in TIES:
        changed = moved(log_P, M, picked, *by)
        if {*F(changed, M)} == {*picked}:
            return True
    return False


def moved(
    log_P: torch.Tensor,
    M: list[int],
    picked: list[int],
    by: float,
    others_by: float,
    top: bool,
) -> torch.Tensor:
    """log_P with the logits of the picked positions of M moved by at most `by`, and of the other ones by `others_by`.

    `top`: the top logit alone; else those above the mean of log_P up and those below it down, which changes entropies
    most.
    """
    at = torch.tensor(M, device=log_P.device)
    rows = log_P[at]  # (M, V)
    moves = log_P.new_tensor([by if ell in picked else others_by for ell in M])[:, None]  # (M, 1)
    if top:
        rows = rows.scatter_add(1, rows.argmax(1, keepdim=True), moves)
    else:
        mean = -reference.entropy_nats(rows)[:, None]  # (M, 1) of log_P under P
        rows = rows + moves * (rows - mean).sign()
    changed = log_P.clone()
    changed[at] = rows.log_softmax(1)
    return changed
