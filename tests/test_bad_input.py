"""What a user sees for bad input, on every kind of network; and what never happens."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import decoder_reference
import dit_reference
import harness_requests
import own
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm_eval_duel.denoisers import hub
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM


def words(folder, *names):
    """A tokenizer of these words, [UNK] before them."""
    spelled = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", *names])}, unk_token="[UNK]"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=spelled, unk_token="[UNK]", bos_token="[UNK]").save_pretrained(folder)
    return folder


KINDS = {  # ways in which a checkpoint is read, and the model args that it needs
    "masked LM": (lambda folder: tiny.checkpoint(folder, "bert"), {}),
    "DiT": (lambda folder: dit_reference.write(words(folder, *"abcdefghijk"), "mdlm")[0], {}),
    "backbone": (lambda folder: decoder_reference.write(folder, decoder_reference.CASES["a2d-qwen3"])[0], {}),
    "causal": (lambda folder: tiny.checkpoint(folder, "gpt2", mask=False), {"estimator": "ar"}),
    "own code": (
        lambda folder: own.write(folder, own.DREAM, "DreamModel", own.decoder(bias=True)),
        {"backend": "remote", "trust_remote_code": True},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: Path(write(tmp_path_factory.mktemp(kind))) for kind, (write, _) in KINDS.items()}


@dataclasses.dataclass
class Copy:
    """A checkpoint of a kind, to be spoilt."""

    folder: Path
    args: dict

    def load(self, **args):
        return DuelMDM(pretrained=str(self.folder), **{"device": "cpu", **self.args, **args})

    def change(self, pattern, content):
        """Files with another content, which is made of what they hold; None: without them."""
        for file in [*self.folder.glob(pattern)]:
            spoilt = content(file.read_bytes()) if callable(content) else content
            if spoilt is None:
                file.unlink()
            else:
                file.write_bytes(spoilt)
        self.load()

    def pickle(self, name, spoil=lambda content: content, cut=None):
        """The weights as torch writes them, with their content spoilt or their bytes cut off."""
        [file] = self.folder.glob("*.safetensors")
        torch.save(spoil(load_file(file)), self.folder / name)
        file.unlink()
        (self.folder / name).write_bytes((self.folder / name).read_bytes()[:cut])
        self.load()


class Trap:
    """Unpickled with its code, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def rolling(lm, *texts):
    requests = harness_requests.ask("loglikelihood_rolling", *[(text,) for text in texts])
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def choice(lm, *pairs):
    return lm.loglikelihood(harness_requests.ask("loglikelihood", *pairs), disable_tqdm=True)


def write(lm, *prompts):
    settings = {"until": [], "max_gen_toks": 4}
    requests = harness_requests.ask("generate_until", *[(prompt, settings) for prompt in prompts])
    return lm.generate_until(requests, disable_tqdm=True)


def poisoned(at, value, **args):
    """A text whose first token breaks the network once it is revealed."""
    lm = at.load(rule="left_to_right", **args)
    network = getattr(lm.denoiser, "model", None) or lm.denoiser.network
    token, *_ = lm.tok_encode("d")
    with torch.no_grad():
        embedding_of(network)[token] = value
    rolling(lm, "a b", "d c b a c")


def embedding_of(network):
    """The first parameter that is a table of embeddings."""
    for name, parameter in network.named_parameters():
        if re.search(r"embed|wte", name) and parameter.dim() == 2:
            return parameter
    raise LookupError("no table of embeddings")


