"""The rules of published samplers against their own pick functions, retyped in published.py, on random predictions."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
import sys

import published
import pytest
import tiny
import torch
from laws import RULES, check_scored_as_drawn, total
from pages import ROOT
from toys import BlockCausal, Rotary, Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, RuleStalled
from lm_eval_duel.estimators.checks import check_rule
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.options import Options
from lm_eval_duel.rules import refused

WIDTH, TOKENS = 7, 5
WORD = re.compile(r"\w+").findall
PC = f"{ROOT}/examples/rules/pc.py:PC"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The counts of tokens 0 and 2 among 20, for examples/rules/pc.py."""
    path = tmp_path_factory.mktemp("pc") / "table.json"
    path.write_text(json.dumps({"num_token": 20, "p_baseline_dict": {"0": 9, "2": 3}}))
    return str(path)


def test_frequencies_are_counted(tmp_path):
    """By the main of examples/rules/pc.py, in the layout that its rule reads."""
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "one.txt").write_text("a b a")
    (tmp_path / "two.jsonl").write_text('{"text": "c a"}\n')
    out, example = tmp_path / "table.json", sys.modules[rules.find(PC).__module__]
    texts = [str(tmp_path / name) for name in ("one.txt", "two.jsonl")]
    example.main(["--tokenizer", str(tmp_path), "--tasks", *texts, "--out", str(out)])
    a, b, c = tiny.tokenizer()("a b c", add_special_tokens=False)["input_ids"]
    assert example.read_table(str(out), None) == (5, {a: 3, b: 1, c: 1})


