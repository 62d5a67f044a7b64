"""The Python interface at the level of ids: what it warns of, and what it refuses."""

import math
from pathlib import Path

import pytest
import tiny
from harness_requests import ask
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.vocabulary import added_tokens
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.options import Options

WARNING = "has no context, but this network expects special tokens before a text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


def test_a_window_without_its_bos_is_warned_of_once(caplog):
    denoiser = denoisers.load("demo-bd", device="cpu")
    before, after = denoiser.special_tokens
    assert len(before) == 1 and not after
    duel = Duel(denoiser, "greedy")
    duel.log_prob([Window(before, (300, 517)), Window((), ()), Window((7,), (300,))])
    assert not warnings(caplog)
    for _ in range(2):
        duel.log_prob([Window(before, (300, 517)), Window((), (300, 517))])
    Duel(denoiser, "margin").sample([()], 4)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"Window 1 {WARNING}")
    assert f"Window(context={before}, target=ids)" in warning

    Duel(denoisers.load("demo-bd", device="cpu"), "greedy").sample([()], 2)
    assert len(warnings(caplog)) == 2  # another denoiser


def test_what_the_advice_says_is_what_the_harness_scores(folder, caplog):
    lm = DuelMDM(pretrained=folder, device="cpu")
    before, after = lm.denoiser.special_tokens
    ids = lm.tok_encode("a b c d")
    scored = Duel(lm.denoiser, "greedy").log_prob([Window(before, ids, after)])[0]
    answers = lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("a b c d",), ("",), ("d " * 40,)))
    assert answers[0] == pytest.approx(scored.log_prob, abs=1e-4)
    lm.loglikelihood(ask("loglikelihood", ("", "a"), ("a b", " c")))
    lm.generate_until(ask("generate_until", ("", {"max_gen_toks": 4}), ("a b", {"max_gen_toks": 4})))
    assert not warnings(caplog)
    wrapped = denoisers.load(folder, device="cpu", cfg_scale=0.5, temperature=0.7)
    assert wrapped.special_tokens == ((2,), (3,))
    Elbo(wrapped).log_prob([Window((), (6, 7))])
    (warning,) = warnings(caplog)
    assert "Window(context=(2,), target=ids, suffix=(3,))" in warning


def test_no_warning_where_none_are_expected(folder, tmp_path, caplog):
    bare = tiny.checkpoint(tmp_path, "bert", framed=False)
    for path, options in ((folder, {"bos": "none"}), (folder, {"bos": "scored"}), (bare, {})):
        denoiser = denoisers.load(path, device="cpu", **options)
        assert denoiser.special_tokens is None
        Duel(denoiser, "greedy").log_prob([Window((), (6, 7))])
    assert not warnings(caplog)


def test_networks_in_memory_are_refused_by_name(folder):
    model = tiny.network("bert")
    tokenizer = tiny.tokenizer()

    with pytest.raises(DuelError, match=r"^'pretrained' .*BertForMaskedLM"):
        DuelMDM(pretrained=model, tokenizer=tokenizer)
    with pytest.raises(DuelError, match=r"^'tokenizer' "):
        DuelMDM(pretrained=folder, tokenizer=tokenizer)
    with pytest.raises(DuelError, match=r"^'name' .*BertForMaskedLM"):
        denoisers.load(model)

    assert denoisers.load(Path(folder), device="cpu").mask_id == 4
    assert Options.parse({"pretrained": 2024}).pretrained == "2024"  # the harness reads a number


def test_factors_of_logits_that_overflow_are_refused_and_the_largest_are_finite(folder):
    for temperature in (1e-45, 1e-21, 1e39, 1e300):
        with pytest.raises(DuelError, match="'temperature'"):
            Options.parse({"temperature": temperature})
    with pytest.raises(DuelError, match="'cfg_scale'"):
        Options.parse({"cfg_scale": 1e39})

    for options in ({"temperature": 1e-20}, {"cfg_scale": 1e20}):
        assert Options.parse(options)
        duel = Duel(denoisers.load(folder, device="cpu", **options), "greedy")
        [score] = duel.log_prob([Window((2,), (6, 7), (3,))])
        assert math.isfinite(score.log_prob)


def test_special_tokens_are_found_without_the_letter_a():
    """Where it is nothing, unknown, or even the special token itself."""
    special = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, "[MASK]": 3}
    letters = {**special, "G": 4, "T": 5}
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}

    def found(model, unknown):
        words = Tokenizer(model)
        frame = {"single": "[CLS] $A [SEP]", "special_tokens": [("[CLS]", 0), ("[SEP]", 1)]}
        words.post_processor = processors.TemplateProcessing(**frame)
        return added_tokens(PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown, **names))

    assert found(models.BPE(letters, []), None) == ([0], [1])
    for unknown in ("[UNK]", "[CLS]"):
        assert found(models.WordLevel(letters, unk_token=unknown), unknown) == ([0], [1])
    with pytest.raises(DuelError, match="bos=none"):
        found(models.WordLevel(special, unk_token="[UNK]"), "[UNK]")
