"""Every column of a report, computed a second time: from the documents and errors that its results were made of.

Two models, their methods and an autoregressive baseline on two tasks. What runs hold besides differs from file to file,
so that a number of the wrong file, task, metric or method is another one.
"""

import csv
import io
import itertools
import json
import math

import pytest
from results import documents, edit, hf, ours

from lm_eval_duel.cli.report import parse
from lm_eval_duel.console import command_line
from lm_eval_duel.results import files
from lm_eval_duel.results.report import collect
from lm_eval_duel.results.report import content as json_of

TOKENS = {"sotu": (20, 40, 30), "news": (25, 36)}
TEXTS = {task: [f"text {'x' * n} {n}" for n in range(len(sizes))] for task, sizes in TOKENS.items()}
BYTES = {task: sum(map(len, texts)) for task, texts in TEXTS.items()}
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


def write(folder):
    """A file for both tasks of the baseline, the ELBO and the estimate; one for each task of the rules."""
    hf(folder, model="AR", docs=docs(("AR", None), *TOKENS))
    of_elbo = ours(folder, model="M", estimator="elbo", docs=docs(("M", None), *TOKENS), spec={"mc_samples": "16"})
    of_estimate = ours(folder, model="N", docs=docs(("N", "greedy:k=1"), *TOKENS), log=False)
    errors = {of_elbo: STDERRS["M", None], of_estimate: STDERRS["N", "greedy:k=1"]}
    for file, stderrs in errors.items():

        def change(body, stderrs=stderrs):
            for task, account in body["config"]["duel"]["tasks"].items():
                [value] = account["values"].values()
                value |= {"stderr": stderrs[task], "window_stderr": WINDOW_STDERR}

        edit(file, change)
    for (model, rule), steps in STEPS.items():
        for task, size in steps.items():
            more = {"seconds": SECONDS[task], "parameters": 1000 + len(rule)}
            file = ours(folder, model=model, rule=rule, docs=docs((model, rule), task), duel=more)

            def count(body, task=task, size=size):
                body["config"]["duel"]["tasks"][task]["values"]["duel"]["nfe"] = size
                body["results"]["choice"] = {"acc,none": size / 100, "acc_stderr,none": size / 1000}
                body["n-samples"]["choice"] = {"original": 70, "effective": size}

            edit(file, count)
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


def extremes(metric, task, function, *methods):
    """The least and greatest value of a function of rates, over all resamples of two or three documents.

    Each resample has a probability above 2.5 %, so these are the ends of the 95 % interval.
    """
    values = []
    numbers = range(len(TOKENS[task]))
    units = TOKENS[task] if metric == "token_perplexity" else list(map(len, TEXTS[task]))
    for drawn in itertools.product(numbers, repeat=len(numbers)):
        rates = []
        for method in methods:
            nats = sum(NATS[method][task][n] for n in drawn)
            rates.append(nats / sum(units[n] for n in drawn))
        values.append(function(*rates))
    return min(values), max(values)


def close(expected):
    return pytest.approx(expected, rel=1e-5)


def expected_of(method, task, metric):
    """The columns of a value."""
    model, _ = method
    total = sum(NATS[method][task])
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
        expected["window_stderr"] = close(propagated(shown, [total], [WINDOW_STDERR]))
        expected["nfe"] = sum(TOKENS[task])
    if model != "AR":
        expected["gap"] = close(value - value_of(metric, task, sum(NATS["AR", None][task])))
    return expected | gap_closed(method, task, metric)


