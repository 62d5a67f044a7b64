"""The rules of published samplers against their own pick functions, retyped in published.py, on random predictions."""

import functools
import itertools
import math
import sys

import published
import pytest
import textbook
import tiny
import torch
from published import KLASS, PC, STATE_ONLY
from random_lanes import decided, random_case
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError


def test_frequencies_are_counted(tmp_path):
    """By the main of examples/rules/pc.py, in the layout that its rule reads."""
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "one.txt").write_text("a b a")
    (tmp_path / "two.jsonl").write_text('{"text": "c a"}\n')
    texts = [str(tmp_path / "one.txt"), str(tmp_path / "two.jsonl")]
    out = tmp_path / "table.json"
    example = sys.modules[rules.find(PC).__module__]

    example.main(["--tokenizer", str(tmp_path), "--tasks", *texts, "--out", str(out)])

    a, b, c = tiny.tokenizer()("a b c", add_special_tokens=False)["input_ids"]
    assert example.read_table(str(out), None) == (5, {a: 3, b: 1, c: 1})


def positions(pick):
    """The positions of a pick (W,)."""
    return set(pick.nonzero()[:, 0].tolist())


def agrees(rule, reference, seed, lanes):
    """Assert that `rule` picks what `reference(p, masked)` picks in every lane."""
    logits, masked = random_case(seed, lanes)
    picks = decided(rule, logits, masked).pick
    for pick, p, lane in zip(picks, logits.softmax(2), masked, strict=True):
        assert positions(pick) == reference(p, lane), rule


FEW = 40  # lanes of a plain test
MANY = 1000  # lanes of a slow one
SEEDS = [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))]
SIZES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


@pytest.mark.parametrize("lanes", SIZES)
def test_picks_are_those_of_the_authors(lanes):
    for text in STATE_ONLY:
        rule = rules.parse(text)
        assert str(rule) == text
        assert rule.state_only
        agrees(text, functools.partial(published.pick, rule), lanes, lanes)


@pytest.mark.parametrize("lanes", SIZES)
def test_a_falling_threshold_is_that_of_mlx_vlm(lanes):
    for steps, step in ((1, 0), (4, 0), (4, 2), (4, 3)):
        logits, masked = random_case(lanes + step, lanes)
        picks = decided(f"falling_threshold:mu=0.813:low=0.313:steps={steps}", logits, masked, step).pick
        for pick, p, lane in zip(picks, logits.softmax(2), masked, strict=True):
            expected = published.falling_threshold(p, lane, 0.813, 0.313, steps, step)
            assert positions(pick) == expected


