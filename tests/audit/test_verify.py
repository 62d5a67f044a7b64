"""`verify=N`: some windows once more, by the reference where it knows the run's rule, in float32."""

import pytest
from close import close_nats
from harness_requests import ask

from lm_eval_duel.audit import verify
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.lm import DuelMDM

pytestmark = pytest.mark.usefixtures("one_load")

TEXTS = [(" ".join(letter + "bcdefghijkl"),) for letter in "mnopqrs"]


def scored(folder, **options):
    model = DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **options})
    values = model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
    return model, values


def test_float32_agrees_and_nothing_else_is_counted(folder, caplog):
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        model, values = scored(folder, verify=5)
    plain, same = scored(folder)
    found = model.get_model_info()["duel"]
    assert values == close_nats(same) and found["rows"] == plain.get_model_info()["duel"]["rows"]
    assert (found["verify"]["windows"], found["verify"]["tokens"]) == (5, 60)
    assert found["verify"]["largest_difference"] < 1e-4 and found["verify"]["changed_picks"] == 0
    assert found["verify"]["not_checked_independently"] == 0
    assert found["verify"]["routes"] == {"reference": 5} and found["verify"]["differing_windows"] == 0
    assert found["verify"]["where"] in caplog.text and not [
        each for each in caplog.records if each.levelname == "ERROR"
    ]
    assert plain.get_model_info()["duel"]["verify"] is None


@pytest.mark.parametrize("hidden", [False, True])
def test_its_progress_bar_is_shown_if_those_of_the_run_are(hidden, folder, capsys):
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=1)
    model.loglikelihood_rolling(ask("loglikelihood_rolling", TEXTS[0]), disable_tqdm=hidden)
    bars = capsys.readouterr().err
    assert ("Scoring windows again" in bars) != hidden and ("documents greedy" in bars) != hidden


def test_a_coarser_run_is_held_against_float32(folder, caplog):
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        model, values = scored(folder, verify=99, dtype="bfloat16")
    assert not [each for each in caplog.records if each.levelname == "ERROR"], "it is reported, not judged"
    _, fine = scored(folder)
    found = model.get_model_info()["duel"]["verify"]
    worst = max(abs(one - other) for one, other in zip(values, fine, strict=True))
    assert found["windows"] == 7 and found["largest_order_difference"] == pytest.approx(worst, abs=1e-4)
    assert worst > 1e-3 and found["largest_difference"] > 1e-3
    for largest in (found["largest_difference"], found["largest_order_difference"]):
        assert f"{largest:.3g} nats" in caplog.text


def test_moved_picks_are_counted(folder, caplog):
    """Against a network that was changed in between."""
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=7)
    other = DuelMDM(pretrained=folder, rule="right_to_left", block=4, device="cpu")
    asked = ask("loglikelihood_rolling", *TEXTS)
    model.estimator.stream = other.estimator.stream  # a run that went wrong
    model.loglikelihood_rolling(asked, disable_tqdm=True)
    found = model.get_model_info()["duel"]["verify"]
    assert found["changed_picks"] > 20 and found["largest_difference"] < 1e-4 < 0.1 < found["largest_order_difference"]
    assert found["differing_windows"] == 7 and [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("error", [KeyError("a rule of the user"), RuntimeError("")])
def test_a_failure_loses_no_answer_and_no_window_that_was_compared(folder, monkeypatch, error):
    again, done = verify.recompute, []

    def fails(*arguments):
        done.append(arguments)
        if len(done) == 3:
            raise error
        return again(*arguments)

    monkeypatch.setattr(verify, "recompute", fails)
    model, values = scored(folder, verify=5)
    assert len(values) == 7
    found = model.get_model_info()["duel"]
    assert found["verify"]["windows"] == 2 and type(error).__name__ in found["verify_failed"][0]


@pytest.mark.parametrize(("windows", "expected"), [(4, [2, 1, 1]), (1, [1, 0, 0])])
def test_ranks_share_it(folder, windows, expected, caplog):
    shares = []
    for rank in range(3):
        model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=windows)
        model.evaluation.ranks = model.ranks = Ranks("cpu", rank, 3)
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
        shares.append(len(model.evaluation.stats.checked))
    assert shares == expected
    assert "response cache" not in caplog.text, "a rank without a share has nothing to explain"
