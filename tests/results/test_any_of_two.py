"""Choices among two or three entries that differ, in both orders: which one counts, whichever file comes first."""

import itertools
import math
from types import SimpleNamespace

import pytest
from results import documents, hf, ours, put

from lm_eval_duel import demo
from lm_eval_duel.cli.report import parse
from lm_eval_duel.results import costs, read
from lm_eval_duel.results.columns import value
from lm_eval_duel.results.report import collect

TOKENS = (20, 40, 30)
NATS = (-60, -150, -90)


def docs(*tasks):
    return {task: documents(NATS, TOKENS) for task in tasks}


def board(folder, *words):
    return collect(parse([str(folder), "--out", "unused", "--as_published", *words]))


# ---------------------------------------------------------------- the time of a method with two runs

KNOWN = {"seconds": 2.0}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("other", "seconds", "reason", "device"),
    [
        ({"seconds": 7.0}, 9.0, "", "cpu x 1"),
        ({"seconds": None}, None, "no time", "cpu x 1"),
        ({"seconds": 7.0, "answers_from_cache": 1}, None, costs.CACHED, "cpu x 1"),
        ({"seconds": 7.0, "device": "cuda"}, None, "ran on", "cpu x 1, cuda x 1"),
        ({"seconds": 7.0, "ranks": 2}, None, "ran on", "cpu x 1, cpu x 2"),
    ],
)
def test_a_method_has_a_time_only_if_both_of_its_runs_have(tmp_path, is_first, other, seconds, reason, device):
    runs = {"sotu": KNOWN, "news": other} if is_first else {"sotu": other, "news": KNOWN}
    for task, duel in runs.items():
        ours(tmp_path, docs=docs(task), duel=duel)
    expected = None if seconds is None else pytest.approx(seconds / (2 * sum(TOKENS)))

    [standing] = board(tmp_path).standings.rows

    method = standing.method
    assert method.seconds_per_token == expected
    assert reason in method.seconds_reason
    assert bool(reason) == bool(method.seconds_reason)
    assert method.device == device


@pytest.mark.parametrize("order", [("sotu", "news"), ("news", "sotu")])
def test_entries_of_a_method_that_one_of_its_runs_has(tmp_path, order):
    """Parameters are those of whichever run knows them; steps are of the tasks that have both counts."""
    parameters = {"sotu": {}, "news": {"parameters": 1234}}
    steps = {"sotu": None, "news": 45}
    for task in order:
        file = ours(tmp_path, docs=docs(task), duel=parameters[task])
        put(file, f"config.duel.tasks.{task}.values.duel.nfe", steps[task])

    [standing] = board(tmp_path).standings.rows

    assert standing.method.parameters == 1234
    assert standing.method.nfe_per_token == pytest.approx(45 / sum(TOKENS))


# ---------------------------------------------------------------- what means are over

METRICS = {"a": "token_perplexity", "b": "byte_perplexity", "c": "byte_perplexity"}


@pytest.mark.parametrize("order", list(itertools.permutations("abc"))[::2])
def test_the_mean_is_over_the_metric_of_the_most_tasks(tmp_path, order):
    for task in order:
        for model, bits in (("A", 2.0), ("B", 3.0)):
            hf(tmp_path, {task: {METRICS[task]: 9.0 + bits + order.index(task)}}, model=model)

    standings = board(tmp_path).standings

    assert standings.metric == "byte_perplexity"
    assert sorted(standings.mean_of) == ["b", "c"]


@pytest.mark.parametrize("tasks", [("one", "two"), ("two", "one")])
def test_without_a_mean_methods_are_ranked_in_the_task_with_the_most_rows(tmp_path, tasks):
    models = {"one": ["A"], "two": ["A", "B"]}
    for task in tasks:
        for model in models[task]:
            hf(tmp_path, {task: {"token_perplexity": 20.0}}, model=model)

    standings = board(tmp_path).standings

    assert standings.by == "two"
    assert standings.mean_of == []


def test_equal_values_share_a_rank_and_the_next_one_is_left_out(tmp_path):
    for model, perplexity in (("A", 20.0), ("B", 20.0), ("C", 21.0), ("D", 19.0)):
        hf(tmp_path, {"sotu": {"token_perplexity": perplexity}}, model=model)

    ranks = {row.method.named.model: row.rank for row in board(tmp_path).standings.rows}

    assert ranks == {"D": 1, "A": 2, "B": 2, "C": 4}


# ---------------------------------------------------------------- the ratio of two times


def time(seconds=None, whole=None, tokens=100, place=("cpu", 1), tasks=("a",), cached=False):
    device, ranks = place
    duel = {"seconds": seconds, "tokens": tokens, "device": device, "ranks": ranks}
    run = SimpleNamespace(
        config=SimpleNamespace(duel=duel),
        header=SimpleNamespace(total_evaluation_time_seconds=whole),
        every_task=dict.fromkeys(tasks),
        cached=cached,
    )
    return costs.Time(run)


SCORED = time(6.0)
WHOLE = time(whole=50.0)


