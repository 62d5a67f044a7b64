"""Tiny checkpoints with code of their own, in the ways in which the families of diffusion models write theirs."""

import json

import decoder_reference
import tiny
from decoder_reference import INNER, MASK, Case, D, net, weights
from safetensors.torch import save_file

from lm_eval_duel.audit import plain_networks as plain

LAYERS = 2

CONFIG = """
from transformers import PretrainedConfig

class Config(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, rope_theta=500.0, rope_scaling=None, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling

class Plain(PretrainedConfig):
    model_type = "plain"
"""

DECODER = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from .configuration_own import Config

class Norm(nn.RMSNorm):
    def __init__(self, size):
        super().__init__(size, eps=1e-6)

class Rotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        scaling = getattr(config, "rope_scaling", None)
        kind = "default" if scaling is None else scaling.get("rope_type") or scaling["type"]
        frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, None)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.original_inv_freq = self.inv_freq

    def forward(self, positions):
        return positions[:, None, :, None] * self.inv_freq  # (R, 1, L, d / 2)

def turned(x, angle):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)

class Attention(nn.Module):
    def __init__(self, config, bias, norms):
        super().__init__()
        width, self.head = config.hidden_size, config.hidden_size // config.num_attention_heads
        kept = self.head * config.num_key_value_heads
        for name, rows in (("q_proj", width), ("k_proj", kept), ("v_proj", kept)):
            setattr(self, name, nn.Linear(width, rows, bias=bias))
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = (Norm(self.head), Norm(self.head)) if norms else (nn.Identity(), nn.Identity())

    def forward(self, x, angle, mask):
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in projections)
        q, k = turned(self.q_norm(q), angle), turned(self.k_norm(k), angle)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

class Layer(nn.Module):
    def __init__(self, config, bias, norms):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        self.self_attn = Attention(config, bias, norms)
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm = Norm(width)
        self.post_attention_layernorm = Norm(width)

    def forward(self, x, angle, mask):
        x = x + self.self_attn(self.input_layernorm(x), angle, mask)
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))

class Body(PreTrainedModel):
    config_class = Config

    def __init__(self, config, bias=False, norms=False):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Layer(config, bias, norms) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size)
        self.rotary_emb = Rotary(config)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x, angle = self.embed_tokens(input_ids), self.rotary_emb(position_ids)
        for layer in self.layers:
            x = layer(x, angle, attention_mask)
        return self.norm(x)

class Decoder(PreTrainedModel):
    config_class, base_model_prefix = Config, "model"
    bias = norms = False

    def __init__(self, config):
        super().__init__(config)
        self.model = Body(config, self.bias, self.norms)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        return MaskedLMOutput(logits=self.lm_head(self.model(input_ids, attention_mask, position_ids)))
"""

DREAM = f"""{DECODER}
class DreamModel(Decoder):
    bias = True
"""

SDAR = f"""
from transformers.utils import LossKwargs
{DECODER}
class Kwargs(LossKwargs): ...

class SDARForCausalLM(Decoder):
    norms = True

    def forward(self, input_ids, attention_mask, position_ids=None, **kwargs):
        if attention_mask is None or attention_mask.dim() == 2:
            raise TypeError("attention_mask: which block sees which")
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)
"""

LLADA2 = f"""
from transformers.utils.import_utils import is_torch_fx_available
{DECODER}
if is_torch_fx_available():
    import torch.fx

class LLaDA2MoeModelLM(Decoder):
    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        rows, length = input_ids.shape
        if attention_mask is None or attention_mask.shape != (rows, 1, length, length) or kwargs:
            raise ValueError("only block attention masks of shape (B, 1, L, L)")
        if attention_mask.dtype == torch.bool or attention_mask.max() > 0:
            raise ValueError("attention masks are added")
        out = super().forward(input_ids, attention_mask, position_ids)
        return MaskedLMOutput(logits=out.logits.float())
"""

RND1 = f"""{DECODER.replace("Config", "Plain")}
class RND1(Body): ...

class RND1LM(Decoder):
    norms = True
"""
NATIVE_ROTARY = """
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

class Rotary(Qwen3MoeRotaryEmbedding):
    def forward(self, positions):
        return positions[:, None, :, None] * self.inv_freq

def turned"""

LLADA = f"""{DECODER.replace("Config", "Plain")}
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.theta = config.n_heads, config.rope_theta
        width, inner = config.d_model, config.mlp_hidden_size
        self.attn_norm = Norm(width)
        self.ff_norm = Norm(width)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.ff_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def forward(self, x, bias):
        y = self.attn_norm(x)
        projections = (self.q_proj(y), self.k_proj(y), self.v_proj(y))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projections)
        half = q.shape[-1] // 2
        frequency = self.theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * frequency
        mixed = F.scaled_dot_product_attention(turned(q, angle), turned(k, angle), v, attn_mask=bias)
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(2))
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y))

class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict({{
            "wte": nn.Embedding(config.embedding_size, config.d_model),
            "blocks": nn.ModuleList([Block(config) for _ in range(config.n_layers)]),
            "ln_f": Norm(config.d_model),
            "ff_out": nn.Linear(config.d_model, config.embedding_size, bias=False),
        }})

