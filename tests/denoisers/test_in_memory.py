"""`Duel.from_model`: the numbers of the same network from disk, and a network that is left as it was."""

import itertools
import math

import pytest
import tiny
import torch
from close import close_nats
from toys import Toy

from lm_eval_duel import Duel, DuelError, Window
from lm_eval_duel.denoisers.user_module import digest
from lm_eval_duel.denoisers.wrappers import Guided

FUNCTION = {"mask_token_id": 7, "max_length": 12}
SHORT = [Window((), (1, 2, 3)), Window((4,), (4, 0, 2, 6, 5))]
WINDOWS = [Window((2,), (7, 9, 30, 12, 8), (3,)), Window((14, 20, 9), (10, 9, 31, 12), (13,))]


def bert(**options):
    model = tiny.network("bert")
    model.config.hidden_dropout_prob = model.bert.embeddings.dropout.p = 0.5
    return model.train()


class Network(torch.nn.Module):
    """A user's own network, f(ids, real), which keeps its position table from the first call on."""

    def __init__(self, tokens=8, width=16, length=12):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(tokens, width)
        self.mix = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, tokens)
        self.drop = torch.nn.Dropout(0.5)
        self.kept = None

    def forward(self, ids, real):
        if self.kept is None:
            self.kept = torch.arange(1.0, 65.0)[:, None].cos()  # (L, 1)
        x = self.table(ids) * self.kept[: ids.shape[1]]
        x = x if real is None else x * real[..., None]
        x = self.drop(torch.tanh(self.mix(x) + x.sum(1, keepdim=True)))
        return self.out(x)


def values(duel, windows=WINDOWS):
    return [score.log_prob for score in duel.log_prob(windows)]


# ---------------------------------------------------------------- the same numbers


def test_a_masked_lm_gives_the_numbers_of_its_checkpoint(tmp_path):
    path = tiny.checkpoint(tmp_path, "bert")
    texts = ["the a b of c", "a of the"]
    disk = Duel.from_pretrained(path, device="cpu", block=3)

    memory = Duel.from_model(bert(), tiny.tokenizer(), block=3)

    assert values(memory) == close_nats(values(disk))
    for score, expected in zip(memory.score(texts), disk.score(texts), strict=True):
        assert score.log_prob == close_nats(expected.log_prob, 1)
    [generated] = memory.generate(["the a"], max_new_tokens=4, do_sample=True)
    [expected] = disk.generate(["the a"], max_new_tokens=4, do_sample=True)
    assert generated.text == expected.text

    assert memory.denoiser.splits_head
    assert memory.denoiser.honours_padding
    different_entries = {key for key in disk.spec if disk.spec[key] != memory.spec[key]}
    assert different_entries == {"denoiser", "weights"}


@pytest.mark.parametrize("name", ["sdar", "dream", "llada", "own llada"])
def test_a_decoder_gives_the_numbers_of_its_checkpoint(family, name):
    disk = family(name).denoiser
    windows = family(name).windows
    block = disk.block or 4
    arguments = {"attention": disk.attention, "mask_token_id": disk.mask_id, "shift_logits": bool(disk.shift)}

    memory = Duel.from_model(disk.model.train(), tiny.tokenizer(), block=block, **arguments)

    assert values(memory, windows) == close_nats(values(Duel(disk, block=block), windows))
    assert disk.model.training
    assert disk.family != "own code" or memory.denoiser.splits_head


def test_a_function_is_a_denoiser():
    """And so is a Denoiser."""
    toy = Toy(length=4)
    windows = [Window((), ids) for ids in itertools.product(range(3), repeat=4)]
    expected = values(Duel(toy, rule="greedy", block=2), windows)

    arguments = {"mask_token_id": toy.mask_id, "max_length": 4, "block": 2}
    of_function = values(Duel.from_model(lambda ids, real: toy.features(ids, real), **arguments), windows)
    of_denoiser = values(Duel.from_model(toy, **arguments), windows)

    assert of_function == pytest.approx(expected, abs=1e-9)
    assert math.fsum(map(math.exp, of_function)) == pytest.approx(1, abs=1e-12)
    assert of_denoiser == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("lowest", "tested"), [(-1e6, True), (-math.inf, False)])
def test_a_function_that_copies_visible_tokens(lowest, tested):
    """MDLM's forward: a visible token has probability 1, and huge logits there must not hide what padding does."""
    network = Network()
    padded = []

    def function(ids, real):
        padded.append(real)
        masked = (ids == 7)[..., None]  # (R, L, 1)
        copied = torch.where(torch.nn.functional.one_hot(ids, 8).bool(), 0.0, lowest)  # (R, L, V)
        return {"loss": None, "logits": torch.where(masked, network(ids, None), copied)}

    arguments = {**FUNCTION, "block": 4, "module": network}
    duel = Duel.from_model(function, **arguments, self_tests=tested)
    assert not duel.denoiser.honours_padding

    padded.clear()
    expected = values(Duel.from_model(lambda ids, real: (network(ids, None), None), **arguments), SHORT)
    assert values(duel, SHORT) == close_nats(expected)
    assert all(real is None for real in padded)


