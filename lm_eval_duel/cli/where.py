"""`lm-eval-duel where`: the folders of the installed tasks, recipes and bundled checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.command_line import Parser
from lm_eval_duel.demo import NAMES, resolve
from lm_eval_duel.tasks import task_folder

PACKAGE = Path(__file__).resolve().parent.parent


def where(name: str) -> str:
    """The absolute path of `tasks`, `recipes` or a bundled checkpoint."""
    if name == "recipes":
        return str(PACKAGE / "recipes")
    return task_folder() if name == "tasks" else resolve(name)


def main(arguments: Sequence[str]) -> None:
    """Print an absolute path: `lm-eval-duel where`."""
    parser = Parser(
        "where",
        "Print where the tasks, the recipes or a bundled checkpoint are installed.",
        "Prints one absolute path.",
        "demo-mdm",
    )
    parser.add_argument("name", choices=["tasks", "recipes", *NAMES], metavar="NAME", help="%(choices)s")
    print(where(parser.parse_args(arguments).name))
