"""What the small functions of the core return, at the ends of their ranges: none, one, exactly the limit, one above.

They are proven where they are used, with a few values. Here none of their answers changes unseen.
"""

import functools
import itertools
import math
import signal

import golden
import pytest
import torch
from attends import Attends
from golden import answer
from toys import Toy

from lm_eval_duel.core import float_noise, row_checks, windows
from lm_eval_duel.core.batch_size import Budget, plan
from lm_eval_duel.core.decision import Decision
from lm_eval_duel.core.float_noise import choose_by_hash, difference, magnitude
from lm_eval_duel.core.lanes import blocks, groups
from lm_eval_duel.core.reveal import Interrupted
from lm_eval_duel.core.row_checks import Drift, LaneCheck, Mean, RowChecks
from lm_eval_duel.core.scores import Counts, Kind, Sample, Score, Value, perplexity, ratio, weaker
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.duel import DuelEstimator

check = functools.partial(golden.check_lines, __file__)
BOS = ("given", "scored", "official", "first", "none")


def shown(window):
    """A window as context | target | suffix, without commas."""
    parts = (window.context, window.target, window.suffix)
    return " | ".join("".join(map(str, part)) for part in parts)


def test_how_texts_are_cut():
    """Ids 1 to n in rows of 5; 8 and 9 are special tokens."""

    def cut(bos, n, prefix, suffix):
        windows_or_error = answer(windows.independent, range(1, n + 1), 5, prefix, suffix, bos)
        if isinstance(windows_or_error, str):
            return windows_or_error
        return "; ".join(map(shown, windows_or_error))

    lines = []
    for bos, (prefix, suffix) in itertools.product(BOS, [((), ()), ((8,), ()), ((8,), (9,))]):
        for n in (0, 1, 2, 3, 4, 5, 6, 9):
            lines.append(f"independent {bos} {prefix} {suffix}, {n} ids: {cut(bos, n, prefix, suffix)}")
    for bos, row in itertools.product(BOS, [(8, 9), (8, 1, 9), (8, 1, 2, 9)]):
        lines.append(f"of_row {bos} {row}: {shown(windows.from_row(row, 1, 1, bos))}")
        lines.append(f"of_row {bos} {row}, no special tokens: {shown(windows.from_row(row, 0, 0, bos))}")
    for n, capacity in itertools.product((0, 1, 2, 3, 4, 5), (1, 2, 3)):
        cut_up = windows.rolling(range(1, n + 1), 8, capacity, (9,))
        lines.append(f"rolling {n} ids by {capacity}: {'; '.join(map(shown, cut_up))}")
    for before, after, room in itertools.product((0, 1, 2, 5), (0, 1, 2, 5), (3, 4, 5, 7)):
        result = answer(windows.infilled, range(1, before + 1), (7, 7), range(1, after + 1), room, (8,), (9,))
        if isinstance(result, str):
            lines.append(f"infilled {before} 77 {after} in {room}: None, {result}")
        else:
            window, lost = result
            lines.append(f"infilled {before} 77 {after} in {room}: {shown(window)}, {lost}")
    for special in (3, 4, 5):
        lines.append(f"target_capacity 4, {special}: {answer(windows.target_capacity, 4, (1,) * special)}")
    check("windows", lines)


def test_how_targets_are_cut_into_blocks_and_windows_into_groups():
    lines = []
    for origin, target, block, grid in itertools.product((0, 1, 3), (0, 1, 3, 4), (None, 1, 3), ("target", "row")):
        spans = blocks(origin, target, block, grid)
        parts = windows.target_parts(Window((1,) * origin, (1,) * target), spans)
        slices = [(part.start, part.stop) for part in parts]
        lines.append(f"{target} from {origin} in {block} by {grid}: {spans} {slices}")

    layouts = ((1, 3), (0, 2), (2, 0), (0, 4), (3, 1), (1, 1))
    grouped = [Window((1,) * context, (2,) * target) for context, target in layouts]
    for same, buckets in itertools.product((False, True), (None, [0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0])):
        lines.append(f"groups, {same=}, {buckets=}: {groups(grouped, same, buckets)}")
    check("blocks", lines)


@pytest.mark.parametrize("known", [(3,), (-1,), (0, 1, 2), (0, 5)])
def test_known_positions_are_some_of_the_target(known):
    assert Window((), (1, 1, 1), known=(0, 2)).scored_tokens == 1
    keys = {Window((), (1, 1, 1), known=positions).key for positions in ((), (0,), (1,), (2,), (0, 2))}
    assert len(keys) == 5
    with pytest.raises(DuelError, match="0 to 2"):
        Window((), (1, 1, 1), known=known)


