"""What is printed and written about the bundled results and about made ones, as files in golden/.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import itertools
import re
import shutil
from pathlib import Path

import golden
import numpy as np
import pytest
import results
from laws import slow_but
from results import documents, edit, hf, ours

from lm_eval_duel import demo
from lm_eval_duel.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
RESULTS = demo.FOLDER / "results"
TRACES = [str(path) for path in sorted((RESULTS / "traces").glob("*.jsonl"))]
MADE = "made"  # folders of made results
FEW = "few"
RUNS = {
    "words": ["report", RESULTS / "demo-bd", RESULTS / "demo-ar", "--pairs", "all", "--metric", "word_perplexity"],
    "bits": ["report", RESULTS / "demo-bd", "--pairs", "none", "--metric", "bits_per_byte"],
    "page": ["report", RESULTS, "--traces", *TRACES, "--published", "paper", "--page"],
    "made": ["report", MADE, "--as_published", "--page"],
    "apart": ["report", MADE, "--apart", "--pairs", "none", "--page"],
    "few": ["report", FEW, "--as_published"],
    "few_page": ["report", FEW, "--metric", "bits_per_byte", "--page"],
}
TEX = (("made", "methods_sotu.tex"), ("made", "gap_news.tex"))
DATE = re.compile(r"\d{4}-\d\d-\d\dT\S+|[Bb]elow .*|wrote to .*|/\S*/(made|few|bundled)|\d{4}-\d\d-\d\d")


def check(name, text):
    golden.check(GOLDEN / name, DATE.sub("...", text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every kind of result: caches, a lattice, estimates, bounds, accuracies, unknown tokens; and without samples."""
    results.COUNT = itertools.count()  # the files have the same names, whichever tests ran before
    folder = tmp_path_factory.mktemp("golden")
    chance = np.random.default_rng(5)
    tokens = chance.integers(50, 150, 12)
    hard = chance.normal(3.4, 0.4, 12)  # nats per token

    def docs(shift, tasks=("sotu",)):
        found = {}
        for task in tasks:
            rates = hard + shift + chance.normal(0, 0.02, 12)
            found[task] = documents(-tokens * rates, tokens)
        return found

    made = folder / MADE
    mdlm = {"model": "org/MDLM"}
    both = ("sotu", "news")
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


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled results with other last digits."""
    copy = tmp_path_factory.mktemp("other") / "bundled"
    shutil.copytree(RESULTS, copy)
    golden.nudge_results(copy)
    return copy


@pytest.mark.parametrize("name", slow_but(RUNS, {*RUNS} - {"page"}))
def test_what_is_printed_and_written(name, folder, bundled, tmp_path, capsys):
    """Tables are the golden ones, and every number that a file shows is one of the JSON."""
    out = tmp_path / "out"
    words = []
    for word in RUNS[name]:
        place = folder / word if word in (MADE, FEW) else word
        words.append(str(place).replace(str(RESULTS), str(bundled)))
    main([*words, "--out", str(out)])
    printed = capsys.readouterr().out
    written = {file.name: file.read_text(encoding="utf-8") for file in sorted(out.iterdir()) if file.is_file()}
    for file, text in written.items():
        if file.endswith((".md", ".csv")) or (name, file) in TEX:
            check(f"{name}_{file}", text)
    known = decimals(written["report.json"])
    for file, text in {**written, "the terminal": printed}.items():
        for number in decimals(text):
            assert any(is_rounded(number, value) for value in known), (file, number, "is not in the JSON")
    if "index.html" in written:
        kinds, legend = (re.findall(f'class="{what} ([a-z-]+)', written["index.html"]) for what in ("row", "mark"))
        assert set(kinds) <= set(legend), "each mark is explained"


def decimals(text):
    """The numbers with a decimal point that a file shows, as they stand there, without signs."""
    if page := re.search("<main>.*</main>", text, re.DOTALL):
        text = re.sub("<svg.*?</svg>|<[^>]*>", " ", page[0], flags=re.DOTALL)
    return {number.lstrip("+-") for number in golden.NUMBER.findall(text) if "." in number}


def is_rounded(shown, value):
    """Whether a printed number may be this one, or this share in per cent."""
    digits = len(shown.partition("e")[0].partition(".")[2])
    unit = 10.0 ** (int(shown.partition("e")[2] or 0) - digits)
    return any(abs(float(shown) - scale * float(value)) <= 0.500001 * unit for scale in (1, 100))
