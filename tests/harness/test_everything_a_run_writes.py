"""Everything that runs write, as files in golden/: answers, config.duel, the log and the trace, of every kind of value.

The network has exact weights and runs in float64, so the numbers are the same on every machine. The counts are those
of a plain loop over the trace, in `recount`. LM_EVAL_DUEL_RECORD=1 writes the files anew: read what has changed.
"""

import collections
import itertools
import json
import logging
import math
import re
from pathlib import Path

import exact
import golden
import pytest
from harness_requests import ask
from laws import slow_but

from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.scoring import Evaluation
from lm_eval_duel.results import trace
from lm_eval_duel.text.annotated import Gap

GOLDEN = Path(__file__).parent / "golden"
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
UNKNOWN = "\u043c\u0438\u0440"
ROW = 14  # tokens beside [CLS] and [SEP] in a row of 16
TEXTS = {  # by task; a window of one text is also one of another
    "one": ["", "a", "the of and", LETTERS[: 2 * ROW - 1], LETTERS[: 2 * ROW + 1], LETTERS, "a", f"b {UNKNOWN} a"],
    "two": ["z", "z y", "", "q w e r t y u"],
}
PAIRS = [  # context and continuation: empty ones, one that is cut, one that shares a token with the next, a gap
    ("", " a b"),
    ("a b", ""),
    ("a b c", " d"),
    (LETTERS, " a b c"),
    (LETTERS[: 2 * ROW - 3], " z y"),
    ("a", "b c"),
    ("the of", Gap(" a and", " b c")),
]
PROMPTS = [  # nothing to continue, one that is cut, a stop string, a draw, the first and the last position
    ("", {"max_gen_toks": 1}),
    (LETTERS, {"max_gen_toks": 5}),
    ("a b", {"max_gen_toks": 8, "until": ["the"]}),
    ("a b", {"max_gen_toks": 6, "do_sample": True, "temperature": 0.7, "top_k": 3}),
    ("a b", {"max_gen_toks": 6, "do_sample": True, "temperature": 0.7, "top_k": 3}),
    ("z", {"max_gen_toks": ROW}),
]
LATTICE = {"estimator": "mixture", "lattice_rules": "greedy+threshold:mu=0.2", "block": 3}
DUO = {"network": "duo", "dtype": "float32"}  # the only one that it runs in
RUNS = {
    "greedy": {"rule": "greedy", "block": 4},
    "adaptive": {"rule": "threshold:mu=0.2", "block": 5, "grid": "row", "cache": "prefix"},
    "random": {"rule": "random:k=2", "block": "none", "bos": "first"},
    "harness": {"rule": "left_to_right", "block": 4, "windows": "harness", "max_length": 8},
    "elbo": {"estimator": "elbo", "mc_samples": 16},
    "bound": {
        "estimator": "elbo",
        "mc_samples": 2,
        "elbo_form": "ratio",
        "elbo_eps": 0.01,
        "elbo_block": 4,
        "draw_seed": 3,
    },
    "lattice": LATTICE,
    "oracle": {**LATTICE, "estimator": "oracle", "block": 2},
    "estimate": {"estimator": "two_phase", "rule": "margin", "block": 2, "sample": 0.6, "cache": "prefix"},
    "warped": {"rule": "greedy", "block": 4, "top_k": 2, "temperature": 0.8},
    "ar": {"network": "gpt2", "estimator": "ar"},
    "ties": {"network": "modernbert", "rule": "greedy", "block": 4, "bos": "none"},
    "seeds": {**DUO, "estimator": "duel_seeds", "noise_seeds": 4, "rule": "threshold:mu=0.2", "block": 4},
    "noised": {**DUO, "estimator": "noised_elbo", "mc_samples": 16},
}
PLAIN = {"greedy", "lattice", "elbo", "bound", "estimate", "seeds", "ar", "ties"}
VOLATILE = (  # what another run or machine changes
    "seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "versions",
    "weights",
    "pretrained",
    "trace",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        "bert": exact.language_model(tmp_path_factory.mktemp("bert"), "bert", ROW + 2),
        "modernbert": exact.language_model(tmp_path_factory.mktemp("modernbert"), "modernbert", ROW + 2),
        "gpt2": exact.language_model(tmp_path_factory.mktemp("gpt2"), "gpt2", ROW + 2),
        "duo": exact.dit(tmp_path_factory.mktemp("duo"), "duo"),
    }


