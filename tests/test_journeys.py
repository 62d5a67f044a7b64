"""What a new user does first, and does wrong: each answer is one clear line that names what it is about."""

import json
import logging
import math

import pytest
import transformers
from toys import Toy

from lm_eval_duel import Duel, DuelError, Window, load, rules
from lm_eval_duel.cli import plan as planning
from lm_eval_duel.cli import score as scoring
from lm_eval_duel.cli import show
from lm_eval_duel.harness import patches
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.tasks import own_text

RULE = """
import dataclasses
from typing import ClassVar
from lm_eval_duel import Decision, Rule
from lm_eval_duel.rules import rank

@dataclasses.dataclass(frozen=True)
class Last(Rule):
    name: ClassVar[str] = "last"

    def __call__(self, predictions, lanes):
        return Decision(lanes.masked & (rank(-lanes.columns.masked_fill(~lanes.masked, -1)) < 1))
"""


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize("ids", [[1.5], ["a"], "ab", 3, [None], [math.nan]], ids=repr)
def test_ids_are_whole_numbers(ids):
    with pytest.raises(DuelError, match="Token ids are whole numbers"):
        Window([1], ids)
    assert Window([1], [2.0]) == Window((1,), (2,))


def test_windows_come_in_a_list():
    duel = Duel(Toy(length=6), "greedy", 2)
    with pytest.raises(DuelError, match="Window 1 must be a Window"):
        duel.log_prob([Window((), (0, 1)), ((), (0, 1))])
    with pytest.raises(DuelError, match=r"Write \[window\]"):
        duel.log_prob(Window((), (0, 1)))


def test_a_text_without_tokens_is_said_to_have_no_perplexity(caplog):
    with caplog.at_level(logging.WARNING, logger="lm_eval.duel_mdm"):
        [score] = Duel.from_pretrained("demo-bd", device="cpu").score([""])
    assert math.isnan(score.perplexity) and "text 0" in caplog.text


@pytest.mark.parametrize(
    ("content", "named"),
    [('{"text": "a"}\n{"text": null}\n', ":2: column 'text' is null"), ("[" * 100_000, " cannot be read")],
    ids=["null", "nested"],
)
def test_broken_files_are_named(tmp_path, content, named):
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(DuelError) as error:
        own_text.texts([str(file)])
    assert f"{file}{named}" in str(error.value) and "\n" not in str(error.value)


def test_an_encoder_decoder_is_not_said_to_be_autoregressive(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=8, num_layers=1, num_heads=1, d_ff=8, d_kv=8)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(DuelError, match="encoder-decoder") as error:
        load(str(tmp_path), device="cpu", tokenizer=transformers.AutoTokenizer.from_pretrained(load_folder()))
    assert "estimator=ar" not in str(error.value)


def load_folder():
    from lm_eval_duel.demo import FOLDER

    return str(FOLDER / "demo-mdm")


# ---------------------------------------------------------------- what is said


def test_a_rule_may_be_named_by_its_file(tmp_path):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "rule_of_a_journey.py"
    file.write_text(RULE)
    rule = rules.parse(f"{file}:Last")
    assert rules.parse(str(rule)) == rule
    windows = [Window((), (0, 1, 0, 1))]
    named, known = (Duel(Toy(length=6), text, 2).log_prob(windows) for text in (f"{file}:Last", "right_to_left"))
    assert named[0].log_prob == pytest.approx(known[0].log_prob, abs=1e-9)
    (tmp_path / "folder" / "random.py").write_text(RULE)
    for text, message in ((f"{tmp_path}/no.py:Last", "No file"), (f"{tmp_path}/folder/random.py:Last", "another name")):
        with pytest.raises(DuelError, match=message):
            rules.parse(text)


def test_score_names_the_file_of_a_document(tmp_path):
    lm = DuelMDM(pretrained="demo-bd", device="cpu")
    mask = lm.tokenizer.decode([lm.denoiser.mask_id])
    with pytest.raises(DuelError, match=r"^notes\.txt:2: the text holds the mask token"):
        scoring.score(lm, [own_text.OwnText("notes.txt:1", "fine"), own_text.OwnText("notes.txt:2", f"not {mask}")])


def test_plan_names_the_device_of_its_times(capsys):
    hours = {}
    for device, word in (("h200", "H200"), ("cpu", "CPU")):
        planning.main(["--model_args", "pretrained=demo-bd", "--tokens", "100", "--device", device])
        assert f"on a{'n' if word == 'H200' else ''} {word}" in capsys.readouterr().out
        planning.main(["--model_args", "pretrained=demo-bd", "--tokens", "100", "--device", device, "--json"])
        hours[device] = json.loads(capsys.readouterr().out)["methods"]["exact"]["hours"]
    assert hours["cpu"] > hours["h200"]


def test_a_traces_names_cannot_steer_the_terminal():
    record = {"task": "a\x1b[2Jb", "doc": 0, "window": 0, "ids": [1], "values": {"du\x1b[2Jel": -1.0}}
    assert "\x1b" not in show._heading(record)


def test_errors_stand_under_the_table_of_results():
    patches.apply()
    from lm_eval import utils

    results = {"results": {"toy": {"alias": "toy", "m,none": 1.0}}, "versions": {"toy": 1}, "n-shot": {"toy": 0}}
    plain = utils.make_table(results)
    line = "ELBO (a bound) of toy: -10.00 +- 0.50 nats"
    table = utils.make_table({**results, "config": {"duel": {"errors": [line]}}})
    assert table.startswith(plain.rstrip("\n")) and table.endswith(line) and line not in plain
    lm = DuelMDM(pretrained="demo-mdm", device="cpu", estimator="elbo", mc_samples=8)
    scoring.score(lm, [own_text.OwnText("notes.txt", "We the people")])
    [error] = lm.get_model_info()["duel"]["errors"]
    assert "ELBO (a bound)" in error and "+-" in error
