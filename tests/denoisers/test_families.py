"""Every family: what is found at load, and its numbers, by the textbook loop over its plain network in float64."""

import itertools
import math
from pathlib import Path

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
ALIKE = {"mmada", "d2f-dream", "diffullama", "nemotron-diffusion-research", "a2d-qwen2-bd3lm", "a2d-llama-bd3lm"}
ALIKE |= {"stable-diffcoder", "dream-reasoner", "dplm", "distilbert", "one-block", "illada"}  # like others here
ALIKE |= {"own dream", "own dream, scaled", "own llada2", "own rnd1, native rotary"}
ALIKE |= {"own dream, tied", "own unknown", "llama", "opt", "mobilebert", "ibert", "bloom", "roberta", "causal letters"}
RULES = ["threshold:mu=0.3", "greedy"]  # by turns: every rule is compared on toys


def test_every_family_is_here():
    assert {name for name in CASES if not name.startswith("plain")} - VARIANTS.keys() == set(families.NAMED)


# attention, shift, bos, block, published block, [MASK], positions, columns, relative positions, must see a token
MASKED_LM = ("masked-lm", "bidirectional", 0, "auto", None, None, 4)
CAUSAL_LM = ("causal-lm", "causal", 1, "given", None, None, None)
DIT = ("bidirectional", 0, "given", None, 4, 12, 16, 13, True, False)
FOUND = {
    **{name: (*MASKED_LM, 32, tiny.ROWS, name == "modernbert", False) for name in MASKED_LMS},
    **dict.fromkeys(TEXTS, (*MASKED_LM, 32, tiny.ROWS, True, False)),
    "letters": ("own code", *MASKED_LM[1:], 32, tiny.ROWS, False, False),
    **dict.fromkeys(CAUSAL, (*CAUSAL_LM, 33, tiny.ROWS, False, False)),
    **dict.fromkeys(PROTEINS, (*MASKED_LM[:-1], 32, 64, 33, False, True)),  # two of 66 positions no residue has
    **{name: ("sedd" if "sedd" in name else "mdlm", *DIT) for name in DITS},
    "bd3lm": ("bd3lm", "block_causal", 0, "given", 4, None, 12, 16, 13, True, False),
    "gidd": ("gidd", "bidirectional", 0, "given", None, None, 12, 16, 16, True, False),
    "ar": ("ar", "causal", 1, "given", None, None, None, 16, 13, False, False),
}
for name, case in CASES.items():
    kind = "decoder" if name.startswith("plain") else VARIANTS.get(name, name)
    FOUND[name] = (kind, case.attention, case.shift, case.bos, case.block, case.published, case.mask, case.length)
    FOUND[name] += (case.rows, case.relative, False)
for name in own.KINDS:  # a checkpoint's own code: the family's attributes, other sizes
    kind = next((each for each in ("llada2", "llada", "dream", "sdar", "rnd1") if each in name), "sdar")
    _, attention, shift, bos, block, published, *_ = FOUND[kind]
    if "unknown" in name:
        kind = "own code"
        bos = "auto"
    FOUND[name] = (kind, attention, shift, bos, block, published, 4, 64, tiny.ROWS, True, False)
LIKE_TRANSFORMERS = [*MASKED_LMS, *TEXTS, *PROTEINS, *tiny.CAUSAL_LMS]
REACT = ["convbert", "fnet", "letters", *(name for name in own.KINDS if FOUND[name][1] != "block_causal")]
REACT.remove("own llada")
REACT += PROTEINS if transformers.__version__.startswith("4.") else []


FOUND_OTHERWISE = {"mmada", "a2d-qwen2-bd3lm", "causal letters"}  # by branches of the loading that are theirs alone
LOADED = [name for name in NAMES if name not in ALIKE or name in FOUND_OTHERWISE]


