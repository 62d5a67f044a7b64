"""What a user sees for bad input, on every kind of network; and what never happens.

Where a wrong word could be refused before weights are read, the checkpoint here has none.
"""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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

import lm_eval_duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.lm import DuelMDM

TESTS = Path(__file__).resolve().parent


def words(folder, *names):
    """A tokenizer of these words, [UNK] before them."""
    spelled = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", *names])}, unk_token="[UNK]"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=spelled, unk_token="[UNK]", bos_token="[UNK]").save_pretrained(folder)
    return str(folder)


def dit(folder, kind):
    words(folder, *"abcdefghijk")
    return dit_reference.write(folder, kind)[0]


def backbone(folder, name):
    return decoder_reference.write(folder, decoder_reference.CASES[name])[0]


TRUSTED = {"backend": "remote", "trust_remote_code": True}
KINDS = {  # every way in which a checkpoint is read, and the model args that it needs
    "masked LM": (lambda folder: tiny.checkpoint(folder, "bert"), {}),
    "DiT": (lambda folder: dit(folder, "mdlm"), {}),
    "block-causal DiT": (lambda folder: dit(folder, "bd3lm"), {}),
    "backbone": (lambda folder: backbone(folder, "a2d-qwen3"), {}),
    "block-causal backbone": (lambda folder: backbone(folder, "sdar"), {}),
    "causal": (lambda folder: tiny.checkpoint(folder, "gpt2", mask=False), {"estimator": "ar"}),
    "own code": (lambda folder: own.write(folder, own.DREAM, "DreamModel", own.decoder(bias=True)), TRUSTED),
    "block-causal own code": (
        lambda folder: own.write(folder, own.SDAR, "SDARForCausalLM", own.decoder(norms=True), block_size=4),
        TRUSTED,
    ),
}
ALL = tuple(KINDS)


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

    @property
    def file(self):
        """One that holds weights."""
        return next(self.folder.glob("*.safetensors"))

    def change(self, name, text):
        (self.folder / name).write_text(text)
        self.load()

    def pickle(self, name, spoil=lambda content: content, cut=None):
        """The weights as torch writes them, with their content spoilt or their bytes cut off."""
        tensors = {}
        for file in self.folder.glob("*.safetensors"):
            tensors |= load_file(file)
        for file in [*self.folder.glob("*.safetensors"), *self.folder.glob("*.index.json")]:
            file.unlink()
        torch.save(spoil(tensors), self.folder / name)
        (self.folder / name).write_bytes((self.folder / name).read_bytes()[:cut])
        self.load()

    def without(self, *patterns):
        for pattern in patterns:
            for file in self.folder.glob(pattern):
                file.unlink()
        self.load()


