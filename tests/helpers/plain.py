"""The decoders in float64, from their description alone: one row, head by head, expert by expert.

    x = table[ids]
    x = x + mix(norm(x))       attention over the positions that `seen` allows; q and k turned by their position
    x = x + feed(norm(x))      SwiGLU, or a mixture of them
    logits = head @ norm(x)

Tensors go by the names in the checkpoint's own files: `NATIVE`, `LLADA`, `LLADA2`, `SMDM` and `NEMOTRON` say which is
which. `GPT2` is a network with learned positions, LayerNorm and biases everywhere.
"""

import dataclasses
import math

import torch

_LAYER = "model.layers.{n}."
NATIVE = {
    "table": "model.embed_tokens.weight",
    "last": "model.norm.weight",
    "head": "lm_head.weight",
    "before mix": _LAYER + "input_layernorm.weight",
    "before feed": _LAYER + "post_attention_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "q bias": _LAYER + "self_attn.q_proj.bias",
    "k bias": _LAYER + "self_attn.k_proj.bias",
    "v bias": _LAYER + "self_attn.v_proj.bias",
    "q norm": _LAYER + "self_attn.q_norm.weight",
    "k norm": _LAYER + "self_attn.k_norm.weight",
    "out": _LAYER + "self_attn.o_proj.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "expert gate": _LAYER + "mlp.experts.{e}.gate_proj.weight",
    "expert up": _LAYER + "mlp.experts.{e}.up_proj.weight",
    "expert down": _LAYER + "mlp.experts.{e}.down_proj.weight",
}
_BLOCK = "model.transformer.blocks.{n}."
LLADA = {
    "table": "model.transformer.wte.weight",
    "last": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "before mix": _BLOCK + "attn_norm.weight",
    "before feed": _BLOCK + "ff_norm.weight",
    "q": _BLOCK + "q_proj.weight",
    "k": _BLOCK + "k_proj.weight",
    "v": _BLOCK + "v_proj.weight",
    "out": _BLOCK + "attn_out.weight",
    "gate": _BLOCK + "ff_proj.weight",
    "up": _BLOCK + "up_proj.weight",
    "down": _BLOCK + "ff_out.weight",
}
LLADA2 = {
    "table": "model.word_embeddings.weight",
    "last": "model.norm.weight",
    "head": "lm_head.weight",
    "before mix": _LAYER + "input_layernorm.weight",
    "before feed": _LAYER + "post_attention_layernorm.weight",
    "qkv": _LAYER + "attention.query_key_value.weight",
    "q norm": _LAYER + "attention.query_layernorm.weight",
    "k norm": _LAYER + "attention.key_layernorm.weight",
    "out": _LAYER + "attention.dense.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "router": _LAYER + "mlp.gate.weight",
    "router bias": _LAYER + "mlp.gate.expert_bias",
    "expert gate": _LAYER + "mlp.experts.{e}.gate_proj.weight",
    "expert up": _LAYER + "mlp.experts.{e}.up_proj.weight",
    "expert down": _LAYER + "mlp.experts.{e}.down_proj.weight",
    "shared gate": _LAYER + "mlp.shared_experts.gate_proj.weight",
    "shared up": _LAYER + "mlp.shared_experts.up_proj.weight",
    "shared down": _LAYER + "mlp.shared_experts.down_proj.weight",
}
_H = "transformer.h.{n}."
SMDM = {
    "table": "transformer.wte.weight",
    "last": "transformer.ln_f.weight",
    "head": "lm_head.weight",
    "before mix": _H + "norm_1.weight",
    "before feed": _H + "norm_2.weight",
    "qkv": _H + "attn.attn.weight",
    "out": _H + "attn.proj.weight",
    "gate": _H + "mlp.swiglu.w1.weight",
    "up": _H + "mlp.swiglu.w2.weight",
    "down": _H + "mlp.swiglu.w3.weight",
}
NEMOTRON = {
    name: "diffusion_head.weight" if name == "head" else key.replace("model.", "encoder.", 1)
    for name, key in NATIVE.items()
}


