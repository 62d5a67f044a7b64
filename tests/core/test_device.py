"""Everything on a second device as on the CPU. There is none, so one is simulated (helpers/simulated_device.py).

Its registration lasts as long as the process, so the runs are in a process of their own (helpers/simulated_runs.py).
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
# not llada2 and llada-moe: transformers routes experts with a histogram of integers that only CUDA has
NETWORKS = {
    "mdlm+": {"greedy", "sample", "replay", "elbo", "lattice", "sampled_confidence", "sampled_order", "two_phase"},
    "llada:cfg_scale=0.5": {"greedy", "sample"},
    "bd3lm": {"greedy", "lattice", "elbo"},
    "gpt2": {"ar", "sample"},
    "mixing": {"mixing"},
    "waits": {"waits greedy", "waits left_to_right"},
    "harness": {"requests", "memory", "two ranks"},
}


@pytest.mark.slow
def test_everything_is_as_on_the_cpu_mixed_devices_raise_and_the_host_seldom_waits(tmp_path):
    """All in one process, since torch and transformers take long to import."""
    path = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HELPERS / "simulated_runs.py"), str(tmp_path), *NETWORKS]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr

    runs = defaultdict(set)  # of each case
    for result in map(json.loads, done.stdout.splitlines()):
        assert "error" not in result, result
        assert result["difference"] < 2e-5, result
        runs[result["case"]].add(result["run"])
    for case, expected in NETWORKS.items():
        assert runs[case] >= expected, case