def random_case(seed, lanes):
    """Logits (R, W, V) at several scales, with equal positions in many lanes, and which positions are masked (R, W)."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(lanes, 1, 1, generator=generator, dtype=torch.float64) * 6
    logits = torch.randn(lanes, WIDTH, TOKENS, generator=generator, dtype=torch.float64) * scale
    source = torch.randint(WIDTH, (lanes, WIDTH), generator=generator)  # a third of the positions copies another
    copies = torch.rand(lanes, WIDTH, generator=generator) < 1 / 3
    source = torch.where(copies, source, torch.arange(WIDTH))
    logits = logits.gather(1, source[:, :, None].expand_as(logits))
    masked = torch.rand(lanes, WIDTH, generator=generator) < 0.7
    masked[:, 0] |= ~masked.any(1)
    return logits, masked


def decided(rule, logits, masked, step=0, memory=()):
    """The decision of a rule on lanes whose masked positions have these logits, at this step."""
    count = len(logits)
    predictions = Predictions(
        masked,
        torch.zeros(count, dtype=torch.bool),
        logits[masked],
        torch.arange(int(masked.sum())),
        lambda features: features.clone(),
        torch.zeros(TOKENS, dtype=torch.bool),
    )
    zero = torch.zeros(count, dtype=torch.int64)
    tokens = torch.where(masked, -1, 0)
    lanes = Lanes(zero, zero, zero, zero + WIDTH, tokens, masked, zero + step, memory)
    return (rules.parse(rule) if isinstance(rule, str) else rule)(predictions, lanes)


def agrees(rule, reference, seed, lanes, step=0, memory=()):
    """Whether `rule` picks what `reference(p, masked)` picks in every lane."""
    logits, masked = random_case(seed, lanes)
    picks = decided(rule, logits, masked, step, memory(masked) if memory else ()).pick
    for pick, p, lane in zip(picks, logits.softmax(2), masked, strict=True):
        assert set(pick.nonzero()[:, 0].tolist()) == reference(p, lane), rule


FEW, MANY = 40, 1000  # lanes of a plain and of a slow test
SEEDS = [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))]
SIZES = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
STATE_ONLY = {  # a rule's text, and its reference
    "threshold:mu=0.613": (published.threshold, {"mu": 0.613}),
    "threshold:mu=0.613:strict=True": (published.strict_threshold, {"mu": 0.613}),
    "threshold:mu=1.0:strict=True": (published.strict_threshold, {"mu": 1.0}),
    "entropy_threshold:tau=0.437": (published.entropy_threshold, {"tau": 0.437}),
    "entropy_threshold:tau=0.0": (published.entropy_threshold, {"tau": 0.0}),
    "factor:f=3.713:variant=a": (published.factor, {"f": 3.713, "variant": "a"}),
    "factor:f=0.713:variant=b": (published.factor, {"f": 0.713, "variant": "b"}),
    "factor:f=1.713:variant=b": (published.factor, {"f": 1.713, "variant": "b"}),
    "factor:f=1.713:variant=c": (published.factor, {"f": 1.713, "variant": "c"}),
    "hierarchy:low=0.413:tau=0.813": (published.hierarchy, {"low": 0.413, "tau": 0.813}),
    "hierarchy:low=0.613:tau=None": (published.hierarchy, {"low": 0.613, "tau": None}),
    "dinfer_threshold:mu=0.713": (published.dinfer_threshold, {"mu": 0.713}),
    "dinfer_threshold:mu=1.0": (published.dinfer_threshold, {"mu": 1.0}),
    "high_or_topk:n=1:tau=0.713": (published.high_or_topk, {"n": 1, "tau": 0.713}),
    "high_or_topk:n=3:tau=0.613": (published.high_or_topk, {"n": 3, "tau": 0.613}),
    "entropy_bound:gamma=0.713:inclusive=True": (published.inclusive_entropy_bound, {"gamma": 0.713}),
}


@pytest.mark.parametrize("lanes", SIZES)
def test_picks_are_those_of_the_authors(lanes):
    for text, (reference, parameters) in STATE_ONLY.items():
        assert str(rules.parse(text)) == text and rules.parse(text).state_only
        agrees(text, functools.partial(reference, **parameters), lanes, lanes)


def began_with(count):
    """The memory of a schedule whose block began with `count` positions."""
    return lambda masked: (torch.full(masked.shape, count),)


@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize(("steps", "step"), [(1, 0), (3, 0), (3, 1), (3, 2), (7, 3), (20, 5)])
def test_quotas_are_those_of_the_authors(steps, step, lanes, table):
    ends = [2, 4]
    cases = {
        f"quota:steps={steps}": lambda p, masked, m: published.quota(p, masked, m, steps, step),
        f"quota:steps={steps}:eos=conf:eos_id=2:eot_id=4": lambda p, masked, m: published.quota_without_ends(
            p, masked, m, steps, step, ends
        ),
        f"{PC}:decay=0.25:alpha=0.9:steps={steps}:table={table}": lambda p, masked, m: published.pc(
            p, masked, m, steps, step, 0.25, 0.9, 20, {0: 9, 2: 3}
        ),
        f"{PC}:decay=0.0:alpha=0.9:steps={steps}:table={table}": lambda p, masked, m: published.pc(
            p, masked, m, steps, step, 0.0, 0.9, 20, {0: 9, 2: 3}
        ),
    }
    for text, reference in cases.items():
        if step == 0:
            agrees(text, lambda p, masked, at=reference: at(p, masked, int(masked.sum())), lanes, lanes // 2)
        for m in (7, 12):  # positions at the first step; a lane with fewer masked than are due loses them all
            logits, masked = random_case(lanes + m, lanes // 2)
            picks = decided(text, logits, masked, step, began_with(m)(masked) if step else ()).pick
            for pick, p, lane in zip(picks, logits.softmax(2), masked, strict=True):
                due = reference(p, lane, m if step else int(lane.sum()))
                assert set(pick.nonzero()[:, 0].tolist()) == {position for position in due if lane[position]}


def orders(toy, row, loop):
    """The reveal steps and the log-probability of a published loop, which yields the positions of each step."""
    steps, log_prob = [None] * len(row), 0.0

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
    toy, row = Toy(length=16, tokens=3), torch.arange(length) * 7 % 3
    wanted, log_prob = orders(toy, row, lambda p_of: dream_orders(p_of, length, alg, steps))
    [scored] = Duel(toy, f"dream:alg={alg}:steps={steps}", None).log_prob([Window((), row.tolist())])
    assert scored.reveal_steps == wanted and scored.log_prob == pytest.approx(log_prob, abs=1e-9)


def fast_dllm_orders(p_of, length, block, steps):
    """Fast-dLLM's generation_utils_block.py: a block's first position alone, then the schedule from i = 1 on."""
    masked, level = torch.ones(length, dtype=torch.bool), torch.linspace(1, 1e-3, steps + 1)
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
    toy, row = Toy(length=16, tokens=3), torch.arange(16 - 16 % block) * 5 % 3
    wanted, log_prob = orders(toy, row, lambda p_of: fast_dllm_orders(p_of, len(row), block, steps))
    rule = f"dream:alg=entropy:steps={steps}:seed_first=true"
    [scored] = Duel(toy, rule, block).log_prob([Window((), row.tolist())])
    assert scored.log_prob == pytest.approx(log_prob, abs=1e-9)
    ranked = [sorted({*wanted[start : start + block]}) for start in range(0, len(row), block)]  # steps of each block
    assert scored.reveal_steps == tuple(ranked[p // block].index(step) for p, step in enumerate(wanted))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("steps", "tau"), [(2, 0.0), (4, 0.613), (4, 1.0), (8, 0.613), (1, 0.513)])
def test_dream_with_a_threshold_is_that_of_the_authors(steps, tau, seed):
    toy = Toy(length=8, seed=seed)
    row = torch.arange(8) * (seed + 2) % 3
    wanted, log_prob = orders(toy, row, lambda p_of: published.dream_threshold_orders(p_of, 8, steps, tau))
    rule = f"dream:alg=confidence_threshold:steps={steps}:tau={tau}"
    scored = Duel(toy, rule, None).log_prob([Window((), row.tolist())])[0]
    assert scored.reveal_steps == wanted and scored.log_prob == pytest.approx(log_prob, abs=1e-9)
    with pytest.raises(DuelError, match="its steps divide"):
        Duel(toy, rule.replace(f"steps={steps}", "steps=3"), None).log_prob([Window((), row.tolist())])


KLASS = "klass:mu={mu}:nu={nu}:history={history}:kl=authors:across=true"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("block", "mu", "nu", "history"), [(4, 0.41, 0.3, 1), (4, 0.41, 0.5, 2), (3, 0.45, 1.5, 3)])
def test_klass_across_blocks_is_that_of_the_authors(block, mu, nu, history, seed):
    toy = Toy(length=12, seed=seed)
    row = torch.arange(12) * (seed + 2) % 3
    wanted, log_prob = orders(toy, row, lambda p_of: published.klass_orders(p_of, 12, block, mu, nu, history))
    duel = Duel(toy, KLASS.format(mu=mu, nu=nu, history=history), block)
    scored = duel.log_prob([Window((), row.tolist())])[0]
    assert scored.reveal_steps == wanted and scored.log_prob == pytest.approx(log_prob, abs=1e-9)


def test_a_history_across_blocks_is_refused_where_there_is_none():
    text = KLASS.format(mu=0.4, nu=0.3, history=1)
    with pytest.raises(DuelError, match=r"needs a bidirectional network without a cache; this one is block_causal"):
        Duel(BlockCausal(), text)
    for name in ("sub_block=2", "seed_first=true"):
        with pytest.raises(DuelError, match="keeps its history over blocks"):
            rules.parse(f"{text}:{name}")
    with pytest.raises(DuelError, match="add kl=authors"):
        rules.parse("klass:mu=0.4:nu=0.3:across=true")
    with pytest.raises(DuelError, match="has a memory"):
        Options.parse({"estimator": "mixture", "lattice_rules": text})


# ---------------------------------------------------------------- laws


def new_rules(table):
    return [
        "threshold:mu=0.45:strict=true",
        "entropy_threshold:tau=0.8",
        "factor:f=1.5",
        "factor:f=1.5:variant=c",
        "hierarchy:low=0.4:tau=0.6",
        "dinfer_threshold:mu=0.5",
        "high_or_topk:n=2:tau=0.5",
        "entropy_bound:gamma=1.5:inclusive=true",
        "quota:steps=2",
        "quota:steps=3:eos=conf:eos_id=1",
        f"{PC}:decay=0.25:alpha=0.9:steps=2:table={table}",
        "dream:alg=topk_margin:steps=2",
        "dream:alg=confidence_threshold:steps=1:tau=0.5",
        KLASS.format(mu=0.4, nu=0.4, history=1),
        "threshold:mu=0.45:sub_block=2",
        "quota:steps=2:sub_block=2:seed_first=true",
        "klass:mu=0.4:nu=0.3:sub_block=2",
        "dream:alg=entropy:steps=3:seed_first=true",
    ]


@pytest.mark.parametrize("number", range(18))
def test_probabilities_sum_to_one_and_samples_score_as_they_were_drawn(number, table):
    """Laws 1 and 2, and law 8: a lane alone is the lane in a batch. Blocks of 2, 3 and all take turns."""
    text, block = new_rules(table)[number], (2, 3, None)[number % 3]
    duel = Duel(Toy(), text, block)
    assert rules.parse(str(duel.rule)) == duel.rule
    assert abs(total(duel, 4) - 1) < 1e-9
    check_scored_as_drawn(duel, seed=number)
    assert abs(total(Duel(Toy(), text, 2, "row"), 3, context=(1,), suffix=(2,)) - 1) < 1e-9


def test_a_block_of_masks_alone():
    """Where all positions are equal, dInfer's rules reveal all of them, and the others the lowest."""
    toy = Rotary(length=6, tokens=3)
    toy.noise = 0.0
    window = Window((), (0, 1, 2))
    p = toy.features(torch.full((1, 3), toy.mask_id), None)[0, 0, :3].double().softmax(0)
    low = float(p.max()) / 2
    for text in ("dinfer_threshold:mu=1.0", f"hierarchy:low={low}"):
        scored = Duel(toy, text, 3).log_prob([window])[0]
        assert scored.reveal_steps == (0, 0, 0) and scored.all_mask_starts == 1
        assert scored.log_prob == pytest.approx(float(p.log().sum()), abs=1e-6)
    assert Duel(toy, "threshold:mu=1.0", 3).log_prob([window])[0].reveal_steps[0] == 0


