"""Figures and the page against the rows that they show: places, axes, marks, legends, labels and classes."""

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
    """Documents whose nats per token are `rate` and, from document to document, a ninth of it more."""
    nats = [-rate * count * (1 + n / 9) for n, count in enumerate(TOKENS)]
    return {"sotu": documents(nats, TOKENS)}


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


# ---------------------------------------------------------------- the figure of values


def texts(items):
    """What the labels of an axis or a legend say."""
    return [item.get_text() for item in items]


def marks(axes):
    """The marks of values. A mark that stands in the legend alone has no place."""
    lines = []
    for line in axes.lines:
        if line.get_marker() not in ("|", "None") and len(line.get_xdata()):
            lines.append(line)
    return lines


def ends(lines):
    """From where to where each line goes."""
    return [list(line.get_xdata()) for line in lines]


def labels_of_values(axes):
    """The texts beside the marks, by height."""
    labels = {}
    for text in axes.texts:
        if hasattr(text, "xy"):
            _, height = text.xy
            labels[height] = text
    return labels


def check_marks(axes, rows):
    """Each row has its mark at its value, its name and its number at its height, and the rows go down."""
    points = marks(axes)
    names = texts(axes.get_yticklabels())
    heights = list(axes.get_yticks())
    labels = labels_of_values(axes)
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()

    assert len(points) == len(rows) == len(heights)
    assert heights == sorted(heights, reverse=True)
    for compared, point, name, height in zip(rows, points, names, heights, strict=True):
        row = compared.row
        assert point.get_xdata()[0] == pytest.approx(row.value)
        assert point.get_ydata()[0] == height
        assert left < row.value < right
        assert bottom < height < top

        assert labels[height].get_text() == columns.value(row)
        assert (labels[height].get_weight() == "bold") == compared.best

        assert name == figures._name(row)
        rule_or_estimator, _, _ = (row.rule or row.estimator).partition(":")
        assert rule_or_estimator in name.lower() + row.estimator

        is_hollow = point.get_markerfacecolor() == "white"
        assert is_hollow == (row.estimator not in ("ar", "mixture", "duel")), "what is not exact is hollow"


def check_intervals(axes, rows):
    """The thin lines are the intervals over documents, the thick ones those of drawn errors."""
    left, right = axes.get_xlim()
    thin = [line for line in axes.lines if line.get_marker() == "|"]
    thick = [line for line in axes.lines if line.get_linewidth() == 4]
    intervals = []
    drawn_intervals = []
    for compared in rows:
        if compared.interval:
            intervals.append(pytest.approx(compared.interval))
        if compared.row.drawn_interval:
            drawn_intervals.append(pytest.approx(compared.row.drawn_interval))

    assert ends(thin) == intervals
    for low, high in ends(thin):
        assert left < low < right
        assert left < high < right
    assert ends(thick) == drawn_intervals


def check_legend(figure):
    """Every kind of mark is explained once."""
    [legend] = figure.legends
    labels = texts(legend.get_texts())
    assert sorted(labels) == sorted(set(labels))
    for expected in ("(dotted line", "ELBO (upper bound)", "ELBO, eps > 0 (no bound)", "DUEL", "Oracle"):
        assert any(expected in label for label in labels), labels


def test_every_row_of_the_figure_of_values_is_at_its_name_with_its_mark(report):
    task = report.tasks["sotu"]

    [axes] = figures.perplexity("sotu", task).axes

    check_marks(axes, task.rows)
    check_intervals(axes, task.rows)
    check_legend(axes.figure)
    [baseline] = [line for line in axes.lines if line.get_linestyle() == ":"]
    [ar] = [compared.row for compared in task.rows if compared.row.ar]
    assert baseline.get_xdata()[0] == pytest.approx(ar.value)
    title = axes.figure.get_suptitle()
    assert "bootstrap intervals" in title
    assert "Monte Carlo error" in title.replace("\n", " ")
    assert axes.get_xscale() == "log"
    assert "log scale" in axes.get_xlabel()


