"""What an audit says of right and wrong values, recounted by hand: windows, totals, texts, networks."""

import dataclasses
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from toys import Toy

from lm_eval_duel.audit import network_check, replay, verify
from lm_eval_duel.audit.checked import (
    ALONE,
    REFERENCE,
    RUNS_RULE,
    CheckedWindow,
    Recomputed,
    distance,
    unequal,
)
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.recompute import _wrong_tie
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Value
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit import denoiser as dit
from lm_eval_duel.errors import counted, told_apart
from lm_eval_duel.text.unigram import unigram_perplexity, unigram_sentence

# ---------------------------------------------------------------- one window


@pytest.mark.parametrize("tokens", [1, 10, 1000, 10000])
def test_a_window_differs_just_above_the_tolerance(tokens):
    window = Window((), (0,) * tokens)
    noise = nats_tolerance(tokens)
    for off, differs in ((0.0, False), (0.99 * noise, False), (1.01 * noise, True), (math.inf, True), (math.nan, True)):
        for sign in (1, -1):
            compared = CheckedWindow("x", window, -1.0, Recomputed(-1.0 + sign * off))
            assert compared.tokens == tokens
            assert compared.tolerance == noise
            assert compared.differs == differs

    with_other_picks = Recomputed(-1.0, other_picks=2, own_order=-3.0, problems=("p",))
    compared = CheckedWindow("x", window, -1.0, with_other_picks)
    assert compared.problems == ["2 picks other than the rule's", "p"]
    place = "at step 1: token 3, not 4"
    again = dataclasses.replace(compared.again, first_other_pick=place)
    [problem, _] = dataclasses.replace(compared, again=again).problems
    assert place in problem
    assert compared.difference == 0.0
    assert compared.order_difference == 2.0
    assert compared.right_log_prob == -3.0, "the run's order is wrong, and so is the value along it"

    with_ties = CheckedWindow("x", window, -1.0, Recomputed(-1.0, other_picks=0, ties=3, own_order=-3.0))
    assert not with_ties.problems
    assert with_ties.right_log_prob == -1.0, "the run's order is as right as another"
    assert not CheckedWindow("x", window, -math.inf, Recomputed(-math.inf)).problems


def test_distances():
    assert distance(1.0, 3.5) == 2.5
    assert distance(3.5, 1.0) == 2.5
    assert distance(-math.inf, -math.inf) == 0
    assert distance(-math.inf, -1.0) == math.inf
    assert distance(math.nan, 1.0) == math.inf
    assert distance(1.0, math.nan) == math.inf
    assert distance(math.nan, math.nan) == math.inf

    pairs = {"a": (1.0, 2.0), "b": (1.0, 1.5), "c": (math.nan, 0.0)}
    assert unequal(pairs, 0.5) == ["a is 1.0000, not 2.0000", "c is nan, not 0.0000"]


@pytest.mark.parametrize("apart", [2.0, 1e-3, 1.3e-5, 7e-9])
def test_two_numbers_that_differ_look_different(apart):
    one, other = told_apart(1.1627 + apart, 1.1627)
    assert float(one) - float(other) == pytest.approx(apart, rel=0.1)
    assert len(one.split(".")[1]) == len(other.split(".")[1]) >= 4
    assert told_apart(math.nan, -math.inf) == ("nan", "-inf")


def checked(*entries):
    """Windows of n tokens: (n, log-prob of the run, what was recomputed)."""
    windows = []
    for number, (tokens, nats, again) in enumerate(entries):
        window = Window((), (0,) * tokens)
        windows.append(CheckedWindow(f"window {number}", window, nats, again))
    return windows


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
    differences = {}  # along the run's order
    order_differences = {}  # along the rule's
    for checked_window in windows:
        again = checked_window.again
        own_order = again.log_prob if again.own_order is None else again.own_order
        differences[checked_window.where] = abs(checked_window.log_prob - again.log_prob)
        order_differences[checked_window.where] = abs(checked_window.log_prob - own_order)
    largest = max(windows, key=lambda checked_window: differences[checked_window.where])
    largest_order_difference = max(order_differences.values())
    routes = Counter(checked_window.again.route for checked_window in windows)
    differing = sum(checked_window in (EVERY[1], EVERY[3], EVERY[4]) for checked_window in windows)

    description = verify.describe(windows)
    assert description == {
        "windows": count,
        "tokens": sum(len(checked_window.window.target) for checked_window in windows),
        "routes": routes,
        "not_checked_independently": routes[ALONE],
        "largest_difference": differences[largest.where],
        "largest_order_difference": largest_order_difference,
        "where": description["where"],  # tested below
        "changed_picks": sum(checked_window.again.other_picks or 0 for checked_window in windows),
        "ties": sum(checked_window.again.ties or 0 for checked_window in windows),
        "differing_windows": differing,
    }

    text = verify.summary(windows)
    order_differs_at = max(order_differences, key=order_differences.get)
    parts = [
        f"verify: {count} window{'s' if count > 1 else ''} ",
        f"difference {largest_order_difference:.3g} nats along the rule's order in float32 ({order_differs_at})",
        f"{description['largest_difference']:.3g} nats along the run's order ({largest.where}",
        description["where"],
        f"{counted(description['changed_picks'], 'pick')} other ",
        f"{counted(description['ties'], 'tie')}; ",
        f"noise in {differing} window{'s' if differing != 1 else ''}",
    ]
    for part in parts:
        assert part in text
    assert text.endswith(f"; {routes[ALONE]} not checked independently") == (routes[ALONE] > 0)


