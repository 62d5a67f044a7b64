"""Texts of the user's own files: how they are read, and the tasks that score them."""

import csv
import functools
import gzip
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from harness_requests import ask, choice_answers
from harness_runs import evaluate
from lm_eval.tasks import TaskManager

from lm_eval_duel import tasks
from lm_eval_duel.cli import run
from lm_eval_duel.core.windows import Window, infilled
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.store import request_key
from lm_eval_duel.tasks import data, files, infilling, named, task_folder
from lm_eval_duel.text.annotated import Gap
from lm_eval_duel.text.text import TextEncoder, shorter_than_a_block

pytestmark = pytest.mark.usefixtures("one_load")


def write(folder, name, content):
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def rows(folder, name, *records):
    lines = [json.dumps(record) for record in records]
    return write(folder, name, "\n".join(lines) + "\n")


def read(*patterns, **options):
    """The texts of the documents of files."""
    return [document.text for document in files.texts([str(pattern) for pattern in patterns], **options)]


# ---------------------------------------------------------------- files


def test_a_file_a_line_or_a_row_is_a_document(tmp_path, monkeypatch):
    plain = write(tmp_path, "a.txt", "one\n\n two\n")
    table = rows(tmp_path, "b.jsonl", {"body": "three"}, {"body": "four"})
    listed = write(tmp_path, "c.json", json.dumps([{"body": "five"}]))
    assert files.texts([plain]) == [(plain, "one\n\n two")]  # without the last line end
    assert files.texts([plain], lines=True) == [(f"{plain}:1", "one"), (f"{plain}:3", " two")]
    assert read(tmp_path / "*.json*", field="body") == ["three", "four", "five"]
    assert files.texts([table, listed], "body") == files.texts([f"{tmp_path}/*.json*"], "body")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    assert files.texts(["-"]) == [("stdin", "typed")]


def test_what_datasets_saves_is_read(tmp_path):
    texts = ["one", "two"]
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts, "n": [1, 2]})})
    splits.save_to_disk(tmp_path / "saved")
    train = tmp_path / "saved" / "train"
    assert read(train) == texts
    assert read(train / "*.arrow") == texts
    with pytest.raises(DuelError, match=re.escape(str(train))):
        read(tmp_path / "saved")
    table = pyarrow.table({"text": texts})
    pyarrow.feather.write_feather(table, tmp_path / "feather.arrow", compression="uncompressed")
    assert read(tmp_path / "feather.arrow") == texts


