"""Check a checkpoint: its network against other programs for it, and one figure that is known of it.

    python examples/paper/reproduce.py --checkpoint bd3lm
    python examples/paper/reproduce.py --checkpoint demos
    python examples/paper/reproduce.py --folder downloads --documents 100
    python examples/paper/reproduce.py --try

For each checkpoint it prints PASS or FAIL with the largest difference of a log-probability, the measured value with its
interval beside the published one, and the name of a JSON file to attach to an issue. The file holds no path, user name
or host name. What is finished is not computed again, and what was interrupted continues; delete the JSON file to begin
anew.

Without a connection, put the files into --folder. If some are missing, the script prints the commands that fetch them.
The bundled models (--checkpoint demos, or one of them) need nothing. --try does everything with tiny random networks in
the three published layouts, on the bundled text.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import run as paper
import yaml

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import compare, read

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
SCHEMA = 1
PATH = re.compile(r"(?<![\w/.:-])(?:~|[A-Za-z]:)?(?:[/\\]+[\w.@+ -]+){2,}|file://\S+")
TOKENIZER_FILES = "config.json tokenizer.json tokenizer_config.json vocab.json merges.txt"


class Checkpoint(NamedTuple):
    """A published checkpoint, and a figure of the paper."""

    name: str
    row: str  # of recipes.yaml
    task: str  # one of the row's tasks
    corpus: str  # the task's data set in lm_eval_duel.tasks.corpora
    documents: int | None  # under an hour on one H100; None: all
    tokenizer: str | None  # another repository, where the checkpoint has none
    differs: tuple[str, ...]  # from the authors' protocol, besides the documents


class Demo(NamedTuple):
    """A bundled model, and its figure in the README or docs/estimators.md."""

    name: str
    model_args: Mapping[str, Any]
    figure: float
    source: str
    row: str = "demo"
    task: str = "sotu"
    documents: int | None = None
    differs: tuple[str, ...] = ()


PACKED = "the authors pack rows in each worker process, so the number of tokens that they drop depends on their machine"
SMALL = (PACKED, "float32 here, bfloat16 autocast there", "ties go to the lowest position here, by topk there")
LARGE = (
    "the authors keep [MASK] in the softmax",
    "the authors take log-softmax in bfloat16, and pad batches with tokens that LLaDA sees",
    "max_length is 2048 here as in the paper, 1028 in the authors' scripts",
)
CHECKPOINTS = {
    "bd3lm": Checkpoint(
        name="kuleshov-group/bd3lm-owt-block_size4",
        row="zero_shot/bd3lm_block4_duel",
        task="duel_ag_news_wrapped",
        corpus="ag_news",
        documents=None,
        tokenizer="gpt2",
        differs=(*SMALL, "the paper says block 4, its scripts run DUEL with block 16"),
    ),
    "mdlm": Checkpoint(
        name="kuleshov-group/mdlm-owt",
        row="zero_shot/mdlm_duel",
        task="duel_ag_news_wrapped",
        corpus="ag_news",
        documents=250,
        tokenizer="gpt2",
        differs=SMALL,
    ),
    "llada": Checkpoint(
        name="GSAI-ML/LLaDA-8B-Base",
        row="8b/llada_duel_2048",
        task="duel_ag_news",
        corpus="ag_news_parts",
        documents=2000,
        tokenizer=None,
        differs=LARGE,
    ),
}
DEMOS = {
    "demo-mdm": Demo("demo-mdm", {"rule": "greedy", "block": 32}, 54.77, "README.md"),
    "demo-bd": Demo("demo-bd", {"rule": "greedy", "block": 4}, 37.60, "README.md"),
    "demo-ar": Demo("demo-ar", {"estimator": "ar"}, 33.48, "README.md"),
    "demo-duo": Demo("demo-duo", {"rule": "greedy", "block": 4, "noise_seed": 0}, 139.14, "docs/estimators.md"),
}
GROUPS = {"all": list(CHECKPOINTS), "demos": list(DEMOS)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*CHECKPOINTS, "all", *DEMOS, "demos"]
    parser.add_argument("--checkpoint", choices=choices, default="all", help="all: the three published ones")
    parser.add_argument("--documents", type=int, help="only the first documents; the default takes under an hour")
    parser.add_argument("--folder", type=Path, help="a folder with the checkpoints and data, in place of the hub")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="a folder for JSON files and caches")
    parser.add_argument("--device", help="as for lm_eval; a GPU if there is one")
    parser.add_argument("--try", dest="tried", action="store_true", help="tiny random networks, in place of the hub")
    parser.add_argument("--table", action="store_true", help="print docs/evidence.md from docs/evidence, and stop")
    options = parser.parse_args(arguments)
    options.names = GROUPS.get(options.checkpoint, [options.checkpoint])
    if options.tried and options.names[0] in DEMOS:
        parser.error("--try is for the published layouts; the bundled models need no files")
    return options


def main(arguments: Sequence[str]) -> int:
    """The number of checkpoints that did not pass. Raises DuelError for files that are not there."""
    options = parse(arguments)
    if options.table:
        print(page(EVIDENCE), end="")
        return 0
    if options.tried:
        options.out = options.out / "try"
        options.folder = options.out / "files"
        options.documents = options.documents or 4
        write_tiny(options.folder, options.names)
    for name in options.names:
        if name in CHECKPOINTS:
            require_files(CHECKPOINTS[name], options.folder)
    failed = 0
    for name in options.names:
        record = reproduce(name, options)
        print(record["checkpoint"])
        for line in lines_of(record):
            print(f"  {line}", flush=True)
        if record["network"]["verdict"] != "PASS":
            failed += 1
    return failed


# ---------------------------------------------------------------- files


def local_place(name: str, folder: Path | None) -> str:
    """The folder of a hub name's files, or the name itself without a folder."""
    if folder is None:
        return name
    return str(folder / name.rpartition("/")[2])


