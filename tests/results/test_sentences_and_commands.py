"""Sentences, cells and commands of a report: what each says, and what it may not say."""

import dataclasses
import math
import shlex
import subprocess
import sys

import pytest
from results import documents, edit, hf, ours, per_token, put

from lm_eval_duel.cli.report import parse
from lm_eval_duel.results import averages, columns, costs, files, page, read, report, rerun, run_tables
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.table import split

TOKENS = (20, 40, 30)


def docs(shift=0.0):
    return {"sotu": documents([-60 - shift, -150 - shift, -90 - shift], TOKENS)}


def board(folder, *words):
    return collect(parse([str(folder), "--out", "unused", "--as_published", *words]))


def cells_of(table):
    """The cells of a table of one row, by their headings."""
    [row] = table.rows
    return dict(zip(table.heads, row, strict=True))


# ---------------------------------------------------------------- headlines

MONTE_CARLO = {"estimator": "elbo", "spec": {"mc_samples": "16"}}
BOUND_ONLY = [(30, MONTE_CARLO)]
WITH_ELBO = [(30, MONTE_CARLO), (15, {})]


@pytest.mark.parametrize(
    ("results", "words", "said", "not_said"),
    [
        (
            WITH_ELBO,
            [],
            ["46.22 under greedy", "estimated 62.2 %", "Monte Carlo ELBO gives ≤ 76.20", "against 28.03"],
            ["Lowest"],
        ),
        (WITH_ELBO, ["--metric", "bits_per_byte"], ["bits per byte"], ["62.2", "closes"]),
        (WITH_ELBO, ["--metric", "word_perplexity"], ["perplexity per word"], ["Lowest"]),
        (BOUND_ONLY, [], ["≤ 76.20", "a gap of at most 48.17", "no DUEL result"], ["under"]),
        ([(15, {"estimator": "mixture"})], [], ["a gap of 18.18", "no DUEL result"], ["at most", "≤"]),
        (
            [*WITH_ELBO, (3, {"rule": "margin:k=1"})],
            [],
            ["under greedy", "Its lowest exact value: margin, 30.98"],
            [],
        ),
        ([*WITH_ELBO, (3, {"estimator": "mixture"})], [], ["Its lowest exact value", "30.98"], []),
        ([*WITH_ELBO, (3, {"estimator": "oracle"})], [], ["under greedy"], ["lowest"]),
        ([(9, MONTE_CARLO), (15, {})], [], ["closes none of"], []),
        ([(30, {"estimator": "elbo", "spec": {"elbo_eps": "0.01"}}), (15, {})], [], ["eps=0.01: no bound"], ["≤"]),
        ([(15, {"spec": {"cache": "dual"}})], [], ["greedy with cache=dual", "gap of 18.18"], []),
        ([(3, {"estimator": "oracle"})], [], ["the oracle only"], ["gap"]),
        ([(15, {"block": "8"}), (3, {"block": "none"})], [], ["30.98 under greedy over the whole target"], []),
        ([(3, {"block": "8"}), (15, {"block": "none"})], [], ["30.98 under greedy in blocks of 8"], []),
    ],
)
def test_the_sentence_about_a_model(tmp_path, results, words, said, not_said):
    hf(tmp_path, docs=docs(), model="AR")
    for shift, more in results:
        ours(tmp_path, docs=docs(shift), model="M", **more)

    [line] = board(tmp_path, *words).headlines["sotu"]

    assert line.startswith(r"**M** on sotu")
    for text in said:
        assert text in line, line
    for text in not_said:
        assert text not in line, line


# ---------------------------------------------------------------- cells