# ---------------------------------------------------------------- the figure of speeds


def check_points(axes, lines, rows):
    """Each rule lies at its steps per token and its value, and those whose steps are measured are joined by dashes."""
    points = []
    for name in ("greedy", "margin", "threshold (adaptive: measured NFE)"):
        points.extend(zip(lines[name].get_xdata(), lines[name].get_ydata(), strict=True))
        assert (lines[name].get_linestyle() == "--") == ("adaptive" in name)
    points.sort()
    assert list(lines["greedy"].get_xdata()) == [pytest.approx(0.25, abs=0.01), 1.0], "a line goes from left to right"

    values = {compared.row.rule: compared.row.value for compared in rows}
    tokens = sum(TOKENS)
    expected = []
    for rule, (_, nfe) in RULES.items():
        expected.append((int(tokens * nfe) / tokens, values[rule]))
    for point, expected_point in zip(points, sorted(expected), strict=True):
        assert point == pytest.approx(expected_point)

    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    for nfe, perplexity in points:
        assert left < nfe < right
        assert bottom < perplexity < top
    assert left < 0.13
    assert right > 1


def check_levels(lines, speeds):
    """The horizontal lines are the bound, the baseline and the oracle, each labelled with its value."""
    assert speeds.elbo.estimator == "elbo"
    assert speeds.elbo.eps == 0.0
    assert speeds.oracle.estimator == "oracle"
    assert speeds.ar.ar

    levels = {"ELBO (upper bound)": speeds.elbo, "autoregressive model": speeds.ar, "oracle": speeds.oracle}
    for start, row in levels.items():
        [label] = [label for label in lines if label.startswith(start)]
        assert lines[label].get_ydata()[0] == pytest.approx(row.value)
        assert f", {columns.value(row).removeprefix('≤ ')}" in label
        assert (start == "oracle") == ("not a likelihood" in label)
        if start == "oracle":  # which has no steps: it stands at one for each token
            assert list(lines[label].get_xdata()) == [1.0]


def test_every_rule_of_the_figure_of_speeds_lies_inside_of_its_axes(report):
    task = report.tasks["sotu"]
    [speeds] = task.rules

    [axes] = figures.rules("sotu", task, speeds).axes

    lines = {line.get_label(): line for line in axes.lines}
    check_points(axes, lines, task.rows)
    check_levels(lines, speeds)
    assert ("log" in axes.get_ylabel()) == (axes.get_yscale() == "log")
    [legend] = axes.figure.legends
    explained = [label for label in lines if not label.startswith("_")]
    assert set(texts(legend.get_texts())) == set(explained)


# ---------------------------------------------------------------- the page


def check_row(cells, classes, standing, plot):
    """A row of the page has the classes of its method, and its mark where the plot places it."""
    row = standing.method.rows["sotu"].row
    expected_classes = standing.method.kind.replace(" ", "-").split()
    if row.ar:
        expected_classes.append("ar")
    if standing.rank == 1:
        expected_classes.append("first")
    assert classes.split() == expected_classes

    assert f'data-text="{row.model}"' in cells
    assert f"<bdi>{row.model}</bdi>" in cells
    assert ('<span class="tag">AR</span>' in cells) == row.ar

    place, *interval = plot["rows"][standing]
    assert (f'cx="{place}"' in cells) != row.score.is_bound
    assert (f'd="M{place - 6} 11l9' in cells) == row.score.is_bound
    assert bool(interval) == (row.estimator != "mixture")
    assert bool(interval) == ('class="interval"' in cells)
    if interval:
        low, high = interval
        assert f'x1="{low}" x2="{high}" y1="11"' in cells
        assert low <= place <= high
    assert f'class="base" x1="{plot["base"]}"' in cells
    if row.ar:
        assert plot["base"] == place

    text = columns.value(row)
    text = text.replace("≤ ", "≤\u00a0").replace("± ", "±\u00a0")  # no line breaks inside a number
    assert re.search(rf'<td class="g-value number">{re.escape(text)}', cells), text


