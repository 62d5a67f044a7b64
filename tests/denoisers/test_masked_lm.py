"""Masked language models through their own forward: what is found out about them."""

import pytest
import tiny
import torch
from close import same_scores

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf.own_forward import MaskedLM
from lm_eval_duel.errors import DuelError

WINDOWS = [
    Window((2, 6), (7, 9, 30, 12, 8, 15, 5, 21, 11), (3,)),
    Window((2,), (10, 9), (3,)),
    Window((), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9), (33, 6, 7), (3,)),
]


def test_the_head_is_evaluated_at_masked_positions_only_and_all_mask_starts_tie(family):
    seen = []
    denoiser = family("modernbert").denoiser
    duel = Duel(denoiser, "greedy", 4)
    head = denoiser.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output[..., 0].numel()))
    duel.log_prob([Window((2, 5, 6, 7), (8, 9, 10), (3,))])
    hook.remove()
    assert sum(seen) == 3 + 2 + 1

    duel = Duel(denoiser, "greedy", 4)
    without_context, with_context = duel.log_prob([Window((), (8, 8, 20, 31, 6)), Window((2,), (8, 8))])
    assert without_context.all_mask_starts == 1
    assert without_context.reveal_steps[0] == 0
    assert with_context.all_mask_starts == 0
    assert duel.counts.all_mask_starts == 1


def test_features_are_the_input_of_the_head(family):
    """Learned planners read them: after BERT's transform, not before it."""
    denoiser = family("bert").denoiser
    ids = torch.tensor([[2, 6, denoiser.mask_id, 9, 3]])
    with torch.inference_mode():
        hidden = denoiser.model.bert(ids).last_hidden_state
        expected = denoiser.model.cls.predictions.transform(hidden)
        assert torch.allclose(denoiser.features(ids, None), expected, atol=1e-5)
        logits = denoiser.head(denoiser.features(ids, None)[0])
        assert torch.allclose(logits, denoiser.model(ids).logits[0], atol=1e-4)
    assert denoiser.splits_head
    assert not torch.allclose(expected, hidden, atol=1e-2)


class Deaf(MaskedLM):
    """A network that does not listen to its attention mask."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, None)


class Whole(MaskedLM):
    """A network without an output embedding to hook."""

    def take(self, model):
        model.get_output_embeddings = lambda: None
        super().take(model)


class Rescaled(MaskedLM):
    """A network that does something to its logits after the head."""

    def _logits(self, ids, mask=None):
        return super()._logits(ids, mask) * 1.001


class Backwards(MaskedLM):
    """A network that ignores what comes later."""

    def _logits(self, ids, mask=None):
        last = []
        for n in range(ids.shape[1]):
            last.append(super()._logits(ids[:, : n + 1])[:, -1:])
        return torch.cat(last, 1)


def test_what_networks_do_with_masks_and_heads():
    right = Duel(tiny.masked_lm(tiny.network("bert")), "greedy", 4).log_prob(WINDOWS)
    for kind, honours, splits in ((Deaf, False, True), (Whole, True, False)):
        denoiser = tiny.masked_lm(tiny.network("bert"), kind=kind)
        assert denoiser.honours_padding == honours
        assert denoiser.splits_head == splits
        same_scores(Duel(denoiser, "greedy", 4).log_prob(WINDOWS), right)
    assert not tiny.masked_lm(tiny.network("bert"), kind=Rescaled).splits_head
    with pytest.raises(DuelError, match="causal"):
        tiny.masked_lm(tiny.network("bert"), kind=Backwards)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_coarse_dtype_does_not_hide_what_a_network_is(name):
    """A barely initialised one in bfloat16: its positions are weak, but BERT has them."""
    quiet = tiny.network(name)
    with torch.no_grad():
        for parameter in quiet.parameters():
            parameter.div_(8)
    assert tiny.masked_lm(quiet.to(torch.bfloat16)).relative_positions == (name == "modernbert")
