"""Which results may be compared, which ELBO and which baseline they get, and what is left out."""

import pytest
from results import documents, edit_samples, hf, ours, per_token, rows
from results import report as run

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import figures, stats

TEXTS = [f"a text of number {n}" for n in range(4)]
OFFICIAL = {"special_tokens": "[0] text [1], bos=official"}
OTHER_COUNTS = {"sotu": documents((-30.0, -40.0, -50.0, -60.0), (11, 12, 14, 16), TEXTS)}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)


def two(tmp_path, here=None, there=None):
    """An hf and one of our results on the same four documents, with changes."""
    docs = {"sotu": documents((-30.0, -40.0, -50.0, -60.0), (10, 12, 14, 16), TEXTS)}
    hf(tmp_path / "ar", **{"docs": docs, **(here or {})})
    ours(tmp_path / "results", **{"docs": docs, **(there or {})})


REFUSED = {
    "windows: harness, 8 target positions (derived) in *, but independent, 126 target positions in *": (
        {"max_length": 8},
        {"spec": {"windows": "independent"}, "duel": {"row_capacity": 126}},
    ),
    "scored positions: the text in *, but bos=official in *": ({}, {"spec": OFFICIAL}),
    "tokenizer: unknown (52 tokens) in *, but gpt2-hash (53 tokens) in *": ({}, {"docs": OTHER_COUNTS}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_by_name_or_listed(tmp_path, said):
    here, there = REFUSED[said]
    two(tmp_path, here, there)
    with pytest.raises(DuelError) as error:
        run(tmp_path)
    message = str(error.value)
    start, middle, end = said.split("*")[0], said.split("*")[1], "To compare, "
    assert message.startswith(f"token_perplexity of sotu cannot be compared: {start}")
    assert middle in message and end in message and "--as_published" in message
    assert message.count("results_2026") == 2
    found = run(tmp_path, "--as_published")
    assert any(line.startswith(start) for line in found["tasks"]["sotu"]["differences"])
    assert "**Compared as published, although these differ:**" in (tmp_path / "out" / "report.md").read_text()


def test_other_documents_are_refused_whatever_is_asked(tmp_path):
    docs = {"sotu": documents((-30.0, -40.0), (10, 12), TEXTS[:2])}
    two(tmp_path, {"docs": docs})
    with pytest.raises(DuelError, match=r"documents: 2 \(2 of them in both\) in .*, but 4 \(2 of them in both\) in"):
        run(tmp_path, "--as_published")


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
        run(tmp_path, "--as_published")
    assert f"compared: {field}: " in str(error.value)


def test_an_unknown_tokenizer_is_refused_and_the_quotient_of_metrics_tells(tmp_path):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [21.0]))
    with pytest.raises(DuelError, match=r"tokenizer \(unknown\): unknown in .* but gpt2-hash in .*--log_samples"):
        run(tmp_path)
    other = tmp_path / "other"
    hf(other / "ar", {"owt": {"token_perplexity": 20.0, "word_perplexity": 400.0}})
    ours(other / "results", {"owt": {"token_perplexity": 25.0, "word_perplexity": 625.0}})
    assert rows(run(other), "owt")["MDLM"]["value"] == 25.0


def test_word_perplexity_stands_across_tokenizers(tmp_path):
    two(tmp_path, {}, {"docs": OTHER_COUNTS})
    with pytest.raises(DuelError, match="--metric word_perplexity"):
        run(tmp_path)
    found = run(tmp_path, "--metric", "word_perplexity")["tasks"]["sotu"]
    assert found["metric"] == "word_perplexity" and any("tokenizer" in line for line in found["differences"])
    with pytest.raises(DuelError, match="Wanted perplexity of sotu, but there is"):
        run(tmp_path, "--metric", "perplexity")


def test_the_ar_result_must_be_one_and_autoregressive(tmp_path):
    ours(tmp_path / "results", per_token(["owt"], [22.58]))
    ours(tmp_path / "ar", per_token(["owt"], [17.54]))
    with pytest.raises(DuelError, match="is a result of estimator=duel, not of an autoregressive model"):
        run(tmp_path)
    other = tmp_path / "other"
    ours(other / "results", per_token(["owt"], [22.58]))
    hf(other / "ar", per_token(["owt"], [17.54]))
    hf(other / "ar", per_token(["owt"], [17.54]))
    with pytest.raises(DuelError, match="--ar holds owt more than once"):
        run(other)


def test_the_elbo_of_a_bidirectional_network_is_over_the_whole_target(tmp_path):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    ours(tmp_path / "results", per_token(["owt"], [22.5]), estimator="elbo", spec={"elbo_block": "4"})
    row = rows(run(tmp_path, "--as_published"), "owt")["MDLM"]
    assert row["gap_closed"] is None and row["gap_closed_reason"] == "no ELBO (estimator=elbo, elbo_block=none)"
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo", spec={"mc_samples": "8"})
    found = run(tmp_path, "--as_published")
    assert rows(found, "owt")["MDLM"]["gap_closed"] == pytest.approx(stats.gap_closed(23.0, 22.0, 17.54))
    (said,) = found["tasks"]["owt"]["elbo"]
    assert said.startswith("ELBO of MDLM: Monte Carlo, mc_samples=8, elbo_form=count, elbo_block=none, standard error")


