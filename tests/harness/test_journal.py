"""A file of lines that is only appended to."""

from lm_eval_duel.harness.journal import Journal


def test_a_journal_continues_after_its_last_whole_line(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path).write(["one", "two"])
    with path.open("ab") as file:
        file.write(b"x" * 200_000)  # cut off, and longer than what is read at a time
    Journal(path).write(["three"])
    assert path.read_text() == "one\ntwo\nthree\n"
    path.write_text("cut off in the first line")
    Journal(path).write([])
    assert path.read_text() == ""


def test_lines_wait_while_the_disk_is_full_and_keep_their_order(tmp_path, caplog):
    journal = Journal(tmp_path / "j.jsonl")
    file = journal.file
    journal.write(["one"])
    with caplog.at_level("ERROR", logger="lm_eval.duel_mdm"), open("/dev/full", "wb", buffering=0) as journal.file:
        journal.write(["two"])
        journal.write(["three"])
        journal.flush()
    assert caplog.text.count("No space left on device): the run continues, and lines wait in memory") == 1
    assert "2 lines could not be written to" in caplog.text
    journal.file = file
    journal.write(["four"])
    assert journal.path.read_text().split() == ["one", "two", "three", "four"] and not journal.waiting
