"""The leaderboard: what may share a column, what has a rank, what is shown, and that names are text everywhere."""

import csv
import importlib
import io
import json
import math
import re
import shlex

import markupsafe
import pytest
from lm_eval._cli import HarnessCLI
from results import documents, edit, hf, ours, put, trace

from lm_eval_duel.console.command_line import one_line
from lm_eval_duel.errors import UsageError
from lm_eval_duel.options import Options
from lm_eval_duel.results import as_json, leaderboard, published
from lm_eval_duel.results import documents as view
from lm_eval_duel.results.leaderboard import collect, console, markdown, parse
from lm_eval_duel.results.leaderboard import csv as to_csv

TEXTS = [f"text {n}" for n in range(3)]
TOKENS, NATS = (20, 40, 30), (-60, -150, -90)
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


def made(folder, model="A", nats=NATS, texts=TEXTS, **more):
    return ours(folder, model=model, **{"docs": {"sotu": docs(nats, texts)}} | more)


def board(*arguments):
    return collect(parse([*map(str, arguments), "--out", "unused"]))


# ---------------------------------------------------------------- columns


def members(content):
    """The models of each column."""
    return ["".join(row.named.model for row in content.rows if c.id in row.results) for c in content.columns]


def test_unequal_documents_and_windows_never_share_a_column(tmp_path):
    made(tmp_path)
    made(tmp_path, "B")
    made(tmp_path, "Few", NATS[:2])
    made(tmp_path, "Other", texts=["x y", "x z", "z z"])
    made(tmp_path, "Short", duel={"row_capacity": 10})
    content = board(tmp_path, "--metric", "word_perplexity")
    assert members(content) == ["AB", "Few", "Other", "Short"]
    assert len({column.label for column in content.columns}) == 4
    assert [bool(column.difference) for column in content.columns] == [False, True, True, True]
    assert all(row.rank is None for row in content.rows if row.named.model not in "AB")


def test_rows_of_one_name_in_different_columns_have_different_labels(tmp_path):
    made(tmp_path)
    made(tmp_path, docs={"news": docs(NATS)}, spec={"max_length": "513"})
    labels = {row.label for row in board(tmp_path).rows}
    assert labels == {f"DUEL, greedy, block 4, max_length={length}" for length in (513, 1025)}


def test_perplexity_per_token_needs_one_tokenizer(tmp_path):
    made(tmp_path)
    made(tmp_path, "B")
    assert board(tmp_path).metric == "token_perplexity"
    made(tmp_path, "C", docs={"sotu": documents(NATS, (25, 45, 35), TEXTS)}, spec={"tokenizer": "another"})
    content = board(tmp_path)
    assert content.metric == "word_perplexity" and members(content) == ["ABC"]
    assert members(board(tmp_path, "--metric", "token_perplexity")) == ["AB", "C"]


# ---------------------------------------------------------------- ranks and means


SEVERAL = {  # (model, estimator, rule, cache): the nats of two tasks
    ("A", "duel", "greedy", "none"): ((-60, -150, -90), (-50, -40, -80)),
    ("B", "duel", "greedy", "none"): ((-70, -140, -95), (-40, -35, -60)),
    ("A", "duel", "greedy", "dual"): ((-80, -150, -90), (-50, -50, -80)),
    ("E", "duel", "greedy", "none"): ((-55, -130, -99), (-41, -30, -70)),  # an estimate
    ("AR", "ar", "", ""): ((-50, -100, -80), (-30, -30, -50)),
    ("A", "oracle", "", "none"): ((-1, -2, -3), (-1, -2, -3)),
    ("A", "elbo", "", "none"): ((-30, -30, -30), (-9, -9, -9)),
}


def several(folder):
    for (model, estimator, _, cache), both in SEVERAL.items():
        given = {"model": model, "docs": dict(zip(("sotu", "news"), map(docs, both), strict=True))}
        if estimator == "ar":
            hf(folder, **given)
            continue
        file = ours(folder, **given, estimator=estimator, spec={"cache": cache} if cache == "dual" else {})
        for task in ("sotu", "news") if model == "E" else ():
            put(file, f"config.duel.tasks.{task}.values.duel.stderr", 1.5)
    return folder