def write_tiny(folder: Path, names: Sequence[str]) -> None:
    """Write random checkpoints in place of published ones, and the bundled text in place of their data."""
    import tiny_checkpoints

    from lm_eval_duel.tasks.corpora import CORPORA

    for name in names:
        checkpoint = CHECKPOINTS[name]
        tiny_checkpoints.write_checkpoint(Path(local_place(checkpoint.name, folder)), name)
        columns = CORPORA[checkpoint.corpus].columns
        tiny_checkpoints.write_data(folder / "data" / f"{checkpoint.corpus}.jsonl", columns)


def require_files(checkpoint: Checkpoint, folder: Path | None) -> None:
    """Raise DuelError, with the commands that fetch what is missing, unless every file can be read."""
    from lm_eval_duel.denoisers import hub, load_tokenizer
    from lm_eval_duel.tasks.corpora import source

    network = local_place(checkpoint.name, folder)
    has_tokenizer = folder is not None and Path(network, "tokenizer.json").is_file()
    try:
        hub.read_config(network, "main")
        if not has_tokenizer:
            load_tokenizer({"pretrained": local_place(checkpoint.tokenizer or checkpoint.name, folder)})
        source(checkpoint.corpus, None if folder is None else str(folder / "data"))
    except DuelError as error:
        target = folder or Path("downloads")
        commands = "\n".join(f"    {line}" for line in fetching(checkpoint, target))
        raise DuelError(
            f"{error}\nFetch these on a machine with a connection, copy {target} here, and pass --folder {target}:\n"
            f"{commands}"
        ) from None


def fetching(checkpoint: Checkpoint, target: Path) -> Iterator[str]:
    """The commands that fetch a checkpoint, its tokenizer and its data into a folder."""
    from lm_eval_duel.tasks.corpora import CORPORA

    data = CORPORA[checkpoint.corpus]
    yield f"hf download {checkpoint.name} --local-dir {local_place(checkpoint.name, target)}"
    if checkpoint.tokenizer:
        yield f"hf download {checkpoint.tokenizer} {TOKENIZER_FILES} --local-dir {target / checkpoint.tokenizer}"
    place = target / "data" / data.repo
    yield f"hf download {data.repo} {data.file} --repo-type dataset --revision {data.revision} --local-dir {place}"


# ---------------------------------------------------------------- one checkpoint


