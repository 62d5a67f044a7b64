"""`paper`: lines are those of the recipes, verdicts are counted by hand, and jobs run, fail, stop and resume."""

import contextlib
import functools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import benchmarks
from lm_eval_duel import demo
from lm_eval_duel.cli.main import main
from lm_eval_duel.cli.paper import forecast, jobs, parse, verdict
from lm_eval_duel.cli.paper.recipes import Job, Line
from lm_eval_duel.cli.paper.verdict import Measured, judge
from lm_eval_duel.command_line import Exit
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.options import Options
from lm_eval_duel.results import published, read, rows
from lm_eval_duel.results.published import PAPER_FILE

PAPER = PAPER_FILE.parent
TABLES = ("owt", "lm1b", "zero_shot", "samplers", "oracle", "8b")
BUNDLED = demo.FOLDER / "results"
COLUMNS = "model,estimator,rule,block,task,metric,value,source,table,recipes"


def lines(*words):
    """The lines of a command."""
    return parse([*map(str, words), "--plan"]).lines


# ---------------------------------------------------------------- lines


def test_published_figures_are_those_of_the_recipes():
    """Estimator, rule and block of the CSV are those of the YAML, whose comment repeats the printed figure."""
    figures, on_disk = published.read([str(PAPER_FILE)]), set()
    for table in TABLES:
        every = lines(table)
        on_disk |= {line.job.row for line in (*every, *lines(table, "--given"))}
        assert all(len(line.job.config["tasks"]) == 1 for line in every)
        for figure in (figure for figure in figures if figure["table"] == table):
            own = [line for line in every if line.figure == figure]
            assert [line.job.row for line in own] == figure["recipes"].split()
            for number, line in enumerate(own):
                arguments = {key: v for key, v in line.job.config["model_args"].items() if key != "add_bos_token"}
                options = Options.parse(arguments)
                estimator = "ar" if line.job.config["model"] == "hf" else options.estimator
                assert estimator in ("oracle", figure["estimator"])
                if estimator == "duel":
                    assert options.rule == Options.parse({"rule": figure["rule"]}).rule
                if number == 0 and figure["estimator"] != "ar":
                    block = options.estimator_args["elbo_block"] if estimator == "elbo" else options.block
                    assert str(block or "none") == figure["block"]
                if number == 0 and table != "oracle":
                    text = (PAPER / f"{line.job.row}.yaml").read_text().splitlines()
                    assert figure["printed"] in " ".join(line for line in text if line.startswith("#"))
    assert on_disk == {path.relative_to(PAPER).with_suffix("").as_posix() for path in PAPER.rglob("*.yaml")}
    zero_shot = lines("zero_shot", "--rows", "mdlm_duel")
    assert [line.job.task for line in zero_shot][:2] == ["duel_ptb_wrapped", "duel_wikitext103_wrapped"]
    assert len({line.job.name for line in zero_shot}) == 7
    assert {(line.job.row, line.job.task) for line in lines("oracle")} == {
        ("zero_shot/ar", "duel_ag_news_wrapped"),
        ("zero_shot/bd3lm_block4_elbo", "duel_ag_news_wrapped"),
        ("oracle/bd3lm_block4", "duel_ag_news_wrapped"),
    }


def test_weights_and_metadata_of_the_user(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    weights = ("--weights", f"checkpoints/lm1b/mdlm={folder}", f"lm1b/ar={folder},tokenizer=gpt2")
    words = (*weights, "--metadata", "data_dir=copies")
    found = {line.job.row: line.job for line in lines("lm1b", *words)}
    used = {row for row, job in found.items() if job.config["model_args"]["pretrained"] == str(folder)}
    assert used == {"lm1b/mdlm_duel", "lm1b/mdlm_elbo", "lm1b/ar"}
    assert found["lm1b/ar"].config["model_args"]["tokenizer"] == "gpt2" and not found["lm1b/ar"].other_data
    assert found["lm1b/mdlm_duel"].changed == (f"pretrained={folder}",) and not found["lm1b/mdlm_duel"].missing_weights
    assert "--weights checkpoints/lm1b/sedd=FOLDER" in found["lm1b/sedd_duel"].missing_weights
    assert not lines("owt")[0].job.missing_weights, "a hub name is no path"
    assert lines("lm1b", "--metadata", "length=64")[0].job.other_data
    assert found["lm1b/ar"].shape.startswith('{"model_type"') and "placeholder" in found["lm1b/ar"].notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("owtt", "Unknown table 'owtt'. Did you mean owt?"),
        ("owt --rows mdlm_dul", "Unknown row 'mdlm_dul'. Did you mean owt/mdlm_duel"),
        ("owt --tasks duel_ptb_wrapped", "Nothing is left to measure"),
        ("lm1b --weights mdlm=gpt2", "Unknown row or checkpoint 'mdlm'"),
        ("lm1b --weights lm1b/ar", "--weights is NAME=FOLDER"),
        ("lm1b --weights lm1b/ar=/no/such/folder", "there is no folder /no/such/folder"),
        ("owt --tolerance -1", "'--tolerance' is a number of per cent"),
        ("owt --recipes /no/such", "there is no published.csv"),
    ],
)
def test_wrong_arguments(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words.split())