@pytest.mark.parametrize("name", slow_but(NAMES, LOADED))
def test_what_is_found_at_load(family, name):
    denoiser = family(name).denoiser
    found = [denoiser.family, denoiser.attention, denoiser.shift, denoiser.bos, denoiser.block]
    found += [denoiser.published_block, denoiser.mask_id, denoiser.max_length, denoiser.vocab_size]
    assert (*found, denoiser.relative_positions, denoiser.needs_visible) == FOUND[name]
    tokens = set(range(len(tiny.WORDS)))
    if name in PROTEINS:
        tokens = set(range(33))
    elif denoiser.vocab_size < 20:  # our own DiT
        tokens = set(range(12))
    assert set((~denoiser.excluded).nonzero()[:, 0].tolist()) == tokens - {denoiser.mask_id}
    assert denoiser.seeds_blocks == (name == NEMOTRON) and denoiser.anchor == ("target" if "d2f" in name else "row")
    assert denoiser.honours_padding == (name not in REACT)
    if name in LIKE_TRANSFORMERS:
        assert denoiser.splits_head or name in [*PROTEINS, "mobilebert"]
        assert type(denoiser.model).__module__.startswith("transformers.models.")
    if denoiser.family == "masked-lm":
        assert denoiser.special_tokens == (((0,), (2,)) if name in PROTEINS else ((2,), (3,)))
    assert golden.entry(SPECS, name, spec_without_digests(denoiser)), denoiser.describe()


SPECS = Path(__file__).with_name("golden") / "specs.json"  # LM_EVAL_DUEL_RECORD=1 pytest -n 0 records them


def spec_without_digests(denoiser):
    """The spec of a network, which must not depend on random weights or on where its files are."""
    spec = {key: str(value) for key, value in denoiser.describe().items() if key not in ("weights", "code")}
    return spec | {"unread entries": ", ".join(getattr(denoiser, "unread_entries", ()))}


ENDS = [(name, {}) for name in NAMES]
ENDS += [(name, {"last_block": "cut"}) for name in ("sdar", "fast-dllm-v2", "d2f-llada", "bd3lm", NEMOTRON)]
ENDS += [("sedd", {"sigma": "schedule", "bos": "official"}), ("sedd-retrained", {"bos": "official"})]
ENDS += [("gidd", {"bos": "official"}), (NEMOTRON, {"first_token": "block"}), (NEMOTRON, {"attention": "causal"})]
CACHES = ["prefix", "dual"]
CACHED = ["mdlm", "bidirectional", "one-block", "bert", "roberta", "modernbert", *TEXTS]
CACHED += [name for name in CASES if CASES[name].attention == "bidirectional"]
QUICK = list(zip(["llada", "dream", "mdlm", "modernbert"], CACHES * 2, strict=True))
for name, cache in itertools.product(CACHED, CACHES):
    ENDS.append((name, {"cache": cache, **({} if name in DITS else {"dtype": "float64"})}))
PARTLY_LIKE = {  # others here: one window of each is compared in a plain run, all of them in a slow one
    *("smdm", "llada-moe", "coda", "a2d-qwen2", "a2d-llama", "a2d-qwen3-bd3lm", "open-dllm", "sdar-moe", "llada2.2"),
    *("plain bidirectional", "plain block_causal", "sedd-retrained", "convbert", "bigbird", "fnet"),
    *("own llada", "own sdar", "own rnd1", "qwen2", "gemma2", "mixtral", "mamba"),
    *("rnd1", "a2d-qwen3", "bidirectional", "eurobert", "gpt2", "fast-dllm-v2", "esm-2", "bert", "diffugpt"),
}
ONE_WINDOW = [  # of each, too: the same network with other options is compared at all windows
    *((name, {}) for name in ("dream", "sdar", "d2f-llada", "mdlm", "sedd", "gidd")),
    *((NEMOTRON, options) for options in ({"first_token": "block"}, {"attention": "causal"})),
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
    modules = (plain.network if isinstance(plain, DiTDenoiser) else plain.model).modules()
    layers = next(part for part in modules if isinstance(part, torch.nn.ModuleList))
    return lambda window: reference(plain, layers, denoiser.cache, window, 4)


@pytest.mark.parametrize(("name", "options"), FEW)
def test_a_window_equals_the_textbook_loop(family, name, options):
    network = family(name, **options)
    denoiser = network.denoiser
    causal = denoiser.attention == "causal"
    rule = "left_to_right" if causal else "greedy"
    window = network.windows[0]
    [scored] = Duel(denoiser, rule, "auto" if denoiser.block or causal else 4).log_prob([window])
    assert not scored.near_ties, "choose another window"
    check(scored, textbook(network, rule, window))


@pytest.mark.row_checks
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*end, marks=pytest.mark.slow) if end in SLOW else end for end in ENDS]
)
def test_lanes_equal_the_textbook_loop(family, name, options, monkeypatch):
    """Together, alone and as drawn; and rows that are evaluated again among others differ by noise."""
    differences = []
    difference = row_checks.difference

    def noted(*rows):
        differences.append(difference(*rows))
        return differences[-1]

    monkeypatch.setattr(row_checks, "difference", noted)
    network = family(name, **options)
    near_ties = 0
    denoiser = network.denoiser
    windows = network.windows
    causal = denoiser.attention == "causal"
    logits_of = under_a_cache(denoiser) if denoiser.cache else lambda _: None

    block = "auto" if denoiser.block or causal else 4
    rule = RULES[ENDS.index((name, options)) % 2]
    if causal:
        rule = "left_to_right"
    elif denoiser.cache and denoiser.shift:
        rule = f"{rule}:seed_first=true"
    duel = Duel(denoiser, rule, block)
    together = duel.log_prob(windows)
    for window, scored in zip(windows, together, strict=True):
        if scored.near_ties:  # the order is at the mercy of float noise
            near_ties += 1
        else:
            check(scored, textbook(network, rule, window, logits_of(window)))
    assert near_ties <= 1, "choose another seed"
    monkeypatch.setattr(block_causal, "CLEAN", 4)  # long contexts in pieces
    few = slice(-3, None)  # with a long context, a suffix and a tail; the others are in the comparison above
    same_scores(together[few], Duel(denoiser, rule, block, batch_size=1).log_prob(windows[few]))
    contexts = [window.context for window in windows[:3]]
    drawn = duel.sample(contexts, 7, seed=3)
    same_scores(drawn, duel.log_prob([Window(c, d.tokens) for c, d in zip(contexts, drawn, strict=True)]))
    assert duel.counts.rows_checked >= row_checks.FIRST and max(differences) < FLOAT32 / 10


