"""What is printed and written about the bundled results and about made ones, as files in golden/.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import bisect
import html
import itertools
import math
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
from lm_eval_duel.console import command_line

GOLDEN = Path(__file__).parent / "golden"
RESULTS = demo.FOLDER / "results"
TRACES = [str(path) for path in sorted((RESULTS / "traces").glob("*.jsonl"))]
MADE = "made"  # folders of made results
FEW = "few"
EDGES = "edges"
RUNS = {
    "words": ["report", RESULTS / "demo-bd", RESULTS / "demo-ar", "--pairs", "all", "--metric", "word_perplexity"],
    "bits": ["report", RESULTS / "demo-bd", "--pairs", "none", "--metric", "bits_per_byte"],
    "page": ["report", RESULTS, "--traces", *TRACES, "--published", "paper", "--page"],
    "made": ["report", MADE, "--as_published", "--page"],
    "apart": ["report", MADE, "--apart", "--pairs", "none", "--page"],
    "few": ["report", FEW, "--as_published"],
    "edges": ["report", EDGES, "--as_published", "--page", "--pairs", "both"],
    "few_page": ["report", FEW, "--metric", "bits_per_byte", "--page"],
}
WHOLE = ("edges",)  # of which the JSON, the page and what is printed are compared, too
TEX = (("made", "methods_sotu.tex"), ("made", "gap_news.tex"))
DATE = re.compile(r"\d{4}-\d\d-\d\dT[^\s,]+|Below .*|wrote to .*|/\S*/(made|few|edges|bundled)|\d{4}-\d\d-\d\d")


def check(name, text):
    # a difference of two close values loses digits
    golden.check(GOLDEN / name, DATE.sub("...", text), within=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every kind of result: caches, a lattice, estimates, bounds, accuracies, unknown tokens; and without samples."""
    results.COUNT = itertools.count()  # the files have the same names, whichever tests ran before
    folder = tmp_path_factory.mktemp("golden")
    chance = np.random.default_rng(5)
    tokens = chance.integers(50, 150, 12)
    hard = chance.normal(3.4, 0.4, 12)  # nats per token

    def docs(shift, tasks=("sotu",)):
        by_task = {}
        for task in tasks:
            rates = hard + shift + chance.normal(0, 0.02, 12)
            by_task[task] = documents(-tokens * rates, tokens)
        return by_task

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
def edges(tmp_path_factory):
    """Results at the ends of ranges: few documents, equal values, infinite ones, caches, coarse dtypes, costs."""
    results.COUNT = itertools.count(5000)
    folder = tmp_path_factory.mktemp("edges") / EDGES
    chance = np.random.default_rng(8)
    tokens = chance.integers(20, 90, 11)
    hard = chance.normal(3.2, 0.3, 11)  # nats per token

    def docs(shift, **counts):
        """Documents of tasks, `counts` of each."""
        by_task = {}
        for task, count in counts.items():
            rates = hard[:count] + shift + chance.normal(0, 0.02, count)
            by_task[task] = documents(-tokens[:count] * rates, tokens[:count])
        return by_task

    sizes = {"nine": 9, "ten": 10, "one": 1, "two": 2}
    hf(folder, model="org/AR", docs=docs(-0.2, **sizes), dtype="torch.bfloat16")
    main_model = {"model": "org/M", "nfe": 1}
    rules = ["greedy:k=1", "greedy:k=2", "margin:k=1", "entropy:k=1", "greedy:k=4", "threshold:mu=0.9"]
    for n, rule in enumerate(rules):  # all on ten documents, one more than are compared with each other; five on nine
        tasks = {"nine": 9, "ten": 10}
        if n < 2:
            tasks = sizes
        elif n == 3:
            tasks = {"ten": 10}
        ours(
            folder,
            model="org/M",
            rule=rule,
            docs=docs(0.03 * n, **tasks),
            nfe=1 - 0.1 * n,
            duel={"seconds": 2.0 + n},
            total_evaluation_time_seconds=f"{30 + n}.5",
        )
    for draws, shift in (("16", 0.5), ("1024", 0.45), ("8", 0.4)):
        ours(
            folder,
            model="org/M",
            estimator="elbo",
            docs=docs(shift, **sizes),
            spec={"mc_samples": draws},
            duel={"seconds": 40 * shift},
        )
    spec = {"elbo_eps": "0.001", "mc_samples": "1024", "elbo_form": "ratio"}
    ours(folder, model="org/M", estimator="elbo", docs=docs(0.42, nine=9, ten=10), spec=spec)
    ours(folder, docs=docs(0.02, ten=10), spec={"cache": "prefix"}, **main_model)
    ours(folder, docs=docs(0.02, ten=10), spec={"cache": "dual", "warpers": "temperature=0.7"}, **main_model)

    # the same result twice, once with another value; a coarse dtype on two GPUs; a part from a response cache
    again = docs(0.1, ten=10)
    for seconds in (1.0, 1.5):
        where = {
            "device": "cuda",
            "ranks": 2,
            "seconds": seconds,
            "forwards": 12345,
            "peak_memory_bytes": 3 * 2**30,
        }
        ours(folder, model="Coarse", docs=again, spec={"dtype": "bfloat16"}, duel=where)
    coarse = {"model": "Coarse", "spec": {"dtype": "bfloat16"}}
    ours(
        folder, estimator="elbo", docs=docs(0.5, ten=10), duel={"device": "cuda", "ranks": 2, "seconds": 4.0}, **coarse
    )
    ours(folder, rule="margin:k=1", docs=docs(0.2, ten=10), duel={"peak_memory_bytes": 2**20 + 2**19}, **coarse)
    edit(ours(folder, model="Cached", docs=docs(0.2, ten=10)), partly_cached)
    ours(folder, model="Cached", estimator="elbo", docs=docs(0.6, ten=10), duel={"answers_from_cache": 10})

    # the noise of two seeds, and their mean; the same numbers under two names; an infinite value; a group
    noise = {"noise": "uniform", "noise_seed": "0"}
    ours(folder, model="Noise", docs=docs(0.1, ten=10, nine=9), spec=noise)
    ours(folder, model="Noise", docs=docs(0.05, ten=10, nine=9), spec=noise | {"noise_seed": "1"})
    equal = docs(0.15, ten=10, nine=9)
    ours(folder, model="Equal", docs=equal)
    ours(folder, model="Twin", docs=equal, block="8")
    impossible = docs(0.1, ten=10)
    text, _, count = impossible["ten"][3]
    impossible["ten"][3] = text, -math.inf, count
    edit(ours(folder, model="Never", docs=impossible), never)
    edit(ours(folder, model="Grouped", docs=docs(0.1, two=2)), grouped)
    return folder


