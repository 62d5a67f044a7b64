"""`lm-eval-duel audit`: both sides of a few documents, and its exit codes."""

import dataclasses
import json
import logging
import re
import signal

import pytest

from lm_eval_duel.audit import verify
from lm_eval_duel.cli import audit, audited_run
from lm_eval_duel.cli.main import main
from lm_eval_duel.core import predictions
from lm_eval_duel.core.reveal import Interrupted
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError, documentation
from lm_eval_duel.estimators import totals
from lm_eval_duel.tasks import data, named
from lm_eval_duel.text import text
from lm_eval_duel.text.annotated import Units, document_of

pytestmark = pytest.mark.usefixtures("one_load")


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "letters.txt"
    file.write_text("m b c d e f g h i j k l m n o p q r\n")
    return str(file)


def command(folder, texts, *more, args="rule=greedy,block=4"):
    return ["--model_args", f"pretrained={folder},{args}", "--tasks", texts, "--device", "cpu", *more]


def exit_code(*arguments):
    """That of a command which ends the program."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_options_before_different_texts(folder, tmp_path, capsys):
    """Their windows differ in the suffix alone."""
    question = {"prefix": "m b", "options": [" c d", " e f"], "label": 0}
    rows = [{**question, "suffix": suffix} for suffix in (" g h", " i j")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--metadata", f"files={tmp_path}/rows.jsonl", "--no_own_code"]

    audit.main(command(folder, "duel_choice", *files))

    out = capsys.readouterr().out
    assert "PASS: 4 windows, 8 tokens, 2 of 2 documents. Compared: 4 windows with the reference" in out
    assert "Not compared: the network (--no_own_code), acc, acc_norm, brier, ece of duel_choice." in out
    assert "document 1, option 1, window 0" in out


def test_a_text_of_probability_0_is_compared_by_its_tokens_alone(folder, texts, capsys):
    audit.main(command(folder, texts, "--no_own_code", args="rule=greedy,block=4,top_k=9"))

    out = capsys.readouterr().out
    assert re.search(r"Not compared: .*the sums of \d+ windows? of probability 0", out)
    assert re.search(r"windows? with the reference \(\d+ of probability 0, by the single tokens alone\)", out)
    assert "best order" not in out
    assert "WARNING: the token perplexity of duel_text is infinite" in out


def test_a_folder_with_results_is_no_model_that_was_not_named(tmp_path, monkeypatch):
    (tmp_path / "results_1.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert "pretrained" not in audit.parse(["--tasks", "sotu"]).model
    with pytest.raises(DuelError, match="not results such as"):
        audit.parse(["--model_args", f"pretrained={tmp_path}", "--tasks", "sotu"])


def test_another_mask_than_the_tokenizer_names_is_a_warning_of_the_verdict(folder, tmp_path, capsys):
    texts = tmp_path / "letters.txt"
    texts.write_text("m b d e f g h")
    audit.main(command(folder, str(texts), "--no_own_code", args="rule=greedy,block=4,mask_token_id=7"))

    out = capsys.readouterr().out
    assert "WARNING: " in out
    assert "mask_token_id=7" in out
    assert re.search(r"^PASS: [^.]*; \d warnings? above\. ", out.splitlines()[-1])


@pytest.mark.parametrize("samples", [8, 32])
def test_values_that_are_not_exact_have_their_sign_and_error(folder, texts, capsys, samples):
    """Of two rows, eight samples give no error."""
    audit.main(command(folder, texts, "--no_own_code", args=f"estimator=elbo,mc_samples={samples}"))

    out = capsys.readouterr().out
    error_is_known = samples == 32
    words = "± is the Monte Carlo error" if error_is_known else "its error is not known"
    assert f"alone (an upper bound of the perplexity; {words}):" in out
    for metric in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
        [line] = [line for line in out.splitlines() if metric in line]
        _, below, value, _, also_below, printed, *error = line.split()
        assert below == also_below == "≤"
        assert float(value) == pytest.approx(float(printed), rel=1e-4)
        assert len(error) == (2 if error_is_known else 0)
        if error:
            assert 0 < float(error[1]) < float(value)


def test_texts_have_the_names_of_their_files(folder, tmp_path, capsys, monkeypatch):
    for name in ("one.txt", "other.txt"):
        (tmp_path / name).write_text("m b c d e f g h")
    files = f"{tmp_path}/one.txt,{tmp_path}/other.txt"
    log_prob = predictions.Predictions.log_prob
    monkeypatch.setattr(predictions.Predictions, "log_prob", lambda self, tokens: log_prob(self, tokens) + 1e-3)

    of_metadata = ["duel_text", "--metadata", json.dumps({"files": files.split(",")})]
    for tasks in ([files], of_metadata):
        assert exit_code("audit", *command(folder, *tasks, "--no_own_code")) == 1
        printed = capsys.readouterr()
        for name in ("one.txt", "other.txt"):
            differs = f"task duel_text, document {tmp_path}/{name}, window 0"
            assert differs in printed.out
            assert differs in printed.err
    documents = named.load([*files.split(",")], {"pretrained": str(folder)})[0].dataset["test"]
    assert list(documents[0]) == ["text", data.TOKENS], "lm-eval's digest of a document has no name of a file"


def test_texts_of_a_task_that_includes_duel_text_have_the_names_of_their_files(folder, tmp_path):
    for name in ("one.txt", "other.txt"):
        (tmp_path / name).write_text("m b c d e f g h")
    (tmp_path / "my_text.yaml").write_text(f"include: {data.task_folder()}/own/duel_text.yaml\ntask: my_text\n")
    metadata = {"pretrained": str(folder), "files": f"{tmp_path}/*.txt"}
    mine, bundled = named.load(["my_text", "sotu"], metadata, str(tmp_path), limit=2)
    names = [document_of(request) for request in mine.instances]
    assert names == [f"{tmp_path}/one.txt", f"{tmp_path}/other.txt"]
    assert [document_of(request) for request in bundled.instances] == [0, 1]


def test_a_fault_is_the_exit_code(folder, texts, capsys, monkeypatch):
    log_prob = predictions.Predictions.log_prob
    monkeypatch.setattr(predictions.Predictions, "log_prob", lambda self, tokens: log_prob(self, tokens) + 1e-3)

    assert exit_code("audit", *command(folder, texts, "--no_own_code")) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 2


def test_all_three_parts(folder, texts, capsys):
    audit.main(command(folder, texts))
    out = capsys.readouterr().out

    assert out.count(" reference\n") == 2  # windows of 14 and 4 tokens
    assert "DIFFERS" not in out
    assert "network equals BertForMaskedLM" in out
    assert "weights equal those of the files" in out
    assert "1 document, 35 bytes, 18 words, 18 tokens" in out
    for metric in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
        [line] = [line for line in out.splitlines() if metric in line]
        _, from_text, _, printed = line.split()
        assert float(from_text) == pytest.approx(float(printed), rel=1e-5)

    verdict = out.splitlines()[-1]
    compared = "2 windows with the reference, the network with Bert"
    assert verdict.startswith(f"PASS: 2 windows, 18 tokens, 1 of 1 document; 1 warning above. Compared: {compared}")
    for what in ("the weights with the files", "totals and their errors", "the best order", "printed numbers"):
        assert what in verdict
    assert f"Not compared: nothing. {documentation('audit.md')} lists" in verdict


def other_ids(monkeypatch):
    document = text.TextEncoder.document
    monkeypatch.setattr(text.TextEncoder, "document", lambda self, ids: document(self, ids[::-1]))


def smaller_totals(monkeypatch):
    from_scores = totals.Total.from_scores

    def smaller(*arguments):
        total = from_scores(*arguments)
        return dataclasses.replace(total, summed=total.summed.with_nats(0.99 * total.log_prob))

    monkeypatch.setattr(totals.Total, "from_scores", smaller)


def another_count(monkeypatch):
    monkeypatch.setattr(data, "count_units", lambda text, *_, **__: Units(len(text.split()) + 1, len(text)))


@pytest.mark.parametrize("fault", [other_ids, smaller_totals, another_count])
def test_a_fault_between_text_and_metric_is_the_exit_code(fault, folder, texts, capsys, monkeypatch):
    fault(monkeypatch)

    assert exit_code("audit", *command(folder, texts, "--no_own_code")) == 1, "though no window differs"

    out = capsys.readouterr().out
    verdict = out.splitlines()[-1]
    assert "DIFFERS" not in out
    assert verdict.startswith("FAIL: ")
    assert "the network (--no_own_code)" in verdict


def test_a_verification_that_fails_is_the_exit_code(folder, texts, capsys, monkeypatch):
    monkeypatch.setattr(verify, "recompute", lambda *_: {}["a key"])

    assert exit_code("audit", *command(folder, texts, "--no_own_code")) == 1
    assert "verification failed: KeyError: 'a key'" in capsys.readouterr().err


FAULTY_RULE = """\
import dataclasses