def test_errors_in_cells_are_of_what_they_stand_behind(tmp_path):
    """The error of a gap is that of the value; that of a gap closed has its own unit; ± ? where none is known."""
    hf(tmp_path, docs=docs(), model="AR")
    elbo_file = ours(tmp_path, docs=docs(30), log=False, **MONTE_CARLO)
    estimate_file = ours(tmp_path, docs=docs(15), estimator="two_phase", spec={"sample": "0.05"}, log=False)
    put(elbo_file, "config.duel.tasks.sotu.values.elbo.stderr", 0.9)
    put(estimate_file, "config.duel.tasks.sotu.values.two_phase.stderr", 0.45)

    def rows_by_estimator():
        return {compared.row.estimator: compared for compared in board(tmp_path).tasks["sotu"].rows}

    rows = rows_by_estimator()
    elbo = rows["elbo"]
    estimate = rows["two_phase"]
    assert columns.gap(elbo.row, elbo.gap) == "≤ +48.17 ± 0.76"
    assert columns.gap(estimate.row, estimate.gap) == "+18.18 ± 0.23"
    # d closed = 100 (gap / elbo_gap**2 d elbo_gap - 1 / elbo_gap d gap)
    error_of_elbo = 18.18 / 48.17**2 * 0.762
    error_of_estimate = 0.231 / 48.17
    assert estimate.closed.stderr == pytest.approx(100 * math.hypot(error_of_elbo, error_of_estimate), rel=1e-2)
    assert columns.closed(estimate, " %") == f"62.2 ± {estimate.closed.stderr:.1f} %"

    put(estimate_file, "config.duel.tasks.sotu.values.two_phase.stderr", None)
    estimate = rows_by_estimator()["two_phase"]
    assert columns.gap(estimate.row, estimate.gap) == "+18.18 ± ?"


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_is_named_if_any_row_or_run_has_one(tmp_path, first):
    for cache in ("none", "dual") if first else ("dual", "none"):
        if cache == "none":
            ours(tmp_path, docs=docs())
        else:
            ours(tmp_path, docs=docs(15), spec={"cache": cache})

    content = board(tmp_path)
    rows = [compared.row for compared in content.tasks["sotu"].rows]
    [with_cost] = [compared for compared in content.tasks["sotu"].rows if compared.cache_cost]

    cache_of_row = columns.names_of_rows(rows)["cache"]
    costs = run_tables.cost(content.costs)
    place = costs.heads.index("cache")
    assert [cache_of_row(row) for row in rows] == ["none", "dual"]
    assert sorted(row[place] for row in costs.rows) == ["dual", "none"]

    cells = cells_of(columns.cache_costs([with_cost]))
    assert cells["cache=none"] == "28.03"
    assert cells["with the cache"] == "46.22"
    [cost_head] = [head for head in cells if head.startswith("cost")]
    assert cells[cost_head] == "+0.5000"


@pytest.mark.parametrize(
    ("estimator", "metric", "output", "error", "text", "remark"),
    [
        ("duel", "acc", "loglikelihood", 0.125, "0.5000 ± 0.1250", None),
        ("duel", "acc", "multiple_choice", 0.125, "0.5000 ± 0.1250", None),
        ("elbo", "acc", "loglikelihood", 0.125, "0.5000 ± 0.1250", averages.NOT_DECODED),
        ("elbo", "acc (strict)", "loglikelihood", 0.125, "0.5000 ± 0.1250", averages.NOT_DECODED),
        ("elbo", "acc", "multiple_choice", 0.125, "0.5000 ± 0.1250", averages.FROM_BOUND),
        ("elbo", "f1", "loglikelihood", 0.0, "0.5000 ± ?", None),
        ("elbo", "f1", "loglikelihood", None, "0.5000 ± ?", None),
    ],
)
def test_an_accuracy(tmp_path, estimator, metric, output, error, text, remark):
    name, _, filtered = metric.partition(" (")
    filtered = filtered.strip(")") or "none"
    file = ours(tmp_path, docs=docs(), estimator=estimator)
    put(file, ["results", "choice"], {f"{name},{filtered}": 0.5, f"{name}_stderr,{filtered}": error})
    put(file, ["configs", "choice"], {"output_type": output})
    [run] = read.runs([tmp_path])

    cell = run_tables.average(run, "choice", metric)

    assert cell == (text if remark is None else (text, remark))
    assert run_tables.average(run, "choice", "other") == ""


@pytest.mark.parametrize(
    ("args", "bos", "said"),
    [({}, "given", True), ({"add_bos_token": "True"}, "given", False), ({}, "none", False)],
)
def test_texts_of_hf_may_lack_the_bos_of_ours(tmp_path, args, bos, said):
    hf_file = hf(tmp_path, docs=docs(), args=args)
    our_file = ours(tmp_path, docs=docs(), spec={"special_tokens": f"[1] text [], bos={bos}"})
    for file in (hf_file, our_file):
        put(file, ["results", "choice"], {"acc,none": 0.5, "acc_stderr,none": 0.125})
        put(file, ["configs", "choice"], {"output_type": "multiple_choice"})
    runs = read.runs([tmp_path])

    for run in runs:
        _, remark = split(run_tables.average_with_doubts(run, "choice", "acc", runs))
        assert (averages.WITHOUT_BOS in str(remark)) == (said and not run.config.ours)


def test_the_costs_of_a_run(tmp_path):
    duel = {"peak_memory_bytes": 3 * 2**20, "forwards": 1234, "rows": 5678, "seconds": 9.0}
    ours(tmp_path, docs=docs(), duel=duel, total_evaluation_time_seconds="31.5")

    cells = cells_of(run_tables.cost(board(tmp_path).costs))

    assert cells["s per token"] == "0.1"
    assert cells["whole run, s"] == "31.5"
    assert cells["forwards"] == "1,234"
    assert cells["rows"] == "5,678"
    assert cells["peak MiB"] == "3"