def test_a_module_with_the_arguments_of_transformers_and_no_config():
    network = Network()
    seen = []

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = network
            self.config = {"layers": 1}

        def forward(self, input_ids, position_ids=None, attention_mask=None):
            seen.append(attention_mask)
            return self.inside(input_ids, None if attention_mask is None else attention_mask.bool())

    duel = Duel.from_model(Named(), **FUNCTION, block=4)

    expected = values(Duel.from_model(network, **FUNCTION, block=4), SHORT)
    assert values(duel, SHORT) == close_nats(expected)
    assert duel.denoiser.honours_padding
    dtypes = {mask.dtype for mask in seen if mask is not None}
    assert dtypes == {torch.long}


@pytest.mark.parametrize(
    ("attention", "implementation"), [("bidirectional", "flash_attention_2"), ("block_causal", "flex_attention")]
)
def test_a_decoder_that_is_trained_with_another_attention(attention, implementation):
    model = tiny.network("llama").train()
    arguments = {"mask_token_id": 4, "max_length": 32, "attention": attention, "block": 2}
    windows = [Window((1,), (5, 2, 7, 7)), Window((2,), (3, 3, 8, 5, 6, 7))]
    plain = values(Duel.from_model(model, **arguments), windows)

    model.config._attn_implementation = implementation

    assert values(Duel.from_model(model, **arguments), windows) == close_nats(plain)
    assert values(Duel.from_model(model, **arguments, self_tests=False), windows) == close_nats(plain)
    assert model.config._attn_implementation == implementation


# ---------------------------------------------------------------- left as it was


def modes(model):
    return [part.training for part in model.modules()]


def state():
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "its dtype": torch.get_autocast_dtype("cpu"),
        "random numbers": torch.random.get_rng_state().tolist(),
    }


def test_modes_gradients_autocast_and_random_numbers_are_as_before():
    model = bert()
    model.bert.encoder.layer[0].eval()  # frozen by its owner
    plain = values(Duel.from_model(tiny.network("bert"), tiny.tokenizer(), block=3))
    modes_before = modes(model)
    assert {True, False} == set(modes_before)

    for context in (
        torch.enable_grad(),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        with context:
            state_before = state()
            duel = Duel.from_model(model, tiny.tokenizer(), block=3)
            assert values(duel) == close_nats(plain)
            for _ in duel.stream(WINDOWS):
                assert modes(model) == modes_before  # between results, too: a training step may run here
            assert state() == state_before
            assert modes(model) == modes_before

    half = values(Duel.from_model(model, tiny.tokenizer(), block=3, autocast=torch.bfloat16))
    assert half != plain
    assert half == pytest.approx(plain, rel=0.1)


def test_an_error_in_the_network_leaves_it_as_it_was():
    model = bert()
    duel = Duel.from_model(model, tiny.tokenizer(), block=3)
    handle = model.bert.encoder.layer[1].register_forward_hook(lambda *ignored: 1 / 0)
    before = state()

    with pytest.raises(ZeroDivisionError):
        duel.log_prob(WINDOWS)

    assert state() == before
    assert all(modes(model))
    handle.remove()
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_training_goes_on_after_scoring():
    """What a network keeps from a scored row must not come from inference mode."""
    network = Network()
    duel = Duel.from_model(network, **FUNCTION, block=4)
    windows = [Window((), (1, 2, 3))]
    before = values(duel, windows)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.tensor([[1, 2, 3]]), None).logsumexp(-1).sum().backward()
    optimizer.step()
    [score] = duel.log_prob(windows)
    assert [score.log_prob] != before, "the weights are the network's own"

    network.zero_grad()
    log_probs = duel.differentiable(windows, [score.reveal_steps])
    log_probs.sum().backward()
    assert float(log_probs.detach().sum()) == close_nats(score.log_prob, 3)
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert network.training


# ---------------------------------------------------------------- wrapped networks


@pytest.mark.slow
def test_compiled_networks_run_as_they_are():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    plain = values(Duel.from_model(bert(), tiny.tokenizer(), block=3))
    inside = bert()
    inside.compile(backend=backend)
    for model in (torch.compile(bert(), backend=backend), inside):
        assert values(Duel.from_model(model, tiny.tokenizer(), block=3)) == close_nats(plain)
    assert not calls
    inside(torch.tensor([[1, 2]]))
    assert calls, "outside, it is still compiled"


