"""What a reader of a report asks: whether two rows differ, what a sign means, which file has the baseline."""

import html
import json
import math
import re

import pytest
from results import documents, hf, ours, per_token, put, three_documents

from lm_eval_duel.cli.report import parse
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import columns, page, published, run_summary
from lm_eval_duel.results import report as reports
from lm_eval_duel.results.page_columns import columns_of, with_minus_signs
from lm_eval_duel.results.table import split


def board(folder, *words):
    return reports.collect(parse([str(folder), "--page", "--out", "unused", *words]))


def differences_of(page_text):
    """The heading and the cells of each table of differences on a page."""
    tables = {}
    for section in re.findall('<section class="differences">(.*?)</section>', page_text, re.DOTALL):
        [heading] = re.findall("<h2>(.*?)</h2>", section)
        rows = []
        for row in re.findall('<tr class="row">(.*?)</tr>', section, re.DOTALL):
            cells = re.findall("<td[^>]*>(.*?)</td>", row)
            rows.append([html.unescape(cell) for cell in cells])
        tables[heading] = rows
    return tables


@pytest.mark.parametrize("count", [2, 6])
def test_the_page_has_the_differences_of_the_report(tmp_path, count):
    """Those of every task, in the same order, and what the sign means; many are folded."""
    tasks = ("sotu", "news")
    hf(tmp_path, docs=three_documents(*tasks, shift=-9))
    for n in range(count):
        ours(tmp_path, docs=three_documents(*tasks, shift=5 * n), rule=f"greedy:k={n + 1}")
    count_of_pairs = math.comb(count + 1, 2)

    content = board(tmp_path, "--pairs", "all")
    shown = page.html(content, None)
    without = page.html(board(tmp_path, "--pairs", "none"), None)

    expected = []
    for task in content.tasks.values():
        table = columns.differences(task)
        assert len(table.rows) == count_of_pairs
        expected.append([[with_minus_signs(text) for text in row] for row in table.rows])
    assert list(differences_of(shown).values()) == expected
    for heading, name in zip(differences_of(shown), tasks, strict=True):
        assert heading.startswith(f"{name}: ")

    is_short = count_of_pairs <= page.MOST_OPEN
    assert shown.count("<details open>") == (len(tasks) if is_short else 0)
    assert shown.count(f"{count_of_pairs} of {count_of_pairs} pairs") == len(tasks)
    assert shown.count(columns.SIGN) == len(tasks)
    assert differences_of(without) == {}
    for text in (shown, without):
        assert text.count(columns.SINGLE) >= 1, "ranks are compared in any case"


def test_the_sign_of_differences_is_explained_below_every_table_of_them(tmp_path):
    hf(tmp_path, docs=three_documents("sotu", shift=-9))
    ours(tmp_path, docs=three_documents("sotu"))
    ours(tmp_path, docs=three_documents("sotu", shift=2), spec={"cache": "dual"})

    content = board(tmp_path)

    tables = {kind: table for _, kind, table in content.tables()}
    assert tables.keys() > {"pairs", "cache", "ranks"}
    for kind, table in tables.items():
        for text in (table.text(), table.markdown(), table.latex()):
            assert ("log p" in text) == (kind in ("pairs", "cache", "ranks"))
    for sentence in (columns.SIGN, columns.SIGN_OF_COST):
        assert sentence in reports.markdown(content)
        assert sentence in reports.console(content)

    [pair] = [pair for pair in content.tasks["sotu"].pairs if pair.first.ar]
    assert pair.difference < 0, "below 0 the first is better"
    assert pair.first.value < pair.second.value


def test_a_baseline_is_named_by_its_model(tmp_path):
    hf(tmp_path / "in", docs=three_documents("sotu"), model="org/AR")
    hf(tmp_path / "in", docs=three_documents("sotu"), model="org/Other")
    ours(tmp_path / "in", docs=three_documents("sotu"))
    for name in ("AR", "org/AR"):
        [run] = board(tmp_path / "in", "--ar", name).baselines
        assert run.label == "AR"
    with pytest.raises(DuelError, match="nowhere"):
        board(tmp_path / "in", "--ar", "nowhere")
    with pytest.raises(
        DuelError, match=r"MDLM is a model without autoregressive results.*: RESULTS have those of AR, Other"
    ):
        board(tmp_path / "in", "--ar", "MDLM")