@pytest.mark.row_checks
@pytest.mark.parametrize(("name", "cache"), slow_but(DEMOS, DEMOS[:1]))
def test_no_demonstration_network_is_stopped_by_its_rows(name, cache):
    network = denoisers.load(name, device="cpu")
    rows = random_rows(network, 24, 20).tolist()
    duel = Duel(Cached(network, cache) if cache else network, "greedy:k=2")
    duel.log_prob([Window(row[:2], row[2 : 10 + n]) for n, row in enumerate(rows)])
    assert duel.counts.rows_checked >= row_checks.FIRST and duel.counts.rows_differing == 0


@pytest.mark.parametrize("name", ["rnd1", "bert"])
@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
def test_dtypes(family, name):
    windows = family(name).windows[:3]
    exact = Duel(family(name).denoiser, "left_to_right", 4).log_prob(windows)
    for short, dtype, tolerance in (("fp64", "float64", 1e-4), ("bf16", "bfloat16", 4.0)):
        denoiser = family(name, dtype=short).denoiser
        assert str(denoiser.dtype) == f"torch.{dtype}" and denoiser.honours_padding
        scored = Duel(denoiser, "left_to_right", 4).log_prob(windows)
        assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in exact], abs=tolerance)


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
    tokens = tuple(range(1, 8)) * 2
    for context, share in (((0, *tokens), 0.1), ((), 0.9)):
        row = torch.tensor([*context, dit_reference.TOKENS])
        logits = dit_reference.plain(w, row.tolist(), -math.log(1 - share))[-1, : dit_reference.TOKENS]
        [scored] = Duel(denoiser, "greedy", None).log_prob([Window(context, (3,))])
        assert scored.log_prob == close_nats(float(logits.log_softmax(0)[3]), 1)


@pytest.mark.parametrize("name", ["duo", "udlm", "gidd"])
def test_noise_levels_are_those_of_training(name, tmp_path):
    """At times outside of them a network is given the nearest one, on both sides."""
    denoiser, _ = dit_reference.opened(tmp_path, name)
    low, high = (0.05, 0.95) if name == "gidd" else (-math.log1p(-1e-3), -math.log(1e-3))
    levels = denoiser.noise_level(torch.tensor([0.0, 1e-5, 1 - 1e-5, 1.0], dtype=torch.float64))
    assert levels.tolist() == pytest.approx([low, low, high, high])


# ---------------------------------------------------------------- compiled


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.parametrize("name", ["sdar", "dream"])
def test_a_compiled_network_sees_what_it_saw(family, name, tmp_path, monkeypatch):
    right = family(name)
    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: plain_compile(self, backend="eager"))
    denoiser = load(*written(tmp_path, name), compile=True)
    block = "auto" if denoiser.block else 4
    windows = right.windows[:1]
    same_scores(*(Duel(each, block=block).log_prob(windows) for each in (denoiser, right.denoiser)))
