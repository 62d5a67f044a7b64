"""Every flag of every command: alone, at 0 and at the empty text, twice, at its default; and what each one changes."""

import pytest
from results import documents, ours, trace

from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.cli import audit, generate, inspect, report, score
from lm_eval_duel.console.command_line import Parser
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.results import figures, traced

NEEDED = {  # the words that a command needs, in a folder with a text and results
    "score": (score.parse, ["a.txt"]),
    "generate": (generate.parse, []),
    "inspect": (inspect.parse, ["demo-mdm"]),
    "audit": (audit.parse, ["demo-mdm", "--tasks", "sotu"]),
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
            try:
                expected = [flag.kind(f"--{key}", written)] if flag.many else flag.read(f"--{key}", written)
            except DuelError:
                expected = "refused"
            found = value_or_name(parse, [*words, *more, f"--{key}={written}"], key)
            assert found in (expected, "refused"), (key, written)
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
        found = getattr(parse([*words, *more, f"--{key}", written]), key)
        assert found == [written] or str(found) == written or float(found) == float(written)
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
    [file] = (place / "results").rglob("results_*.json")
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
    assert "A heading" in page and "another:100" in page
    *_, last = capsys.readouterr().out.splitlines()
    listed = last.removeprefix("wrote to out: ").split(", ")
    assert sorted(listed) == sorted(file.name for file in (traced_place / "out").iterdir())
    report.main(["results", "--out", "second", "--traces", "t.jsonl"])
    assert not (traced_place / "second" / "index.html").exists()
    for flags in (["--title", "x"], ["--shown", "0"], ["--tokenizer", "x"]):
        with pytest.raises(UsageError, match=f"{flags[0]}: .*--page"):
            report.parse([*words, *flags])
    with pytest.raises(UsageError, match="--apart and --as_published"):
        report.parse([*words, "--apart", "--as_published"])


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
        (["--width", "5.5"], ("png",), 5.5),
    ],
)
def test_figures_have_their_formats_and_their_width(flags, formats, width, place, monkeypatch):
    asked = []
    monkeypatch.setattr(report, "collect", lambda options: "a report")
    monkeypatch.setattr(report, "console", lambda made: "as text")
    monkeypatch.setattr(report, "write", lambda *given: asked.append(given) or ["report.md"])
    report.main(["results", "--out", "out", *flags])
    [(made, out, given_formats, given_width, others)] = asked
    assert (made, out, tuple(given_formats), given_width, others) == ("a report", "out", formats, width, {})
