"""diffusers' BlockRefinementScheduler, the sampler of its LLaDA2Pipeline, run on a toy network beside our rules."""

import inspect

import pytest
import torch
from drawn_reference import logits_of
from laws import slow_but
from noised_toys import NoisyToy
from toys import BlockCausal

from lm_eval_duel import Duel
from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.windows import Window
from lm_eval_duel.options import Options

BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def diffusers():
    """The library; imported for these tests alone, not by whoever collects them."""
    return pytest.importorskip("diffusers", minversion="0.42", reason="diffusers is not installed")


def scheduler_of(width, steps):
    from diffusers import BlockRefinementScheduler

    scheduler = BlockRefinementScheduler(block_length=width, num_inference_steps=steps)
    scheduler.set_timesteps(steps, block_length=width)
    return scheduler


def refine(toy, context, steps, threshold):
    """Blocks of masked tokens filled by the scheduler as LLaDA2Pipeline calls it: ids (1, 4), reveal steps (1, 4)."""
    scheduler = scheduler_of(BLOCK, steps)
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
    for seed in range(2):
        toy = BlockCausal(block=BLOCK, length=8, seed=seed)
        context = (1, 0, 2, seed % 3)
        ids, when = refine(toy, context, steps, threshold)
        n = BLOCK // steps
        rule = f"high_or_topk:n={n}:tau={threshold}" if threshold <= 1 else f"greedy:k={n}"
        duel = Duel(toy, rule, BLOCK)

        [drawn] = duel.sample([context], BLOCK, do_sample=False)
        [scored] = duel.log_prob([Window(context, drawn.tokens)])

        assert drawn.tokens == tuple(ids[0].tolist())
        assert drawn.reveal_steps == tuple(when[0].tolist())
        assert scored.is_greedy
        assert scored.reveal_steps == drawn.reveal_steps


@pytest.mark.slow  # importing the pipeline takes seconds
def test_the_preset_has_the_pipelines_defaults(diffusers):
    """But for editing, which replaces revealed tokens and has no likelihood under an unmasking rule."""
    arguments = inspect.signature(diffusers.LLaDA2Pipeline.__call__).parameters
    defaults = {name: argument.default for name, argument in arguments.items()}
    scheduler = diffusers.BlockRefinementScheduler().config

    options = Options.parse({"preset": "llada2-diffusers"})

    assert options.block == scheduler.block_length
    assert options.block == defaults["num_inference_steps"]
    assert str(options.rule) == f"high_or_topk:n={defaults['minimal_topk']}:tau={defaults['threshold']}"
    assert defaults["temperature"] == 0


def renoise(toy, context, width, steps, threshold, noise):
    """A canvas of random tokens refined by the scheduler as DiffusionGemmaPipeline calls it: reveal steps (1, W), ids.

    `noise(step)` (W,): the tokens that positions show at a step while they are not committed. The scheduler draws its
    own, which are replaced.
    """
    scheduler = scheduler_of(width, steps)
    committed = torch.full((1, width), -1)
    when = torch.full((1, width), -1)
    settings = {"mask_token_id": None, "editing_threshold": None, "temperature": 0.0, "threshold": threshold}
    canvas = noise(0)[None]
    for step in range(steps):
        logits = toy.logits_of(context, canvas[0])[None].float()
        out = scheduler.step(logits, step, canvas, **settings)
        new = out.transfer_index & (when < 0)
        when[new] = step
        committed = torch.where(new, out.sampled_tokens, committed)
        canvas = torch.where(when >= 0, committed, noise(step + 1)[None])
    return when, committed


class Canvas(NoisyToy):
    """A toy whose whole row is one canvas."""

    def logits_of(self, context, canvas):
        ids = torch.cat([torch.tensor(context, dtype=torch.long), canvas])
        logits = self.features(ids[None], None)[0]
        return logits.masked_fill(self.excluded, -torch.inf)[len(context) :]


SCHEDULES = [(4, 0.45), (3, 0.7), (6, 0.6), (2, 0.95), (8, 0.99)]


@pytest.mark.parametrize(("steps", "threshold"), slow_but(SCHEDULES, SCHEDULES[::2]))
def test_with_noise_handed_over_it_commits_the_same_at_the_same_steps(steps, threshold):
    """At temperature 0. Its quota counts up, so that a step may commit nothing."""
    for seed in range(4):
        toy = Canvas(tokens=5, length=8, timed=False, scale=1.5)
        width = 6
        context = (1, 4)
        place = [torch.tensor([[value]]) for value in (seed, 0)]

        def noise(step, place=place, toy=toy, width=width):
            at = noises.NoiseKeys(*place, torch.tensor([[step]]), torch.arange(width)[None])
            return noises.masked_tokens(toy.noise_training.noise, torch.arange(5), None, torch.ones(1), at)[0]

        when, tokens = renoise(toy, context, width, steps, threshold, noise)
        duel = Duel(toy, f"cumulative_quota:steps={steps}:tau={threshold}", width, noise_seed=seed)
        [drawn] = duel.sample([context], width, do_sample=False)
        assert drawn.reveal_steps == tuple(when[0].tolist())
        assert drawn.tokens == tuple(tokens[0].tolist())
