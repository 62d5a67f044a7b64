"""`inspect --tasks` and `--files`: the counts are those of a run, and each estimator has its time."""

import json

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
    main(["inspect", "demo-mdm", "--model_args", model, "--files", texts, "--lines", "--json", "--device", "cpu"])
    printed = capsys.readouterr().out
    found = json.loads(printed)
    duel = Duel.from_pretrained("demo-mdm", rule="greedy:k=2", block=8, device="cpu")
    scores = duel.score(TEXTS)
    assert found["checkpoint"]["family"].startswith("masked-lm")
    assert found["tokens"] == sum(len(score.tokens) for score in scores)
    assert found["length"] == max(window.length for score in scores for window in score.windows)
    assert found["estimators"].keys() == {"duel", "two_phase", "elbo"}
    of_duel = found["estimators"]["duel"]
    assert of_duel["nfe"] == sum(score.nfe for score in scores)
    assert of_duel["windows"] == 3
    assert of_duel["calls"] <= duel.counts.forwards
    assert all(each["seconds"] > 0 and each["peak_memory"] > 0 for each in found["estimators"].values())


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
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith(("duel ", "elbo "))}
    assert [mark for mark in "≤~" if mark in rows["duel"]] == list(sign)
    assert not {"≤", "~"} & {*rows["elbo"]}


def test_a_way_that_a_network_does_not_have_is_named(texts, capsys):
    main(["inspect", "demo-bd", "--files", texts, "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "two_phase: " in printed and "block_causal" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.startswith(("duel ", "elbo "))] == ["duel", "elbo"]


def test_an_autoregressive_network_is_timed_as_one(texts, capsys):
    main(["inspect", "demo-ar", "--model_args", "estimator=ar", "--files", texts, "--device", "cpu", "--json"])
    assert json.loads(capsys.readouterr().out)["estimators"].keys() == {"ar"}


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
    shown = dict(inspect.inspect(lm, "demo-mdm"))["parameters"]
    assert int(shown.replace(",", "")) == lm.get_model_info()["duel"]["parameters"]
    monkeypatch.setattr(lm.denoiser, "quantized", True)
    packed = dict(inspect.inspect(lm, "demo-mdm"))["parameters"]
    assert not any(letter.isdigit() for letter in packed)
    monkeypatch.undo()
    monkeypatch.setattr(lm.denoiser, "model", None)  # as of a network that is no module
    assert dict(inspect.inspect(lm, "demo-mdm"))["parameters"] not in (shown, packed)


def test_the_time_of_all_is_that_of_the_timed_windows_times_their_share(texts, monkeypatch):
    from lm_eval_duel.harness.lm import DuelMDM

    monkeypatch.setattr(timing, "_seconds", lambda estimator, windows: 1.0)
    lm = DuelMDM(pretrained="demo-mdm", rule="greedy", block=8, device="cpu")
    documents = [lm.text.windows(text.text) for text in files.texts([texts], lines=True)] * 4
    timed, _ = timing.measure(lm, documents)
    assert all(each.seconds >= 1.0 for each in timed)
    more, _ = timing.measure(lm, [*documents, lm.text.windows("A longer text than the others " * 3)])
    assert more[0].seconds > timed[0].seconds
