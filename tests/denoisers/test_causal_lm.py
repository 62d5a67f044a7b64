"""Any causal LM of transformers: its nats are those of its own logits, in one forward a window."""

import json
import math

import pytest
import tiny
import torch
import transformers
from harness_requests import ask
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import log_softmax

from lm_eval_duel import denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.demo import FOLDER, resolve
from lm_eval_duel.denoisers.hf import causal_lm
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM

SIZE = {
    "vocab_size": tiny.ROWS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
NETWORKS = {
    "GPT2LMHeadModel": {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": tiny.ROWS},
    "LlamaForCausalLM": SIZE,
    "Qwen2ForCausalLM": {**SIZE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "Gemma2ForCausalLM": {**SIZE, **GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "ModernBertDecoderForCausalLM": {**SIZE, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
    "CohereForCausalLM": {**SIZE, "logit_scale": 0.3},
    "GraniteForCausalLM": {**SIZE, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "OPTForCausalLM": {**SIZE, "ffn_dim": 32, "word_embed_proj_dim": 8},
    "BloomForCausalLM": {"vocab_size": tiny.ROWS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "MixtralForCausalLM": {**SIZE, "num_local_experts": 3, "output_router_logits": True},
    "MambaForCausalLM": {"vocab_size": tiny.ROWS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((2,), (10, 9)),
    Window((2,), tuple(range(1, 32))),
    Window((2, 14, 5, 9, 9), (33, 6, 7)),
]
RAGGED = [*WINDOWS, *(Window((2, n), (7, 9, 30, n)) for n in range(5, 13))]  # so many that long and short go together


def network(name):
    """A random network of transformers whose predictions differ from place to place."""
    torch.manual_seed(7)
    config = getattr(transformers, name.replace("LMHeadModel", "ForCausalLM").replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(config(**NETWORKS[name]))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in key:
                parameter.normal_(std=0.4)
            elif key.endswith("bias"):
                parameter.normal_(std=0.5)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name in NETWORKS:
        found[name] = str(tmp_path_factory.mktemp(name))
        network(name).save_pretrained(found[name])
        tiny.tokenizer(mask=False).save_pretrained(found[name])
    return found


def load(path, **options):
    words = {"tokenizer": tiny.tokenizer(mask=False)}  # AutoTokenizer adds tokens of its own for some classes
    return denoisers.load(path, device="cpu", attention="causal", **{**words, **options})


def by_hand(model, window):
    """Nats of a window from the network's own logits, in float64."""
    row, start = (*window.context, *window.target), len(window.context)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0].double()  # (L, V)
    logs = log_softmax(logits[:, : len(tiny.WORDS)], dim=-1)  # the other rows of the embedding are padding
    return [float(logs[i - 1, row[i]]) for i in range(start, len(row))]


@pytest.mark.parametrize("name", NETWORKS)
def test_nats_are_those_of_the_networks_own_logits(folders, name):
    denoiser = load(folders[name])
    model = getattr(transformers, name).from_pretrained(folders[name], attn_implementation="eager").eval()
    assert denoiser.splits_head, "the head runs at the predicted positions only"
    assert (denoiser.attention, denoiser.shift, denoiser.mask_id, denoiser.bos) == ("causal", 1, None, "given")
    assert denoiser.excluded.nonzero()[:, 0].tolist() == list(range(len(tiny.WORDS), tiny.ROWS))
    duel = DuelEstimator(denoiser, "left_to_right")
    together = duel.log_prob(RAGGED)
    assert duel.counts.forwards < duel.counts.rows <= len(RAGGED)
    for window, scored in zip(RAGGED, together, strict=True):
        assert scored.token_logprobs == pytest.approx(by_hand(model, window), abs=1e-4)
    for window, scored in zip(WINDOWS, together, strict=False):
        alone = DuelEstimator(denoiser, "left_to_right", batch_size=1).log_prob([window])[0]
        assert alone.token_logprobs == pytest.approx(scored.token_logprobs, abs=1e-4)


def test_rotary_positions_that_change_with_the_length_of_a_batch(tmp_path):
    """LongRoPE has other frequencies from a length on, for all rows of a call: only equal lengths go together."""
    short = {"original_max_position_embeddings": 8}  # transformers 4 and 5 look for it in two places
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    scaled = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10_000.0, **factors, **short}
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **short, rope_scaling=scaled)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    model.save_pretrained(tmp_path)
    tiny.tokenizer(mask=False).save_pretrained(tmp_path)
    denoiser = load(str(tmp_path))
    right = [pytest.approx(by_hand(model, window), abs=1e-4) for window in RAGGED]
    assert [scored.token_logprobs for scored in DuelEstimator(denoiser, "left_to_right").log_prob(RAGGED)] == right
    denoiser.honours_padding = True
    assert [scored.token_logprobs for scored in DuelEstimator(denoiser, "left_to_right").log_prob(RAGGED)] != right


def test_one_forward_for_each_window(folders):
    denoiser = load(folders["LlamaForCausalLM"])
    rows = []
    hook = denoiser.layers.register_forward_hook(lambda module, inputs, output: rows.append(output[0].shape[:2]))
    duel = DuelEstimator(denoiser, "left_to_right", batch_size=1)
    for n, window in enumerate(WINDOWS, start=1):
        assert duel.log_prob([window])[0].nfe == len(window.target)
        assert (duel.counts.forwards, duel.counts.rows) == (n, n)
    hook.remove()
    assert rows == [(1, window.length - 1) for window in WINDOWS]  # the last token is predicted and never fed
    heads = []
    hook = denoiser.model.lm_head.register_forward_hook(lambda *call: heads.append(call[2][..., 0].numel()))
    duel.log_prob([Window((2, 5, 6, 7), (8, 9, 10))])
    hook.remove()
    assert sum(heads) == 3  # at scored positions only
    equal = [Window((n,), tuple(range(1, 32))) for n in range(4)]
    duel = DuelEstimator(denoiser, "left_to_right", batch_size=4)
    duel.log_prob(equal)
    assert (duel.counts.forwards, duel.counts.rows) == (1, 4)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GraniteForCausalLM", "ModernBertDecoderForCausalLM"])
def test_samples_are_scored_as_they_were_drawn(folders, name):
    duel = DuelEstimator(load(folders[name]), "left_to_right")
    contexts = [(2,), (2, 7, 9, 6), (2, 30)]
    drawn, greedy = duel.sample(contexts, 6, seed=1), duel.sample(contexts, 6, do_sample=False)
    scored = duel.log_prob([Window(c, d.tokens) for c, d in zip(contexts, [*drawn, *greedy][:3], strict=True)])
    assert [s.token_logprobs for s in scored] == [pytest.approx(d.token_logprobs, abs=1e-4) for d in drawn]
    assert all(s.is_greedy for s in duel.log_prob([Window(c, d.tokens) for c, d in zip(contexts, greedy, strict=True)]))


def test_a_head_that_cannot_be_split_off_runs_with_the_rest(folders, monkeypatch):
    right = DuelEstimator(load(folders["Gemma2ForCausalLM"]), "left_to_right")
    monkeypatch.setattr(causal_lm, "_layer_modules", lambda model: ["model.layers.1", "model.norm", "lm_head"])
    denoiser = load(folders["Gemma2ForCausalLM"])
    assert not denoiser.splits_head and denoiser.layers is denoiser.model
    whole = DuelEstimator(denoiser, "left_to_right")
    for a, b in zip(whole.log_prob(WINDOWS), right.log_prob(WINDOWS), strict=True):
        assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-4)
    contexts = [(2,), (2, 7, 9, 6)]
    for a, b in zip(whole.sample(contexts, 5, seed=2), right.sample(contexts, 5, seed=2), strict=True):
        assert a.tokens == b.tokens and a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-4)


def test_dtypes_and_lengths(folders, tmp_path):
    """A network of 32 positions scores rows of 33: the last token is never fed."""
    for name, dtype in (("MixtralForCausalLM", "bfloat16"), ("MixtralForCausalLM", "float64")):
        denoiser = load(folders[name], dtype=dtype)
        assert str(denoiser.dtype) == f"torch.{dtype}" and denoiser.describe()["dtype"] == dtype
        assert denoiser.splits_head and denoiser.max_length == 33
        [scored] = DuelEstimator(denoiser, "left_to_right").log_prob([Window((2,), (5,) * 32)])
        model = getattr(transformers, name).from_pretrained(folders[name]).eval()
        right = by_hand(model, Window((2,), (5,) * 32))
        assert scored.token_logprobs == pytest.approx(right, abs=1e-4 if dtype == "float64" else 0.5)
    network("BloomForCausalLM").save_pretrained(tmp_path)
    tiny.tokenizer(mask=False, length=int(1e30)).save_pretrained(tmp_path)
    with pytest.raises(DuelError, match="max_length"):
        load(str(tmp_path), tokenizer=None)
    assert load(str(tmp_path), tokenizer=None, max_length=48).max_length == 48


# ---------------------------------------------------------------- what is refused


def test_networks_that_are_not_autoregressive(tmp_path):
    path = tiny.checkpoint(tmp_path / "bert", "bert")
    with pytest.raises(DuelError, match="is not causal"):
        load(path)
    for name in ("demo-mdm", "demo-bd"):
        with pytest.raises(DuelError, match=r"not (autoregressive|causal)"):
            load(name, tokenizer=None)


def test_a_class_that_is_not_the_one_in_the_config(folders, tmp_path, caplog):
    """No code of a checkpoint is run; transformers' class stands for its own only where they have one name."""
    model = network("LlamaForCausalLM")
    for names, code in ((["LLaMAForCausalLM"], True), (["OtherLM"], False), (["OtherLM"], True)):
        model.save_pretrained(tmp_path)
        tiny.tokenizer(mask=False).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = names
        if code:
            config["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{names[0]}"}
            (tmp_path / "modeling_own.py").write_text("raise RuntimeError('this is not run')")
        (tmp_path / "config.json").write_text(json.dumps(config))
        if names == ["OtherLM"] and code:
            with pytest.raises(DuelError, match=r"OtherLM.*trust_remote_code"):
                load(str(tmp_path))
        else:
            nats = DuelEstimator(load(str(tmp_path)), "left_to_right").log_prob(WINDOWS)[0].token_logprobs
            assert nats == pytest.approx(by_hand(model, WINDOWS[0]), abs=1e-4)
    assert "is a OtherLM; scoring it as transformers' LlamaForCausalLM" in caplog.text


def test_an_adapter_is_merged(folders, tmp_path):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        network("CohereForCausalLM"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(tmp_path)
    denoiser = load(folders["CohereForCausalLM"], peft=str(tmp_path))
    nats = DuelEstimator(denoiser, "left_to_right").log_prob(WINDOWS)[0].token_logprobs
    assert nats == pytest.approx(by_hand(tuned.eval(), WINDOWS[0]), abs=1e-4)
    assert nats != pytest.approx(by_hand(network("CohereForCausalLM"), WINDOWS[0]), abs=1e-2)
    assert "peft" in denoiser.describe()


def test_nan_that_shows_only_when_a_token_is_seen(folders):
    denoiser = load(folders["LlamaForCausalLM"])
    with torch.no_grad():
        denoiser.model.model.embed_tokens.weight[12] = float("nan")
    duel = DuelEstimator(denoiser, "left_to_right")
    assert math.isfinite(duel.log_prob([Window((2, 6), (7, 9, 12))])[0].log_prob)  # its own token is never fed
    with pytest.raises(NotFinite, match="Window 0, "):
        duel.log_prob([Window((2, 6), (7, 12, 9))])


# ---------------------------------------------------------------- the harness's own model


@pytest.fixture(scope="module")
def texts():
    passages = [json.loads(line)["text"] for line in (FOLDER / "text" / "sotu.jsonl").open(encoding="utf-8")]
    return [*passages[:7], " ".join(passages[7:11])]  # the last is longer than the network's row


@pytest.fixture(scope="module")
def ours():
    return DuelMDM(
        pretrained="demo-ar", attention="causal", rule="left_to_right", windows="harness", dtype="float32", device="cpu"
    )


@pytest.fixture(scope="module")
def stock():
    return HFLM(pretrained=resolve("demo-ar"), dtype="float32", device="cpu", batch_size=4)


def together(lm, kind, arguments):
    return getattr(lm, kind)(ask(kind, *arguments), disable_tqdm=True)


def test_documents_equal_the_harness_own_model(ours, stock, texts):
    """Per document, by the harness's rolling windows; the last document has several."""
    assert ours.spec["special_tokens"].startswith(f"[{stock.prefix_token_id}] text [], bos=given")
    assert ours.max_length == stock.max_length + 1
    requests = [(text,) for text in texts]
    theirs, counts = together(stock, "loglikelihood_rolling", requests), [len(ours.tok_encode(text)) for text in texts]
    assert max(counts) > stock.max_length
    for mine, right, tokens in zip(together(ours, "loglikelihood_rolling", requests), theirs, counts, strict=True):
        assert abs(mine - right) <= max(1e-4, 1e-6 * tokens)


def pairs(text):
    words = text.split()
    return [(" ".join(words[:n]), " " + " ".join(words[n : n + m])) for n, m in ((1, 2), (5, 1), (20, 8), (30, 3))]


def agree(mine, right):
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in right]
    assert [nats for nats, _ in mine] == pytest.approx([nats for nats, _ in right], abs=1e-4)


def test_continuations_equal_the_harness_own_model(ours, stock, texts):
    """Where both show the same: nothing but a BOS, or with bos=none the context alone."""
    requests = [("", text) for text in texts[:2]]
    agree(together(ours, "loglikelihood", requests), together(stock, "loglikelihood", requests))
    bare = DuelMDM(pretrained="demo-ar", attention="causal", rule="left_to_right", bos="none", device="cpu")
    agree(*(together(lm, "loglikelihood", pairs(texts[0])) for lm in (bare, stock)))


def test_the_authors_windows_of_llama3():
    """bos=first: windows of max_length ids, no BOS, the first id of each given and in no sum."""
    lm = DuelMDM(pretrained="demo-ar", estimator="ar", bos="first", max_length=16, dtype="float32", device="cpu")
    text = "The state of the union is strong, and the people of this nation have never been more free."
    ids = lm.text.encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve("demo-ar"), dtype=torch.float32).eval()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids), 16):
            part = torch.tensor([ids[start : start + 16]])
            nats = log_softmax(model(input_ids=part).logits[0].double()[:-1], -1)
            total += float(nats.gather(1, part[0, 1:, None]).sum())
    assert len(ids) > 20
    (value,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert value == pytest.approx(total, abs=1e-3)
    with pytest.raises(DuelError, match="bos=first"):
        lm.loglikelihood(ask("loglikelihood", ("a", " b")), disable_tqdm=True)
