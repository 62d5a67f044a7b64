"""Transformers denoisers on tiny random checkpoints: the right numbers, and clear errors for wrong checkpoints."""

import json
import re

import pytest
import tiny
import torch
from close import same_scores
from safetensors.torch import load_file, save_file
from textbook import score

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf.masked_lm import MaskedLM
from lm_eval_duel.denoisers.hub import pick_device as load_device
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.duel import DuelEstimator

FAMILIES = ["bert", "roberta", "distilbert", "modernbert"]
RULES = ["greedy", "margin:k=2", "threshold:mu=0.3", "klass:mu=0.2:nu=0.5"]
WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {f: tiny.checkpoint(tmp_path_factory.mktemp(f), f) for f in [*FAMILIES, "gpt2"]}


def load(path, **options):
    return denoisers.load(path, device="cpu", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_found_at_load(folders, family):
    denoiser = load(folders[family])
    assert denoiser.mask_id == 4
    assert denoiser.vocab_size == tiny.ROWS
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [4, *range(len(tiny.WORDS), tiny.ROWS)]
    assert denoiser.max_length == 32
    assert denoiser.honours_padding
    assert denoiser.relative_positions == (family == "modernbert")
    assert denoiser.splits_head  # the head runs at masked positions only


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_textbook_loop_over_full_logits(folders, family):
    denoiser = load(folders[family], dtype="float64")
    model = tiny.network(family).double()
    scores = [(rule, DuelEstimator(denoiser, rule, 4).log_prob(WINDOWS)) for rule in RULES]
    for rule, window, scored in [(rule, *pair) for rule, of in scores for pair in zip(WINDOWS, of, strict=True)]:
        with torch.no_grad():
            _, steps, nats, greedy, nfe = score(
                lambda ids: model(input_ids=ids[None]).logits[0],
                4,
                denoiser.excluded,
                rules.parse(rule),
                4,
                window,
                tie_when_all_mask=denoiser.relative_positions,
            )
        assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe), rule
        assert scored.token_logprobs == pytest.approx(nats, abs=1e-9), rule


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_equals_the_row_in_a_batch(folders, family):
    denoiser = load(folders[family], dtype="float64")
    together = DuelEstimator(denoiser, "greedy", 4).log_prob(WINDOWS)
    for batch_size in (1, 2):
        for window, scored in zip(WINDOWS, together, strict=True):
            alone = DuelEstimator(denoiser, "greedy", 4, batch_size=batch_size).log_prob([window])[0]
            assert alone.reveal_steps == scored.reveal_steps
            assert alone.token_logprobs == pytest.approx(scored.token_logprobs, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_evaluated_at_hidden_cells_only(folders, family):
    denoiser = load(folders[family])
    seen = []
    hook = denoiser._output.register_forward_hook(lambda module, inputs, output: seen.append(output[..., 0].numel()))
    DuelEstimator(denoiser, "greedy", 4).log_prob([Window((2, 5, 6, 7), (8, 9, 10), (3,))])
    hook.remove()
    assert sum(seen) == 3 + 2 + 1


def test_blank_starts_tie_and_are_counted(folders):
    duel = DuelEstimator(load(folders["modernbert"]), "greedy", 4)
    scored = duel.log_prob([Window((), (8, 8, 20, 31, 6)), Window((2,), (8, 8))])
    assert [s.all_mask_starts for s in scored] == [1, 0]
    assert scored[0].reveal_steps[0] == 0
    assert duel.counts.all_mask_starts == 1


class Deaf(MaskedLM):
    """A network that does not listen to its attention mask."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, None)


class Whole(MaskedLM):
    """A network without an output embedding to hook."""

    def take(self, model):
        model.get_output_embeddings = lambda: None
        super().take(model)


def test_equal_lengths_go_together_where_padding_is_seen():
    deaf = tiny.masked_lm(tiny.network("bert"), kind=Deaf)
    assert not deaf.honours_padding
    together = DuelEstimator(deaf, "greedy", 4).log_prob(WINDOWS)
    right = DuelEstimator(tiny.masked_lm(tiny.network("bert")), "greedy", 4).log_prob(WINDOWS)
    same_scores(together, right)


def test_full_logits_where_there_is_no_head_to_split():
    whole = tiny.masked_lm(tiny.network("bert"), kind=Whole)
    assert not whole.splits_head
    right = DuelEstimator(tiny.masked_lm(tiny.network("bert")), "greedy", 4).log_prob(WINDOWS)
    same_scores(DuelEstimator(whole, "greedy", 4).log_prob(WINDOWS), right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes(folders, dtype):
    denoiser = load(folders["bert"], dtype=dtype)
    assert str(denoiser.dtype) == f"torch.{dtype}" and denoiser.honours_padding
    scored = DuelEstimator(denoiser, "l2r", 4).log_prob(WINDOWS)
    exact = DuelEstimator(load(folders["bert"]), "l2r", 4).log_prob(WINDOWS)
    tolerance = {"bfloat16": 1.0, "float64": 1e-4}[dtype]
    assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in exact], abs=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_coarse_dtype_does_not_hide_what_a_network_is(family):
    """A barely initialised BERT in bfloat16: its positions are weak, but they are there."""
    quiet = tiny.network(family)
    with torch.no_grad():
        for parameter in quiet.parameters():
            parameter.div_(8)
    denoiser = tiny.masked_lm(quiet.to(torch.bfloat16))
    assert denoiser.relative_positions == (family == "modernbert")


class Rescaled(MaskedLM):
    """A network that does something to its logits after the head."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, mask) * 1.001


def test_a_head_that_is_not_the_last_word_is_not_split():
    assert not tiny.masked_lm(tiny.network("bert"), kind=Rescaled).splits_head


def test_ids_that_no_token_has_are_padding():
    holes = set(range(len(tiny.WORDS))) - {20} | {38}
    denoiser = tiny.masked_lm(tiny.network("bert"), holes)
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [4, 20, 34, 35, 36, 37, 39]


# ---------------------------------------------------------------- wrong checkpoints


def test_devices():
    assert load_device("cuda:0") == load_device("0") == load_device(None) or torch.cuda.is_available()
    assert load_device("cpu:0").type == "cpu"  # the name that accelerate gives
    for wrong in ("mps", "xpu", "nowhere", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(DuelError, match=f"No device '{wrong}'.* cpu"):
            load_device(wrong)


def test_a_network_that_is_no_masked_lm_is_refused(folders):
    for options in ({}, {"attention": "bidirectional", "mask_token_id": 4}):
        with pytest.raises(DuelError, match=r"GPT2LMHeadModel.* estimator=ar.* family="):
            load(folders["gpt2"], **options)


def test_a_causal_network_is_refused():
    class Backwards(MaskedLM):
        """A network that ignores what comes later."""

        def _logits(self, ids, mask=None):
            return torch.cat([super(Backwards, self)._logits(ids[:, : n + 1])[:, -1:] for n in range(ids.shape[1])], 1)

    with pytest.raises(DuelError, match="is causal: its predictions ignore later tokens"):
        tiny.masked_lm(tiny.network("bert"), kind=Backwards)


def test_args_that_a_masked_lm_has_no_choice_of(folders):
    for name, value in {"shift_logits": True, "backend": "native", "sigma": "clamped", "peft": "adapter"}.items():
        with pytest.raises(DuelError, match=f"is of the family masked LM, which has no choice of '{name}'"):
            load(folders["bert"], **{name: value})
    with pytest.raises(DuelError, match="is a masked LM of transformers, so bidirectional; leave attention out"):
        load(folders["bert"], attention="block_causal")


def test_a_shift_in_its_config_means_nothing(tmp_path):
    """`right_shift_logits` is an entry of decoders."""
    path = tiny.checkpoint(tmp_path, "bert")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "right_shift_logits": True}))
    assert denoisers.load(path, device="cpu").shift == 0


