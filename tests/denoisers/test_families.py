"""Every family: what is found at load, and its numbers, by the textbook loop over its plain network in float64."""

import itertools
import math
from pathlib import Path
from typing import NamedTuple

import dit_reference
import golden
import own
import pytest
import tiny
import torch
import transformers
from attends import reference
from close import check, close_nats, same_scores
from decoder_reference import CASES, VARIANTS
from laws import slow_but
from networks import CAUSAL, DITS, MASKED_LMS, NAMES, PROTEINS, TEXTS, load, textbook, written

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core import block_causal, row_checks
from lm_eval_duel.core.float_noise import FLOAT32, random_rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser
from lm_eval_duel.denoisers.hf import families

DEMOS = [("demo-bd", None), ("demo-mdm", None), ("demo-mdm", "prefix"), ("demo-mdm", "dual")]
NEMOTRON = "nemotron-labs-diffusion"
ALIKE = {  # like others here
    "mmada",
    "d2f-dream",
    "diffullama",
    "nemotron-diffusion-research",
    "a2d-qwen2-bd3lm",
    "a2d-llama-bd3lm",
    "stable-diffcoder",
    "dream-reasoner",
    "dplm",
    "distilbert",
    "one-block",
    "illada",
    "own dream",
    "own dream, scaled",
    "own dream, tied",
    "own llada2",
    "own rnd1, native rotary",
    "own unknown",
    "llama",
    "opt",
    "mobilebert",
    "ibert",
    "bloom",
    "roberta",
    "causal letters",
}
RULES = ["threshold:mu=0.3", "greedy"]  # by turns: every rule is compared on toys


def test_every_family_is_here():
    named = {name for name in CASES if not name.startswith("plain")}
    assert named - VARIANTS.keys() == set(families.NAMED)


class Loaded(NamedTuple):
    """What is found of a network at load."""

    family: str
    attention: str = "bidirectional"
    shift: int = 0
    bos: str = "auto"
    block: int | None = None
    published_block: int | None = None
    mask_id: int | None = 4
    max_length: int = 32
    vocab_size: int = tiny.ROWS
    relative_positions: bool = False
    needs_visible: bool = False


MASKED_LM = Loaded("masked-lm")
CAUSAL_LM = Loaded("causal-lm", "causal", shift=1, bos="given", mask_id=None, max_length=33)
DIT = Loaded(
    "mdlm",
    bos="given",
    published_block=4,
    mask_id=12,
    max_length=16,
    vocab_size=13,
    relative_positions=True,
)
EXPECTED = {
    **dict.fromkeys(MASKED_LMS, MASKED_LM),
    "modernbert": MASKED_LM._replace(relative_positions=True),
    **dict.fromkeys(TEXTS, MASKED_LM._replace(relative_positions=True)),
    "letters": MASKED_LM._replace(family="own code"),
    **dict.fromkeys(CAUSAL, CAUSAL_LM),
    # two of 66 positions no residue has
    **dict.fromkeys(PROTEINS, MASKED_LM._replace(mask_id=32, max_length=64, vocab_size=33, needs_visible=True)),
    **dict.fromkeys(DITS, DIT),
    "sedd": DIT._replace(family="sedd"),
    "sedd-retrained": DIT._replace(family="sedd"),
    "bd3lm": DIT._replace(family="bd3lm", attention="block_causal", block=4, published_block=None),
    "gidd": DIT._replace(family="gidd", published_block=None, vocab_size=16),
    "ar": CAUSAL_LM._replace(family="ar", max_length=16, vocab_size=13),
}
for name, case in CASES.items():
    EXPECTED[name] = Loaded(
        "decoder" if name.startswith("plain") else VARIANTS.get(name, name),
        attention=case.attention,
        shift=case.shift,
        bos=case.bos,
        block=case.block,
        published_block=case.published,
        mask_id=case.mask,
        max_length=case.length,
        vocab_size=case.rows,
        relative_positions=case.relative,
    )
for name in own.KINDS:  # a checkpoint's own code: the family's attributes, other sizes
    families_in_name = [family for family in ("llada2", "llada", "dream", "sdar", "rnd1") if family in name]
    kind = families_in_name[0] if families_in_name else "sdar"
    EXPECTED[name] = EXPECTED[kind]._replace(
        family=kind, mask_id=4, max_length=64, vocab_size=tiny.ROWS, relative_positions=True
    )
    if "unknown" in name:
        EXPECTED[name] = EXPECTED[name]._replace(family="own code", bos="auto")
