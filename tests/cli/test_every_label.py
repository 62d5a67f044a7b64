"""What `inspect` says of a network, and what it times, for networks and texts of every kind. Nothing is loaded."""

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from lm_eval_duel.cli import inspect, timing
from lm_eval_duel.cli import main as program
from lm_eval_duel.core.scores import Kind, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.registry import value_template
from lm_eval_duel.harness import lm as lm_module
from lm_eval_duel.harness import requests, stats
from lm_eval_duel.options import Options

BOUND = Score(-7.25, stderr=0.5, kind=Kind.UPPER_BOUND)
NAMES = {4: "[MASK]", 2: "[CLS]", 3: "[SEP]"}
NETWORK = {
    "attention": "bidirectional",
    "block": None,
    "family": "masked-lm",
    "quantized": False,
    "device": "cpu",
    "shift": 0,
    "mask_id": 4,
    "relative_positions": True,
    "honours_padding": True,
    "max_length": 16,
    "noise_training": None,
}
SPEC = {"denoiser": "Bert", "dtype": "float32", "vocabulary": "33 of 40", "weights": "digest"}
TEXT = {"prefix": (2,), "suffix": (3,), "bos": "given", "capacity": 14}
ESTIMATOR = {"block": 32, "grid": "target", "name": "duel", "value_template": value_template("duel", {})}


def model(spec=None, text=None, estimator=None, **network):
    """A model of the harness as `inspect` reads it: a bidirectional network of masks, but for what is given."""
    return SimpleNamespace(
        denoiser=SimpleNamespace(**NETWORK | network),
        spec=SPEC | (spec or {}),
        text=SimpleNamespace(**TEXT | (text or {})),
        estimator=SimpleNamespace(**ESTIMATOR | (estimator or {})),
        tokenizer=SimpleNamespace(convert_ids_to_tokens=NAMES.get, mask_token_id=4),
    )


@pytest.fixture
def described(monkeypatch):
    """What is said of a model, by label."""
    monkeypatch.setattr(stats, "parameters", lambda denoiser: 1234567)
    monkeypatch.setattr(inspect, "_score", lambda lm: "scored")

    def said(**more):
        return dict(inspect.inspect(model(**more), "a name"))

    return said


def test_a_network_of_masks(described):
    assert described() == {
        "checkpoint": "a name",
        "family": "masked-lm (Bert)",
        "parameters": "1,234,567",
        "dtype": "float32 on cpu",
        "vocabulary": "33 of 40 columns are tokens",
        "mask": "4 '[MASK]'",
        "attention": "bidirectional",
        "block": "32, counted from the first scored position (grid=target)",
        "logit shift": "0: a token is predicted at its own position",
        "max length": "16 positions: special tokens and 14 of text",
        "special tokens": "2 '[CLS]' text 3 '[SEP]' (bos=given)",
        "padding": "invisible (the attention mask is honoured): rows of any length share a batch",
        "all-mask starts": "every position ties: the lowest goes first",
        "weights": "digest",
        "one text": "scored",
    }


LABELS = [  # what a model is, a label, and words of what it says, or None if there is no such line
    ({"shift": 1}, "logit shift", "1: a token is predicted from the one before"),
    ({"relative_positions": False}, "all-mask starts", "positions differ"),
    ({"attention": "causal", "mask_id": None}, "all-mask starts", None),
    ({"attention": "causal", "mask_id": None}, "mask", "none: an autoregressive network"),
    ({"mask_id": None}, "all-mask starts", None),
    ({"mask_id": None}, "mask", "none: the noise is random tokens"),
    ({"mask_id": 7}, "mask", "7, which is no token"),
    ({"mask_id": 3}, "mask", "3 '[SEP]'; the tokenizer's own is 4 '[MASK]', which counts as a token"),
    ({"attention": "block_causal", "block": 4}, "attention", "block_causal, trained on blocks of 4"),
    ({"attention": "block_causal"}, "padding", "later blocks"),
    ({"attention": "causal_prefix"}, "padding", "later blocks"),
    ({"attention": "causal"}, "padding", "after the text"),
    ({"attention": "causal"}, "max length", "all but the last"),
    ({"honours_padding": False}, "padding", "only rows of equal length share a batch"),
    ({"estimator": {"grid": "row"}}, "block", "32, counted from the row's first position (grid=row)"),
    ({"estimator": {"block": None}}, "block", "none: the whole target"),
    ({"text": {"prefix": (), "suffix": (), "bos": "none"}}, "special tokens", "none (bos=none)"),
    ({"text": {"prefix": ()}}, "special tokens", "text 3 '[SEP]' (bos=given)"),
    ({"text": {"suffix": (), "bos": "official"}}, "special tokens", "2 '[CLS]' text (bos=official)"),
    ({"spec": {"guidance": "cfg_scale=0.5"}}, "guidance", "cfg_scale=0.5"),
    ({}, "guidance", None),
]


