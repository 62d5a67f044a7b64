"""Laws of the statistics: bootstrap intervals, paired differences, verdicts, gap closed, and the paper's tables."""

import dataclasses
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from results import documents, hf, ours, per_token, rows, text_score
from results import report as run

from lm_eval_duel import DuelError, compare
from lm_eval_duel.cli.report import main as report
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.results import compare as side_by_side
from lm_eval_duel.results import gaps, read, stats
from lm_eval_duel.results.read import SCORE_VERSION
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import SCHEMA
from lm_eval_duel.results.table import Note, number

SIZE = 40


# ---------------------------------------------------------------- the paper, as printed

TABLES = {  # task: the perplexity of the autoregressive model, and by model its ELBO, DUEL and gap closed
    "owt": (17.54, {"SEDD": (24.10, 22.58, 23.2), "BD3-LM-4": (20.73, 19.73, 31.3), "BD3-LM-8": (21.68, 20.37, 31.6)}),
    "lm1b": (22.83, {"MDLM": (31.78, 29.03, 30.7), "BD3-LM-8": (29.83, 27.85, 28.3), "SEDD": (32.68, 31.51, 11.9)}),
}


@pytest.mark.parametrize("name", TABLES)
def test_in_domain_tables_of_the_paper(tmp_path, name):
    ar, table = TABLES[name]
    ours(tmp_path / "ar", per_token([name], [ar]), "ARM", "ar", rule=None, block="1", attention="causal")
    for model, (elbo, duel, _) in table.items():
        causal = model.startswith("BD3")
        block = model.partition("BD3-LM-")[2] or "4"
        shape = {"attention": "block_causal" if causal else "bidirectional", "block": block}
        spec = {"elbo_block": block if causal else "None"}
        ours(tmp_path / "results", per_token([name], [elbo]), model, "elbo", spec=spec, **shape)
        ours(tmp_path / "results", per_token([name], [duel]), model, **shape)
    found = rows(run(tmp_path), name)
    closed = {model: round(row["gap_closed"], 1) for model, row in found.items()}
    assert closed == {model: expected for model, (*_, expected) in table.items()}
    assert all(row["best"] for row in found.values())


# ---------------------------------------------------------------- intervals


