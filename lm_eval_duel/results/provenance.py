"""The command that makes a result again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from lm_eval_duel.results.own_files import reading
from lm_eval_duel.results.read import RESULTS, SCORE
from lm_eval_duel.results.runs import MODEL, Run

SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}  # of --seed
TASK_FOLDER = '"$(lm-eval-duel list folders tasks)"'
UNREAD = ("trace",)  # model args that change no number, and may name a private folder
IN_PYTHON = "no command: the model was made in Python"
OWN_TEXTS = "no command: these are your own texts, scored by lm-eval-duel score"


def command(run: Run) -> str:
    """The command line that makes a results file again, quoted for a POSIX shell.

    It leaves out what changes no number: the device, the batch size, the output folder, the response cache. Raises
    DuelError that names the file, for an entry that lm_eval does not write.
    """
    with reading(run.file, RESULTS):
        content, config = run.content, run.content["config"]
        if content.get("format") == SCORE:
            return OWN_TEXTS
        if run.ours and run.model != MODEL:
            return IN_PYTHON
        words = ["lm-eval-duel", "run"] if run.ours else ["lm_eval", "--model", run.model]
        shots = set(content.get("n-shot", {}).values()) - {None}
        seeds, arguments = [config.get(key, default) for key, default in SEEDS.items()], config.get("model_args")
        flags = {  # as far as they are not at their defaults
            "--model_args": arguments if isinstance(arguments, str) else _joined(arguments or {}),
            "--tasks": ",".join(sorted(run.every_task)),
            "--num_fewshot": shots.pop() if len(shots) == 1 and shots != {0} else "",
            "--limit": "" if config.get("limit") is None else f"{float(config['limit']):g}",
            "--seed": "" if seeds == [*SEEDS.values()] else ",".join(map(str, seeds)),
        }
        words += [str(word) for flag, value in flags.items() if value != "" for word in (flag, value)]
        words += ["--apply_chat_template"] if content.get("chat_template") else []
        if instruction := content.get("system_instruction"):
            words += ["--system_instruction", str(instruction)]
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
