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
from lm_eval_duel.denoisers.hf import own_forward
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM

TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
SIZE = {**tiny.SIZE, **TOKENS, "num_key_value_heads": 1, "max_position_embeddings": 32}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
NETWORKS = {
    "GPT2LMHeadModel": {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": tiny.ROWS},
    "LlamaForCausalLM": SIZE,
    "Qwen2ForCausalLM": {**SIZE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "Gemma2ForCausalLM": {**SIZE, **GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
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
    heads = []
    hook = denoiser.model.get_output_embeddings().register_forward_hook(
        lambda *call: heads.append(call[2][..., 0].numel())
    )
    alone = DuelEstimator(denoiser, "left_to_right", batch_size=1)
    for n, (window, scored) in enumerate(zip(WINDOWS, together, strict=False), start=1):
        assert alone.log_prob([window])[0].token_logprobs == pytest.approx(scored.token_logprobs, abs=1e-4)
        assert alone.counts.forwards == n and scored.nfe == len(window.target)
    hook.remove()
    assert sum(heads) == sum(len(window.target) for window in WINDOWS), "at scored positions only"
    contexts = [(2,), (2, 7, 9, 6)]
    drawn, greedy = duel.sample(contexts, 6, seed=1), duel.sample(contexts, 6, do_sample=False)
    scored = duel.log_prob([Window(c, d.tokens) for c, d in zip(contexts * 2, [*drawn, *greedy], strict=True)])
    assert [s.token_logprobs for s in scored[:2]] == [pytest.approx(d.token_logprobs, abs=1e-4) for d in drawn]
    assert all(s.is_greedy for s in scored[2:])


def test_a_head_that_cannot_be_split_off_runs_with_the_rest(folders, monkeypatch):
    right = DuelEstimator(load(folders["Gemma2ForCausalLM"]), "left_to_right")
    monkeypatch.setattr(own_forward, "layer_modules", lambda model: ["model.layers.1", "model.norm", "lm_head"])
    denoiser = load(folders["Gemma2ForCausalLM"])
    assert not denoiser.splits_head and denoiser.layers is denoiser.model
    whole = DuelEstimator(denoiser, "left_to_right")
    for a, b in zip(whole.log_prob(WINDOWS), right.log_prob(WINDOWS), strict=True):
        assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-4)


# ---------------------------------------------------------------- what is refused


def test_what_is_refused(folders, tmp_path):
    for name in (tiny.checkpoint(tmp_path / "bert", "bert"), "demo-mdm", "demo-bd"):
        with pytest.raises(DuelError, match=r"not (autoregressive|causal)"):
            load(name, tokenizer=None)
    tiny.tokenizer(mask=False, length=int(1e30)).save_pretrained(folders["BloomForCausalLM"])
    with pytest.raises(DuelError, match="max_length"):
        load(folders["BloomForCausalLM"], tokenizer=None)
    assert load(folders["BloomForCausalLM"], tokenizer=None, max_length=48).max_length == 48
    denoiser = load(folders["LlamaForCausalLM"])
    assert denoiser.max_length == 33  # of 32 positions: the last token is never fed
    with torch.no_grad():
        denoiser.model.model.embed_tokens.weight[12] = float("nan")
    duel = DuelEstimator(denoiser, "left_to_right")
    assert math.isfinite(duel.log_prob([Window((2, 6), (7, 9, 12))])[0].log_prob)
    with pytest.raises(NotFinite, match="Window 0, "):
        duel.log_prob([Window((2, 6), (7, 12, 9))])


def test_a_class_that_is_not_the_one_in_the_config(folders, tmp_path, caplog):
    """No code of a checkpoint is run; transformers' class stands for its own only where they have one name."""
    model = network("LlamaForCausalLM")
    cases = (["LLaMAForCausalLM"], True), (["LlamaModel"], False), (["OtherLM"], False), (["OtherLM"], True)
    for names, code in cases:
        model.save_pretrained(tmp_path)
        tiny.tokenizer(mask=False).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = names
        if code:
            config["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{names[0]}"}
            (tmp_path / "modeling_own.py").write_text("raise RuntimeError('this is not run')")
        (tmp_path / "config.json").write_text(json.dumps(config))
        if names == ["OtherLM"]:
            with pytest.raises(DuelError, match=r"OtherLM.*trust_remote_code" if code else "OtherLM.*LlamaForCausalLM"):
                load(str(tmp_path))
        else:
            nats = DuelEstimator(load(str(tmp_path)), "left_to_right").log_prob(WINDOWS)[0].token_logprobs
            assert nats == pytest.approx(by_hand(model, WINDOWS[0]), abs=1e-4)
    assert "is a LlamaModel; scoring it as transformers' LlamaForCausalLM" in caplog.text


def test_an_adapter_is_merged(folders, tmp_path):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        network("LlamaForCausalLM"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(tmp_path)
    denoiser = load(folders["LlamaForCausalLM"], peft=str(tmp_path))
    nats = DuelEstimator(denoiser, "left_to_right").log_prob(WINDOWS)[0].token_logprobs
    assert nats == pytest.approx(by_hand(tuned.eval(), WINDOWS[0]), abs=1e-4)
    assert nats != pytest.approx(by_hand(network("LlamaForCausalLM"), WINDOWS[0]), abs=1e-2)
    assert "peft" in denoiser.describe()


# ---------------------------------------------------------------- the harness's own model


def test_the_numbers_are_those_of_the_harness_own_model():
    """Documents by the harness's rolling windows, the last of several; continuations where both show the same."""
    stock = HFLM(pretrained=resolve("demo-ar"), dtype="float32", device="cpu", batch_size=4)
    ours, bare = (
        DuelMDM(pretrained="demo-ar", attention="causal", rule="left_to_right", device="cpu", **more)
        for more in ({"windows": "harness"}, {"bos": "none"})
    )
    passages = [json.loads(line)["text"] for line in (FOLDER / "text" / "sotu.jsonl").open(encoding="utf-8")]
    texts = [*passages[:3], " ".join(passages[7:11])]
    assert ours.spec["special_tokens"].startswith(f"[{stock.prefix_token_id}] text [], bos=given")
    assert ours.max_length == stock.max_length + 1 < len(ours.tok_encode(texts[-1])) + 1

    def both(lm, kind, arguments):
        return [getattr(each, kind)(ask(kind, *arguments), disable_tqdm=True) for each in (lm, stock)]

    for mine, right in zip(*both(ours, "loglikelihood_rolling", [(text,) for text in texts]), strict=True):
        assert abs(mine - right) <= 1e-3
    words = texts[0].split()
    pairs = [(" ".join(words[:n]), " " + " ".join(words[n : n + m])) for n, m in ((1, 2), (20, 8), (30, 3))]
    for lm, asked in ((ours, [("", text) for text in texts[:2]]), (bare, pairs)):
        for (mine, is_greedy), (right, greedy) in zip(*both(lm, "loglikelihood", asked), strict=True):
            assert is_greedy == greedy and mine == pytest.approx(right, abs=1e-4)


def test_the_first_id_of_a_window_given_makes_no_continuation():
    lm = DuelMDM(pretrained="demo-ar", estimator="ar", bos="first", max_length=16, device="cpu")
    with pytest.raises(DuelError, match="bos=first"):
        lm.loglikelihood(ask("loglikelihood", ("a", " b")), disable_tqdm=True)
