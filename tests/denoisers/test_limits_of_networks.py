"""Choices that are made when a network is loaded, a second time by hand: who decides first, and the ends of ranges."""

import itertools
import logging
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attends import Attends
from toys import Toy

from lm_eval_duel import rules
from lm_eval_duel.denoisers import checkpoint, hub, vocabulary
from lm_eval_duel.denoisers.filters import Warp, excluding, tie_warning, warped
from lm_eval_duel.denoisers.hf import block_routing, own_forward, pretrained, weights
from lm_eval_duel.denoisers.hf.families import NAMED, Family
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import spec_of

CPU = torch.device("cpu")


def options(**given):
    return LoadOptions("a/checkpoint", CPU, **given)


def refused(function, *arguments, **named):
    """The message of the DuelError of a call, or None."""
    try:
        function(*arguments, **named)
    except DuelError as error:
        return str(error)
    return None


def first_of(*values):
    """The first that is not None, if there is one."""
    return next((value for value in values if value is not None), None)


# ---------------------------------------------------------------- [MASK], special tokens, columns


def test_the_mask_is_named_by_the_user_then_the_config_the_tokenizer_the_family():
    for user, config, tokenizer, family in itertools.product((None, 0), (None, 1), (None, 2), (None, 3)):
        words = SimpleNamespace(mask_token_id=tokenizer, get_vocab=dict)
        find = partial(vocabulary.find_mask_id, options(mask_token_id=user), {"mask_token_id": config}, words, family)

        expected = first_of(user, config, tokenizer, family)
        if expected is None:
            assert "mask_token_id=" in refused(find, None)
            continue
        assert find(None) == expected
        assert find(expected + 1) == expected  # the last column
        if expected:
            assert f"0 to {expected - 1}." in refused(find, expected)


def test_a_mask_that_is_no_id_is_named_with_its_source_and_the_tokens_that_look_like_one():
    words = SimpleNamespace(mask_token_id=None, get_vocab=lambda: {"a": 3, "<|mask|>": 5})
    sources = {
        "given": (90, None, 70),
        "from its config": (None, 80, 70),
        "the default of its family": (None, None, 70),
    }
    for source, (user, config, family) in sources.items():
        find = partial(vocabulary.find_mask_id, options(mask_token_id=user), {"mask_token_id": config}, words, family)
        message = refused(find, 12)
        assert source in message
        assert "0 to 11" in message
        assert "<|mask|> (id 5)" in message


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_mask_that_is_another_special_token_is_refused_unless_the_tokenizer_says_so(name):
    words = SimpleNamespace(mask_token_id=None, **{name: 7})
    find = partial(vocabulary.find_mask_id, options(mask_token_id=7), {}, words, None, None)
    assert name in refused(find)
    words.mask_token_id = 7
    assert find() == 7


def test_the_end_of_a_text_is_eos_then_sep_then_bos():
    for eos, sep, bos in itertools.product((None, 0), (None, 1), (None, 2)):
        words = SimpleNamespace(eos_token_id=eos, sep_token_id=sep, bos_token_id=bos)
        assert vocabulary.end_of_text(words) == first_of(eos, sep, bos)


def test_the_length_of_rows():
    for given, positions in itertools.product((None, 7, 8, 9), (None, 8)):
        find = partial(vocabulary.row_length, "x", given, positions)
        if given is positions is None:
            assert "max_length=" in refused(find)
        elif given and positions and given > positions:
            message = refused(find)
            assert "max_length=9" in message
            assert "8 positions" in message
        else:
            assert find() == (given or positions)


@pytest.mark.parametrize(("columns", "tokens", "warns"), [(228, 100, False), (229, 100, True), (2000, 1800, False)])
def test_more_columns_than_padding_explains_are_named(columns, tokens, warns, caplog):
    """Up to 128, or a tenth of the columns."""
    excluded = vocabulary.excluded_columns(set(range(tokens + 1)), tokens, columns, "x", CPU)
    assert (~excluded).nonzero()[:, 0].tolist() == list(range(tokens))
    assert bool(caplog.records) == warns
    if warns:
        assert f" {tokens} tokens" in caplog.text
        assert f" {columns} columns" in caplog.text
    with pytest.raises(DuelError, match=f"up to {columns} .* predicts {columns}:"):
        vocabulary.excluded_columns({columns}, tokens, columns, "x", CPU)