def test_mask_token(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert", mask=False)
    with pytest.raises(DuelError, match="names a mask token; pass mask_token_id=<id>"):
        load(path)
    assert load(path, mask_token_id=4).mask_id == 4
    with pytest.raises(DuelError, match=r"mask_token_id=40 is not an id of .*; its ids are 0 to 39\."):
        load(path, mask_token_id=40)


def test_broken_weights(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    gone = next(name for name in weights if "layer.1" in name and "query.weight" in name)
    save_file({name: value for name, value in weights.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(DuelError, match=f"do not fill BertForMaskedLM: 1 missing: {re.escape(gone)}"):
        load(path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DuelError, match=f"Cannot read {re.escape(str(file))}: SafetensorError: .* cut off or damaged"):
        load(path)
    weights[gone.replace("self.query", "output.dense")][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        DuelError, match="returns NaN or infinite logits for arbitrary tokens: its weights or dtype are"
    ):
        load(path)


def test_nan_that_shows_only_when_a_token_is_seen(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    table = weights["bert.embeddings.word_embeddings.weight"]
    token = next(token for token in range(12, 30) if not (self_tests.random_rows(load(path)) == token).any())
    weights["cls.predictions.decoder.weight"] = table.clone()
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    table[token] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    duel = DuelEstimator(load(path), "left_to_right", 4)
    with pytest.raises(NotFinite, match=r"NaN or infinite logits\. \(Window 1, block at target position 4, step 3\.\)"):
        duel.log_prob([WINDOWS[1], Window((2,), (5, 6, 7, 8, 9, 10, token, 11), (3,))])


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(DuelError, match=r"Cannot read checkpoint .*not a local folder; a hub name needs a connection"):
        load(str(tmp_path / "nothing"))


def test_lengths(folders):
    assert load(folders["bert"], max_length=16).max_length == 16
    with pytest.raises(DuelError, match=r"max_length=33 is too long: .* 32 positions"):
        load(folders["bert"], max_length=33)
    with pytest.raises(DuelError, match="Window 0 has 33 positions but the network holds 32"):
        DuelEstimator(load(folders["bert"]), "greedy", 4).log_prob([Window((), (5,) * 33)])


def test_ids_that_cannot_be_scored(folders):
    duel = DuelEstimator(load(folders["bert"]), "greedy", 4)
    with pytest.raises(DuelError, match=r"Window 1 holds the mask token \(id 4\)"):
        duel.log_prob([Window((), (5,)), Window((4,), (5,))])
    with pytest.raises(DuelError, match=r"Window 0 holds id 40; the network's ids are 0 to 39"):
        duel.log_prob([Window((), (40,))])
    with pytest.raises(DuelError, match=r"Window 0 holds id 36, .* not a token of the vocabulary"):
        duel.log_prob([Window((), (36,))])


# ---------------------------------------------------------------- code of its own

CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

class LetterConfig(PretrainedConfig):
    model_type = "letters"
    def __init__(self, vocab_size=40, max_position_embeddings=32, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings

class LetterModel(PreTrainedModel):
    config_class = LetterConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, config.vocab_size)
        self.post_init()
    def get_input_embeddings(self):
        return self.embed
    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids)
        return MaskedLMOutput(logits=self.head(x + x.mean(1, keepdim=True)))
"""


def test_a_bidirectional_network_with_code_of_its_own(tmp_path):
    (tmp_path / "letters.py").write_text(CODE)
    config = {
        "model_type": "letters",
        "architectures": ["LetterModel"],
        "auto_map": {"AutoConfig": "letters.LetterConfig", "AutoModel": "letters.LetterModel"},
        "vocab_size": 40,
        "max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        "embed.weight": torch.randn(40, 8, generator=generator),
        "head.weight": torch.randn(40, 8, generator=generator),
        "head.bias": torch.zeros(40),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DuelError, match="pass trust_remote_code=true if you trust it"):
        load(str(tmp_path))
    denoiser = load(str(tmp_path), trust_remote_code=True, dtype="float64")
    assert not denoiser.honours_padding and not denoiser.splits_head

    def logits(ids):
        x = weights["embed.weight"][ids].double()
        return (x + x.mean(0)) @ weights["head.weight"].double().T

    for window, scored in zip(WINDOWS, DuelEstimator(denoiser, "greedy", 4).log_prob(WINDOWS), strict=True):
        _, steps, nats, _, _ = score(
            logits, 4, denoiser.excluded, rules.parse("greedy"), 4, window, tie_when_all_mask=True
        )
        assert scored.reveal_steps == steps and scored.token_logprobs == pytest.approx(nats, abs=1e-9)
