"""What the encoder of texts and the settings of generation answer, at the ends of their ranges: ids, windows, counts.

Words are letters, of which `x y z` are unknown and `ab` and `cd` are single tokens, so that tokens span borders.
"""

import copy
import functools
import itertools
from types import SimpleNamespace

import golden
import pytest
from golden import answer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from toys import Causal, Toy
from transformers import PreTrainedTokenizerFast

from lm_eval_duel.core.scores import Sample
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence
from lm_eval_duel.text.annotated import Gap, Residues, TokenText, count_units, split_at_borders, token_texts
from lm_eval_duel.text.generation import OF_OTHER_BACK_ENDS, Generator, Settings
from lm_eval_duel.text.text import TextEncoder, shorter_than_a_block, unknown_share

check = functools.partial(golden.check_lines, __file__)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefg", "ab", "cd", " ", *"thous"]
LENGTH = 8
BOS = ("auto", "given", "scored", "official", "first", "none")


@functools.cache
def tokenizer(framed=True):
    vocabulary = {piece: n for n, piece in enumerate(PIECES)}
    merges = [("a", "b"), ("c", "d")]
    pieces = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    pieces.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    pieces.decoder = decoders.Fuse()
    pieces.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    if framed:
        special = [("[CLS]", 2), ("[SEP]", 3)]
        pieces.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
        names["cls_token"] = "[CLS]"
    return PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False, **names)


@functools.cache
def network(kind=Toy):
    made = kind(length=LENGTH, tokens=len(PIECES))
    made.appends_sep = True
    if kind is Toy:
        made.mask_id = 4
    return made


def encoder(bos="auto", scheme="independent", kind=Toy, framed=True, block=None):
    denoiser = copy.copy(network(kind))
    denoiser.bos = bos
    return TextEncoder(tokenizer(framed), denoiser, scheme, block)


def shown(value):
    """Windows as their ids; anything else as it is printed."""
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    if isinstance(value, Window):
        known = f" known {list(value.known)}" if value.known else ""
        return f"{[*value.context]} | {[*value.target]} | {[*value.suffix]}{known}"
    return str(value)


CONTEXTS = ("", "c", "c ", "fa", "ffff")
CONTINUATIONS = ("", "b", " b", "d e", " ")
SUFFIXES = ("", "b", " g")


def test_windows_of_texts_between_others():
    """With the ids of each, what was cut, and how many borders a token spans."""
    lines = []
    for context, text in itertools.product(CONTEXTS, CONTINUATIONS):
        text_encoder = encoder()
        ids = shown(answer(text_encoder.encode_pair, context, text))
        lines.append(f"{context!r} + {text!r}: {ids}, {text_encoder.merged_borders} merged")
        for suffix in SUFFIXES:
            text_encoder = encoder()
            window = shown(answer(text_encoder.pair, context, Gap(text, suffix)))
            counts = f"{text_encoder.merged_borders} merged, {text_encoder.cut_contexts} cut"
            lines.append(f"{context!r} + {text!r} + {suffix!r}: {window}, {counts}")
    text_encoder = encoder()
    lines.append(f"residues: {shown(text_encoder.pair('ab', Residues('aba', 'g', (1,))))}")
    lines.append(f"unknown residues: {answer(text_encoder.pair, '', Residues('az', 'g'))}")
    check("between", lines)


