"""Networks through their own forward: what is found out about them, code of their own, and proteins as text."""

import json
import math

import pytest
import tiny
import torch
from close import same_scores
from encoder_reference import PROTEIN_CASES, RESIDUES, esm, protein_ids
from harness_requests import ask, text_log_prob
from harness_runs import evaluate
from laws import slow_but
from safetensors.torch import save_file
from textbook import score

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf.masked_lm import MaskedLM
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM

WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
]


def test_the_head_is_evaluated_at_masked_positions_only_and_all_mask_starts_tie(family):
    seen, denoiser = [], family("modernbert").denoiser
    duel = Duel(denoiser, "greedy", 4)
    head = denoiser.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output[..., 0].numel()))
    duel.log_prob([Window((2, 5, 6, 7), (8, 9, 10), (3,))])
    hook.remove()
    assert sum(seen) == 3 + 2 + 1
    duel = Duel(denoiser, "greedy", 4)
    scored = duel.log_prob([Window((), (8, 8, 20, 31, 6)), Window((2,), (8, 8))])
    assert [s.all_mask_starts for s in scored] == [1, 0] and duel.counts.all_mask_starts == 1
    assert scored[0].reveal_steps[0] == 0


def test_features_are_the_input_of_the_head(family):
    """Learned planners read them: after BERT's transform, not before it."""
    denoiser = family("bert").denoiser
    ids = torch.tensor([[2, 6, denoiser.mask_id, 9, 3]])
    with torch.inference_mode():
        hidden = denoiser.model.bert(ids).last_hidden_state
        expected = denoiser.model.cls.predictions.transform(hidden)
        assert torch.allclose(denoiser.features(ids, None), expected, atol=1e-5)
        logits = denoiser.head(denoiser.features(ids, None)[0])
        assert torch.allclose(logits, denoiser.model(ids).logits[0], atol=1e-4)
    assert denoiser.splits_head and not torch.allclose(expected, hidden, atol=1e-2)


class Deaf(MaskedLM):
    """A network that does not listen to its attention mask."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, None)


class Whole(MaskedLM):
    """A network without an output embedding to hook."""

    def take(self, model):
        model.get_output_embeddings = lambda: None
        super().take(model)


class Rescaled(MaskedLM):
    """A network that does something to its logits after the head."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, mask) * 1.001


class Backwards(MaskedLM):
    """A network that ignores what comes later."""

    def _logits(self, ids, mask=None):
        return torch.cat([super(Backwards, self)._logits(ids[:, : n + 1])[:, -1:] for n in range(ids.shape[1])], 1)


def test_what_networks_do_with_masks_and_heads():
    right = Duel(tiny.masked_lm(tiny.network("bert")), "greedy", 4).log_prob(WINDOWS)
    for kind, honours, splits in ((Deaf, False, True), (Whole, True, False)):
        denoiser = tiny.masked_lm(tiny.network("bert"), kind=kind)
        assert (denoiser.honours_padding, denoiser.splits_head) == (honours, splits)
        same_scores(Duel(denoiser, "greedy", 4).log_prob(WINDOWS), right)
    assert not tiny.masked_lm(tiny.network("bert"), kind=Rescaled).splits_head
    with pytest.raises(DuelError, match="causal"):
        tiny.masked_lm(tiny.network("bert"), kind=Backwards)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_coarse_dtype_does_not_hide_what_a_network_is(name):
    """A barely initialised one in bfloat16: its positions are weak, but BERT has them."""
    quiet = tiny.network(name)
    with torch.no_grad():
        for parameter in quiet.parameters():
            parameter.div_(8)
    assert tiny.masked_lm(quiet.to(torch.bfloat16)).relative_positions == (name == "modernbert")


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

class LetterConfig(PretrainedConfig):
    model_type = "letters"

class LetterModel(PreTrainedModel):
    config_class = LetterConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(40, 8)
        self.head = torch.nn.Linear(8, 40)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids)
        return MaskedLMOutput(logits=self.head(MIX))
