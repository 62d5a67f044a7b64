"""Signals end a run after the network call under way; what was finished is kept, and the same command goes on."""

import os
import re
import signal
import subprocess
import sys
import time

import kill
import pytest
from harness_requests import ask, cached
from harness_runs import free_port

from lm_eval_duel.core import reveal as interrupts
from lm_eval_duel.harness.lm import DuelMDM

TEXTS = [(" ".join(letter + "bcdefghijkl"),) for letter in "mnop"]  # a row each, nearly


@pytest.fixture
def model(folder):
    """One row a call, so that documents finish one after the other."""
    return DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_batch_size=1)


def after_calls(model, calls, act):
    """`act` while the network is at its nth call."""
    features, seen = model.denoiser.features, []

    def counted(*arguments):
        seen.append(1)
        if len(seen) == calls:
            act()
        return features(*arguments)

    model.denoiser.features = counted
    return seen


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_the_network_call(model, caplog, number, status):
    calls = after_calls(model, 14, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as raised, caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS))
    assert raised.value.code == status
    assert len(calls) == 14
    assert signal.getsignal(number) is before
    message = f"Interrupted by {signal.Signals(number).name} on rank 0 after 1 of 4 documents. "
    assert f"{message}No answer is saved. " in caplog.text


@pytest.mark.parametrize(("calls", "said"), [(1, "nothing to save yet"), (14, "They are saved in ")])
def test_the_log_says_what_an_interrupted_call_has_saved(model, tmp_path, caplog, calls, said):
    wrapped = cached(model, tmp_path)
    after_calls(model, calls, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit), caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        wrapped.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS))
    progress = model.evaluation.progress
    assert bool(progress.finished or progress.windows) == (calls > 1)
    assert said in caplog.text


def test_the_trace_of_an_interrupted_call_has_the_finished_documents(folder, tmp_path, caplog):
    trace = tmp_path / "t.jsonl"
    model = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_batch_size=1, trace=str(trace))
    after_calls(model, 14, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit), caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS))
    assert str(trace) in caplog.text
    _, *windows = trace.read_text().splitlines()
    assert len(windows) == 1


def test_an_interrupted_call_estimates_from_a_random_sample_and_says_so(model, caplog):
    after_calls(model, 14, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit), caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS))
    estimate = str(model.evaluation.progress.running)
    assert estimate
    [line] = [record.getMessage() for record in caplog.records if estimate in record.getMessage()]
    assert "before the first unfinished one" in line


@pytest.mark.parametrize(("ranks", "shown"), [(1, False), (2, True)])
def test_the_bar_of_several_ranks_names_its_rank(model, ranks, shown):
    model.evaluation.ranks = model.ranks._replace(world_size=ranks)
    progress = model.evaluation.begin("generate_until", [4], [0])
    assert (f"rank 0 of {ranks}" in progress.bar.desc) == shown
    progress.bar.close()


def test_a_second_ctrl_c_does_not_wait(monkeypatch):
    """The first is passed on by a launcher as well, within moments; only a later one is meant."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        now[0] += 5
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher's own
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")


def test_a_signal_at_the_very_end_counts(model, monkeypatch):
    """After the last network call: the answers are kept, and the run ends all the same."""
    stream = model.estimator.stream

    def last(windows, **options):
        yield from stream(windows, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(model.estimator, "stream", last)
    with pytest.raises(interrupts.Interrupted):
        model.loglikelihood_rolling(ask("loglikelihood_rolling", *TEXTS))
    interrupts.check()


@pytest.mark.slow
@pytest.mark.parametrize("model", [kill.MODEL, kill.NOISED], ids=["masks", "random tokens"])
def test_kills_change_no_number(model, tmp_path):
    whole = tmp_path / "whole"
    resumed = tmp_path / "killed"
    assert kill.start(whole, model).wait() == 0, (whole / "log.txt").read_text()[-3000:]
    documents, twice = kill.killed(resumed, 2, model)
    assert documents == pytest.approx(kill.documents(whole), abs=1e-4)
    assert len(documents) == kill.LIMIT
    assert twice == 0, "finished documents are kept"
    values = kill.values(whole)
    for name, value in kill.values(resumed).items():
        for figure in ("log_prob", "stderr", "window_stderr", "tokens", "windows", "near_ties"):
            expected = values[name].get(figure)
            if isinstance(expected, float):
                expected = pytest.approx(expected, abs=1e-3)
            assert value.get(figure) == expected, (name, figure)


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path):
    """As a terminal sends it: to the launcher and to its processes, which then hear of it from the launcher again."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    run = subprocess.Popen(
        [*launcher, *kill.command(tmp_path)[1:]],
        stdout=(tmp_path / "log.txt").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while run.poll() is None and not kill.kept(tmp_path):  # soon, so that neither rank has finished
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) != 0
    log = (tmp_path / "log.txt").read_text().replace("\n", " ")
    for rank in (0, 1):
        assert re.search(
            rf"Interrupted by SIGINT on rank {rank} after \d+ of {kill.LIMIT // 2} .* saved in .*c_rank{rank}.db", log
        ), rank