@pytest.mark.parametrize("has_baseline", [True, False])
def test_only_gaps_have_a_table_of_gaps(tmp_path, has_baseline):
    """In LaTeX; report.md also says why there are none."""
    if has_baseline:
        hf(tmp_path / "in", docs=three_documents("sotu", shift=-9))
    ours(tmp_path / "in", docs=three_documents("sotu"))
    out = tmp_path / "out"

    reports.write(board(tmp_path / "in"), str(out))

    assert (out / "gap_sotu.tex").exists() == has_baseline
    assert (out / "methods_sotu.tex").exists()
    assert "### Gap to" in (out / "report.md").read_text()


def test_a_rank_that_no_interval_decides_is_marked(tmp_path):
    """Three documents give no verdict, one gives no interval: such a rank does not read like a decided one."""
    hf(tmp_path, docs=three_documents("sotu", shift=-9))
    ours(tmp_path, docs=three_documents("sotu"))
    assert marks_below_ranks(board(tmp_path)) == ["", "no verdict"]

    alone = tmp_path / "alone"
    hf(alone, docs={"sotu": documents((-90,), (20,))})
    ours(alone, docs={"sotu": documents((-130,), (20,))})
    assert marks_below_ranks(board(alone)) == ["", "no interval"]


def marks_below_ranks(content):
    rank = columns_of(content)[0]
    return [rank.below(row) for row in content.standings.rows]


def figures(file, *tasks, metric="token_perplexity", value="3", stderr="", rule=""):
    lines = [",".join((*published.NEEDED, "stderr", "rule"))]
    for task in tasks:
        lines.append(f"M,duel,{task},{metric},{value},s,{stderr},{rule}")
    file.write_text("\n".join(lines))
    return str(file)


def test_published_figures_of_no_result_are_named_with_the_nearest_task(tmp_path):
    ours(tmp_path / "in", docs=three_documents("sotu", "news"))
    mistyped = figures(tmp_path / "mistyped.csv", "sotuu", "sotu", "sotuu", "wikitext")
    right = figures(tmp_path / "right.csv", "news")

    content = board(tmp_path / "in", "--published", mistyped, right, published.PAPER)

    [note] = [str(note) for note in content.notes if "--published" in str(note)]
    assert mistyped in note
    assert note.count("sotuu (did you mean sotu?)") == 1
    assert note.endswith(" wikitext")
    assert note in reports.console(content)


def test_published_figures_in_another_unit_are_told_the_metric_that_sets_them_beside_the_results(tmp_path):
    hf(tmp_path / "in", docs=three_documents("sotu"))
    for metric in ("token_perplexity", "word_perplexity", "perplexity"):  # of which the results have no last one
        file = figures(tmp_path / "p.csv", "sotu", metric=metric)
        notes = [str(note) for note in board(tmp_path / "in", "--published", file).notes]
        expected = [f"--published {file}: perplexity per word of sotu stands beside the results with --metric {metric}"]
        assert [note for note in notes if "--metric" in note] == (expected if metric == "word_perplexity" else [])

    hf(tmp_path / "in", per_token(["news"], [10.0]))  # without perplexity per word, which cannot be asked for then
    file = figures(tmp_path / "p.csv", "sotu", metric="word_perplexity")
    assert not [note for note in board(tmp_path / "in", "--published", file).notes if "--metric" in str(note)]


def test_two_published_figures_of_the_same_names_are_two_rows(tmp_path):
    file = tmp_path / "p.csv"
    figures(file, "a", "b", "a", value="30")
    shown = published.table(published.by_source(published.read([str(file)]))[0])
    assert [row.count("30") for row in shown.rows] == [2, 1]


