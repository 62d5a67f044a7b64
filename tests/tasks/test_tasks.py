"""The bundled tasks: what is in them, and that their token counts are the model's own."""

import datasets
import pytest
import tiny

from lm_eval_duel import tasks
from lm_eval_duel.errors import DuelError


def test_sotu_is_the_fixed_list():
    data = tasks.sotu()["test"]
    assert (len(data), sum(data["duel_tokens"]), max(data["duel_tokens"])) == (36, 4053, 128)
    assert min(data["year"]) == 2001 and max(data["year"]) == 2021
    assert len(set(data["text"])) == 36
    assert all(text[0].isupper() or text[0] == '"' for text in data["text"])
    assert all(text.rstrip("\"'")[-1] in ".!?" for text in data["text"])


def test_sotu_full_holds_every_address_and_sotu_choice_has_one_right_answer():
    full, data, passages = tasks.sotu_full()["test"], tasks.sotu_choice()["test"], tasks.sotu()["test"]
    assert (len(full), sum(full["duel_tokens"]), len(data)) == (21, 220_661, 40)
    addresses = dict(zip(full["year"], full["text"], strict=True))
    assert all(record["text"] in addresses[record["year"]] for record in passages)
    for record in data:
        follows = [f"{record['passage']} {option}" in addresses[record["year"]] for option in record["options"]]
        assert follows.index(True) == record["label"] and sum(follows) == 1
    assert {data["label"].count(i) > 4 for i in range(4)} == {True}


def test_token_counts_follow_the_model_args(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    for key in ("tokenizer", "pretrained"):
        first = tasks.sotu(**{key: str(tmp_path), "config_source": "inline"})["test"][0]
        assert first["duel_tokens"] == len(first["text"].split())
    with pytest.raises(DuelError, match=r"--metadata tokenizer="):
        tasks.sotu(pretrained="/no/such/folder")


def test_proteins_are_whole_and_counted_in_residues():
    data = tasks.only_residues(tasks.proteins()["test"])
    assert {record["accession"]: len(record["text"]) for record in data} == {  # lengths as UniProtKB has them
        "P0CG48": 76,  # the first of nine equal ubiquitins
        "P99999": 105,
        "P01308": 110,
        "P69905": 142,
        "P00698": 147,
        "P02144": 154,
        "P42212": 238,
    }
    assert tasks.residue_perplexity(data[0], [-152.0])["bits_per_residue"] == (-152.0, 76)


def test_what_is_no_residue_is_refused_before_anything_is_scored():
    def checked(*texts):
        return tasks.only_residues(datasets.Dataset.from_list([{"text": text} for text in texts]))

    assert checked("MKT\nAYI\n", "M")["text"] == ["MKTAYI", "M"]
    with pytest.raises(DuelError, match=r"Protein 1 has 'a', 'k', which are not .*: write residues in upper case"):
        checked("MKT", "Mka")
    with pytest.raises(DuelError, match=r"Protein 0 has '\*', 'J', which are not letters of residues \(ABC.*: remove"):
        checked("MJ*")
    with pytest.raises(DuelError, match=r"Protein 1 is None, not text with a letter for each residue"):
        checked("MKT", None)
    with pytest.raises(DuelError, match=r"have no column 'text'; they have seq\. Name the column with the sequences"):
        tasks.only_residues(datasets.Dataset.from_list([{"seq": "MKT"}]))