def partly_cached(body):
    """Four of ten documents were computed by this run."""
    task = body["config"]["duel"]["tasks"]["ten"]
    task["documents"] = 4
    body["config"]["duel"]["answers_from_cache"] = 6


def never(body):
    """A token has probability 0."""
    value = body["config"]["duel"]["tasks"]["ten"]["values"]["duel"]
    value |= {"log_prob": None, "reason": "a token has probability 0"}
    body["nulls"] = {}
    for entry in body["results"]["ten"]:
        body["results"]["ten"][entry] = None
        body["nulls"][f"results.ten.{entry}"] = command_line.REASONS[math.inf]


def grouped(body):
    """A group of tasks, a task without numbers, and accuracies: equal documents, two filters, no decoding."""
    body["groups"] = {"all": {}}
    body["group_subtasks"] = {"all": ["two", "empty"]}
    body["results"]["all"] = {"acc,none": 0.5}
    body["results"]["empty"] = {"alias": "empty"}
    body["results"]["choice"] = {
        "acc,none": 1.0,
        "acc_stderr,none": 0.0,
        "acc,strict": 0.25,
        "acc_stderr,strict": 0.125,
        "brier,none": 0.125,
        "brier_stderr,none": "N/A",
        "word_count": 7,
        "acc_norm,none": 0.75,
    }
    body["configs"]["choice"] = {"output_type": "loglikelihood"}
    body["versions"]["choice"] = 2.0
    body["n-shot"]["choice"] = 3


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled results with other last digits."""
    copy = tmp_path_factory.mktemp("other") / "bundled"
    shutil.copytree(RESULTS, copy)
    golden.nudge_results(copy)
    return copy


@pytest.mark.parametrize("name", slow_but(RUNS, {*RUNS} - {"page"}))
def test_what_is_printed_and_written(name, folder, edges, bundled, tmp_path, capsys):
    """Tables are the golden ones, and every number that a file shows is one of the JSON."""
    out = tmp_path / "out"
    folders = {MADE: folder / MADE, FEW: folder / FEW, EDGES: edges}
    words = []
    for word in RUNS[name]:
        place = folders.get(word, word)
        words.append(str(place).replace(str(RESULTS), str(bundled)))

    main([*words, "--out", str(out)])

    printed = capsys.readouterr().out
    written = {}
    for file in sorted(out.iterdir()):
        if file.is_file():
            written[file.name] = file.read_text(encoding="utf-8")
    check_golden(name, written, printed)
    check_numbers({**written, "the terminal": printed}, written["report.json"])
    if "index.html" in written:
        page = written["index.html"]
        kinds = set(re.findall('class="row ([a-z-]+)', page))
        explained = set(re.findall('class="mark ([a-z-]+)', page))
        assert kinds <= explained


def check_golden(name, written, printed):
    """What a run wrote and printed is what the golden files hold."""
    for file, text in written.items():
        if file.endswith((".md", ".csv")) or (name, file) in TEX or (name in WHOLE and file == "report.json"):
            check(f"{name}_{file}", text)
    if name in WHOLE:
        check(f"{name}_terminal.txt", printed)
        check(f"{name}_page.txt", words_of(written["index.html"]))


def check_numbers(texts, report_json):
    """Every number that a text shows is one of the JSON, rounded, or a share of it in per cent."""
    values = []
    for number in decimals(report_json):
        values.append(float(number))
        values.append(100 * float(number))
    values.sort()
    for name, text in texts.items():
        for number in decimals(text):
            assert is_rounded(number, values), (name, number, "is not in the JSON")


def words_of(page):
    """The texts of a page and its plot, a line each."""
    shown = re.sub("<(style|script).*?</\\1>", " ", page, flags=re.DOTALL)
    marks = re.findall(r"<(?:line|circle|rect|text)\b[^>]*>", shown)  # where the plot has its values
    texts = [html.unescape(text.strip()) for text in re.split("<[^>]*>", shown)]
    lines = [text for text in texts if text] + marks
    return "\n".join(lines) + "\n"


def decimals(text):
    """The numbers with a decimal point that a file shows, as they stand there, without signs."""
    if page := re.search("<main>.*</main>", text, re.DOTALL):
        text = re.sub("<svg.*?</svg>|<[^>]*>", " ", page[0], flags=re.DOTALL)
    return {number.lstrip("+-") for number in golden.NUMBER.findall(text) if "." in number}


def is_rounded(shown, values):
    """Whether a printed number may be one of these values, which are sorted."""
    mantissa, _, exponent = shown.partition("e")
    decimal_places = len(mantissa.partition(".")[2])
    reach = 0.500001 * 10.0 ** (int(exponent or 0) - decimal_places)
    nearest = bisect.bisect_left(values, float(shown) - reach)
    return nearest < len(values) and values[nearest] <= float(shown) + reach