def test_a_recipe_without_tasks_is_named(tmp_path):
    copied = shutil.copytree(PAPER, tmp_path / "recipes")
    for file in copied.glob("owt/*.yaml"):
        file.write_text(file.read_text().replace("tasks:", "tsks:"))
    with pytest.raises(DuelError, match=r"owt/\S+ is not a recipe .*'tasks'"):
        lines("owt", "--recipes", copied)


def test_it_starts_its_processes_itself(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="start it without torchrun or accelerate, with --num_processes 4"):
        parse(["owt"])


# ---------------------------------------------------------------- verdicts


FIGURE = {"value": 20.0, "printed": "20.0", "estimator": "duel", "rule": "greedy", "metric": "token_perplexity"}


def judged(value, stderr=1.0, random=None, is_random=False, documents=100, of=100, tolerance=1.0, **job):
    found = Measured(value, stderr, random, is_random, documents, of)
    return judge(Line(Job("t/r", "task", {}, Path("out"), **job), FIGURE), found, tolerance)


def test_all_documents_have_no_sampling_error():
    """Half of the last printed place and 1 % of 20: 0.25, whatever the standard error."""
    for stderr in (0.0, 5.0, None):
        assert judged(20.24, stderr) == (verdict.AGREES, pytest.approx(0.25), "")
        assert judged(20.26, stderr)[0] == judged(19.74, stderr)[0] == verdict.DIFFERS
    assert judged(20.06, tolerance=0)[0] == verdict.DIFFERS and judged(20.04, tolerance=0)[0] == verdict.AGREES
    assert judged(20.0, None, documents=1, of=1)[0] == verdict.AGREES


def test_a_subset_has_the_standard_error_of_a_finite_population():
    """s = 1, 36 of 100: 0.25 + 2 x sqrt(1 - 0.36) = 1.85. Nearly all documents: nearly no error."""
    assert judged(21.84, documents=36)[1] == pytest.approx(1.85)
    assert (judged(21.84, documents=36)[0], judged(21.86, documents=36)[0]) == (verdict.AGREES, verdict.DIFFERS)
    assert judged(20, documents=9_999, of=10_000)[1] == pytest.approx(0.27)
    assert judged(20.0, documents=7)[0] == judged(20.0, None, documents=50)[0] == verdict.UNDECIDED


def test_both_figures_of_an_elbo_are_drawn():
    """Twice the variance, from the draws if they are known, else from the spread over documents, which includes it."""
    assert judged(20, random=0.5, is_random=True)[1] == pytest.approx(0.25 + 2 * math.sqrt(2) * 0.5)
    assert judged(20, is_random=True)[1] == pytest.approx(0.25 + 2 * math.sqrt(2))
    assert judged(20, is_random=True, documents=36)[1] == pytest.approx(0.25 + 2 * math.sqrt(1.36))


def test_other_data_get_no_verdict():
    assert judged(20.0, other_data=True, changed=("rows=12",))[0] == verdict.OTHER


def test_documents_and_windows_give_one_standard_error():
    """Passages of one window: the samples' route, the run's own sums and the jackknife agree."""
    for file in sorted(BUNDLED.rglob("results_*.json")):
        run = read.run(file)
        row = rows.from_run(run, "sotu")[0]
        assert row.documents or run.estimator == "mixture"
        if not row.documents or row.nats_window_stderr is None:
            continue
        own = verdict.over_documents(row, "token_perplexity")
        assert own == pytest.approx(row.error("token_perplexity", row.nats_window_stderr), rel=1e-6)
        nats, units = map(sum, zip(*(values := list(row.documents["token_perplexity"].values())), strict=True))
        left = [math.exp(-(nats - value) / (units - size)) for value, size in values]
        mean, n = sum(left) / len(left), len(left)
        assert own == pytest.approx(math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in left)), rel=0.1)


