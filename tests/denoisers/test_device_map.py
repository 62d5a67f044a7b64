"""Networks whose layers lie on several devices: who has which GPU, and numbers that stay the same."""

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

    def of(gpus, processes, number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (gpu + 1, 100))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_RANK", str(number))

    return of


def options(layout="auto"):
    return device_map.placement_kwargs(LoadOptions("name", torch.device("cpu"), device_map=layout))


@pytest.mark.parametrize("gpus, processes", [(8, 2), (5, 2), (3, 3), (4, 1)])
def test_processes_of_a_machine_share_its_gpus_out(machine, gpus, processes):
    shares = []
    for number in range(processes):
        machine(gpus, processes, number)
        found = options()
        assert found["device_map"] == "auto"
        shares.append(found.get("max_memory"))
    if processes == 1:
        assert shares == [None]
    else:
        assert shares[0] == {gpu: gpu + 1 for gpu in range(0, gpus, processes)}
        assert sorted(gpu for share in shares for gpu in share) == list(range(gpus))


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
    for value, wanted in ((True, "auto"), ("true", "auto"), (False, None), ("none", None)):
        assert Options.parse({"parallelize": value}).device_map == wanted
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
PARTS = {f"transformer.{name}": "cpu" for name in ("wte", "drop", "h.0", "ln_f")}
MAPS = {
    "sdar": DECODER,
    "bert": {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": "disk", "cls": "cpu"},
    "gpt2": {**PARTS, "transformer.wpe": "disk", "transformer.h.1": "disk", "lm_head": "cpu"},
}


def scored(denoiser):
    rule = "left_to_right" if denoiser.attention == "causal" else "greedy"
    return DuelEstimator(denoiser, rule, "auto" if denoiser.block or rule == "left_to_right" else 4).log_prob(WINDOWS)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="keeps no given tensors on a disk")
@pytest.mark.parametrize("kind", slow_but(MAPS, ["sdar"]))
def test_a_network_whose_layers_lie_elsewhere(kind, tmp_path, monkeypatch):
    """Weights on a disk, brought in for each call by the hooks that move inputs between GPUs too."""
    path, asked = written(tmp_path, kind)
    right = load(path, asked)
    said = device_map.placement_kwargs
    monkeypatch.setattr(
        device_map, "placement_kwargs", lambda asked: said(asked) | {"offload_folder": str(tmp_path / "kept")}
    )
    spread = load(path, asked, device_map=MAPS[kind])
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.device == torch.device("cpu") and spread.splits_head == right.splits_head
    assert spread.describe() == right.describe()
    same_scores(scored(spread), scored(right))


def test_a_network_that_does_not_fit(tmp_path):
    path, asked = written(tmp_path, "sdar")
    refused(path, "device_map", device_map=DECODER, **asked)


def test_own_code_by_a_map(tmp_path):
    path, asked = written(tmp_path, "own dream")
    right = scored(load(path, asked))
    same_scores(scored(load(path, asked, device_map={"": "cpu"})), right)
    for layout, named in (("auto", "_no_split_modules"), ({"model": "cpu"}, "device_map=")):
        refused(path, named, device_map=layout, **asked)
    (tmp_path / "modeling_own.py").write_text(DREAM + '    _no_split_modules = ["Layer"]\n')
    same_scores(scored(load(path, asked, device_map="sequential")), right)
