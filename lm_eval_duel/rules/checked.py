"""Checks of what a user's rule returns, as a rule around it; the package's own rules need none.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.decision import Decision, UnmaskingRule
from lm_eval_duel.core.float_noise import FLOOR, choose_by_hash, difference, equal_or_nan, is_coarse, magnitude
from lm_eval_duel.errors import DuelError, InconsistentOutput, RuleStalled
from lm_eval_duel.rules import users
from lm_eval_duel.rules.base import Rule
from lm_eval_duel.rules.wrappers import Around

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.network import Network
    from lm_eval_duel.core.scores import Counts
    from lm_eval_duel.rules.operation_checks import RecordedCall

log = logging.getLogger("lm_eval.duel_mdm")

FIRST_CALLS = 8  # of a run that are repeated
NOISES = 3  # of each of these calls: rounding that happens to agree once differs in another
MOST_STEPS = 4096  # of a block; a rule that still picks nothing then is taken to wait for ever
FORMS = {
    "pick": "a boolean tensor (R, W)",
    "decision_margin": "a number for each lane (R,)",
    "memory": "tensors (R, W, ...)",
}
ADVICE_ON_NAN = (
    "Statistics are NaN where a position is not masked. Take means, maxima and ranks over lanes.masked: with "
    "torch.nanmean, or after masked_fill(~lanes.masked, ...)."
)
FUNCTION = (
    "A rule is a function of a lane's own predictions, masked positions, step and memory; anything else gives no "
    "likelihood, so every value that was computed with it is suspect."
)
ADVICE_ON_LANES = (
    "Compute means, maxima, sums and ranks in each lane, along dim=1, over lanes.masked: elsewhere the statistics are "
    "NaN. Before exp, subtract the lane's own maximum, x.amax(1, keepdim=True): with one over all lanes, exp is 0 in a "
    "lane whose values are far below those of another."
)
ADVICE_ON_RANDOM = "In place of random numbers, take a hash of the positions, as the rule random does."
ALONE = (
    "Rule %s decided otherwise when it was asked about one lane alone. It gave no decision_margin, so this may be a "
    "near tie, or the rule may read other lanes. Such decisions are counted (decisions_differing in the results), and "
    "the note of each score says so"
)
WITH_NOISE = (
    "Rule %s decided otherwise when its predictions changed by a millionth: float noise decides, so values may depend "
    "on the device and the batch size. In a row of masks all positions have the same statistics, and a comparison with "
    "their mean needs a tolerance, such as `>= mean - 1e-3`"
)
_warned: set[tuple[str, str]] = set()  # the warnings that this process has logged, each with its rule
OTHERS = ("memory", "carried")  # fields of lanes that are several planes


def with_checks(rule: Rule, counts: Counts, network: Network) -> Rule:
    """The rule, with the innermost one checked at every step if a user wrote it.

    `counts`: of the run; its checks are added to it. `network`: if its numbers are coarser than float32, a different
    answer is counted and does not end the run.
    """
    if not rule.built_in:
        users.require_contract(type(rule))
        return Checked(rule, counts, network)
    if isinstance(rule, Around) and not isinstance(rule, Checked):
        return dataclasses.replace(rule, rule=with_checks(rule.rule, counts, network))
    return rule


def repeat_last(rule: UnmaskingRule) -> None:
    """Ask a user's rule, inside others perhaps, for its last decision again; raises InconsistentOutput."""
    while isinstance(rule, Around):
        if isinstance(rule, Checked):
            rule.repeat_last()
        rule = rule.rule


