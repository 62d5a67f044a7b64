"""Checkpoints with code of their own: today's transformers runs them, and they agree with what runs without them."""

import plain
import pytest
import tiny
import torch
import transformers
from close import same_scores
from own import (
    CONFIG,
    DREAM,
    LAYERS,
    LLADA,
    LLADA2,
    LLADA_SIZE,
    MASK,
    NATIVE_ROTARY,
    RND1,
    SDAR,
    decoder,
    llada,
    write,
)
from textbook import score
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel import denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf import remote_code
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator

WINDOWS = [
    Window((6, 20), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((9, 9, 14), (10, 9), (3,)),
    Window((2,), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9, 25), (33, 6, 7)),
]

NET = plain.Net(head=4, heads=4, kept=2, layers=LAYERS, theta=500.0)
LLADA_NET = plain.Net(head=4, heads=4, kept=4, layers=LAYERS, theta=500.0, eps=1e-5, keys=plain.LLADA)


def load(path, own=True, **options):
    chosen = {"backend": "remote", "trust_remote_code": True} if own else {}
    return denoisers.load(path, device="cpu", **{**chosen, **options})


def logits(denoiser, ids):
    features = denoiser.features(ids, None)
    return denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])


def ids(rows=3, length=13):
    return torch.randint(5, len(tiny.WORDS), (rows, length), generator=torch.Generator().manual_seed(5))


def agrees(denoiser, logits_of, block, **how):
    """Every rule's numbers are the textbook's over `logits_of`."""
    for rule in ("greedy", "threshold:mu=0.3", "klass:mu=0.2:nu=0.5", "right_to_left:k=2"):
        for window, scored in zip(WINDOWS, DuelEstimator(denoiser, rule, block).log_prob(WINDOWS), strict=True):
            _, steps, nats, greedy, nfe = score(
                logits_of, MASK, denoiser.excluded, rules.parse(rule), block, window, **how
            )
            assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
            assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
            assert scored.token_logprobs == pytest.approx(nats, abs=1e-4)


def block_causal(net, tensors, block):
    return lambda row: plain.logits(net, tensors, row.tolist(), plain.block_causal(len(row), block))


# ---------------------------------------------------------------- what own code computes


def test_llada(tmp_path):
    tensors = llada()
    path = write(tmp_path, LLADA, "LLaDAModelLM", tensors, LLADA_SIZE)
    own, native = load(path), load(path, own=False)
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-4
    for name in ("attention", "shift", "mask_id", "max_length", "published_block", "bos", "relative_positions"):
        assert getattr(own, name) == getattr(native, name)
    assert own.honours_padding and own.splits_head and own.relative_positions
    assert type(own.model).__name__ == own.describe()["denoiser"] == "LLaDAModelLM"
    assert "as LlamaForCausalLM" in native.describe()["denoiser"]
    assert own.describe()["weights"] != native.describe()["weights"], "the code is part of the spec"
    same_scores(*(DuelEstimator(denoiser, "greedy", 4).log_prob(WINDOWS) for denoiser in (own, native)))
    agrees(own, lambda row: plain.logits(LLADA_NET, tensors, row.tolist(), plain.everywhere(len(row))), 4)


def test_dream(tmp_path):
    tensors = decoder(bias=True)
    path = write(tmp_path, DREAM, "DreamModel", tensors)
    own, native = load(path), load(path, own=False)
    frequencies = own.model.model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 500.0 ** -(torch.arange(0, 4, 2) / 4), rtol=1e-6)
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-4
    for name in ("attention", "shift", "mask_id", "max_length", "published_block", "bos", "relative_positions"):
        assert getattr(own, name) == getattr(native, name)
    assert own.shift == 1 and not own.honours_padding

    def shifted(row):
        found = plain.logits(NET, tensors, row.tolist(), plain.everywhere(len(row)))
        return torch.cat([found[:1], found[:-1]])

    agrees(own, shifted, 4)
    with pytest.raises(DuelError, match="Window 0 needs a context: this network predicts each token from the one"):
        DuelEstimator(own, "greedy", 4).log_prob([Window((), (8, 9))])
    assert load(path, shift_logits=False).shift == 0


def test_sdar(tmp_path):
    tensors = decoder(norms=True)
    path = write(tmp_path, SDAR, "SDARForCausalLM", tensors, block_size=4)
    own, native = load(path), load(path, own=False)
    assert (own.attention, own.block) == (native.attention, native.block) == ("block_causal", 4)
    for rule in ("greedy", "threshold:mu=0.3"):
        same_scores(*(DuelEstimator(denoiser, rule).log_prob(WINDOWS) for denoiser in (own, native)))
    agrees(own, block_causal(NET, tensors, 4), 4, grid="row", sees="fill")
    cut = load(path, last_block="cut")
    agrees(cut, block_causal(NET, tensors, 4), 4, grid="row", sees="cut")
    assert cut.describe() != own.describe()