@pytest.mark.parametrize(("more", "label", "says"), LABELS)
def test_every_line_says_what_the_network_is(more, label, says, described):
    said = described(**more)
    if says is None:
        assert label not in said
    else:
        assert says in said[label]


@pytest.mark.parametrize(
    ("name", "score", "says"),
    [
        ("duel", Score(-7.25, nfe=3), "-7.250 nats for the 2 tokens of {}, greedy:k=1, 3 steps, exact, "),
        (
            "elbo",
            Score(-7.25, stderr=0.5, kind=Kind.UPPER_BOUND),
            "≥ -7.250 ± 0.500 nats for the 2 tokens of {}, elbo, bound, ",
        ),
        ("oracle", Score(-7.25), "-7.250 nats for the 2 tokens of {}, oracle, "),
    ],
)
def test_the_line_of_one_text(name, score, says):
    windows = [Window((2,), (5, 6), (3,))]

    def log_prob(given):
        assert given is windows
        return [score]

    lm = model(
        spec={"rule": "greedy:k=1"} if name == "duel" else {},
        text={"windows": lambda text: windows},
        estimator={"name": name, "log_prob": log_prob},
    )

    assert inspect._score(lm).startswith(says.format(repr(inspect.SENTENCE)))


# ---------------------------------------------------------------- what is timed


@pytest.mark.parametrize(
    ("network", "estimator", "names"),
    [
        ({}, "duel", ["duel", "two_phase", "elbo"]),
        ({}, "elbo", ["elbo", "duel", "two_phase"]),
        ({}, "oracle", ["oracle", "duel", "two_phase", "elbo"]),
        ({"attention": "causal"}, "ar", ["ar"]),
        ({"noise_training": "uniform"}, "noised_elbo", ["noised_elbo"]),
    ],
)
def test_the_estimators_that_are_timed(network, estimator, names, monkeypatch):
    """The run's own first, with its arguments; the others with their defaults. What is left out is named."""
    given = {"estimator": estimator}
    if not network:
        given["block"] = 4
    if "elbo" in estimator:
        given["mc_samples"] = 7
    options = Options.parse(given)
    lm = model(**network)
    lm.options = options
    asked = []

    def made(denoiser, given):
        asked.append(given)
        if given.estimator == "two_phase":
            raise DuelError("no cache here")
        return given

    monkeypatch.setattr(Estimator, "from_options", made)
    monkeypatch.setattr(timing, "_timed", lambda lm, given, windows: (given.estimator, len(windows)))

    timed, notes = timing.measure(lm, [[Window((), (1, 2)), Window((), ())], [Window((), (3,))]])

    assert [given.estimator for given in asked] == names
    assert asked[0] is options
    assert timed == [(name, 2) for name in names if name != "two_phase"]
    assert notes == (["two_phase: no cache here"] if "two_phase" in names else [])
    for given in asked[1:]:
        with_defaults = Options.parse({"estimator": given.estimator, "block": 4})
        assert given.estimator_args == with_defaults.estimator_args
        assert given.block == options.block
        assert given.rule == options.rule


def window(text):
    """A window whose ids are the characters of a text."""
    return [Window((), tuple(map(ord, text)))]


def text_of(windows):
    """The text of such a window."""
    [only] = windows
    return "".join(map(chr, only.target))


def test_the_first_documents_of_tasks_and_files_are_timed(monkeypatch, tmp_path):
    """Of both, whole texts and continuations; `--limit` holds for each task and for the files."""
    (tmp_path / "t.txt").write_text("ab\ncd\nef\n")
    kinds = ["loglikelihood_rolling", "loglikelihood"] * 2
    task = SimpleNamespace(instances=[SimpleNamespace(request_type=kind, n=n) for n, kind in enumerate(kinds)])

    def whole(text, asked):
        return [window(f"whole {request.n}") for request in asked]

    def gaps(text, asked):
        return [window(f"gap {request.n}") for request in asked], Counter()

    monkeypatch.setattr(requests, "document_windows", whole)
    monkeypatch.setattr(requests, "continuation_windows", gaps)
    lm = model(text={"windows": window})
    options = SimpleNamespace(files=[str(tmp_path / "t.txt")], field="text", lines=True, limit=2)

    documents = timing.read_documents(lm, options, [task])
    assert [text_of(windows) for windows in documents] == ["whole 0", "whole 2", "gap 1", "gap 3", "ab", "cd"]

    options.limit = None
    assert len(timing.read_documents(lm, options, [])) == 3

    without_tokens = model(text={"windows": lambda text: [Window((2,), ())]})
    with pytest.raises(DuelError):
        timing.read_documents(without_tokens, options, [])