"""


MIXED = {"AutoModel": "x + x.mean(1, keepdim=True)", "AutoModelForCausalLM": "x.cumsum(1)"}


@pytest.mark.parametrize("kind", MIXED)
def test_a_network_with_code_of_its_own(tmp_path, kind):
    """Bidirectional or causal, of no class that is known."""
    (tmp_path / "letters.py").write_text(CODE.replace("MIX", MIXED[kind]))
    auto_map = {"AutoConfig": "letters.LetterConfig", kind: "letters.LetterModel"}
    config = {"model_type": "letters", "vocab_size": 40, "max_position_embeddings": 32, "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LetterModel"]}))
    torch.manual_seed(0)
    table, head = torch.randn(40, 8), torch.randn(40, 8)
    tensors = {"embed.weight": table, "head.weight": head, "head.bias": torch.zeros(40)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    causal = kind == "AutoModelForCausalLM"
    tiny.tokenizer(mask=not causal).save_pretrained(tmp_path)
    options = {"device": "cpu", "attention": "causal"} if causal else {"device": "cpu", "dtype": "float64"}
    with pytest.raises(DuelError, match="trust_remote_code"):
        denoisers.load(str(tmp_path), **options)
    denoiser = denoisers.load(str(tmp_path), trust_remote_code=True, **options)
    assert denoiser.honours_padding == causal and not denoiser.splits_head

    def logits(ids):
        x = table[ids].double()
        return (x.cumsum(0) if causal else x + x.mean(0)) @ head.double().T

    if causal:
        row = [2, 6, 7, 9, 30]
        logs = logits(row).masked_fill(denoiser.excluded, -math.inf).log_softmax(-1)
        [scored] = Duel(denoiser, "left_to_right").log_prob([Window((2, 6), (7, 9, 30))])
        assert scored.token_logprobs == pytest.approx([float(logs[i - 1, row[i]]) for i in (2, 3, 4)], abs=1e-4)
        return
    for window, scored in zip(WINDOWS, Duel(denoiser, "greedy", 4).log_prob(WINDOWS), strict=True):
        right = score(logits, 4, denoiser.excluded, rules.parse("greedy"), 4, window, tie_when_all_mask=True)
        assert scored.token_logprobs == pytest.approx(right[2], abs=1e-9)


# ---------------------------------------------------------------- proteins


@pytest.fixture(scope="module", params=slow_but(PROTEIN_CASES, ["esm-2"]))
def protein(request, tmp_path_factory):
    return esm(tmp_path_factory.mktemp(request.param), **PROTEIN_CASES[request.param])[0]


def test_a_residue_is_a_token(protein):
    lm = DuelMDM(pretrained=protein, device="cpu", rule="l2r", block=8)
    duel = Duel(denoisers.load(protein, device="cpu"), "l2r", 8)
    assert [lm.tok_encode(letter) for letter in RESIDUES] == [[n] for n in range(4, 24)]
    assert lm.tok_encode("MKTAYIAKQR") == list(protein_ids("MKTAYIAKQR")) == lm.tok_encode("M K T A Y\nIAKQR")
    [value] = lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("MKTAYIAKQR",)), disable_tqdm=True)
    [expected] = duel.log_prob([Window((0,), protein_ids("MKTAYIAKQR"), (2,))])
    assert value == pytest.approx(expected.log_prob, abs=1e-4)
    [(value, _)] = lm.loglikelihood(ask("loglikelihood", ("MKTA", "YIAK")), disable_tqdm=True)
    [expected] = duel.log_prob([Window((0, *protein_ids("MKTA")), protein_ids("YIAK"), (2,))])
    assert value == pytest.approx(expected.log_prob, abs=1e-4)


def test_the_task_reports_bits_per_residue(protein):
    model_args = f"pretrained={protein},rule=left_to_right:k=64,block=64,max_length=64"
    found = evaluate("proteins", model_args, limit=2, bootstrap_iters=0)
    nats = sum(text_log_prob(sample) for sample in found["samples"]["proteins"])
    results = found["results"]["proteins"]
    bits = results["bits_per_residue,none"]
    assert bits == results["bits_per_byte,none"] == pytest.approx(-nats / math.log(2) / (76 + 105))
    assert results["residue_perplexity,none"] == pytest.approx(2**bits)
