"""Two lists of scores of the same texts: their paired difference, its verdict, and both in a report of score files."""

import dataclasses
import json
import math

import numpy as np
import pytest
from results import ours, text_score, three_documents

from lm_eval_duel import DuelError, Window, compare, pool
from lm_eval_duel.cli.report import main as report
from lm_eval_duel.cli.report import parse
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.results import baseline, read, stats
from lm_eval_duel.results.read import SCORE_VERSION
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.runs import SCHEMA

SIZE = 40


def scores(shift=0.0, seed=1, tokens=None, **drawn):
    """Scores of the same texts; `shift` in nats per token. `drawn`: as in `text_score`."""
    texts = np.random.default_rng(0)
    noise = np.random.default_rng(seed)
    scores_of_texts = []
    for n in range(SIZE):
        count = int(texts.integers(20, 60))
        hard = texts.normal(3.4, 0.5)
        nats = -count * (hard + shift + noise.normal(0, 0.02))
        scores_of_texts.append(text_score(f"text {n} " + "word " * count, nats, tokens or count, **drawn))
    return scores_of_texts


def test_a_difference_is_that_of_the_rates_with_the_error_of_a_paired_ratio():
    a = scores(0.0)
    b = scores(0.05, seed=2)
    tokens = np.array([len(score.tokens) for score in a])
    nats_a = np.array([-score.log_prob for score in a])
    nats_b = np.array([-score.log_prob for score in b])
    expected = (nats_a - nats_b).sum() / tokens.sum()
    residuals = nats_a - nats_b - expected * tokens
    error = math.sqrt((residuals**2).sum()) / tokens.sum()

    forward = compare(a, b, ("A", "B"))
    assert json.loads(json.dumps(forward.to_dict()))["perplexities"] == pytest.approx(forward.perplexities)
    backward = compare(b, a, ("B", "A"))

    low, high = forward.interval
    assert forward.unit == "token"
    assert forward.difference == pytest.approx(expected, abs=1e-12)
    assert forward.perplexities == pytest.approx(tuple(np.exp([nats_a.sum(), nats_b.sum()] / tokens.sum())))
    assert (low + high) / 2 == pytest.approx(expected, abs=0.1 * error)
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.1)
    assert forward.verdict == "A is better"
    assert f"{expected:+.4f}" in str(forward)
    assert repr(forward) == str(forward)
    assert "\n" not in repr(forward)

    assert backward.difference == -forward.difference
    assert backward.interval == pytest.approx((-high, -low))
    assert compare(a, a).verdict == "equal"


def test_other_tokens_are_compared_per_byte():
    a = scores()
    b = scores(0.05, seed=2, tokens=7)
    size = 0
    nats = 0.0
    for first, second in zip(a, b, strict=True):
        size += len(first.text.encode())
        nats += second.log_prob - first.log_prob

    difference = compare(a, b)

    assert difference.unit == "byte"
    assert difference.difference == pytest.approx(nats / size)
    assert compare(a, b, unit="word").unit == "word"
    with pytest.raises(DuelError, match="other tokens"):
        compare(a, b, unit="token")
    with pytest.raises(DuelError, match="'unit'"):
        compare(a, b, unit="line")
    with pytest.raises(DuelError, match=r"'name'.*names"):
        compare(a, b, name=("A", "B"))
    for names in ("AB", ("A", "A"), ("A", "B", "C")):
        with pytest.raises(DuelError, match="two different names"):
            compare(a, b, names)


BOUND = {"estimator": "elbo", "mc_samples": 16, "stderr": 0.1}


@pytest.mark.parametrize(
    ("drawn", "shift", "why"),
    [
        (BOUND, 0.05, "only a bound"),
        (BOUND | {"elbo_eps": 0.001}, 0.05, "neither a likelihood nor a bound"),
        ({"estimator": "elbo", "mc_samples": 4}, 0.05, "mc_samples=4"),
        pytest.param({"estimator": "elbo", "mc_samples": 4}, -0.05, "mc_samples=4", marks=pytest.mark.slow),
        ({"estimator": "two_phase", "blocks": TwoPhaseBlocks(20)}, 0.05, "not known"),
        ({"estimator": "oracle"}, -0.05, "not a likelihood"),
    ],
)
def test_values_that_allow_no_verdict(drawn, shift, why):
    """Whatever a report has doubts about, `compare` has, too."""
    exact = scores()
    other = scores(shift, seed=2, **drawn)

    for difference in (compare(exact, other), compare(other, exact)):
        assert difference.verdict.startswith("no verdict")
        assert why in difference.verdict