def test_the_paired_bootstrap_against_the_analytic_error(tmp_path):
    """Documents whose difficulty is shared by AR, ELBO and DUEL."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(50, 150, 400)
    hard = generator.normal(3.4, 0.4, 400)  # nats per token
    nats = [-tokens * (hard + shift + generator.normal(0, 0.02, 400)) for shift in (0.0, 0.3, 0.2)]
    ar, elbo, duel = ({"sotu": documents(n, tokens)} for n in nats)
    hf(tmp_path / "ar", docs=ar)
    ours(tmp_path / "results", docs=elbo, estimator="elbo")
    ours(tmp_path / "results", docs=duel)
    first = run(tmp_path)
    assert run(tmp_path) == first  # seeded
    row = rows(first, "sotu")["MDLM"]
    rate = -nats[2].sum() / tokens.sum()
    error = np.sqrt(((-nats[2] - rate * tokens) ** 2).sum()) / tokens.sum() * math.exp(rate)  # of a ratio of sums
    low, high = row["interval"]
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.05)
    low, high = row["gap_closed_interval"]
    assert low < row["gap_closed"] < high

    unpaired_draws = []  # of other documents for each model
    for seed, of_model in enumerate(nats):
        sums = stats.resample(np.stack([of_model, tokens], 1).astype(float), seed=seed)
        unpaired_draws.append(stats.value("token_perplexity", *sums.T))
    ar, elbo, duel = unpaired_draws
    unpaired, _ = stats.gap_interval(elbo, duel, ar)
    assert unpaired is None or high - low < 0.3 * (unpaired[1] - unpaired[0])


def test_draws_that_are_made_together_are_those_of_a_loop():
    """At a number of documents for which not all draws are made at once."""
    columns = np.random.default_rng(3).normal(size=(130, 2))
    random = np.random.default_rng(7)
    sums = [columns[random.integers(130, size=130)].sum(0) for _ in range(stats.DRAWS)]
    assert stats.DRAWS * len(columns) > stats.DRAWN_TOGETHER
    assert stats.resample(columns, seed=7) == pytest.approx(np.array(sums), abs=1e-9)


def test_draws_without_a_positive_gap_are_counted_or_end_the_interval():
    generator = np.random.default_rng(0)
    ar = np.full(1000, 20.0)
    elbo = 20 + np.abs(generator.normal(1, 0.1, 1000))
    elbo[:10] = 19.0
    found, said = stats.gap_interval(elbo, ar + 0.3, ar)
    assert found is not None and said == "10 of 1,000 draws without a positive ELBO gap are left out"
    elbo[:30] = 20.0
    assert stats.gap_interval(elbo, ar + 0.3, ar) == (None, "no interval: 30 of 1,000 draws have no positive ELBO gap")


def test_a_bootstrap_that_holds_the_monte_carlo_error_gets_no_more_of_it():
    generator = np.random.default_rng(1)
    hard = generator.normal(3, 1, 500)
    noise = generator.normal(0, 0.5, 500)
    error = 0.5 * math.sqrt(500)  # of the sum of the noise
    units = np.ones(500)

    def draws(*nats):
        table = np.stack([np.stack([column, units], 1) for column in nats], 1)  # (documents, models, 2)
        return stats.with_errors(stats.bootstrap_rates(table), [error / 500, None])

    first, second = draws(hard + noise, hard)
    assert np.std(first) == pytest.approx(np.std(hard + noise) / math.sqrt(500), rel=0.05)  # and so its interval
    assert np.std(first - second) == pytest.approx(error / 500, rel=0.15)
    first, second = draws(hard, hard)  # which know nothing of the error
    assert np.std(first - second) == pytest.approx(error / 500, rel=0.05)


def test_an_interval_does_not_depend_on_other_rows(tmp_path):
    """Neither that of a value, nor of a difference, nor of gap closed."""
    tokens = np.arange(50, 62)
    nats = -tokens * np.linspace(3.0, 3.8, 12)
    hf(tmp_path / "ar", docs={"sotu": documents(nats + 8, tokens)})
    ours(tmp_path / "results", docs={"sotu": documents(nats - 9, tokens)}, estimator="elbo", spec={"mc_samples": "16"})
    ours(tmp_path / "results", docs={"sotu": documents(nats, tokens)})
    alone = run(tmp_path, "--pairs", "all")["tasks"]["sotu"]
    ours(tmp_path / "results", docs={"sotu": documents(nats - 9.01, tokens)}, model="Near", estimator="elbo")
    among = run(tmp_path, "--pairs", "all")["tasks"]["sotu"]

    def intervals(found):
        """Those that are not about the other row."""
        ends = []
        for row in found["rows"]:
            if row["model"] != "Near":
                ends += [row["interval"], row["gap_interval"], row["gap_closed_interval"]]
        for pair in found["pairs"]:
            if "Near" not in " ".join(pair["names"]):
                ends.append(pair["interval"])
        return np.array(list(filter(None, ends)))

    assert intervals(alone).shape == (3 + 2 + 1 + 3, 2)
    assert intervals(among) == pytest.approx(intervals(alone))


@pytest.mark.parametrize("lift", [0.2, 0.4])
@pytest.mark.parametrize("noise", [0.02, 0.8])
def test_a_headline_says_that_its_gap_closed_may_be_zero(tmp_path, noise, lift):
    """DUEL is below its ELBO, which is at 0.3, or above it: in all documents alike or on average only."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(50, 150, SIZE)
    hard = generator.normal(3.4, 0.4, SIZE)  # nats per token
    duel = hard + lift + noise * np.resize([1, -1], SIZE)
    hf(tmp_path / "ar", docs={"sotu": documents(-tokens * hard, tokens)})
    ours(tmp_path / "results", docs={"sotu": documents(-tokens * (hard + 0.3), tokens)}, estimator="elbo")
    ours(tmp_path / "results", docs={"sotu": documents(-tokens * duel, tokens)})
    found = run(tmp_path)
    row = rows(found, "sotu")["MDLM"]
    low, high = row["gap_closed_interval"]
    assert row["distinguishable"] and (low <= 0 <= high) == (noise == 0.8)
    assert (row["gap_closed"] > 0) == (lift == 0.2)
    [headline] = found["tasks"]["sotu"]["headlines"]
    assert (f"{stats.UNCLEAR} from 0" in headline) == (low <= 0 <= high)


