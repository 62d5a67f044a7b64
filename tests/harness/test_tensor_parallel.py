"""Runs of the harness in which processes hold one network together (tp_plan=auto)."""

import importlib.util

import pytest
from decoder_reference import CASES, write
from harness_requests import ask, text_log_prob
from harness_runs import TORCHRUN, launch, read, write_task

from lm_eval_duel.harness import trace
from lm_eval_duel.harness.lm import DuelMDM

TEXTS = ["a b c d e f", "the of and a", "z y x w v u t s", "b b a of", "m n o p", "q r the s t"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint and a task."""
    folder = tmp_path_factory.mktemp("run")
    path, _ = write(folder, CASES["sdar"])
    write_task(folder, "letters", TEXTS)
    return folder, path


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.utils") is None, reason="this release cannot split networks"
)
def test_two_groups_of_two_print_what_one_process_computes(folder, tmp_path):
    run, path = folder
    alone = DuelMDM(pretrained=path, rule="margin", dtype="float32", device="cpu")
    expected = alone.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in TEXTS]), True)
    model = f"pretrained={path},rule=margin,dtype=float32,tp_plan=auto,tp_size=2,trace={run}/trace.jsonl"
    arguments = ("--model", "duel-mdm", "--model_args", model, "--tasks", f"{run}/letters.yaml", "--device", "cpu")
    arguments += ("--output_path", str(tmp_path), "--log_samples", "--use_cache", str(tmp_path / "cache"))
    (status,), printed = launch(TORCHRUN, 4, "lm_eval", *arguments)
    assert status == 0, printed[-3000:]
    results, samples = read(tmp_path, "letters")  # one file each
    values = {line["doc_id"]: text_log_prob(line) for line in samples}
    assert values == pytest.approx(dict(enumerate(expected)), abs=1e-5)
    info = results["config"]["duel"]
    assert info["tp_size"] == 2
    assert results["config"]["fingerprint"] == alone.fingerprint
    assert len(info["balance"]["rows"]["ranks"]) == 2 and info["windows"] == len(TEXTS)
    assert "balance of 2 ranks" in printed and "4 processes, 2 for each network" in printed
    assert sorted(path.name for path in tmp_path.glob("cache*.db")) == ["cache_rank0.db", "cache_rank1.db"]
    assert sorted(line["doc"] for line in trace.read(run / "trace.jsonl")) == list(range(len(TEXTS)))
