"""Train the bundled checkpoints, one for each kind of diffusion and an autoregressive one (needs torch 2.9 for Muon).

    python scripts/train_demo.py --corpus sotu.jsonl.xz --objective mdm --out demo-mdm

The tokenizer, the number of parameters and the rows are the same for all; only attention and objective differ:

* `mdm`: ModernBERT. t ~ U(0, 1) stratified over the batch, each token masked with probability t,
  loss = (1/t) * cross entropy at masked positions, divided by all positions (Sahoo et al. 2024, eq. 10).
* `ar`: ModernBERT decoder, next-token cross entropy after one <|endoftext|>.
* `bd`: our DiT, block-causal with blocks of 4 (Arriola et al. 2025). The masked row and the clean row are processed
  together under the attention mask of block diffusion. In each block l ~ U{1..4} positions are masked, loss = 4/l *
  cross entropy at masked positions. The row begins with one <|endoftext|>, which is never masked.
* `duo`: our DiT under uniform noise, given the noise level (Sahoo et al. 2025; Schiff et al. 2024). t = v^2 with v
  stratified over the batch, each token replaced by a random one with probability t, loss = the integrand of the bound
  in continuous time at all positions. The row begins with one <|endoftext|>, which is never replaced.

Run the same command again to continue an interrupted training from the last state in `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import (
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from lm_eval_duel.core import noise as noises
from lm_eval_duel.denoisers.dit.denoiser import NOISE_EPS
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig

ROW = 128  # tokens in a full training row, and the longest row of the model
BLOCK = 4  # block size of block diffusion; its longest row has one more block, for <|endoftext|>
ROPE_THETA = 10_000.0
PAD = "<|pad|>"
END = "<|endoftext|>"
MASK = "<|mask|>"
SENTENCE_START = re.compile(r"(?<=[.!?] )(?=[A-Z])")
STATE = "state.pt"


@dataclasses.dataclass(frozen=True)
class Address:
    """An address of the corpus, with the character offsets at which rows may begin."""

    year: int
    text: str
    sentences: np.ndarray  # offsets of the first letter of each sentence
    words: np.ndarray  # offsets of the space before each word


def read_corpus(path: str, last_year: int) -> list[Address]:
    """The addresses up to `last_year` of an (xz-compressed) JSONL file with `year` and `text`."""
    opener = lzma.open if path.endswith(".xz") else open
    addresses = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["year"] > last_year:
                continue
            text = record["text"].replace("\x02", "").strip()
            sentences = [0]
            sentences += [match.start() for match in SENTENCE_START.finditer(text)]
            words = [match.start() for match in re.finditer(" ", text)]
            addresses.append(Address(record["year"], text, np.array(sentences), np.array(words)))
    return addresses


def train_tokenizer(addresses: list[Address], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `size` entries, specials included, trained on the addresses."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((address.text for address in addresses), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=END,
        eos_token=END,
        mask_token=MASK,
        model_max_length=ROW,
        clean_up_tokenization_spaces=False,
    )


class TrainingRows:
    """Training rows as a pure function of (seed, step): the same for all objectives and after a resume.

    An address is drawn in proportion to its length, halved for every `half_life` years before the last one; half of
    the rows begin at a sentence, half at any word. One step in four has shorter rows, so that the model sees every
    length up to `ROW`; the number of tokens per step stays the same.
    """

    def __init__(
        self, addresses: list[Address], tokenizer: PreTrainedTokenizerFast, batch: int, half_life: float, seed: int
    ):
        self.addresses = addresses
        self.tokenizer = tokenizer
        self.batch = batch
        self.seed = seed

        year = np.array([address.year for address in addresses])
        length = np.array([len(address.text) for address in addresses])
        age = year.max() - year
        weight = length * 0.5 ** (age / half_life)
        self.share = weight / weight.sum()  # the probability of each address

    def step(self, step: int) -> torch.Tensor:
        """Token ids (B, L) of one step."""
        rng = np.random.default_rng((self.seed, step))
        length = ROW if rng.random() < 0.75 else int(rng.integers(16, ROW))
        rows: list[list[int]] = []
        wanted = round(self.batch * ROW / length)
        while len(rows) < wanted:
            texts = []
            for index in rng.choice(len(self.addresses), size=wanted - len(rows), p=self.share):
                address = self.addresses[index]
                starts = address.sentences if rng.random() < 0.5 else address.words
                start = int(rng.choice(starts))
                texts.append(address.text[start : start + 8 * length])
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            rows += [ids[:length] for ids in encoded if len(ids) > length]  # the last token may be a cut word
        return torch.tensor(rows)  # (B, L)


def build(
    objective: str, tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, dropout: float
) -> torch.nn.Module:
    """The network: every layer sees the whole row (no local attention)."""
    if objective == "bd":
        return build_dit(DiTConfig(len(tokenizer), hidden, layers, heads=4, condition=16))
    if objective == "duo":
        return build_dit(DiTConfig(len(tokenizer), hidden, layers, heads=4, condition=32, time=True))
    config_class, model_class = {
        "mdm": (ModernBertConfig, ModernBertForMaskedLM),
        "ar": (ModernBertDecoderConfig, ModernBertDecoderForCausalLM),
    }[objective]
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=ROW,
        global_attn_every_n_layers=1,
        local_attention=2 * ROW,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        cls_token_id=tokenizer.bos_token_id,
        sep_token_id=tokenizer.eos_token_id,
    )
    return model_class(config)


def build_dit(config: DiTConfig) -> DiT:
    """A DiT, initialized as by its authors: gates and head are zero."""
    network = DiT(config)
    torch.nn.init.normal_(network.vocab_embed.embedding, std=0.02)
    output = network.output_layer
    zero = [output.adaLN_modulation, output.linear]
    zero += [block.adaLN_modulation for block in network.blocks]
    for layer in zero:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return network


def mdm_loss(
    model: torch.nn.Module, ids: torch.Tensor, mask_id: int, generator: torch.Generator, eps: float = 1e-3
) -> torch.Tensor:
    """The negative ELBO in nats per token, with one draw of t per row."""
    count = len(ids)
    shift = torch.rand(1, generator=generator)
    t = eps + (1 - eps) * ((torch.arange(count) + shift) / count)  # (B,)
    masked = torch.rand(ids.shape, generator=generator) < t[:, None]  # (B, L)
    logits = model(input_ids=ids.masked_fill(masked, mask_id)).logits[masked].float()  # (C, V)
    logits[:, mask_id] = -torch.inf
    weight = (1 / t)[:, None].expand_as(masked)[masked]  # (C,)
    nats = F.cross_entropy(logits, ids[masked], reduction="none")  # (C,)
    return (nats * weight).sum() / ids.numel()


def ar_loss(model: torch.nn.Module, ids: torch.Tensor, end_id: int) -> torch.Tensor:
    """Next-token cross entropy in nats per token; the first token is predicted from <|endoftext|>."""
    shifted = F.pad(ids[:, :-1], (1, 0), value=end_id)  # (B, L)
    logits = model(input_ids=shifted).logits.float()  # (B, L, V)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def bd_loss(
    model: DiT, ids: torch.Tensor, mask_id: int, end_id: int, generator: torch.Generator, block: int = BLOCK
) -> torch.Tensor:
    """The negative ELBO of block diffusion in nats per token, with one draw per block.

    The noisy row and the clean row are one input: a noisy position sees its own block of the noisy row and the earlier
    blocks of the clean row; a clean position sees the clean row up to the end of its own block. A short last block is
    padded with [MASK]s that have no loss.
    """
    rows = F.pad(ids, (1, 0), value=end_id)  # (B, L)
    short = -rows.shape[1] % block
    rows = F.pad(rows, (0, short), value=mask_id)  # (B, L)
    count, length = rows.shape
    blocks = length // block

    draws = torch.randperm(count * blocks, generator=generator) % block + 1  # (B * L / block,) each l equally often
    rank = torch.rand(count * blocks, block, generator=generator).argsort(1).argsort(1)  # (B * L / block, block)
    masked = (rank < draws[:, None]).view(count, length)  # (B, L)
    weight = (block / draws)[:, None].expand(-1, block).reshape(count, length)  # (B, L)
    scored = torch.ones_like(masked)
    scored[:, 0] = False
    scored[:, length - short :] = False
    noisy = rows.masked_fill(masked & scored, mask_id)  # (B, L)

    # keys:        noisy row    clean row
    # noisy row    own block    blocks before
    # clean row    none         own block and those before
    index = torch.arange(length) // block  # (L,)
    same = index[:, None] == index  # (L, L) query, key
    before = index[:, None] > index  # (L, L)
    of_noisy = torch.cat([same, before], 1)  # (L, 2L)
    of_clean = torch.cat([torch.zeros_like(same), same | before], 1)  # (L, 2L)
    mask = torch.cat([of_noisy, of_clean])  # (2L, 2L)
    positions = torch.arange(length).repeat(2)[None]  # (1, 2L)
    both = torch.cat([noisy, rows], 1)  # (B, 2L)
    features, _ = model(both, torch.zeros(count), mask[None, None], positions=positions)  # (B, 2L, D)

    masked &= scored
    logits = model.output_layer.linear(features[:, :length][masked]).float()  # (C, V)
    logits[:, mask_id] = -torch.inf
    nats = F.cross_entropy(logits, rows[masked], reduction="none")  # (C,)
    return (nats * weight[masked]).sum() / scored.sum()


def duo_loss(model: DiT, ids: torch.Tensor, end_id: int, generator: torch.Generator) -> torch.Tensor:
    """The negative ELBO under uniform noise in nats per token, in continuous time, with one draw of t per row."""
    count = len(ids)
    noise = noises.Uniform(model.config.vocab_size)
    shift = torch.rand(1, generator=generator, dtype=torch.float64)
    v = (torch.arange(count, dtype=torch.float64) + shift)[:, None] / count  # (B, 1)
    t = v**2  # denser near 0, where a position is noisy with probability t and weight 1 / t
    rest = (1 - v) * (1 + v)
    level = noise.level(t, rest)
    u, token = torch.rand(2, *ids.shape, generator=generator, dtype=torch.float64)  # (B, L) each
    noisy = noises.noisy_tokens(noise, level, ids, u, token)  # (B, L)

    sigma = -rest.clamp(NOISE_EPS, 1 - NOISE_EPS).log()  # (B, 1)
    features, _ = model(F.pad(noisy, (1, 0), value=end_id), sigma[:, 0].float())  # (B, 1 + L, D)
    log_r = model.output_layer.linear(features[:, 1:]).float().log_softmax(2)  # (B, L, V)
    ratio = (level.a / level.u)[:, :, None].float()  # (B, 1, 1)
    total = torch.log1p(ratio * log_r.exp()).sum(2)  # (B, L)
    clean = log_r.gather(2, ids[:, :, None])[:, :, 0]  # (B, L)
    kept = log_r.gather(2, noisy[:, :, None])[:, :, 0]  # (B, L)
    stats = noises.Statistics(clean.double(), kept.double(), total.double())
    observed = noises.Observed(noisy == ids, torch.zeros_like(ids, dtype=torch.bool))
    rate = noises.limit_rate(level, noise.rates(t, rest), stats, observed)  # (B, L)
    return (2 * v * rate).sum() / ids.numel()  # dt = 2 v dv


def loss_of(
    objective: str,
    model: torch.nn.Module,
    ids: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    generator: torch.Generator,
) -> torch.Tensor:
    """The loss of rows (B, L), in nats per token."""
    mask_id = tokenizer.mask_token_id
    end_id = tokenizer.bos_token_id
    if objective == "mdm":
        return mdm_loss(model, ids, mask_id, generator)
    if objective == "bd":
        return bd_loss(model, ids, mask_id, end_id, generator)
    if objective == "duo":
        return duo_loss(model, ids, end_id, generator)
    return ar_loss(model, ids, end_id)


def learning_rate(step: int, steps: int, warmup: int = 200, decay: float = 0.3) -> float:
    """The factor on the peak rate: linear warmup, constant, linear to zero over the last `decay` of the steps."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (decay * steps))


def optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms, biases."""
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        is_inside = "layers." in name or "blocks." in name
        if is_inside and parameter.ndim == 2 and "adaLN" not in name:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the tokenizer so that transformers 4.57 and 5 can both read it."""
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    known = {"bos_token", "eos_token", "mask_token", "pad_token", "model_max_length", "clean_up_tokenization_spaces"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, value in json.loads(file.read_text()).items():
        if key in known:
            config[key] = value
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def dit_config(shape: DiTConfig) -> dict[str, object]:
    """The config.json of BD3-LM's or, for a network that is given the noise level, of Duo's authors."""
    config = {
        "causal": False,
        "cond_dim": shape.condition,
        "dropout": 0.0,
        "hidden_dim": shape.width,
        "n_blocks": shape.layers,
        "n_heads": shape.heads,
        "var_min": False,
        "vocab_size": shape.vocab_size,
    }
    if shape.time:
        duo = {"architectures": ["DUO"], "model_type": "DUO", "model_length": ROW + 1, "time_conditioning": True}
        return {**config, **duo}
    return {
        **config,
        "architectures": ["BD3LM"],
        "model_type": "bd3lm",
        "adaln": True,
        "attn_backend": "sdpa",
        "block_size": BLOCK,
        "cross_attn": True,
        "model_length": ROW + BLOCK,
        "time_conditioning": False,
    }


def save_checkpoint(model: torch.nn.Module, out: Path, dtype: str) -> None:
    """Save the checkpoint so that transformers 4.57 and 5 can both read it, or in the layout of the DiT's authors."""
    model.to(getattr(torch, dtype))
    if isinstance(model, DiT):
        weights = {f"backbone.{key}": value for key, value in model.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(dit_config(model.config), indent=2, sort_keys=True) + "\n")
        return
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config |= {"global_rope_theta": ROPE_THETA, "local_rope_theta": ROPE_THETA}  # the names of 4.57
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    addresses = read_corpus(args.corpus, args.last_year)
    if args.tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(addresses, args.vocab)
    save_tokenizer(tokenizer, out)
    rows = TrainingRows(addresses, tokenizer, args.batch, args.half_life, args.seed)

    model = build(args.objective, tokenizer, args.hidden, args.layers, args.dropout)
    opts = optimizers(model, args.lr)
    done = 0  # steps
    seconds = 0.0  # of all cores
    curve = []  # (step, mean loss since the entry before)
    if (out / STATE).exists():
        state = torch.load(out / STATE, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(saved)
        done = state["step"]
        seconds = state["seconds"]
        curve = state["curve"]

    model.train()
    recent: list[float] = []
    bar = tqdm(range(done, args.steps), initial=done, total=args.steps, desc=args.objective, mininterval=5)
    for step in bar:
        began = time.process_time()
        ids = rows.step(step)
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            loss = loss_of(args.objective, model, ids, tokenizer, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * learning_rate(step, args.steps)
            opt.step()
            opt.zero_grad(set_to_none=True)
        recent.append(loss.item())
        seconds += time.process_time() - began
        if not math.isfinite(recent[-1]):
            raise RuntimeError(f"the loss is {recent[-1]} at step {step}; lower --lr, then continue from {out / STATE}")

        done = step + 1
        if done % args.log_every == 0 or done == args.steps:
            mean = sum(recent) / len(recent)
            curve.append([done, mean])
            bar.set_postfix(nats=f"{mean:.3f}")
            recent = []
        if done % args.save_every == 0 or done == args.steps:
            state = {
                "model": model.state_dict(),
                "opts": [opt.state_dict() for opt in opts],
                "step": done,
                "seconds": seconds,
                "curve": curve,
            }
            part = out / (STATE + ".part")
            torch.save(state, part)
            os.replace(part, out / STATE)  # at once: a killed training loses no state

    save_checkpoint(model, out, args.save_dtype)
    record = dict(vars(args))
    for place in ("corpus", "out", "tokenizer"):
        del record[place]
    record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    record["tokens"] = args.steps * args.batch * ROW
    record["core_hours"] = round(seconds / 3600, 2)
    record["loss_nats_per_token"] = [[step, round(value, 4)] for step, value in curve]
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python scripts/train_demo.py",
        description="Train a bundled checkpoint on a JSONL corpus with `year` and `text`; resumes from --out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--corpus", required=True, help="JSONL or JSONL.xz, one address a line")
    p.add_argument("--last-year", type=int, default=2000, help="later addresses are held out")
    p.add_argument("--objective", choices=["mdm", "ar", "bd", "duo"], required=True)
    p.add_argument("--out", required=True, help="folder for checkpoint, tokenizer and resumable state")
    p.add_argument("--tokenizer", help="folder of a tokenizer to share (trained on the corpus when absent)")
    p.add_argument("--vocab", type=int, default=2048, help="entries of a newly trained tokenizer")
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--batch", type=int, default=48, help=f"rows of {ROW} tokens a step")
    p.add_argument("--steps", type=int, default=6000)
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--half-life", type=float, default=100, help="years after which an address is drawn half as often")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=0, help="CPU threads (0: all)")
    p.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast to bfloat16")
    p.add_argument("--save-dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--save-every", type=int, default=200)
    return p


if __name__ == "__main__":
    train(parser().parse_args())
