"""All that the rules of the package decide on made predictions in float64, step by step, and what tables call them.

That picks and margins are right is proven elsewhere. Here none of them changes unseen, at any rank or border.
"""

import golden
import torch
from laws import AROUND, RULES
from random_lanes import TOKENS, WIDTH

from lm_eval_duel import rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions

MORE = (
    "left_to_right:k=2:seed_first=true",
    "greedy:k=2:sub_block=3",
    "entropy:k=9",
    "margin:k=2:seed_first=true",
    "klass:mu=0.5:nu=0.05:kl=authors:across=true",
    "klass:mu=0.4:nu=0.5:history=2:kl=authors:across=true",
    "klass:mu=0.5:nu=0.02:history=2",
    "random:k=2:seed=3",
    "dream:alg=maskgit_plus:steps=4",
    "dream:alg=confidence_threshold:steps=1:tau=0.7",
    "quota:steps=4",
    "cumulative_quota:steps=5:tau=0.9",
    "threshold_until:mu=0.8:steps=2",
    "falling_threshold:mu=0.9:low=0.4:steps=2",
    "factor:f=0.7:variant=b",
    "dinfer_threshold:mu=1.0",
    "hierarchy:low=0.6",
    "threshold_ref:mu=0.0:f=0.6",
    "cumulative_error:mu=0.0",
    "cumulative_error:mu=0.02",
    "high_or_topk:n=3:tau=0.7",
    "threshold_fixed:mu=0.3:n=3",
    "quota:steps=3:eos=conf:eos_id=1:eot_id=2",
)
EVERY = [*RULES, *AROUND, *MORE]
STEPS = 3  # of a rule that depends on them


def made():
    """Logits (R, W, V) of each step, and lanes: wide, narrow, begun inside the context, of one position, with a known
    one, and of masks alone.
    """
    generator = torch.Generator().manual_seed(3)
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0, 6.0, 1.5], dtype=torch.float64)[:, None, None]
    first = torch.randn(6, WIDTH, TOKENS, generator=generator, dtype=torch.float64) * scale
    drift = torch.randn(STEPS, 6, WIDTH, TOKENS, generator=generator, dtype=torch.float64) * 0.2
    start = torch.tensor([2, 2, 0, 5, 9, 2])
    width = torch.tensor([7, 5, 7, 1, 7, 7])
    origin = torch.full_like(start, 2)
    columns = start[:, None] + torch.arange(WIDTH)
    masked = (columns >= origin[:, None]) & (columns < (start + width)[:, None])
    masked[4, 3] = False  # known
    row = torch.arange(len(start))
    lanes = Lanes(row, start, origin, width, torch.where(masked, -1, 0), masked, torch.zeros_like(row))
    return first + drift.cumsum(0), lanes


def predicted(logits, lanes):
    """The predictions of lanes, of which those of masks alone have one distribution at their first step."""
    all_mask = (lanes.row == 5) & (lanes.step == 0)
    lane, position = lanes.masked.nonzero().unbind(1)
    position = torch.where(all_mask[lane], 0, position)
    place = lanes.row[lane] * WIDTH + position
    places, row = place.unique(return_inverse=True)
    features = logits.flatten(0, 1)[places]
    excluded = torch.zeros(TOKENS, dtype=torch.bool)
    return Predictions(lanes.masked, all_mask, features, row, torch.clone, excluded)


def decisions(text):
    """What a rule decides at each step, a line for each: the number of the lane, the picked positions, the margin."""
    rule = rules.parse(text)
    logits_of_steps, lanes = made()
    steps = 1 if rule.state_only else STEPS
    for step in range(steps):
        if not len(lanes):
            return
        decision = rule(predicted(logits_of_steps[step], lanes), lanes)
        shown = []
        for lane in range(len(lanes)):
            picked = "".join("x" if yes else "." for yes in decision.pick[lane].tolist())
            margin = float(decision.decision_margin[lane])
            shown.append(f"{int(lanes.row[lane])} {picked} {margin:.8g}")
        yield f"step {step}: {' | '.join(shown)}"
        lanes = lanes.reveal(decision.pick, torch.zeros_like(lanes.tokens), decision.memory)
        lanes = lanes.select(lanes.masked.any(1))


def test_picks_and_margins_are_as_recorded():
    lines = []
    for text in EVERY:
        lines.append(text)
        lines += [f"    {line}" for line in decisions(text)]
    golden.check_lines(__file__, "decisions", lines, within=1e-6)


def test_the_number_of_steps_depends_on_the_text_only_if_the_rule_is_said_to_be_adaptive():
    """Of rules with a schedule, on lanes of equal size."""
    generator = torch.Generator().manual_seed(4)
    count = 6
    zero = torch.zeros(count, dtype=torch.int64)
    masked = torch.ones(count, 6, dtype=torch.bool)
    excluded = torch.zeros(TOKENS, dtype=torch.bool)
    for text in ("quota:steps=4", "dream:alg=entropy:steps=3", "dream:alg=confidence_threshold:steps=3:tau=0.5"):
        rule = rules.parse(text)
        lanes = Lanes(zero, zero, zero, zero + 6, torch.where(masked, -1, 0), masked, zero)
        steps = set()
        while lanes.masked.any():
            logits = 3 * torch.randn(int(lanes.masked.sum()), TOKENS, generator=generator, dtype=torch.float64)
            rows = torch.arange(len(logits))
            all_mask = torch.zeros(len(lanes), dtype=torch.bool)
            predictions = Predictions(lanes.masked, all_mask, logits, rows, torch.clone, excluded)
            decision = rule(predictions, lanes)
            lanes = lanes.reveal(decision.pick, lanes.tokens.clamp(min=0), decision.memory)
            finished = ~lanes.masked.any(1)
            steps.update(lanes.step[finished].tolist())
            lanes = lanes.select(~finished)
        assert (len(steps) > 1) == rules.adaptive(text), (text, steps)


NAMES = ("family", "sort_key", "adaptive", "without_defaults", "is_rule")
TEXTS = (
    "greedy",
    "klass:mu=0.9:nu=0.1:history=1",
    "klass:mu=0.9:nu=0.1:history=2",
    "threshold:mu=0.9:sub_block=8",
    "my_module:Mine:k=3",
    "mine.py:Mine",
    "greedy:k=x",
    "",
    "random:k=2:seed=0",
    "greedy:k=1:seed_first=True",
)


def test_what_tables_call_a_rule_is_as_recorded():
    parsed = {rule.name: rule for rule in map(rules.parse, EVERY)}  # the last one of each name
    assert parsed.keys() == rules.RULES.keys()
    lines = []
    for rule in [*parsed.values(), rules.parse(AROUND[1])]:
        flags = [name for name in (*rules.base.READS, "dense_memory", "spans_blocks") if getattr(rule, name)]
        lines.append(f"{rule}: speed {'+'.join(rule.speed)}, {' '.join(flags)}")
    texts = [*TEXTS, *map(str, parsed.values())]
    for text in sorted(texts, key=rules.sort_key):
        lines.append(f"{text}:")
        lines += [f"    {name}: {getattr(rules, name)(text)}" for name in NAMES]
    golden.check_lines(__file__, "names", lines)