def test_costs_of_a_part_of_a_run_are_remarked_in_every_form(tmp_path):
    """Of a run with answers from a response cache, no number of the table stands without the remark."""
    duel = {"forwards": 1234, "rows": 5678, "seconds": 9.0, "answers_from_cache": 1}
    ours(tmp_path, docs=docs(), duel=duel)
    hf(tmp_path, docs=docs(1.0))

    report = board(tmp_path)

    [cost] = [cost for cost in report.costs if not cost.baseline]
    table = run_tables.cost([cost])
    cells = cells_of(table)
    [mark] = [mark for mark, remark in table.remarks.items() if remark.fact == costs.CACHED]
    assert cells["s per token"] == mark
    for head in ("forwards", "rows", "whole run, s", "x AR"):
        assert cells[head].endswith(mark)
    assert files.cost(cost)["seconds_per_token"] is None

    [method] = [standing.method for standing in report.standings.rows if standing.method.is_duel]
    assert method.seconds_per_token is None
    assert method.seconds_reason == costs.CACHED


def test_every_result_of_a_value_has_a_time_over_the_elbo(tmp_path):
    """Also that of a second run with the same value, which has no row of its own."""
    for seconds in (4.0, 6.0):
        ours(tmp_path, docs=docs(), duel={"seconds": seconds})
    ours(tmp_path, docs=docs(), estimator="elbo", duel={"seconds": 2.0})

    costs_of_duel = [cost for cost in board(tmp_path).costs if cost.run.config.estimator == "duel"]

    ratios = sorted(cost.over_elbo.value for cost in costs_of_duel)
    assert ratios == pytest.approx([2.0, 3.0])


# ---------------------------------------------------------------- commands

SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, {"--model_args": "pretrained=MDLM", "--tasks": "a,b"}),
        ({"config.limit": 0.25}, {"--limit": "0.25"}),
        ({"config.random_seed": 7}, {"--seed": "7,1234,1234,1234"}),
        ({"config.numpy_seed": 7}, {"--seed": "0,7,1234,1234"}),
        ({"config.torch_seed": 7}, {"--seed": "0,1234,7,1234"}),
        ({"config.fewshot_seed": 7}, {"--seed": "0,1234,1234,7"}),
        ({"config.random_seed": 0}, {"--seed": None}),  # the harness's own seeds, here and below
        ({"config.numpy_seed": 1234}, {"--seed": None}),
        ({"config.torch_seed": 1234}, {"--seed": None}),
        ({"config.fewshot_seed": 1234}, {"--seed": None}),
        ({f"config.{key}": 0 for key in SEEDS}, {"--seed": "0,0,0,0"}),
        ({"n-shot": {"a": 5, "b": 5}}, {"--num_fewshot": "5"}),
        ({"n-shot": {"a": 5, "b": 0}}, {"--num_fewshot": None}),
        ({"n-shot": {"a": 5, "b": 3}}, {"--num_fewshot": None}),
        ({"system_instruction": "be brief"}, {"--system_instruction": "be brief"}),
        ({"chat_template": "x"}, {"--apply_chat_template": ""}),
        ({"config.model_args": {"pretrained": "M", "trace": "/a/t"}}, {"--model_args": "pretrained=M,trace=t"}),
        ({"config.model_args": {"pretrained": "M", "trace": "C:\\a\\t"}}, {"--model_args": "pretrained=M,trace=t"}),
        ({"config.model_args": {"pretrained": "M", "x": "a,b"}}, {"--model_args": '{"pretrained": "M", "x": "a,b"}'}),
        ({"config.model_args": {"x": "a b", "pretrained": "M"}}, {"--model_args": '{"x": "a b", "pretrained": "M"}'}),
        ({"config.model_args": {"x": [1]}}, {"--model_args": '{"x": [1]}'}),
        ({"config.model_args": "pretrained=M,k=2"}, {"--model_args": "pretrained=M,k=2"}),
    ],
)
@pytest.mark.parametrize("make", [ours, hf])
def test_the_flags_of_a_command(tmp_path, make, changes, flags):
    file = make(tmp_path, per_token(["b", "a"], [20.0, 20.0]), model="MDLM")
    for place, value in changes.items():
        put(file, place, value)
    [run] = read.runs([tmp_path])

    words = shlex.split(rerun.command(run))

    if make is ours:
        assert words[:2] == ["lm-eval-duel", "run"]
        assert "--include_path" not in words
    else:
        assert words[:3] == ["lm_eval", "--model", "hf"]
        assert "--include_path" in words
    assert "--log_samples" in words, "without samples, a report has no intervals"
    assert "--output_path" in words
    for flag, value in flags.items():
        assert (flag in words) == (value is not None)
        if value:
            assert words[words.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("spec", "values", "needed"),
    [
        ({"rule": "greedy:k=1"}, (), []),
        (
            {"rule": "my/rules.py:Surest:least=0.3", "rule_code": "abc", "rule_files": "def"},
            (),
            [("file my/rules.py", 2)],
        ),
        ({"rule": "rules:Surest", "rule_code": "abc"}, (), [("module rules", 1)]),
        ({}, ("greedy:k=1", "a.py:A", "a.py:A:k=2", "b:B"), [("file a.py", 0), ("module b", 0)]),  # of a lattice
    ],
)
def test_a_row_says_which_code_of_a_user_its_command_needs(tmp_path, spec, values, needed):
    """With its digest, on the page and in the JSON; once if several tasks or rules need it."""
    more = {"rule": spec["rule"]} if spec else {"estimator": "oracle", "values": {"a": dict.fromkeys(values, 3.0)}}
    ours(tmp_path, per_token(["a", "b"], [20.0, 20.0]), spec=spec, **more)
    content = board(tmp_path)

    for standing in content.standings.rows:
        sentences = rerun.needed(standing.method)
        assert len(sentences) == len(needed)
        for sentence, (place, digests) in zip(sentences, needed, strict=True):
            assert place in sentence
            assert [f"{key}={spec.get(key)}" in sentence for key in ("rule_code", "rule_files")].count(True) == digests
            assert sentence in page.html(content, None)
    for row in report.content(content)["standings"]["rows"]:
        assert len(row["needed"]) == len(needed)