@dataclasses.dataclass(frozen=True)
class Checked(Around):
    """A user's rule with checks of what it returns. It may return the pick alone, without a `Decision`.

    The first eight calls of a run with a real choice, and the last one of each group of windows (`repeat_last`), are
    repeated: on the same predictions, while no NaN may decide (`NoNaN`); on the same again, while operations must get
    the same numbers (operation_checks.py); at another step if the rule is `state_only`; and for a lane and the
    narrowest one, with other predictions in all other lanes, and alone. Picks and memory must agree, except in near
    ties.

    The near ties of a rule without a decision_margin are not known, so it is asked once more with float noise in its
    predictions. If it then decides differently, or for a lane alone, this is counted and logged. The checks detect a
    rule that is no function of a lane's predictions, but they prove nothing; `verify` asks again.

    In the lanes that the rule sees `row` is 0, so that it cannot depend on a window's number.

    Raises:
        DuelError: the rule raised an exception, returned anything but planes of the lanes' shape and device, or a
            memory although it is `state_only`, changed the lanes, or let a NaN decide.
        InconsistentOutput: it decided differently when it was asked again, or its operations got other numbers.
        RuleStalled: it picked a position that is not masked, or nothing. Nothing is allowed if `may_pick_none` is set
            and its step or memory moves on, for 4,096 steps of a block.
    """

    counts: Counts = dataclasses.field(repr=False, compare=False)
    network: Network = dataclasses.field(repr=False, compare=False)
    # the predictions and lanes of the last call, unless it has been repeated; at most one entry
    last: list[tuple[Any, Any]] = dataclasses.field(default_factory=list, repr=False, compare=False)

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        lanes = dataclasses.replace(lanes.in_row(0), carried=())
        if not (lanes.masked.sum(1) > 1).any():  # no lane has a choice
            return self._decided(predictions, lanes)
        self.counts.decisions += 1
        if self.counts.decisions_checked < FIRST_CALLS:
            self.last.clear()
            return self._repeated(predictions, lanes)
        self.last[:] = [(predictions, lanes)]
        return self._decided(predictions, lanes)

    def after_first(self) -> Rule:
        return dataclasses.replace(self, rule=self.rule.after_first())

    def repeat_last(self) -> None:
        """Ask for the last decision again, which shows what a counter in the rule has changed since the first ones.

        One that has been repeated is counted once, so that no more decisions are checked than made.
        """
        for predictions, lanes in self.last:
            self._repeated(predictions, lanes)
        self.last.clear()

    def _lane_to_ask(self, lanes: Any) -> int:
        """A lane with a real choice, chosen by a hash, for which the rule is asked alone."""
        choice = (lanes.masked.sum(1) > 1).nonzero()[:, 0]  # (r,)
        if len(choice) > 1:
            # not the first: a rule that draws random numbers may draw the same for the first lane as for one alone
            choice = choice[1:]
        index = choose_by_hash(1, choice, self.counts.decisions, lanes.step[choice])  # (1,)
        return int(choice[index])

    def _narrowest(self, lanes: Any) -> int:
        """The narrowest lane with a real choice, in which a rule that counts padding differs most."""
        has_choice = lanes.masked.sum(1) > 1  # (R,)
        return int(lanes.width.masked_fill(~has_choice, lanes.masked.shape[1] + 1).argmin())

    def _repeated(self, predictions: Any, lanes: Any) -> Decision:
        """The rule's decision, which must be the same when it is asked again, and for one lane alone."""
        from lm_eval_duel.rules.nan_checks import NoNaN
        from lm_eval_duel.rules.operation_checks import AskedAgain, RecordedCall

        self.counts.decisions_checked += 1
        before = [plane.clone() for plane in _planes(lanes)]
        decision = self._decided(predictions, lanes)
        # a memory may hold NaN, as statistics do
        if not all(equal_or_nan(old, new).all() for old, new in zip(before, _planes(lanes), strict=True)):
            raise DuelError(f"Rule {self} changed the lanes that it was given; it must return new tensors.")
        if decision.decision_margin is not None and decision.decision_margin.isnan().any():
            raise DuelError(f"{self._with_place}: its decision_margin is NaN. {ADVICE_ON_NAN}")
        near = decision.near_tie  # (R,)
        operations = RecordedCall(lanes.masked.numel())
        with NoNaN(lanes.masked), operations:
            again = self._decided(predictions, lanes)
        if not _agree(decision, again, ~near):
            self._differs("when it was asked again")
            return decision
        with AskedAgain(operations):
            self._decided(predictions, lanes)
        if self.rule.state_only:
            later_lanes = dataclasses.replace(lanes, step=lanes.step + 1)
            later = self._decided(predictions, later_lanes)
            if not _agree(decision, later, ~near):
                self._differs("at another step, which it does not read according to its state_only = True")
                return decision

        for each in sorted({self._lane_to_ask(lanes), self._narrowest(lanes)}):
            if predictions is not None and len(lanes) > 1:
                self._require_own_lane(decision, operations, predictions, lanes, each)
            if not self._is_same_alone(decision, predictions, lanes, each):
                return decision
        if predictions is not None and decision.decision_margin is None:
            self._ask_with_noise(decision, predictions, lanes)
        return decision

    def _ask_with_noise(self, decision: Decision, predictions: Any, lanes: Any) -> None:
        """Count and log it if float noise in the predictions changes the decision of a rule that knows no near ties."""
        for seed in range(NOISES):
            with_noise = self._decided(predictions.with_noise(seed), lanes)
            if not _agree(decision, with_noise, ~decision.near_tie):
                self.counts.decisions_differing += 1
                self._warn_once(WITH_NOISE)
                return

    def _is_same_alone(self, decision: Decision, predictions: Any, lanes: Any, lane: int) -> bool:
        """True if a lane is decided in the same way alone, without the columns that only wider lanes have.

        A difference is counted, and raises InconsistentOutput if a margin rules out float noise.
        """
        only = slice(lane, lane + 1)
        width = int(lanes.width[lane])
        single = None if predictions is None else predictions.in_lane(lane, width)
        alone = self._decided(single, _alone(lanes, lane, width))
        memory = tuple(plane[only, :width] for plane in decision.memory)
        cut = Decision(decision.pick[only, :width], None, memory)
        if _agree(cut, alone, ~decision.near_tie[only]):
            return True
        if decision.decision_margin is None or alone.decision_margin is None:  # near ties are not known
            self.counts.decisions_differing += 1
            self._warn_once(ALONE)
        else:
            self._differs("when it was asked about one lane alone", lane)
        return False

    def _require_own_lane(
        self, decision: Decision, operations: RecordedCall, predictions: Any, lanes: Any, lane: int
    ) -> None:
        """Raise InconsistentOutput if the decision in a lane changes with the predictions in other lanes.

        Or if one of its `operations` does. Alone, a lane has other shapes, and a sum over them other float noise. Here
        nothing of the lane changes, not one bit, so a different decision is no near tie in any dtype.
        """
        import torch

        from lm_eval_duel.rules.operation_checks import OthersChanged

        others = predictions.with_lane_elsewhere(lane)
        try:
            with OthersChanged(operations, lane, lanes.masked.shape):
                with_others = self._decided(others, lanes)
        except InconsistentOutput as error:
            error.lane = lane
            raise
        except DuelError:  # in a lane whose memory and predictions do not fit each other, which proves nothing
            return
        only = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,)
        only[lane] = True
        if _agree(decision, with_others, only):
            return
        self.counts.decisions_differing += 1
        raise InconsistentOutput(
            f"{self._with_place} reads other lanes: it decided otherwise for a lane when only the predictions in other "
            f"lanes changed. {FUNCTION} {ADVICE_ON_LANES}",
            lane=lane,
        )

    def _warn_once(self, warning: str) -> None:
        """Log a warning on this rule, unless this process has logged it before."""
        if (warning, str(self)) not in _warned:
            _warned.add((warning, str(self)))
            log.warning(warning, self)

    def _differs(self, when: str, lane: int = 0) -> None:
        """Count a different decision; raise InconsistentOutput unless float noise can explain it."""
        self.counts.decisions_differing += 1
        if not is_coarse(self.network):
            raise InconsistentOutput(
                f"{self._with_place} is not deterministic: it decided otherwise {when}. {FUNCTION}",
                lane=lane,
            )

    def _decided(self, predictions: Any, lanes: Any) -> Decision:
        """The rule's decision, of the right form."""
        import torch

        from lm_eval_duel.rules.nan_checks import DecidedByNaN
        from lm_eval_duel.rules.operation_checks import DrawsNumbers, ReadsOtherLanes

        try:
            returned: Any = self.rule(predictions, lanes)
        except (DuelError, torch.OutOfMemoryError):
            raise
        except DecidedByNaN as error:
            raise DuelError(f"Rule {self}: {error} ({_line_of(self.rule, error)}). {ADVICE_ON_NAN}") from error
        except (DrawsNumbers, ReadsOtherLanes) as error:
            self.counts.decisions_differing += 1
            what = "is not deterministic"
            advice = ADVICE_ON_RANDOM
            if isinstance(error, ReadsOtherLanes):
                what = "reads other lanes"
                advice = ADVICE_ON_LANES
            line = _line_of(self.rule, error)
            raise InconsistentOutput(f"Rule {self} {what}: {error} ({line}). {FUNCTION} {advice}") from error
        except Exception as error:
            reads_none = predictions is None and self.rule.fixed
            advice = " It declares fixed = True, so it gets no predictions: leave fixed out." if reads_none else ""
            raise DuelError(
                f"Rule {self} raised {type(error).__name__}: {error} ({_line_of(self.rule, error)}).{advice}"
            ) from error
        decision = self._of_form(returned, lanes)
        pick = decision.pick  # (R, W)
        picks_revealed = (pick & ~lanes.masked).any(1)  # (R,)
        picks_nothing = ~pick.any(1) & ~self._waits(decision, lanes)  # (R,)
        stalled = picks_nothing | picks_revealed
        if stalled.any():
            lane = int(stalled.nonzero()[0])
            if picks_revealed[lane]:
                what = (
                    "picked a position that is not masked: pick among lanes.masked only (statistics are NaN where a "
                    "position is not masked)"
                )
            else:
                what = f"picked nothing: {self._advice_on_nothing(lanes, lane)}"
            raise RuleStalled(f"{self._with_place} {what}.", lane=lane)
        return decision

    def _advice_on_nothing(self, lanes: Any, lane: int) -> str:
        """The advice for a lane without a pick."""
        advice = "pick a masked position in each lane (the statistics of others are NaN)"
        if not self.may_pick_none:
            return f"{advice}, or set may_pick_none if it reads the step or its memory moves on"
        if lanes.step[lane] >= MOST_STEPS:
            return f"{advice}. It may pick nothing (may_pick_none), but not for ever: a block has {MOST_STEPS:,} steps"
        return (
            f"{advice}. It has may_pick_none, but neither reads the step (reads_step) nor moved its memory on, so it "
            "would pick nothing for ever"
        )

    def _of_form(self, returned: Any, lanes: Any) -> Decision:
        """The rule's return value as a Decision; raises DuelError unless its planes fit the lanes."""
        import torch

        decision = returned
        remark = ""  # on the pick
        if isinstance(returned, torch.Tensor):
            decision = Decision(returned)
            remark = " It returned a plain tensor, not a Decision, so this was taken for the pick."
        if not isinstance(decision, Decision):
            raise DuelError(
                f"{self._with_place} must return a Decision or a boolean tensor (R, W), True at the masked positions "
                f"to reveal next; got {type(decision).__name__}."
            )
        self._require_form("pick", decision.pick, lanes, remark)
        if not isinstance(decision.memory, tuple):
            raise DuelError(
                f"{self._with_place}: its memory must be a tuple of tensors, such as memory=(plane,); got "
                f"{type(decision.memory).__name__}."
            )
        if decision.memory and self.rule.state_only:
            raise DuelError(
                f"{self._with_place} declares state_only = True, which promises that its picks depend on the revealed "
                "tokens alone, but it returned a memory. Leave one of the two out."
            )
        for plane in decision.memory:
            self._require_form("memory", plane, lanes)
        if decision.decision_margin is not None:
            self._require_form("decision_margin", decision.decision_margin, lanes)
        return decision

    def _require_form(self, name: str, plane: Any, lanes: Any, remark: str = "") -> None:
        """Raise DuelError unless a part of a decision is a tensor of the lanes' shape on their device."""
        import torch

        masked = lanes.masked  # (R, W)
        got = type(plane).__name__
        fits = isinstance(plane, torch.Tensor)
        advice = ""
        if fits:
            got = f"{plane.dtype} {tuple(plane.shape)} on {plane.device}"
            expected = masked.shape[:1] if name == "decision_margin" else masked.shape
            shape = plane.shape[:2] if name == "memory" else plane.shape  # a memory may have more dimensions
            if shape != expected:
                fits = False
            if name == "pick" and plane.dtype != torch.bool:
                fits = False
            if plane.device != masked.device:
                fits = False
                advice = " Make tensors with device=lanes.masked.device."
        if not fits:
            count, width = masked.shape
            raise DuelError(
                f"{self._with_place}: its {name} must be {FORMS[name]} with R, W = {count}, {width} on "
                f"{masked.device}; got {got}.{advice}{remark}"
            )

    def _waits(self, decision: Decision, lanes: Any) -> torch.Tensor:
        """The lanes that may pick nothing now, because the rule's step or memory moves on, (R,) bool."""
        import torch

        waits = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,)
        if not self.may_pick_none or decision.pick.any(1).all():
            return waits
        in_time: torch.Tensor = lanes.step < MOST_STEPS  # (R,)
        if self.reads_step:  # which always moves on
            return in_time
        before = lanes.memory or tuple(torch.zeros_like(plane) for plane in decision.memory)
        for old, new in zip(before, decision.memory, strict=True):
            moved_on = ~equal_or_nan(old, new)
            waits |= moved_on.flatten(1).any(1)
        return waits & in_time

    @property
    def _with_place(self) -> str:
        """The rule with its file and line, for errors."""
        return f"Rule {self} ({users.place(type(self.rule))})"

    def __str__(self) -> str:
        return str(self.rule)