# ---------------------------------------------------------------- inside a block


def every_rule(table):
    """A text of every rule with several schedules, without what goes around rules and without files of weights."""
    texts = [
        *RULES,
        *(text for text in new_rules(table) if not {"across", "sub_block", "seed_first"} & set(WORD(text))),
    ]
    texts += ["klass:mu=0.4:nu=0.4:history=2", "quota:steps=3", "dream:alg=entropy:steps=3"]
    texts += ["custom_rules:Turns"]
    named = {rules.split(text)[0] for text in texts}
    assert named >= {*rules.RULES} - {"learned", "learned_threshold"}
    return texts


def test_sub_blocks_are_blocks_that_see_the_masks_after_them(table, subtests):
    """In a bidirectional network, sub-blocks are smaller blocks: a rule's steps and memory start again in each."""
    toy, windows = Toy(length=9), [Window((1,), (2, 0, 1, 1, 2, 0, 0, 1)), Window((), (0, 0, 1, 2, 1))]
    for rule in every_rule(table):
        with subtests.test(rule):
            small, inside = Duel(toy, rule, 3).log_prob(windows), Duel(toy, f"{rule}:sub_block=3", 6).log_prob(windows)
            assert [s.token_logprobs for s in inside] == [pytest.approx(s.token_logprobs, abs=1e-12) for s in small]
            assert [s.nfe for s in inside] == [s.nfe for s in small]


