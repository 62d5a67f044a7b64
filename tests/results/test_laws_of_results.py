"""Laws of the statistics: bootstrap intervals, paired differences, verdicts, gap closed, and the paper's tables."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from results import documents, hf, ours, per_token, rows
from results import report as run

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import bootstrap, gaps, stats
from lm_eval_duel.results import compare as side_by_side
from lm_eval_duel.results.rows import Row
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
    results = tmp_path / "results"
    for model, (elbo, duel, _) in table.items():
        attention = "bidirectional"
        block = "4"
        elbo_block = "None"
        if model.startswith("BD3-LM-"):
            attention = "block_causal"
            block = model.removeprefix("BD3-LM-")
            elbo_block = block
        shape = {"attention": attention, "block": block}
        ours(results, per_token([name], [elbo]), model, "elbo", spec={"elbo_block": elbo_block}, **shape)
        ours(results, per_token([name], [duel]), model, **shape)

    rows_of_models = rows(run(tmp_path), name)

    assert rows_of_models.keys() == table.keys()
    for model, (_, _, gap_closed) in table.items():
        row = rows_of_models[model]
        assert round(row["gap_closed"], 1) == gap_closed
        assert row["best"]


# ---------------------------------------------------------------- intervals


def test_the_paired_bootstrap_against_the_analytic_error(tmp_path):
    """Documents whose difficulty is shared by AR, ELBO and DUEL."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(50, 150, 400)
    hard = generator.normal(3.4, 0.4, 400)  # nats per token

    def nats_of_model(shift):
        return -tokens * (hard + shift + generator.normal(0, 0.02, 400))

    ar = nats_of_model(0.0)
    elbo = nats_of_model(0.3)
    duel = nats_of_model(0.2)
    hf(tmp_path / "ar", docs={"sotu": documents(ar, tokens)})
    ours(tmp_path / "results", docs={"sotu": documents(elbo, tokens)}, estimator="elbo")
    ours(tmp_path / "results", docs={"sotu": documents(duel, tokens)})

    content = run(tmp_path)
    assert run(tmp_path) == content  # seeded

    # The interval of the value has the error of a ratio of sums.
    row = rows(content, "sotu")["MDLM"]
    rate = -duel.sum() / tokens.sum()
    residuals = -duel - rate * tokens
    error_of_rate = np.sqrt((residuals**2).sum()) / tokens.sum()
    low, high = row["interval"]
    assert (high - low) / (2 * 1.96) == pytest.approx(error_of_rate * math.exp(rate), rel=0.05)

    # That of gap closed is narrower than one of unpaired draws: of other documents for each model.
    def unpaired_draws(nats, seed):
        table = np.stack([nats, tokens], 1).astype(float)
        return stats.value("token_perplexity", *bootstrap.resample(table, seed=seed).T)

    low, high = row["gap_closed_interval"]
    assert low < row["gap_closed"] < high
    unpaired, _ = stats.gap_interval(unpaired_draws(elbo, 1), unpaired_draws(duel, 2), unpaired_draws(ar, 0), 400)
    assert unpaired is None or high - low < 0.3 * (unpaired[1] - unpaired[0])


@pytest.mark.parametrize(("freedom", "quantile"), [(9, 2.262), (11, 2.201), (35, 2.030), (10**9, 1.960)])
def test_the_quantile_of_students_t(freedom, quantile):
    assert bootstrap.student_quantile(freedom) == pytest.approx(quantile, abs=1e-3)


@pytest.mark.parametrize("size", [12, 36])
def test_of_twenty_pairs_that_do_not_differ_one_is_called_different(size):
    """Among 4,000, the standard error is 0.34 %. With percentiles at 2.5 and 97.5 it would be 8 and 6 %."""
    pairs = 4000
    differences = np.random.default_rng(size).standard_normal((size, pairs))
    keys = list(map(str, range(size)))
    equal = stats.Side("b", stats.Value(-1.0), "", np.ones(bootstrap.DRAWS))
    called = 0
    for begin in range(0, pairs, 500):
        some = differences[:, begin : begin + 500]
        for draws in bootstrap.resample(some).T / size:
            side = stats.Side("a", stats.Value(-1.0 - draws.mean()), "", 1.0 + draws)
            called += bool(stats.difference(side, equal, "token", keys).better)
    assert called / pairs == pytest.approx(0.05, abs=0.012)


