"""Networks in float64 from their description alone, one row at a time, on the tensors of the checkpoint's own files.

Nothing here is shared with `denoisers/`: neither the names of tensors, nor the entries of config.json, nor a line of a
forward pass. `audit` compares the network of a run with these.

    decoder        x = table[ids]
                   x = x + mix(norm(x))       attention over the positions that `seen` allows; rotary q and k
                   x = x + feed(norm(x))      SwiGLU, or a mixture of them
                   logits = head @ norm(x)
    DiT            the same with layer norms that a noise level shifts, scales and gates, and a GELU

Tensors of decoders go by the names in the checkpoint's own files, without `.weight`: `NATIVE`, `LLADA`, `LLADA2`,
`SMDM` and `NEMOTRON` say which is which.

Shapes: L row length, D features, H heads, h features of a head, E experts, V tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_duel.audit.weight_files import Tensors, Unknown, first

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
NEMOTRON = {name: key.replace("model.", "encoder.", 1) for name, key in NATIVE.items()}
NEMOTRON["head"] = "diffusion_head"


@dataclasses.dataclass(frozen=True)
class Net:
    """A decoder's sizes and conventions. Biases, norms of q and k, and a shared expert count if the file has them."""

    head: int  # features of a head
    heads: int = 4
    kv_heads: int = 2  # heads of keys and values
    layers: int = 2
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: NATIVE)
    grouped: bool = False  # qkv holds for each head of keys its queries, its keys and its values
    theta: float = 10_000.0
    eps: float = 1e-6
    rotary_share: float = 1.0  # the share of a head's features that is rotated, from the first one on
    rope_scaling: Mapping[str, Any] | None = None  # of the rotary frequencies; `rope_type` is linear, llama3 or yarn
    experts: int = 0
    chosen: int = 0  # experts of a position
    normalised: bool = True  # weights of the chosen experts sum to one
    groups: int = 0  # 0: softmax router; else sigmoid scores, and experts in this many groups
    groups_kept: int = 0
    capacity: int = 0  # experts that a block's positions share: the highest at any of them; the groups are ignored
    routing_block: int = 0  # positions of such a block
    scale: float = 1.0  # of the experts' sum
    dense: int = 0  # first layers without experts


def logits(net: Net, w: Tensors, ids: Sequence[int], seen: Tensor | None = None) -> Tensor:
    """Logits (L, V) of ids. Position i attends to position j where `seen[i, j]`; to all of them if `seen` is None."""
    if seen is None:
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool)
    return DecoderForward(net, w, seen).logits(ids)