def test_an_error_that_is_known_of_all_texts_together_is_enough():
    few = scores(0.05, seed=2, estimator="two_phase", blocks=TwoPhaseBlocks(20, 2, 2, 1e-4))

    assert few[0].stderr is None
    assert compare(scores(), few).verdict == "first is better"


def test_equal_texts_share_their_draws():
    """Twelve copies of one text have one error twelve times, as in the total of a run."""
    tokens = 10
    error = 1.0  # nats of a text
    bound = BOUND | {"stderr": error}

    def compared_with_bounds(texts):
        exact = [text_score(text, -30.0, tokens) for text in texts]
        drawn = [text_score(text, -29.0, tokens, **bound) for text in texts]
        return compare(exact, drawn)

    copies = compared_with_bounds(["the same text"] * 12)
    different = compared_with_bounds([f"text {n}" for n in range(12)])

    low, high = copies.interval
    assert (high - low) / (2 * 1.96) == pytest.approx(error / tokens, rel=0.05)
    assert copies.stderrs == (None, pytest.approx(math.exp(2.9) * error / tokens))
    low, high = different.interval
    of_twelve = 2.201 * math.sqrt(12 / 11)  # times the error, from Student's t
    assert (high - low) / (2 * of_twelve) == pytest.approx(error / tokens / math.sqrt(12), rel=0.05)


def test_other_texts_and_what_is_no_score_of_one_model_are_refused():
    whole = scores()
    first, *others = whole
    mixed = [scores(estimator="oracle")[0], *others]
    positive = [dataclasses.replace(first, log_prob=1.0), *others]
    unknown = [dataclasses.replace(first, log_prob=math.nan), *others]

    for other in (whole[:-1], whole[::-1], []):
        with pytest.raises(DuelError, match="same texts"):
            compare(whole, other)
    for other in (mixed, positive, unknown, ["text"] * SIZE, [3.0] * SIZE, "text"):
        with pytest.raises(DuelError):
            compare(whole, other)
        with pytest.raises(DuelError):
            compare(other, whole)


def test_the_monte_carlo_error_widens_the_interval():
    a = scores()
    exact = scores(0.05, seed=2)
    drawn = scores(0.05, seed=2, estimator="elbo", mc_samples=16, stderr=3.0)
    tokens = sum(len(score.tokens) for score in a)
    error = 3.0 * math.sqrt(SIZE) / tokens

    def width(other):
        low, high = compare(a, other).interval
        return high - low

    assert width(drawn) == pytest.approx(math.hypot(width(exact), 2 * 1.96 * error), rel=0.1)


def test_a_text_without_a_word_counts_in_the_interval_as_in_the_difference():
    """It is far worse under the first model, which is better on all other texts: so there is no verdict."""
    a = [text_score(f"some text {n}", -30.0 - n, 10) for n in range(12)]
    b = [text_score(f"some text {n}", -31.0 - 1.1 * n, 10) for n in range(12)]

    pair = compare([*a, text_score("   ", -50.0, 3)], [*b, text_score("   ", -10.0, 3)], unit="word")

    assert pair.difference > 0
    low, high = pair.interval
    assert low < 0 < pair.difference < high
    assert not pair.better


EMPTY = text_score("", 0.0, 0)
BETTER = scores()
WORSE = scores(0.05, seed=2)
MUCH_WORSE = scores(0.1, seed=2)


def test_the_length_that_makes_windows_equal_is_named():
    def cut(scores, max_length, *windows):
        spec = {**scores[0].spec, "max_length": str(max_length)}
        return [dataclasses.replace(score, spec=spec, windows=windows) for score in scores]

    longer = cut(BETTER, 132, Window((), (1,) * 6), Window((), (1,) * 4))
    shorter = cut(WORSE, 129, Window((), (1,) * 5), Window((), (1,) * 5))
    assert "max_length=129" in compare(longer, shorter).verdict


