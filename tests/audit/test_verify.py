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
    """A model that has scored the texts, and their log-probabilities."""
    model = DuelMDM(**{"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", **options})
    values = model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
    return model, values


def errors(caplog):
    """What was logged as an error."""
    return [record for record in caplog.records if record.levelname == "ERROR"]


def test_float32_agrees_and_nothing_else_is_counted(folder, caplog):
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        model, values = scored(folder, verify=5)
    plain, plain_values = scored(folder)
    info = model.get_model_info()["duel"]
    plain_info = plain.get_model_info()["duel"]

    assert values == close_nats(plain_values)
    assert info["rows"] == plain_info["rows"]
    assert plain_info["verify"] is None

    verification = info["verify"]
    assert verification["windows"] == 5
    assert verification["tokens"] == 60
    assert verification["largest_difference"] < 1e-4
    assert verification["changed_picks"] == 0
    assert verification["not_checked_independently"] == 0
    assert verification["routes"] == {"reference": 5}
    assert verification["differing_windows"] == 0
    assert verification["where"] in caplog.text
    assert not errors(caplog)


@pytest.mark.parametrize("hidden", [False, True])
def test_its_progress_bar_is_shown_if_those_of_the_run_are(hidden, folder, capsys):
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=1)
    model.loglikelihood_rolling(ask("loglikelihood_rolling", TEXTS[0]), disable_tqdm=hidden)

    bars = capsys.readouterr().err
    assert ("Scoring windows again" in bars) != hidden
    assert ("documents greedy" in bars) != hidden


def test_a_coarser_run_is_held_against_float32(folder, caplog):
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        model, values = scored(folder, verify=99, dtype="bfloat16")
    assert not errors(caplog), "it is reported, not judged"

    _, in_float32 = scored(folder)
    largest = max(abs(coarse - fine) for coarse, fine in zip(values, in_float32, strict=True))
    assert largest > 1e-3

    verification = model.get_model_info()["duel"]["verify"]
    assert verification["windows"] == 7
    assert verification["largest_order_difference"] == pytest.approx(largest, abs=1e-4)
    assert verification["largest_difference"] > 1e-3
    assert f"{verification['largest_difference']:.3g} nats" in caplog.text
    assert f"{verification['largest_order_difference']:.3g} nats" in caplog.text


def test_moved_picks_are_counted(folder, caplog):
    """Against a network that was changed in between."""
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=7)
    other = DuelMDM(pretrained=folder, rule="right_to_left", block=4, device="cpu")
    asked = ask("loglikelihood_rolling", *TEXTS)
    model.estimator.stream = other.estimator.stream  # a run that went wrong
    model.loglikelihood_rolling(asked, disable_tqdm=True)

    verification = model.get_model_info()["duel"]["verify"]
    assert verification["changed_picks"] > 20
    assert verification["largest_difference"] < 1e-4
    assert verification["largest_order_difference"] > 0.1
    assert verification["differing_windows"] == 7
    assert errors(caplog)


@pytest.mark.parametrize("error", [KeyError("a rule of the user"), RuntimeError("")])
def test_a_failure_loses_no_answer_and_no_window_that_was_compared(folder, monkeypatch, error):
    recompute = verify.recompute
    calls = []

    def third_call_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return recompute(*arguments)

    monkeypatch.setattr(verify, "recompute", third_call_fails)
    model, values = scored(folder, verify=5)

    info = model.get_model_info()["duel"]
    assert len(values) == 7
    assert info["verify"]["windows"] == 2
    assert type(error).__name__ in info["verify_failed"][0]


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
