"""Every flag of every command: alone, at 0 and at the empty text, twice, at its default; and what each one changes."""

import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from results import documents, ours, trace

import lm_eval_duel
from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.cli import audit, audited_run, generate, inspect, report, score
from lm_eval_duel.cli.main import main as command
from lm_eval_duel.console import exits
from lm_eval_duel.console.command_line import Parser
from lm_eval_duel.console.exits import Exit
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.harness.requests import make_request
from lm_eval_duel.results import figures, traced

NEEDED = {  # the words that a command needs, in a folder with a text and results
    "score": (score.parse, ["a.txt"]),
    "generate": (generate.parse, []),
    "inspect": (inspect.parse, ["demo-mdm", "--tasks", "a.txt"]),
    "audit": (audit.parse, ["demo-mdm", "--tasks", "a.txt"]),
    "report": (report.parse, ["results", "--out", "out"]),
}
COMPLETED = {  # what `parse` puts in place of a flag that is not given
    ("report", "shown"): report.SHOWN,
    ("generate", "prompts"): [""],
    ("score", "model_args"): {},
}
ABOUT_THE_PAGE = ("title", "shown", "tokenizer")  # of `report`
QUESTIONS = ("NAME", "name", "RESULTS", "FILE", "tasks", "out", "model_args")  # have no default, or words of their own


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a text and with results, in which commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a b\n")
    ours(tmp_path / "results", docs={"sotu": documents([-5, -7], [2, 3])})
    return tmp_path


