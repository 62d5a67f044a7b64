"""The report against the paper's printed tables, and what it refuses."""

import json
import math

import numpy as np
import pytest
from results import documents, edit, edit_samples, hf, ours, trace

from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import figures, stats
from lm_eval_duel.results.report import main as report
from lm_eval_duel.results.rows import SEES_TRUTH

# ---------------------------------------------------------------- the paper, as printed

OWT = {  # model: ELBO, DUEL, gap closed
    "SEDD": (24.10, 22.58, 23.2),
    "MDLM": (22.98, 21.86, 20.6),
    "BD3-LM-4": (20.73, 19.73, 31.3),
    "BD3-LM-8": (21.68, 20.37, 31.6),
    "BD3-LM-16": (22.27, 20.76, 31.9),
}
LM1B = {
    "SEDD": (32.68, 31.51, 11.9),
    "MDLM": (31.78, 29.03, 30.7),
    "BD3-LM-4": (28.23, 26.97, 23.3),
    "BD3-LM-8": (29.83, 27.85, 28.3),
    "BD3-LM-16": (30.60, 28.39, 28.4),
}


def per_token(names, values):
    return {name: {"token_perplexity": value} for name, value in zip(names, values, strict=True)}


def pair(folder, model, names, elbo, duel, **spec):
    """An ELBO and a DUEL result of one model."""
    block = spec.pop("block", "4")
    causal = model.startswith("BD3")
    shape = {"attention": "block_causal" if causal else "bidirectional", "block": block}
    ours(folder, per_token(names, elbo), model, "elbo", spec={"elbo_block": block if causal else "None"}, **shape)
    ours(folder, per_token(names, duel), model, **shape)


def run(tmp_path, *arguments, ar=True):
    """The report's JSON; ar: `ARM` among the results is the baseline."""
    out = tmp_path / "out"
    given = ["--ar", str(tmp_path / "ar")] if ar else []
    report([str(tmp_path / "results"), *given, "--out", str(out), *map(str, arguments)])
    return json.loads((out / "report.json").read_text())


def rows(found, task, estimator="duel"):
    return {row["model"]: row for row in found["tasks"][task]["rows"] if row["estimator"] == estimator}


@pytest.mark.parametrize(("name", "ar", "table"), [("owt", 17.54, OWT), ("lm1b", 22.83, LM1B)])
def test_in_domain_tables_of_the_paper(tmp_path, no_figures, name, ar, table):
    ours(tmp_path / "ar", per_token([name], [ar]), "ARM", "ar", rule=None, block="1", attention="causal")
    for model, (elbo, duel, _) in table.items():
        pair(
            tmp_path / "results", model, [name], [elbo], [duel], block=model.rpartition("-")[2] if "-" in model else "4"
        )
    found = rows(run(tmp_path), name)
    assert {model: round(row["gap_closed"], 1) for model, row in found.items()} == {
        m: row[2] for m, row in table.items()
    }
    assert all(row["best"] for row in found.values())


# ---------------------------------------------------------------- one lattice run, and the oracle


ORACLE = {"elbo_exact": 60.72, "mixture": 58.90, "oracle": 36.47, "left_to_right:k=1": 54.94, "greedy:k=1": 56.73}


def lattice(folder, selected="elbo_exact", **more):
    first = {"ag_news": {"token_perplexity": ORACLE[selected], "word_perplexity": 900.0}}
    shape = {"model": "BD3-LM", "estimator": selected, "attention": "block_causal"}
    return ours(folder, first, values={"ag_news": ORACLE}, **shape, **more)


def test_a_lattice_run_gives_several_rows(tmp_path, no_figures):
    hf(tmp_path / "ar", {"ag_news": {"token_perplexity": 52.11, "word_perplexity": 700.0}}, log=False)
    lattice(tmp_path / "results")
    found = run(tmp_path, "--as-published")
    shown = {row["rule"] or row["estimator"]: row for row in found["tasks"]["ag_news"]["rows"]}
    for name, value in ORACLE.items():
        assert shown[name]["value"] == pytest.approx(value)
        assert math.log(shown[name]["metrics"]["word_perplexity"]) == pytest.approx(
            math.log(900) * math.log(value) / math.log(60.72)
        )
    assert shown["greedy:k=1"]["gap_closed"] == pytest.approx(stats.gap_closed(60.72, 56.73, 52.11))
    (said,) = found["tasks"]["ag_news"]["elbo"]
    assert said.startswith("ELBO of BD3-LM") and "elbo_exact; there is no Monte Carlo ELBO" in said
    assert [name for name, row in shown.items() if row["best"]] == ["left_to_right:k=1"]


