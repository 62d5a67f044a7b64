"""The tensors of every kind of weights file; no code in a pickle is run."""

import argparse
import json
import pickle
import re
import shlex

import dit_reference
import pytest
import torch
from safetensors.torch import save_file

from lm_eval_duel import Duel, denoisers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import hub
from lm_eval_duel.errors import DuelError

WINDOWS = [Window((), (1, 2, 3, 4, 5)), Window((7,), (0, 6, 6), (2,))]
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4), "c": torch.tensor([1, 2])}


def trained(scale):
    """What the authors' training code saves: the network, its rotation as a buffer amid it, and more beside it."""
    tensors = {key: value * scale for key, value in dit_reference.weights(True, "backbone.", 13).items()}
    buffer = "backbone.rotary_emb.inv_freq"
    after_it = [key for key in tensors if "blocks" in key or "output" in key]
    before_it = [key for key in tensors if key not in (*after_it, buffer)]
    saved = {key: tensors[key] for key in (*before_it, buffer, *after_it)}
    saved["noise.weight"] = torch.ones(2, 2)
    saved["sampling_eps_min"] = torch.tensor(1e-3)
    return saved


def averages(tensors):
    """The tensors of the network alone, in order, as an average keeps them."""
    return [value for key, value in tensors.items() if key.startswith("backbone") and "inv_freq" not in key]


LEFT_OUT = object()


def lightning(path, **changes):
    """A Lightning checkpoint of one network, with another as its average; the two. `LEFT_OUT`: without that entry."""
    last = trained(1)
    average = trained(0.7)
    ema = {"decay": 0.9999, "shadow_params": averages(average)}
    content = {"epoch": 3, "state_dict": last, "ema": ema, **changes}
    torch.save({key: value for key, value in content.items() if value is not LEFT_OUT}, path)
    return last, average


def scores(folder, tensors=None):
    """What a folder scores, its weights replaced where given."""
    (folder / "config.json").write_text(json.dumps(dit_reference.MDLM))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return Duel(denoisers.load(str(folder), device="cpu")).log_prob(WINDOWS)


def read(folder):
    return hub.read_tensors(str(folder))


def equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key in expected:
        assert tensors[key].dtype == expected[key].dtype
        assert torch.equal(tensors[key], expected[key])


