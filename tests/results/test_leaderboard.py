"""The leaderboard: what may share a column, what has a rank, what is shown, and that names are text everywhere."""

import csv
import dataclasses
import html.parser
import importlib
import importlib.util
import io
import json
import math
import re
import shlex

import pytest
from lm_eval._cli import HarnessCLI
from results import documents, edit, hf, ours, trace

from lm_eval_duel.cli.main import main
from lm_eval_duel.console.tables import one_line
from lm_eval_duel.errors import UsageError
from lm_eval_duel.options import Options
from lm_eval_duel.results import as_json, page
from lm_eval_duel.results import documents as view
from lm_eval_duel.results.leaderboard import collect, markdown, parse, write
from lm_eval_duel.results.leaderboard import csv as to_csv
from lm_eval_duel.results.samples import Traces

TEXTS = [f"text {n}" for n in range(3)]
TOKENS = (20, 40, 30)
NAMES = (  # each in some format markup, a formula, or the end of a cell
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a|b `c` *d* _e_ [f](http://g) $h$ \\i",
    "=HYPERLINK(1)",
    "@SUM(1)",
    "-1+1",
    r"\input{x} & % # $ ^ ~ { } \\ [2pt]",
    "[2pt] *",
    "new\nline\ttab\x00nul",
    "\ud83d half a character",
    "{{ 1234 * 3 }} {% raw %}",
    "1. first #",
)


def docs(nats, texts=TEXTS):
    return documents(nats, TOKENS[: len(nats)], texts[: len(nats)])


def board(*arguments, out="unused"):
    return collect(parse([*map(str, arguments), "--out", str(out)]))


def perplexity(nats, tokens=TOKENS):
    return math.exp(-sum(nats) / sum(tokens[: len(nats)]))


def shown_as(*arguments):
    """leaderboard.json."""
    return as_json.board(board(*arguments))


def by_label(content):
    return {(row["model"], row["estimator"], row["rule"], row["cache"]): row for row in content["rows"]}


# ---------------------------------------------------------------- columns


def members(content):
    """The models of each column."""
    return ["".join(r["model"] for r in content["rows"] if c["id"] in r["cells"]) for c in content["columns"]]


def test_unequal_documents_and_windows_never_share_a_column(tmp_path):
    ours(tmp_path, model="A", docs={"sotu": docs((-60, -150, -90))})
    ours(tmp_path, model="B", docs={"sotu": docs((-70, -160, -95))})
    ours(tmp_path, model="Few", docs={"sotu": docs((-70, -160))})
    ours(tmp_path, model="Other", docs={"sotu": docs((-70, -160, -95), ["x y", "x z", "z z"])})
    ours(tmp_path, model="Short", docs={"sotu": docs((-7, -16, -9))}, duel={"row_capacity": 10})
    content = shown_as(tmp_path, "--metric", "word_perplexity")
    assert members(content) == ["AB", "Few", "Other", "Short"]
    labels = [column["label"] for column in content["columns"]]
    assert len(set(labels)) == 4, "and the columns are told apart"
    assert [bool(column["apart"]) for column in content["columns"]] == [False, True, True, True]
    assert all(row["rank"] is None for row in content["rows"] if row["model"] not in "AB")


def test_perplexity_per_token_needs_one_tokenizer(tmp_path):
    ours(tmp_path, model="A", docs={"sotu": docs((-60, -150, -90))})
    ours(tmp_path, model="B", docs={"sotu": docs((-70, -160, -95))})
    assert shown_as(tmp_path)["metric"] == "token_perplexity"
    other = documents((-70, -160, -95), (25, 45, 35), TEXTS)
    ours(tmp_path, model="C", docs={"sotu": other}, spec={"tokenizer": "another"})
    content = shown_as(tmp_path)
    assert content["metric"] == "word_perplexity" and len(content["columns"]) == 1
    assert members(shown_as(tmp_path, "--metric", "token_perplexity")) == ["AB", "C"]


# ---------------------------------------------------------------- ranks and means


def several(folder):
    """Two tasks; bounds, an oracle, an estimate, a cached sampler and two autoregressive models."""
    nats = {"A": ((-60, -150, -90), (-50, -40, -80)), "B": ((-70, -140, -95), (-40, -35, -60))}
    for model, both in nats.items():
        ours(folder, model=model, docs=dict(zip(("sotu", "news"), map(docs, both), strict=True)))
    ours(folder, model="A", docs={"sotu": docs((-1, -2, -3)), "news": docs((-1, -2, -3))}, estimator="oracle")
    ours(folder, model="A", docs={"sotu": docs((-61, -151, -91)), "news": docs((-9, -9, -9))}, estimator="elbo")
    ours(
        folder, model="A", docs={"sotu": docs((-80, -150, -90)), "news": docs((-50, -50, -80))}, spec={"cache": "dual"}
    )
    estimate = {"sotu": docs((-55, -130, -99)), "news": docs((-41, -30, -70))}
    edit(ours(folder, model="E", docs=estimate), with_error)
    hf(folder, model="AR", docs={"sotu": docs((-50, -100, -80)), "news": docs((-30, -30, -50))})
    return folder


def with_error(body):
    for task in body["config"]["duel"]["tasks"].values():
        task["values"]["duel"]["stderr"] = 1.5


def test_only_likelihoods_have_ranks_and_means_are_over_all_tasks(tmp_path):
    content = shown_as(several(tmp_path))
    rows = by_label(content)
    nats = {
        ("A", "duel", "greedy", "none"): ((-60, -150, -90), (-50, -40, -80)),
        ("B", "duel", "greedy", "none"): ((-70, -140, -95), (-40, -35, -60)),
        ("A", "duel", "greedy", "dual"): ((-80, -150, -90), (-50, -50, -80)),
        ("E", "duel", "greedy", "none"): ((-55, -130, -99), (-41, -30, -70)),
        ("AR", "ar", "", ""): ((-50, -100, -80), (-30, -30, -50)),
    }
    expected = {name: tuple(map(perplexity, both)) for name, both in nats.items()}
    means = {name: math.sqrt(a * b) for name, (a, b) in expected.items()}
    for name, mean in means.items():
        assert rows[name]["mean"] == pytest.approx(mean, rel=1e-9)
        assert rows[name]["rank"] == 1 + sum(other < mean for other in means.values())
        places = [1 + sum(v[n] < expected[name][n] for v in expected.values()) for n in (0, 1)]
        assert rows[name]["mean_rank"] == sum(places) / 2
    for name in (("A", "oracle", "", "none"), ("A", "elbo", "", "none")):
        assert rows[name]["rank"] is None and rows[name]["mean_rank"] is None, "although its numbers are the lowest"
        assert rows[name]["mean"] < min(means.values())
    assert rows["E", "duel", "greedy", "none"]["kind"] == "estimate"
    assert content["ar"] == "AR", "the only autoregressive model is the one of the gaps"


# ---------------------------------------------------------------- names are text


def parsed(content):
    """The tags, attributes and text of a page."""
    page, tags, attributes, texts = html.parser.HTMLParser(), [], set(), []
    page.handle_starttag = lambda tag, attrs: (tags.append(tag), attributes.update(name for name, _ in attrs))
    page.handle_data = texts.append
    page.feed(content)
    page.close()
    return tags, attributes, "".join(texts)


def named(folder, names):
    """A results file with a name in every place that one can stand, and a page of it."""
    for name in names:
        file = ours(folder, model="x", docs={"sotu": docs((-60, -150, -90))}, spec={"note": name, "weights": name})
        edit(file, lambda body, name=name: rename(body, name))
    figures = io.StringIO()
    writer = csv.writer(figures)
    writer.writerow(["model", "estimator", "task", "metric", "value", "source", "rule", "note"])
    for name in names:
        clean = name.replace("\ud83d", "").replace("\n", " ")
        writer.writerow([clean, "duel", clean, "token_perplexity", "3", clean, clean, clean])
    (folder / "published.csv").write_text(figures.getvalue(), encoding="utf-8")
    return board(folder, "--published", folder / "published.csv", "--title", names[0])


def rename(body, name):
    body["config"]["duel"]["pretrained"] = body["config"]["model_args"]["pretrained"] = name
    body["config"]["duel"]["versions"] = {name: name}
    body["config"]["fingerprint"] = name
    for part in (
        *(body[key] for key in ("results", "configs", "versions", "n-samples")),
        body["config"]["duel"]["tasks"],
    ):
        part[name] = part.pop("sotu")


def test_names_are_text_in_every_output(tmp_path):
    content = named(tmp_path, NAMES)
    plain = named(tmp_path / "plain", [f"plain {n}" for n in range(len(NAMES))])
    (tags, attributes, words), (plain_tags, plain_attributes, _) = (parsed(page.html(b)) for b in (content, plain))
    assert set(tags) <= {*plain_tags, "wbr"} and tags.count("script") == plain_tags.count("script")
    assert attributes <= plain_attributes
    for name in NAMES:
        assert one_line(name) in words, f"{name!r} is shown as it is"
    assert str(1234 * 3) not in words
    text = markdown(content)
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))
            assert not re.search(r"(?<!\\)[$<](?=[a-z/!])|(?<!\\)\[f\]\(", line), line
            assert len(cells) in widths(text), line
    for row in csv.reader(io.StringIO(to_csv(as_json.board(content)))):
        assert not [cell for cell in row if cell.startswith(("=", "@", "+", "\t")) or re.match(r"-[^\d]|-1\+", cell)]


