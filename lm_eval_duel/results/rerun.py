"""The command that makes a result again, and the files of a user's rules and tasks that it needs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.results.read import RESULTS, reading
from lm_eval_duel.results.runs import MODEL, Run
from lm_eval_duel.results.standings import RankedMethod
from lm_eval_duel.rules import RULES, is_rule
from lm_eval_duel.tasks import metadata, task_folder

SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}  # of --seed
TASK_FOLDER = '"$(lm-eval-duel list folders tasks)"'
OUTPUT = ("--output_path", "results", "--log_samples")  # without samples, a report has no intervals
SEPARATORS = ",=\"'{}[] "  # characters that key=value,... cannot have in a key or value
IN_PYTHON = "no command: the model was made in Python"
OWN_TEXTS = "no command: whoever made this page scored texts of their own with lm-eval-duel score"


def commands(method: RankedMethod) -> list[str]:
    """The commands that make the results of a method again."""
    return list(dict.fromkeys(command(run) for run in method.runs))


def needed(method: RankedMethod) -> list[str]:
    """Sentences on a user's rules and tasks, which the commands of a method need and this package does not have."""
    sentences: dict[str, None] = {}
    for run in method.runs:
        digests = []
        for key in ("rule_code", "rule_files"):  # of the code, and of the files that the rule reads
            if key in run.spec:
                digests.append(f"{key}={run.spec[key]}")
        of_digests = f" ({', '.join(digests)} in the spec)" if digests else ""
        for rule in _rules_of_users(run):
            place, name, *_ = rule.split(":")
            what = "file" if place.endswith(".py") else "module"
            sentences[f"The command needs the {what} {place}, which defines the rule {name}{of_digests}."] = None
        for name, file in _tasks_of_users(run):
            sentences[f"The command needs --include_path with the folder of {file}, which defines {name}."] = None
    return list(sentences)


def _tasks_of_users(run: Run) -> Iterator[tuple[str, str]]:
    """The tasks that neither this package nor lm_eval defines, and the names of their files."""
    for name in run.every_task:
        source = str(_metadata_of(run, name).get("config_source", "")).replace("\\", "/")
        folder, _, file = source.rpartition("/")
        _, is_among_ours, of_ours = f"/{source}".rpartition("/task_configs/")
        is_ours = is_among_ours and (Path(task_folder()) / of_ours).is_file()
        if folder and not is_ours and "/lm_eval/tasks/" not in source:
            yield name, file


def _rules_of_users(run: Run) -> Iterator[str]:
    """The rules of a run that are `module:Name` or `file.py:Name`."""
    followed: dict[str, None] = {}
    if run.config.rule:
        followed[run.config.rule] = None
    for task in run.every_task.values():
        followed |= dict.fromkeys(task.entry.get("values", {}))  # those of a lattice, among its estimators
    for rule in followed:
        name, _, _ = rule.partition(":")
        if is_rule(rule) and name not in RULES:
            yield rule


def command(run: Run) -> str:
    """The command line that makes a results file again, quoted for a POSIX shell.

    `report` reads what it writes to the same row. It leaves out what changes no number: the device, the batch size, the
    response cache, and the folders of the results and of a trace, which may be private. Raises DuelError that names the
    file, for an entry that lm_eval does not write.
    """
    if run.is_of_score:
        return OWN_TEXTS
    if run.config.ours and run.config.model != MODEL:
        return IN_PYTHON
    words = ["lm-eval-duel", "run"] if run.config.ours else ["lm_eval", "--model", run.config.model]
    with reading(run.file, RESULTS):
        for flag, value in _flags(run).items():
            if value != "":
                words += [flag, str(value)]
        if run.content.get("chat_template"):
            words.append("--apply_chat_template")
        if instruction := run.content.get("system_instruction"):
            words += ["--system_instruction", str(instruction)]
        words += OUTPUT
    line = shlex.join(words)
    return line if run.config.ours else f"{line} --include_path {TASK_FOLDER}"


def _flags(run: Run) -> dict[str, Any]:
    """The flags of a run; those at their defaults are empty."""
    config = run.content["config"]
    return {
        "--model_args": _model_args(run),
        "--tasks": ",".join(sorted(run.every_task)),
        "--metadata": _metadata(run),
        "--num_fewshot": _num_fewshot(run),
        "--limit": _limit(config.get("limit")),
        "--seed": _seed(config),
    }


def _model_args(run: Run) -> str:
    """The model args of a run. Of its trace they have the name only: the folder may be private."""
    arguments = run.content["config"].get("model_args") or {}
    if isinstance(arguments, str):
        return arguments
    arguments = dict(arguments)
    values_of_trace = {value for _, value in run.traced}
    if run.trace is not None and len(values_of_trace) > 1:  # the rows of a lattice run have their intervals from it
        arguments["trace"] = run.trace.name
    elif "trace" in arguments:
        arguments["trace"] = re.split(r"[/\\]", str(arguments["trace"]))[-1]
    return _joined(arguments)


def _metadata_of(run: Run, name: str) -> Mapping[str, Any]:
    """The metadata of a task, as lm_eval writes them."""
    return run.content.get("configs", {}).get(name, {}).get("metadata") or {}


def _metadata(run: Run) -> str:
    """The entries of --metadata about data, as JSON; empty without any.

    lm_eval writes them for each task, with the model args and the task's own metadata.
    """
    of_tasks = []
    for name in run.every_task:
        entries = {}
        for key, value in _metadata_of(run, name).items():
            if key in metadata.KEYS and key not in run.config.model_args:
                entries[key] = value
        of_tasks.append(entries)
    first, *others = of_tasks
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return json.dumps(shared) if shared else ""


def _limit(limit: Any) -> str:
    """The documents of a run, or their share if it is below 1, with all digits; empty for all of them."""
    if limit is None:
        return ""
    documents = float(limit)
    return str(int(documents)) if documents.is_integer() else str(documents)


def _num_fewshot(run: Run) -> Any:
    """The value that all tasks share; empty for 0, and for several, which are those of the tasks' own files."""
    shots = set(run.content.get("n-shot", {}).values()) - {None}
    if len(shots) != 1 or 0 in shots:
        return ""
    return shots.pop()


def _seed(config: Mapping[str, Any]) -> str:
    """The seeds of a run, unless they are the harness's."""
    seeds = {key: config.get(key, default) for key, default in SEEDS.items()}
    return "" if seeds == SEEDS else ",".join(map(str, seeds.values()))


def _joined(arguments: Mapping[str, Any]) -> str:
    """Model args as key=value,...; as JSON if a value would not survive that."""
    if all(_is_simple(key, value) for key, value in arguments.items()):
        return ",".join(f"{key}={value}" for key, value in arguments.items())
    return json.dumps(arguments)


def _is_simple(key: str, value: Any) -> bool:
    """True if key=value is read back as it is."""
    if not isinstance(value, str | int | float | bool | None):
        return False
    return set(f"{key}{value}").isdisjoint(SEPARATORS)
