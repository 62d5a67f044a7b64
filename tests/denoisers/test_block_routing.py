"""Experts chosen by block, against a loop over blocks; the networks are in test_families.py (`llada2.2`)."""

import torch

from lm_eval_duel.denoisers.hf.block_routing import blocks_of, choose


def by_hand(scores, block, capacity, count):
    """The experts of each token: the best of the `capacity` that its block has, with ties from the lowest."""
    chosen = []
    for token, number in zip(scores.tolist(), block.tolist(), strict=True):
        peak = scores[block == number].amax(0).tolist()
        allowed = sorted(range(len(peak)), key=lambda e: (-peak[e], e))[:capacity]
        chosen.append(sorted(allowed, key=lambda e: (-token[e], e))[:count])
    return torch.tensor(chosen)


def test_choices_are_those_of_a_loop_ties_included():
    generator = torch.Generator().manual_seed(0)
    for capacity, count in ((2, 1), (3, 3), (5, 2), (8, 3)):
        scores = torch.randint(5, (40, 8), generator=generator).float()  # many are equal
        block = torch.randint(6, (40,), generator=generator) * 7

        expected = by_hand(scores, block, capacity, count)
        assert torch.equal(choose(scores, block, capacity, count), expected)


def test_positions_that_see_each_other_are_a_block():
    """The last one sees not even itself."""
    seen = [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
    ]

    of_two_rows = blocks_of(torch.tensor([seen]).bool(), 2)

    assert of_two_rows.tolist() == [0, 0, 2, 2, 4, 5, 5, 7, 7, 9]
