"""Our DiT against a plain reimplementation in float64, on tiny random checkpoints with the authors' file layout."""

import itertools
import json
import math
import re

import pytest
import tiny
import torch
from close import close_nats, same_scores
from dit_reference import BLOCK, CONFIGS, MDLM, SEDD, TOKENS, opened, plain, weights, write
from safetensors.torch import load_file, save_file
from textbook import score

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError

WHOLE_ROW = [kind for kind in CONFIGS if kind not in ("ar", "bd3lm")]
RULES = ["greedy", "margin:k=2", "threshold:mu=0.4", "klass:mu=0.3:nu=0.5"]


def until(length, block=1):
    """`seen` of a clean row: blocks up to the query's own; blocks of one are causal."""
    return torch.tensor([[i // block >= j // block for j in range(length)] for i in range(length)])


def sigma_of(kind, ids, count=None, schedule=False):
    """The noise level of a row, of `count` positions if not all."""
    if not kind.startswith("sedd"):
        return 0.0
    share = sum(token == TOKENS for token in ids) / (count or len(ids))
    return -math.log(1 - (1 - 1e-3) * share) if schedule else -math.log(1 - min(max(share, 0.1), 0.9))


def agrees(duel, windows, logits_of, mask_id=TOKENS, sees=None):
    """Assert that windows score as in the textbook loop over `logits_of(ids, window)`; the results."""
    results = duel.log_prob(windows)
    for window, scored in zip(windows, results, strict=True):
        _, steps, nats, greedy, nfe = score(
            lambda ids, window=window: logits_of(ids.tolist(), window),
            mask_id,
            duel.denoiser.excluded,
            duel.rule,
            duel.block,
            window,
            duel.grid,
            tie_when_all_mask=True,
            sees=sees,
        )
        assert scored.near_ties == 0
        assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe)
        assert scored.token_logprobs == close_nats(nats)
    return results


def total(duel, tokens, length, context=(), suffix=()):
    """The sum of exp(log_prob) over all strings."""
    strings = itertools.product(range(tokens), repeat=length)
    return sum(math.exp(s.log_prob) for s in duel.log_prob([Window(context, string, suffix) for string in strings]))


# ---------------------------------------------------------------- one network, whole rows


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "bd3lm"])
def test_the_network_equals_the_plain_one(kind, tmp_path):
    denoiser, w = opened(tmp_path, kind)
    assert denoiser.attention == ("causal" if kind == "ar" else "bidirectional")
    for ids in ([3, TOKENS, 5, TOKENS, 0, 1, TOKENS], [1] * 12, [TOKENS] * 5):
        sigma = sigma_of(kind, ids)
        features = denoiser.features(torch.tensor([ids]), None, torch.tensor([sigma]))
        seen = until(len(ids)) if kind == "ar" else None
        assert (denoiser.head(features[0]) - plain(w, ids, sigma, seen)).abs().max() < 1e-4
    padded = torch.tensor([[3, TOKENS, 5, 7, 7, 7], [3, TOKENS, 5, 1, 2, 4]])
    real = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    sigma = torch.tensor([0.4, 0.9])
    alone = denoiser.features(padded[:1, :3], None, sigma[:1])
    assert (denoiser.features(padded, real, sigma)[:1, :3] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("kind", WHOLE_ROW)
def test_lanes_equal_the_textbook_loop(kind, tmp_path):
    denoiser, w = opened(tmp_path, kind)
    windows = [Window((3,), (4, 5, 6, 7, 8, 1, 0)), Window((), (2, 2, 9)), Window((1, 1), (11, 10), (0,))]
    for rule in RULES:
        duel = Duel(denoiser, rule)
        assert (duel.block, duel.grid) == (4, "target")
        scored = agrees(duel, windows, lambda ids, window: plain(w, ids, sigma_of(kind, ids)))
        assert (sum(s.nfe for s in scored) < sum(len(s.token_logprobs) for s in scored)) == (rule != "greedy"), rule


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_the_ar_baseline_reads_from_left_to_right(backend, tmp_path):
    denoiser, w = opened(tmp_path, "ar", {"attn_backend": backend})
    duel = Duel(denoiser, "left_to_right")
    assert (denoiser.attention, denoiser.shift, denoiser.mask_id) == ("causal", 1, None)
    row = [12 - 1, 4, 5, 6, 0]
    logs = plain(w, row, seen=until(5))[:, :TOKENS].log_softmax(-1)
    scored = duel.log_prob([Window(row[:1], row[1:])])[0]
    assert scored.token_logprobs == close_nats([float(logs[i, row[i + 1]]) for i in range(4)])
    with pytest.raises(DuelError, match="Window 0 needs a context"):
        duel.log_prob([Window((), row)])
    assert (duel.counts.forwards, duel.counts.rows) == (1, 1)  # the whole window in one pass
    for k in (1, 2):  # blocks of one, whatever k
        again = Duel(denoiser, f"left_to_right:k={k}")
        assert again.block == 1
        assert again.log_prob([Window(row[:1], row[1:])])[0].token_logprobs == close_nats(scored.token_logprobs)


# ---------------------------------------------------------------- BD3-LM: block-causal


def two_streams(w, noisy, clean, block=BLOCK):
    """The authors' form: noisy | clean as one row of twice the length, each half at positions 0..L-1."""
    length = len(clean)

    def attends(query, key):
        q, k = query % length // block, key % length // block
        query_noisy, key_noisy = query < length, key < length
        if query_noisy == key_noisy:
            return q == k if query_noisy else q >= k
        return query_noisy and q > k

    seen = torch.tensor([[attends(i, j) for j in range(2 * length)] for i in range(2 * length)])
    return plain(w, [*noisy, *clean], seen=seen, positions=[*range(length)] * 2)[:length]


def prefix_and_block(w, noisy, clean, block=BLOCK):
    """Each block as the end of a row of its own: the clean blocks before it, and itself."""
    ends = [min(begin + block, len(clean)) for begin in range(0, len(clean), block)]
    rows = [[*clean[: begin * block], *noisy[begin * block : end]] for begin, end in enumerate(ends)]
    return torch.cat([plain(w, row, seen=until(len(row), block))[begin * block :] for begin, row in enumerate(rows)])


def kept_keys(denoiser, noisy, clean, at_once, block=BLOCK):
    """The package's stream: keys and values of the clean row, `at_once` of its blocks a call; then block by block."""
    past, logits, length = None, [], len(clean)
    for begin in range(0, length, at_once * block):
        end = min(begin + at_once * block, length)
        seen = until(end, block)[None, begin:end]
        _, new = denoiser.stream(torch.tensor([clean[begin:end]]), torch.arange(begin, end)[None], seen, past)
        past = [
            tuple(torch.cat(planes, 2) for planes in zip(*layers, strict=True))
            for layers in zip(*([past, new] if past else [new]), strict=True)
        ]
    for begin in range(0, length, block):
        end = min(begin + block, length)
        before = [tuple(plane[:, :, :begin] for plane in layer) for layer in past]
        seen = torch.ones(1, end - begin, end, dtype=torch.bool)
        ids = torch.tensor([noisy[begin:end]])
        features, _ = denoiser.stream(ids, torch.arange(begin, end)[None], seen, before if begin else None)
        logits.append(denoiser.head(features[0]))
    return torch.cat(logits)


@pytest.mark.parametrize("length", [16, 14])
def test_three_routes_to_a_block_are_one(length, tmp_path):
    denoiser, w = opened(tmp_path, "bd3lm")
    assert (denoiser.attention, denoiser.block, denoiser.mask_id) == ("block_causal", BLOCK, TOKENS)
    generator = torch.Generator().manual_seed(length)
    clean = torch.randint(TOKENS, (length,), generator=generator).tolist()
    for share in (0.3, 0.7, 1.0):
        masked = (torch.rand(length, generator=generator) < share).tolist()
        noisy = [TOKENS if hide else token for hide, token in zip(masked, clean, strict=True)]
        authors = two_streams(w, noisy, clean)
        assert (prefix_and_block(w, noisy, clean) - authors).abs().max() < 1e-9
        for at_once in (1, 2, 4):
            assert (kept_keys(denoiser, noisy, clean, at_once) - authors).abs().max() < 1e-4


BLOCKS = [
    Window((3,), (4, 5, 6, 7, 8, 1, 0)),
    Window((), (2, 2, 9, 10, 0, 7)),  # a short last block
    Window((1, 1), (11, 10, 3, 4, 9), (0,)),
    Window((1, 1, 5, 6, 7), (11, 10), (8,)),
    Window((), (8, 1, 9, 0, 10, 5, 2, 9, 0, 3, 4, 6, 1, 7, 11, 2)),
    Window((5, 9, 0, 1), (3,)),
]


@pytest.mark.parametrize("last_block", ["fill", "cut"])
@pytest.mark.parametrize("rule", RULES)
def test_block_causal_lanes_equal_the_textbook_loop(rule, last_block, tmp_path):
    denoiser, w = opened(tmp_path, "bd3lm", last_block=last_block)
    duel = Duel(denoiser, rule)
    assert (duel.block, duel.grid) == (BLOCK, "row")
    together = agrees(duel, BLOCKS, lambda ids, window: plain(w, ids, seen=until(len(ids), BLOCK)), sees=last_block)
    assert [scored.all_mask_starts for scored in together] == [0, 1, 0, 0, 1, 0]
    assert (sum(s.nfe for s in together) < sum(len(s.token_logprobs) for s in together)) == (rule != "greedy")
    same_scores(together, [duel.log_prob([window])[0] for window in BLOCKS])
    same_scores(together, Duel(denoiser, rule, batch_size=1).log_prob(BLOCKS[::-1])[::-1])
    drawn = duel.sample([window.context for window in BLOCKS], 9, seed=5)
    same_scores(drawn, duel.log_prob([Window(b.context, d.tokens) for b, d in zip(BLOCKS, drawn, strict=True)]))


def test_a_filled_last_block_is_another_law_than_a_cut_one(tmp_path):
    values = []
    for last_block in ("fill", "cut"):
        denoiser, _ = opened(tmp_path, "bd3lm", last_block=last_block)
        values.append(Duel(denoiser).log_prob(BLOCKS))
    assert [abs(a.log_prob - b.log_prob) > 1e-2 for a, b in zip(*values, strict=True)] == [
        window.length % BLOCK > 0 for window in BLOCKS
    ]


@pytest.mark.parametrize(("rule", "last_block"), [("margin:k=2", "fill"), ("threshold:mu=0.4", "cut")])
def test_block_causal_sums_to_one(rule, last_block, tmp_path):
    denoiser, _ = opened(tmp_path, "bd3lm", {"vocab_size": 4, "block_size": 2}, last_block=last_block)
    duel = Duel(denoiser, rule)
    assert abs(total(duel, 3, 4) - 1) < 1e-4
    assert abs(total(duel, 3, 4, context=(1,)) - 1) < 1e-4
    assert abs(total(duel, 3, 3, context=(2, 0), suffix=(1,)) - 1) < 1e-4


def test_what_a_block_causal_network_refuses(tmp_path):
    path, _ = write(tmp_path, "bd3lm")
    denoiser = denoisers.load(path, device="cpu")
    for block in (8, 1, None):
        with pytest.raises(DuelError, match=f"block={block}"):
            Duel(denoiser, block=block)
    with pytest.raises(DuelError, match="Window 0 has 17 positions but the network holds 16"):
        Duel(denoiser).log_prob([Window((), (1,) * 17)])
    with pytest.raises(DuelError, match="its last target block ends at 3"):
        Duel(denoiser).log_prob([Window((), (1,) * 4, (2,))])
    short = denoisers.load(path, device="cpu", max_length=8)
    same_scores(Duel(short).log_prob(BLOCKS[:2]), Duel(denoiser).log_prob(BLOCKS[:2]))
    with pytest.raises(DuelError, match="has 9 positions but the network holds 8"):
        Duel(short).log_prob([Window((), (1,) * 9)])
    with pytest.raises(DuelError, match=r"max_length=17 is too long: .* 16 positions"):
        denoisers.load(path, device="cpu", max_length=17)
    write(tmp_path, "bd3lm", time_conditioning=True)
    with pytest.raises(DuelError, match="A block-causal network with time conditioning is not supported"):
        denoisers.load(path, device="cpu")


# ---------------------------------------------------------------- SEDD: told the noise level


@pytest.mark.parametrize(
    ("kind", "sigma", "bos"),
    [("sedd", "clamped", "given"), ("sedd", "schedule", "official"), ("sedd-retrained", "clamped", "official")],
)
def test_sedd_is_told_the_masked_share(kind, sigma, bos, tmp_path):
    denoiser, w = opened(tmp_path, kind, sigma=sigma, bos=bos)
    assert denoiser.describe()["sigma"] == f"{sigma}, of the masked share of the " + (
        "scored positions" if bos == "official" else "row"
    )
    rows = [(3, 4, 5, 6, 7, 8, 1, 0, 11, 10, 2, 2, 9), (9, 2, 2, 9, 10), (0, 7)]
    windows = [
        Window((), row[:-1], row[-1:]) for row in rows
    ]  # the authors': the last token is given, the first is not
    if bos == "given":
        windows += [Window((3,), (4, 5, 6, 7, 8, 1, 0)), Window((1, 1, 6, 2, 8), (11, 10), (0, 5))]

    def logits_of(ids, window):
        count = len(window.target) if bos == "official" else window.length
        return plain(w, ids, sigma_of("sedd", ids, count, sigma == "schedule"))

    for rule in ("greedy", "klass:mu=0.3:nu=0.5"):
        duel = Duel(denoiser, rule)
        together = agrees(duel, windows, logits_of)  # rows of several lengths: padding counts nowhere
        same_scores(together, [duel.log_prob([window])[0] for window in windows])


def test_the_four_noise_levels_are_four_laws(tmp_path):
    window = Window((), (3, 4, 5, 6, 7, 8, 1, 0, 11, 9, 2, 2, 9, 10, 7), (8,))
    values = [
        Duel(opened(tmp_path, "sedd", sigma=sigma, bos=bos)[0]).log_prob([window])[0].log_prob
        for sigma in ("clamped", "schedule")
        for bos in ("given", "official")
    ]
    assert min(abs(a - b) for a, b in itertools.combinations(values, 2)) > 1e-2


def test_the_noise_level_loses_no_digits_near_a_row_of_masks(tmp_path, monkeypatch):
    denoiser, _ = opened(tmp_path, "sedd", sigma="schedule")
    told, features = [], denoiser.features

    def record(ids, real, sigma, columns):
        told.extend(sigma.tolist())
        return features(ids, real, sigma, columns)

    monkeypatch.setattr(denoiser, "features", record)
    Duel(denoiser, block=None).log_prob([Window((), (3, 4, 5, 6))])
    assert told == pytest.approx([-math.log(1 - (1 - 1e-3) * share) for share in (1, 0.75, 0.5, 0.25)], abs=1e-6)


@pytest.mark.parametrize(("bos", "sigma"), [("given", "schedule"), ("official", "clamped")])
def test_sedd_sums_to_one_and_scores_its_samples(sigma, bos, tmp_path):
    path, _ = write(tmp_path, "sedd")
    duel = Duel(denoisers.load(path, device="cpu", sigma=sigma, bos=bos), "margin:k=2", block=3)
    for extra in ({}, {"tail": 3}):
        drawn = duel.sample([(), (1,), (2, 2)], 6, suffix=(4,), seed=1, **extra)
        contexts = ((), (1,), (2, 2))
        windows = [Window(c, d.tokens, (4,), **extra) for c, d in zip(contexts, drawn, strict=True)]
        same_scores(drawn, duel.log_prob(windows))
    (tmp_path / "config.json").write_text(json.dumps({**SEDD, "tokens": 3}))
    torch.save(weights(True, "", 4), tmp_path / "pytorch_model.bin")
    tiny_duel = Duel(denoisers.load(path, device="cpu", sigma=sigma, bos=bos), block=2)
    assert abs(total(tiny_duel, 3, 4, suffix=(1,)) - 1) < 1e-4


# ---------------------------------------------------------------- which column is [MASK]


def test_the_mask_is_as_asked_else_of_config_else_of_the_tokenizer_else_the_last(tmp_path):
    def mask(changes=None, **asked):
        denoiser, _ = opened(tmp_path, "mdlm", {"vocab_size": 34, **(changes or {})}, **asked)
        assert denoiser.excluded.nonzero()[:, 0].tolist() == [denoiser.mask_id]
        return denoiser.mask_id

    assert mask() == mask(tokenizer=tiny.tokenizer(mask=False)) == 33
    assert mask(tokenizer=tiny.tokenizer()) == 4
    assert mask({"mask_token_id": 7}, tokenizer=tiny.tokenizer()) == 7
    assert mask({"mask_token_id": 7}, mask_token_id=9) == 9
    assert mask(mask_token_id=0) == 0
    with pytest.raises(DuelError, match=r"mask_token_id=34 is not an id of .*; its ids are 0 to 33"):
        mask(mask_token_id=34)
    with pytest.raises(DuelError, match=r"'mask_token_id' is .*; got '-1'"):
        mask(mask_token_id=-1)
    with pytest.raises(DuelError, match=r"mask_token_id=50257 is not an id of .*; its ids are 0 to 33"):
        mask({"mask_token_id": 50257})


@pytest.mark.parametrize("vocabulary", [34, 40])
def test_a_tokenizer_with_a_mask_of_its_own(vocabulary, tmp_path):
    """As in LM1B, by BERT's vocabulary: the last column is a token, or padding of the table."""
    tiny.tokenizer().save_pretrained(tmp_path)
    denoiser, w = opened(tmp_path, "mdlm", {"vocab_size": vocabulary})
    assert denoiser.mask_id == 4
    assert denoiser.excluded.nonzero()[:, 0].tolist() == [4, *range(34, vocabulary)]
    windows = [Window((2,), (33, 5, 12, 33, 31, 1), (3,)), Window((), (33, 32, 3))]
    agrees(Duel(denoiser), windows, lambda ids, window: plain(w, ids), mask_id=4)
    for token, message in ((4, "holds the mask token"), (34, "id 34")):
        with pytest.raises(DuelError, match=message):
            Duel(denoiser).log_prob([Window((2,), (token,))])


# ---------------------------------------------------------------- refusals


def test_args_that_do_not_apply_are_refused(tmp_path):
    path, _ = write(tmp_path, "mdlm")
    for asked, message in {
        ("family", "mdml"): r"By its config\.json .* is mdlm, not mdml; leave family out",
        ("family", "sedd"): r"By its config\.json .* is mdlm, not sedd; leave family out",
        ("attention", "block_causal"): r"By its config\.json .* is bidirectional, not block_causal",
        ("dtype", "bfloat16"): "run in float32, not bfloat16; leave dtype out",
        ("sigma", "clamped"): "no choice of 'sigma'",
        ("backend", "native"): "of the family DiT, which has no choice of 'backend'; leave it out",
        ("shift_logits", True): "no choice of 'shift_logits'",
        ("cfg_scale", 1.5): "no choice of 'cfg_scale'",
        ("peft", "folder"): "no choice of 'peft'",
        ("device_map", "auto"): "no choice of 'device_map'",
        ("load_in_8bit", True): "no choice of 'load_in_8bit'",
        ("load_in_4bit", True): "no choice of 'load_in_4bit'",
    }.items():
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu", **dict([asked]))
    denoisers.load(path, device="cpu", family="mdlm", attention="bidirectional", dtype="float32", shift_logits=False)
    with pytest.raises(DuelError, match=r"The tokenizer has ids up to 33 but .* predicts 13"):
        denoisers.load(path, device="cpu", tokenizer=tiny.tokenizer())
    path, _ = write(tmp_path, "sedd-retrained")
    with pytest.raises(DuelError, match=r"Unknown value of sigma 'shedule'\. Did you mean schedule\?"):
        denoisers.load(path, device="cpu", sigma="shedule")


def test_wrong_checkpoints(tmp_path):
    path, _ = write(tmp_path, "mdlm")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def broken(message, change):
        save_file(change(dict(tensors)), file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=message):
            denoisers.load(path, device="cpu")

    gone = "backbone.blocks.1.mlp.0.bias"
    broken(r"Missing key.*blocks\.1\.mlp\.0\.bias", lambda t: {k: v for k, v in t.items() if k != gone})
    broken(r"Unexpected key.*blocks\.9\.norm1", lambda t: {**t, "backbone.blocks.9.norm1.weight": torch.ones(2)})
    broken(r"size mismatch for blocks\.1\.mlp\.0\.bias", lambda t: {**t, gone: torch.ones(3)})
    broken("both with and without backbone", lambda t: {**t, "vocab_embed.embedding": torch.ones(13, 16)})
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DuelError, match=re.escape(f"Cannot read {file}")):
        denoisers.load(path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in MDLM.items() if k != "hidden_dim"}))
    with pytest.raises(DuelError, match=r"config\.json of .* has no hidden_dim, which"):
        denoisers.load(path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mdlm", "vocab_size": 13, "n_heads": None}))
    with pytest.raises(DuelError, match="has no hidden_dim, n_blocks, n_heads, model_length, which its family"):
        denoisers.load(path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**SEDD, "graph": {"type": "uniform"}}))
    with pytest.raises(DuelError, match=r"^This SEDD has a uniform graph: without a mask state"):
        denoisers.load(path, device="cpu")


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("bd3lm", "block_size", (0, -4, 3.5, True)),
        ("bd3lm", "causal", ("fasle", 2)),
        ("mdlm", "time_conditioning", ("no", [1])),
        ("mdlm", "n_heads", ("two", 2.5, True, 0, [2])),
        ("sedd", "graph", ("absorb", ["absorb"])),
    ],
)
def test_entries_of_a_wrong_type(kind, key, values, tmp_path):
    path, _ = write(tmp_path, kind)
    for value in values:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[kind], key: value}))
        with pytest.raises(DuelError):
            denoisers.load(path, device="cpu")
    null = {**CONFIGS["bd3lm"], "block_size": None, "causal": None, "adaln": None, "time_conditioning": None}
    (tmp_path / "config.json").write_text(json.dumps(null))
    if kind == "bd3lm":  # an entry that is null is one that is not there
        assert denoisers.load(path, device="cpu").family == "mdlm"
