"""A network split over processes: the others repeat the leader's calls, and the numbers are those of one process."""

import importlib.util
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import dit_reference
import pytest
import tiny
import torch
from decoder_reference import CASES, write
from harness_runs import TORCHRUN, launch
from score_split import WINDOWS, main
from toys import Toy

from lm_eval_duel import denoisers
from lm_eval_duel.denoisers import loading, process_groups
from lm_eval_duel.denoisers.hf import tensor_parallel
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.wrappers import split
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.engine import budget
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.options import Options

HELPERS = Path(__file__).resolve().parent.parent / "helpers"

# ---------------------------------------------------------------- the protocol, without processes


class Wire(split.Group):
    """A group whose broadcasts are kept: its leader writes them, another process reads them later."""

    def __init__(self, messages, leads):
        self.messages, self.rank, self.leader, self.size = messages, 0 if leads else 1, 0, 2
        self.device = torch.device("cpu")

    def require_equal(self, value):
        pass

    def broadcast(self, command=None):
        if self.leads:
            self.messages.append(pickle.dumps(command))
        return command if self.leads else pickle.loads(self.messages.pop(0))

    def broadcast_tensor(self, tensor):
        if self.leads:
            self.messages.append(tensor.clone())
            return tensor
        sent = self.messages.pop(0)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        return sent


def watched(denoiser, calls):
    """The denoiser, with the arguments and results of its network calls written down."""
    for name, run in (("features", denoiser.features), ("stream", denoiser.stream), ("head", denoiser.head)):

        def call(*arguments, run=run, name=name):
            result = run(*arguments)
            calls.append((name, *flat(arguments), *flat(result)))
            return result

        setattr(denoiser, name, call)
    return denoiser


def flat(value):
    """All tensors in a value, copied."""
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    return [part for item in value for part in flat(item)] if isinstance(value, tuple | list) else []


@pytest.fixture(scope="module")
def block_causal(tmp_path_factory):
    path, _ = write(tmp_path_factory.mktemp("sdar"), CASES["fast-dllm-v2"])  # shifted, so that it needs edges too
    return lambda: denoisers.load(path, device="cpu", **CASES["fast-dllm-v2"].options)


@pytest.mark.parametrize("kind", ["bidirectional", "guided", "block-causal"])
def test_the_others_make_the_calls_of_the_leader(kind, block_causal):
    make = block_causal if kind == "block-causal" else lambda: Toy(tokens=5, length=12)
    windows = WINDOWS if kind == "block-causal" else [Window((1,), (0, 3, 2, 4, 4, 1)), Window((), (2, 2, 0), (1,))]
    context, length = windows[0].context, 6
    messages, ours, theirs = [], [], []
    leader = split.share(watched(make(), ours), Wire(messages, leads=True))
    duel = Duel(Guided(leader, 0.5) if kind == "guided" else leader, "margin", "auto" if leader.block else 2)
    scores = duel.log_prob(windows)
    samples = duel.sample([context, windows[1].context or context], length, seed=0)
    plain = make()
    alone = Duel(Guided(plain, 0.5) if kind == "guided" else plain, "margin", duel.block)
    assert [score.log_prob for score in alone.log_prob(windows)] == [score.log_prob for score in scores]
    assert [sample.tokens for sample in alone.sample([context, windows[1].context or context], length, seed=0)] == [
        sample.tokens for sample in samples
    ]
    leader.end()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        split.share(watched(make(), theirs), Wire(messages, leads=False))
    assert end.value.code == 0 and not messages
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(ours) > 10
    assert [call[0] for call in theirs] == [call[0] for call in ours]
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))


class Failing(Toy):
    error = torch.OutOfMemoryError("CUDA out of memory")

    def features(self, ids, real):
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Failing.error, r"ran out of memory in a call that processes 1 make with it .* Pass a smaller batch_size"),
        (RuntimeError("[gloo/pair.cc:553] Connection closed by peer\nstack"), "processes 1 .* one of them has ended"),
    ],
)
def test_errors_of_a_call_that_all_make(error, message):
    network = Failing(tokens=5, length=12)
    network.error = error
    leader = split.Split(network, Wire([], leads=True))
    with pytest.raises(DuelError, match=message):
        Duel(leader, "greedy", 2).log_prob([Window((1,), (0, 3, 2, 4))] * 3)