def test_windows_at_the_length_of_a_row():
    lines = []
    cases = [("auto", Toy, True), ("none", Toy, True), ("given", Toy, False), ("auto", Causal, True)]
    for bos, kind, framed in cases:
        text_encoder = encoder(bos, kind=kind, framed=framed)
        name = f"{bos} {kind.__name__} {'with' if framed else 'without'} special tokens"
        ends = f"start {text_encoder.start}, end {text_encoder.end}"
        lines.append(f"{name}: {text_encoder.prefix} {text_encoder.suffix}, {ends}, {text_encoder.capacity} positions")
        for context, target in ((0, 0), (0, 1), (1, 2), (2, 4), (3, 4), (4, 4), (0, 6), (0, 7), (0, 8), (0, 9)):
            counting = encoder(bos, kind=kind, framed=framed)
            window = shown(answer(counting.continuation, [5] * context, [6] * target, [7]))
            lines.append(f"    {context} and {target}: {window}, {counting.cut_contexts} cut")
        lines.append(f"    after a start: {shown(answer(text_encoder.continuation, [2, 5], [2, 6]))}")
        lines.append(f"    at a start: {shown(answer(text_encoder.continuation, [], [2, 6]))}")
        lines.append(f"    a start alone: {shown(answer(text_encoder.continuation, [], [3, 6]))}")
        for length in (1, 5, 6, 7, 8, 9):
            lines.append(f"    {length} to generate: {shown(answer(text_encoder.prompt, 'aff', length, 'g'))}")
        for text in ("", "f", "fffff", "ffffff", "fffffff"):
            lines.append(f"    room beside {text!r}: {text_encoder.room(text)} {text_encoder.room(text, [5, 6])}")
    check("rows", lines)


def test_what_the_spec_says_of_texts():
    lines = []
    for scheme, bos, framed in itertools.product(("independent", "harness"), ("auto", "none"), (True, False)):
        entries = encoder(bos, scheme, framed=framed).describe()
        del entries["tokenizer"]  # its digest depends on the version of the library
        lines.append(f"{scheme} {bos} {framed}: {entries}")
    check("spec", lines)


def test_answers_are_kept_under_all_that_defines_them():
    """Each differs from the first in one part."""
    rows = [
        TokenText("a", (1, 2, 3), (1, 1), ("t", "f")),
        TokenText("a", (1, 2, 4), (1, 1), ("t", "f")),
        TokenText("a", (1, 2, 3), (1, 0), ("t", "f")),
        TokenText("a", (1, 2, 3), (1, 1), ("u", "f")),
        TokenText("a", (1, 2, 3), (1, 1), ("t", "g")),
    ]
    digests_of_rows = {row.digest for row in rows}
    assert len(digests_of_rows) == len(rows)

    gaps = [
        Gap("a"),
        Gap("a", "b"),
        Gap("a", "c"),
        Residues("a"),
        Residues("a", "b"),
        Residues("a", "b", (1,)),
        Residues("a", "b", (0,)),
        Residues("a", "b", (0, 1)),
    ]
    digests_of_gaps = {gap.digest for gap in gaps}
    assert len(digests_of_gaps) == len(gaps)
    for digest in digests_of_gaps:
        assert len(digest) == 16


def test_an_end_of_text_is_no_unknown_token():
    """GPT-2's is both."""
    text_encoder = encoder()
    assert text_encoder.unk_id == 1
    text_encoder.tokenizer = SimpleNamespace(unk_token_id=7, eos_token_id=7, bos_token_id=None)
    assert text_encoder.unk_id is None
    text_encoder.tokenizer = SimpleNamespace(unk_token_id=7, eos_token_id=8, bos_token_id=7)
    assert text_encoder.unk_id is None


def test_windows_of_whole_texts():
    """And which number of tokens a task may have counted."""
    lines = []
    for scheme, bos in [*itertools.product(["independent"], BOS), ("harness", "auto"), ("harness", "none")]:
        text_encoder = encoder(bos, scheme)
        for count in (0, 1, 5, 6, 7, 8, 9, 13):
            text = "f" * count
            accepted = []  # numbers of tokens that a task may have counted
            for n in range(count - 2, count + 3):
                if not isinstance(answer(text_encoder.windows, text, n), str):
                    accepted.append(n)
            windows = shown(answer(text_encoder.windows, text))
            lines.append(f"{scheme} {bos}, {count} tokens: {windows}, counted {accepted}")

    rows = itertools.product(BOS, [""], (2, 3, 8, 9))
    for bos, row_bos, size in [*rows, ("given", "given", 3), ("given", "scored", 3)]:
        text_encoder = encoder(bos)
        row = TokenText("f", [2, *[10] * (size - 2), 3], (1, 1), ("t", text_encoder.fingerprint), row_bos)
        lines.append(f"row {bos} {row_bos!r}, {size} ids: {shown(answer(text_encoder.row, row))}")

    for text in ("a[MASK]b", "[MASK][MASK]"):
        lines.append(f"{text}: {answer(encoder().windows, text)}")
    check("whole", lines)