@pytest.mark.parametrize("name", ["LLaDA2MoeModelLM", "UnheardOf"])
def test_a_network_that_wants_a_mask_of_every_row(tmp_path, name):
    tensors = decoder()
    path = write(tmp_path, LLADA2.replace("LLaDA2MoeModelLM", name), name, tensors)
    unheard = {} if name.startswith("LLaDA2") else {"attention": "block_causal"}
    if unheard:
        with pytest.raises(DuelError, match=r"is block-causal and its config has no block; pass block=<the trained"):
            load(path, **unheard)
        with pytest.raises(DuelError, match=r"Cannot read checkpoint .*: ValueError: only block attention masks"):
            load(path)
    denoiser = load(path, block=4, **unheard)
    assert (denoiser.attention, denoiser.block, denoiser.shift) == ("block_causal", 4, 0)
    agrees(denoiser, block_causal(NET, tensors, 4), 4, grid="row", sees="fill")
    duel = DuelEstimator(denoiser, "greedy")
    contexts = [window.context for window in WINDOWS]
    drawn = duel.sample(contexts, 7)
    windows = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    same_scores([duel.log_prob([window])[0] for window in windows], drawn)


def test_rows_of_one_call_may_know_different_numbers_of_clean_blocks(tmp_path):
    denoiser = load(write(tmp_path, LLADA2, "LLaDA2MoeModelLM", decoder()), block=4, max_length=16)
    windows = [Window(tuple(range(5, 5 + n)), tuple(range(30, 14 + n, -1))) for n in (1, 3, 4, 6, 9)]
    alone = [DuelEstimator(denoiser, "greedy").log_prob([window])[0] for window in windows]
    for batch_size in (1, 2, 3, None):
        same_scores(alone, DuelEstimator(denoiser, "greedy", batch_size=batch_size).log_prob(windows))
    duel, contexts = DuelEstimator(denoiser, "threshold:mu=0.4"), [(5,), (6,), (7,), (8,)]  # not all take as long
    drawn = duel.sample(contexts, 15)
    ones = [duel.sample([context], 15, keys=[key])[0] for key, context in enumerate(contexts)]
    assert [one.tokens for one in ones] == [sample.tokens for sample in drawn]
    same_scores(ones, drawn)


@pytest.mark.parametrize("code", [RND1, RND1.replace("def turned", NATIVE_ROTARY)], ids=["own", "native"])
def test_rnd1(tmp_path, code):
    """No rotary scaling, said as false; a class without a head goes before the one with it."""
    tensors, files = decoder(norms=True), ("configuration_own.Plain", "modeling_own.RND1", "modeling_own.RND1LM")
    mapped = dict(zip(("AutoConfig", "AutoModel", "AutoModelForMaskedLM"), files, strict=True))
    path = write(tmp_path, code, "RND1LM", tensors, rope_scaling=False, auto_map=mapped, model_type="plain")
    denoiser = load(path)
    assert type(denoiser.model).__name__ == "RND1LM" and not denoiser.honours_padding
    agrees(denoiser, lambda row: plain.logits(NET, tensors, row.tolist(), plain.everywhere(len(row))), 4)


def test_a_tied_head(tmp_path):
    tensors = decoder(bias=True, tied=True)
    path = write(tmp_path, DREAM, "DreamModel", tensors, tie_word_embeddings=True)
    own, native = load(path), load(path, own=False)
    assert own.model.lm_head.weight is own.model.model.embed_tokens.weight
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-4


