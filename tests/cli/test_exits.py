"""Exit codes: 2 for what is not begun, whatever is wrong with it; 1 for what is begun and fails; 130 for Ctrl-C."""

import pytest

from lm_eval_duel import Duel
from lm_eval_duel.cli import score
from lm_eval_duel.cli.main import main
from lm_eval_duel.console import exits
from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.tasks import named

pytestmark = pytest.mark.usefixtures("one_load")


def code_of(words):
    """The exit code of a command, and its message."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code, str(ended.value)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("We the people\n")
    return str(file)


@pytest.mark.parametrize("command", ["score", "generate", "inspect", "run", "audit"])
@pytest.mark.parametrize(
    "wrong", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("checkpoint", "preset", "tokenizer"))]
)
def test_a_checkpoint_that_cannot_be_scored_is_not_begun(command, wrong, text, tmp_path):
    name = str(tmp_path / "nosuch") if wrong == "checkpoint" else "demo-bd"
    args = {
        "checkpoint": "rule=greedy",
        "block": "block=7",  # it is trained on blocks of 4
        "preset": "preset=llada",
        "tokenizer": f"tokenizer={tmp_path}/nosuch",
    }[wrong]
    words = {
        "score": ["score", text, "--model_args", f"{name},{args}", "--device", "cpu"],
        "generate": ["generate", name, "--model_args", args, "--device", "cpu"],
        "inspect": ["inspect", name, "--model_args", args, "--device", "cpu"],
        "run": ["run", name, "--model_args", args, "--tasks", text, "--device", "cpu"],
        "audit": ["audit", name, "--model_args", args, "--tasks", text, "--device", "cpu"],
    }[command]

    code, message = code_of(words)

    assert code == exits.WRONG, message
    assert (
        name if wrong == "checkpoint" else {"preset": "llada", "block": "7", "tokenizer": "nosuch"}[wrong]
    ) in message


@pytest.mark.parametrize("command", ["inspect", pytest.param("audit", marks=pytest.mark.slow), "run"])
@pytest.mark.parametrize("task", ["duel_ptb", "wikitext_of_the_hub"])
def test_a_data_set_that_is_not_here_is_not_begun_and_says_what_it_needs(command, task, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "hub.yaml").write_text(
        "task: wikitext_of_the_hub\ndataset_path: nobody/nothing_of_this_name\noutput_type: loglikelihood_rolling\n"
        "test_split: test\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    )
    words = [command, "demo-bd", "--tasks", task, "--include_path", str(folder), "--device", "cpu"]

    code, message = code_of(words)

    assert code == exits.WRONG, message
    assert "HF_HUB_OFFLINE" in message
    assert ("data_dir" if task == "duel_ptb" else "duel_text") in message


def test_an_error_that_names_github_is_not_one_of_the_hub():
    with pytest.raises(UsageError) as error, named.loading():
        raise ValueError("no column 'text': see https://github.com/someone/a_task")
    assert "duel_text" not in str(error.value)
    with pytest.raises(UsageError) as error, named.loading():
        raise ValueError("Couldn't reach the Hub")
    assert "duel_text" in str(error.value)


@pytest.mark.parametrize("data_files", ["nowhere.jsonl", "nowhere*.jsonl"])
def test_a_task_without_its_data_is_named(data_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"task: my_own\ndataset_path: json\ndataset_kwargs: {{data_files: {data_files}}}\ntest_split: train\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    )
    with pytest.raises(UsageError, match=r"my_own.*nowhere.*jsonl"):
        named.load(["mine.yaml"], {})


def test_too_many_positions_are_not_begun():
    code, message = code_of(["generate", "demo-bd", "--max_new_tokens", "100000", "--device", "cpu"])
    assert code == exits.WRONG, message


def test_a_prompt_where_whole_rows_are_scored_is_not_begun():
    code, message = code_of(["generate", "demo-mdm", "--model_args", "bos=first", "--device", "cpu"])
    assert code == exits.WRONG, message


def test_a_task_file_that_cannot_be_read_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("missing.yaml", "missing*.yaml"):
        code, message = code_of(["run", "demo-mdm", "--tasks", name, "--device", "cpu"])
        assert code == exits.WRONG
        assert f"--tasks {name}" in message
    for content, named_file in (("task: mine\ninclude: missing.yaml\n", "missing.yaml"), ("task: [\n", "mine.yaml")):
        (tmp_path / "mine.yaml").write_text(content)
        code, message = code_of(["run", "demo-mdm", "--tasks", "mine.yaml", "--device", "cpu"])
        assert code == exits.WRONG
        assert named_file in message
        assert "mine.yaml" in message


def test_results_that_cannot_be_compared_are_not_begun(tmp_path):
    results = sorted((FOLDER / "results").rglob("results_*.json"))
    words = ["report", *map(str, results), "--out", str(tmp_path / "report"), "--metric", "no_metric"]
    code, _ = code_of(words)
    assert code == exits.WRONG
    words[-1] = "token_perplexity"
    code, message = code_of([*words, "--ar", str(tmp_path / "nosuch")])
    assert code == exits.WRONG, message


@pytest.mark.parametrize(
    ("error", "code"), [(DuelError("a step failed"), exits.FAILED), (KeyboardInterrupt(), exits.INTERRUPTED)]
)
@pytest.mark.parametrize("command", ["score", "generate"])
def test_what_fails_once_it_has_begun_has_another_code(error, code, command, text, monkeypatch):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(score, "score", failing)
    monkeypatch.setattr(Duel, "generate_stream", failing)
    words = {"score": ["score", text, "--model_args", "demo-bd"], "generate": ["generate", "demo-bd"]}
    assert code_of([*words[command], "--device", "cpu"])[0] == code
