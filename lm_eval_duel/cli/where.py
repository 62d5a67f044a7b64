"""`lm-eval-duel tools where`: the folders of the installed tasks, recipes, bundled checkpoints and their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.arguments import MISSING, choice
from lm_eval_duel.command_line import Flag, Parser
from lm_eval_duel.demo import FOLDER, NAMES, resolve
from lm_eval_duel.tasks import task_folder

PACKAGE = Path(__file__).resolve().parent.parent


def where(name: str) -> str:
    """The absolute path of `tasks`, `recipes`, `results` or a bundled checkpoint."""
    if name == "recipes":
        return str(PACKAGE / "recipes")
    if name == "results":
        return str(FOLDER / "results")
    return task_folder() if name == "tasks" else resolve(name)


def main(arguments: Sequence[str]) -> None:
    """Print an absolute path: `lm-eval-duel tools where`."""
    parser = Parser(
        "tools where",
        "Print where the tasks, the recipes, a bundled checkpoint or the bundled results are installed.",
        "Prints one absolute path.",
        "demo-mdm",
        WHAT=Flag(
            choice("tasks", "recipes", "results", *NAMES), MISSING, ", ".join(["tasks, recipes, results", *NAMES])
        ),
    )
    print(where(parser.parse_args(arguments).what))