def bars(printed):
    """What the last state of each progress bar shows: its title, tokens, and the text behind the rate."""
    shown = {}
    for text in re.split("[\\r\\n]", printed):
        parts = re.fullmatch(r"(\w.*): +\d+%\|.*\| (\d+/\d+) \[.*(?:tok/s|s/tok)(.*)\]", text.rstrip())
        if parts:
            shown[parts[1]] = parts[2] + parts[3]
    return [f"{title}: {state}" for title, state in shown.items()]


def lines(records):
    """JSON, a record a line."""
    return [json.dumps(golden.without(record, VOLATILE), allow_nan=False) for record in records]


@pytest.mark.parametrize("name", slow_but(RUNS, PLAIN))
def test_everything_that_a_run_writes(folders, tmp_path, caplog, capsys, name):
    """Each call counts its own requests alone: texts and continuations come in two calls."""
    caplog.set_level(logging.INFO, "lm_eval.duel_mdm")
    path = tmp_path / "trace.jsonl"
    given = {"dtype": "float64", **RUNS[name]}
    folder = folders[given.pop("network", "bert")]
    lm = DuelMDM(pretrained=folder, device="cpu", trace=str(path), **given)
    answers = []
    for task, texts in TEXTS.items():
        answers += lm.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in texts], task=task))
    traced = trace.read(path)
    require_recounted(lm, traced)

    parts = [["# texts", *map(str, map(float, answers))]]
    if name not in ("random", "bound", "oracle", "estimate"):
        pairs = PAIRS[:-1] if name == "ar" else PAIRS  # it sees no text after a gap
        requests = ask("loglikelihood", *pairs, task="pairs")
        answers = lm.loglikelihood(requests[:4]) + lm.loglikelihood(requests[4:])
        parts.append(["# continuations", *map(str, answers)])
    if name in ("greedy", "adaptive", "lattice"):
        parts.append(["# generated", *lm.generate_until(ask("generate_until", *PROMPTS, task="prompts"))])
    following = Evaluation(lm.options, lm.text, lm.estimator, lm.ranks, None).summary()
    assert not following.cut_contexts, "they are of the evaluation before"
    assert following.counts["merged_borders"] == 0, "they are of the evaluation before"
    duel = lm.get_model_info()["duel"]
    assert duel["trace"] == str(path)
    parts.append(["# results", json.dumps(golden.without(duel, VOLATILE), indent=1)])
    tolerance = 1e-4
    if given["dtype"] == "float64":  # in float32 the last of the printed digits differ between machines
        tolerance = 1e-6
        parts.append(["# bars", *bars(capsys.readouterr().err)])
        messages = [text for text in caplog.messages if "fingerprint" not in text and folder not in text]
        parts.append(["# log", *messages])
        _, *written = path.read_text().splitlines()
        parts.append(["# trace", *lines(map(json.loads, written))])
    text = "\n".join(itertools.chain(*parts)) + "\n"
    golden.check(GOLDEN / f"{name}.txt", text, within=tolerance)


def require_recounted(lm, traced):
    """The entries of the results file, counted again from the lines of its trace."""
    duel = lm.get_model_info()["duel"]
    estimator = lm.estimator.name
    has_unknown = lm.tokenizer.unk_token == "[UNK]"  # of the others it is a word
    for task, texts in TEXTS.items():
        counts = collections.Counter()
        longest = collections.Counter()
        nats = []
        tied = set()
        for line in traced:
            if line["task"] != task:
                continue
            counts["windows"] += 1
            counts["tokens"] += len(line["ids"])
            counts["nfe"] += line["nfe"] or 0
            counts["near_ties"] += line["near_ties"] or 0
            longest[line["doc"]] += len(line["ids"])
            nats.append(line["values"][estimator])
            if line["near_ties"]:
                tied.add(line["doc"])
        entry = duel["tasks"][task]
        value = entry["values"][estimator]
        assert entry["documents"] == len(texts)
        assert entry["requests"] == len(texts)
        assert entry["windows"] == counts["windows"]
        assert entry["tokens"] == counts["tokens"]
        assert entry["longest_document"] == max(longest.values())
        assert entry["near_tie_documents"] == sorted(tied)
        assert entry["unk_tokens"] == has_unknown * sum(text.count(UNKNOWN) for text in texts)
        assert value["windows"] == counts["windows"]
        assert value["nfe"] in (None, counts["nfe"])
        if math.isfinite(math.fsum(nats)):
            assert value["log_prob"] == pytest.approx(math.fsum(nats), abs=1e-9)
        else:
            assert value["log_prob"] is None
