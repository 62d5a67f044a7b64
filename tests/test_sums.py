"""Laws of what is said about sums: sizes add up, a ratio is taken in every draw, intervals hold the drawn errors.

Also the detokenizers of the benchmarks, beside the authors' functions written out, since they decide every word count.
"""

import math
from collections import Counter

import numpy as np
import pytest
import tiny
import torch

from lm_eval_duel import Duel
from lm_eval_duel.audit import verify
from lm_eval_duel.audit.checked import ALONE, CheckedWindow, Recomputed
from lm_eval_duel.core.scores import Counts, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.harness.progress import estimate
from lm_eval_duel.harness.stats import RunStats, TaskStats
from lm_eval_duel.library.results import TextEstimate
from lm_eval_duel.library.training import training_metrics
from lm_eval_duel.results.stats import gap_interval, with_errors
from lm_eval_duel.tasks import corpora, infilling
from lm_eval_duel.tasks.infilling import expected_calibration_error

TEXTS = ["a b c d", "the of and to", "m n"]


def test_a_total_has_the_sum_of_every_size(folder):
    duel = Duel.from_pretrained(folder, rule="greedy", block=4, device="cpu")
    parts = duel.estimate(TEXTS, sample=1.0)
    total = TextEstimate.total(parts)
    for size in ("tokens", "bytes", "blocks", "sampled_blocks"):
        assert getattr(total, size) == sum(getattr(part, size) for part in parts), size
    nats = math.fsum(part.log_prob for part in parts)
    assert total.log_prob == pytest.approx(nats)
    assert total.bits_per_byte == pytest.approx(-nats / math.log(2) / len("".join(TEXTS).encode()))


def test_ranks_keep_each_others_near_ties_and_documents():
    one = TaskStats()
    one.near_ties = {0, 2}
    one.documents = {0, 2}
    other = TaskStats()
    other.near_ties = {1}
    other.documents = {1, 3}
    one.merge(other)
    assert one.near_ties == {0, 1, 2}
    assert one.documents == {0, 1, 2, 3}


def test_counts_and_costs_of_ranks_add_up():
    """Also of one document, whose options two ranks have scored."""
    one = RunStats({"t": TaskStats(unknown=Counter({0: 2}))}, phases={"cached": {"nfe": 3}})
    other = RunStats(
        {"t": TaskStats(unknown=Counter({0: 1, 1: 1}))}, phases={"cached": {"nfe": 4}, "uncached": {"nfe": 5}}
    )
    one.merge(other)
    assert one.phases == {"cached": {"nfe": 7}, "uncached": {"nfe": 5}}
    assert one.tasks["t"].unknown == {0: 3, 1: 1}


def test_counts_of_verified_windows_add_up():
    window = Window((), (1,))
    checked = []
    for n in (1, 2):
        again = Recomputed(-1.0, other_picks=n, ties=n + 2, route=ALONE)
        checked.append(CheckedWindow(str(n), window, -1.0, again))
    entries = verify.describe(checked)
    assert entries["windows"] == 2
    assert entries["tokens"] == 2
    assert entries["changed_picks"] == 3
    assert entries["ties"] == 7
    assert entries["not_checked_independently"] == 2
    assert entries["differing_windows"] == 2


def test_a_window_with_several_near_ties_is_one_window_with_near_ties():
    counts = Counts()
    for near_ties in (0, 5, 2):
        counts.add(Score(-1.0, near_ties=near_ties), 9)
    assert counts.windows == 3
    assert counts.near_ties == 7
    assert counts.near_tie_windows == 2


def test_an_interval_of_the_final_value_shrinks_as_documents_are_finished():
    """Without replacement: sqrt(1 - n / N). With nearly all documents there is nearly nothing left to know."""
    values = [-1.0, -2.0, -3.0, -4.0, -9.0]
    sizes = [1] * 5

    def width(documents):
        value, low, high = estimate(values, sizes, documents)
        return math.log(high / value) + math.log(value / low)

    assert width(6) == pytest.approx(width(5_000_000) * math.sqrt(1 / 6), rel=1e-3)