def test_cached_answers_leave_the_harness_value_only(tmp_path, no_figures):
    file = lattice(tmp_path / "results")
    body = json.loads(file.read_text())
    body["config"]["duel"]["tasks"]["ag_news"]["documents"] = 1
    file.write_text(json.dumps(body))
    found = run(tmp_path, ar=False)
    assert [row["estimator"] for row in found["tasks"]["ag_news"]["rows"]] == ["elbo_exact"]
    assert any("response cache" in note for note in found["tasks"]["ag_news"]["notes"])


# ---------------------------------------------------------------- intervals


def correlated(tmp_path, size=400, seed=1, log=True):
    """Documents whose difficulty is shared by AR, ELBO and DUEL."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(50, 150, size)
    hard = generator.normal(3.4, 0.4, size)
    noise = [generator.normal(0, 0.02, size) for _ in range(3)]
    nats = [-tokens * (hard + shift + e) for shift, e in zip((0.0, 0.3, 0.2), noise, strict=True)]
    ar, elbo, duel = ({"sotu": documents(n, tokens)} for n in nats)
    hf(tmp_path / "ar", docs=ar)
    ours(tmp_path / "results", docs=elbo, estimator="elbo", log=log)
    ours(tmp_path / "results", docs=duel)
    return tokens, nats


def test_paired_bootstrap_against_the_analytic_error(tmp_path, no_figures):
    tokens, nats = correlated(tmp_path)
    first = run(tmp_path)
    assert run(tmp_path) == first  # seeded
    row = rows(first, "sotu")["MDLM"]
    rate = -nats[2].sum() / tokens.sum()
    error = np.sqrt(((-nats[2] - rate * tokens) ** 2).sum()) / tokens.sum() * math.exp(rate)  # of a ratio of sums
    low, high = row["interval"]
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.05)
    low, high = row["gap_closed_interval"]
    assert low < row["gap_closed"] < high

    columns = [np.stack([n, tokens], 1).astype(float) for n in nats]
    ar, elbo, duel = (stats.value("token_perplexity", *stats.resample(c, seed=s).T) for s, c in enumerate(columns))
    unpaired, _ = stats.gap_interval(elbo, duel, ar)
    assert unpaired is None or high - low < 0.3 * (unpaired[1] - unpaired[0])


def test_resampling_in_pieces_has_the_right_moments(monkeypatch):
    columns = np.random.default_rng(0).normal(5, 2, (50, 2))
    monkeypatch.setattr(stats, "MAX_DRAWN", 700)
    sums = stats.resample(columns, draws=4000, seed=3)
    assert sums.shape == (4000, 2)
    assert sums.mean(0) == pytest.approx(columns.sum(0), rel=0.01)
    assert sums.std(0) == pytest.approx(columns.std(0) * np.sqrt(50), rel=0.05)


def test_draws_without_a_positive_gap_are_counted_or_end_the_interval():
    generator = np.random.default_rng(0)
    ar = np.full(1000, 20.0)
    elbo = 20 + np.abs(generator.normal(1, 0.1, 1000))
    elbo[:10] = 19.0
    found, said = stats.gap_interval(elbo, ar + 0.3, ar)
    assert found is not None and said == "10 of 1,000 draws without a positive ELBO gap are left out"
    elbo[:30] = 20.0
    assert stats.gap_interval(elbo, ar + 0.3, ar) == (None, "no interval: 30 of 1,000 draws have no positive ELBO gap")


def test_a_number_per_document_is_aggregated_as_the_harness_does(tmp_path, no_figures):
    file = ours(tmp_path / "results", {"lambada": {"token_perplexity": 9.0}}, size=3)
    body = json.loads(file.read_text())
    body["results"]["lambada"] = {"perplexity,none": math.exp(2.0), "acc,none": 0.5}
    file.write_text(json.dumps(body))
    lines = [{"doc_id": n, "doc": {"n": n}, "doc_hash": str(n), "perplexity": v} for n, v in enumerate((-1, -2, -3))]
    samples = file.with_name(file.name.replace("results_", "samples_lambada_")).with_suffix(".jsonl")
    samples.write_text("\n".join(map(json.dumps, lines)))
    found = run(tmp_path, ar=False)
    row = rows(found, "lambada")["MDLM"]
    assert found["tasks"]["lambada"]["metric"] == "perplexity"
    assert row["interval"][0] < row["value"] < row["interval"][1]


# ---------------------------------------------------------------- refusals


TEXTS = [f"a text of number {n}" for n in range(4)]


def two(tmp_path, here=None, there=None, nats=(-30.0, -40.0, -50.0, -60.0), tokens=(10, 12, 14, 16)):
    """An hf and one of our results on the same four documents, with changes."""
    docs = {"sotu": documents(nats, tokens, TEXTS)}
    hf(tmp_path / "ar", **{"docs": docs, **(here or {})})
    ours(tmp_path / "results", **{"docs": docs, **(there or {})})


OFFICIAL = {"special_tokens": "[0] text [1], bos=official"}
OTHER_COUNTS = {"sotu": documents((-30.0, -40.0, -50.0, -60.0), (11, 12, 14, 16), TEXTS)}
REFUSED = {
    "windows: harness, 8 target positions (derived) in *, but independent, 126 target positions in *": (
        {"max_length": 8},
        {"spec": {"windows": "independent"}, "duel": {"row_capacity": 126}},
    ),
    "scored positions: the text in *, but bos=official in *": ({}, {"spec": OFFICIAL}),
    "tokenizer: unknown (52 tokens) in *, but gpt2-hash (53 tokens) in *": ({}, {"docs": OTHER_COUNTS}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_by_name_or_listed(tmp_path, no_figures, said):
    here, there = REFUSED[said]
    two(tmp_path, here, there)
    with pytest.raises(DuelError) as error:
        run(tmp_path)
    message = str(error.value)
    start, middle, end = said.split("*")[0], said.split("*")[1], "To compare, "
    assert message.startswith(f"token_perplexity of sotu cannot be compared: {start}")
    assert middle in message and end in message and "--as-published" in message
    assert message.count("results_2026") == 2
    found = run(tmp_path, "--as-published")
    assert any(line.startswith(start) for line in found["tasks"]["sotu"]["differences"])
    assert "**Compared as published, although these differ:**" in (tmp_path / "out" / "report.md").read_text()


def test_other_documents_are_refused_whatever_is_asked(tmp_path, no_figures):
    docs = {"sotu": documents((-30.0, -40.0), (10, 12), TEXTS[:2])}
    two(tmp_path, {"docs": docs})
    with pytest.raises(DuelError, match=r"documents: 2 \(2 of them in both\) in .*, but 4 \(2 of them in both\) in"):
        run(tmp_path, "--as-published")


@pytest.mark.parametrize(
    ("field", "here", "there"),
    [
        ("documents", {"size": 7}, {}),
        ("documents (shots)", {"shots": 5}, {}),
        ("documents (version)", {"version": 2.0}, {}),
    ],
)
def test_without_samples_documents_are_told_by_the_results_file(tmp_path, field, here, there):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]), **here)
    ours(tmp_path / "results", per_token(["owt"], [21.0]), **there)
    with pytest.raises(DuelError) as error:
        run(tmp_path, "--as-published")
    assert f"compared: {field}: " in str(error.value)


def test_an_unknown_tokenizer_is_refused_and_the_quotient_of_metrics_tells(tmp_path, no_figures):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [21.0]))
    with pytest.raises(DuelError, match=r"tokenizer \(unknown\): unknown in .* but gpt2-hash in .*--log_samples"):
        run(tmp_path)
    other = tmp_path / "other"
    hf(other / "ar", {"owt": {"token_perplexity": 20.0, "word_perplexity": 400.0}})
    ours(other / "results", {"owt": {"token_perplexity": 25.0, "word_perplexity": 625.0}})
    assert rows(run(other), "owt")["MDLM"]["value"] == 25.0


def test_word_perplexity_stands_across_tokenizers(tmp_path, no_figures):
    two(tmp_path, {}, {"docs": OTHER_COUNTS})
    with pytest.raises(DuelError, match="--metric word_perplexity"):
        run(tmp_path)
    found = run(tmp_path, "--metric", "word_perplexity")["tasks"]["sotu"]
    assert found["metric"] == "word_perplexity" and any("tokenizer" in line for line in found["differences"])
    with pytest.raises(DuelError, match="Wanted perplexity of sotu, but there is"):
        run(tmp_path, "--metric", "perplexity")


def test_the_ar_result_must_be_one_and_autoregressive(tmp_path):
    pair(tmp_path / "results", "SEDD", ["owt"], [24.10], [22.58])
    ours(tmp_path / "ar", per_token(["owt"], [17.54]))
    with pytest.raises(DuelError, match="is a result of estimator=duel, not of an autoregressive model"):
        run(tmp_path)
    other = tmp_path / "other"
    pair(other / "results", "SEDD", ["owt"], [24.10], [22.58])
    hf(other / "ar", per_token(["owt"], [17.54]))
    hf(other / "ar", per_token(["owt"], [17.54]))
    with pytest.raises(DuelError, match="--ar holds owt more than once"):
        run(other)


def test_files_that_are_no_results(tmp_path):
    with pytest.raises(DuelError, match="No file or folder"):
        report([str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    with pytest.raises(DuelError, match=r"No results_\*\.json \(or \*_DATE\.json\) in"):
        report([str(tmp_path), "--out", str(tmp_path / "out")])
    (tmp_path / "results_x.json").write_text("{}")
    with pytest.raises(DuelError, match=r"is not a results file of lm_eval, or is not whole \(KeyError"):
        report([str(tmp_path), "--out", str(tmp_path / "out")])


# ---------------------------------------------------------------- which ELBO, notes, cost


def test_the_elbo_of_a_bidirectional_network_is_over_the_whole_target(tmp_path, no_figures):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    ours(tmp_path / "results", per_token(["owt"], [22.5]), estimator="elbo", spec={"elbo_block": "4"})
    row = rows(run(tmp_path, "--as-published"), "owt")["MDLM"]
    assert row["gap_closed"] is None and row["gap_closed_reason"] == "no ELBO (estimator=elbo, elbo_block=none)"
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo", spec={"mc_samples": "8"})
    found = run(tmp_path, "--as-published")
    assert rows(found, "owt")["MDLM"]["gap_closed"] == pytest.approx(stats.gap_closed(23.0, 22.0, 17.54))
    (said,) = found["tasks"]["owt"]["elbo"]
    assert said.startswith("ELBO of MDLM: Monte Carlo, mc_samples=8, elbo_form=count, elbo_block=none, standard error")


def test_two_models_of_one_label_are_told_apart(tmp_path, no_figures):
    ours(tmp_path / "results", per_token(["owt"], [21.0]), "a/last")
    ours(tmp_path / "results", per_token(["owt"], [22.0]), "b/last")
    assert set(rows(run(tmp_path, ar=False), "owt")) == {"a/last", "b/last"}


def test_cost_against_the_elbo_and_a_stock_run(tmp_path, no_figures):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]), duel={"seconds": 30.0})
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo")
    found = run(tmp_path, "--as-published")
    (duel,) = [entry for entry in found["cost"] if entry["estimator"] == "duel"]
    assert duel["seconds_per_token"] == 0.03 and duel["times_elbo"] == pytest.approx(3.0)
    assert duel["times_ar"] == 1.0 and "whole runs, loading included" in duel["times_ar_reason"]
    assert "whole runs, loading included" in (tmp_path / "out" / "report.md").read_text()


# ---------------------------------------------------------------- the baseline, and which ELBO stands beside DUEL


def test_the_baseline_stays_whatever_else_is_there(tmp_path, no_figures):
    tokens, nats = correlated(tmp_path, size=20)
    closed = rows(run(tmp_path), "sotu")["MDLM"]["gap_closed"]
    again = {"sotu": documents(nats[0], tokens)}
    hf(tmp_path / "results", docs=again)  # newer, of the same spec
    hf(tmp_path / "results", docs=again, dtype="torch.bfloat16")
    hf(tmp_path / "results", docs=again, args={"revision": "step1000"})
    found = run(tmp_path)["tasks"]["sotu"]
    assert [row["name"] for row in found["rows"] if row["ar"]] == ["AR, dtype=float32, revision=not set"]
    assert found["rows"][0]["ar"] and "/ar/" in found["rows"][0]["file"]
    assert [row["estimator"] for row in found["rows"]].count("ar") == 3
    assert next(row["gap_closed"] for row in found["rows"] if row["rule"]) == closed
    assert any("is shown" in note and "holds it too" in note for note in found["notes"])


def test_the_elbo_is_of_the_same_law(tmp_path, no_figures):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    low = {"dtype": "bfloat16", "mc_samples": "128"}
    ours(tmp_path / "results", per_token(["owt"], [25.0]), estimator="elbo", spec=low)
    row = rows(run(tmp_path, "--as-published"), "owt")["MDLM"]
    assert row["gap_closed"] is None
    assert row["gap_closed_reason"] == "no ELBO of the same spec: dtype=bfloat16 there, float32 here"
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo")
    row = rows(run(tmp_path, "--as-published"), "owt")["MDLM"]
    assert row["gap_closed"] == pytest.approx(stats.gap_closed(23.0, 22.0, 17.54))


def test_a_published_figure_may_have_an_elbo_of_other_positions(tmp_path, no_figures):
    """The authors' DUEL figures score BOS and leave the last token given, their ELBOs do not."""
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]), spec={"special_tokens": "[0] text [], bos=official"})
    given = {"special_tokens": "[0] text [], bos=given"}
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo", spec=given)
    found = run(tmp_path, "--as-published")["tasks"]["owt"]
    (row,) = (row for row in found["rows"] if row["rule"])
    assert row["gap_closed"] == pytest.approx(stats.gap_closed(23.0, 22.0, 17.54))
    assert any("as published, of another convention: special_tokens=" in note for note in found["notes"])