def test_only_likelihoods_have_ranks_and_means_are_over_all_tasks(tmp_path):
    content = board(several(tmp_path))
    printed = console(content)
    rows = {(row.named.model, row.named.estimator, row.rule, row.cache): row for row in content.rows}
    values = {name: [math.exp(-sum(nats) / sum(TOKENS)) for nats in both] for name, both in SEVERAL.items()}
    means = {name: math.sqrt(a * b) for name, (a, b) in values.items()}
    ranked = [name for name in SEVERAL if name[1] in ("duel", "ar")]
    assert rows.keys() == SEVERAL.keys()
    for name, row in rows.items():
        assert row.mean == pytest.approx(means[name], rel=1e-9)
        assert all(f" {value:.2f}" in printed for value in (means[name], *values[name]))
        if name not in ranked:
            assert row.rank is None and row.mean_rank is None, "although its numbers are the lowest"
            continue
        assert row.rank == 1 + sum(means[other] < means[name] for other in ranked)
        places = [1 + sum(values[other][n] < values[name][n] for other in ranked) for n in (0, 1)]
        assert row.mean_rank == sum(places) / 2
    assert rows["E", "duel", "greedy", "none"].kind == "estimate"
    assert content.ar == "AR", "the only autoregressive model is the one of the gaps"


def test_the_plot_is_logarithmic_for_perplexities_and_has_intervals(tmp_path):
    several(tmp_path)
    for metric, scale in (("token_perplexity", math.log), ("bits_per_byte", float)):
        plot = leaderboard._plot(board(tmp_path, "--metric", metric))
        values, places = [scale(row.main) for row in plot["rows"]], [place for place, *_ in plot["rows"].values()]
        slope = (places[-1] - places[0]) / (values[-1] - values[0])
        assert places == pytest.approx([places[0] + slope * (value - values[0]) for value in values], abs=0.3)
        assert leaderboard.MARGIN <= min(places) < max(places) <= leaderboard.WIDTH - leaderboard.MARGIN
    made(tmp_path / "one")
    made(tmp_path / "one", "B", (-70, -140, -95))
    assert all(low < place < high for place, low, high in leaderboard._plot(board(tmp_path / "one"))["rows"].values())


@pytest.mark.parametrize("low, high", [(29, 121), (31.2, 31.9), (1.541, 1.568), (0.02, 900), (4.9, 6.1), (97, 104)])
def test_ticks_are_few_and_round(low, high):
    ticks = leaderboard._ticks(low, high)
    assert 2 <= len(ticks) <= leaderboard.MOST_TICKS and [low, *ticks, high] == sorted([low, *{*ticks}, high])
    assert all(math.isclose(tick, float(f"{tick:.3g}")) for tick in ticks)


# ---------------------------------------------------------------- names are text


def named(folder, name):
    """A results file with a name in every place that one can stand."""

    def rename(body):
        duel = body["config"]["duel"]
        duel["pretrained"] = body["config"]["model_args"]["pretrained"] = body["config"]["fingerprint"] = name
        duel["versions"] = {name: name}
        for part in (*(body[key] for key in ("results", "configs", "versions", "n-samples")), duel["tasks"]):
            part[name] = part.pop("sotu")

    edit(made(folder, spec={"note": name, "weights": name}), rename)