@pytest.mark.parametrize(("column", "wrong"), [("block", "four"), ("block", "0"), ("source", " "), ("model", "")])
def test_a_published_figure_without_a_name_or_with_another_block_is_refused(tmp_path, column, wrong):
    line = {
        "model": "M",
        "estimator": "duel",
        "task": "a",
        "metric": "perplexity",
        "value": "3",
        "source": "s",
        "block": "4",
    }
    file = tmp_path / "p.csv"
    for value, is_refused in ((line[column], False), (wrong, True)):
        rows = [line, line | {column: value}, dict.fromkeys(line, "")]
        file.write_text("\n".join([",".join(line), *(",".join(row.values()) for row in rows[1:])]))
        if is_refused:
            with pytest.raises(DuelError, match=f"line 2: the column {column}"):
                published.read([str(file)])
        else:
            assert len(published.read([str(file)])) == 1


def test_a_published_column_that_nobody_reads_is_an_error_with_the_nearest(tmp_path):
    file = tmp_path / "p.csv"
    figures(file, "sotu")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([f"{lines[0]},notes,", f"{lines[1]},approximate,"]))
    with pytest.raises(DuelError, match=r"notes.*note"):
        published.read([file])
    file.write_text("\n".join([f"{lines[0]},note,", f"{lines[1]},approximate,"]))  # with an empty column
    [figure] = published.read([file])
    assert figure["note"] == "approximate"


@pytest.mark.parametrize("wrong", ["abc", "nan", "inf", "12,5"])
def test_a_published_number_that_is_none_is_named_with_its_line_and_column(tmp_path, wrong):
    for column in ("value", "stderr"):
        file = figures(tmp_path / "p.csv", "sotu", **{column: f'"{wrong}"'})
        with pytest.raises(DuelError, match=f"line 2.*{column}.*{wrong}"):
            published.read([file])


@pytest.mark.parametrize(
    ("metric", "wrong", "least"),
    [("token_perplexity", "-3", "1"), ("word_perplexity", "0.53", "1"), ("bits_per_byte", "-0.1", "0")],
)
def test_a_published_number_that_is_no_perplexity_is_refused(tmp_path, metric, wrong, least):
    """An accuracy, or a log-probability."""
    file = tmp_path / "p.csv"
    with pytest.raises(DuelError, match=f"line 2.* at least {least}; got {wrong}"):
        published.read([figures(file, "sotu", metric=metric, value=wrong)])
    with pytest.raises(DuelError, match=r"line 2.*acc.*accuracies"):
        published.read([figures(file, "sotu", metric="acc", value=wrong)])
    with pytest.raises(DuelError, match=r"stderr.*at least 0"):
        published.read([figures(file, "sotu", stderr="-0.1")])

    [figure] = published.read([figures(file, "sotu", metric=metric, value=least)])
    assert figure["value"] == float(least)


@pytest.mark.parametrize("rule", ["", "greedy:k=2", "llada", "steering", "my/rules.py:Gredy"])
def test_a_published_rule_may_be_one_that_this_package_has_not(tmp_path, rule):
    [figure] = published.read([figures(tmp_path / "p.csv", "sotu", rule=rule)])
    assert figure["rule"] == rule


@pytest.mark.parametrize(("rule", "near"), [("gredy", "greedy"), ("Margin:k=2", "margin"), ("lladda", "llada")])
def test_a_mistyped_published_rule_is_told_the_nearest(tmp_path, rule, near):
    with pytest.raises(DuelError, match=f"line 2.*Did you mean {near}"):
        published.read([figures(tmp_path / "p.csv", "sotu", rule=rule)])


def test_columns_of_published_figures_say_their_unit(tmp_path):
    ours(tmp_path / "in", docs=three_documents("sotu"))
    words = ["--metric", "word_perplexity", "--published"]
    content = board(tmp_path / "in", *words, figures(tmp_path / "p.csv", "sotu", metric="word_perplexity"))
    [task] = content.tasks.values()
    [source] = content.published

    for table in (published.table(source), published.beside("sotu", task, content.published)):
        heads = [head for head in table.heads if "published" in head or head.startswith("sotu")]
        assert heads
        for head in heads:
            assert "perplexity per word" in head
        below_comment = table.latex().partition("\n")[2]
        assert "perplexity per word" in below_comment


