"""A network split over processes: the others repeat the leader's calls, and the numbers are those of one process."""

import functools
import gc
import importlib.util
import itertools
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
from encoder_reference import eurobert
from harness_runs import TORCHRUN, launch
from score_split import WINDOWS, main
from toys import Toy

from lm_eval_duel import denoisers
from lm_eval_duel.denoisers import hub, loading, process_groups
from lm_eval_duel.denoisers.hf import masked_lm, tensor_parallel
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.wrappers import split
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.engine import budget
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import Duel
from lm_eval_duel.options import Options

needs_meshes = pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.utils") is None, reason="this release cannot split networks"
)
HELPERS = Path(__file__).resolve().parent.parent / "helpers"

# ---------------------------------------------------------------- the protocol, without processes


class Wire(split.Group):
    """A group whose broadcasts are kept: its leader writes them, another process reads them later."""

    def __init__(self, messages, leads):
        self.messages, self.rank, self.leader, self.size = messages, 0 if leads else 1, 0, 2
        self.device, self.network, self.numbers, self.closed = torch.device("cpu"), None, itertools.count(1), []
        self.broken = False

    def gather(self, value):
        return [value]

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
    leader = split.share(watched(make(), ours), Wire(messages, leads=True), None)
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
        split.share(watched(make(), theirs), Wire(messages, leads=False), None)
    assert end.value.code == 0 and not messages
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(ours) > 10
    assert [call[0] for call in theirs] == [call[0] for call in ours]
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))


def test_a_second_network_in_another_dtype():
    windows, messages, ours, theirs = [Window((1,), (0, 3, 2, 4))] * 2, [], [], []

    def loaded(calls):
        """Loads in float64, as another distribution, and not in float32."""

        def load(dtype):
            if dtype == "float32":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return watched(Toy(tokens=5, length=12, seed=1), calls)

        return load

    leader = split.share(watched(Toy(tokens=5, length=12), ours), Wire(messages, leads=True), loaded(ours))
    with pytest.raises(DuelError, match="cannot be loaded a second time, in float32: CUDA out of memory"):
        leader.in_dtype("float32")
    second = leader.in_dtype("float64")
    for network in (leader, second, leader):
        Duel(network, "margin", 2).log_prob(windows)
    number = second.number
    del second, network
    gc.collect()
    assert number in leader.group.closed
    leader.end()
    with pytest.raises(SystemExit):
        split.share(watched(Toy(tokens=5, length=12), theirs), Wire(messages, leads=False), loaded(theirs))
    assert not messages and len(ours) > 10
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], other[1:], strict=True))


def test_a_launch_holds_one_network_in_any_dtype(tmp_path, monkeypatch):
    path = tiny.checkpoint(tmp_path, "bert")
    group = Wire([], leads=True)
    group.network = SimpleNamespace(group=group, in_dtype=lambda dtype: f"the network in {dtype}")
    group.options = hub.pin_revision(LoadOptions(path, torch.device("cpu"), tp_plan="auto"))
    monkeypatch.setattr(loading, "_group", lambda options, device: group)
    assert loading.load(path, device="cpu", tp_plan="auto", dtype="float32") == "the network in float32"
    with pytest.raises(DuelError, match="holds one network, and this process has loaded one already"):
        loading.load(path, device="cpu", tp_plan="auto", dtype="float32", cfg_scale=1)


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
    messages = []
    leader = split.Split(network, Wire(messages, leads=True))
    with pytest.raises(DuelError, match=message):
        Duel(leader, "greedy", 2).log_prob([Window((1,), (0, 3, 2, 4))] * 3)
    calls = len(messages)
    with pytest.raises(DuelError, match=r"A call that processes 1 make with process 0 .* has failed before"):
        Duel(leader, "greedy", 2).log_prob([Window((1,), (0, 3))])
    leader.end()
    assert len(messages) == calls, "the others may wait in the call, so a leader that waits for them would hang"


def test_other_errors_are_left_as_they_are():
    network = Failing(tokens=5, length=12)
    network.error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match=r"^shapes do not match"):
        Duel(split.Split(network, Wire([], leads=True)), "greedy", 2).log_prob([Window((1,), (0, 3))])