def test_the_id_of_padding_is_a_token_other_than_the_mask():
    for pad, expected in ((None, 1), (2, 2), (0, 1), (9, 1), (3, 3), ("2", 1)):
        assert own_forward.padding_id(SimpleNamespace(pad_token_id=pad), {0, 1, 2, 3}, 0) == expected


# ---------------------------------------------------------------- blocks, shifts and row lengths


@pytest.mark.parametrize("published", [None, 8])
def test_the_trained_block_is_that_of_the_config_then_the_user_then_the_family(published, caplog):
    """A user's block that is neither trained nor published is named."""
    for in_config, given, of_family, routes in itertools.product((None, 16), (None, 4, 8, 2), (None, 4), (False, True)):
        family = Family("f", "Llama", block=of_family, published_block=published, block_routes=routes)
        config = {"block_size": in_config}
        caplog.clear()
        find = partial(pretrained.trained_block, family, config, options(block=given))

        users = None if routes else given
        familys = published or of_family if of_family else None
        expected = first_of(in_config, users, familys)
        if expected is None:
            assert "block=" in refused(find)
            continue
        assert find() == expected

        is_untrained = users and not in_config and of_family and users not in (of_family, published)
        assert bool(caplog.records) == bool(is_untrained)
        if is_untrained:
            assert f"blocks of {of_family}" in caplog.text
            assert f"block={given}" in caplog.text


def test_the_block_of_a_config_is_its_first_entry():
    family = Family("f", "Llama")
    assert family.block_in({"block_length": 3}) == 3
    assert family.block_in({"bd_size": 2, "block_length": 3}) == 2
    assert family.block_in({"block_size": 1, "bd_size": 2, "block_length": 3}) == 1
    assert "'block_size'" in refused(family.block_in, {"block_size": 0})


def test_an_attention_that_a_family_is_not_trained_with_is_named_unless_it_is_causal(caplog):
    """attention=causal scores the network that a family was trained from; a family outside the table may have any."""
    for trained, given, name in itertools.product(
        ("bidirectional", "block_causal"), (None, "bidirectional", "block_causal", "causal"), ("llada", "own code")
    ):
        family = Family(name, "Llama", attention=trained, block=4)
        caplog.clear()
        pretrained.set_attributes(Attends(), family, {}, options(attention=given))
        is_another = given not in (None, "causal", trained)
        assert bool(caplog.records) == (is_another and name == "llada")
        if caplog.records:
            assert f"attention={trained}" in caplog.text and f"attention={given}" in caplog.text


def test_a_shift_is_the_users_then_that_of_the_config_then_of_the_family():
    for given, in_config, of_family, native in itertools.product(
        (None, False, True), (None, False, True), (0, 1), ("Llama", "")
    ):
        family = Family("f", native, shift=of_family)
        read = in_config if native else None
        expected = first_of(given, read, of_family)
        network = Attends()

        pretrained.set_attributes(network, family, {"right_shift_logits": in_config}, options(shift_logits=given))

        assert network.shift == int(expected)
        assert network.bos == ("given" if expected else "none")
        assert not network.seeds_blocks
        assert network.attention == "bidirectional"


def test_positions_of_scaled_queries_end_a_block_before_the_scale_begins():
    for positions, original, block, expected in (
        (100, 64, None, 32),
        (100, 64, 8, 56),
        (40, 64, 8, 40),
        (56, 64, 8, 56),
    ):
        config = {"rope_parameters": {"original_max_position_embeddings": original}, "block_size": block}
        assert pretrained.trained_positions(NAMED["nemotron-labs-diffusion"], positions, config) == expected
    for positions, of_family, expected in ((None, None, None), (9, None, 9), (None, 8, 8), (9, 8, 8), (7, 8, 7)):
        assert pretrained.trained_positions(Family("f", "Llama", max_length=of_family), positions, {}) == expected


@pytest.mark.parametrize("entries", [{}, {"n_positions": 20}, {"max_position_embeddings": 30, "n_ctx": 10}])
@pytest.mark.parametrize("bound", [None, 15, 10**6 - 1, 10**6, 10**30])
def test_a_network_holds_the_least_of_its_positions(entries, bound):
    """A tokenizer's bound counts below a million."""
    network = torch.nn.Module()
    network.config = SimpleNamespace(**entries)
    lengths = list(entries.values())
    if bound and bound < 10**6:
        lengths.append(bound)

    assert pretrained.held_positions(network, bound) == min(lengths, default=None)


