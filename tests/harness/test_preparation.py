"""What an evaluation needs besides its model is checked before the model is loaded."""

import os
import random
import re
from functools import partialmethod

import numpy as np
import pytest
from harness_requests import ask, cached
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from lm_eval_duel.demo import FOLDER
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.tasks import task_folder

SEEDS = [1, 2, 3, 4]
SHUFFLED = """
task: shuffled
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
process_docs: !function code.shuffle
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: word_perplexity}}]
"""
CODE = """
import random
import numpy

def shuffle(documents):
    order = list(range(len(documents)))
    random.shuffle(order)
    numpy.random.shuffle(order)
    return documents.select(order)
"""
GENERATES = f"""
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {FOLDER / "text" / "sotu.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["."], num_beams: 4}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(autouse=True)
def our_tasks_only(monkeypatch):
    """lm-eval's own 14,000 task files take seconds to read."""
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A network that is loaded ends the test."""
    for module in ("denoisers", "text"):
        monkeypatch.setattr(f"lm_eval_duel.{module}.loading.load_network", None)


def settings(tasks, folder=None, **others):
    folders = [task_folder()] if folder is None else [task_folder(), str(folder)]
    model_args = {"pretrained": "demo-mdm", **others.pop("model_args", {})}
    return EvaluatorConfig(
        model="duel-mdm", model_args=model_args, tasks=tasks, include_path=folders, device="cpu", seed=SEEDS, **others
    )


@pytest.mark.parametrize(
    ("tasks", "others", "named"),
    [
        (["sotu_choice"], {"model_args": {"estimator": "two_phase"}}, "estimator=duel"),
        (["duel_text"], {"metadata": {"files": "missing.txt"}}, "missing.txt"),
        (["duel_text"], {}, "metadata"),
        (["sotu"], {"model_args": {"preset": "llada", "family": "dream"}}, "family dream"),
        (["sotu"], {"model_args": {"preset": "llada-fast-dllm-dual"}}, "family masked-lm"),
        (["sotu"], {"model_args": {"pretrained": "demo-ar"}}, "estimator=ar"),
        (["sotu"], {"model_args": {"rule": "gredy"}}, "greedy"),
        (["sotu"], {"limit": 0.0}, "--limit"),
        (["sotu"], {"apply_chat_template": True}, "--apply_chat_template"),
        (["sotu"], {"use_cache": "runs/"}, "--use_cache"),
        (["sotu"], {"use_cache": os.path.dirname(__file__)}, "--use_cache"),  # a folder that exists
        (["sotu"], {"use_cache": f"{__file__}/answers"}, "--use_cache"),  # no folder, and none can be made
        (["sotu"], {"output_path": f"{__file__}/results"}, "--output_path"),
        (["sotu"], {"output_path": f"results/{'x' * 300}"}, "--output_path"),  # no file system has such a name
        (["sotu_choice"], {"model_args": {"bos": "first"}}, "sotu_choice.*bos"),
    ],
)
def test_what_is_wrong_is_told_before_the_network_is_loaded(tasks, others, named):
    config = settings(tasks, **others)
    with pytest.raises(DuelError, match=named):
        config.process_tasks(config.metadata)


def test_the_file_of_a_response_cache_is_told_from_its_path(tmp_path):
    """The message of an interrupted run names the file, and its path is the beginning of that name."""
    path = tmp_path / "runs_rank"
    file = path.with_name(f"{path.name}_rank0.db")
    file.touch()
    with pytest.raises(DuelError, match=f"{re.escape(str(path))}$"):
        config = settings(["sotu"], use_cache=str(file))
        config.process_tasks(config.metadata)


def test_settings_of_generation_are_checked_before_the_network_is_loaded(tmp_path):
    (tmp_path / "answers.yaml").write_text(GENERATES)
    with pytest.raises(DuelError, match=r"answers.*num_beams"):
        settings(["answers"], tmp_path).process_tasks()
    with pytest.raises(DuelError, match=r"'temprature'.*temperature"):
        settings(["answers"], tmp_path, gen_kwargs={"num_beams": 1, "temprature": 1}).process_tasks()
    settings(["answers"], tmp_path, gen_kwargs={"num_beams": 1, "max_gen_toks": 120}).process_tasks()


def test_texts_longer_than_a_row_are_refused_before_the_network_is_loaded(tmp_path):
    (tmp_path / "answers.yaml").write_text(GENERATES.replace(", num_beams: 4", ""))
    for model_args, length in (({}, 129), ({"max_length": 64}, 65)):
        longest = settings(["answers"], tmp_path, model_args=model_args, gen_kwargs={"max_gen_toks": length - 1})
        longest.process_tasks()
        longer = settings(["answers"], tmp_path, model_args=model_args, gen_kwargs={"max_gen_toks": length})
        with pytest.raises(DuelError, match=r"answers.*max_gen_toks"):
            longer.process_tasks()


def test_only_our_own_tasks_are_loaded_without_advice_on_metadata(tmp_path, caplog):
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ncustom_dataset: !function lm_eval_duel.tasks.sotu\ntest_split: test\n"
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: text\n'
    )
    config = settings(["sotu", "mine"], tmp_path)
    with caplog.at_level("WARNING"):
        config.process_tasks(config.metadata)
    advice = [record.getMessage() for record in caplog.records if "--metadata" in record.getMessage()]
    assert len(advice) == 1 and advice[0].startswith("mine")


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--tasks"):
        settings([str(tmp_path)]).process_tasks()


def test_a_data_set_that_is_missing_is_named(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "shuffled.yaml").write_text(SHUFFLED.format(data=tmp_path / "missing.jsonl"))
    with pytest.raises(DuelError, match=r"missing\.jsonl"):
        settings(["shuffled"], tmp_path).process_tasks()


def test_tasks_are_loaded_once_with_the_random_numbers_of_lm_eval(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "{n}"}}\n' for n in range(20)))
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "shuffled.yaml").write_text(SHUFFLED.format(data=data))

    TaskManager(include_path=[str(tmp_path)]).load(["shuffled"])  # the first time, `datasets` draws numbers, too
    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    expected = TaskManager(include_path=[str(tmp_path)]).load(["shuffled"])["tasks"]["shuffled"]
    documents = list(expected.eval_docs)  # shuffled once more

    config = settings(["shuffled"], tmp_path)
    manager = config.process_tasks()
    random.seed(9)  # as much as a model may draw while it is loaded
    np.random.seed(9)
    task = manager.load(config.tasks)["tasks"]["shuffled"]
    assert list(task.eval_docs) == documents
    assert manager.load(config.tasks)["tasks"]["shuffled"] is not task, "another call loads again"


def test_a_comma_behind_the_last_task_is_ignored():
    config = settings(["sotu,"])
    config.process_tasks()
    assert config.tasks == ["sotu"]


@pytest.fixture(scope="module")
def use_cache(tmp_path_factory):
    """The response cache of a run of one text, made before a network ends a test."""
    from lm_eval_duel.harness.lm import DuelMDM

    folder = tmp_path_factory.mktemp("answers")
    first = cached(DuelMDM(pretrained="demo-mdm", block=4, device="cpu"), folder)
    first.loglikelihood_rolling(ask("loglikelihood_rolling", ("We the people",)))
    return str(folder / "c")


@pytest.mark.parametrize(
    ("model_args", "named"),
    [
        ({}, ""),
        ({"k": 2}, "rule: this run greedy:k=2"),
        ({"estimator": "elbo", "block": "auto"}, "estimator: this run elbo"),
        ({"block": 8}, "block: this run 8"),
        ({"windows": "harness"}, "windows: this run harness"),
    ],
)
def test_answers_under_other_model_args_are_refused(model_args, named, use_cache):
    config = settings(["sotu"], model_args={"block": 4, **model_args}, use_cache=use_cache)
    if not named:
        assert config.process_tasks().load(config.tasks)["tasks"].keys() == {"sotu"}
        return
    with pytest.raises(DuelError, match=named):
        config.process_tasks()
