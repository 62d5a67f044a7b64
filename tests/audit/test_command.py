"""`lm-eval-duel audit`: both sides of a few documents, and its exit codes."""

import dataclasses
import json

import pytest

from lm_eval_duel.audit import recompute as verify
from lm_eval_duel.cli import audit
from lm_eval_duel.cli.main import main
from lm_eval_duel.core import predictions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import totals
from lm_eval_duel.tasks import metrics
from lm_eval_duel.text import text

pytestmark = pytest.mark.usefixtures("one_load")


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "letters.txt"
    file.write_text("m b c d e f g h i j k l m n o p q r\n")
    return str(file)


def command(folder, texts, *more, args="rule=greedy,block=4"):
    return ["--model_args", f"pretrained={folder},{args}", "--tasks", texts, "--device", "cpu", *more]


def test_options_before_different_texts(folder, tmp_path, capsys):
    """Their windows differ in the suffix alone."""
    rows = [{"prefix": "m b", "options": [" c d", " e f"], "label": 0, "suffix": suffix} for suffix in (" g h", " i j")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--metadata", f"files={tmp_path}/rows.jsonl", "--no_own_code"]
    audit.main(command(folder, "duel_choice", *files))
    out = capsys.readouterr().out
    assert "4 windows, 8 tokens" in out and "Windows that differ: 0. Not checked independently: 0." in out
    assert "document 1, option 1, window 0" in out


def test_a_fault_is_the_exit_code(folder, texts, capsys, monkeypatch):
    log_prob = predictions.Predictions.log_prob
    monkeypatch.setattr(predictions.Predictions, "log_prob", lambda self, tokens: log_prob(self, tokens) + 1e-3)
    with pytest.raises(SystemExit) as ended:
        main(["audit", *command(folder, texts, "--no_own_code")])
    assert ended.value.code == 1 and capsys.readouterr().out.count("DIFFERS") == 2


def test_all_three_parts(folder, texts, capsys):
    audit.main(command(folder, texts))
    out = capsys.readouterr().out
    assert out.count(" reference\n") == 2 and "DIFFERS" not in out  # of 14 and 4 tokens
    assert "Windows that differ: 0. Not checked independently: 0." in out
    assert "1 documents, 36 bytes, 19 words, 18 tokens" in out  # the line end is a word of the harness
    for metric in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
        [line] = [line.split() for line in out.splitlines() if metric in line]
        assert float(line[1]) == pytest.approx(float(line[3]), rel=1e-5)
    assert "network: equals BertForMaskedLM" in out


def other_ids(monkeypatch):
    document = text.TextEncoder.document
    monkeypatch.setattr(text.TextEncoder, "document", lambda self, ids: document(self, ids[::-1]))


def smaller_totals(monkeypatch):
    from_scores = totals.Total.from_scores
    smaller = lambda *a: dataclasses.replace(total := from_scores(*a), log_prob=0.99 * total.log_prob)  # noqa: E731
    monkeypatch.setattr(totals.Total, "from_scores", smaller)


def another_count(monkeypatch):
    monkeypatch.setattr(metrics, "sizes", lambda text: (len(text.split()), len(text)))


@pytest.mark.parametrize("fault", [other_ids, smaller_totals, another_count])
def test_a_fault_between_text_and_metric_is_the_exit_code(fault, folder, texts, capsys, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["audit", *command(folder, texts, "--no_own_code")])
    assert ended.value.code == 1, "though no window differs"
    out = capsys.readouterr().out
    assert "DIFFERS" not in out and "network: not compared: --no_own_code." in out


def test_a_verification_that_fails_is_the_exit_code(folder, texts, capsys, monkeypatch):
    monkeypatch.setattr(verify, "recompute", lambda *_: {}["a key"])
    with pytest.raises(SystemExit) as ended:
        main(["audit", *command(folder, texts, "--no_own_code")])
    assert ended.value.code == 1 and "verification failed: KeyError: 'a key'" in capsys.readouterr().err


def test_what_the_run_alone_computed_twice_is_not_checked(folder, tmp_path, capsys):
    texts = str(tmp_path / "seven.txt")
    (tmp_path / "seven.txt").write_text("m b c d e f g\n")
    with pytest.raises(SystemExit) as ended:
        main(["audit", *command(folder, texts, args="estimator=mixture,block=7")])
    assert ended.value.code == 3
    out = capsys.readouterr().out
    assert "Windows that differ: 0. Not checked independently: 1." in out and out.count(" run alone\n") == 1


def test_a_coarser_dtype_is_raised_to_float32(folder, texts, capsys):
    audit.main(command(folder, texts, "--no_own_code", args="rule=greedy,block=4,dtype=bfloat16"))
    assert "Audited in float32, fingerprint" in capsys.readouterr().out


def test_a_dtype_that_a_run_refuses_is_refused(texts):
    with pytest.raises(DuelError, match="bfloat16"):
        audit.main(command("demo-bd", texts, args="dtype=bfloat16"))


def test_blocks_without_figures_by_the_reference_are_not_checked(folder, texts, capsys):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "audit",
                *command(
                    folder, texts, "--no_own_code", args="estimator=elbo,elbo_form=ratio,elbo_eps=0.1,mc_samples=16"
                ),
            ]
        )
    out = capsys.readouterr().out
    assert ended.value.code == 3 and "token_perplexity" not in out and "18 tokens" in out
