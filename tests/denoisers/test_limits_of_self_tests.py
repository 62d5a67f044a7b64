"""What a network must show when it is loaded: the sizes of calls that are tested, and tolerances on both sides."""

import json
import logging
import math
from types import SimpleNamespace

import dit_reference
import pytest
import torch
from safetensors.torch import save_file
from toys import Toy

from lm_eval_duel import Duel
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import hub, self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.dit import checkpoint as dit_checkpoint
from lm_eval_duel.denoisers.dit import denoiser as dit
from lm_eval_duel.denoisers.hf import own_code, weights
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.user_module import digest
from lm_eval_duel.errors import DuelError

# ---------------------------------------------------------------- rows that are evaluated together


class Sized(Toy):
    """Notes the size of each call, and runs out of memory above `most` rows."""

    splits_head = True

    def __init__(self, most=10**9, **options):
        super().__init__(**options)
        self.sizes = []
        self.most = most

    def features(self, ids, real):
        self.sizes.append(tuple(ids.shape))
        if len(ids) > self.most:
            raise torch.OutOfMemoryError
        return super().features(ids, real)


@pytest.mark.row_checks
@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("tokens", [1, 16, 128, 129])
def test_a_row_is_tested_in_calls_of_the_positions_that_are_given(length, tokens):
    """Among at least three other rows."""
    toy = Sized(length=length)
    row = min(length, self_tests.LENGTH)
    count = max(4, tokens // row)

    self_tests.require_separate_rows(toy, "x", tokens)
    assert toy.sizes == [(1, row), (1, row), (count, row), (count, row)]
    assert toy.separate_tokens == tokens

    self_tests.require_separate_rows(toy, "x", 1)
    assert toy.separate_tokens == tokens, "the larger call stays"


@pytest.mark.row_checks
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    ("tested", "asked", "most"), [(0, 900, 10**9), (128, 128, 10**9), (128, 900, 10**9), (128, 900, 30)]
)
def test_larger_calls_are_tested_before_they_are_made(tested, asked, most, splits, monkeypatch):
    """If smaller ones were; halved where memory does not suffice; with whole logits a call holds fewer positions."""
    monkeypatch.setattr(self_tests, "VALUES", 4 * 500)
    toy = Sized(most)
    toy.splits_head = splits
    toy.separate_tokens = tested
    larger = asked if splits else min(asked, 500)  # of four columns
    while larger // 8 > most:
        larger //= 2
    expected = max(tested, larger) if tested else 0

    self_tests.cover(toy, asked)

    assert toy.separate_tokens == expected
    rows = [count for count, _ in toy.sizes if 1 < count <= most]
    if tested and expected > tested:
        assert rows[-1] == expected // 8
    else:
        assert not rows


# ---------------------------------------------------------------- tolerances


class Padded(Toy):
    """Honours padding but for a part of the effect that it would have."""

    share = 0.0

    def features(self, ids, real):
        hidden = super().features(ids, real)
        return hidden if real is None else hidden + self.share * (super().features(ids, None) - hidden)