def test_a_suffix_that_begins_a_block_of_its_own_is_left_out():
    text_encoder = encoder()
    text_encoder.denoiser.attention = "block_causal"
    for block, texts in ((3, ("f", "ff", "fff", "ffff", "ffffff")), (None, ("f", "ff"))):
        text_encoder.block = block
        for text in texts:
            text_encoder.prefix = []
            [window] = text_encoder.windows(text)
            assert window.suffix == (() if len(text) % (block or 1) == 0 else (3,)), (block, text)


def test_what_is_said_of_texts():
    lines = []
    text_encoder = encoder()
    for text in ("abx", "x[UNK]", "[UNK][UNK]", "xyz ", "f"):
        lines.append(f"unknown in {text!r}: {text_encoder.unknown(text_encoder.windows(text), text)}")
    lines.append(f"does not distinguish: {text_encoder.normalises}")
    for block, lengths in itertools.product((None, 1, 3), ([], [0], [1], [2, 1], [1, 3], [3, 2], [4])):
        windows = [Window((), (5,) * length) for length in lengths]
        lines.append(f"{lengths} in blocks of {block}: {shorter_than_a_block(windows, block)}")
    for unknown, tokens in ((1, 1), (1, 3000), (1999, 2000)):
        lines.append(unknown_share(unknown, tokens))
    for text, between in itertools.product(("", " ", "a", " a", "a b\n", "\u00e9 \u00fc", "a  b"), (False, True)):
        lines.append(f"units of {text!r}, {between}: {count_units(text, between)}")
    for parts in itertools.product(("", "a", "a "), ("", " ", "b", " b ", "b "), (None, "", " c")):
        lines.append(f"borders of {parts}: {split_at_borders(*parts)}")
    ids = text_encoder.encode("ab cd" * 12 + "a")
    pieces = token_texts(ids, text_encoder.tokenizer)
    assert "".join(pieces) == text_encoder.tokenizer.decode(ids)
    lines.append(f"pieces: {'/'.join(pieces)}")
    check("said", lines)


# ---------------------------------------------------------------- generation

