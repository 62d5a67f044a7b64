"""Kill a run of the command line with SIGKILL at ten random moments, go on each time, and compare with an unharmed run.

    python tests/kill.py FOLDER [--kills 10] [--seed 0]

Prints after how many seconds each run was killed, the answers that it had kept, and how many documents were scored
twice; exits with 1 where a document's number differs. A document in flight is scored again from its beginning.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

LIMIT = 12  # documents
MODEL = "rule=greedy,block=32,max_batch_size=1"  # one row a call: documents finish one after the other
TOLERANCE = 1e-4  # nats of a document; float noise in float32


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


def kept(folder):
    """Answers in the response cache; its law is a record, too."""
    path = folder / "c_rank0.db"
    if not path.exists():
        return 0
    file = sqlite3.connect(path)
    try:
        return max(0, file.execute('SELECT COUNT(*) FROM "unnamed"').fetchone()[0] - 1)
    except sqlite3.OperationalError:  # its table is not made yet
        return 0
    finally:
        file.close()


def documents(folder):
    """Nats by document, as the run that ended printed them."""
    (path,) = folder.glob("**/samples_sotu_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["doc_id"]: float(line["filtered_resps"][0]) for line in lines}


def perplexity(folder):
    (path,) = folder.glob("**/results_*.json")
    return json.loads(path.read_text())["results"]["sotu"]["token_perplexity,none"]


def scored_twice(folder):
    """How many documents' lines came into the trace once more."""
    lines = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()[1:]]
    times = Counter(line["doc"] for line in lines if line["window"] == 0)
    return sum(count - 1 for count in times.values())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    whole, killed, chance = asked.folder / "whole", asked.folder / "killed", random.Random(asked.seed)

    began = time.monotonic()
    assert start(whole).wait() == 0, (whole / "log.txt").read_text()[-3000:]
    length = time.monotonic() - began
    print(f"uninterrupted: {length:.0f} s, {kept(whole)} documents", flush=True)

    for n in range(asked.kills):
        run, began = start(killed), time.monotonic()
        before = kept(killed)
        if n % 3:  # two of three once it scores, one at any moment
            while run.poll() is None and kept(killed) == before:
                time.sleep(0.05)
        time.sleep(chance.uniform(0, length / (10 if n % 3 else 2)))
        assert run.poll() is None, "it ended before it was killed: raise LIMIT"
        run.send_signal(signal.SIGKILL)
        run.wait()
        found = kept(killed)
        print(f"killed after {time.monotonic() - began:.1f} s: {found} kept, {found - before} of them new", flush=True)
    assert start(killed).wait() == 0, (killed / "log.txt").read_text()[-3000:]

    ours, theirs = documents(killed), documents(whole)
    worst = max(abs(ours[doc] - theirs[doc]) for doc in theirs)
    same = ours.keys() == theirs.keys() and worst <= TOLERANCE
    print(f"documents scored twice: {scored_twice(killed)} of {len(theirs)}, in {asked.kills} kills")
    print(f"largest difference of a document: {worst:.2g} nats")
    print(f"token perplexity: {perplexity(killed)!r}, uninterrupted {perplexity(whole)!r}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
