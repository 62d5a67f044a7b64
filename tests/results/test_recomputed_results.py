"""Every column of a report, computed a second time: from the documents and errors that its results were made of.

Two models, their methods and an autoregressive baseline on two tasks. What runs hold besides differs from file to file,
so that a number of the wrong file, task, metric or method is another one.
"""

import collections
import csv
import io
import itertools
import json
import math

import numpy as np
import pytest
from results import documents, hf, ours, put

from lm_eval_duel.cli.report import parse
from lm_eval_duel.console import command_line
from lm_eval_duel.results import files
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.report import content as json_of

TOKENS = {"sotu": (20, 40, 30), "news": (25, 36)}
TEXTS = {"sotu": ["text  0", "text x 1", "text xx 2"], "news": ["text  0", "text x 1"]}
BYTES = {task: len("".join(texts)) for task, texts in TEXTS.items()}
NATS = {  # of each document
    ("AR", None): {"sotu": (-50, -110, -80), "news": (-60, -82)},
    ("M", None): {"sotu": (-60, -128, -90), "news": (-70, -96)},  # an ELBO
    ("M", "greedy:k=1"): {"sotu": (-55, -121, -88), "news": (-66, -90)},
    ("M", "margin:k=1"): {"sotu": (-56, -124, -82), "news": (-64, -95)},
    ("N", "greedy:k=1"): {"sotu": (-58, -125, -83), "news": (-67, -93)},  # an estimate, and without samples
}
STDERRS = {("M", None): {"sotu": 0.7, "news": 0.9}, ("N", "greedy:k=1"): {"sotu": 0.5, "news": 0.3}}  # in nats
AR, ELBO, *_, ESTIMATE = NATS
WINDOW_STDERR = 2.5
STEPS = {("M", "greedy:k=1"): {"sotu": 90, "news": 40}, ("M", "margin:k=1"): {"sotu": 45, "news": 61}}
SECONDS = {"sotu": 3.0, "news": 8.0}  # of runs of one task


def docs(method, *tasks):
    return {task: documents(NATS[method][task], TOKENS[task], TEXTS[task]) for task in tasks}


def put_errors(file, estimator, stderrs):
    """Give the value of each task an error of its draws and one over windows."""
    for task, stderr in stderrs.items():
        place = f"config.duel.tasks.{task}.values.{estimator}"
        put(file, f"{place}.stderr", stderr)
        put(file, f"{place}.window_stderr", WINDOW_STDERR)


def put_steps(file, task, steps):
    """Give the value of a task its steps, and the run an accuracy that has to do with them."""
    put(file, f"config.duel.tasks.{task}.values.duel.nfe", steps)
    put(file, "results.choice", {"acc,none": steps / 100, "acc_stderr,none": steps / 1000})
    put(file, "n-samples.choice", {"original": 70, "effective": steps})


def write(folder):
    """A file for both tasks of the baseline, the ELBO and the estimate; one for each task of the rules."""
    hf(folder, model="AR", docs=docs(AR, *TOKENS))
    elbo = ours(folder, model="M", estimator="elbo", docs=docs(ELBO, *TOKENS), spec={"mc_samples": "16"})
    put_errors(elbo, "elbo", STDERRS[ELBO])
    estimate = ours(folder, model="N", docs=docs(ESTIMATE, *TOKENS), log=False)
    put_errors(estimate, "duel", STDERRS[ESTIMATE])
    for method, steps_of_tasks in STEPS.items():
        model, rule = method
        for task, steps in steps_of_tasks.items():
            more = {"seconds": SECONDS[task], "parameters": 1000 + len(rule)}
            file = ours(folder, model=model, rule=rule, docs=docs(method, task), duel=more)
            put_steps(file, task, steps)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("results"))


def collected(folder, *words):
    return collect(parse([str(folder), "--page", "--out", "unused", "--as_published", *words]))


@pytest.fixture(params=["token_perplexity", "bits_per_byte"])
def report(request, folder):
    return collected(folder, "--metric", request.param)


# ---------------------------------------------------------------- the second way


def total_nats(method, task):
    return sum(NATS[method][task])


def value_of(metric, task, nats):
    if metric == "bits_per_byte":
        return -nats / BYTES[task] / math.log(2)
    return math.exp(-nats / sum(TOKENS[task]))


def propagated(function, values, errors):
    """The standard error of a function of independent values, by differences."""
    square = 0.0
    for n, error in enumerate(errors):
        step = 1e-4 * error
        higher = [*values[:n], values[n] + step, *values[n + 1 :]]
        lower = [*values[:n], values[n] - step, *values[n + 1 :]]
        square += ((function(*higher) - function(*lower)) / 2e-4) ** 2
    return math.sqrt(square)


