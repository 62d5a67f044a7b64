"""The network beside the checkpoint's own code, beside one written out, and its weights beside the files."""

import itertools
from typing import NamedTuple

import dit_reference
import networks
import pytest
import tiny
import torch
from laws import slow_but
from own import DREAM, KINDS, MASK, SIZE, decoder, made, write

from lm_eval_duel import denoisers
from lm_eval_duel.audit import network_check
from lm_eval_duel.denoisers.dit import network
from lm_eval_duel.options import Options

NAMES = {kind: KINDS[f"own {kind}"][1] for kind in ("llada", "dream", "sdar")}


class Comparisons(NamedTuple):
    """What an audit has compared of a network, and why not the rest."""

    own: network_check.Compared | None  # with the checkpoint's own code
    written: network_check.Compared | None  # with the network written out
    weights: network_check.Weights | None
    reasons: str


def compared(path, denoiser=None, **arguments):
    arguments = {"pretrained": path, "dtype": "float32", "trust_remote_code": True, "device": "cpu", **arguments}
    options = Options.parse(arguments)
    denoiser = denoiser or denoisers.load(path, device="cpu", **options.network)
    parts, reasons = network_check.compare(options, denoiser, "cpu")

    by_kind = {"own": None, "written": None, "weights": None}
    for part in reversed(parts):  # of several of a kind the first one
        if isinstance(part, network_check.Weights):
            by_kind["weights"] = part
        elif "written out" in part.name:
            by_kind["written"] = part
        else:
            by_kind["own"] = part
    return Comparisons(**by_kind, reasons=" ".join(reasons))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The path of each checkpoint."""
    return {kind: made(tmp_path_factory.mktemp(kind), f"own {kind}")[0] for kind in NAMES}


@pytest.mark.parametrize("kind", NAMES)
def test_a_network_equals_its_own_code(kind, folders):
    comparisons = compared(folders[kind])

    own = comparisons.own
    assert own.name == NAMES[kind]
    assert not own.differs, own
    assert own.positions > 20
    assert own.difference < 1e-4
    assert not comparisons.written.differs, comparisons
    assert comparisons.written.positions == own.positions
    assert not comparisons.weights.differs


@pytest.mark.parametrize(("fault", "kind"), [("head", "llada"), ("rotary", "dream"), ("layer", "sdar")])
def test_a_fault_of_the_network_differs(fault, kind, folders, monkeypatch):
    path = folders[kind]
    denoiser = denoisers.load(path, device="cpu")
    decoder = denoiser.model.base_model
    if fault == "head":
        head = denoiser.head
        monkeypatch.setattr(denoiser, "head", lambda features: 0.9 * head(features))
    elif fault == "rotary":
        decoder.rotary_emb.inv_freq = 450.0 ** -(torch.arange(2) / 2)  # of heads of four; the base is 500
    else:
        with torch.no_grad():
            decoder.layers[1].mlp.down_proj.weight *= 1.02

    comparisons = compared(path, denoiser)
    assert comparisons.own.differs, comparisons
    assert comparisons.written.differs, comparisons


LLAMA = {**SIZE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def test_a_class_of_transformers(tmp_path):
    (tmp_path / "bert").mkdir()
    bert = tiny.checkpoint(tmp_path / "bert", "bert")
    own = compared(bert).own
    assert own.name == "BertForMaskedLM"
    assert not own.differs, own

    (tmp_path / "llama").mkdir()
    llama = write(tmp_path / "llama", "", "", decoder(), LLAMA)
    for arguments in (
        {"attention": "bidirectional", "mask_token_id": MASK},
        {"attention": "causal", "estimator": "ar"},
    ):
        own = compared(llama, **arguments).own
        assert own.name == "LlamaForCausalLM"
        assert not own.differs, own


def test_llada2(tmp_path):
    """Its code in small, beside Llama's class under the same attention."""
    for name in ("own", "twin"):
        (tmp_path / name).mkdir()
    path, *_ = made(tmp_path / "own", "own llada2")
    twin = write(tmp_path / "twin", "", "", decoder(), LLAMA)
    denoiser = denoisers.load(twin, device="cpu", attention="block_causal", mask_token_id=MASK, block=4)

    own = compared(path, denoiser).own
    assert own.name == "LLaDA2MoeModelLM"
    assert not own.differs, own

    runs_own_code = denoisers.load(path, device="cpu", backend="remote", trust_remote_code=True)
    assert "the run itself" in compared(path, runs_own_code).reasons