# ---------------------------------------------------------------- what is not there, and why


def test_a_baseline_of_averages_alone_is_named(tmp_path):
    """Not as if there were no autoregressive result."""
    folder = tmp_path / "in"
    ours(folder, docs=three_documents("sotu"))
    without_baseline = [str(note) for note in board(folder).notes if "No gaps" in str(note)]
    averages = ours(folder, {"choice": {"token_perplexity": 9.0}}, model="ARM", estimator="ar")
    put(averages, "results.choice", {"acc,none": 0.5})
    put(averages, "configs.choice.output_type", "multiple_choice")

    [note] = [str(note) for note in board(folder).notes if "No gaps" in str(note)]

    assert "ARM" in note
    assert "--tasks sotu" in note
    assert note not in without_baseline


@pytest.mark.parametrize("log", [True, False])
def test_a_pair_without_an_interval_has_no_verdict_with_the_reason(tmp_path, log):
    folder = tmp_path / "in"
    hf(folder, docs=three_documents("sotu", shift=-20))
    ours(folder, docs=three_documents("sotu"))
    ours(folder, docs=three_documents("sotu", shift=3), rule="margin", log=log)
    content = board(folder)

    tables = {kind: table for _, kind, table in content.tables()}

    for kind, head in (("pairs", "better"), ("ranks", "next lower: worse?")):
        table = tables[kind]
        cells = [row[table.heads.index(head)] for row in table.rows if "margin" in str(row)]
        assert cells
        for cell in cells:
            assert cell.startswith(columns.NO_VERDICT)
            mark = cell.rpartition(" ")[2]
            assert (mark in table.remarks) == (not log)


def test_a_table_of_pairs_says_what_an_empty_name_means(tmp_path):
    folder = tmp_path / "in"
    hf(folder, docs=three_documents("sotu"))
    ours(folder, docs=three_documents("sotu"))
    assert columns.SHARED not in reports.markdown(board(folder))
    ours(folder, docs=three_documents("sotu", shift=3), rule="margin")
    assert columns.SHARED in reports.markdown(board(folder))


def test_the_rows_of_the_table_of_costs_differ(tmp_path):
    folder = tmp_path / "in"
    for task in ("sotu", "news", "news"):
        ours(folder, docs=three_documents(task))
    [cost] = [table for _, kind, table in board(folder).tables() if kind == "cost"]
    assert len({tuple(row) for row in cost.rows}) == 3

    alone = tmp_path / "alone"
    ours(alone, docs=three_documents("sotu"))
    [cost] = [table for _, kind, table in board(alone).tables() if kind == "cost"]
    assert not {"file", "tasks"} & set(cost.heads)


def test_intervals_of_values_without_an_error_are_not_said_to_include_it(tmp_path):
    folder = tmp_path / "in"
    ours(folder, docs=three_documents("sotu"), estimator="two_phase", spec={"sample": "0.05"})
    [text] = [table.about for _, kind, table in board(folder).tables() if kind == "methods"]
    assert columns.WITH_ERRORS not in text
    assert columns.UNKNOWN_ERRORS in text
    ours(folder, docs=three_documents("sotu"), estimator="elbo")
    [text] = [table.about for _, kind, table in board(folder).tables() if kind == "methods"]
    assert columns.WITH_ERRORS in text
    assert columns.UNKNOWN_ERRORS in text


def test_a_metric_that_no_result_has_lists_those_of_all_once(tmp_path):
    folder = tmp_path / "in"
    for rule in ("greedy", "margin", "entropy"):
        ours(folder, docs=three_documents("sotu"), rule=rule)
    with pytest.raises(DuelError) as refused:
        board(folder, "--metric", "perplexity")
    assert str(refused.value).count("word_perplexity") == 1

    other = ours(folder, {"sotu": {"token_perplexity": 9.0}}, rule="random", size=3)
    with pytest.raises(DuelError) as refused:
        board(folder, "--metric", "word_perplexity")
    assert str(refused.value).count(str(other)) == 1
    assert "token_perplexity with --metric" in str(refused.value)


