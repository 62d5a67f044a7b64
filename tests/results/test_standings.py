"""Results over tasks and the page: what may share a table, what has a rank, what is shown, and that names are text."""

import csv
import importlib
import io
import json
import math
import re
import shlex

import markupsafe
import numpy as np
import pytest
from lm_eval._cli import HarnessCLI
from results import GONE, documents, edit, hf, ours, put, trace

from lm_eval_duel.cli.report import parse
from lm_eval_duel.console.command_line import one_line
from lm_eval_duel.errors import UsageError
from lm_eval_duel.options import Options
from lm_eval_duel.results import files, page, published, rerun, traced
from lm_eval_duel.results.report import collect, markdown

TEXTS = [f"text {n}" for n in range(3)]
TOKENS = (20, 40, 30)
NATS = (-60, -150, -90)
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
    return collect(parse([*map(str, arguments), "--page", "--out", "unused"]))


# ---------------------------------------------------------------- what is kept apart


def models_of_tables(content):
    """The models of each table, as one word."""
    models = []
    for task in content.tasks.values():
        models.append("".join(compared.row.model for compared in task.rows))
    return models


def test_unequal_documents_and_windows_never_share_a_table(tmp_path):
    made(tmp_path)
    made(tmp_path, "B")
    made(tmp_path, "Few", NATS[:2])
    made(tmp_path, "Other", texts=["x y", "x z", "z z"])
    made(tmp_path, "Short", duel={"row_capacity": 10})

    content = board(tmp_path, "--metric", "word_perplexity", "--apart")

    assert models_of_tables(content) == ["AB", "Few", "Other", "Short"]
    assert list(content.tasks) == ["sotu", "sotu (2)", "sotu (3)", "sotu (4)"]
    for name in ("sotu (2)", "sotu (3)", "sotu (4)"):
        assert any(note.fact.startswith(f"{name}: ") for note in content.notes), "it is said why"
    ranks = {row.method.named.model: row.rank for row in content.standings.rows}
    assert ranks == {"A": 1, "B": 1, "Few": None, "Other": None, "Short": None}


def test_two_results_of_one_model_and_task_are_two_rows(tmp_path):
    """Of equal names, whatever their specs differ in; and of accuracies, too."""
    made(tmp_path)
    made(tmp_path, nats=(-61, -150, -90), spec={"note": "another"})
    for accuracy in (0.5, 0.6):
        put(made(tmp_path, "C"), "results.choice", {"acc,none": accuracy})

    methods = [row.method for row in board(tmp_path).standings.rows]

    assert [method.named.model for method in methods].count("A") == 2
    accuracies = set()
    for method in methods:
        if "choice" in method.scored:
            accuracy, _ = method.scored["choice"].scores("choice")["acc"]
            accuracies.add(accuracy)
    assert accuracies == {0.5, 0.6}


def test_a_single_likelihood_has_no_rank(tmp_path):
    for estimator, ranks in (("duel", {None}), ("elbo", {None}), ("mixture", {None, 1, 2})):
        ours(tmp_path, docs={"sotu": documents(NATS, TOKENS)}, estimator=estimator)
        content = collect(parse([str(tmp_path), "--out", "unused"]))
        assert {row.rank for row in content.standings.rows} <= ranks
        assert ("are ranked by" in page.about(content)) == (len(ranks) > 1)


def test_methods_of_one_name_in_different_tasks_have_different_labels(tmp_path):
    made(tmp_path)
    made(tmp_path, docs={"news": docs(NATS)}, spec={"max_length": "513"})

    labels = {row.method.label for row in board(tmp_path).standings.rows}

    assert labels == {"DUEL, greedy, block 4, max_length=513", "DUEL, greedy, block 4, max_length=1025"}


def test_an_oracle_of_one_task_neither_prevents_means_nor_has_a_rank(tmp_path):
    for model in "AB":
        made(tmp_path, model, docs={"sotu": docs(NATS), "news": docs(NATS)})
    made(tmp_path, estimator="oracle")

    standings = board(tmp_path).standings

    assert sorted(standings.mean_of) == ["news", "sotu"]
    ranks = {}
    for row in standings.rows:
        ranks[row.method.named.model, row.method.named.estimator] = row.rank
    assert ranks == {("A", "duel"): 1, ("B", "duel"): 1, ("A", "oracle"): None}