@pytest.mark.parametrize(("rows", "padding", "esm"), [(12, None, False), (12, 1, False), (12, 1, True)])
def test_positions_after_the_padding_id(rows, padding, esm):
    network = torch.nn.Module()
    network.position_embeddings = torch.nn.Embedding(rows, 2, padding_idx=padding)
    network.config = SimpleNamespace(model_type="esm" if esm else "x", max_position_embeddings=40, pad_token_id=30)
    lengths = [40]
    if esm:
        lengths.append(40 - 30 - 1)
    if padding:
        lengths.append(rows - padding - 1)

    assert pretrained.held_positions(network, None) == min(lengths)
    assert pretrained.first_position(network) == (padding + 1 if padding else 0)


def test_rows_of_a_block_causal_network_hold_a_block():
    network = SimpleNamespace(by_blocks=True, block=8, path="x", options=options())
    pretrained.Pretrained.set_row_length(network, 8)
    assert network.max_length == 8

    message = refused(pretrained.Pretrained.set_row_length, network, 7)
    assert "7 positions" in message
    assert "8" in message


@pytest.mark.parametrize(("blocks", "size"), [(1, 2), (3, 64)])
def test_where_block_sparse_attention_begins(blocks, size):
    """BigBird's class falls back to full attention up to (5 + 2 r) blocks."""
    asked = []
    config = SimpleNamespace(attention_type="block_sparse", num_random_blocks=blocks, block_size=size)
    model = SimpleNamespace(config=config, base_model=SimpleNamespace(set_attention_type=asked.append))
    assert own_forward.without_block_sparse(model) == (5 + 2 * blocks) * size + 1
    assert asked == ["original_full"]

    config.attention_type = "original_full"
    assert own_forward.without_block_sparse(model) is None


# ---------------------------------------------------------------- experts, devices


def test_the_capacity_of_a_block_is_from_the_experts_of_a_token_to_all():
    for capacity, is_right in ((1, False), (2, True), (3, True), (6, True), (7, False)):
        gate = torch.nn.Module()
        gate.weight = torch.zeros(6, 4)
        gate.top_k = 2
        layer = torch.nn.Module()
        layer.gate = gate
        layer.experts = torch.nn.Module()
        model = torch.nn.Module()
        model.layer = layer
        model.base_model = layer

        message = refused(block_routing.install, model, capacity)

        if is_right:
            assert message is None
        else:
            for part in ("=2", "=6", f"has {capacity}."):
                assert part in message


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_processes_of_a_machine_share_its_gpus(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (100 + gpu, 1000))
    assert weights.own_gpus("auto") is None
    for processes in (1, 2, 3):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        used = []
        sizes = []
        for rank in range(processes):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            if processes > gpus:
                assert f"{processes} processes share {gpus} GPUs" in refused(weights.own_gpus, "auto")
            elif processes > 1:
                share = weights.own_gpus("auto")
                assert share == {gpu: 100 + gpu for gpu in share}
                assert "balanced_low_0" in refused(weights.own_gpus, "balanced_low_0")
                used += share
                sizes.append(len(share))
        if sizes:
            assert sorted(used) == list(range(gpus))
            assert max(sizes) - min(sizes) <= 1


# ---------------------------------------------------------------- filters


def test_ids_to_exclude():
    toy = Toy(tokens=3, unused=1)  # [MASK] is 3, of 5 columns
    for ids, parts in (
        ((-1,), ("-1", "0 to 4.")),
        ((5,), ("5", "0 to 4.")),
        ((3,), ("3", "[MASK]")),
        ((0, 1, 2), ("no token",)),
    ):
        message = refused(excluding, toy, ids)
        for part in parts:
            assert part in message

    twin = excluding(excluding(toy, [2, 4]), [0])
    assert twin.excluded.tolist() == [True, False, True, True, True]
    assert twin.excluded_ids == (0, 2, 4)
    assert twin.filters[-1].describe() == {"exclude_ids": "0+2+4"}
    assert toy.excluded.tolist() == [False, False, False, True, True]
    assert not toy.filters


