"""Which results may be compared, which ELBO and which baseline they get, and what is left out."""

import itertools
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from results import board, documents, edit_samples, hf, ours, per_token, put, rows
from results import report as run

from lm_eval_duel.cli.report import parse
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import match
from lm_eval_duel.results.report import _latex, collect
from lm_eval_duel.results.spec_entries import entries_for_names
from lm_eval_duel.results.table import latex_text

TEXTS = [f"a text of number {n}" for n in range(4)]
NATS = (-30.0, -40.0, -50.0, -60.0)
TOKENS = (10, 12, 14, 16)
DOCS = {"sotu": documents(NATS, TOKENS, TEXTS)}
OTHER_TOKENS = {"docs": {"sotu": documents(NATS, (11, 12, 14, 16), TEXTS)}}
OTHER_TEXTS = {"docs": {"sotu": documents(NATS, TOKENS, [*TEXTS[:3], "another text"])}}


def two(tmp_path, changes_of_hf=None, changes_of_ours=None):
    """An hf and one of our results on the same four documents, with changes."""
    of_hf = {"docs": DOCS} | (changes_of_hf or {})
    of_ours = {"docs": DOCS} | (changes_of_ours or {})
    hf(tmp_path / "ar", **of_hf)
    ours(tmp_path / "results", **of_ours)


def owt(tmp_path, *, ar=({},), **by_estimator):
    """Results of one task without documents: a baseline for each of `ar`, and ours by estimator: (value, more)."""
    for more in ar:
        hf(tmp_path / "ar", per_token(["owt"], [17.54]), **more)
    for estimator, (value, more) in by_estimator.items():
        ours(tmp_path / "results", per_token(["owt"], [value]), estimator=estimator, **more)


def change_text(record):
    record["target_hash"] = f"x{record['target_hash']}"


def change_units(record):
    record["bits_per_byte"][1] = 9


INDEPENDENT = {"spec": {"windows": "independent"}, "duel": {"row_capacity": 126}}
OFFICIAL = {"spec": {"special_tokens": "[0] text [1], bos=official"}}
TWO = {"docs": {"sotu": documents(NATS[:2], TOKENS[:2], TEXTS[:2])}}
SHORT = {"max_length": 8}
UNKNOWN = {"max_length": None}
FEW = {"size": 7, "log": False}
SOME = {"log": False}
ANSWERS = {"configs": {"sotu": {"output_type": "loglikelihood"}}}
REFUSED = [  # the field, what hf's and our result have in it, and what is changed in each, or in our samples
    ("windows", "harness, 8 target positions (derived)", "independent, 126 target positions", SHORT, INDEPENDENT),
    ("windows", "harness, unknown length (derived)", "independent, 126 target positions", UNKNOWN, INDEPENDENT),
    ("scored positions", "the text", "bos=official", {}, OFFICIAL),
    (
        "contexts",
        "an unknown number cut",
        "2 cut at 1025 (1024 positions, tokenizer gpt2-hash)",
        ANSWERS,
        {"duel": {"cut_contexts": {"sotu": 2}}, **ANSWERS},
    ),
    ("tokenizer", "unknown (52 tokens)", "gpt2-hash (53 tokens)", {}, OTHER_TOKENS),
    ("documents", "2 (2 of them in both)", "4 (2 of them in both)", TWO, {}),
    ("documents", "7", "4", FEW, SOME),
    ("documents (shots)", "5", "0", {"shots": 5}, {}),
    ("documents (version)", "2.0", "1.0", {"version": 2.0}, {}),
    ("documents", "4 (0 of them in both)", "4 (0 of them in both)", {}, change_text),
    ("units of bits_per_byte", "18 in document *", "9 in document *", {}, change_units),
]


def pattern(text):
    """A regular expression for a text in which * is the digest of a document."""
    return re.escape(text).replace(r"\*", r"\w{12}")


