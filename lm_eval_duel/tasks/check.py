"""What works on this machine: each benchmark's data set loaded, counted and shown.

python -m lm_eval_duel data check [TASK...] [--data_dir D] [--tokenizer T] [--length N] [--rows N]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval_duel import tasks
from lm_eval_duel.arguments import count
from lm_eval_duel.command_line import Parser
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, unknown, usage
from lm_eval_duel.tasks import corpora
from lm_eval_duel.tasks.columns import TOKENS

SHOWN = 100  # characters of a first sample
PRINTS = """\
Prints for each task how many rows, tokens and documents it has, its licence, where it was found and how it begins, or
why it cannot be loaded; then the exit code is 1.
"""


def benchmarks() -> dict[str, dict[str, Any]]:
    """The YAML of each benchmark task, what it includes filled in, by the task's name."""
    found = {}
    for file in sorted((Path(tasks.task_folder()) / "benchmarks").glob("[!_]*.yaml")):
        config = _yaml(file)
        if isinstance(config.get("task"), str):  # a group has a list there
            found[config["task"]] = {**_yaml(file.with_name(config["include"])), **config}
    return found


def check(task: str, config: dict[str, Any], said: dict[str, Any]) -> str:
    """What one task holds, in lines; raises DuelError where it cannot be loaded. `said`: metadata of the user."""
    metadata = {**config["metadata"], **said}
    load = getattr(tasks, config["custom_dataset"].rsplit(".", 1)[-1])
    rows = load(**metadata)["test"]
    corpus = corpora.find(metadata["corpus"])
    first = rows[0]
    text = tasks.token_text(first) if "ids" in first else first["text"]
    kind = f"rows of up to {metadata.get('length') or tasks.LENGTH}" if "ids" in first else "documents"
    return "\n".join(
        [
            f"{task}: {count('rows', said.get('rows')) or corpus.rows:,} rows, {sum(rows[TOKENS]):,} tokens scored in "
            f"{len(rows):,} {kind}",
            f"    licence  {corpus.licence}",
            f"    from     {corpora.source(metadata['corpus'], metadata.get('data_dir'))}",
            f"    first    {' '.join(text.split())[:SHOWN]!r}",
        ]
    )


@usage()
def parse(arguments: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The YAML of each task asked for, by name, and what is said about all of them; raises UsageError."""
    parser = Parser("data", "The data sets of the benchmark tasks.", PRINTS, "check duel_ptb --data_dir corpora")
    parser.add_argument("action", choices=["check"], metavar="check", help="load each data set and print what is in it")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="which of the benchmark tasks (default: all)")
    parser.add_argument("--data_dir", help="a folder of local copies (default: the hub and its cache)")
    parser.add_argument("--tokenizer", help=f"a folder or hub name: whose tokens are counted (default: {BUNDLED}'s)")
    parser.add_argument("--length", help=f"ids of a wrapped row (default: the task's, mostly {tasks.LENGTH})")
    parser.add_argument("--rows", help="how many rows the local copies hold, if it is not the whole data set")
    parsed = vars(parser.parse_args(arguments))
    for name in ("length", "rows"):
        count(f"--{name}", parsed[name])
    if parsed["data_dir"] and not Path(parsed["data_dir"]).is_dir():
        raise DuelError(f"--data_dir {parsed['data_dir']}: there is no such folder.")
    known = benchmarks()
    names = parsed.pop("tasks") or list(known)
    for name in names:
        if name not in known:
            raise unknown("benchmark task", name, known)
    del parsed["action"]
    return {name: known[name] for name in names}, {key: value for key, value in parsed.items() if value is not None}


def main(arguments: list[str]) -> None:
    """`python -m lm_eval_duel data`."""
    asked, said = parse(arguments)
    print(f"tokens of {said.get('tokenizer') or f'{BUNDLED}; name yours with --tokenizer'}", flush=True)
    failed: dict[str, dict[str, Exception]] = {}  # by reason, then by task
    for name, config in asked.items():
        try:
            print(check(name, config, said), flush=True)
        except Exception as error:  # whatever is wrong with one data set, the others are looked at
            failed.setdefault(_reason(error), {})[name] = error
    for reason, errors in failed.items():
        what = getattr(next(iter(errors.values())), "what", "") if len(errors) == 1 else ""
        print(f"{', '.join(errors)}: NOT LOADED\n    {what}{reason}", flush=True)
    if failed:
        lost = [name for name in asked if any(name in errors for errors in failed.values())]
        raise DuelError(f"{len(lost)} of {len(asked)} tasks cannot be loaded: {', '.join(lost)}")


def _reason(error: Exception) -> str:
    """Why a task cannot be loaded: the same words for the same reason, and this command's own flags as the remedy."""
    if isinstance(error, corpora.WantsMetadata):
        return f"{error.cause} {error.flag}"
    return str(error) if isinstance(error, DuelError) else f"{type(error).__name__}: {error}"


def _yaml(file: Path) -> dict[str, Any]:
    """A task's YAML; what `!function` names stays a name."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    return yaml.load(file.read_text(encoding="utf-8"), Loader)