SAME = f"{-4:.6f}"


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ([(3, -4.0, Recomputed(-4.0))], [SAME, "window 0"]),  # none differs
        ([(3, -4.0, Recomputed(-4.0, problems=("2 picks of a:B",)))], ["2 picks of a:B"]),
        ([(3, -4.0, Recomputed(-4.0, other_picks=2)), (3, -4.0, Recomputed(-4.0 - 1e-9))], ["2 picks", "window 0"]),
        ([(3, -4.0, Recomputed(-4.0, other_picks=2)), (3, -5.0, Recomputed(-5.5))], [f"not {-5.5:.4f}", "window 1"]),
    ],
)
def test_the_window_that_differs_most_is_named_with_its_problems(windows, said):
    """And not by two equal values."""
    windows = checked(*windows)
    where = verify.describe(windows)["where"]
    assert all(text in where for text in said)
    assert (SAME in where) == (SAME in said)
    assert where in verify.summary(windows)


def test_an_infinite_difference_is_null():
    description = verify.describe(checked((1, -math.inf, Recomputed(-1.0))))

    assert description["largest_difference"] is None
    assert description["largest_order_difference"] is None


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize(
    ("relative", "unlike", "wrong"),
    [
        (True, None, False),
        (True, 0.0, False),
        (True, 1e-5, False),
        (True, 0.01, False),
        (True, 0.0101, True),
        (True, 1.0, True),
        (False, None, False),
        (False, 0.0, False),
        (False, 1e-4, False),
        (False, 1.0, False),
        (False, 0.99e-4, True),
        (False, 1e-9, True),
    ],
)
def test_whether_a_row_of_masks_ties(relative, unlike, wrong):
    """Under relative positions it does; `unlike`: how far its predictions differ from each other."""
    problems = _wrong_tie(SimpleNamespace(relative_positions=relative, difference_under_masks=unlike))

    assert bool(problems) == wrong
    if wrong:
        assert f"{unlike:.2g}" in problems[0]


@pytest.mark.parametrize("behind", [0.0, 0.5, 0.99, 1.01, 2.0])
@pytest.mark.parametrize("second", [0.5, 0.99, 1.01, 2.0])
def test_greedy_tokens_within_a_tie(behind, second):
    """In near ties: how far the token is behind the top one, and the second token."""
    followed = replay.Followed(SimpleNamespace(relative_positions=False), {}, None)
    log_p = torch.tensor([0.0, -second * NEAR_TIE, -behind * NEAR_TIE, -9.0], dtype=torch.float64)
    top, next_top, *_ = log_p.sort(descending=True).values.tolist()

    followed._compare_with_top(log_p, 2)

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
    tokens = sum(map(len, documents))
    words = sum(len(re.split(r"\s+", text)) for text in documents)
    size = sum(len(text.encode()) for text in documents)
    counts = {
        "token_perplexity": (tokens, "tokens"),
        "word_perplexity": (words, "words"),
        "byte_perplexity": (size, "bytes"),
        "bits_per_byte": (size, "bytes"),
    }

    task = of_task(documents)
    assert task.documents == count
    assert task.problems == []
    assert task.tokens == tokens
    assert task.words == words
    assert task.bytes == size
    assert task.counts == (counts if count else {})

    if not count:
        assert task.differing({}) == []
        return
    nats = 1.5 * tokens
    printed = {}
    for metric, (number, _) in counts.items():
        printed[metric] = value_of(metric, nats / number)
        assert task.value(metric) == pytest.approx(printed[metric])
    assert task.differing(printed) == []

    noise = nats_tolerance(tokens)
    for metric, (number, unit) in counts.items():
        just_below = value_of(metric, (nats + 0.9 * noise) / number)
        assert not task.differing({metric: just_below})

        just_above = value_of(metric, (nats + 1.1 * noise) / number)
        [problem] = task.differing({metric: just_above})
        of_run, expected = told_apart(just_above, printed[metric])
        assert f"{of_run}, not {expected} over {number} {unit}" in problem


