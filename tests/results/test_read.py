"""What is read: samples, traces, groups and other models; files that are not whole or contradict themselves."""

import contextlib
import json
import math
import random
import re
from pathlib import Path

import pytest
from results import GONE, documents, edit_samples, hf, ours, put, trace
from results import report as run

from lm_eval_duel import demo
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import averages, files, read, runs
from lm_eval_duel.results.files import stems
from lm_eval_duel.results.run_summary import summary
from lm_eval_duel.results.trace import files as trace_files

TEXTS = [f"a text of number {n}" for n in range(4)]
DOCS = {"sotu": documents((-30.0, -40.0, -50.0, -60.0), (10, 12, 14, 16), TEXTS)}
LATTICE = {"elbo_exact": 9.0, "mixture": 8.0, "oracle": 6.0, "greedy:k=1": 8.5, "margin:k=1": 8.6}
IMPOSSIBLE = {"log_prob": None, "stderr": None, "reason": "a token of probability 0"}
VALUES = [GONE, None, "text", "", [], [1], {}, {"a": 1}, -1, 0, 0.5, True, math.nan, math.inf, -math.inf, 10**400]


def made(tmp_path):
    """One AR result, an ELBO, a DUEL run and a lattice run, all of the same documents."""
    hf(tmp_path / "ar", docs=DOCS)
    ours(tmp_path / "results", docs=DOCS, estimator="elbo")
    duel = ours(tmp_path / "results", docs=DOCS, rule="threshold:mu=0.5")
    values = {"sotu": dict(LATTICE)}
    ours(tmp_path / "results", docs=DOCS, estimator="oracle", values=values)
    return duel


# ---------------------------------------------------------------- files that are not whole


def test_another_file_in_a_folder_of_traces_is_left_out(tmp_path, caplog):
    path = trace(tmp_path / "t.jsonl", ours(tmp_path / "results", docs=DOCS), [])
    (tmp_path / "samples.jsonl").write_text('{"doc_id": 0}\n')

    assert trace_files(str(tmp_path)) == [str(path)]
    assert "samples.jsonl" in caplog.text


def test_the_files_of_twelve_ranks_are_one_trace(tmp_path):
    """Numbers of two digits, too: a file that counted as a trace of its own would be read twice."""
    path = trace(tmp_path / "t.jsonl", ours(tmp_path / "results", docs=DOCS), [])
    for rank in range(12):
        (tmp_path / f"t.rank{rank}.jsonl").write_text(path.read_text())
    path.unlink()
    assert trace_files(str(tmp_path)) == [str(path)]


