"""Networks with a causal prefix and bidirectional blocks: Nemotron-Labs-Diffusion's procedure retyped, on a tiny one.

The laws: test_view_laws.py. What is found at load and refused: test_families.py, test_refusals.py.
"""

import dataclasses
import math
from functools import partial

import pytest
import tiny
import torch
from close import close_nats
from decoder_reference import CASES, YARN, without, write
from toys import CausalPrefix

from benchmarks.loops import algorithm2
from lm_eval_duel import denoisers
from lm_eval_duel.audit import plain_networks as plain
from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice

CASE = CASES["nemotron-labs-diffusion"]


def test_every_state_of_a_block_needs_the_sampler_that_has_them():
    toy = CausalPrefix(length=12)
    for make in (
        Elbo,
        partial(Lattice, block="auto", estimator="mixture"),
        partial(Lattice, block="auto", estimator="oracle"),
    ):
        with pytest.raises(DuelError, match="first_token=block"):
            make(toy)

    toy = CausalPrefix("block", length=12)
    window = Window((1,), (2, 0, 1, 1))
    [score] = Lattice(toy, "auto", estimator="mixture").log_prob([window])
    mixture = score.log_prob
    mean = score.others["elbo_exact"].log_prob
    best = score.others["oracle"].log_prob
    [greedy] = DuelEstimator(toy, "greedy", "auto").log_prob([window])
    assert mean <= mixture <= best + 1e-12
    assert greedy.log_prob <= best + 1e-12

    [drawn] = Elbo(toy, ElboArguments(512)).log_prob([window])
    assert abs(drawn.log_prob - mean) < 4 * drawn.stderr


# ---------------------------------------------------------------- a tiny checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("nemotron"), CASE)


def generate(w, window, seeded, threshold):
    """The authors' generate() with the tokens known: the log-probability of each token, and its step in its block.

    A causal pass over all that is finished predicts the block's first token. Then one bidirectional pass over prefix
    and block at a time: the most probable position, and others whose probability reaches the threshold. Without
    `seeded`, as in vLLM: a block starts all masked.
    """
    row = list(window.context)
    nats = []
    steps = []

    def logs(ids, seen):
        return plain.logits(CASE.net, w, ids, seen)[:, : len(tiny.WORDS)].log_softmax(-1)  # without [MASK], padding

    while len(nats) < len(window.target):
        begin = len(row)
        tokens = window.target[len(nats) : len(nats) + CASE.block]  # of this block
        shown = [CASE.mask] * CASE.block
        log_probs = {}
        revealed_at = {}
        if seeded:
            log_probs[0] = float(logs(row, plain.block_causal(begin, 1))[-1, tokens[0]])
            revealed_at[0] = 0
            shown[0] = tokens[0]
        step = len(log_probs)
        while len(log_probs) < len(tokens):
            now = logs([*row, *shown], plain.causal_prefix(begin + CASE.block, begin))[begin:]
            top = now.amax(-1).tolist()
            masked = [position for position in range(len(tokens)) if position not in log_probs]
            best = max(masked, key=lambda position: top[position])
            for position in masked:
                if position == best or top[position] >= math.log(threshold):
                    log_probs[position] = float(now[position, tokens[position]])
                    revealed_at[position] = step
                    shown[position] = tokens[position]
            step += 1
        nats += [log_probs[position] for position in range(len(tokens))]
        steps += [revealed_at[position] for position in range(len(tokens))]
        row += tokens
    return nats, tuple(steps)


TEXTS = [
    Window((2,), (7, 9, 30, 12, 8, 15, 21, 11, 6)),
    Window((2, 14, 20), (10, 9, 31, 12, 6)),
    Window((2, 6, 17, 17, 5, 9, 9), (33, 6)),
]


@pytest.mark.parametrize(
    ("first_token", "rule", "threshold"), [("causal", "threshold:mu=0.3", 0.3), ("block", "greedy", 1.1)]
)
def test_equals_the_authors_procedure(checkpoint, first_token, rule, threshold):
    path, w = checkpoint
    denoiser = denoisers.load(path, device="cpu", first_token=first_token)
    assert denoiser.describe()["first_token"] == first_token
    duel = DuelEstimator(denoiser, rule, "auto")
    for window, scored in zip(TEXTS, duel.log_prob(TEXTS), strict=True):
        nats, steps = generate(w, window, first_token == "causal", threshold)
        assert scored.near_ties == 0
        assert scored.reveal_steps == steps
        assert scored.token_logprobs == close_nats(nats)

    rows = random_rows(denoiser, 16, 3).tolist()
    windows = [Window(row[:2], row[2:]) for row in rows]
    loop = algorithm2(duel, windows)
    for row, scored in enumerate(duel.log_prob(windows)):
        assert tuple(loop.reveal_steps[row].tolist()) == scored.reveal_steps
        assert loop.token_logprobs[row].tolist() == close_nats(scored.token_logprobs)


def test_the_self_test_finds_a_network_that_is_bidirectional_throughout(checkpoint):
    denoiser = denoisers.load(checkpoint[0], device="cpu")
    own = denoiser.stream
    denoiser.stream = lambda ids, positions, seen, past: own(ids, positions, torch.ones_like(seen), past)
    with pytest.raises(DuelError, match="is not causal-prefix: a later block changes"):
        self_tests.run(denoiser, "x")


def test_rotary_positions_that_are_stretched(tmp_path):
    """As in the 8B: a factor above 1, with no scale of attention besides, since mscale equals mscale_all_dim."""
    yarn = {**YARN, "factor": 16.0, "original_max_position_embeddings": 32}
    net = dataclasses.replace(CASE.net, rope_scaling=yarn)
    older_spelling = dict(yarn)
    theta = older_spelling.pop("rope_theta")
    older_spelling["type"] = older_spelling.pop("rope_type")
    entries = {"rope_scaling": older_spelling, "rope_theta": theta, "max_position_embeddings": 512}
    config = {**without(CASE.config, "rope_parameters"), **entries}
    path, w = write(tmp_path, dataclasses.replace(CASE, config=config, net=net))

    denoiser = denoisers.load(path, device="cpu")
    assert denoiser.max_length == 28

    ids = random_rows(denoiser, 28)[:1]
    seen = plain.causal_prefix(28, 24)
    features, _ = denoiser.stream(ids, torch.arange(28)[None], seen[None], None)
    expected = plain.logits(net, w, ids[0].tolist(), seen)
    assert (denoiser.head(features[0]) - expected).abs().max() < 1e-4