class DecoderForward:
    """A forward pass of a decoder with tensors `w`; `seen` (L, L): the positions that each position attends to.

    Of the arguments below, `n` is the number of a layer and `e` that of an expert.
    """

    def __init__(self, net: Net, w: Tensors, seen: Tensor):
        self.net = net
        self.w = w
        self.seen = seen

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (L, V) of ids."""
        table = self.tensor("table")
        x = table[list(ids)]  # (L, D)
        for n in range(self.net.layers):
            x = x + self.mix(self.norm(x, self.tensor("before mix", n)), n)
            x = x + self.feed(self.norm(x, self.tensor("before feed", n)), n)
        head = self.maybe("head")
        if head is None:  # tied
            head = table
        out = self.norm(x, self.tensor("last")) @ head.T
        return torch.nn.functional.pad(out, (0, len(table) - len(head)))  # SMDM's head has no row for [MASK]

    # ------------------------------------------------------------ tensors by name, and products with them

    def maybe(
        self,
        name: str,
        n: int | None = None,
        e: int | None = None,
        end: str = ".weight",
    ) -> Tensor | None:
        """A tensor in float64; None if the checkpoint has none of this name."""
        key = self.net.keys.get(name, "").format(n=n, e=e) + end  # a layout without this name: no tensor has the key
        return self.w[key].double() if key in self.w else None

    def tensor(
        self,
        name: str,
        n: int | None = None,
        e: int | None = None,
        end: str = ".weight",
    ) -> Tensor:
        """A tensor in float64."""
        value = self.maybe(name, n, e, end)
        if value is None:
            key = self.net.keys.get(name, name).format(n=n, e=e)
            raise KeyError(f"the checkpoint has no tensor {key}{end}")
        return value

    def linear(self, x: Tensor, name: str, n: int | None = None, e: int | None = None) -> Tensor:
        """The product with a weight, and its bias if there is one."""
        y = x @ self.tensor(name, n, e).T
        bias = self.maybe(name, n, e, ".bias")
        return y if bias is None else y + bias

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The RMS norm of the last dimension."""
        mean_square = x.square().mean(-1, keepdim=True)
        return x / (mean_square + self.net.eps).sqrt() * weight

    # ------------------------------------------------------------ attention

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions: pairs (i, i + half) of a head's first features (L, H, h), rotated by the position."""
        net = self.net
        size = int(net.head * net.rotary_share)
        half = size // 2
        frequency = torch.tensor([_frequency(net, i, size) for i in range(half)], dtype=torch.float64)
        position = torch.arange(len(x), dtype=torch.float64)
        angle = position[:, None, None] * frequency  # (L, 1, half)
        cos = angle.cos()
        sin = angle.sin()
        a, b, rest = x.split([half, half, net.head - size], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def project(self, x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and as many keys and values, (L, H, h) each."""
        net = self.net
        shared_by = net.heads // net.kv_heads  # heads of queries that share a head of keys
        if net.grouped:
            qkv = self.linear(x, "qkv", n).unflatten(1, (net.kv_heads, shared_by + 2, net.head))
            parts = qkv.split([shared_by, 1, 1], 2)
        elif "qkv" in net.keys:
            qkv = self.linear(x, "qkv", n).unflatten(1, (-1, net.head))
            parts = qkv.split([net.heads, net.kv_heads, net.kv_heads], 1)
        else:
            parts = tuple(self.linear(x, name, n) for name in "qkv")
        q, k, v = (part.reshape(len(x), -1, net.head) for part in parts)

        weight = self.maybe("q norm", n)
        if weight is not None:
            q = self.norm(q, weight)
            k = self.norm(k, self.tensor("k norm", n))
        q = self.rotate(q)
        k = self.rotate(k)
        return q, k.repeat_interleave(shared_by, 1), v.repeat_interleave(shared_by, 1)

    def mix(self, x: Tensor, n: int) -> Tensor:
        """Attention over the positions that are seen."""
        q, k, v = self.project(x, n)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(self.net.head)  # (H, L, L)
        attention = scores.masked_fill(~self.seen, -math.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", attention, v)  # (L, H, h)
        return self.linear(mixed.flatten(1), "out", n)

    # ------------------------------------------------------------ feed-forward layers

    def feed(self, x: Tensor, n: int) -> Tensor:
        """SwiGLU, or a mixture of them."""
        if not self.net.experts or n < self.net.dense:
            return self.swiglu(x, "", n)
        shares = self.net.scale * self.route(x, n)  # (L, E)
        total = torch.zeros_like(x)
        for e in range(self.net.experts):
            total = total + shares[:, e, None] * self.swiglu(x, "expert ", n, e)
        has_shared = self.maybe("shared gate", n) is not None
        return total + self.swiglu(x, "shared ", n) if has_shared else total

    def swiglu(self, x: Tensor, kind: str, n: int, e: int | None = None) -> Tensor:
        """One SwiGLU: `kind` is "", "expert " or "shared "."""
        gate = self.linear(x, f"{kind}gate", n, e)
        up = self.linear(x, f"{kind}up", n, e)
        return self.linear(gate * gate.sigmoid() * up, f"{kind}down", n, e)

    def route(self, x: Tensor, n: int) -> Tensor:
        """The weight of each expert for each position (L, E), 0 for those that are not chosen."""
        net = self.net
        score = self.linear(x, "router", n)
        if net.capacity:
            score = score.sigmoid()
            chosen = self.by_block(score + self.tensor("router bias", n, end=""))
        elif net.groups:
            score = score.sigmoid()
            chosen = self.by_group(score + self.tensor("router bias", n, end=""))
        else:
            score = score.softmax(-1)
            chosen = score.topk(net.chosen).indices
        share = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
        return share / share.sum(1, keepdim=True) if net.normalised else share

    def by_group(self, biased: Tensor) -> Tensor:
        """The experts of each position (L, chosen), from its best groups (DeepSeek-V3)."""
        net = self.net
        grouped = biased.unflatten(1, (net.groups, -1))  # (L, groups, experts of one)
        of_groups = grouped.topk(2).values.sum(-1)  # a group is as good as its two best experts
        best = of_groups.topk(net.groups_kept).indices
        allowed = torch.zeros(of_groups.shape, dtype=torch.bool).scatter(1, best, True)
        among_allowed = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(1)
        chosen: Tensor = among_allowed.topk(net.chosen).indices
        return chosen

    def by_block(self, biased: Tensor) -> Tensor:
        """The experts of each position (L, chosen): a block allows the best by their maximum, ties from the lowest."""
        net = self.net
        chosen = []
        for begin in range(0, len(biased), net.routing_block):
            block = biased[begin : begin + net.routing_block].tolist()
            peak = [max(position[e] for position in block) for e in range(net.experts)]
            allowed = sorted(range(net.experts), key=lambda e: (-peak[e], e))[: net.capacity]
            for position in block:
                best_first = sorted(allowed, key=lambda e: (-position[e], e))
                chosen.append(best_first[: net.chosen])
        return torch.tensor(chosen)


def _frequency(net: Net, i: int, size: int) -> float:
    """The angle per position of pair i of `size` // 2, in radians."""
    frequency = float(net.theta ** (-2 * i / size))
    scaling = net.rope_scaling
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return float(frequency / scaling["factor"])

    # Pairs that rotate often over the length of the first training keep their frequency, slow ones are divided by the
    # factor, and those between are interpolated: by the index of the pair in YaRN, by its periods in Llama 3.
    length = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "yarn":

        def pair(periods: float) -> float:
            """The index of the pair with this many periods over the length."""
            return size * math.log(length / (periods * 2 * math.pi)) / (2 * math.log(net.theta))

        low = pair(first(scaling, "beta_fast", default=32))
        high = pair(first(scaling, "beta_slow", default=1))
        if first(scaling, "truncate", default=True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, size - 1)
        if low == high:
            high += 0.001  # as in transformers: no pair is between them
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        return float(frequency * (1 - slowed) + frequency / scaling["factor"] * slowed)

    periods = length * frequency / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    kept = min(max((periods - low) / (high - low), 0.0), 1.0)
    return float(kept * frequency + (1 - kept) * frequency / scaling["factor"])


def block_causal(length: int, block: int, origin: int = 0) -> Tensor:
    """(L, L), true where a position (row) attends to another (column): in its own block, and in those before it.

    Blocks count from `origin`; the positions before it are one block.
    """
    position = torch.arange(length) - origin
    number = position.div(block, rounding_mode="floor").clamp(min=-1)
    return number[:, None] >= number


def causal_prefix(length: int, begin: int) -> Tensor:
    """Positions before `begin` see themselves and those before them; those from `begin` on see everything."""
    return block_causal(length, 1) | (torch.arange(length) >= begin)[:, None]


# ---------------------------------------------------------------- DiT


def dit(
    w: Tensors,
    ids: Sequence[int],
    heads: int,
    sigma: float = 0.0,
    seen: Tensor | None = None,
) -> Tensor:
    """Logits (L, V) of a DiT (MDLM, BD3-LM, SEDD, GIDD, Duo) at noise level `sigma`.

    `seen` (L, L): which keys (columns) a query (row) attends to; all of them if None. Tensors have the authors' names
    without `backbone.`; their shapes give the sizes. Rotary positions are products of complex numbers here.
    """

    def tensor(name: str) -> Tensor:
        return w[name].double()

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ tensor(f"{name}.weight").T
        return y + tensor(f"{name}.bias") if f"{name}.bias" in w else y

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        variance = (x**2).mean(1, keepdim=True)
        return x / (variance + 1e-5).sqrt() * tensor(f"{name}.weight")

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def modulation(name: str, parts: int) -> tuple[Tensor | float, ...]:
        """Shift, scale and gate, twice (`parts` = 6); the last layer has shift and scale alone (`parts` = 2)."""
        if condition is None:  # no noise level among the inputs: nothing is shifted, scaled or gated
            unchanged = (0.0, 0.0, 1.0)  # shift, scale and gate
            return unchanged * 2 if parts == 6 else unchanged[:2]
        return tuple(linear(condition, f"{name}.adaLN_modulation").split(width))

    table = tensor("vocab_embed.embedding")
    length = len(ids)
    width = table.shape[1]
    half = width // heads // 2  # pairs of features of a head

    condition = None
    if "sigma_map.mlp.0.weight" in w:
        frequencies = [math.exp(-math.log(10_000) * i / 128) for i in range(128)]
        angles = sigma * torch.tensor(frequencies, dtype=torch.float64)
        condition = linear(torch.cat([angles.cos(), angles.sin()]), "sigma_map.mlp.0")
        condition = silu(linear(silu(condition), "sigma_map.mlp.2"))

    if seen is None:
        seen = torch.ones(length, length, dtype=torch.bool)
    positions = torch.arange(length, dtype=torch.float64)
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[:, None] * frequency  # (L, half)
    rotation = torch.exp(1j * angle)[:, None]  # (L, 1, half)

    x = table[torch.tensor(ids)]  # (L, D)
    for n in range(sum(key.endswith("attn_qkv.weight") for key in w)):
        p = f"blocks.{n}"
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation(p, 6)
        y = norm(x, f"{p}.norm1") * (1 + scale) + shift
        qkv = linear(y, f"{p}.attn_qkv").reshape(length, 3, heads, 2 * half)
        q, k, v = qkv.unbind(1)  # (L, H, h) each
        q = torch.complex(q[..., :half], q[..., half:]) * rotation
        k = torch.complex(k[..., :half], k[..., half:]) * rotation
        products = torch.einsum("ihc,jhc->hij", q, k.conj()).real
        scores = products / math.sqrt(2 * half)  # (H, L, L)
        attention = scores.masked_fill(~seen, -math.inf).softmax(2)
        mixed = torch.einsum("hij,jhc->ihc", attention, v).reshape(length, width)  # (L, D)
        x = x + gate * linear(mixed, f"{p}.attn_out")

        y = norm(x, f"{p}.norm2") * (1 + scale_mlp) + shift_mlp
        y = linear(gelu(linear(y, f"{p}.mlp.0")), f"{p}.mlp.2")
        x = x + gate_mlp * y
    shift, scale = modulation("output_layer", 2)
    y = norm(x, "output_layer.norm_final") * (1 + scale) + shift
    return linear(y, "output_layer.linear")


# ---------------------------------------------------------------- from a config.json


def decoder_of(config: Mapping[str, Any], w: Tensors, block: int | None = None) -> Net:
    """The decoder that a config.json describes; raises Unknown for one that is not written here.

    `block`: the block of the run, within which a network may share its experts.
    """
    for keys in LAYOUTS:
        if f"{keys['table']}.weight" in w and f"{keys['last']}.weight" in w:
            break
    else:
        raise Unknown("its tensors have other names than those of the decoders written out here")
    architectures = " ".join(config.get("architectures") or ())
    if config.get("layer_types") and set(config["layer_types"]) != {"full_attention"}:
        raise Unknown("its layers are of several kinds")

    rotary = config.get("rope_parameters") or config
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled_as = first(scaling, "rope_type", "type", default="default")  # `type`: the older spelling
    if scaled_as not in ("default", "linear", "llama3", "yarn"):
        raise Unknown(f"its rotary positions are scaled as in {scaled_as}")
    if scaled_as == "yarn" and _scales_attention(scaling):
        raise Unknown("its YaRN scales the scores of attention, too")
    share = first(rotary, "partial_rotary_factor")
    if share is None:  # some configs with `rope_parameters` have it outside
        share = first(config, "partial_rotary_factor", default=1.0)

    usual_eps = 1e-5 if keys in (LLADA, SMDM) else 1e-6
    normalises = first(config, "norm_topk_prob", default=False)
    if "LLaDAMoE" in architectures:  # its code ignores the entry
        normalises = False
    heads = first(config, "num_attention_heads", "n_heads", "n_head")
    width = w[f"{keys['table']}.weight"].shape[1]
    return Net(
        head=first(config, "head_dim", default=width // heads),
        heads=heads,
        kv_heads=first(config, "num_key_value_heads", "n_kv_heads", "n_query_groups", default=heads),
        layers=first(config, "num_hidden_layers", "n_layers", "n_layer"),
        keys=keys,
        grouped=keys is SMDM,
        theta=first(rotary, "rope_theta", default=10_000.0),
        eps=first(config, "rms_norm_eps", "norm_eps", default=usual_eps),
        rotary_share=share,
        rope_scaling=None if scaled_as == "default" else {**scaling, "rope_type": scaled_as},
        capacity=first(config, "expert_capacity", default=0),
        routing_block=block or 0,
        experts=first(config, "num_experts", "n_routed_experts", default=0),
        chosen=first(config, "num_experts_per_tok", default=0),
        normalised=normalises,
        groups=first(config, "n_group", default=0),
        groups_kept=first(config, "topk_group", default=0),
        scale=first(config, "routed_scaling_factor", default=1.0),
        dense=first(config, "first_k_dense_replace", default=0),
    )


def _scales_attention(yarn: Mapping[str, Any]) -> bool:
    """True unless YaRN's factor of attention is 1, as where its two mscales cancel."""
    if first(yarn, "attention_factor") is not None:
        return bool(yarn["attention_factor"] != 1)
    if yarn.get("mscale") and yarn.get("mscale_all_dim"):
        return bool(yarn["mscale"] != yarn["mscale_all_dim"])
    return bool(yarn["factor"] > 1)


LAYOUTS = (NATIVE, LLADA, LLADA2, SMDM, NEMOTRON)