def _units(metric, task):
    return sum(TOKENS[task]) if metric == "token_perplexity" else BYTES[task]


def in_unit(metric, difference):
    """A paired difference in nats per unit as it is shown: under bits per byte in bits."""
    return difference / math.log(2) if metric == "bits_per_byte" else difference


def extremes(metric, task, function, *methods):
    """The least and greatest value of a function of rates, over all resamples of two or three documents.

    The 95 % interval of so few documents holds all draws, and each resample is drawn many times, so these are its ends.
    """
    values = []
    numbers = range(len(TOKENS[task]))
    units = np.array(TOKENS[task] if metric == "token_perplexity" else [len(text) for text in TEXTS[task]])
    for drawn in itertools.product(numbers, repeat=len(numbers)):
        resample = list(drawn)
        rates = []
        for method in methods:
            nats = np.array(NATS[method][task])
            rates.append(nats[resample].sum() / units[resample].sum())
        values.append(function(*rates))
    return min(values), max(values)


def close(expected):
    return pytest.approx(expected, rel=1e-5)


def expected_of(method, task, metric):
    """The columns of a value."""
    model, _ = method
    total = total_nats(method, task)
    stderr = STDERRS.get(method, {}).get(task)
    value = value_of(metric, task, total)
    expected = {
        "value": close(value),
        "bits_per_byte": close(value_of("bits_per_byte", task, total)),
        "stderr": None,
        "bits_per_byte_monte_carlo_stderr": None,
        "window_stderr": None,
        "gap": None,
        "tokens": sum(TOKENS[task]),
        "nfe": STEPS.get(method, {}).get(task),
        "documents": len(TOKENS[task]),
        "available_documents": 99,
    }

    def shown(nats):
        return value_of(metric, task, nats)

    def bits(nats):
        return value_of("bits_per_byte", task, nats)

    if stderr is not None:
        expected["stderr"] = close(propagated(shown, [total], [stderr]))
        expected["bits_per_byte_monte_carlo_stderr"] = close(propagated(bits, [total], [stderr]))
    if model == "N":
        if metric == "token_perplexity":  # how many words or bytes a window has is not in the results
            expected["window_stderr"] = close(propagated(shown, [total], [WINDOW_STDERR]))
        expected["nfe"] = sum(TOKENS[task])
    if model != "AR":
        expected["gap"] = close(value - value_of(metric, task, total_nats(AR, task)))
    return expected | gap_closed(method, task, metric) | place_of(method, task, metric)


def compared_with(method, task):
    """The methods that a row is compared with, under the names of their columns; none for the lowest and for a bound.

    Results have their values, so every method of a task with a lower total is before it.
    """
    ranked = sorted((other for other in NATS if other != ELBO), key=lambda other: -total_nats(other, task))
    if method not in ranked[1:]:
        return {}
    return {"next_lower": ranked[ranked.index(method) - 1], "lowest": ranked[0]}


def place_of(method, task, metric):
    """The columns of the rank on a task and of the differences that belong to it."""
    better = [other for other in NATS if other != ELBO and total_nats(other, task) > total_nats(method, task)]
    columns = {"task_rank": None if method == ELBO else 1 + len(better)}
    unit = "bits per byte" if metric == "bits_per_byte" else "nats per token"
    columns["difference_unit"] = None if method == ELBO else unit
    others = compared_with(method, task)
    for name in ("next_lower", "lowest"):
        difference = None
        if others:
            lower_rate = -total_nats(others[name], task)
            difference = close(in_unit(metric, (-total_nats(method, task) - lower_rate) / _units(metric, task)))
        columns[f"from_{name}"] = difference
    return columns


def gap_closed(method, task, metric):
    """The columns of gap closed, which is that of a rule of M; N has no ELBO."""
    keys = ("gap_closed", "gap_closed_stderr", "distinguishable", "gap_closed_of")
    model, rule = method
    if model != "M" or rule is None:
        return dict.fromkeys(keys)
    if metric == "bits_per_byte":  # of which no gap is closed
        return dict.fromkeys(keys) | {"gap_closed_of": "Monte Carlo"}
    ar = value_of(metric, task, total_nats(AR, task))
    duel = value_of(metric, task, total_nats(method, task))

    def closed(nats):
        elbo = value_of(metric, task, nats)
        return 100 * (elbo - duel) / (elbo - ar)

    elbo_nats = total_nats(ELBO, task)
    return {
        "gap_closed": close(closed(elbo_nats)),
        "gap_closed_stderr": close(propagated(closed, [elbo_nats], [STDERRS[ELBO][task]])),
        "distinguishable": True,
        "gap_closed_of": "Monte Carlo",
    }