@pytest.mark.parametrize("off", [0.5, 2.0])
def test_padding_is_honoured_up_to_float_noise(off):
    """In float64, to 1e-10 of the logits' spread."""
    toy = Padded()
    row = self_tests.half_masked(toy)
    lengths = torch.tensor([1, 4, 7, 8])
    real = torch.arange(8) < lengths[:, None]
    ids = torch.where(real, row, toy.mask_id)
    seen = self_tests.logits_of(toy, ids)
    effects = []
    for n, count in enumerate([1, 4, 7]):
        alone = self_tests.logits_of(toy, row[:, :count])[0]
        effects.append(self_tests.difference_of(alone, seen[n, :count]))

    toy.share = off * 1e-10 / max(effects)

    assert self_tests.honours_padding(toy) == (off < 1)


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("off", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("where", ["rope_parameters", "rope_theta"])
def test_rotary_frequencies(dtype, noise, off, where):
    frequencies = 500.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    module = torch.nn.Module()
    module.register_buffer("inv_freq", (frequencies * (1 + off * noise)).to(dtype))
    config = SimpleNamespace(rope_theta=500.0)
    if where == "rope_parameters":
        config = SimpleNamespace(rope_parameters={"rope_theta": 500.0})

    if off < 1:
        self_tests.rotary_frequencies(module, config, "x")
    else:
        with pytest.raises(DuelError, match="500"):
            self_tests.rotary_frequencies(module, config, "x")
        scaled = SimpleNamespace(rope_theta=500.0, rope_scaling={"type": "yarn"})
        self_tests.rotary_frequencies(module, scaled, "x")


@pytest.mark.parametrize("entries", [{"head_dim": 8}, {"head_dim": None}, {"partial_rotary_factor": 0.5}])
def test_plain_rotary_frequencies_by_hand(entries):
    config = SimpleNamespace(**{"rope_theta": 100.0, "hidden_size": 16, "num_attention_heads": 2, **entries})
    width = 4 if "partial_rotary_factor" in entries else 8
    expected = [100.0 ** -(2 * n / width) for n in range(width // 2)]

    frequencies, factor = own_code.plain_rope(config)

    assert frequencies.tolist() == pytest.approx(expected, rel=1e-6)
    assert factor == 1.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default", "linear"])
@pytest.mark.parametrize("positions", [31, 32, 33, 64])
@pytest.mark.parametrize("layers", [False, True])
def test_frequencies_that_change_with_the_row(kind, positions, layers):
    """Above the least length that the config names; sections may stand by type of layer."""
    section = {"rope_type": kind, "original_max_position_embeddings": 32}
    config = SimpleNamespace(rope_parameters={"full": section} if layers else section, max_position_embeddings=64)
    network = SimpleNamespace(model=SimpleNamespace(config=config), max_length=positions)
    changes = kind in ("dynamic", "longrope") and positions > 32
    assert self_tests._unscaled_length(network) == (32 if changes else None)


# ---------------------------------------------------------------- functions in memory


@pytest.mark.parametrize(
    ("given", "bound", "length"), [(None, 6, 6), (4, 6, 4), (9, 6, 9), (5, 10**6, 5), (5, 10**30, 5)]
)
def test_the_rows_of_a_function(given, bound, length):
    """As the user says, else as long as the tokenizer says if that is a length."""
    words = dit_reference.words(5, mask=True)
    words.model_max_length = bound
    duel = Duel.from_model(Toy(tokens=5, length=16).features, words, max_length=given)
    assert duel.denoiser.max_length == length
    if given is None:
        with pytest.raises(DuelError, match="max_length="):
            words.model_max_length = 10**6
            Duel.from_model(Toy(tokens=5, length=16).features, words)


@pytest.mark.parametrize("kind", ["probabilities", "with a zero", "log-probabilities", "logits"])
def test_a_function_that_returns_probabilities_is_refused(kind):
    toy = Toy(length=4)

    def function(ids, real):
        logits = toy.features(ids, real)
        if kind == "probabilities":
            return logits.softmax(2)
        if kind == "with a zero":
            return logits.masked_fill(torch.arange(4) == 3, -math.inf).softmax(2)
        return logits.log_softmax(2) if kind == "log-probabilities" else logits

    arguments = {"mask_token_id": 3, "max_length": 4}
    if kind.startswith("log"):
        assert Duel.from_model(function, **arguments).denoiser.vocab_size == 4
    else:
        with pytest.raises(DuelError, match="probabilities"):
            Duel.from_model(function, **arguments)


def test_a_digest_of_weights_reads_all_of_them():
    """Twelve digits; another for each parameter, buffer, dtype, name and entry of the config."""

    def network(layers=1, dtype=None):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        module.register_buffer("table", torch.arange(3.0), persistent=False)
        module.config = SimpleNamespace(to_dict=lambda: {"layers": layers, "dtype": dtype})
        return module

    def tensors(module):
        return dict([*module.named_parameters(), *module.named_buffers()])

    first = digest(network())
    assert len(first) == 12
    assert int(first, 16) >= 0
    assert digest(network()) == first
    assert digest(network(dtype="float16")) == first

    names = list(tensors(network()))
    assert "table" in names
    others = [digest(network(layers=2)), digest(network().double())]
    for name in names:
        changed = network()
        with torch.no_grad():
            tensors(changed)[name].add_(1)
        others.append(digest(changed))
    assert len({first, *others}) == len(others) + 1


# ---------------------------------------------------------------- our own DiT by its config


def unfilled(tmp_path, kind, tokenizer=None, **changes):
    """A network by a config with these changes; None: without that entry."""
    config = {**dit_reference.CONFIGS[kind], **changes}
    for name, value in changes.items():
        if value is None:
            del config[name]
    options = LoadOptions(str(tmp_path), torch.device("cpu"))
    return dit_checkpoint.unfilled(Checkpoint(options, config, tokenizer=tokenizer))


def test_a_dit_by_its_config(tmp_path, caplog):
    assert unfilled(tmp_path, "mdlm", cond_dim=None).network.config.condition == 128
    assert unfilled(tmp_path, "mdlm").network.config.condition == dit_reference.CONDITION

    for block, family in ((4, "bd3lm"), (15, "bd3lm"), (16, "mdlm"), (17, "mdlm"), (None, "mdlm")):
        assert unfilled(tmp_path, "bd3lm", block_size=block).family == family

    for t_eps in (1e-9, 0.499):
        network = unfilled(tmp_path, "gidd", t_eps=t_eps, vocab_size=50300, mask_token_id=None)
        assert network.t_eps == t_eps
        assert network.mask_id == 50258
    for t_eps in (0.0, 0.5):
        with pytest.raises(DuelError, match="t_eps"):
            unfilled(tmp_path, "gidd", t_eps=t_eps, vocab_size=50300)

    assert unfilled(tmp_path, "gidd", vocab_size=50259).mask_id == 50258
    with pytest.raises(DuelError, match="mask_token_id="):
        unfilled(tmp_path, "gidd", vocab_size=50258)
    assert unfilled(tmp_path, "mdlm").mask_id == dit_reference.VOCABULARY - 1
    assert unfilled(tmp_path, "duo").mask_id is None
    assert not caplog.records

    (tmp_path / "duo-distilled").mkdir()
    unfilled(tmp_path / "duo-distilled", "duo")
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "duo-distilled" in caplog.text


@pytest.mark.parametrize("bos", ["given", "official"])
def test_what_timed_networks_say_of_their_time(bos, tmp_path):
    counted = "scored positions" if bos == "official" else "row"
    for kind, key, text in (
        ("gidd", "time", f"masked share of the {counted}, in [0.05, 1 - 0.05]"),
        ("sedd", "sigma", f"clamped, of the masked share of the {counted}"),
    ):
        path, _ = dit_reference.write(tmp_path, kind)
        if kind == "sedd":
            dit_reference.words(dit_reference.TOKENS).save_pretrained(path)
        spec = dit_reference.denoisers.load(path, device="cpu", bos=bos).describe()
        assert spec[key] == text
        assert spec["relative_positions"] is True
        for file in tmp_path.iterdir():
            file.unlink()

    path, _ = dit_reference.write(tmp_path, "gidd-uniform")
    noised = dit_reference.denoisers.load(path, device="cpu")
    assert noised.noise_training.note == "t in [0.05, 1 - 0.05]"
    assert noised.describe()["relative_positions"] is False


@pytest.mark.parametrize("bos", ["given", "official"])
def test_the_masked_share_of_a_row(bos):
    """Of all of it; in the authors' way, of target and tail."""
    network = dit.SEDD.__new__(dit.SEDD)
    network.mask_id = 3
    network.bos = bos
    network.noise_training = None
    network.device = torch.device("cpu")
    windows = [Window((0, 1), (0, 1, 2, 0), (1,)), Window((), (0, 1, 2)), Window((0,), (0, 1), (2, 2), tail=2)]
    rows = Rows.from_windows(windows, network.device)
    view = dit.TimedView(network, rows, None)
    lanes = Lanes.fresh(rows, *torch.tensor([(0, 4, 2), (1, 0, 3), (2, 2, 1)]).unbind(1))
    _, shown, real = view._input(lanes)

    share = view.masked_share(lanes, shown, real)

    # masked: the blocks in progress, what follows them in the target, and the tail
    assert share.tolist() == ([2 / 4, 3 / 3, 3 / 4] if bos == "official" else [2 / 7, 3 / 3, 3 / 7])


# ---------------------------------------------------------------- files


def test_averaged_weights_are_named_if_they_are_missing(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    file = str(tmp_path / "last.ckpt")
    state = {"backbone.a": torch.zeros(2), "backbone.rotary_emb.inv_freq": torch.ones(1), "noise.b": torch.ones(3)}
    for averages, weights_of_a, warned in (
        ({}, [0.0, 0.0], True),
        ({"ema": {"shadow_params": [torch.ones(2)]}}, [1.0, 1.0], False),
    ):
        caplog.clear()
        torch.save({"state_dict": state, **averages}, file)
        tensors = hub.read_tensors(str(tmp_path))
        assert sorted(tensors) == ["backbone.a", "backbone.rotary_emb.inv_freq"]
        assert tensors["backbone.a"].tolist() == weights_of_a
        assert ("EMA" in caplog.text) == warned
    torch.save({"state_dict": state, "ema": {"shadow_params": [torch.ones(2), torch.ones(1)]}}, file)
    with pytest.raises(DuelError, match="2 tensors for 1 parameters"):
        hub.read_tensors(str(tmp_path))


def test_every_shard_is_read(tmp_path):
    """Of many; one that is missing is named."""
    tensors = {f"t{n}": torch.full((n,), float(n)) for n in range(1, 15)}
    files = {name: f"model-{name}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / files[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    read = hub.read_tensors(str(tmp_path))
    assert read.keys() == tensors.keys()
    assert hub.tensor_names(str(tmp_path)) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].equal(tensor)

    (tmp_path / files["t14"]).unlink()
    with pytest.raises(DuelError, match="model-t14"):
        hub.read_tensors(str(tmp_path))


def test_the_first_pattern_of_an_adapter_that_matches_a_module_counts():
    modules = {"native.a": "block.0.att_proj", "native.b": "block.1.att_proj", "native.c": "att_proj_more"}
    patterns = {"1.att_proj": 2, "att_proj": 4, "block.0.att_proj": 8}
    assert weights._by_module(patterns, modules) == {"native\\.a": 4, "native\\.b": 2}