def values():
    """A value of each kind; with and without errors, seeds and notes; infinite."""
    for kind in Kind:
        yield Value(-2.5, kind=kind)
    yield Value(-2.5, 0.0, Kind.ESTIMATE, "of two")
    yield Value(-math.inf, 0.5, Kind.UPPER_BOUND, seeds=(-1.0, -math.inf))
    for count in (1, 2, 3, 8, 20):
        yield Value.from_seeds([-1.0, -2.5, -2.0, -7.0, *[-3.0] * 16][:count], note="over seeds")
    yield Value.from_seeds([-1.0, -math.inf])


def test_what_a_value_is_called_and_its_errors():
    lines = []
    names = ("is_exact", "is_bound", "is_likelihood", "may_exceed_one", "word", "doubt", "label", "interval_error")
    for n, value in enumerate(values()):
        entries = value.describe()
        for name in names:
            entries[name] = getattr(value, name)
        lines += golden.listed(f"value {n}", entries)
    value_template = Value(0.0, kind=Kind.UPPER_BOUND, note="of the spec")
    for entries in ({"log_prob": -1.0}, {"log_prob": -1.0, "kind": "estimate"}, {"log_prob": None}, {"reason": "x"}):
        lines.append(f"{entries} read: {Value.read(entries, value_template)}")
    for one, other in itertools.product(Kind, repeat=2):
        lines.append(f"{one.name} + {other.name}: {weaker(one, other).name}")
    for nll in (-1.0, 0.0, 709.0, 710.0):
        lines.append(f"perplexity({nll}) = {perplexity(nll):.10g}")
    sizes = ([1], [1, 0], [1, 2], [0, 2, 3], [0, 2, 0], [4, 5, 6])
    for size in sizes:
        lines += golden.listed(f"ratio of {size}", ratio([-1.0, -5.0, -3.5][: len(size)], size))
    lines += golden.listed("an infinite ratio", ratio([-1.0, -math.inf], [1, 2]))
    shown = (
        Score(-1.23456789, True, (0, 1), (-1.0, -0.23456789), 2, 0),
        Score(-1.23456789, stderr=0.0, kind=Kind.ESTIMATE),
        Score(-1.23456789, stderr=0.123456, kind=Kind.UPPER_BOUND, note="over seeds", near_ties=3),
        Sample(-1.23456789, token_logprobs=(-1.23456789,), nfe=1, tokens=(5,), tail=2),
    )
    lines += [repr(score) for score in shown]
    check("values", lines)


def test_what_a_run_counts():
    """A window with some near ties is one window, and what is not known of one is not known of all."""
    lines = []
    counts = Counts()
    for score in (
        Score(-1.0, nfe=3, near_ties=0, all_mask_starts=0),
        Score(-1.0, nfe=1, near_ties=1, all_mask_starts=2),
        Score(-1.0, nfe=2, near_ties=5, all_mask_starts=1),
        Score(-1.0, nfe=2),
        Score(-1.0, near_ties=4),
    ):
        counts.add(score, 7)
        lines += golden.listed(f"after {counts.windows}", counts)

    work = Counts(
        windows=1,
        forwards=2,
        rows=3,
        lane_steps=4,
        rows_checked=5,
        rows_differing=6,
        decisions=7,
        decisions_checked=8,
        decisions_differing=9,
    )
    counts.add_work(work)
    counts.add_work(work)
    check("counts", [*lines, *golden.listed("with others", counts)])


def test_the_size_of_a_call():
    lines = []
    for tokens, values, cost, each in itertools.product((1, 10, 30), (5, 40), (0, 3, 10, 11), (0, 10, 41)):
        rows = Budget(tokens, values).rows(cost, each)
        lines.append(f"{tokens} tokens, {values} values, {cost} and {each} a lane: {rows}")
    for length, size, most in itertools.product((8, 4096), (None, 1, 3, 700), (None, 1, 2, 400)):
        budget = plan(Rows(length), None, "target", size, most)
        lines.append(f"rows of {length}, {size}, at most {most}: {budget.tokens}")
    budget = Budget(5, 3)
    for _ in range(3):
        budget.halve(torch.device("cpu"))
        lines.append(f"halved: {budget.tokens} {budget.values}")
    check("budget", lines)


class Rows(Toy):
    """A network whose weights are not needed."""

    def __init__(self, length):
        self.max_length = length


class Broken(Toy):
    """Its output is NaN once token 2 shows in column 4."""

    def features(self, ids, real):
        features = super().features(ids, real)
        return features.masked_fill((ids[:, 4] == 2)[:, None, None], math.nan)


@pytest.mark.parametrize(
    ("block", "grid", "place"),
    [(2, "target", "1 4 0"), (None, "target", "1 0 4"), (2, "row", "1 3 1"), (8, "row", "1 0 4")],
)
def test_an_error_names_the_window_the_block_and_the_step(block, grid, place):
    """The target position at which a block begins, 0 if it begins inside the context."""
    windows = [Window((0,), (1, 1, 1, 1, 0)), Window((0,), (1, 1, 1, 2, 0))]
    with pytest.raises(NotFinite) as raised:
        DuelEstimator(Broken(), "left_to_right", block, grid=grid).log_prob(windows)
    numbers = " ".join(golden.NUMBER.findall(str(raised.value).partition("(Window")[2]))
    assert raised.value.window == 1
    assert numbers == place


