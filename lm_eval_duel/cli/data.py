"""Checks the data sets of the benchmarks on this machine: loads each one, counts it and shows how it begins.

python -m lm_eval_duel tools data check [TASK...] [--metadata key=value,...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_duel import tasks
from lm_eval_duel.command_line import Parser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.harness.key_values import key_values
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metadata import read

SHOWN = 100  # characters of a first sample
PRINTS = """\
Prints for each task its number of rows, tokens and documents, its licence, its source and how it begins, or why it
cannot be loaded. In that case the exit code is 1.
"""


def benchmarks() -> dict[str, dict[str, Any]]:
    """The YAML of each benchmark task, with its include, by name."""
    configs = {}
    for file in sorted((Path(tasks.task_folder()) / "benchmarks").glob("[!_]*.yaml")):
        config = _yaml(file)
        if isinstance(config.get("task"), str):  # a group has a list there
            configs[config["task"]] = {**_yaml(file.with_name(config["include"])), **config}
    return configs


def check(task: str, config: dict[str, Any], overrides: dict[str, Any]) -> str:
    """Lines about one task; raises DuelError if it cannot be loaded. `overrides`: metadata of the user."""
    metadata = {**config["metadata"], **overrides}
    load = getattr(tasks, config["custom_dataset"].rsplit(".", 1)[-1])
    rows = load(**metadata)["test"]
    corpus = corpora.find(metadata["corpus"])
    first = rows[0]
    text = tasks.token_text(first) if "ids" in first else first["text"]
    kind = f"rows of up to {metadata.get('length') or tasks.LENGTH}" if "ids" in first else "documents"
    return "\n".join(
        [
            f"{task}: {read(overrides).get('rows', corpus.rows):,} rows, {sum(rows[TOKENS]):,} tokens "
            f"scored in {len(rows):,} {kind}",
            f"    licence  {corpus.licence}",
            f"    from     {corpora.source(metadata['corpus'], metadata.get('data_dir'))}",
            f"    first    {' '.join(text.split())[:SHOWN]!r}",
        ]
    )


@usage()
def parse(arguments: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The YAML of each selected task, by name, and the metadata for all of them; raises UsageError."""
    parser = Parser(
        "tools data", "The data sets of the benchmark tasks.", PRINTS, "check duel_ptb --metadata data_dir=corpora"
    )
    parser.add_argument("action", choices=["check"], metavar="check", help="load each data set and describe it")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="benchmark tasks to check (default: all)")
    parser.add_argument("--metadata", default="", help="as for a run: data_dir, rows, tokenizer, length, ...")
    parsed = parser.parse_args(arguments)
    known = benchmarks()
    for name in parsed.tasks:
        if name not in known:
            raise unknown("benchmark task", name, known)
    overrides = key_values("--metadata", parsed.metadata)
    read(overrides)
    return {name: known[name] for name in parsed.tasks or known}, overrides


def main(arguments: list[str]) -> None:
    """`python -m lm_eval_duel tools data`."""
    selected, overrides = parse(arguments)
    named = overrides.get("tokenizer") or f"{BUNDLED}; name yours with --metadata tokenizer=..."
    print(f"tokens of {named}", flush=True)
    failed: dict[str, list[str]] = {}  # tasks by what went wrong
    messages: dict[str, str] = {}  # of the first task of each
    for name, config in selected.items():
        try:
            print(check(name, config, overrides), flush=True)
        except Exception as error:  # the other data sets are checked all the same
            reason = str(error.__context__ or error)
            failed.setdefault(reason, []).append(name)
            messages.setdefault(reason, str(error))
    for reason, names in failed.items():
        print(f"{', '.join(names)}: NOT LOADED\n    {messages[reason]}", flush=True)
    if failed:
        lost = [name for name in selected if any(name in names for names in failed.values())]
        raise DuelError(f"{len(lost)} of {len(selected)} tasks cannot be loaded: {', '.join(lost)}")


def _yaml(file: Path) -> dict[str, Any]:
    """A task's YAML; functions stay names."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    return yaml.load(file.read_text(encoding="utf-8"), Loader)
