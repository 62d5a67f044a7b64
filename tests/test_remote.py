"""Checkpoints with code of their own: today's transformers runs them, and they agree with what runs without them."""

import json

import plain
import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file
from textbook import score
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel import denoisers, rules
from lm_eval_duel.denoisers import remote
from lm_eval_duel.duel import Duel
from lm_eval_duel.errors import DuelError
from lm_eval_duel.windows import Window

ROWS, WIDTH, INNER, LAYERS, MASK = tiny.ROWS, 16, 24, 2, 4
WINDOWS = [
    Window((6, 20), (7, 9, 30, 12, 8, 15, 5, 21, 11)),
    Window((9, 9, 14), (10, 9), (3,)),
    Window((2,), (8, 8, 20, 31, 6)),
    Window((2, 14, 5, 9, 9, 25), (33, 6, 7)),
]

CONFIG = """
from transformers import PretrainedConfig

class Config(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, rope_theta=500.0, rope_scaling=None, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.rope_theta, self.rope_scaling = num_key_value_heads, rope_theta, rope_scaling

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

class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

class Rotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        scaling = getattr(config, "rope_scaling", None)
        kind = "default" if scaling is None else scaling["rope_type"]
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
        self.heads, self.kept = config.num_attention_heads, config.num_key_value_heads
        width, self.head = config.hidden_size, config.hidden_size // self.heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, self.kept * self.head, bias=bias)
        self.v_proj = nn.Linear(width, self.kept * self.head, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = (Norm(self.head), Norm(self.head)) if norms else (nn.Identity(), nn.Identity())

    def forward(self, x, angle, mask):
        def split(y):
            return y.unflatten(-1, (-1, self.head)).transpose(1, 2)
        q = turned(self.q_norm(split(self.q_proj(x))), angle)
        k = turned(self.k_norm(split(self.k_proj(x))), angle).repeat_interleave(self.heads // self.kept, 1)
        v = split(self.v_proj(x)).repeat_interleave(self.heads // self.kept, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

class Feed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Layer(nn.Module):
    def __init__(self, config, bias, norms):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, bias, norms), Feed(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(config.hidden_size), Norm(config.hidden_size)

    def forward(self, x, angle, mask):
        x = x + self.self_attn(self.input_layernorm(x), angle, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

class Body(PreTrainedModel):
    config_class = Config

    def __init__(self, config, bias=False, norms=False):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Layer(config, bias, norms) for _ in range(config.num_hidden_layers)])
        self.norm, self.rotary_emb = Norm(config.hidden_size), Rotary(config)

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

LLADA = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from .configuration_own import Plain

class Norm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, width, inner = config, config.d_model, config.mlp_hidden_size
        self.attn_norm, self.ff_norm = Norm(config), Norm(config)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.ff_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def turned(self, x):
        half = x.shape[-1] // 2
        frequency = self.config.rope_theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)

    def forward(self, x, bias):
        y = self.attn_norm(x)
        q, k, v = (
            project(y).unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, attn_mask=bias)
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(2))
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y))

class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.embedding_size, config.d_model),
            "blocks": nn.ModuleList([Block(config) for _ in range(config.n_layers)]),
            "ln_f": Norm(config),
            "ff_out": nn.Linear(config.d_model, config.embedding_size, bias=False),
        })

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
        return CausalLMOutputWithPast(logits=parts.ff_out(parts.ln_f(x)))
"""

SIZE = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLADA_SIZE = {
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoConfig": "configuration_own.Plain", "AutoModel": "modeling_own.LLaDAModelLM"},
    "model_type": "plain",
    "d_model": WIDTH,
    "embedding_size": ROWS,
    "vocab_size": ROWS,
    "max_sequence_length": 64,
    "mlp_hidden_size": INNER,
    "n_heads": 4,
    "n_layers": LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "weight_tying": False,
    "mask_token_id": MASK,
}
NET = plain.Net(head=4, heads=4, kept=2, layers=LAYERS, theta=500.0)
LLADA_NET = plain.Net(head=4, heads=4, kept=4, layers=LAYERS, theta=500.0, eps=1e-5, keys=plain.LLADA)


def random(shapes):
    generator = torch.Generator().manual_seed(3)
    draws = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    return {name: 1 + value / 4 if "norm" in name or "ln_f" in name else value for name, value in draws.items()}


