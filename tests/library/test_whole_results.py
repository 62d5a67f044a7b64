"""Everything that a result of `Duel` says, for texts at the ends of ranges, held to a file.

The files in golden/ were made by `LM_EVAL_DUEL_RECORD=1 pytest tests/library/test_whole_results.py` (torch 2.13 on a
CPU), from a random network in float64, and read by eye. What follows from tokens and their log-probabilities is
computed here a second time.
"""

import dataclasses
import logging
import math
import re
from pathlib import Path

import golden
import pytest
import tiny
from attends import Attends

from lm_eval_duel import Duel, TextEstimate
from lm_eval_duel.denoisers import vocabulary
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.library.results import _bits_per_byte

GOLDEN = Path(__file__).with_name("golden")
ROW = 8  # positions, of which [CLS] and [SEP] are two
TEXTS = {
    "no tokens": "",
    "blank": "  ",
    "one token": "a",
    "a full window": "a b c the of and",
    "one token more": "a b c the of and z",
    "three windows": "c " * 12 + "d",
    "unknown words": "a \u03a9mega \u00e9 c",
    "an unknown word that is spelt out": "a [UNK]",
    "white space at its ends": "  a b ",
    "the same again": "a b c the of and",
    "characters of HTML": "<b> & c",
    "forty characters": "and " * 9 + "andd",
    "more than forty": "and " * 10 + "z",
}
LONG = " ".join("abcdefghijklmnopqrstuvwxyz")
AROUND = {  # context, text, suffix
    "nothing": ("", "a b", ""),
    "a context": ("c d", "a b", ""),
    "a suffix": ("", "a b", "e f"),
    "both, with white space": ("c d ", "a b ", "e f"),
    "white space before": ("c ", "a", ""),
    "white space before, and a suffix": ("", " a b", "e"),
    "white space after, and no suffix": ("c", "a b ", ""),
    "ids": ((7, 8), "a b", (9,)),
    "a context that is cut": ("c d e f g h i j", "a b", ""),
    "a suffix that is cut": ("c", "a b", "d e f g h i j"),
    "no tokens": ("c", "", "d"),
}
ESTIMATORS = {
    "duel": {"rule": "greedy:k=2", "block": 3},
    "threshold": {"rule": "threshold:mu=0.2"},
    "elbo": {"estimator": "elbo", "mc_samples": 32},
    "elbo_eps": {"estimator": "elbo", "mc_samples": 32, "elbo_form": "ratio", "elbo_eps": 0.01},
    "one_draw": {"estimator": "elbo", "mc_samples": 1},
    "two_phase": {"estimator": "two_phase", "rule": "greedy", "block": 2, "sample": 0.5},
    "mixture": {"estimator": "mixture", "block": 2},
    "oracle": {"estimator": "oracle", "block": 2},
    "special_tokens_scored": {"bos": "scored", "rule": "right_to_left", "block": None},
    "bound_special_tokens_scored": {"bos": "scored", "estimator": "elbo", "mc_samples": 32},
    "sampled": {"estimator": "sampled_confidence", "n": 2, "block": 3},
}


class Words(Attends):
    """A network over the words of `tiny.tokenizer`; position 4 of its columns is [MASK]."""

    appends_sep = True

    def __init__(self, bos):
        super().__init__(tokens=39, length=ROW, seed=1)
        self.out *= 0.1  # about 3 nats a token
        self.bos = bos
        self.mask_id = 4
        tokens = set(tiny.tokenizer().get_vocab().values())
        self.excluded = vocabulary.excluded_columns(tokens, self.mask_id, self.vocab_size, "words", self.device)
        self.special_tokens = vocabulary.expected(self, tiny.tokenizer())

    def describe(self):
        return {"denoiser": "words", "mask_token_id": self.mask_id}


def a_duel(bos="given", temperature=None, **arguments):
    network = Words(bos)
    if temperature is not None:
        network = warped(network, temperature)
    return Duel(network, tokenizer=tiny.tokenizer(length=ROW), **arguments)


def in_lines(result, *more):
    """A result: its line, its values by name, and further properties."""
    yield repr(result)
    values = result.to_dict() if hasattr(result, "to_dict") else {}
    values |= {name: getattr(result, name) for name in more}
    for name, value in values.items():
        yield f"    {name}: {value!r}"


@pytest.fixture
def held(caplog):
    """Hold sections of text, and the log, to a file."""
    caplog.set_level(logging.INFO)

    def check(name, *sections):
        logged = [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]
        paragraphs = ["\n".join(section) for section in (*sections, logged)]
        text = "\n\n".join(paragraphs) + "\n"
        golden.check(GOLDEN / f"{name}.txt", re.sub("fingerprint=[0-9a-f]{12}", "fingerprint=...", text))

    return check


