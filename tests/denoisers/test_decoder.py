"""Decoder families against a plain reimplementation in float64, on tiny random checkpoints with real file layouts."""

import dataclasses
import functools
import itertools
import json
import math
import re

import plain
import pytest
import tiny
import torch
from close import close_nats
from decoder_reference import CASES, LLAMA, MASK, write
from laws import slow_but
from safetensors.torch import load_file, save_file
from textbook import score

from lm_eval_duel import Duel, denoisers, rules
from lm_eval_duel.bench.loops import algorithm2
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.hf import families
from lm_eval_duel.errors import DuelError

RULES = ["greedy", "margin:k=2", "threshold:mu=0.3"]
WINDOWS = [
    Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)),
    Window((14, 20, 9), (10, 9, 31, 12), (13,)),
    Window((22, 6, 17, 17, 2), (33, 6, 7, 18)),
    Window((), (8, 8, 20, 31, 6)),  # a all_mask start; not where logits are shifted
]


BIDIRECTIONAL = [name for name, case in CASES.items() if case.attention == "bidirectional"]
BLOCK_CAUSAL = [name for name, case in CASES.items() if case.attention == "block_causal"]
NEMOTRON = "nemotron-labs-diffusion"
ALIKE = ("mmada", "smdm", "d2f-dream")  # of a class, mask and shift that others have: only their layout is new
ALIKE += ("diffullama", "nemotron-diffusion-research")
KINDS = ["llada", "dream", "llada2", "fast-dllm-v2", "sdar-moe", "d2f-llada", NEMOTRON, "diffugpt"]  # one of each way
SCORED = slow_but(CASES, KINDS)


def load(path, case, **others):
    return denoisers.load(path, device="cpu", **{**case.options, **others})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a case: its denoiser, and the plain network's logits of ids, remembered."""

    @functools.cache
    def checkpoint(name):
        case = CASES[name]
        path, w = write(tmp_path_factory.mktemp("backbone"), case)

        @functools.cache
        def logits(ids, origin=0):
            """`origin`: the first target position, for networks whose blocks count from there."""
            if case.attention == "causal_prefix":
                begin = origin + (ids.index(case.mask) - origin) // case.block * case.block  # of the block in progress
                found = plain.logits(case.net, w, ids, plain.causal_prefix(len(ids), begin))
                found[begin] = found[begin - 1]  # its first token is predicted by the clean position before it
                return found
            first = origin if case.anchor == "target" else 0
            seen = plain.everywhere(len(ids)) if case.block is None else plain.block_causal(len(ids), case.block, first)
            return plain.logits(case.net, w, ids, seen)

        return path, logits

    @functools.cache
    def find(name, last_block="fill"):
        path, logits = checkpoint(name)
        return load(path, CASES[name], last_block=last_block), logits

    return find


def test_every_family_is_here():
    assert {name for name in CASES if not name.startswith("plain")} == set(families.NAMED)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_at_load(found, name):
    case, denoiser = CASES[name], found(name)[0]
    assert denoiser.family == ("decoder" if name.startswith("plain") else name)
    assert (denoiser.attention, denoiser.shift, denoiser.bos) == (
        case.attention,
        case.shift,
        "given" if case.shift else case.bos,
    )
    assert (denoiser.block, denoiser.published_block) == (case.block, case.published)
    assert (denoiser.mask_id, denoiser.max_length, denoiser.vocab_size) == (case.mask, case.length, case.rows)
    unused = {case.mask, *range(len(tiny.WORDS), case.rows)}
    assert set(denoiser.excluded.nonzero()[:, 0].tolist()) == unused
    assert denoiser.relative_positions == case.relative
    assert denoiser.seeds_blocks == (name == NEMOTRON)
    assert denoiser.honours_padding
    assert denoiser.supports_columns == (name != "diffugpt")  # GPT-2's layers have another form