# ---------------------------------------------------------------- jobs


@pytest.fixture
def tiny(tmp_path):
    """A folder of recipes on bundled networks: three rows whose results are bundled too, and what they print."""
    folder = tmp_path / "recipes"
    (folder / "tiny").mkdir(parents=True)
    runs = {
        "ar": {"pretrained": "demo-ar", "estimator": "ar"},
        "bd_duel": {"pretrained": "demo-bd", "rule": "greedy", "block": 4},
        "bd_lattice": {"pretrained": "demo-bd", "estimator": "mixture", "lattice_rules": "none", "block": 4},
    }
    for name, arguments in runs.items():
        content = {"model": "duel-mdm", "model_args": arguments, "tasks": ["sotu"]}
        (folder / "tiny" / f"{name}.yaml").write_text(f"# Tiny, {name}: 33.48.\n# A note.\n{yaml.safe_dump(content)}")
    figures = [
        ("A", "ar", "", "", "33.48", "ar"),
        ("B", "duel", "greedy", "4", "99.99", "bd_duel"),
        *(("B", name, "", "4", "50.00", "bd_lattice") for name in ("mixture", "oracle", "elbo_exact")),
    ]
    table = [f"{m},{e},{r},{b},sotu,token_perplexity,{v},Nobody,tiny,tiny/{row}" for m, e, r, b, v, row in figures]
    (folder / "published.csv").write_text("\n".join([COLUMNS, *table]) + "\n")
    return folder


def bundled(job, options):
    """A stand-in for a process: the bundled results of the same model args, or a failure."""
    for file in BUNDLED.rglob("results_*.json"):
        if json.loads(file.read_text())["config"]["model_args"] == job.config["model_args"]:
            jobs.write(job, options)
            shutil.copytree(file.parent, job.path("results"))
            for other in job.path("results").glob("*.json*"):
                if file.stem.removeprefix("results_") not in other.name:
                    other.unlink()
            return ""
    return "no such results"


def test_published_beside_measured(tiny, tmp_path, monkeypatch, capsys):
    ran, measured, measure = [], [], verdict.measure
    monkeypatch.setattr(jobs, "run", lambda job, options: ran.append(job.row) or bundled(job, options))
    monkeypatch.setattr(verdict, "measure", lambda line, file: measured.append(line) or measure(line, file))
    words = ["paper", "tiny", "--recipes", str(tiny), "--out", str(tmp_path / "out")]
    main(words)
    printed = capsys.readouterr().out
    assert ran == ["tiny/ar", "tiny/bd_duel", "tiny/bd_lattice"] and len(measured) == 5, "a line once"
    content = json.loads((tmp_path / "out" / "paper.json").read_text())["lines"]
    assert [line["verdict"] for line in content] == ["agrees", *["differs"] * 4]
    assert content[0]["measured"] == pytest.approx(33.4849, abs=1e-4) and content[0]["difference"] < 0.01
    assert content[0]["documents"] == content[0]["of"] == 36 and not content[0]["subset"]
    mixture, oracle, elbo = (line["measured"] for line in content[2:])
    assert oracle < mixture < elbo, "one run, three values"
    assert all(line["stderr"] > 0 and line["fingerprint"] for line in content)
    page = (tmp_path / "out" / "paper.md").read_text()
    for shown in (printed, page):
        assert "99.99" in shown and "differs" in shown and "A note." in shown and "sampling error does not" in shown
    main(words)
    assert len(ran) == 3 and capsys.readouterr().out.count("finished before") == 3

    def stopped(job, options):
        for each in {line.path: line.job for line in options.lines}.values():  # as another command in the folder does
            bundled(each, options)
        if job.row == stop:
            raise KeyboardInterrupt

    for stop, more in (("tiny/ar", "stopped"), ("", "shared")):
        words[-1] = str(tmp_path / more)
        monkeypatch.setattr(jobs, "run", lambda job, options: ran.append(job.row) or stopped(job, options))
        with contextlib.suppress(Exit):
            main(words)
        content = json.loads((tmp_path / more / "paper.json").read_text())["lines"]
        assert [line["status"] for line in content][: 1 if stop else 5] == ["finished"] * (1 if stop else 5)
    assert ran[3:] == ["tiny/ar", "tiny/ar"] and capsys.readouterr().out.count("finished meanwhile") == 2
    from lm_eval_duel.results.report import parse as report

    report([str(tmp_path / "out" / "results"), "--out", str(tmp_path / "report")])