def test_an_elbo_with_eps_is_no_bound(tmp_path, no_figures):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    eps = {"elbo_form": "ratio", "elbo_eps": "0.001", "mc_samples": "128"}
    ours(tmp_path / "results", per_token(["owt"], [22.9]), estimator="elbo", spec=eps)
    found = run(tmp_path, "--as-published")["tasks"]["owt"]
    assert "elbo_eps=0.001 (above 0: NO bound)" in found["elbo"][0] and "(eps=0.001: no bound)" in found["headlines"][0]
    assert [(r["name"], r["bound"]) for r in found["rows"] if r["estimator"] == "elbo"] == [
        ("ELBO, whole target, eps=0.001: no bound", False)
    ]
    text = (tmp_path / "out" / "report.md").read_text() + (tmp_path / "out" / "methods_owt.tex").read_text()
    assert "22.90" in text and "<= 22.90" not in text and r"$\leq$22.90" not in text
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo")  # fewer draws, but a bound
    assert rows(run(tmp_path, "--as-published"), "owt")["MDLM"]["gap_closed"] == pytest.approx(
        stats.gap_closed(23.0, 22.0, 17.54)
    )


# ---------------------------------------------------------------- what is left out, and what stands for a document


def test_groups_of_tasks_are_left_out(tmp_path, no_figures):
    file = ours(tmp_path / "results", per_token(["owt", "both", "all"], [21.0, 30.0, 40.0]))
    edit(file, lambda body: body.update(group_subtasks={"both": ["owt"], "owt": []}, groups={"all": {}}))
    found = run(tmp_path, ar=False)
    assert list(found["tasks"]) == ["owt"]
    assert [note.split(" in ")[0] for note in found["notes"] if "group of tasks" in note] == ["all", "both"]


