"""`lm-eval-duel presets`: the deployed samplers that have a name, and the settings that each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.command_line import Parser
from lm_eval_duel.errors import usage
from lm_eval_duel.rules import presets
from lm_eval_duel.tables import plain_table

HEADER = ("preset", "model args", "checkpoints", "what")


def table(chosen: Sequence[presets.Preset]) -> str:
    """The presets with the args that they stand for."""
    return plain_table(HEADER, [(p.name, p.written_out, " ".join(p.families), p.what) for p in chosen])


@usage()
def parse(arguments: Sequence[str]) -> list[presets.Preset]:
    """The presets of the command line; raises UsageError for an unknown one."""
    parser = Parser(
        "presets",
        "Print the deployed samplers that have a name, and the settings that each stands for.",
        "Prints a table, and the code that each preset follows: repository@commit, file and lines.",
        "llada-fast-dllm-dual",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets to print (default: all)")
    names = parser.parse_args(list(arguments)).names
    return [presets.find(name) for name in names] or list(presets.ENTRIES)


def main(arguments: Sequence[str]) -> None:
    """Print the table of presets: `lm-eval-duel presets`."""
    chosen = parse(arguments)
    print(table(chosen))
    print("\nsources")
    for preset in chosen:
        free = f" ({' and '.join(preset.free)} may be changed)" if preset.free else ""
        print(f"{preset.name}: {preset.source}{free}")
