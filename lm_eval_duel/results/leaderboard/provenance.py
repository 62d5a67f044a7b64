"""Where a result comes from: versions, date, size of the network, and the command that makes it again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
from collections.abc import Mapping
from typing import Any

from lm_eval_duel.results.own_files import whole
from lm_eval_duel.results.read import MODEL, RESULTS, Run
from lm_eval_duel.results.task import Json

SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}  # of --seed
TASK_FOLDER = '"$(lm-eval-duel tools where tasks)"'
OF_TASKS = ("version", "corpus", "config_source")  # entries of a task's metadata that are its own, not the user's
UNREAD = ("trace",)  # model args that change no number, and may name a private folder
IN_PYTHON = "no command: the model was made in Python"
DATASET = {"path": "dataset_path", "name": "dataset_name", "split": "test_split"}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What a results file says about how it was made."""

    versions: dict[str, str]
    date: str  # ISO 8601, UTC; empty if it is not known
    parameters: int | None
    command: str
    datasets: dict[str, dict[str, str]]  # task -> path, name and split, if the task names a data set of the hub


def of(run: Run) -> Provenance:
    """The provenance of a run; raises DuelError for an entry that lm_eval does not write."""
    with whole(run.file, RESULTS):
        content, config = run.content, run.content["config"]
        duel = config.get("duel") or {}
        releases = {name: str(version or "unknown") for name, version in (duel.get("versions") or {}).items()}
        for name in ("lm_eval", "transformers"):
            if content.get(f"{name}_version"):
                releases.setdefault(name, str(content[f"{name}_version"]))
        configs = {name: content.get("configs", {}).get(task.key, {}) for name, task in run.tasks.items()}
        return Provenance(
            releases,
            _date(run.date),
            int(duel.get("parameters") or config.get("model_num_parameters") or 0) or None,
            command(run),
            {n: {key: str(c[entry]) for key, entry in DATASET.items() if c.get(entry)} for n, c in configs.items()},
        )


def _date(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return ""


def command(run: Run) -> str:
    """The command line that makes a results file again, quoted for a POSIX shell.

    What does not change a number is left out: the device, the output folder, the response cache.
    """
    content, config = run.content, run.content["config"]
    if run.ours and run.model != MODEL:
        return IN_PYTHON
    words = ["lm-eval-duel", "run"] if run.ours else ["lm_eval", "--model", run.model]
    if arguments := config.get("model_args"):
        words += ["--model_args", arguments if isinstance(arguments, str) else _joined(arguments)]
    words += ["--tasks", ",".join(sorted({*run.tasks, *run.others}))]
    if metadata := _metadata(content, config):
        words += ["--metadata", json.dumps(metadata)]
    shots = set(content.get("n-shot", {}).values()) - {None}
    seeds = [config.get(key, default) for key, default in SEEDS.items()]
    flags = {  # as far as they are not at their defaults
        "--num_fewshot": shots.pop() if len(shots) == 1 and shots != {0} else None,
        "--limit": None if config.get("limit") is None else f"{float(config['limit']):g}",
        "--seed": None if seeds == [*SEEDS.values()] else ",".join(map(str, seeds)),
        "--batch_size": None if config.get("batch_size") in (1, "1") else config.get("batch_size"),
        "--apply_chat_template": True if content.get("chat_template") else None,
        "--system_instruction": content.get("system_instruction") or None,
    }
    for flag, value in flags.items():
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    line = shlex.join(words)
    return line if run.ours else f"{line} --include_path {TASK_FOLDER}"


def _joined(arguments: Mapping[str, Any]) -> str:
    """Model args as key=value,...; as JSON if a value would not survive that."""
    kept = {str(key): value for key, value in arguments.items() if key not in UNREAD}
    simple = all(
        isinstance(value, str | int | float | bool | None) and not set(f"{key}{value}") & set(",=\"'{}[] ")
        for key, value in kept.items()
    )
    return ",".join(f"{key}={value}" for key, value in kept.items()) if simple else json.dumps(kept)


def _metadata(content: Json, config: Json) -> dict[str, Any]:
    """The entries of --metadata: what all tasks have in common beyond the model args and the task's own version."""
    entries = [entry.get("metadata") for entry in content.get("configs", {}).values()]
    if not entries or None in entries:
        return {}
    known = config.get("model_args")
    known = set(known) if isinstance(known, dict) else {part.split("=")[0] for part in str(known or "").split(",")}
    shared = {key: value for key, value in entries[0].items() if all(key in e and e[key] == value for e in entries)}
    return {key: value for key, value in shared.items() if key not in {*known, *OF_TASKS}}