# ---------------------------------------------------------------- intervals of comparisons


@pytest.mark.parametrize("others", [0, 1, 3])
def test_an_interval_of_a_difference_holds_the_drawn_errors(others):
    """Of two estimates on equal documents: 1.96 hypot of their errors, whoever stands beside them."""
    draws = np.random.default_rng(0).standard_normal(2000) * 1e-3
    rows = [draws, draws, *[-1000.0 * draws] * others]
    first, second, *_ = with_errors(rows, [0.3, 0.4, *[None] * others])
    assert float(np.std(first - second)) == pytest.approx(0.5, rel=0.1)


def test_gap_closed_is_a_ratio_in_every_draw():
    """If the closed part is the same share of the gap in all draws, its interval is that share."""
    random = np.random.default_rng(1)
    ar = 3.0 + 0.1 * random.standard_normal(500)
    elbo = ar + random.uniform(0.1, 2.0, 500)
    (low, high), remark = gap_interval(elbo, elbo - 0.4 * (elbo - ar), ar, 500)
    assert low == pytest.approx(40.0)
    assert high == pytest.approx(40.0)
    assert not remark


def test_calibration_is_of_bins_not_of_questions():
    """Two questions at 0.5, one of them right, are calibrated."""
    assert expected_calibration_error([(0.5, 1.0), (0.5, 0.0)]) == pytest.approx(0.0)
    assert expected_calibration_error([(0.95, 1.0), (0.15, 1.0)]) == pytest.approx((0.05 + 0.85) / 2)


def test_bins_of_calibration_end_at_tenths():
    """Two questions in one tenth share a bin, and two in neighbouring tenths do not."""
    assert expected_calibration_error([(0.51, 1.0), (0.58, 0.0)]) == pytest.approx(abs(1 - 0.51 - 0.58) / 2)
    assert expected_calibration_error([(0.58, 1.0), (0.62, 0.0)]) == pytest.approx((0.42 + 0.62) / 2)


# ---------------------------------------------------------------- every rule of a call under the same arguments


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), {"grid": "row"}, {"temperature": 0.7}])
def test_rules_that_are_measured_together_have_the_values_of_each_alone(more):
    torch.manual_seed(0)
    model = tiny.network("bert")

    def metrics(*rules):
        return training_metrics(model, tiny.tokenizer(), TEXTS, rules=rules, block=3, **more)

    together = metrics("greedy", "margin:k=2")
    for rule in ("greedy", "margin:k=2"):
        for name, value in metrics(rule).items():
            if "per_byte" in name:
                assert together[name] == pytest.approx(value, rel=1e-5), name


# ---------------------------------------------------------------- detokenizers


def written_out(text):
    """MDLM's ptb_detokenizer."""
    for before, after in ((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (" \n ", "\n"), ("\\/", "/")):
        text = text.replace(before, after)
    for _ in range(10):
        text = text.replace(" N ", " 1 ")
    return text.replace("$ 1", "$1").replace("# 1", "#1").replace("<unk>", "?")


SENTENCES = [
    "mr. <unk> does n't sell the dogs ' N N N shares at $ N a share",
    "it 's n't # N \n but a 3\\/4 loss",
    "N N N N N N the firms ' profits rose $ N N",
]


@pytest.mark.parametrize("text", SENTENCES)
def test_penn_treebank_is_detokenized_as_by_the_authors(text):
    assert corpora.ptb(f" {text} ") == written_out(f" {text} ")


def test_only_headings_of_one_level_begin_an_article():
    lines = [" = A = \n", " x \n", " = = B = = \n", " y \n", " = = = C = = = \n", " = D = \n", " z \n"]
    assert corpora.articles(lines) == ["".join(lines[:5]), "".join(lines[5:])]


def test_words_of_a_gap_do_not_count_the_space_before_it():
    class Answer(float):
        tokens = 2

    doc = {"prefix": "a ", "target": "b c", "suffix": " d"}
    _, words = infilling.target_perplexity(doc, [(Answer(-4.0), True)])["word_perplexity"]
    assert words == 2
