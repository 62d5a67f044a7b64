"""`lm-eval-duel score`: the harness's numbers for the user's own texts."""

import csv
import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import golden
import numpy as np
import pytest
import tiny
from harness_runs import TORCHRUN, launch

from lm_eval_duel import Duel
from lm_eval_duel.cli import comparison, score, scored
from lm_eval_duel.cli.main import main as command
from lm_eval_duel.cli.report import main as report
from lm_eval_duel.cli.report import parse as parse_report
from lm_eval_duel.core.scores import Value
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import files as find_results
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.trace import read as read_trace
from lm_eval_duel.rules import presets
from lm_eval_duel.text.text import TextEncoder

pytestmark = pytest.mark.usefixtures("one_load")
TEXTS = ["a b c d e", "the of and a b c d e a b c d e the of and", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=8)


@pytest.fixture(autouse=True)
def other_digits(monkeypatch):
    """No test here depends on the last digits of a float."""
    golden.nudge_functions(monkeypatch.setattr)


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    return str(file)


def run(*arguments, capsys):
    score.main([*arguments, "--device", "cpu"])
    return capsys.readouterr().out


def test_the_numbers_are_those_of_the_library(folder, texts, tmp_path, capsys):
    model = f"pretrained={folder},rule=margin,block=4"
    out = tmp_path / "out.json"
    table = tmp_path / "out.csv"
    duel = Duel.from_pretrained(folder, rule="margin", block=4, device="cpu")
    scores = duel.score(TEXTS)
    sizes = np.array([len(text.encode()) for text in TEXTS])
    bits = np.array([-expected.log_prob / math.log(2) for expected in scores])
    rate = bits.sum() / sizes.sum()
    residuals = bits - rate * sizes
    error = math.sqrt(3 / 2 * (residuals**2).sum()) / sizes.sum()  # of a ratio of sums over three documents

    printed = run(texts, "--lines", "--model_args", model, "--json", str(out), "--csv", str(table), capsys=capsys)

    content = json.loads(out.read_text())
    for row, expected in zip(content["documents"], scores, strict=True):
        assert row["log_prob"] == pytest.approx(expected.log_prob, abs=1e-4)
        assert row["token_perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert row["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    total = content["total"]
    assert total["bits_per_byte"] == pytest.approx(rate, rel=1e-5)
    assert total["bits_per_byte_documents_stderr"] == pytest.approx(error, rel=1e-4)
    assert content["fingerprint"] == duel.fingerprint

    with table.open() as rows:
        names = [row["document"] for row in csv.DictReader(rows)]
    assert names == [f"{texts}:1", f"{texts}:2", f"{texts}:3"]
    assert duel.fingerprint in printed
    assert "total" in printed
    assert "standard error over documents" in printed


def test_text_that_the_tokenizer_does_not_know_is_counted(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "=cmd().txt").write_text(" a b c\n")
    (tmp_path / "unknown.txt").write_text("a \u043c\u0438\u0440 \u043c\u0438\u0440")
    more = ("--model_args", f"pretrained={folder}", "--json", "out.json", "--csv", "out.csv")

    printed = run("./=cmd().txt", "./unknown.txt", *more, capsys=capsys)

    content = json.loads((tmp_path / "out.json").read_text())
    clean, unknown = content["documents"]
    assert clean["unk_tokens"] == 0
    assert unknown["unk_tokens"] == 2
    assert content["total"]["unk_tokens"] == 2
    assert "2 of 6 tokens (33.3%) are [UNK]" in printed
    assert clean["words"] == 4  # white space at an end adds one
    assert unknown["words"] == 3

    first, *_ = csv.DictReader((tmp_path / "out.csv").open())
    assert first["document"] == "'=cmd().txt"  # a name is no formula
    assert float(first["log_prob"]) < 0


def test_what_the_tokenizer_drops_is_named(folder, texts, monkeypatch, capsys):
    monkeypatch.setattr(TextEncoder, "normalises", "lower case")
    alone = run(texts, "--model_args", f"pretrained={folder},rule=greedy", capsys=capsys)
    assert "the tokenizer drops upper case: bits per byte and word perplexity" in alone
    compared = run(texts, "--model_args", f"pretrained={folder}", "--compare", "rule=margin", capsys=capsys)
    assert " drops upper case: its bits per byte" in compared


def test_what_is_not_a_likelihood_is_labelled_and_has_its_error(folder, texts, tmp_path, capsys):
    model = f"pretrained={folder},block=4,estimator="
    out = tmp_path / "out.json"
    printed = run(texts, "--lines", "--model_args", f"{model}elbo,mc_samples=16", "--json", str(out), capsys=capsys)

    content = json.loads(out.read_text())
    total = content["total"]
    errors = [row["log_prob_stderr"] for row in content["documents"]]
    assert errors[0] > 0
    assert errors[2] == 0  # a single token has one state, so its bound is exact
    assert total["log_prob_stderr"] == pytest.approx(math.hypot(*errors))
    assert f"≥ {total['log_prob']:.2f} ± {total['log_prob_stderr']:.2f}" in printed, "a bound from below"
    assert re.search(rf"≤ {total['token_perplexity']:.2f} ± [\d.]+ ", printed)
    assert re.search(rf"≤ {total['bits_per_byte']:.4f} ± [\d.]+\n", printed)
    assert "an upper bound of the perplexity" in printed
    assert re.search(rf"bits per byte ≤ {total['bits_per_byte']:.4f} ± [\d.]+, standard error over documents", printed)

    assert "error not known" in run(texts, "--model_args", f"{model}elbo,mc_samples=2", capsys=capsys)
    assert "not a likelihood" in run(texts, "--model_args", f"{model}oracle", capsys=capsys)
    assert registry.value_template("elbo", {"elbo_eps": "0.001"}).label == registry.Kind.NO_BOUND.meaning


@pytest.mark.slow
def test_two_processes_score_what_one_scores(folder, texts, tmp_path, capsys):
    model = f"pretrained={folder},rule=margin,block=4,dtype=float64"
    shown = run(texts, "--lines", "--model_args", model, "--json", str(tmp_path / "one.json"), capsys=capsys)
    more = ("--lines", "--model_args", model, "--device", "cpu", "--json", str(tmp_path / "two.json"))

    [status], printed = launch(TORCHRUN, 2, "lm_eval_duel", "score", texts, *more)

    assert status == 0, printed[-3000:]
    assert printed.count(" ".join(shown.split())) == 1, printed[-3000:]
    one = json.loads((tmp_path / "one.json").read_text())
    two = json.loads((tmp_path / "two.json").read_text())
    assert one["spec"] == two["spec"]
    for first, second in zip([*one["documents"], one["total"]], [*two["documents"], two["total"]], strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            expected = pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value
            assert second[name] == expected, name


def test_several_models_end_with_the_paired_differences(folder, texts, tmp_path, capsys):
    model = f"pretrained={folder},rule=greedy,block=4"
    out = tmp_path / "out.json"
    table = tmp_path / "out.csv"
    alone = tmp_path / "alone.json"
    arguments = ("--lines", "--model_args", model, "--compare", "rule=margin", f"pretrained={folder},block=2")

    printed = run(texts, *arguments, "--json", str(out), "--csv", str(table), capsys=capsys)
    run(texts, "--lines", "--model_args", model.replace("greedy", "margin"), "--json", str(alone), capsys=capsys)

    content = json.loads(out.read_text())
    margin, _ = content["compared"]
    margin_alone = json.loads(alone.read_text())
    for row, expected in zip(margin["documents"], margin_alone["documents"], strict=True):
        assert row["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-4)
        assert row["sha256"] == expected["sha256"]

    total = content["total"]
    pair = margin["difference"]
    per_token = (margin["total"]["log_prob"] - total["log_prob"]) / total["tokens"]
    assert pair["difference"] == pytest.approx(per_token)
    assert pair["names"] == ["greedy", "margin"]
    assert "greedy \u2212 margin" in printed
    assert "no verdict from 3 distinct documents" in printed
    models = {line["model"] for line in csv.DictReader(table.open())}
    assert models == {str(folder)}


@pytest.mark.slow
def test_models_are_compared_as_a_report_compares_them(folder, texts, tmp_path, capsys):
    """The same rows and differences as those of a report of the file, under the arguments that differ."""
    other = tiny.checkpoint(tmp_path / "other", "modernbert", length=8)
    out = tmp_path / "out.json"
    table = tmp_path / "out.csv"
    model = f"pretrained={folder},rule=margin,k=2,block=4"
    more = ("--compare", str(other), "estimator=elbo,mc_samples=16", "temperature=0.5", "estimator=oracle")
    words = (texts, "--lines", "--model_args", model, *more, "--json", str(out), "--csv", str(table))

    printed = run(*words, capsys=capsys)
    report([str(out), "--out", str(tmp_path / "report"), "--pairs", "all", "--metric", "token_perplexity"])

    first = json.loads(out.read_text())
    of_other, elbo, warm, oracle = first["compared"]
    assert first["spec"]["rule"] == "margin:k=2"
    assert of_other["spec"]["rule"] == "margin:k=2"
    assert of_other["spec"]["block"] == "4"
    assert warm["difference"]["names"] == ["no warpers", "temperature=0.5"]
    assert "not a likelihood" in oracle["difference"]["verdict"]
    fingerprints = [entry["fingerprint"] for entry in (first, *first["compared"])]
    for entry in first["compared"]:
        for name in entry["difference"]["names"]:
            assert not any(fingerprint in name for fingerprint in fingerprints)

    task = json.loads((tmp_path / "report" / "report.json").read_text())["tasks"]["texts.txt"]
    pairs = {frozenset(pair["names"]): pair for pair in task["pairs"]}  # in whichever order
    for entry in (of_other, elbo, warm):
        difference = entry["difference"]
        pair = pairs[frozenset(difference["names"])]
        assert abs(pair["difference"]) == pytest.approx(abs(difference["difference"]))
        assert pair["verdict"] == difference["verdict"]
    for row in task["rows"]:
        assert f"{row['value']:.2f}" in printed

    lines = list(csv.DictReader(table.open()))
    models = {(line["model"], line["estimator"], line["fingerprint"], line["kind"]) for line in lines}
    assert len(models) == 5
    first_line_of_elbo = lines[2 * len(TEXTS)]
    assert first_line_of_elbo["log_prob_stderr"]
    assert "document" not in printed.splitlines()[0]


@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("estimator=elbo_exact,block=4", ["estimator=mixture", "estimator=oracle"]),
        ("estimator=mixture,block=4", ["estimator=duel,rule=greedy", "estimator=oracle", "estimator=mixture"]),
        ("rule=left_to_right,block=4", ["rule=greedy", "rule=greedy,k=1", "rule=left_to_right", "estimator=mixture"]),
        pytest.param(
            "estimator=sampled_order,alg=entropy,alg_temp=0.5,steps=4,block=4",
            ["alg_temp=0.6", "rule=greedy,estimator=duel"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_difference_is_that_of_the_totals(folder, texts, tmp_path, capsys, model, others):
    """Of every model, also of one whose value a lattice run or another model has too; names differ as models do."""
    out = tmp_path / "out.json"
    arguments = ("--lines", "--model_args", f"pretrained={folder},{model}", "--json", str(out))

    run(texts, *arguments, "--compare", *others, capsys=capsys)

    first = json.loads(out.read_text())
    for other in first["compared"]:
        pair = other["difference"]
        perplexities = [first["total"]["token_perplexity"], other["total"]["token_perplexity"]]
        assert pair["perplexities"] == pytest.approx(perplexities, rel=1e-5)
        first_name, other_name = pair["names"]
        assert (first_name == other_name) == (first["fingerprint"] == other["fingerprint"])
        assert pair["kinds"] == [first["kind"], other["kind"]]
        assert pair["interval"]


def test_every_value_of_a_lattice_run_with_a_trace_has_an_interval(folder, texts, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    arguments = ("--lines", "--model_args", f"pretrained={folder},block=4")

    printed = run(texts, *arguments, "--compare", f"estimator=oracle,trace={trace}", capsys=capsys)

    assert trace.exists()
    assert "Mixture of orders" in printed
    assert "over windows" not in printed


def test_a_report_of_limited_scores_says_how_many_documents_there_are_and_which_file(folder, tmp_path, capsys):
    """Two files, whose texts are not the same, have tables apart, each with the name of its file alone."""
    scores = []
    trace = tmp_path / "trace.jsonl"
    for name, lines in (("one.txt", ["a b c", "b c", "c a"]), ("two.txt", ["c b a", "c b", "c a"])):
        file = tmp_path / name
        file.write_text("\n".join(lines))
        scores.append(str(tmp_path / f"{name}.json"))
        words = ("--lines", "--limit", "2", "--json", scores[-1], "--trace", str(trace))
        printed = run(
            str(file), *words, "--model_args", f"pretrained={folder},block=4", "--compare", "rule=margin", capsys=capsys
        )
        assert "2 of 3 documents" in printed
        trace = tmp_path / "other_trace.jsonl"

    content = collect(parse_report([*scores, "--apart", "--page", "--out", "unused"]))
    assert {name: task.size for name, task in content.tasks.items()} == dict.fromkeys(
        ["one.txt", "two.txt"], "2 of 3 documents"
    )
    [difference] = [str(note) for note in content.notes if str(note).startswith("two.txt: documents")]
    assert scores[0] in difference

    for places, files in ((scores[:1], ["one.txt"]), (scores, ["one.txt", "two.txt"])):
        content = collect(parse_report([*places, "--apart", "--page", "--out", "unused"]))
        of_documents = [(document["task"], document["number"]) for document in content.documents]
        assert of_documents == [(file, n) for file in files for n in range(2)]
        titles = [document["title"] for document in content.documents]
        assert titles == [f"{file}:{line}" for file in files for line in (1, 2)], "as the scores name them"

    figures = tmp_path / "figures.csv"
    figures.write_text("model,estimator,task,metric,value,source\nM,duel,one.txt,token_perplexity,3,S\n")
    content = collect(parse_report([scores[0], "--published", str(figures), "--out", "unused"]))
    [table] = [table for _, kind, table in content.tables() if kind == "published"]
    assert any("M" in row for row in table.rows)


def test_texts_of_a_folder_are_one_task(folder, tmp_path, capsys):
    """In tables, also beside a result of one file with the same texts, and on the page, which shows a few of a task."""
    own = tmp_path / "own"
    own.mkdir()
    for name, text in zip("xyz", TEXTS, strict=True):
        (own / f"{name}.txt").write_text(text)
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS))
    results = []
    for place, model in (("own", "rule=greedy"), ("lines.txt", "rule=margin")):
        results.append(str(tmp_path / f"{place}.json"))
        trace = str(tmp_path / f"{place}.jsonl")
        words = ("--lines", "--json", results[-1], "--trace", trace)
        run(str(tmp_path / place), *words, "--model_args", f"pretrained={folder},{model}", capsys=capsys)

    (tmp_path / "other.json").write_text("[]")
    assert list(map(str, find_results([tmp_path]))) == sorted(results)
    of_documents = json.loads(Path(results[-1]).read_text())["documents"]
    digests = dict.fromkeys(line["sha256"] for line in read_trace(trace))
    assert list(digests) == [document["sha256"] for document in of_documents]

    for places, name in ((results, "own"), (results[::-1], "lines.txt")):
        content = collect(parse_report([*places, "--page", "--shown", "2", "--out", "unused"]))
        assert list(content.tasks) == [name]
    of_folder = collect(parse_report([results[0], "--page", "--shown", "2", "--out", "unused"]))
    assert [document["title"] for document in of_folder.documents] == ["x.txt:1", "y.txt:1"]

    assert len(content.documents) == 2
    for document in content.documents:
        assert document["title"] in ("x.txt:1", "y.txt:1", "lines.txt:1", "lines.txt:2")
        assert len(document["orders"]) == 2, "of both results"


def test_the_models_without_a_trace_are_named(folder, texts, tmp_path, capsys):
    """Where only some have one; what a value lacks for an interval is named by an argument that `score` takes."""
    words = [texts, "--lines", "--model_args", f"pretrained={folder},block=4"]
    trace = str(tmp_path / "trace.jsonl")
    none_traced = score.parse([*words, "--compare", "rule=margin"])
    assert not score.trace_note(none_traced.models)

    all_traced = score.parse([*words, "--trace", trace, "--compare", f"rule=margin,trace={trace}2"])
    assert not score.trace_note(all_traced.models)

    first_traced = score.parse([*words, "--trace", trace, "--compare", "rule=margin", "rule=random"])
    traced, _, others = score.trace_note(first_traced.models).partition("Not traced")
    assert "--model_args" in traced
    assert "rule" not in traced
    assert "--compare rule=margin" in others
    assert "--compare rule=random" in others

    printed = run(*words, "--trace", trace, "--compare", "estimator=oracle", capsys=capsys)
    assert "trace=FILE in its --compare" in printed
    assert "--traces" not in printed


def test_a_model_that_fails_costs_no_finished_one(folder, texts, tmp_path, capsys):
    out = tmp_path / "out.json"
    damaged = tmp_path / "damaged"
    words = [texts, "--lines", "--model_args", f"pretrained={folder},rule=threshold,mu=0.9", "--json", str(out)]
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"none")

    with pytest.raises(DuelError, match="damaged"):
        score.main([*words, "--compare", "rule=greedy:k=2", str(damaged), "rule=margin"])

    content = json.loads(out.read_text())
    assert content["spec"]["rule"] == "threshold:mu=0.9"
    assert content["total"]["log_prob"] < 0
    [second] = content["compared"]
    assert second["spec"]["rule"] == "greedy:k=2", "without the mu of the other rule"
    assert "threshold" in capsys.readouterr().out


def test_scores_without_a_comparison_are_kept(folder, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    out = tmp_path / "out.json"
    table = tmp_path / "out.csv"
    empty.write_text('{"text": ""}\n' * 2)
    more = ("--json", str(out), "--csv", str(table))

    with pytest.raises(DuelError):
        run(str(empty), "--model_args", f"pretrained={folder}", "--compare", "rule=margin", *more, capsys=capsys)

    content = json.loads(out.read_text())
    [second] = content["compared"]
    assert len(content["documents"]) == 2
    assert len(second["documents"]) == 2
    assert len(table.read_text().splitlines()) == 5
    assert capsys.readouterr().out.count("total") == 2


def test_files_that_overwrite_each_other_are_refused(folder, texts, tmp_path):
    file = str(tmp_path / "out")
    with pytest.raises(UsageError, match="same file"):
        score.parse([texts, "--model_args", f"pretrained={folder}", "--csv", file, "--json", file])


def test_two_models_have_two_traces(folder, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [texts, "--model_args", f"pretrained={folder}", "--trace", "t.jsonl", "--compare"]
    with pytest.raises(UsageError, match="Two models have the trace"):
        score.parse([*words, f"rule=margin,trace={tmp_path}/t.jsonl"])
    score.parse([*words, "rule=margin,trace=other.jsonl", "rule=random"])


def test_a_trace_has_one_name(folder, texts):
    with pytest.raises(UsageError, match=r"--trace a.* trace=b"):
        score.parse([texts, "--model_args", f"pretrained={folder},trace=b", "--trace", "a"])


def test_a_model_without_a_config_is_found_before_the_first_is_loaded(folder, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval_duel.harness.lm.DuelMDM", None)
    with pytest.raises(DuelError, match="nowhere"):
        score.main([texts, "--model_args", f"pretrained={folder}", "--compare", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("demo-ar", "estimator=ar"),  # autoregressive by its config.json
        ("demo-mdm,estimator=ar", "estimator=ar"),
        ("demo-bd", "block=4"),  # trained on other blocks
        ("demo-mdm,first_token=block", "first_token"),
        ("demo-bd,block=4,grid=target", "grid=row"),
        ("demo-mdm,mask_token_id=100000", "mask_token_id"),
    ],
)
def test_what_config_and_tokenizer_show_is_found_before_the_first_is_loaded(other, named, texts, monkeypatch):
    monkeypatch.setattr("lm_eval_duel.harness.lm.DuelMDM", None)
    with pytest.raises(DuelError, match=named) as raised:
        score.main([texts, "--model_args", "demo-mdm,block=32", "--compare", other])
    assert f"--compare {other}" in str(raised.value)


def test_a_wrong_argument_that_others_inherit_is_one_of_the_first_model(texts):
    with pytest.raises(DuelError, match="max_length") as raised:
        score.main([texts, "--model_args", "demo-mdm,max_length=200", "--compare", "rule=margin"])
    assert "--compare" not in str(raised.value)


@pytest.mark.parametrize("others", [["--model_args", "demo-ar"], ["--model_args", "demo-mdm", "--compare", "demo-ar"]])
def test_a_missing_estimator_is_a_wrong_argument(texts, others):
    with pytest.raises(SystemExit) as raised:
        command(["score", texts, *others])
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("other", "named"), [("rule=margin,", "comma"), ("margin", "rule=margin"), ("rule=gredy", "greedy")]
)
def test_a_wrong_model_is_named_before_anything_is_scored(folder, texts, other, named):
    with pytest.raises(UsageError, match=named):
        score.parse([texts, "--model_args", f"pretrained={folder}", "--compare", other])


def test_what_is_ignored_is_named(folder, texts, capsys):
    first = f"pretrained={folder},rule=margin,block=4"
    [_, other] = score.parse([texts, "--model_args", first, "--compare", "estimator=ar"]).models
    assert "estimator=ar ignores rule, block of --model_args" in other.note


def test_a_conflict_says_what_to_set(texts, capsys):
    with pytest.raises(DuelError, match="block=4") as raised:
        run(texts, "--model_args", "demo-mdm,block=32", "--compare", "demo-bd", capsys=capsys)
    assert "set block here" in str(raised.value)


def test_one_document_says_how_to_come_to_a_verdict(folder, texts, capsys):
    printed = run(texts, "--model_args", f"pretrained={folder},block=4", "--compare", "rule=margin", capsys=capsys)

    assert "--lines" in printed
    assert ".jsonl" in printed


@pytest.mark.parametrize(("distinct", "is_told"), [(stats.FEW - 1, True), (stats.FEW, False)])
def test_copies_of_a_text_are_one_document_of_a_verdict(distinct, is_told, folder, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    letters = itertools.cycle("abcdefghijkl"[:distinct])
    texts.write_text("\n".join(itertools.islice(letters, 2 * stats.FEW)))
    model = f"pretrained={folder},block=4"

    printed = run(str(texts), "--lines", "--model_args", model, "--compare", "rule=margin", capsys=capsys)

    assert (comparison.TO_A_VERDICT in printed) == is_told
    assert f"{distinct} distinct documents among {2 * stats.FEW}" in printed
    printed = printed.replace(f"{distinct} distinct documents among", "")
    of_intervals = printed.count(f"{distinct} distinct document") - printed.count("no verdict from")
    assert of_intervals == is_told, "intervals and verdicts have one rule"


@pytest.mark.parametrize(("lengths", "is_compared"), [((8, 6), False), ((6, 6), True)])
def test_models_that_cut_texts_apart_have_no_verdict(lengths, is_compared, folder, tmp_path, capsys):
    """As `report` refuses them; the remedy that is printed makes their windows equal."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join("a b c d e f g h i j k l"[n:] for n in range(0, 2 * stats.FEW, 2)))
    out = tmp_path / "out.json"
    first, second = lengths
    model = f"pretrained={folder},block=4,rule=margin,max_length="
    words = [str(texts), "--lines", "--json", str(out), "--model_args"]
    words_of_report = [str(out), "--metric", "token_perplexity", "--out", str(tmp_path / "report")]

    printed = run(*words, f"{model}{first}", "--compare", f"rule=greedy,max_length={second}", capsys=capsys)

    [compared] = json.loads(out.read_text())["compared"]
    pair = compared["difference"]
    assert ("windows" not in pair["verdict"]) == is_compared
    assert pair["interval"] is not None
    assert printed.count("cut at different places") == (0 if is_compared else 1)
    if is_compared:
        report(words_of_report)
        return

    with pytest.raises(DuelError, match="windows"):
        report(words_of_report)
    [length] = set(re.findall(r"max_length=(\d+) to", printed))
    run(*words, f"{model}{length}", "--compare", "rule=greedy", capsys=capsys)
    [compared] = json.loads(out.read_text())["compared"]
    assert "windows" not in compared["difference"]["verdict"]


@pytest.mark.parametrize(("text", "is_cut"), [("a b c", False), ("a b c d e f g h i j k l", True)])
def test_windows_are_named_where_a_text_is_cut(text, is_cut, folder, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text(text)
    words = ("--model_args", f"pretrained={folder},block=4", "--compare", "rule=margin,max_length=7")
    assert ("window" in run(str(texts), *words, capsys=capsys)) == is_cut


def test_a_comparison_says_what_was_scored(folder, tmp_path, capsys, caplog):
    """Documents, tokens and blank lines, and the fingerprint of each model; one model twice is named as such."""
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c\n\na\n \n")
    out = tmp_path / "out.json"
    words = ("--lines", "--model_args", f"pretrained={folder},block=4", "--json", str(out))

    printed = run(str(texts), *words, "--compare", "rule=margin", "rule=greedy", capsys=capsys)

    greedy = json.loads(out.read_text())
    margin, greedy_again = greedy["compared"]
    assert f"2 documents, {greedy['total']['tokens']} tokens" in printed
    assert "2 blank lines" in caplog.text
    for n, model in enumerate((greedy, margin, greedy_again), 1):
        [line] = [line for line in printed.splitlines() if line.startswith(f"model {n}: ")]
        assert line.endswith(model["fingerprint"])
    assert margin["difference"]["verdict"] != comparison.SAME_MODEL
    assert "model 2 differs from model 1 in rule: margin:k=1 (model 1: greedy:k=1)" in printed.splitlines()
    assert "model 3 differs" not in printed
    assert greedy_again["difference"]["verdict"] == comparison.SAME_MODEL


def test_copies_of_a_text_are_one_document_of_an_error(folder, tmp_path, capsys):
    """The error of each text once, as the two are of the same size; none from copies of one text. Copies are named."""
    errors = []
    for copies in (["a b c"], ["a b c", "a b c"], ["a b c", "c b a"], ["a b c", "c b a", "a b c", "c b a"]):
        texts = tmp_path / "texts.txt"
        texts.write_text("\n".join(copies))
        out = tmp_path / "out.json"
        words = ("--lines", "--model_args", f"pretrained={folder},block=4", "--json", str(out))
        printed = run(str(texts), *words, capsys=capsys)
        told = re.search(r"(\d+) distinct documents? among (\d+)", printed)
        has_copies = len({*copies}) < len(copies)
        assert (told is not None) == has_copies
        if told:
            assert [int(count) for count in told.groups()] == [len({*copies}), len(copies)]
        errors.append(json.loads(out.read_text())["total"]["bits_per_byte_documents_stderr"])
    assert errors[:2] == [None, None]
    assert errors[3] == pytest.approx(errors[2])


def test_rows_stand_in_the_order_of_the_command(folder, texts, tmp_path, capsys):
    """Whichever value is lower; and every setting in which a model differs from the first is named with both values."""
    models = ["temperature=4", "temperature=none", "bos=none", "rule=margin,max_length=7"]
    model = f"pretrained={folder},block=4,temperature=1.5"
    more = ("--lines", "--model_args", model, "--json", str(tmp_path / "out.json"))

    printed = run(texts, *more, "--compare", *models, capsys=capsys)

    first = json.loads((tmp_path / "out.json").read_text())
    values = [model["total"]["bits_per_byte"] for model in (first, *first["compared"])]
    rows = printed.split("\n\n")[0].splitlines()[1:]
    assert values not in (sorted(values), sorted(values, reverse=True))
    for row, value in zip(rows, values, strict=True):
        assert float(row.split()[-1]) == pytest.approx(value, abs=1e-3)
    for n, model in enumerate(first["compared"], 2):
        differing = {key for key in first["spec"] | model["spec"] if first["spec"].get(key) != model["spec"].get(key)}
        [line] = [line for line in printed.splitlines() if line.startswith(f"model {n} differs from model 1 in ")]
        for key in differing:
            of_first = first["spec"].get(key, "not set")
            assert f"{key}: {model['spec'].get(key, 'not set')} (model 1: {of_first})" in line
        assert line.count("(model 1: ") == len(differing)


def test_what_only_one_of_two_estimators_has_is_no_difference_in_settings(folder, texts, capsys):
    """Such as the rule, which an ELBO does not follow; what both have is named if it differs."""
    model = ("--lines", "--model_args", f"pretrained={folder},rule=greedy,block=4")
    printed = run(texts, *model, "--compare", "estimator=elbo,mc_samples=4,temperature=2", capsys=capsys)
    [line] = [line for line in printed.splitlines() if line.startswith("model 2 differs from model 1 in ")]
    assert "estimator: elbo (model 1: duel)" in line
    for key in ("rule", "mc_samples"):
        assert f"{key}: " not in line


@pytest.mark.slow
def test_values_under_noise_are_compared_by_their_seeds(tmp_path, capsys):
    """Another seed is another distribution; the mean over seeds has its other value in a note."""
    (tmp_path / "t.txt").write_text("We the people of the United States\n")
    words = ["score", str(tmp_path / "t.txt"), "--model_args", "demo-duo,rule=greedy,block=4", "--device", "cpu"]
    command([*words, "--compare", "noise_seed=1", "estimator=duel_seeds,noise_seeds=2"])
    shown = capsys.readouterr().out
    for named in ("DUEL (noise_seed=0)", "DUEL (noise_seed=1)", "DUEL over noise", "log of the mean probability"):
        assert named in shown, named


def test_two_samplers_of_one_estimator_are_told_apart():
    """By the settings that make their values those of different things."""
    described = set()
    for name in ("sdar-static", "sdar-dynamic"):
        spec = {key: str(value) for key, value in presets.find(name).arguments.items()}
        line = scored.Line("total", "", Value(-3.0), 1, 1, 1, 0)
        info = {"spec": spec, "fingerprint": "", "duel": {"pretrained": "sdar"}}
        described.add(scored.ScoredModel(info, spec["estimator"], [line], line, 1).method)
    assert len(described) == 2


@pytest.mark.parametrize(("documents", "windows", "starts"), [(1, 3, 0), (1, 1, 0), (2, 3, 1), (2, 2, 1)])
def test_below_the_table_of_a_model_stand_its_windows_and_ties(documents, windows, starts):
    spec = {"rule": "greedy:k=1", "block": "4"}
    duel = {"pretrained": "MDLM", "tasks": {"score": {"windows": windows}}, "all_mask_starts": starts}
    line = scored.Line("a.txt", "", Value(-3.0), 1, 1, 1, 0)
    lines = [dataclasses.replace(line, key=str(n)) for n in range(documents)]
    text = scored.ScoredModel({"spec": spec, "fingerprint": "", "duel": duel}, "duel", lines, line, documents).table()

    assert (f"in {windows} windows" in text) is (windows > documents)
    assert ("--lines" in text) is (documents == 1 and windows > 1)
    assert ("masks alone" in text) is bool(starts)


@pytest.mark.parametrize(("words", "warns"), [(1200, True), (800, False)])
def test_a_text_that_a_unigram_predicts_better_is_noted(words, warns, folder, tmp_path, capsys, caplog, monkeypatch):
    """A network that knows nothing, on a text of one word: said once for each model, from 1,000 tokens on."""
    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda: None)  # it takes the log away from caplog
    texts = tmp_path / "a.txt"
    texts.write_text("a " * words)
    model = f"pretrained={folder},rule=greedy,block=4,bos=none"
    run(str(texts), "--model_args", model, "--compare", "estimator=elbo,mc_samples=4", capsys=capsys)
    notes = [record.message for record in caplog.records if "unigram" in record.message]
    assert len(notes) == 2 * warns
    assert [" at most " in note for note in notes] == [False, True][: len(notes)]