def test_each_task_keeps_its_unit(tmp_path):
    """One task without token perplexity changes no other one; there is no mean over two units."""
    made(tmp_path)
    made(tmp_path, "B")
    for model in "AB":
        values = {"token_perplexity": 12.5, "byte_perplexity": 12.5, "bits_per_byte": 3.6}
        file = ours(tmp_path, {"proteins": values}, model=model)
        put(file, "results.proteins.token_perplexity,none", GONE)

    content = board(tmp_path)
    shown = page.html(content, None)

    metrics = {name: task.metric for name, task in content.tasks.items()}
    assert metrics == {"sotu": "token_perplexity", "proteins": "byte_perplexity"}
    assert content.standings.mean_of == []
    assert content.standings.by == "sotu"
    assert "sotu ppl/token" in shown
    assert "proteins ppl/byte" in shown


def test_accuracies_are_on_the_page(tmp_path):
    def more(body):
        body["results"]["choice"] = {"acc,none": 0.5, "acc_stderr,none": 0.1}
        body["configs"]["choice"] = {"output_type": "multiple_choice"}

    edit(made(tmp_path), more)

    shown = page.html(board(tmp_path), None)

    assert "choice acc" in shown
    assert "0.5000 ±\u00a00.1000" in shown


def test_a_page_of_accuracies_alone_says_so(tmp_path):
    def only(body):
        body["results"] = {"choice": {"acc,none": 0.5, "acc_stderr,none": 0.1}}
        body["configs"] = {"choice": {"output_type": "multiple_choice"}}
        body["config"]["duel"]["tasks"] = {}

    edit(made(tmp_path), only)

    content = board(tmp_path)
    shown = page.html(content, None)

    assert "0.5000 ±\u00a00.1000" in shown
    assert "no result has a perplexity" in shown
    assert "lower is better" not in shown
    assert all(row.rank is None for row in content.standings.rows)


def test_advice_is_not_on_the_page(tmp_path):
    """What the person at the console should do is printed, and on the page there is no path of that machine."""
    values = {"sotu": {"greedy:k=1": 8.0, "mixture": 9.0}}
    file = made(tmp_path / "somebody", estimator="oracle", values=values)
    put(file, "config.duel.trace", str(tmp_path / "gone.jsonl"))

    content = board(tmp_path)
    text = markdown(content)
    shown = page.html(content, None)

    assert "--traces" in text
    assert "estimator=ar" in text
    without_code = re.sub("<style>.*?</style>|<script>.*?</script>|<pre.*?</pre>", "", shown, flags=re.DOTALL)
    for advice in ("--", "trace=FILE", "estimator=ar", str(tmp_path)):
        assert advice not in without_code


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
    """Their results files."""
    for (model, estimator, _, cache), (sotu, news) in SEVERAL.items():
        documents_of_tasks = {"sotu": docs(sotu), "news": docs(news)}
        if estimator == "ar":
            hf(folder, model=model, docs=documents_of_tasks)
            continue
        spec = {"cache": "dual"} if cache == "dual" else {}
        file = ours(folder, model=model, docs=documents_of_tasks, estimator=estimator, spec=spec)
        if model == "E":
            put(file, "config.duel.tasks.sotu.values.duel.stderr", 1.5)
            put(file, "config.duel.tasks.news.values.duel.stderr", 1.5)
    return folder


def rank(name, values, ranked):
    """The place of a value among those of the methods that have a rank: 1 for the lowest."""
    return 1 + sum(values[other] < values[name] for other in ranked)


def test_only_likelihoods_have_ranks_and_means_are_over_all_tasks(tmp_path):
    """The mean is the geometric one of both perplexities; the mean rank that of the ranks in each task."""
    sotu = {}
    news = {}
    means = {}
    for name, (nats_of_sotu, nats_of_news) in SEVERAL.items():
        sotu[name] = math.exp(-sum(nats_of_sotu) / sum(TOKENS))
        news[name] = math.exp(-sum(nats_of_news) / sum(TOKENS))
        means[name] = math.sqrt(sotu[name] * news[name])
    ranked = [name for name in SEVERAL if name[1] in ("duel", "ar")]

    content = board(several(tmp_path))
    printed = markdown(content)

    rows = {}
    for row in content.standings.rows:
        named = row.method.named
        rule, _, _ = (named.rule or "").partition(":")
        rows[named.model, named.estimator, rule, named.cache or ""] = row
    assert rows.keys() == SEVERAL.keys()
    for name, row in rows.items():
        assert row.mean == pytest.approx(means[name], rel=1e-9)
        for value in (means[name], sotu[name], news[name]):
            assert f" {value:.2f}" in printed
        if name in ranked:
            assert row.rank == rank(name, means, ranked)
            assert row.mean_rank == (rank(name, sotu, ranked) + rank(name, news, ranked)) / 2
        else:
            assert row.rank is None, "although its numbers are the lowest"
            assert row.mean_rank is None
    assert rows["E", "duel", "greedy", "none"].method.kind == "estimate"
    assert [run.label for run in content.baselines] == ["AR"], "the only autoregressive model is the one of the gaps"