def test_after_a_blocks_first_position_a_rule_starts_afresh(table, subtests):
    """The first position of a block alone, then the rule as in a block that begins behind it."""
    toy, window = Toy(length=9), Window((1,), (2, 0, 1, 1, 2))
    rest = Window((1, 2), (0, 1, 1, 2))
    for rule in every_rule(table):
        if rules.parse(rule).name in ("dream", "random"):
            continue  # its schedule goes on, see `after_first`; its order is that of the whole block
        with subtests.test(rule):
            seeded, after = Duel(toy, f"{rule}:seed_first=true", 5).log_prob([window])[0], Duel(toy, rule, 4)
            followed = after.log_prob([rest])[0]
            assert seeded.reveal_steps == (0, *(step + 1 for step in followed.reveal_steps))
            assert seeded.token_logprobs[1:] == pytest.approx(followed.token_logprobs, abs=1e-12)


def test_positions_that_come_last_are_not_near_ties():
    """With eos=conf they tie by definition: only another most probable token changes the order."""
    logits = torch.tensor([3.0, 0.0, 1.0, -1.0, 0.5], dtype=torch.float64).repeat(1, WIDTH, 1)
    logits[0, 2, 0] = 1.75  # it leads by 0.75
    masked = torch.ones(1, WIDTH, dtype=torch.bool)
    decision = decided(f"quota:steps={WIDTH}:eos=conf:eos_id=0", logits, masked)
    assert decision.pick[0].tolist() == [True] + [False] * (WIDTH - 1)
    assert decision.decision_margin.tolist() == [pytest.approx(0.375)]
    logits[0, 4, 2] = 6.0  # the only one of another token: it is first
    decision = decided(f"quota:steps={WIDTH}:eos=conf:eos_id=0", logits, masked)
    assert decision.pick[0].nonzero().tolist() == [[4]] and decision.decision_margin.tolist() == [pytest.approx(0.375)]


