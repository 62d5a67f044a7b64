"""`lm-eval-duel audit`, from a text to the verdict, once for each kind of run: it passes, and says what was compared.

Small checkpoints of random weights here; the bundled ones among the slow tests.
"""

import dit_reference
import networks
import pytest
from laws import slow_but

from lm_eval_duel.cli import audit

pytestmark = pytest.mark.usefixtures("one_load")

LETTERS = "b c d e f g h i j k"
REFERENCE = "1 window with the reference"
WRITTEN_OUT = "written out in float64"
TOTALS = "totals and their errors"
PRINTED = "printed numbers with the text"


def verdict(capsys, path, arguments, text):
    """The last line that an audit prints; raises DuelError if something differs."""
    model = ",".join([f"pretrained={path}", *([arguments] if arguments else [])])
    audit.main(["--model_args", model, "--tasks", str(text), "--device", "cpu", "--limit", "1"])
    return capsys.readouterr().out.splitlines()[-1]


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "letters.txt"
    file.write_text(f"{LETTERS}\n")
    return file


MASKED_LM = {  # what the verdict must name, by the model args of a network that is nothing but a masked LM
    "rule=entropy,block=4": ["the best order of 1 window"],
    "rule=random,block=4": ["the best order of 1 window"],
    "rule=greedy,block=4,bos=none": [],
    "rule=greedy,block=4,cache=dual": [],
    "rule=greedy,block=4,cache=prefix,cfg_scale=0.5": [],
    "rule=greedy,block=4,temperature=0.7,top_k=30,top_p=0.9999": [],
    "rule=greedy,block=4,top_k=9": [],
    "rule=greedy,block=4,exclude_ids=30+31": [],
    "estimator=two_phase,rule=greedy,block=2,sample=0.5": ["draws"],
    "estimator=elbo,elbo_block=4,mc_samples=16": ["draws", "the mean over all orders of 1 window"],
    "estimator=elbo,elbo_form=ratio,mc_samples=16": ["draws"],
    "estimator=elbo_exact,block=4": ["the order of the values over all orders"],
    "estimator=mixture,block=4": ["the order of the values over all orders"],
    "estimator=oracle,block=4": ["the order of the values over all orders"],
    "estimator=sampled_confidence,block=4,temperature=0.8": [],
    "estimator=sampled_order,block=4,alg=entropy,alg_temp=0.2,steps=2": [],
}


IMPOSSIBLE = "the sums of 1 window of probability 0"
NOT_COMPARED = {
    "rule=random,block=4": "how the rule decides (both sides run its own code, in 1 window)",
    "rule=greedy,block=4,temperature=0.7,top_k=30,top_p=0.9999": IMPOSSIBLE,
    "rule=greedy,block=4,top_k=9": IMPOSSIBLE,
}


PLAIN_RUNS = [  # a rule, two kinds of draws
    "rule=entropy,block=4",
    "estimator=two_phase,rule=greedy,block=2,sample=0.5",
    "estimator=elbo,elbo_block=4,mc_samples=16",
]


@pytest.mark.parametrize("arguments", slow_but(MASKED_LM, PLAIN_RUNS))
def test_every_estimator_of_a_masked_lm(arguments, folder, text, capsys):
    line = verdict(capsys, folder, arguments, text)

    assert line.startswith("PASS: 1 window, 10 tokens, 1 of 1 document")
    for what in (REFERENCE, "the network with BertForMaskedLM", TOTALS, PRINTED, *MASKED_LM[arguments]):
        assert what in line
    assert f"Not compared: {NOT_COMPARED.get(arguments, 'nothing')}." in line


