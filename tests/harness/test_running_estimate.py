"""Running estimates: they equal the formula by hand and are unbiased, and a random order changes no number."""

import itertools
import math
import random
import statistics

import pytest
from harness_requests import cached
from scipy.special import stdtrit
from toys import Toy

from benchmarks.recording import Recording
from lm_eval_duel.core.scores import Counts
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators import base
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.progress import Progress, RunningEstimate, estimate
from lm_eval_duel.harness.requests import make_request, random_order
from lm_eval_duel.harness.store import Answers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DRAW = random.Random(5)
TEXTS = []
for _ in range(12):
    letters = DRAW.choices(LETTERS, k=DRAW.randrange(3, 30))
    TEXTS.append(" ".join(letters))


def requests(texts):
    return [make_request("loglikelihood_rolling", {}, (text,), "toy", TEXTS.index(text)) for text in texts]


def by_hand(order, finished):
    """Perplexity and interval from the first texts of the order that are finished, by the formula of the docs."""
    log_probs = []
    sizes = []
    for text in order:
        if text not in finished:
            break
        log_probs.append(finished[text])
        sizes.append(len(text.split()))
    n = len(sizes)
    assert n >= 5

    total = sum(sizes)
    rate = sum(log_probs) / total
    squares = 0.0
    for log_prob, size in zip(log_probs, sizes, strict=True):
        squares += (log_prob - rate * size) ** 2
    variance = (1 - n / len(order)) * n / (n - 1) * squares / total**2
    reach = math.sqrt(variance) * stdtrit(n - 1, 0.975)
    return math.exp(-rate), math.exp(-rate - reach), math.exp(-rate + reach)


def test_the_estimate_of_a_killed_run_is_that_by_hand(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BUCKET", 1)
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_batch_size=1)
    finished = {}
    save = Answers.save

    def save_or_stop(answers, n, scores):
        if len(finished) == 8:
            raise KeyboardInterrupt
        finished[TEXTS[n]] = math.fsum(score.log_prob for score in scores)
        save(answers, n, scores)

    monkeypatch.setattr(Answers, "save", save_or_stop)
    with pytest.raises(KeyboardInterrupt):
        cached(model, tmp_path).loglikelihood_rolling(requests(TEXTS))

    order = [TEXTS[n] for n in random_order(requests(TEXTS), 0)]
    assert order != TEXTS
    assert order != sorted(TEXTS, key=len, reverse=True)
    running = model.evaluation.progress.running
    value, low, high = by_hand(order, finished)
    assert str(running) == f"ppl {value:.4g} [{low:.4g}, {high:.4g}] (95 % interval of the final value)"

    sample = [*itertools.takewhile(finished.__contains__, order)]
    log_probs = [finished[text] for text in sample]
    sizes = [len(text.split()) for text in sample]
    estimated = estimate(log_probs, sizes, len(TEXTS))
    assert estimated == pytest.approx((value, low, high), rel=1e-12)


def test_the_bar_has_the_error_of_the_draws_and_no_interval_of_a_final_value(folder, capsys):
    for settings, is_drawn in (({"estimator": "elbo", "mc_samples": 16}, True), ({"rule": "greedy"}, False)):
        model = DuelMDM(pretrained=folder, block=4, device="cpu", **settings)

        model.loglikelihood_rolling(requests(TEXTS[:2]))

        bar = capsys.readouterr().err.splitlines()[-1]
        value = bar.split("ppl ")[1]
        assert ("±" in value) is is_drawn
        assert value.startswith("≤") is is_drawn  # the drawn one of the two is a bound
        assert "interval" not in value
        assert "[" not in value
        if is_drawn:
            total = model.evaluation.total().tasks["toy"].total
            error = math.exp(-total.log_prob / total.tokens) * total.stderr / total.tokens
            assert f"± {error:.2g}" in bar


