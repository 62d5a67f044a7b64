"""Running estimates: they equal the formula by hand and are unbiased, and a random order changes no number."""

import math
import random

import pytest
from lm_eval.api.model import CachingLM
from toys import Toy

from lm_eval_duel.bench.arms import Recording
from lm_eval_duel.cli.so_far import so_far, table
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators import base
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.loglikelihood import Scoring
from lm_eval_duel.harness.requests import make_request
from lm_eval_duel.harness.so_far import Document, SoFar, estimate, random_order

pytestmark = pytest.mark.usefixtures("one_load")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DRAW = random.Random(5)
TEXTS = [" ".join(DRAW.choices(LETTERS, k=DRAW.randrange(3, 30))) for _ in range(12)]


def document(log_prob, size, n=0):
    return Document("toy", n, f"key {n}", size, size, size, log_prob)


def requests(texts):
    return [
        make_request("loglikelihood_rolling", {"text": text}, (text,), "toy", TEXTS.index(text), 1) for text in texts
    ]


def killed(model, texts, path, after):
    """Score `texts` with a response cache until `after` are finished; returns each finished text's log-likelihood."""
    finished, save = {}, Scoring.save

    def save_or_stop(work, done):
        if len(finished) == after:
            raise KeyboardInterrupt
        finished[work.requests[done.n].args[0]] = done.answer.log_prob
        save(work, done)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Scoring, "save", save_or_stop)
        CachingLM(model, str(path)).loglikelihood_rolling(requests(texts), disable_tqdm=True)
    return finished


def by_hand(order, finished):
    """Perplexity and interval from the first texts of the order that are finished, by the formula of the docs."""
    sample = []
    for text in order:
        if text not in finished:
            break
        sample.append((finished[text], len(text.split())))
    n, everything, total = len(sample), len(order), sum(size for _, size in sample)
    rate = sum(log_prob for log_prob, _ in sample) / total
    squares = sum((log_prob - rate * size) ** 2 for log_prob, size in sample)
    error = math.sqrt((1 - n / everything) * n / (n - 1) * squares) / total
    return n, math.exp(-rate), math.exp(-rate - error * STUDENT[n]), math.exp(-rate + error * STUDENT[n])


STUDENT = {5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 97.5 % quantiles, by the size of the sample


def test_the_estimate_of_a_killed_run_is_that_by_hand(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BUCKET", 1)
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_batch_size=1)
    finished = killed(model, TEXTS, tmp_path / "c_rank0.db", 8)
    order = [TEXTS[n] for n in random_order(requests(TEXTS), 0)]
    assert order != TEXTS and order != sorted(TEXTS, key=len, reverse=True)
    count, perplexity, low, high = by_hand(order, finished)
    assert count >= 5
    figures = so_far(str(tmp_path / "c"))["tasks"]["toy"]
    assert (figures["finished"], figures["documents"], figures["sample"]) == (8, 12, count)
    value = figures["perplexity"]["tokens"]
    assert value["value"] == pytest.approx(perplexity, rel=1e-12)
    assert (value["low"], value["high"]) == (pytest.approx(low, rel=3e-3), pytest.approx(high, rel=3e-3))
    assert figures["perplexity"]["bytes"]["value"] < value["value"]  # a token here is a letter and a space
    printed = table(so_far(str(tmp_path / "c_rank0.db")))
    assert "PARTIAL" in printed and "8 of 12" in printed and "Do not publish" in printed


def test_a_finished_run_has_its_own_value_and_no_label(folder, tmp_path):
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu")
    answers = CachingLM(model, str(tmp_path / "c_rank0.db")).loglikelihood_rolling(requests(TEXTS), disable_tqdm=True)
    figures = so_far(str(tmp_path / "c"))
    value, tokens = figures["tasks"]["toy"]["perplexity"]["tokens"], sum(len(text.split()) for text in TEXTS)
    assert value["value"] == value["low"] == value["high"] == pytest.approx(math.exp(-sum(answers) / tokens))
    assert not figures["tasks"]["toy"]["partial"] and "PARTIAL" not in table(figures)
    assert "[" not in table(figures).splitlines()[-1]


def test_the_bar_has_the_error_of_the_draws_and_no_interval_of_a_final_value(folder, capsys):
    for settings, expected in (({"estimator": "elbo", "mc_samples": 16}, True), ({"rule": "greedy"}, False)):
        model = DuelMDM(pretrained=folder, block=4, device="cpu", **settings)
        model.loglikelihood_rolling(requests(TEXTS[:2]))
        bar = capsys.readouterr().err.splitlines()[-1]
        assert ("+-" in bar) is expected and "ppl " in bar and "interval" not in bar and "[" not in bar.split("ppl ")[1]
        if expected:
            value = model.run.total().tasks["toy"].values["elbo"]
            tokens = model.run.total().tasks["toy"].tokens
            error = math.exp(-value.log_prob / tokens) * value.stderr / tokens
            assert f"+- {error:.2g}" in bar


def test_two_ranks_are_two_strata(folder, tmp_path):
    """Each process has its documents and its file; a resumed run with one process counts no document twice."""
    shares, finished = (TEXTS[0::2], TEXTS[1::2]), {}
    for rank, after in ((0, 5), (1, 3)):
        model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_batch_size=1)
        finished |= killed(model, shares[rank], tmp_path / f"c_rank{rank}.db", after)
    figures = so_far(str(tmp_path / "c"))["tasks"]["toy"]
    assert (figures["documents"], figures["finished"]) == (12, 8)
    weighted, sizes = 0.0, 0.0
    for share in shares:
        order = [share[n] for n in random_order(requests(share), 0)]
        sample = order[: next(n for n, text in enumerate(order) if text not in finished)]
        assert len(sample) >= 2
        weighted += len(share) / len(sample) * sum(finished[text] for text in sample)
        sizes += len(share) / len(sample) * sum(len(text.split()) for text in sample)
    assert figures["perplexity"]["tokens"]["value"] == pytest.approx(math.exp(-weighted / sizes))
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu")
    CachingLM(model, str(tmp_path / "c_rank0.db")).loglikelihood_rolling(requests(TEXTS), disable_tqdm=True)
    figures = so_far(str(tmp_path / "c"))["tasks"]["toy"]
    assert (figures["documents"], figures["finished"], figures["partial"]) == (12, 12, False)


