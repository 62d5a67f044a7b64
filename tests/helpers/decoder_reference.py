"""Published decoder checkpoints in small: config entries that count, file layouts, random weights."""

import dataclasses
import json

import tiny
import torch
import transformers
from safetensors.torch import save_file

from lm_eval_duel.audit import plain_networks as plain

D = 16
INNER = 24
MASK = 4


def remote(model, base=None, **entries):
    """A config as authors with code of their own write it."""
    return {"architectures": [model], "auto_map": {"AutoModel": f"modeling_x.{model}"}, **(base or {}), **entries}


def of_class(model, base, **entries):
    """A config without such code."""
    return {"architectures": [model], **base, **entries}


COMMON = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "hidden_size": D,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": tiny.ROWS,
}
LLAMA = {**COMMON, "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN2 = {**COMMON, "model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True}  # never read
QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 8}
QWEN3_MOE = {
    **QWEN3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
STRETCH = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 0.25,  # below 1, as in the 3B
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
}


def without(config, *keys):
    """A config without some entries."""
    return {key: value for key, value in config.items() if key not in keys}


def net(config, keys=plain.NATIVE, **more):
    """The plain network of a config; `more`: what it does not say, or what the authors' code does instead."""
    rotary = config.get("rope_parameters", config)
    found = {
        "head": config.get("head_dim", D // 4),
        "layers": config.get("num_hidden_layers", 2),
        "theta": rotary.get("rope_theta", 10_000.0),
        "eps": config.get("rms_norm_eps", 1e-5),
        "rotary_share": config.get("partial_rotary_factor", 1.0),
        "rope_scaling": rotary if rotary.get("rope_type", "default") != "default" else None,
        "experts": config.get("num_experts", 0),
        "chosen": config.get("num_experts_per_tok", 0),
        "groups": config.get("n_group", 0),
        "groups_kept": config.get("topk_group", 0),
        "scale": config.get("routed_scaling_factor", 1.0),
        "dense": config.get("first_k_dense_replace", 0),
    }
    return plain.Net(keys=keys, **{**found, **more})


@dataclasses.dataclass
class Case:
    """A published checkpoint in small, and what is found at load; `options`: what a user must say to load it."""

    config: dict
    parts: str = ""  # "bias" of q, k and v; "norm" of q and k
    options: dict = dataclasses.field(default_factory=dict)
    net: plain.Net | None = None  # of the config unless given; none for GPT-2
    mask: int | None = None  # MASK unless the user or the config says; any other is not in the tokenizer
    shift: int = 0
    block: int | None = 0  # as the user or the config says
    attention: str = ""  # bidirectional, or block-causal where it has a block
    bos: str = ""  # given where logits are shifted, else none
    anchor: str = "row"
    published: int | None = None
    length: int = 64
    folder: str = "checkpoint"
    rows: int = tiny.ROWS  # of the embedding
    masks: int = 0  # rows of the embedding that the head does not have
    store: str = "whole"  # "sharded", "bfloat16", "tied": no head in the file, "tied and stored"
    relative: bool = True  # no positions but rotary ones
    seed: int = 3

    def __post_init__(self):
        said = {**self.config, **self.options}
        if self.net is None and self.config["model_type"] != "gpt2":
            self.net = net(self.config)
        self.mask = self.mask or said.get("mask_token_id", MASK)
        self.block = said.get("block", said.get("block_size")) if self.block == 0 else self.block
        self.attention = self.attention or ("bidirectional" if self.block is None else "block_causal")
        self.bos = self.bos or ("given" if self.shift else "none")


LLADA = remote(
    "LLaDAModelLM",
    activation_type="silu",
    alibi=False,
    block_type="llama",
    d_model=D,
    embedding_size=48,
    include_bias=False,
    layer_norm_type="rms",
    mask_token_id=45,
    max_sequence_length=64,
    mlp_hidden_size=24,
    model_type="llada",
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    rope_theta=500_000.0,
    vocab_size=34,
    weight_tying=False,
)
LLADA_NET = net(LLADA, plain.LLADA)
DREAM = remote("DreamModel", QWEN2, mask_token_id=35, max_position_embeddings=4096, model_type="Dream")
MMADA = remote("MMadaModelLM", without(LLADA, "architectures", "auto_map"), embedding_size=40, new_vocab_size=48)
SMDM = {
    "architectures": ["TransEncoder"],
    "block_size": 64,
    "intermediate_size": 24,
    "model_type": "smdm",
    "n_embd": D,
    "n_head": 4,
    "n_layer": 2,
    "n_query_groups": 2,
    "norm_eps": 1e-5,
    "vocab_size": 39,
}
LLADA_MOE = remote(
    "LLaDAMoEModelLM",
    without(COMMON, "intermediate_size", "rms_norm_eps"),
    dense_intermediate_size=24,
    expert_intermediate_size=16,
    model_type="llada",  # the dense network's
    norm_topk_prob=True,  # never normalised
    num_experts=6,
    num_experts_per_tok=2,
    rope_theta=50_000,
)
LLADA2 = remote(
    "LLaDA2MoeModelLM",
    COMMON,
    first_k_dense_replace=1,
    head_dim=8,
    model_type="llada2_moe",
    moe_intermediate_size=16,
    n_group=4,
    norm_topk_prob=True,
    num_experts=12,
    num_experts_per_tok=3,
    num_hidden_layers=3,
    num_shared_experts=1,
    partial_rotary_factor=0.5,
    rope_theta=600_000,
    routed_scaling_factor=2.5,
    sliding_window=4096,
    topk_group=2,
    use_qk_norm=True,
    use_qkv_bias=False,
)
CODA = remote(
    "CoDALanguageModel",
    without(QWEN3, "torch_dtype"),
    attention_kernel="flash_attention",
    mask_token_id=36,
    model_type="CoDA",
    use_sliding_window=False,
    mask_block_sizes=[4, 8],
    block_masking_probability=[0.25, 0.5],
    sampling_eps=[0.001, 0.25],
)
NEW = without(LLAMA, "rope_scaling", "rope_theta")  # rotary entries as transformers 5 writes them
NEMOTRON = remote(
    "NemotronLabsDiffusionModel",
    NEW,
    block_size=4,
    head_dim=8,
    mask_token_id=36,
    model_type="nemotron_labs_diffusion",
    rope_parameters=YARN,
)
NVRDIFF = remote("DiffEncoderModel", QWEN3, block_size=4, dlm_type="dream", mask_token_id=37, model_type="nvrdiff")
A2D_QWEN2 = of_class("A2DQwen2LMHeadModel", QWEN2, model_type="a2d-qwen2", tie_word_embeddings=True)
A2D_QWEN3 = of_class("A2DQwen3LMHeadModel", QWEN3, model_type="a2d-qwen3", tie_word_embeddings=True)
A2D_NEW = {"rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}}
GPT = {"n_embd": D, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": tiny.ROWS}
GIVEN_WORDS = {"tokenizer": tiny.tokenizer()}  # beside a qwen2 or gpt2, transformers 5 reads Qwen's or GPT-2's alone
BD3LM = "Qwen3-0.6B-diffusion-bd3lm-v0.1", "Qwen2.5-Coder-0.5B-Instruct-diffusion-BD3LM-v0.1"  # found by their names

CASES = {
    "llada": Case(LLADA, net=LLADA_NET, rows=48, store="sharded", published=32),
    "mmada": Case({**MMADA, "model_type": "mmada", "vocab_size": 48}, net=LLADA_NET, rows=48, published=128),
    "smdm": Case(
        SMDM,
        options={"mask_token_id": 39},
        net=net(SMDM, plain.SMDM, grouped=True),
        masks=1,
        bos="given",
        block=None,
    ),
    "illada": Case(
        remote("ILLaDAForCausalLM", LLAMA, layer_norm_eps=None, tie_word_embeddings=True),
        store="tied and stored",
        mask=5,
    ),
    "dream": Case(DREAM, "bias", shift=1, length=2048),
    "llada-moe": Case(LLADA_MOE, "norm", net=net(LLADA_MOE, normalised=False), published=32),
    "rnd1": Case(remote("RND1LM", QWEN3_MOE, mask_token_id=MASK, model_type="rnd1", rope_scaling=False), "norm"),
    "coda": Case(CODA, "norm", shift=1),
    "a2d-qwen3": Case(A2D_QWEN3, "norm", store="tied"),
    "a2d-qwen2": Case({**without(A2D_QWEN2, "rope_scaling", "rope_theta", "tie_word_embeddings"), **A2D_NEW}, "bias"),
    "a2d-llama": Case(of_class("A2DLlamaLMHeadModel", NEW, rope_parameters={**STRETCH, "rope_theta": 1_000_000.0})),
    "a2d-qwen3-bd3lm": Case(A2D_QWEN3, "norm", {"block": 4}, folder=BD3LM[0], store="tied"),
    "a2d-qwen2-bd3lm": Case(A2D_QWEN2, "bias", {"block": 4}, folder=BD3LM[1]),  # tied, but the file has a head
    "a2d-llama-bd3lm": Case(of_class("A2DLlamaLMHeadModel", LLAMA), options={"family": "a2d-llama-bd3lm", "block": 4}),
    "open-dllm": Case(of_class("Qwen2ForCausalLM", QWEN2), "bias", {"family": "open-dllm", **GIVEN_WORDS}, shift=1),
    "sdar": Case(
        remote("SDARForCausalLM", QWEN3, block_size=4, mask_token_id=36, model_type="sdar"), "norm", store="sharded"
    ),
    "sdar-moe": Case(remote("SDARMoeForCausalLM", QWEN3_MOE, block_size=8, model_type="sdar_moe"), "norm"),
    "fast-dllm-v2": Case(  # its forward takes blocks of 32, whatever bd_size
        remote("Fast_dLLM_QwenForCausalLM", QWEN2, bd_size=8, model_type="Fast_dLLM_Qwen"),
        "bias",
        {"block": 4},
        store="bfloat16",
        shift=1,
    ),
    "llada2": Case(LLADA2, "norm", {"block": 4}, net(LLADA2, plain.LLADA2, eps=1e-6)),
    "llada2.2": Case(
        {**LLADA2, "expert_capacity": 5, "routing_strategy": "block", "block_size": 4},
        "norm",
        net=net(LLADA2, plain.LLADA2, eps=1e-6, capacity=5, routing_block=4),
    ),
    "stable-diffcoder": Case(remote("StableDiffcoderForCausalLM", LLAMA), mask=5, block=4),
    "d2f-llada": Case(LLADA, "", {"family": "d2f-llada", "block": 4}, LLADA_NET, rows=48, anchor="target"),
    "d2f-dream": Case(DREAM, "bias", {"family": "d2f-dream", "block": 4}, shift=1, anchor="target", length=2048),
    "dream-reasoner": Case(  # another network's type
        remote("DreamForCausalLM", QWEN2, mask_token_id=37, model_type="Dream"), "bias", {"block": 4}
    ),
    "nemotron-labs-diffusion": Case(
        NEMOTRON, net=net(NEMOTRON, plain.NEMOTRON), attention="causal_prefix", bos="given"
    ),
    "nemotron-diffusion-research": Case(NVRDIFF, "norm", net=net(NVRDIFF, plain.NEMOTRON), shift=1),
    "diffugpt": Case(
        of_class("GPT2LMHeadModel", GPT, layer_norm_epsilon=1e-5, model_type="gpt2"),
        options=GIVEN_WORDS,
        shift=1,
        relative=False,
        seed=4,
    ),
    "diffullama": Case(
        of_class("LlamaForCausalLM", LLAMA, max_position_embeddings=4096),
        options={"family": "diffullama"},
        store="sharded",
        shift=1,
        length=2048,
    ),
    "plain bidirectional": Case(
        of_class("LlamaForCausalLM", LLAMA), options={"attention": "bidirectional", "mask_token_id": 38}
    ),
    "plain block_causal": Case(
        of_class("Qwen3ForCausalLM", QWEN3),
        "norm",
        {"attention": "block_causal", "block": 2, "shift_logits": True},
        shift=1,
    ),
}
VARIANTS = {"llada2.2": "llada2"}  # cases of a family that has another case, too
METADATA = {"gpt2": {"lm_head.weight": "embed_tokens.weight"}}  # of DiffuGPT's file
GPT2_KEYS = {"embed_tokens.": "transformer.wte.", "denoise_model.": "transformer."}  # DiffuGPT's names


def weights(case):
    """Random tensors under the names of the family's files."""
    net = case.net
    generator = torch.Generator().manual_seed(case.seed)
    made = {}
    if net is None:
        state = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)).state_dict()
        for key in without(state, "lm_head.weight"):
            for own, native in GPT2_KEYS.items():
                key = key.replace(native, own)
            draw = torch.randn(state[_native(key)].shape, generator=generator) * 0.4
            made[key] = draw + 1 if ".ln_" in key and key.endswith("weight") else draw
        return made
    q = net.heads * net.head
    kept = net.kv_heads * net.head
    expert = 16

    scales = {"table": 0.5 if case.store.startswith("tied") else 1.0, "router": 0.5}

    def add(name, shape, n=None, e=None, end=".weight"):
        draw = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            mean = 0 if end == ".bias" else 1
            draw = draw * 0.2 + (-2 if name == "router bias" else mean)
        else:
            draw = draw * scales.get(name, 0.3)
        made[net.keys[name].format(n=n, e=e) + end] = draw

    add("table", (case.rows, D))
    add("last", (D,))
    if case.store != "tied":
        add("head", (case.rows - case.masks, D))
    for n in range(net.layers):
        projections = {"q": (q, D), "k": (kept, D), "v": (kept, D)}
        if "qkv" in net.keys:
            projections = {"qkv": (q + 2 * kept, D)}
        layer = {"before mix": (D,), "before feed": (D,), "out": (D, q), **projections}
        if "norm" in case.parts:
            layer |= {"q norm": (net.head,), "k norm": (net.head,)}
        if "bias" in case.parts:
            for name, shape in projections.items():
                add(name, shape[:1], n, end=".bias")
        if not net.experts or n < net.dense:
            layer |= {"gate": (INNER, D), "up": (INNER, D), "down": (D, INNER)}
        else:
            layer["router"] = (net.experts, D)
            if net.groups:
                add("router bias", (net.experts,), n, end="")
                layer |= {"shared gate": (expert, D), "shared up": (expert, D), "shared down": (D, expert)}
            for e in range(net.experts):
                for name, shape in (("gate", (expert, D)), ("up", (expert, D)), ("down", (D, expert))):
                    add(f"expert {name}", shape, n, e)
        for name, shape in layer.items():
            add(name, shape, n)
    if case.store == "tied and stored":
        made[net.keys["head"] + ".weight"] = made[net.keys["table"] + ".weight"].clone()
    return made


def _native(key):
    for own, native in GPT2_KEYS.items():
        key = key.replace(own, native)
    return key


@torch.no_grad()
def logits(case, w, ids, origin=0, seeded=True):
    """Logits (L, V) of the plain network of a case. `origin`: the first target position; `seeded`: the first token of
    a block is predicted by the clean position before it, where the prefix is causal.
    """
    if case.net is None:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)).double().eval()
        model.load_state_dict({_native(key): value for key, value in w.items()}, strict=False)
        seen = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)  # everything
        return model(input_ids=torch.tensor([ids]), attention_mask=seen).logits[0]
    if case.attention == "causal_prefix":
        begin = origin + (ids.index(case.mask) - origin) // case.block * case.block  # of the block in progress
        found = plain.logits(case.net, w, ids, plain.causal_prefix(len(ids), begin))
        if seeded:
            found[begin] = found[begin - 1]
        return found
    first = origin if case.anchor == "target" else 0
    return plain.logits(case.net, w, ids, case.block and plain.block_causal(len(ids), case.block, first))


def write(folder, case):
    """The checkpoint of a case below `folder`; its path and its tensors in float64."""
    folder = folder / case.folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    tiny.tokenizer(mask=case.mask == MASK).save_pretrained(folder)
    tensors = weights(case)
    if case.store == "bfloat16":
        tensors = {key: value.bfloat16() for key, value in tensors.items()}
    right = {key: value.double() for key, value in tensors.items()}
    if case.config["model_type"] == "llama":  # old files hold what is computed anew
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    names = ["model.safetensors"]
    if case.store == "sharded":
        names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
        places = {key: names[n % 2] for n, key in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for n, name in enumerate(names):
        part = {key: tensors[key] for key in list(tensors)[n :: len(names)]}
        save_file(part, folder / name, metadata=METADATA.get(case.config["model_type"], {"format": "pt"}))
    return str(folder), right