def test_intervals_cover_the_final_value_and_long_documents_do_not_bias():
    """300 random orders of 60 documents whose rate falls with their length; 20 of them are finished."""
    draw = random.Random(1)
    sizes = [draw.randrange(5, 200) for _ in range(60)]
    log_probs = []
    for size in sizes:
        rate = 3 + 40 / size + draw.gauss(0, 0.3)
        log_probs.append(-size * rate)
    final = -sum(log_probs) / sum(sizes)

    orders = 300
    covered = 0
    rates = []
    for _ in range(orders):
        finished = draw.sample(range(len(sizes)), 20)
        value, low, high = estimate([log_probs[n] for n in finished], [sizes[n] for n in finished], len(sizes))
        covered += low <= math.exp(final) <= high
        rates.append(math.log(value))

    error = statistics.stdev(rates) / math.sqrt(orders)
    assert 0.91 <= covered / orders <= 0.98
    assert abs(statistics.mean(rates) - final) < 4 * error + 0.005


def test_few_documents_have_no_interval_and_none_no_estimate():
    sizes = (4, 9, 2, 5, 7, 8)
    log_probs = {n: -3.0 * sizes[n] for n in (0, 1, 3, 4)}
    running = RunningEstimate([(n, "toy", size) for n, size in enumerate(sizes)], log_probs, {})
    assert str(running) == "ppl 20.09 over 2 of 6 documents"
    assert estimate([-12.0, -27.0], [4, 9], 6) == (pytest.approx(math.e**3), None, None)
    log_probs.pop(0)
    assert str(running) == ""
    assert estimate([], [], 6) is None


@pytest.mark.parametrize("rule", ["greedy", "left_to_right"])
def test_random_order_changes_no_number_and_keeps_the_budget(rule, monkeypatch):
    """Texts of 1 to 30 tokens in many small buckets: short lanes often stand before long ones."""
    monkeypatch.setattr(base, "BUCKET", 1)
    denoiser = Toy(tokens=6, length=32)  # in float64
    draw = random.Random(2)
    windows = []
    for _ in range(10):
        length = draw.randrange(1, 31)
        windows.append(Window((1,), draw.choices(range(6), k=length)))

    def score(in_order):
        duel = DuelEstimator(denoiser, rule, 8, batch_size=3)
        recording = Recording(denoiser)
        with recording.record():
            scores = dict(duel.stream(windows, in_order=in_order))

        largest = 0
        for name, arguments, *_ in recording.calls:
            if name == "features_at":
                largest = max(largest, arguments[1].numel())
        assert 60 <= largest <= duel.budget.tokens == 3 * 32
        return scores

    longest_first = score(in_order=False)
    as_given = score(in_order=True)

    for n in range(len(windows)):
        assert longest_first[n].reveal_steps == as_given[n].reveal_steps
        assert longest_first[n].token_logprobs == pytest.approx(as_given[n].token_logprobs, abs=1e-9)


# ---------------------------------------------------------------- from the first minute


def test_the_first_document_of_the_order_is_finished_early():
    """After a few percent of the steps, whatever the lengths of the others; no step is taken twice."""
    duel = DuelEstimator(Toy(tokens=6, length=16), "greedy", 4, max_batch_size=4)
    windows = []
    for n in range(60):
        windows.append(Window((1,), DRAW.choices(range(6), k=15 - n % 2)))
    steps = {}  # that were taken when a window was finished
    for index, _ in duel.stream(windows, in_order=True):
        steps[index] = duel.counts.lane_steps
    total = duel.counts.lane_steps
    assert total == sum(len(window.target) for window in windows)
    assert steps[0] <= 0.03 * total
    for n, taken in enumerate(steps.values(), 1):  # in the order in which they were finished
        assert abs(taken / total - n / len(steps)) < 0.15


def test_the_bar_counts_the_work_on_unfinished_windows():
    """Two tokens a step: ten steps, six of them of a finished window of twelve tokens, stand for twenty tokens."""
    counts = Counts()
    progress = Progress("loglikelihood_rolling", [12, 30, 8], [0, 1], counts)
    counts.lane_steps = 10
    progress.add_window(12, 6)
    assert (progress.bar.n, progress.bar.total) == (20, 42)
    progress.add_saved(8)
    assert (progress.bar.n, progress.bar.initial) == (28, 8)
    counts.lane_steps = 21
    progress.add_window(22, 15)
    assert progress.bar.n == 42
    Progress("loglikelihood_rolling", [12], [0], counts, hidden=True).add_saved(8)
