"""One process as one of several ranks of torch.distributed, one after another."""

import torch


def use_rank(monkeypatch, rank, world, shares):
    """Make this process rank `rank` of `world`. What it gathers are `shares`, by rank, with its own; its own is kept.

    A rank that has not run yet is taken to share what this one does.
    """

    def gather(of_ranks, own):
        shares[rank] = own
        for n in range(world):
            of_ranks[n] = shares.get(n, own)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