def test_names_are_text_in_every_output(tmp_path):
    for name in NAMES:
        named(tmp_path, name)
    figure = ("MDLM", "duel", NAMES[0], "token_perplexity", "3", NAMES[2])
    with (tmp_path / "published.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([published.NEEDED, figure])
    content = board(tmp_path, "--published", tmp_path / "published.csv", "--title", NAMES[0])
    shown, text = leaderboard.html(content), markdown(content)
    for name in NAMES:
        assert str(markupsafe.escape(one_line(name))) in shown, f"{name!r} is shown as it is"
        assert "<" not in name or name not in shown
    widths = {line.count("|") for line in text.splitlines() if re.fullmatch(r"[|: -]+", line)}
    for line in text.splitlines():
        assert not re.search(r"(?<!\\)[$<](?=[a-z/!])|(?<!\\)\[f\]\(", line), line
        assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) in widths, line
    for row in csv.reader(io.StringIO(to_csv(as_json.board(content)))):
        assert not [cell for cell in row if cell.startswith(("=", "@", "+", "\t")) or re.match(r"-[^\d]|-1\+", cell)]


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    "given, config, seeded",
    [
        ({"pretrained": "demo-mdm", "rule": "threshold", "mu": 0.5, "trace": "/home/somebody/x.jsonl"}, {}, False),
        ({"pretrained": "demo-mdm", "rule": "klass", "mu": "0.9", "nu": 0.1}, {"torch_seed": 7}, True),
    ],
)
def test_the_command_of_a_row_gives_the_options_of_its_run(given, config, seeded, tmp_path, monkeypatch):
    """The command is read by the program itself; its model args must be those of the results file."""
    config = {"limit": 3.0, "random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234} | config
    file = edit(made(tmp_path), lambda body: body["config"].update(config, model_args=given))
    [[command]] = [row.commands for row in board(file).rows]
    words, seen = shlex.split(command), []
    assert words[:2] == ["lm-eval-duel", "run"] and "somebody" not in command and ("--seed" in words) == seeded
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: seen.append(args))
    importlib.import_module("lm_eval_duel.cli.run").main(words[2:])
    wanted = {key: value for key, value in given.items() if key != "trace"}
    assert str(Options.parse(seen[0].model_args)) == str(Options.parse(wanted))
    assert seen[0].tasks in ("sotu", ["sotu"]) and seen[0].limit == 3.0


# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize(
    "lines, message",
    [
        ("model,estimator,task,metric,value,sauce\n", "no column source"),
        ("H\nA,duel,t,token_perplexity,x,s\n", "line 2: could not convert"),
        ("H\nA,duel,t,ppl,3,s\n", "line 2: Unknown metric 'ppl'"),
        ("H\nA,dule,t,token_perplexity,3,s\n", "line 2: Unknown estimator 'dule'. Did you mean duel"),
    ],
)
def test_a_wrong_file_of_published_figures(tmp_path, lines, message):
    made(tmp_path)
    file = tmp_path / "figures.csv"
    file.write_text(lines.replace("H\n", "model,estimator,task,metric,value,source\n"))
    with pytest.raises(UsageError, match=message):
        parse([str(tmp_path), "--published", str(file), "--out", "unused"])


# ---------------------------------------------------------------- documents


def test_windows_of_a_document_are_joined_and_an_infinite_cost_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "token_texts", lambda ids, tokenizer: [f"{n} " for n in ids])
    result, first = made(tmp_path), {"task": "sotu", "doc": 0, "request": 0, "window": 0, "values": {}}
    first |= {"ids": [5, 6, 7, 8], "starts": [0, 2], "reveal_steps": [0, 1, 1, 0], "token_logprobs": [-0.5, -1, -2, -4]}
    costly = {"window": 1, "ids": [9, 9], "starts": [0], "reveal_steps": [1, 0], "token_logprobs": [-1.0, None]}
    path = trace(tmp_path / "trace.jsonl", result, [first, first | costly])
    content = board(result, "--traces", path, "--tokenizer", "demo-mdm")
    [document] = content.documents
    assert (document["task"], document["number"]) == ("sotu", 0)
    assert document["pieces"] == [["5 ", "6 ", "7 ", "8 ", "9 ", "9 "]]
    [order] = document["orders"]
    assert order["starts"] == [0, 2, 4] and order["steps"] == [0, 1, 1, 0, 1, 0]
    assert order["nats"] == [0.5, 1.0, 2.0, 4.0, 1.0, math.inf]
    data = re.search(r'id="documents-data">(.*?)</script>', leaderboard.html(content))[1]
    assert json.loads(data)[0]["orders"][0]["nats"][-1] is None
