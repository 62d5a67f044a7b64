"""Rows of a batch: networks that react to padding, to the length of a row, or to other rows (law 18)."""

import math

import pytest
import tiny
import torch
import transformers
from networks import written
from toys import BlockCausal

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo

RAGGED = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((2,), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
    Window((), (17,), (3,)),
]


def agree(scores, expected):
    for score, other in zip(scores, expected, strict=True):
        assert score.log_prob == pytest.approx(other.log_prob, abs=1e-4)


def test_a_small_leak_is_a_leak():
    """A convolution that reads padding a little, far less than attention would: 1e-3 nats, far above float noise."""
    model = tiny.network("convbert", scale=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv_out_layer" in name:
                parameter.mul_(0.03)
    assert not tiny.masked_lm(model.bfloat16()).honours_padding


# ---------------------------------------------------------------- rows that show nothing


def test_esm_needs_a_visible_token(family, tmp_path):
    """Its input depends on how much of a row is masked."""
    denoiser = family("esm-2").denoiser
    path = family("esm-2").path
    windows = [Window((0, 6), (7, 9, 12, 8, 15, 5), (2,)), Window((0,), (10, 9), (2,)), Window((), (17,), (2,))]
    one_row_a_call = Elbo(denoiser, ElboArguments(4), batch_size=1)
    alone = [one_row_a_call.log_prob([window])[0] for window in windows]
    agree(Elbo(denoiser, ElboArguments(4), batch_size=8).log_prob(windows), alone)

    duel = DuelEstimator(denoiser, "greedy", 4)
    shows_nothing = Window((), (5, 6))
    with pytest.raises(DuelError, match=r"^Window 1 .*bos=none"):
        duel.log_prob([Window((2,), (5, 6)), shows_nothing])
    with pytest.raises(DuelError, match=r"^Window 0 .*bos=none"):
        Elbo(denoiser).log_prob([shows_nothing])
    with pytest.raises(DuelError, match=r"^Window 0 .*bos=none"):
        duel.sample([()], 4)
    duel.log_prob([Window((), ())])

    with pytest.raises(DuelError, match="cfg_scale"):
        denoisers.load(path, device="cpu", cfg_scale=0.5)
    with pytest.raises(DuelError, match="cfg_scale"):
        Guided(denoiser, 0.5)

    path, _ = written(tmp_path, "esm-2", {"token_dropout": False})
    plain = denoisers.load(path, device="cpu")
    assert not plain.needs_visible
    assert plain.relative_positions
    DuelEstimator(plain, "greedy", 4).log_prob([shows_nothing])


# ---------------------------------------------------------------- networks that change, or are no function


def test_bigbird_is_scored_with_full_attention_at_every_length(tmp_path, caplog):
    path = tiny.checkpoint(tmp_path, "bigbird")
    denoiser = denoisers.load(path, device="cpu")
    assert "block-sparse" in caplog.text
    assert "original_full" in denoiser.describe()["attention_type"]

    long = Window((2,), tuple(range(5, 29)), (3,))
    before = DuelEstimator(denoiser, "greedy", 4).log_prob([long])
    DuelEstimator(denoiser, "greedy", 4).log_prob([Window((2,), (5,))])
    assert DuelEstimator(denoiser, "greedy", 4).log_prob([long]) == before

    caplog.clear()
    short = denoisers.load(path, device="cpu", max_length=14)
    assert "attention_type" not in short.describe()
    assert "block-sparse" not in caplog.text


def test_rotary_positions_that_change_with_the_longest_row_of_a_batch(tmp_path):
    """LongRoPE has other frequencies from a length on, for all rows of a call: only equal lengths go together."""
    short = {"original_max_position_embeddings": 8}  # transformers 4 and 5 look for it in two places
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    scaled = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10_000.0, **factors, **short}
    path = tiny.checkpoint(tmp_path, "llama")
    tiny.network("llama", rope_scaling=scaled, **short).save_pretrained(path)
    blocks = {"device": "cpu", "attention": "block_causal", "block": 4}
    assert denoisers.load(path, max_length=8, **blocks).honours_padding
    with pytest.raises(DuelError, match="max_length=8"):
        denoisers.load(path, **blocks)
    for attention, rule in (("bidirectional", "greedy"), ("causal", "left_to_right")):
        denoiser = denoisers.load(path, device="cpu", attention=attention)
        assert not denoiser.honours_padding
        windows = RAGGED if attention == "bidirectional" else [Window((2, *w.context), w.target) for w in RAGGED]
        alone = [DuelEstimator(denoiser, rule, "auto", batch_size=1).log_prob([window])[0] for window in windows]
        agree(DuelEstimator(denoiser, rule, "auto", batch_size=8).log_prob(windows), alone)