@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize(("steps", "step"), [(1, 0), (3, 0), (3, 1), (3, 2), (7, 3), (20, 5)])
def test_quotas_are_those_of_the_authors(steps, step, lanes, table):
    def quota(p, masked, m):
        return published.quota(p, masked, m, steps, step)

    def quota_without_ends(p, masked, m):
        return published.quota_without_ends(p, masked, m, steps, step, [2, 4])

    def pc(p, masked, m, decay):
        return published.pc(p, masked, m, steps, step, decay, 0.9, 20, {0: 9, 2: 3})

    cases = {
        f"quota:steps={steps}": quota,
        f"quota:steps={steps}:eos=conf:eos_id=2:eot_id=4": quota_without_ends,
        f"{PC}:decay=0.25:alpha=0.9:steps={steps}:table={table}": functools.partial(pc, decay=0.25),
        f"{PC}:decay=0.0:alpha=0.9:steps={steps}:table={table}": functools.partial(pc, decay=0.0),
    }

    for text, reference in cases.items():
        if step == 0:
            agrees(text, lambda p, masked, at=reference: at(p, masked, int(masked.sum())), lanes, lanes // 2)
        for m in (7, 12):  # positions at the first step; a lane with fewer masked than are due loses them all
            logits, masked = random_case(lanes + m, lanes // 2)
            memory = (torch.full(masked.shape, m),) if step else ()
            picks = decided(text, logits, masked, step, memory).pick
            for pick, p, lane in zip(picks, logits.softmax(2), masked, strict=True):
                due = reference(p, lane, m if step else int(lane.sum()))
                assert positions(pick) == due & positions(lane)


def orders(toy, row, loop):
    """The reveal steps and the log-probability of a published loop, which yields the positions of each step."""
    steps = [None] * len(row)
    log_prob = 0.0

    def p_of(masked):
        ids = torch.where(masked, toy.mask_id, row)
        p_of.now = toy.features(ids[None], None)[0].masked_fill(toy.excluded, -math.inf).softmax(1)
        return p_of.now

    for step, chosen in enumerate(loop(p_of)):
        for position in chosen:
            steps[position] = step
            log_prob += math.log(p_of.now[position, row[position]])
    return tuple(steps), log_prob


def dream_orders(p_of, length, alg, steps):
    """Dream's loop over one block: the positions of each step that reveals any."""
    masked = torch.ones(length, dtype=torch.bool)
    for count in published.dream_counts(length, steps):
        if count:
            yield (chosen := published.dream(p_of(masked), masked, alg, count))
            masked[list(chosen)] = False


@pytest.mark.parametrize(
    ("alg", "length", "steps"),
    [("entropy", 8, 8), ("topk_margin", 12, 5), ("maskgit_plus", 16, 8), ("entropy", 16, 24), ("topk_margin", 5, 1)],
)
def test_dream_follows_its_schedule_and_its_score(alg, length, steps):
    toy = Toy(length=16, tokens=3)
    row = torch.arange(length) * 7 % 3
    expected, log_prob = orders(toy, row, lambda p_of: dream_orders(p_of, length, alg, steps))

    [scored] = Duel(toy, f"dream:alg={alg}:steps={steps}", None).log_prob([Window((), row.tolist())])

    assert scored.reveal_steps == expected
    assert scored.log_prob == pytest.approx(log_prob, abs=1e-9)


def fast_dllm_orders(p_of, length, block, steps):
    """Fast-dLLM's generation_utils_block.py: a block's first position alone, then the schedule from i = 1 on."""
    masked = torch.ones(length, dtype=torch.bool)
    level = torch.linspace(1, 1e-3, steps + 1)
    for start in range(0, length, block):
        p_of(masked)
        yield {start}
        masked[start] = False
        inside = torch.zeros_like(masked)
        inside[start : start + block] = True
        for i in range(1, steps):
            left = int((masked & inside).sum())
            count = int(left * (1 - level[i + 1] / level[i])) if i < steps - 1 else left
            if count:
                yield (chosen := published.dream(p_of(masked), masked & inside, "entropy", count))
                masked[list(chosen)] = False


@pytest.mark.parametrize(("block", "steps"), [(8, 8), (8, 5), (5, 3), (12, 24), (1, 2)])
def test_dream_after_the_first_position_is_fast_dllms_block_sampler(block, steps):
    """Their steps count on through the blocks; ours begin again in each."""
    toy = Toy(length=16, tokens=3)
    row = torch.arange(16 - 16 % block) * 5 % 3
    all_steps, log_prob = orders(toy, row, lambda p_of: fast_dllm_orders(p_of, len(row), block, steps))
    expected = []
    for start in range(0, len(row), block):
        of_block = all_steps[start : start + block]
        ranked = sorted(set(of_block))
        expected += [ranked.index(step) for step in of_block]

    rule = f"dream:alg=entropy:steps={steps}:seed_first=true"
    [scored] = Duel(toy, rule, block).log_prob([Window((), row.tolist())])

    assert scored.log_prob == pytest.approx(log_prob, abs=1e-9)
    assert scored.reveal_steps == tuple(expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("steps", "tau"), [(2, 0.0), (4, 0.613), (4, 1.0), (8, 0.613), (1, 0.513)])
def test_dream_with_a_threshold_is_that_of_the_authors(steps, tau, seed):
    toy = Toy(length=8, seed=seed)
    row = torch.arange(8) * (seed + 2) % 3
    window = Window((), row.tolist())
    expected, log_prob = orders(toy, row, lambda p_of: published.dream_threshold_orders(p_of, 8, steps, tau))

    [scored] = Duel(toy, f"dream:alg=confidence_threshold:steps={steps}:tau={tau}", None).log_prob([window])

    assert scored.reveal_steps == expected
    assert scored.log_prob == pytest.approx(log_prob, abs=1e-9)
    with pytest.raises(DuelError, match="its steps divide"):
        Duel(toy, f"dream:alg=confidence_threshold:steps=3:tau={tau}", None).log_prob([window])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("block", "mu", "nu", "history"), [(4, 0.41, 0.3, 1), (4, 0.41, 0.5, 2), (3, 0.45, 1.5, 3)])
def test_klass_across_blocks_is_that_of_the_authors(block, mu, nu, history, seed):
    toy = Toy(length=12, seed=seed)
    row = torch.arange(12) * (seed + 2) % 3
    expected, log_prob = orders(toy, row, lambda p_of: published.klass_orders(p_of, 12, block, mu, nu, history))

    duel = Duel(toy, KLASS.format(mu=mu, nu=nu, history=history), block)
    [scored] = duel.log_prob([Window((), row.tolist())])

    assert scored.reveal_steps == expected
    assert scored.log_prob == pytest.approx(log_prob, abs=1e-9)


def test_a_history_across_blocks_is_refused_where_there_is_none():
    text = KLASS.format(mu=0.4, nu=0.3, history=1)
    with pytest.raises(DuelError, match=r"needs a bidirectional network without a cache; this one is block_causal"):
        Duel(BlockCausal(), text)


def fast_dllm_v2(toy, context, target, block, sub_block, tau):
    """Fast_dLLM_v2's batch_sample without its block cache, for known tokens: reveal steps and log-probabilities."""
    row = [*context, *[toy.mask_id] * len(target)]
    steps = {}
    log_probs = {}
    for start in range(len(context) // block * block, len(row), block):
        end = min(start + block, len(row))
        step = 0

        def reveal(positions, log_p, step):
            for position in positions:
                row[position] = target[position - len(context)]
                steps[position] = step
                log_probs[position] = float(log_p[position, row[position]])

        def log_p():
            logits = toy.features(torch.tensor([row]), None)[0].masked_fill(toy.excluded, -math.inf)
            return logits.log_softmax(1)  # (L, V)

        if start >= len(context):  # a clean block is complete, and its last row predicts the next token
            reveal([start], log_p(), step)
            step += 1
        for left in range(start, end, sub_block):
            inside = range(left, min(left + sub_block, end))
            while masked := [position for position in inside if row[position] == toy.mask_id]:
                now = log_p()
                top = now.exp().amax(1)
                most = max(masked, key=lambda position: top[position])
                reveal([position for position in masked if top[position] > tau or position == most], now, step)
                step += 1
    in_order = sorted(steps)
    return tuple(steps[position] for position in in_order), [log_probs[position] for position in in_order]


def test_the_loop_of_fast_dllm_v2():
    """No first token of its own for a block in which the context ends."""
    toy = Toy(length=14)
    rule = "threshold:mu=0.6:strict=true:sub_block=2:seed_first=true"
    for known, seed in itertools.product(range(6), range(2)):
        row = torch.randint(3, (14,), generator=torch.Generator().manual_seed(seed)).tolist()
        window = Window(row[:known], row[known:])
        steps, log_probs = fast_dllm_v2(toy, row[:known], row[known:], 4, 2, 0.6)

        [scored] = Duel(toy, rule, 4, "row").log_prob([window])

        assert scored.reveal_steps == steps
        assert scored.token_logprobs == pytest.approx(log_probs, abs=1e-9)


@pytest.mark.parametrize("history", [1, 2])
def test_klass_over_a_whole_target(history):
    rule = f"klass:mu=0.4:nu=0.05:history={history}"
    window = Window((1,), (0, 2, 1, 1, 2, 0, 0, 1))
    different_orders = set()
    for seed in range(12):
        toy = Toy(length=10, seed=seed, scale=1.0)

        def network(ids, toy=toy):
            return toy.features(ids[None], None)[0]

        _, steps, *_ = textbook.score(network, toy.mask_id, toy.excluded, rules.parse(rule), None, window)

        [scored] = Duel(toy, rule, None).log_prob([window])
        assert scored.reveal_steps == steps
        different_orders.add(steps)
    assert len(different_orders) > 6  # not from one end to the other
