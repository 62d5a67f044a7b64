"""LaTeX tables: every row has the columns of the heading, texts stay texts, and pdflatex takes them."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from results import documents, hf, ours, put

from lm_eval_duel import demo
from lm_eval_duel.cli.report import main as report
from lm_eval_duel.results.table import MINUS, Bold, Head, Note, Table, latex_text

DOCS = Path(__file__).parents[2] / "docs" / "results.md"
NAMES = (r"\input{x} & % # $ ^ ~ { } \\ [2pt]", "[2pt] *", "a_b<c>", "-1", "x [9]")


def cells(line):
    """The cells of a row; a heading over two columns counts as two."""
    parts = re.split(r"(?<!\\)&", line.removesuffix(r"\\"))
    count = 0
    for part in parts:
        span = re.match(r" *\\multicolumn\{(\d+)\}", part)
        count += 1 if span is None else int(span[1])
    return count


def table(names=NAMES):
    """A table of a name, a number with a remark, and an interval; the last two stand below one heading."""
    columns = {
        "model": lambda name: name,
        Head("gap", "DUEL's gap", "value"): lambda name: (Bold("-0.25"), Note(f"of {name}", "run it again")),
        Head("its interval", "DUEL's gap", "95 % interval"): lambda name: "-0.5 to +0.5",
    }
    return Table.from_records("A table", names, columns)


def test_rows_have_the_columns_of_the_heading():
    text = table().latex()
    body = text[: text.index(r"\end{tabular}")].splitlines()
    rows = [line for line in body if line.endswith(r"\\")]
    assert rows
    for row in rows:
        assert cells(row) == 3, row
    assert r"\multicolumn{2}{c}{\textsc{DUEL}'s gap}" in text
    assert r"\cmidrule(lr){2-3}" in text


def test_a_minus_is_one_and_remarks_are_text():
    text = table(["first", "second"]).latex()

    assert r"\textbf{$-$0.25}\textsuperscript{1}" in text
    assert r"$-$0.5 to +0.5" in text
    assert r"\textsuperscript{2}~of second" in text
    assert "again" not in text, "advice is not for readers"
    assert latex_text(f"a - b {MINUS} margin, log-odds of 1e-5") == "a - b $-$ margin, log-odds of 1e-5"


@pytest.mark.parametrize("size", [12, 99])
def test_documents_that_limit_left_out_are_told_below_every_table(tmp_path, size):
    """Of 99 in each task. The comment and the CSV have the numbers in any case."""
    for seed, make, more in ((0, hf, {}), (1, ours, {"estimator": "elbo"}), (2, ours, {})):
        rates = np.random.default_rng(seed).normal(3, 0.1, size) + 0.2 * (seed > 0)
        docs = documents(-10 * rates, [10] * size)
        make(tmp_path / "results", docs={"a_b": docs, "news": docs}, **more)
    out = tmp_path / "out"

    report([str(tmp_path / "results"), "--out", str(out)])

    shown = f"{size} of 99 documents" if size < 99 else "99 documents"
    for name in ("gap_a_b.tex", "methods_news.tex", "perplexity.tex"):
        assert (out / name).exists()
    for file in out.glob("*.tex"):
        comment, *lines = file.read_text().splitlines()
        below = "\n".join(lines[lines.index(r"\end{tabular}") :])
        for task in ("a_b", "news"):
            is_about = file.stem.endswith(task) or file.stem in ("perplexity", "gap_closed")
            assert (f"{task}: {shown}" in comment) == is_about, file.name
            assert (f"{latex_text(task)}: {shown}" in below) == (is_about and size < 99), file.name

    with (out / "report.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        assert row["documents"] == str(size)
        assert row["available_documents"] == "99"


def test_tables_keep_their_names_when_results_are_added(tmp_path):
    """Whatever a paper includes is there again with another model, block or cache: rules in one table."""
    nats = np.linspace(-10, -120, 12)
    tokens = range(3, 39, 3)
    folder = tmp_path / "results"
    hf(folder, docs={"sotu": documents(nats, tokens)})
    names = set()
    for added, more in enumerate(({}, {"model": "Other"}, {"block": "8"}, {"spec": {"cache": "dual"}}), 1):
        for k in (1, 2):
            docs = {"sotu": documents((1 + 0.1 * k) * nats, tokens)}
            ours(folder, docs=docs, rule=f"greedy:k={k}", nfe=1 / k, **more)

        report([str(folder), "--out", str(tmp_path / "out")])

        before = names
        names = {file.name for file in (tmp_path / "out").glob("*.tex")}
        assert before <= names
        _, _, rows = (tmp_path / "out" / "rules_sotu.tex").read_text().partition("\\midrule")
        assert rows.count("greedy") == 2 * added


def test_tables_keep_their_names_when_a_result_is_added_that_stands_apart(tmp_path):
    docs = {"sotu": documents(np.linspace(-10, -120, 12), range(3, 39, 3))}
    folder = tmp_path / "results"
    files = []
    hf(folder, docs=docs)
    for more in ({}, {"model": "Short", "spec": {"max_length": "30"}, "duel": {"row_capacity": 29}}):
        ours(folder, docs=docs, **more)
        report([str(folder), "--apart", "--out", str(tmp_path / "out")])
        files.append({file.name: file.read_text() for file in (tmp_path / "out").glob("*.tex")})

    before, after = files
    assert before.keys() < after.keys()
    assert before["methods_sotu.tex"] == after["methods_sotu.tex"]


def test_published_figures_are_never_in_a_column_of_computed_values(tmp_path):
    """They are in tables and CSV under `published`, next to the rows of their task, and in no other table."""
    docs = {"sotu": documents(np.linspace(-10, -120, 8), range(3, 27, 3))}
    hf(tmp_path / "results", docs=docs)
    ours(tmp_path / "results", docs=docs)
    ours(tmp_path / "results", docs=docs, spec={"cache": "dual"}, duel={"verify_failed": ["out of memory"]})
    figures = tmp_path / "p.csv"
    figures.write_text(
        "model,estimator,rule,task,metric,value,source,stderr,note\n"
        "MDLM,duel,greedy,sotu,token_perplexity,87.57,Paper,,\n"
        "MDLM,elbo,,sotu,token_perplexity,95.26,Paper,0.5,zero-shot\n"
        "MDLM,elbo,,sotu,word_perplexity,888.11,Paper,,\n"
        "MDLM,elbo,,ptb,token_perplexity,99.49,Paper,,\n"
    )
    out = tmp_path / "out"

    report([str(tmp_path / "results"), "--published", str(figures), "--out", str(out)])

    places = {"87.57": 2, "95.26": 2, "888.11": 1, "99.49": 1}  # the last two are of other columns than the task's
    for value, count in places.items():
        tables = [file.name for file in out.glob("*.tex") if value in file.read_text()]
        assert len(tables) == count
        assert all(name.startswith("published_") for name in tables)
    _, _, below_head = (out / "published_sotu.tex").read_text().partition("\\midrule\n")
    rows, _, notes = below_head.partition("\\bottomrule")
    caches = []
    for row in rows.splitlines():
        _, _, _, _, cache, measured, _, published = row.removesuffix(r"\\").split("&")
        assert bool(measured.strip()) != bool(published.strip()), row
        caches.append(cache.strip())
    assert caches == ["", "none", "dual", "", ""], "as in every table of these rows"
    assert "from 8 distinct documents: too narrow" in notes
    assert "out of memory" in notes
    for name in ("published_Paper.tex", "published_Paper_2.tex"):
        assert "Published figures" in (out / name).read_text()
    assert "Published figures" in notes
    assert "published: Paper " in notes
    assert "published: Paper, zero-shot" in notes

    with (out / "report.csv").open() as lines:
        by_kind = {}
        for row in csv.DictReader(lines):
            by_kind.setdefault(row["kind"], []).append(row)
    assert [row["published"] for row in by_kind.pop("published")] == ["87.57"]
    bounds = by_kind.pop("published bound")
    assert [row["published"] for row in bounds] == ["95.26", "99.49", "888.11"]
    assert (bounds[0]["published_stderr"], bounds[0]["published_note"]) == ("0.5", "zero-shot")
    for row in bounds:
        assert (row["source"], row["value"], row["rank"], row["interval_low"]) == ("Paper", "", "", "")
    for rows_of_kind in by_kind.values():
        assert all(row["value"] and not row["published"] for row in rows_of_kind)


DIFFERS = {"windows": 8, "differing_windows": 3, "changed_picks": 0, "where": "task sotu"}


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"dtype": "float32", "verify": DIFFERS}, "3 of 8 windows differ"),
        ({"verify_failed": ["out of memory"]}, "verify ended early, after 0 windows: out of memory"),
        ({"verify": DIFFERS | {"differing_windows": 0}, "verify_failed": ["one", "two"]}, "after 8 windows: one; two"),
        ({"verify": DIFFERS | {"differing_windows": 0}}, ""),
    ],
)
def test_no_form_of_a_value_hides_that_verify_found_a_difference_or_ended_early(tmp_path, entries, sentence):
    nats = np.linspace(-10, -120, 12)
    tokens = range(3, 39, 3)

    def docs(factor):
        return {name: documents(factor * nats, tokens) for name in ("sotu", "news")}

    hf(tmp_path / "results", docs=docs(1))
    ours(tmp_path / "results", docs=docs(1.5), estimator="elbo")
    for n, more in enumerate(({}, {"rule": "greedy:k=2"}, {"spec": {"cache": "dual"}}), 1):
        file = ours(tmp_path / "results", docs=docs(1 + 0.1 * n), nfe=1 / n, duel=entries, **more)
    put(file, "results.choice", {"acc,none": 0.5, "acc_stderr,none": 0.125})
    out = tmp_path / "out"

    report([str(tmp_path / "results"), "--page", "--out", str(out)])

    texts = {file.name: file.read_text() for file in out.iterdir()}
    kinds = {name.partition("_")[0].removesuffix(".tex") for name in texts if name.endswith(".tex")}
    assert kinds == {"perplexity", "gap", "methods", "ranks", "cache", "pairs", "rules", "accuracy"}
    assert "gap_closed.tex" in texts
    for name, text in texts.items():
        if sentence:
            assert sentence in text, name
        else:
            assert "verify" not in text, name
    assert ("in doubt" in texts["report.md"]) == ("differ" in sentence), "not for a check that ended early"
    for task in json.loads(texts["report.json"])["tasks"].values():
        for row in task["rows"]:
            assert bool(row["doubts"]) == (row["estimator"] == "duel" and bool(sentence))
    for line in csv.DictReader(texts["report.csv"].splitlines()):
        assert (sentence in line["doubts"]) == (line["estimator"] == "duel" or not sentence)


def test_no_gap_and_no_headline_hides_a_doubt_in_another_row(tmp_path):
    """The baseline has no row in the tables of gaps, which are computed from its value."""
    nats = np.linspace(-10, -120, 12)
    tokens = range(3, 39, 3)

    def docs(factor):
        return {name: documents(factor * nats, tokens) for name in ("sotu", "news")}

    def doubt(differing):
        return {"decisions_checked": 8, "decisions_differing": differing}

    ours(tmp_path / "ar", docs=docs(1), estimator="ar", rule=None, model="ARM", duel=doubt(1))
    ours(tmp_path / "results", docs=docs(1.5), estimator="elbo", duel=doubt(2))
    ours(tmp_path / "results", docs=docs(1.1), duel=doubt(3))
    ours(tmp_path / "results", docs=docs(1.05), duel=doubt(4), rule="greedy:k=2")
    ours(tmp_path / "results", docs=docs(1.2), duel=doubt(5), spec={"cache": "dual"})
    out = tmp_path / "out"

    report([str(tmp_path / "results"), "--ar", str(tmp_path / "ar"), "--out", str(out)])

    computed_from = {"gap_sotu": "12345", "gap_news": "12345", "gap_closed": "1234", "cache_sotu": "35"}
    for name, runs in computed_from.items():
        text = (out / f"{name}.tex").read_text()
        assert set(re.findall(r"(\d) of 8 decisions", text)) == set(runs), name
    _, _, below_head = (out / "gap_sotu.tex").read_text().partition("\\midrule\n")
    row, _, _ = below_head.partition("\n")
    assert "greedy:k=2" not in row
    assert row.count(r"\textsuperscript{") == 4, row  # at the ELBO, at DUEL, and at the gap of each
    headlines = (out / "report.md").read_text()
    for start, end in ((" against ", " for ARM"), ("Its lowest exact value: greedy:k=2", "\n")):
        value, _, _ = headlines.partition(start)[2].partition(end)
        assert "in doubt" in value


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_pdflatex_takes_every_table(tmp_path):
    """The tables of a report, and one of names in markup."""
    nats = np.linspace(-10, -120, 12)
    tokens = range(3, 39, 3)
    hf(tmp_path / "results", docs={"a_b": documents(nats, tokens)})
    for factor, more in ((1.2, {"estimator": "elbo"}), (1.1, {}), (1.15, {"rule": "threshold:mu=0.5"})):
        docs = documents(factor * nats, tokens)
        ours(tmp_path / "results", docs={"a_b": docs, "50%": docs}, nfe=factor, **more)
    out = tmp_path / "out"

    report([str(tmp_path / "results"), "--published", "paper", "--out", str(out)])

    (out / "names.tex").write_text(table().latex())
    files = sorted(out.glob("*.tex"))
    assert len(files) > 6
    inputs = "\n\n".join(rf"\input{{\detokenize{{{file.name}}}}}" for file in files)
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{inputs}\end{{document}}"
    typeset(out, text)


def typeset(folder, text):
    """What pdflatex prints about a text."""
    (folder / "main.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_a_wide_table_fits_as_the_documentation_says(tmp_path):
    """Every table of the bundled report fits; the widest is too wide without the recipe."""
    [recipe] = re.findall("```latex\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    preamble, body = recipe.split("\n\n")
    cases = [(r"\input{gap_sotu}", True)]
    for file in sorted((demo.FOLDER / "report").glob("*.tex")):
        shutil.copy(file, tmp_path)
        cases.append((body.replace("gap_sotu", file.stem), False))
    for wrapped, is_too_wide in cases:
        text = f"\\documentclass{{article}}\n{preamble}\n\\begin{{document}}\n{wrapped}\n\\end{{document}}\n"
        assert ("Overfull" in typeset(tmp_path, text)) == is_too_wide