def _agree(one: Decision, other: Decision, lanes: torch.Tensor) -> bool:
    """True if both are one decision in `lanes` (R,) bool, but for the float noise of a memory."""
    first = (one.pick, *one.memory)
    second = (other.pick, *other.memory)
    if [plane.shape for plane in first] != [plane.shape for plane in second]:
        return False
    return all(_same_plane(old[lanes], new[lanes]) for old, new in zip(first, second, strict=True))


def _same_plane(old: torch.Tensor, new: torch.Tensor) -> bool:
    """True if two planes of one shape are equal, up to float noise if they hold floats."""
    if not old.is_floating_point() or not old.numel():
        return old.equal(new)
    return difference(old, new, magnitude(old.reshape(1, -1))) <= FLOOR


def _planes(lanes: Any) -> list[torch.Tensor]:
    """All tensors of lanes."""
    planes = []
    for field in dataclasses.fields(lanes):
        if field.name not in OTHERS:
            planes.append(getattr(lanes, field.name))
    return [*planes, *lanes.memory]


def _alone(lanes: Any, lane: int, width: int) -> Any:
    """A lane alone, cut to its own width. Memory that is zero at its first step is left out."""
    part = lanes.select(slice(lane, lane + 1))
    is_fresh = not part.step[0] and not any(plane.any() for plane in part.memory)
    memory = ()
    if not is_fresh:
        memory = tuple(plane[:, :width] for plane in part.memory)
    return dataclasses.replace(
        part,
        tokens=part.tokens[:, :width],
        masked=part.masked[:, :width],
        memory=memory,
    )


def _line_of(rule: Rule, error: Exception) -> str:
    """The line of a user's rule that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(rule).__module__), "__file__", None)
    in_rule = [frame for frame in frames if frame.filename == file]
    last = (in_rule or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