SETTINGS = (
    *({}, {"do_sample": True}, {"do_sample": False, "temperature": 0.7, "top_k": 3}, {"temperature": 0.7}),
    *({"temperature": 0}, {"temperature": 0, "do_sample": True}, {"do_sample": True, "temperature": 1, "top_p": 1}),
    *(
        {"do_sample": True, "top_p": 0.95, "temperature": 1.25},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 5, "top_p": 0.25},
        {"top_k": 4, "top_p": 0.5},
    ),
    *({"do_sample": False, "top_k": 0, "top_p": 1, "temperature": 1}, {"do_sample": False, "top_k": 1}),
    *({"max_gen_toks": 3}, {"max_tokens": 4, "max_gen_toks": 5}, {"max_new_tokens": 6, "max_completion_tokens": 6}),
    *({"max_completion_tokens": 7, "max_tokens": 8, "max_new_tokens": 9}, {"until": "a"}, {"until": ["a", "", "b"]}),
    *({"until": None, "num_beams": 1}, {"num_beams": 2}, {"n": 2}, {"temperature": 1e21}, {"temperature": 1e-21}),
    *({"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"max_gen_toks": 0}, {"repetition_penalty": 1.2}, {"min_p": 0.0}),
)


def test_settings_of_generation():
    lines = []
    for given in SETTINGS:
        settings = answer(Settings.from_arguments, given)
        lines.append(f"{given}:")
        if isinstance(settings, str):
            lines.append(f"    {settings}")
            continue
        lines += [f"    {line}" for line in golden.listed("read", settings)]
        lines.append(f"    {settings.description}; {settings.denoiser(Toy()).filters}")
    assert Settings().length == 256
    for name in OF_OTHER_BACK_ENDS:
        accepted = []
        for value in (None, 0, 1, 2, True, False):
            if isinstance(answer(Settings.from_arguments, {name: value}), Settings):
                accepted.append(value)
        lines.append(f"{name} may be {accepted}")
    check("settings", lines)


def test_texts_are_drawn_above_temperature_0_and_decoded_at_it():
    duel = DuelEstimator(network(), "greedy", 3)
    text = TextEncoder(tokenizer(), duel.denoiser, "independent", 3)
    for temperature, do_sample in ((0.0, False), (1.0, True)):
        generator = Generator(duel, text, Settings(length=4, temperature=temperature), seed=2)
        prompts = [generator.prompt("a"), generator.prompt("b", "g")]

        generated = list(generator.stream(prompts, [5, 6]))

        samples = duel.sample([(2, 5), (2, 6)], 4, suffixes=[(3,), (11, 3)], do_sample=do_sample, seed=2, keys=[5, 6])
        for n, _, window, sample in generated:
            assert window.target == sample.tokens
            assert sample.tokens == samples[n].tokens[: len(sample.tokens)]


@pytest.mark.parametrize(
    ("until", "tokens", "text", "stops"),
    [
        ((), [5, 6, 5], "aba", False),
        ((), [5, 3, 5], "a", True),
        ((), [3, 5], "", True),
        ((), [5, 1, 5], "a[UNK]a", False),
        (("c",), [5, 12, 6], "aabb", False),
        (("b",), [5, 6, 5], "a", True),
        (("g", "b"), [5, 6, 11, 5], "a", True),
        (("g", "b"), [5, 11, 5, 6], "a", True),
        (("ba",), [5, 6, 5, 6], "a", True),
        (("b",), [5, 3, 6], "a", True),
    ],
)
def test_a_text_ends_at_its_first_stop_string_or_end(until, tokens, text, stops):
    duel = DuelEstimator(network(), "greedy", block=2)
    generator = Generator(duel, TextEncoder(tokenizer(), duel.denoiser, "independent", 2), Settings(until), 0)
    assert generator.cut(tokens) == text
    assert generator._stops(0, tuple(tokens)) == stops


def test_samples_stop_after_the_block_with_the_end():
    """Tokens, steps, calls and what stays masked, with a stop after none, one, and each block."""
    lines = []
    duel = DuelEstimator(network(), "greedy:k=2", 3)
    cases = [(0, 0, None), (0, 2, None), (1, 0, 1), (3, 2, 1), (6, 1, 3)]
    cases += [(7, 0, None), (7, 0, 1), (7, 0, 3), (7, 0, 5)]
    for length, tail, stop in cases:
        asked = []

        def stops(index, tokens, stop=stop, asked=asked):
            asked.append((index, len(tokens)))
            return stop is not None and len(tokens) >= stop

        before = duel.counts.tokens
        for n, sample in enumerate(duel.sample([(5,)] * 2, length, tail=tail, seed=1, stop=stops)):
            assert isinstance(sample, Sample)
            lines += golden.listed(f"{length} positions, tail {tail}, stop at {stop}, sample {n}", sample)
        lines.append(f"asked about {sorted(asked)}, {duel.counts.tokens - before} tokens counted")
    sampler = SampledConfidence(network(), 3)
    for scored in (True, False):
        for n, sample in sorted(sampler.stream_samples([(5,), (6,)], 4, do_sample=scored, scored=scored)):
            lines += golden.listed(f"select after sampling, {scored=}, sample {n}", sample)
    lines += golden.listed("counts", sampler.counts)
    check("samples", lines)