def test_intervals_cover_the_final_value_and_long_documents_do_not_bias():
    """300 random orders of 60 documents whose rate falls with their length; 20 of them are finished."""
    draw = random.Random(1)
    sizes = [draw.randrange(5, 200) for _ in range(60)]
    documents = [(-size * (3 + 40 / size + draw.gauss(0, 0.3)), size) for size in sizes]
    final = -sum(log_prob for log_prob, _ in documents) / sum(sizes)
    covered, rates = 0, []
    for _ in range(300):
        shuffled = draw.sample(documents, len(documents))
        strata = [document(value if n < 20 else None, size, n) for n, (value, size) in enumerate(shuffled)]
        value = estimate([strata])
        covered += value.low <= math.exp(final) <= value.high
        rates.append(math.log(value.perplexity))
    mean = sum(rates) / len(rates)
    error = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / 299 / 300)
    assert 0.91 <= covered / 300 <= 0.98 and abs(mean - final) < 4 * error + 0.005


def test_few_documents_have_no_interval_and_none_no_estimate():
    documents = [document(-3.0 * size, size, n) for n, size in enumerate((4, 9, 2, 5, 7, 8))]
    for n in (2, 5):
        documents[n].log_prob = None
    value = SoFar(documents).estimate("toy")
    assert (value.sample, value.documents, value.low) == (2, 6, None) and value.perplexity == pytest.approx(math.e**3)
    assert str(SoFar(documents)) == "ppl 20.09"
    documents[0].log_prob = None
    assert SoFar(documents).estimate("toy") is None and str(SoFar(documents)) == ""
    documents[0].log_prob, documents[0].words = -12.0, None
    assert SoFar(documents).estimate("toy", "words") is None


@pytest.mark.parametrize("rule", ["greedy", "left_to_right"])
def test_random_order_changes_no_number_and_keeps_the_budget(rule, monkeypatch):
    """Texts of 1 to 30 tokens in many small buckets: short lanes often stand before long ones."""
    monkeypatch.setattr(base, "BUCKET", 1)
    denoiser = Toy(tokens=6, length=32)  # in float64
    draw = random.Random(2)
    windows = [Window((1,), draw.choices(range(6), k=draw.randrange(1, 31))) for _ in range(16)]
    scores = []
    for in_order in (False, True):
        duel = DuelEstimator(denoiser, rule, 8, batch_size=3)
        duel.in_order = in_order
        recording = Recording(denoiser)
        with recording.record():
            scores.append(duel.log_prob(windows))
        largest = max(call[1][0].numel() for call in recording.calls if call[0] == "features")
        assert 60 <= largest <= duel.budget.tokens == 3 * 32
    for longest, given in zip(*scores, strict=True):
        assert longest.reveal_steps == given.reveal_steps
        assert longest.token_logprobs == pytest.approx(given.token_logprobs, abs=1e-9)