DITS = [
    ("mdlm", "rule=greedy,block=4"),
    ("bd3lm", "rule=margin"),
    ("mdlm", "rule=greedy,block=4,cache=dual,cfg_scale=0.7"),
    ("sedd", "rule=greedy,block=4"),
    ("sedd", "rule=greedy,block=4,bos=official,cfg_scale=0.7"),
    ("gidd", "rule=greedy,block=4"),
    ("ar", "estimator=ar"),
    ("duo", "rule=greedy,block=4,noise_seed=1"),
    ("duo", "estimator=duel_seeds,rule=greedy,block=4,noise_seeds=3"),
    ("duo", "estimator=noised_elbo,mc_samples=16"),
    ("udlm", "estimator=noised_elbo,mc_samples=16,steps=8"),
    ("gidd-uniform", "rule=greedy,block=4"),
]


PLAIN_DITS = [  # kept keys, guidance beside a noise level, noise seeds
    DITS[1],
    DITS[4],
    DITS[8],
]


@pytest.mark.parametrize(("name", "arguments"), slow_but(DITS, PLAIN_DITS))
def test_every_kind_of_dit(name, arguments, tmp_path, text, capsys):
    path, _ = dit_reference.write(tmp_path, name)
    if not name.startswith("gidd"):
        dit_reference.words(dit_reference.TOKENS).save_pretrained(path)

    line = verdict(capsys, path, arguments, text)

    assert line.startswith("PASS: 1 window, 10 tokens, 1 of 1 document")
    for what in (REFERENCE, "the network with the DiT", WRITTEN_OUT, "the weights", TOTALS, PRINTED):
        assert what in line
    assert "Not compared: nothing." in line


SHARED = "duel_seeds,noise_seeds=3"
DRAWN = "noised_elbo,mc_samples=16"


@pytest.mark.parametrize("estimator", slow_but([SHARED, DRAWN], [DRAWN]))
def test_errors_of_totals_over_windows(estimator, tmp_path, text, capsys):
    """Windows share their noise seeds, so errors add up otherwise than those of independent draws."""
    path, _ = dit_reference.write(tmp_path, "duo")
    dit_reference.words(dit_reference.TOKENS).save_pretrained(path)
    text.write_text(f"{LETTERS} {LETTERS} {LETTERS}\n")

    line = verdict(capsys, path, f"estimator={estimator}", text)

    assert line.startswith("PASS: 2 windows, 30 tokens, 1 of 1 document")
    assert TOTALS in line


DECODERS = ["own llada", "own dream", "own sdar", "llada2", "smdm", "nemotron-labs-diffusion"]


@pytest.mark.parametrize("name", slow_but(DECODERS, ["own dream"]))
def test_every_kind_of_decoder(name, tmp_path, text, capsys):
    path, options, _ = networks.made(tmp_path, name)
    options = {**options, "trust_remote_code": "true"}
    options.pop("backend", None)
    arguments = ",".join(f"{key}={value}" for key, value in options.items())

    line = verdict(capsys, path, arguments, text)

    assert line.startswith("PASS: 1 window, ")
    for what in (REFERENCE, "the network with the decoder", WRITTEN_OUT, "the weights", TOTALS, PRINTED):
        assert what in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "pretrained=demo-mdm,rule=greedy,block=32",
        "pretrained=demo-mdm,rule=greedy,block=32,cache=dual",
        "pretrained=demo-mdm,estimator=two_phase,rule=greedy,block=8",
        "pretrained=demo-mdm,estimator=elbo,block=32",
        "pretrained=demo-mdm,estimator=mixture,block=3",
        "pretrained=demo-bd,rule=margin",
        "pretrained=demo-ar,estimator=ar",
        "pretrained=demo-duo,rule=greedy,block=32,noise_seed=0",
        "pretrained=demo-duo,estimator=duel_seeds,block=32,noise_seeds=2",
        "pretrained=demo-duo,estimator=noised_elbo",
    ],
)
def test_the_bundled_checkpoints(arguments, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The people of America, and the people of the union, are one people and one nation this year.\n")
    name, _, more = arguments.removeprefix("pretrained=").partition(",")

    line = verdict(capsys, name, more, text)

    assert line.startswith("PASS: 1 window, ")
    assert REFERENCE in line
    assert "Not compared: nothing." in line