def test_no_batch_size_is_tried_on_a_gpu():
    network = SimpleNamespace(device=torch.device("cuda"), retries=False, max_length=64)
    assert budget.plan(network, None, "target", None, None).tokens == budget.GPU_TOKENS[0]


# ---------------------------------------------------------------- arguments

SPLIT = {"tp_plan": "auto", "ep_size": 2}


@pytest.fixture
def one_of_two(monkeypatch):
    """As if this were a process of a launch of two, for what is refused before they meet."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(loading, "_group", lambda options, device: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2}, "tp_size=2 is the number of processes that hold one network together; it needs tp_plan=auto."),
        ({"tp_size": 2, "ep_size": 2}, "tp_size=2 is the number of processes that hold one network together; it needs"),
        ({"tp_plan": "auto", "tp_size": 2, "ep_size": 4}, "tp_size=2 and ep_size=4: transformers places the experts"),
        ({"ep_size": 2, "cache": "dual"}, "ep_size=2 places experts on different processes, which does not work toge"),
        ({"ep_size": 2, "backend": "remote"}, "ep_size=2 needs a network in transformers' own classes, and backend"),
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


@pytest.mark.parametrize(
    ("processes", "arguments", "result"),
    [
        ("1", {"tp_plan": "auto"}, "a single process. Start one for each GPU: torchrun --nproc-per-node N -m lm_eval"),
        ("1", {"ep_size": 8}, "a single process. Start one for each GPU: torchrun --nproc-per-node 8 -m lm_eval"),
        ("6", {"tp_plan": "auto", "tp_size": 4}, "tp_size=4: 6 processes do not form groups of 4. Start a multiple"),
        ("6", {"ep_size": 4}, "ep_size=4: 6 processes do not form groups of 4. Start a multiple of 4."),
        ("6", {"tp_plan": "auto", "tp_size": 2}, {"tp_size": 2}),
        ("6", {"tp_plan": "auto"}, {"tp_size": 6}),
        ("6", {"tp_plan": "auto", "ep_size": 2}, {"tp_size": 2, "ep_size": 2}),
        ("6", {"ep_size": 3}, {"ep_size": 3}),
    ],
)
def test_groups_of_processes(processes, arguments, result, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    options = Options.parse(arguments)
    if isinstance(result, dict):
        assert process_groups.sizes(options) == result
        assert {process_groups.size(options)} == set(result.values())
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


@needs_meshes
def test_experts_that_cannot_be_placed(monkeypatch):
    """LLaDA2.0-flash has 4 heads of keys, which only `tp_plan` splits, and 256 experts."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("WORLD_SIZE", "24")
    config = Glm4MoeConfig(num_key_value_heads=4, n_routed_experts=256, moe_intermediate_size=1001)

    def require(**arguments):
        options = LoadOptions("flash", torch.device("cpu"), **arguments)
        tensor_parallel.require_plan(Glm4MoeForCausalLM, config, options)

    require(ep_size=8)
    require(ep_size=4, tp_plan="auto")  # whole experts: their width does not matter
    with pytest.raises(DuelError, match="flash has num_key_value_heads=4, which does not divide into tp_size=8 equal"):
        require(ep_size=8, tp_plan="auto")
    message = (
        "flash has n_routed_experts=256, which does not divide into ep_size=12 equal parts. Use ep_size=2 or 4 or 8."
    )
    with pytest.raises(DuelError) as error:
        require(ep_size=12)
    assert str(error.value) == message
    options = LoadOptions("dense", torch.device("cpu"), ep_size=2)
    with pytest.raises(
        DuelError, match=r"^dense \(LlamaForCausalLM\) has no experts: leave ep_size out\. tp_plan=auto"
    ):
        tensor_parallel.require_plan(LlamaForCausalLM, LlamaConfig(), options)


def test_a_plan_that_does_not_fit_its_class():
    """As those of ESM-C and NeoMME in transformers 5.23: a norm over all heads meets those of one process."""
    with (
        pytest.raises(DuelError, match=r"plan to split SimpleNamespace .* does not fit esmc: .* Leave tp_plan out\."),
        masked_lm.first_calls("esmc", SimpleNamespace(tp_size=2)),
    ):
        raise RuntimeError("Given normalized_shape=[32], expected input with shape [*, 32]")