def test_noise_seeds_do_not_compete(tmp_path):
    """Values given two noises are of two distributions: none is the best, and neither outranks the other."""
    hf(tmp_path, model="AR", docs={"sotu": docs((-50, -100, -80))})
    made(tmp_path, "A", (-60, -150, -90), spec={"noise_seed": "0"})
    made(tmp_path, "A", (-55, -140, -85), spec={"noise_seed": "1"})
    made(tmp_path, "B", (-58, -145, -88))

    content = board(tmp_path)

    rows = [compared for compared in content.tasks["sotu"].rows if compared.row.model == "A"]
    assert [compared.row.noise_seed for compared in rows] == ["0", "1"]
    assert not any(compared.best for compared in rows)
    ranks = {}
    for row in content.standings.rows:
        ranks[row.method.named.model, row.method.named.noise_seed] = row.rank
    assert ranks == {("AR", None): 1, ("A", "1"): 2, ("B", None): 3, ("A", "0"): 3}, "each is ranked among the others"
    headline = next(line for line in content.headlines["sotu"] if "**A**" in line)
    assert "noise seed 0" in headline, "the first seed, not the best one"
    assert "Lowest" not in headline


def test_another_sampler_is_named_where_its_bound_is_shown(tmp_path):
    hf(tmp_path, model="AR", docs={"sotu": docs((-50, -100, -80))})
    made(tmp_path, spec={"noise_seed": "0"})
    [headline] = board(tmp_path).headlines["sotu"]
    assert "ancestral" not in headline
    made(tmp_path, estimator="noised_elbo", nats=(-70, -160, -95), spec={"steps": "48"})
    [headline] = board(tmp_path).headlines["sotu"]
    assert "ancestral sampling" in headline


def plotted(*arguments):
    content = board(*arguments)
    return page._plot(content.standings, content.tasks)


def test_the_plot_is_logarithmic_for_perplexities_and_has_intervals(tmp_path):
    several(tmp_path)

    for metric, scale in (("token_perplexity", math.log), ("bits_per_byte", float)):
        plot = plotted(tmp_path, "--metric", metric)
        values = np.array([scale(row.main) for row in plot["rows"]])
        places = np.array([place for place, *_ in plot["rows"].values()])
        slope = (places[-1] - places[0]) / (values[-1] - values[0])
        assert places == pytest.approx(places[0] + slope * (values - values[0]), abs=0.3)
        assert page.MARGIN <= places.min() < places.max() <= page.WIDTH - page.MARGIN

    made(tmp_path / "one")
    made(tmp_path / "one", "B", (-70, -140, -95))
    for place, low, high in plotted(tmp_path / "one")["rows"].values():
        assert low < place < high


@pytest.mark.parametrize("low, high", [(29, 121), (31.2, 31.9), (1.541, 1.568), (0.02, 900), (4.9, 6.1), (97, 104)])
def test_ticks_are_few_and_round(low, high):
    ticks = page._ticks(low, high)

    assert 2 <= len(ticks) <= page.MOST_TICKS
    assert [low, *ticks, high] == sorted([low, *set(ticks), high]), "they go up, inside of the axis, each once"
    for tick in ticks:
        assert math.isclose(tick, float(f"{tick:.3g}"))


# ---------------------------------------------------------------- names are text


def named(folder, name):
    """A results file with a name in every place that one can stand."""

    def rename(body):
        duel = body["config"]["duel"]
        duel["pretrained"] = body["config"]["model_args"]["pretrained"] = body["config"]["fingerprint"] = name
        duel["versions"] = {name: name}
        for by_task in (body["results"], body["configs"], body["versions"], body["n-samples"], duel["tasks"]):
            by_task[name] = by_task.pop("sotu")

    edit(made(folder, spec={"note": name, "weights": name}), rename)


UNESCAPED_MARKUP = r"(?<!\\)[$<](?=[a-z/!])|(?<!\\)\[f\]\("  # a formula, a tag or a link of Markdown
UNESCAPED_BAR = r"(?<!\\)\|"  # the end of a cell


def is_formula(cell):
    """Whether a program that shows tables may compute a cell of CSV. A negative number is none."""
    return cell.startswith(("=", "@", "+", "\t")) or re.match(r"-[^\d]|-1\+", cell) is not None