def test_the_elbo_is_of_the_same_law(tmp_path):
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    ours(tmp_path / "results", per_token(["owt"], [22.0]))
    low = {"dtype": "bfloat16", "mc_samples": "128"}
    ours(tmp_path / "results", per_token(["owt"], [25.0]), estimator="elbo", spec=low)
    row = rows(run(tmp_path, "--as_published"), "owt")["MDLM"]
    assert row["gap_closed"] is None
    assert row["gap_closed_reason"] == "no ELBO of the same spec: dtype=bfloat16 there, float32 here"
    ours(tmp_path / "results", per_token(["owt"], [23.0]), estimator="elbo")
    row = rows(run(tmp_path, "--as_published"), "owt")["MDLM"]
    assert row["gap_closed"] == pytest.approx(stats.gap_closed(23.0, 22.0, 17.54))


def test_the_baseline_stays_whatever_else_is_there(tmp_path):
    tokens = [10, 12, 14, 16] * 5
    ar, elbo, duel = ([-count * (rate + n / 20) for n, count in enumerate(tokens)] for rate in (3.0, 3.3, 3.2))
    hf(tmp_path / "ar", docs={"sotu": documents(ar, tokens)})
    ours(tmp_path / "results", docs={"sotu": documents(elbo, tokens)}, estimator="elbo")
    ours(tmp_path / "results", docs={"sotu": documents(duel, tokens)})
    closed = rows(run(tmp_path), "sotu")["MDLM"]["gap_closed"]
    again = {"sotu": documents(ar, tokens)}
    hf(tmp_path / "results", docs=again)  # newer, of the same spec
    hf(tmp_path / "results", docs=again, dtype="torch.bfloat16")
    hf(tmp_path / "results", docs=again, args={"revision": "step1000"})
    found = run(tmp_path)["tasks"]["sotu"]
    assert [row["name"] for row in found["rows"] if row["ar"]] == ["AR, dtype=float32, revision=not set"]
    assert found["rows"][0]["ar"] and "/ar/" in found["rows"][0]["file"]
    assert [row["estimator"] for row in found["rows"]].count("ar") == 3
    assert next(row["gap_closed"] for row in found["rows"] if row["rule"]) == closed
    assert any("is shown" in note and "holds it too" in note for note in found["notes"])


def test_documents_are_compared_with_the_first_that_has_samples(tmp_path):
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
def test_other_texts_or_units_behind_the_same_documents_are_refused(tmp_path, said):
    two(tmp_path)
    (file,) = (tmp_path / "results").rglob("results_*.json")
    edit_samples(file, CHANGED[said])
    with pytest.raises(DuelError) as error:
        run(tmp_path, "--as_published")
    assert said in str(error.value)


# ---------------------------------------------------------------- caches, models


def cached(folder, tokens, values, **more):
    return ours(folder / "results", docs={"sotu": documents(values, tokens)}, **{"spec": {"cache": "dual"}, **more})


ALONE = {
    "there is no result of this network and rule with cache=none": {"rule": "margin:k=1"},
    "the result with cache=none is of another spec: block=8 there, 4 here": {"block": "8"},
    "the result with cache=none is of another spec: grid=row there, target here; max_length=512 there, 1025 here": {
        "spec": {"grid": "row", "max_length": "512"}
    },
}


@pytest.mark.parametrize("reason", ALONE)
def test_a_missing_pair_is_stated(tmp_path, reason):
    tokens = [10] * 12
    ours(tmp_path / "results", docs={"sotu": documents([-30.0] * 12, tokens)}, **ALONE[reason])
    cached(tmp_path, tokens, [-31.0] * 12)
    (cost,) = [row["cache_cost"] for row in run(tmp_path, ar=False)["tasks"]["sotu"]["rows"] if row["cache"] == "dual"]
    assert (cost["second"], cost["difference"], cost["reason"]) == (None, None, reason)
    assert reason in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(("model", "args"), [("ARM-2", {}), ("ARM", {"revision": "step1000"})])
def test_the_only_ar_result_is_the_baseline_and_of_several_none(tmp_path, model, args):
    docs = {"sotu": documents([-30.0] * 12, [10] * 12)}
    ours(tmp_path / "results", docs=docs)
    hf(tmp_path / "results", docs=docs)
    assert [row["model"] for row in run(tmp_path, ar=False)["tasks"]["sotu"]["rows"] if row["ar"]] == ["ARM"]
    hf(tmp_path / "results", docs=docs, model=model, args=args)
    found = run(tmp_path, ar=False)
    assert not any(row["ar"] for row in found["tasks"]["sotu"]["rows"])
    assert any("name one with --ar" in note for note in found["notes"])
