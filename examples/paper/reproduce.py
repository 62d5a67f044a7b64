"""Check a published checkpoint: its network against other programs for it, and one figure of the DUEL paper.

    python examples/paper/reproduce.py --checkpoint bd3lm
    python examples/paper/reproduce.py --folder downloads --documents 100
    python examples/paper/reproduce.py --try

For each checkpoint it prints PASS or FAIL with the largest difference of a log-probability, the measured value with its
interval beside the published one, and the name of a JSON file to attach to an issue. The file holds no path, user name
or host name. What is finished is not computed again, and what was interrupted continues; delete
the JSON file to begin anew.

Without a connection: put the files into --folder. What is missing is named, with the command that fetches it.
--try does all of this with tiny random networks of the three layouts, on the bundled text.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_duel.errors import DuelError

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
SCHEMA = 1
PATH = re.compile(r"(?<![\w/.:-])(?:~|[A-Za-z]:)?(?:[/\\]+[\w.@+ -]+){2,}|file://\S+")
HEADS = ("checkpoint", "revision", "device", "network", "task", "documents", "measured", "published")
NOTHING = """\
**Nobody has sent a run of a published checkpoint yet**: what is checked so far are the three bundled demo models and
random weights in published layouts, so the first file is yours to send."""
PAGE = """\
# Evidence

What anyone has run of the published checkpoints, beside the paper's figures.

{table}

To add a line, run this on a GPU, and attach the JSON files in `reproduced/` to an issue. They hold no path, user name
or host name.

```bash
python examples/paper/reproduce.py --checkpoint bd3lm
```

- `--checkpoint` is `bd3lm`, `mdlm`, `llada` or `all`. LLaDA's network is compared in float32, which takes a GPU of
  80 GB.
- *network*: our log-probabilities at masked positions against the checkpoint's own code, where it can be run, and
  against the network written out in float64 on the tensors of its files, as in [audit](audit.md). The code of MDLM
  needs `flash-attn`.
- *measured*: with its 95 % interval over documents. What differs from the authors' protocol is in each file.

This page is made from the files in `docs/evidence/` by `python examples/paper/reproduce.py --table`.
"""
TRIED = {"length": 64}  # of rows, in --try
TRIED_CHARACTERS = 200  # of a text
WIDTH, LAYERS, ATTENTION_HEADS, CONDITION, INNER = 32, 2, 2, 8, 48  # of the tiny networks


class Checkpoint(NamedTuple):
    """A checkpoint, and a figure of the paper. `row` and `task`: of recipes.yaml."""

    name: str
    row: str
    task: str
    corpus: str  # its data set in lm_eval_duel.tasks.corpora
    documents: int | None  # under an hour on one H100; None: all
    tokenizer: str | None  # another repository, where the checkpoint has none
    differs: tuple[str, ...]  # from the authors' protocol, besides the documents


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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", choices=[*CHECKPOINTS, "all"], default="all")
    parser.add_argument("--documents", type=int, help="only the first documents; the default takes under an hour")
    parser.add_argument("--folder", type=Path, help="a folder with the checkpoints and data, in place of the hub")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="a folder for JSON files and caches")
    parser.add_argument("--device", help="as for lm_eval; a GPU if there is one")
    parser.add_argument("--try", dest="tried", action="store_true", help="tiny random networks, in place of the hub")
    parser.add_argument("--table", action="store_true", help="print docs/evidence.md from docs/evidence, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The number of checkpoints that did not pass. Raises DuelError for files that are not there."""
    options = parse(arguments)
    if options.table:
        print(page(EVIDENCE), end="")
        return 0
    names = list(CHECKPOINTS) if options.checkpoint == "all" else [options.checkpoint]
    if options.tried:
        options.out = options.out / "try"
        options.folder = options.out / "files"
        options.documents = options.documents or 4
        for name in names:
            write_tiny(options.folder, name)
    for name in names:
        require_files(CHECKPOINTS[name], options.folder)
    failed = 0
    for name in names:
        print(f"{CHECKPOINTS[name].name}", flush=True)
        record = reproduce(name, options)
        print("\n".join(f"  {line}" for line in lines_of(record)), flush=True)
        failed += record["network"]["verdict"] != "PASS"
    return failed


