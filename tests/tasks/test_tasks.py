"""The bundled tasks: what is in them, and that their token counts are the model's own."""

import pytest
import tiny

from lm_eval_duel import tasks
from lm_eval_duel.errors import DuelError

pytestmark = pytest.mark.usefixtures("one_load")


def test_sotu_is_the_fixed_list():
    data = tasks.sotu()["test"]
    assert (len(data), sum(data["duel_tokens"]), max(data["duel_tokens"])) == (36, 4053, 128)
    assert min(data["year"]) == 2001 and max(data["year"]) == 2021
    assert len(set(data["text"])) == 36
    assert all(text[0].isupper() or text[0] == '"' for text in data["text"])
    assert all(text.rstrip("\"'")[-1] in ".!?" for text in data["text"])


def test_sotu_full_holds_every_address_and_sotu_choice_has_one_right_answer():
    full = tasks.sotu_full()["test"]
    assert (len(full), sum(full["duel_tokens"])) == (21, 220_661)
    addresses = dict(zip(full["year"], full["text"], strict=True))
    for record in tasks.sotu()["test"]:
        assert record["text"] in addresses[record["year"]]

    questions = tasks.sotu_choice()["test"]
    assert len(questions) == 40
    for record in questions:
        for n, option in enumerate(record["options"]):
            follows = f"{record['passage']} {option}" in addresses[record["year"]]
            assert follows == (n == record["label"])
    for n in range(4):
        assert questions["label"].count(n) > 4


def test_token_counts_follow_the_model_args(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for key in ("tokenizer", "pretrained"):
        first = tasks.sotu(**{key: str(tmp_path), "config_source": "inline"})["test"][0]
        assert first["duel_tokens"] == len(first["text"].split())
    with pytest.raises(DuelError, match=r"--metadata tokenizer="):
        tasks.sotu(pretrained="/no/such/folder")
