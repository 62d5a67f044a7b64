"""`lm-eval-duel where`: where the tasks, the recipes and the bundled checkpoints are installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.command_line import Parser
from lm_eval_duel.demo import NAMES, resolve
from lm_eval_duel.tasks import task_folder

PACKAGE = Path(__file__).resolve().parent.parent


def where(name: str) -> str:
    """The absolute path of `tasks`, `recipes` or of a bundled checkpoint."""
    if name == "recipes":
        return str(PACKAGE / "recipes")
    return task_folder() if name == "tasks" else resolve(name)


def main(arguments: Sequence[str]) -> None:
    """Print an absolute path: `lm-eval-duel where`."""
    parser = Parser(
        "where",
        "Where the tasks, the recipes or a bundled checkpoint are installed.",
        "Prints one absolute path.",
        "demo-mdm",
    )
    parser.add_argument("name", choices=["tasks", "recipes", *NAMES], metavar="NAME", help="one of %(choices)s")
    print(where(parser.parse_args(arguments).name))