@pytest.mark.parametrize(("field", "first", "second", "of_hf", "of_ours"), REFUSED)
def test_refused_with_both_files_or_listed_as_published(tmp_path, field, first, second, of_hf, of_ours):
    if callable(of_ours):
        two(tmp_path, of_hf)
        [file] = (tmp_path / "results").rglob("results_*.json")
        edit_samples(file, of_ours)
    else:
        two(tmp_path, of_hf, of_ours)

    file = r"\S*/results_2026\S*json"
    difference = f"{re.escape(field)}: {pattern(first)} in {file}, but {pattern(second)} in {file}"
    refusal = f"^token_perplexity of sotu cannot be compared: {difference}. To compare, "
    if field == "windows":
        refusal += "score ARM with lm-eval-duel run .*pretrained=ARM,estimator=ar"
    with pytest.raises(DuelError, match=refusal):
        run(tmp_path)

    if field.startswith(("documents", "units")):  # whatever is asked
        with pytest.raises(DuelError, match=difference):
            run(tmp_path, "--as_published")
    else:
        [listed] = run(tmp_path, "--as_published")["tasks"]["sotu"]["differences"]
        assert re.fullmatch(difference, listed)


def test_two_results_of_ours_with_other_windows_are_told_one_length_and_tables_show_the_difference(tmp_path):
    for length in (10, 13):
        spec = {"max_length": str(length)}
        ours(tmp_path / "results", docs=DOCS, rule=f"greedy:k={length}", spec=spec, duel={"row_capacity": length - 1})
    for metric in ("token_perplexity", "word_perplexity", "bits_per_byte"):
        with pytest.raises(DuelError, match="max_length=10 to all models"):
            run(tmp_path, "--metric", metric)

    shorter_rows = {"spec": {"max_length": "20"}, "duel": {"row_capacity": 20}}  # without special tokens
    shutil.copytree(tmp_path / "results", tmp_path / "three" / "results")
    ours(tmp_path / "three" / "results", docs=DOCS, rule="margin", **shorter_rows)
    with pytest.raises(DuelError, match=r"max_length=10 to \S+, \S+ and max_length=9 to"):
        run(tmp_path / "three")

    odd = ours(tmp_path / "odd" / "results", docs=DOCS, rule="margin", **shorter_rows)
    for k, length in ((1, 10), (2, 10)):
        spec = {"max_length": str(length)}
        ours(tmp_path / "odd" / "results", docs=DOCS, rule=f"greedy:k={k}", spec=spec, duel={"row_capacity": 9})
    with pytest.raises(DuelError, match=f"make {odd} again with max_length=9, and name the new results instead"):
        run(tmp_path / "odd")
    shutil.copytree(tmp_path / "odd", tmp_path / "short")
    [of_most] = (tmp_path / "short" / "results").rglob(odd.name)
    of_most.unlink()
    short = {"spec": {"max_length": "5"}, "duel": {"row_capacity": 5}}
    ours(tmp_path / "short" / "results", docs=DOCS, model="Other", **short)  # nobody knows whether it takes longer rows
    with pytest.raises(DuelError, match=r"score them again, pass max_length=6 to MDLM and max_length=5 to Other"):
        run(tmp_path / "short")

    report = board(tmp_path / "results")
    [difference] = report.tasks["sotu"].differences
    tables = [_latex(report, name, kind, table) for name, kind, table in report.tables() if kind == "methods"]
    for table in tables:
        assert latex_text(f"differs: {difference}") in table
    [pair] = report.tasks["sotu"].pairs
    assert not pair.better
    assert pair.verdict == "no verdict: the windows differ"
    assert tables


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_a_bos_that_hf_scores_is_refused_and_one_that_it_may_have_scored_has_a_remark(tmp_path, add_bos_token):
    """Of whole texts; a choice is a continuation, at whose start there is none."""
    args = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    hf(tmp_path / "ar", docs=DOCS, args=args)
    ours(tmp_path / "results", docs=DOCS)
    if add_bos_token:
        with pytest.raises(DuelError, match=r"a BOS and the text.*To compare, run --model hf with add_bos_token=False"):
            run(tmp_path)
    else:
        run(tmp_path)
        table = (tmp_path / "out" / "methods_sotu.tex").read_text()
        assert (latex_text("add_bos_token") in table) == (add_bos_token is None)

    for file in tmp_path.rglob("results_*.json"):
        put(file, "configs.sotu.output_type", "loglikelihood")
    run(tmp_path)
    assert "bos" not in (tmp_path / "out" / "methods_sotu.tex").read_text()