def widths(text):
    """The numbers of cells of the tables' heads."""
    return {len(line.split("|")) for line in text.splitlines() if re.fullmatch(r"[|: -]+", line)}


def test_names_cannot_leave_the_folder(tmp_path):
    for name in ("../../../up", "/root/x", "..", "a/../..", "C:\\x"):
        edit(ours(tmp_path / "in", docs={"sotu": docs((-60, -150, -90))}), lambda body, name=name: rename(body, name))
    out = tmp_path / "a" / "site"
    options = parse([str(tmp_path / "in"), "--out", str(out)])
    content = collect(options)
    before = set(tmp_path.rglob("*"))
    names = write(content, options)
    assert all(out in path.parents or path in (out, out.parent) for path in set(tmp_path.rglob("*")) - before)
    assert all((out / name).is_file() for name in names)


# ---------------------------------------------------------------- commands


def test_the_command_of_a_row_gives_the_options_of_its_run(tmp_path, monkeypatch):
    """The command is read by the program itself; its model args must be those of the results file."""
    seen, seeds = [], {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234, "batch_size": 1}
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: seen.append(args))
    for given, more in (
        (
            {"pretrained": "demo-mdm", "rule": "threshold", "mu": 0.5, "trace": "/home/somebody/x.jsonl"},
            {"limit": 3.0, **seeds},
        ),
        (
            {"pretrained": "demo-mdm", "rule": "klass", "mu": "0.9", "nu": 0.1},
            {"limit": 0.5, **seeds, "torch_seed": 7} | {"batch_size": "auto"},
        ),
    ):
        file = ours(tmp_path, docs={"sotu": docs((-60, -150, -90))})
        edit(file, lambda body, given=given, more=more: body["config"].update(more, model_args=given))
        (row,) = board(file).rows
        (command,) = row.commands
        words = shlex.split(command)
        assert words[:2] == ["lm-eval-duel", "run"] and "somebody" not in command
        assert ("--seed" in words, "--batch_size" in words) == ("torch_seed" in more and more["torch_seed"] == 7,) * 2
        importlib.import_module("lm_eval_duel.cli.run").main(words[2:])
        parsed = seen.pop()
        wanted = {key: value for key, value in given.items() if key != "trace"}
        assert str(Options.parse(parsed.model_args)) == str(Options.parse(wanted))
        assert parsed.tasks in ("sotu", ["sotu"]) and parsed.limit == more.get("limit")


# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize(
    "lines, message",
    [
        ("model,estimator,task,metric,value,sauce\n", "no column source"),
        ("H\nA,duel,t,token_perplexity,x,s\n", "line 2: could not convert"),
        ("H\nA,dule,t,token_perplexity,3,s\n", "line 2: Unknown estimator 'dule'. Did you mean duel"),
    ],
)
def test_a_wrong_file_of_published_figures(tmp_path, lines, message):
    ours(tmp_path, docs={"sotu": docs((-60, -150, -90))})
    file = tmp_path / "figures.csv"
    file.write_text(lines.replace("H\n", "model,estimator,task,metric,value,source\n"))
    with pytest.raises(UsageError, match=message):
        parse([str(tmp_path), "--published", str(file), "--out", "unused"])


# ---------------------------------------------------------------- documents


def window(steps, ids=(5, 6, 7, 8), **more):
    line = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "ids": [*ids], "starts": [0, 2]}
    line |= {"reveal_steps": [*steps], "token_logprobs": [-0.5, -1.0, -2.0, -4.0][: len(ids)], "values": {}}
    return line | more


def shown(folder, *records, most=3):
    result = ours(folder, docs={"sotu": docs((-60, -150, -90))})
    path = trace(folder / f"{len(list(folder.iterdir()))}.jsonl", result, records)
    return view.collect(Traces([path]), {}, most, lambda name, ids: [f"{n} " for n in ids])


def test_windows_of_a_document_are_joined_and_an_infinite_cost_is_null(tmp_path):
    costly = window([1, 0], ids=(9, 9), window=1, starts=[0], token_logprobs=[-1.0, None])
    (document,), notes = shown(tmp_path, window([0, 1, 1, 0]), costly)
    assert notes == [] and document["pieces"] == [["5 ", "6 ", "7 ", "8 ", "9 ", "9 "]]
    (order,) = document["orders"]
    assert order["starts"] == [0, 2, 4] and order["steps"] == [0, 1, 1, 0, 1, 0]
    assert order["nats"] == [0.5, 1.0, 2.0, 4.0, 1.0, math.inf]
    ours(tmp_path / "in", docs={"sotu": docs((-60, -150, -90))})
    content = dataclasses.replace(board(tmp_path / "in"), documents=[document])
    data = re.search(r'id="documents-data">(.*?)</script>', page.html(content))[1]
    assert json.loads(data)[0]["orders"][0]["nats"][-1] is None


# ---------------------------------------------------------------- files


def test_only_files_of_a_leaderboard_are_replaced(tmp_path, capsys):
    out = tmp_path / "site"
    main(["leaderboard", str(several(tmp_path / "in")), "--out", str(out)])
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == set(json.loads((out / "leaderboard.json").read_text())["files"])
    (out / "mine.txt").write_text("x")
    main(["leaderboard", str(tmp_path / "in" / "B"), "--out", str(out)])
    assert (out / "mine.txt").read_text() == "x"
