"""`lm-eval-duel tools data`: load the data sets of the benchmarks, count them and print their first words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_duel import tasks
from lm_eval_duel.arguments import MISSING, TEXT, choice
from lm_eval_duel.console.command_line import Flag, Parser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, require_known, usage
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metadata import read

SHOWN = 100  # characters of a first sample
PRINTS = """\
Prints for each task its number of rows, tokens and documents, its licence, its source and its first words, or why it
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
    options = Parser(
        "tools data",
        "The data sets of the benchmark tasks.",
        PRINTS,
        "check duel_ptb --metadata data_dir=corpora",
        "metadata",
        ACTION=Flag(choice("check"), MISSING, "check: load each data set and describe it"),
        TASK=Flag(TEXT, None, "benchmark tasks to check", many=True, unset="all"),
    ).parse_args(arguments)
    known = benchmarks()
    require_known("benchmark task", options.task, known)
    read(options.metadata)
    return {name: known[name] for name in options.task or known}, options.metadata


def main(arguments: list[str]) -> None:
    """`lm-eval-duel tools data`."""
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