def test_apart_each_table_has_its_own_baseline(tmp_path):
    for length in (10, 13):
        cut = {"spec": {"max_length": str(length)}, "duel": {"row_capacity": length - 1}}
        for estimator, model in (("duel", "MDLM"), ("ar", "Twin")):
            ours(tmp_path / "results" / str(length), docs=DOCS, estimator=estimator, model=model, **cut)
    other = {"spec": {"max_length": "16"}, "duel": {"row_capacity": 15}}
    ours(tmp_path / "results" / "16", docs=DOCS, **other)

    for ar in ([], ["--ar", str(tmp_path / "results" / "13" / "Twin")]):
        made = collect(parse([str(tmp_path / "results"), "--apart", "--out", "unused", *ar]))
        with_baseline = {name: any(each.row.ar for each in task.rows) for name, task in made.tasks.items()}
        assert sorted(with_baseline.values()) == [False, True, True]
        assert len(made.baselines) == 2
        [note] = [str(note) for note in made.notes if "No gaps" in str(note)]
        assert note.startswith(f"{next(name for name, has in with_baseline.items() if not has)}: ")


def test_equal_texts_are_separate_documents(tmp_path):
    texts = ["one text", "one text", *(f"text {n}" for n in range(8))]
    docs = {"sotu": documents(range(-30, -40, -1), range(10, 20), texts)}
    for rule in ("greedy:k=1", "margin:k=1"):
        ours(tmp_path / "results", docs=docs, rule=rule)

    task = run(tmp_path)["tasks"]["sotu"]

    assert task["documents"] == 10
    assert all(row["interval"] for row in task["rows"])


def test_documents_are_compared_with_the_first_that_has_samples(tmp_path):
    two(tmp_path, {"log": False})
    ours(tmp_path / "results", estimator="elbo", **OTHER_TEXTS)

    with pytest.raises(DuelError, match=r"documents: 4 \(3 of them in both\)"):
        run(tmp_path)


def test_an_unknown_tokenizer_is_refused_and_the_quotient_of_metrics_tells(tmp_path):
    owt(tmp_path, duel=(21.0, {}))
    with pytest.raises(DuelError, match=r"tokenizer \(unknown\): unknown in .* but gpt2-hash in .*--log_samples"):
        run(tmp_path)

    # Two tokens a word in both: log 400 / log 20 = log 625 / log 25.
    other = tmp_path / "other"
    hf(other / "ar", {"owt": {"token_perplexity": 20.0, "word_perplexity": 400.0}})
    file = ours(other / "results", {"owt": {"token_perplexity": 25.0, "word_perplexity": 625.0}})
    assert rows(run(other), "owt")["MDLM"]["value"] == pytest.approx(25.0)

    put(file, "results.owt.word_perplexity,none", 626.0)
    with pytest.raises(DuelError, match="tokenizer: unknown in"):
        run(other)


def test_word_perplexity_stands_across_tokenizers(tmp_path):
    two(tmp_path, {}, OTHER_TOKENS)
    with pytest.raises(DuelError, match="--metric word_perplexity"):
        run(tmp_path)

    task = run(tmp_path, "--metric", "word_perplexity")["tasks"]["sotu"]
    assert task["metric"] == "word_perplexity"
    assert any("tokenizer" in line for line in task["differences"])

    with pytest.raises(DuelError, match="Wanted perplexity of sotu, but there is"):
        run(tmp_path, "--metric", "perplexity")


# ---------------------------------------------------------------- baselines, ELBOs, caches


