"""The base class of estimators: windows in, a score for each as it is finished; and the checks before.

    for index, score in estimator.stream(windows): ...

    estimator    lanes                                            how log-probabilities combine
    duel, ar     every block of every window (duel.py)            sum over picks
    lattice      every set of masked positions of every block     max, mixture or mean over orders (lattice.py)
    elbo         random draws of every span                       weighted mean (elbo.py)

Equal windows are evaluated once. A combination of network, rule, block and window that is not supported raises
DuelError before anything is scored.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from lm_eval_duel import rules
from lm_eval_duel.arguments import BLOCK, Argument, choice
from lm_eval_duel.core.decision import UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows, blocks, groups
from lm_eval_duel.core.reveal import Accumulator, BlockSpan, Budget, Reveal, WindowGroup, plan
from lm_eval_duel.core.row_checks import RowChecks
from lm_eval_duel.core.scores import Counts, IndexedScores, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.errors import DuelError, another_block, first_position_unseen, random_tokens

log = logging.getLogger("lm_eval.duel_mdm")

DEFAULT_BLOCK = 32
GRID = Argument(choice("auto", "target", "row"), "auto")
_warned: weakref.WeakSet[Denoiser] = weakref.WeakSet()  # denoisers whose windows lacked special tokens


def require_masks(denoiser: Denoiser, name: str) -> None:
    """Raise DuelError for a network whose noise is random tokens, which estimator `name` does not score."""
    if denoiser.noise_training is not None:
        raise random_tokens(f"this network ({denoiser.family})", name, denoiser.reads_causally)


def resolve_block(denoiser: Denoiser, block: int | str | None) -> int | None:
    """The block to use: an int, or None (the whole target); "auto" is the trained or published one, or else 32."""
    number: int | str | None = BLOCK("block", block)
    if denoiser.attention == "causal":
        if number not in ("auto", 1):
            raise _one_order(f"block={block}")
        return 1
    if isinstance(number, str):
        return denoiser.block or denoiser.published_block or DEFAULT_BLOCK
    if denoiser.block is not None and number != denoiser.block:
        raise another_block(denoiser.block, number)
    return number


def resolve_grid(denoiser: Denoiser, grid: str) -> str:
    """The grid to use: "target" or "row"; "auto" is the one that the network needs.

    A causal prefix ends where the target begins, so blocks count from there, as in the authors' code.
    """
    grid = GRID.read("grid", grid)
    if of_canvases(denoiser) and grid == "row":
        raise DuelError("The canvases of this network count from the target's first position; use grid=target or auto.")
    needed = denoiser.anchor if denoiser.attention == "block_causal" else None
    if needed and grid not in ("auto", needed):
        which = "A block-causal network" if needed == "row" else "This network"
        raise DuelError(f"{which} counts its blocks from the {needed}'s first position; use grid={needed} or auto.")
    if denoiser.seeds_blocks and grid == "row":
        raise DuelError(
            "With grid=row a block may begin inside the context, and first_token=causal predicts a block's first token "
            "from the clean row. Use grid=target or auto, or first_token=block."
        )
    return grid if grid != "auto" else needed or "target"


def of_canvases(denoiser: Denoiser) -> bool:
    """True for a network whose noise is random tokens, and whose blocks see the clean tokens before them alone."""
    return denoiser.noise_training is not None and denoiser.block is not None


def rule_for(denoiser: Denoiser, rule: rules.Rule) -> rules.Rule:
    """The rule for this network: within `seed_first` if it reveals the first token of each block alone."""
    if denoiser.seeds_blocks and not isinstance(rule, rules.SeedFirst):
        return rules.SeedFirst(rule)
    return rule


def _one_order(given: str) -> DuelError:
    return DuelError(f"A causal network has no rule or block: leave both out and pass estimator=ar; got {given}.")


def check_rule(denoiser: Denoiser, rule: rules.Rule) -> None:
    """Raise DuelError for a rule that this network does not support."""
    if denoiser.attention == "causal" and not isinstance(rule, rules.LeftToRight):
        raise _one_order(f"rule={rule}")
    if denoiser.shift and denoiser.cache and not isinstance(rule, rules.SeedFirst):
        raise first_position_unseen(denoiser.cache)
    if in_memory := list(rules.in_memory(rule)):
        raise DuelError(
            f"'{in_memory[0]}' of rule {type(rule).__name__} is a module or tensor in memory, which the fingerprint "
            "cannot describe. Save it to a file that the rule names, as examples/rules/learned.py does (docs/rules.md)."
        )
    rule.check_network(denoiser)


def check_every_order(denoiser: Denoiser, name: str) -> None:
    """Raise DuelError for a network that cannot evaluate every state of a block, which estimator `name` needs."""
    if denoiser.attention == "causal":
        raise DuelError("An autoregressive network has one order: use estimator=ar.")
    states = f"estimator={name} evaluates states in which a block's first token is masked and later ones are revealed."
    if denoiser.seeds_blocks:
        raise DuelError(
            f"{states} This network's sampler reveals it first, alone. For the sampler that predicts it like the "
            "others (vLLM's), pass first_token=block."
        )
    if denoiser.shift and denoiser.cache:
        raise DuelError(
            f"{states} Under cache={denoiser.cache} it is predicted at the block's start alone. Leave cache out."
        )


def check_two_phase(denoiser: Denoiser, rule: rules.Rule, cache: str) -> None:
    """Raise DuelError, with what to use instead, for a network or rule whose blocks cannot be scored in two phases."""
    if denoiser.cache is not None:
        raise DuelError(
            f"estimator=two_phase gives the value without a cache, and this network is under cache={denoiser.cache}. "
            f"Pass the network without it; TwoPhase(..., cache={denoiser.cache!r}) names that of the first phase."
        )
    if denoiser.attention != "bidirectional":
        instead = "ar" if denoiser.attention == "causal" else "duel"
        raise DuelError(
            f"estimator=two_phase saves whole rows at every step, and a {denoiser.attention} network has no such cost. "
            f"Use estimator={instead}."
        )
    if rule.spans_blocks:
        raise DuelError(
            "estimator=two_phase scores single blocks, which across=true of rule klass makes one chain. Leave across "
            "out, or use estimator=duel."
        )
    if denoiser.shift and not isinstance(rule, rules.SeedFirst):
        raise DuelError(
            f"estimator=two_phase scores every block under cache={cache}, where this network predicts a block's first "
            "token at the block's start alone. Pass seed_first=true, which is another rule, or use estimator=duel."
        )


def check_windows(
    denoiser: Denoiser, block: int | None, grid: str, windows: Sequence[Window], generating: bool = False
) -> None:
    """Raise DuelError, naming the window, for one that cannot be scored (or generated)."""
    if isinstance(windows, Window):
        raise DuelError("Pass a list of windows; got one Window. Write [window].")
    unscorable = set(denoiser.excluded.nonzero()[:, 0].tolist()) - {denoiser.mask_id}
    for n, window in enumerate(windows):
        if not isinstance(window, Window):
            raise DuelError(f"Window {n} is not a Window(context=(), target=ids), but a {type(window).__name__}.", n)
        case = WindowCase(denoiser, block, grid, window, () if generating else window.target, unscorable)
        for finds, message in PROBLEMS:
            if found := finds(case):
                raise DuelError(f"Window {n} {message.format(case=case, found=found)}", n)
    _warn_without_special_tokens(denoiser, windows)


def _warn_without_special_tokens(denoiser: Denoiser, windows: Sequence[Window]) -> None:
    """Warn, once per denoiser, of a window without the special tokens that the network expects before a text."""
    if denoiser.special_tokens is None or denoiser in _warned:
        return
    n = next((n for n, window in enumerate(windows) if window.target and not window.context), None)
    if n is None:
        return
    _warned.add(denoiser)
    before, after = denoiser.special_tokens
    log.warning(
        "Window %d has no context, but this network expects special tokens before a text. Without them, values differ "
        "from the harness's. Score Window(context=%s, target=ids%s), or load the network with bos='none'. (Warned once "
        "per denoiser.)",
        *(n, before or "(bos,)", f", suffix={after}" if after else ""),
    )


@dataclasses.dataclass(frozen=True)
class WindowCase:
    """A window, the network that is to score it, and what the checks read of both."""

    denoiser: Denoiser
    block: int | None
    grid: str
    window: Window
    target: tuple[int, ...]  # ids to score; none if they are to be generated
    unscorable: set[int]  # ids other than [MASK] that the network gives no probability

    @cached_property
    def ids(self) -> set[int]:
        """The ids that occur in the row."""
        return {*self.window.context, *self.window.suffix, *self.target}

    @property
    def largest_id(self) -> int:
        """The largest id of the network."""
        return self.denoiser.vocab_size - 1

    @property
    def end(self) -> int:
        """The column after the target."""
        return len(self.window.context) + len(self.window.target)

    @property
    def positions(self) -> int:
        """The number of positions from the one where blocks begin to count to the end of the target."""
        return self.end if self.grid == "row" else len(self.window.target)

    @property
    def border(self) -> int:
        """The column after the last block of a network with a trained block."""
        return self.end + -self.positions % (self.denoiser.block or 1)


# What can be wrong with a window, in the order of the checks: a function that finds it, and what to say then. The
# message is formatted with the `case` and with what was `found`.
PROBLEMS: tuple[tuple[Callable[[WindowCase], Any], str], ...] = (
    (
        lambda case: case.window.length > case.denoiser.max_length,
        "has {case.window.length} positions but the network holds {case.denoiser.max_length}; cut it "
        "(lm_eval_duel.core.windows.independent) or shorten the context.",
    ),
    (
        lambda case: (
            case.denoiser.needs_visible and case.window.target and not case.window.context + case.window.suffix
        ),
        "shows no token at its first step, and this network divides by the number of visible ones. Keep the "
        "tokenizer's special tokens (leave bos=none out), or pass a context.",
    ),
    (
        lambda case: (
            case.window.target and len(case.window.context) < max(case.denoiser.shift, case.denoiser.seeds_blocks)
        ),
        "needs a context: this network predicts each token from the one before it. Use bos=given for texts; for ids, "
        "put a token into the window's context.",
    ),
    (
        lambda case: [token for token in case.ids if not 0 <= token <= case.largest_id],
        "holds id {found[0]}; the network's ids are 0 to {case.largest_id}.",
    ),
    (
        lambda case: sorted(case.ids & case.denoiser.image_ids),
        "holds id {found[0]}, which stands for an image. Images are not scored: leave their tokens out.",
    ),
    (
        lambda case: case.denoiser.mask_id in case.ids,
        "holds the mask token (id {case.denoiser.mask_id}), which can be neither context nor target.",
    ),
    (
        lambda case: case.window.suffix and case.window.target and case.denoiser.attention == "causal",
        "has a suffix, which a causal network never sees. Leave it out.",
    ),
    (
        lambda case: (
            case.window.suffix
            and case.window.target
            and case.denoiser.block
            and case.denoiser.attention != "bidirectional"
            and case.window.length > case.border
        ),
        "has a suffix after position {case.border}, where its last target block ends, and this network sees nothing "
        "after that. Leave out the ids after it.",
    ),
    (
        lambda case: case.window.target and of_canvases(case.denoiser) and not case.window.context,
        "needs a context: its first canvas has no clean token to read. Keep BOS.",
    ),
    (
        lambda case: case.window.target and of_canvases(case.denoiser) and case.window.suffix,
        "has a suffix, which a canvas never sees. Leave it out.",
    ),
    (
        lambda case: of_canvases(case.denoiser) and case.window.known,
        "has known target positions, which the canvases before them do not see. Leave them out.",
    ),
    (
        lambda case: case.window.known and (case.denoiser.attention != "bidirectional" or case.denoiser.cache),
        "has known target positions, which only a bidirectional network without cache= sees from the first step.",
    ),
    (
        lambda case: case.window.known and case.denoiser.hides_given,
        "has known target positions, and cfg_scale masks what is given: leave one of them out.",
    ),
    (
        lambda case: case.window.tail and (case.block is None or case.positions % case.block),
        "has a tail, so its target must end on a block border: {case.positions} positions with block {case.block} do "
        "not. Off a border the value is not a probability.",
    ),
    (
        lambda case: sorted(case.unscorable.intersection(case.target, case.denoiser.excluded_ids)),
        "holds id {found[0]}, which exclude_ids leaves out: its probability is 0.",
    ),
    (
        lambda case: sorted(case.unscorable.intersection(case.target)),
        "holds id {found[0]}, which is padding and not a token of the vocabulary.",
    ),
)


EARLY = 2  # buckets that are evaluated alone, if windows are taken in the order given
MANY = 64  # calls that hold one step of all lanes: of a run with more, small first calls take less than 3 %
BUCKET = 8  # the most network calls that the windows of one bucket fill, if windows are taken in the order given


class Estimator(abc.ABC):
    """A denoiser, a block, and a way to combine log-probabilities. Subclasses implement `score_group`.

    Args:
        denoiser: A network, from `load`.
        block: The number of positions that are finished before the next ones begin. None: the whole target. "auto": the
            trained or published block, else 32.
        grid: Where blocks start counting: "target", "row", or "auto" ("row" for block-causal networks).
        batch_size: Rows of max_length in one network call, more if rows are shorter. None: 2048 tokens or one row on a
            CPU; on a GPU as many as fit, found by trial. On out-of-memory the batch is halved. Changes no number beyond
            float noise.
        max_batch_size: The most rows of max_length that the trial takes.
        traced: Add the confidence, margin and entropy of each token to the scores.

    Raises:
        DuelError: If the network does not support the estimator, the block or the grid.
    """

    name: str  # as in estimator=
    decodes: ClassVar[bool] = False  # `is_greedy` says what decoding would write
    takes_known: ClassVar[bool] = False  # whether windows may have known target positions
    takes_noise: ClassVar[str] = "no"  # networks whose noise is random tokens: "no", "only" or "both"
    noise_seed: int = 0  # of the noise at masked positions, if it is random tokens
    empty_score: Score = Score(0.0, is_greedy=True, nfe=0, near_ties=0)  # of an empty target

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        if self.takes_noise == "no":
            require_masks(denoiser, self.name)
        self.denoiser, self.traced = denoiser, traced
        self.block = resolve_block(denoiser, block)
        self.grid = resolve_grid(denoiser, grid)
        self.budget = plan(denoiser, self.block, self.grid, batch_size, max_batch_size)  # of a network call, at present
        self_tests.cover(denoiser, self.budget.tokens)
        self.counts = Counts()  # of what has been computed; may be shared by estimators
        self.row_checks = RowChecks()

    def describe(self) -> dict[str, object]:
        """The entries of the spec that define this estimator's numbers."""
        return {"estimator": self.name, "block": self.block, "grid": self.grid}

    @abc.abstractmethod
    def score_group(self, group: WindowGroup) -> IndexedScores:
        """Score one group of windows; yield (row, score) of each as it is finished."""

    def reveal(
        self, group: WindowGroup, rule: UnmaskingRule, lanes: Iterable[Lanes], scores: Accumulator, **sampling: Any
    ) -> IndexedScores:
        """(row, score) of each window of a group as it is finished; `sampling`: other arguments of `Reveal`."""
        return iter(Reveal(group, rule, lanes, scores, self.budget, self.counts, self.row_checks, **sampling))

    def use_single_rows(self) -> None:
        """Evaluate one row in each network call."""
        self.budget = Budget(1, 1)

    # ------------------------------------------------------------ windows in, scores out

    def log_prob(self, windows: Sequence[Window]) -> list[Score]:
        """The score of each window, in order."""
        with self.one_run():
            scores = dict(self.stream(windows))
        return [scores[n] for n in range(len(windows))]

    def one_run(self) -> contextlib.AbstractContextManager[None]:
        """A run that returns when all is done, so that nobody may change the network before its end."""
        return self.row_checks.repeating(self.denoiser, self.counts)

    def count_into(self, counts: Counts) -> None:
        """Add what is computed from now on to `counts`, which several estimators may share."""
        self.counts = counts

    def stream(self, windows: Sequence[Window], in_order: bool = False) -> IndexedScores:
        """Yield (index, score) of each window as it is finished, in any order.

        `in_order`: take the windows in the order given, a few network calls at once, so that the first are finished
        early; by default the longest are first.

        Equal windows are scored once, and equal rows of different windows are evaluated once.

        Raises:
            DuelError: If a window cannot be scored; raised before any is, and the message names it.
        """
        self.check(windows)
        return self._scored(windows, in_order)

    def check(self, windows: Sequence[Window]) -> None:
        """Raise DuelError, naming the window, for one that cannot be scored."""
        check_windows(self.denoiser, self.block, self.grid, windows)
        for n, window in enumerate(windows):
            if window.known and not self.takes_known:
                raise DuelError(f"Window {n} has known target positions, which estimator={self.name} does not take.", n)

    @torch.inference_mode()
    def _scored(self, windows: Sequence[Window], in_order: bool) -> IndexedScores:
        equal: dict[Window, list[int]] = {}
        for n, window in enumerate(windows):
            equal.setdefault(window, []).append(n)
        for window, indices in equal.items():
            if not window.target:
                yield from ((n, self.empty_score) for n in indices)
        for group in self.groups(windows, [indices[0] for indices in equal.values()], in_order=in_order):
            for row, score in self.score_group(group):
                window = group.windows[row]
                self.counts.add(score, window.scored_tokens)
                yield from ((n, score) for n in equal[window])
        self.row_checks.compare(self.counts)  # the last ones that were drawn

    def groups(
        self,
        windows: Sequence[Window],
        window_indices: Sequence[int],
        generating: bool = False,
        in_order: bool = False,
    ) -> Iterator[WindowGroup]:
        """The windows at these indices, opened in groups; those with an empty target are left out."""
        chosen = [windows[n] for n in window_indices]
        buckets = self._buckets(chosen) if in_order else [0] * len(chosen)
        early = EARLY if in_order and self._takes_small_calls(chosen) else 0
        for stage in range(early + 1):  # each of the first buckets alone, then all others together
            members = [n for n, bucket in enumerate(buckets) if min(bucket, early) == stage]
            same_length = not self.denoiser.honours_padding
            for part in groups([chosen[n] for n in members], same_length, [buckets[n] for n in members]):
                of_group = [members[n] for n in part]
                yield self.open([chosen[n] for n in of_group], [window_indices[n] for n in of_group], generating)

    def open(self, windows: list[Window], window_indices: list[int], generating: bool = False) -> WindowGroup:
        """One group of windows; `window_indices`: of each among all that are scored."""
        rows = Rows.from_windows(windows, self.denoiser.device, self.noise_seed)
        return WindowGroup(windows, window_indices, rows, partial(self.denoiser.open, generating=generating))

    def _buckets(self, windows: Sequence[Window]) -> list[int]:
        """The bucket of each window. The first fills a quarter of a network call, so that it is finished early.

        Each of the next fills twice as much, up to `BUCKET` calls: sorting its windows by length saves padding.
        """
        numbers: list[int] = []
        bucket, work, calls = 0, 0, 0.25
        for window in windows:
            more = self._work(window)
            if work and work + more > calls * self.budget.tokens:
                bucket += 1
                work = 0
                calls = min(2 * calls, BUCKET)
            numbers.append(bucket)
            work += more
        return numbers

    def _takes_small_calls(self, windows: Sequence[Window]) -> bool:
        """True if the first calls may be small: on a CPU time goes by tokens, elsewhere if there are many others."""
        work = sum(map(self._work, windows))
        return self.denoiser.device.type == "cpu" or work > MANY * self.budget.tokens

    def _work(self, window: Window) -> int:
        """The network tokens of one step of all lanes of a window."""
        whole_rows = self.denoiser.attention == "bidirectional"
        return self.lanes(window) * (window.length if whole_rows else self.denoiser.block or 1)

    # ------------------------------------------------------------ for subclasses: blocks and lanes

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        """(first column, width) of each block of a window that has a position to score."""
        spans = blocks(len(window.context), len(window.target), self.block, self.grid)
        if not window.known:
            return spans
        masked = {len(window.context) + index for index in set(range(len(window.target))) - set(window.known)}
        return [(start, width) for start, width in spans if not masked.isdisjoint(range(start, start + width))]

    def block_spans(self, group: WindowGroup) -> list[BlockSpan]:
        """Every block of every window."""
        return [(row, *span) for row, window in enumerate(group.windows) for span in self.blocks(window)]

    def batches(
        self, group: WindowGroup, spans: Sequence[BlockSpan], size: Callable[[int], int], rule: UnmaskingRule
    ) -> Iterator[tuple[Lanes, int]]:
        """Fresh lanes of some blocks after the other, `size(room)` at once, and `room`: how many fit a network call."""
        done = 0
        while done < len(spans):
            room = self.budget.room(group.view, rule, group.fresh(spans[done : done + 1]))
            here = slice(done, done + max(1, size(room)))
            yield group.fresh(spans[here]), room
            done = here.stop

    def block_numbers(self, lanes: Lanes) -> torch.Tensor:
        """The number of each lane's block in its window, (R,)."""
        return -((lanes.origin - lanes.start) // self.block) if self.block else torch.zeros_like(lanes.row)

    def lanes(self, window: Window) -> int:
        """The number of lanes of a window that can be evaluated together."""
        return len(self.blocks(window))