SCHEMES = {
    "bitsandbytes": {"load_in_8bit": True},  # older files have no name
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
}


@pytest.mark.parametrize(("name", "value"), SPLIT.items())
@pytest.mark.parametrize("kind", ["decoder", "masked LM", "causal LM"])
@pytest.mark.parametrize("method", SCHEMES)
def test_quantized_checkpoints_are_refused_before_weights_are_read(method, kind, name, value, tmp_path, one_of_two):
    more = {"attention": "causal"} if kind == "causal LM" else {}
    case = CASES["sdar" if kind == "decoder" else "plain bidirectional"]
    path = tiny.checkpoint(tmp_path, "bert") if kind == "masked LM" else write(tmp_path, case)[0]
    config = Path(path, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": SCHEMES[method]}))
    for file in Path(path).glob("*.safetensors"):
        file.write_bytes(b"not to be read")
    message = rf"^{name}={value} does not work together with the quantisation of .* \({method}\): .* not quantised, or"
    with pytest.raises(DuelError, match=message):
        loading.load(path, device="cpu", tokenizer=tiny.tokenizer(), **{name: value}, **more)


def test_a_release_of_transformers_without_meshes(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.utils", None)
    with pytest.raises(DuelError, match=r"tp_plan=auto needs transformers 5\.23 or later; this is "):
        tensor_parallel.model_kwargs(LoadOptions("x", torch.device("cpu"), tp_plan="auto"))


@needs_meshes
def test_one_group_alone_can_load_again(monkeypatch):
    """All processes must take part in making meshes, and verify=1 loads the network again in the first group alone."""
    made = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "init_device_mesh", lambda *shape, **names: made.append(shape))
    monkeypatch.setattr("transformers.distributed.utils.TransformersDeviceMesh", lambda *meshes: meshes)
    tensor_parallel._meshes.cache_clear()
    try:
        for dtype in ("bfloat16", "float32"):
            options = LoadOptions("x", torch.device("cpu"), tp_plan="auto", tp_size=2, dtype=dtype)
            tensor_parallel.network_class(torch.nn.Linear, options).prepare_distribute_model(None)
        assert made == [("cpu", (1, 2, 1, 2))] * 2
    finally:
        tensor_parallel._meshes.cache_clear()


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        pytest.param(
            "masked LM",
            {
                "tp_plan": "transformers has no plan to split BertForMaskedLM over processes: leave tp_plan out.",
                "ep_size": "(BertForMaskedLM) has no experts: leave ep_size out.",
            },
            marks=needs_meshes,
        ),
        ("DiT", {name: f"is of the family DiT, which has no choice of '{name}'; leave it out" for name in SPLIT}),
    ],
)
def test_networks_that_are_not_split(kind, refused, tmp_path, one_of_two):
    path = tiny.checkpoint(tmp_path, "bert") if kind == "masked LM" else dit_reference.write(tmp_path, "mdlm")[0]
    for split_by, message in refused.items():
        with pytest.raises(DuelError) as error:
            loading.load(path, device="cpu", tokenizer=tiny.tokenizer(), **{split_by: SPLIT[split_by]})
        assert message in str(error.value)


# ---------------------------------------------------------------- processes

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

    def add(name, split_by, write, **options):
        (tmp_path / name).mkdir()
        path, _ = write(tmp_path / name)
        jobs[name], split_jobs[name] = (path, options), (path, {**options, **split_by})

    for name, split_by in FAMILIES.items():
        case = CASES[name.split()[0]]
        add(name, split_by, functools.partial(write, case=case), **case.options)
    add("ar", TP, functools.partial(write, case=CASES["plain bidirectional"]), attention="causal")
    add("masked LM", TP, eurobert)
    add("masked LM, and again", TP, eurobert, dtype="bfloat16")
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
        kind = "again" if "again" in alone else "numbers"  # in float32
        for (log_prob, order), (other, other_order) in zip(alone[kind], together[kind], strict=True):
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
    words = (
        f"DuelError: Process {1 - rank} holds a part of a network together with processes {rank} (tp_plan, ep_size), "
    )
    assert words + "and one of them has ended" in printed, printed[-3000:]
