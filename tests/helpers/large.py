"""A LLaDA-8B-shaped random checkpoint in bfloat16: written in shards, loaded and scored, with the memory it took.

python tests/helpers/large.py FOLDER   (16 GB of disk; not part of the test suite)
"""

import json
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from lm_eval_duel import demo, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.duel import DuelEstimator

CONFIG = {
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    "model_type": "llada",
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 4096,
    "embedding_size": 126464,
    "vocab_size": 126464,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "weight_tying": False,
}


def shapes():
    width, inner, rows = CONFIG["d_model"], CONFIG["mlp_hidden_size"], CONFIG["embedding_size"]
    yield "model.transformer.wte.weight", (rows, width)
    for n in range(CONFIG["n_layers"]):
        block = f"model.transformer.blocks.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            yield f"{block}{name}.weight", (width, width)
        yield f"{block}ff_proj.weight", (inner, width)
        yield f"{block}up_proj.weight", (inner, width)
        yield f"{block}ff_out.weight", (width, inner)
        yield f"{block}attn_norm.weight", (width,)
        yield f"{block}ff_norm.weight", (width,)
    yield "model.transformer.ln_f.weight", (width,)
    yield "model.transformer.ff_out.weight", (rows, width)


def write(folder, shard_bytes=4_000_000_000):
    """The checkpoint, one shard in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.resolve("demo-mdm")) / name, folder)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.02
    places, shard, size = {}, {}, 0

    def flush():
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for number, (name, shape) in enumerate(shapes()):
        count = torch.Size(shape).numel()
        if len(shape) == 1:
            shard[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            rolled = noise.roll(number * 7919)
            shard[name] = rolled.repeat(-(-count // len(rolled)))[:count].view(shape).clone()
        size += 2 * count
        if size > shard_bytes:
            flush()
            size = 0
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def memory():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    anonymous, mapped = (int(lines[key].split()[0]) / 2**20 for key in ("RssAnon", "RssFile"))
    return f"peak {peak:.1f} GiB; now {anonymous:.1f} GiB of its own and {mapped:.1f} GiB of mapped files"


def main(folder):
    if not (folder / "model.safetensors.index.json").exists():
        began = time.time()
        write(folder)
        print(f"written in {time.time() - began:.0f} s; {memory()}", flush=True)
        print("run again to load it in a fresh process")
        return
    began = time.time()
    denoiser = denoisers.load(str(folder), device="cpu", dtype="bfloat16")
    count = sum(parameter.numel() for parameter in denoiser.model.parameters())
    print(
        f"{count / 1e9:.2f} B parameters, {denoiser.dtype}, loaded in {time.time() - began:.0f} s; {memory()}",
        flush=True,
    )
    began = time.time()
    scored = DuelEstimator(denoiser, "greedy").log_prob([Window((300, 517), (261, 400, 7, 12))])[0]
    print(f"{scored.log_prob:.3f} nats, steps {scored.reveal_steps}, {time.time() - began:.0f} s; {memory()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