def test_the_ar_result_must_be_one_and_autoregressive(tmp_path):
    ours(tmp_path / "ar", per_token(["owt"], [17.54]))
    owt(tmp_path, ar=(), duel=(22.58, {}))
    with pytest.raises(DuelError, match="is a result of estimator=duel, not of an autoregressive model"):
        run(tmp_path)

    other = tmp_path / "other"
    owt(other, ar=({}, {}), duel=(22.58, {}))
    with pytest.raises(DuelError, match="--ar holds owt more than once"):
        run(other)


@pytest.mark.parametrize(
    ("apart", "named"),
    [
        ({"elbo_block": "4"}, ("no ELBO", "elbo_block=none")),
        ({"dtype": "bfloat16"}, ("no ELBO", "dtype=float32", "bfloat16")),
    ],
)
def test_the_elbo_is_over_the_whole_target_and_of_the_same_law(tmp_path, apart, named):
    another_law = {"spec": {"mc_samples": "128", **apart}}
    owt(tmp_path, duel=(22.0, {}), elbo=(22.5, another_law))
    row = rows(run(tmp_path, "--as_published"), "owt")["MDLM"]
    assert row["gap_closed"] is None
    for part in named:
        assert part in row["gap_closed_reason"]

    same_law = {"spec": {"mc_samples": "8"}}
    owt(tmp_path, ar=(), elbo=(23.0, same_law))
    content = run(tmp_path, "--as_published")
    row = rows(content, "owt")["MDLM"]
    assert row["gap_closed"] == pytest.approx(100 * (23.0 - 22.0) / (23.0 - 17.54))
    [note] = [note for note in content["tasks"]["owt"]["notes"] if note.startswith("ELBO of MDLM")]
    assert "mc_samples=8, elbo_form=count, elbo_block=none" in note


EXACT = None  # the mean over all orders, which a lattice run gives
CANDIDATES = (  # ELBOs of one network, the one to close a gap of first: draws (or EXACT), and eps
    (EXACT, 0.0),
    (1024, 0.0),
    (999, 0.0),
    (128, 0.0),
    (64, 0.0),
    (16, 0.0),
    (8, 0.0),
    (4096, 0.001),
    (100, 0.001),
    (20, 0.001),
)


def value_of(candidate):
    """Its perplexity, which grows from the first to the last."""
    return 30.0 + CANDIDATES.index(candidate)


def write_candidates(folder, model, attention, candidates):
    """Results of one model: a DUEL run, and an ELBO for each candidate."""
    shared = {"model": model, "attention": attention}
    block = "None" if attention == "bidirectional" else "4"
    ours(folder, per_token(["owt"], [22.0]), **shared)
    for candidate in candidates:
        value = value_of(candidate)
        draws, eps = candidate
        if draws is EXACT:
            exact = {"owt": {"elbo_exact": value}}
            ours(folder, per_token(["owt"], [28.0]), estimator="mixture", values=exact, **shared)
        else:
            spec = {"mc_samples": str(draws), "elbo_block": block, "elbo_eps": str(eps)}
            ours(folder, per_token(["owt"], [value]), estimator="elbo", spec=spec, **shared)


def check_elbo(row, elbo, note, candidate):
    """The gap of a row is closed from the ELBO of a candidate, which is described in a note."""
    value = value_of(candidate)
    draws, eps = candidate
    assert elbo["value"] == pytest.approx(value)
    assert elbo["estimator"] == ("elbo_exact" if draws is EXACT else "elbo")
    assert elbo["eps"] == eps
    assert row["gap_closed"] == pytest.approx(100 * (value - 22.0) / (value - 17.54))
    assert ("exact" in note) == (draws is EXACT)
    if draws is not EXACT:
        assert f" mc_samples={draws}," in note
    assert ("NO bound" in note) == (eps > 0)


