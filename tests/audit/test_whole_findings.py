"""What an audit says of right and wrong values, recounted by hand: windows, totals, texts, draws, networks."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from toys import Toy

from lm_eval_duel.audit import contradictions, network_check, replay, verify
from lm_eval_duel.audit.checked import ALONE, REFERENCE, RUNS_RULE, CheckedWindow, Recomputed, distance, unequal
from lm_eval_duel.audit.estimates import SMALL
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.recompute import _wrong_tie
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit import denoiser as dit
from lm_eval_duel.estimators.arguments import ElboArguments, TwoPhaseArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.two_phase import TwoPhase

# ---------------------------------------------------------------- one window


@pytest.mark.parametrize("tokens", [1, 10, 1000, 10000])
def test_a_window_differs_just_above_the_tolerance(tokens):
    window = Window((), (0,) * tokens)
    noise = nats_tolerance(tokens)
    for off, differs in ((0.0, False), (0.99 * noise, False), (1.01 * noise, True), (math.inf, True), (math.nan, True)):
        for sign in (1, -1):
            each = CheckedWindow("x", window, -1.0, Recomputed(-1.0 + sign * off))
            assert (each.tokens, each.tolerance, each.differs) == (tokens, noise, differs)
    picks = CheckedWindow("x", window, -1.0, Recomputed(-1.0, other_picks=2, own_order=-3.0, problems=("p",)))
    assert picks.problems == ["2 picks that are not the rule's", "p"]
    assert (picks.difference, picks.order_difference) == (0.0, 2.0)
    assert not CheckedWindow("x", window, -1.0, Recomputed(-1.0, other_picks=0, ties=3)).problems
    assert not CheckedWindow("x", window, -math.inf, Recomputed(-math.inf)).problems


def test_distances():
    assert distance(-math.inf, -math.inf) == 0 and distance(-math.inf, -1.0) == math.inf
    assert distance(math.nan, 1.0) == distance(1.0, math.nan) == distance(math.nan, math.nan) == math.inf
    assert distance(1.0, 3.5) == distance(3.5, 1.0) == 2.5
    assert unequal({"a": (1.0, 2.0), "b": (1.0, 1.5), "c": (math.nan, 0.0)}, 0.5) == [
        "a is 1, not 2",
        "c is nan, not 0",
    ]


def checked(*entries):
    """Windows of n tokens: (n, log-prob of the run, what was recomputed)."""
    return [
        CheckedWindow(f"window {n}", Window((), (0,) * tokens), nats, again)
        for n, (tokens, nats, again) in enumerate(entries)
    ]


EVERY = checked(
    (3, -4.0, Recomputed(-4.0, REFERENCE, 0, 1)),
    (5, -6.0, Recomputed(-6.25, REFERENCE, 2, 2, own_order=-6.5)),
    (7, -8.0, Recomputed(-8.0, RUNS_RULE, 0, 0, own_order=-9.0)),
    (2, -1.0, Recomputed(-1.125, ALONE, why_alone="why")),
    (4, -2.0, Recomputed(-2.0, REFERENCE, problems=("stderr is 1, not 2",))),
)


@pytest.mark.parametrize("count", range(1, len(EVERY) + 1))
@pytest.mark.parametrize("last", [False, True])
def test_a_summary_counts_every_window(count, last):
    """The first or the last `count` windows; the parts of the summary are those of the description."""
    windows = EVERY[-count:] if last else EVERY[:count]
    found = verify.describe(windows)
    largest = max(windows, key=lambda each: abs(each.log_prob - each.again.log_prob))
    orders = {}
    for each in windows:
        own = each.again.log_prob if each.again.own_order is None else each.again.own_order
        orders[each.where] = abs(each.log_prob - own)
    routes = Counter(each.again.route for each in windows)
    differing = sum(each in (EVERY[1], EVERY[3], EVERY[4]) for each in windows)
    assert found == {
        "windows": count,
        "tokens": sum(len(each.window.target) for each in windows),
        "routes": routes,
        "not_checked_independently": routes[ALONE],
        "largest_difference": abs(largest.log_prob - largest.again.log_prob),
        "largest_order_difference": max(orders.values()),
        "where": f"{largest.where}: {largest.log_prob:.6f} in the run, {largest.again.log_prob:.6f} by "
        f"{largest.again.route}",
        "changed_picks": sum(each.again.other_picks or 0 for each in windows),
        "ties": sum(each.again.ties or 0 for each in windows),
        "differing_windows": differing,
    }
    text = verify.summary(windows)
    where = max(orders, key=orders.get)
    for part in (
        f"verify: {count} window{'s' if count > 1 else ''} ",
        f"difference {max(orders.values()):.3g} nats along the rule's order in float32 ({where})",
        f"{found['largest_difference']:.3g} nats along the run's order ({found['where']})",
        f"{found['changed_picks']} picks ",
        f"{found['ties']} are its ties",
        f"noise in {differing} window{'s' if differing != 1 else ''}",
    ):
        assert part in text
    assert text.endswith(f"; {routes[ALONE]} not checked independently") == (routes[ALONE] > 0)


def test_an_infinite_difference_is_null():
    found = verify.describe(checked((1, -math.inf, Recomputed(-1.0))))
    assert (found["largest_difference"], found["largest_order_difference"]) == (None, None)


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize(
    ("relative", "unlike", "wrong"),
    [
        *[(True, unlike, False) for unlike in (None, 0.0, 1e-5, 0.01)],
        *[(True, unlike, True) for unlike in (0.0101, 1.0)],
        *[(False, unlike, False) for unlike in (None, 0.0, 1e-4, 1.0)],
        *[(False, unlike, True) for unlike in (0.99e-4, 1e-9)],
    ],
)
def test_whether_a_row_of_masks_ties(relative, unlike, wrong):
    found = _wrong_tie(SimpleNamespace(relative_positions=relative, unlike=unlike))
    assert bool(found) == wrong and (not wrong or f"{unlike:.2g}" in found[0])


@pytest.mark.parametrize("behind", [0.0, 0.5, 0.99, 1.01, 2.0])
@pytest.mark.parametrize("second", [0.5, 0.99, 1.01, 2.0])
def test_greedy_tokens_within_a_tie(behind, second):
    """In near ties: how far the token is behind the top one, and the second token."""
    followed = replay.Followed(SimpleNamespace(relative_positions=False), {}, None)
    log_p = torch.tensor([0.0, -second * NEAR_TIE, -behind * NEAR_TIE, -9.0], dtype=torch.float64)
    followed._compare_with_top(log_p, 2)
    top, next_top, *_ = log_p.sort(descending=True).values.tolist()
    assert followed.is_greedy == (behind < 1)
    assert followed.top_tokens_tie == (behind < 1 and top - next_top < NEAR_TIE)


# ---------------------------------------------------------------- from the text to the printed number


class Letters:
    """A tokenizer with an id for each character."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