@pytest.mark.parametrize(
    ("this", "others", "ratio", "reason"),
    [
        (SCORED, [], None, "no AR run"),
        (SCORED, [time(2.0)], 3.0, "note"),
        (SCORED, [time(2.0, tokens=50)], 1.5, "note"),  # per token
        (SCORED, [time(1.0), time(2.0)], 3.0, "note"),  # the newest
        (SCORED, [time(2.0), time(1.0, place=("cuda", 1))], 3.0, "note"),
        (SCORED, [time(1.0, place=("cuda", 1)), time(2.0)], 3.0, "note"),
        (SCORED, [time(1.0, tasks=("b",)), time(2.0)], 3.0, "note"),
        (SCORED, [time(2.0), time(1.0, tasks=("a", "b"))], 3.0, "note"),
        (SCORED, [time(2.0, tasks=("a", "b"))], None, "other tasks"),
        (SCORED, [time(2.0, place=("cuda", 1))], None, "cuda x 1"),
        (SCORED, [time(2.0, place=("cpu", 2))], None, "cpu x 2"),
        (SCORED, [time(2.0, place=("cuda", 1)), time(2.0, place=("cpu", 2))], None, "cpu x 2"),
        (SCORED, [time(2.0, cached=True)], None, costs.CACHED),
        (SCORED, [time(2.0), time(2.0, cached=True)], None, costs.CACHED),
        (SCORED, [time(2.0, cached=True), time(2.0)], None, costs.CACHED),
        (time(6.0, cached=True), [time(2.0)], None, costs.CACHED),
        (SCORED, [time(2.0), time(2.0, tasks=("b",), cached=True)], 3.0, "note"),  # which is not compared
        (SCORED, [time(2.0), time(None, whole=5.0)], 3.0, "note"),
        (SCORED, [WHOLE], None, "no time"),
        (WHOLE, [time(whole=25.0)], 2.0, costs.WHOLE_RUN),
        (WHOLE, [time(whole=10.0), time(whole=25.0)], 2.0, costs.WHOLE_RUN),
        (WHOLE, [time(whole=25.0), time(2.0)], 2.0, costs.WHOLE_RUN),
        (time(6.0, whole=50.0), [time(whole=25.0)], 2.0, costs.WHOLE_RUN),
    ],
)
def test_a_ratio_is_of_times_that_can_be_compared(this, others, ratio, reason):
    computed = costs._ratio(this, others, "AR run", "note")

    assert computed.value == (None if ratio is None else pytest.approx(ratio))
    assert reason in computed.reason


@pytest.mark.parametrize("known", [("a", "b"), ("a",), ("b",), ()])
def test_the_tokens_of_another_model_are_known_if_those_of_all_tasks_are(known):
    tasks = {}
    for name, size in (("a", 30.0), ("b", 12.0)):
        tasks[name] = SimpleNamespace(tokens={"text": size, "more": 1.0} if name in known else None)
    run = SimpleNamespace(config=SimpleNamespace(duel={}), tasks=tasks)

    assert costs.Time(run).tokens == (44 if len(known) == 2 else None)


# ---------------------------------------------------------------- what a file says twice


@pytest.mark.parametrize("first", ["none", "strict"])
def test_a_perplexity_is_that_of_the_first_filter(first):
    second = "strict" if first == "none" else "none"
    entries = {f"word_perplexity,{first}": 12.0, f"word_perplexity,{second}": 15.0}
    assert read._perplexities("t", entries, {}) == {"word_perplexity": 12.0}


def test_each_filter_of_an_average_has_its_own_error():
    entries = {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc,strict": 0.25, "acc_stderr,strict": 0.2}
    entries |= {"f1,strict": 0.75, "f1_stderr,strict": "N/A", "alias": "t", "word_perplexity,none": 3.0}
    expected = {"acc": (0.5, 0.1), "acc (strict)": (0.25, 0.2), "f1 (strict)": (0.75, None)}

    assert read._averages(entries) == expected


# ---------------------------------------------------------------- values in another metric


def test_a_value_in_another_metric_has_the_error_of_that_metric(tmp_path):
    file = ours(tmp_path, docs=docs("sotu"), estimator="elbo", spec={"mc_samples": "16"})
    put(file, "config.duel.tasks.sotu.values.elbo.stderr", 3.0)
    size = len("text 0" + "text 1" + "text 2")

    [compared] = board(tmp_path).tasks["sotu"].rows

    row = compared.row
    assert value(row).endswith(f"± {row.value * 3.0 / sum(TOKENS):.2f}")
    assert value(row, "bits_per_byte").endswith(f"± {3.0 / size / math.log(2):.4f}")


# ---------------------------------------------------------------- the names of the bundled models


def test_the_masked_model_is_scored_if_none_is_named():
    assert demo.BUNDLED == "demo-mdm"
    assert demo.BUNDLED in demo.NAMES


@pytest.mark.parametrize("name", demo.NAMES)
def test_a_bundled_model_is_named_by_its_name_alone(name):
    """A folder of that name somewhere else is the user's own."""
    assert demo.resolve(name) == str(demo.FOLDER / name)
    for other in (
        f"runs/{name}",
        f"./{name}",
        f"{name}/",
        f"/home/me/{name}",
        name.upper(),
        f"{name}-2",
        f"org/{name}",
    ):
        assert demo.resolve(other) == other
    assert demo.model_hint(["duel_sotu", name])
    assert not demo.model_hint([f"runs/{name}", "demo"])
