"""Train a tiny masked diffusion model on the bundled text and follow its exact likelihood. Run by hand; two minutes.

python examples/training/train.py
"""

import json
import lzma
import sys
from typing import Any

import torch
from torch.nn import functional as F
from transformers import ModernBertConfig, ModernBertForMaskedLM, Trainer, TrainingArguments

from lm_eval_duel import DuelCallback, load_tokenizer
from lm_eval_duel.demo import FOLDER

ROW = 64


class MaskedDiffusion(Trainer):
    """Minimizes the negative ELBO: mask each token with probability t, divide the cross entropy by t."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *ignored: Any, **also_ignored: Any
    ) -> torch.Tensor:
        ids, mask_id = inputs["input_ids"], self.processing_class.mask_token_id  # (B, L)
        t = (torch.arange(len(ids)) + torch.rand(1)).div(len(ids)).clamp(min=1e-3)[:, None]  # (B, 1)
        masked = torch.rand(ids.shape) < t
        logits = model(input_ids=ids.masked_fill(masked, mask_id)).logits  # (B, L, V)
        nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (nll * masked / t).mean()


def read(tokenizer: Any) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Training rows of ROW tokens, and texts of later addresses for scoring."""
    with lzma.open(FOLDER / "text" / "sotu_full.jsonl.xz", "rt", encoding="utf-8") as lines:
        addresses = [json.loads(line) for line in lines]
    early = " ".join(address["text"] for address in addresses if address["year"] <= 2017)
    ids = torch.tensor(tokenizer(early, add_special_tokens=False, verbose=False)["input_ids"])
    rows = [{"input_ids": row} for row in ids[: len(ids) // ROW * ROW].view(-1, ROW)]
    texts = [address["text"][start : start + 200] for address in addresses[-4:] for start in (1000, 5000, 9000)]
    return rows, texts


def main(out: str, steps: int = 300, every: int = 50) -> list[dict[str, float]]:
    """The logs of the scores."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer({"pretrained": "demo-mdm"})
    rows, texts = read(tokenizer)
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=ROW,
        global_attn_every_n_layers=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        cls_token_id=tokenizer.bos_token_id,
        sep_token_id=tokenizer.eos_token_id,
    )
    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        warmup_steps=20,
        lr_scheduler_type="constant_with_warmup",
        logging_steps=every,
        save_strategy="no",
        report_to="none",  # or wandb, tensorboard, trackio: they get the numbers, too
        use_cpu=True,
    )
    trainer = MaskedDiffusion(ModernBertForMaskedLM(config), arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.add_callback(DuelCallback(trainer, texts, every=every, rules=["greedy", "left_to_right"], block=8))
    trainer.train()
    return [log for log in trainer.state.log_history if "duel/greedy,block=8/bits_per_byte" in log]


if __name__ == "__main__":
    for log in main(sys.argv[1] if len(sys.argv) > 1 else "tiny-mdm"):
        print(log)