def interval_ends(method, task, metric):
    """The columns of intervals of an exact value, which no Monte Carlo error widens."""

    def shown(rate):
        return value_of(metric, task, rate * _units(metric, task))

    def gap(rate, ar):
        return shown(rate) - shown(ar)

    low, high = extremes(metric, task, shown, method)
    ends = {"interval_low": close(low), "interval_high": close(high)}
    if method != AR:
        low, high = extremes(metric, task, gap, method, AR)
        ends |= {"gap_interval_low": close(low), "gap_interval_high": close(high)}
    for name, other in compared_with(method, task).items():
        low, high = None, None
        if other not in STDERRS:  # and has samples
            low, high = extremes(metric, task, lambda rate, lower: in_unit(metric, lower - rate), method, other)
        ends[f"from_{name}_interval_low"] = None if low is None else close(low)
        ends[f"from_{name}_interval_high"] = None if high is None else close(high)
    return ends


# ---------------------------------------------------------------- report.csv and report.json


def method_of(row):
    return row["model"], row["rule"] or None


def lines_of(report):
    return list(csv.DictReader(io.StringIO(files.csv_of(report.standings))))


def read(cell):
    """A cell of the CSV as the value that it stands for."""
    try:
        return float(cell)
    except ValueError:
        return {"": None, "yes": True, "no": False}.get(cell, cell)


def check_value(line):
    """The columns of a line of a perplexity or of bits, computed from the documents of its method."""
    method = method_of(line)
    task = line["task"]
    expected = expected_of(method, task, line["metric"])
    if method not in STDERRS:
        expected |= interval_ends(method, task, line["metric"])
    values = {key: read(line[key]) for key in expected}
    assert values == expected, (method, task)

    assert bool(line["interval_low"]) == (method != ESTIMATE)
    is_per_token = line["metric"] == "token_perplexity"
    assert bool(line["window_stderr"]) == (method == ESTIMATE and is_per_token)
    if line["gap_closed"]:
        low = float(line["gap_closed_interval_low"])
        high = float(line["gap_closed_interval_high"])
        assert low < float(line["gap_closed"]) < high


def test_every_number_of_a_value_is_that_of_its_documents(report):
    methods_and_tasks = []
    for line in lines_of(report):
        if line["task"] != "choice":
            check_value(line)
            methods_and_tasks.append((method_of(line), line["task"]))
    every_one = itertools.product(NATS, TOKENS)
    assert sorted(methods_and_tasks, key=str) == sorted(every_one, key=str), "each once"


def test_a_line_has_the_time_and_the_date_of_its_own_run(report):
    """Its method has another run, of another task."""
    for line in lines_of(report):
        method = method_of(line)
        task = line["task"]
        if method not in STEPS or task == "choice":
            continue
        [run] = [run for run in report.runs if run.name == line["file"]]
        assert read(line["nfe_per_token"]) == close(STEPS[method][task] / sum(TOKENS[task]))
        assert read(line["seconds_per_token"]) == close(SECONDS[task] / sum(TOKENS[task]))
        assert line["device"] == "cpu x 1"
        assert line["parameters"] == str(1000 + len(line["rule"]))
        assert line["date"] == run.when
        assert line["kind"] == "exact"
        assert line["dtype"] == "float32"
        assert line["fingerprint"] == run.config.fingerprint

    kinds = {method_of(line): line["kind"] for line in lines_of(report)}
    assert kinds == {ELBO: "bound", ESTIMATE: "estimate"} | dict.fromkeys([AR, *STEPS], "exact")


def test_an_average_has_the_error_and_the_documents_of_the_newest_result(report):
    lines = collections.defaultdict(list)
    for line in lines_of(report):
        if line["task"] == "choice":
            lines[method_of(line)].append(line)

    assert lines.keys() == STEPS.keys()
    for method, steps in STEPS.items():
        newest_first = [steps["news"], steps["sotu"]]  # two results of one task are two methods
        for line, size in zip(lines[method], newest_first, strict=True):
            assert line["metric"] == "acc"
            assert read(line["value"]) == close(size / 100)
            assert read(line["documents_stderr"]) == close(size / 1000)
            assert read(line["documents"]) == size
            assert read(line["available_documents"]) == 70
            assert read(line["stderr"]) is None
            assert read(line["nfe"]) is None


def test_ranks_and_means_are_those_of_the_values(report):
    metric = report.standings.metric
    means = {}
    for method in NATS:
        sotu = value_of(metric, "sotu", total_nats(method, "sotu"))
        news = value_of(metric, "news", total_nats(method, "news"))
        means[method] = (sotu + news) / 2 if metric == "bits_per_byte" else math.sqrt(sotu * news)
    ranked = [method for method in NATS if method != ELBO]  # a bound has no rank

    for line in lines_of(report):
        method = method_of(line)
        if line["task"] == "choice" and not line["mean"]:
            continue  # the older average is a method of its own
        assert read(line["mean"]) == close(means[method])
        lower = [other for other in ranked if means[other] < means[method]]
        assert line["rank"] == (str(1 + len(lower)) if method in ranked else "")


