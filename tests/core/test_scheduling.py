"""What is evaluated, and how often: every number here is a count, and no result depends on it."""

import math

import custom_rules
import pytest
import torch
from dit_reference import opened
from laws import numbers
from toys import BlockCausal, Small, Toy

from lm_eval_duel.core import predictions
from lm_eval_duel.core.batch_size import largest
from lm_eval_duel.core.denoiser import BlockCausalView, distinct
from lm_eval_duel.core.logits import top_of, two_largest
from lm_eval_duel.core.reveal import Reveal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.duel import DuelEstimator


def random_windows(count, shortest, longest, tokens=3, context=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    rows = [tuple(torch.randint(tokens, (n,), generator=generator).tolist()) for n in lengths]
    return [Window(row[:context], row[context:]) for row in rows]


# ---------------------------------------------------------------- orders that do not depend on the network


class Alternates(custom_rules.Turns):
    """A fixed order with memory."""

    fixed = True


def test_a_fixed_order_may_remember():
    window = Window((), (0, 1, 2, 0, 1, 2))
    duel = DuelEstimator(Toy(), Alternates(), 6)
    [flat] = duel.log_prob([window])
    [stepwise] = DuelEstimator(Toy(), custom_rules.Turns(), 6).log_prob([window])
    assert duel.counts.forwards == 1
    assert flat.reveal_steps == stepwise.reveal_steps == (0, 2, 4, 5, 3, 1)
    assert flat.token_logprobs == pytest.approx(stepwise.token_logprobs, abs=1e-12)


# ---------------------------------------------------------------- equal rows once


@pytest.mark.parametrize("rule", ["greedy", "klass:mu=0.4:nu=0.3"])
@pytest.mark.parametrize("kind", [Toy, BlockCausal])
def test_options_share_rows_until_they_differ(kind, rule):
    options = [Window((0, 1, 2, 1), (token, 2, 0, 0, 1)) for token in range(3)] * 2
    duel = DuelEstimator(kind(length=12), rule, 2)
    alone = DuelEstimator(kind(length=12), rule, 2)

    together = duel.log_prob(options)

    for option, score in zip(options, together, strict=True):
        assert numbers([score]) == pytest.approx(numbers(alone.log_prob([option])), abs=1e-9, nan_ok=True)
    assert duel.counts.rows < alone.counts.rows


def test_a_hash_that_collides_merges_nothing(monkeypatch):
    from lm_eval_duel.core import denoiser

    monkeypatch.setattr(denoiser, "hashed", lambda columns, seed: torch.zeros_like(columns))
    first, kind = distinct(torch.tensor([[1, 2], [2, 1], [1, 2]]))
    assert first.tolist() == kind.tolist() == [0, 1, 2]


# ---------------------------------------------------------------- passes


def test_all_blocks_of_a_window_go_in_one_pass():
    for k, passes in ((1, 5), (3, 3), (4, 2)):
        duel = DuelEstimator(BlockCausal(4, length=32), f"greedy:k={k}", "auto")
        duel.log_prob(random_windows(3, 32, 32))
        assert duel.counts.forwards == passes  # ceil(4 / k) and one over the clean blocks


@pytest.mark.parametrize("kind", ["bidirectional", "block-causal"])
def test_the_head_runs_at_masked_positions_and_once(kind, monkeypatch):
    toy = Toy(length=32) if kind == "bidirectional" else BlockCausal(8, length=32)
    head = toy.head
    chunks = []  # positions of each

    def counted(features):
        chunks.append(len(features))
        return head(features)

    monkeypatch.setattr(toy, "head", counted)
    monkeypatch.setattr(predictions, "CPU_VALUES", 20)
    monkeypatch.setattr(predictions, "CPU_ROWS", 5)  # positions a chunk
    windows = random_windows(1, 32, 32)

    DuelEstimator(toy, "greedy:k=3", 8).log_prob(windows)
    assert sum(chunks) == 4 * (8 + 5 + 2)
    assert max(chunks) == 5

    chunks.clear()
    DuelEstimator(toy, "left_to_right:k=3", 8).log_prob(windows)
    assert sum(chunks) == 32  # at the picks alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_normalised_in_float32(dtype, monkeypatch):
    toy = Toy(length=2, unused=2)
    head = toy.head
    monkeypatch.setattr(toy, "head", lambda features: head(features).to(dtype))
    logits = toy.head(toy.features(torch.tensor([[1, toy.mask_id]]), None))[0, 1, : toy.tokens]
    expected = logits.float().log_softmax(0)[2]

    [score] = DuelEstimator(toy, "greedy", 1).log_prob([Window((1,), (2,))])

    assert score.log_prob == pytest.approx(float(expected), abs=1e-6)


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("toy", [Toy(length=64), BlockCausal(8, length=64)], ids=["bidirectional", "block-causal"])
def test_batches_stay_full_while_lanes_wait(toy, monkeypatch):
    duel = DuelEstimator(toy, "threshold:mu=0.97", 8, batch_size=4)
    fill = Reveal._fill
    live = []  # network tokens of the lanes of every batch while others wait

    def spy(self):
        active = fill(self)
        if self.waiting:
            live.append(int(self.view.cost(active).sum()))
        return active

    monkeypatch.setattr(Reveal, "_fill", spy)
    duel.log_prob(random_windows(32, 16, 64))
    assert len(live) > 20
    assert sum(live) / len(live) >= 0.9 * duel.budget.tokens


@pytest.mark.parametrize(
    ("rule", "windows"),
    [
        ("greedy", [Window((), (1,) * 64), *[Window((n % 3, *(0,) * 55), (1, 2, n % 3)) for n in range(60)]]),
        ("threshold:mu=0.97", random_windows(40, 8, 64)),
    ],
)
def test_what_is_evaluated_is_live(rule, windows, monkeypatch):
    toy = BlockCausal(4, length=64)
    stream = toy.stream
    evaluate = BlockCausalView._evaluate
    evaluated = []  # positions of each network call
    live = []  # positions of the lanes of each step
    in_steps = []  # positions that the network evaluated for it

    def count(ids, *rest, **more):
        evaluated.append(ids.numel())
        return stream(ids, *rest, **more)

    def spy(self, lanes, *rest):
        before = len(evaluated)
        positions = evaluate(self, lanes, *rest)
        live.append(4 * len(lanes))
        in_steps.append(sum(evaluated[before:]))
        return positions

    monkeypatch.setattr(toy, "stream", count)
    monkeypatch.setattr(BlockCausalView, "_evaluate", spy)
    duel = DuelEstimator(toy, rule, "auto", batch_size=8)
    duel.log_prob(windows)
    assert sum(live) >= 0.83 * sum(in_steps)
    assert max(evaluated) <= 1.2 * duel.budget.tokens


# ---------------------------------------------------------------- memory


def test_the_largest_budget_that_fits_is_found_by_trial():
    for rows, tokens in ((1, 16), (3, 16), (4, 32), (12, 64), (100, 128)):
        assert largest(Small(most=rows, tokens=50), 4, "target", 16, 128) == tokens


def test_a_trial_runs_on_every_kind_of_network(tmp_path):
    for toy in (Toy(), BlockCausal(4), opened(tmp_path, "ar")[0]):
        block = 1 if toy.attention == "causal" else 4
        assert largest(toy, block, "row", 16, 512) == 512


# ---------------------------------------------------------------- the last layer and the head


@pytest.mark.parametrize("vocabulary", [3, 63, 64, 65, 200])
def test_the_top_tokens(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-3, 4, (50, vocabulary), generator=generator).double()  # many ties
    token, first, second = two_largest(logits)
    assert torch.equal(token[:, 0], logits.argmax(1))
    assert torch.equal(torch.stack([first, second], 1), logits.topk(2).values)
    logits = torch.randn(50, vocabulary, generator=generator, dtype=torch.float64) * 9
    kept = logits.clone()
    top = top_of(logits)
    assert torch.equal(logits, kept)
    others = logits.scatter(1, top.token[:, None], -math.inf)
    assert torch.allclose(top.confidence, logits.amax(1) - others.logsumexp(1), atol=1e-12)
    assert torch.allclose(top.confidence.sigmoid(), logits.softmax(1).amax(1), atol=1e-12)
    assert torch.allclose(top.log_margin, logits.topk(2).values.diff().neg()[:, 0], atol=1e-12)