def test_copies_do_not_narrow_an_interval():
    """Neither of a value, nor of a gap, a pair or a gap closed: as many documents count as are different."""
    texts = [f"{n % 12}:{n // 12}" for n in range(24)]
    draws = np.random.default_rng(0).standard_normal((3, 10_000)) * 1e-3
    row, elbo, ar = (replace(entry("greedy:k=1", value), documents=dict.fromkeys(texts)) for value in (20, 24, 16))
    of_rows = dict(zip((row, elbo, ar), draws + np.log([[20.0], [24.0], [16.0]]), strict=True))
    values, values_of_elbo, values_of_ar = (np.exp(of_rows[each]) for each in (row, elbo, ar))
    closed = 100 * (values_of_elbo - values) / (values_of_elbo - values_of_ar)

    for interval, drawn in (
        (gaps.interval(row, of_rows), values),
        (gaps.gap_interval(row, ar, of_rows), values - values_of_ar),
        (gaps.pair(row, ar, of_rows).interval, of_rows[row] - of_rows[ar]),
        (gaps.close_gap(row, elbo, ar, of_rows, "").interval, closed),
    ):
        assert interval == pytest.approx(bootstrap.percentile_interval(drawn, 12))
        assert interval != pytest.approx(bootstrap.percentile_interval(drawn, 24))


def test_draws_that_are_made_together_are_those_of_a_loop():
    """At a number of documents for which not all draws are made at once."""
    columns = np.random.default_rng(3).normal(size=(130, 2))
    random = np.random.default_rng(7)
    sums = [columns[random.integers(130, size=130)].sum(0) for _ in range(bootstrap.DRAWS)]
    assert bootstrap.DRAWS * len(columns) > bootstrap.DRAWN_TOGETHER
    assert bootstrap.resample(columns, seed=7) == pytest.approx(np.array(sums), abs=1e-9)


def test_draws_without_a_positive_gap_are_counted_or_end_the_interval():
    generator = np.random.default_rng(0)
    ar = np.full(1000, 20.0)
    elbo = 20 + np.abs(generator.normal(1, 0.1, 1000))
    elbo[:10] = 19.0

    interval, remark = stats.gap_interval(elbo, ar + 0.3, ar, 400)
    assert interval is not None
    assert remark == "10 of 1,000 draws without a positive ELBO gap are left out"

    elbo[:30] = 20.0
    interval, remark = stats.gap_interval(elbo, ar + 0.3, ar, 400)
    assert interval is None
    draws = "in 30 of 1,000 draws of documents it is not positive"
    assert remark == f"the ELBO's gap is not distinguishable from 0: {draws}"


def test_copies_of_texts_tell_nothing_new():
    """A corpus that holds each text twice, and one that holds a text three times, have the draws of each text once."""
    generator = np.random.default_rng(1)
    table = generator.uniform(1, 2, (12, 2, 2))  # (documents, models, 2)
    texts = [f"text {n}" for n in range(12)]
    once = bootstrap.bootstrap_rates(table, texts)
    assert bootstrap.bootstrap_rates(np.concatenate([table, table]), [*texts, *texts]) == pytest.approx(once)

    weighted = table.copy()
    weighted[0] *= 3
    copies = np.concatenate([table, table[:1], table[:1]])
    of_weighted = bootstrap.bootstrap_rates(weighted, texts)
    assert bootstrap.bootstrap_rates(copies, [*texts, "text 0", "text 0"]) == pytest.approx(of_weighted)