LIKE_TRANSFORMERS = [*MASKED_LMS, *TEXTS, *PROTEINS, *tiny.CAUSAL_LMS]
REACT_TO_PADDING = {"convbert", "fnet", "letters"}
REACT_TO_PADDING |= {name for name in own.KINDS if EXPECTED[name].attention != "block_causal"} - {"own llada"}
if transformers.__version__.startswith("4."):
    REACT_TO_PADDING |= set(PROTEINS)


FOUND_OTHERWISE = {"mmada", "a2d-qwen2-bd3lm", "causal letters"}  # by branches of the loading that are theirs alone
LOADED = [name for name in NAMES if name not in ALIKE or name in FOUND_OTHERWISE]


@pytest.mark.parametrize("name", slow_but(NAMES, LOADED))
def test_what_is_found_at_load(family, name):
    denoiser = family(name).denoiser

    for attribute, value in EXPECTED[name]._asdict().items():
        assert getattr(denoiser, attribute) == value, attribute
    assert denoiser.seeds_blocks == (name == NEMOTRON)
    assert denoiser.anchor == ("target" if "d2f" in name else "row")
    assert denoiser.honours_padding == (name not in REACT_TO_PADDING)

    columns = len(tiny.WORDS)
    if name in PROTEINS:
        columns = 33
    elif denoiser.vocab_size < 20:  # our own DiT
        columns = 12
    tokens = (~denoiser.excluded).nonzero()[:, 0].tolist()
    assert tokens == [token for token in range(columns) if token != denoiser.mask_id]

    if name in LIKE_TRANSFORMERS:
        assert denoiser.splits_head or name in [*PROTEINS, "mobilebert"]
        assert type(denoiser.model).__module__.startswith("transformers.models.")
    if denoiser.family == "masked-lm":
        assert denoiser.special_tokens == (((0,), (2,)) if name in PROTEINS else ((2,), (3,)))
    assert golden.entry(SPECS, name, spec_without_digests(denoiser)), denoiser.describe()


SPECS = Path(__file__).with_name("golden") / "specs.json"  # LM_EVAL_DUEL_RECORD=1 pytest -n 0 records them


def spec_without_digests(denoiser):
    """The spec of a network, which must not depend on random weights or on where its files are."""
    spec = {key: str(value) for key, value in denoiser.describe().items()}
    del spec["weights"]
    spec.pop("code", None)
    spec["unread entries"] = ", ".join(getattr(denoiser, "unread_entries", ()))
    return spec


ENDS = [(name, {}) for name in NAMES]
ENDS += [(name, {"last_block": "cut"}) for name in ("sdar", "fast-dllm-v2", "d2f-llada", "bd3lm", NEMOTRON)]
ENDS += [("sedd", {"sigma": "schedule", "bos": "official"}), ("sedd-retrained", {"bos": "official"})]
ENDS += [("gidd", {"bos": "official"}), (NEMOTRON, {"first_token": "block"}), (NEMOTRON, {"attention": "causal"})]
CACHES = ["prefix", "dual"]
CACHED = ["mdlm", "bidirectional", "one-block", "bert", "roberta", "modernbert", *TEXTS]
CACHED += [name for name in CASES if CASES[name].attention == "bidirectional"]
QUICK = [("llada", "prefix"), ("dream", "dual"), ("mdlm", "prefix"), ("modernbert", "dual")]
for name, cache in itertools.product(CACHED, CACHES):
    ENDS.append((name, {"cache": cache} if name in DITS else {"cache": cache, "dtype": "float64"}))