def test_names_are_text_in_every_output(tmp_path):
    for name in NAMES:
        named(tmp_path, name)
    figure = ("MDLM", "duel", NAMES[0], "token_perplexity", "3", NAMES[2])
    with (tmp_path / "published.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([published.NEEDED, figure])

    content = board(tmp_path, "--published", tmp_path / "published.csv")
    shown = page.html(content, NAMES[0])
    lines = markdown(content).splitlines()
    table = csv.reader(io.StringIO(files.csv_of(content.standings, published.lines(content.published))))

    for name in NAMES:
        assert str(markupsafe.escape(one_line(name))) in shown, f"{name!r} is shown as it is"
        assert "<" not in name or name not in shown

    widths = {line.count("|") for line in lines if re.fullmatch(r"[|: -]+", line)}
    for line in lines:
        assert not re.search(UNESCAPED_MARKUP, line), line
        if line.startswith("|"):
            assert len(re.findall(UNESCAPED_BAR, line)) in widths, line

    for row in table:
        for cell in row:
            assert not is_formula(cell), cell


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
    expected = dict(given)
    if "trace" in expected:  # the rows of a lattice run need one; its folder may be private
        expected["trace"] = "x.jsonl"
    executed = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: executed.append(args))

    [row] = board(file).standings.rows
    [run] = row.method.runs
    command = rerun.command(run)
    program, subcommand, *words = shlex.split(command)
    importlib.import_module("lm_eval_duel.cli.run").main(words)

    assert program == "lm-eval-duel"
    assert subcommand == "run"
    assert "somebody" not in command
    assert ("--seed" in words) == seeded
    args = executed[0]
    assert str(Options.parse(args.model_args)) == str(Options.parse(expected))
    assert args.tasks in ("sotu", ["sotu"])
    assert args.limit == 3.0
    assert args.log_samples
    assert args.output_path


def test_the_command_of_a_row_names_the_data_of_its_tasks_and_a_sentence_their_files(tmp_path):
    """lm_eval writes --metadata for each task, beside the model args and what the task's own file says."""
    sources = {
        "sotu": "/home/somebody/site-packages/task_configs/sotu/sotu.yaml",
        "wikitext": "/home/somebody/lm_eval/tasks/wikitext/wikitext.yaml",
        "duel_text": "task_configs/own/duel_text.yaml",  # with --include_path task_configs
        "made": "inline",
        "mine": "/home/somebody/task_configs/mine.yaml",
    }
    file = ours(tmp_path, docs={name: documents(NATS, TOKENS) for name in sources})
    given = {"files": "notes.txt", "lines": True}
    for name, source in sources.items():
        more = {"version": 1.0, "pretrained": "M", "tokenizer": "T", "config_source": source, "data_dir": name}
        put(file, f"configs.{name}.metadata", given | more)
    put(file, "config.model_args", {"pretrained": "M", "tokenizer": "T"})

    [row] = board(file).standings.rows
    [command] = rerun.commands(row.method)
    words = shlex.split(command)
    assert json.loads(words[words.index("--metadata") + 1]) == given
    assert rerun.needed(row.method) == [
        "The command needs --include_path with the folder of mine.yaml, which defines mine."
    ]
    assert "somebody" not in command


# ---------------------------------------------------------------- published figures


@pytest.mark.parametrize(
    "lines, message",
    [
        ("model,estimator,task,metric,value,sauce\n", "no column source"),
        ("H\nA,duel,t,token_perplexity,x,s\n", "line 2: .*column value"),
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


def test_a_missing_file_of_published_figures(tmp_path):
    made(tmp_path)
    with pytest.raises(UsageError, match=r"no nope\.csv"):
        parse([str(tmp_path), "--published", "nope.csv", "--out", "unused"])


# ---------------------------------------------------------------- documents


def test_windows_of_a_document_are_joined_and_an_infinite_cost_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(traced, "token_texts", lambda ids, tokenizer: [f"{n} " for n in ids])
    result = made(tmp_path)
    first = {"task": "sotu", "doc": 0, "request": 0, "window": 0, "values": {}}
    first |= {"ids": [5, 6, 7, 8], "starts": [0, 2], "reveal_steps": [0, 1, 1, 0], "token_logprobs": [-0.5, -1, -2, -4]}
    costly = {"window": 1, "ids": [9, 9], "starts": [0], "reveal_steps": [1, 0], "token_logprobs": [-1.0, None]}
    path = trace(tmp_path / "trace.jsonl", result, [first, first | costly])

    content = board(result, "--traces", path, "--tokenizer", "demo-mdm")
    shown = page.html(content, None)

    [document] = content.documents
    assert document["task"] == "sotu"
    assert document["number"] == 0
    assert document["pieces"] == [["5 ", "6 ", "7 ", "8 ", "9 ", "9 "]]
    [order] = document["orders"]
    assert order["starts"] == [0, 2, 4]
    assert order["steps"] == [0, 1, 1, 0, 1, 0]
    assert order["nats"] == [0.5, 1.0, 2.0, 4.0, 1.0, math.inf]
    data = json.loads(re.search(r'id="documents-data">(.*?)</script>', shown)[1])
    assert data[0]["orders"][0]["nats"][-1] is None
