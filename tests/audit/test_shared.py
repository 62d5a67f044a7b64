"""The checks that docs/audit.md has for what both sides of an audit share: each runs, and shows what the page says."""

import re
import shlex

import dit_reference
import networks
import pytest
import tiny
from pages import read, rows, section
from safetensors.torch import load_file, save_file

from lm_eval_duel.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_load")]

PAGE = section(read("docs/audit.md"), "## What the two sides share")
CHECKS = {row[0]: re.findall(r"`(lm-eval-duel [^`]+)`", row[1]) for row in rows(PAGE)}
TEXT = "b c d e f g h i j k b"


def decoder(name, folder):
    """The model args of a small decoder."""
    path, options, _ = networks.made(folder, name)
    arguments = {"pretrained": path, **options, "trust_remote_code": "true"}
    arguments.pop("backend", None)
    return ",".join(f"{key}={value}" for key, value in arguments.items())


def repeats(folder):
    """A decoder that predicts what it reads: under shifted logits, the token before."""
    arguments = decoder("own dream", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):  # the layers add next to nothing
            tensor *= 0.03
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = 8 * table / table.norm(dim=1, keepdim=True)
    save_file(tensors, file, metadata={"format": "pt"})
    return arguments + ",rule=left_to_right,block=4"


def dit(name, folder):
    """The model args of a small DiT."""
    path, _ = dit_reference.write(folder, name)
    dit_reference.words(dit_reference.TOKENS).save_pretrained(path)
    return f"pretrained={path}"


MODELS = {  # a small checkpoint for each row of the table: that of a masked LM, unless it says otherwise
    "shift": repeats,
    "the block": lambda folder: decoder("llada2", folder),
    "a short last block": lambda folder: decoder("llada2", folder),
    "attention": lambda folder: decoder("llada2", folder),
    "the noise level of SEDD": lambda folder: dit("sedd", folder),
    "the noise level of GIDD": lambda folder: dit("duo", folder),
    "relative_positions": lambda folder: dit("mdlm", folder),
}
TOKENS = len(tiny.WORDS)
SHOWN = {  # what the output must hold, by the row
    "[MASK]": [r"mask +4 '\[MASK\]'"],
    "columns that are not tokens": [rf"vocabulary +{TOKENS - 1} of {tiny.ROWS} columns are tokens"],
    "shift": ["shift=1 . shift=0"],
    "special tokens": ["bos=given . bos=none"],
    "the block": [r"block +4, .* \(grid=row\)", "trained on blocks of 4"],
    "a short last block": ["last_block=fill . last_block=cut"],
    "attention": ["attention +block_causal"],
    "the noise level of SEDD": ["sigma=clamped", "sigma=schedule", "of the masked share"],
    "the noise level of GIDD": ["network equals the DiT written out in float64"],
    "relative_positions": ["all-mask starts +every position ties"],
    "the generator": ["draw_seed=0 . draw_seed=1"],
    "temperature": ["PASS: 1 window", "1 window with the reference"],
    "a rule that is not": ["klass  .mu, nu"],
    "the network's calls": ["PASS: 1 window", "Not compared: the network"],
    "cutting texts": [f"{len(TEXT)} bytes, {len(TEXT.split())} words"],
}


def of_row(name, table):
    """The entry of `table` for a row of the page."""
    plain_name = name.replace("`", "")
    for key, value in table.items():
        if plain_name.startswith(key):
            return value
    return None


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_runs_and_shows_what_the_page_says(name, folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT + "\n")
    make = of_row(name, MODELS)
    model = make(tmp_path) if make else f"pretrained={folder},block=4"
    [command] = CHECKS[name]
    placeholders = {"T": str(text), "NAME": "klass"}
    words = []
    for word in shlex.split(command)[1:]:
        word = placeholders.get(word, word)
        words.append(re.sub(r"^M\b", model, word))
    if words[0] != "list":
        words += ["--device", "cpu"]
    if name.startswith("the network's calls"):
        words.append("--no_own_code")
    assert not main(words)

    shown = capsys.readouterr().out
    expected = of_row(name, SHOWN)
    assert expected, f"a row without a test: {name}"
    for pattern in expected:
        assert re.search(pattern, shown), (pattern, shown)


def test_the_right_shift_has_a_perplexity_that_is_lower_by_far(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("b b b b b b b b b b\n")
    model = repeats(tmp_path)
    words = ["--model_args", f"{model},shift_logits=true", "--compare", "shift_logits=false", "--device", "cpu"]

    main(["score", str(text), *words])

    shown = capsys.readouterr().out
    right = perplexity_under(1, shown)
    wrong = perplexity_under(0, shown)
    assert right < wrong / 10, (right, wrong)


def perplexity_under(shift, shown):
    """The perplexity in the row of a shift."""
    return float(re.search(rf"shift={shift}\).*? (\d+\.\d+) ", shown)[1])