IDS = [[6, MASK, 9, 9, MASK, 30, 12, MASK, 8, MASK, 15], [17] * 9, [MASK] * 5]


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_the_network_equals_the_plain_one(found, name):
    denoiser, right = found(name)
    for ids in IDS:
        ids = [CASES[name].mask if token == MASK else token for token in ids]
        ours = denoiser.head(denoiser.features(torch.tensor([ids]), None)[0])
        assert (ours - right(tuple(ids))).abs().max() < 1e-4
    padded = torch.tensor([[6, 7, 9, 5, 5, 5], [6, 7, 9, 30, 12, 8]])
    real = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    features = denoiser.features(padded, real)
    assert (denoiser.head(features[0, :3]) - right((6, 7, 9))).abs().max() < 1e-4
    assert (denoiser.head(features[1]) - right((6, 7, 9, 30, 12, 8))).abs().max() < 1e-4


@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_the_stream_equals_the_plain_network(found, name):
    denoiser, right = found(name)
    block = denoiser.block
    for ids in IDS:
        ids = [CASES[name].mask if token == MASK else token for token in ids]
        row, position = torch.tensor([ids]), torch.arange(len(ids))[None]
        seen = torch.tensor(plain.block_causal(len(ids), block))[None]
        features, _ = denoiser.stream(row, position, seen, None)
        assert (denoiser.head(features[0]) - right(tuple(ids))).abs().max() < 1e-4
        before, past = denoiser.stream(row[:, :block], position[:, :block], seen[:, :block, :block], None)
        if len(ids) > block:  # a second call on the keys and values of the first
            after, _ = denoiser.stream(row[:, block:], position[:, block:], seen[:, block:], past)
            again = denoiser.head(torch.cat([before, after], 1)[0])
            assert (again - right(tuple(ids))).abs().max() < 1e-4


def textbook(name, denoiser, right, rule, window):
    """One window by the textbook loop over the plain network."""
    shift, rule = CASES[name].shift, rules.parse(rule)
    rule = rules.SeedFirst(rule) if denoiser.seeds_blocks else rule
    return score(
        lambda ids: right(tuple(ids.tolist()), len(window.context)).roll(shift, 0),
        denoiser.mask_id,
        denoiser.excluded,
        rule,
        denoiser.block or 4,
        window,
        denoiser.anchor if denoiser.attention == "block_causal" else "target",
        tie_when_all_mask=True,
        sees=denoiser.last_block if denoiser.block else None,
    )


def windows_of(name):
    """Those that the network can score: no all_mask start under a shift, no suffix past the last block."""
    case = CASES[name]
    windows, past = WINDOWS, case.block == 2 or case.attention == "causal_prefix"  # the suffix lies past the last block
    if case.anchor == "target":  # the last block ends with the suffix
        windows = [dataclasses.replace(w, target=w.target[:3]) if w.suffix else w for w in WINDOWS]
    least = max(case.shift, name == NEMOTRON)
    return [window for window in windows if len(window.context) >= least and not (window.suffix and past)]


ENDS = [(name, "fill") for name in CASES] + [(name, "cut") for name in (*BLOCK_CAUSAL, NEMOTRON)]
ENDS = [pytest.param(*end, marks=pytest.mark.slow) if end[0] in ALIKE else end for end in ENDS]


@pytest.mark.parametrize(("name", "last_block"), ENDS)
def test_lanes_equal_the_textbook_loop(found, name, last_block):
    denoiser, right = found(name, last_block)
    windows = windows_of(name)
    for rule in RULES:
        duel = Duel(denoiser, rule, "auto" if denoiser.block else 4)
        for window, scored in zip(windows, duel.log_prob(windows), strict=True):
            _, steps, nats, greedy, nfe = textbook(name, denoiser, right, rule, window)
            assert scored.near_ties == 0, "choose another seed: the order is at the mercy of float noise here"
            assert (scored.reveal_steps, scored.is_greedy, scored.nfe) == (steps, greedy, nfe), rule
            assert scored.token_logprobs == pytest.approx(nats, abs=1e-4), rule


@pytest.mark.parametrize("name", SCORED)
def test_a_window_alone_equals_the_window_in_a_batch(found, name):
    denoiser, _ = found(name)
    block = "auto" if denoiser.block else 4
    windows = windows_of(name)
    duel = Duel(denoiser, "greedy", block)
    alone = [duel.log_prob([window])[0] for window in windows]
    for batch_size in (2, None):
        together = Duel(denoiser, "greedy", block, batch_size=batch_size).log_prob(windows)
        for scored, again in zip(together, alone, strict=True):
            assert again.reveal_steps == scored.reveal_steps
            assert again.token_logprobs == pytest.approx(scored.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "diffugpt"])