def test_byte_order_marks_and_line_ends_are_no_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\x0cthree\r\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n')
    assert read(tmp_path) == ["one\ntwo\x0cthree", "one"]
    assert read(tmp_path / "a.txt", lines=True) == ["one", "two\x0cthree"], "a form feed ends a page, not a line"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é".encode("latin-1")), errors="surrogateescape"))
    with pytest.raises(DuelError, match="stdin is not UTF-8 text"):
        files.texts(["-"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", "x", "is not .txt"),
        ("a.txt", "", "no text to score"),
        ("a.jsonl", '{"txt": "x"}', "Unknown column 'text'. Did you mean txt"),
        ("a.jsonl", '{"body": "x", "empty": null}', "--field body"),
        ("a.jsonl", '{"id": 3, "body": "x"}', "--field body"),
        ("a.jsonl", '{"$schema": "x", "title": "y"}', r"Known: \$schema, title\. Name it by --field COLUMN\.$"),
        ("a.jsonl", '{"text": 3}', "holds int, not text"),
        ("a.jsonl", "{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", '{"text": "a\x01"}', r"a.jsonl:1 is not JSON \(Invalid control character at character"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n{"text": "c"\n{"text": "d"}\n', "a.jsonl:4 is not JSON"),
        ("a.json", '[\n {"text": "a"},\n {"text" "b"}\n]', "a.json:3 is not JSON"),
        ("a.jsonl", '[\n {"text": "a"},\n {"text": [1},\n {"text": "b"}\n]', "a.jsonl:3 is not JSON"),
        ("a.jsonl", '{"text": [1,\n{"text": "b"}\n', "a.jsonl:1 is not JSON"),
        ("a.json", '["a", "b"]', "a.json:1 is not a JSON object"),
        ("a.csv", "text,n\na,1\nb\n", "a.csv:3 has 1 cells"),
        ("a.csv", "text,text\na,b\n", "several columns text"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(DuelError, match=message):
        files.texts([write(tmp_path, name, content)])


WRITTEN = {  # one JSON, and how it may be written
    "lines": '{"text": "a"}\n{"text": "b"}\n',
    "lines with blank ones": '\n{"text": "a"}\n\n{"text": "b"}',
    "list": '[{"text": "a"}, {"text": "b"}]',
    "white space first": '\n  [{"text": "a"}, {"text": "b"}]',
    "indented": json.dumps([{"text": "a"}, {"text": "b"}], indent=2),
    "wrapped": '{"data": [{"text": "a"}, {"text": "b"}], "version": "1"}',
    "wrapped and indented": json.dumps({"rows": [{"text": "a"}, {"text": "b"}]}, indent=2),
    "objects of several lines": '{\n "text": "a"\n}\n{\n "text": "b"\n}\n',
}


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_json_is_read_however_it_is_written(tmp_path, ending):
    for n, content in enumerate(WRITTEN.values()):
        file = write(tmp_path, f"{n}{ending}", content)
        assert read(file) == ["a", "b"], content
    one = write(tmp_path, f"one{ending}", json.dumps({"text": "a", "marks": [{"text": "b"}]}, indent=2))
    assert read(one) == ["a"]


def test_the_name_of_a_document_has_its_line(tmp_path):
    file = write(tmp_path, "a.jsonl", '\n{"text": "a"}\n\n{"text": 3}\n')
    with pytest.raises(DuelError, match=re.escape(f"{file}:4")):
        files.texts([file])


def test_cells_of_csv_hold_any_text(tmp_path):
    """Line breaks in quoted cells, in a file above a megabyte, and a cell above one."""
    texts = [f"text {n}\n" + "word\n" * 100 for n in range(4000)]
    texts += ["line\n" * 700_000, "1", "2026-11-27", "true", ""]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(texts))
    assert read(tmp_path / "a.csv") == texts


@pytest.mark.parametrize("column", [["1", "2"], ["2026-11-27", "2026-11-28"], ["true", "false"], ["1.50", "2"]])
def test_a_column_of_csv_is_text(tmp_path, column):
    assert read(write(tmp_path, "a.csv", "text\n" + "\n".join(column) + "\n")) == column


def test_folders_are_read_in_any_case_and_packed_and_name_what_they_leave_out(tmp_path, caplog):
    for name, content in (("a.TXT", "one"), ("b.md", "two"), ("notes.docx", "x"), (".hidden", "x")):
        write(tmp_path, name, content)
    (tmp_path / "below").mkdir()
    for name, content in (("c.jsonl.gz", '{"text": "three"}\n'), ("d.Txt.GZ", "four\n"), ("e.csv.gz", "text\nfive\n")):
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["six"]}), buffer)
    (tmp_path / "f.parquet.gz").write_bytes(gzip.compress(buffer.getvalue()))
    assert read(tmp_path) == ["one", "two", "three", "four", "five", "six"]
    assert "below/, notes.docx" in caplog.text
    assert "hidden" not in caplog.text
    assert read(tmp_path / "c.jsonl.gz") == ["three"]


# ---------------------------------------------------------------- tasks


def test_documents_and_rows_of_own_texts(tmp_path, folder):
    file = rows(tmp_path, "a.jsonl", {"body": "a b c d"}, {"body": "e d c b a"})
    model = {"tokenizer": folder, "files": file, "field": "body"}
    documents = tasks.own_documents(**model)["test"]
    assert documents["text"] == ["a b c d", "e d c b a"]
    assert documents["duel_tokens"] == [4, 5]

    packed = tasks.own_rows(**model, length=5, scoring="joint")["test"]  # the latter is another task's
    assert [len(ids.split()) for ids in packed["ids"]] == [5, 5, 5]  # 9 tokens between two special ones, three a row
    with pytest.raises(DuelError, match="name them: --metadata"):
        tasks.own_documents(tokenizer=folder)


def test_a_gap_is_scored_with_both_sides_visible(lm):
    [(log_prob, is_greedy)] = lm.loglikelihood(ask("loglikelihood", ("a b", Gap(" c", " d e"))))
    window = Window((2, *lm.tok_encode("a b")), lm.tok_encode("c"), (*lm.tok_encode("d e"), 3))
    [score] = DuelEstimator(lm.denoiser, "greedy", 4).log_prob([window])
    assert log_prob == pytest.approx(score.log_prob, abs=1e-4)
    assert is_greedy == score.is_greedy
    assert log_prob.tokens == 1
    assert log_prob.text == " c"
    assert log_prob.sees_suffix is True

    joint = lm.text.encode_gap("a b", Gap(" c", " d e"))
    assert lm.text.encode_gap("a b", Gap(" c ", "d e")) == joint  # spaces at the end belong to the suffix
    [(alone, _)] = lm.loglikelihood(ask("loglikelihood", ("a b", " c")))
    assert abs(alone - log_prob) > 1e-4  # the suffix counts


def test_the_suffix_is_part_of_the_key_of_an_answer():
    texts = ("b", Gap("b", "c"), Gap("b", "d"))
    keys = {request_key("loglikelihood", ("a", text), "") for text in texts}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("context", "after", "kept_before", "kept_after"),
    [(2, 2, 2, 2), (9, 9, 3, 3), (9, 1, 5, 1), (1, 9, 1, 5), (0, 9, 0, 6), (9, 0, 6, 0)],
)
def test_what_does_not_fit_is_cut_from_the_far_ends(context, after, kept_before, kept_after):
    before = list(range(10, 10 + context))
    behind = list(range(30, 30 + after))
    window, cut = infilled(before, [1, 2], behind, 10, [8], [9])
    assert window.context == (8, *before[context - kept_before :])
    assert window.target == (1, 2)
    assert window.suffix == (*behind[:kept_after], 9)
    assert cut == context + after - kept_before - kept_after