# ---------------------------------------------------------------- files


def place(name: str, folder: Path | None) -> str:
    """The folder of a hub name's files, or the name itself without a folder."""
    return name if folder is None else str(folder / name.rpartition("/")[2])


def require_files(checkpoint: Checkpoint, folder: Path | None) -> None:
    """Raise DuelError, with the commands that fetch what is missing, unless every file can be read."""
    from lm_eval_duel.denoisers import hub, load_tokenizer
    from lm_eval_duel.tasks.corpora import CORPORA, source

    target = folder or Path("downloads")
    data = CORPORA[checkpoint.corpus]
    fetch = [f"hf download {checkpoint.name} --local-dir {target / checkpoint.name.rpartition('/')[2]}"]
    if checkpoint.tokenizer:
        words = "config.json tokenizer.json tokenizer_config.json vocab.json merges.txt"
        fetch.append(f"hf download {checkpoint.tokenizer} {words} --local-dir {target / checkpoint.tokenizer}")
    fetch.append(
        f"hf download {data.repo} {data.file} --repo-type dataset --revision {data.revision} "
        f"--local-dir {target / 'data' / data.repo}"
    )
    try:
        hub.read_config(place(checkpoint.name, folder), "main")
        if not (folder and (folder / checkpoint.name.rpartition("/")[2] / "tokenizer.json").is_file()):
            load_tokenizer({"pretrained": place(checkpoint.tokenizer or checkpoint.name, folder)})
        source(checkpoint.corpus, None if folder is None else str(folder / "data"))
    except DuelError as error:
        commands = "\n".join(f"    {line}" for line in fetch)
        raise DuelError(
            f"{error}\nFetch these on a machine with a connection, copy {target} here, and pass --folder {target}:\n"
            f"{commands}"
        ) from None


# ---------------------------------------------------------------- one checkpoint


