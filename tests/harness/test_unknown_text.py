"""Text that a tokenizer does not know: counted by task and document, warned of, and normalisation in the spec."""

import logging

import pytest
import tiny
from harness_requests import ask
from tokenizers import normalizers
from toys import Toy
from transformers import PreTrainedTokenizerFast

from lm_eval_duel import Duel
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import make_request as request
from lm_eval_duel.text.text import TextEncoder

TEXTS = ["a b Привет the", "a b c", "мир [UNK] x y [UNK]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert")


def test_harness(folder, caplog):
    lm = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu")
    lm.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in TEXTS], task="words"))
    lm.loglikelihood([request("loglikelihood", {}, ("a", " ¿ b"), "pairs", 7)])
    with caplog.at_level(logging.WARNING, "lm_eval.duel_mdm"):
        tasks = lm.get_model_info()["duel"]["tasks"]
    assert tasks["words"]["unk_tokens"] == 2
    assert tasks["words"]["unk_documents"] == {"0": 1, "2": 1}
    assert tasks["pairs"]["unk_tokens"] == 1
    assert tasks["pairs"]["unk_documents"] == {"7": 1}
    assert "words: 2 of 12 tokens (16.7%)" in caplog.text


def test_an_end_of_text_that_is_the_unknown_token_does_not_count():
    tokenizer = tiny.tokenizer(framed=False)
    tokenizer.eos_token = "[UNK]"
    text = TextEncoder(tokenizer, Toy(length=8), "independent", 2)
    assert text.unk_id is None
    assert text.unknown(text.document([1, 1]), "? ?") == 0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([normalizers.Lowercase()], "lower case"),
        ([normalizers.NFD(), normalizers.StripAccents()], "accents"),
        ([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()], "lower case, accents"),
        ([normalizers.NFC()], None),
    ],
)
def test_normalisation_is_in_the_spec(steps, expected):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "the", "house", "The", "House", "cafe", "caf\u00e9"]
    numbers = {word: n for n, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.normalizer = normalizers.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    text = TextEncoder(tokenizer, Toy(length=8), "independent", 2)
    assert text.describe().get("normalises") == expected
    [score] = Duel(Toy(tokens=7, length=8), block=2, tokenizer=tokenizer).score(["the house"])
    assert score.note == (f"up to {expected}" if expected else "")