def flags_of(parse, words, monkeypatch):
    """The flags that a command declares."""
    declared = {}
    parse_args = Parser.parse_args

    def recorded(parser, *given):
        declared.update(parser.flags)
        return parse_args(parser, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", recorded)
        parse(words)
    return declared


def value_or_name(parse, words, name):
    """The value of a flag, or "refused" for an error that names it or what was written."""
    try:
        return getattr(parse(words), name)
    except UsageError as error:
        *_, written = words[-1].partition("=")
        assert name in str(error) or written in str(error), (words, error)
        return "refused"


def read_alone(flag, key, written):
    """What a flag reads, whatever the other flags are."""
    try:
        if flag.many:
            return [flag.kind(f"--{key}", written)]
        return flag.read(f"--{key}", written)
    except DuelError:
        return "refused"


@pytest.mark.parametrize("name", NEEDED)
def test_a_flag_at_a_falsy_value_is_that_value_or_refused(name, place, monkeypatch):
    """Neither its default, nor as if it were not given; twice, it is an error; not given, it is its default."""
    parse, words = NEEDED[name]
    for key, flag in flags_of(parse, words, monkeypatch).items():
        if key in QUESTIONS or key == "quiet":
            continue
        more = ["--page"] if key in ABOUT_THE_PAGE else []
        default = list(flag.default or ()) if flag.many else flag.default
        assert getattr(parse(words), key) == COMPLETED.get((name, key), default), key
        if flag.kind is TRUTH:
            assert getattr(parse([*words, *more, f"--{key}"]), key) is True
            continue
        for written in ("0", ""):
            expected = read_alone(flag, key, written)
            value = value_or_name(parse, [*words, *more, f"--{key}={written}"], key)
            assert value in (expected, "refused"), (key, written)
        with pytest.raises(UsageError, match=key):
            parse([*words, f"--{key}=1", f"--{key}=1"])


ENDS = {  # values that a flag takes at the ends of its range, and the nearest that it refuses
    ("report", "shown"): (["0", "1"], ["-1", "0.5"]),
    ("report", "width"): (["3", "30", "3.0"], ["2.99", "30.1", "0", "nan"]),
    ("report", "figures"): (["png", "svg", "pdf"], ["jpg", ""]),
    ("report", "pairs"): (["both", "rules", "models", "all", "none"], ["", "every"]),
    ("score", "limit"): (["1"], ["0", "-1", ""]),
    ("generate", "num"): (["1"], ["0", "-1"]),
    ("generate", "max_new_tokens"): (["1"], ["0"]),
    ("generate", "temperature"): (["0", "0.5"], ["-0.1", "nan"]),
    ("generate", "top_k"): (["1"], ["0"]),
    ("generate", "top_p"): (["1", "0.01"], ["0", "1.01"]),
    ("generate", "seed"): (["0", "7"], ["-1", "0.5"]),
    ("inspect", "limit"): (["1"], ["0"]),
    ("audit", "limit"): (["1"], ["0"]),
}


@pytest.mark.parametrize(("name", "key"), ENDS)
def test_the_ends_of_a_range(name, key, place):
    parse, words = NEEDED[name]
    taken, refused = ENDS[name, key]
    more = ["--page"] if key in ABOUT_THE_PAGE else []
    for written in taken:
        value = getattr(parse([*words, *more, f"--{key}", written]), key)
        assert value == [written] or str(value) == written or float(value) == float(written)
    for written in refused:
        with pytest.raises(UsageError, match=key):
            parse([*words, *more, f"--{key}={written}"])


# ---------------------------------------------------------------- report


@pytest.fixture
def traced_place(place, monkeypatch):
    """Results with a trace of five documents."""
    monkeypatch.setattr(figures, "available", lambda: False)
    monkeypatch.setattr(traced, "_load", str)
    monkeypatch.setattr(traced, "token_texts", lambda ids, tokenizer: [f"{tokenizer}:{n} " for n in ids])
    shutil.rmtree(place / "results")
    file = ours(place / "results", docs={"sotu": documents([-3] * 5, [2] * 5)})
    records = []
    for n in range(5):
        window = {"task": "sotu", "doc": n, "request": 0, "window": 0, "ids": [100 + n, 200 + n], "starts": [0]}
        records.append({**window, "reveal_steps": [1, 0], "token_logprobs": [-1.0, -2.0], "values": {"duel": -3.0}})
    trace(place / "t.jsonl", file, records)
    return place


PAGES = {  # flags of the page, and the documents that are shown
    "": [0, 1, 2],
    "--shown 0": [],
    "--shown 1": [0],
    "--shown 4": [0, 1, 2, 3],
    "--shown 9": [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("flags", PAGES)
def test_so_many_documents_are_on_the_page(flags, traced_place):
    report.main(["results", "--out", "out", "--traces", "t.jsonl", "--page", *flags.split()])

    page = (traced_place / "out" / "index.html").read_text()
    assert [n for n in range(5) if f":{100 + n}" in page] == PAGES[flags]


def test_a_page_has_its_heading_and_its_tokenizer_and_no_page_has_none(traced_place, capsys):
    words = ["results", "--out", "out", "--traces", "t.jsonl"]
    report.main([*words, "--page", "--title", "A heading", "--tokenizer", "another"])
    page = (traced_place / "out" / "index.html").read_text()
    assert "A heading" in page
    assert "another:100" in page
    *_, last = capsys.readouterr().out.splitlines()
    listed = last.removeprefix("wrote to out: ").split(", ")
    assert sorted(listed) == sorted(file.name for file in (traced_place / "out").iterdir())

    report.main(["results", "--out", "second", "--traces", "t.jsonl"])
    assert not (traced_place / "second" / "index.html").exists()

    for flag, value in (("--title", "x"), ("--shown", "0"), ("--tokenizer", "x")):
        with pytest.raises(UsageError, match=f"{flag}: .*--page"):
            report.parse([*words, flag, value])
    with pytest.raises(UsageError, match="--apart and --as_published"):
        report.parse([*words, "--apart", "--as_published"])


def test_every_trace_that_is_named_is_taken(traced_place):
    """Of files and of folders, in the order of the command line."""
    (traced_place / "more").mkdir()
    content = (traced_place / "t.jsonl").read_text()
    (traced_place / "more" / "u.jsonl").write_text(content)

    first, second = report.parse(["results", "--out", "out", "--traces", "more", "t.jsonl"]).traces

    assert Path(first).name == "u.jsonl"
    assert Path(second).name == "t.jsonl"


def test_what_cannot_be_read_is_found_before_anything_is_written(traced_place):
    (traced_place / "none.jsonl").write_text("{}\n")
    for flags in (["--ar", "nowhere"], ["--traces", "none.jsonl"], ["--published", "nowhere.csv"]):
        with pytest.raises(UsageError, match=flags[1]):
            report.parse(["results", "--out", "out", *flags])
    assert not (traced_place / "out").exists()


@pytest.mark.parametrize(
    ("flags", "formats", "width"),
    [
        ([], ("png",), None),
        (["--figures", "svg", "pdf"], ("svg", "pdf"), None),
        (["--figures", "none"], (), None),
        (["--width", "5.5"], ("png",), 5.5),
    ],
)
def test_figures_have_their_formats_and_their_width(flags, formats, width, place, monkeypatch):
    written = []

    def write(*given):
        written.append(given)
        return ["report.md"]

    monkeypatch.setattr(report, "collect", lambda options: "a report")
    monkeypatch.setattr(report, "console", lambda content: "as text")
    monkeypatch.setattr(report, "write", write)

    report.main(["results", "--out", "out", *flags])

    [(content, out, formats_of_figures, width_of_figures, others)] = written
    assert content == "a report"
    assert out == "out"
    assert tuple(formats_of_figures) == formats
    assert width_of_figures == width
    assert others == {}


def test_none_of_several_values_stands_alone(place):
    """It means no figures, and for other flags of several values the default."""
    words = ["results", "--out", "out"]
    assert report.parse([*words, "--figures", "none"]).figures == []
    assert score.parse(["a.txt", "--compare", "none"]).compare == []
    for several in (["none", "svg"], ["svg", "none"]):
        with pytest.raises(UsageError, match="--figures"):
            report.parse([*words, "--figures", *several])


# ---------------------------------------------------------------- score


@pytest.mark.parametrize("name", ["out.json", "./out.json", "here/../out.json", "linked.json"])
def test_two_names_of_one_file_are_refused(name, place):
    (place / "here").mkdir()
    (place / "linked.json").symlink_to(place / "out.json")
    with pytest.raises(UsageError, match="--csv and --json"):
        score.parse(["a.txt", "--csv", str(place / "out.json"), "--json", name])
    score.parse(["a.txt", "--csv", "other.json", "--json", name])


def test_standard_input_is_read_by_one_process(place, monkeypatch):
    for processes, files, refused in (
        (1, ["-"], False),
        (2, ["-"], True),
        (2, ["a.txt", "-"], True),
        (2, ["a.txt"], False),
    ):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UsageError, match="Standard input") if refused else contextlib.nullcontext():
            assert score.parse(files).file == files


def test_a_trace_is_that_of_the_first_model(place):
    models = score.parse(["a.txt", "--trace", "t.jsonl", "--compare", "rule=margin", "trace=u.jsonl"]).models
    assert [model.args.get("trace") for model in models] == ["t.jsonl", None, "u.jsonl"]


# ---------------------------------------------------------------- generate

SETTINGS = {  # a flag with its value: what the draws get, and the entry of each line
    "--suffix x": ({"suffixes": ["x"] * 2}, {"suffix": "x"}),
    "--max_new_tokens 5": ({"max_new_tokens": 5}, {}),
    "--temperature 0": ({"temperature": 0.0, "do_sample": False}, {"temperature": 0.0}),
    "--temperature 0.5": ({"temperature": 0.5}, {"temperature": 0.5}),
    "--top_k 3": ({"top_k": 3}, {"top_k": 3}),
    "--top_p 0.25": ({"top_p": 0.25}, {"top_p": 0.25}),
    "--until x yz": ({"until": ["x", "yz"]}, {}),
    "--seed 7": ({"seed": 7}, {"seed": 7}),
    "--model_args temperature=0.5,top_k=3,top_p=0.25": ({}, {"temperature": 0.5, "top_k": 3, "top_p": 0.25}),
    "--batch_size 3": ({}, {}),
    "--batch_size auto": ({}, {}),
    "a_checkpoint": ({}, {"pretrained": "a_checkpoint"}),
}


@dataclasses.dataclass
class Drawn:
    """What `generate` reads of a text."""

    prompt: str
    window: dict = dataclasses.field(default_factory=lambda: {"target": (5,), "known": ()})
    spec: dict = dataclasses.field(default_factory=dict)
    fingerprint: ClassVar = "f"
    log_prob: float = -math.inf


class Drawing:
    """A `Duel` that notes what it is asked for. `interrupted`: Ctrl-C comes after the second text."""

    rule, block, grid = "greedy:k=1", 4, "target"
    estimator = SimpleNamespace(name="duel")
    denoiser = SimpleNamespace(cache="dual")

    def __init__(self, interrupted=False):
        self.interrupted = interrupted

    def from_pretrained(self, name, **model):
        self.name = name
        self.model = model
        return self

    def generate_stream(self, prompts, **settings):
        self.settings = settings
        order = range(len(prompts))
        for count, n in enumerate(reversed(order)):
            if self.interrupted and count == 2:
                raise KeyboardInterrupt
            yield n, Drawn(prompts[n])


NO_SETTINGS = {
    "suffixes": [""] * 2,
    "max_new_tokens": 64,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "until": [],
    "seed": 0,
    "keys": [0, 1 << 32],
}
NO_METHOD = {
    "suffix": "",
    "pretrained": "demo-mdm",
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "seed": 0,
    "fingerprint": "f",
    "estimator": "duel",
    "rule": "greedy:k=1",
    "block": 4,
    "grid": "target",
    "cache": "dual",
}


def lines_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("flags", ["", *SETTINGS])
def test_every_setting_of_generate_reaches_the_draws_and_the_lines(flags, place, monkeypatch):
    changed_settings, changed_method = SETTINGS.get(flags, ({}, {}))
    settings = {**NO_SETTINGS, **changed_settings}
    method = {**NO_METHOD, **changed_method}
    duel = Drawing()
    monkeypatch.setattr(lm_eval_duel, "Duel", duel)

    generate.main([*flags.split(), "--prompt", "a \u00e9", "b", "--out", "out.jsonl"])

    assert duel.settings == settings
    assert duel.name == method["pretrained"]
    assert "pretrained" not in duel.model
    assert duel.model["batch_size"] == (3 if flags == "--batch_size 3" else None)

    lines = lines_of(place / "out.jsonl")
    assert [(line["prompt"], line["sample"], line["context"]) for line in lines] == [(0, 0, "a \u00e9"), (1, 0, "b")]
    for line in lines:
        assert method.items() <= line.items()
        assert line["log_prob"] is None
        assert line["window"] == {"target": [5]}


def test_a_sampler_without_a_rule_has_none(place, monkeypatch):
    duel = Drawing()
    duel.rule = None
    monkeypatch.setattr(lm_eval_duel, "Duel", duel)
    generate.main(["--out", "out.jsonl"])
    assert json.loads((place / "out.jsonl").read_text())["rule"] is None


def test_a_flag_and_a_model_arg_of_one_name_are_refused(place):
    for key, flag, arg in (("temperature", "0", "0.5"), ("top_k", "3", "2"), ("top_p", "1", "0.5")):
        with pytest.raises(UsageError, match=f"--{key} {flag} and {key}={arg} of"):
            generate.parse(["--model_args", f"{key}={arg}", f"--{key}", flag])


def test_texts_that_were_drawn_before_an_interrupt_are_written(place, monkeypatch):
    monkeypatch.setattr(lm_eval_duel, "Duel", Drawing(interrupted=True))
    with pytest.raises(Exit) as ended:
        command(["generate", "--prompt", "a", "b", "c", "d", "--out", "out.jsonl"])

    assert ended.value.code == exits.INTERRUPTED
    third, fourth = lines_of(place / "out.jsonl")
    assert third["prompt"] == 2
    assert third["context"] == "c"
    assert fourth["prompt"] == 3
    assert fourth["context"] == "d"


@pytest.mark.parametrize(
    ("named", "texts"),
    [
        ([], [""]),
        (["--prompt", "a", "b"], ["a", "b"]),
        (["--prompts", "lines.txt", "a.txt"], ["c d", "e", "a b"]),
        (["--prompts", "rows.jsonl"], ["x", "z"]),
        (["--prompts", "rows.jsonl", "--field", "other"], ["y", "w"]),
    ],
)
def test_prompts(named, texts, place):
    (place / "rows.jsonl").write_text('{"prompt": "x", "other": "y"}\n{"prompt": "z", "other": "w"}\n')
    (place / "lines.txt").write_text("c d\n\ne\n")
    assert generate.parse(named).prompts == texts


# ---------------------------------------------------------------- audit


@pytest.mark.parametrize(
    ("args", "used", "of_run"),
    [
        ("block=4", "float32", "auto"),
        ("dtype=float32", "float32", "float32"),
        ("dtype=bfloat16", "float32", "bfloat16"),
        ("dtype=float64", "float64", "float64"),
    ],
)
def test_an_audit_is_in_float32_or_better(args, used, of_run):
    """And says which runs have another fingerprint."""
    options = audit.parse(["demo-mdm", "--tasks", "sotu", "--model_args", args])
    assert options.model["dtype"] == used
    assert options.dtype == of_run

    lm = SimpleNamespace(options=SimpleNamespace(dtype=used), fingerprint="f")
    said = audited_run.audited_model(lm, options.model, options.dtype)
    assert f"dtype={used}, fingerprint f. A run in " in said
    assert "pretrained=demo-mdm" in said
    other = "another dtype" if of_run in ("auto", used) else of_run
    assert f"A run in {other} has" in said


def test_the_documents_of_the_limit_are_audited_and_the_others_are_company():
    scored = []

    def rolling(requests):
        scored.extend(requests)
        return [-1.0] * len(requests)

    statistics = SimpleNamespace(checked=[], verify_failures=["a window"])
    lm = SimpleNamespace(loglikelihood_rolling=rolling, evaluation=SimpleNamespace(stats=statistics))
    requests = [make_request("loglikelihood_rolling", {}, (f"a b {n}",), "t", n) for n in (0, 1, 2, 3)]
    findings = audited_run.Audit("float32")

    audited_run.audit_requests(lm, None, requests, 2, findings)

    audited = [request.doc_id for request in scored if request.task_name == "t"]
    company = [request.args[0] for request in scored if request.task_name != "t"]
    assert audited == [0, 1]
    assert company == ["a b 2", "a b 3", "a b ", "a b "]
    assert len(findings.problems) == 1


@pytest.mark.parametrize("command", ["audit", "inspect"])
@pytest.mark.parametrize("words", [["sotu,ptb"], ["sotu", "ptb"], ["sotu,", "ptb"]])
def test_tasks_are_separated_by_commas_or_spaces(command, words):
    """As in lm_eval."""
    parse, _ = NEEDED[command]
    assert parse(["demo-mdm", "--tasks", *words, "--limit", "1"]).tasks == ["sotu", "ptb"]