def test_the_error_of_gap_closed_against_a_simulation():
    generator = np.random.default_rng(0)
    elbo = 40 + 0.1 * generator.standard_normal(200_000)
    duel = 37 + 0.2 * generator.standard_normal(200_000)
    simulated = (100 * (elbo - duel) / (elbo - 36)).std()
    assert stats.gap_closed_stderr(40, 37, 36, 0.1, 0.2) == pytest.approx(simulated, rel=0.02)
    assert stats.gap_closed_stderr(40, 37, 36, None, 0.2) is None is stats.gap_closed_stderr(40, 37, 36, 0.1, None)


@pytest.mark.parametrize("error", [0.001, 0.3, 2.0])
def test_the_interval_of_a_drawn_error_is_symmetric_on_a_logarithmic_axis(error):
    low, high = stats.drawn_interval("token_perplexity", math.log(40.0), error)
    assert 0 < low < 40.0 < high
    assert low * high == pytest.approx(40.0**2)
    assert math.log(high / 40.0) == pytest.approx(1.96 * error, rel=1e-3)
    low, high = stats.drawn_interval("bits_per_byte", math.log(2.0), error)
    assert (low + high) / 2 == pytest.approx(1.0)


# ---------------------------------------------------------------- two scores of the same texts


def scores(shift=0.0, seed=1, tokens=None, **drawn):
    """Scores of the same texts; `shift` in nats per token. `drawn`: as in `text_score`."""
    texts = np.random.default_rng(0)
    noise = np.random.default_rng(seed)
    found = []
    for n in range(SIZE):
        count = int(texts.integers(20, 60))
        hard = texts.normal(3.4, 0.5)
        nats = -count * (hard + shift + noise.normal(0, 0.02))
        found.append(text_score(f"text {n} " + "word " * count, nats, tokens or count, **drawn))
    return found


def test_a_difference_is_that_of_the_rates_with_the_error_of_a_paired_ratio():
    a = scores(0.0)
    b = scores(0.05, seed=2)
    found = compare(a, b, ("A", "B"))
    tokens = np.array([len(score.tokens) for score in a])
    nats_a = np.array([-score.log_prob for score in a])
    nats_b = np.array([-score.log_prob for score in b])
    expected = (nats_a - nats_b).sum() / tokens.sum()
    residuals = nats_a - nats_b - expected * tokens
    error = math.sqrt((residuals**2).sum()) / tokens.sum()
    low, high = found.interval
    assert found.difference == pytest.approx(expected, abs=1e-12) and found.unit == "token"
    assert found.perplexities == pytest.approx(tuple(np.exp([nats_a.sum(), nats_b.sum()] / tokens.sum())))
    assert (low + high) / 2 == pytest.approx(expected, abs=0.1 * error)
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.1)
    assert found.verdict == "A is better" and f"{expected:+.4f}" in str(found)
    back = compare(b, a, ("B", "A"))
    assert back.difference == -found.difference and back.interval == pytest.approx((-high, -low))
    assert compare(a, a).verdict == "equal"


def test_other_tokens_are_compared_per_byte():
    a = scores()
    b = scores(0.05, seed=2, tokens=7)
    found = compare(a, b)
    size = sum(len(score.text.encode()) for score in a)
    nats = sum(score.log_prob for score in b) - sum(score.log_prob for score in a)
    assert found.unit == "byte"
    assert found.difference == pytest.approx(nats / size)
    assert compare(a, b, unit="word").unit == "word"
    with pytest.raises(DuelError, match="other tokens"):
        compare(a, b, unit="token")
    with pytest.raises(DuelError, match="'unit'"):
        compare(a, b, unit="line")


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
    other = scores(shift, seed=2, **drawn)
    for found in (compare(scores(), other), compare(other, scores())):
        assert found.verdict.startswith("no verdict") and why in found.verdict