def reproduce(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a checkpoint. It is written after each of its two parts; a part that it holds is not run again."""
    checkpoint = CHECKPOINTS[name] if name in CHECKPOINTS else DEMOS[name]
    job = job_of(name, options)
    documents = options.documents or checkpoint.documents or "all"
    file = options.out / f"{name}{'-try' if options.tried else ''}-{documents}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    record["schema"] = SCHEMA
    record["checkpoint"] = checkpoint.name
    record["bundled"] = name in DEMOS
    record["random_weights"] = options.tried
    if "network" not in record:
        record |= compare_network(job.config["model_args"], options.device)
        save(record, file)
    if "cell" not in record:
        record |= measure(checkpoint, job)
        save(record, file)
    return record | {"file": str(file)}


def save(record: Mapping[str, Any], file: Path) -> None:
    """Write a record, without paths."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(anonymous(record), indent=1, ensure_ascii=False)
    partial = file.with_suffix(".partial")
    partial.write_text(f"{text}\n", encoding="utf-8")
    partial.replace(file)  # a kill leaves no half file


def anonymous(value: Any) -> Any:
    """A value with PATH for each absolute path in its texts."""
    if isinstance(value, str):
        return PATH.sub("PATH", value)
    if isinstance(value, Mapping):
        return {key: anonymous(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(entry) for entry in value]
    return value


def compare_network(model_args: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Our network beside the checkpoint's own forward pass, and beside the one written out in float64."""
    import torch

    from lm_eval_duel.audit import network_check
    from lm_eval_duel.denoisers import hub
    from lm_eval_duel.denoisers.load_options import LoadOptions
    from lm_eval_duel.harness.lm import DuelMDM

    lm = DuelMDM(**{**model_args, "dtype": "float32", "trust_remote_code": True, "device": device})
    findings, reasons = network_check.compare(lm.options, lm.denoiser, lm.ranks.device)
    compared = [each for each in findings if isinstance(each, network_check.Compared)]
    verdict = "PASS" if compared else "NOT COMPARED"
    if any(each.differs for each in findings):
        verdict = "FAIL"
    network = {
        "verdict": verdict,
        "against": [each.name for each in compared],
        "largest_difference_nats": max((each.difference for each in compared), default=None),
        "compared": [str(each) for each in findings],
        "not_compared": reasons,
        "dtype": str(lm.options.dtype),
        "fingerprint": lm.fingerprint,
    }

    chip = lm.denoiser.device
    pretrained = lm.options.pretrained
    if pretrained in DEMOS:
        revision = "bundled"
    elif Path(pretrained).is_dir():
        revision = "files of a folder"
    else:
        revision = hub.pin_revision(LoadOptions(pretrained, chip)).revision
    device_name = torch.cuda.get_device_name(chip) if chip.type == "cuda" else "CPU"
    return {"revision": revision, "device": device_name, "network": network}


def job_of(name: str, options: argparse.Namespace) -> paper.Job:
    """The run of lm_eval for a checkpoint, as a job of run.py with recipes of one row."""
    if name in DEMOS:
        demo = DEMOS[name]
        checkpoint: Checkpoint | Demo = demo
        group = {"tasks": [demo.task], "rows": {demo.row: {"pretrained": name, **demo.model_args}}}
    else:
        checkpoint = CHECKPOINTS[name]
        group = paper_group(checkpoint, options)
    recipes = options.out / f"{name}.yaml"
    recipes.parent.mkdir(parents=True, exist_ok=True)
    recipes.write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")

    words = [checkpoint.row, "--out", str(options.out), "--recipes", str(recipes)]
    documents = options.documents or checkpoint.documents
    if documents is not None:
        words += ["--limit", str(documents)]
    if options.device is not None:
        words += ["--device", options.device]
    [job] = paper.jobs(paper.parse(words))
    return job


def paper_group(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, Any]:
    """The group of recipes.yaml that has a checkpoint's row, with this row and task alone and with local files."""
    for group in yaml.safe_load(paper.RECIPES.read_text(encoding="utf-8"))["groups"]:
        rows = dict(paper.rows(group))
        if checkpoint.row in rows:
            break
    arguments = rows[checkpoint.row] | {"pretrained": local_place(checkpoint.name, options.folder)}
    metadata = dict(group.get("metadata", {}))
    if options.folder is not None:
        metadata["data_dir"] = str(options.folder / "data")
        if checkpoint.tokenizer and not options.tried:
            arguments["tokenizer"] = local_place(checkpoint.tokenizer, options.folder)
    if options.tried:
        import tiny_checkpoints

        metadata["rows"] = len(tiny_checkpoints.bundled_texts())
        if "length" in metadata:
            metadata["length"] = tiny_checkpoints.LENGTH
    return {**group, "tasks": [checkpoint.task], "metadata": metadata, "rows": {checkpoint.row: arguments}}


def known_figure(checkpoint: Checkpoint | Demo) -> tuple[str, float, str]:
    """The metric, the value and the source of the figure that is known of a checkpoint."""
    if isinstance(checkpoint, Demo):
        return "token_perplexity", checkpoint.figure, checkpoint.source
    line = next(paper.published_figures(checkpoint.row, checkpoint.task), None)
    if line is None:
        raise LookupError(f"The paper has no figure of {checkpoint.row} on {checkpoint.task}.")
    return line["metric"], float(line["value"]), line["source"]


def measure(checkpoint: Checkpoint | Demo, job: paper.Job) -> dict[str, Any]:
    """The value of a checkpoint: run by lm_eval in a process of its own, unless it was run before."""
    if not job.finished:
        code = paper.execute([sys.executable, "-m", "lm_eval_duel", "run", "--config", str(job.write_config())])
        if code:
            raise DuelError(f"The run of {checkpoint.name} ended with exit code {code}; the same command continues it.")

    metric, published, source = known_figure(checkpoint)
    runs = read.runs([job.config["output_path"]])
    [shown] = compare.task(checkpoint.task, runs, metric=metric).rows
    content = runs[-1].content
    counts = content["n-samples"][checkpoint.task]
    duel = content["config"]["duel"]
    differs = list(checkpoint.differs)
    if counts["effective"] < counts["original"]:
        differs.insert(0, f"the first {counts['effective']:,} of {counts['original']:,} documents: no random sample")
    cell = {
        "row": checkpoint.row,
        "task": checkpoint.task,
        "metric": metric,
        "published": published,
        "source": source,
        "value": shown.row.value,
        "interval_95": None if shown.interval is None else list(shown.interval),
        "no_interval": str(shown.no_interval.text) if shown.interval is None else None,
        "documents": counts["effective"],
        "of": counts["original"],
        "protocol_differs": differs,
        "dtype": duel["dtype"],
        "seconds": duel["seconds"],
    }
    return {
        "cell": cell,
        "spec": content["config"]["spec"],
        "fingerprint": content["config"]["fingerprint"],
        "versions": duel["versions"],
    }


def lines_of(record: Mapping[str, Any]) -> Iterator[str]:
    """What is printed of a record."""
    network = record["network"]
    cell = record["cell"]
    yield f"{network['verdict']}: {network_cell(record)}"
    yield from network["compared"]
    for reason in network["not_compared"]:
        yield f"not compared: {reason}"
    yield f"{cell['task']}, {cell['metric']}: {measured(cell)}; published {cell['published']:.2f} ({cell['source']})"
    for line in cell["protocol_differs"]:
        yield f"protocol: {line}"
    if record["random_weights"]:
        yield "random weights: the published value is printed to show the form, and cannot be reached"
    yield f"written: {record['file']}"


# ---------------------------------------------------------------- docs/evidence.md

HEADS = ("checkpoint", "revision", "device", "network", "task", "documents", "measured", "published")
ONLY_DEMOS = """\
**So far only the bundled demo models have been run, by the authors of this package; nobody has run a published
checkpoint yet**, so the first of these results is yours to send."""
PAGE = """\
# Evidence

This page lists the checkpoints that have been run with this package, with the measured and the published values.

{table}

To add a line, run this on a GPU, and attach the JSON files in `reproduced/` to an issue. They hold no path, user name
or host name.

```bash
python examples/paper/reproduce.py --checkpoint bd3lm
```

- `--checkpoint` is `bd3lm`, `mdlm`, `llada` or `all`. LLaDA's network is compared in float32, which takes a GPU of
  80 GB. `--checkpoint demos` repeats the lines of the bundled models in a few minutes on a CPU.
- *network*: our log-probabilities at masked positions against the checkpoint's own code, where it can be run, and
  against the network written out in float64 on the tensors of its files, as in [audit](audit.md). The code of MDLM
  needs `flash-attn`.
- *measured*: with its 95 % interval over documents. What differs from the authors' protocol is in each file.
- *published*: in the DUEL paper; for the bundled models, in the README or in [estimators.md](estimators.md).

This page is made from the files in `docs/evidence/` by `python examples/paper/reproduce.py --table`.
"""


def network_cell(record: Mapping[str, Any]) -> str:
    """The largest difference of a record's network, and from which programs."""
    network = record["network"]
    if not network["against"]:
        return "no other program for it could be run"
    return f"at most {network['largest_difference_nats']:.2g} nats from {' and '.join(network['against'])}"


def measured(cell: Mapping[str, Any]) -> str:
    """A value with its interval."""
    if cell["interval_95"] is None:
        return f"{cell['value']:.2f} (no interval: {cell['no_interval']})"
    low, high = cell["interval_95"]
    return f"{cell['value']:.2f} [{low:.2f}, {high:.2f}]"


def page(folder: Path) -> str:
    """docs/evidence.md, from the JSON files of a folder. Random weights are left out."""
    rows = []
    has_published = False
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["random_weights"]:
            continue
        has_published |= not record["bundled"]
        cell = record["cell"]
        network = f"{record['network']['verdict']}, {network_cell(record)}"
        documents = f"{cell['documents']:,} of {cell['of']:,}"
        checkpoint = (record["checkpoint"], record["revision"], record["device"], network)
        rows.append((*checkpoint, cell["task"], documents, measured(cell), f"{cell['published']:.2f}"))
    lines = [] if has_published else [ONLY_DEMOS, ""]
    for cells in (HEADS, ["---"] * len(HEADS), *rows):
        lines.append(f"| {' | '.join(cells)} |")
    return PAGE.format(table="\n".join(lines))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]) > 0)
    except DuelError as error:
        sys.exit(f"reproduce.py: {error}")