def test_the_exit_code_of_a_signal_is_that_of_a_shell():
    assert Interrupted(signal.SIGINT).code == 130
    assert Interrupted(signal.SIGTERM).code == 143
    assert Interrupted(signal.SIGTERM).name == "SIGTERM"


# ---------------------------------------------------------------- what is evaluated again, and what float noise is


@pytest.mark.row_checks
def test_how_many_lanes_are_due():
    """In calls of several sizes, where each lane costs as much as a row, or a quarter of one."""
    lines = []
    for size, share in itertools.product((1, 3, 50, 4000), (1.0, 4.0)):
        counts = Counts()
        checks = RowChecks()
        due = []
        for _ in range(6):
            due.append(checks.number_due(counts, size, share))
            counts.lane_steps += size
            counts.rows_checked += due[-1]
        lines.append(f"calls of {size}, {share} lanes a row: {due}")
    checks = RowChecks()
    checks.first = []
    lines.append(f"of a later run: {checks.number_due(Counts(lane_steps=9000, rows_checked=900), 5, 1.0)}")
    checks.first = [None]
    lines.append(f"and one is drawn: {checks.number_due(Counts(lane_steps=9000, rows_checked=900), 5, 1.0)}")
    lines += [f"among {n}: {row_checks.checks_among(n):.10g}" for n in (0, 8, 9, 800, 801, 10_000)]
    check("checks", lines)


def test_what_is_float_noise():
    lines = [f"of {n} tokens: {float_noise.nats_tolerance(n):.10g}" for n in (0, 1, 100, 101, 10_000)]
    toy = Plain()
    for quantized, coarse, routed in itertools.product((False, True), repeat=3):
        toy.quantized = quantized
        toy.coarse = coarse
        toy.network = torch.nn.ModuleDict({"experts" if routed else "layers": torch.nn.Identity()})
        within = float_noise.tolerance(toy)
        within_few_rows = float_noise.tolerance(toy, few_rows=True)
        is_coarse = float_noise.is_coarse(toy)
        lines.append(f"{quantized=} {coarse=} {routed=}: {[within, within_few_rows, is_coarse]}")
    one = torch.tensor([[1.0, -4.0, math.inf, math.nan]])
    other = torch.tensor([[1.5, -4.0, math.inf, math.nan]])
    lines.append(f"differences: {difference(one, other, 0.25)} {difference(one, other.flip(1), 1.0)}")
    lines.append(f"of nothing: {difference(one[:0], other[:0], 1.0)}")
    small = torch.tensor([[0.25, -0.5], [math.nan, math.inf], [1.0, -3.0]])
    lines.append(f"sizes: {magnitude(small)[:, 0].tolist()} {magnitude(small, 0.1)[:, 0].tolist()}")
    three = choose_by_hash(3, torch.arange(9), 5)
    all_four = choose_by_hash(20, torch.arange(4))
    lines.append(f"drawn: {three.tolist()} {all_four.tolist()}")
    again = torch.ones(4, 1, dtype=torch.float64)
    for most, noise in itertools.product((1e-3, 0.05), (0.0, 1e-7, 1e-6, 1e-5, 1e-3)):
        lane = LaneCheck(None, lambda noise=noise: again + noise, again, 1.0, toy, 0, 1, "", most)
        lines.append(f"limit with {noise:g}, at most {most:g}: {lane.limit(again):.10g}")
    lines.append(f"limit of a lane alone: {lane._replace(in_call=None, ceiling=1e-3).limit(again):.10g}")
    margins = torch.tensor([0.0, 9.9e-5, 1e-4, 1.1e-4, math.inf, math.nan], dtype=torch.float64)
    pick = torch.ones(len(margins), 1, dtype=torch.bool)
    lines.append(f"near ties: {Decision(pick, margins).near_tie.tolist()} {Decision(pick).near_tie.tolist()}")
    check("noise", lines)


class Plain(Attends):
    """A network whose numbers are as coarse as it says."""

    coarse = False


def test_a_drift_takes_sixteen_changes_to_one_side():
    lines = []
    for count, change in itertools.product((1, 2, 15, 16, 17), (1e-6, 1e-3)):
        drift = Drift()
        mean = Mean()
        for n in range(count):
            mean.add(change * (1 + n % 2))
            before = torch.tensor([[1.0], [2.0], [3.0], [-1.0]], dtype=torch.float64)
            drift.add(before, before + change * (1 + n % 2), 10)
        lines.append(f"{count} of {change:g}: {drift.significant} {mean.beyond(6)} {mean.value:.8g} {mean.stderr:.8g}")
    check("drift", lines)
