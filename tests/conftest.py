"""No test reaches a hub, and every test sees the same numbers whatever ran before."""

import gc
import logging
import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/; last, so that an installed package is tested
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: before torch counts the cores
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # set but empty, it means every core

if os.environ.get("LM_EVAL_DUEL_PERTURB"):
    import perturb

    perturb.install()


gc.disable()  # while modules are imported, there is nothing to collect


def pytest_collection_finish():
    """What was imported stays: the collector of garbage never looks through its 400,000 objects."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def the_machine_is_not_described():
    """The harness writes the machine's description into every results file: a `pip list` of half a second."""
    if "torch" in sys.modules:
        from torch.utils import collect_env

        collect_env.get_pretty_env_info = lambda: "a machine"


@pytest.fixture(autouse=True)
def loggers_of_the_harness():
    """lm-eval's command line stops its loggers from reaching `caplog`, for the rest of the process."""
    logger = logging.getLogger("lm_eval")
    logger.propagate = True
    if logger.level != logging.NOTSET:
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny BERT checkpoint whose rows have 16 positions; modules that need another one define their own."""
    import tiny

    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


@pytest.fixture(scope="module")
def lm(folder):
    """The harness's model of that checkpoint."""
    from lm_eval_duel.harness.lm import DuelMDM

    return DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu")


@pytest.fixture(autouse=True)
def no_row_checks(request, monkeypatch):
    """No row is evaluated twice, alone and among others, but in tests marked `row_checks`.

    That is half of the time of short runs, and of loading a tiny network.
    """
    if not request.node.get_closest_marker("row_checks"):
        from lm_eval_duel.core.row_checks import RowChecks
        from lm_eval_duel.denoisers import self_tests

        monkeypatch.setattr(RowChecks, "number_due", lambda *_: 0)
        monkeypatch.setattr(self_tests, "cover", lambda *_: None)
        monkeypatch.setattr(self_tests, "require_separate_rows", lambda *_: None)


LOADED = {}  # networks and tokenizers by what they were loaded from and with


def files_of(folder):
    """The name, the size and the time of each file of a folder."""
    if not os.path.isdir(folder):
        return []
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    return [(entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries]


@pytest.fixture(scope="module")
def one_load():
    """What is loaded again with the same args is a shallow copy of the first: what is set on it is its own.

    Loading a tiny network and testing it takes longer than most tests.
    """
    import copy

    from lm_eval_duel.denoisers import vocabulary
    from lm_eval_duel.text import loading

    load_network = loading.load_network
    load_tokenizer = vocabulary.load_tokenizer

    def once(key, load, *arguments):
        if key not in LOADED:
            LOADED[key] = load(*arguments)
        return copy.copy(LOADED[key])

    def network(checkpoint, tokenizer):
        key = repr((checkpoint, tokenizer, files_of(checkpoint.name)))
        return once(key, load_network, checkpoint, tokenizer)

    def words(path, *options):
        key = repr((path, options, files_of(path)))
        return once(key, load_tokenizer, path, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_network", network)
        patch.setattr(vocabulary, "load_tokenizer", words)
        yield
