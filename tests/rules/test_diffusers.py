"""diffusers' BlockRefinementScheduler, the sampler of its LLaDA2Pipeline, run on a toy network beside our rules."""

import inspect

import pytest
import torch
from drawn_reference import logits_of
from toys import BlockCausal

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.options import Options

diffusers = pytest.importorskip("diffusers", minversion="0.42", reason="diffusers is not installed")

BLOCK = 4


def refine(toy, context, steps, threshold):
    """Blocks of masked tokens filled by the scheduler as LLaDA2Pipeline calls it: ids (1, 4), reveal steps (1, 4)."""
    scheduler = diffusers.BlockRefinementScheduler(block_length=BLOCK, num_inference_steps=steps)
    scheduler.set_timesteps(steps, block_length=BLOCK)
    head, block, when = torch.tensor([context]), torch.full((1, BLOCK), toy.mask_id), torch.full((1, BLOCK), -1)
    settings = {"mask_token_id": toy.mask_id, "editing_threshold": None, "temperature": 0.0, "threshold": threshold}
    for step in range(steps):
        if not (block == toy.mask_id).any():
            break
        logits = logits_of(toy, torch.cat([head, block], 1))[:, len(context) :].float()
        out = scheduler.step(logits, step, block, **settings)
        when[out.transfer_index] = step
        block = out.prev_sample
    return block, when


@pytest.mark.parametrize(("steps", "threshold"), [(4, 0.45), (4, 0.7), (2, 0.45), (1, 0.45), (4, 1.5)])
def test_without_temperature_it_is_high_or_topk(steps, threshold):
    """A threshold above 1 is never passed, so the quota alone decides, as with greedy."""
    for seed in range(4):
        toy = BlockCausal(block=BLOCK, length=8, seed=seed)
        context = (1, 0, 2, seed % 3)
        ids, when = refine(toy, context, steps, threshold)
        n = BLOCK // steps
        rule = f"high_or_topk:n={n}:tau={threshold}" if threshold <= 1 else f"greedy:k={n}"
        duel = Duel(toy, rule, BLOCK)
        [drawn] = duel.sample([context], BLOCK, do_sample=False)
        assert drawn.tokens == tuple(ids[0].tolist()) and drawn.reveal_steps == tuple(when[0].tolist())
        [scored] = duel.log_prob([Window(context, drawn.tokens)])
        assert scored.is_greedy and scored.reveal_steps == drawn.reveal_steps


@pytest.mark.slow  # importing the pipeline takes seconds
def test_the_preset_has_the_pipelines_defaults():
    """But for editing, which replaces revealed tokens and has no likelihood under an unmasking rule."""
    defaults = {
        name: entry.default for name, entry in inspect.signature(diffusers.LLaDA2Pipeline.__call__).parameters.items()
    }
    scheduler = diffusers.BlockRefinementScheduler().config
    options = Options.parse({"preset": "llada2-diffusers"})
    assert defaults["temperature"] == 0 and defaults["num_inference_steps"] == scheduler.block_length == options.block
    assert str(options.rule) == f"high_or_topk:n={defaults['minimal_topk']}:tau={defaults['threshold']}"