def test_samples_of_another_run_give_no_interval(tmp_path, no_figures):
    two(tmp_path)
    (file,) = (tmp_path / "results").rglob("results_*.json")
    edit_samples(file, lambda record: record["token_perplexity"].__setitem__(0, 2 * record["token_perplexity"][0]))
    row = rows(run(tmp_path), "sotu")["MDLM"]
    assert row["interval"] is None
    assert row["reason"].startswith("the samples of sotu give token_perplexity") and "31." in row["reason"]


def test_results_of_a_model_object(tmp_path, no_figures):
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    file = ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo")
    edit(file, lambda body: body["config"].update(model="DuelMDM"))
    assert [row["estimator"] for row in run(tmp_path, ar=False)["tasks"]["owt"]["rows"]] == ["elbo", "duel"]

    def nameless(body):
        body["config"].update(model_args=None)
        body["config"]["duel"].update(pretrained="kuleshov-group/mdlm-owt")
        body.update(model_name=None)

    edit(file, nameless)
    assert "mdlm-owt" in {row["model"] for row in run(tmp_path, ar=False)["tasks"]["owt"]["rows"]}


def test_documents_are_compared_with_the_first_that_has_samples(tmp_path, no_figures):
    two(tmp_path, {"log": False})
    other = {"sotu": documents((-30.0, -40.0, -50.0, -60.0), (10, 12, 14, 16), [*TEXTS[:3], "another text"])}
    ours(tmp_path / "results", docs=other, estimator="elbo")
    with pytest.raises(DuelError, match=r"documents: 4 \(3 of them in both\)"):
        run(tmp_path)