def value_of(metric, nats):
    """A metric of nats per unit."""
    return nats / math.log(2) if metric == "bits_per_byte" else math.exp(nats)


@pytest.mark.parametrize("vocabulary", [2, 300])
@pytest.mark.parametrize("count", range(len(DOCUMENTS) + 1))
def test_the_unigram_by_hand(count, vocabulary):
    """Each token by the others, of which there are as many more as there are distinct tokens."""
    tokens = "".join(DOCUMENTS[:count])
    kinds = len(set(tokens))
    added = kinds / max(vocabulary, kinds)  # to the count of each token
    nats = []
    for token in tokens:
        others = tokens.count(token) - 1
        nats.append(-math.log((others + added) / (len(tokens) - 1 + kinds)))
    unigram = math.exp(math.fsum(nats) / len(nats)) if nats else math.nan

    task = of_task(DOCUMENTS[:count], vocabulary=vocabulary)
    assert unigram_perplexity(task.ids, vocabulary) == pytest.approx(unigram, nan_ok=True)
    assert task.warnings({}) == []

    alike = max(vocabulary, kinds)  # the perplexity if all tokens are equally probable
    limit = min(unigram, alike)
    assert task.warnings({"token_perplexity": 0.99 * limit}) == []
    worse = 1.01 * limit
    problems = task.warnings({"token_perplexity": worse})
    assert bool(problems) == (count > 0)
    if problems:
        without_context = f"has {alike:,}" if alike < unigram else f"has {unigram:.2f}"
        assert f"is {worse:.2f}," in problems[0]
        assert without_context in problems[0]


def test_a_perplexity_above_the_number_of_tokens_is_odd_on_any_text():
    """In a text of different tokens none is among the others, so the unigram is of no use."""
    task = of_task(["abcdefgh"], vocabulary=10)
    assert unigram_perplexity(task.ids, 10) > 10
    assert "too short" in unigram_sentence(task.ids, 10)
    assert "too short" not in unigram_sentence(of_task(["aaaabbbb"], vocabulary=10).ids, 10)
    assert task.warnings({"token_perplexity": 10.1}) and not task.warnings({"token_perplexity": 9.9})


