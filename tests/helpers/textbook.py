"""The textbook loop, written apart from the package: one window, one block after the other, full logits, no batch.

Rules here work on plain probability vectors in float64 (or better, see `Cell`) and know nothing of the package's
statistics.
"""

import itertools
import math

import torch

from lm_eval_duel.hashing import hashed
from lm_eval_duel.rules import SeedFirst


class Cell:
    """What a rule may know of one position's distribution, in float64."""

    def __init__(self, logits):
        self.logs = logits.detach().log_softmax(-1)
        self.probs = self.logs.exp()
        self.first, self.second = self.probs.topk(2).values.tolist()
        self.argmax = int(self.logs.argmax())

    @property
    def log_margin(self):
        return math.log(self.first) - math.log(self.second)

    @property
    def entropy(self):
        q = self.probs[self.probs > 0]
        return float(-(q * q.log()).sum())

    def kl(self, other):
        keep = self.probs > 0
        return float((self.probs[keep] * (self.logs[keep] - other.logs[keep])).sum())

    def log_prob(self, token):
        return float(self.logs[token])


def pick(rule, positions, masked, previous, offset):
    """Positions picked by `rule` (a package rule, read for its name and parameters) among `masked` (ascending).

    `positions[p]`: the distribution at p. `previous`: such dicts of earlier steps in this block. `offset`: the first
    target position's column, for `random`.
    """
    name = rule.name

    def top(score, k):
        return sorted(masked, key=lambda p: (-score(positions[p]), p))[:k]

    def single():
        return top(lambda position: position.first, 1)

    if name == "left_to_right":
        return masked[: rule.k]
    if name == "right_to_left":
        return masked[-rule.k :]
    if name == "random":
        keys = {p: int(hashed(torch.tensor(p - offset), rule.seed)) for p in masked}
        return sorted(masked, key=lambda p: (keys[p], p))[: rule.k]
    if name == "greedy":
        return top(lambda position: position.first, rule.k)
    if name == "margin":
        return top(lambda position: position.first - position.second, rule.k)
    if name == "log_margin":
        return top(lambda position: position.log_margin, rule.k)
    if name == "entropy":
        return top(lambda position: -position.entropy, rule.k)
    if name == "threshold":
        return [
            p for p in masked if positions[p].first > rule.mu or (positions[p].first == rule.mu and not rule.strict)
        ] or (single())
    if name == "entropy_bound":
        chosen, total = [], 0
        for p in sorted(masked, key=lambda p: (positions[p].entropy, p)):
            spent, total = total, total + positions[p].entropy
            if (total < rule.gamma or not chosen) if rule.inclusive else spent <= rule.gamma:
                chosen.append(p)
        return chosen
    if name == "entropy_threshold":
        return [p for p in masked if positions[p].entropy <= rule.tau] or top(lambda position: -position.entropy, 1)
    if name == "factor":
        ordered = [positions[p].first for p in top(lambda position: position.first, len(masked))]
        bounds = [1 - rule.f / (rank + 1) for rank in range(2, len(masked) + 1)]
        if rule.variant == "c":
            k = 1 + sum(c > bound for c, bound in zip(ordered[1:], bounds, strict=True))
            return top(lambda position: position.first, max(1, k - 1) if k == len(masked) else k)
        k = 1 + sum(c >= bound for c, bound in zip(ordered[1:], bounds, strict=True))
        return top(lambda position: position.first, k + 1 if rule.variant == "a" and k == len(masked) - 1 else k)
    if name == "high_or_topk":
        high = [p for p in masked if positions[p].first > rule.tau]
        return high if len(high) >= rule.n else top(lambda position: position.first, rule.n)
    if name == "dinfer_threshold":
        best = max(positions[p].first for p in masked)
        return [p for p in masked if positions[p].first >= min(rule.mu, best - type(best)(1e-5))]
    if name == "quota":
        m = len(previous[0]) if previous else len(masked)
        return top(lambda position: position.first, m // rule.steps + (len(previous) < m % rule.steps))
    if name == "klass":

        def stable(p):
            seen = [*previous, positions]
            if len(seen) < rule.history + 1:
                return False
            pairs = list(itertools.pairwise(seen))[-rule.history :]
            return all((a[p].kl(b[p]) if rule.kl == "paper" else b[p].kl(a[p])) <= rule.nu for a, b in pairs)

        return [p for p in masked if positions[p].first >= rule.mu and stable(p)] or single()
    raise NotImplementedError(name)


def score(
    logits_of, mask_id, excluded, rule, block, window, grid="target", tie_when_all_mask=False, sees=None, position=Cell
):
    """(log_prob, steps, nats, is_greedy, nfe) of one window; `logits_of(ids (L,)) -> (L, V)`.

    `sees`: None, the network is shown the whole row; "fill" or "cut", it is block-causal and shown the row up to the
    end of the current block, which is filled up with masks or ends with the window. `position`: what logits (V,)
    become.
    """
    origin, target = len(window.context), len(window.target)
    row = [*window.context, *[mask_id] * (target + window.tail), *window.suffix]
    steps, nats, greedy, nfe = [None] * target, [None] * target, True, 0
    borders = list(range(origin if grid == "target" or block is None else 0, origin + target, block or max(target, 1)))
    for begin in borders:
        own = [p for p in range(begin, min(begin + (block or target), origin + target)) if p >= origin]
        step, previous = 0, []
        seeded = isinstance(rule, SeedFirst) and begin >= origin  # its first position is not that of a context
        then = rule.rule if isinstance(rule, SeedFirst) else rule
        while any(row[p] == mask_id for p in own):
            masked = [p for p in own if row[p] == mask_id]
            shown = row if sees is None else row[: begin + block]
            if sees == "fill":
                shown = shown + [mask_id] * (begin + block - len(shown))
            logits = logits_of(torch.tensor(shown))
            logits = logits.double().masked_fill(excluded.cpu(), -math.inf)
            if tie_when_all_mask and all(token == mask_id for token in shown):
                logits = logits[masked[0]].expand_as(logits)
            positions = {p: position(logits[p]) for p in masked}
            picked = pick(then, positions, masked, previous, origin) if step or not seeded else masked[:1]
            for p in picked:
                truth = window.target[p - origin]
                steps[p - origin], nats[p - origin] = step, positions[p].log_prob(truth)
                greedy &= truth == positions[p].argmax
                row[p] = truth
            if step or not seeded:
                previous.append(positions)
            step += 1
            nfe += 1
    return sum(nats), tuple(steps), tuple(nats), greedy, nfe