PARTLY_LIKE = {  # others here: one window of each is compared in a plain run, all of them in a slow one
    "smdm",
    "llada-moe",
    "coda",
    "a2d-qwen2",
    "a2d-qwen3",
    "a2d-llama",
    "a2d-qwen3-bd3lm",
    "open-dllm",
    "sdar-moe",
    "llada2.2",
    "rnd1",
    "diffugpt",
    "fast-dllm-v2",
    "plain bidirectional",
    "plain block_causal",
    "bidirectional",
    "sedd-retrained",
    "convbert",
    "bigbird",
    "fnet",
    "bert",
    "eurobert",
    "esm-2",
    "own llada",
    "own sdar",
    "own rnd1",
    "qwen2",
    "gpt2",
    "gemma2",
    "mixtral",
    "mamba",
}
ONE_WINDOW = [  # of each, too: the same network with other options is compared at all windows
    ("dream", {}),
    ("sdar", {}),
    ("d2f-llada", {}),
    ("mdlm", {}),
    ("sedd", {}),
    ("gidd", {}),
    (NEMOTRON, {"first_token": "block"}),
    (NEMOTRON, {"attention": "causal"}),
]
FEW = [end for end in ENDS if end[0] in PARTLY_LIKE and "cache" not in end[1]] + ONE_WINDOW
CUT_LIKE = ("fast-dllm-v2", "bd3lm", NEMOTRON)  # a cut last block is compared under other block-causal networks
SLOW = [*ONE_WINDOW]
for name, options in ENDS:
    is_like = name in ALIKE | PARTLY_LIKE or ("last_block" in options and name in CUT_LIKE)
    if is_like or ("cache" in options and (name, options["cache"]) not in QUICK):
        SLOW.append((name, options))


def under_a_cache(denoiser):
    """By hooks: before every layer, hidden states are replaced by those of the block's start; no keys are kept."""
    plain = denoiser.plain
    network = plain.network if isinstance(plain, DiTDenoiser) else plain.model
    layers = next(module for module in network.modules() if isinstance(module, torch.nn.ModuleList))
    return lambda window: reference(plain, layers, denoiser.cache, window, 4)


@pytest.mark.parametrize(("name", "options"), FEW)
def test_a_window_equals_the_textbook_loop(family, name, options):
    network = family(name, **options)
    denoiser = network.denoiser
    causal = denoiser.attention == "causal"
    rule = "left_to_right" if causal else "greedy"
    block = "auto" if denoiser.block or causal else 4
    window = network.windows[0]

    [scored] = Duel(denoiser, rule, block).log_prob([window])

    assert not scored.near_ties, "choose another window"
    check(scored, textbook(network, rule, window))


@pytest.mark.row_checks
@pytest.mark.parametrize(("name", "options"), slow_but(ENDS, [end for end in ENDS if end not in SLOW]))
def test_lanes_equal_the_textbook_loop(family, name, options, monkeypatch):
    """Together, alone and as drawn; and rows that are evaluated again among others differ by noise."""
    differences = []
    difference = row_checks.difference

    def noted(*rows):
        differences.append(difference(*rows))
        return differences[-1]

    monkeypatch.setattr(row_checks, "difference", noted)
    network = family(name, **options)
    denoiser = network.denoiser
    windows = network.windows
    causal = denoiser.attention == "causal"
    block = "auto" if denoiser.block or causal else 4
    rule = RULES[ENDS.index((name, options)) % 2]
    if causal:
        rule = "left_to_right"
    elif denoiser.cache and denoiser.shift:
        rule = f"{rule}:seed_first=true"
    duel = Duel(denoiser, rule, block)

    # together
    logits_of = under_a_cache(denoiser) if denoiser.cache else lambda _: None
    together = duel.log_prob(windows)
    near_ties = 0
    for window, scored in zip(windows, together, strict=True):
        if scored.near_ties:  # the order is at the mercy of float noise
            near_ties += 1
        else:
            check(scored, textbook(network, rule, window, logits_of(window)))
    assert near_ties <= 1, "choose another seed"

    # alone: with a long context, a suffix and a tail; the others are in the comparison above
    monkeypatch.setattr(block_causal, "CLEAN", 4)  # long contexts in pieces
    few = slice(-3, None)
    alone = Duel(denoiser, rule, block, batch_size=1).log_prob(windows[few])
    same_scores(together[few], alone)

    # as drawn
    contexts = [window.context for window in windows[:3]]
    drawn = duel.sample(contexts, 7, seed=3)
    as_drawn = [Window(context, sample.tokens) for context, sample in zip(contexts, drawn, strict=True)]
    same_scores(drawn, duel.log_prob(as_drawn))

    assert duel.counts.rows_checked >= row_checks.FIRST
    assert max(differences) < FLOAT32 / 10


