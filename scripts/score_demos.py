"""Make the bundled results again: what lm-eval writes for the bundled networks on all of `sotu`, and traces.

    python scripts/score_demos.py FOLDER        FOLDER then has what lm_eval_duel/demo/results has, in about 20 minutes

One thread, so that times can be compared. What repeats other entries is left out of the files: the package holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

RUNS = {  # model args: the name of a trace, if there is one
    "pretrained=demo-ar,estimator=ar": "ar",
    "pretrained=demo-bd,rule=left_to_right,block=4": "demo-bd_left_to_right",
    "pretrained=demo-bd,rule=greedy,block=4": "demo-bd_greedy",
    "pretrained=demo-bd,rule=margin,block=4": "demo-bd_margin",
    "pretrained=demo-bd,rule=greedy,k=2,block=4": None,
    "pretrained=demo-bd,estimator=elbo": None,
    "pretrained=demo-bd,estimator=mixture,lattice_rules=none,block=4": "demo-bd_mixture",
    "pretrained=demo-mdm,rule=left_to_right,block=4": "demo-mdm_left_to_right",
    "pretrained=demo-mdm,rule=greedy,block=4": "demo-mdm_greedy",
    "pretrained=demo-mdm,rule=margin,block=4": "demo-mdm_margin",
    "pretrained=demo-mdm,rule=greedy,k=2,block=4": None,
    "pretrained=demo-mdm,rule=greedy,block=32": "demo-mdm_greedy32",
    "pretrained=demo-mdm,rule=greedy,block=32,cache=dual": None,
    "pretrained=demo-mdm,rule=margin,k=2,block=32": "demo-mdm_margin32_k2",
    "pretrained=demo-mdm,estimator=elbo": None,
    "pretrained=demo-mdm,estimator=mixture,lattice_rules=none,block=4": "demo-mdm_mixture",
}
TRACED = 3  # documents: the texts that a page shows
TASKS = Path(__file__).resolve().parents[1] / "task_configs"
REPEATED = ("arguments", "target", "resps", "filtered_resps")  # entries of samples


def run(model_args: str, *arguments: str) -> None:
    """`lm_eval` on one thread."""
    command = [sys.executable, "-m", "lm_eval", "--model", "duel-mdm", "--model_args", model_args, "--device", "cpu"]
    command += ["--include_path", str(TASKS), "--tasks", "sotu", *arguments]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def shorten(folder: Path) -> None:
    """Take out of the files what repeats other entries, or tells of this machine alone."""
    for file in folder.glob("*/results_*.json"):
        results = json.loads(file.read_text(encoding="utf-8"))
        results.pop("pretty_env_info", None)
        for task in results["configs"].values():
            task["metadata"].pop("config_source", None)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for file in folder.glob("*/samples_*.jsonl"):
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            for entry in REPEATED:
                sample.pop(entry, None)
            lines.append(json.dumps(sample) + "\n")
        file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Score, trace, shorten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where results and traces are written")
    folder = parser.parse_args().folder
    for model_args, trace in RUNS.items():
        run(model_args, "--log_samples", "--output_path", str(folder))
        if trace is not None:
            file = folder / "traces" / f"{trace}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            traced = f"{model_args},trace={file}"
            if "estimator=mixture" in model_args:
                run(traced)  # all documents: only a trace has the ELBO and the oracle of each
            else:
                run(traced, "--limit", str(TRACED))
    shorten(folder)


if __name__ == "__main__":
    main()