def test_an_error_that_is_known_of_all_texts_together_is_enough():
    few = scores(0.05, seed=2, estimator="two_phase", blocks=TwoPhaseBlocks(20, 2, 2, 1e-4))
    assert few[0].stderr is None and compare(scores(), few).verdict == "first is better"


def test_equal_texts_share_their_draws():
    """Twelve copies of one text have one error twelve times, as in the total of a run."""
    exact = [text_score("the same text", -30.0, 10)] * 12
    drawn = [text_score("the same text", -29.0, 10, **BOUND | {"stderr": 1.0})] * 12
    low, high = compare(exact, drawn).interval
    assert (high - low) / (2 * 1.96) == pytest.approx(1.0 / 10, rel=0.05)
    assert compare(exact, drawn).stderrs == (None, pytest.approx(math.exp(2.9) * 0.1))
    others = [text_score(f"other text {n}", -29.0, 10, **BOUND | {"stderr": 1.0}) for n in range(12)]
    low, high = compare([text_score(s.text, -30.0, 10) for s in others], others).interval
    assert (high - low) / (2 * 1.96) == pytest.approx(1.0 / 10 / math.sqrt(12), rel=0.05)


def test_other_texts_and_what_is_no_score_of_one_model_are_refused():
    for other in (scores()[:-1], scores()[::-1], []):
        with pytest.raises(DuelError, match="same texts"):
            compare(scores(), other)
    mixed = [*scores()[:-1], scores(estimator="oracle")[-1]]
    positive = [dataclasses.replace(scores()[0], log_prob=1.0), *scores()[1:]]
    unknown = [dataclasses.replace(scores()[0], log_prob=math.nan), *scores()[1:]]
    for other in (mixed, positive, unknown, ["text"] * SIZE, [3.0] * SIZE, "text"):
        for lists in ((scores(), other), (other, scores())):
            with pytest.raises(DuelError):
                compare(*lists)


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


def case(first, second, verdict):
    return pytest.param(first, second, verdict, id=verdict)


EMPTY = dataclasses.replace(scores()[0], text="", tokens=(), text_tokens=0, log_prob=0.0)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        case(scores(), scores(0.05, seed=2), "A is better"),
        case(*([text_score("one text", nats, 10)] * 12 for nats in (-30.0, -31.0)), "no verdict from 1 distinct"),
        case(*([*found[:2], EMPTY] for found in (scores(), scores(0.05, seed=2))), "no verdict from 3 distinct"),
        case(*([*found[:12], EMPTY] for found in (scores(), scores(0.1, seed=2))), "A is"),
    ],
)
def test_a_report_of_score_files_has_the_same_difference(tmp_path, first, second, verdict):
    """In two files and in one. Copies of a text count once for a verdict; an empty one takes no interval away."""
    files = {name: score_file(name, found) for name, found in (("A", first), ("B", second))}
    files["both"] = files["A"] | {"compared": [files["B"]]}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    expected = compare(first, second, ("A", "B"))
    for names in (("A", "B"), ("both",)):
        places = [str(tmp_path / f"{name}.json") for name in names]
        report([*places, "--out", str(tmp_path / "out"), "--metric", "token_perplexity"])
        (task,) = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"].values()
        (pair,) = task["pairs"]
        assert pair["names"] == ["A", "B"] and pair["difference"] == pytest.approx(expected.difference)
        assert pair["interval"] == pytest.approx(expected.interval)
        assert pair["verdict"] == expected.verdict and pair["verdict"].startswith(verdict)


def test_a_score_file_of_another_version_is_refused(tmp_path):
    file = tmp_path / "A.json"
    file.write_text(json.dumps(score_file("A", scores()) | {"version": SCORE_VERSION + 1}))
    with pytest.raises(DuelError, match="version"):
        read.runs([file])