@pytest.mark.slow
def test_the_command_of_a_row_makes_a_file_that_report_reads_to_the_same_row(tmp_path):
    """Also the interval of a row that only a trace has the documents of."""
    made_by = "estimator=mixture,lattice_rules=none,block=4"
    run_of = [sys.executable, "-m", "lm_eval_duel", "run", "--tasks", "sotu", "--limit", "2", "--device", "cpu"]
    run_of += ["--model_args", f"pretrained=demo-bd,{made_by},trace={tmp_path / 'private' / 't.jsonl'}"]
    (tmp_path / "private").mkdir()
    subprocess.run([*run_of, "--output_path", "first", "--log_samples"], check=True, cwd=tmp_path)
    [first] = read.runs([tmp_path / "first"])

    program, *words = shlex.split(rerun.command(first))
    assert program == "lm-eval-duel"
    subprocess.run([sys.executable, "-m", "lm_eval_duel", *words], check=True, cwd=tmp_path)

    rows = []
    for place, trace in (("first", "private/t.jsonl"), ("results", "t.jsonl")):
        options = [str(tmp_path / place), "--traces", str(tmp_path / trace), "--out", "unused"]
        [task] = collect(parse(options)).tasks.values()
        rows.append(
            [(each.row.title, each.row.value, each.interval, each.row.run.config.fingerprint) for each in task.rows]
        )
    first_rows, second_rows = rows
    assert len(first_rows) == len(second_rows) > 1
    for one, other in zip(first_rows, second_rows, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1])
        assert one[2] == pytest.approx(other[2])
        assert one[3] == other[3]


@pytest.mark.parametrize("values", [("duel",), ("mixture", "elbo_exact")])
def test_the_command_of_a_lattice_run_has_the_trace_of_its_intervals(tmp_path, values):
    """Also if the trace was given to report alone; a trace of a run with one value makes no row."""
    file = ours(tmp_path, docs=docs())
    put(file, "config.model_args", {"pretrained": "M"})
    [run] = read.runs([tmp_path])
    trace = tmp_path / "private" / "t.jsonl"
    traced = dataclasses.replace(run, trace=trace, traced={("a", value): {} for value in values})

    words = shlex.split(rerun.command(traced))

    arguments = words[words.index("--model_args") + 1]
    assert arguments == ("pretrained=M,trace=t.jsonl" if len(values) > 1 else "pretrained=M")


def test_a_model_that_was_made_in_python_has_no_command(tmp_path):
    file = ours(tmp_path, docs=docs())
    put(file, "config.model", "Duel")

    [run] = read.runs([tmp_path])

    assert rerun.command(run) == rerun.IN_PYTHON


# ---------------------------------------------------------------- the folder of a report


@pytest.mark.parametrize(
    ("name", "is_removed"),
    [("old.tex", True), ("old.png", True), ("sub/old.tex", False), ("../old.tex", False), ("old.py", False)],
)
def test_only_files_of_a_report_in_its_folder_are_removed(tmp_path, name, is_removed):
    folder = tmp_path / "a" / "out"
    (folder / "sub").mkdir(parents=True)
    old = folder / name
    files.write(folder, {}, {})
    edit(folder / files.LISTING, lambda body: body["files"].append(name))
    old.write_text("mine")

    files.write(folder, {}, {"report.csv": "x", "report.md": b"y"})

    assert old.exists() != is_removed
    assert (folder / "report.csv").read_text() == "x"
    assert (folder / "report.md").read_bytes() == b"y"