def fast_dllm_v2(toy, context, target, block, sub_block, tau):
    """Fast_dLLM_v2's batch_sample without its block cache, for known tokens: reveal steps and log-probabilities."""
    row, steps, log_probs = [*context, *[toy.mask_id] * len(target)], {}, {}
    for start in range(len(context) // block * block, len(row), block):
        end, step = min(start + block, len(row)), 0

        def reveal(positions, log_p, step):
            for position in positions:
                row[position] = target[position - len(context)]
                steps[position], log_probs[position] = step, float(log_p[position, row[position]])

        def log_p():
            logits = toy.features(torch.tensor([row]), None)[0].masked_fill(toy.excluded, -math.inf)
            return logits.log_softmax(1)  # (L, V)

        if start >= len(context):  # a clean block is complete, and its last row predicts the next token
            reveal([start], log_p(), step)
            step += 1
        for left in range(start, end, sub_block):
            while masked := [
                position for position in range(left, min(left + sub_block, end)) if row[position] == toy.mask_id
            ]:
                now = log_p()
                top = now.exp().amax(1)
                most = max(masked, key=lambda position: top[position])
                reveal([position for position in masked if top[position] > tau or position == most], now, step)
                step += 1
    return tuple(steps[position] for position in sorted(steps)), [log_probs[position] for position in sorted(steps)]


def test_the_loop_of_fast_dllm_v2():
    """No first token of its own for a block in which the context ends."""
    toy, rule = Toy(length=14), "threshold:mu=0.6:strict=true:sub_block=2:seed_first=true"
    for known, seed in itertools.product(range(6), range(2)):
        row = torch.randint(3, (14,), generator=torch.Generator().manual_seed(seed)).tolist()
        window = Window(row[:known], row[known:])
        scored = Duel(toy, rule, 4, "row").log_prob([window])[0]
        steps, log_probs = fast_dllm_v2(toy, row[:known], row[known:], 4, 2, 0.6)
        assert scored.reveal_steps == steps and scored.token_logprobs == pytest.approx(log_probs, abs=1e-9)


# ---------------------------------------------------------------- rules that may wait


@dataclasses.dataclass(frozen=True)
class EverySecond(rules.Rule):
    """Reveals the first masked position at odd steps."""

    may_pick_none = True
    reads_step = True

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) == 1) & (lanes.step % 2 == 1)[:, None]


@dataclasses.dataclass(frozen=True)
class Patient(rules.Rule):
    """Counts in its memory, to `until`, and then reveals all; or never counts."""

    until: int = 2
    counts: bool = True
    may_pick_none = True

    def __call__(self, predictions, lanes):
        now = lanes.memory[0] if lanes.memory else torch.zeros_like(lanes.masked, dtype=torch.int64)
        return rules.Decision(lanes.masked & (now >= self.until), None, (now + self.counts,))


def test_a_rule_that_may_wait():
    windows = [Window((1,), (2, 0, 1)), Window((), (0, 2))]
    waits, plain = (Duel(Toy(), rule, None) for rule in (EverySecond(), "left_to_right"))
    scored = waits.log_prob(windows)
    assert [s.reveal_steps for s in scored] == [(1, 3, 5), (1, 3)] and [s.nfe for s in scored] == [6, 4]
    assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in plain.log_prob(windows)], abs=1e-12)
    assert [s.log_prob for s in waits.replay(windows, [s.reveal_steps for s in scored])] == pytest.approx(
        [s.log_prob for s in scored], abs=1e-12
    )
    assert Duel(Toy(), Patient(), 2).log_prob(windows)[0].reveal_steps == (2, 2, 2)


@pytest.mark.parametrize("rule", [Patient(counts=False), type("Hasty", (Patient,), {"may_pick_none": False})()])
def test_a_rule_that_waits_without_end_stalls(rule):
    with pytest.raises(RuleStalled, match="picked nothing"):
        Duel(Toy(), rule, 2).log_prob([Window((), (0, 1))])


# ---------------------------------------------------------------- ids, tables, refusals


class Words:
    """A tokenizer of some special tokens."""

    def __init__(self, eos, **ids):
        self.eos_token_id, self.ids = eos, ids

    def get_vocab(self):
        return self.ids


