"""A run of the command line that is killed with SIGKILL at random moments and goes on each time."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter

from harness_requests import text_log_prob

LIMIT = 6  # documents
# one row a call: documents finish one after the other; most have two windows
MODEL = "rule=greedy,block=32,max_batch_size=1,max_length=64"
NOISED = f"pretrained=demo-duo,estimator=duel_seeds,noise_seeds=2,{MODEL}"  # the noise of each text is drawn by a hash


def command(folder, model=MODEL):
    """A run that keeps what it has in `folder`."""
    args = f"{model},trace={folder / 't.jsonl'}"
    what = ["--model_args", args, "--tasks", "sotu", "--limit", str(LIMIT), "--device", "cpu", "--log_samples"]
    where = ["--output_path", str(folder), "--use_cache", str(folder / "c")]
    return [sys.executable, "-m", "lm_eval_duel", "run", *what, *where]


def start(folder, model=MODEL):
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("ab")
    return subprocess.Popen(command(folder, model), stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kept(folder, begins=""):
    """Documents in the response cache: keys of answers begin with no word; `begins="window "`: windows of others."""
    path = folder / "c_rank0.db"
    if not path.exists():
        return 0
    file = sqlite3.connect(path, timeout=60)
    try:
        keys = [key for (key,) in file.execute('SELECT key FROM "unnamed"')]
        if begins:
            return sum(key.startswith(begins) for key in keys)
        return sum(" " not in key for key in keys)
    except sqlite3.OperationalError:  # its table is not made yet
        return 0
    finally:
        file.close()


def documents(folder):
    """Nats by document, as the run that ended printed them."""
    (path,) = folder.glob("**/samples_sotu_*.jsonl")
    return {sample["doc_id"]: text_log_prob(sample) for sample in json_lines(path)}


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(folder):
    """The figures of each value in the results of the run that ended: sums, errors, and those of single seeds."""
    (path,) = folder.glob("**/results_*.json")
    results = json.loads(path.read_text())
    return results["config"]["duel"]["tasks"]["sotu"]["values"]


def killed(folder, kills, model=MODEL, seed=0):
    """Nats by document of a run that is killed so many times, and how many documents came into its trace once more."""
    chance = random.Random(seed)
    for _ in range(kills):
        run = start(folder, model)
        enough = kept(folder) + chance.randint(1, 2)
        while kept(folder) < enough:
            assert run.poll() is None, "it ended before it was killed: raise LIMIT"
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1))
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert start(folder, model).wait() == 0, (folder / "log.txt").read_text()[-3000:]

    _, *lines = json_lines(folder / "t.jsonl")
    times = Counter(line["doc"] for line in lines if line["window"] == 0)
    traced_again = times.total() - len(times)
    return documents(folder), traced_again