def test_other_errors_are_left_as_they_are():
    network = Failing(tokens=5, length=12)
    network.error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match=r"^shapes do not match"):
        Duel(split.Split(network, Wire([], leads=True)), "greedy", 2).log_prob([Window((1,), (0, 3))])


def test_no_batch_size_is_tried_on_a_gpu():
    network = SimpleNamespace(device=torch.device("cuda"), retries=False, max_length=64)
    assert budget.plan(network, None, "target", None, None).tokens == budget.GPU_TOKENS[0]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2}, "tp_size=2 is the number of processes that hold one network together; it needs tp_plan=auto."),
        ({"tp_plan": "auto", "cache": "dual"}, "does not work together with cache=dual; leave one of them out."),
        ({"tp_plan": "auto", "device_map": "auto"}, "does not work together with parallelize, device_map; leave"),
        ({"tp_plan": "auto", "load_in_8bit": True}, "does not work together with load_in_8bit=true; leave"),
        ({"tp_plan": "auto", "peft": "lora"}, "does not work together with peft=lora; leave"),
        ({"tp_plan": "auto", "compile": True}, "does not work together with compile=true; leave"),
        ({"tp_plan": "auto", "backend": "remote"}, "and backend=remote runs a checkpoint's own code; leave"),
    ],
)
def test_what_is_refused(arguments, message):
    for read in (Options.parse, lambda values: LoadOptions("x", torch.device("cpu"), **values)):
        with pytest.raises(DuelError) as error:
            read(arguments)
        assert message in str(error.value)


def test_verify_needs_the_precision_of_the_run():
    with pytest.raises(DuelError, match=r"verify scores windows again in float32.*pass dtype=float32, or leave verify"):
        Options.parse({"tp_plan": "auto", "verify": 2})
    assert Options.parse({"tp_plan": "auto", "verify": 2, "dtype": "float32"}).verify == 2


@pytest.mark.parametrize(
    ("processes", "tp_size", "result"),
    [
        ("1", None, "this is a single process. Start one for each GPU: torchrun --nproc-per-node N -m lm_eval"),
        ("6", 4, "tp_size=4: 6 processes do not form groups of 4. Start a multiple of 4."),
        ("6", 2, 2),
        ("6", None, 6),
    ],
)
def test_groups_of_processes(processes, tp_size, result, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    options = Options.parse({"tp_plan": "auto"} | ({"tp_size": tp_size} if tp_size else {}))
    if isinstance(result, int):
        assert process_groups.size(options) == result
        return
    with pytest.raises(DuelError) as error:
        process_groups.size(options)
    assert result in str(error.value)
    assert process_groups.size(Options.parse({})) == 1


def test_sizes_that_do_not_divide(monkeypatch):
    """LLaDA2.0-flash has 4 heads of keys."""
    from transformers import BertConfig, BertForMaskedLM, Glm4MoeConfig, Glm4MoeForCausalLM

    monkeypatch.setenv("WORLD_SIZE", "8")
    options = LoadOptions("flash", torch.device("cpu"), tp_plan="auto")
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 9216}
    message = (
        r"flash has num_key_value_heads=4, which does not divide into tp_size=8 equal parts\. Use tp_size=2 or 4\."
    )
    with pytest.raises(DuelError, match=message):
        tensor_parallel.require_plan(Glm4MoeForCausalLM, Glm4MoeConfig(**sizes), options)
    monkeypatch.setenv("WORLD_SIZE", "4")
    tensor_parallel.require_plan(Glm4MoeForCausalLM, Glm4MoeConfig(**sizes), options)
    with pytest.raises(DuelError, match="transformers has no plan to split BertForMaskedLM over processes"):
        tensor_parallel.require_plan(BertForMaskedLM, BertConfig(), options)
    with pytest.raises(DuelError, match="and flash runs code of its own; leave tp_plan out"):
        tensor_parallel.require_plan(None, BertConfig(), options)


