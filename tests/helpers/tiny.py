"""Tiny random checkpoints with the real structure of their families, written to a folder."""

from types import SimpleNamespace

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lm_eval_duel.denoisers.hf.masked_lm import MASKED_LM, MaskedLM
from lm_eval_duel.denoisers.load_options import LoadOptions

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "of", "and"]
ROWS = 40  # embedding rows: 6 more than words


def tokenizer(framed=True, mask=True, length=32):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if framed:
        words.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    if mask:
        names["mask_token"] = "[MASK]"
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, **names)


SIZE = {"vocab_size": ROWS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE["intermediate_size"] = 32
SHORT = {"vocab_size": ROWS, "dim": 16, "n_layers": 2, "n_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
FAMILIES = {  # class, head, config, and what it calls its number of positions
    "bert": ("Bert", "ForMaskedLM", SIZE, "max_position_embeddings"),
    "roberta": ("Roberta", "ForMaskedLM", {**SIZE, "pad_token_id": 0}, "max_position_embeddings"),
    "distilbert": ("DistilBert", "ForMaskedLM", {**SHORT, "hidden_dim": 32}, "max_position_embeddings"),
    "modernbert": ("ModernBert", "ForMaskedLM", {**SIZE, **SPECIAL, "local_attention": 8}, "max_position_embeddings"),
    "gpt2": ("GPT2", "LMHeadModel", {"vocab_size": ROWS, "n_embd": 16, "n_layer": 2, "n_head": 2}, "n_positions"),
}


def network(family, length=32):
    torch.manual_seed(7)
    name, head, entries, positions = FAMILIES[family]
    longest = {positions: length + (family == "roberta")}
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**entries, **longest))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # random initialisations predict nearly the same at every position
    return model.eval()


def checkpoint(folder, family, **tokenizer_options):
    """A checkpoint folder of the family; returns its path."""
    network(family).save_pretrained(folder)
    tokenizer(**tokenizer_options).save_pretrained(folder)
    return str(folder)


def masked_lm(model, tokens=tuple(range(34)), kind=MaskedLM, length=32):
    """The denoiser of a masked LM in memory, whose [MASK] is token 4."""
    words = SimpleNamespace(get_vocab=lambda: {str(n): n for n in tokens}, model_max_length=length)
    options = LoadOptions("network", torch.device("cpu"), mask_token_id=4)
    denoiser = kind(MASKED_LM, {}, options, words, None)
    denoiser.take(model)
    return denoiser
