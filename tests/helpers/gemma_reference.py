"""A tiny random DiffusionGemma with the structure of the released one, as a folder; and its plain logits."""

import functools

import dit_reference
import torch
import transformers

TOKENS, CANVAS, LENGTH = 3, 2, 12
TEXT = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 1},
    **{"sliding_window": 4, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8},
    **{"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": LENGTH},
    **{"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0, "use_bidirectional_attention": "vision"},
}
VISION = {
    **{"model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
}


@functools.cache
def network(tokens=TOKENS):
    """The network in float64; its embedding is scaled so that its distributions are far from uniform."""
    ids = {name: tokens + n for n, name in enumerate(("image_token_id", "boi_token_id", "eoi_token_id"), 1)}
    config = transformers.DiffusionGemmaConfig(
        text_config={**TEXT, "vocab_size": tokens}, vision_config=VISION, canvas_length=CANVAS, **ids
    )
    torch.manual_seed(3)
    model = transformers.DiffusionGemmaForBlockDiffusion._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return model.double().eval()


def write(folder, tokens=TOKENS):
    """Its folder, with a tokenizer."""
    model = network(tokens)
    model.float().save_pretrained(folder)
    model.double()
    dit_reference.words(tokens).save_pretrained(folder)
    return str(folder)


class Plain:
    """A canvas after a context, for the enumeration in `noised_toys`: the class's own forward of the whole model."""

    def __init__(self, denoiser, context):
        self.noise_training = denoiser.noise_training
        self.vocab_size = denoiser.vocab_size
        self.context = torch.tensor([context])
        self.known = {}  # logits by canvas and conditioning: the network does not see the time

    @torch.no_grad()
    def logits(self, z, t, before=None):
        conditioning = None if before is None else before[None].double()
        key = (z.numpy().tobytes(), None if before is None else before.numpy().tobytes())
        if key not in self.known:
            model = network(self.vocab_size)
            out = model(input_ids=self.context, decoder_input_ids=z[None], self_conditioning_logits=conditioning)
            self.known[key] = out.logits[0].double()
        return self.known[key]

    def level(self, t):
        return 1 - t, torch.full((self.vocab_size,), t / self.vocab_size, dtype=torch.float64)


@torch.no_grad()
def encoder_log_probs(row):
    """log p of each token of a row given those before it, (L - 1,): the head over the encoder's own output."""
    model = network()
    hidden = model.model.encoder(input_ids=torch.tensor([row])).last_hidden_state[0]
    logits = torch.tanh(model.lm_head(hidden) / 30) * 30
    return logits.log_softmax(1)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
