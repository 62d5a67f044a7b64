"""The examples: a loop learns, sums over all orders agree, quality of samples by hand, each run of the paper's once."""

import csv
import importlib.util
import math
import runpy
import statistics

import data_copies
import pytest
import torch
import yaml
from lm_eval.tasks import TaskManager
from pages import ROOT
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, Window
from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import Options
from lm_eval_duel.results.published import PAPER_FILE
from lm_eval_duel.rules import parse
from lm_eval_duel.tasks import task_folder

pytestmark = pytest.mark.usefixtures("one_load")


def example(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / "examples" / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_script(file):
    return '__name__ == "__main__"' in file.read_text(encoding="utf-8")


SCRIPTS = sorted(filter(is_script, (ROOT / "examples").rglob("*.py")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_help_runs_nothing(script, monkeypatch, capsys):
    """Nor does it train, or fail."""
    if script.stem == "trl_trainer":
        pytest.importorskip("trl")
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
def test_the_bound_of_the_training_example_has_its_sign_and_its_error():
    training = example("training/train")
    lines = {point.way: (point, training.line_of(point)) for point in training.train(steps=0)}
    for way, (point, line) in lines.items():
        is_bound = way == "ELBO"
        assert point.bound == is_bound
        assert (point.error is not None) == is_bound
        assert (("≤" in line) and ("±" in line)) == is_bound
    bound, exact = lines["ELBO"][0], lines["left to right"][0]
    # an untrained network predicts nearly the same in every order, so the bound is nearly tight
    assert bound.value == pytest.approx(exact.value, abs=0.01 + 4 * bound.error)


@pytest.mark.slow
def test_grpo_learns():
    grpo = example("grpo/train")
    curve = [step.reward for step in grpo.train(10, grpo.Settings(length=8))]
    assert statistics.mean(curve[-3:]) > statistics.mean(curve[:3]) + 0.05


@pytest.mark.parametrize(("kind", "block"), [(Toy, 4), (BlockCausal, 2)])
def test_surrogates(kind, block):
    compare = example("surrogates/compare")
    duel = Duel(kind(length=8), "greedy", block=block)
    window = Window((), (0, 2, 1, 1))
    generator = torch.Generator().manual_seed(0)

    def value(surrogate):
        return float(compare.log_prob(duel, window, surrogate, generator))

    [bound] = Duel(duel.denoiser, block=block, estimator="elbo_exact").log_prob([window])
    assert value(compare.all_orders) == pytest.approx(bound.log_prob, abs=1e-6)  # weights are float32
    draws = [value(compare.elbo(50)) for _ in range(20)]
    assert abs(statistics.mean(draws) - bound.log_prob) < 5 * statistics.stdev(draws) / 20**0.5


@pytest.mark.slow
def test_generation_quality(tmp_path):
    quality = example("generation_quality")
    assert quality.entropy((1, 1, 2, 1)) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert quality.repetition((1, 2, 1, 2, 1, 2)) == pytest.approx(1 / 3)  # 1212 twice
    mean = quality.mean([2.0, 6.0, 1.0], [1, 3, 1])
    assert mean.value == pytest.approx(9 / 5)
    assert mean.interval == pytest.approx((1.0, 2.0))  # a third of it, or none
    assert quality.mean([2.0, 6.0], [1, 3]).interval == pytest.approx((2.0, 2.0))  # the same rate in both

    (tmp_path / "text.jsonl").write_text('{"text": "We the people of the United States, in order to form a union"}\n')
    words = ["demo-bd", "--rules", "greedy:k=2", "--samples", "2", "--length", "8", "--judge", "demo-ar"]
    drawn, text = quality.compare(quality.parse([*words, "--text", str(tmp_path / "text.jsonl")]))

    duel = Duel.from_pretrained("demo-bd", rule="greedy:k=2")
    samples = duel.sample([duel.windows("a")[0].context] * 2, 8, seed=0)
    assert drawn.own.value == pytest.approx(-sum(sample.log_prob for sample in samples) / 16)
    assert drawn.nfe == 5 / 8
    assert drawn.perplexity.value > text.perplexity.value > 1
    assert text.name == "2 pieces of the text"
    assert text.own is None
    assert text.mauve is None


# ---------------------------------------------------------------- the paper's tables


def test_the_papers_rows_are_those_of_the_published_figures(tmp_path):
    paper = example("paper/run")
    tasks = {*TaskManager(include_path=task_folder(), include_defaults=False).all_tasks, "wikitext"}
    words = ["*", "--out", str(tmp_path)]

    jobs = {(job.row, job.task): job for job in paper.jobs(paper.parse(words))}
    rows = set()
    for row, task in jobs:
        rows.add(row)
        assert task in tasks

    given = paper.jobs(paper.parse([*words, "--given"]))
    conventions = [job.config["model_args"].get("bos") for job in given]
    assert len(conventions) == len(jobs)
    assert set(conventions) == {"given", "none", "first", None}

    rows_of_figures = set()
    with PAPER_FILE.open(encoding="utf-8") as file:
        for figure in csv.DictReader(file):
            for row in figure["recipes"].split():
                rows_of_figures.add(row)
                require_same_setting(row, jobs[row, figure["task"]].config, figure)
    assert rows_of_figures == rows


def require_same_setting(row, config, figure):
    """Assert that a row's run has the estimator, the rule and the block of a published figure."""
    if config["model"] == "hf":
        return
    options = Options.parse(config["model_args"])
    assert options.estimator in ("oracle", figure["estimator"])
    if options.estimator == "duel":
        assert options.rule == parse(figure["rule"])
    if figure["block"].isdigit() and "zero_shot/bd3lm_block16" not in row:  # what the scripts ran as block 4
        assert int(figure["block"]) in (options.block, getattr(options.estimator_args, "elbo_block", None))


@pytest.mark.parametrize("row", ["owt/bd3lm_blok4", "owt/bd3lm_block4/duel_otw"])
def test_a_row_of_the_papers_that_does_not_exist(row, tmp_path):
    paper = example("paper/run")
    with pytest.raises(DuelError, match=row):
        paper.main(["oracle/*", row, "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_finished_run_of_the_papers_is_not_run_again(tmp_path, monkeypatch, capsys):
    paper = example("paper/run")
    started = []
    table = yaml.safe_load(paper.RECIPES.read_text())
    [group] = [group for group in table["groups"] if "oracle/bd3lm_block4" in group["rows"]]
    group["rows"]["oracle/bd3lm_block4"]["pretrained"] = "demo-bd"
    elbo = {"pretrained": "demo-bd", "estimator": "elbo", "mc_samples": 8, "bos": "given", "dtype": "float32"}
    group["rows"]["zero_shot/bd3lm_block4_elbo"] = elbo
    group["metadata"] |= {"data_dir": str(data_copies.write(tmp_path / "data")), "rows": data_copies.ROWS, "length": 12}
    (tmp_path / "recipes.yaml").write_text(yaml.safe_dump({"groups": [group]}))

    def execute(words):
        started.append(words[:3])
        main(words[3:])

    monkeypatch.setattr(paper, "execute", execute)
    words = ["*_block4*", "--recipes", str(tmp_path / "recipes.yaml"), "--out", str(tmp_path), "--limit", "2"]
    assert paper.main([*words, "--device", "cpu", "--launch", "python"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert started == [["python", "-m", "lm_eval_duel"]] * 2
    oracle, *rules, elbo = [line.split(" | ") for line in lines if line.startswith(("| oracle", "| zero"))]
    assert [cells[2] for cells in rules] == ["left_to_right", "greedy", "margin", "threshold:mu=0.95"]
    for cells in rules:
        assert float(oracle[4]) < float(cells[4])  # the best of all orders
    assert elbo[4].startswith("≤ ")
    assert " ± " in elbo[4]
    assert elbo[-1].startswith("2 of ")

    paper.main([*words, "--device", "cpu"])
    again = capsys.readouterr().out.splitlines()
    assert len(started) == 2
    assert again[2:] == lines[2 - len(again) :]
