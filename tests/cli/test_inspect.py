"""`inspect --tasks` and `--files`: the counts are those of a run, and each estimator has its time."""

import json
import re

import pytest

from lm_eval_duel import Duel
from lm_eval_duel.cli import inspect, timing
from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import files

pytestmark = pytest.mark.usefixtures("one_load")
TEXTS = ["The state of the union is strong.", "We the people of the United States", "x"]


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    return str(file)


def test_the_counts_are_those_of_a_run(texts, capsys):
    model = "rule=greedy,k=2,block=8"
    duel = Duel.from_pretrained("demo-mdm", rule="greedy:k=2", block=8, device="cpu")
    scores = duel.score(TEXTS)
    lengths = []
    for score in scores:
        lengths += [window.length for window in score.windows]

    main(["inspect", "demo-mdm", "--model_args", model, "--files", texts, "--lines", "--json", "--device", "cpu"])

    inspected = json.loads(capsys.readouterr().out)
    assert inspected["checkpoint"]["family"].startswith("masked-lm")
    assert inspected["tokens"] == sum(len(score.tokens) for score in scores)
    assert inspected["length"] == max(lengths)
    estimators = inspected["estimators"]
    assert estimators.keys() == {"duel", "two_phase", "elbo"}
    assert estimators["duel"]["nfe"] == sum(score.nfe for score in scores)
    assert estimators["duel"]["windows"] == 3
    assert estimators["duel"]["calls"] <= duel.counts.forwards
    for timed in estimators.values():
        assert timed["seconds"] > 0
        assert timed["peak_memory"] > 0


def lines_of_estimators(printed):
    """The lines of the table of times, by estimator."""
    lines = {}
    for line in printed.splitlines():
        if line.startswith(("duel ", "elbo ")):
            lines[line.split()[0]] = line
    return lines


WAITING = """
import lm_eval_duel.rules as rules

class EverySecond(rules.Rule):
    may_pick_none = True
    reads_step = True

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) == 1) & (lanes.step % 2 == 1)[:, None]
"""


@pytest.mark.parametrize(
    ("rule", "sign"), [("greedy:k=2", ""), ("threshold:mu=0.5", "≤"), ("{folder}/waiting.py:EverySecond", "~")]
)
def test_counts_that_depend_on_the_text_have_a_sign(folder, texts, tmp_path, capsys, rule, sign):
    """A rule's counts are known, or at most those shown, or have no bound; those of an ELBO are always known."""
    (tmp_path / "waiting.py").write_text(WAITING)
    rule = rule.format(folder=tmp_path)

    main(["inspect", folder, "--model_args", f"rule={rule},block=8", "--files", texts, "--device", "cpu"])

    lines = lines_of_estimators(capsys.readouterr().out)
    cells = re.split(r"\s{2,}", lines["duel"])
    calls = "~ " if sign else "≥ "
    assert [cell.startswith(mark) for cell, mark in zip(cells[1:5], (sign, calls, sign, sign), strict=True)] == [
        True
    ] * 4
    assert not set("≤~") & {*lines["elbo"]}
    assert "≥" in lines["elbo"]


def test_a_way_that_a_network_does_not_have_is_named(texts, capsys):
    main(["inspect", "demo-bd", "--files", texts, "--device", "cpu"])

    printed = capsys.readouterr().out
    assert "two_phase: " in printed
    assert "block_causal" in printed
    assert list(lines_of_estimators(printed)) == ["duel", "elbo"]


def test_an_autoregressive_network_is_timed_as_one(texts, capsys):
    main(["inspect", "demo-ar", "--model_args", "estimator=ar", "--files", texts, "--device", "cpu", "--json"])

    inspected = json.loads(capsys.readouterr().out)
    assert inspected["estimators"].keys() == {"ar"}


@pytest.mark.parametrize(
    ("model", "tasks", "named"),
    [
        ("demo-mdm", ["duel_text", "--metadata", "files=missing.txt"], r"missing\.txt"),
        ("demo-ar", ["sotu"], "estimator=ar"),
    ],
)
def test_what_is_wrong_with_a_task_is_told_before_the_network_is_loaded(model, tasks, named, monkeypatch):
    monkeypatch.setattr("lm_eval_duel.harness.lm.DuelMDM", None)
    with pytest.raises(DuelError, match=named):
        inspect.main([model, "--tasks", *tasks])


def test_parameters_are_those_of_the_results(monkeypatch):
    """A tensor of packed weights holds several in one number, so it says nothing of how many there are."""
    from lm_eval_duel.harness.lm import DuelMDM

    lm = DuelMDM(pretrained="demo-mdm", rule="greedy", block=8, device="cpu")

    def parameters():
        return dict(inspect.inspect(lm, "demo-mdm"))["parameters"]

    counted = parameters()
    assert int(counted.replace(",", "")) == lm.get_model_info()["duel"]["parameters"]

    monkeypatch.setattr(lm.denoiser, "quantized", True)
    packed = parameters()
    assert not any(letter.isdigit() for letter in packed)

    monkeypatch.undo()
    monkeypatch.setattr(lm.denoiser, "model", None)  # as of a network that is no module
    assert parameters() not in (counted, packed)


def test_the_time_of_all_is_that_of_the_timed_windows_times_their_share(texts, monkeypatch):
    from lm_eval_duel.harness.lm import DuelMDM

    monkeypatch.setattr(timing, "_seconds", lambda estimator, windows: 1.0)
    lm = DuelMDM(pretrained="demo-mdm", rule="greedy", block=8, device="cpu")
    documents = [lm.text.windows(text.text) for text in files.texts([texts], lines=True)] * 4
    longer = lm.text.windows("A longer text than the others " * 3)

    timed, _ = timing.measure(lm, documents)
    timed_with_longer, _ = timing.measure(lm, [*documents, longer])

    assert all(estimator.seconds >= 1.0 for estimator in timed)
    assert timed_with_longer[0].seconds > timed[0].seconds


@pytest.mark.parametrize("sample", [0.25, 1.0])
def test_counts_are_those_to_expect_only_if_blocks_are_drawn(texts, monkeypatch, sample):
    """A two-phase estimate of every block has counts that are known."""
    from lm_eval_duel.harness.lm import DuelMDM

    monkeypatch.setattr(timing, "_seconds", lambda estimator, windows: 1.0)
    lm = DuelMDM(pretrained="demo-mdm", estimator="two_phase", sample=sample, block=8, device="cpu")
    documents = [lm.text.windows(text.text) for text in files.texts([texts], lines=True)]

    timed, _ = timing.measure(lm, documents)

    is_expected = {each.estimator: each.is_expected for each in timed}
    assert is_expected == {"two_phase": sample < 1, "duel": False, "elbo": False}


@pytest.mark.parametrize(
    ("model", "sign", "error"),
    [
        ("demo-bd,rule=greedy", "", ""),
        ("demo-bd,estimator=elbo,mc_samples=16", "≥ ", r" ± [\d.]+"),
        ("demo-bd,estimator=elbo,mc_samples=2", "≥ ", r" ± \?"),  # too few draws for an error
        ("demo-mdm,estimator=two_phase,block=8", "", r" ± \?"),
    ],
)
def test_the_score_of_a_text_has_its_sign_and_its_error(model, sign, error, capsys):
    main(["inspect", "--model_args", model, "--json", "--device", "cpu"])
    described = json.loads(capsys.readouterr().out)["checkpoint"]
    assert re.match(rf"{sign}-[\d.]+{error} nats ", described["one text"]), described["one text"]
