"""Checkpoints with code of their own: today's transformers runs them, and they agree with what runs without them."""

import plain
import pytest
import tiny
import torch
import transformers
from close import same_scores
from own import CONFIG, DREAM, LAYERS, LLADA, LLADA2, LLADA_SIZE, MASK, NATIVE_ROTARY, RND1, SDAR, decoder, llada, write
from textbook import score
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf import remote_code
from lm_eval_duel.errors import DuelError

WINDOWS = [
    Window((6, 20), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((9, 9, 14), (10, 9), (3,)),
    Window((2,), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9, 25), (33, 6, 7)),
]
NET = plain.Net(head=4, layers=LAYERS, theta=500.0)
LLADA_NET = plain.Net(head=4, kept=4, layers=LAYERS, theta=500.0, keys=plain.LLADA)
RND1_MAP = {"AutoModel": "modeling_own.RND1", "AutoModelForMaskedLM": "modeling_own.RND1LM"}  # one without a head
RND1_MAP["AutoConfig"] = "configuration_own.Plain"
RND1_ENTRIES = {"rope_scaling": False, "auto_map": RND1_MAP, "model_type": "plain"}  # none, said as false
BLOCKS, SCALED = {"block_size": 4}, {"rope_scaling": {"type": "linear", "factor": 2.0}}
KINDS = {  # code, class, tensors, config entries, the plain network, and whether what runs without the code compares
    "llada": (LLADA, "LLaDAModelLM", llada, {"config": LLADA_SIZE}, LLADA_NET, True),
    "dream": (DREAM, "DreamModel", lambda: decoder(bias=True), {}, NET, True),
    "dream, tied": (DREAM, "DreamModel", lambda: decoder(True, tied=True), {"tie_word_embeddings": True}, NET, True),
    "dream, scaled": (DREAM, "DreamModel", lambda: decoder(True), SCALED, None, True),
    "sdar": (SDAR, "SDARForCausalLM", lambda: decoder(norms=True), BLOCKS, NET, True),
    "llada2": (LLADA2, "LLaDA2MoeModelLM", decoder, BLOCKS, NET, False),
    "of no known class": (LLADA2.replace("LLaDA2MoeModelLM", "UnheardOf"), "UnheardOf", decoder, {}, NET, False),
    "rnd1": (RND1, "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES, NET, False),
    "rnd1, native rotary": (
        *(RND1.replace("def turned", NATIVE_ROTARY), "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES),
        *(NET, False),
    ),
}
SAME = ("attention", "shift", "mask_id", "max_length", "published_block", "block", "bos", "relative_positions")


def load(path, own=True, **options):
    chosen = {"backend": "remote", "trust_remote_code": True} if own else {}
    return denoisers.load(path, device="cpu", **{**chosen, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_own_code_equals_the_plain_network_and_what_runs_without_it(tmp_path, kind):
    code, name, make, entries, net, has_native = KINDS[kind]
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
    duels = [Duel(own, "greedy", own.block or 4)]
    for last_block in ("fill", "cut") if kind == "sdar" else ("fill",):
        denoiser = own if last_block == "fill" else load(path, last_block="cut")
        for rule in ("greedy", "threshold:mu=0.3") if net else ():
            for window, scored in zip(WINDOWS, Duel(denoiser, rule, own.block or 4).log_prob(WINDOWS), strict=True):
                _, steps, nats, greedy, nfe = score(
                    lambda row: plain.logits(
                        net, tensors, row.tolist(), own.block and plain.block_causal(len(row), own.block)
                    ).roll(own.shift, 0),
                    *(MASK, own.excluded, rules.parse(rule), 4, window, "row" if own.block else "target"),
                    sees=last_block if own.block else None,
                )
                assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
                assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
                assert scored.token_logprobs == pytest.approx(nats, abs=1e-4)
    contexts = [window.context for window in WINDOWS]
    drawn = duels[0].sample(contexts, 7)
    windows = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    same_scores([duels[0].log_prob([window])[0] for window in windows], drawn)
    if has_native:
        native = load(path, own=False)
        assert [getattr(own, name) for name in SAME] == [getattr(native, name) for name in SAME]
        same_scores(*(Duel(denoiser, "greedy", own.block or 4).log_prob(WINDOWS) for denoiser in (own, native)))
        assert "ForCausalLM" in native.describe()["denoiser"]
        assert own.describe()["weights"] != native.describe()["weights"], "the code is part of the spec"
    if kind == "dream":
        assert load(path, shift_logits=False).shift == 0
        with pytest.raises(DuelError, match="Window 0 needs a context"):
            Duel(own, "greedy", 4).log_prob([Window((), (8, 9))])
        exact = Duel(own, "l2r", 4).log_prob(WINDOWS)
        for dtype, rough in (("bfloat16", 1.0), ("float64", 1e-4)):
            other = load(path, dtype=dtype)
            assert str(other.dtype) == f"torch.{dtype}" and torch.get_default_dtype() == torch.float32
            scored = Duel(other, "l2r", 4).log_prob(WINDOWS)
            assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in exact], abs=rough)


def test_rows_of_one_call_may_know_different_numbers_of_clean_blocks(tmp_path):
    denoiser = load(write(tmp_path, LLADA2, "LLaDA2MoeModelLM", decoder()), block=4, max_length=16)
    windows = [Window(tuple(range(5, 5 + n)), tuple(range(30, 14 + n, -1))) for n in (1, 3, 4, 6, 9)]
    alone = [Duel(denoiser, "greedy").log_prob([window])[0] for window in windows]
    for batch_size in (2, None):
        same_scores(alone, Duel(denoiser, "greedy", batch_size=batch_size).log_prob(windows))
    duel, contexts = Duel(denoiser, "threshold:mu=0.4"), [(5,), (6,), (7,), (8,)]  # not all take as long
    drawn = duel.sample(contexts, 15)
    ones = [duel.sample([context], 15, keys=[key])[0] for key, context in enumerate(contexts)]
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
