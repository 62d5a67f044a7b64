"""Law 18: a row alone equals the same row among strangers of equal length; other networks are refused at load."""

import pytest
import tiny
import torch
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, DuelError, Window

VOCABULARY, MASK, LENGTH = 8, 4, 12


class Experts(torch.nn.Module):
    """A mixture of experts with a capacity: tokens beyond it are dropped, in the order of the batch."""

    def __init__(self, capacity=None, width=16, experts=4):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(VOCABULARY, width)
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))
        self.out = torch.nn.Linear(width, VOCABULARY)
        self.capacity = capacity  # share of the tokens of a call that an expert takes, and at least 8

    def forward(self, ids, real):
        x = self.table(ids)
        x = x + torch.arange(ids.shape[1])[:, None].cos() + x.mean(1, keepdim=True)
        flat = x.flatten(0, 1)
        chosen = self.router(flat).argmax(1)
        added = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            at = (chosen == n).nonzero()[:, 0]
            if self.capacity is not None:
                at = at[: max(8, int(self.capacity * len(flat)))]
            added = added.index_add(0, at, expert(flat[at]))
        return self.out(torch.tanh(flat + 2 * added)).view(*ids.shape, -1)


class Normalised(Experts):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(VOCABULARY)

    def forward(self, ids, real):
        return self.norm(super().forward(ids, real).flatten(0, 1)).view(*ids.shape, -1)


def duel(network, **options):
    return Duel.from_model(network, block=4, mask_token_id=MASK, max_length=LENGTH, **options)


def minus_mean():
    network = Experts()
    return lambda ids, real: network(ids, real) - network(ids, real).mean((0, 1), keepdim=True)


@pytest.mark.parametrize("network", [lambda: Experts(capacity=0.3), minus_mean])
def test_networks_whose_rows_influence_each_other_are_refused(network):
    with pytest.raises(DuelError, match="its rows influence each other"):
        duel(network())
    assert duel(network(), self_tests=False)


def test_a_mixture_of_experts_without_a_capacity_is_scored():
    windows = [Window((), (0, 1, 2, 3, 5, 6, 7)), Window((2,), (7, 6, 5, 3, 2, 1))]
    scorer = duel(Experts())
    together = [scored.log_prob for scored in scorer.log_prob(windows)]
    assert together == pytest.approx([scorer.log_prob([window])[0].log_prob for window in windows], abs=1e-4)


def test_batch_normalisation_in_training_mode_is_refused_and_its_statistics_stay():
    network = Normalised().train()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with pytest.raises(DuelError, match="its rows influence each other"):
        duel(lambda ids, real: network(ids, real))
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    duel(network)  # a module that is known runs in eval mode
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())
    assert network.norm.training


class Mixing(BlockCausal):
    """A block-causal network that subtracts the mean of the batch."""

    def stream(self, *arguments, **more):
        features, own = super().stream(*arguments, **more)
        return features - features.mean((0, 1), keepdim=True), own


@pytest.mark.parametrize(("kind", "refused"), [(BlockCausal, False), (Mixing, True)])
def test_block_causal_networks(kind, refused):
    if not refused:
        assert Duel.from_model(kind(), block=2)
        return
    with pytest.raises(DuelError, match="its rows influence each other"):
        Duel.from_model(kind(), block=2)


def test_a_masked_lm_in_half_precision_is_tested_in_float32(tmp_path, monkeypatch):
    import transformers

    own = transformers.BertForMaskedLM.forward

    def mixed(self, *arguments, **more):
        out = own(self, *arguments, **more)
        out.logits = out.logits - 0.05 * out.logits.mean((0, 1), keepdim=True)
        return out

    folder = tiny.checkpoint(tmp_path, "bert")
    monkeypatch.setattr(transformers.BertForMaskedLM, "forward", mixed)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(DuelError, match="its rows influence each other"):
            Duel.from_pretrained(folder, device="cpu", dtype=dtype)


def test_the_toys_are_functions_of_their_rows():
    assert Duel.from_model(Toy(), block=2)