@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_the_elbo_is_the_best_of_the_candidates_in_any_order_of_the_files(tmp_path, attention):
    """A model for each pair of neighbours, in both orders of their files, and one that has all candidates.

    The exact ELBO is over blocks, so it is none of a bidirectional network's, whose ELBO is over the whole target.
    """
    eligible = list(CANDIDATES)
    if attention == "bidirectional":
        eligible.remove((EXACT, 0.0))
    groups = [eligible, eligible[::-1]]
    for pair in itertools.pairwise(eligible):
        groups += [pair, pair[::-1]]
    hf(tmp_path / "ar", per_token(["owt"], [17.54]))
    for number, candidates in enumerate(groups):
        write_candidates(tmp_path / "results", f"model {number}", attention, candidates)

    content = run(tmp_path, "--as_published")

    task = content["tasks"]["owt"]
    duel_rows = rows(content, "owt")
    assert len(duel_rows) == len(groups)
    for number, candidates in enumerate(groups):
        best = min(candidates, key=CANDIDATES.index)
        row = duel_rows[f"model {number}"]
        [note] = [note for note in task["notes"] if re.match(rf"ELBO of model {number}\b", note)]
        check_elbo(row, task["rows"][row["elbo"]], note, best)


@pytest.mark.parametrize("known", [None, 0.5])
def test_gap_closed_has_an_error_only_if_that_of_its_value_is_known(tmp_path, known):
    """An estimate without a sampling error, and the same with one. Only over windows is its error known in both."""
    owt(tmp_path, elbo=(24.0, {}))
    file = ours(tmp_path / "results", per_token(["owt"], [20.0]), estimator="two_phase", spec={"sample": "0.05"})
    put(file, "config.duel.tasks.owt.values.two_phase.stderr", known)
    put(file, "config.duel.tasks.owt.values.two_phase.window_stderr", 2.0)

    row = rows(run(tmp_path, "--as_published"), "owt", "two_phase")["MDLM"]

    assert row["gap_closed"] == pytest.approx(100 * (24.0 - 20.0) / (24.0 - 17.54))
    assert (row["stderr"] is None) == (known is None)
    assert (row["gap_closed_stderr"] is None) == (known is None)


def test_the_baseline_stays_whatever_else_is_there(tmp_path):
    tokens = np.array([10, 12, 14, 16] * 5)
    hard = np.arange(len(tokens)) / 20  # nats per token

    def docs(rate):
        return {"sotu": documents(-tokens * (rate + hard), tokens)}

    hf(tmp_path / "ar", docs=docs(3.0))
    ours(tmp_path / "results", docs=docs(3.3), estimator="elbo")
    ours(tmp_path / "results", docs=docs(3.2))
    closed = rows(run(tmp_path), "sotu")["MDLM"]["gap_closed"]
    for more in ({}, {"dtype": "torch.bfloat16"}, {"args": {"revision": "step1000"}}):  # the first is of the same spec
        hf(tmp_path / "results", docs=docs(3.0), **more)

    task = run(tmp_path)["tasks"]["sotu"]

    baseline, *others = task["rows"]
    assert baseline["ar"]
    assert baseline["name"] == "AR, dtype=float32, revision=not set"
    assert "/ar/" in baseline["file"]
    assert not any(row["ar"] for row in others)
    assert [row["estimator"] for row in others].count("ar") == 2
    [duel] = [row for row in others if row["rule"]]
    assert duel["gap_closed"] == closed
    assert any("is shown" in note and "holds it too" in note for note in task["notes"])


@pytest.mark.parametrize("write", [hf, ours])
@pytest.mark.parametrize(("rate", "keeps_samples"), [(3.0, True), (3.1, False)])
def test_the_same_value_again_without_samples_does_not_take_the_interval(tmp_path, write, rate, keeps_samples):
    """Of the baseline and of other results, such as of a cached run that is repeated. Another value is the newest."""
    tokens = np.array([10, 12, 14, 16] * 5)
    hard = np.arange(len(tokens)) / 20  # nats per token
    other = ours if write is hf else hf
    other(tmp_path / "results", docs={"sotu": documents(-tokens * (2.5 + hard), tokens)})
    first = write(tmp_path / "results", docs={"sotu": documents(-tokens * (3.0 + hard), tokens)})
    second = write(tmp_path / "results", docs={"sotu": documents(-tokens * (rate + hard), tokens)}, log=False)

    [row] = rows(run(tmp_path), "sotu", "ar" if write is hf else "duel").values()

    assert row["file"] == str(first if keeps_samples else second)
    assert bool(row["interval"]) == keeps_samples
    assert row["ar"] == (write is hf)


