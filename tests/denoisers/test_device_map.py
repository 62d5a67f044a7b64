"""Networks whose layers lie on several devices: who has which GPU, and numbers that stay the same."""

import itertools

import pytest
import torch
import transformers
from close import same_scores
from laws import slow_but
from networks import load, refused, written
from own import DREAM

from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.hf import weights as device_map
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.options import Options

WINDOWS = [Window((6,), (7, 9, 30, 12, 8, 15, 21, 11)), Window((22, 6, 17, 17, 2), (33, 6, 7, 18))]


# ---------------------------------------------------------------- which GPUs are a process's


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many GPUs, seen by one of so many processes; GPU i has (i + 1) bytes free."""

    def pretend(gpus, processes, number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (gpu + 1, 100))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_RANK", str(number))

    return pretend


def options(layout="auto"):
    return device_map.placement_kwargs(LoadOptions("name", torch.device("cpu"), device_map=layout))


@pytest.mark.parametrize("gpus, processes", [(8, 2), (5, 2), (3, 3), (4, 1)])
def test_processes_of_a_machine_share_its_gpus_out(machine, gpus, processes):
    shares = []
    for number in range(processes):
        machine(gpus, processes, number)
        placement = options()
        assert placement["device_map"] == "auto"
        shares.append(placement.get("max_memory"))

    if processes == 1:
        assert shares == [None]
    else:
        assert shares[0] == {gpu: gpu + 1 for gpu in range(0, gpus, processes)}
        used = itertools.chain(*shares)
        assert sorted(used) == list(range(gpus))


def test_fewer_gpus_than_processes(machine):
    machine(2, 4, 1)
    with pytest.raises(DuelError, match="4 processes share 2 GPUs"):
        options()
    assert options("cuda:1") == {"device_map": "cuda:1"}
    machine(8, 4, 1)
    with pytest.raises(DuelError, match="device_map=balanced_low_0"):
        options("balanced_low_0")
    machine(0, 4, 1)
    assert options() == {"device_map": "auto"}  # on CPUs


def test_parallelize_is_device_map_auto():
    for value, expected in ((True, "auto"), ("true", "auto"), (False, None), ("none", None)):
        assert Options.parse({"parallelize": value}).device_map == expected
    assert Options.parse({"parallelize": False, "device_map": "balanced"}).device_map == "balanced"
    with pytest.raises(DuelError, match="device_map=balanced"):
        Options.parse({"parallelize": True, "device_map": "balanced"})


# ---------------------------------------------------------------- numbers of networks that are spread

DECODER = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
BERT = {
    "bert.embeddings": "cpu",
    "bert.encoder.layer.0": "cpu",
    "bert.encoder.layer.1": "disk",
    "cls": "cpu",
}
GPT2 = {
    "transformer.wte": "cpu",
    "transformer.wpe": "disk",
    "transformer.drop": "cpu",
    "transformer.h.0": "cpu",
    "transformer.h.1": "disk",
    "transformer.ln_f": "cpu",
    "lm_head": "cpu",
}
MAPS = {"sdar": DECODER, "bert": BERT, "gpt2": GPT2}


def scored(denoiser):
    causal = denoiser.attention == "causal"
    rule = "left_to_right" if causal else "greedy"
    block = "auto" if denoiser.block or causal else 4
    return DuelEstimator(denoiser, rule, block).log_prob(WINDOWS)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="keeps no given tensors on a disk")
@pytest.mark.parametrize("kind", slow_but(MAPS, ["sdar"]))
def test_a_network_whose_layers_lie_elsewhere(kind, tmp_path, monkeypatch):
    """Weights on a disk, brought in for each call by the hooks that move inputs between GPUs too."""
    path, arguments = written(tmp_path, kind)
    whole = load(path, arguments)
    placement_kwargs = device_map.placement_kwargs

    def with_a_folder(options):
        return {**placement_kwargs(options), "offload_folder": str(tmp_path / "kept")}

    monkeypatch.setattr(device_map, "placement_kwargs", with_a_folder)
    spread = load(path, arguments, device_map=MAPS[kind])

    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.device == torch.device("cpu")
    assert spread.splits_head == whole.splits_head
    assert spread.describe() == whole.describe()
    same_scores(scored(spread), scored(whole))


def test_a_network_that_does_not_fit(tmp_path):
    path, arguments = written(tmp_path, "sdar")
    refused(path, "device_map", device_map=DECODER, **arguments)


def test_own_code_by_a_map(tmp_path):
    path, arguments = written(tmp_path, "own dream")
    expected = scored(load(path, arguments))

    same_scores(scored(load(path, arguments, device_map={"": "cpu"})), expected)
    refused(path, "_no_split_modules", device_map="auto", **arguments)
    refused(path, "device_map=", device_map={"model": "cpu"}, **arguments)

    (tmp_path / "modeling_own.py").write_text(DREAM + '    _no_split_modules = ["Layer"]\n')
    same_scores(scored(load(path, arguments, device_map="sequential")), expected)