def test_tasks_are_loaded_with_their_metadata_and_limit(monkeypatch):
    asked = []

    def load(*given):
        asked.append(given)
        return ["a task"]

    monkeypatch.setattr(inspect.named, "load", load)
    words = ["demo-mdm", "--model_args", "max_length=8", "--limit", "2", "--metadata", "max_length=9,a=1"]

    assert inspect._load_tasks(inspect.parse([*words, "--tasks", "sotu,ptb"])) == ["a task"]
    assert asked == [(["sotu", "ptb"], {"pretrained": "demo-mdm", "max_length": 9, "a": 1}, None, 2)]

    assert inspect._load_tasks(inspect.parse(words)) == []
    assert len(asked) == 1


def test_every_count_and_unit_of_the_table(monkeypatch):
    monkeypatch.setattr(timing, "_steps", lambda lm: "≤ ")
    timed = [
        timing.TimedEstimator("duel", "a likelihood", 4, 90.0, 3 * 2**20, 1234.0, 56, 7890.0, 12345.0),
        timing.TimedEstimator("elbo", "a bound", 2, 7200.0, 2**30, None, 5, 6.0, 7.0),
        timing.TimedEstimator("drawn", "an estimate", 1, 0.5, 0, 3.0, 2, 4.0, 9.0, is_expected=True),
    ]
    documents = [[Window((1,), (2, 3)), Window((), (4,))], [Window((), (5,))]]

    shown = timing.table(model(), documents, timed, ["a note"]).splitlines()
    figures = timing.figures(documents, timed, ["a note"])

    assert shown[0] == (
        "2 documents, 4 tokens in 3 windows of at most 3 positions. Up to 4 windows were timed for each estimator, "
        "on cpu; the figures are for all windows:"
    )
    head, *rows = (" ".join(line.split()) for line in shown[2:6])
    assert head == "estimator NFE calls rows token-rows time peak MiB what it gives"
    assert rows == [
        "duel ≤ 1,234 ~ 56 ≤ 7,890 ≤ 12,345 1.5 min 3 a likelihood",
        "elbo ≥ 5 6 7 2 h 1,024 a bound",
        "drawn ~ 3 ~ 2 ~ 4 ~ 9 0.5 s 0 an estimate",
    ]
    assert [line[0] for line in shown[6:9]] == ["≥", "~", "≤"], "each sign is explained"
    assert shown[9:] == ["a note"]

    assert list(figures["estimators"]) == ["duel", "elbo", "drawn"]
    in_json = json.loads(json.dumps(figures))["estimators"]
    for estimator in timed:
        assert in_json[estimator.estimator] == dataclasses.asdict(estimator)


@pytest.mark.parametrize("asked", [None, "-", "file"])
@pytest.mark.parametrize("texts", [[], ["--files", "t.txt"], ["--tasks", "sotu"]])
def test_json_has_what_is_printed(asked, texts, monkeypatch, tmp_path, capsys):
    """With --json FILE both; with --json alone, JSON alone; without texts, the checkpoint alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("ab")
    made = []
    monkeypatch.setattr(lm_module, "DuelMDM", lambda **args: made.append(args))
    monkeypatch.setattr(inspect, "inspect", lambda lm, name: [("checkpoint", name), ("mask", "4")])
    monkeypatch.setattr(inspect, "_load_tasks", lambda options: options.tasks)
    monkeypatch.setattr(timing, "read_documents", lambda lm, options, tasks: [window("ab")] if texts else [])
    monkeypatch.setattr(timing, "measure", lambda lm, documents: ([], ["a note"]))
    monkeypatch.setattr(timing, "table", lambda lm, documents, timed, notes: f"{len(documents)} document, {notes}")
    words = {None: [], "-": ["--json"], "file": ["--json", "out.json"]}[asked]
    expected = {"checkpoint": {"checkpoint": "demo-mdm", "mask": "4"}}
    if texts:
        expected |= {"documents": 1, "windows": 1, "length": 2, "tokens": 2, "estimators": {}, "left_out": ["a note"]}

    program.main(["inspect", "demo-mdm", "--model_args", "block=4", *texts, *words])

    [args] = made
    assert args == {"pretrained": "demo-mdm", "block": 4, "device": None, "batch_size": "auto"}
    printed = capsys.readouterr().out
    if asked == "-":
        assert json.loads(printed) == expected
        return
    assert printed.splitlines()[:2] == ["checkpoint  demo-mdm", "mask        4"]
    assert ("1 document, ['a note']" in printed) == bool(texts)
    assert (tmp_path / "out.json").exists() == (asked == "file")
    if asked == "file":
        assert json.loads((tmp_path / "out.json").read_text()) == expected