# ---------------------------------------------------------------- rows that influence each other


class Experts(torch.nn.Module):
    """An expert with a capacity: tokens beyond it are dropped, in the order of the batch."""

    def __init__(self, capacity=math.inf):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(8, 16)
        self.out = torch.nn.Linear(16, 8)
        self.capacity = capacity

    def forward(self, ids, real):
        x = self.table(ids)
        x = (x + torch.arange(ids.shape[1])[:, None].cos() + x.mean(1, keepdim=True)).flatten(0, 1)
        chosen = x[:, 0] > 0
        taken = chosen & (chosen.cumsum(0) <= max(8, self.capacity * len(x)))
        return self.out(torch.tanh(x + 2 * taken[:, None] * x.flip(1))).view(*ids.shape, -1)


class Normalised(Experts):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, ids, real):
        return self.norm(super().forward(ids, real).flatten(0, 1)).view(*ids.shape, -1)


class Mixing(BlockCausal):
    """A block-causal network that subtracts the mean of the batch."""

    def stream(self, *arguments, **more):
        features, own = super().stream(*arguments, **more)
        return features - features.mean((0, 1), keepdim=True), own


def in_memory(network, **options):
    return Duel.from_model(network, block=4, mask_token_id=4, max_length=12, **options)


class Floor(Experts):
    """Room for 128 tokens in any call."""

    def forward(self, ids, real):
        self.capacity = 128 / ids.numel()
        return super().forward(ids, real)


def crowd(rows):
    return lambda ids, real: Experts()(ids, real) * (1 + 0.1 * (len(ids) > rows))


def minus_mean(ids, real):
    logits = Experts()(ids, real)
    return logits - logits.mean((0, 1), keepdim=True)


@pytest.mark.row_checks
def test_networks_whose_rows_influence_each_other_are_refused():
    """In small calls, and in the largest call of a run."""
    for network in (Experts(capacity=0.3), minus_mean, Floor(), crowd(16)):
        with pytest.raises(DuelError, match="in a batch"):
            in_memory(network)
    assert in_memory(minus_mean, self_tests=False)
    with pytest.raises(DuelError, match="in a batch"):
        Duel.from_model(Mixing(), block=2)
    assert in_memory(crowd(256))  # 2048 tokens are 256 rows of 8
    with pytest.raises(DuelError, match="in a batch"):
        in_memory(crowd(256), batch_size=200)

    windows = [Window((), (0, 1, 2, 3, 5, 6, 7)), Window((2,), (7, 6, 5, 3, 2, 1))]
    duel = in_memory(Experts())  # without a capacity
    alone = [duel.log_prob([window])[0] for window in windows]
    agree(duel.log_prob(windows), alone)


@pytest.mark.row_checks
def test_batch_normalisation_in_training_mode_is_refused_and_its_statistics_stay():
    network = Normalised().train()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}

    with pytest.raises(DuelError, match="in a batch"):
        in_memory(lambda ids, real: network(ids, real))
    in_memory(network)  # a module that is known runs in eval mode

    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name])
    assert network.norm.training


@pytest.mark.row_checks
def test_a_masked_lm_in_half_precision_is_tested_in_float32(tmp_path, monkeypatch):
    own = transformers.BertForMaskedLM.forward

    def mixed(self, *arguments, **more):
        out = own(self, *arguments, **more)
        out.logits = out.logits - 0.05 * out.logits.mean((0, 1), keepdim=True)
        return out

    folder = tiny.checkpoint(tmp_path, "bert")
    monkeypatch.setattr(transformers.BertForMaskedLM, "forward", mixed)
    with pytest.raises(DuelError, match="in a batch"):
        Duel.from_pretrained(folder, device="cpu", dtype="bfloat16")