@pytest.mark.row_checks
@pytest.mark.parametrize(("name", "cache"), slow_but(DEMOS, DEMOS[:1]))
def test_no_demonstration_network_is_stopped_by_its_rows(name, cache):
    network = denoisers.load(name, device="cpu")
    rows = random_rows(network, 24, 20).tolist()
    duel = Duel(Cached(network, cache) if cache else network, "greedy:k=2")

    duel.log_prob([Window(row[:2], row[2 : 10 + n]) for n, row in enumerate(rows)])

    assert duel.counts.rows_checked >= row_checks.FIRST
    assert duel.counts.rows_differing == 0


@pytest.mark.parametrize("name", ["rnd1", "bert"])
@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
def test_dtypes(family, name):
    windows = family(name).windows[:3]
    in_float32 = Duel(family(name).denoiser, "left_to_right", 4).log_prob(windows)
    for short, dtype, tolerance in (("fp64", "float64", 1e-4), ("bf16", "bfloat16", 4.0)):
        denoiser = family(name, dtype=short).denoiser
        assert str(denoiser.dtype) == f"torch.{dtype}"
        assert denoiser.honours_padding

        scores = Duel(denoiser, "left_to_right", 4).log_prob(windows)
        for score, expected in zip(scores, in_float32, strict=True):
            assert score.log_prob == pytest.approx(expected.log_prob, abs=tolerance)


# ---------------------------------------------------------------- what is in the spec, and beside the law


def test_a_context_that_is_one_block_is_in_the_spec(family):
    assert family("d2f-llada").denoiser.describe()["context"] == "one block"
    assert "context" not in family("sdar").denoiser.describe()


def test_noise_levels_are_in_the_spec(family):
    """SEDD and GIDD are told the masked share of the row, or of the scored positions, which loses no digit near 1."""
    counted = {"given": "row", "official": "scored positions"}
    for bos, count in counted.items():
        for sigma in ("clamped", "schedule"):
            described = family("sedd", sigma=sigma, bos=bos).denoiser.describe()
            assert described["sigma"] == f"{sigma}, of the masked share of the {count}"
        described = family("gidd", bos=bos).denoiser.describe()
        assert described["time"] == f"masked share of the {count}, in [0.05, 1 - 0.05]"


def test_an_audit_reads_the_ar_baseline_as_it_is_scored(family):
    network = family("ar")
    ids = (11, 4, 5, 6, 0)
    logits = network.denoiser.head(network.denoiser.features(torch.tensor([ids]), None)[0])
    assert (logits - network.logits(ids, None)).abs().max() < 1e-4


def test_sedds_noise_level_is_clamped(tmp_path):
    """Of a share below 0.1, one position of 16, and of a row of masks."""
    denoiser, w = dit_reference.opened(tmp_path, "sedd")
    duel = Duel(denoiser, "greedy", None)
    tokens = tuple(range(1, 8)) * 2
    mask = dit_reference.TOKENS
    for context, share in (((0, *tokens), 0.1), ((), 0.9)):
        logits = dit_reference.plain(w, [*context, mask], -math.log(1 - share))[-1, : dit_reference.TOKENS]
        expected = float(logits.log_softmax(0)[3])

        [scored] = duel.log_prob([Window(context, (3,))])
        assert scored.log_prob == close_nats(expected, 1)


@pytest.mark.parametrize("name", ["duo", "udlm", "gidd"])
def test_noise_levels_are_those_of_training(name, tmp_path):
    """At times outside of them a network is given the nearest one, on both sides."""
    denoiser, _ = dit_reference.opened(tmp_path, name)
    low, high = (0.05, 0.95) if name == "gidd" else (-math.log1p(-1e-3), -math.log(1e-3))
    times = torch.tensor([0.0, 1e-5, 1 - 1e-5, 1.0], dtype=torch.float64)

    levels = denoiser.noise_level(times)

    assert levels.tolist() == pytest.approx([low, low, high, high])


# ---------------------------------------------------------------- compiled


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.parametrize("name", ["sdar", "dream"])
def test_a_compiled_network_sees_what_it_saw(family, name, tmp_path, monkeypatch):
    right = family(name)
    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: plain_compile(self, backend="eager"))
    compiled = load(*written(tmp_path, name), compile=True)
    block = "auto" if compiled.block else 4
    windows = right.windows[:1]

    scores = Duel(compiled, block=block).log_prob(windows)

    same_scores(scores, Duel(right.denoiser, block=block).log_prob(windows))
