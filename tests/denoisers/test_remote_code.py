"""Checkpoints with code of their own: what is found, whom one trusts, what is left behind; wrong ones."""

import pytest
import tiny
import torch
import transformers
from own import CONFIG, DREAM, KINDS, LLADA, LLADA_SIZE, SDAR, decoder, llada, made, write
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel import denoisers
from lm_eval_duel.denoisers.hf import own_code as remote_code
from lm_eval_duel.errors import DuelError

SAME = ("attention", "shift", "mask_id", "max_length", "published_block", "block", "bos", "relative_positions")


def load(path, own=True, **options):
    chosen = {"backend": "remote", "trust_remote_code": True} if own else {}
    return denoisers.load(path, device="cpu", **{**chosen, **options})


@pytest.mark.parametrize("kind", ["own llada", "own dream", "own sdar"])
def test_a_known_class_is_what_it_is_without_its_code(family, kind):
    """Its numbers, and those of other kinds: test_families.py."""
    own = family(kind)
    native = load(own.path, own=False)
    assert [getattr(own.denoiser, each) for each in SAME] == [getattr(native, each) for each in SAME]
    described = own.denoiser.describe()
    assert described["denoiser"] == type(own.denoiser.model).__name__ == KINDS[kind][1]
    assert described["weights"] != native.describe()["weights"], "the code is part of the spec"


def test_a_mask_that_the_code_needs_is_named(tmp_path):
    path, *_ = made(tmp_path, "own unknown")
    for wrong, needed in (({"attention": "block_causal"}, "block=<"), ({}, "only block attention masks")):
        with pytest.raises(DuelError, match=needed):
            load(path, **wrong)


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
