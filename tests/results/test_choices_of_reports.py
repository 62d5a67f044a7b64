"""What a report chooses among rows, runs, traces and notes: small tables of cases, each in both orders."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
from results import documents, edit, hf, ours, per_token, put, trace
from results import report as run

from lm_eval_duel import demo
from lm_eval_duel.cli.report import parse
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import compare, gaps, page, published, read, run_summary, traced
from lm_eval_duel.results import report as reports
from lm_eval_duel.results import trace as trace_files
from lm_eval_duel.results.table import Note, Table

TOKENS = (20, 40, 30)


def docs(*tasks, shift=0.0):
    nats = [-60 - shift, -150 - shift, -90 - shift]
    return {task: documents(nats, TOKENS) for task in tasks}


def board(folder, *words):
    return reports.collect(parse([str(folder), "--page", "--out", "unused", "--as_published", *words]))


def rows_of(folder, task="sotu", *words):
    return board(folder, *words).tasks[task].rows


# ---------------------------------------------------------------- the row of a headline


def candidate(name, rule="margin:k=1", estimator="duel", cached=False, elbo=True, seed=None, value=20.0, bound=False):
    row = SimpleNamespace(
        name=name,
        rule=rule,
        estimator=estimator,
        run=SimpleNamespace(has_cache=cached),
        entry=SimpleNamespace(follows_rule=estimator in ("duel", "two_phase")),
        noise_seed=seed,
        value=value,
        score=SimpleNamespace(is_bound=bound),
        ar=estimator == "ar",
    )
    return SimpleNamespace(row=row, closed=SimpleNamespace(elbo=object() if elbo else None))


PAPER = compare.PAPER_RULE
PREFERRED = [  # the first of each pair stands for its model
    (candidate("paper", PAPER, value=30.0), candidate("best", value=10.0)),
    (candidate("best", value=10.0), candidate("other")),
    (candidate("plain", value=30.0), candidate("cached", cached=True)),
    (candidate("plain", elbo=False), candidate("cached", cached=True)),
    (candidate("with an ELBO", value=30.0), candidate("without", elbo=False)),
    (candidate("seed 2", seed="2", value=30.0), candidate("seed 10", seed="10")),
    (candidate("with an ELBO", seed="1"), candidate("seed 0", seed="0", elbo=False)),
    (candidate("exact", value=30.0), candidate("paper estimate", PAPER, "two_phase")),
    (candidate("estimate", estimator="two_phase", value=30.0), candidate("mixture", None, "mixture")),
]


@pytest.mark.parametrize("pair", PREFERRED, ids=lambda pair: pair[0].row.name)
def test_the_row_of_a_headline(pair):
    for shown in (pair, pair[::-1]):
        assert compare.headline(shown).row.name == pair[0].row.name
        assert compare.main_row(shown).name == pair[0].row.name
    assert compare.headline([candidate("mixture", None, "mixture")]) is None
    baseline = candidate("baseline", None, "ar", value=90.0)
    assert compare.main_row([*pair, baseline]).name == "baseline" == compare.main_row([baseline, *pair]).name


def test_the_lowest_is_a_likelihood_if_there_is_one():
    bound = candidate("bound", estimator="elbo", value=10.0, bound=True)
    lower = candidate("lower bound", estimator="elbo", value=9.0, bound=True)
    exact = candidate("exact", value=20.0)
    for shown in itertools.permutations([bound, lower, exact]):
        assert compare.lowest(shown).row.name == "exact"
    assert compare.lowest([bound, lower]).row.name == compare.lowest([lower, bound]).row.name == "lower bound"


def test_pairs_come_with_clear_ones_first_and_the_largest_difference_first():
    def pair(better, verdict, difference):
        same = SimpleNamespace(model="M", block="4", cache=None)
        return SimpleNamespace(better=better, verdict=verdict, difference=difference, first=same, second=same)

    ordered = [
        *(pair("a", "a is better", -0.9), pair("b", "b is better", 0.5), pair("a", "a is better", -0.1)),
        *(pair("", "equal", -0.7), pair("", "equal", 0.6), pair("", "", -0.8), pair("", "", None)),
    ]
    for shuffled in (ordered[::-1], ordered[::2] + ordered[1::2]):
        assert compare._in_groups(shuffled) == ordered


# ---------------------------------------------------------------- speeds and notes


@pytest.mark.parametrize("steps", [(1.0, 1.0), (1.0, 0.999), (0.5, 1.0)])
def test_rules_are_shown_against_nfe_if_two_differ(tmp_path, steps):
    for rule, nfe in zip(("greedy:k=1", "margin:k=1"), steps, strict=True):
        put(ours(tmp_path, per_token(["t"], [20.0]), rule=rule), "config.duel.tasks.t.values.duel.nfe", 1000 * nfe)
    assert len(board(tmp_path).tasks["t"].rules) == (steps[0] != steps[1])


@pytest.mark.parametrize("first", [True, False])
def test_the_levels_of_rules_are_of_their_own_block(tmp_path, first):
    """The ELBO of whichever row has one, and the oracle of their block and cache."""
    shared = {"attention": "block_causal"}
    for block, value in (("4", 12.0), ("8", 11.0))[:: 1 if first else -1]:
        ours(tmp_path, per_token(["t"], [value]), estimator="oracle", block=block, **shared)
    for rule, nfe in (("greedy:k=1", 1.0), ("greedy:k=2", 0.5)):
        for block in ("4", "8"):
            ours(tmp_path, per_token(["t"], [20.0]), rule=rule, nfe=nfe, block=block, **shared)
    ours(tmp_path, per_token(["t"], [23.0]), estimator="elbo", block="4", spec={"elbo_block": "4"}, **shared)
    shown = {
        speeds.title: (round(speeds.oracle.value, 6), speeds.elbo is not None)
        for speeds in board(tmp_path).tasks["t"].rules
    }
    assert shown == {"MDLM, block 4": (12.0, True), "MDLM, block 8": (11.0, False)}


@pytest.mark.parametrize(("dtype", "noted"), [("float32", 0), ("float64", 0), ("bfloat16", 1), ("float16", 1)])
def test_low_precision_is_noted(tmp_path, dtype, noted):
    ours(tmp_path, docs=docs("sotu"), spec={"dtype": dtype})
    notes = board(tmp_path).tasks["sotu"].notes
    assert sum(f"ran in {dtype}" in note for note in notes) == noted


def test_the_note_on_windows_has_all_of_a_model(tmp_path):
    for capacity in (200, 300):
        ours(tmp_path, docs=docs("sotu"), duel={"row_capacity": capacity}, rule=f"greedy:k={capacity}")
    [note] = [note for note in board(tmp_path).tasks["sotu"].notes if note.startswith("windows")]
    assert "200 target positions and harness, 300 target positions" in note


@pytest.mark.parametrize("metric", ["token_perplexity", "word_perplexity", "byte_perplexity"])
def test_gap_closed_in_another_unit_than_the_papers_says_so(tmp_path, metric):
    hf(tmp_path, docs=docs("sotu"))
    ours(tmp_path, docs=docs("sotu", shift=30), estimator="elbo")
    ours(tmp_path, docs=docs("sotu", shift=15))
    notes = board(tmp_path, "--metric", metric).tasks["sotu"].notes
    assert any("The paper computes it per token" in note for note in notes) == (metric != "token_perplexity")


# ---------------------------------------------------------------- ELBOs, caches, intervals


@pytest.mark.parametrize(
    ("attention", "block", "found"),
    [
        ("bidirectional", "None", True),
        ("bidirectional", "4", False),
        ("block_causal", "4", True),
        ("causal_prefix", "4", True),
        ("block_causal", "None", False),
        ("causal_prefix", "None", False),
    ],
)
def test_the_elbo_is_over_what_the_network_was_trained_on(tmp_path, attention, block, found):
    shared = {"attention": attention}
    hf(tmp_path, docs=docs("sotu"))
    ours(tmp_path, docs=docs("sotu", shift=30), estimator="elbo", spec={"elbo_block": block}, **shared)
    ours(tmp_path, docs=docs("sotu", shift=15), **shared)
    [each] = [each for each in rows_of(tmp_path) if each.row.is_duel]
    assert (each.closed.percent is not None) == found


@pytest.mark.parametrize(
    ("key", "is_convention"), [("max_length", True), ("windows", True), ("dtype", False), ("x", False)]
)
def test_published_elbos_may_differ_in_conventions_only(tmp_path, key, is_convention):
    hf(tmp_path, docs=docs("sotu"))
    ours(tmp_path, docs=docs("sotu", shift=30), estimator="elbo", spec={key: "2049"})
    ours(tmp_path, docs=docs("sotu", shift=15))
    [each] = [each for each in rows_of(tmp_path) if each.row.is_duel]
    assert (each.closed.percent is not None) == is_convention
    assert ("ELBO" in str(each.closed.reason)) != is_convention


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_the_nearest_spec_is_the_one_with_the_fewest_differences(order):
    def row(estimator, **spec):
        return SimpleNamespace(run=SimpleNamespace(key="w", spec=spec), estimator=estimator)

    this = row("this", a="1", b="1")
    others = [row("near", a="2", b="1"), row("near too", a="2", b="1"), row("far", a="2", b="2")]
    found, differences = gaps.nearest(this, [others[n] for n in order], lambda other: True, set())
    assert sorted(each.estimator for each in found) == ["near", "near too"]
    assert differences == {"a": "a=1 in this row, 2 in that one"}
    assert gaps.nearest(this, others, lambda other: True, {"a", "b"})[1] == {}
    assert gaps.nearest(this, others, lambda other: False, set()) == ([], {})


@pytest.mark.parametrize(("draws", "is_compared"), [("0", True), ("1", False)])
def test_the_cost_of_a_cache_is_of_the_same_draws(tmp_path, draws, is_compared):
    spec = {"sample": "0.05", "draw_seed": "0"}
    ours(tmp_path, docs=docs("sotu"), estimator="two_phase", spec=spec)
    cached = spec | {"cache": "dual", "draw_seed": draws}
    ours(tmp_path, docs=docs("sotu", shift=5), estimator="two_phase", spec=cached)
    [cost] = [each.cache_cost for each in rows_of(tmp_path) if each.cache_cost]
    assert (cost.second is not None) == is_compared
    if is_compared:
        assert cost.difference == pytest.approx(15 / 90) and cost.first.cache == "dual"
    else:
        assert "draw_seed" in str(cost.reason)


@pytest.mark.parametrize("first", [True, False])
def test_no_interval_is_explained_by_the_row_that_has_no_draws(tmp_path, first):
    ours(tmp_path, docs=docs("sotu"), rule="greedy:k=1", log=first)
    ours(tmp_path, docs=docs("sotu", shift=5), rule="margin:k=1", log=not first)
    [pair] = board(tmp_path, "--pairs", "all").tasks["sotu"].pairs
    assert pair.interval is None and pair.difference == pytest.approx(-15 / 90)
    without, other = ("margin", "greedy") if first else ("greedy", "margin")
    assert without in str(pair.reason) and other not in str(pair.reason)


@pytest.mark.parametrize(("error", "closes"), [(1.0, True), (40.0, False)])
def test_an_elbo_whose_windows_vary_more_than_its_gap_closes_none(tmp_path, error, closes):
    """Its draws have no error of their own: the spread over windows is a bound of that."""
    hf(tmp_path, docs=docs("sotu"))
    file = ours(tmp_path, docs=docs("sotu", shift=9), estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo.stderr", None)
    put(file, "config.duel.tasks.sotu.values.elbo.window_stderr", error)
    ours(tmp_path, docs=docs("sotu", shift=3))
    [each] = [each for each in rows_of(tmp_path) if each.row.is_duel]
    assert (each.closed.percent is not None) == closes and each.closed.of == "Monte Carlo"
    assert each.closed.stderr is None


# ---------------------------------------------------------------- a model's name in LaTeX


def test_a_name_stands_in_the_first_of_its_rows_only():
    rows = [("A", "x", "1"), ("A", "x", "2"), ("B", "x", "3"), ("A", "x", "4")]
    columns = {"model": lambda row: row[0], "rule": lambda row: row[1], "n": lambda row: row[2]}
    lines = Table.from_records("T", rows, columns).latex().splitlines()
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    cells = [[cell.strip() for cell in line.removesuffix(r"\\").split("&")] for line in body]
    assert cells == [["A", "x", "1"], ["", "x", "2"], ["B", "x", "3"], ["A", "x", "4"]]


# ---------------------------------------------------------------- traces

WINDOW = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "ids": [5, 6, 7], "starts": [0, 2]}
WINDOW |= {"reveal_steps": [1, 0, 0], "token_logprobs": [-0.5, -1.0, -2.0], "values": {"duel": -3.5}}


def test_windows_of_a_document_are_joined_in_their_order():
    joined = traced.Order("M", "t")
    for _ in range(2):
        joined.add(WINDOW, WINDOW)
    assert joined.starts == [0, 2, 3, 5] and joined.ids == [5, 6, 7, 5, 6, 7]
    assert joined.steps == [1, 0, 0, 1, 0, 0] and joined.nats == [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({}, ["greedy"]),
        ({"task": None}, []),
        ({"doc": None}, []),
        ({"generated": {}}, []),
        ({"request": 1}, []),
        ({"repeat": 1}, []),
        ({"repeat": 0}, ["greedy"]),
        ({"reveal_steps": []}, []),
        ({"rules": {"margin": WINDOW, "none": {"reveal_steps": []}}}, ["greedy", "margin"]),
    ],
)
def test_the_orders_of_a_window(change, rules):
    assert [rule for rule, _ in traced._orders(WINDOW | change, {"rule": "greedy"})] == rules


@pytest.mark.parametrize(
    ("spec", "rule", "label"),
    [
        ({"estimator": "duel", "block": "4", "cache": "none"}, "greedy:k=1", "M, greedy, block 4, cache=none"),
        ({"estimator": "duel", "block": "none"}, "greedy:k=1", "M, greedy, whole target"),
        ({"estimator": "oracle", "block": "4"}, "greedy:k=1", "M, greedy, block 4"),
        ({"estimator": "two_phase", "block": "4"}, "greedy:k=1", "M, DUEL estimate*, greedy, block 4"),
        ({"estimator": "ar"}, "", "M, autoregressive"),
        ({"estimator": "later", "block": "4"}, "greedy:k=1", "M, greedy, block 4"),
    ],
)
def test_the_label_of_an_order(spec, rule, label):
    pattern = re.escape(label).replace(r"\*", "[^,]*")
    assert re.fullmatch(pattern, traced._label("M", spec, rule)), traced._label("M", spec, rule)


def test_a_named_trace_is_taken_before_the_one_that_the_run_wrote(tmp_path):
    file = ours(tmp_path, docs=docs("sotu"))
    written = trace(tmp_path / "written.jsonl", file, [WINDOW])
    put(file, "config.duel.trace", str(written))
    named = trace(tmp_path / "named.jsonl", file, [WINDOW | {"values": {"duel": -9.0}}])
    found = read.runs([tmp_path])
    for places, nats in (([], -3.5), ([named], -9.0)):
        [with_trace], notes = traced.Traces(places).attach(found)
        assert with_trace.traced["sotu", "duel"] == {0: nats} and notes == []


def test_of_equal_windows_the_last_written_counts_and_a_request_is_replaced_whole(tmp_path):
    """As written by a run that was continued: the second time the request has one window fewer."""
    file = ours(tmp_path, docs=docs("sotu"))
    first = [WINDOW, WINDOW | {"window": 1}, WINDOW | {"doc": 1}]
    path = trace(tmp_path / "t.jsonl", file, [*first, WINDOW | {"values": {"duel": -9.0}}])
    windows = trace_files.read(path)
    assert [(line["doc"], line["window"], line["values"]["duel"]) for line in windows] == [(0, 0, -9.0), (1, 0, -3.5)]


@pytest.mark.parametrize("key", ["fingerprint", "rules", "lattice_rule_code"])
def test_a_trace_is_continued_under_the_same_header_only(tmp_path, key):
    header = {"fingerprint": "f", "rules": ["greedy"], "lattice_rule_code": "c", "spec": {}}
    for given in (header, header | {"pretrained": "elsewhere"}):
        trace_files.Writer(tmp_path / "t.jsonl").begin(given)
    with pytest.raises(DuelError, match=key):
        trace_files.Writer(tmp_path / "t.jsonl").begin(header | {key: "other"})


@pytest.mark.parametrize("changed", ["reveal_steps", "token_logprobs", "confidence", "margin", "entropy"])
@pytest.mark.parametrize("length", [0, 2, 3, 4])
def test_lists_of_a_window_have_a_number_for_each_id_or_none(changed, length):
    line = WINDOW | {changed: [0] * length}
    if length in (0, 3):
        trace_files._window(line)
        return
    with pytest.raises(ValueError, match="length"):
        trace_files._window(line)


# ---------------------------------------------------------------- the page


def test_notes_of_the_page_say_for_which_tasks_they_hold():
    def task(*notes, documents=4, available=4, differences=()):
        size = f"{documents} of {available} documents"
        return SimpleNamespace(
            notes=notes, differences=differences, documents=documents, available=available, size=size
        )

    tasks = {
        "a": task("all", "two", "one"),
        "b": task("all", "two", documents=3),
        "c": task("all", differences=["in /home/me/r/x.json"]),
    }
    made = SimpleNamespace(file=reports.read.Path("/home/me/r/x.json"))
    made.name = "/home/me/r/x.json"
    given = SimpleNamespace(tasks=tasks, runs=[made], notes=[Note("fact", "advice"), Note("", "advice")])
    assert page.notes(given) == ["fact", "b: 3 of 4 documents", "all", "a, b: two", "a: one", "c: in x.json"]


def test_a_remark_belongs_to_all_groups_of_columns_that_refer_to_it():
    def cell(text):
        return lambda row: (text, Note("why"))

    shown = [
        page.Column("a", cell("1"), "value"),
        page.Column("b", cell("2"), "gap"),
        page.Column("c", cell("3"), "gap"),
    ]
    texts, [remark] = page._texts(["row"], shown)
    assert (remark.mark, remark.text, remark.groups) == ("[1]", "why", ["value", "gap"])
    assert texts["row"] == ["1\u00a0[1]", "2\u00a0[1]", "3\u00a0[1]"]


@pytest.mark.parametrize("tasks", [("sotu",), ("sotu", "news")])
def test_columns_of_the_page(tmp_path, tasks):
    """Its columns of bits have the bits; of several tasks most groups are hidden until they are asked for."""
    hf(tmp_path, docs=docs(*tasks), model="AR")
    ours(tmp_path, docs=docs(*tasks, shift=30), estimator="elbo", spec={"mc_samples": "16"})
    file = ours(tmp_path, docs=docs(*tasks, shift=15))
    edit(file, lambda body: body["results"].update(choice={"acc,none": 0.5, "acc_stderr,none": 0.125}))
    content = board(tmp_path)
    shown = page.html(content, None)
    checked = set(re.findall(r'data-group="(\w+)" checked', shown))
    every = set(re.findall(r'data-group="(\w+)"', shown))
    hidden = {"source"} if len(tasks) == 1 else {"source", "bits", "gap", "closed"}
    assert every - checked == hidden and {"value", "bits", "gap", "closed", "average", "cost", "source"} <= every
    [duel] = [row for row in content.standings.rows if row.method.is_duel]
    texts = {column.head: column.cell(duel) for column in page.columns_of(content)}
    for name in tasks:
        row = duel.method.rows[name].row
        assert texts[f"{name} bits/byte"] == f"{row.metrics['bits_per_byte']:.4f}"
        assert texts[f"{name} gap"].startswith("+") and texts[f"{name} gap closed, %"][0][:2] == "62"
        assert "Monte Carlo" in str(texts[f"{name} gap closed, %"][1])
    assert texts["choice acc"] == "0.5000 ± 0.1250"
    kinds = set(page._legend(content.standings.rows))
    assert kinds == {"AR", "exact", "bound"}


# ---------------------------------------------------------------- published figures, the table of a run, a report


def test_published_figures_are_listed_by_source_and_metric_and_bounds_are_marked(tmp_path):
    lines = [",".join((*published.NEEDED, "stderr", "block"))]
    for metric, source in (("token_perplexity", "s"), ("word_perplexity", "s"), ("token_perplexity", "t")):
        for estimator, number, stderr, block in (("elbo", 30, 0.25, "none"), ("duel", 20, "", 4), ("duel", 21, 1.5, 8)):
            lines.append(f"M,{estimator},ptb,{metric},{number},{source},{stderr},{block}")
    (tmp_path / "p.csv").write_text("\n".join(lines))
    sources = published.by_source(published.read([tmp_path / "p.csv"]))
    assert [(each["source"], each["metric"]) for each in sources] == [
        *(("s", "token_perplexity"), ("s", "word_perplexity"), ("t", "token_perplexity"))
    ]
    for each in sources:
        shown = [(row[2], row[-1]) for row in published.table(each).rows]
        assert shown == [("whole target", "≤ 30.00 ± 0.25"), ("4", "20.00"), ("8", "21.00 ± 1.50")]


def test_the_table_of_a_run_has_the_first_metric_and_counts_documents_of_tasks_without_a_limit():
    [file] = sorted((demo.FOLDER / "results").glob("demo-bd/results_*.json"))[:1]
    content = json.loads(file.read_text())
    entries = content["results"]["sotu"]
    content["results"]["sotu"] = dict(reversed(entries.items()))
    first = next(metric for metric in METRICS if f"{metric},none" in entries)
    assert first == "token_perplexity" and "perplexity per token" in run_summary.summary(content)
    sizes = {name: {"effective": 30} for name in "abcdef"}
    sizes["a"]["original"] = 50
    content["results"] = {name: {"acc,none": 0.5} for name in sizes}
    content["n-samples"] = sizes
    assert "180 of 200 documents of 6 tasks (--limit)" in run_summary.summary(content)


def test_the_table_of_a_run_has_both_errors_of_a_value(tmp_path):
    """That of the draws and that over windows, in the unit of the value; bits per byte have their own."""
    file = ours(tmp_path, docs=docs("sotu"), estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo", {"log_prob": -300.0, "stderr": 0.9, "window_stderr": 2.7})
    text = run_summary.summary(json.loads(file.read_text()))
    heads, _, values = [line.strip("|").split("|") for line in text.splitlines()[:3]]
    cells = {head.strip(): cell.strip() for head, cell in zip(heads, values, strict=True)}
    assert cells["value"] == "≤ 28.03 ± 0.28" and cells["s.e. over windows"] == "0.84"
    assert cells["bits per byte"] == "≤ 24.0449 ± 0.0721" and cells["unit"] == "perplexity per token"
    assert cells["kind"] == "an upper bound of the perplexity" and "Monte Carlo" in cells["error (±)"]


@pytest.mark.parametrize("tasks", [("sotu", "news"), ("news", "sotu")])
def test_a_table_over_tasks_is_there_if_one_of_them_has_its_numbers(tmp_path, tasks):
    """Gap closed, and the remark on intervals of estimates, although the other task has no ELBO."""
    first, second = tasks
    hf(tmp_path, docs=docs(*tasks))
    ours(tmp_path, docs=docs(first, shift=30), estimator="elbo", spec={"mc_samples": "16"})
    ours(tmp_path, docs=docs(*tasks, shift=15))
    content = board(tmp_path)
    kinds = [kind for name, kind, _ in content.tables() if not name]
    assert "gap_closed" in kinds
    text = reports.markdown(content)
    assert text.count(reports.DRAWN) == 1
    of_second = text[text.index(f"## {second}") :]
    assert reports.DRAWN not in of_second.partition("\n## ")[0]


@pytest.mark.parametrize("names", [("a.txt", "a.txt"), ("a.txt", "b.txt"), ("a.txt", None), (None, None)])
def test_texts_of_one_file_have_its_name(names):
    found = [SimpleNamespace(content={"scored": name} if name else {}) for name in names]
    assert reports._label("score", found) == ("a.txt" if names == ("a.txt", "a.txt") else "score")


def test_the_only_baseline_is_the_newest_of_each_task_under_one_spec(tmp_path):
    for task, date in (("a", 3.0), ("a", 5.0), ("b", 4.0)):
        put(hf(tmp_path, per_token([task], [10.0 + date])), "date", date)
    ours(tmp_path, per_token(["a", "b"], [20.0, 20.0]))
    found, note = reports.baseline(read.runs([tmp_path]))
    assert sorted(each.header.date for each in found) == [4.0, 5.0] and not note
    hf(tmp_path, per_token(["b"], [15.0]), args={"revision": "r"})
    found, note = reports.baseline(read.runs([tmp_path]))
    assert found == [] and "on b" in note.fact


def test_two_results_of_one_task_are_no_ar_baseline(tmp_path):
    for _ in range(2):
        hf(tmp_path / "ar", per_token(["a"], [10.0]))
    ours(tmp_path / "results", per_token(["a"], [20.0]))
    with pytest.raises(DuelError, match="a more than once"):
        run(tmp_path, "--as_published")