@pytest.mark.parametrize(("model", "args"), [("ARM-2", {}), ("ARM", {"revision": "step1000"})])
def test_the_only_ar_result_is_the_baseline_and_of_several_none(tmp_path, model, args):
    ours(tmp_path / "results", docs=DOCS)
    hf(tmp_path / "results", docs=DOCS)
    content = run(tmp_path)
    [baseline] = [row for row in content["tasks"]["sotu"]["rows"] if row["ar"]]
    assert baseline["model"] == "ARM"

    hf(tmp_path / "results", docs=DOCS, model=model, args=args)
    content = run(tmp_path)
    assert not any(row["ar"] for row in content["tasks"]["sotu"]["rows"])
    assert any("name one with --ar" in note for note in content["notes"])


ALONE = {  # what the reason names: the result that there is
    ("cache=none",): {"rule": "margin:k=1"},
    ("block=4", "8"): {"block": "8"},
    ("grid=target", "row", "max_length=1025", "512"): {"spec": {"grid": "row", "max_length": "512"}},
}


@pytest.mark.parametrize("named", ALONE)
def test_a_missing_result_without_a_cache_is_stated(tmp_path, named):
    ours(tmp_path / "results", docs=DOCS, **ALONE[named])
    ours(tmp_path / "results", docs=DOCS, spec={"cache": "dual"})

    [row] = [row for row in run(tmp_path)["tasks"]["sotu"]["rows"] if row["cache"] == "dual"]

    cost = row["cache_cost"]
    assert cost["second"] is None
    assert cost["difference"] is None
    for part in named:
        assert part in cost["reason"]


def test_the_longest_document_is_the_tasks(tmp_path):
    duel = {"row_capacity": 126, "longest_document": 9000}
    two(tmp_path, {"max_length": 128, "log": False}, {"spec": {"windows": "independent"}, "duel": duel, "log": False})
    with pytest.raises(DuelError, match="windows: harness, 128"):
        run(tmp_path)

    [file] = (tmp_path / "results").rglob("results_*.json")
    put(file, "config.duel.tasks.sotu.longest_document", 16)
    assert run(tmp_path)["tasks"]["sotu"]["differences"] == []

    put(file, "config.duel.tasks.sotu.documents", 3)  # the others: not known
    with pytest.raises(DuelError, match="windows: harness, 128"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (["[] text [], bos=none", "[2] text [], bos=given"], ["bos=none", "bos=given"]),
        (
            ["[] text [], bos=given", "[2] text [], bos=given"],  # two tokenizers
            ["special_tokens=[] text [], bos=given", "special_tokens=[2] text [], bos=given"],
        ),
        (["[2] text [], bos=given", None], ["bos=given", "special_tokens=not set"]),
    ],
)
def test_names_hold_the_special_tokens_as_the_model_arg_that_decides_on_them(entries, named):
    specs = [{} if entry is None else {"special_tokens": entry} for entry in entries]
    assert entries_for_names(specs, ["special_tokens"]) == [[name] for name in named]


@pytest.mark.parametrize("shares_its_file", [False, True])
def test_one_of_several_results_in_a_file_cannot_be_replaced_alone(shares_its_file):
    runs = []
    for n, capacity in enumerate((9, 9, 20)):
        written = "s.json" if shares_its_file or n < 2 else "odd.json"
        sizes = {"windows": "independent", "capacity": capacity, "max_length": capacity + 1}
        runs.append(SimpleNamespace(name=f"s.json#{n}", written=written, key="M", **sizes))

    assert bool(match._remedy_of_few(runs)) != shares_its_file