def test_scaled_rotary_positions(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    path = write(tmp_path, DREAM, "DreamModel", decoder(bias=True), rope_scaling=scaling)
    own, native = load(path), load(path, own=False)
    assert torch.allclose(own.model.model.rotary_emb.inv_freq, 500.0 ** -(torch.arange(0, 4, 2) / 4) / 2, rtol=1e-6)
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-4


def test_dtypes(tmp_path):
    path = write(tmp_path, DREAM, "DreamModel", decoder(bias=True))
    right = logits(load(path), ids())
    for dtype, rough in ((torch.bfloat16, 0.1), (torch.float64, 1e-5)):
        denoiser = load(path, dtype=str(dtype).removeprefix("torch."))
        assert denoiser.dtype == dtype and torch.get_default_dtype() == torch.float32
        assert (logits(denoiser, ids()).double() - right).abs().max() < rough * right.abs().max()


# ---------------------------------------------------------------- trust, and what is left behind


@pytest.mark.parametrize("name", ["LLaDAModelLM", "UnheardOf"])
def test_code_runs_only_where_it_is_trusted(tmp_path, name):
    ran = tmp_path / "ran"
    write_it = f"\nopen({str(ran)!r}, 'w').close()\n"
    mapped = {"AutoConfig": "configuration_own.Plain", "AutoModel": f"modeling_own.{name}"}
    code = LLADA.replace("LLaDAModelLM", name) + write_it
    path = write(tmp_path, code, name, llada(), LLADA_SIZE, architectures=[name], auto_map=mapped)
    (tmp_path / "configuration_own.py").write_text(CONFIG + write_it)
    for options in ({"backend": "remote"}, {"backend": "remote", "dtype": "float64"}):
        with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it\."):
            load(path, own=False, **options)
    if name == "LLaDAModelLM":
        load(path, own=False)
    else:
        with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it\."):
            load(path, own=False)
    assert not ran.exists()
    load(path)
    assert ran.exists()


def left_behind():
    places = (transformers.utils, "LossKwargs"), (transformers.utils.import_utils, "is_torch_fx_available")
    return dict(ROPE_INIT_FUNCTIONS), [getattr(place, name, None) for place, name in places], torch.get_default_dtype()


def test_repairs_are_undone(tmp_path):
    before = left_behind()
    with remote_code.repairs():
        assert "default" in ROPE_INIT_FUNCTIONS
        assert hasattr(transformers.utils, "LossKwargs") and hasattr(
            transformers.utils.import_utils, "is_torch_fx_available"
        )
    assert left_behind() == before
    with pytest.raises(KeyError), remote_code.repairs():
        raise KeyError
    assert left_behind() == before
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
    load(write(good, SDAR, "SDARForCausalLM", decoder(norms=True)), dtype="bfloat16")
    assert left_behind() == before
    breaks = SDAR.replace(
        "norms = True", "norms = True\n    def __init__(self, config):\n        self.x = config.nowhere"
    )
    path = write(bad, breaks, "SDARForCausalLM", decoder(norms=True))
    with pytest.raises(DuelError, match=r"Cannot read checkpoint .*: AttributeError: .*nowhere"):
        load(path, dtype="bfloat16")
    assert left_behind() == before


# ---------------------------------------------------------------- wrong checkpoints


def test_no_code(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    for trusted in (True, False):
        with pytest.raises(DuelError, match=r"has no code of its own \(no auto_map with a model in config\.json\)"):
            load(path, trust_remote_code=trusted)


def test_weights_that_do_not_fill_the_network(tmp_path):
    full, gone, head = decoder(bias=True), "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"
    for tensors, words in (
        ({key: full[key] for key in full if key != gone}, f"Missing key.*{gone}"),
        ({key: full[key] for key in full if key != head}, f"Missing key.*{head}"),
        ({**full, "model.extra.weight": torch.ones(2)}, r"Unexpected key.*model\.extra\.weight"),
        ({**full, gone: torch.ones(3)}, f"size mismatch for {gone}"),
    ):
        path = write(tmp_path, DREAM, "DreamModel", tensors)
        with pytest.raises(DuelError, match=words):
            load(path)


def test_wrong_rotary_frequencies(tmp_path):
    empty = DREAM.replace('register_buffer("inv_freq", frequencies,', 'register_buffer("inv_freq", 0 * frequencies,')
    path = write(tmp_path, empty, "DreamModel", decoder(bias=True))
    with pytest.raises(DuelError, match=r"rotary frequencies of .*rotary_emb\.inv_freq\) are not 500\^\(-2i/d\)"):
        load(path)
    path = write(tmp_path, DREAM, "DreamModel", {**decoder(bias=True), "model.rotary_emb.inv_freq": torch.zeros(2)})
    load(path)  # frequencies of a file are not taken


def test_broken_code(tmp_path):
    path = write(tmp_path, "import no_such_package\n" + LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    with pytest.raises(DuelError, match=r"Cannot read .*: ImportError: .*no_such_package"):
        load(path)
    path = write(tmp_path, LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    (tmp_path / "configuration_own.py").write_text("import no_such_package\n" + CONFIG)
    with pytest.raises(DuelError, match=r"Cannot read .*: ImportError: .*no_such_package"):
        load(path)


def test_args_that_own_code_cannot_follow(tmp_path):
    path = write(tmp_path, LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    for name, value in (("sigma", "schedule"), ("load_in_8bit", True), ("load_in_4bit", True)):
        with pytest.raises(DuelError, match=f"is of the family own code, which has no choice of '{name}'"):
            load(path, **{name: value})
    with pytest.raises(DuelError, match="backend=remote does not go with attention=causal for"):
        load(path, attention="causal")
    with pytest.raises(DuelError, match="unexpected keyword argument 'position_ids'"):
        load(path, attention="block_causal", block=4)