# ---------------------------------------------------------------- results that are compared as published


@pytest.fixture
def as_published(tmp_path):
    """A baseline of other scored positions than an ELBO and four rules."""
    folder = tmp_path / "in"
    hf(folder, docs=three_documents("sotu", shift=-30))
    of_rows = {"special_tokens": "[50256] text [], bos=eos,eos"}
    ours(folder, docs=three_documents("sotu", shift=9), estimator="elbo", block="none", spec=of_rows)
    for n, rule in enumerate(("greedy:k=1", "margin", "entropy", "random")):
        ours(folder, docs=three_documents("sotu", shift=n), rule=rule, spec=of_rows)
    return board(folder, "--as_published")


def test_what_several_results_differ_in_is_one_line(as_published):
    [task] = as_published.tasks.values()
    [line] = task.differences
    assert line.count("bos=eos") == 1
    assert "and 3 more" in line


def test_a_gap_that_is_compared_as_published_says_so_where_it_stands(as_published, tmp_path):
    """In the headline, the tables and the page; not where nothing differs."""
    differs = "the scored positions differ"
    [task] = as_published.tasks.values()
    [headline] = as_published.headlines["sotu"]
    assert "closes" in headline
    assert differs in headline
    assert differs in page.about(as_published)
    for each in task.rows:
        assert (differs in str(each.about_gap)) == (not each.row.ar)
        assert (differs in str(each.closed.reason)) == each.row.is_duel
        assert (differs in str(each.closed.about_elbo_gap)) == each.row.is_duel
    heads = [column.head for column in columns_of(as_published)]
    for head in ("sotu gap", "sotu gap closed, %"):
        cell = columns_of(as_published)[heads.index(head)].cell
        remarks = [split(cell(row))[1].fact for row in as_published.standings.rows if row.method.is_duel]
        assert remarks
        assert all(differs in remark for remark in remarks)

    alike = tmp_path / "alike"
    hf(alike, docs=three_documents("sotu", shift=-30))
    ours(alike, docs=three_documents("sotu"))
    content = board(alike, "--as_published")
    assert "as published" not in page.about(content) + content.headlines["sotu"][0]


def test_the_result_that_takes_the_interval_from_gap_closed_is_named_once(tmp_path):
    """A run of all orders without its trace has an exact ELBO, which is used before that of draws."""
    folder = tmp_path / "in"
    causal = {"duel": {"attention": "block_causal"}, "docs": three_documents("sotu")}
    hf(folder, docs=three_documents("sotu", shift=-30))
    for rule in ("greedy:k=1", "margin"):
        ours(folder, rule=rule, **causal)
    ours(folder, estimator="elbo", spec={"elbo_block": "4"}, **{**causal, "docs": three_documents("sotu", shift=9)})
    assert not [note for note in board(folder).notes if "no interval" in str(note)]

    lattice = ours(folder, estimator="mixture", values={"sotu": {"elbo_exact": 40.0}}, **causal)
    content = board(folder)

    [note] = [str(note) for note in content.notes if "no interval" in str(note)]
    assert str(lattice) in note
    assert "trace=FILE" in note
    assert note in reports.console(content)
    for each in content.tasks["sotu"].rows:
        assert (each.interval is None) == (each.row.estimator == "elbo_exact")


@pytest.mark.parametrize("starts", [0, 3])
def test_ties_in_rows_of_masks_are_told_with_the_results(tmp_path, starts):
    file = ours(tmp_path, docs=three_documents("sotu"), duel={"all_mask_starts": starts})
    ours(tmp_path, docs=three_documents("sotu"), model="Other")

    facts = [note.fact for note in board(tmp_path).notes if "masks alone" in note.fact]

    assert len(facts) == (1 if starts else 0)
    for fact in facts:
        assert fact.startswith("MDLM:")
    assert ("masks alone" in run_summary.summary(json.loads(file.read_text()))) is bool(starts)
