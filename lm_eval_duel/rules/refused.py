"""Samplers that no unmasking rule describes, by name, with the reason."""

from __future__ import annotations

from lm_eval_duel.errors import DuelError

REMASKS = (
    "it masks revealed tokens again, so a text has no single order of unmasking, and its probability is a sum over "
    "paths that no evaluation of this text can enumerate"
)
EDITS = "it replaces revealed tokens, so the text at the end is not the one whose tokens were revealed"
BATCH = (
    "above batch size 1 the value of a text depends on the texts in the same batch, so it has no probability of its "
    "own; the cached samplers that are covered are cache=prefix and cache=dual"
)
LEAVES_MASKS = (
    "its loop can end with [MASK] in the text, so the probabilities of texts do not sum to 1. The rule threshold "
    "always reveals the most confident position"
)
HISTORY = "its state spans blocks and is more than the revealed tokens, which is not implemented"
OPEN_BLOCKS = (
    "it keeps several blocks open and may reveal nothing in the later ones, so which blocks a step shows depends on "
    "more than the block's revealed tokens"
)
MERGES = (
    "it shows the network mixtures of [MASK] and predicted embeddings at revealed positions and may replace them "
    "later, so the text at the end is not the one whose tokens were revealed"
)
UNPUBLISHED = (
    "its filter reads the network's probabilities at revealed positions of the block too, which no rule sees, and its "
    "weights are not in its repository. Your own filter can be a rule (docs/rules.md)"
)

REFUSED = {  # name: (what it is, why)
    "remdm": ("ReMDM", REMASKS),
    "p2": ("P2 (path planning)", REMASKS),
    "wino": ("WINO", REMASKS),
    "hierarchy-remask": ("dInfer's hierarchy with remasking", REMASKS),
    "t2t": ("the token-to-token editing of LLaDA2.1", EDITS),
    "llada2.1": ("the sampler of LLaDA2.1", EDITS + "; without these edits it is preset=llada2 with family=llada2"),
    "llada2.2": ("the sampler of LLaDA2.2", EDITS + ", and its length changes"),
    "d2cache": ("d2Cache", BATCH),
    "fast-dllm-v2-block-cache": ("Fast_dLLM_v2 with use_block_cache", BATCH),
    "fast-dllm-unforced": ("Fast-dLLM's threshold without a forced pick (commit fb55582)", LEAVES_MASKS),
    "llada2-many-steps": ("LLaDA2 with more steps than positions in a block", LEAVES_MASKS),
    "credit": ("dInfer's credit decoding", HISTORY),
    "slow-fast": ("Slow-Fast sampling", HISTORY),
    "d3llm-multi-block": ("d3LLM's multi-block decoding", HISTORY + "; preset=d3llm is its decoding block by block"),
    "learn2pd": ("Learn2PD", UNPUBLISHED),
    "multi-bd": ("Diffulex's multi-block decoding", OPEN_BLOCKS),
    "dmax": ("DMax", MERGES),
    "joint-threshold": ("SGLang's JointThreshold", EDITS),
    "joint-threshold-indel": ("SGLang's JointThresholdInDel", EDITS + ", and its length changes"),
}


def require_covered(what: str, name: str) -> None:
    """Raise DuelError, with the reason, if `name` is a sampler that is refused."""
    if entry := REFUSED.get(name.lower().replace("_", "-")):
        raise DuelError(f"{what}={name} is {entry[0]}, which cannot be scored: {entry[1]}.")