class Trap:
    """Unpickled with its code, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def rolling(lm, *texts):
    return lm.loglikelihood_rolling(
        harness_requests.ask("loglikelihood_rolling", *[(text,) for text in texts]), disable_tqdm=True
    )


def choice(lm, *pairs):
    return lm.loglikelihood(harness_requests.ask("loglikelihood", *pairs), disable_tqdm=True)


def write(lm, *prompts):
    asked = {"until": [], "max_gen_toks": 4}
    return lm.generate_until(
        harness_requests.ask("generate_until", *[(prompt, asked) for prompt in prompts]), disable_tqdm=True
    )


def poisoned(at, value, **args):
    """A text whose first token breaks the network once it is revealed."""
    lm = at.load(rule="left_to_right", **args)
    token = lm.tok_encode("d")[0]
    network = getattr(lm.denoiser, "model", None) or lm.denoiser.network
    with torch.no_grad():
        table = next(p for name, p in network.named_parameters() if re.search(r"embed|wte", name) and p.dim() == 2)
        table[token] = value
    rolling(lm, "a b", "d c b a c")


def missing_shard(at):
    """As if the second of two had not been loaded."""
    (at.folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {}, "weight_map": dict.fromkeys(load_file(at.file), "model-00002-of-00002.safetensors")}
        )
    )
    at.file.unlink()
    at.load()


def spoilt(at, content):
    at.file.write_bytes(content(at.file.read_bytes()))
    at.load()


@dataclasses.dataclass(frozen=True)
class Case:
    """Bad input, the words that matter, what provokes it; `weights`: it shows only once they are read."""

    name: str
    words: str
    provoke: Callable
    kinds: tuple = ALL
    weights: bool = False


HALF = "a \ud83d b"
HALF_WORDS = r"Request of task toy, document 1: the text holds a lone surrogate, '\ud83d' at character 2 (after 'a ')"

CASES = [
    Case(
        "a tokenizer with more ids than the network",
        "The tokenizer has ids up to 60 but ... pass tokenizer=",
        lambda at: at.load(tokenizer=words(at.folder / "other", *[f"w{n}" for n in range(60)]), mask_token_id=9),
        ("masked LM", "DiT", "block-causal DiT", "backbone", "block-causal backbone"),
    ),
    Case(
        "the same, of a causal LM",
        "The tokenizer has ids up to 60 but",
        lambda at: at.load(tokenizer=words(at.folder / "other", *[f"w{n}" for n in range(60)])),
        ("causal",),
    ),
    Case(
        "the same, of own code, whose table is known once it is built",
        "The tokenizer has ids up to 60 but",
        lambda at: at.load(tokenizer=words(at.folder / "other", *[f"w{n}" for n in range(60)]), mask_token_id=9),
        ("own code", "block-causal own code"),
        weights=True,
    ),
    Case(
        "a folder without a tokenizer",
        "pass tokenizer=<a folder or hub name>",
        lambda at: at.without("*token*", "vocab*"),
        tuple(kind for kind in ALL if "DiT" not in kind),
    ),
    Case(
        "the same, of MDLM, BD3-LM or SEDD, without a connection",
        "Cannot read config and tokenizer of 'gpt2'",
        lambda at: at.without("*token*", "vocab*"),
        ("DiT", "block-causal DiT"),
    ),
    Case(
        "a tokenizer file that is cut off",
        "Cannot read config and tokenizer",
        lambda at: at.change("tokenizer.json", "{"),
    ),
    Case(
        "a tokenizer_config.json that is cut off",
        "Cannot read config and tokenizer",
        lambda at: at.change("tokenizer_config.json", '{"a'),
    ),
    Case(
        "a config.json that is no JSON", "is not a valid JSON file", lambda at: at.change("config.json", '{"model_type')
    ),
    Case("a config.json that is no object", "expected an object", lambda at: at.change("config.json", "[]")),
    Case("a folder without config.json", "has no config.json", lambda at: at.without("config.json")),
    Case(
        "a safetensors file that is cut off",
        "incomplete metadata, file not fully covered. It is cut off or damaged: download it again.",
        lambda at: spoilt(at, lambda content: content[:-40]),
        weights=True,
    ),
    Case("an empty file", "It is empty: download it again.", lambda at: spoilt(at, lambda content: b""), weights=True),
    Case(
        "a pointer of git-lfs",
        "run git lfs pull",
        lambda at: spoilt(at, lambda content: b"version https://git-lfs.github.com/spec/v1\n"),
        weights=True,
    ),
    Case(
        "a .bin that is cut off",
        "It is cut off or damaged: download it again.",
        lambda at: at.pickle("pytorch_model.bin", cut=-200),
        weights=True,
    ),
    Case(
        "a shard that is missing",
        "names model-00002-of-00002.safetensors, which is missing: the download is incomplete",
        missing_shard,
        tuple(kind for kind in ALL if "backbone" not in kind),
        weights=True,
    ),
    Case(
        "a .bin with code in it",
        "pytorch_model.bin needs code to be read (Unsupported ... io.open",
        lambda at: at.pickle("pytorch_model.bin", lambda content: {**content, "x": Trap(at.folder / "trap")}),
        weights=True,
    ),
    Case(
        "a .ckpt with code in it",
        "last.ckpt needs code to be read (Unsupported",
        lambda at: at.pickle("last.ckpt", lambda content: {"state_dict": content, "x": Trap(at.folder / "trap")}),
        tuple(kind for kind in ALL if kind not in ("masked LM", "causal")),
        weights=True,
    ),
    Case("a device that there is none of", "No device 'banana'", lambda at: at.load(device="banana")),
    Case("a GPU that there is none of", "No device 'cuda:99'", lambda at: at.load(device="cuda:99")),
    Case(
        "a length that the network does not hold",
        "max_length=100000 is too long",
        lambda at: at.load(max_length=100_000),
        ("DiT", "block-causal DiT"),
    ),
    Case(
        "NaN or infinite logits",
        "Request of task toy, document 1: ... NaN or infinite logits. (Window ... block at target position ... step",
        lambda at: poisoned(at, math.nan),
        ("masked LM", "DiT", "block-causal DiT", "backbone", "causal", "own code"),
        weights=True,
    ),
    Case(
        "a lone surrogate in a text",
        HALF_WORDS,
        lambda at: rolling(at.load(), "a", HALF),
        weights=True,
    ),
]


def copied(folders, place, kind, weights=True):
    """A copy of a kind's checkpoint to spoil, its weights left out where they are not to be read."""
    left = shutil.ignore_patterns(*([] if weights else ["*.safetensors", "*.bin"]))
    return Copy(Path(shutil.copytree(folders[kind], place / "checkpoint", ignore=left)), KINDS[kind][1])


def said(text, fragment):
    """Whether a text holds a fragment in which ... stands for anything."""
    return re.search(".*".join(re.escape(part.strip()) for part in fragment.split("...")), text, re.DOTALL)


