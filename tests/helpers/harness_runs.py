"""Runs of the real harness: in a subprocess, and in this process; what they write; ports for several ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from lm_eval_duel.tasks import task_folder

TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "{ranks}", "--master-port", "{port}")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "{ranks}", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: word_perplexity}}]
"""


def write_task(folder, name, texts):
    """The YAML file of a task of these texts."""
    data = folder / f"{name}.jsonl"
    file = folder / f"{name}.yaml"
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    data.write_text("".join(lines))
    file.write_text(TASK.format(name=name, data=data))
    return str(file)


def lm_eval(*arguments, module="lm_eval", check=True):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.expanduser("~"),
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def read(folder, task):
    """The results JSON and the samples of a task."""
    (results,) = Path(folder).rglob("results_*.json")
    (samples,) = Path(folder).rglob(f"samples_{task}_*.jsonl")
    lines = samples.read_text().splitlines()
    return json.loads(results.read_text()), [json.loads(line) for line in lines]


def evaluate(task, model_args, model="duel-mdm", metadata=None, folders=(), **options):
    """The harness in this process, with this package's tasks only (its own 14,000 take 8 seconds to index).

    `task`: one name or several; `folders`: others with tasks.
    """
    pairs = [pair.split("=", 1) for pair in model_args.split(",")]
    metadata = {**dict(pairs), **(metadata or {})}  # as the command line does
    tasks = TaskManager(include_path=[task_folder(), *folders], include_defaults=False, metadata=metadata)
    return simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[task] if isinstance(task, str) else task,
        device="cpu",
        task_manager=tasks,
        log_samples=True,
        **options,
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(launcher, count, *arguments, machines=1):
    """The exit statuses of launchers, one a machine (all of them this one), and what all ranks printed in one line."""
    port = free_port()
    runs = []
    for machine in range(machines):
        parts = [part.format(ranks=count // machines, port=port) for part in launcher]
        if machines > 1:
            parts += ["--nnodes", str(machines), "--node-rank", str(machine), "--master-addr", "127.0.0.1"]
        command = [sys.executable, "-m", *parts, "-m", *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    printed = [run.communicate(timeout=600)[0] for run in runs]
    return [run.returncode for run in runs], " ".join("".join(printed).split())