def follows_from_tokens(score):
    """What a score says beside its log-probability, from its tokens and its texts."""
    tokens = sum(window.scored_tokens for window in score.windows)
    size = len(score.scored.encode())
    bits = -score.log_prob / math.log(2)
    assert score.perplexity == pytest.approx(math.exp(-score.log_prob / tokens) if tokens else math.nan, nan_ok=True)
    assert score.bits_per_byte == pytest.approx(bits / size if size else math.nan, nan_ok=True)
    assert len(score.tokens) == sum(len(window.target) for window in score.windows)
    if score.token_logprobs:
        assert math.fsum(score.token_logprobs) == pytest.approx(score.log_prob)
    if score.stderr is not None and tokens:
        # the delta method, by a small step
        step = 1e-6
        slope = (math.exp((step - score.log_prob) / tokens) - score.perplexity) / step
        expected = {
            "log_prob": score.stderr,
            "perplexity": score.stderr * slope,
            "bits_per_byte": score.stderr / math.log(2) / size,
        }
        assert score.errors == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_of_texts(name, held):
    duel = a_duel(**ESTIMATORS[name])
    cases = TEXTS if name == "duel" else ("no tokens", "one token", "three windows")
    left_out = () if name == "duel" else ("windows", "scored", "context", "suffix", "text", "units", "tokens")

    sections = [[repr(duel)]]
    scores = duel.score([TEXTS[case] for case in cases])
    for case, score in zip(cases, scores, strict=True):
        follows_from_tokens(score)
        section = [f"{case}:"]
        for line in in_lines(score, "errors", "units"):
            entry, _, _ = line.strip().partition(":")
            if entry not in left_out:
                section.append(line)
        sections.append(section)
    held(f"scores_{name}", *sections)


def test_scores_between_contexts_and_suffixes(held):
    contexts, texts, suffixes = zip(*AROUND.values(), strict=True)
    sections = []
    for case, score in zip(AROUND, a_duel(block=2).score(texts, contexts, suffixes), strict=True):
        follows_from_tokens(score)
        sections.append([f"{case}:", *in_lines(score, "units")])
    held("around", *sections)


def test_a_probability_of_one_has_no_relative_error():
    [score] = a_duel(**ESTIMATORS["elbo"]).score(["a"])
    certain = dataclasses.replace(score, log_prob=0.0, stderr=0.0, perplexity=1.0, bits_per_byte=0.0)
    assert certain.errors == {}
    assert "perplexity≤1.0000, " in repr(certain)


def test_each_call_counts_its_own_cuts(caplog):
    """Of contexts, of suffixes and of prompts; one is enough to be named."""
    duel = a_duel(block=2)
    for case, (context, text, suffix) in AROUND.items():
        caplog.clear()
        duel.score([text], [context], [suffix])
        assert ("suffix of 1 text was cut to fit max_length=8" in caplog.text) == case.endswith("that is cut"), case
    for cut in (1, 2, 0):
        caplog.clear()
        duel.generate(["a b c d e f g h"] * cut + ["a"], max_new_tokens=3)
        assert (f"{cut} of {cut + 1} prompts cut" in caplog.text) == (cut > 0)


def test_estimates_of_texts(held):
    duel = a_duel(block=2)
    cases = {**TEXTS, "many windows": LONG}
    estimates = duel.estimate(list(cases.values()), sample=0.75, seed=1)
    fields = ("tokens", "bytes", "log_prob", "stderr", "blocks", "sampled_blocks", "correlation", "bits_per_byte")
    fields += ("perplexity", "errors", "kind")
    sections = []
    for case, estimate in zip(cases, estimates, strict=True):
        assert estimate.bytes == len(cases[case].encode())
        sections.append([f"{case}:", *in_lines(estimate, *fields)])
    total = TextEstimate.total(estimates)
    assert total.tokens == sum(estimate.tokens for estimate in estimates)
    assert total.bytes == sum(estimate.bytes for estimate in estimates)
    assert total.log_prob == pytest.approx(sum(estimate.log_prob for estimate in estimates))
    held(
        "estimates",
        *sections,
        ["all:", *in_lines(total, *fields)],
        ["none:", *in_lines(TextEstimate.total(duel.estimate([""])), *fields)],
    )


SETTINGS = {
    "argmax": {},
    "drawn": {"do_sample": True, "seed": 3},
    "tempered": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 3},
    "stopped": {"until": ["h", "of"], "max_new_tokens": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_generated_texts(name, held):
    """The network has a filter of its own, which is no change of the generation."""
    duel = a_duel(temperature=2.0, block=2)
    prompts = ["a b", "", [5, 6, 7]]
    suffixes = ["", "z", [9]]
    if "max_new_tokens" in SETTINGS[name]:  # what is left of a row that one prompt fills is no length for all
        prompts.append("a b c d e f g h")
        suffixes.append("")

    sections = []
    texts = duel.generate(prompts, suffixes=suffixes, **SETTINGS[name])
    for prompt, text in zip(prompts, texts, strict=True):
        assert math.fsum(text.token_logprobs) == pytest.approx(text.log_prob)
        sections.append([f"{prompt!r}:", *in_lines(text)])
    held(f"generated_{name}", *sections)


def test_bits_of_no_tokens_have_no_sign():
    """Files of answers compare numbers by value, and -0.0 is 0.0."""
    assert math.copysign(1, _bits_per_byte(0.0, 3)) == 1
    assert math.isnan(_bits_per_byte(0.0, 0))


def test_the_page_of_a_score(held):
    """Colours from 0 to 8 nats, the step of a token, and positions that are given."""
    duel = a_duel(block=3)
    [text] = duel.generate(["a"], max_new_tokens=3)

    sections = []
    for result in (*duel.score(["a b c the of and", ""]), text):
        page = result._repr_html_()
        sections.append(page.replace("<span", "\n<span").split("\n"))
    held("page", *sections)