def reproduce(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a checkpoint. It is written after each of its two parts; a part that it holds is not run again."""
    checkpoint = CHECKPOINTS[name]
    job = job_of(name, options)
    documents = options.documents or checkpoint.documents
    file = options.out / f"{name}{'-try' * options.tried}-{documents or 'all'}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    record |= {"schema": SCHEMA, "checkpoint": checkpoint.name, "random_weights": options.tried}
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
    partial.replace(file)


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
    """The checkpoint's own forward pass, or the network written out in float64, against ours on the same rows."""
    import torch

    from lm_eval_duel.audit import network_check
    from lm_eval_duel.denoisers import hub
    from lm_eval_duel.denoisers.load_options import LoadOptions
    from lm_eval_duel.harness.lm import DuelMDM

    lm = DuelMDM(**{**model_args, "dtype": "float32", "trust_remote_code": True, "device": device})
    findings, reasons = network_check.compare(lm.options, lm.denoiser, lm.ranks.device)
    compared = [each for each in findings if isinstance(each, network_check.Compared)]
    failed = any(each.differs for each in findings)
    chip = lm.denoiser.device
    pinned = hub.pin_revision(LoadOptions(lm.options.pretrained, chip))
    of_folder = Path(lm.options.pretrained).is_dir()
    return {
        "revision": "files of a folder" if of_folder else pinned.revision,
        "device": torch.cuda.get_device_name(chip) if chip.type == "cuda" else "CPU",
        "network": {
            "verdict": "FAIL" if failed else "PASS" if compared else "NOT COMPARED",
            "against": [each.name for each in compared],
            "largest_difference_nats": max((each.difference for each in compared), default=None),
            "compared": [str(each) for each in findings],
            "not_compared": reasons,
            "dtype": str(lm.options.dtype),
            "fingerprint": lm.fingerprint,
        },
    }


def job_of(name: str, options: argparse.Namespace) -> Any:
    """The job of run.py for a checkpoint's row: that of recipes.yaml, with local files in place of the hub."""
    import run as paper
    import yaml

    checkpoint = CHECKPOINTS[name]
    groups = yaml.safe_load(paper.RECIPES.read_text(encoding="utf-8"))["groups"]
    every = ((group, row, arguments) for group in groups for row, arguments in paper.rows(group))
    group, arguments = next((group, arguments) for group, row, arguments in every if row == checkpoint.row)
    metadata = dict(group.get("metadata", {}))
    arguments = arguments | {"pretrained": place(checkpoint.name, options.folder)}
    if options.folder is not None:
        metadata["data_dir"] = str(options.folder / "data")
        if checkpoint.tokenizer and not options.tried:
            arguments["tokenizer"] = place(checkpoint.tokenizer, options.folder)
    if options.tried:
        metadata |= TRIED if "length" in metadata else {}
        metadata["rows"] = len(bundled_texts())
    recipes = options.out / f"{name}.yaml"
    recipes.parent.mkdir(parents=True, exist_ok=True)
    own = {**group, "tasks": [checkpoint.task], "metadata": metadata, "rows": {checkpoint.row: arguments}}
    recipes.write_text(yaml.safe_dump({"groups": [own]}), encoding="utf-8")
    words = [checkpoint.row, "--out", str(options.out), "--recipes", str(recipes)]
    for flag, value in (("--limit", options.documents or checkpoint.documents), ("--device", options.device)):
        words += [] if value is None else [flag, str(value)]
    [job] = paper.jobs(paper.parse(words))
    return job


def measure(checkpoint: Checkpoint, job: Any) -> dict[str, Any]:
    """The cell of the paper's table: run by lm_eval in a process of its own, unless it was run before."""
    import csv

    import run as paper
    import yaml

    from lm_eval_duel.results import compare, read
    from lm_eval_duel.results.columns import PAPER_FILE

    if not job.finished:
        file = Path(job.config["use_cache"]).with_name("config.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(job.config), encoding="utf-8")
        if code := paper.execute([sys.executable, "-m", "lm_eval_duel", "run", "--config", str(file)]):
            raise DuelError(f"The run of {checkpoint.name} ended with exit code {code}; the same command continues it.")
    lines = csv.DictReader(PAPER_FILE.read_text(encoding="utf-8").splitlines())
    of_task = (line for line in lines if line["task"] == checkpoint.task)
    figure = next(line for line in of_task if checkpoint.row in line["recipes"].split())
    runs = read.runs([job.config["output_path"]])
    [shown] = compare.task(checkpoint.task, runs, metric=figure["metric"]).rows
    content = runs[-1].content
    counts = content["n-samples"][checkpoint.task]
    differs = list(checkpoint.differs)
    if counts["effective"] < counts["original"]:
        differs.insert(0, f"the first {counts['effective']:,} of {counts['original']:,} documents: no random sample")
    return {
        "cell": {
            "row": checkpoint.row,
            "task": checkpoint.task,
            "metric": figure["metric"],
            "published": float(figure["value"]),
            "source": figure["source"],
            "value": shown.row.value,
            "interval_95": None if shown.interval is None else list(shown.interval),
            "no_interval": str(shown.no_interval.text) if shown.interval is None else None,
            "documents": counts["effective"],
            "of": counts["original"],
            "protocol_differs": differs,
            "dtype": content["config"]["duel"]["dtype"],
            "seconds": content["config"]["duel"]["seconds"],
        },
        "spec": content["config"]["spec"],
        "fingerprint": content["config"]["fingerprint"],
        "versions": content["config"]["duel"]["versions"],
    }


def lines_of(record: Mapping[str, Any]) -> Iterator[str]:
    """What is printed of a record."""
    network, cell = record["network"], record["cell"]
    yield f"{network['verdict']}: {network_cell(record)}"
    yield from network["compared"]
    yield from (f"not compared: {reason}" for reason in network["not_compared"])
    yield f"{cell['task']}, {cell['metric']}: {measured(cell)}; published {cell['published']:.2f}"
    yield from (f"protocol: {line}" for line in cell["protocol_differs"])
    if record["random_weights"]:
        yield "random weights: the published value is printed to show the form, and cannot be reached"
    yield f"written: {record['file']}"


# ---------------------------------------------------------------- docs/evidence.md


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
    """docs/evidence.md, from the JSON files of a folder."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    real = [record for record in records if not record["random_weights"]]
    rows = []
    for record in real:
        cell = record["cell"]
        documents = f"{cell['documents']:,} of {cell['of']:,}"
        network = f"{record['network']['verdict']}, {network_cell(record)}"
        first = (record["checkpoint"], record["revision"], record["device"], network)
        rows.append((*first, cell["task"], documents, measured(cell), f"{cell['published']:.2f}"))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [HEADS, ["---"] * len(HEADS), *rows])
    return PAGE.format(table=table if rows else NOTHING)


# ---------------------------------------------------------------- tiny random networks


def bundled_texts() -> list[str]:
    """The beginnings of the texts of the bundled task."""
    from lm_eval_duel.demo import FOLDER

    lines = (FOLDER / "text" / "sotu.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"][:TRIED_CHARACTERS] for line in lines]


def write_tiny(folder: Path, name: str) -> None:
    """A tiny checkpoint with random weights in the layout of a published one, and the bundled text as its data set."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lm_eval_duel.tasks.corpora import CORPORA

    texts = bundled_texts()
    data = folder / "data" / f"{CHECKPOINTS[name].corpus}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    columns = CORPORA[CHECKPOINTS[name].corpus].columns
    data.write_text("".join(f"{json.dumps(dict.fromkeys(columns, text))}\n" for text in texts), encoding="utf-8")
    known = sorted({character for text in texts for character in text})
    vocabulary = {token: n for n, token in enumerate(["<s>", "?", *known])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    target = Path(place(CHECKPOINTS[name].name, folder))
    target.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(target)
    config, shapes = (tiny_llada if name == "llada" else tiny_dit)(name, len(vocabulary))
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def tiny_dit(name: str, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and the shapes of the tensors of MDLM or BD3-LM; [MASK] is the last row."""
    import torch

    from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig

    config = {"model_type": name, "architectures": [name.upper()], "vocab_size": tokens + 1, "time_conditioning": False}
    config |= {"model_length": TRIED["length"], "hidden_dim": WIDTH, "cond_dim": CONDITION}
    config |= {"n_blocks": LAYERS, "n_heads": ATTENTION_HEADS}
    if name == "bd3lm":
        config |= {"adaln": True, "cross_attn": True, "causal": False, "var_min": False, "block_size": 4}
    with torch.device("meta"):
        network = DiT(DiTConfig(tokens + 1, WIDTH, LAYERS, ATTENTION_HEADS, CONDITION, True))
    return config, {f"backbone.{key}": value.shape for key, value in network.state_dict().items()}


def tiny_llada(name: str, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of LLaDA."""
    from lm_eval_duel.audit.plain_networks import LLADA

    config = {"architectures": ["LLaDAModelLM"], "model_type": "llada", "vocab_size": tokens, "d_model": WIDTH}
    config |= {"embedding_size": tokens + 1, "mask_token_id": tokens, "mlp_hidden_size": INNER, "n_layers": LAYERS}
    config |= {"n_heads": ATTENTION_HEADS, "n_kv_heads": ATTENTION_HEADS, "max_sequence_length": 2048}
    config |= {"rope_theta": 500_000.0, "include_bias": False, "weight_tying": False, "block_type": "llama"}
    config |= {"layer_norm_type": "rms", "activation_type": "silu", "alibi": False}
    whole = {"table": (tokens + 1, WIDTH), "last": (WIDTH,), "head": (tokens + 1, WIDTH)}
    layer = {"before mix": (WIDTH,), "before feed": (WIDTH,), **dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))}
    layer |= {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    shapes = {f"{LLADA[part]}.weight": shape for part, shape in whole.items()}
    for n in range(LAYERS):
        shapes |= {f"{LLADA[part].format(n=n)}.weight": shape for part, shape in layer.items()}
    return config, shapes


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]) > 0)
    except DuelError as error:
        sys.exit(f"reproduce.py: {error}")