DOCUMENTS = ["ab a", "\u00e9\u00e8 a", " b ", "aaaa bbbb\nc"]


def of_task(documents, bos="none", vocabulary=300, **more):
    task = FromText("task", Letters(), bos, 5, vocabulary=vocabulary, **more)
    for n, text in enumerate(documents):
        ids = [ord(letter) for letter in text]
        windows = [Window((), ids[start : start + 5]) for start in range(0, len(ids), 5)]
        task.add(f"document {n}", {"text": text}, text, windows, -1.5 * len(ids))
    return task


@pytest.mark.parametrize("count", range(len(DOCUMENTS) + 1))
def test_documents_are_counted_and_added_up(count):
    documents = DOCUMENTS[:count]
    task = of_task(documents)
    tokens = sum(map(len, documents))
    sizes = {
        "tokens": tokens,
        "words": sum(len(re.split(r"\s+", text)) for text in documents),
        "bytes": sum(len(text.encode()) for text in documents),
    }
    assert (task.documents, task.problems) == (count, [])
    assert {name: getattr(task, name) for name in sizes} == sizes
    units = {"token_perplexity": "tokens", "word_perplexity": "words", "byte_perplexity": "bytes"}
    units["bits_per_byte"] = "bytes"
    assert task.counts == {metric: (sizes[unit], unit) for metric, unit in units.items() if count}

    if not count:
        assert task.differing({}) == []
        return
    printed = {metric: math.exp(1.5 * tokens / sizes[unit]) for metric, unit in units.items()}
    printed["bits_per_byte"] = 1.5 * tokens / sizes["bytes"] / math.log(2)
    assert {metric: task.value(metric) for metric in printed} == pytest.approx(printed)
    assert task.differing(printed) == []
    noise = nats_tolerance(tokens)
    for metric, unit in units.items():
        nats = 1.5 * tokens / sizes[unit]
        for factor, differs in ((0.9, False), (1.1, True)):
            moved = nats + factor * noise / sizes[unit]
            value = moved / math.log(2) if metric == "bits_per_byte" else math.exp(moved)
            found = task.differing({metric: value})
            assert bool(found) == differs
            assert not found or f"{value:.4f}, not {printed[metric]:.4f} over {sizes[unit]} {unit}" in found[0]