def test_wrapped_networks_give_the_numbers_of_those_inside(tmp_path):
    from accelerate.utils.operations import convert_outputs_to_fp32
    from torch.distributed.fsdp import fully_shard

    plain = values(Duel.from_model(bert(), tiny.tokenizer(), block=3))
    model = bert()
    model._original_forward = model.forward  # what Accelerator.prepare does for mixed_precision="bf16"
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    mixed = model.forward
    assert values(Duel.from_model(model, tiny.tokenizer(), block=3)) == close_nats(plain)
    assert model.forward is mixed
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(bert())
        assert values(Duel.from_model(parallel, tiny.tokenizer(), block=3)) == close_nats(plain)
        sharded = fully_shard(bert(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(DuelError, match="FSDP"):
            Duel.from_model(sharded, tiny.tokenizer())
    finally:
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- what the spec says


def test_the_spec_says_what_is_known_of_the_weights():
    model = bert()
    in_memory = Duel.from_model(model, tiny.tokenizer())
    named = Duel.from_model(model, tiny.tokenizer(), weights="run 7, step 20")
    hashed = Duel.from_model(model, tiny.tokenizer(), weights="digest")
    fingerprint = in_memory.fingerprint
    assert len({fingerprint, named.fingerprint, hashed.fingerprint}) == 3
    assert in_memory.spec["weights"] == "in memory"
    assert in_memory.spec["denoiser"] == "BertForMaskedLM in memory"
    assert in_memory.spec["dtype"] == "float32"
    assert named.spec["weights"] == "run 7, step 20"

    first = hashed.spec["weights"]
    assert len(first) == 12
    assert hashed.spec["weights"] == first
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[5, 0] += 1e-6
    assert hashed.spec["weights"] != first
    assert in_memory.fingerprint == fingerprint

    first = digest(model)
    model.config.use_cache = not model.config.use_cache
    assert digest(model) == first, "no number depends on it"
    model.config.num_attention_heads //= 2  # the same shapes, another network
    assert digest(model) != first


# ---------------------------------------------------------------- what is refused


def function(ids, real):
    return torch.zeros(*ids.shape, 8)


def dropping():
    network = Network()
    return lambda ids, real: network(ids, real)


class Timed(torch.nn.Module):
    def forward(self, input_ids, attention_mask, times):
        return torch.zeros(*input_ids.shape, 8)


REFUSED = [
    ("demo-mdm", {}, "from_pretrained"),
    (function, {"max_lenght": 3}, "Did you mean max_length"),
    (function, {"max_length": 12}, "mask_token_id="),
    (function, {"mask_token_id": 7}, "max_length="),
    (function, {**FUNCTION, "attention": "block_causal"}, "attention=block_causal"),
    (function, {**FUNCTION, "weights": "digest"}, "weights='digest'"),
    (lambda ids, real: ids, FUNCTION, r"\(R, L, V\), \(1, 2, V\)"),
    (function, {**FUNCTION, "self_tests": False}, "predicts the same for every row"),
    (lambda ids, real: Network()(ids, real) / 0, FUNCTION, "NaN or infinite logits"),
    (lambda ids, real: torch.rand(*ids.shape, 8), FUNCTION, "different logits each time"),
    (Network(), {**FUNCTION, "cache": "dual"}, "cache=dual"),
    (lambda ids: Network()(ids, None), FUNCTION, r"TypeError: .* f\(ids, real\)"),
    (Timed(), FUNCTION, r"TypeError: .*'times'.* model\(input_ids=ids, attention_mask=real\)"),
    (lambda ids, real: Network().eval()(ids, real).softmax(2), FUNCTION, "probabilities"),
    (dropping(), FUNCTION, "module="),
    (dropping(), {**FUNCTION, "self_tests": False}, "module="),
    (Guided(Toy(length=4), 0.5), {}, "Guided"),
    (Toy(length=4), {"mask_token_id": 0}, "`mask_id`.* leave mask_token_id=0 out"),
    (Toy(length=4), {"max_length": 3}, "`max_length`, 4"),
    (Toy(length=4), {"shift_logits": True}, "`shift`, 0"),
    (Toy(length=4), {"bos": "scored"}, "`bos`"),
    (Toy(length=4), {"last_block": "cut"}, "`last_block`"),
    (Toy(length=4), {"family": "dream"}, "`family`"),
    (function, {**FUNCTION, "family": "dream"}, "no family"),
    ("gpt2", {"mask_token_id": 39, "self_tests": False}, "is causal"),
    ("gpt2", {}, "autoregressive: save .*mask_token_id=<id>"),
    ("llama", {}, "autoregressive: save .*attention='bidirectional'"),
    ("bert", {"mask_token_id": 4, "attention": "causal"}, "estimator=ar"),
    ("bigbird", {"mask_token_id": 4}, "set_attention_type"),
]


@pytest.mark.parametrize(("model", "arguments", "message"), REFUSED)
def test_what_is_refused(model, arguments, message):
    if isinstance(model, str) and model != "demo-mdm":  # of transformers
        model = tiny.network(model)
    with pytest.raises(DuelError, match=message):
        Duel.from_model(model, **arguments)
