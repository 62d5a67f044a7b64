"""The textbook loop, written apart from the package: one window, one block after the other, full logits, no batch.

Rules here work on plain probability vectors in float64 and know nothing of the package's statistics.
"""

import itertools
import math

import torch

from lm_eval_duel.hashing import hashed


def pick(rule, probs, hidden, step, previous, offset):
    """Positions picked by `rule` (a package rule, read for its name and parameters) among `hidden` (ascending).

    `probs[p]`: probability vector at p. `previous`: list of dicts of earlier steps in this block. `offset`: the first
    target position's column, for `random`.
    """
    name = rule.name

    def top(score, k):
        return sorted(hidden, key=lambda p: (-score(p), p))[:k]

    def first(p):
        return float(probs[p].max())

    def two(p):
        values = torch.sort(probs[p], descending=True).values
        return float(values[0]), float(values[1])

    def entropy(p):
        q = probs[p][probs[p] > 0]
        return float(-(q * q.log()).sum())

    if name == "left_to_right":
        return hidden[: rule.k]
    if name == "right_to_left":
        return hidden[-rule.k :]
    if name == "random":
        keys = {p: int(hashed(torch.tensor(p - offset), rule.seed)) for p in hidden}
        return sorted(hidden, key=lambda p: (keys[p], p))[: rule.k]
    if name == "greedy":
        return top(first, rule.k)
    if name == "margin":
        return top(lambda p: two(p)[0] - two(p)[1], rule.k)
    if name == "log_margin":
        return top(lambda p: math.log(two(p)[0]) - math.log(two(p)[1]), rule.k)
    if name == "entropy":
        return top(lambda p: -entropy(p), rule.k)
    if name == "threshold":
        return [p for p in hidden if first(p) >= rule.mu] or top(first, 1)
    if name == "entropy_bound":
        chosen, total = [], 0.0
        for p in sorted(hidden, key=lambda p: (entropy(p), p)):
            if total <= rule.gamma:
                chosen.append(p)
            total += entropy(p)
        return chosen
    if name == "klass":

        def kl(a, b):
            keep = a > 0
            return float((a[keep] * (a[keep].log() - b[keep].log())).sum())

        def stable(p):
            seen = [*previous, probs]
            if len(seen) < rule.history + 1:
                return False
            pairs = list(itertools.pairwise(seen))[-rule.history :]
            return all((kl(a[p], b[p]) if rule.kl == "paper" else kl(b[p], a[p])) <= rule.nu for a, b in pairs)

        return [p for p in hidden if first(p) >= rule.mu and stable(p)] or top(first, 1)
    raise NotImplementedError(name)


def score(logits_of, mask_id, excluded, rule, block, window, grid="target", tie_when_blank=False, sees=None):
    """(log_prob, steps, nats, is_greedy, nfe) of one window; `logits_of(ids (L,)) -> (L, V)`.

    `sees`: None, the network is shown the whole row; "fill" or "cut", it is block-causal and shown the row up to the
    end of the current block, which is filled up with masks or ends with the window.
    """
    origin, target = len(window.context), len(window.target)
    row = [*window.context, *[mask_id] * (target + window.tail), *window.suffix]
    steps, nats, greedy, nfe = [None] * target, [None] * target, True, 0
    borders = list(range(origin if grid == "target" or block is None else 0, origin + target, block or max(target, 1)))
    for begin in borders:
        cells = [p for p in range(begin, min(begin + (block or target), origin + target)) if p >= origin]
        step, previous = 0, []
        while any(row[p] == mask_id for p in cells):
            hidden = [p for p in cells if row[p] == mask_id]
            shown = row if sees is None else row[: begin + block]
            if sees == "fill":
                shown = shown + [mask_id] * (begin + block - len(shown))
            logits = logits_of(torch.tensor(shown))
            logits = logits.double().masked_fill(excluded.cpu(), -math.inf)
            if tie_when_blank and all(token == mask_id for token in shown):
                logits = logits[hidden[0]].expand_as(logits)
            logs = logits.log_softmax(-1)
            probs = {p: logs[p].exp() for p in hidden}
            for p in pick(rule, probs, hidden, step, previous, origin):
                truth = window.target[p - origin]
                steps[p - origin], nats[p - origin] = step, float(logs[p, truth])
                greedy &= truth == int(logs[p].argmax())
                row[p] = truth
            previous.append(probs)
            step += 1
            nfe += 1
    return sum(nats), tuple(steps), tuple(nats), greedy, nfe