@pytest.mark.parametrize("vocabulary", [2, 300])
@pytest.mark.parametrize("count", range(len(DOCUMENTS) + 1))
def test_the_unigram_by_hand(count, vocabulary):
    """Each token by the others, of which there are as many more as there are distinct tokens."""
    task = of_task(DOCUMENTS[:count], vocabulary=vocabulary)
    tokens = "".join(DOCUMENTS[:count])
    kinds = len(set(tokens))
    nats = [
        -math.log((tokens.count(each) - 1 + kinds / max(vocabulary, kinds)) / (len(tokens) - 1 + kinds))
        for each in tokens
    ]
    unigram = math.exp(math.fsum(nats) / len(nats)) if nats else math.nan
    assert task.unigram == pytest.approx(unigram, nan_ok=True)
    for factor, odd in ((0.99, False), (1.01, True)):
        found = task.odd({"token_perplexity": factor * unigram})
        assert bool(found) == (odd and count > 0)
        assert not found or f"{factor * unigram:.2f}, and a unigram of its texts has {unigram:.2f}" in found[0]
    assert task.odd({}) == []


def test_lines_for_the_terminal():
    task = of_task(DOCUMENTS[:2])
    printed = {"token_perplexity": 4.5, "bits_per_byte": 2.0, "other": 1.0}
    assert task.lines(printed) == [
        "From the text of task, by the tokenizer and the reference alone:",
        f"  2 documents, 10 bytes, 4 words, 8 tokens, {-1.5 * 8:.4f} nats",
        f"  token_perplexity  {math.exp(1.5):14.4f}   printed         4.5000",
        f"  bits_per_byte     {1.5 * 8 / 10 / math.log(2):14.4f}   printed         2.0000",
        f"  a unigram of these texts has a token perplexity of {task.unigram:.4f}",
    ]
    task.alone = 1
    assert task.lines(printed)[1:] == [
        "  2 documents, 10 bytes, 4 words, 8 tokens",
        "  log-probabilities and perplexities: not checked independently (1 window)",
    ]


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize(
    ("bos", "prefix", "suffix"),
    [
        *[("none", (), ()), ("first", (), ()), ("given", (91,), ()), ("given", (91, 92), (93,))],
        *[("official", (91,), (93,)), ("scored", (91,), (93,)), ("auto", (91,), (93,))],
    ],
)
def test_the_ids_that_are_scored_of_rows(bos, prefix, suffix, length):
    """By what is not scored of a row: all special tokens, the last position, only the end, or the first position."""
    ids = list(range(length))
    task = FromText("task", Letters(), bos, 5, prefix, suffix)
    room = 5 - len(prefix) - len(suffix)
    scored = []
    for start in range(0, length, room):
        row = [*prefix, *ids[start : start + room], *suffix]
        if bos == "official":
            row = row[:-1]
        elif bos == "scored":
            row = row[: len(row) - len(suffix)]
        elif bos == "first":
            row = row[1:]
        else:
            row = row[len(prefix) : len(row) - len(suffix)]
        scored += row
    assert task.scored_of_text(ids) == scored


# ---------------------------------------------------------------- draws


def all_draws(size):
    """Every way to mask positions of a block of `size`, and its probability if every number of them is as likely."""
    for count in range(1, size + 1):
        ways = list(itertools.combinations(range(size), count))
        for masked in ways:
            yield masked, 1 / size / len(ways)


class AllDraws(Elbo):
    """An ELBO whose draws are given."""

    given = ()

    def draws(self, window):
        return self.given


@pytest.mark.parametrize("size", range(1, 6))
def test_statistics_of_the_number_of_masks_are_exact(size):
    """Over all draws the deviations add up to 0, and their squares to the variance that is told."""
    elbo = AllDraws(Toy(), ElboArguments(16))
    window = Window((), (0,) * size)
    names = ("share of masked positions", "place of masked positions")
    means = dict.fromkeys(names, 0.0)
    squares = dict.fromkeys(names, 0.0)
    variances = dict.fromkeys(names, 0.0)
    spread = 0.0
    for masked, probability in all_draws(size):
        elbo.given = [[(masked, None)]]  # without a time
        found = contradictions.draw_statistics(elbo, [window])
        for name in names:
            means[name] += probability * found[name].deviation
            squares[name] += probability * found[name].deviation ** 2
            variances[name] += probability * found[name].variance
        spread += probability * found["spread of the share of masked positions"].deviation
        assert found["number of masked positions at a time"].variance == 0
    assert means == pytest.approx(dict.fromkeys(names, 0.0), abs=1e-12) and spread == pytest.approx(0, abs=1e-12)
    assert squares == pytest.approx(variances, abs=1e-12)