def paths_of_entries(value, path=()):
    """The path of each entry of a JSON value, however deep."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from paths_of_entries(value[key], (*path, key))


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_random_edits(tmp_path, count, monkeypatch):
    """Files with a random entry, however deep, replaced or removed: a report, or a DuelError."""
    monkeypatch.setattr("lm_eval_duel.results.bootstrap.DRAWS", 20)
    file = made(tmp_path)
    whole = file.read_text()
    chance = random.Random(0)
    paths = list(paths_of_entries(json.loads(whole)))

    for _ in range(count):
        file.write_text(whole)
        put(file, chance.choice(paths), chance.choice(VALUES))
        with contextlib.suppress(DuelError):
            run(tmp_path, "--as_published")


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("results.sotu.token_perplexity,none", 3.21, "token_perplexity"),
        ("results.sotu.token_perplexity,none", math.nan, "token_perplexity"),
        ("results.sotu.bits_per_byte,none", None, "bits_per_byte"),
        ("config.duel.tasks.sotu.values.duel.log_prob", 5.0, "log_prob"),
        ("config.duel.tasks.sotu.values.duel.log_prob", -10000.0, "log_prob"),
        ("config.duel.tasks.sotu.tokens", 51, "tokens"),
        ("config.spec.version", GONE, "version"),
        ("config.duel.schema", runs.SCHEMA + 1, "schema"),
        ("config.duel.schema", GONE, "schema"),
        ("config.duel.verify_failed", 3, "TypeError"),
        ("config.duel.estimator", "fake", "Unknown estimator 'fake'"),
        ("config.duel.tasks.sotu.values.fake", {"log_prob": -90.0, "windows": 3}, "Unknown estimator or rule 'fake'"),
    ],
)
def test_a_file_that_is_not_whole_or_contradicts_itself_is_refused(tmp_path, place, value, named):
    file = ours(tmp_path / "results", docs=DOCS)
    run(tmp_path)
    put(file, place, value)

    with pytest.raises(DuelError) as error:
        run(tmp_path)

    assert str(file) in str(error.value)
    assert named in str(error.value)


def test_half_of_a_task_from_a_response_cache_does_not_contradict_it(tmp_path):
    file = ours(tmp_path / "results", docs=DOCS)
    put(file, "config.duel.tasks.sotu.documents", 1)
    put(file, "config.duel.tasks.sotu.values.duel.log_prob", -30.0)

    task = run(tmp_path)["tasks"]["sotu"]

    assert task["rows"][0]["nfe"] is None
    assert any("are of 1 documents of sotu" in note for note in task["notes"])


def test_files_that_are_no_results(tmp_path):
    folder = tmp_path / "results"
    with pytest.raises(DuelError, match="No file or folder"):
        run(tmp_path)

    folder.mkdir()
    with pytest.raises(DuelError, match=r"No results_\*\.json \(or \*_DATE\.json\) and no file of score --json in"):
        run(tmp_path)

    (folder / "results_x.json").write_text("{}")
    with pytest.raises(DuelError, match="is not a results file of lm_eval or of score --json, or is not whole"):
        run(tmp_path)


def test_infinity_is_null_with_a_reason(tmp_path):
    hf(tmp_path / "ar", {"a": {"token_perplexity": 20.0}})
    ours(tmp_path / "results", {"a": {"token_perplexity": 30.0}}, estimator="elbo")
    file = ours(tmp_path / "results", {"a": {"token_perplexity": 25.0}})
    put(file, "results.a.token_perplexity,none", math.inf)
    put(file, "config.duel.tasks.a.values.duel", IMPOSSIBLE)

    content = run(tmp_path, "--as_published")

    rows = content["tasks"]["a"]["rows"]
    [number] = [number for number, row in enumerate(rows) if row["rule"]]
    assert rows[number]["value"] is None
    assert rows[number]["gap_closed"] is None
    assert "infinite" in rows[number]["gap_closed_reason"]
    assert content["nulls"][f"tasks.a.rows.{number}.value"].startswith("infinite: ")
    assert "a: inf under" in (tmp_path / "out" / "report.md").read_text()


def test_an_order_of_a_lattice_that_is_impossible_has_no_value(tmp_path):
    """One order of a lattice may meet a token of probability 0 (top_k), and so may all of them."""
    file = ours(tmp_path / "results", docs=DOCS, estimator="mixture", values={"sotu": LATTICE})
    put(file, "config.duel.tasks.sotu.values.greedy:k=1", IMPOSSIBLE)

    values = {}
    for row in run(tmp_path)["tasks"]["sotu"]["rows"]:
        values[row["rule"] or row["estimator"]] = row["value"]

    assert values.keys() == LATTICE.keys()
    assert values["greedy:k=1"] is None
    assert values["margin:k=1"] is not None


# ---------------------------------------------------------------- samples, tasks, models


def test_a_number_per_document_is_aggregated_as_the_harness_does(tmp_path):
    file = ours(tmp_path / "results", {"lambada": {"token_perplexity": 9.0}}, size=3)
    put(file, "results.lambada", {"perplexity,none": math.exp(2.0), "acc,none": 0.5})
    lines = []
    for n, nats in enumerate((-1, -2, -3)):
        sample = {"doc_id": n, "doc": {"n": n}, "doc_hash": str(n), "perplexity": nats}
        lines.append(json.dumps(sample))
    samples = file.with_name(file.name.replace("results_", "samples_lambada_")).with_suffix(".jsonl")
    samples.write_text("\n".join(lines))

    task = run(tmp_path)["tasks"]["lambada"]

    assert task["metric"] == "perplexity"
    [row] = task["rows"]
    low, high = row["interval"]
    assert low < row["value"] < high


def test_samples_of_another_run_give_no_interval(tmp_path):
    file = ours(tmp_path / "results", docs=DOCS)

    def double_nats(record):
        nats, tokens = record["token_perplexity"]
        record["token_perplexity"] = [2 * nats, tokens]

    edit_samples(file, double_nats)

    [row] = run(tmp_path)["tasks"]["sotu"]["rows"]

    assert row["interval"] is None
    assert row["reason"].startswith("the samples of sotu give token_perplexity")
    assert "31." in row["reason"]


def test_an_accuracy_that_no_decoding_stands_behind_says_so(tmp_path):
    file = ours(tmp_path / "results", {"lambada": {"token_perplexity": 9.0}}, estimator="elbo")
    put(file, "results.lambada.acc,none", 0.0)
    put(file, "configs.lambada.output_type", "loglikelihood")
    run(tmp_path)
    assert averages.NOT_DECODED in (tmp_path / "out" / "report.md").read_text()


def test_a_rule_of_fewer_documents_is_not_in_the_table(tmp_path):
    """A lattice run that a cache continued with one more rule: margin is of 2 of 4 documents."""
    file = ours(tmp_path / "results", docs=DOCS, estimator="oracle", values={"sotu": LATTICE})
    put(file, "config.duel.tasks.sotu.values.margin:k=1", {"log_prob": -72.0, "windows": 2})

    task = run(tmp_path)["tasks"]["sotu"]

    assert "margin:k=1" not in [row["rule"] for row in task["rows"]]
    assert all("margin" not in line for line in task["headlines"])
    [note] = [note for note in task["notes"] if note.startswith("margin:k=1 of sotu in")]
    assert "left out: " in note


def test_models_of_one_name_are_told_apart(tmp_path):
    for model in ("one/M", "two/M", "N"):
        ours(tmp_path / "results", model=model, docs=DOCS)

    shown = {row["model"] for row in run(tmp_path)["tasks"]["sotu"]["rows"]}

    assert shown == {"one/M", "two/M", "N"}


# ---------------------------------------------------------------- traces


@pytest.mark.parametrize("header", [{"pretrained": "org/Other"}, {}])
def test_a_trace_of_none_of_the_results_is_named(tmp_path, monkeypatch, header):
    """In a note, and on the page by its own model, or else by its file."""
    monkeypatch.setattr("lm_eval_duel.results.traced.token_texts", lambda ids, tokenizer: ["x"] * len(ids))
    window = {"task": "sotu", "doc": 0, "window": 0, "ids": [5, 6], "reveal_steps": [0, 1]}
    window |= {"token_logprobs": [-0.5, -1.0], "values": {"duel": -1.5}}
    first = ours(tmp_path / "results", docs=DOCS, model="org/First")
    other = ours(tmp_path / "other", docs=DOCS, model="org/Other", rule="margin:k=1")
    paths = [trace(tmp_path / "first.jsonl", first, [window]), trace(tmp_path / "copy.jsonl", first, [window])]
    foreign = trace(tmp_path / "foreign.jsonl", other, [window])
    first_line, *lines = foreign.read_text().splitlines(keepends=True)
    header_of_foreign = json.loads(first_line)
    foreign.write_text("".join([json.dumps(header_of_foreign | header) + "\n", *lines]))

    content = run(tmp_path, "--traces", *paths, foreign, "--page", "--tokenizer", "demo-mdm")

    [note] = [note for note in content["notes"] if "none of the results" in note]
    assert str(foreign) in note
    assert header_of_foreign["fingerprint"] in note
    [document] = content["documents"]
    names = [order["label"].split(",")[0] for order in document["orders"]]
    assert names == ["First", "Other" if header else "foreign"], "the copy of a trace repeats its orders"


def test_intervals_of_a_lattice_need_its_trace(tmp_path):
    """Not one that is gone, or of another run."""
    first = {"oracle": -20.0, "mixture": -30.0, "greedy:k=1": -29.0}  # nats of the first document, of 8 tokens
    second = {"oracle": -12.0, "mixture": -14.0, "greedy:k=1": -13.5}  # of 4 tokens
    perplexities = {name: math.exp(-(first[name] + second[name]) / 12) for name in first}
    half_of_first = {name: nats / 2 for name, nats in first.items()}
    windows = [
        {"task": "sotu", "doc": 0, "window": 0, "values": half_of_first},
        {"task": "sotu", "doc": 0, "window": 1, "values": half_of_first},
        {"task": "sotu", "doc": 1, "window": 0, "values": second},
    ]
    path = tmp_path / "t.jsonl"
    file = ours(
        tmp_path / "results",
        docs={"sotu": documents([first["oracle"], second["oracle"]], [8, 4], TEXTS[:2])},
        estimator="oracle",
        values={"sotu": perplexities},
        duel={"attention": "block_causal", "trace": str(path)},
    )
    trace(path, file, windows)

    def check_reasons(content, pattern):
        """Hold what is said of the intervals of the mixture and of greedy. The samples give the oracle's."""
        mixture, greedy = [row for row in content["tasks"]["sotu"]["rows"] if row["estimator"] != "oracle"]
        assert re.match(pattern, mixture["reason"])
        assert re.match(pattern, greedy["reason"])

    for row in run(tmp_path)["tasks"]["sotu"]["rows"]:
        low, high = row["interval"]
        assert low < row["value"] < high, row["name"]

    moved = path.rename(tmp_path / "moved.jsonl")
    content = run(tmp_path)
    assert any("is no longer at" in note for note in content["notes"])
    check_reasons(content, "no trace of")

    content = run(tmp_path, "--traces", moved)
    check_reasons(content, "from 2 distinct documents")  # an interval, from few of them

    without_last_line = moved.read_text().splitlines()[:-1]
    moved.write_text("\n".join(without_last_line) + "\n")
    check_reasons(run(tmp_path, "--traces", moved), ".*another run's trace")

    moved.rename(file.parent / path.name)  # next to the results it is found by its name
    check_reasons(run(tmp_path), ".*another run's trace")