DIT_CONFIG = """
from transformers import PretrainedConfig

class DiTConfig(PretrainedConfig):
    model_type = "own_dit"
"""
DIT_CODE = """
import torch
from transformers import PreTrainedModel
from lm_eval_duel.audit import plain_networks as plain
from lm_eval_duel.audit.weight_files import WithoutPrefix
from lm_eval_duel.denoisers.dit import network
from .configuration_own import DiTConfig

class OwnDiT(PreTrainedModel):
    config_class = DiTConfig

    def __init__(self, config):
        super().__init__(config)
        sizes = config.vocab_size, config.hidden_dim, config.n_blocks, config.n_heads, config.cond_dim, True
        self.backbone = network.DiT(network.DiTConfig(*sizes))
        self.backbone.rotary_emb = torch.nn.Module()
        self.backbone.rotary_emb.register_buffer("inv_freq", torch.zeros(config.hidden_dim // config.n_heads // 2))
        if config.model_type == "bd3lm":
            for name in ("sampling_eps_min", "sampling_eps_max"):
                self.register_buffer(name, torch.tensor(0.5))

    def forward(self, input_ids, timesteps, SAMPLE_MODE):
        torch.zeros_like(timesteps)
        [ids] = input_ids.tolist()
        seen = plain.block_causal(len(ids), self.config.block_size) if sample_mode else None
        w = WithoutPrefix(self.state_dict(), "backbone.")
        return plain.dit(w, ids, self.config.n_heads, seen=seen)[None].float()
"""


@pytest.mark.parametrize("kind", [pytest.param("mdlm", marks=pytest.mark.slow), "bd3lm"])
def test_the_forward_of_a_dit_takes_timesteps(kind, tmp_path):
    """BD3-LM's takes a plain row in its sample mode only, and masks attention itself."""
    name = kind.upper()
    mapped = {"AutoConfig": "configuration_own.DiTConfig", "AutoModelForMaskedLM": f"modeling_own.{name}"}
    path, _ = dit_reference.write(tmp_path, kind, auto_map=mapped)
    dit_reference.words(dit_reference.TOKENS).save_pretrained(path)
    (tmp_path / "configuration_own.py").write_text(DIT_CONFIG)
    if kind == "bd3lm":
        code = DIT_CODE.replace("SAMPLE_MODE", "sample_mode=None")
    else:
        code = DIT_CODE.replace(", SAMPLE_MODE", "").replace(" if sample_mode else None", " if False else None")
    (tmp_path / "modeling_own.py").write_text(code.replace("OwnDiT", name))

    comparisons = compared(path)

    assert comparisons.own is not None, comparisons.reasons
    assert comparisons.own.name == name
    assert not comparisons.own.differs, comparisons


def test_what_cannot_be_compared_says_why(tmp_path):
    dit, _ = dit_reference.write(tmp_path, "bd3lm")
    assert "it has no code" in compared(dit).reasons
    path, *_ = made(tmp_path, "own dream")
    assert "trust_remote_code=true" in compared(path, trust_remote_code=False).reasons
    (tmp_path / "modeling_own.py").write_text("import no_such_package\n" + DREAM)
    assert "no_such_package" in compared(path).reasons


def test_an_error_of_this_network_is_no_reason_to_skip_the_comparison(folders, monkeypatch):
    """The code of others may fail, which is a text; our own network may not."""
    denoiser = denoisers.load(folders["llada"], device="cpu")

    def broken(*_, **__):
        raise KeyError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(network_check.OwnRow, "seen", lambda self, *_: {}["ours"])
        with pytest.raises(KeyError, match="ours"):
            compared(folders["llada"], denoiser)
    monkeypatch.setattr(network_check, "load_own_class", lambda *_: broken)
    assert "own code: KeyError: 'ours'" in compared(folders["llada"], denoiser).reasons
    monkeypatch.setattr(denoiser, "head", broken)
    with pytest.raises(KeyError, match="ours"):
        compared(folders["llada"], denoiser)


# ---------------------------------------------------------------- the network written out

