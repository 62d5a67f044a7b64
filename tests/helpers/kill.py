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


def command(folder):
    """A run that keeps what it has in `folder`."""
    args = f"{MODEL},trace={folder / 't.jsonl'}"
    said = ["--model_args", args, "--tasks", "sotu", "--limit", str(LIMIT), "--device", "cpu", "--log_samples"]
    kept = ["--output_path", str(folder), "--use_cache", str(folder / "c")]
    return [sys.executable, "-m", "lm_eval_duel", "run", *said, *kept]


def start(folder):
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("ab")
    return subprocess.Popen(command(folder), stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kept(folder, begins=""):
    """Documents in the response cache: keys of answers begin with no word; `begins="window "`: windows of others."""
    path = folder / "c_rank0.db"
    if not path.exists():
        return 0
    file = sqlite3.connect(path, timeout=60)
    try:
        keys = [key for (key,) in file.execute('SELECT key FROM "unnamed"')]
        return sum(key.startswith(begins) if begins else " " not in key for key in keys)
    except sqlite3.OperationalError:  # its table is not made yet
        return 0
    finally:
        file.close()


def documents(folder):
    """Nats by document, as the run that ended printed them."""
    (path,) = folder.glob("**/samples_sotu_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["doc_id"]: text_log_prob(line) for line in lines}


def killed(folder, kills, seed=0):
    """Nats by document of a run that is killed so many times, and how many documents came into its trace once more."""
    chance = random.Random(seed)
    for _ in range(kills):
        run, found, more = start(folder), kept(folder), chance.randint(1, 2)
        while kept(folder) < found + more:
            assert run.poll() is None, "it ended before it was killed: raise LIMIT"
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1))
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert start(folder).wait() == 0, (folder / "log.txt").read_text()[-3000:]
    lines = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()[1:]]
    times = Counter(line["doc"] for line in lines if line["window"] == 0)
    return documents(folder), sum(count - 1 for count in times.values())
