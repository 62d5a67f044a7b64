"""Words and bytes are those of the text that was scored, in the library, in our tasks and in comparisons."""

import math

import pytest
from laws import slow_but

from lm_eval_duel import Duel, compare
from lm_eval_duel.tasks.data import perplexity
from lm_eval_duel.tasks.infilling import target_perplexity
from lm_eval_duel.text.annotated import count_units, split_at_borders

pytestmark = pytest.mark.usefixtures("one_load")
BORDERS = [  # context, text, suffix; what is scored of it; bits per byte by hand
    ("", "x\n", "We the people", "x", 13.3914),
    ("", "act \n\n\n", " now", "act", 3.2621),
    ("We the people of the United   ", "States", "", "   States", 5.1694),
]


@pytest.fixture(scope="module")
def duel():
    return Duel.from_pretrained("demo-mdm", rule="greedy", block=8, device="cpu")


@pytest.mark.parametrize(("context", "text", "suffix", "scored", "bits"), BORDERS)
def test_bits_per_byte_are_those_of_the_text_that_was_scored(duel, context, text, suffix, scored, bits):
    [score] = duel.score([text], contexts=[context], suffixes=[suffix])
    assert score.text == text
    assert score.scored == scored
    assert score.bits_per_byte == pytest.approx(bits, abs=1e-4)
    assert score.bits_per_byte == pytest.approx(-score.log_prob / math.log(2) / score.units.bytes)


def test_equal_windows_have_equal_bits_per_byte(duel):
    """Wherever the white space of a border is written."""
    [expected] = duel.score([" people"], contexts=["We the"], suffixes=[" of the"])
    assert expected.units == (1, len(" people"))

    for context, text, suffix in (("We the ", "people", " of the"), ("We the", " people ", "of the")):
        [score] = duel.score([text], contexts=[context], suffixes=[suffix])
        assert score.windows == expected.windows
        assert score.scored == expected.scored
        assert score.units == expected.units


def test_an_infilling_task_and_the_library_divide_by_the_same_units(duel):
    for context, text, suffix, _, _ in BORDERS:
        [score] = duel.score([text], contexts=[context], suffixes=[suffix])
        doc = {"prefix": context, "target": text, "suffix": suffix}
        metrics = target_perplexity(doc, [(score.log_prob, False)])
        assert metrics["word_perplexity"] == (score.log_prob, score.units.words)
        assert metrics["bits_per_byte"] == (score.log_prob, score.units.bytes)


def test_a_comparison_divides_by_the_same_units(duel):
    scores = []
    for context, text, suffix, _, _ in BORDERS:
        scores += duel.score([text], contexts=[context], suffixes=[suffix])
    nats = -math.fsum(score.log_prob for score in scores)
    words, size = map(sum, zip(*(score.units for score in scores), strict=True))

    by_word, _ = compare(scores, scores, unit="word").perplexities
    by_byte, _ = compare(scores, scores, unit="byte").perplexities

    assert by_word == pytest.approx(math.exp(nats / words))
    assert by_byte == pytest.approx(math.exp(nats / size))


def test_borders_give_back_every_character():
    for context in ("", "a", "a \n"):
        for text in ("", " ", "b", " b\t"):
            for suffix in (None, "", " c"):
                assert "".join(split_at_borders(context, text, suffix)) == context + text + (suffix or "")


def test_a_blank_text_has_no_words():
    for text, words in (("", 0), (" \n", 0), ("a", 1), ("a b", 2), ("a  b\n", 3)):
        assert count_units(text).words == words
    assert count_units(" a b\n", between=True) == (2, 5)
    for text, words in (("a b", 2), (" ", 0)):
        document = {"text": text, "duel_tokens": 1}
        assert perplexity(document, [-1.0])["word_perplexity"] == (-1.0, words)


@pytest.mark.parametrize(
    "bos", slow_but(["given", "scored", "official", "first", "none"], ["given", "scored", "first"])
)
def test_a_perplexity_its_error_and_a_comparison_divide_by_the_scored_tokens(folder, bos):
    """Special tokens count if they are scored, and a first token that is context does not: as in the harness."""
    duel = Duel.from_pretrained(folder, estimator="elbo", mc_samples=16, bos=bos, device="cpu")
    [score] = duel.score(["h e y t h e r e"])
    tokens = 8 + {"scored": 1, "official": 1, "first": -1}.get(bos, 0)
    assert len(score.tokens) == tokens
    assert score.perplexity == pytest.approx(math.exp(-score.log_prob / tokens))
    assert score.errors["perplexity"] == pytest.approx(score.perplexity * score.stderr / tokens)
    assert compare([score], [score], unit="token").perplexities == pytest.approx([score.perplexity] * 2)