def test_a_failure_does_not_stop_the_others_and_foreign_files_stay(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "run", lambda job, options: "boom" if job.row == "tiny/ar" else bundled(job, options))
    out = tmp_path / "out"
    with pytest.raises(Exit) as ended:
        main(["paper", "tiny", "--recipes", str(tiny), "--out", str(out)])
    assert ended.value.code == 1 and "1 of 3 runs failed" in str(ended.value)
    assert "tiny/ar, sotu: FAILED: boom" in capsys.readouterr().out
    content = json.loads((out / "paper.json").read_text())["lines"]
    assert [bool(line["measured"]) for line in content] == [False, *[True] * 4]
    (out / "paper.json").write_text("{}")
    with pytest.raises(Exit, match="was not written by this command"):
        main(["paper", "tiny", "--recipes", str(tiny), "--out", str(out)])
    assert (out / "paper.json").read_text() == "{}" and "wrote" not in capsys.readouterr().out


def test_what_counts_as_finished(tiny, tmp_path):
    words = ["tiny", "--recipes", str(tiny), "--out", str(tmp_path / "out")]
    options = parse(words)
    job = options.lines[0].job
    assert job.finished is None
    bundled(job, options)
    file = job.finished
    limited, other = (parse([*words, *more]).lines[0].job for more in (("--limit", "3"), ("--metadata", "a=b")))
    assert file is not None and limited.path("cache") == job.path("cache")
    assert limited.finished is None is other.finished
    file.write_text("{")
    assert job.finished is None


def test_a_reason_is_one_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\nlm-eval-duel: No hub.\nprogress 5%\n")
    assert jobs.reason(log, 1) == "No hub."
    log.write_text("lm-eval-duel: No hub.\nlm-eval-duel: Rank 0 of 2 waited for the other ranks, and one has ended.\n")
    assert jobs.reason(log, 1) == "No hub.", "the first of several processes"
    log.write_text("Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n\n")
    assert jobs.reason(log, 1) == "torch.OutOfMemoryError: CUDA out of memory."
    assert jobs.reason(log, -9) == "killed by SIGKILL (probably out of memory)"


def test_several_processes_share_a_job():
    options = SimpleNamespace(num_processes=8)
    for config, count in (({"model": "duel-mdm"}, 8), ({"model": "duel-mdm", "limit": 3}, 3), ({"model": "hf"}, 1)):
        assert jobs.processes_of(Job("t/r", "task", config, Path("out")), options) == count


# ---------------------------------------------------------------- forecasts