def test_the_last_layer_at_the_wanted_positions_changes_no_number(name, tmp_path, monkeypatch):
    denoiser = load(write(tmp_path, CASES[name])[0], CASES[name], dtype="float64")
    caches = ("prefix", "dual") if denoiser.attention == "bidirectional" and not denoiser.shift else ()
    for network in [denoiser, *(Cached(denoiser, cache) for cache in caches)]:
        narrow = Duel(network, "greedy").log_prob(windows_of(name))
        with monkeypatch.context() as patch:
            patch.setattr(denoiser, "supports_columns", False)
            whole = Duel(network, "greedy").log_prob(windows_of(name))
        for one, other in zip(narrow, whole, strict=True):
            within = 1e-5 if name == "llada2" else 1e-9  # its router runs in float32
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=within)
    assert "forward" not in vars(denoiser.model.base_model.layers[-1])


@pytest.mark.parametrize("name", KINDS)
def test_samples_are_scored_as_they_were_drawn(found, name):
    denoiser, _ = found(name)
    contexts = [(6,), (14, 20, 9), (22, 6, 17, 17, 2)]
    for rule in RULES:
        duel = Duel(denoiser, rule, "auto" if denoiser.block else 4)
        drawn = duel.sample(contexts, 7, seed=3)
        scored = duel.log_prob([Window(c, d.tokens) for c, d in zip(contexts, drawn, strict=True)])
        for d, s in zip(drawn, scored, strict=True):
            assert (s.near_ties, s.reveal_steps, s.nfe) == (0, d.reveal_steps, d.nfe), rule
            assert s.token_logprobs == pytest.approx(d.token_logprobs, abs=1e-4), rule


@pytest.mark.parametrize("name", SCORED)
def test_all_pairs_of_tokens_sum_to_one(found, name):
    denoiser, _ = found(name)
    tokens = (~denoiser.excluded).nonzero()[:, 0].tolist()
    pairs = [Window((6, 7), pair) for pair in itertools.product(tokens, repeat=2)]
    scored = Duel(denoiser, "greedy", "auto" if denoiser.block else 4).log_prob(pairs)
    assert math.fsum(math.exp(s.log_prob) for s in scored) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", SCORED)
def test_left_to_right_is_the_chain_rule_and_k_the_marginals(found, name):
    denoiser, right = found(name)
    block, mask = denoiser.block or 4, denoiser.mask_id
    counted = 2 if denoiser.anchor == "target" or denoiser.seeds_blocks else 4  # positions from where blocks begin
    short = [mask] * (-counted % block if denoiser.block else 0)  # a short last block is shown filled up

    def logs(*row):
        logits = right((*row, *short), 2).roll(CASES[name].shift, 0)
        return logits.masked_fill(denoiser.excluded, -math.inf).log_softmax(-1)

    first, second = logs(6, 7, mask, mask), logs(6, 7, 9, mask)
    window = [Window((6, 7), (9, 30))]
    one, two = (Duel(denoiser, f"l2r:k={k}", "auto" if denoiser.block else 4).log_prob(window)[0] for k in (1, 2))
    assert one.token_logprobs == close_nats([float(first[2, 9]), float(second[3, 30])])
    if block > 1 and 2 // block == 3 // block and not denoiser.seeds_blocks:
        assert two.token_logprobs == close_nats([float(first[2, 9]), float(first[3, 30])])


# ---------------------------------------------------------------- plain decoders, and what the user says


def test_a_causal_decoder_is_the_chain_rule(tmp_path):
    case = dataclasses.replace(CASES["plain bidirectional"], options={"attention": "causal"}, tokenizer={"mask": False})
    path, w = write(tmp_path, case)
    denoiser = load(path, case)
    assert (denoiser.attention, denoiser.shift, denoiser.mask_id, denoiser.block) == ("causal", 1, None, None)
    row = (6, 7, 9, 30, 12, 8)
    right = plain.logits(case.net, w, row, plain.causal(len(row)))
    ours = denoiser.head(denoiser.features(torch.tensor([row]), None)[0])
    assert (ours - right).abs().max() < 1e-4
    logs = right.masked_fill(denoiser.excluded, -math.inf).log_softmax(-1)
    scored = Duel(denoiser, "left_to_right").log_prob([Window(row[:1], row[1:]), Window(row[:2], row[2:3])])
    assert scored[0].token_logprobs == close_nats([float(logs[i, row[i + 1]]) for i in range(5)])
    assert scored[1].token_logprobs == close_nats([float(logs[1, row[2]])])
    with pytest.raises(DuelError, match="A causal network reveals left to right only"):
        Duel(denoiser, "greedy")