def test_the_ends_of_a_text_come_from_the_tokenizer_or_are_given():
    rule = rules.parse("quota:steps=4:eos=conf")
    eot = {"<|eot_id|>": 5}
    assert str(rule.with_tokenizer(Words(3, **eot))) == "quota:steps=4:eos=conf:eos_id=3:eot_id=5"
    assert str(rule.with_tokenizer(Words(3))) == "quota:steps=4:eos=conf:eos_id=3"
    given = rules.parse("quota:steps=4:eos=conf:eos_id=1:eot_id=0:sub_block=2:seed_first=true")
    assert given.with_tokenizer(Words(3, **eot)) == given
    assert rules.parse("quota:steps=4").with_tokenizer(Words(3)) == rules.parse("quota:steps=4")
    with pytest.raises(DuelError, match="The tokenizer names no EOS"):
        rule.with_tokenizer(Words(None))
    with pytest.raises(DuelError, match="needs the id of EOS: pass eos_id"):
        check_rule(Toy(), rule)
    with pytest.raises(DuelError, match="eos_id=99 of rule quota is not an id"):
        check_rule(Toy(), rules.parse("quota:steps=4:eos=conf:eos_id=99"))


def test_samplers_that_are_no_distribution_are_refused_with_the_reason():
    for name, (_, reason) in refused.REFUSED.items():
        for arguments in ({"rule": name}, {"preset": name}, {"rule": name.upper().replace("-", "_")}):
            with pytest.raises(DuelError) as error:
                Options.parse(arguments)
            assert reason in str(error.value)


BOUNDS = {  # a rule with one parameter left open, and values between which its picks differ
    "threshold:mu={}": (0.0, 1.0),
    "threshold:strict=True:mu={}": (0.0, 1.0),
    "klass:nu=0.5:mu={}": (0.0, 1.0),
    "klass:mu=0.3:nu={}": (0.0, 2.0),
    "entropy_threshold:tau={}": (0.0, 2.0),
    "entropy_bound:gamma={}": (0.0, 5.0),
    "entropy_bound:inclusive=True:gamma={}": (0.0, 5.0),
    "factor:f={}": (0.01, 5.0),
    "factor:variant=b:f={}": (0.01, 5.0),
    "factor:variant=c:f={}": (0.01, 5.0),
    "hierarchy:tau=0.9:low={}": (0.0, 0.9),
    "hierarchy:low=0.2:tau={}": (0.2, 1.0),
    "dinfer_threshold:mu={}": (0.0, 1.0),
    "high_or_topk:n=2:tau={}": (0.0, 1.0),
    "dream:alg=confidence_threshold:steps=1:tau={}": (0.0, 1.0),
}


def test_a_parameter_a_hair_from_another_pick_is_a_near_tie(subtests):
    """Where a parameter a hair larger gives another pick, on both sides float noise could do the same."""

    def decision(text, value, logits, masked):
        if not text.startswith("klass"):
            return decided(text.format(value), logits, masked)
        before = (logits.roll(1, 1) * 0.2 + logits).log_softmax(2), torch.zeros_like(masked, dtype=torch.int64)
        return decided(text.format(value), logits, masked, 1, before)

    for text, (low, high) in BOUNDS.items():
        found = 0
        for seed in range(6):
            logits, masked = random_case(100 + seed, 1)
            grid = torch.linspace(low, high, 6, dtype=torch.float64).tolist()
            picks = [decision(text, value, logits, masked).pick for value in grid]
            for n, (one, other) in enumerate(itertools.pairwise(picks)):
                if found > 1 or torch.equal(one, other):
                    continue
                below, above = grid[n], grid[n + 1]
                while above - below > 1e-9:
                    middle = (below + above) / 2
                    same = torch.equal(decision(text, middle, logits, masked).pick, one)
                    below, above = (middle, above) if same else (below, middle)
                found += 1
                with subtests.test(text, seed=seed, value=above):
                    near = [bool(decision(text, value, logits, masked).near_tie) for value in (below, above)]
                    assert near == [True, True]
        assert found, text


def test_a_threshold_a_hair_above_the_most_probable_token_is_a_near_tie():
    """Which position is revealed does not change there, but whether it was sure does."""
    logits = torch.tensor([[[2.0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0], *[[0.5, 0, 0, 0, 0]] * 5]], dtype=torch.float64)
    p = float(logits[0, 0].softmax(0).max())
    for mu, near in ((p + 1e-6, True), (p - 1e-6, True), (p + 0.01, False)):
        decision = decided(f"threshold:mu={mu}", logits, torch.ones(1, WIDTH, dtype=torch.bool))
        assert decision.pick.nonzero().tolist() == [[0, 0]] and bool(decision.near_tie) == near