def test_a_comparison_without_a_verdict_says_why():
    impossible = [text_score("text", -math.inf, 10), *BETTER[1:]]
    infinite = compare(impossible, [text_score("text", -30.0, 10), *BETTER[1:]])
    assert infinite.difference is None and "infinite" in infinite.verdict
    single = compare(BETTER[:1], WORSE[:1])
    assert single.interval is None and "single text" in single.verdict


@pytest.mark.parametrize("visible", [3, 5])
def test_contexts_that_were_cut_in_another_way_have_no_verdict(visible):
    def cut(scores, visible):
        window = Window((0,) * visible, (1,) * 10)
        return [dataclasses.replace(score, windows=(window,), cut=True) for score in scores]

    assert "contexts were cut" in compare(BETTER, cut(WORSE, visible)).verdict
    assert ("contexts were cut" in compare(cut(BETTER, 3), cut(WORSE, visible)).verdict) is (visible == 5)


@pytest.mark.parametrize("bos", ["none", "first"])
def test_other_scored_positions_have_no_verdict(bos):
    """The first token costs nothing under bos=first: that makes no model better."""
    given, other = (
        [dataclasses.replace(score, spec={**score.spec, "special_tokens": f"[] text [], bos={each}"}) for score in side]
        for side, each in ((BETTER, "given"), (WORSE, bos))
    )
    assert ("scored positions" in compare(given, other).verdict) is (bos == "first")


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (BETTER, WORSE, "A is better"),
        ([text_score("one text", -30.0, 10)] * 12, [text_score("one text", -31.0, 10)] * 12, "no verdict from 1 dist"),
        ([*BETTER[:2], EMPTY], [*WORSE[:2], EMPTY], "no verdict from 2 distinct"),
        ([*BETTER[:12], EMPTY], [*MUCH_WORSE[:12], EMPTY], "A is"),
    ],
    ids=["many texts", "copies of one", "few texts", "an empty text"],
)
def test_a_report_of_score_files_has_the_same_difference(tmp_path, first, second, verdict):
    """In two files and in one. Copies of a text count once for a verdict, and an empty one does not count."""
    content_a = score_file("A", first)
    content_b = score_file("B", second)
    a = tmp_path / "A.json"
    b = tmp_path / "B.json"
    both = tmp_path / "both.json"
    a.write_text(json.dumps(content_a))
    b.write_text(json.dumps(content_b))
    both.write_text(json.dumps(content_a | {"compared": [content_b]}))

    expected = compare(first, second, ("A", "B"))
    for places in ([str(a), str(b)], [str(both)]):
        report([*places, "--out", str(tmp_path / "out"), "--metric", "token_perplexity"])
        [task] = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"].values()
        [pair] = task["pairs"]
        assert pair["names"] == ["A", "B"]
        assert pair["difference"] == pytest.approx(expected.difference)
        assert pair["interval"] == pytest.approx(expected.interval)
        assert pair["verdict"] == expected.verdict
        assert pair["verdict"].startswith(verdict)
        for row in task["rows"]:
            pooled = pool(first if row["model"] == "A" else second)
            assert pooled.perplexity == pytest.approx(row["value"])
            assert pooled.interval == pytest.approx(row["interval"])


def test_a_score_file_of_another_version_is_refused(tmp_path):
    file = tmp_path / "A.json"
    file.write_text(json.dumps(score_file("A", scores()) | {"version": SCORE_VERSION + 1}))

    with pytest.raises(DuelError, match="version"):
        read.runs([file])


@pytest.mark.parametrize("of_score", [True, False])
def test_a_missing_baseline_is_made_by_the_command_of_the_results(tmp_path, of_score):
    if of_score:
        file = tmp_path / "A.json"
        file.write_text(json.dumps(score_file("A", scores())))
        runs = read.runs([file])
    else:
        runs = read.runs([ours(tmp_path, docs=three_documents("sotu"))])

    _, note = baseline.find(runs)

    assert ("--compare" in note.advice) == of_score
    assert ("--model_args" in note.advice) != of_score
    assert "estimator=ar" in note.advice


