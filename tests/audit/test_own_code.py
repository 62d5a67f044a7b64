"""The network beside the checkpoint's own code, on tiny folders of LLaDA, Dream, SDAR, LLaDA2 and a masked LM."""

import pytest
import tiny
import torch
from own import DREAM, KINDS, MASK, SIZE, decoder, made, write

from lm_eval_duel import denoisers
from lm_eval_duel.audit import own_code
from lm_eval_duel.options import Options

NAMES = {kind: KINDS[f"own {kind}"][1] for kind in ("llada", "dream", "sdar")}


def compared(path, denoiser=None, **arguments):
    arguments = {"pretrained": path, "dtype": "float32", "trust_remote_code": True, "device": "cpu", **arguments}
    options = Options.parse(arguments)
    denoiser = denoiser or denoisers.load(path, device="cpu", **options.network)
    return own_code.compare(options, denoiser, "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The path of each checkpoint."""
    return {kind: made(tmp_path_factory.mktemp(kind), f"own {kind}")[0] for kind in NAMES}


@pytest.mark.parametrize("kind", NAMES)
def test_a_network_equals_its_own_code(kind, folders):
    found = compared(folders[kind])
    assert (found.name, found.differs) == (NAMES[kind], False) and found.positions > 20, found
    assert found.difference < 1e-4


@pytest.mark.parametrize(("fault", "kind"), [("head", "llada"), ("rotary", "dream"), ("layer", "sdar")])
def test_a_fault_of_the_network_differs(fault, kind, folders, monkeypatch):
    path = folders[kind]
    denoiser = denoisers.load(path, device="cpu")
    network = denoiser.model.base_model
    if fault == "head":
        head = denoiser.head
        monkeypatch.setattr(denoiser, "head", lambda features: 0.9 * head(features))
    elif fault == "rotary":
        network.rotary_emb.inv_freq = 450.0 ** -(torch.arange(2) / 2)  # of heads of four; the base is 500
    else:
        with torch.no_grad():
            network.layers[1].mlp.down_proj.weight *= 1.02
    found = compared(path, denoiser)
    assert not isinstance(found, str) and found.differs, found


def test_a_class_of_transformers(tmp_path):
    (tmp_path / "bert").mkdir()
    path = tiny.checkpoint(tmp_path / "bert", "bert")
    found = compared(path)
    assert found.name == "BertForMaskedLM" and not found.differs, found
    (tmp_path / "llama").mkdir()
    config = {**SIZE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    path = write(tmp_path / "llama", "", "", decoder(), config)
    for attention in ("bidirectional", "causal"):
        mask = {"mask_token_id": MASK} if attention == "bidirectional" else {"estimator": "ar"}
        found = compared(path, attention=attention, **mask)
        assert found.name == "LlamaForCausalLM" and not found.differs, found


def test_llada2(tmp_path):
    """Its code in small, beside Llama's class under the same attention."""
    for name in ("own", "twin"):
        (tmp_path / name).mkdir()
    path, *_ = made(tmp_path / "own", "own llada2")
    config = {**SIZE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    twin = write(tmp_path / "twin", "", "", decoder(), config)
    denoiser = denoisers.load(twin, device="cpu", attention="block_causal", mask_token_id=MASK, block=4)
    found = compared(path, denoiser)
    assert (found.name, found.differs) == ("LLaDA2MoeModelLM", False), found
    own = denoisers.load(path, device="cpu", backend="remote", trust_remote_code=True)
    assert "the run itself" in compared(path, own)


def test_what_cannot_be_compared_says_why(tmp_path):
    assert "it has no code" in compared("demo-bd")
    path, *_ = made(tmp_path, "own dream")
    assert "trust_remote_code=true" in compared(path, trust_remote_code=False)
    (tmp_path / "modeling_own.py").write_text("import no_such_package\n" + DREAM)
    assert "no_such_package" in compared(path)


def test_an_error_of_this_network_is_no_reason_to_skip_the_comparison(folders, monkeypatch):
    """The code of others may fail, which is a text; our own network may not."""
    denoiser = denoisers.load(folders["llada"], device="cpu")

    def broken(*_, **__):
        raise KeyError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(own_code.OwnRow, "seen", lambda self, *_: {}["ours"])
        with pytest.raises(KeyError, match="ours"):
            compared(folders["llada"], denoiser)
    monkeypatch.setattr(own_code, "load_own_class", lambda *_: broken)
    assert compared(folders["llada"], denoiser) == "KeyError: 'ours'"
    monkeypatch.setattr(denoiser, "head", broken)
    with pytest.raises(KeyError, match="ours"):
        compared(folders["llada"], denoiser)