def close_or_none(value):
    """A number, or the numbers of an interval, of the CSV; there are none where its cells are empty."""
    if value is None or value == [None, None]:
        return None
    return close(value)


def check_row(row, line, task):
    """A row of report.json has the numbers of the line of its method in report.csv."""
    for name in row.keys() & line.keys() - {"reason", "block"}:
        value = read(line[name])
        if isinstance(value, float) or row[name] is None:
            assert row[name] == close_or_none(value), name
    for name in ("interval", "gap_interval", "gap_closed_interval"):
        ends = [read(line[f"{name}_low"]), read(line[f"{name}_high"])]
        assert row[name] == close_or_none(ends), name
    for name in ("next_lower", "lowest"):
        pair = row[name] or {"difference": None, "interval": None, "verdict": None, "reason": None}
        ends = [read(line[f"from_{name}_interval_low"]), read(line[f"from_{name}_interval_high"])]
        assert pair["difference"] == close_or_none(read(line[f"from_{name}"]))
        assert pair["interval"] == close_or_none(ends)
        assert (pair["verdict"] or None) == read(line[f"from_{name}_verdict"])
        assert (pair["reason"] or None) == read(line[f"from_{name}_reason"])
    assert row["metrics"]["bits_per_byte"] == close(read(line["bits_per_byte"]))
    assert row["stderrs"]["bits_per_byte"] == close_or_none(read(line["bits_per_byte_monte_carlo_stderr"]))
    steps = STEPS.get(method_of(row), {}).get(task)
    if steps is not None:
        assert row["nfe_per_token"] == close(steps / sum(TOKENS[task]))


def check_references(content, task):
    """Rows, pairs and sweeps of rules refer to the rows of the methods that they are about."""
    methods = [method_of(row) for row in content["rows"]]
    for row, method in zip(content["rows"], methods, strict=True):
        if method in STEPS:
            assert methods[row["elbo"]] == ELBO
        else:
            assert row["elbo"] is None
        others = {name: methods[row[name]["second"]] for name in ("next_lower", "lowest") if row[name]}
        assert others == compared_with(method, task)

    for pair in content["pairs"]:
        first = methods[pair["first"]]
        second = methods[pair["second"]]
        difference = total_nats(second, task) - total_nats(first, task)
        assert pair["difference"] == close(in_unit(content["metric"], difference / _units(content["metric"], task)))

    for speeds in content["rules"]:
        assert methods[speeds["elbo"]] == ELBO
        assert methods[speeds["ar"]] == AR
        families = speeds["families"]
        assert families.keys() == {"greedy", "margin"}
        [greedy] = families["greedy"]
        [margin] = families["margin"]
        assert methods[greedy] == ("M", "greedy:k=1")
        assert methods[margin] == ("M", "margin:k=1")


def test_report_json_has_the_numbers_of_report_csv(report):
    """Under the same names; rows are referred to by their numbers."""
    lines = {}
    for line in lines_of(report):
        lines[method_of(line), line["task"]] = line

    content = json.loads(command_line.dumps(json_of(report)))

    for task, content_of_task in content["tasks"].items():
        for row in content_of_task["rows"]:
            check_row(row, lines[method_of(row), task], task)
        check_references(content_of_task, task)
    for standing in content["standings"]["rows"]:
        for task, number in standing["rows"].items():
            assert method_of(content["tasks"][task]["rows"][number]) == method_of(standing)


def test_every_column_is_recomputed(report):
    """One that is added belongs to a test of this file."""
    checked = set(expected_of(("M", "greedy:k=1"), "sotu", "token_perplexity"))
    checked |= {"interval_low", "interval_high", "gap_interval_low", "gap_interval_high"}
    for name in ("next_lower", "lowest"):
        checked |= {f"from_{name}_interval_low", f"from_{name}_interval_high"}
        checked |= {f"from_{name}_verdict", f"from_{name}_reason"}
    checked |= {"gap_closed_interval_low", "gap_closed_interval_high", "rank", "mean", "mean_rank"}
    checked |= {"nfe_per_token", "seconds_per_token", "device", "parameters", "fingerprint", "date", "dtype", "kind"}
    checked |= {"documents_stderr", "metric", "task", "model", "rule"}
    texts = {"estimator", "block", "cache", "remarks", "stderr_reason", "reason", "gap_closed_reason", "file", "doubts"}

    first_line, *_ = lines_of(report)
    assert first_line.keys() == checked | texts