from lm_eval_duel.rules import Rule


@dataclasses.dataclass(frozen=True)
class Faulty(Rule, name="faulty"):
    def __call__(self, predictions, lanes):
        return lanes.masked[9999]
"""
GENERATES = """\
task: short_answers
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
metric_list: [{metric: exact_match}]
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unknown task", marks=pytest.mark.slow),  # lm-eval reads the names of all of its tasks
        pytest.param("generating task", marks=pytest.mark.slow),
        "missing file",
        "another block",
        "missing checkpoint",
        "results",
        "no checkpoint",
        "faulty rule",
    ],
)
def test_what_keeps_an_audit_from_a_verdict_is_no_fail(name, folder, texts, tmp_path, monkeypatch):
    """Exit code 1 is for a difference alone: a test in CI must not take a mistyped argument for one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"text": "m b c"}\n' * 2)
    (tmp_path / "generates.yaml").write_text(GENERATES)
    (tmp_path / "faulty_rule.py").write_text(FAULTY_RULE)
    words = {
        "unknown task": command(folder, "letterz"),
        "missing file": command(folder, "nosuch.txt"),
        "generating task": command(folder, "generates.yaml"),
        "another block": command("demo-bd", texts, args="block=8"),
        "missing checkpoint": command(str(tmp_path / "nosuch"), texts),
        "results": command(str(FOLDER / "results" / "demo-bd"), texts),
        "no checkpoint": command(str(tmp_path), texts),
        "faulty rule": command(folder, texts, args="rule=faulty_rule.py:Faulty,block=4"),
    }

    with pytest.raises(SystemExit) as ended:
        main(["audit", *words[name]])

    assert ended.value.code == 2
    if name == "faulty rule":
        assert "Faulty" in str(ended.value) and "other texts" not in str(ended.value)
    if name == "results":
        assert "not results" in str(ended.value)


def test_an_unexpected_error_of_an_audit_is_no_fail(folder, texts, monkeypatch):
    monkeypatch.setattr(audited_run, "audit", lambda options: {}["a key"])

    with pytest.raises(SystemExit) as ended:
        main(["audit", *command(folder, texts)])

    assert ended.value.code == 2


def test_what_the_run_alone_computed_twice_is_not_checked(folder, tmp_path, capsys):
    texts = tmp_path / "seven.txt"
    texts.write_text("m b c d e f g\n")

    assert exit_code("audit", *command(folder, str(texts), args="estimator=mixture,block=7")) == 3

    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("NOTHING CHECKED: 1 window, 7 tokens, 1 of 1 document")
    assert "printed numbers with the text" not in out
    assert "printed perplexities of duel_text" in out
    assert out.count(" run alone\n") == 1
    assert "1 window (a block of more than 6 positions has too many orders to list)" in out


def half_errors(monkeypatch):
    monkeypatch.setattr(totals.Total, "stderr", property(lambda self: 0.5 * STDERR(self)))


def other_rows(monkeypatch):
    """A fault of company: log-probabilities are off in calls of more than four lanes."""
    log_prob = predictions.Predictions.log_prob

    def wrong(self, tokens):
        return log_prob(self, tokens) + 1e-2 * (len(self.masked) > 4)

    monkeypatch.setattr(predictions.Predictions, "log_prob", wrong)


STDERR = totals.Total.stderr.fget


@pytest.mark.parametrize(
    ("fault", "args"),
    [(half_errors, "estimator=elbo,mc_samples=16"), (other_rows, "rule=greedy,block=4")],
)
def test_a_fault_of_totals_or_of_company_is_the_exit_code(fault, args, folder, texts, capsys, monkeypatch):
    fault(monkeypatch)

    assert exit_code("audit", *command(folder, texts, "--no_own_code", "--limit", "1", args=args)) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")


def test_a_text_that_a_unigram_predicts_better_is_noted(folder, texts, capsys):
    audit.main(command(folder, texts, "--no_own_code"))
    *_, warning, verdict = capsys.readouterr().out.splitlines()
    assert warning.startswith("WARNING: the token perplexity of")
    assert re.search(r"^PASS: [^.]*; 1 warning above\. ", verdict)


def test_an_estimate_that_a_unigram_predicts_better_is_noted_with_its_error(folder, texts, capsys):
    audit.main(command(folder, texts, "--no_own_code", args="estimator=elbo,mc_samples=16,block=4"))
    *_, warning, _ = capsys.readouterr().out.splitlines()
    assert re.search(r"WARNING: .* is at most \d+\.\d+ ± \d+\.\d+, and", warning)


@pytest.mark.parametrize(
    ("step", "error", "code"),
    [
        ("network_check.compare", KeyboardInterrupt(), 130),
        ("company", Interrupted(signal.SIGTERM), 143),
        ("contradictions", KeyboardInterrupt(), 130),
    ],
)
def test_an_interrupted_audit_says_what_it_has_compared(step, error, code, folder, texts, capsys, monkeypatch):
    """After the network or before it, before the windows, and before values are compared with each other."""

    def interrupted(*_):
        raise error

    *module, name = step.split(".")
    monkeypatch.setattr(getattr(audited_run, module[0]) if module else audited_run, name, interrupted)

    assert exit_code("audit", *command(folder, texts)) == code

    printed = capsys.readouterr()
    assert "PASS" not in printed.out
    compared, _, missing = printed.err.splitlines()[-1].partition("Not compared: ")
    assert ("weights" in compared) == (step != "network_check.compare")
    assert ("windows with the reference" in compared) == (step == "contradictions")
    assert ("duel_text" in missing) == (step != "contradictions"), "the task that is not audited"


def test_a_coarser_dtype_is_raised_to_float32(folder, texts, capsys):
    audit.main(command(folder, texts, "--no_own_code", args="rule=greedy,block=4,dtype=bfloat16"))
    assert "dtype=float32, fingerprint" in capsys.readouterr().out


def test_a_dtype_that_a_run_refuses_is_refused(texts):
    with pytest.raises(DuelError, match="bfloat16"):
        audit.main(command("demo-bd", texts, args="dtype=bfloat16"))


def test_blocks_without_figures_by_the_reference_are_not_checked(folder, texts, capsys):
    elbo = "estimator=elbo,elbo_form=ratio,elbo_eps=0.1,mc_samples=16"

    assert exit_code("audit", *command(folder, texts, "--no_own_code", args=elbo)) == 3

    out = capsys.readouterr().out
    assert "token_perplexity" not in out
    assert "18 tokens" in out


def test_each_line_of_a_file_is_a_document_with_lines(folder, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lm_eval.api.task"), "filters", [])  # of models loaded before
    (tmp_path / "lines.txt").write_text("m b c\n\nd e f g\n")
    words = command(folder, str(tmp_path / "lines.txt"), "--no_own_code")
    audit.main(words)
    assert "1 document, " in capsys.readouterr().out
    audit.main([*words, "--lines"])
    assert "2 documents, " in capsys.readouterr().out
    assert "Custom kwargs" not in caplog.text  # lm-eval's advice for each task that takes --metadata
