"""A sweep over ranks: what each of them computes, and that files and numbers are those of one process."""

import copy
import functools
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import lm_eval.tasks
import pytest
import tiny
import torch
from harness_runs import TORCHRUN, launch
from lm_eval.tasks import TaskManager

from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.sweep import main as sweep
from lm_eval_duel.sweep import store

# ------------------------------------------------------------ dealing


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("costs", [[], [1] * 7, [0, 0, 5], [9, 1, 1, 1, 1, 1, 1, 1], list(range(100))])
def test_every_item_goes_to_one_rank_and_the_work_is_balanced(ranks, costs):
    shares = [Ranks("cpu", rank, ranks).deal(costs) for rank in range(ranks)]
    assert sorted(n for share in shares for n in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    work = [sum(costs[n] for n in share) for share in shares]
    assert max(work) - min(work) <= max(costs, default=0)


# ------------------------------------------------------------ journals of several ranks, here of threads


class Together:
    """Threads that exchange objects as ranks do."""

    def __init__(self, count):
        self.barrier, self.objects = threading.Barrier(count, timeout=20), [None] * count

    def rank(self, rank):
        def all_gather_object(obj):
            self.objects[rank] = obj
            self.barrier.wait()
            objects = copy.deepcopy(self.objects)
            self.barrier.wait()
            return objects

        ranks = Ranks("cpu", rank, len(self.objects))
        return SimpleNamespace(rank=rank, deal=ranks.deal, all_gather_object=all_gather_object)


def journals(folder, count, numbers, about=1):
    """What each of several ranks finds, computes and has in the end, of work on numbers."""
    together = Together(count)

    def work(rank):
        journal, computed = store.Journal(folder, "numbers", {"spec": about}, together.rank(rank)), []

        def compute(mine):
            for n in mine:
                computed.append(n)
                yield {("a", n): [-math.inf, None], n: n}

        before = sorted(key for key in journal.results if isinstance(key, int))
        found = journal.complete([n for n in range(numbers) if n not in before], compute, "numbers")
        assert all(found["a", n] == [-math.inf, None] for n in range(numbers))
        return before, computed, sorted(key for key in found if isinstance(key, int))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def test_ranks_share_what_is_missing_and_find_what_all_of_them_wrote(tmp_path):
    assert journals(tmp_path, 3, 6) == [([], [n, n + 3], [*range(6)]) for n in range(3)]
    assert len(list(tmp_path.rglob("*.jsonl"))) == 3
    (cut,) = tmp_path.rglob("*.rank2.jsonl")
    with cut.open("a") as file:
        file.write("[7, ")  # killed while it wrote
    assert journals(tmp_path, 2, 6) == [([*range(6)], [], [*range(6)])] * 2, "another number of ranks finds all of it"
    cut.unlink()
    assert [computed for _, computed, _ in journals(tmp_path, 3, 6)] == [[2], [5], []], "and computes what is missing"
    assert journals(tmp_path, 1, 2, about=2) == [([], [0, 1], [0, 1])], "another spec has files of its own"


# ------------------------------------------------------------ the command, on the real launchers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    return {"mdm": tiny.checkpoint(folder / "mdm", "distilbert"), "ar": tiny.checkpoint(folder / "ar", "gpt2")}


@pytest.fixture
def one_process(monkeypatch):
    """A sweep in this process, without the harness's own tasks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", functools.partial(TaskManager, include_defaults=False))
    yield sweep
    torch.set_num_threads(threads)


def words(network, out, *more):
    model = f"pretrained={network},block=4,dtype=float64"
    rules = ["--rules", "greedy,klass:mu=0.3:nu=0.5", "--k", "1,2", "--mu", "0.2"]
    return ["--model_args", model, "--tasks", "sotu", *rules, "--device", "cpu", "--out", str(out), *more]


def content(out):
    """All that a sweep wrote, without the time it took; lines of journals in order."""
    files = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.suffix == ".jsonl":
            files.setdefault(re.sub(r"\.rank\d+", "", name), []).extend(map(json.loads, path.read_text().splitlines()))
        elif path.suffix == ".json":
            files[name] = {**json.loads(path.read_text()), "seconds": 0, "folder": ""}
        elif path.is_file():
            files[name] = path.read_text() if path.suffix == ".md" else None
    lines = {
        name: sorted(file, key=lambda line: json.dumps(line)[:60]) for name, file in files.items() if "parts" in name
    }
    return files | lines


def flat(value, place=()):
    """(place, leaf) of every leaf."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {leaf: number for key, part in items for leaf, number in flat(part, (*place, key)).items()}
    return {place: value}


@pytest.mark.slow
def test_two_processes_write_what_one_writes(folder, tmp_path, one_process, capsys):
    """In float64, so that the noise of another batch is small; and one process finishes what two began."""
    out = {name: tmp_path / name for name in ("one", "two")}
    more = ("--limit", "2", "--samples", "2", "--length", "6", "--scorer", folder["ar"], "--elbo", "8")
    one_process(words(folder["mdm"], out["one"], *more))
    shown = capsys.readouterr().out.splitlines()[0]
    (status,), output = launch(TORCHRUN, 2, "lm_eval_duel", "sweep", *words(folder["mdm"], out["two"], *more))
    assert status == 0, output[-3000:]
    assert output.count(" ".join(shown.split())) == 1, "the first prints"
    assert output.count("text of sotu, 3 rules: 100%") == 1, "and shows progress"
    one, two = (flat(content(path)) for path in out.values())
    assert one.keys() == two.keys()
    for place, value in one.items():
        assert two[place] == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value), place
    one_process(words(folder["mdm"], out["two"], *more))
    assert flat(content(out["two"])).keys() == one.keys()