def test_forecasts_are_those_of_plan(capsys):
    """All figures of a plan are tested elsewhere: here, that each row gets its own line of it."""
    options = parse(["samplers", "--rows", "elbo", "greedy_k[18]", "threshold_mu0.15"])
    by_row = {line.job.row: forecast.forecast(line.job, options) for line in options.lines}
    elbo, fast, slow, most = (
        by_row[f"samplers/{row}"] for row in ("elbo", "greedy_k8", "greedy_k1", "threshold_mu0.15")
    )
    assert slow["rows"] > fast["rows"] > elbo["rows"] and most["most"] and most["rows"] == slow["rows"]
    assert slow["rough"] and not slow["most"]
    options.tflops, options.utilization = 67.0, 0.25
    assert forecast.forecast(options.lines[0].job, options)["hours"] == pytest.approx(2 * elbo["hours"])
    options = parse(["oracle", "--rows", "oracle/*"])
    oracle = forecast.forecast(options.lines[0].job, options)
    assert oracle["windows"] == 384 and oracle["rows"] > 384
    main(["paper", "lm1b", "--plan", "--rows", "mdlm_duel", "--limit", "10"])
    printed = capsys.readouterr().out  # without weights: the recipe's comment has the config.json
    assert "1 run, 10 windows" in printed and "1,270" in printed and "about" in printed
    alone, eight = (
        forecast.table(parse(["samplers", "--rows", "greedy_k1", "--num_processes", n])) for n in ("1", "8")
    )
    assert "8 devices" in eight and alone != eight


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """Recipes over small copies of data sets; another network of the harness (hf) is among them."""
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "w" / "given").mkdir(parents=True)
    metadata = {"length": 32, "insert_eos": False, "framed": True, "remainder": "official", "rows": 12}
    mdm = {"pretrained": "demo-mdm", "rule": "greedy", "block": 16, "dtype": "float32"}
    for row, bos in (("mdm_duel", "official"), ("given/mdm_duel", "given")):
        content = {"model": "duel-mdm", "model_args": {**mdm, "bos": bos}, "metadata": metadata}
        content["tasks"] = ["duel_ag_news_wrapped"]
        (folder / "w" / f"{row}.yaml").write_text(yaml.safe_dump(content))
    stock = {"pretrained": demo.resolve("demo-ar"), "dtype": "float32", "add_bos_token": False}
    content = {"model": "hf", "model_args": stock, "tasks": ["duel_ag_news"], "metadata": {"rows": 12}}
    (folder / "w" / "ar.yaml").write_text(yaml.safe_dump(content))
    rows = [
        "M,duel,greedy,16,duel_ag_news_wrapped,token_perplexity,300.0,Nobody,w,w/mdm_duel",
        "A,ar,,,duel_ag_news,word_perplexity,900.0,Nobody,w,w/ar",
    ]
    (folder / "published.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    return folder, benchmarks.write(folder / "copies")


def command(folder, copies, out, *more):
    words = ["paper", "w", "--recipes", folder, "--metadata", f"data_dir={copies}", "--out", out, "--device", "cpu"]
    return [sys.executable, "-m", "lm_eval_duel", *map(str, [*words, *more])]


@pytest.mark.slow
def test_a_run_stops_and_resumes(wrapped, tmp_path):
    """Ctrl-C while a job runs, then the same command, then again: the first jobs are kept, the numbers are real."""
    folder, copies = wrapped
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job does not
    process = subprocess.Popen(
        command(folder, copies, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeds
    )
    until = time.monotonic() + 60
    while not list(Path(tmp_path).rglob("results_*.json")) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error.decode()
    assert "wrote" in out.decode(), "what is finished is shown"
    again = subprocess.run(command(folder, copies, tmp_path), capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 0 and "[1/2] w/mdm_duel duel_ag_news_wrapped: finished before" in again.stdout
    content = json.loads((tmp_path / "paper.json").read_text())["lines"]
    assert [line["status"] for line in content] == ["finished"] * 2 and all(line["stderr"] > 0 for line in content)
    options = parse(["w", "--recipes", str(folder), "--metadata", f"data_dir={copies}", "--out", str(tmp_path)])
    (file,) = options.lines[0].job.path("results").rglob("results_*.json")
    ran, planned = json.loads(file.read_text())["config"]["duel"], forecast.forecast(options.lines[0].job, options)
    assert planned["windows"] == ran["windows"] and not planned["rough"] and ran["rows"] <= planned["rows"]
    third = subprocess.run(command(folder, copies, tmp_path), capture_output=True, text=True, check=True, timeout=60)
    assert third.stdout.count("finished before") == 2


@pytest.mark.slow
def test_a_subset_of_the_corrected_convention_without_samples(wrapped, tmp_path):
    """8 of the rows on two processes, and no samples: the standard error comes from windows.

    A missing data set is a failure.
    """
    folder, copies = wrapped
    more = ("--given", "--limit", 8, "--no_samples", "--rows", "mdm_duel")
    subprocess.run(command(folder, copies, tmp_path, *more, "--num_processes", 2), check=True, timeout=120)
    (line,) = json.loads((tmp_path / "paper.json").read_text())["lines"]
    assert line["row"] == "w/given/mdm_duel" and line["subset"] and line["documents"] == 8 < line["of"]
    assert line["verdict"] in ("agrees", "differs") and line["stderr"] > 0 and not list(tmp_path.rglob("samples_*"))
    (results,) = tmp_path.rglob("results_*.json")
    assert len(json.loads(results.read_text())["config"]["duel"]["balance"]["rows"]["ranks"]) == 2
    assert len(list(tmp_path.rglob("*_rank*.db"))) == 2
    broken = command(folder, folder, tmp_path / "broken", "--rows", "mdm_duel")
    done = subprocess.run(broken, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "FAILED: No copy of ag_news" in done.stdout and "1 of 1 runs" in done.stderr
