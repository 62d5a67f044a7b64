"""`lm-eval-duel tools where`: the folders of the installed tasks, bundled checkpoints and their results."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.arguments import MISSING, choice
from lm_eval_duel.console.command_line import Flag, Parser
from lm_eval_duel.demo import FOLDER, NAMES, resolve
from lm_eval_duel.tasks import task_folder


def where(name: str) -> str:
    """The absolute path of `tasks`, `results` or a bundled checkpoint."""
    if name == "results":
        return str(FOLDER / "results")
    return task_folder() if name == "tasks" else resolve(name)


def main(arguments: Sequence[str]) -> None:
    """Print an absolute path: `lm-eval-duel tools where`."""
    parser = Parser(
        "tools where",
        "Print where the tasks, a bundled checkpoint or the bundled results are installed.",
        "Prints one absolute path.",
        "demo-mdm",
        WHAT=Flag(choice("tasks", "results", *NAMES), MISSING, ", ".join(["tasks", "results", *NAMES])),
    )
    print(where(parser.parse_args(arguments).what))