def test_a_bootstrap_that_holds_the_monte_carlo_error_gets_no_more_of_it():
    generator = np.random.default_rng(1)
    hard = generator.normal(3, 1, 500)
    noise = generator.normal(0, 0.5, 500)
    error = 0.5 * math.sqrt(500)  # of the sum of the noise
    units = np.ones(500)

    def draws(*nats):
        table = np.stack([np.stack([column, units], 1) for column in nats], 1)  # (documents, models, 2)
        return bootstrap.with_errors(
            bootstrap.bootstrap_rates(table, [str(n) for n in range(500)]), [error / 500, None]
        )

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
    beside_another = run(tmp_path, "--pairs", "all")["tasks"]["sotu"]

    def intervals(task):
        """Those that are not about the other row."""
        ends = []
        for row in task["rows"]:
            if row["model"] != "Near":
                ends += [row["interval"], row["gap_interval"], row["gap_closed_interval"]]
        for pair in task["pairs"]:
            if "Near" not in " ".join(pair["names"]):
                ends.append(pair["interval"])
        return np.array([interval for interval in ends if interval is not None])

    assert intervals(alone).shape == (3 + 2 + 1 + 3, 2)
    assert intervals(beside_another) == pytest.approx(intervals(alone))


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

    content = run(tmp_path)

    row = rows(content, "sotu")["MDLM"]
    low, high = row["gap_closed_interval"]
    may_be_zero = low <= 0 <= high
    assert row["distinguishable"]
    assert may_be_zero == (noise == 0.8)
    assert (row["gap_closed"] > 0) == (lift == 0.2)
    [headline] = content["tasks"]["sotu"]["headlines"]
    assert (f"{stats.UNCLEAR} from 0" in headline) == may_be_zero


def test_the_error_of_gap_closed_against_a_simulation():
    generator = np.random.default_rng(0)
    elbo = 40 + 0.1 * generator.standard_normal(200_000)
    duel = 37 + 0.2 * generator.standard_normal(200_000)
    simulated = (100 * (elbo - duel) / (elbo - 36)).std()

    assert stats.gap_closed_stderr(40, 37, 36, 0.1, 0.2) == pytest.approx(simulated, rel=0.02)
    assert stats.gap_closed_stderr(40, 37, 36, None, 0.2) is None
    assert stats.gap_closed_stderr(40, 37, 36, 0.1, None) is None


@pytest.mark.parametrize("error", [0.001, 0.3, 2.0])
def test_the_interval_of_a_drawn_error_is_symmetric_on_a_logarithmic_axis(error):
    low, high = stats.drawn_interval("token_perplexity", math.log(40.0), error)
    assert 0 < low < 40.0 < high
    assert low * high == pytest.approx(40.0**2)
    assert math.log(high / 40.0) == pytest.approx(1.96 * error, rel=1e-3)
    low, high = stats.drawn_interval("bits_per_byte", math.log(2.0), error)
    assert (low + high) / 2 == pytest.approx(1.0)


# ---------------------------------------------------------------- verdicts, and which rows are compared


def entry(rule, value=20.0, estimator="duel", block="4", cache="none", stderr=0.0, **spec):
    """A row with such a perplexity per token, of 10 tokens."""
    spec = {"elbo_block": block, **spec}
    run = SimpleNamespace(
        label="MDM",
        key="w",
        has_cache=cache != "none",
        config=SimpleNamespace(ours=True, block=block, cache=cache, duel={}),
        spec={"tokenizer": "one", **spec},
        tasks={"t": SimpleNamespace(rolling=False)},
        every_task={"t": SimpleNamespace(unknown=0)},
        cut_contexts=lambda name: 0,
    )
    return Row(
        run=run,
        task="t",
        metric="token_perplexity",
        estimator=estimator,
        rule=rule,
        metrics={"token_perplexity": value},
        score=registry.value_template(estimator, spec).with_nats(-30.0, stderr),
        documents={},
        missing=Note(),
        ar=False,
    )