def score_file(name, found):
    """As `score --json` writes it."""
    documents = []
    for score in found:
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
    spec = shared | {"block": "4", "tokenizer": "t", "version": "1"}
    head = {
        "format": "lm_eval_duel score",
        "version": SCORE_VERSION,
        "pretrained": name,
        "fingerprint": name,
        "spec": spec,
    }
    head["kind"] = Kind.LIKELIHOOD.value
    duel = {"schema": SCHEMA, **shared, "pretrained": name, "tasks": {}}
    return head | {"documents": documents, "duel": duel}


# ---------------------------------------------------------------- verdicts, and which rows are compared


def entry(rule, value=20.0, estimator="duel", block="4", cache="none", stderr=0.0, **spec):
    """A row with such a perplexity per token, of 10 tokens."""
    spec = {"elbo_block": block, **spec}
    run = SimpleNamespace(
        **{"label": "MDM", "has_cache": cache != "none", "key": "w"},
        config=SimpleNamespace(ours=True, block=block, cache=cache),
        spec=spec,
        every_task={"t": SimpleNamespace(unknown=0)},
    )
    named = {"run": run, "task": "t", "metric": "token_perplexity", "estimator": estimator, "rule": rule, "ar": False}
    known = {"metrics": {"token_perplexity": value}}
    score = registry.worth(estimator, spec).with_nats(-30.0, stderr)
    return Row(**named, **known, score=score, documents={}, missing=Note())


def compared(first, second, low, high, documents=50):
    known = dict.fromkeys(f"text {n}:1" for n in range(documents))
    first, second = (replace(row, documents=known) for row in (first, second))
    draws = {first: np.linspace(low, high, 1000) + math.log(20.0), second: np.zeros(1000) + math.log(20.0)}
    forward = gaps.pair(first, second, draws)
    backward = gaps.pair(second, first, draws)
    assert forward.verdict == backward.verdict
    assert forward.interval == pytest.approx([-value for value in reversed(backward.interval)])
    return forward.verdict


def test_verdicts():
    greedy = entry("greedy:k=1")
    margin = entry("margin:k=1")
    assert compared(greedy, margin, -0.2, -0.1) == "greedy is better"
    assert compared(greedy, margin, 0.1, 0.2) == "margin is better"
    assert compared(greedy, margin, -0.1, 0.2) == "not distinguishable"
    assert compared(greedy, margin, -1e-9, 2e-8) == "equal"
    assert compared(greedy, margin, 0.1, 0.2, 9) == "no verdict from 9 distinct documents"
    assert compared(greedy, entry("greedy:k=1", block="8"), 0.1, 0.2) == "block 8 is better"


def test_a_bound_decides_only_what_it_proves():
    greedy = entry("greedy:k=1")
    elbo = entry(None, estimator="elbo")
    other = entry(None, estimator="elbo", mc_samples="16")
    assert compared(greedy, elbo, 0.1, 0.2) == "what ELBO bounds is better"  # it is at or below the bound
    for low, high in ((-0.2, -0.1), (-0.1, 0.2), (-1e-9, 2e-8)):  # it may be anywhere below the bound
        assert compared(greedy, elbo, low, high) == "no verdict: only a bound"
    for low, high in ((-0.2, -0.1), (0.1, 0.2), (-0.1, 0.2)):
        assert compared(elbo, other, low, high).startswith("no verdict")


def test_values_that_are_neither_likelihoods_nor_bounds_have_no_verdict():
    greedy = entry("greedy:k=1")
    assert compared(greedy, entry(None, estimator="elbo", elbo_eps="0.1"), 0.1, 0.2).endswith("nor a bound")
    unknown = entry(None, estimator="elbo", stderr=None, mc_samples="4")
    assert compared(greedy, unknown, 0.1, 0.2).startswith("no verdict: Monte Carlo error not known (mc_samples=4")