def two(n, kinds):
    """Two kinds of each case, in turn, so that every kind meets many cases."""
    return sorted({kinds[n % len(kinds)], kinds[(n + len(kinds) // 2) % len(kinds)]})


@pytest.mark.parametrize(
    ("case", "kind"), [pytest.param(c, k, id=f"{c.name}, {k}") for n, c in enumerate(CASES) for k in two(n, c.kinds)]
)
def test_what_the_user_sees(case, kind, folders, tmp_path):
    at = copied(folders, tmp_path, kind, case.weights)
    with pytest.raises(DuelError) as error:
        case.provoke(at)
    message = str(error.value)
    assert said(message, case.words), message
    assert not (at.folder / "trap").exists()
    assert len(message.splitlines()) == 1 + ("python -c" in message)


# ---------------------------------------------------------------- what is no error, or depends on more


def test_a_lone_surrogate_is_named_in_every_kind_of_request(folders, tmp_path):
    lm = copied(folders, tmp_path, "DiT").load()
    for ask, requests in (
        (choice, [("a", " b"), (HALF, " c")]),
        (choice, [("a", " b"), ("a", " \ud83d b")]),
        (write, ["a", HALF]),
    ):
        with pytest.raises(DuelError) as error:
            ask(lm, *requests)
        assert said(str(error.value), HALF_WORDS), error.value
    repair = re.search(r"by (text\..*)\.$", str(error.value))[1]
    assert eval(repair, {"text": HALF}) == "a \ufffd b"
    assert eval(repair, {"text": "a \ud83d\ude00 b"}) == "a \U0001f600 b"  # two halves


def test_a_nul_is_a_character_like_any_other():
    lm = DuelMDM(pretrained="demo-bd", device="cpu")
    text = "the\0 people"
    ids = lm.tok_encode(text)
    assert lm.tokenizer.decode(ids) == text
    by_hand = DuelEstimator(lm.denoiser, "greedy").log_prob([Window(tuple(lm.text.prefix), ids)])[0].log_prob
    assert rolling(lm, text, "the") == pytest.approx([by_hand, rolling(lm, "the")[0]], abs=1e-4)
    assert choice(lm, ("the\0", " people"))[0][0] == pytest.approx(by_hand - rolling(lm, "the\0")[0], abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "value"), [("duel", math.inf), ("elbo", math.nan), ("mixture", math.inf), ("oracle", math.nan)]
)
def test_no_estimator_returns_nan(estimator, value, folders, tmp_path):
    at = copied(folders, tmp_path, "backbone")
    with pytest.raises(DuelError, match=r"toy, document 1: .* \(Window \d, .* step \d+\.\)"):
        poisoned(at, value, estimator=estimator, block=4)


def test_the_harness_asks_for_a_gpu_unless_told_otherwise(monkeypatch, folders, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    at = copied(folders, tmp_path, "DiT")
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        assert at.load(device="cuda:0").denoiser.device.type == "cpu"
    assert "CUDA" in caplog.text
    with pytest.raises(DuelError, match="No device 'cuda:1'"):
        at.load(device="cuda:1")


def test_a_tokenizer_far_smaller_than_the_network_is_said(tmp_path, caplog):
    known = words(tmp_path / "tokenizer", *[f"w{n}" for n in range(300)])
    for size, warned in ((301 + 128, False), (301 + 129, True)):
        (tmp_path / str(size)).mkdir()
        path, _ = dit_reference.write(tmp_path / str(size), "mdlm", vocab_size=size)
        caplog.clear()
        with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
            DuelMDM(pretrained=path, tokenizer=known, device="cpu")
        assert ("301 tokens" in caplog.text) == warned


# ---------------------------------------------------------------- what is never done


@pytest.mark.parametrize("kind", ["masked LM", "DiT", "backbone", "causal", "own code"])
def test_no_code_beside_a_tokenizer_is_run_unless_trusted(kind, folders, tmp_path):
    at = copied(folders, tmp_path, kind)
    trap = tmp_path / "trap"
    (at.folder / "own_tokenizer.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    told = json.loads((at.folder / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}}
    (at.folder / "tokenizer_config.json").write_text(json.dumps(told))
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
from lm_eval_duel.harness.versions import request as make_request

lm = DuelMDM(device="cpu")
(value,) = lm.loglikelihood_rolling([make_request("loglikelihood_rolling", {}, ("a b",), "toy", 0)], disable_tqdm=True)
try:
    DuelMDM(pretrained="nobody/no-such-checkpoint", device="cpu")
except DuelError as error:
    print(value < 0, "needs a connection or a cached copy" in str(error))
"""


def test_nothing_is_asked_of_a_network():
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_the_site_hook_imports_the_standard_library_only():
    """In an interpreter without site-packages, so that other packages' hooks are not counted."""
    home = Path(lm_eval_duel.__file__).parent.parent
    code = (
        f"import sys; before = set(sys.modules); sys.path.insert(0, {str(home)!r})\n"
        f"{(TESTS.parent / 'lm_eval_duel' / 'autoload.pth').read_text()}"
        "new = {name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lm_eval_duel', 'lm_eval_duel._autoload']"