def score_file(name, scores_of_texts):
    """As `score --json` writes it."""
    documents = []
    for score in scores_of_texts:
        documents.append(
            {
                "document": "texts.txt:1",
                "sha256": stats.key_of(score.text),
                "tokens": len(score.tokens),
                "words": len(score.text.split()),
                "bytes": len(score.text.encode()),
                "log_prob": score.log_prob,
            }
        )
    shared = {"weights": f"w-{name}", "rule": "greedy:k=1", "estimator": "duel"}
    return {
        "format": "lm_eval_duel score",
        "version": SCORE_VERSION,
        "pretrained": name,
        "fingerprint": name,
        "spec": {**shared, "block": "4", "tokenizer": "t", "version": "1"},
        "kind": Kind.LIKELIHOOD.value,
        "documents": documents,
        "duel": {**shared, "schema": SCHEMA, "pretrained": name, "tasks": {}},
    }


def test_texts_cut_at_different_places_have_no_verdict():
    """Unless other tokens are counted. Special tokens before the text of every window make no difference."""

    def cut(scores_of_texts, *windows):
        sized = [dataclasses.replace(score, spec=score.spec | {"max_length": 3}) for score in scores_of_texts]
        return [dataclasses.replace(score, windows=windows) for score in sized]

    a = cut(scores(), Window((1,), (5, 6)), Window((1,), (7,)))
    better = scores(0.05, seed=2)
    for windows, verdict in (
        ([Window((), (5, 6)), Window((), (7,))], "first is better"),
        ([Window((), (5,)), Window((), (6, 7))], "no verdict: the windows differ"),
        ([Window((), (5, 6)), Window((6,), (7,))], "no verdict: the windows differ"),
    ):
        difference = compare(a, cut(better, *windows))
        assert difference.verdict.startswith(verdict)
        assert bool(difference.better) == (verdict == "first is better")
        assert difference.interval

    scored_bos = cut(better, Window((), (1, 5, 6, 7)))
    assert compare(cut(scores(), Window((1,), (5, 6, 7))), scored_bos).verdict == "first is better", "nothing is cut"

    other_tokens = cut(scores(0.05, seed=2, tokens=70), Window((), (5, 6, 7)))
    assert compare(a, other_tokens, unit="byte").verdict == "first is better"


@pytest.mark.parametrize(
    ("of_better", "of_other", "verdict"),
    [
        ({"normalises": "lower case, accents"}, {}, "no verdict: first drops upper case and drops accents"),
        ({"normalises": "lower case"}, {"normalises": "accents"}, "no verdict: first drops upper case"),
        ({"normalises": "lower case"}, {"normalises": "lower case, accents"}, "first is better"),
        ({}, {"normalises": "lower case"}, "first is better"),
        ({"tokenizer": "t", "unk": 1}, {"tokenizer": "u"}, "no verdict: first has 2.5% [UNK]"),
        ({"tokenizer": "t", "unk": 1}, {"tokenizer": "u", "unk": 1}, "no verdict: first has 2.5% [UNK]"),
        ({"tokenizer": "t", "unk": 1}, {"tokenizer": "t", "unk": 1}, "first is better"),
        ({"tokenizer": "t"}, {"tokenizer": "u", "unk": 1}, "first is better"),
    ],
)
def test_a_value_of_several_texts_together_is_not_better(of_better, of_other, verdict):
    """If the worse of the two is such a value, that of its text alone is worse still."""

    def made(shift, seed, unk=0, **spec):
        made_scores = scores(shift, seed, tokens=40, **spec)
        return [dataclasses.replace(score, unk_tokens=unk) for score in made_scores]

    difference = compare(made(0.0, 1, **of_better), made(0.05, 2, **of_other))
    assert difference.verdict == verdict
    assert difference.interval
    assert compare(made(0.05, 2, **of_other), made(0.0, 1, **of_better)).verdict == verdict.replace("first", "second")


