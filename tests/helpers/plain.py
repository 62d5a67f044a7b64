"""The decoders in float64, from their description alone, one row at a time.

    x = table[ids]
    x = x + mix(norm(x))       attention over the positions that `seen` allows; q and k turned by their position
    x = x + feed(norm(x))      SwiGLU, or a mixture of them
    logits = head @ norm(x)

Tensors go by the names in the checkpoint's own files, without `.weight`: `NATIVE`, `LLADA`, `LLADA2`, `SMDM` and
`NEMOTRON` say which is which.

Shapes: L row length, D features, H heads, h features of a head, E experts, V tokens.
"""

import dataclasses
import math

import torch

_LAYER = "model.layers.{n}."
NATIVE = {
    "table": "model.embed_tokens",
    "last": "model.norm",
    "head": "lm_head",
    "before mix": _LAYER + "input_layernorm",
    "before feed": _LAYER + "post_attention_layernorm",
    **{name: _LAYER + f"self_attn.{name}_proj" for name in "qkv"},
    "q norm": _LAYER + "self_attn.q_norm",
    "k norm": _LAYER + "self_attn.k_norm",
    "out": _LAYER + "self_attn.o_proj",
    "router": _LAYER + "mlp.gate",
    **{part: _LAYER + f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"expert {part}": _LAYER + f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
}
_BLOCK = "model.transformer.blocks.{n}."
LLADA = {
    "table": "model.transformer.wte",
    "last": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "before mix": _BLOCK + "attn_norm",
    "before feed": _BLOCK + "ff_norm",
    **{name: _BLOCK + f"{name}_proj" for name in "qkv"},
    "out": _BLOCK + "attn_out",
    "gate": _BLOCK + "ff_proj",
    "up": _BLOCK + "up_proj",
    "down": _BLOCK + "ff_out",
}
LLADA2 = {
    **NATIVE,
    "table": "model.word_embeddings",
    "qkv": _LAYER + "attention.query_key_value",
    "q norm": _LAYER + "attention.query_layernorm",
    "k norm": _LAYER + "attention.key_layernorm",
    "out": _LAYER + "attention.dense",
    "router bias": _LAYER + "mlp.gate.expert_bias",
    **{f"shared {part}": _LAYER + f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_H = "transformer.h.{n}."
SMDM = {
    "table": "transformer.wte",
    "last": "transformer.ln_f",
    "head": "lm_head",
    "before mix": _H + "norm_1",
    "before feed": _H + "norm_2",
    "qkv": _H + "attn.attn",
    "out": _H + "attn.proj",
    "gate": _H + "mlp.swiglu.w1",
    "up": _H + "mlp.swiglu.w2",
    "down": _H + "mlp.swiglu.w3",
}
NEMOTRON = {name: key.replace("model.", "encoder.", 1) for name, key in NATIVE.items()} | {"head": "diffusion_head"}


@dataclasses.dataclass(frozen=True)
class Net:
    """A decoder's sizes and habits. Biases, norms of q and k, and a shared expert are there where the file has them."""

    head: int  # features of a head
    heads: int = 4
    kept: int = 2  # heads of keys and values
    layers: int = 2
    keys: dict = dataclasses.field(default_factory=lambda: NATIVE)
    grouped: bool = False  # qkv holds for each head of keys its queries, its keys and its values
    theta: float = 10_000.0
    eps: float = 1e-6
    turned: float = 1.0  # the share of a head that is turned, from its start
    stretch: dict | None = None  # of the rotary frequencies, as in Llama 3 or YaRN, or all of them
    experts: int = 0
    chosen: int = 0
    normalised: bool = True  # weights of the chosen experts sum to one
    groups: int = 0  # 0: softmax router; else sigmoid scores, and experts in this many groups
    groups_kept: int = 0
    capacity: int = 0  # experts that the positions of a block share, chosen by the best of them; the groups are ignored
    routed: int = 0  # positions of such a block
    scale: float = 1.0  # of the experts' sum
    dense: int = 0  # first layers without experts


def logits(net, w, ids, seen=None):
    """Logits (L, V) of ids; position i attends to position j where `seen[i, j]`, everywhere unless given."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool) if seen is None else seen

    def tensor(name, n=None, e=None, end=".weight"):
        key = net.keys.get(name, "nowhere").format(n=n, e=e) + end
        return w[key].double() if key in w else None

    def linear(x, name, n=None, e=None):
        y, bias = x @ tensor(name, n, e).T, tensor(name, n, e, ".bias")
        return y if bias is None else y + bias

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + net.eps).sqrt() * weight

    def swiglu(x, kind, n, e=None):
        gate = linear(x, f"{kind}gate", n, e)
        return linear(gate * gate.sigmoid() * linear(x, f"{kind}up", n, e), f"{kind}down", n, e)

    def turn(x):
        """Pairs (i, i + half) of a head's first features (L, H, h), each turned by the position."""
        size = int(net.head * net.turned)
        half = size // 2
        speed = torch.tensor([_frequency(net, i, size) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * speed  # (L, 1, half)
        a, b, rest = x.split([half, half, net.head - size], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    def project(x, n):
        """Queries (L, H, h), and as many keys and values (L, H, h) each."""
        of = net.heads // net.kept  # queries of a head of keys
        if net.grouped:
            parts = linear(x, "qkv", n).unflatten(1, (net.kept, of + 2, net.head)).split([of, 1, 1], 2)
        elif "qkv" in net.keys:
            parts = linear(x, "qkv", n).unflatten(1, (-1, net.head)).split([net.heads, net.kept, net.kept], 1)
        else:
            parts = [linear(x, name, n) for name in "qkv"]
        q, k, v = (part.reshape(len(x), -1, net.head) for part in parts)
        if (weight := tensor("q norm", n)) is not None:
            q, k = norm(q, weight), norm(k, tensor("k norm", n))
        return turn(q), turn(k).repeat_interleave(of, 1), v.repeat_interleave(of, 1)

    def mix(x, n):
        q, k, v = project(x, n)
        match = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(net.head)
        shares = match.masked_fill(~seen, -math.inf).softmax(-1)  # (H, L, L)
        return linear(torch.einsum("hij,jhd->ihd", shares, v).flatten(1), "out", n)

    def route(x, n):
        """The weight of each expert for each position (L, E), 0 for those that are not chosen."""
        score = linear(x, "router", n)
        if net.capacity:
            score = score.sigmoid()
            chosen = by_block(score + tensor("router bias", n, end=""))
        elif net.groups:
            score = score.sigmoid()
            biased = (score + tensor("router bias", n, end="")).unflatten(1, (net.groups, -1))
            best = biased.topk(2).values.sum(-1).topk(net.groups_kept).indices
            allowed = torch.zeros(biased.shape[:2], dtype=torch.bool).scatter(1, best, True)
            chosen = biased.masked_fill(~allowed[..., None], -math.inf).flatten(1).topk(net.chosen).indices
        else:
            score = score.softmax(-1)
            chosen = score.topk(net.chosen).indices
        share = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
        return share / share.sum(1, keepdim=True) if net.normalised else share

    def by_block(biased):
        """The experts of each position (L, chosen): a block allows the best by their maximum, ties from the lowest."""
        chosen = []
        for begin in range(0, len(biased), net.routed):
            block = biased[begin : begin + net.routed].tolist()
            peak = [max(position[e] for position in block) for e in range(net.experts)]
            allowed = sorted(range(net.experts), key=lambda e: (-peak[e], e))[: net.capacity]
            for position in block:
                chosen.append(sorted(allowed, key=lambda e: (-position[e], e))[: net.chosen])
        return torch.tensor(chosen)

    def feed(x, n):
        if not net.experts or n < net.dense:
            return swiglu(x, "", n)
        shares = net.scale * route(x, n)
        total = sum(shares[:, e, None] * swiglu(x, "expert ", n, e) for e in range(net.experts))
        return total if tensor("shared gate", n) is None else total + swiglu(x, "shared ", n)

    table = tensor("table")
    x = table[list(ids)]  # (L, D)
    for n in range(net.layers):
        x = x + mix(norm(x, tensor("before mix", n)), n)
        x = x + feed(norm(x, tensor("before feed", n)), n)
    head = table if tensor("head") is None else tensor("head")
    out = norm(x, tensor("last")) @ head.T
    return torch.nn.functional.pad(out, (0, len(table) - len(head)))  # rows that the head does not have: [MASK]


def _frequency(net, i, size):
    """The turn per position of pair i of `size` // 2."""
    frequency = net.theta ** (-2 * i / size)
    if net.stretch is None:
        return frequency
    if "type" in net.stretch:  # linear
        return frequency / net.stretch["factor"]
    if net.stretch["rope_type"] == "yarn":

        def pair(turns):  # the pair of features that turns this often over the first training's positions
            length = net.stretch["original_max_position_embeddings"]
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(net.theta))

        low, high = max(math.floor(pair(net.stretch["beta_fast"])), 0), min(math.ceil(pair(1)), size - 1)
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        return frequency * (1 - slowed) + frequency / net.stretch["factor"] * slowed
    periods = net.stretch["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the first training
    low, high = net.stretch["low_freq_factor"], net.stretch["high_freq_factor"]
    kept = min(max((periods - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / net.stretch["factor"]


def block_causal(length, block, origin=0):
    """Which positions see which (L, L): their own block and those before it; what is before `origin` is one block."""
    number = (torch.arange(length) - origin).div(block, rounding_mode="floor").clamp(min=-1)
    return number[:, None] >= number


def causal_prefix(length, begin):
    """Positions before `begin` see themselves and those before them; those from `begin` on see everything."""
    return block_causal(length, 1) | (torch.arange(length) >= begin)[:, None]