def test_rows_that_are_compared():
    rules = [entry(f"threshold:mu=0.{n}", 20.0 + (n - 3) ** 2) for n in range(1, 8)]
    others = [entry("greedy:k=1", block="8"), entry("margin:k=1", block="8"), entry("margin:k=1", cache="dual")]
    entries = [*rules, *others, entry(None, estimator="oracle")]

    def chosen(choice):
        shown = [SimpleNamespace(row=row) for row in entries]
        pairs = side_by_side.choose(choice, shown, {})
        return [(entries.index(pair.first), entries.index(pair.second)) for pair in pairs]

    assert chosen("rules") == [*((n, 2) for n in (6, 5, 0, 4, 1, 3)), (7, 8)]  # more than five: with the lowest
    assert len(chosen("all")) == 10 * 9 // 2 and all(10 not in pair for pair in chosen("all"))
    assert chosen("none") == []


def test_a_row_beside_another_temperature_stays_among_the_rules_of_its_own(tmp_path):
    """Its name tells the two apart; that of a rule with one temperature does not, and both are of one distribution."""
    folder = tmp_path / "results"
    warm = {"warpers": "temperature=0.7"}
    ours(folder, per_token(["ten"], [20.0]), nfe=1.0)
    ours(folder, per_token(["ten"], [21.0]), rule="greedy:k=2", nfe=0.5)
    ours(folder, per_token(["ten"], [19.0]), nfe=1.0, spec=warm)
    ours(folder, per_token(["ten"], [23.0]), rule="greedy:k=4", nfe=0.25, spec=warm)
    task = run(tmp_path, "--pairs", "rules")["tasks"]["ten"]
    values = [row["value"] for row in task["rows"]]
    pairs = [{round(values[pair[end]]) for end in ("first", "second")} for pair in task["pairs"]]
    assert sorted(map(sorted, pairs)) == [[19, 23], [20, 21]]
    speeds = [[round(values[n]) for n in each["families"]["greedy"]] for each in task["rules"]]
    assert sorted(speeds) == [[21, 20], [23, 19]]
    assert len({each["title"] for each in task["rules"]}) == 2


def test_two_digits_of_a_large_error_have_no_exponent():
    assert [number(value, ".2g") for value in (0.034, 4.5, 136.4, 1364.2)] == ["0.034", "4.5", "136", "1,364"]


def test_no_gap_is_closed_between_two_samplers(tmp_path):
    """Commit-once (`noise_seed`) and the sampler of `noised_elbo` are two laws: neither value bounds the other."""
    sizes = [10 + n % 7 for n in range(12)]
    noise = {"noise": "uniform", "noise_seed": "0"}
    for model, estimator, rate, spec in (
        ("Duo", "noised_elbo", 3.6, {"noise": "uniform", "steps": "inf"}),
        ("Duo", "duel", 3.0, noise),
        ("Duo", "duel_seeds", 3.1, {**noise, "noise_seeds": "8"}),
        ("MDLM", "elbo", 3.6, {"elbo_block": "none"}),
        ("MDLM", "duel", 3.0, {}),
    ):
        found = {"sotu": documents([-rate * size for size in sizes], sizes)}
        block = "none" if "elbo" in estimator else "4"
        ours(tmp_path / "results", model=model, estimator=estimator, docs=found, spec=spec, block=block)
    hf(tmp_path / "ar", docs={"sotu": documents([-2.5 * size for size in sizes], sizes)})
    printed = run(tmp_path, "--page")
    table = printed["tasks"]["sotu"]["rows"]
    closed = {(row["model"], row["estimator"]): row["gap_closed"] for row in table}
    assert closed["MDLM", "duel"] is not None, "under masks a gap is closed"
    noised = [row for row in table if row["model"] == "Duo"]
    assert [(row["gap_closed"], row["elbo"]) for row in noised] == [(None, None)] * 3
    assert all(row["gap_closed_reason"] for row in noised if row["estimator"] != "noised_elbo")
    [headline] = [line for line in printed["tasks"]["sotu"]["headlines"] if "Duo" in line]
    assert "closed" not in headline
