"""Values under a user's rule that decided otherwise when it was asked again: their notes say so."""

import json

import pytest

from lm_eval_duel import Duel
from lm_eval_duel.cli.main import main
from lm_eval_duel.rules import checked

IN_DOUBT = "in doubt"
RULE = """
import dataclasses
import math

import torch

from lm_eval_duel.rules import Rule, rank


@dataclasses.dataclass(frozen=True)
class ByPlace(Rule):
    \"\"\"Negative control: random numbers that depend on the place of a lane in the batch.\"\"\"

    seed: int = 0

    def __call__(self, predictions, lanes):
        generator = torch.Generator().manual_seed(self.seed)
        key = torch.rand(lanes.masked.shape, generator=generator)
        return lanes.masked & (rank(key.masked_fill(~lanes.masked, math.inf)) < 1)


@dataclasses.dataclass(frozen=True)
class LastMasked(Rule):
    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.flip(1).cumsum(1).flip(1) == 1)
"""
TEXT = "We the people of the United States, and so on to the President of the Union and the Congress."


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    file = tmp_path_factory.mktemp("rules") / "doubtful_rules.py"
    file.write_text(RULE)
    return file


def written(capsys, *arguments):
    """The JSON values that a command writes to standard output."""
    main(arguments)
    decoder = json.JSONDecoder()
    out = capsys.readouterr().out.strip()
    values = []
    while out:
        value, end = decoder.raw_decode(out)
        values.append(value)
        out = out[end:].strip()
    return values


@pytest.mark.parametrize(("name", "differs"), [("ByPlace", True), ("LastMasked", False)])
def test_scores_and_samples_under_a_rule_that_decides_otherwise_say_so(
    name, differs, rules, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(checked, "_warned", set())
    args = f"demo-bd,rule={rules}:{name}"
    samples = written(
        capsys, "generate", "--model_args", args, "--device", "cpu", "--max_new_tokens", "12", "--num", "3"
    )
    (tmp_path / "text.txt").write_text(TEXT)
    scores = written(
        capsys, "score", str(tmp_path / "text.txt"), "--model_args", args, "--device", "cpu", "--json", "-"
    )
    duel = Duel.from_pretrained("demo-bd", rule=f"{rules}:{name}", device="cpu")
    [score] = duel.score([TEXT])
    sample, *_ = duel.generate(["We the"] * 3, max_new_tokens=8, temperature=0.5)

    notes = [samples[-1]["note"], scores[0]["note"], score.note, sample.note]
    said = {"came out otherwise" in note or IN_DOUBT in note for note in notes}
    assert said == {differs}
    assert IN_DOUBT in repr(score) or not differs
    assert "temperature" in sample.note
    warnings = [record for record in caplog.records if "decided otherwise when" in record.getMessage()]
    assert len(warnings) == differs  # once, however many runs


def test_a_difference_in_the_last_decision_is_noted_in_every_score(monkeypatch):
    """It is found when all texts are scored."""
    duel = Duel.from_pretrained("demo-bd", rule="greedy", device="cpu")
    counts = duel.counts

    def stream(*_):
        yield from zip(range(2), found, strict=True)
        counts.decisions_differing = 1

    found = duel.score(["We the", "people"])
    assert all(IN_DOUBT not in score.note for score in found)
    monkeypatch.setattr(duel, "score_stream", stream)
    assert all(IN_DOUBT in score.note for score in duel.score(["We the", "people"]))
