"""What is printed and written about the bundled results and about made ones, as files in golden/.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import results
from results import documents, edit, hf, ours

from lm_eval_duel import demo
from lm_eval_duel.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
RESULTS = demo.FOLDER / "results"
TRACES = [str(path) for path in sorted((RESULTS / "traces").glob("*.jsonl"))]
MADE, FEW = "made", "few"  # folders of made results
RUNS = {
    "report": ["report", RESULTS, "--traces", *TRACES],
    "words": ["report", RESULTS / "demo-bd", RESULTS / "demo-ar", "--pairs", "all", "--metric", "word_perplexity"],
    "bits": ["report", RESULTS / "demo-bd", "--pairs", "none", "--metric", "bits_per_byte"],
    "leaderboard": ["leaderboard", RESULTS, "--traces", *TRACES, "--published", "paper"],
    "made": ["report", MADE, "--as_published"],
    "few": ["report", FEW, "--as_published"],
    "board": ["leaderboard", MADE, "--benchmark", "sotu=a/b:c"],
    "few_board": ["leaderboard", FEW, "--metric", "bits_per_byte"],
}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\S+|[Bb]elow .*|wrote to .*|/\S*/(made|few|RESULTS)|\d{4}-\d\d-\d\d")


def check(name, text):
    file = GOLDEN / name
    text = DATE.sub("...", text.replace(str(RESULTS), "RESULTS"))
    if os.environ.get("LM_EVAL_DUEL_RECORD"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), name


def rounded(value):
    """JSON with numbers that another CPU gives too, without what differs from run to run."""
    if isinstance(value, dict):
        apart = ("files", "file", "folder", "version", "versions", "retrieved_timestamp", "evaluation_id")
        return {key: rounded(part) for key, part in value.items() if key not in apart}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every kind of result: caches, a lattice, estimates, bounds, accuracies, unknown tokens; and without samples."""
    results.COUNT = itertools.count()  # the files have the same names, whichever tests ran before
    folder, chance = tmp_path_factory.mktemp("golden"), np.random.default_rng(5)
    tokens, hard = chance.integers(50, 150, 12), chance.normal(3.4, 0.4, 12)

    def docs(shift, tasks=("sotu",)):
        return {task: documents(-tokens * (hard + shift + chance.normal(0, 0.02, 12)), tokens) for task in tasks}

    made, mdlm, both = folder / MADE, {"model": "org/MDLM"}, ("sotu", "news")
    hf(made, model="org/AR", docs=docs(-0.3, both))
    ours(made, estimator="elbo", docs=docs(0.3, both), spec={"mc_samples": "16"}, **mdlm)
    ours(made, docs=docs(0, both), nfe=1, **mdlm)
    ours(made, docs=docs(0.03), nfe=1, spec={"cache": "dual"}, **mdlm)
    for rule, shift, nfe in (("greedy:k=2", 0.2, 0.5), ("threshold:mu=0.5", 0.1, 0.4), ("mine:Outward:k=1", 0.3, 1)):
        ours(made, rule=rule, docs=docs(shift), nfe=nfe, **mdlm)
    sampled = {"sample": "0.05", "cheap_cache": "dual", "draw_seed": "0"}
    ours(made, docs=docs(0.05), estimator="two_phase", spec=sampled, **mdlm)
    block_causal = {"model": "BD3", "attention": "block_causal"}
    values = {"sotu": {"elbo_exact": 33.0, "mixture": 30.0, "greedy:k=1": 29.0}}
    ours(made, docs=docs(-0.6), estimator="oracle", values=values, **block_causal)
    ours(made, docs=docs(0.2), block="8", spec={"max_length": "513"}, **block_causal)
    edit(ours(made, model="Other", docs=docs(0.15)), more)

    def plain(a, b):
        return {"a": {"token_perplexity": a, "bits_per_byte": a / 9}, "b": {"token_perplexity": b, "bits_per_byte": 2}}

    few = folder / FEW
    hf(few, plain(18.0, 18.0), model="AR")
    ours(few, plain(24.0, 24.0), estimator="elbo")
    ours(few, plain(22.0, 23.9))
    ours(few, plain(22.5, 23.0), spec={"cache": "prefix"})
    ours(few, plain(17.0, 23.0), model="X", estimator="elbo", spec={"elbo_eps": "0.001"})
    ours(few, plain(16.0, 25.0), model="X")
    return folder


def more(body):
    """An accuracy, unknown tokens and where the result comes from."""
    body["results"]["choice"] = {"acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25, "f1_stderr,strict": "N/A"}
    body["configs"]["choice"] = {"output_type": "multiple_choice"}
    body["configs"]["sotu"] |= {"dataset_path": "owner/set", "test_split": "test"}
    body["n-samples"]["choice"] = {"original": 12, "effective": 6}
    body["config"]["duel"]["tasks"]["sotu"]["unk_tokens"] = 111
    body["config"]["duel"] |= {"versions": {"lm_eval_duel": "0.1"}, "parameters": 123456789}
    body["config"] |= {"batch_size": 8, "random_seed": 7, "limit": 40.0}
    body |= {"chat_template": "x", "system_instruction": "be brief"}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_printed_and_written(name, folder, tmp_path, capsys):
    main(
        [*(str(folder / word if word in (MADE, FEW) else word) for word in RUNS[name]), "--out", str(tmp_path / "out")]
    )
    check(f"{name}.txt", capsys.readouterr().out)
    for file in sorted((tmp_path / "out").iterdir()):
        if file.suffix in (".md", ".tex", ".csv") and not (name == "words" and file.suffix == ".tex"):
            check(f"{name}_{file.name}", file.read_text(encoding="utf-8"))
        if file.suffix == ".json" and name in ("few", "board"):
            check(f"{name}_{file.name}", json.dumps(rounded(json.loads(file.read_text())), indent=0))
    if name == "board":
        main_part = re.search("<main>.*</main>", (tmp_path / "out" / "index.html").read_text(), re.DOTALL)
        check("board_main.html", main_part[0])
        files = (tmp_path / "out" / "exports").rglob("*.json")
        exported = sorted((rounded(json.loads(file.read_text())) for file in files), key=json.dumps)
        kinds = [record["evaluation_results"][0]["metric_config"]["evaluation_description"] for record in exported]
        exported = list(
            {kind.partition(": ")[2]: record for kind, record in zip(kinds, exported, strict=True)}.values()
        )
        check("board_exports.json", json.dumps(exported, indent=0))
