"""Kill a run of the command line with SIGKILL at random moments, go on each time, and compare with an unharmed run.

    python tests/helpers/kill.py FOLDER [--kills 2] [--seed 0] [--model_args ...]

Prints after how many seconds each run was killed, the documents (and windows of others) that it had kept, and how many
were scored twice: those that were finished and not kept, and those in flight, whose windows in flight are scored again.
Exits with 1 where a document's number differs.
"""

import argparse
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from harness_requests import text_log_prob

LIMIT = 6  # documents
# one row a call: documents finish one after the other; most have two windows
MODEL = "rule=greedy,block=32,max_batch_size=1,max_length=64"
TOLERANCE = 1e-4  # nats of a document; float noise in float32


def command(folder, model=MODEL):
    """A run that keeps what it has in `folder`."""
    args = f"{model},trace={folder / 't.jsonl'}"
    said = ["--model_args", args, "--tasks", "sotu", "--limit", str(LIMIT), "--device", "cpu", "--log_samples"]
    kept = ["--output_path", str(folder), "--use_cache", str(folder / "c")]
    return [sys.executable, "-m", "lm_eval_duel", "run", *said, *kept]


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
        return sum(key.startswith(begins) if begins else " " not in key for key in keys)
    except sqlite3.OperationalError:  # its table is not made yet
        return 0
    finally:
        file.close()


def progress(folder):
    """Windows that will not be scored again; documents have two of them."""
    return 2 * kept(folder) + kept(folder, "window ")


def scoring(folder, since):
    """Whether the run whose log begins at byte `since` had begun to score."""
    return b"Running loglikelihood_rolling" in (folder / "log.txt").read_bytes()[since:]


def documents(folder):
    """Nats by document, as the run that ended printed them."""
    (path,) = folder.glob("**/samples_sotu_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["doc_id"]: text_log_prob(line) for line in lines}


def perplexity(folder):
    (path,) = folder.glob("**/results_*.json")
    return json.loads(path.read_text())["results"]["sotu"]["token_perplexity,none"]


def finished_twice(folder):
    """How many documents came into the trace once more."""
    lines = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()[1:]]
    times = Counter(line["doc"] for line in lines if line["window"] == 0)
    return sum(count - 1 for count in times.values())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model_args", default=MODEL)
    asked = parser.parse_args(arguments)
    whole, killed, chance = asked.folder / "whole", asked.folder / "killed", random.Random(asked.seed)
    model = asked.model_args

    began = time.monotonic()
    assert start(whole, model).wait() == 0, (whole / "log.txt").read_text()[-3000:]
    length = time.monotonic() - began
    print(f"uninterrupted: {length:.0f} s, {kept(whole)} documents", flush=True)

    flying = 0
    for n in range(asked.kills):
        since = (killed / "log.txt").stat().st_size if n else 0
        run, began = start(killed, model), time.monotonic()
        before, at_first = kept(killed), progress(killed)
        # two of three some time after another window is kept, one at any moment
        more, end = (chance.randint(1, 3), math.inf) if n % 3 else (3, began + chance.uniform(0, length / 2))
        while progress(killed) < at_first + more and time.monotonic() < end:
            assert run.poll() is None, "it ended before it was killed: raise LIMIT"
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1))
        run.send_signal(signal.SIGKILL)
        run.wait()
        found, parts = kept(killed), kept(killed, "window ")
        flying += scoring(killed, since)
        print(
            f"killed after {time.monotonic() - began:.1f} s: {found} documents kept, {found - before} of them new, and "
            f"{parts} windows of others",
            flush=True,
        )
    assert start(killed, model).wait() == 0, (killed / "log.txt").read_text()[-3000:]

    ours, theirs = documents(killed), documents(whole)
    worst = max(abs(ours[doc] - theirs[doc]) for doc in theirs)
    same = ours.keys() == theirs.keys() and worst <= TOLERANCE
    print(f"documents scored twice: {finished_twice(killed)} finished, {flying} in flight, in {asked.kills} kills")
    print(f"largest difference of a document: {worst:.2g} nats")
    print(f"token perplexity: {perplexity(killed)!r}, uninterrupted {perplexity(whole)!r}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