@pytest.mark.parametrize(
    "stem, ending, save", [("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)]
)
def test_whole_and_sharded(stem, ending, save, tmp_path):
    """Shards have the names that transformers gives them."""
    whole = tmp_path / f"{stem}.{ending}"
    save(TENSORS, whole)
    equal(read(tmp_path), TENSORS)
    whole.unlink()

    first = f"{stem}-00001-of-00002.{ending}"
    second = f"{stem}-00002-of-00002.{ending}"
    save({"a": TENSORS["a"], "b.weight": TENSORS["b.weight"]}, tmp_path / first)
    save({"c": TENSORS["c"]}, tmp_path / second)
    places = {"a": first, "b.weight": first, "c": second}
    index = tmp_path / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": places}))
    equal(read(tmp_path), TENSORS)

    for wrong in ('{"weight', '{"weight_map": ["a"]}'):
        index.write_text(wrong)
        with pytest.raises(DuelError, match=index.name):
            read(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / second).unlink()
    with pytest.raises(DuelError, match=second):
        read(tmp_path)


def test_safetensors_come_before_bin_and_bin_before_ckpt(tmp_path):
    ckpt, _ = lightning(tmp_path / "last.ckpt", ema=LEFT_OUT)
    tensors = read(tmp_path)
    equal(tensors, {key: ckpt[key] for key in tensors})

    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(read(tmp_path)) == ["x"]

    save_file(TENSORS, tmp_path / "model.safetensors")
    equal(read(tmp_path), TENSORS)


@pytest.mark.parametrize("kind", ["averaged", "compiled", "without an average"])
def test_the_averaged_weights_of_a_lightning_checkpoint_are_scored(kind, tmp_path, caplog):
    last, average = lightning(tmp_path / "best.ckpt")
    if kind == "compiled":
        state = {key.replace("backbone.", "backbone._orig_mod."): value for key, value in last.items()}
        lightning(tmp_path / "best.ckpt", state_dict=state)
    elif kind == "without an average":
        average, _ = lightning(tmp_path / "best.ckpt", ema=LEFT_OUT)

    of_checkpoint = scores(tmp_path)

    assert of_checkpoint == scores(tmp_path, average)
    assert ("best.ckpt has no averaged weights" in caplog.text) == (kind == "without an average")


def test_lightning_checkpoints_that_cannot_be_scored(tmp_path):
    path = tmp_path / "last.ckpt"
    first, second, *rest = averages(trained(0.7))
    count = 2 + len(rest)
    wrong_averages = (
        {"shadow_params": [first, second, *rest[:-1]]},
        {"shadow_params": [second, first, *rest]},
        {"shadow_params": None},
        {"shadow_params": [1.0] * count},
        [torch.ones(1)],
    )
    for ema in wrong_averages:
        lightning(path, ema=ema)
        with pytest.raises(DuelError, match=r"EMA\) of .*last\.ckpt"):
            read(tmp_path)
    for state in (LEFT_OUT, [torch.ones(1)]):
        lightning(path, state_dict=state)
        with pytest.raises(DuelError, match="no state_dict"):
            read(tmp_path)

    for name in ("last.ckpt", "best.ckpt"):
        lightning(tmp_path / name)
    with pytest.raises(DuelError, match=r"2 \.ckpt files \(best\.ckpt, last\.ckpt\)"):
        read(tmp_path)


def test_the_printed_command_makes_a_checkpoint_that_can_be_read(tmp_path, monkeypatch):
    source = tmp_path / "the model"
    result = tmp_path / "made"
    source.mkdir()
    result.mkdir()
    _, average = lightning(source / "last.ckpt", hyper_parameters=argparse.Namespace(lr=3e-4))
    with pytest.raises(DuelError, match=r"needs code to be read \(Unsupported .*argparse\.Namespace") as error:
        scores(source)
    command = str(error.value).splitlines()[-1].strip()

    monkeypatch.chdir(result)
    _, _, code = shlex.split(command)
    exec(code, {})

    assert [file.name for file in result.iterdir()] == ["weights.ckpt"]
    assert scores(result) == scores(result, average)


class Trap:
    """Unpickled with its code, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(("name", "form"), [("pytorch_model.bin", "legacy"), ("last.ckpt", "pickle"), ("shard", "zip")])
def test_no_code_in_a_pickle_is_run(name, form, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trap = tmp_path / "trap"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    file = folder / ("pytorch_model-00001-of-00001.bin" if name == "shard" else name)
    content = {"state_dict": {"backbone.a": torch.ones(2), "backbone.b": Trap(trap)}, "ema": Trap(trap)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "zip")
    if name == "shard":
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": file.name}}))

    with pytest.raises(DuelError, match=r"\.(bin|ckpt) needs code to be read"):
        scores(folder)
    assert not trap.exists()

    pickle.loads(pickle.dumps(content))
    assert trap.exists()  # the trap is one


def test_files_that_hold_no_tensors(tmp_path):
    with pytest.raises(DuelError, match=r"model\.safetensors, pytorch_model\.bin"):
        read(tmp_path)

    file = tmp_path / "pytorch_model.bin"
    for content in ({"state_dict": {}}, {"a": torch.ones(1), "step": 3}, [torch.ones(1)], 3, None):
        torch.save(content, file)
        with pytest.raises(DuelError, match=r"pytorch_model\.bin holds more than tensors"):
            read(tmp_path)
    file.unlink()

    for name, save in (("last.ckpt", torch.save), ("pytorch_model.bin", torch.save), ("model.safetensors", save_file)):
        file = tmp_path / name
        save(TENSORS, file)
        whole = file.read_bytes()
        for wrong in (b"", whole[:-4], b"version https://git-lfs"):
            file.write_bytes(wrong)
            with pytest.raises(DuelError, match=re.escape(f"Cannot read {file}")):
                read(tmp_path)