CHANGED = {
    "documents: 4 (0 of them in both)": lambda record: record.update(target_hash=f"x{record['target_hash']}"),
    "units of bits_per_byte: 18 in document": lambda record: record["bits_per_byte"].__setitem__(1, 9),
}


@pytest.mark.parametrize("said", CHANGED)
def test_other_texts_or_units_behind_the_same_documents_are_refused(tmp_path, no_figures, said):
    two(tmp_path)
    (file,) = (tmp_path / "results").rglob("results_*.json")
    edit_samples(file, CHANGED[said])
    with pytest.raises(DuelError) as error:
        run(tmp_path, "--as-published")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("docs", "log", "field"),
    [(None, True, "windows"), ("OTHER_COUNTS", True, "tokenizer"), (None, False, "tokenizer (unknown)")],
)
def test_words_need_the_same_documents_only(tmp_path, no_figures, docs, log, field):
    there = {"spec": {"windows": "independent"}, "duel": {"row_capacity": 126}, "log": log}
    two(tmp_path, {"max_length": 8, "log": log}, there | ({"docs": OTHER_COUNTS} if docs else {}))
    if not log:
        for place in ("ar", "results"):
            (file,) = (tmp_path / place).rglob("results_*.json")
            edit(file, lambda body: body["results"]["sotu"].pop("token_perplexity,none"))
    found = run(tmp_path, "--metric", "word_perplexity")["tasks"]["sotu"]
    assert {line.split(": ")[0] for line in found["differences"]} == {field, "windows"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**These differ:**" in text and "Compared as published" not in text


# ---------------------------------------------------------------- what a reader sees


HEADLINES = {  # ELBO, DUEL, AR
    "a gap of 4.46; no ELBO": (None, 22.0, 17.54),
    "<= 17.00 +- 0.17 (the MDM is already better under the ELBO); the gap is -1.54": (
        17.0,
        16.0,
        17.54,
    ),
    "lower than DUEL, which closes none of the ELBO's gap of 5.46 (gap closed -18.3 % +- 5.0)": (23.0, 24.0, 17.54),
    "<= 23.00 +- 0.23 (ELBO, whole target) against 17.54 for ARM, a gap of at most 5.46; no DUEL": (23.0, None, 17.54),
    "; the ELBO gives <= 23.00 +- 0.23 (no AR result of owt (--ar)).": (23.0, 22.0, None),
    "22.00 under `greedy` (DUEL).": (None, 22.0, None),
}


@pytest.mark.parametrize("said", HEADLINES)
def test_headlines_where_something_is_missing(tmp_path, no_figures, said):
    elbo, duel, ar = HEADLINES[said]
    if ar:
        ours(tmp_path / "ar", per_token(["owt"], [ar]), "ARM", "ar", block="1", attention="causal")
    if elbo:
        ours(tmp_path / "results", per_token(["owt"], [elbo]), estimator="elbo")
    if duel:
        ours(tmp_path / "results", per_token(["owt"], [duel]))
    (found,) = run(tmp_path, ar=bool(ar))["tasks"]["owt"]["headlines"]
    assert said in found


def test_the_gap_to_ar_has_a_paired_interval(tmp_path, no_figures):
    correlated(tmp_path, size=50)
    found = run(tmp_path)["tasks"]["sotu"]["rows"]
    for row in found[1:]:
        assert row["gap_interval"][0] < row["gap"] < row["gap_interval"][1]
        assert row["gap_interval"][1] - row["gap_interval"][0] < 0.5 * (row["interval"][1] - row["interval"][0])
    assert "ELBO's gap" in (tmp_path / "out" / "report.md").read_text()


# ---------------------------------------------------------------- the Monte Carlo error of an ELBO


def noisy(tmp_path, error, elbo=40.25, duel=41.91, ar=36.3, docs=False):
    """An ELBO of so large a standard error, in perplexity, beside DUEL and AR."""
    tokens = 1000

    def nats(value):
        return {"sotu": documents([-math.log(value) * tokens / 4 * share for share in (0.8, 0.9, 1.1, 1.2)], [250] * 4)}

    def given(value):
        return {"docs": nats(value)} if docs else {"tasks": per_token(["sotu"], [value])}

    hf(tmp_path / "ar", **given(ar), **({} if docs else {"size": 3}))
    file = ours(tmp_path / "results", estimator="elbo", spec={"mc_samples": "16"}, **given(elbo))
    told = {"stderr": None if error is None else error / elbo * tokens}
    edit(file, lambda body: body["config"]["duel"]["tasks"]["sotu"]["values"]["elbo"].update(told))
    ours(tmp_path / "results", **given(duel))


def test_gap_closed_carries_the_monte_carlo_error_in_its_interval(tmp_path, no_figures):
    widths = {}
    for error in (0.01, 0.4):
        noisy(tmp_path / str(error), error, duel=38.0, docs=True)
        (row,) = [row for row in run(tmp_path / str(error))["tasks"]["sotu"]["rows"] if row["rule"]]
        assert row["gap_closed"] == pytest.approx(100 * (40.25 - 38) / (40.25 - 36.3))
        assert row["gap_closed_stderr"] == pytest.approx(100 * (38 - 36.3) / (40.25 - 36.3) ** 2 * error)
        low, high = row["gap_closed_interval"]
        assert low < row["gap_closed"] < high
        widths[error] = high - low
    assert widths[0.4] > 3 * 0.8 * 100 * (38 - 36.3) / (40.25 - 36.3) ** 2 * 0.4 > 2 * widths[0.01]


def test_a_bootstrap_that_holds_the_monte_carlo_error_gets_no_more_of_it():
    generator = np.random.default_rng(1)
    hard, noise = generator.normal(3, 1, 500), generator.normal(0, 0.5, 500)
    columns = np.stack([hard + noise, hard], 1)
    rates = stats.resample(columns, draws=4000) / 500
    error = 0.5 / math.sqrt(500)
    spread = np.std(stats.with_error(rates, 0, error) - rates[:, 1])
    assert spread == pytest.approx(error, rel=0.15)
    few = stats.with_error(rates[:, [1, 1]], 0, error) - rates[:, 1]  # draws that know nothing of it
    assert np.std(few) == pytest.approx(error, rel=0.05)


def test_an_average_holds_the_tasks_that_cannot_be_told_from_0(tmp_path, no_figures):
    values = {"a": (24.0, 22.0), "b": (24.0, 23.9)}
    hf(tmp_path / "ar", per_token(values, [18.0, 18.0]))
    ours(tmp_path / "results", per_token(values, [24.0, 24.0]), estimator="elbo")
    ours(tmp_path / "results", per_token(values, [22.0, 23.9]))
    (row,) = run(tmp_path, "--as-published")["averages"]
    assert row["tasks"]["b"] is None and row["unclear"] == ["b"] and row["averaged"] == 2
    assert row["average"] == pytest.approx((100 * 2 / 6 + 100 * 0.1 / 6) / 2)
    assert "not distinguishable" in (tmp_path / "out" / "gap_closed.tex").read_text()


# ---------------------------------------------------------------- traces, figures, the command


def traced(tmp_path, selected="oracle", texts=("one text", "another text")):
    """A lattice run of two documents, its samples and its trace."""
    tokens = [8, 4]
    nats = {
        "oracle": [-20.0, -12.0],
        "mixture": [-30.0, -14.0],
        "elbo_exact": [-33.0, -15.0],
        "greedy:k=1": [-29.0, -13.5],
    }
    docs = {"sotu": documents(nats[selected], tokens, list(texts))}
    values = {"sotu": {name: math.exp(-sum(v) / 12) for name, v in nats.items()}}
    shape = {"model": "BD3-LM", "attention": "block_causal", "duel": {"trace": str(tmp_path / "trace.jsonl")}}
    file = ours(tmp_path / "results", docs=docs, estimator=selected, values=values, **shape)
    lines = []
    for doc, length in enumerate(tokens):
        for window in range(length // 4):
            share = {name: v[doc] * 4 / length for name, v in nats.items()}
            steps = [0, 1, 3, 2]
            lines.append(
                {"task": "sotu", "doc": doc, "request": doc, "window": window, "context": 0, "ids": [1, 2, 3, 4]}
                | {"starts": [0], "reveal_steps": steps, "token_logprobs": [share[selected] / 4] * 4, "values": share}
                | {"log_prob": share[selected], "nfe": 4, "near_ties": 0}
            )
    return trace(tmp_path / "trace.jsonl", file, lines), nats


def test_lattice_rows_have_intervals_from_the_trace(tmp_path, no_figures):
    traced(tmp_path)
    found = run(tmp_path, ar=False)
    for row in found["tasks"]["sotu"]["rows"]:
        assert row["interval"] is not None and row["interval"][0] < row["value"] < row["interval"][1], row["name"]
    (shown,) = found["traces"]
    assert shown["likelihood"] is False and shown["flag"] == SEES_TRUTH
    assert shown["reveals"]["counts"] == [[3, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 3], [0, 0, 3, 0]]
    assert shown["by_position"]["tokens"] == [3, 3, 3, 3] and shown["by_step"]["mean_nll"][0] == pytest.approx(32 / 12)


def test_a_trace_that_is_gone_or_of_another_run(tmp_path, no_figures):
    path, _ = traced(tmp_path)
    (result,) = (tmp_path / "results").rglob("results_*.json")
    beside = path.rename(result.parent / path.name)
    assert all(row["interval"] for row in run(tmp_path, ar=False)["tasks"]["sotu"]["rows"])
    moved = beside.rename(tmp_path / "moved.jsonl")
    found = run(tmp_path, ar=False)
    assert any("is no longer at" in note and "name it with --trace" in note for note in found["notes"])
    rest = [row for row in found["tasks"]["sotu"]["rows"] if row["estimator"] != "oracle"]
    assert all(row["interval"] is None and row["reason"].startswith("no trace of") for row in rest)
    found = run(tmp_path, "--trace", moved, ar=False)
    assert all(row["interval"] for row in found["tasks"]["sotu"]["rows"])
    lines = moved.read_text().splitlines()
    moved.write_text("\n".join(lines[:-1]) + "\n")
    found = run(tmp_path, "--trace", moved, ar=False)
    assert any("another run's trace" in row["reason"] for row in found["tasks"]["sotu"]["rows"])


def test_the_command(tmp_path, capsys, no_figures):
    pair(tmp_path / "results", "SEDD", ["owt"], [24.10], [22.58])
    main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")])
    assert "<= 24.10" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="lm-eval-duel: No file or folder"):
        main(["report", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])


@pytest.fixture
def no_figures(monkeypatch):
    """Tables only: drawing takes seconds and these tests do not look."""
    monkeypatch.setattr(figures, "available", lambda: False)


@pytest.mark.parametrize("impossible", [["greedy:k=1"], list(ORACLE)], ids=["one order", "all"])
def test_a_log_likelihood_that_json_has_no_number_for(tmp_path, no_figures, impossible):
    """One order of a lattice may meet a token of probability 0 (top_k), and so may all of them."""
    told = {"log_prob": None, "stderr": None, "window_stderr": None, "reason": "a token has probability 0"}
    file = lattice(tmp_path / "results", "mixture")
    edit(
        file,
        lambda body: body["config"]["duel"]["tasks"]["ag_news"]["values"].update(dict.fromkeys(impossible, told)),
    )
    if len(impossible) > 1:
        edit(file, lambda body: body["results"]["ag_news"].update({"token_perplexity,none": math.inf}))
    shown = {row["rule"] or row["estimator"]: row for row in run(tmp_path, ar=False)["tasks"]["ag_news"]["rows"]}
    if len(impossible) > 1:
        assert list(shown) == ["mixture"]  # the harness's own value
    else:
        assert shown.keys() == ORACLE.keys() and shown["greedy:k=1"]["value"] is None
        assert shown["left_to_right:k=1"]["value"] == pytest.approx(54.94) and shown["left_to_right:k=1"]["best"]
