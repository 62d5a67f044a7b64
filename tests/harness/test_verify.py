"""`verify=N`: some windows once more, by the reference where it knows the run's rule, in float32."""

import dataclasses

import pytest
import tiny
from close import close_nats
from harness_requests import ask

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import verify
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.lm import DuelMDM

TEXTS = [(" ".join(letter + "bcdefghijkl"),) for letter in "mnopqrs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


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
    assert found["verify"]["routes"] == {"reference": 5} and found["verify"]["differing_windows"] == 0
    assert found["verify"]["where"] in caplog.text and not [
        each for each in caplog.records if each.levelname == "ERROR"
    ]
    assert plain.get_model_info()["duel"]["verify"] is None


def test_one_row_a_call(folder, monkeypatch):
    model, _ = scored(folder)
    from lm_eval_duel.denoisers.hf.masked_lm import MaskedLM

    rows, features = [], MaskedLM.features
    monkeypatch.setattr(
        MaskedLM, "features", lambda self, ids, real: rows.append(len(ids)) or features(self, ids, real)
    )
    model.run.options = dataclasses.replace(model.options, verify=3)
    model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
    steps = 3 * 12  # of the three windows
    assert set(rows[-steps:]) == {1} and max(rows[:-steps]) > 1


def test_a_coarser_run_is_held_against_float32(folder, caplog):
    model, values = scored(folder, verify=99, dtype="bfloat16")
    assert not [each for each in caplog.records if each.levelname == "ERROR"], "it is reported, not judged"
    _, fine = scored(folder)
    found = model.get_model_info()["duel"]["verify"]
    worst = max(abs(one - other) for one, other in zip(values, fine, strict=True))
    assert found["windows"] == 7 and found["largest_difference"] == pytest.approx(worst, abs=1e-4) and worst > 1e-3


def test_moved_picks_are_counted(folder, caplog):
    """Against a network that was changed in between."""
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=7)
    other = DuelMDM(pretrained=folder, rule="right_to_left", block=4, device="cpu")
    asked = ask("loglikelihood_rolling", *TEXTS)
    model.estimator.stream = other.estimator.stream  # a run that went wrong
    model.loglikelihood_rolling(asked, disable_tqdm=True)
    found = model.get_model_info()["duel"]["verify"]
    assert found["changed_picks"] > 20 and found["changed_windows"] == 7 and found["largest_difference"] > 0.1
    assert found["differing_windows"] == 7 and [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("spec", [{"estimator": "elbo", "mc_samples": 8}, {"estimator": "oracle"}])
def test_estimators_without_one_order(folder, spec):
    model, _ = scored(folder, verify=2, **spec)
    found = model.get_model_info()["duel"]["verify"]
    assert found["windows"] == 2 and found["largest_difference"] < 1e-4 and found["routes"] == {"alone": 2}
    assert found["changed_picks"] == (None if spec["estimator"] == "elbo" else 0)


def test_what_cannot_be_verified_is_not_lost(folder, caplog, monkeypatch):
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=2)

    def fails(options, text, device):
        raise DuelError("it does not fit.")

    monkeypatch.setattr(verify, "float32_network", fails)
    with caplog.at_level("ERROR", logger="lm_eval.duel_mdm"):
        values = model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
    assert values == close_nats(scored(folder)[1])
    assert "verify failed, so no window is verified; scores are unaffected: it does not fit." in caplog.text


@pytest.mark.parametrize(("windows", "expected"), [(4, [2, 1, 1]), (1, [1, 0, 0])])
def test_ranks_share_it(folder, windows, expected, caplog):
    shares = []
    for rank in range(3):
        model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", verify=windows)
        model.run.ranks = model.ranks = Ranks("cpu", rank, 3)
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS), disable_tqdm=True)
        shares.append(len(model.run.stats.checked))
    assert shares == expected
    assert "response cache" not in caplog.text, "a rank without a share has nothing to explain"