def test_where_the_trained_block_comes_from(tmp_path, caplog):
    path, _ = write(tmp_path, dataclasses.replace(CASES["fast-dllm-v2"], folder="fast"))
    denoiser = denoisers.load(path, device="cpu")
    assert denoiser.block == 32  # not config.bd_size
    sdar = CASES["sdar"]
    for n, (config, options, block) in enumerate(
        [({"block_size": 16}, {}, 16), ({"block_size": None}, {}, 4), ({"block_size": None}, {"block": 8}, 8)]
    ):
        case = dataclasses.replace(sdar, config={**sdar.config, **config}, folder=f"sdar-{n}")
        path, _ = write(tmp_path, case)
        assert load(path, case, **options).block == block
    assert "sdar networks are trained on blocks of 4; using block=8" in caplog.text
    case = CASES["plain block_causal"]
    path, _ = write(tmp_path, case)
    with pytest.raises(DuelError, match=r"is block-causal and its config has no block; pass block=<the trained one>"):
        denoisers.load(path, device="cpu", attention="block_causal")


def test_another_block_is_another_network(found):
    denoiser, _ = found("sdar")
    with pytest.raises(DuelError, match=r"trained on blocks of 4: .* so block=8 would be another network"):
        Duel(denoiser, "greedy", 8)
    with pytest.raises(DuelError, match="counts its blocks from the row's first position"):
        Duel(denoiser, "greedy", grid="target")


# ---------------------------------------------------------------- D2F: the context is one block


@pytest.mark.parametrize("name", ["d2f-llada", "d2f-dream"])
def test_blocks_count_from_the_target_whatever_the_context(found, name, monkeypatch):
    """Contexts that end anywhere, long ones in one piece; equal rows with other contexts are other windows."""
    monkeypatch.setattr("lm_eval_duel.core.block_causal.CLEAN", 4)
    denoiser, right = found(name)
    row = (6, 7, 9, 30, 12, 8, 15, 21, 11, 14, 20, 9, 10, 9, 31, 12, 22, 6)
    windows = [Window(row[:n], row[n:]) for n in (2, 11)]
    duel = Duel(denoiser, "greedy")
    for window, scored in zip(windows, duel.log_prob(windows), strict=True):
        _, steps, nats, _, _ = textbook(name, denoiser, right, "greedy", window)
        assert scored.near_ties == 0 and scored.reveal_steps == steps
        assert scored.token_logprobs == close_nats(nats)
        loop = algorithm2(duel, [window])  # that of bench
        assert loop.reveal_steps[0].tolist() == list(steps)
        assert loop.token_logprobs[0].tolist() == close_nats(nats)
    with pytest.raises(
        DuelError, match=r"This network counts its blocks from the target's first position; use grid=ta"
    ):
        Duel(denoiser, "greedy", grid="row")
    assert denoiser.describe()["context"] == "one block" and "context" not in found("sdar")[0].describe()


def test_the_context_is_seen_whole_and_no_later_block(found):
    denoiser, _ = found("d2f-llada")
    first = Duel(denoiser, "greedy").log_prob([Window((6, 7, 9), (30, 12, 8, 15))])[0]
    longer = Duel(denoiser, "greedy").log_prob([Window((6, 7, 9), (30, 12, 8, 15, 21, 11))])[0]
    assert longer.token_logprobs[:4] == close_nats(first.token_logprobs)
    tail = Duel(denoiser, "greedy").log_prob([Window((6, 7, 9), (30, 12, 8, 15), tail=4)])[0]
    assert tail.token_logprobs == close_nats(first.token_logprobs)
    with pytest.raises(DuelError, match="has a suffix up to position 8, but its last target block ends at 6"):
        Duel(denoiser, "greedy").log_prob([Window((6, 7, 9), (30, 12, 8), (5, 5, 5))])


