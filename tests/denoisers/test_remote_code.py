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
    own = family(kind).denoiser
    native = load(family(kind).path, own=False)

    for attribute in SAME:
        assert getattr(own, attribute) == getattr(native, attribute), attribute
    spec = own.describe()
    class_name = KINDS[kind][1]
    assert type(own.model).__name__ == class_name
    assert spec["denoiser"] == class_name
    assert spec["weights"] != native.describe()["weights"], "the code is part of the spec"


def test_a_mask_that_the_code_needs_is_named(tmp_path):
    path, *_ = made(tmp_path, "own unknown")

    with pytest.raises(DuelError, match="block=<"):
        load(path, attention="block_causal")
    with pytest.raises(DuelError, match="only block attention masks"):
        load(path)


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
        with pytest.raises(DuelError, match="trust_remote_code=true"):
            load(path, own=False, **options)
    if name == "UnheardOf":
        with pytest.raises(DuelError, match="trust_remote_code=true"):
            load(path, own=False)
    else:
        load(path, own=False)
    assert not ran.exists()

    load(path)
    assert ran.exists()


def left_behind():
    """What repairs change."""
    return {
        "rotary functions": dict(ROPE_INIT_FUNCTIONS),
        "LossKwargs": getattr(transformers.utils, "LossKwargs", None),
        "is_torch_fx_available": getattr(transformers.utils.import_utils, "is_torch_fx_available", None),
        "dtype": torch.get_default_dtype(),
    }


def test_repairs_are_undone(tmp_path):
    before = left_behind()
    with pytest.raises(KeyError), remote_code.repairs():
        assert "default" in ROPE_INIT_FUNCTIONS
        assert hasattr(transformers.utils, "LossKwargs")
        raise KeyError
    assert left_behind() == before

    (tmp_path / "right").mkdir()
    path = write(tmp_path / "right", SDAR, "SDARForCausalLM", decoder(norms=True))
    load(path, dtype="bfloat16")
    assert left_behind() == before

    breaks = SDAR.replace("norms = True", "norms = True\n    def __init__(self, config):\n        config.nowhere")
    (tmp_path / "broken").mkdir()
    path = write(tmp_path / "broken", breaks, "SDARForCausalLM", decoder(norms=True))
    with pytest.raises(DuelError, match=r"AttributeError: .*nowhere"):
        load(path, dtype="bfloat16")
    assert left_behind() == before


# ---------------------------------------------------------------- wrong checkpoints


def test_wrong_rotary_frequencies(tmp_path):
    empty = DREAM.replace('register_buffer("inv_freq", frequencies,', 'register_buffer("inv_freq", 0 * frequencies,')
    path = write(tmp_path, empty, "DreamModel", decoder(bias=True))
    with pytest.raises(DuelError, match="rotary frequencies"):
        load(path)

    tensors = decoder(bias=True)
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(2)
    path = write(tmp_path, DREAM, "DreamModel", tensors)
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
