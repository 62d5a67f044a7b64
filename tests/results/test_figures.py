"""Figures: one colour for each rule, files of a stated width, names that say what is shown."""

import json
import re
import sys

import pytest
from results import documents, ours

from lm_eval_duel.cli.report import main as report
from lm_eval_duel.cli.report import parse
from lm_eval_duel.results import figures
from lm_eval_duel.results.report import collect
from lm_eval_duel.rules import RULES

AVAILABLE = figures.available  # the others in this folder have none
RATES = {"greedy:k=1": (3.0, 1.0), "greedy:k=2": (4.0, 0.5), "margin:k=1": (3.1, 1.0), "mine:Outward:k=1": (3.2, 1.0)}


def made(folder, *arguments, rules=RATES):
    pytest.importorskip("matplotlib")
    for rule in rules:
        rate, nfe = RATES[rule]
        docs = {"sotu": documents([-10 * rate, -9 * rate, -12 * rate], [10, 9, 12])}
        for more in ({}, {"spec": {"cache": "dual"}}):
            ours(folder / "results", docs=docs, rule=rule, nfe=nfe, **more)
    report([str(folder / "results"), "--out", str(folder / "out"), *arguments])
    return json.loads((folder / "out" / "report.json").read_text())


def colours_of(axes):
    """The colour of each line with a name."""
    colours = {}
    for line in axes.lines:
        if not line.get_label().startswith("_"):
            colours[line.get_label()] = line.get_color()
    return colours


def test_every_rule_has_a_colour_of_its_own():
    colours = {figures.rule_colour(name) for name in RULES}

    assert len(colours | set(figures.OTHER_RULES)) == len(RULES) + len(figures.OTHER_RULES)
    for name in RULES:
        assert figures.rule_colour(f"{name}:k=4:seed_first=True") == figures.rule_colour(name)


def test_a_model_and_a_rule_have_one_colour_in_every_figure(tmp_path):
    made(tmp_path)
    task = collect(parse([str(tmp_path / "results"), "--out", str(tmp_path / "out")])).tasks["sotu"]
    colours_of_rules = {name: figures.rule_colour(name) for name in ("greedy", "margin", "mine:Outward")}

    [values] = figures.perplexity("sotu", task).axes
    intervals = [line for line in values.lines if line.get_marker() == "|"]
    points = []
    for line in values.lines:
        if line.get_marker() == "o" and len(line.get_xdata()):  # one in the legend alone has no place
            points.append(line)
    for compared, interval, point in zip(task.rows, intervals, points, strict=True):
        assert list(interval.get_xdata()) == compared.interval
        assert point.get_color() == figures.model_colour(compared.row.model)

    for speeds in task.rules:
        [axes] = figures.rules("sotu", task, speeds).axes
        left, right = axes.get_xlim()
        assert left < 0.5
        assert right > 1, "from left to right"
        assert colours_of(axes) == colours_of_rules


@pytest.mark.slow
def test_files_in_three_formats_have_the_stated_width(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: True)
    out = tmp_path / "out"

    content = made(tmp_path, "--figures", "pdf", "svg", "png", "--width", "4.5", rules=["greedy:k=1", "greedy:k=2"])

    assert "](perplexity_sotu.svg)" in (out / "report.md").read_text()
    for name in ("perplexity_sotu", "rules_sotu_MDLM_block_4", "rules_sotu_MDLM_block_4_cache_dual"):
        assert {f"{name}.pdf", f"{name}.svg", f"{name}.png"} <= set(content["files"])

    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", (out / "perplexity_sotu.pdf").read_bytes())
    assert float(box[1]) == pytest.approx(72 * 4.5)
    assert 'width="324pt"' in (out / "perplexity_sotu.svg").read_text()
    from PIL import Image

    with Image.open(out / "perplexity_sotu.png") as image:
        assert image.width == round(4.5 * figures.PRINT_DPI)


def test_without_matplotlib_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not AVAILABLE()


def test_a_report_without_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: True)

    content = made(tmp_path, "--figures", "none", rules=["greedy:k=1"])

    assert content["files"]
    for name in content["files"]:
        assert name.endswith((".json", ".md", ".csv", ".tex"))


@pytest.mark.parametrize(
    ("metric", "values", "logarithmic"),
    [
        ("token_perplexity", [10.0, 25.0], False),
        ("token_perplexity", [10.0, 25.1], True),
        ("bits_per_byte", [1.0, 9.0], False),
        ("token_perplexity", [10.0, float("inf")], False),
        ("token_perplexity", [0.0, 9.0], False),
        ("token_perplexity", [], False),
    ],
)
def test_an_axis_is_logarithmic_beyond_a_factor_of_two_and_a_half(metric, values, logarithmic):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    assert figures._set_scale(axes, "x", metric, values) is logarithmic
    assert axes.get_xscale() == ("log" if logarithmic else "linear")