def test_the_block_of_d2f_is_the_published_one_or_any_other(tmp_path, caplog):
    path, _ = write(tmp_path, CASES["d2f-llada"])
    assert denoisers.load(path, device="cpu", family="d2f-llada").block == 32
    assert denoisers.load(path, device="cpu", family="d2f-llada", block=16).block == 16
    assert not caplog.text
    assert denoisers.load(path, device="cpu", family="d2f-llada", block=8).block == 8
    assert "d2f-llada networks are trained on blocks of 16; using block=8" in caplog.text
    with pytest.raises(DuelError, match="backend=remote does not support the family d2f-llada; leave backend out"):
        denoisers.load(path, device="cpu", family="d2f-llada", backend="remote", trust_remote_code=True)


def test_bd3lm_in_a_name_can_be_overruled(tmp_path, caplog):
    case = CASES["a2d-qwen3-bd3lm"]
    path, _ = write(tmp_path, case)
    assert denoisers.load(path, device="cpu").family == "a2d-qwen3-bd3lm"
    assert "is taken as a2d-qwen3-bd3lm; its config does not say" in caplog.text
    for options in ({"family": "a2d-qwen3"}, {"attention": "bidirectional"}):
        denoiser = denoisers.load(path, device="cpu", **options)
        assert (denoiser.family, denoiser.attention, denoiser.block) == ("a2d-qwen3", "bidirectional", None)


@pytest.mark.parametrize("name", ["dream", "rnd1"])
def test_dtypes(name, tmp_path):
    path, _ = write(tmp_path, CASES[name])
    exact = Duel(load(path, CASES[name]), "left_to_right").log_prob(WINDOWS[:3])
    for dtype, tolerance in (("float64", 1e-4), ("bfloat16", 2.0)):
        denoiser = load(path, CASES[name], dtype=dtype)
        assert str(denoiser.dtype) == f"torch.{dtype}"
        scored = Duel(denoiser, "left_to_right").log_prob(WINDOWS[:3])
        assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in exact], abs=tolerance)


def test_lengths(tmp_path):
    path, _ = write(tmp_path, CASES["dream"])
    assert load(path, CASES["dream"], max_length=16).max_length == 16
    with pytest.raises(DuelError, match=r"max_length=4096 is too long: .* 2048 positions"):
        load(path, CASES["dream"], max_length=4096)


# ---------------------------------------------------------------- wrong checkpoints


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("llada", "model.transformer.ff_out.weight"),
        ("dream", "model.layers.1.self_attn.k_proj.bias"),
        ("llada2", "model.layers.1.mlp.gate.expert_bias"),
        ("llada2", "model.layers.2.attention.query_key_value.weight"),
    ],
)
def test_tensors_that_do_not_fit(name, gone, tmp_path, caplog):
    case = dataclasses.replace(CASES[name], store="whole")
    path, _ = write(tmp_path, case)
    file = tmp_path / case.folder / "model.safetensors"
    tensors = load_file(file)
    other = next(key for key in tensors if key != gone and tensors[key].dim() == 2)
    inside = re.escape(gone)

    def broken(message, change):
        save_file(change(dict(tensors)), file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=message):
            load(path, case)

    broken(r"do not fill .*ForCausalLM: \d missing: ", lambda t: {k: t[k] for k in t if k != gone})
    broken(r"1 unknown: model\.layers\.9\.x\.weight\.", lambda t: {**t, "model.layers.9.x.weight": torch.ones(2)})
    broken(rf"\d of another shape: {inside} is ", lambda t: {**t, gone: t[gone][:3].clone()})
    broken(  # all at once
        rf"\d missing: .*; 1 unknown: model\.extra; \d of another shape: {inside}",
        lambda t: {k: t[k] for k in t if k != other} | {"model.extra": torch.ones(2), gone: t[gone][:3].clone()},
    )
    assert not re.search("newly initialized|LOAD REPORT", caplog.text)