@pytest.mark.parametrize(("form", "eps"), [("ratio", 0.0), ("ratio", 0.01), ("score_entropy", 0.0)])
def test_statistics_of_times_are_exact(form, eps):
    """At a grid of times, and over all masks at each: the chance of a mask is the time, or SEDD's share of it."""
    elbo = AllDraws(Toy(), ElboArguments(16, "ratio", elbo_eps=eps))
    elbo.arguments = dataclasses.replace(elbo.arguments, elbo_form=form)
    size, grid = 3, 400
    window = Window((), (0,) * size)
    total = contradictions.Statistic()
    square = 0.0
    times = contradictions.Statistic()
    squares = {"share": 0.0, "spread": 0.0}
    for n in range(grid):
        t = eps + (1 - eps) * (n + 0.5) / grid
        chance = t * (1 - dit.NOISE_EPS) if form == "score_entropy" else t
        for count in range(size + 1):
            for masked in itertools.combinations(range(size), count):
                p = chance**count * (1 - chance) ** (size - count)
                elbo.given = [[(masked, t)]]
                found = contradictions.draw_statistics(elbo, [window])
                at_time = found["number of masked positions at a time"]
                total.add(p * at_time.deviation, p * at_time.variance)
                square += p * at_time.deviation**2
        share = found["share of masked positions"]
        spread = found["spread of the share of masked positions"]
        times.add(share.deviation, share.variance)
        squares["share"] += share.deviation**2 / grid
        squares["spread"] += spread.deviation**2 / grid
    assert total.deviation == pytest.approx(0, abs=1e-9) and square == pytest.approx(total.variance)
    assert times.deviation == pytest.approx(0, abs=1e-9)
    assert squares == pytest.approx({"share": 1 / 12, "spread": 1 / 180}, rel=1e-3)
    assert (share.variance, spread.variance) == pytest.approx((1 / 12, 1 / 180))


@pytest.mark.parametrize("drawn", list(itertools.product((False, True), repeat=3)))
def test_statistics_of_drawn_blocks(drawn):
    """Places after the last block of a window do not count."""
    estimator = TwoPhase.__new__(TwoPhase)
    estimator.arguments = TwoPhaseArguments(0.3)
    estimator.blocks = lambda window: [0, 2, 4]
    estimator.weights = lambda windows: torch.tensor([[each / 0.3 for each in (*drawn, True)]])
    found = contradictions.draw_statistics(estimator, [Window((), (0,) * 6)])["share of drawn blocks"]
    assert (found.deviation, found.variance) == pytest.approx((sum(drawn) - 3 * 0.3, 3 * 0.3 * 0.7))


def test_unlikely_statistics_are_named_with_their_side():
    statistics = {
        name: contradictions.Statistic(errors * 2.0, 4.0)
        for name, errors in (("a", 3.9), ("b", 4.1), ("c", -4.1), ("d", -3.9), ("e", 0.0))
    }
    statistics["none"] = contradictions.Statistic(5.0, 0.0)
    assert list(contradictions._unlikely(statistics)) == [
        "the b of the draws is 4.1 standard errors too large",
        "the c of the draws is 4.1 standard errors too small",
    ]


