"""Causal LMs of transformers: what one call evaluates, and the harness's own model. Their nats: test_families.py."""

import json
import math

import pytest
import tiny
import torch
from close import same_scores
from harness_requests import ask
from lm_eval.models.huggingface import HFLM
from networks import load, refused, written
from toys import Causal

from lm_eval_duel import denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import FOLDER, resolve
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import own_forward
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM

WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((2,), (10, 9)),
    Window((2,), tuple(range(1, 32))),
    Window((2, 14, 5, 9, 9), (33, 6, 7)),
]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_one_forward_a_window_and_the_head_at_scored_positions_only(family, name):
    denoiser = family(name).denoiser
    duel = DuelEstimator(denoiser, "left_to_right", "auto", batch_size=1)
    targets = [len(window.target) for window in WINDOWS]
    evaluated = []

    def count(module, inputs, logits):
        evaluated.append(logits[..., 0].numel())

    hook = denoiser.model.get_output_embeddings().register_forward_hook(count)
    scores = duel.log_prob(WINDOWS)
    hook.remove()

    assert [score.nfe for score in scores] == targets
    assert duel.counts.forwards == len(WINDOWS)
    assert duel.counts.rows == len(WINDOWS)
    assert sum(evaluated) == sum(targets)


def test_a_head_that_cannot_be_split_off_runs_with_the_rest(family, monkeypatch):
    right = family("gemma2")
    monkeypatch.setattr(own_forward, "layer_modules", lambda model: ["model.layers.1", "model.norm", "lm_head"])
    denoiser = load(right.path, right.options)
    assert not denoiser.splits_head
    assert denoiser.layers is denoiser.model

    scores = DuelEstimator(denoiser, "left_to_right", "auto").log_prob(WINDOWS)
    same_scores(scores, DuelEstimator(right.denoiser, "left_to_right", "auto").log_prob(WINDOWS))


# ---------------------------------------------------------------- what is refused


class LooksAhead(Causal):
    """Another last token changes the predictions before it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.last = self_tests.probe_rows(self)[:, -1]  # (R,)

    def features(self, ids, real):
        logits = super().features(ids, real)
        logits[ids[:, -1] != self.last, :-1] *= self.factor
        return logits


@pytest.mark.parametrize("factor", [2.0, math.inf, math.nan])
def test_a_network_that_looks_ahead_is_not_causal(factor):
    self_tests.run(Causal(), "x")
    with pytest.raises(DuelError, match="is not causal"):
        self_tests.run(LooksAhead(factor), "x")


def test_what_is_refused(tmp_path):
    for name in (tiny.checkpoint(tmp_path, "bert"), "demo-mdm", "demo-bd"):
        with pytest.raises(DuelError, match=r"not (autoregressive|causal)"):
            denoisers.load(name, device="cpu", attention="causal")

    path, options = written(tmp_path, "bloom")
    tiny.tokenizer(mask=False, length=int(1e30)).save_pretrained(path)
    with pytest.raises(DuelError, match="max_length"):
        load(path, options)
    assert load(path, options, max_length=48).max_length == 48

    denoiser = load(*written(tmp_path, "llama"))
    with torch.no_grad():
        denoiser.model.model.embed_tokens.weight[12] = float("nan")
    duel = DuelEstimator(denoiser, "left_to_right", "auto")
    [last_token_is_nan] = duel.log_prob([Window((2, 6), (7, 9, 12))])
    assert math.isfinite(last_token_is_nan.log_prob)
    with pytest.raises(NotFinite, match="Window 0, "):
        duel.log_prob([Window((2, 6), (7, 12, 9))])


def test_a_class_that_is_not_the_one_in_the_config(family, tmp_path, caplog):
    """No code of a checkpoint is run; transformers' class stands for its own only where they have one name."""
    expected = DuelEstimator(family("llama").denoiser, "left_to_right", "auto").log_prob(WINDOWS)
    (tmp_path / "modeling_own.py").write_text("raise RuntimeError('this is not run')")

    def with_class(name, has_code):
        entries = {"architectures": [name]}
        if has_code:
            entries["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{name}"}
        return written(tmp_path, "llama", entries)

    for name, has_code in (("LLaMAForCausalLM", True), ("LlamaModel", False)):
        denoiser = load(*with_class(name, has_code))
        same_scores(DuelEstimator(denoiser, "left_to_right", "auto").log_prob(WINDOWS), expected)

    for has_code, message in ((False, "OtherLM.*LlamaForCausalLM"), (True, r"OtherLM.*trust_remote_code")):
        path, options = with_class("OtherLM", has_code)
        refused(path, message, **options)
    assert "is a LlamaModel; scoring it as transformers' LlamaForCausalLM" in caplog.text


# ---------------------------------------------------------------- the harness's own model


def test_the_numbers_are_those_of_the_harness_own_model():
    """Documents by the harness's rolling windows, the last of several; continuations where both show the same."""
    stock = HFLM(pretrained=resolve("demo-ar"), dtype="float32", device="cpu", batch_size=4)
    arguments = {"pretrained": "demo-ar", "attention": "causal", "rule": "left_to_right", "device": "cpu"}
    ours = DuelMDM(**arguments, windows="harness")
    without_bos = DuelMDM(**arguments, bos="none")
    passages = [json.loads(line)["text"] for line in (FOLDER / "text" / "sotu.jsonl").open(encoding="utf-8")]
    texts = [passages[0], " ".join(passages[7:11])]
    assert ours.spec["special_tokens"].startswith(f"[{stock.prefix_token_id}] text [], bos=given")
    assert ours.max_length == stock.max_length + 1 < len(ours.tok_encode(texts[-1])) + 1

    def answers(model, kind, arguments):
        return getattr(model, kind)(ask(kind, *arguments), disable_tqdm=True)

    documents = [(text,) for text in texts]
    rolling = answers(ours, "loglikelihood_rolling", documents)
    assert rolling == pytest.approx(answers(stock, "loglikelihood_rolling", documents), rel=0, abs=1e-3)

    words = texts[0].split()
    pairs = []
    for n, m in ((1, 2), (20, 8), (30, 3)):
        pairs.append((" ".join(words[:n]), " " + " ".join(words[n : n + m])))
    for model, requests in ((ours, [("", texts[0])]), (without_bos, pairs)):
        expected = answers(stock, "loglikelihood", requests)
        for answer, other in zip(answers(model, "loglikelihood", requests), expected, strict=True):
            log_prob, is_greedy = answer
            assert log_prob == pytest.approx(other[0], abs=1e-4)
            assert is_greedy == other[1]


def test_the_first_id_of_a_window_given_makes_no_continuation():
    lm = DuelMDM(pretrained="demo-ar", estimator="ar", bos="first", max_length=16, device="cpu")
    with pytest.raises(DuelError, match="bos=first"):
        lm.loglikelihood(ask("loglikelihood", ("a", " b")), disable_tqdm=True)
