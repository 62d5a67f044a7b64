"""What a report chooses among rows, runs, traces and notes: small tables of cases, each in both orders."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
from results import board, documents, hf, ours, per_token, put, three_documents
from results import report as run

from lm_eval_duel import demo
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import (
    baseline,
    columns,
    compare,
    figures,
    gaps,
    published,
    read,
    run_summary,
)
from lm_eval_duel.results import report as reports
from lm_eval_duel.results.doubts import doubts
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.table import Table


def rows_of(folder):
    return board(folder).tasks["sotu"].rows


def duel_row(folder):
    """The only row of DUEL."""
    [compared] = [compared for compared in rows_of(folder) if compared.row.is_duel]
    return compared


# ---------------------------------------------------------------- the row of a headline


def candidate(
    name,
    rule="margin:k=1",
    estimator="duel",
    cached=False,
    elbo=True,
    seed=None,
    value=20.0,
    bound=False,
    documents=(),
):
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
        documents=documents,
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
    with_documents = candidate("documents", "random", value=80.0, documents=("text",))
    assert compare.main_row([*pair, with_documents]).name == "documents", "the only one with a verdict"
    baseline = candidate("baseline", None, "ar", value=90.0)
    assert compare.main_row([*pair, baseline]).name == "baseline"
    assert compare.main_row([baseline, *pair]).name == "baseline"


def test_the_lowest_is_a_likelihood_if_there_is_one():
    bound = candidate("bound", estimator="elbo", value=10.0, bound=True)
    lower = candidate("lower bound", estimator="elbo", value=9.0, bound=True)
    exact = candidate("exact", value=20.0)
    for shown in itertools.permutations([bound, lower, exact]):
        assert compare.lowest(shown).row.name == "exact"
    assert compare.lowest([bound, lower]).row.name == "lower bound"
    assert compare.lowest([lower, bound]).row.name == "lower bound"


def test_pairs_come_with_clear_ones_first_and_the_largest_difference_first():
    def pair(better, verdict, difference):
        same = SimpleNamespace(model="M", block="4", cache=None)
        return SimpleNamespace(better=better, verdict=verdict, difference=difference, first=same, second=same)

    ordered = [
        pair("a", "a is better", -0.9),
        pair("b", "b is better", 0.5),
        pair("a", "a is better", -0.1),
        pair("", "equal", -0.7),
        pair("", "equal", 0.6),
        pair("", "", -0.8),
        pair("", "", None),
    ]
    for shuffled in (ordered[::-1], ordered[::2] + ordered[1::2]):
        assert compare._in_groups(shuffled) == ordered


# ---------------------------------------------------------------- speeds and notes


@pytest.mark.parametrize("steps", [(1.0, 1.0), (1.0, 0.999), (0.5, 1.0)])
def test_rules_are_shown_against_nfe_if_two_differ(tmp_path, steps):
    for rule, nfe in zip(("greedy:k=1", "margin:k=1"), steps, strict=True):
        file = ours(tmp_path, per_token(["t"], [20.0]), rule=rule)
        put(file, "config.duel.tasks.t.values.duel.nfe", 1000 * nfe)

    speeds = board(tmp_path).tasks["t"].rules

    first, second = steps
    assert len(speeds) == (1 if first != second else 0)


@pytest.mark.parametrize("first", [True, False])
def test_the_levels_of_rules_are_of_their_own_block(tmp_path, first):
    """The ELBO of whichever row has one, and the oracle of their block and cache."""
    shared = {"attention": "block_causal"}
    oracles = [("4", 12.0), ("8", 11.0)]
    if not first:
        oracles.reverse()
    for block, value in oracles:
        ours(tmp_path, per_token(["t"], [value]), estimator="oracle", block=block, **shared)
    for rule, nfe in (("greedy:k=1", 1.0), ("greedy:k=2", 0.5)):
        for block in ("4", "8"):
            ours(tmp_path, per_token(["t"], [20.0]), rule=rule, nfe=nfe, block=block, **shared)
    ours(tmp_path, per_token(["t"], [23.0]), estimator="elbo", block="4", spec={"elbo_block": "4"}, **shared)

    speeds = {speeds.title: speeds for speeds in board(tmp_path).tasks["t"].rules}

    assert speeds.keys() == {"MDLM, block 4", "MDLM, block 8"}
    assert speeds["MDLM, block 4"].oracle.value == pytest.approx(12.0)
    assert speeds["MDLM, block 4"].elbo is not None
    assert speeds["MDLM, block 8"].oracle.value == pytest.approx(11.0)
    assert speeds["MDLM, block 8"].elbo is None


@pytest.mark.parametrize(("dtype", "noted"), [("float32", 0), ("float64", 0), ("bfloat16", 1), ("float16", 1)])
def test_low_precision_is_noted(tmp_path, dtype, noted):
    ours(tmp_path, docs=three_documents("sotu"), spec={"dtype": dtype})

    notes = board(tmp_path).tasks["sotu"].notes

    assert len([note for note in notes if f"ran in {dtype}" in note]) == noted


def test_the_note_on_windows_has_all_of_a_model(tmp_path):
    for capacity in (200, 300):
        ours(tmp_path, docs=three_documents("sotu"), duel={"row_capacity": capacity}, rule=f"greedy:k={capacity}")
    [note] = [note for note in board(tmp_path).tasks["sotu"].notes if note.startswith("windows")]
    assert "200 target positions and harness, 300 target positions" in note


@pytest.mark.parametrize(
    ("capacities", "longest", "known", "every_size"),
    [
        ((200, 200), 500, "the same in all results", False),
        ((200, 300), 40, "each document is one window", True),
        ((200, 300), 500, "windows: not the same", True),
    ],
)
def test_the_note_on_windows_says_whether_all_are_alike(tmp_path, capacities, longest, known, every_size):
    """Each size is listed only if they differ."""
    for capacity, model in zip(capacities, ("A", "B"), strict=True):
        docs = {"sotu": documents([-60, -150, -90], (20, longest, 30))}
        ours(tmp_path, docs=docs, duel={"row_capacity": capacity}, model=model)
    [note] = [note for note in board(tmp_path).tasks["sotu"].notes if note.startswith("windows")]
    assert known in note
    assert ("B: harness" in note) == every_size


@pytest.mark.parametrize("tasks_of_baseline", [("sotu",), ("sotu", "news"), ()])
def test_a_task_without_a_result_of_the_baseline_says_so(tmp_path, tasks_of_baseline):
    if tasks_of_baseline:
        hf(tmp_path, docs=three_documents(*tasks_of_baseline))
    ours(tmp_path, docs=three_documents("sotu", "news"))
    notes = [str(note) for note in board(tmp_path).notes if str(note).startswith("news: no gaps")]
    assert len(notes) == (tasks_of_baseline == ("sotu",))


def test_a_table_explains_bold_if_it_has_any(tmp_path):
    for rule, has_bold in (("greedy", False), ("margin", True)):
        ours(tmp_path, docs=three_documents("sotu"), rule=rule)
        text = reports.markdown(board(tmp_path))
        assert (columns.BEST in text) == ("**46.22**" in text or "**28.03**" in text) == has_bold


def test_windows_of_results_without_samples_are_not_known_to_be_the_same(tmp_path):
    for capacity in (200, 300):
        duel = {"row_capacity": capacity}
        file = ours(tmp_path, docs=three_documents("sotu"), duel=duel, model=f"of {capacity}", log=False)
        put(file, "config.duel.tasks.sotu.documents", 1)  # the others are from a response cache
    [note] = [note for note in board(tmp_path).tasks["sotu"].notes if note.startswith("windows")]
    assert note.startswith("windows: not known to be the same")


@pytest.mark.parametrize("metric", ["token_perplexity", "word_perplexity", "byte_perplexity"])
def test_gap_closed_in_another_unit_than_the_papers_says_so(tmp_path, metric):
    hf(tmp_path, docs=three_documents("sotu"))
    ours(tmp_path, docs=three_documents("sotu", shift=30), estimator="elbo")
    ours(tmp_path, docs=three_documents("sotu", shift=15))

    notes = board(tmp_path, "--metric", metric).tasks["sotu"].notes

    says_so = any("The paper computes it per token" in note for note in notes)
    assert says_so == (metric != "token_perplexity")


# ---------------------------------------------------------------- ELBOs, caches, intervals


@pytest.mark.parametrize(
    ("attention", "block", "is_used"),
    [
        ("bidirectional", "None", True),
        ("bidirectional", "4", False),
        ("block_causal", "4", True),
        ("causal_prefix", "4", True),
        ("block_causal", "None", False),
        ("causal_prefix", "None", False),
    ],
)
def test_the_elbo_is_over_what_the_network_was_trained_on(tmp_path, attention, block, is_used):
    shared = {"attention": attention}
    hf(tmp_path, docs=three_documents("sotu"))
    ours(tmp_path, docs=three_documents("sotu", shift=30), estimator="elbo", spec={"elbo_block": block}, **shared)
    ours(tmp_path, docs=three_documents("sotu", shift=15), **shared)

    assert (duel_row(tmp_path).closed.percent is not None) == is_used


@pytest.mark.parametrize(
    ("key", "is_convention"), [("max_length", True), ("windows", True), ("dtype", False), ("x", False)]
)
def test_published_elbos_may_differ_in_conventions_only(tmp_path, key, is_convention):
    hf(tmp_path, docs=three_documents("sotu"))
    ours(tmp_path, docs=three_documents("sotu", shift=30), estimator="elbo", spec={key: "2049"})
    ours(tmp_path, docs=three_documents("sotu", shift=15))

    closed = duel_row(tmp_path).closed

    assert (closed.percent is not None) == is_convention
    assert ("ELBO" in str(closed.reason)) != is_convention


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_the_nearest_spec_is_the_one_with_the_fewest_differences(order):
    def row(estimator, **spec):
        return SimpleNamespace(run=SimpleNamespace(key="w", spec=spec), estimator=estimator)

    this = row("this", a="1", b="1")
    others = [row("near", a="2", b="1"), row("near too", a="2", b="1"), row("far", a="2", b="2")]
    shuffled = [others[n] for n in order]

    nearest, differences = gaps.nearest(this, shuffled, lambda other: True, set())
    assert sorted(row.estimator for row in nearest) == ["near", "near too"]
    assert differences == {"a": "a=1 in this row, 2 in that one"}

    _, differences = gaps.nearest(this, others, lambda other: True, {"a", "b"})
    assert differences == {}

    nearest, differences = gaps.nearest(this, others, lambda other: False, set())
    assert nearest == []
    assert differences == {}


@pytest.mark.parametrize(("draws", "is_compared"), [("0", True), ("1", False)])
def test_the_cost_of_a_cache_is_of_the_same_draws(tmp_path, draws, is_compared):
    spec = {"sample": "0.05", "draw_seed": "0"}
    ours(tmp_path, docs=three_documents("sotu"), estimator="two_phase", spec=spec)
    cached = spec | {"cache": "dual", "draw_seed": draws}
    ours(tmp_path, docs=three_documents("sotu", shift=5), estimator="two_phase", spec=cached)

    [cost] = [compared.cache_cost for compared in rows_of(tmp_path) if compared.cache_cost]

    assert (cost.second is not None) == is_compared
    if is_compared:
        assert cost.difference == pytest.approx(15 / 90)
        assert cost.first.cache == "dual"
    else:
        assert "draw_seed" in str(cost.reason)


@pytest.mark.parametrize("first", [True, False])
def test_no_interval_is_explained_by_the_row_that_has_no_draws(tmp_path, first):
    ours(tmp_path, docs=three_documents("sotu"), rule="greedy:k=1", log=first)
    ours(tmp_path, docs=three_documents("sotu", shift=5), rule="margin:k=1", log=not first)

    [pair] = board(tmp_path, "--pairs", "all").tasks["sotu"].pairs

    assert pair.interval is None
    assert pair.difference == pytest.approx(-15 / 90)
    without, other = ("margin", "greedy") if first else ("greedy", "margin")
    assert without in str(pair.reason)
    assert other not in str(pair.reason)


@pytest.mark.parametrize(("spread", "closes"), [(1.0, True), (40.0, False)])
def test_a_gap_that_other_documents_might_not_have_is_closed_by_nothing(tmp_path, spread, closes):
    """An exact ELBO has no Monte Carlo error, but its gap to the baseline depends on the documents."""
    nats = [-100.0 - n for n in range(12)]
    elbo = [value - 5 + spread * (-1) ** n for n, value in enumerate(nats)]

    def of(values):
        return {"sotu": documents(values, [30] * 12)}

    hf(tmp_path, docs=of(nats))
    ours(tmp_path, docs=of([value - 1 for value in elbo]), estimator="elbo", spec={"mc_samples": "16"})
    ours(tmp_path, docs=of([value + 1 for value in elbo]))

    closed = duel_row(tmp_path).closed

    assert (closed.percent is not None) is closes
    assert ("draws of documents" in str(closed.reason)) is not closes


@pytest.mark.parametrize(("error", "closes"), [(1.0, True), (40.0, False)])
def test_an_elbo_whose_windows_vary_more_than_its_gap_closes_none(tmp_path, error, closes):
    """Its draws have no error of their own: the spread over windows is a bound of that."""
    hf(tmp_path, docs=three_documents("sotu"))
    file = ours(tmp_path, docs=three_documents("sotu", shift=9), estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo.stderr", None)
    put(file, "config.duel.tasks.sotu.values.elbo.window_stderr", error)
    ours(tmp_path, docs=three_documents("sotu", shift=3))

    closed = duel_row(tmp_path).closed

    assert (closed.percent is not None) == closes
    assert closed.of == "Monte Carlo"
    assert closed.stderr is None


# ---------------------------------------------------------------- a model's name in LaTeX


def test_a_name_stands_in_the_first_of_its_rows_only():
    rows = [("A", "x", "1"), ("A", "x", "2"), ("B", "x", "3"), ("A", "x", "4")]
    columns = {"model": lambda row: row[0], "rule": lambda row: row[1], "n": lambda row: row[2]}

    lines = Table.from_records("T", rows, columns).latex().splitlines()

    cells = []
    for line in lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]:
        cells.append([cell.strip() for cell in line.removesuffix(r"\\").split("&")])
    assert cells == [["A", "x", "1"], ["", "x", "2"], ["B", "x", "3"], ["A", "x", "4"]]


# ---------------------------------------------------------------- published figures, the table of a run, a report


def test_published_figures_are_listed_by_source_and_metric_and_bounds_are_marked(tmp_path):
    lines = [",".join((*published.NEEDED, "stderr", "block"))]
    for metric, source in (("token_perplexity", "s"), ("word_perplexity", "s"), ("token_perplexity", "t")):
        for estimator, number, stderr, block in (("elbo", 30, 0.25, "none"), ("duel", 20, "", 4), ("duel", 21, 1.5, 8)):
            lines.append(f"M,{estimator},ptb,{metric},{number},{source},{stderr},{block}")
    (tmp_path / "p.csv").write_text("\n".join(lines))

    sources = published.by_source(published.read([tmp_path / "p.csv"]))

    assert [(source["source"], source["metric"]) for source in sources] == [
        ("s", "token_perplexity"),
        ("s", "word_perplexity"),
        ("t", "token_perplexity"),
    ]
    for source in sources:
        blocks_and_values = [(row[2], row[-1]) for row in published.table(source).rows]
        assert blocks_and_values == [("whole target", "≤ 30.00 ± 0.25"), ("4", "20"), ("8", "21.0 ± 1.5")]


def test_an_estimator_of_published_figures_has_the_name_of_either_table(tmp_path):
    """Each by the name that a user types and by the one that tables print, whatever its case."""
    file = tmp_path / "p.csv"
    for entry in registry.ENTRIES:
        for name in (entry.name, entry.title, entry.title.lower(), entry.display):
            file.write_text(f'{",".join(published.NEEDED)}\nM,"{name}",ptb,token_perplexity,3,s\n')
            [figure] = published.read([file])
            assert (figure["estimator"], figure["display"]) == (entry.name, entry.title)


def test_the_table_of_a_run_has_the_first_metric_and_counts_documents_of_tasks_without_a_limit():
    [file] = sorted((demo.FOLDER / "results").glob("demo-bd/results_*.json"))[:1]
    content = json.loads(file.read_text())
    entries = content["results"]["sotu"]
    content["results"]["sotu"] = dict(reversed(entries.items()))
    first = next(metric for metric in METRICS if f"{metric},none" in entries)
    assert first == "token_perplexity"
    assert "perplexity per token" in run_summary.summary(content)

    sizes = {name: {"effective": 30} for name in "abcdef"}
    sizes["a"]["original"] = 50
    content["results"] = {name: {"acc,none": 0.5} for name in sizes}
    content["n-samples"] = sizes
    assert "180 of 200 documents of 6 tasks (--limit)" in run_summary.summary(content)


def test_the_table_of_a_run_has_both_errors_of_a_value(tmp_path):
    """That of the draws and that over windows, in the unit of the value; bits per byte have their own."""
    file = ours(tmp_path, docs=three_documents("sotu"), estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo", {"log_prob": -300.0, "stderr": 0.9, "window_stderr": 2.7})

    text = run_summary.summary(json.loads(file.read_text()))

    heads, _, values = [line.strip("|").split("|") for line in text.splitlines()[:3]]
    cells = {head.strip(): value.strip() for head, value in zip(heads, values, strict=True)}
    assert cells["value"] == "≤ 28.03 ± 0.28"
    assert cells["s.e. over windows"] == "0.84"
    assert cells["bits per byte"] == "≤ 24.0449 ± 0.0721"
    assert cells["unit"] == "perplexity per token"
    assert cells["kind"] == "bound"
    assert "Monte Carlo" in cells["error (±)"]


@pytest.mark.parametrize(
    ("estimator", "stderr", "shown"),
    [("duel", None, None), ("elbo", 0.9, "Monte Carlo"), ("elbo", None, "not known"), ("two_phase", None, "not known")],
)
def test_the_table_of_a_run_says_which_error_a_value_has(tmp_path, estimator, stderr, shown):
    """What the error is of, or why it is not known; without a value that is drawn there is no such column."""
    file = ours(tmp_path, docs=three_documents("sotu"), estimator=estimator, spec={"mc_samples": "1", "sample": "0.1"})
    values = {estimator: {"log_prob": -300.0, "stderr": stderr}}
    put(file, "config.duel.tasks.sotu.values", values)

    lines = run_summary.summary(json.loads(file.read_text())).splitlines()

    heads, _, cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:3]]
    of_value = dict(zip(heads, cells, strict=True))
    assert ("error (±)" in of_value) == (shown is not None)
    assert shown is None or shown in of_value["error (±)"]


@pytest.mark.parametrize("tasks", [("sotu", "news"), ("news", "sotu")])
def test_a_table_over_tasks_is_there_if_one_of_them_has_its_numbers(tmp_path, tasks):
    """Gap closed, and the remark on intervals of estimates, although the other task has no ELBO."""
    first, second = tasks
    hf(tmp_path, docs=three_documents(*tasks))
    ours(tmp_path, docs=three_documents(first, shift=30), estimator="elbo", spec={"mc_samples": "16"})
    ours(tmp_path, docs=three_documents(*tasks, shift=15))

    content = board(tmp_path)
    text = reports.markdown(content)

    kinds_over_tasks = [kind for name, kind, _ in content.tables() if not name]
    assert "gap_closed" in kinds_over_tasks
    for task, is_drawn in ((first, True), (second, False)):
        _, _, from_task = text.partition(f"## {task}")
        section, _, _ = from_task.partition("\n## ")
        assert (columns.WITH_ERRORS in section) == is_drawn
        assert (columns.OVER_DOCUMENTS in section) != is_drawn


@pytest.mark.parametrize("names", [("a.txt", "a.txt"), ("a.txt", "b.txt"), ("a.txt", None), (None, None)])
def test_texts_of_one_file_have_its_name(names):
    runs = []
    for name in names:
        of_name = SimpleNamespace(content={"scored": name} if name else {})
        of_name.label_of = functools.partial(Run.label_of, of_name)
        runs.append(of_name)

    assert reports._label("score", runs) == (names[0] or "score")


def test_the_only_baseline_is_the_newest_of_each_task_under_one_spec(tmp_path):
    for task, date in (("a", 3.0), ("a", 5.0), ("b", 4.0)):
        put(hf(tmp_path, per_token([task], [10.0 + date])), "date", date)
    ours(tmp_path, per_token(["a", "b"], [20.0, 20.0]))

    baselines, note = baseline.find(read.runs([tmp_path]))
    assert sorted(run.header.date for run in baselines) == [4.0, 5.0]
    assert not note

    hf(tmp_path, per_token(["b"], [15.0]), args={"revision": "r"})
    baselines, note = baseline.find(read.runs([tmp_path]))
    assert baselines == []
    assert "on b" in note.fact


@pytest.mark.parametrize("value", [20.0, 21.0])
def test_a_value_that_several_results_hold_is_noted_once(tmp_path, value):
    """For the person at the console, with a warning if it is not the same; the page has its own note."""
    ours(tmp_path, per_token(["a", "b"], [20.0, 30.0]))
    content = board(tmp_path)
    assert not [note for note in content.notes if "several results" in str(note)]
    ours(tmp_path, per_token(["a", "b"], [value, 30.0]))
    content = board(tmp_path)
    assert [len(task.rows) for task in content.tasks.values()] == [1, 1]
    [note] = [note for note in content.notes if "several results" in str(note)]
    assert "1 value of a" in note.advice
    assert "1 value of b" in note.advice
    assert ("ANOTHER" in note.advice) == (value != 20.0)
    assert not note.fact


def test_two_results_of_one_task_are_no_ar_baseline(tmp_path):
    for _ in range(2):
        hf(tmp_path / "ar", per_token(["a"], [10.0]))
    ours(tmp_path / "results", per_token(["a"], [20.0]))
    with pytest.raises(DuelError, match="a more than once"):
        run(tmp_path, "--as_published")


VERIFIED = {"windows": 8, "differing_windows": 3, "changed_picks": 2, "where": "task sotu, document 1, window 0"}


@pytest.mark.parametrize(
    ("entries", "sentences"),
    [
        ({"decisions_checked": 8, "decisions_differing": 0, "verify": None}, 0),
        ({"verify": {**VERIFIED, "differing_windows": 0}}, 0),
        ({"verify": VERIFIED, "dtype": "bfloat16"}, 0),  # measured, not judged
        ({"verify": VERIFIED, "dtype": "float32"}, 1),
        ({"decisions_checked": 8, "decisions_differing": 2}, 1),
        ({"decisions_checked": 8, "decisions_differing": 2, "verify": VERIFIED, "dtype": "float64"}, 2),
    ],
)
def test_a_value_in_doubt_is_marked_in_every_table(tmp_path, entries, sentences):
    file = ours(tmp_path, docs=three_documents("sotu"))
    for name, entry in entries.items():
        put(file, f"config.duel.{name}", entry)
    content = json.loads(file.read_text())

    about = doubts(content["config"]["duel"])
    assert len(about) == sentences
    assert board(tmp_path).runs[0].doubts == about
    assert ("in doubt" in "".join(board(tmp_path).headlines["sotu"])) is bool(about)
    assert ("in doubt" in figures._name(duel_row(tmp_path).row)) is bool(about)
    for table in (run_summary.summary(content), reports.markdown(board(tmp_path))):
        for sentence in about:
            assert sentence in table
    assert ("in doubt" in run_summary.summary(content)) is bool(about)


@pytest.mark.parametrize(
    ("description", "changes"),
    [
        ("argmax", ""),
        ("sampling, temperature=1", ""),
        ("sampling, temperature=1, rule=greedy, block=4", ""),
        ("sampling, temperature=0.5", "temperature=0.5"),
        ("sampling, temperature=1, top_k=3, top_p=0.9", "top_k=3, top_p=0.9"),
    ],
)
def test_texts_from_another_distribution_are_named_below_the_table(tmp_path, description, changes):
    file = ours(tmp_path, docs=three_documents("sotu"))
    put(file, "config.duel.generated", [description])

    text = run_summary.summary(json.loads(file.read_text()))

    assert ("another distribution" in text) is bool(changes)
    assert changes in text


@pytest.mark.parametrize(
    ("alone", "differing", "line"),
    [
        (0, 0, "verify: 3 windows agree with the reference"),
        (1, 0, "verify: 2 of 3 windows agree with the reference, which has none for the others"),
        (3, 0, "verify checked nothing: the reference has no value for any of 3 windows"),
        (0, 1, ""),  # among the doubts
    ],
)
def test_a_run_says_what_verify_found(tmp_path, alone, differing, line):
    verified = {"windows": 3, "not_checked_independently": alone, "differing_windows": differing}
    file = ours(tmp_path, docs=three_documents("sotu"), duel={"verify": verified})

    lines = run_summary.summary(json.loads(file.read_text())).splitlines()

    of_verify = [each for each in lines if each.startswith("verify") and "differ" not in each]
    assert of_verify == ([line] if line else [])