# ---------------------------------------------------------------- the tasks' files

INFILL = {
    "task": "x",
    "output_type": "loglikelihood",
    "custom_dataset": infilling.gaps,
    "test_split": "test",
    "doc_to_text": "prefix",
    "doc_to_target": "target",
    "process_results": infilling.target_perplexity,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def test_the_file_of_duel_infill_in_the_harness(tmp_path, folder, lm):
    file = rows(tmp_path, "g.jsonl", {"prefix": "a b", "target": " c d", "suffix": " e"}, {"target": "a b"})
    run = evaluate("duel_infill", f"pretrained={folder},rule=greedy,block=4", metadata={"files": file})

    pairs = ask("loglikelihood", ("a b", Gap(" c d", " e")), ("", "a b"))
    log_probs, are_greedy = zip(*lm.loglikelihood(pairs), strict=True)
    nats = sum(log_probs)
    metrics = run["results"]["duel_infill"]
    assert metrics["token_perplexity,none"] == pytest.approx(math.exp(-nats / 4))
    assert metrics["bits_per_byte,none"] == pytest.approx(-nats / math.log(2) / len(" c da b"))
    assert metrics["acc,none"] == sum(are_greedy) / 2

    [row, bare] = infilling.gaps(files=file)["test"]
    other = infilling.Gaps({"metadata": {"files": file}, **INFILL})
    with pytest.raises(DuelError, match="sees the prefix only"):
        other.process_results(row, [(-1.0, True)])
    assert other.process_results(bare, [(-1.0, True)])["acc"] == 1.0  # nothing to see after this one


@pytest.mark.parametrize(
    ("make", "record", "named"),
    [
        (infilling.gaps, {"prefix": "a"}, "'target'"),
        (infilling.gaps, {"target": ""}, "nothing to score"),
        (infilling.gaps, {"target": "a", "suffix": ["b"]}, "holds list"),
        (infilling.choices, {"options": ["a"], "label": 0}, "two or more"),
        (infilling.choices, {"options": ["a", "b"], "label": 2}, "from 0 to 1; got 2"),
    ],
)
def test_wrong_rows(tmp_path, make, record, named):
    with pytest.raises(DuelError, match=named):
        make(files=rows(tmp_path, "g.jsonl", record))


def test_choices_are_scored_with_their_suffix(tmp_path, folder, lm):
    question = {"prefix": "a", "options": [" b", " c"], "suffix": " d"}
    file = rows(tmp_path, "q.jsonl", {**question, "label": 0}, {**question, "label": " c"})
    run = evaluate("duel_choice", f"pretrained={folder},rule=greedy,block=4", metadata={"files": file})
    asked = ask("loglikelihood", ("a", Gap(" b", " d")), ("a", Gap(" c", " d")))
    answers = lm.loglikelihood(asked)
    best = max((0, 1), key=lambda n: answers[n][0])
    for sample in run["samples"]["duel_choice"]:
        assert [tuple(answer) for answer in choice_answers(sample)] == answers
        assert sample["acc"] == float(sample["doc"]["label"] == best)
    results = run["results"]["duel_choice"]
    assert results["acc,none"] == 0.5
    nats = torch.tensor([log_prob for log_prob, _ in answers], dtype=torch.float64)
    p = nats.softmax(0)
    right = torch.eye(2)  # of the two questions
    briers = ((p - right) ** 2).sum(1)
    assert results["brier,none"] == pytest.approx(float(briers.mean()))
    assert results["ece,none"] == pytest.approx(float(p.max()) - 0.5)  # both in one bin, one of them right


def test_a_bound_has_no_calibration(tmp_path, folder):
    file = rows(tmp_path, "q.jsonl", {"prefix": "a", "options": [" b", " c d"], "label": 0})
    model = f"pretrained={folder},estimator=elbo,mc_samples=16"
    results = evaluate("duel_choice", model, metadata={"files": file})["results"]["duel_choice"]
    assert "acc,none" in results
    assert "brier,none" not in results
    assert "ece,none" not in results


def test_calibration_by_hand():
    log_probs = [math.log(p) - 700 for p in (0.5, 0.3, 0.2)]
    scores = infilling.calibration(log_probs, 1)
    assert scores["brier"] == pytest.approx(0.25 + 0.49 + 0.04)
    assert scores["ece"] == (pytest.approx(0.5), 0.0)
    assert infilling.calibration([-math.inf, -math.inf], 0) == {}
    items = [(0.95, 1.0), (0.91, 0.0), (0.55, 1.0), (1.0, 1.0)]  # bins: three of the last, and one
    expected = (abs(2 - 0.95 - 0.91 - 1.0) + 0.45) / 4
    assert infilling.expected_calibration_error(items) == pytest.approx(expected)
    for top in (0.91, 0.95, 0.99):  # deviations of opposite signs: in two bins they would not cancel
        items = [(1.0, 0.0), (top, 1.0)]
        assert infilling.expected_calibration_error(items) == pytest.approx(top / 2)


def test_windows_shorter_than_a_block_are_named(lm):
    windows = [Window((), (5, 6, 7))]
    note = shorter_than_a_block(windows, 4096)
    assert "block=4096" in note
    assert "3 positions" in note
    for block in (None, 3, 2):
        assert not shorter_than_a_block(windows, block)
    assert not shorter_than_a_block([], 4)


@pytest.mark.parametrize("by_blocks", [True, False])
def test_a_network_with_one_block_size_gets_no_note_on_others(by_blocks):
    encoder = SimpleNamespace(denoiser=SimpleNamespace(by_blocks=by_blocks), block=8)
    note = TextEncoder.note_on_blocks(encoder, [Window((), (5, 6, 7))])
    assert bool(note) != by_blocks


def test_a_command_takes_a_task_a_yaml_file_or_texts(tmp_path, folder, monkeypatch):
    def without_defaults(include_defaults=True, **more):
        return TaskManager(include_defaults=False, **more)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", without_defaults)  # 14,000 tasks are indexed otherwise
    texts = rows(tmp_path, "a.jsonl", {"text": "a b c d"}, {"text": "e"})
    document = tasks.task_folder() + "/benchmarks/_document.yaml"
    mine = f"include: {document}\ntask: mine\ncustom_dataset: !function lm_eval_duel.tasks.own_documents\n"
    yaml = write(tmp_path, "mine.yaml", mine + f"metadata:\n  version: 1.0\n  files: {texts}\n")
    metadata = {"tokenizer": folder}
    for name, include_path in ((yaml, None), ("mine", str(tmp_path))):
        [task] = named.load([name], metadata, include_path)
        assert [request.args[-1] for request in task.instances] == ["a b c d", "e"]
    with pytest.raises(DuelError, match="Did you mean sotu"):
        named.load(["sotus"], metadata)


def test_files_of_text_are_one_task_together(folder, tmp_path, monkeypatch):
    """As in `run`, so that `audit` and `inspect` have its documents and its totals."""
    ours_only = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", ours_only)  # lm-eval's own tasks take seconds to index
    files = [write(tmp_path, "first.txt", "a b c d"), write(tmp_path, "second.txt", "e")]
    [task] = named.load(files, {"tokenizer": folder})
    assert [request.args[-1] for request in task.instances] == ["a b c d", "e"]


def test_an_unknown_task_names_the_files_that_lm_eval_passed_over(tmp_path, monkeypatch):
    ours_only = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", ours_only)  # lm-eval's own tasks take seconds to index
    missing = tmp_path / "missing"
    (tmp_path / "nested").mkdir()
    written = {
        "nested/includes.yaml": "include: nowhere.yaml\ntask: mine",
        "broken.yaml": "task: [mine",
        "good.yaml": "task: other",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DuelError, match="mine") as raised:
        named.load(["mine"], {}, str(tmp_path))
    message = str(raised.value)
    assert "nested/includes.yaml" in message
    assert "nowhere.yaml" in message
    assert "broken.yaml" in message
    assert "good.yaml" not in message
    assert "line 1" in message  # where YAML's error stands
    for folders in ([str(missing)], [missing], [tmp_path / "nested", missing]):
        assert str(missing) in named.unreadable(folders)
    assert named.unreadable([]) == ""


def test_run_reads_files_of_text_as_a_task(tmp_path):
    texts = write(tmp_path, "notes.txt", "a b")
    args = SimpleNamespace(tasks=f"sotu,{texts}", metadata={"lines": True})
    run._take_texts(args)
    assert args.tasks == "sotu,duel_text"
    assert args.metadata == {"lines": True, "files": [texts]}
    with pytest.raises(UsageError, match="name them in one place"):
        run._take_texts(SimpleNamespace(tasks=texts, metadata={"files": "other.txt"}))
    with pytest.raises(DuelError, match="matches no file"):
        run._take_texts(SimpleNamespace(tasks=str(tmp_path / "none.txt"), metadata=None))


def test_a_file_that_is_named_twice_is_read_once_and_said_so(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    pattern = str(tmp_path / "*.txt")
    once = files.texts([pattern])
    assert [document.text for document in once] == ["one", "two"]
    assert not caplog.messages

    assert files.texts([pattern, str(tmp_path / "b.txt")]) == once
    [message] = caplog.messages
    assert str(tmp_path / "b.txt") in message


def test_a_folder_of_tasks_is_read_once(tmp_path):
    """lm-eval warns of every task that it finds twice."""
    ours = task_folder()
    inside = f"{ours}/sotu"
    same = f"{ours}/../{Path(ours).name}"
    assert named.with_our_tasks([ours, inside, same]) == [ours]
    assert named.with_our_tasks([str(tmp_path), f"{tmp_path}/"]) == [ours, str(tmp_path)]


def test_the_nearest_of_the_tasks_in_folders(tmp_path):
    (tmp_path / "answers.yaml").write_text("task: my_answers\noutput_type: loglikelihood")
    assert named.nearest_in([tmp_path], ["my_answer", "nothing_like_it"]) == ["my_answers"]
    assert named.nearest_in([tmp_path / "missing"], ["my_answer"]) == []
    assert named.nearest_in([tmp_path], ["hellaswga"]) == ["hellaswag"]  # of lm-eval


def test_names_of_tasks_are_told_from_others_before_lm_eval_reads_its_files(tmp_path, monkeypatch):
    (tmp_path / "answers.yaml").write_text("task: my_answers\noutput_type: loglikelihood")
    small = named.tasks_in([task_folder(), tmp_path])
    monkeypatch.setattr(TaskManager, "__init__", None)
    tasks = ["sotu", "hellaswag", "my_answers", "ntrex_tasks"]
    assert named.not_mentioned(small, [*tasks, "sotu*", "./hellaswga", "a.yaml", str(tmp_path)]) == []
    assert named.not_mentioned(small, ["hellaswga", *tasks, "my_answer"]) == ["hellaswga", "my_answer"]


@pytest.mark.slow
def test_every_task_of_lm_eval_is_mentioned_in_its_files():
    tasks = TaskManager().all_tasks
    assert named.not_mentioned(named.tasks_in([]), tasks) == []
    suggested = named._names_of_lm_eval()
    assert len(suggested & {*tasks}) > 0.9 * len(tasks)


def test_a_column_that_the_task_needs_is_not_taken_for_one_that_the_user_named():
    with pytest.raises(DuelError, match="needs a column 'target'; there are prefix, tarjet"):
        files.column("a.jsonl:1", {"prefix": "x", "tarjet": "y"}, "target")


@pytest.mark.parametrize(
    ("output", "refused"),
    [("texts/a.txt", "would overwrite"), ("texts/new.csv", "next time"), ("texts/new.log", ""), ("new.csv", "")],
)
def test_an_output_is_none_of_the_texts(tmp_path, monkeypatch, output, refused):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("a b")
    for patterns in (["texts"], ["-", "texts"]):
        if refused:
            with pytest.raises(DuelError, match=refused):
                files.check_outputs(patterns, {"--json": None, "--csv": output})
        else:
            files.check_outputs(patterns, {"--json": None, "--csv": output})
    if "new" in output:
        files.check_outputs(["texts/a.txt"], {"--csv": output})


@pytest.mark.parametrize(
    ("content", "replaced"),
    [("", True), ('{\n "format": "lm_eval_duel score",', True), ("model,estimator,rule", True), ("A speech.", False)],
)
def test_an_output_replaces_only_outputs(tmp_path, content, replaced):
    """A pattern that the shell expands behind --json would cost its first file."""
    output = tmp_path / "a.txt"
    output.write_text(content)
    if replaced:
        files.check_outputs([], {"--json": str(output)})
        return
    with pytest.raises(DuelError, match=r"--json .*a\.txt exists"):
        files.check_outputs([], {"--json": str(output)})


def test_a_setting_by_which_no_file_is_read_is_named_in_a_warning(tmp_path, caplog):
    table = rows(tmp_path, "a.jsonl", {"page": "a b"})
    text = write(tmp_path, "a.txt", "a b\n")
    for patterns in ([table, text], [str(tmp_path)]):
        files.warn_of_unused(patterns, "page", lines=True)
    files.warn_of_unused(["-"], "text", lines=True)
    files.warn_of_unused([table], "page", lines=False)
    files.warn_of_unused([text], "text", lines=True)
    assert not caplog.messages

    for file, field, lines, setting in ((table, "page", True, "'lines'"), (text, "page", False, "'field'")):
        [document] = data.own_documents(files=file, field=field, lines=lines, pretrained="demo-mdm")["test"]
        assert document["text"] == "a b"
        [message] = caplog.messages
        assert setting in message
        caplog.clear()


def test_a_comma_without_a_name_behind_it_names_no_task():
    assert named.split("sotu,") == ["sotu"]
    assert named.split(["a, b", ",c"]) == ["a", "b", "c"]
