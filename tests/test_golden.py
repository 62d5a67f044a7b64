"""The recorded runs of the bundled networks, made again for a few documents, and a document by the textbook loop.

Golden values: demo/results holds sixteen runs of lm_eval over all of `sotu`, with their model args, the fingerprint of
the weights, the versions of the libraries and the log-probability of every document. Their perplexities are published.
"""

import json
import math

import pytest
import torch
from close import close_nats
from harness_runs import evaluate
from laws import slow_but
from pages import read
from textbook import score
from transformers import AutoModelForMaskedLM

from lm_eval_duel import Window, rules
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.denoisers import load_tokenizer
from lm_eval_duel.results import trace

pytestmark = pytest.mark.usefixtures("one_load")
RUNS = sorted((FOLDER / "results").glob("*/results_*.json"))
PUBLISHED = {"pretrained": "demo-mdm", "rule": "greedy", "block": 32}  # the command of the README
FAST = [
    {"pretrained": "demo-ar", "estimator": "ar"},
    {"pretrained": "demo-bd", "estimator": "elbo"},
    {"pretrained": "demo-bd", "rule": "greedy", "block": 4},
    {"pretrained": "demo-mdm", "rule": "margin", "k": 2, "block": 32},
]


def recorded(run):
    """The model args, the spec and the log-probability of each document that has no near tie."""
    config = json.loads(run.read_text())["config"]
    near_ties = config["duel"]["tasks"]["sotu"]["near_tie_documents"]
    samples = run.with_name(run.name.replace("results_", "samples_sotu_") + "l")
    nats = {}
    for line in map(json.loads, samples.read_text().splitlines()):
        if line["doc_id"] not in near_ties:
            nats[line["doc_id"]] = line["token_perplexity"][0]
    return config["model_args"], config["spec"], nats


def again(args, limit, **more):
    """The spec and the log-probability of each of the first documents, by the harness."""
    model_args = ",".join(f"{key}={value}" for key, value in (args | more).items())
    results = evaluate("sotu", model_args, limit=limit)
    nats = {sample["doc_id"]: sample["token_perplexity"][0] for sample in results["samples"]["sotu"]}
    return results["config"]["spec"], nats


def with_args(run):
    """A parameter of a test: a run, named by its model args."""
    args, _, _ = recorded(run)
    return pytest.param(run, id=str(args), marks=() if args in FAST else pytest.mark.slow)


@pytest.mark.parametrize("run", [with_args(run) for run in RUNS])
def test_a_document_has_the_log_probability_that_was_recorded(run):
    """So have its spec and fingerprint: what a user computes is comparable with the bundled results."""
    args, spec, expected = recorded(run)

    spec_now, nats = again(args, 1 if args in FAST else 3)

    assert spec_now["weights"] == spec["weights"], "the golden values were made with other weights: make them again"
    assert spec_now == spec
    compared = expected.keys() & nats.keys()
    assert compared
    for n in compared:
        assert nats[n] == close_nats(expected[n], 128)


ORDERS = {  # of the first two documents; of the first eight this lattice had the perplexities 40.8613 and 25.3143
    "elbo_exact": [-374.3761927, -360.8988596],
    "oracle": [-319.5764420, -315.3868209],
}


def test_one_lattice_gives_what_the_runs_give(tmp_path):
    """The value of each rule, the mixture's, the mean and the maximum over all orders."""
    path = tmp_path / "t.jsonl"
    lattice = {"pretrained": "demo-bd", "estimator": "oracle", "block": 4}
    again(lattice, 2, lattice_rules="left_to_right+greedy+margin", trace=path)

    runs = {}  # log-probabilities by the rule or the estimator that they are of
    for args, _, nats in map(recorded, RUNS):
        if args["pretrained"] == "demo-bd" and "k" not in args:
            runs[args.get("rule") or args["estimator"]] = nats

    records = trace.read(path)
    assert len(records) == 2
    for n, record in enumerate(records):
        assert record["values"] == {
            "oracle": close_nats(ORDERS["oracle"][n], 128),
            "elbo_exact": close_nats(ORDERS["elbo_exact"][n], 128),
            "mixture": close_nats(runs["mixture"][n], 128),
            "left_to_right:k=1": close_nats(runs["left_to_right"][n], 128),
            "greedy:k=1": close_nats(runs["greedy"][n], 128),
            "margin:k=1": close_nats(runs["margin"][n], 128),
        }


RANDOM_TOKENS = {  # of the first document; the weights were dcacf17b430d, torch 2.13 on one CPU thread
    "noised_elbo,mc_samples=16": -334.4898900,
    "duel,rule=greedy,block=4,noise_seed=0": -514.1385212,
}


@pytest.mark.parametrize("estimator", slow_but(RANDOM_TOKENS, ["noised_elbo,mc_samples=16"]))
def test_the_network_under_random_tokens_gives_what_it_gave(estimator):
    """Made by `lm-eval-duel run --model_args pretrained=demo-duo,estimator=... --tasks sotu --limit 1`."""
    spec, nats = again({"pretrained": "demo-duo", "estimator": estimator}, 1)
    assert spec["weights"] == "dcacf17b430d", "the golden values were made with other weights: make them again"
    assert nats[0] == close_nats(RANDOM_TOKENS[estimator], 128)


@pytest.mark.slow
def test_the_bundled_network_by_the_textbook_loop():
    """The README's number is that of all documents; here is the first, from the plain model, a position at a time."""
    [nats] = [nats for args, _, nats in map(recorded, RUNS) if args == PUBLISHED]
    tokens = 4053  # of the corpus
    perplexity = math.exp(-sum(nats.values()) / tokens)
    assert f"{perplexity:.2f}" in read("README.md")

    folder = FOLDER / "demo-mdm"
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer({"pretrained": folder})
    first, *_ = (FOLDER / "text" / "sotu.jsonl").read_text().splitlines()
    ids = tokenizer(json.loads(first)["text"], add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        by_hand, *_ = score(
            lambda ids: model(input_ids=ids[None]).logits[0],
            tokenizer.mask_token_id,
            torch.arange(model.config.vocab_size) == tokenizer.mask_token_id,
            rules.parse("greedy"),
            32,
            Window((), ids),
            tie_when_all_mask=True,  # rotary positions, nothing in view
        )
    assert by_hand == close_nats(nats[0], 128)
