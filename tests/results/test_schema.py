"""The bundled results, and files that the commands write, are valid under docs/results.schema.json."""

import json

import jsonschema
import pytest
from pages import ROOT

from lm_eval_duel import demo
from lm_eval_duel.cli import report, score

SCHEMA = json.loads((ROOT / "docs" / "results.schema.json").read_text())
RESULTS = demo.FOLDER / "results"
FILES = sorted(RESULTS.glob("*/results_*.json"))
TRACES = sorted((RESULTS / "traces").glob("*.jsonl"))


def check(name, content):
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"}).validate(content)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_bundled_results(file):
    content = json.loads(file.read_text())
    check("results", content)
    for value in next(iter(content["config"]["duel"]["tasks"].values()))["values"].values():
        value["log_prob"] = 5.0
    with pytest.raises(jsonschema.ValidationError, match="maximum"):
        check("results", content)


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.stem)
def test_bundled_traces(file):
    header, *windows = map(json.loads, file.read_text().splitlines())
    check("trace_header", header)
    for window in windows[:5]:
        check("trace_window", window)


def test_a_report(tmp_path):
    report.main([str(RESULTS / "demo-bd"), "--page", "--out", str(tmp_path)])
    check("report", json.loads((tmp_path / "report.json").read_text()))


def test_score(tmp_path):
    (tmp_path / "text.txt").write_text("We the people of the United States\nin order to form a more perfect union")
    words = [str(tmp_path / "text.txt"), "--lines", "--model_args", "pretrained=demo-bd", "--device", "cpu"]
    score.main([*words, "--compare", "rule=margin", "--json", str(tmp_path / "score.json")])
    content = json.loads((tmp_path / "score.json").read_text())
    check("score", content)
    del content["compared"][0]["difference"]["interval"]
    with pytest.raises(jsonschema.ValidationError, match="interval"):
        check("score", content)