@dataclasses.dataclass(frozen=True)
class GPT2:
    """A GPT-2 under the names of DiffuGPT's files."""

    heads: int = 4
    layers: int = 2
    eps: float = 1e-5
    inner: int = 64
    positions: int = 64

    def shapes(self, rows, width):
        """The tensors of a file, by name."""
        shapes = {"embed_tokens.weight": (rows, width), "denoise_model.wpe.weight": (self.positions, width)}
        parts = {
            "ln_1": (width,),
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "ln_2": (width,),
            "mlp.c_fc": (width, self.inner),
            "mlp.c_proj": (self.inner, width),
        }
        named = {f"denoise_model.h.{n}.{name}": shape for n in range(self.layers) for name, shape in parts.items()}
        for name, shape in (named | {"denoise_model.ln_f": (width,)}).items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
        return shapes

    def logits(self, w, ids, seen):
        """Logits (L, V) of ids; position i attends to position j where `seen[i][j]`."""
        table, sees = w["embed_tokens.weight"].double(), torch.as_tensor(seen)

        def affine(x, name):
            return x @ w[f"denoise_model.{name}.weight"].double() + w[f"denoise_model.{name}.bias"].double()

        def norm(x, name):
            x = x - x.mean(-1, keepdim=True)
            x = x / ((x * x).mean(-1, keepdim=True) + self.eps).sqrt()
            return x * w[f"denoise_model.{name}.weight"].double() + w[f"denoise_model.{name}.bias"].double()

        x = torch.stack([table[t] + w["denoise_model.wpe.weight"][p].double() for p, t in enumerate(ids)])
        width = x.shape[1] // self.heads
        for n in range(self.layers):
            q, k, v = affine(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn").chunk(3, -1)
            mixed = []
            for h in range(self.heads):
                own = slice(h * width, (h + 1) * width)
                match = (q[:, own] @ k[:, own].T / math.sqrt(width)).masked_fill(~sees, -math.inf)
                mixed.append(match.softmax(-1) @ v[:, own])
            x = x + affine(torch.cat(mixed, -1), f"h.{n}.attn.c_proj")
            y = affine(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + affine(y, f"h.{n}.mlp.c_proj")
        return norm(x, "ln_f") @ table.T


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
    stretch: dict | None = None  # of the rotary frequencies, as in Llama 3 or YaRN
    experts: int = 0
    chosen: int = 0
    normalised: bool = True  # weights of the chosen experts sum to one
    groups: int = 0  # 0: softmax router; else sigmoid scores, and experts in this many groups
    groups_kept: int = 0
    scale: float = 1.0  # of the experts' sum
    dense: int = 0  # first layers without experts


def logits(net, w, ids, seen):
    """Logits (L, V) of ids; position i attends to position j where `seen[i][j]`."""
    if isinstance(net, GPT2):
        return net.logits(w, ids, seen)
    sees = torch.as_tensor(seen)  # (L, L)

    def tensor(name, n=None, e=None):
        key = net.keys.get(name, "nowhere").format(n=n, e=e)
        return w[key].double() if key in w else None

    def norm(x, weight):
        return x / (x * x).mean(-1, keepdim=True).add(net.eps).sqrt() * weight

    def swiglu(x, gate, up, down):
        g = gate @ x
        return down @ (g / (1 + torch.exp(-g)) * (up @ x))

    def turn(x):
        """Pairs (i, i + half) of a head's first features, each turned by the position's position; (L, H)."""
        size = int(net.head * net.turned)
        half, out = size // 2, x.clone()
        for i in range(half):
            angle = torch.arange(len(x), dtype=torch.float64) * _frequency(net, i, size)
            out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
            out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
        return out

    def project(x, name, n):
        """Queries, keys or values of every head, (L, H) each."""
        if net.grouped:
            of = net.heads // net.kept  # queries of a group
            groups = (x @ tensor("qkv", n).T).unflatten(1, (net.kept, of + 2, net.head))  # (L, groups, of + 2, H)
            own = {"q": range(of), "k": [of], "v": [of + 1]}[name]
            return [groups[:, g, i] for g in range(net.kept) for i in own]
        if (fused := tensor("qkv", n)) is not None:
            rows = {"q": net.heads * net.head, "k": net.kept * net.head, "v": net.kept * net.head}
            begin = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}[name]
            y = x @ fused[begin : begin + rows[name]].T
        else:
            y = x @ tensor(name, n).T
        if (bias := tensor(f"{name} bias", n)) is not None:
            y = y + bias
        found = [y[:, at : at + net.head] for at in range(0, y.shape[1], net.head)]
        if (weight := tensor(f"{name} norm", n)) is not None:
            found = [norm(part, weight) for part in found]
        return found

    def mix(x, n):
        q = [turn(part) for part in project(x, "q", n)]
        k = [turn(part) for part in project(x, "k", n)]
        v = project(x, "v", n)
        parts = []
        for h in range(net.heads):
            of = h // (net.heads // net.kept)  # its keys and values
            match = (q[h] @ k[of].T / math.sqrt(net.head)).masked_fill(~sees, -math.inf)  # (L, L)
            parts.append(match.softmax(-1) @ v[of])
        return torch.cat(parts, -1) @ tensor("out", n).T

    def route(x, n):
        """The experts of one token and their weights."""
        score = tensor("router", n) @ x
        if not net.groups:
            score = score.softmax(0)
            best = sorted(range(net.experts), key=lambda e: -score[e])[: net.chosen]
        else:
            score = 1 / (1 + torch.exp(-score))
            biased = (score + tensor("router bias", n)).tolist()
            size = net.experts // net.groups
            groups = [list(range(g * size, (g + 1) * size)) for g in range(net.groups)]
            groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
            allowed = [e for group in groups[: net.groups_kept] for e in group]
            best = sorted(allowed, key=lambda e: -biased[e])[: net.chosen]
        total = sum(float(score[e]) for e in best) if net.normalised else 1.0
        return [(e, float(score[e]) / total * net.scale) for e in best]

    def feed(x, n):
        """One token's (D,)."""
        if not net.experts or n < net.dense:
            return swiglu(x, tensor("gate", n), tensor("up", n), tensor("down", n))
        total = torch.zeros_like(x)
        for e, share in route(x, n):
            total += share * swiglu(x, *(tensor(f"expert {name}", n, e) for name in ("gate", "up", "down")))
        if tensor("shared gate", n) is not None:
            total += swiglu(x, *(tensor(f"shared {name}", n) for name in ("gate", "up", "down")))
        return total

    table = tensor("table")
    x = torch.stack([table[token] for token in ids])  # (L, D)
    for n in range(net.layers):
        x = x + mix(norm(x, tensor("before mix", n)), n)
        x = x + torch.stack([feed(y, n) for y in norm(x, tensor("before feed", n))])
    head = table if tensor("head") is None else tensor("head")
    out = norm(x, tensor("last")) @ head.T
    return torch.nn.functional.pad(out, (0, len(table) - len(head)))  # rows that the head does not have: [MASK]


def _frequency(net, i, size):
    """The turn per position of pair i of `size` // 2."""
    frequency = net.theta ** (-2 * i / size)
    if net.stretch is None:
        return frequency
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


def everywhere(length):
    """Every position sees every position."""
    return [[True] * length for _ in range(length)]


def causal(length):
    """A position sees itself and those before it."""
    return [[j <= i for j in range(length)] for i in range(length)]


def block_causal(length, block, origin=0):
    """A position sees its own block and those before it; what is before `origin` is one block."""

    def number(i):
        return max((i - origin) // block, -1)

    return [[number(j) <= number(i) for j in range(length)] for i in range(length)]


def causal_prefix(length, begin):
    """Positions before `begin` see themselves and those before them; those of the block from `begin` on see
    everything.
    """
    return [[j <= i or i >= begin for j in range(length)] for i in range(length)]
