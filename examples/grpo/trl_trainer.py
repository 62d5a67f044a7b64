"""GRPO by TRL with exact log-probabilities. Run with TRL 1.16.0; the two hooks are private, and move between releases.

pip install trl
python examples/grpo/trl_trainer.py

The bundled bidirectional network learns to write tokens that begin with a capital letter.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForMaskedLM, GenerationConfig

from lm_eval_duel import Duel, Window, load_tokenizer
from lm_eval_duel.demo import FOLDER

try:
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f"This example needs TRL: pip install trl ({error}).") from None

Ids = tuple[int, ...]


class DuelGRPOTrainer(GRPOTrainer):
    """Rollouts by `Duel.sample`, log-probabilities by `Duel.differentiable`."""

    def __init__(self, *arguments: Any, block: int, **settings: Any):
        super().__init__(*arguments, **settings)
        self.duel = Duel.from_model(self.model, self.processing_class, rule="greedy", block=block)
        self.orders: dict[tuple[Ids, Ids], Ids] = {}  # a text has one order under the weights that wrote it

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *ignored: Any, **also_ignored: Any
    ) -> tuple[list[list[int]], None]:
        samples = self.duel.sample(prompt_ids, self.args.max_completion_length, seed=self.state.global_step)
        self.orders = {
            (tuple(prompt), sample.tokens): sample.reveal_steps
            for prompt, sample in zip(prompt_ids, samples, strict=True)
        }
        return [list(sample.tokens) for sample in samples], None

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *ignored: Any,
        **also_ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        if self.accelerator.unwrap_model(model) is not self.model:
            raise NotImplementedError("For beta above 0, make a second Duel of the reference network.")
        windows = []
        for ids, real in zip(input_ids, attention_mask.bool(), strict=True):  # (L,) each
            prompt = slice(None, -logits_to_keep)
            completion = slice(-logits_to_keep, None)
            windows.append(Window(ids[prompt][real[prompt]], ids[completion][real[completion]]))
        orders = [self.orders[window.context, window.target] for window in windows]
        log_probs = torch.zeros(len(windows), logits_to_keep)  # (N, T)
        found = self.duel.differentiable(windows, orders, batch_size=len(windows)).float()
        log_probs[:, : found.shape[1]] = found
        return log_probs, torch.full_like(log_probs, torch.nan), None  # entropies are not computed


def capitals(completion_ids: list[list[int]], **ignored: Any) -> list[float]:
    """The share of tokens that begin with a capital letter."""
    pieces = [tokenizer.convert_ids_to_tokens(ids) for ids in completion_ids]
    return [sum(piece.lstrip("Ġ")[:1].isupper() for piece in each) / len(each) for each in pieces]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO of demo-mdm by TRL: it learns to write capital letters.")
    parser.add_argument("--steps", type=int, default=10, help="steps of training (10)")
    steps = parser.parse_args().steps
    tokenizer = load_tokenizer({"pretrained": "demo-mdm"})
    config = GRPOConfig(
        "grpo-trl",
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        max_steps=steps,
        learning_rate=3e-4,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    network = AutoModelForMaskedLM.from_pretrained(FOLDER / "demo-mdm", dtype=torch.float32)
    network.generation_config = GenerationConfig()  # TRL writes into it
    trainer = DuelGRPOTrainer(
        network,
        capitals,
        config,
        train_dataset=Dataset.from_dict({"prompt": ["We the people of the", "My fellow"] * 40}),
        processing_class=tokenizer,
        block=8,
    )
    trainer.train()
    print([round(log["reward"], 3) for log in trainer.state.log_history if "reward" in log])
