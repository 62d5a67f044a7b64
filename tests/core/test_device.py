"""Everything on a second device as on the CPU. There is none, so one is simulated (helpers/simulated_device.py).

Its registration lasts as long as the process, so the runs are in processes of their own (helpers/simulated_runs.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
FAMILIES = ["bd3lm", "llada", "gpt2"]
WRAPPED = ["mdlm+", "llada:cfg_scale=0.5"]
FEW = 25  # waits of the host for each network call: the network, the rule, the loop, and a share of the run's start


def run(folder, *cases):
    """The results of the runs of some cases, and what was printed to stderr."""
    path = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HELPERS / "simulated_runs.py"), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(results, *expected):
    """Assert that all runs agree with the CPU's, and that those of these names are among them."""
    assert not [result["error"] for result in results if "error" in result]
    assert all(result["difference"] < 2e-5 for result in results)
    assert {result["run"] for result in results} >= set(expected)


@pytest.mark.slow
def test_toys_score_and_sample_as_on_the_cpu_and_mixed_devices_raise(tmp_path):
    results = run(tmp_path, "mixing", "toy-blocks", "toy-causal")
    refused, allowed = results[0]["refused"], results[0]["allowed"]
    assert refused == ["add", "reversed", "cat", "index", "where", "matmul", "write"] and allowed == [
        "scalar",
        "indices",
    ]
    drawn = ("sampled_confidence", "sampled_order origin", "sampled_order entropy")
    check(results[1:], "greedy", "sample", "replay", "elbo", "lattice", *drawn, "ar", "trial")


@pytest.mark.slow
def test_networks_the_harness_and_gradients_are_as_on_the_cpu_and_the_host_seldom_waits(tmp_path):
    """All in one process, since torch and transformers take long to import."""
    cases = [*FAMILIES, *WRAPPED, "harness", "memory", "waits"]
    found = run(tmp_path, *cases)
    results = {case: [result for result in found if result["case"] == case] for case in cases}
    for case in (*FAMILIES, *WRAPPED):
        check(results[case], *(["ar"] if case == "gpt2" else ["greedy", "lattice", "elbo"]), "sample")
    check(results["harness"], "requests", "trace", "two ranks", "library")
    check(results["memory"], "score", "learned", "cache", "function", "metrics", "backward")
    assert len(results["waits"]) == 3
    assert all(0 < result["total"] <= FEW * result["calls"] for result in results["waits"])
