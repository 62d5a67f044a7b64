"""Requests of the harness's own cache: answered only for the documents that the task has in this run."""

import json

import pytest
from harness_runs import evaluate
from lm_eval.caching import cache
from lm_eval.tasks import TaskManager

from lm_eval_duel import tasks
from lm_eval_duel.errors import DuelError

GAP = {"prefix": "We the", "target": " people", "suffix": " act"}
CHOICE = {"prefix": "We the", "options": [" people", " act"], "label": 0}
VARIANT = {"mutant": "A1G", "mutated_sequence": "GCD", "DMS_score": 0.5}
FILES = {  # of a task: the documents of two files, some with equal texts
    "duel_text": ([{"text": "We the people of the United States"}], [{"text": "We the people"}]),
    "duel_text_wrapped": ([{"text": "We the people of the United States"}], [{"text": "We the people of America"}]),
    "duel_infill": ([GAP], [{**GAP, "target": " people of the United States"}]),
    "duel_choice": ([CHOICE], [{**CHOICE, "label": 1}]),
    "proteingym": ([VARIANT], [{**VARIANT, "DMS_score": 0.25}]),
}


@pytest.fixture(autouse=True)
def request_cache(tmp_path, monkeypatch):
    """An empty folder in place of the one in the installed harness."""
    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))


def write(folder, records, name="texts"):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def task_of(name, file, **metadata):
    """The task as the harness makes it."""
    settings = {"files": file, "length": 4, "bos": "none", "pretrained": "demo-mdm", **metadata}
    manager = TaskManager(include_path=tasks.task_folder(), include_defaults=False, metadata=settings)
    return manager.load([name])["tasks"][name]


def documents(name, file, refresh=False, limit=None, **metadata):
    """The documents of the requests that the harness builds or finds."""
    task = task_of(name, file, **metadata)
    task.build_all_requests(cache_requests=True, rewrite_requests_cache=refresh, limit=limit)
    return [request.doc for request in task.instances]


@pytest.mark.parametrize("name", FILES)
def test_requests_of_another_file_are_refused_and_those_of_the_same_are_used(tmp_path, name):
    records, changed = FILES[name]
    one = write(tmp_path, records, "one")
    other = write(tmp_path, changed, "other")
    first = documents(name, one)
    assert documents(name, one) == first
    with pytest.raises(DuelError, match=f"document . of task {name}.*--cache_requests refresh"):
        documents(name, other)
    refreshed = documents(name, other, refresh=True)
    assert refreshed == documents(name, other) != first


def test_requests_under_another_tokenizer_or_option_are_refused(tmp_path):
    lines = write(tmp_path, [{"text": "We the people of the United States, in order to form a more perfect union"}])
    documents("duel_text_wrapped", lines)
    for change in ({"length": 5}, {"framed": False}, {"bos": "given"}):
        with pytest.raises(DuelError, match="duel_text_wrapped"):
            documents("duel_text_wrapped", lines, **change)


def test_a_file_that_has_grown_is_another_one_but_for_a_limit(tmp_path):
    texts = [{"text": "one"}, {"text": "two"}]
    file = write(tmp_path, texts)
    first = documents("duel_text", file)
    write(tmp_path, [*texts, {"text": "three"}])
    assert documents("duel_text", file, limit=2) == first
    with pytest.raises(DuelError, match="document 2 of task duel_text"):
        documents("duel_text", file)


@pytest.mark.parametrize("name", ["duel_text", "duel_infill"])
def test_cached_requests_print_the_numbers_of_their_own_file(tmp_path, name, one_load):
    file = write(tmp_path, FILES[name][1])
    values = []
    for options in ({}, {"cache_requests": True}, {"cache_requests": True}):
        results = evaluate(name, "rule=greedy,block=8", metadata={"files": file}, **options)["results"]
        values.append(results[name]["token_perplexity,none"])
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-6)