# ---------------------------------------------------------------- groups, estimators, the folder


@pytest.mark.parametrize("kind", registry.Kind)
def test_a_new_estimator_is_shown_under_its_name_and_kind(tmp_path, monkeypatch, kind):
    entry = registry.Entry("fake", "Fake Estimator", "a fake", kind, "nowhere:Fake", dict)
    monkeypatch.setitem(registry.ESTIMATORS, "fake", entry)
    ours(tmp_path / "results", docs=DOCS, estimator="fake", values={"sotu": {"mixture": 7.0}})

    rows = {row["estimator"]: row for row in run(tmp_path)["tasks"]["sotu"]["rows"]}

    assert set(rows) == {"fake", "mixture"}
    fake = rows["fake"]
    assert fake["name"].startswith("Fake Estimator")
    for file in ("report.md", "methods_sotu.tex"):
        assert "Fake Estimator" in (tmp_path / "out" / file).read_text()
    assert fake["rule"] is None
    assert fake["kind"] == kind.value
    assert not fake["best"]
    assert rows["mixture"]["best"] is (kind is not registry.Kind.NOT_A_LIKELIHOOD)
    assert (kind.meaning in fake["name"]) is (kind is registry.Kind.NOT_A_LIKELIHOOD)


def test_names_of_files_differ_where_case_is_ignored():
    """A file of a part of a task is named after it, too."""
    tables = [("a/b", "gap", ""), ("A/b", "gap", ""), ("a", "rules", "M, block 4"), ("a", "rules", "N")]

    assert list(stems(tables)) == ["gap_a_b", "gap_A_b_2", "rules_a_M_block_4", "rules_a_N"]
    assert list(stems([("notes.txt", "gap", "")])) == ["gap_notes_txt"], "the only extension is that of the table"


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"report.json": '{"files": ["thesis.tex", "report.json"]}'}, r"report\.json was not written by this command"),
        ({"report.json": "["}, r"report\.json was not written by this command"),
        ({"methods_sotu.tex": "mine"}, r"holds methods_sotu\.tex, which no report there lists"),
    ],
)
def test_a_folder_of_something_else_is_left_as_it_is(tmp_path, mine, message):
    made(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    mine |= {"thesis.tex": "years of work"}
    for name, text in mine.items():
        (out / name).write_text(text)

    with pytest.raises(DuelError, match=message):
        run(tmp_path)

    content = {path.name: path.read_text() for path in out.iterdir()}
    assert content == mine


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    made(tmp_path)
    for folder in ("/dev/null/report", tmp_path / ("x" * 300)):  # below a file, and a name that is too long
        with pytest.raises(DuelError, match=re.escape(f"--out {folder}")):
            files.write(folder, {}, {})


def test_files_of_an_earlier_report_are_replaced_and_others_stay(tmp_path):
    made(tmp_path)
    before = set(run(tmp_path)["files"])
    out = tmp_path / "out"
    (out / "thesis.tex").write_text("years of work")

    after = set(run(tmp_path, "--pairs", "none")["files"])

    assert before - after == {"pairs_sotu.tex"}
    assert (out / "thesis.tex").read_text() == "years of work"
    assert {path.name for path in out.iterdir()} == after | {"thesis.tex"}


def test_a_run_ends_with_a_table_of_kinds_and_errors():
    """From the content of a results file alone: the values of its report, a bound and an oracle told as such."""
    lines = []
    for file in sorted((demo.FOLDER / "results").glob("demo-bd/results_*.json")):
        content = json.loads(file.read_text())
        lines += summary(content).splitlines()

    for value, kind in (
        ("≤ 42.27 ± 0.17", "bound"),
        ("≤ 42.04", "bound"),
        ("35.28", "exact"),
        ("25.30", "oracle"),
        ("± 0.17", "Monte Carlo"),
    ):
        lines_with_value = [line for line in lines if f"{value} |" in line]
        assert any(kind in line for line in lines_with_value), (value, kind, lines)
    assert "--limit" not in "\n".join(lines)

    content["n-samples"]["sotu"]["original"] = 99
    assert "36 of 99 documents of sotu" in summary(content)


def test_a_run_without_perplexity_ends_with_its_documents_and_its_fingerprint():
    [file] = sorted((demo.FOLDER / "results").glob("demo-bd/results_*.json"))[:1]
    content = json.loads(file.read_text())
    content["results"] = {"sotu": {"alias": "sotu", "exact_match,none": 0.5, "exact_match_stderr,none": 0.1}}
    fingerprint = content["config"]["fingerprint"]
    assert summary(content) == f"36 documents of sotu, fingerprint {fingerprint}"

    # what lm-eval's own table does not say of a number
    content["results"]["sotu"] = {"alias": "sotu", "acc,none": 0.5, "acc_stderr,none": 0.1}
    content["configs"]["sotu"]["output_type"] = "multiple_choice"
    content["config"]["duel"]["estimator"] = "elbo"
    remark, last = summary(content).split("\n\n")
    assert remark.startswith("acc of sotu: from a bound") and last.startswith("36 documents of sotu, ")

    content["results"] = dict.fromkeys("abcdefghij", content["results"]["sotu"])
    content["configs"] = {name: {"output_type": "loglikelihood_rolling"} for name in "abcdefghij"}
    content["n-samples"] = {name: {"original": 40, "effective": 30} for name in "abcdefghij"}
    assert summary(content) == f"300 of 400 documents of 10 tasks (--limit), fingerprint {fingerprint}"


def test_a_report_names_files_as_the_command_does(tmp_path, monkeypatch, capsys):
    """A folder that is named relative to the current one brings no folder above it into what is shared."""
    made(tmp_path)
    monkeypatch.chdir(tmp_path)

    run(Path(), "--page")

    assert str(tmp_path) not in capsys.readouterr().out
    for name in ("report.md", "report.csv", "report.json", "index.html"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()

    named_twice = read.files(["results", tmp_path / "results", "ar"])
    assert len(named_twice) == 4
    assert len({path.resolve() for path in named_twice}) == 4
    assert runs.common_folder(read.runs([tmp_path / "results", "ar"])) == "."
