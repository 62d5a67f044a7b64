"""Tiny random checkpoints with the real structure of their families, written to a folder."""

from types import SimpleNamespace

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lm_eval_duel.denoisers.checkpoint import Checkpoint
from lm_eval_duel.denoisers.hf.own_forward import MASKED_LM, MaskedLM
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
SIZE |= {"intermediate_size": 32, "pad_token_id": 0}
SPECIAL = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
SHORT = {"vocab_size": ROWS, "dim": 16, "n_layers": 2, "n_heads": 2}
LM = {**SIZE, "bos_token_id": 2, "eos_token_id": 3, "num_key_value_heads": 1}
GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
BOTTLENECK = {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
MASKED_LMS = {  # class, and what its config says beside the number of positions
    "bert": ("Bert", SIZE),
    "roberta": ("Roberta", SIZE),
    "distilbert": ("DistilBert", {**SHORT, "hidden_dim": 32}),
    "modernbert": ("ModernBert", {**SIZE, **SPECIAL, "local_attention": 8}),
    "convbert": ("ConvBert", {**SIZE, "embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3}),
    "mobilebert": ("MobileBert", {**SIZE, **BOTTLENECK}),
    "fnet": ("FNet", {key: value for key, value in SIZE.items() if key != "num_attention_heads"}),
    "ibert": ("IBert", SIZE),
    "bigbird": ("BigBird", {**SIZE, **SPARSE}),
}
CAUSAL_LMS = {
    "gpt2": ("GPT2", {"vocab_size": ROWS, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("Llama", LM),
    "qwen2": ("Qwen2", {**LM, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "gemma2": ("Gemma2", {**LM, **GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}),
    "opt": ("OPT", {**LM, "ffn_dim": 32, "word_embed_proj_dim": 8}),
    "bloom": ("Bloom", {"vocab_size": ROWS, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "mixtral": ("Mixtral", {**LM, "num_local_experts": 3, "output_router_logits": True}),
    "mamba": ("Mamba", {"vocab_size": ROWS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
}


def network(family, length=32, scale=8, **entries):
    """A network of transformers with random weights."""
    torch.manual_seed(7)
    kind, config = {**MASKED_LMS, **CAUSAL_LMS}[family]
    head = "ForMaskedLM" if family in MASKED_LMS else "ForCausalLM"
    if family == "gpt2":
        head = "LMHeadModel"
    if family not in ("bloom", "mamba"):
        positions = length + (family in ("roberta", "ibert"))
        config = {"max_position_embeddings": positions, **config}
    config_class = getattr(transformers, f"{kind}Config")
    model_class = getattr(transformers, f"{kind}{head}")
    model = model_class(config_class(**{**config, **entries}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if family == "mamba" else scale)  # or they predict nearly the same everywhere
        model.get_input_embeddings().weight[0].zero_()  # as files of trained networks have it, for padding
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
    denoiser = kind(Checkpoint(options, {}, MASKED_LM, words), None)
    denoiser.take(model)
    return denoiser