def test_a_release_of_transformers_without_meshes(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.utils", None)
    with pytest.raises(DuelError, match=r"tp_plan=auto needs transformers 5\.23 or later; this is "):
        tensor_parallel.model_kwargs(LoadOptions("x", torch.device("cpu"), tp_plan="auto"))


@pytest.mark.parametrize("kind", ["masked LM", "DiT"])
def test_networks_that_are_not_split(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(loading, "_group", lambda options, device: None)  # there are no processes
    path = tiny.checkpoint(tmp_path, "bert") if kind == "masked LM" else dit_reference.write(tmp_path, "mdlm")[0]
    with pytest.raises(DuelError, match=f"is of the family {kind}, which has no choice of 'tp_plan'; leave it out"):
        loading.load(path, device="cpu", tp_plan="auto", tokenizer=tiny.tokenizer())


# ---------------------------------------------------------------- processes

needs_meshes = pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.utils") is None, reason="this release cannot split networks"
)
TP, EP = {"tp_plan": "auto"}, {"ep_size": 2}
FAMILIES = {  # and how they are split
    "llada": TP,  # renamed
    "dream": TP,  # shifted
    "llada2": TP,  # block-causal, with experts
    "a2d-qwen2": TP,  # a tied head
    "llada2 by experts": TP | EP,
    "llada-moe": EP,
    "sdar-moe misrouted": EP,  # see score_split
}


@pytest.mark.slow
@needs_meshes
def test_two_processes_compute_the_numbers_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *sys.path]))
    jobs, split_jobs = {}, {}
    for name, split_by in FAMILIES.items():
        case = CASES[name.split()[0]]
        (tmp_path / name).mkdir()
        path, _ = write(tmp_path / name, case)
        jobs[name], split_jobs[name] = (path, case.options), (path, {**case.options, **split_by})
    (tmp_path / "ar").mkdir()
    path, _ = write(tmp_path / "ar", CASES["plain bidirectional"])
    jobs["ar"], split_jobs["ar"] = (path, {"attention": "causal"}), (path, {"attention": "causal", **TP})
    for name, entries in (("jobs1", jobs), ("jobs2", split_jobs)):
        (tmp_path / name).write_text(json.dumps(entries))
    main(tmp_path / "jobs1", tmp_path / "one")
    status, printed = launch(TORCHRUN, 2, "score_split", str(tmp_path / "jobs2"), str(tmp_path / "two"))
    assert status == [0], printed[-3000:]
    assert not (tmp_path / "two_1.json").exists()  # it only held a part
    one, two = (json.loads((tmp_path / f"{name}_0.json").read_text()) for name in ("one", "two"))
    assert one.keys() == two.keys() == jobs.keys()
    for name, alone in one.items():
        together = two[name]
        assert together["spec"] == alone["spec"]
        assert together["parameters"] == alone["parameters"] == alone["own"]
        share = 0.55 if "tp_plan" in split_jobs[name][1] else 0.7  # the experts are 2/3 of these networks or more
        assert together["own"] < share * alone["own"], name
        for (log_prob, order), (other, other_order) in zip(alone["numbers"], together["numbers"], strict=True):
            assert other == pytest.approx(log_prob, abs=1e-5), name
            assert other_order == order, name


DIES = """
import os, sys
from lm_eval_duel.denoisers.wrappers import split
from score_split import main

broadcast, calls = split.Group.broadcast, []

def counted(self, command=None):
    calls.append(command)
    if self.rank == {rank} and len(calls) == 12:
        os._exit(9)
    return broadcast(self, command)

split.Group.broadcast = counted
main(*sys.argv[1:])
"""


@pytest.mark.slow
@needs_meshes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_its_group(rank, tmp_path, monkeypatch):
    """On two machines, so that no launcher ends the other process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), str(tmp_path), *sys.path]))
    (tmp_path / "dies.py").write_text(DIES.format(rank=rank))
    path, _ = write(tmp_path, CASES["sdar"])
    (tmp_path / "jobs.json").write_text(json.dumps({"sdar": [path, {"tp_plan": "auto"}]}))
    status, printed = launch(TORCHRUN, 2, "dies", str(tmp_path / "jobs.json"), str(tmp_path / "out"), machines=2)
    assert 0 not in status, printed[-3000:]
    words = f"DuelError: Process {1 - rank} holds a part of a network together with processes {rank} (tp_plan=auto), "
    assert words + "and one of them has ended" in printed, printed[-3000:]