def test_lines_for_the_terminal():
    task = of_task(DOCUMENTS[:2])
    printed = {"token_perplexity": 4.5, "bits_per_byte": 2.0, "other": 1.0}
    assert task.lines(printed, Value(0.0)) == [
        "From the text of task, by the tokenizer and the reference alone (a likelihood):",
        f"  2 documents, 10 bytes, 4 words, 8 tokens, {-1.5 * 8:.4f} nats",
        f"  token_perplexity  {math.exp(1.5):14.4f}   printed         4.5000",
        f"  bits_per_byte     {1.5 * 8 / 10 / math.log(2):14.4f}   printed         2.0000",
        f"  a unigram of these texts has a token perplexity of {unigram_perplexity(task.ids, 300):.4f}",
    ]
    task.alone = 1
    assert task.lines(printed, Value(0.0))[1:] == [
        "  2 documents, 10 bytes, 4 words, 8 tokens",
        "  log-probabilities and perplexities: not checked independently (1 window)",
    ]


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize(
    ("bos", "prefix", "suffix"),
    [
        ("none", (), ()),
        ("first", (), ()),
        ("given", (91,), ()),
        ("given", (91, 92), (93,)),
        ("official", (91,), (93,)),
        ("scored", (91,), (93,)),
        ("auto", (91,), (93,)),
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


# ---------------------------------------------------------------- networks


def test_verdicts_on_networks():
    for one, row, differs in (
        (0.0, 0.0, False),
        (0.0, 1e-2, False),
        (1e-3, 0.0, False),
        (1e-3, 1e-2, False),
        (1.01e-3, 0.0, True),
        (0.0, 1.01e-2, True),
        (math.nan, 0.0, True),
        (0.0, math.nan, True),
        (math.inf, math.inf, True),
    ):
        verdict = network_check.Compared("A", 2, 34, one, row, 1e-3, 1e-2)
        assert verdict.differs == differs
        words = "DIFFERS from A" if differs else "equals A"
        assert str(verdict) == (
            f"network {words} at 34 positions of 2 rows: largest difference of a log-probability {one:.2g} nats "
            f"(tolerance 0.001), and of the sum of a row {row:.2g} (tolerance 0.01)"
        )

    for held, differs in ((1000, False), (500, False), (499, True), (0, True)):
        verdict = network_check.Weights(held, 1000)
        assert verdict.differs == differs
        assert f"weights {'DIFFER from' if differs else 'equal'} those" in str(verdict)
        assert f"holds {held:,} of their 1,000 numbers" in str(verdict)


@pytest.mark.parametrize("honours", [False, True])
@pytest.mark.parametrize("length", [4, 8, 9, 20, 200])
def test_the_rows_and_positions_of_a_comparison(length, honours):
    """A long row and a short one, and one with a suffix from nine positions on. The second row is off by half a nat.

    About half of each target is masked, and every masked position of a row is compared.
    """
    toy = Toy(length=length, honours_padding=honours)
    most = min(length, 128)
    quarter = most // 4
    lengths = [(quarter, most - quarter, 0), (1, most // 2 - 1, 0)]
    if most > 8:
        lengths.append((quarter, most // 2 - quarter, quarter))
    windows = network_check.rows_of(toy)
    assert [(len(window.context), len(window.target), len(window.suffix)) for window in windows] == lengths

    masked = []  # the columns of each row

    class OffInTheSecondRow(network_check.OtherProgram):
        def forward(self, shown, seen):
            columns = (shown == self.m).nonzero()[:, 0]
            masked.append(columns)
            logits = toy.features(shown[None], None)[0]
            if len(masked) == 2:
                logits[columns, 0] += 0.5
            return logits

    compared = network_check.compared_rows(toy, OffInTheSecondRow).compared("same", toy)
    assert compared.rows == len(windows)
    assert compared.positions == sum(map(len, masked))
    for columns, window in zip(masked, windows, strict=True):
        assert 0 < len(columns) <= len(window.target)

    columns = masked[1]
    row = torch.tensor([*windows[1].context, *windows[1].target])
    shown = row.index_fill(0, columns, toy.mask_id)
    before = toy.features(shown[None], None)[0][columns, : toy.tokens].log_softmax(1)  # (C, V)
    after = (before + torch.tensor([0.5, 0.0, 0.0])).log_softmax(1)
    of_targets = (after - before).gather(1, row[columns][:, None])
    assert compared.difference == pytest.approx(float((after - before).abs().max()), rel=1e-6)
    assert compared.in_a_row == pytest.approx(abs(float(of_targets.sum())), rel=1e-6)
    assert compared.tolerance == nats_tolerance(1)
    assert compared.row_tolerance == 2 * nats_tolerance(min(map(len, masked)))


def test_tolerances_of_networks():
    """Half precision and other devices have larger ones; half precision decides."""
    deviations = network_check.Deviations()
    deviations.add(0, torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([0, 1, 0]))

    for device, is_half, least in (("cpu", False, 0.0), ("cuda", False, 1e-3), ("cpu", True, 0.5), ("cuda", True, 0.5)):
        network = SimpleNamespace(device=torch.device(device))
        compared = deviations.compared("x", network, is_half)
        assert compared.tolerance == max(least, nats_tolerance(1))
        assert compared.row_tolerance == max(least, 2 * nats_tolerance(3))


@pytest.mark.parametrize("t", [0.0, 1e-4, 0.05, 0.1, 0.5, 0.9, 0.95, 0.9999, 1.0])
def test_noise_levels(t):
    """Beside those of the networks' own classes."""

    def network_of(kind, **attributes):
        network = kind.__new__(kind)
        for name, value in attributes.items():
            setattr(network, name, value)
        return network

    networks = [
        network_of(dit.NoisedDiT, family="duo"),
        network_of(dit.NoisedDiT, family="udlm"),
        network_of(dit.GIDD, family="gidd", t_eps=0.06),
        network_of(dit.SEDD, family="sedd"),
        network_of(dit.SEDD, family="sedd", sigma="schedule"),
    ]
    for network in networks:
        level = float(network.noise_level(torch.tensor([t], dtype=torch.float64)))
        assert network_check.noise_level(network, t) == pytest.approx(level, rel=1e-9, abs=1e-12), network.family
    assert network_check.noise_level(SimpleNamespace(family="mdlm"), t) == 0.0