WRITTEN = ["mdlm", "bd3lm", "sedd", "gidd", "ar", "duo", "gidd-uniform", "llada2", "sdar-moe", "smdm"]
WRITTEN += ["a2d-llama", "nemotron-labs-diffusion"]
SCALED = {  # rotary positions: the entries of each kind
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def folder_of(name, folder):
    """A checkpoint of a family, and what a user says to load it."""
    if name in dit_reference.CONFIGS:
        return dit_reference.write(folder, name)[0], {}
    path, options, _ = networks.made(folder, name)
    return path, options


@pytest.mark.parametrize(
    "name", slow_but(WRITTEN, ["sedd", "bd3lm", "gidd-uniform", "llada2", "nemotron-labs-diffusion"])
)
def test_a_network_equals_the_one_written_out(name, tmp_path):
    path, options = folder_of(name, tmp_path)

    comparisons = compared(path, trust_remote_code=False, **options)

    assert not comparisons.written.differs, comparisons
    assert comparisons.written.positions > 9
    assert comparisons.written.difference < 1e-4
    assert not comparisons.weights.differs


def scaled(folder, scaling):
    """The comparisons of a Llama whose rotary positions are scaled."""
    path = write(folder, "", "", decoder(), {**LLAMA, "rope_scaling": scaling})
    return compared(path, attention="bidirectional", mask_token_id=MASK)


SPELLED = list(itertools.product(SCALED, ["rope_type", "type"]))


@pytest.mark.parametrize(("kind", "spelling"), slow_but(SPELLED, [SPELLED[0], SPELLED[3], SPELLED[4]]))
def test_scaled_rotary_positions_are_written_out_under_either_spelling(kind, spelling, tmp_path):
    comparisons = scaled(tmp_path, {spelling: kind, **SCALED[kind]})

    assert comparisons.written is not None, comparisons
    assert not comparisons.written.differs, comparisons
    assert not comparisons.own.differs, comparisons


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"attention_factor": 1.0}, marks=pytest.mark.slow),
        {"attention_factor": 1.0, "beta_slow": 16.0, "original_max_position_embeddings": 4096},
        {"mscale": 0.7, "mscale_all_dim": 0.7},
        pytest.param({"factor": 0.5}, marks=pytest.mark.slow),
        {"attention_factor": 1.0, "beta_slow": 3.0},  # the pairs between which it interpolates are one
        {"attention_factor": 1.0, "original_max_position_embeddings": 4096, "truncate": False},
    ],
)
def test_yarn_that_leaves_attention_unscaled_is_written_out(entries, tmp_path):
    comparisons = scaled(tmp_path, {**YARN, **entries})

    assert comparisons.written is not None, comparisons
    assert not comparisons.written.differs, comparisons


@pytest.mark.parametrize("entries", [{}, {"attention_factor": 1.1}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
def test_yarn_that_scales_attention_is_not_written_out(entries, tmp_path):
    comparisons = scaled(tmp_path, {**YARN, **entries})

    assert comparisons.written is None, comparisons
    assert "scales the scores of attention" in comparisons.reasons
    assert not comparisons.own.differs, comparisons


OWN_FAULTS = [
    *itertools.product(("rotary", "rounded"), ("mdlm", "bd3lm", "sedd", "duo", "gidd")),
    *itertools.product(["level"], ("sedd", "duo", "gidd")),  # the others read no noise level
]
PLAIN_FAULTS = [case for case in OWN_FAULTS if case[1] in ("bd3lm", "duo")]


@pytest.mark.parametrize(("fault", "name"), slow_but(OWN_FAULTS, PLAIN_FAULTS))
def test_a_fault_of_our_own_network_differs(fault, name, tmp_path, monkeypatch):
    """A rotary base of 9,000; weights in eight bits, under the digest of the files; another noise level."""
    path, options = folder_of(name, tmp_path)
    denoiser = denoisers.load(path, device="cpu", **options)
    if fault == "rotary":
        rotary = network.rotary
        monkeypatch.setattr(network, "rotary", lambda positions, head: rotary(positions * 0.9, head))
    elif fault == "rounded":
        with torch.no_grad():
            for parameter in denoiser.network.parameters():
                parameter.copy_(parameter.to(torch.float8_e4m3fn).float())
    else:
        noise_level = type(denoiser).noise_level
        monkeypatch.setattr(type(denoiser), "noise_level", lambda self, t: 1.1 * noise_level(self, t))

    comparisons = compared(path, denoiser)
    assert comparisons.written.differs, comparisons
    assert comparisons.weights.differs == (fault == "rounded")
