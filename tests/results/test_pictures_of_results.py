"""Figures and the page against the rows that they show: places, axes, marks, legends, labels and classes."""

import itertools
import math
import re

import pytest
from results import documents, hf, ours

from lm_eval_duel.cli.report import parse
from lm_eval_duel.results import columns, figures, page
from lm_eval_duel.results import report as reports
from lm_eval_duel.results.report import collect

pytest.importorskip("matplotlib")
TOKENS = (20, 40, 30, 25)
RULES = {  # the nats per token of a rule, and its steps per token
    "greedy:k=4": (3.9, 0.25),
    "greedy:k=1": (3.2, 1.0),
    "margin:k=8": (4.4, 0.125),
    "threshold:mu=0.5": (3.6, 0.4),
}


def docs(rate):
    return {"sotu": documents([-rate * count * (1 + n / 9) for n, count in enumerate(TOKENS)], TOKENS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The rules of one model in two orders, with its bounds, its oracle and a baseline."""
    made = []
    for rules in (list(RULES), list(RULES)[::-1]):
        folder = tmp_path_factory.mktemp("results")
        hf(folder, model="AR", docs=docs(2.5))
        shared = {"model": "M"}
        ours(folder, estimator="elbo", docs=docs(3.8), spec={"mc_samples": "16"}, **shared)
        ours(folder, estimator="elbo", docs=docs(3.5), spec={"mc_samples": "16", "elbo_eps": "0.1"}, **shared)
        ours(folder, estimator="oracle", docs=docs(2.0), values={"sotu": {"mixture": math.exp(3.1)}}, **shared)
        for rule in rules:
            rate, nfe = RULES[rule]
            ours(folder, rule=rule, docs=docs(rate), nfe=nfe, **shared)
        made.append(folder)
    return made


@pytest.fixture(params=[0, 1])
def report(request, folders):
    return collect(parse([str(folders[request.param]), "--page", "--out", "unused", "--as_published"]))


def test_every_row_of_the_figure_of_values_is_at_its_name_with_its_mark(report):
    task = report.tasks["sotu"]
    [axes] = figures.perplexity("sotu", task).axes
    figure = axes.figure
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    heights = list(axes.get_yticks())
    points = []
    for line in axes.lines:
        if line.get_marker() not in ("|", "None") and len(line.get_xdata()):
            points.append(line)
    assert len(points) == len(task.rows) == len(heights) and heights == sorted(heights, reverse=True)
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    beside = {text.xy[1]: text for text in axes.texts if hasattr(text, "xy")}
    for each, point, name, height in zip(task.rows, points, names, heights, strict=True):
        row = each.row
        assert (point.get_xdata()[0], point.get_ydata()[0]) == (pytest.approx(row.value), height)
        assert left < row.value < right and bottom < height < top
        assert beside[height].get_text() == columns.value(row)
        assert (beside[height].get_weight() == "bold") == each.best
        assert (
            name == figures._name(row) and (row.rule or row.estimator).partition(":")[0] in name.lower() + row.estimator
        )
        is_hollow = point.get_markerfacecolor() == "white"
        assert is_hollow == (row.estimator not in ("ar", "mixture", "duel")), "what is not exact is hollow"
    intervals = [line for line in axes.lines if line.get_marker() == "|"]
    drawn = [each.interval for each in task.rows if each.interval]
    assert [list(line.get_xdata()) for line in intervals] == [pytest.approx(ends) for ends in drawn]
    assert all(left < end < right for ends in drawn for end in ends)
    wide = [list(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 4]
    assert wide == [pytest.approx(each.row.drawn_interval) for each in task.rows if each.row.drawn_interval]
    [baseline] = [line for line in axes.lines if line.get_linestyle() == ":"]
    [ar] = [each.row for each in task.rows if each.row.ar]
    assert baseline.get_xdata()[0] == pytest.approx(ar.value)
    [legend] = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert sorted(shown) == sorted(set(shown))
    expected = ["(dotted line", "ELBO (upper bound)", "ELBO, eps > 0 (no bound)", "DUEL", "Oracle"]
    assert all(any(part in label for label in shown) for part in expected), shown
    title = figure.get_suptitle()
    assert "bootstrap intervals" in title and "Monte Carlo error" in title.replace("\n", " ")
    is_logarithmic = axes.get_xscale() == "log"
    assert is_logarithmic == ("log scale" in axes.get_xlabel()) and is_logarithmic


def test_every_rule_of_the_figure_of_speeds_lies_inside_of_its_axes(report):
    task = report.tasks["sotu"]
    [speeds] = task.rules
    [axes] = figures.rules("sotu", task, speeds).axes
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    lines = {line.get_label(): line for line in axes.lines}
    shown = {}
    for name in ("greedy", "margin", "threshold (adaptive: measured NFE)"):
        shown[name] = list(zip(lines[name].get_xdata(), lines[name].get_ydata(), strict=True))
        assert (lines[name].get_linestyle() == "--") == ("adaptive" in name)
    points = sorted(itertools.chain.from_iterable(shown.values()))
    tokens = sum(TOKENS)
    value_of = {each.row.rule: each.row.value for each in task.rows}
    expected = sorted((int(tokens * nfe) / tokens, value_of[rule]) for rule, (_, nfe) in RULES.items())
    assert points == [pytest.approx(point) for point in expected]
    assert [nfe for nfe, _ in shown["greedy"]] == [pytest.approx(0.25, abs=0.01), 1.0], "a line goes from left to right"
    for nfe, perplexity in points:
        assert left < nfe < right and bottom < perplexity < top
    assert left < 0.13 and right > 1
    levels = {"ELBO (upper bound)": speeds.elbo, "autoregressive model": speeds.ar, "oracle": speeds.oracle}
    for start, row in levels.items():
        [line] = [line for label, line in lines.items() if label.startswith(start)]
        assert line.get_ydata()[0] == pytest.approx(row.value)
        assert f", {columns.value(row).removeprefix('≤ ')}" in line.get_label()
        assert (start == "oracle") == ("not a likelihood" in line.get_label())
        if start == "oracle":  # which has no steps: it stands at one for each token
            assert list(line.get_xdata()) == [1.0]
    assert (speeds.elbo.estimator, speeds.elbo.eps, speeds.oracle.estimator) == ("elbo", 0.0, "oracle") and speeds.ar.ar
    assert ("log" in axes.get_ylabel()) == (axes.get_yscale() == "log")
    [legend] = axes.figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {label for label in lines if not label.startswith("_")}


def test_every_row_of_the_page_has_the_classes_and_the_mark_of_its_method(report):
    shown = page.html(report, None)
    plot = page._plot(report.standings, report.tasks)
    rows = re.findall(r'<tr class="row ([^"]*)">(.*?)</tr>', shown.partition("</table>")[0], re.DOTALL)
    standings = [row for _, members in report.standings.groups() for row in members]
    assert len(rows) == len(standings) == len(report.tasks["sotu"].rows)
    values = []
    for (classes, cells), standing in zip(rows, standings, strict=True):
        row = standing.method.rows["sotu"].row
        expected = [*standing.method.kind.replace(" ", "-").split()]
        expected += ["ar"] * row.ar + ["first"] * (standing.rank == 1)
        assert classes.split() == expected
        assert f'data-text="{row.model}"' in cells and f"<bdi>{row.model}</bdi>" in cells
        assert ('<span class="tag">AR</span>' in cells) == row.ar
        place, *ends = plot["rows"][standing]
        assert (f'cx="{place}"' in cells) != row.score.is_bound
        assert (f'd="M{place - 6} 11l9' in cells) == row.score.is_bound
        assert bool(ends) == (row.estimator != "mixture") == ('class="interval"' in cells)
        if ends:
            assert f'x1="{ends[0]}" x2="{ends[1]}" y1="11"' in cells and ends[0] <= place <= ends[1]
        assert f'class="base" x1="{plot["base"]}"' in cells
        if row.ar:
            assert plot["base"] == place
        text = columns.value(row)
        assert re.search(rf'<td class="g-value number">{re.escape(text)}', cells), text
        values.append(row.value)
    ends = [each.interval for each in report.tasks["sotu"].rows if each.interval]
    low, *_, high = sorted([*values, *itertools.chain.from_iterable(ends)])
    likelihoods = values[:-1]
    assert likelihoods == sorted(likelihoods) and standings[-1].method.named.estimator == "oracle"
    for x, label in plot["ticks"]:
        assert f'<text x="{x}" y="16">{label}</text>' in shown
        share = math.log(float(label) / low) / math.log(high / low)
        assert x == pytest.approx(page.MARGIN + share * (page.WIDTH - 2 * page.MARGIN), abs=0.06)


# ---------------------------------------------------------------- files of figures, and their places in report.md


def test_each_task_has_its_figures_in_every_format(folders, monkeypatch, tmp_path):
    """By name; report.md shows the first format that is a picture, below the table that the figure is of."""
    monkeypatch.setattr(figures, "_file", lambda figure, form, exact: f"{form} {exact}".encode())
    for task in ("news", "a|b"):
        for rule, (rate, nfe) in list(RULES.items())[:2]:
            ours(tmp_path, docs={task: docs(rate)["sotu"]}, rule=rule, nfe=nfe)
    content = collect(parse([str(folders[0]), str(tmp_path), "--out", "unused", "--as_published"]))
    for formats, width in ((("png", "pdf"), None), (("pdf", "svg"), 4.5), (("pdf",), None)):
        images = figures.draw(content.tasks, formats, width)
        assert [(image.task, image.kind) for image in images] == [
            (task, kind) for task in content.tasks for kind in ("perplexity", "rules")
        ]
        text = reports.markdown(content, images)
        sections = dict(zip(content.tasks, re.split(r"^## ", text, flags=re.MULTILINE)[1:], strict=False))
        for image in images:
            stem = f"{image.kind}_{re.sub('[^a-z]', '_', image.task)}"
            assert image.files == {f"{stem}.{form}": f"{form} {width is not None}".encode() for form in formats}
            shown = next((form for form in formats if form != "pdf"), "pdf")
            assert text.count(f"]({stem}.{shown})") == 1 == text.count(f"({stem}.")
            section = sections[image.task]
            place = section.index(f"({stem}.")
            assert section.startswith(image.task)
            assert (place < section.index("### Rules against NFE")) == (image.kind == "perplexity")
            assert ("![" in section[:place].splitlines()[-1]) == (shown != "pdf")