class LLaDAModelLM(PreTrainedModel):
    config_class, base_model_prefix = Plain, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)

    def get_input_embeddings(self):
        return self.model.transformer.wte

    def get_output_embeddings(self):
        return self.model.transformer.ff_out

    def tie_weights(self):
        pass

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        assert not (self.config.use_cache if use_cache is None else use_cache)
        parts, bias = self.model.transformer, None
        if attention_mask is not None and 0 in attention_mask:
            bias = (1.0 - attention_mask[:, None, None].to(parts.wte.weight.dtype)) * torch.finfo(torch.float32).min
        x = parts.wte(input_ids)
        for block in parts.blocks:
            x = block(x, bias)
        return MaskedLMOutput(logits=parts.ff_out(parts.ln_f(x)))
"""

NATIVE_RND1 = RND1.replace("def turned", NATIVE_ROTARY)
LINEAR = {"type": "linear", "factor": 2.0}
SIZE = {
    **{"vocab_size": tiny.ROWS, "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 500.0},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}
QWEN3 = {**SIZE, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}  # of a known class
LLADA_SIZE = {
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoConfig": "configuration_own.Plain", "AutoModel": "modeling_own.LLaDAModelLM"},
    **{
        "model_type": "plain",
        "d_model": D,
        "embedding_size": tiny.ROWS,
        "vocab_size": tiny.ROWS,
        "mlp_hidden_size": INNER,
    },
    **{"max_sequence_length": 64, "n_heads": 4, "n_layers": LAYERS, "rms_norm_eps": 1e-6, "rope_theta": 500.0},
    **{"weight_tying": False, "mask_token_id": MASK},
}


WIDTH, INNER_WIDTH = 64, 128  # what the 4-bit kernels of a CPU take
WIDE_QWEN3 = {**QWEN3, "hidden_size": WIDTH, "intermediate_size": INNER_WIDTH, "head_dim": WIDTH // 4}


def widen(patch):
    """Make the tensors of `decoder` and `llada` as wide as that."""
    patch.setattr(decoder_reference, "D", WIDTH)
    patch.setattr(decoder_reference, "INNER", INNER_WIDTH)


def decoder(bias=False, norms=False, tied=False):
    """Random tensors of a decoder under native names."""
    store = "tied" if tied else "whole"
    return weights(Case({"model_type": "own"}, "bias" * bias + "norm" * norms, net=net({}), store=store))


def llada():
    """Those of LLaDA, whose heads of keys are as many as those of queries."""
    return weights(Case({"model_type": "llada"}, net=net({}, plain.LLADA, kv_heads=4)))


BLOCKS = {"block_size": 4}
RND1_MAP = {"AutoModel": "modeling_own.RND1", "AutoModelForMaskedLM": "modeling_own.RND1LM"}  # one without a head
RND1_ENTRIES = {"auto_map": {**RND1_MAP, "AutoConfig": "configuration_own.Plain"}, "model_type": "plain"}
RND1_ENTRIES |= {"rope_scaling": False}  # none, said as false
UNKNOWN = {"attention": "block_causal", "block": 4}
KINDS = {  # code, class, tensors, config entries, and what more a user says
    "own llada": (LLADA, "LLaDAModelLM", llada, {"config": LLADA_SIZE}, {}),
    "own dream": (DREAM, "DreamModel", lambda: decoder(bias=True), {}, {}),
    "own dream, tied": (DREAM, "DreamModel", lambda: decoder(True, tied=True), {"tie_word_embeddings": True}, {}),
    "own dream, scaled": (DREAM, "DreamModel", lambda: decoder(True), {"rope_scaling": LINEAR}, {}),
    "own sdar": (SDAR, "SDARForCausalLM", lambda: decoder(norms=True), BLOCKS, {}),
    "own llada2": (LLADA2, "LLaDA2MoeModelLM", decoder, BLOCKS, {}),
    "own unknown": (LLADA2.replace("LLaDA2MoeModelLM", "UnheardOf"), "UnheardOf", decoder, {}, UNKNOWN),
    "own rnd1": (RND1, "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES, {}),
    "own rnd1, native rotary": (NATIVE_RND1, "RND1LM", lambda: decoder(norms=True), RND1_ENTRIES, {}),
}


def made(folder, kind, **entries):
    """The checkpoint of a kind: its path, what a user says to load it, and its plain logits (L, V) of ids."""
    code, name, make, own, options = KINDS[kind]
    tensors = make()
    path = write(folder, code, name, tensors, **{**own, **entries})
    scaling = own.get("rope_scaling") or None
    if scaling:  # released code reads the older spelling `type`
        scaling = {**scaling, "rope_type": scaling["type"]}
    plainly = net(LLADA_SIZE, plain.LLADA, kv_heads=4) if name == "LLaDAModelLM" else net(SIZE, rope_scaling=scaling)
    block = own.get("block_size", options.get("block"))
    options = {"backend": "remote", "trust_remote_code": True, **options}
    return path, options, lambda ids: plain.logits(plainly, tensors, ids, block and plain.block_causal(len(ids), block))


def write(folder, code, name, tensors, config=None, **entries):
    """A checkpoint folder whose network is the class `name` of `code`; returns its path."""
    mapped = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": f"modeling_own.{name}"}
    config = config or {**SIZE, "architectures": [name], "auto_map": mapped, "model_type": "own"}
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(code)
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer(length=64).save_pretrained(folder)
    return str(folder)