def test_what_limits_a_value_stands_behind_it():
    noised = [dataclasses.replace(score, note="given the noise of seed 0") for score in scores()]
    difference = compare(noised, scores(0.05, seed=2), ("A", "B"))
    assert difference.to_dict()["notes"] == ["given the noise of seed 0", ""]
    assert f"A {difference.perplexities[0]:.2f} (given the noise of seed 0) and B" in str(difference)
    assert pool(noised).note == "given the noise of seed 0"


def test_windows_are_made_equal_although_special_tokens_differ():
    def cut(shift, seed, max_length, windows):
        return [dataclasses.replace(score, windows=windows) for score in scores(shift, seed, max_length=max_length)]

    a = cut(0.0, 1, 4, (Window((), (1, 2, 3, 4)), Window((), (5,))))
    b = cut(0.1, 2, 4, (Window((9,), (1, 2, 3)), Window((9,), (4, 5))))
    assert compare(a, b).verdict == (
        "no verdict: the windows differ (make first with max_length=3 and second with max_length=4)"
    )
    b = cut(0.1, 2, 6, (Window((), (1, 2, 3, 4, 5)), Window((), (6,))))
    assert compare(a, b).verdict == "no verdict: the windows differ (make both with max_length=4)"


def test_pooled_scores():
    of_texts = scores()
    pooled = pool(iter(of_texts), unit="byte")
    nats = -math.fsum(score.log_prob for score in of_texts)
    size = sum(len(score.text.encode()) for score in of_texts)
    assert (pooled.count, pooled.documents, pooled.stderr) == (size, SIZE, None)
    assert pooled.perplexity == pytest.approx(math.exp(nats / size))
    low, high = pooled.interval
    assert low < pooled.perplexity < high
    assert f"per byte {pooled.perplexity:.2f} (95 % interval {low:.2f} to {high:.2f}, 40 documents), exact" in repr(
        pooled
    )

    drawn = pool([text_score(f"text {n}", -30.0, 10, **BOUND | {"stderr": 5.0}) for n in range(12)])
    low, high = drawn.interval  # equal values: all of it is the error of the draws, of 120 tokens
    assert math.log(high / low) / 2 == pytest.approx(2.2 * 5 * math.sqrt(12) / 120, rel=0.1), "2.2 errors for 12 texts"

    bound = pool(scores(**BOUND))
    assert bound.stderr == pytest.approx(0.1 * math.sqrt(SIZE))
    assert bound.bound and "≤" in repr(bound) and "±" in repr(bound)
    unknown = pool(scores(estimator="elbo", mc_samples=4))
    assert "mc_samples=4" in unknown.remark and "± ?" in repr(unknown), "its interval does not include the error"
    few = pool(of_texts[:3])
    assert "too narrow" in few.remark and few.remark in repr(few)
    one = pool(of_texts[:1])
    assert one.interval is None and "(1 document)" in repr(one)
    for wrong, reason in (([], "got none"), (of_texts[0], "lists"), ([3], "int"), (of_texts + scores(k=2), "several")):
        with pytest.raises(DuelError, match=reason):
            pool(wrong)
    with pytest.raises(DuelError, match="no tokens"):
        pool([text_score("", 0.0, 0)])


def test_a_baseline_among_the_models_of_one_file(tmp_path):
    """It is named by its model or as messages name it, or by the file if it is the only one there."""

    def autoregressive(name):
        content = score_file(name, scores())
        for entries in (content, content["spec"], content["duel"]):
            entries["estimator"] = "ar"
        return content

    def baselines(file, name):
        options = parse([str(file), "--ar", name, "--out", "unused"])
        return [run.label for run in collect(options).baselines]

    one = tmp_path / "one.json"
    two = tmp_path / "two.json"
    one.write_text(json.dumps(score_file("M", scores(0.1)) | {"compared": [autoregressive("A")]}))
    two.write_text(json.dumps(score_file("M", scores(0.1)) | {"compared": [autoregressive("A"), autoregressive("B")]}))

    assert baselines(one, str(one)) == ["A"]
    for name in ("B", f"{two}#3"):
        assert baselines(two, name) == ["B"]
    with pytest.raises(DuelError, match=r"more than once: .*two.json#2, .*two.json#3"):
        baselines(two, str(two))
    with pytest.raises(DuelError, match="without autoregressive results"):
        baselines(two, "M")
