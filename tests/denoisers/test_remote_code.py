"""Checkpoints with code of their own: today's transformers runs them, and they agree with what runs without them."""

import pytest
import tiny
import torch
import transformers
from close import same_scores
from laws import slow_but
from own import CONFIG, DREAM, LLADA, LLADA2, LLADA_SIZE, MASK, NATIVE_ROTARY, RND1, SDAR, SIZE, decoder, llada, write
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf import remote_code
from lm_eval_duel.errors import DuelError

WINDOWS = [
    Window((6, 20), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((9, 9, 14), (10, 9), (3,)),
    Window((2,), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9, 25), (33, 6, 7)),
]
RND1_MAP = {"AutoModel": "modeling_own.RND1", "AutoModelForMaskedLM": "modeling_own.RND1LM"}  # one without a head
RND1_MAP["AutoConfig"] = "configuration_own.Plain"
RND1_ENTRIES = {"rope_scaling": False, "auto_map": RND1_MAP, "model_type": "plain"}  # none, said as false
BLOCKS, SCALED = {"block_size": 4}, {"rope_scaling": {"type": "linear", "factor": 2.0}}
NATIVE_RND1 = RND1.replace("def turned", NATIVE_ROTARY)
KINDS = {  # code, class, tensors, config entries, and the class of transformers if none runs without the code
    "llada": (LLADA, "LLaDAModelLM", llada, {"config": LLADA_SIZE}, None),
    "dream, tied": (DREAM, "DreamModel", lambda: decoder(True, tied=True), {"tie_word_embeddings": True}, None),
    "dream, scaled": (DREAM, "DreamModel", lambda: decoder(True), SCALED, None),
    "sdar": (SDAR, "SDARForCausalLM", lambda: decoder(norms=True), BLOCKS, None),
    "llada2": (LLADA2, "LLaDA2MoeModelLM", decoder, BLOCKS, "Llama"),
    "of no known class": (LLADA2.replace("LLaDA2MoeModelLM", "UnheardOf"), "UnheardOf", decoder, {}, "Llama"),
    "rnd1": (RND1, "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES, "Qwen3"),
    "rnd1, native rotary": (NATIVE_RND1, "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES, "Qwen3"),
}
SAME = ("attention", "shift", "mask_id", "max_length", "published_block", "block", "bos", "relative_positions")


def load(path, own=True, **options):
    chosen = {"backend": "remote", "trust_remote_code": True} if own else {}
    return denoisers.load(path, device="cpu", **{**chosen, **options})


@pytest.mark.parametrize("kind", slow_but(KINDS, ["llada", "dream, tied", "sdar", "of no known class", "rnd1"]))
def test_own_code_equals_what_runs_without_it(tmp_path, kind):
    code, name, make, entries, twin = KINDS[kind]
    tensors = make()
    path = write(tmp_path, code, name, tensors, **entries)
    options = {"attention": "block_causal", "block": 4} if kind == "of no known class" else {}
    if options:
        for wrong, needed in (({"attention": "block_causal"}, "block=<"), ({}, "only block attention masks")):
            with pytest.raises(DuelError, match=needed):
                load(path, **wrong)
    own = load(path, **options)
    assert type(own.model).__name__ == own.describe()["denoiser"] == name
    assert own.shift == ("dream" in kind) and (own.block == 4) == (own.attention == "block_causal")
    assert own.honours_padding == (own.attention == "block_causal" or kind == "llada")
    if twin:
        (tmp_path / "twin").mkdir()
        config = {**SIZE, "architectures": [f"{twin}ForCausalLM"], "model_type": twin.lower()}
        alike = {"attention": own.attention, "mask_token_id": MASK, "block": own.block}
        native = load(write(tmp_path / "twin", "", "", tensors, config), own=False, **alike)
    else:
        native = load(path, own=False)
        assert [getattr(own, each) for each in SAME] == [getattr(native, each) for each in SAME]
        assert own.describe()["weights"] != native.describe()["weights"], "the code is part of the spec"
    duel, other = (Duel(denoiser, "threshold:mu=0.3", own.block or 4) for denoiser in (own, native))
    same_scores(duel.log_prob(WINDOWS), other.log_prob(WINDOWS))
    contexts = [window.context for window in WINDOWS]
    windows = [Window(c, drawn.tokens) for c, drawn in zip(contexts, duel.sample(contexts, 7), strict=True)]
    same_scores([duel.log_prob([window])[0] for window in windows], other.log_prob(windows))


def test_rows_of_one_call_may_know_different_numbers_of_clean_blocks(tmp_path):
    denoiser = load(write(tmp_path, LLADA2, "LLaDA2MoeModelLM", decoder()), block=4, max_length=16)
    windows = [Window(tuple(range(5, 5 + n)), tuple(range(30, 14 + n, -1))) for n in (1, 3, 4, 6, 9)]
    alone = [Duel(denoiser, "greedy").log_prob([window])[0] for window in windows]
    for batch_size in (2, None):
        same_scores(alone, Duel(denoiser, "greedy", batch_size=batch_size).log_prob(windows))
    duel, contexts = Duel(denoiser, "threshold:mu=0.4"), [(5,), (6,), (7,)]  # not all take as long
    drawn = duel.sample(contexts, 11)
    ones = [duel.sample([context], 11, keys=[key])[0] for key, context in enumerate(contexts)]
    assert [one.tokens for one in ones] == [sample.tokens for sample in drawn]
    same_scores(ones, drawn)


# ---------------------------------------------------------------- trust, and what is left behind


@pytest.mark.parametrize("name", ["LLaDAModelLM", "UnheardOf"])
def test_code_runs_only_where_it_is_trusted(tmp_path, name):
    ran = tmp_path / "ran"
    write_it = f"\nopen({str(ran)!r}, 'w').close()\n"
    mapped = {"AutoConfig": "configuration_own.Plain", "AutoModel": f"modeling_own.{name}"}
    code = LLADA.replace("LLaDAModelLM", name) + write_it
    path = write(tmp_path, code, name, llada(), LLADA_SIZE, architectures=[name], auto_map=mapped)
    (tmp_path / "configuration_own.py").write_text(CONFIG + write_it)
    for options in ({"backend": "remote"}, {"backend": "remote", "dtype": "float64"}, {}):
        if options or name == "UnheardOf":
            with pytest.raises(DuelError, match="trust_remote_code=true"):
                load(path, own=False, **options)
        else:
            load(path, own=False)
    assert not ran.exists()
    load(path)
    assert ran.exists()


def left_behind():
    places = (transformers.utils, "LossKwargs"), (transformers.utils.import_utils, "is_torch_fx_available")
    return dict(ROPE_INIT_FUNCTIONS), [getattr(place, name, None) for place, name in places], torch.get_default_dtype()


def test_repairs_are_undone(tmp_path):
    before = left_behind()
    with pytest.raises(KeyError), remote_code.repairs():
        assert "default" in ROPE_INIT_FUNCTIONS and hasattr(transformers.utils, "LossKwargs")
        raise KeyError
    assert left_behind() == before
    breaks = SDAR.replace("norms = True", "norms = True\n    def __init__(self, config):\n        config.nowhere")
    for number, code in enumerate((SDAR, breaks)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder, code, "SDARForCausalLM", decoder(norms=True))
        if code is SDAR:
            load(path, dtype="bfloat16")
        else:
            with pytest.raises(DuelError, match=r"AttributeError: .*nowhere"):
                load(path, dtype="bfloat16")
        assert left_behind() == before


# ---------------------------------------------------------------- wrong checkpoints


def test_wrong_rotary_frequencies(tmp_path):
    empty = DREAM.replace('register_buffer("inv_freq", frequencies,', 'register_buffer("inv_freq", 0 * frequencies,')
    path = write(tmp_path, empty, "DreamModel", decoder(bias=True))
    with pytest.raises(DuelError, match="rotary frequencies"):
        load(path)
    path = write(tmp_path, DREAM, "DreamModel", {**decoder(bias=True), "model.rotary_emb.inv_freq": torch.zeros(2)})
    load(path)  # frequencies of a file are not taken


def test_broken_code(tmp_path):
    path = write(tmp_path, LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    with pytest.raises(DuelError, match="'position_ids'"):
        load(path, attention="block_causal", block=4)
    for file, text in (("configuration_own.py", CONFIG), ("modeling_own.py", LLADA)):
        (tmp_path / file).write_text("import no_such_package\n" + text)
        with pytest.raises(DuelError, match=r"ImportError: .*no_such_package"):
            load(path)
        (tmp_path / file).write_text(text)
    assert load(path).vocab_size == tiny.ROWS