def decoder(bias=False, norms=False, tied=False):
    shapes = {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (ROWS, WIDTH)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        for name, rows in {"q_proj": WIDTH, "k_proj": WIDTH // 2, "v_proj": WIDTH // 2, "o_proj": WIDTH}.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, WIDTH)
            shapes |= {f"{layer}self_attn.{name}.bias": (rows,)} if bias and name != "o_proj" else {}
        for name in ("q_norm", "k_norm") if norms else ():
            shapes[f"{layer}self_attn.{name}.weight"] = (WIDTH // 4,)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (INNER, WIDTH)
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (WIDTH,)
    return random(shapes)


def llada():
    inner = "model.transformer."
    shapes = {f"{inner}wte.weight": (ROWS, WIDTH), f"{inner}ff_out.weight": (ROWS, WIDTH), f"{inner}ln_f.weight": (WIDTH,)}
    for n in range(LAYERS):
        block = f"{inner}blocks.{n}."
        shapes |= {f"{block}{name}.weight": (WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        shapes |= {f"{block}{name}.weight": (WIDTH,) for name in ("attn_norm", "ff_norm")}
        shapes |= {f"{block}ff_proj.weight": (INNER, WIDTH), f"{block}up_proj.weight": (INNER, WIDTH)}
        shapes[f"{block}ff_out.weight"] = (WIDTH, INNER)
    return random(shapes)


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


def load(path, own=True, **options):
    chosen = {"backend": "remote", "trust_remote_code": True} if own else {}
    return denoisers.load(path, device="cpu", **{**chosen, **options})


def logits(denoiser, ids):
    features = denoiser.features(ids, None)
    return denoiser.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])


def ids(rows=3, length=13):
    return torch.randint(5, len(tiny.WORDS), (rows, length), generator=torch.Generator().manual_seed(5))


def agrees(denoiser, logits_of, block, **how):
    """Every rule's numbers are the textbook's over `logits_of`."""
    for rule in ("greedy", "threshold:mu=0.3", "klass:mu=0.2:nu=0.5", "right_to_left:k=2"):
        for window, scored in zip(WINDOWS, Duel(denoiser, rule, block).log_prob(WINDOWS), strict=True):
            _, steps, nats, greedy, nfe = score(
                logits_of, MASK, denoiser.excluded, rules.parse(rule), block, window, **how
            )
            assert scored.close_picks == 0, "choose another seed: the order is at the mercy of float noise here"
            assert (scored.steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
            assert scored.nats == pytest.approx(nats, abs=1e-4)


def block_causal(net, tensors, block):
    return lambda row: plain.logits(net, tensors, row.tolist(), plain.block_causal(len(row), block))


# ---------------------------------------------------------------- what own code computes


def test_llada(tmp_path):
    tensors = llada()
    path = write(tmp_path, LLADA, "LLaDAModelLM", tensors, LLADA_SIZE)
    own, native = load(path), load(path, own=False)
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-5
    for name in ("attention", "shift", "mask_id", "max_length", "published_block", "bos", "relative_positions"):
        assert getattr(own, name) == getattr(native, name)
    assert own.honours_padding and own.splits_head and own.relative_positions
    assert type(own.model).__name__ == own.describe()["denoiser"] == "LLaDAModelLM"
    assert "as LlamaForCausalLM" in native.describe()["denoiser"]
    assert own.describe()["weights"] != native.describe()["weights"], "the code is part of the law"
    both = [Duel(denoiser, "greedy", 4).log_prob(WINDOWS) for denoiser in (own, native)]
    assert [s.steps for s in both[0]] == [s.steps for s in both[1]]
    agrees(own, lambda row: plain.logits(LLADA_NET, tensors, row.tolist(), plain.everywhere(len(row))), 4)


def test_dream(tmp_path):
    tensors = decoder(bias=True)
    path = write(tmp_path, DREAM, "DreamModel", tensors)
    own, native = load(path), load(path, own=False)
    frequencies = own.model.model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 500.0 ** -(torch.arange(0, 4, 2) / 4), rtol=1e-6)
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-5
    for name in ("attention", "shift", "mask_id", "max_length", "published_block", "bos", "relative_positions"):
        assert getattr(own, name) == getattr(native, name)
    assert own.shift == 1 and not own.honours_padding

    def shifted(row):
        found = plain.logits(NET, tensors, row.tolist(), plain.everywhere(len(row)))
        return torch.cat([found[:1], found[:-1]])

    agrees(own, shifted, 4)
    with pytest.raises(DuelError, match="Window 0 needs a given first token: this network predicts a token from the"):
        Duel(own, "greedy", 4).log_prob([Window((), (8, 9))])
    assert load(path, shift_logits=False).shift == 0


def test_sdar(tmp_path):
    tensors = decoder(norms=True)
    path = write(tmp_path, SDAR, "SDARForCausalLM", tensors, block_size=4)
    own, native = load(path), load(path, own=False)
    assert (own.attention, own.block) == (native.attention, native.block) == ("block_causal", 4)
    for rule in ("greedy", "threshold:mu=0.3"):
        both = [Duel(denoiser, rule).log_prob(WINDOWS) for denoiser in (own, native)]
        for one, other in zip(*both, strict=True):
            assert one.steps == other.steps and one.nats == pytest.approx(other.nats, abs=1e-5)
    agrees(own, block_causal(NET, tensors, 4), 4, grid="row", sees="fill")
    cut = load(path, last_block="cut")
    agrees(cut, block_causal(NET, tensors, 4), 4, grid="row", sees="cut")
    assert cut.describe() != own.describe()


@pytest.mark.parametrize("name", ["LLaDA2MoeModelLM", "UnheardOf"])
def test_a_network_that_wants_a_mask_of_every_row(tmp_path, name):
    tensors = decoder()
    path = write(tmp_path, LLADA2.replace("LLaDA2MoeModelLM", name), name, tensors)
    unheard = {} if name.startswith("LLaDA2") else {"attention": "block_causal"}
    if unheard:
        with pytest.raises(DuelError, match=r"is block-causal and its config names no block; pass block=<the trained"):
            load(path, **unheard)
        with pytest.raises(DuelError, match=r"Cannot read checkpoint .*: ValueError: only block attention masks"):
            load(path)
    denoiser = load(path, block=4, **unheard)
    assert (denoiser.attention, denoiser.block, denoiser.shift) == ("block_causal", 4, 0)
    agrees(denoiser, block_causal(NET, tensors, 4), 4, grid="row", sees="fill")
    duel = Duel(denoiser, "greedy")
    contexts = [window.context for window in WINDOWS]
    for context, drawn in zip(contexts, duel.sample(contexts, 7), strict=True):
        scored = duel.log_prob([Window(context, drawn.tokens)])[0]
        assert scored.steps == drawn.steps and scored.nats == pytest.approx(drawn.nats, abs=1e-5)


def test_rows_of_one_call_may_know_different_numbers_of_clean_blocks(tmp_path):
    denoiser = load(write(tmp_path, LLADA2, "LLaDA2MoeModelLM", decoder()), block=4, max_length=16)
    windows = [Window(tuple(range(5, 5 + n)), tuple(range(30, 14 + n, -1))) for n in (1, 3, 4, 6, 9)]
    alone = [Duel(denoiser, "greedy").log_prob([window])[0] for window in windows]
    for batch_size in (1, 2, 3, None):
        for one, scored in zip(alone, Duel(denoiser, "greedy", batch_size=batch_size).log_prob(windows), strict=True):
            assert scored.steps == one.steps and scored.nats == pytest.approx(one.nats, abs=1e-5)
    duel, contexts = Duel(denoiser, "threshold:mu=0.4"), [(5,), (6,), (7,), (8,)]  # not all take as long
    for key, drawn in enumerate(duel.sample(contexts, 15)):
        one = duel.sample([contexts[key]], 15, keys=[key])[0]
        assert (one.tokens, one.steps) == (drawn.tokens, drawn.steps)
        assert one.nats == pytest.approx(drawn.nats, abs=1e-5)


@pytest.mark.parametrize("code", [RND1, RND1.replace("def turned", NATIVE_ROTARY)], ids=["own", "native"])
def test_rnd1(tmp_path, code):
    """No rotary scaling, said as false; a class without a head goes before the one with it."""
    tensors, files = decoder(norms=True), ("configuration_own.Plain", "modeling_own.RND1", "modeling_own.RND1LM")
    mapped = dict(zip(("AutoConfig", "AutoModel", "AutoModelForMaskedLM"), files, strict=True))
    path = write(tmp_path, code, "RND1LM", tensors, rope_scaling=False, auto_map=mapped, model_type="plain")
    denoiser = load(path)
    assert type(denoiser.model).__name__ == "RND1LM" and not denoiser.honours_padding
    agrees(denoiser, lambda row: plain.logits(NET, tensors, row.tolist(), plain.everywhere(len(row))), 4)


def test_a_tied_head(tmp_path):
    tensors = decoder(bias=True, tied=True)
    path = write(tmp_path, DREAM, "DreamModel", tensors, tie_word_embeddings=True)
    own, native = load(path), load(path, own=False)
    assert own.model.lm_head.weight is own.model.model.embed_tokens.weight
    assert (logits(own, ids()) - logits(native, ids())).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes(tmp_path, dtype):
    path = write(tmp_path, DREAM, "DreamModel", decoder(bias=True))
    denoiser, exact = load(path, dtype=dtype), load(path)
    assert denoiser.dtype == getattr(torch, dtype) and torch.get_default_dtype() == torch.float32
    rough = 0.1 if dtype == "bfloat16" else 1e-5
    right = logits(exact, ids())
    assert (logits(denoiser, ids()).double() - right).abs().max() < rough * right.abs().max()


# ---------------------------------------------------------------- trust, and what is left behind


@pytest.mark.parametrize("name", ["LLaDAModelLM", "UnheardOf"])
def test_code_runs_only_where_it_is_trusted(tmp_path, name):
    ran = tmp_path / "ran"
    write_it = f"\nopen({str(ran)!r}, 'w').close()\n"
    mapped = {"AutoConfig": "configuration_own.Plain", "AutoModel": f"modeling_own.{name}"}
    code = LLADA.replace("LLaDAModelLM", name) + write_it
    path = write(tmp_path, code, name, llada(), LLADA_SIZE, architectures=[name], auto_map=mapped)
    (tmp_path / "configuration_own.py").write_text(CONFIG + write_it)
    for options in ({"backend": "remote"}, {"backend": "remote", "dtype": "float64"}):
        with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it\."):
            load(path, own=False, **options)
    if name == "LLaDAModelLM":
        load(path, own=False)
    else:
        with pytest.raises(DuelError, match=r"runs code of its own: pass trust_remote_code=true if you trust it\."):
            load(path, own=False)
    assert not ran.exists()
    load(path)
    assert ran.exists()


def left_behind():
    places = (transformers.utils, "LossKwargs"), (transformers.utils.import_utils, "is_torch_fx_available")
    return dict(ROPE_INIT_FUNCTIONS), [getattr(place, name, None) for place, name in places], torch.get_default_dtype()


def test_repairs_are_undone(tmp_path):
    before = left_behind()
    with remote.repairs():
        assert "default" in ROPE_INIT_FUNCTIONS
        assert hasattr(transformers.utils, "LossKwargs") and hasattr(transformers.utils.import_utils, "is_torch_fx_available")
    assert left_behind() == before
    with pytest.raises(KeyError), remote.repairs():
        raise KeyError
    assert left_behind() == before
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
    load(write(good, SDAR, "SDARForCausalLM", decoder(norms=True)), dtype="bfloat16")
    assert left_behind() == before
    breaks = SDAR.replace("norms = True", "norms = True\n    def __init__(self, config):\n        self.x = config.nowhere")
    path = write(bad, breaks, "SDARForCausalLM", decoder(norms=True))
    with pytest.raises(DuelError, match="Cannot read checkpoint .*: AttributeError: .*nowhere"):
        load(path, dtype="bfloat16")
    assert left_behind() == before


# ---------------------------------------------------------------- wrong checkpoints


def test_no_code(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    for trusted in (True, False):
        with pytest.raises(DuelError, match=r"has no code of its own \(no auto_map with a model in config\.json\)"):
            load(path, trust_remote_code=trusted)


def test_weights_that_do_not_fill_the_network(tmp_path):
    full, gone, head = decoder(bias=True), "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"
    for lacking in (gone, head):
        path = write(tmp_path, DREAM, "DreamModel", {key: full[key] for key in full if key != lacking})
        with pytest.raises(DuelError, match=f"do not fill its own code: 1 missing: {lacking}"):
            load(path)
    path = write(tmp_path, DREAM, "DreamModel", {**full, "model.extra.weight": torch.ones(2)})
    with pytest.raises(DuelError, match=r"do not fill its own code: 1 not known: model\.extra\.weight"):
        load(path)
    path = write(tmp_path, DREAM, "DreamModel", {**full, gone: torch.ones(3)})
    with pytest.raises(DuelError, match=f"do not fill its own code: .*{gone}.*3"):
        load(path)


def test_wrong_rotary_frequencies(tmp_path):
    empty = DREAM.replace('register_buffer("inv_freq", frequencies,', 'register_buffer("inv_freq", 0 * frequencies,')
    path = write(tmp_path, empty, "DreamModel", decoder(bias=True))
    with pytest.raises(DuelError, match=r"rotary frequencies of .*rotary_emb\.inv_freq\) are not 500\^\(-2i/d\)"):
        load(path)
    path = write(tmp_path, DREAM, "DreamModel", {**decoder(bias=True), "model.rotary_emb.inv_freq": torch.zeros(2)})
    load(path)  # frequencies of a file are not taken


def test_broken_code(tmp_path):
    path = write(tmp_path, "import no_such_package\n" + LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    with pytest.raises(DuelError, match=r"Cannot read checkpoint .*: ImportError: .*no_such_package"):
        load(path)


def test_args_that_own_code_cannot_follow(tmp_path):
    path = write(tmp_path, LLADA, "LLaDAModelLM", llada(), LLADA_SIZE)
    for name in ("sigma", "device_map"):
        with pytest.raises(DuelError, match=f"is of the family own code, which has no choice of '{name}'"):
            load(path, **{name: "auto"})
    with pytest.raises(DuelError, match=r"attention=causal .*backend=remote"):
        load(path, attention="causal")
    with pytest.raises(DuelError, match="unexpected keyword argument 'position_ids'"):
        load(path, attention="block_causal", block=4)