SCORES = ["greedy", "greedy:k=2", "margin", "log_margin", "entropy:k=2", "threshold:mu=0.5", "entropy_bound:gamma=0.5"]


@dataclasses.dataclass(frozen=True)
class FirstTwo(rules.Rule):
    """A rule that does not know by how much its picks are decided."""

    state_only = True

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) <= 2)


def test_near_ties_of_a_rule_without_margins_are_not_known():
    window = Window((1,), (0, 2, 1, 1))
    assert Duel(Toy(), FirstTwo(), 4).log_prob([window])[0].near_ties is None
    [scored] = Lattice(Toy(), 4, follow=[FirstTwo(), "greedy:k=1"]).log_prob([window])
    assert [path.near_ties is None for path in scored.others.values()][2:] == [True, False]


EVEN, SURE = [0.0, 0.0, -math.inf, -math.inf, -math.inf], [0.0, *[-math.inf] * 4]  # P1 = 1/2, and P1 = 1
AT_THE_BOUND = {  # the picks of positions that are all even, or all sure
    "threshold:mu=0.5": (EVEN, WIDTH),
    "threshold:mu=0.5:strict=true": (EVEN, 1),
    "entropy_bound:gamma=0.0": (SURE, WIDTH),
    "entropy_bound:gamma=0.0:inclusive=true": (SURE, 1),
}


@pytest.mark.parametrize("rule", AT_THE_BOUND)
def test_a_value_at_the_bound(rule):
    logits, count = AT_THE_BOUND[rule]
    masked = torch.ones(1, WIDTH, dtype=torch.bool)
    logits = torch.tensor(logits, dtype=torch.float64).expand(1, WIDTH, TOKENS)
    assert int(decided(rule, logits, masked).pick.sum()) == count


def klass_by_hand(toy, window, mu, nu, history):
    """The reveal steps of KLASS over a whole target: sure for `history` steps in a row, else the most confident one."""
    row, start = [*window.context, *window.target], len(window.context)
    masked, before, streak, steps = set(range(start, len(row))), {}, collections.Counter(), {}
    while masked:
        ids = torch.tensor([[toy.mask_id if column in masked else token for column, token in enumerate(row)]])
        log_p = toy.head(toy.features(ids, None))[0, :, : toy.tokens].log_softmax(1)
        for column in masked:
            moved = float((before[column].exp() * (before[column] - log_p[column])).sum()) if before else math.inf
            streak[column] = streak[column] + 1 if moved <= nu else 0
        sure = {column for column in masked if streak[column] >= history and float(log_p[column].max().exp()) >= mu}
        picked = sure or {max(sorted(masked), key=lambda column: float(log_p[column].max()))}
        steps |= dict.fromkeys(picked, 1 + max(steps.values(), default=-1))
        before, masked = dict(enumerate(log_p)), masked - picked
    return tuple(steps[column] for column in range(start, len(row)))


@pytest.mark.parametrize("history", [1, 2])
def test_klass_by_hand(history):
    found = set()
    for seed in range(12):
        toy = Toy(length=10, seed=seed, scale=1.0)
        window = Window((1,), (0, 2, 1, 1, 2, 0, 0, 1))
        expected = klass_by_hand(toy, window, 0.4, 0.05, history)
        scored = Duel(toy, f"klass:mu=0.4:nu=0.05:history={history}", None).log_prob([window])[0]
        assert scored.reveal_steps == expected
        found.add(expected)
    assert len(found) > 6  # not from one end to the other


def test_near_ties_are_counted():
    """A pick that moves under noise of 1e-4 was counted as near."""
    logits, masked = random_case(7, 400)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 2e-5
    for text in [
        *STATE_ONLY,
        *SCORES,
        "quota:steps=3",
        "dream:alg=maskgit_plus:steps=3",
        "quota:steps=3:eos=conf:eos_id=2",
    ]:
        first, second = decided(text, logits, masked), decided(text, logits + noise, masked)
        moved = (first.pick != second.pick).any(1)  # (R,)
        assert not (moved & ~(torch.minimum(first.decision_margin, second.decision_margin) <= 1e-4)).any(), text
