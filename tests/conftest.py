"""No test reaches a hub, and every test sees the same numbers whatever ran before."""

import functools
import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: before torch counts the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("LM_EVAL_DUEL_PERTURB"):
    import perturb

    perturb.install()


def pytest_collection_modifyitems(items):
    """Under LM_EVAL_DUEL_PERTURB, skip the tests that stand in its list."""
    if os.environ.get("LM_EVAL_DUEL_PERTURB"):
        for item in items:
            reason = perturb.EXEMPT.get(item.nodeid.split("[")[0])
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def the_machine_is_described_once():
    """The harness writes the machine's description into every results file: a `pip list` of half a second each."""
    if "torch" in sys.modules:
        from torch.utils import collect_env

        collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)


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