def missing_shard(at):
    """As if the second of two had not been loaded."""
    [file] = at.folder.glob("*.safetensors")
    shards = dict.fromkeys(load_file(file), "model-00002-of-00002.safetensors")
    (at.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    at.change(file.name, None)


HALF = "a \ud83d b"
POINTER = b"version https://git-lfs.github.com/spec/v1\n"
WEIGHTS = "*.safetensors"
CONFIG = "config.json"
CASES = {  # what is named, what provokes it, on which kinds
    "more ids than the network": (
        "tokenizer .*60",
        lambda at: at.load(tokenizer=str(words(at.folder / "other", *(f"w{n}" for n in range(60)))), mask_token_id=9),
        ("masked LM", "DiT", "own code"),
    ),
    "no tokenizer": ("tokenizer=|'gpt2'", lambda at: at.change("[tv]o*[kc]*", None), ("masked LM", "DiT")),
    "a tokenizer cut off": ("config and tokenizer", lambda at: at.change("tokenizer.json", b"{"), ("backbone",)),
    "a config cut off": ("not a valid JSON", lambda at: at.change(CONFIG, b'{"model_type'), ("DiT", "masked LM")),
    "a config that is a list": ("JSON object", lambda at: at.change(CONFIG, b"[]"), ("causal",)),
    "no config": (r"has no config\.json", lambda at: at.change(CONFIG, None), ("own code", "DiT")),
    "weights cut off": ("download it again", lambda at: at.change(WEIGHTS, lambda told: told[:-40]), ("DiT", "causal")),
    "an empty file": ("empty", lambda at: at.change(WEIGHTS, b""), ("masked LM", "backbone")),
    "a pointer of git-lfs": ("git lfs pull", lambda at: at.change(WEIGHTS, POINTER), ("own code",)),
    "a .bin cut off": ("download it again", lambda at: at.pickle("pytorch_model.bin", cut=-200), ("masked LM", "DiT")),
    "a shard missing": (r"model-00002-of-00002\.safetensors", missing_shard, ("DiT", "causal")),
    "a .bin with code": (
        r"pytorch_model\.bin needs code",
        lambda at: at.pickle("pytorch_model.bin", lambda content: {**content, "x": Trap(at.folder / "trap")}),
        ("masked LM", "own code"),
    ),
    "a .ckpt with code": (
        r"last\.ckpt needs code",
        lambda at: at.pickle("last.ckpt", lambda content: {"state_dict": content, "x": Trap(at.folder / "trap")}),
        ("DiT", "backbone"),
    ),
    "no such device": ("'cuda:99'", lambda at: at.load(device="cuda:99"), ("causal",)),
    "too long": ("max_length=100000", lambda at: at.load(max_length=100_000), ("DiT",)),
    "NaN logits": ("Document 1 of task toy.* step", lambda at: poisoned(at, math.nan), ("masked LM", "DiT", "causal")),
    "infinite logits of a bound": (
        "Document 1 of task toy.* step",
        lambda at: poisoned(at, math.inf, estimator="elbo"),
        ("backbone",),
    ),
    "half a character": (
        r"Document 1 .* lone surrogate, '\\ud83d' at character 2",
        lambda at: rolling(at.load(), "a", HALF),
        ("causal", "own code"),
    ),
}


BEFORE_WEIGHTS = (
    "more ids than the network",
    "no tokenizer",
    "a tokenizer cut off",
    "a config cut off",
    "no such device",
)


def copied(folders, place, kind, weights=True):
    """A copy of a kind's checkpoint to spoil, its weights left out where they are not to be read."""
    _, args = KINDS[kind]
    left_out = None if weights else shutil.ignore_patterns(WEIGHTS)
    folder = shutil.copytree(folders[kind], place / "checkpoint", ignore=left_out)
    return Copy(Path(folder), args)


def cases():
    """A mistake and a kind of checkpoint."""
    for name, (_, _, kinds) in CASES.items():
        for kind in kinds:
            yield name, kind


@pytest.mark.parametrize(("name", "kind"), [*cases()])
def test_what_the_user_sees(name, kind, folders, tmp_path):
    """One line with the name; and no code of a checkpoint runs."""
    named, provoke, _ = CASES[name]
    at = copied(folders, tmp_path, kind, weights=name not in BEFORE_WEIGHTS)
    with pytest.raises(DuelError, match=f"(?s){named}") as error:
        provoke(at)
    assert not (at.folder / "trap").exists()
    assert len(str(error.value).splitlines()) == 1 + ("python -c" in str(error.value))


# ---------------------------------------------------------------- what is no error, or depends on more


def test_a_lone_surrogate_is_named_in_every_kind_of_request(folders, tmp_path):
    lm = copied(folders, tmp_path, "DiT").load()
    for ask, requests in (
        (choice, [("a", " b"), (HALF, " c")]),
        (choice, [("a", " b"), ("a", " \ud83d b")]),
        (write, ["a", HALF]),
    ):
        with pytest.raises(DuelError, match="lone surrogate") as error:
            ask(lm, *requests)
    repair = re.search(r"by (text\..*)\.$", str(error.value))[1]
    assert eval(repair, {"text": HALF}) == "a \ufffd b"


def test_the_harness_asks_for_a_gpu_unless_told_otherwise(monkeypatch, folders, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hub._say_cpu.cache_clear()  # a process says it once, and another test may have loaded a network
    at = copied(folders, tmp_path, "DiT")
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        assert at.load(device="cuda:0").denoiser.device.type == "cpu"
    assert "CUDA" in caplog.text
    with pytest.raises(DuelError, match="No device 'cuda:1'"):
        at.load(device="cuda:1")


# ---------------------------------------------------------------- what is never done


@pytest.mark.parametrize("kind", ["masked LM", "DiT", "own code"])
def test_no_code_beside_a_tokenizer_is_run_unless_trusted(kind, folders, tmp_path):
    at = copied(folders, tmp_path, kind)
    trap = tmp_path / "trap"
    (at.folder / "own_tokenizer.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    file = at.folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["tokenizer_class"] = "Own"
    config["auto_map"] = {"AutoTokenizer": ["own_tokenizer.Own", None]}
    file.write_text(json.dumps(config))
    for more in ({"trust_remote_code": False}, {"trust_remote_code": False, "backend": None}):
        try:
            at.load(**more)
        except DuelError as error:
            assert "pass trust_remote_code=true if you trust it" in str(error)
    assert not trap.exists()


OFFLINE = """
import os, socket, sys

def refuse(*where, **more):
    print("a connection was tried:", where[1:], file=sys.stderr)
    os._exit(7)

for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse)

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import make_request

lm = DuelMDM(device="cpu")
(value,) = lm.loglikelihood_rolling([make_request("loglikelihood_rolling", {}, ("a b",), "toy", 0)], disable_tqdm=True)
try:
    DuelMDM(pretrained="nobody/no-such-checkpoint", device="cpu")
except DuelError as error:
    print(value < 0, "needs a connection or a cached copy" in str(error))
"""


@pytest.mark.slow
def test_nothing_is_asked_of_a_network():
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True"]