def compared(first, second, low, high, documents=50):
    """The verdict on two rows whose difference has draws from `low` to `high`; with the rows exchanged the same."""
    keys = {f"text {n}:1": None for n in range(documents)}
    first = replace(first, documents=keys)
    second = replace(second, documents=keys)
    rate = math.log(20.0)
    draws = {first: rate + np.linspace(low, high, 1000), second: rate + np.zeros(1000)}
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
    entries = []
    for n in range(1, 8):  # 0 to 6: rules of block 4, the third the lowest
        entries.append(entry(f"threshold:mu=0.{n}", 20.0 + (n - 3) ** 2))
    entries.append(entry("greedy:k=1", block="8"))  # 7
    entries.append(entry("margin:k=1", block="8"))  # 8
    entries.append(entry("margin:k=1", cache="dual"))  # 9
    entries.append(entry(None, estimator="oracle"))  # 10

    def chosen(choice):
        shown = [SimpleNamespace(row=row) for row in entries]
        pairs = side_by_side.choose(choice, shown, {})
        return [(entries.index(pair.first), entries.index(pair.second)) for pair in pairs]

    with_the_lowest = [(6, 2), (5, 2), (0, 2), (4, 2), (1, 2), (3, 2)]  # the largest difference first
    assert chosen("rules") == [*with_the_lowest, (7, 8)]
    assert len(chosen("all")) == 10 * 9 // 2
    assert all(10 not in pair for pair in chosen("all"))
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
    values = [round(row["value"]) for row in task["rows"]]

    pairs = []
    for pair in task["pairs"]:
        pairs.append(sorted([values[pair["first"]], values[pair["second"]]]))
    assert sorted(pairs) == [[19, 23], [20, 21]]

    values_of_sweeps = []
    for speeds in task["rules"]:
        values_of_sweeps.append([values[n] for n in speeds["families"]["greedy"]])
    assert sorted(values_of_sweeps) == [[21, 20], [23, 19]]
    assert len({speeds["title"] for speeds in task["rules"]}) == 2


def test_two_digits_of_a_large_error_have_no_exponent():
    for value, text in ((0.034, "0.034"), (4.5, "4.5"), (136.4, "136"), (1364.2, "1,364")):
        assert number(value, ".2g") == text


def test_no_gap_is_closed_between_two_samplers(tmp_path):
    """Commit-once (`noise_seed`) and the sampler of `noised_elbo` are two laws: neither value bounds the other."""
    sizes = 10 + np.arange(12) % 7
    noise = {"noise": "uniform", "noise_seed": "0"}
    for model, estimator, rate, spec in (
        ("Duo", "noised_elbo", 3.6, {"noise": "uniform", "steps": "inf"}),
        ("Duo", "duel", 3.0, noise),
        ("Duo", "duel_seeds", 3.1, {**noise, "noise_seeds": "8"}),
        ("MDLM", "elbo", 3.6, {"elbo_block": "none"}),
        ("MDLM", "duel", 3.0, {}),
    ):
        docs = {"sotu": documents(-rate * sizes, sizes)}
        block = "none" if "elbo" in estimator else "4"
        ours(tmp_path / "results", model=model, estimator=estimator, docs=docs, spec=spec, block=block)
    hf(tmp_path / "ar", docs={"sotu": documents(-2.5 * sizes, sizes)})

    task = run(tmp_path, "--page")["tasks"]["sotu"]
    for row in task["rows"]:
        if row["model"] == "Duo":
            assert row["gap_closed"] is None
            assert row["elbo"] is None
            assert row["gap_closed_reason"] or row["estimator"] == "noised_elbo"
        if row["model"] == "MDLM" and row["estimator"] == "duel":
            assert row["gap_closed"] is not None, "under masks a gap is closed"
    [headline] = [line for line in task["headlines"] if "Duo" in line]
    assert "closed" not in headline