@pytest.mark.parametrize("rule", ["greedy", "left_to_right"])
def test_a_network_ties_where_one_token_is_left(rule):
    """The most probable of three tokens has at least a third."""
    toy = Toy(tokens=3)
    for temperature, top_k, top_p in itertools.product((None, 0.5), (None, 1, 2), (None, 1 / 3, 0.34, 1.0)):
        one_token_is_left = top_k == 1 or (top_p or 1.0) <= 1 / 3

        reason = tie_warning(warped(toy, temperature, top_k, top_p), rules.parse(rule))

        assert bool(reason) == (rule == "greedy" and one_token_is_left)
        if reason:
            assert reason.startswith("top_k=1 " if top_k == 1 else f"top_p={top_p!r} ")


def test_filters_say_what_they_are():
    assert str(Warp()) == "temperature=1"
    assert str(Warp(0.7, 5)) == "temperature=0.7, top_k=5"
    assert str(Warp(2.0, None, 0.9)) == "temperature=2, top_p=0.9"
    cold_after_hot = warped(warped(Toy(), 2.0), 0.7)
    assert spec_of(cold_after_hot)["warpers"] == "temperature=2, then temperature=0.7"


@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.49, 0.51, 0.74, 0.76, 1e-9])  # not on a border, where float noise decides
def test_truncation_by_hand(top_k, top_p):
    """Probabilities 1/2, 1/4, 1/8, 1/8: the fewest that have top_p together, equal ones from the lowest id."""
    rows = [[0.125, 0.5, 0.125, 0.25], [0.25, 0.125, 0.5, 0.125]]
    logits = torch.tensor(rows, dtype=torch.float64).log()

    kept = Warp(1.0, top_k, top_p)(logits, None).isfinite()

    for p, kept_of_row in zip(rows, kept.tolist(), strict=True):
        most_probable = sorted(range(4), key=lambda token: (-p[token], token))[: top_k or 4]
        total = math.fsum(p[token] for token in most_probable)
        share = 0.0  # exact, of powers of two
        expected = [False] * 4
        for token in most_probable:
            if share / total >= top_p and top_p < 1:
                break
            expected[token] = True
            share += p[token]
        assert kept_of_row == expected


# ---------------------------------------------------------------- messages with a number in them


@pytest.mark.parametrize("count", [0, 1, 10, 11, 12])
def test_tensors_that_do_not_fit_are_counted_and_ten_are_named(count):
    names = [f"t{n:02}" for n in range(count)]
    shown = ", ".join(names[:10]) + (", ..." if count > 10 else "")
    for kind, arguments in (("missing", (names,)), ("unknown", ((), names)), ("of another shape", ((), (), names))):
        message = refused(hub.require_none, "Weights", *arguments)
        assert message == (f"Weights: {count} {kind}: {shown}." if count else None)


def test_tensors_are_compared_by_name_and_by_shape():
    expected = {"a": (1, 2), "b": (3,), "c": (4,)}
    assert refused(hub.require_equal, "W", expected, expected) is None
    message = refused(hub.require_equal, "W", expected, {"a": (2, 1), "b": (3,), "d": (4,)}, str.upper)
    assert message == "W: 1 missing: C; 1 unknown: D; 1 of another shape: A is (2, 1), not (1, 2)."


def test_a_folder_with_several_checkpoints_of_lightning(tmp_path):
    for n in range(6):
        (tmp_path / f"{n}.ckpt").write_bytes(b"")

    message = refused(hub.read_tensors, str(tmp_path))

    assert "6 .ckpt" in message
    assert "4.ckpt" in message
    assert "5.ckpt" not in message


def test_long_entries_are_cut_in_the_warning(caplog):
    caplog.set_level(logging.WARNING)
    config = {"short": "x" * 40, "long": "y" * 41, "section": {"entry": 1}}
    checkpoint.name_unread(config, ["long", "section.entry", "short"], "n", "f")
    assert f"long={'y' * 37}..., section.entry=1, short={'x' * 40}. " in caplog.text
    assert f"short={'x' * 40}" in refused(checkpoint.name_unread, config, ["short"], "n", "f", refuse=True)
    caplog.clear()
    checkpoint.name_unread(config, [], "n", "f", refuse=True)
    assert not caplog.records


def test_reasons_are_one_line_of_bounded_length():
    for error, reason in (
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("a list:\n  one\n  two"), "ValueError: a list: one two"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 801), "ValueError: " + "x" * 800),
        (RuntimeError("WeightsUnpickler error: Unsupported class a.B. More"), "Unsupported class a.B"),
    ):
        assert hub.short_reason(error) == reason
