"""GIDD with p_uniform 0: MDLM's network that is given the masked share of the row as its time; others are refused."""

import json
import math

import dit_reference
import pytest
import tiny
import torch
from close import close_nats, same_scores
from dit_reference import CONDITION, HEADS, LAYERS, LENGTH, TOKENS, VOCABULARY, WIDTH, plain
from laws import strings
from safetensors.torch import save_file
from textbook import score
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.cli.plan import parse, plan
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import unloaded
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.subsets.lattice import Lattice

T_EPS = 0.05  # 1e-4 in the published files: here a clamp that is seen
CONFIG = {
    "architectures": ["DIT"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dit.DITConfig", "AutoModelForMaskedLM": "modeling_dit.DIT"},
    "hidden_size": WIDTH,
    "max_seq_len": LENGTH,
    "model_type": "dit",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "p_uniform": 0.0,
    "t_eps": T_EPS,
    "timestep_cond_dim": CONDITION,
    "vocab_size": VOCABULARY + 3,  # rows of the table may exceed the tokenizer's
}


def words(count):
    """A tokenizer of `count` words, whose last is [MASK], after <s> and letters."""
    names = ["<s>", *"abcdefghijklmnop"[: count - 2], "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(names)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", mask_token="[MASK]")


def write(folder, count=VOCABULARY, **changes):
    """A checkpoint folder as the authors write it, with `count` words; its path, and its tensors in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tensors = dit_reference.weights(True, "", config["vocab_size"])
    del tensors["rotary_emb.inv_freq"]
    buffers = {f"rotary_emb.{name}_cached": torch.ones(1, LENGTH, 3, 1, WIDTH // HEADS) for name in ("cos", "sin")}
    save_file(tensors | buffers, folder / "model.safetensors", metadata={"format": "pt"})
    words(count).save_pretrained(folder)
    return str(folder), {name: value.double() for name, value in tensors.items()}


def time_of(ids, count=None, mask=TOKENS):
    """The time that the network is given for a row, of `count` positions if not all."""
    return min(max(sum(token == mask for token in ids) / (count or len(ids)), T_EPS), 1 - T_EPS)


WINDOWS = [
    Window((0,), (4, 5, 6, 7, 8, 1, 2, 3, 9)),
    Window((0, 1), (11, 10), (3,)),
    Window((), (2, 2, 9)),
    Window((0, 4, 4, 1, 7, 2, 5), (6,), (9, 9, 1)),
]


@pytest.mark.parametrize("bos", ["given", "official"])
@pytest.mark.parametrize("rule", ["greedy", "margin:k=2", "threshold:mu=0.4"])
def test_equals_the_plain_network_at_the_masked_share(rule, bos, tmp_path):
    path, w = write(tmp_path)
    denoiser = denoisers.load(path, device="cpu", bos=bos)
    assert (denoiser.family, denoiser.attention, denoiser.mask_id, denoiser.shift) == (
        "gidd",
        "bidirectional",
        TOKENS,
        0,
    )
    assert (denoiser.max_length, denoiser.published_block) == (LENGTH, None)
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [TOKENS, *range(VOCABULARY, VOCABULARY + 3)]
    duel = Duel(denoiser, rule, 4)
    together = duel.log_prob(WINDOWS)  # rows of several lengths: padding counts nowhere
    for window, scored in zip(WINDOWS, together, strict=True):
        count = None if bos == "given" else len(window.target)
        logits_of = lambda ids, count=count: plain(w, ids.tolist(), time_of(ids.tolist(), count))  # noqa: E731
        _, steps, nats, greedy, nfe = score(
            logits_of, TOKENS, denoiser.excluded, duel.rule, 4, window, tie_when_all_mask=True
        )
        assert scored.near_ties == 0
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
        assert scored.token_logprobs == close_nats(nats)
        [alone] = duel.log_prob([window])
        assert alone.reveal_steps == steps and alone.token_logprobs == close_nats(scored.token_logprobs)
    drawn = duel.sample([(0,), (0, 3)], 6, suffix=(1,), seed=1)
    again = duel.log_prob([Window(c, d.tokens, (1,)) for c, d in zip([(0,), (0, 3)], drawn, strict=True)])
    same_scores(drawn, again)


def test_the_network_equals_the_plain_one(tmp_path):
    path, w = write(tmp_path)
    denoiser = denoisers.load(path, device="cpu")
    for ids in ([3, TOKENS, 5, TOKENS, 0, 1, TOKENS], [1] * 12, [TOKENS] * 5):
        features = denoiser.features(torch.tensor([ids]), None, torch.tensor([0.3]))
        assert (denoiser.head(features[0]) - plain(w, ids, 0.3)).abs().max() < 1e-4


def test_its_time_matters_and_is_in_the_spec(tmp_path):
    path, _ = write(tmp_path)
    scores, specs = [], []
    for bos in ("given", "official"):
        denoiser = denoisers.load(path, device="cpu", bos=bos)
        specs.append(denoiser.describe())
        scores.append(Duel(denoiser, "greedy", 4).log_prob(WINDOWS[3:])[0].log_prob)
    assert abs(scores[0] - scores[1]) > 1e-2
    assert [spec["time"] for spec in specs] == [
        f"masked share of the {counted}, in [0.05, 1 - 0.05]" for counted in ("row", "scored positions")
    ]


def test_sums_to_one_and_the_bounds_are_bounds(tmp_path):
    path, _ = write(tmp_path, count=4, vocab_size=4)
    denoiser = denoisers.load(path, device="cpu")
    for rule in ("left_to_right", "greedy", "margin:k=2"):
        scored = Duel(denoiser, rule, 2).log_prob([Window((0,), s, (1,)) for s in strings(3, 3)])
        assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-4)
    window = Window((0,), (2, 1, 0, 1))
    mean = Lattice(denoiser, 4, value="elbo_exact").log_prob([window])[0].elbo_exact
    drawn = Elbo(denoiser, samples=256).log_prob([window])[0]
    assert abs(drawn.log_prob - mean) < 4 * drawn.stderr


def test_what_is_refused(tmp_path):
    path, _ = write(tmp_path / "gidd-small-p_unif-0.0")
    for asked, message in (
        ({"cache": "dual"}, "a gidd network gets another noise level at each step"),
        ({"sigma": "clamped"}, "no choice of 'sigma'"),
        ({"dtype": "bfloat16"}, "run in float32, not bfloat16"),
        ({"first_token": "block"}, "no choice of 'first_token'"),
        ({"tokenizer": tiny.tokenizer()}, r"The tokenizer has ids up to 33 but .* predicts 16"),
    ):
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu", **asked)
    for name, change, message in (
        ("gidd-small-p_unif-0.1", {"p_uniform": 0.1}, "trained with uniform noise"),
        ("gidd-base-p_unif-0.2", {}, "trained with uniform noise"),
        ("gidd-unif-3b", {}, "trained with uniform noise"),
        ("no-p", {"p_uniform": None}, "has no p_uniform"),
        ("a-text", {"p_uniform": "much"}, "'p_uniform'"),
        ("no-eps", {"t_eps": None}, "has no t_eps"),
        ("no-heads", {"num_attention_heads": None}, "has no num_attention_heads"),
        ("layers", {"num_hidden_layers": 99}, "Missing key"),
    ):
        path, _ = write(tmp_path / name, **change)
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu")


def test_a_plan_knows_its_kind(tmp_path):
    path, _ = write(tmp_path)
    planned, denoiser = unloaded.read(path, {}), denoisers.load(path, device="cpu")
    for name in ("family", "attention", "max_length", "published_block", "vocab_size", "bos"):
        assert getattr(planned, name) == getattr(denoiser, name)
    figures = plan(parse(["--model_args", f"pretrained={path}", "--tokens", "20"]))
    assert set(figures["methods"]) == {"exact", "elbo 128"}  # no cache: the noise level changes every key