@pytest.mark.parametrize("states", [0, 14, 15, 16, 29, 30, 44, 45, 99])
def test_sums_over_orders_are_computed_while_they_are_cheap(states, monkeypatch):
    """A block of m positions has 2^m - 1 states; a window with a larger block is left out, and costs nothing."""
    monkeypatch.setattr(contradictions, "STATES", states)
    windows = [
        Window((), (0, 1, 2, 0)),
        Window((), (0,) * (SMALL + 1)),
        Window((), (1, 1, 2, 0)),
        Window((), (1, 2, 2, 0)),
    ]
    scored = [CheckedWindow("x", each, -1.0, Recomputed(-1.0), 0, Score(-1.0)) for each in windows]
    estimator = DuelEstimator(Toy(), "greedy", None)
    found = [n for n, _ in contradictions._over_all_orders(estimator, scored)]
    assert found == [0, 2, 3][: states // 15]


# ---------------------------------------------------------------- networks


def test_verdicts_on_networks():
    for one, row, differs in (
        *[(one, row, False) for one in (0.0, 1e-3) for row in (0.0, 1e-2)],
        *[(1.01e-3, 0.0, True), (0.0, 1.01e-2, True), (math.nan, 0.0, True), (0.0, math.nan, True)],
        (math.inf, math.inf, True),
    ):
        found = network_check.Compared("A", 2, 34, one, row, 1e-3, 1e-2)
        assert found.differs == differs
        words = "DIFFERS from A" if differs else "equals A"
        assert str(found) == (
            f"network {words} at 34 masked positions of 2 rows: largest difference of a log-probability {one:.2g} nats "
            f"(tolerance 0.001), and of the sum of a row {row:.2g} (tolerance 0.01)"
        )
    for held, differs in ((1000, False), (500, False), (499, True), (0, True)):
        found = network_check.Weights(held, 1000)
        assert found.differs == differs
        assert f"weights {'DIFFER from' if differs else 'equal'} those" in str(found)
        assert f"holds {held:,} of their 1,000 numbers" in str(found)


@pytest.mark.parametrize("honours", [False, True])
@pytest.mark.parametrize("length", [4, 8, 9, 20, 200])
def test_the_rows_and_positions_of_a_comparison(length, honours):
    """A long row and a short one, and one with a suffix from nine positions on. The second row is off by half a nat."""
    toy = Toy(length=length, honours_padding=honours)
    windows = network_check.rows_of(toy)
    most = min(length, 128)
    assert [(len(w.context), len(w.target), len(w.suffix)) for w in windows] == [
        (most // 4, most - most // 4, 0),
        (1, most // 2 - 1, 0),
        *([(most // 4, most // 2 - most // 4, most // 4)] if most > 8 else []),
    ]
    asked = []

    class Same(network_check.OtherProgram):
        def forward(self, shown, seen):
            asked.append([column for column, token in enumerate(shown.tolist()) if token == self.m])
            logits = toy.features(shown[None], None)[0]
            if len(asked) == 2:  # from log p to log(p / (p + q e)), of one token
                logits[asked[-1], 0] += 0.5
            return logits

    deviations = network_check.compared_rows(toy, Same)
    found = deviations.compared("same", toy)
    # about half of each target is masked, and every masked position of a row is compared
    assert (found.rows, found.positions) == (len(windows), sum(map(len, asked)))
    assert all(0 < len(columns) <= len(window.target) for columns, window in zip(asked, windows, strict=True))
    shown = torch.tensor([*windows[1].context, *windows[1].target])
    shown[asked[1]] = toy.mask_id
    before = toy.features(shown[None], None)[0][asked[1], : toy.tokens].log_softmax(1)
    after = (before + torch.tensor([0.5, 0.0, 0.0])).log_softmax(1)
    own = torch.tensor([*windows[1].context, *windows[1].target])[asked[1]]
    assert found.difference == pytest.approx(float((after - before).abs().max()), rel=1e-6)
    assert found.in_a_row == pytest.approx(abs(float((after - before).gather(1, own[:, None]).sum())), rel=1e-6)
    fewest = min(map(len, asked))
    assert (found.tolerance, found.row_tolerance) == (nats_tolerance(1), nats_tolerance(fewest))


def test_tolerances_of_networks():
    """Half precision and other devices have larger ones; half precision decides."""
    deviations = network_check.Deviations()
    deviations.add(0, torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    for device, is_half, least in (("cpu", False, 0.0), ("cuda", False, 1e-3), ("cpu", True, 0.5), ("cuda", True, 0.5)):
        found = deviations.compared("x", SimpleNamespace(device=torch.device(device)), is_half)
        assert found.tolerance == max(least, nats_tolerance(1)) and found.row_tolerance == max(least, nats_tolerance(3))


@pytest.mark.parametrize("t", [0.0, 1e-4, 0.05, 0.1, 0.5, 0.9, 0.95, 0.9999, 1.0])
def test_noise_levels(t):
    """Beside those of the networks' own classes."""

    def of(kind, **attributes):
        network = kind.__new__(kind)
        for name, value in attributes.items():
            setattr(network, name, value)
        return network, float(network.noise_level(torch.tensor([t], dtype=torch.float64)))

    networks = [
        of(dit.NoisedDiT, family="duo"),
        of(dit.NoisedDiT, family="udlm"),
        of(dit.GIDD, family="gidd", t_eps=0.06),
        of(dit.SEDD, family="sedd"),
        of(dit.SEDD, family="sedd", sigma="schedule"),
    ]
    for network, level in networks:
        assert network_check.noise_level(network, t) == pytest.approx(level, rel=1e-9, abs=1e-12), network.family
    assert network_check.noise_level(SimpleNamespace(family="mdlm"), t) == 0.0