def gap_closed(method, task, metric):
    """The columns of gap closed, which is that of a rule of M; N has no ELBO."""
    keys = ("gap_closed", "gap_closed_stderr", "distinguishable", "gap_closed_of")
    model, rule = method
    if model != "M" or rule is None:
        return dict.fromkeys(keys)
    if metric == "bits_per_byte":  # of which no gap is closed
        return dict.fromkeys(keys) | {"gap_closed_of": "Monte Carlo"}
    ar = value_of(metric, task, sum(NATS["AR", None][task]))
    duel = value_of(metric, task, sum(NATS[method][task]))

    def closed(nats):
        elbo = value_of(metric, task, nats)
        return 100 * (elbo - duel) / (elbo - ar)

    elbo_nats = sum(NATS["M", None][task])
    return {
        "gap_closed": close(closed(elbo_nats)),
        "gap_closed_stderr": close(propagated(closed, [elbo_nats], [STDERRS["M", None][task]])),
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


def test_every_number_of_a_value_is_that_of_its_documents(report):
    seen = []
    for line in lines_of(report):
        task = line["task"]
        if task == "choice":
            continue
        method = method_of(line)
        seen.append((method, task))
        expected = expected_of(method, task, line["metric"])
        if method not in STDERRS:
            expected |= interval_ends(method, task, line["metric"])
        assert {key: read(line[key]) for key in expected} == expected, (method, task)
        has_interval = method[0] != "N"
        assert bool(line["interval_low"]) == has_interval != bool(line["window_stderr"])
        if line["gap_closed"]:
            assert float(line["gap_closed_interval_low"]) < float(line["gap_closed"])
            assert float(line["gap_closed"]) < float(line["gap_closed_interval_high"])
    assert sorted(seen, key=str) == sorted(itertools.product(NATS, TOKENS), key=str), "each once"


def test_what_a_line_says_of_its_method_is_of_all_its_runs(report):
    """Times are sums over sums; the date is the newest; what differs is listed."""
    for line in lines_of(report):
        method = method_of(line)
        runs = [run for run in report.runs if (run.label, run.config.rule) == method and run.config.rule]
        if method not in STEPS or line["task"] == "choice":
            continue
        tokens = sum(map(sum, TOKENS.values()))
        assert len(runs) == 2
        assert read(line["nfe_per_token"]) == close(STEPS[method][line["task"]] / sum(TOKENS[line["task"]]))
        assert read(line["seconds_per_token"]) == close(sum(SECONDS.values()) / tokens)
        assert line["device"] == "cpu x 1" and line["parameters"] == str(1000 + len(line["rule"]))
        assert line["date"] == max(run.when for run in runs)
        assert line["kind"] == "exact" and line["dtype"] == "float32"
        assert line["fingerprint"] == runs[0].config.fingerprint
    kinds = {method_of(line): line["kind"] for line in lines_of(report)}
    assert kinds == {ELBO: "bound", ESTIMATE: "estimate"} | dict.fromkeys([AR, *STEPS], "exact")


def test_an_average_has_the_error_and_the_documents_of_the_newest_result(report):
    found = {}
    for line in lines_of(report):
        if line["task"] == "choice":
            keys = ("metric", "value", "documents_stderr", "documents", "available_documents", "stderr", "nfe")
            found.setdefault(method_of(line), []).append([read(line[key]) for key in keys])
    expected = {}
    for method, steps in STEPS.items():
        newest_first = [steps["news"], steps["sotu"]]  # two results of one task are two methods
        expected[method] = []
        for size in newest_first:
            expected[method].append(["acc", close(size / 100), close(size / 1000), size, 70, None, None])
    assert found == expected


def test_ranks_and_means_are_those_of_the_values(report):
    metric = report.standings.metric
    means = {}
    for method, of_tasks in NATS.items():
        values = [value_of(metric, task, sum(nats)) for task, nats in of_tasks.items()]
        means[method] = sum(values) / 2 if metric == "bits_per_byte" else math.sqrt(math.prod(values))
    ranked = [method for method in NATS if method != ELBO]  # a bound has no rank
    for line in lines_of(report):
        method = method_of(line)
        if line["task"] == "choice" and not line["mean"]:
            continue  # the older average is a method of its own
        assert read(line["mean"]) == close(means[method])
        lower = [other for other in ranked if means[other] < means[method]]
        assert line["rank"] == (str(1 + len(lower)) if method in ranked else "")


def test_report_json_has_the_numbers_of_report_csv(report):
    """Under the same names; rows are referred to by their numbers."""
    content = json.loads(command_line.dumps(json_of(report)))
    lines = {}
    for line in lines_of(report):
        lines[method_of(line), line["task"]] = line
    for task, found in content["tasks"].items():
        rows = found["rows"]
        for row in rows:
            line = lines[method_of(row), task]
            for name in {*row} & {*line} - {"reason", "block"}:
                value = read(line[name])
                if isinstance(value, float) or row[name] is None:
                    assert row[name] == (None if value is None else close(value)), name
            for name in ("interval", "gap_interval", "gap_closed_interval"):
                ends = [read(line[f"{name}_low"]), read(line[f"{name}_high"])]
                assert row[name] == (None if ends == [None, None] else close(ends)), name
            assert row["metrics"]["bits_per_byte"] == close(read(line["bits_per_byte"]))
            error = read(line["bits_per_byte_monte_carlo_stderr"])
            assert row["stderrs"]["bits_per_byte"] == (None if error is None else close(error))
            steps = STEPS.get(method_of(row), {}).get(task)
            if steps is not None:
                assert row["nfe_per_token"] == close(steps / sum(TOKENS[task]))
            of_elbo = row["elbo"] is not None
            assert of_elbo == (method_of(row) in STEPS)
            assert not of_elbo or method_of(rows[row["elbo"]]) == ELBO
        for pair in found["pairs"]:
            first = rows[pair["first"]]
            second = rows[pair["second"]]
            units = sum(TOKENS[task]) if found["metric"] == "token_perplexity" else BYTES[task]
            difference = sum(NATS[method_of(second)][task]) - sum(NATS[method_of(first)][task])
            assert pair["difference"] == close(difference / units)
        for speeds in found["rules"]:
            assert method_of(rows[speeds["elbo"]]) == ELBO and method_of(rows[speeds["ar"]]) == AR
            families = {name: [method_of(rows[n]) for n in numbers] for name, numbers in speeds["families"].items()}
            assert families == {"greedy": [("M", "greedy:k=1")], "margin": [("M", "margin:k=1")]}
    for standing in content["standings"]["rows"]:
        for task, number in standing["rows"].items():
            assert method_of(content["tasks"][task]["rows"][number]) == method_of(standing)


def test_every_column_is_recomputed(report):
    """One that is added belongs to a test of this file."""
    checked = {*expected_of(*next(iter(itertools.product(STEPS, TOKENS))), "token_perplexity")}
    checked |= {"interval_low", "interval_high", "gap_interval_low", "gap_interval_high"}
    checked |= {"gap_closed_interval_low", "gap_closed_interval_high", "rank", "mean", "mean_rank"}
    checked |= {"nfe_per_token", "seconds_per_token", "device", "parameters", "fingerprint", "date", "dtype", "kind"}
    checked |= {"documents_stderr", "metric", "task", "model", "rule"}
    texts = {"estimator", "block", "cache", "remarks", "stderr_reason", "reason", "gap_closed_reason", "file"}
    assert {*lines_of(report)[0]} == checked | texts