@pytest.mark.parametrize("name", ["rnd1", "llada2"])
def test_experts_that_do_not_fit(name, tmp_path):
    case = CASES[name]
    path, _ = write(tmp_path, case)
    file = tmp_path / case.folder / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    other = key.replace("experts.2.", "experts.77.")
    for message, change in (
        (f"1 missing: {key}.", {k: t for k, t in tensors.items() if k != key}),
        ("6 missing: ", {k: t for k, t in tensors.items() if ".experts.2." not in k}),
        (f"1 unknown: {other}.", {**tensors, other: tensors[key].clone()}),
        ("6 missing: ", {k.replace("experts.2.", "experts.77."): t for k, t in tensors.items()}),
        (f"1 of another shape: {key} is (5, 16), not (16, 16).", {**tensors, key: tensors[key][:5].clone()}),
    ):
        save_file(change, file, metadata={"format": "pt"})
        with pytest.raises(DuelError, match=f"do not fill .*ForCausalLM: {re.escape(message)}"):
            load(path, case)


def test_broken_numbers(tmp_path):
    case = CASES["a2d-llama"]
    path, _ = write(tmp_path, case)
    file = tmp_path / case.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DuelError, match="returns NaN or infinite logits for arbitrary tokens"):
        load(path, case)


def test_a_tokenizer_of_another_model(found, tmp_path):
    words = tiny.tokenizer()
    words.add_tokens([f"new{i}" for i in range(20)])
    case = CASES["rnd1"]
    path, _ = write(tmp_path, case)
    with pytest.raises(DuelError, match=r"has ids up to 53 but .* predicts 40: they do not belong together"):
        load(path, case, tokenizer=words)


def test_the_mask(tmp_path):
    case = CASES["a2d-qwen3"]
    path, _ = write(tmp_path, dataclasses.replace(case, tokenizer={"mask": False}))
    for options, named in (
        ({}, "pass mask_token_id"),
        ({"mask_token_id": tiny.ROWS}, f"mask_token_id={tiny.ROWS} .* 0 to 39"),
        ({"mask_token_id": -1}, "'mask_token_id'"),
        ({"mask_token_id": 0}, "mask_token_id=0 .*pad_token_id"),
    ):
        with pytest.raises(DuelError, match=named):
            load(path, case, **options)
    assert load(path, case, mask_token_id=39).mask_id == 39
    moe = dataclasses.replace(CASES["llada-moe"], tokenizer={"mask": False}, folder="moe")
    path, _ = write(tmp_path, moe)
    with pytest.raises(DuelError, match=r"mask_token_id=156895 is not an id of .*; its ids are 0 to 39"):
        load(path, moe)  # the family's own


def test_names(tmp_path):
    path, _ = write(tmp_path, CASES["open-dllm"])
    with pytest.raises(DuelError, match=r"Unknown family 'open-dlm'\. Did you mean open-dllm\? Known: a2d-llama, "):
        denoisers.load(path, device="cpu", family="open-dlm")
    with pytest.raises(DuelError, match=r"is a Qwen2ForCausalLM, an autoregressive network; score it with"):
        denoisers.load(path, device="cpu")
    with pytest.raises(DuelError, match="is of the family open-dllm, which has no choice of 'sigma'; leave it out"):
        denoisers.load(path, device="cpu", family="open-dllm", sigma="clamped")