def check_ticks(shown, plot, values, intervals):
    """The axis is logarithmic, from the lowest to the highest number that is shown."""
    numbers = list(values)
    for interval in intervals:
        numbers.extend(interval)
    low = min(numbers)
    high = max(numbers)
    for x, label in plot["ticks"]:
        assert f'<text x="{x}" y="16">{label}</text>' in shown
        share = math.log(float(label) / low) / math.log(high / low)
        assert x == pytest.approx(page.MARGIN + share * (page.WIDTH - 2 * page.MARGIN), abs=0.06)


def test_every_row_of_the_page_has_the_classes_and_the_mark_of_its_method(report):
    compared_rows = report.tasks["sotu"].rows

    shown = page.html(report, None)
    plot = page._plot(report.standings, report.tasks)

    first_table, _, _ = shown.partition("</table>")
    rows = re.findall(r'<tr class="row ([^"]*)">(.*?)</tr>', first_table, re.DOTALL)
    standings = []
    for _, members in report.standings.groups():
        standings.extend(members)
    assert len(rows) == len(standings) == len(compared_rows)
    for (classes, cells), standing in zip(rows, standings, strict=True):
        check_row(cells, classes, standing, plot)

    values = [standing.method.rows["sotu"].row.value for standing in standings]
    likelihoods = values[:-1]
    assert likelihoods == sorted(likelihoods)
    assert standings[-1].method.named.estimator == "oracle"
    check_ticks(shown, plot, values, [compared.interval for compared in compared_rows if compared.interval])


# ---------------------------------------------------------------- files of figures, and their places in report.md


def check_place(image, section, name, is_picture):
    """A figure stands in the section of its task, below the table that it is of: as a picture, or else as a link."""
    place = section.index(f"({name}.")
    assert section.startswith(image.task)
    assert (place < section.index("### Rules against NFE")) == (image.kind == "perplexity")
    assert ("![" in section[:place].splitlines()[-1]) == is_picture


def test_each_task_has_its_figures_in_every_format(folders, monkeypatch, tmp_path):
    """By name; report.md shows the first format that is a picture, below the table that the figure is of."""
    monkeypatch.setattr(figures, "_file", lambda figure, form, exact: f"{form} {exact}".encode())
    for task in ("news", "a|b"):
        for rule, (rate, nfe) in list(RULES.items())[:2]:
            ours(tmp_path, docs={task: docs(rate)["sotu"]}, rule=rule, nfe=nfe)
    content = collect(parse([str(folders[0]), str(tmp_path), "--out", "unused", "--as_published"]))
    figures_of_tasks = []
    for task in content.tasks:
        figures_of_tasks += [(task, "perplexity"), (task, "rules")]

    for formats, width, first_picture in (
        (("png", "pdf"), None, "png"),
        (("pdf", "svg"), 4.5, "svg"),
        (("pdf",), None, None),
    ):
        images = figures.draw(content.tasks, formats, width)
        text = reports.markdown(content, images)

        assert [(image.task, image.kind) for image in images] == figures_of_tasks
        _, *by_heading = re.split(r"^## ", text, flags=re.MULTILINE)
        sections = dict(zip(content.tasks, by_heading, strict=False))
        for image in images:
            name = f"{image.kind}_{re.sub('[^a-z]', '_', image.task)}"
            subject = f" on {image.task}"
            if image.kind == "rules":
                setting = content.tasks[image.task].rules[0].title
                subject += f": {setting}"
                name += f"_{setting.replace(', block ', '_block_')}"
            assert image.title.endswith(subject)
            assert image.files == {f"{name}.{form}": f"{form} {width is not None}".encode() for form in formats}
            assert text.count(f"]({name}.{first_picture or 'pdf'})") == 1
            assert text.count(f"({name}.") == 1
            check_place(image, sections[image.task], name, is_picture=first_picture is not None)
