"""What a view says of its work: network calls, rows, and the cost of a lane, recounted at the network itself."""

import itertools

import pytest
import torch
from attends import Attends
from toys import Toy

from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached import kept_keys
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.estimators.duel import DuelEstimator

WINDOWS = [
    Window((), (0, 1, 2, 0, 1, 2, 0)),
    Window((), (0, 1, 2, 2, 1, 2, 1)),  # its first blocks have states of the one above
    Window((1, 2), (2, 0, 1), (0,)),
    Window((2,), (1,)),
    Window((1, 2), (2, 0, 1), (0,), tail=2),
]
MANY = [Window((a, b), (c, a, b, 2, c)) for a, b, c in itertools.product(range(3), repeat=3)]  # several begin together
MADE = {
    "plain": Attends,
    "without stream": Toy,
    "guided": lambda: Guided(Toy(), 0.5),
    "dual": lambda: Cached(Attends(), "dual"),
    "prefix": lambda: Cached(Attends(), "prefix"),
    "guided, dual": lambda: Guided(Cached(Attends(), "dual"), 0.5),
    "guided, prefix": lambda: Guided(Cached(Attends(), "prefix"), 0.5),
}


class Recorded:
    """The network calls of a denoiser, (rows, positions of a row) each."""

    def __init__(self, monkeypatch):
        self.calls = []
        for owner, name in ((Attends, "stream"), (Toy, "features")):
            monkeypatch.setattr(owner, name, self._recording(getattr(owner, name)))

    def _recording(self, call):
        def recorded(denoiser, ids, *more, **named):
            self.calls.append(tuple(ids.shape))
            return call(denoiser, ids, *more, **named)

        return recorded


@pytest.mark.parametrize("batch_size", [1, None])
@pytest.mark.parametrize("name", MADE)
def test_calls_and_rows_are_those_of_the_network(name, batch_size, monkeypatch):
    denoiser = MADE[name]()
    windows = WINDOWS if batch_size else [*WINDOWS, *MANY]
    recorded = Recorded(monkeypatch)
    for rule in ("greedy:k=2", "threshold:mu=0.4"):
        estimator = DuelEstimator(denoiser, rule, 3, batch_size=batch_size)
        recorded.calls.clear()

        estimator.log_prob(windows)

        assert estimator.counts.forwards == len(recorded.calls), rule
        assert estimator.counts.rows == sum(rows for rows, _ in recorded.calls), rule


@pytest.mark.parametrize("name", MADE)
def test_a_lane_costs_the_positions_that_its_later_steps_evaluate(name, monkeypatch):
    """Of a network that is small enough that its keys weigh less than its positions."""
    denoiser = MADE[name]()
    recorded = Recorded(monkeypatch)
    for window in WINDOWS:
        rows = Rows.from_windows([window], denoiser.device)
        view = denoiser.open(rows)
        for span in blocks(len(window.context), len(window.target), 3, "target"):
            lane = Lanes.fresh(rows, *torch.tensor([(0, *span)]).unbind(1))
            if span[1] < 2:
                continue
            view(lane)  # its first step
            later = lane.show(rows.targets(lane), torch.arange(lane.masked.shape[1])[None] > 0)
            recorded.calls.clear()
            view(later)
            evaluated = sum(rows * positions for rows, positions in recorded.calls)
            assert int(view.cost(lane)) == evaluated, (window, span)


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_keys_that_take_more_memory_than_positions_are_the_cost(cache):
    """A position's keys and values count as `kept` numbers, and 2^13 of them as a position."""
    denoiser = Cached(Attends(), cache)
    rows = Rows.from_windows(WINDOWS[:1], denoiser.device)
    lane = Lanes.fresh(rows, *torch.tensor([(0, 3, 3)]).unbind(1))
    assert denoiser.kept == 2 * 2 * 8  # keys and values of two layers of width 8
    evaluated = {"dual": 3, "prefix": 4}[cache]
    for kept, cost in ((32, evaluated), (1 << 13, 7), ((1 << 13) + 1, 8), (10 << 13, 70)):
        denoiser.kept = kept
        assert denoiser.open(rows).cost(lane).tolist() == [max(cost, evaluated)]


def test_a_slot_is_kept_while_a_lane_needs_it():
    """The same blocks in another order, more of them, fewer: what is missing is exactly what is not there."""
    slots = kept_keys.Slots(4, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    kept = {}  # the block whose keys each slot has
    for _ in range(200):
        count = int(torch.randint(1, 6, (1,), generator=draw))
        asked = torch.randperm(9, generator=draw)[:count]
        blocks_asked = asked.tolist()

        slot, missing = slots.arrange(asked)
        places = slot.tolist()
        assert sorted(places) == list(range(count))
        assert missing.tolist() == [block not in kept.values() for block in blocks_asked]

        for block, place, is_missing in zip(blocks_asked, places, missing.tolist(), strict=True):
            if is_missing:
                keys = torch.full((1, 2, 4, 3), float(block))
                features = torch.full((1, 2, 5), block)
                slots.fill(torch.tensor([place]), torch.tensor([block]), features, [(keys, -keys)])
            held_keys, held_values = slots.layers[0]
            assert (held_keys[place] == block).all()
            assert (held_values[place] == -block).all()
            assert (slots.features[place] == block).all()

        # the slots behind those of this call keep what they have, unless it moved into one of them
        for place, block in list(kept.items()):
            if place < count or block in blocks_asked:
                del kept[place]
        kept.update(zip(places, blocks_asked, strict=True))