def test_networks_without_a_law_are_refused(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for given in families.REFUSED:
        for named in ({"architectures": [given]}, {"auto_map": {"AutoModel": f"code.{given}"}}):
            (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama", **named}))
            with pytest.raises(DuelError, match=given):
                denoisers.load(str(tmp_path), device="cpu")


def test_diffugpt_is_known_by_its_tensors(found, tmp_path):
    """Its config is GPT-2's."""
    case = CASES["diffugpt"]
    assert "family" not in case.options and found("diffugpt")[0].family == "diffugpt"
    gpt2 = tiny.checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(DuelError, match="is neither a masked LM of transformers nor of a known diffusion family"):
        denoisers.load(gpt2, device="cpu", tokenizer=tiny.tokenizer())
    path, _ = write(tmp_path, case)
    with pytest.raises(DuelError, match=r"is a masked diffusion model \(diffugpt\), so it has no autoregressive"):
        load(path, case, attention="causal")
    config = {**case.config, "scale_attn_by_inverse_layer_idx": True}
    path, _ = write(tmp_path, dataclasses.replace(case, config=config, folder="scaled"))
    with pytest.raises(DuelError, match=r"not the released network .*\(scale_attn_by_inverse_layer_idx=True\)"):
        load(path, case)


def test_the_mask_of_diffugpt_is_that_of_its_size():
    for rows, mask in ((50257, 10541), (50258, 50257)):
        config = {**CASES["diffugpt"].config, "vocab_size": rows}
        assert families.by_tensors(config, ["denoise_model.wpe.weight"]).mask_id == mask
        assert families.by_tensors(config, ["transformer.wpe.weight"]) is None


def test_diffullama_by_its_name(tmp_path, caplog):
    case = dataclasses.replace(CASES["diffullama"], folder="diffullama", options={})
    path, _ = write(tmp_path, case)
    assert load(path, case).family == "diffullama"
    assert "is taken as diffullama; its config is that of a Llama" in caplog.text
    assert load(path, case, attention="causal").family == "causal-lm"
    assert load(path, case, attention="bidirectional").family == "decoder"


def test_nemotron_research_by_its_dlm_type(tmp_path):
    case = CASES["nemotron-diffusion-research"]
    for kind, shift in (("llada", 0), ("dream", 1)):
        config = {**case.config, "dlm_type": kind}
        path, _ = write(tmp_path, dataclasses.replace(case, config=config, folder=str(kind)))
        for options in ({}, {"family": "nemotron-diffusion-research"}):
            assert load(path, case, **options).shift == shift
    for change, message in (
        ({"dlm_type": "sedd"}, "'dlm_type' must be llada or dream; got 'sedd'"),
        ({"disable_qk_norm": True}, "not the released network"),
        ({"dlm_type": None, "prefix_ratio": 0}, "has no dlm_type, which the family nemotron-diffusion-research"),
    ):
        path, _ = write(tmp_path, dataclasses.replace(case, config={**case.config, **change}, folder="-".join(change)))
        with pytest.raises(DuelError, match=message):
            load(path, case)


def test_llada2_that_edits_is_refused_unless_asked_for(tmp_path):
    case = CASES["llada2"]
    path, _ = write(tmp_path, case)
    code = tmp_path / case.folder / "modeling_llada2_moe.py"
    code.write_text("raise RuntimeError('never run')\n")
    assert load(path, case).family == "llada2"
    code.write_text("raise RuntimeError('never run')\ndef generate(self, editing_threshold=0.9): ...\n")
    with pytest.raises(DuelError, match=r"edits revealed tokens when it generates .* pass family=llada2"):
        load(path, case)
    assert load(path, case, family="llada2").block == 4


def test_networks_that_are_not_the_released_ones(tmp_path):
    for name, change in (
        ("llada", {"alibi": True}),
        ("llada", {"layer_norm_type": "low_precision"}),
        ("llada", {"activation_type": "gelu"}),
        ("llada2", {"use_qkv_bias": True}),
    ):
        case = CASES[name]
        case = dataclasses.replace(case, config={**case.config, **change}, folder="-".join([name, *change]))
        path, _ = write(tmp_path, case)
        with pytest.raises(DuelError, match="is not the released network"):
            load(path, case)


@pytest.mark.parametrize("name", ["llada", "a2d-qwen2", "llada2"])
def test_wrong_rotary_frequencies_are_found(name, tmp_path):
    path, _ = write(tmp_path, CASES[name])
    model = load(path, CASES[name]).model
    self_tests.rotary_frequencies(model, model.config, path)
    buffer = next(buffer for key, buffer in model.named_buffers() if key.endswith("rotary_emb.inv_freq"))
    buffer[-1] *= 1.01
    with pytest.raises(DuelError, match=r"The rotary frequencies of .* are not [\de+]+\^\(-2i/d\)"):
        self_tests.rotary_frequencies(model, model.config, path)


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.parametrize("name", ["sdar", "llada", "dream"])
def test_a_compiled_network_sees_what_it_saw(name, tmp_path, monkeypatch):
    denoiser = load(write(tmp_path, CASES[name])[0], CASES[name])
    windows = [Window((9,), (7, 8, 9, 6, 5, 7, 8)), Window((8,), (9, 9, 7))]
    expected = Duel(denoiser).log_prob(windows)
    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: plain_compile(self, backend="eager"))
    denoiser.compile()
    for one, other in zip(Duel(denoiser).log_prob(windows), expected, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)
