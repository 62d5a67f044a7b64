"""Rows cut from a stream of tokens, and texts that carry their own ids."""

import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from dit_reference import tiny_mdlm
from harness_requests import ask

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.tasks.data import Wrapping, _start_and_end
from lm_eval_duel.text.annotated import TokenText

B = 90
E = 91
DOCUMENTS = [[1, 2, 3], [4, 5], [], [6, 7, 8, 9, 10], [11]]


def rows(documents=DOCUMENTS, **options):
    return list(Wrapping(**{"length": 6, "bos": B, "eos": E, **options}).rows(documents))


def test_the_ends_of_a_row_are_those_that_the_tokenizer_has():
    for bos, cls, eos, expected in (
        (B, None, E, (B, E)),
        (B, 5, None, (B, B)),
        (None, 5, E, (5, E)),
        (None, 5, None, (5, 5)),
        (None, None, E, (E, E)),
    ):
        tokenizer = SimpleNamespace(bos_token_id=bos, cls_token_id=cls, eos_token_id=eos)
        assert _start_and_end(tokenizer) == expected
    with pytest.raises(DuelError, match="framed=false"):
        _start_and_end(SimpleNamespace(bos_token_id=None, cls_token_id=None, eos_token_id=None))


def test_rows_by_hand():
    assert rows() == [[B, 1, 2, 3, 4, E], [B, 5, 6, 7, 8, E], [B, 9, 10, 11, E]]
    assert rows(remainder="drop") == rows()[:2]
    assert rows(framed=False) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    assert rows(insert_eos=True) == [
        [B, 1, 2, 3, E, E],
        [B, 4, 5, E, E, E],
        [B, 6, 7, 8, 9, E],
        [B, 10, E, 11, E, E],
    ]
    assert rows(length=5, insert_eos=True, framed=False, remainder="drop") == [
        [1, 2, 3, E, 4],
        [5, E, E, 6, 7],
        [8, 9, 10, E, 11],
    ]
    assert rows([]) == rows([[], []]) == []


def official(documents, length, insert_eos, framed):
    """The authors' wrapping from its description: batches of 1,000 documents, each concatenated and cut by itself."""
    size = length - 2 if framed else length
    cut = []
    for first in range(0, len(documents), 1000):
        stream = concatenated(documents[first : first + 1000], insert_eos)
        for start in range(0, len(stream) // size * size, size):
            chunk = stream[start : start + size]
            cut.append([B, *chunk, E] if framed else chunk)
    return cut


def concatenated(documents, insert_eos):
    stream = []
    for document in documents:
        stream += document
        if insert_eos:
            stream.append(E)
    return stream


@pytest.mark.parametrize(
    ("count", "insert_eos", "framed"),
    [(0, True, True), (1000, False, True), (1001, True, True), (2500, False, False)],
)
def test_the_official_remainder_is_that_of_each_batch(framed, insert_eos, count):
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(0, 30, (count,), generator=generator).tolist()
    documents = [torch.randint(0, 90, (size,), generator=generator).tolist() for size in sizes]
    options = {"length": 32, "insert_eos": insert_eos, "framed": framed}
    assert rows(documents, **options, remainder="official") == official(documents, 32, insert_eos, framed)
    whole = rows(documents, **options)
    packed = [row[1:-1] if framed else row for row in whole]
    assert [*itertools.chain(*packed)] == concatenated(documents, insert_eos), "every token exactly once"
    assert rows(documents, **options, remainder="drop") == [row for row in whole if len(row) == 32]


# ---------------------------------------------------------------- texts that carry ids


def test_a_token_text_is_a_text():
    text = TokenText("a b", [0, 1, 2, 3], (1, 1), ("tiny", "abc"))
    assert text == "a b"
    assert text.digest != TokenText("a b", [0, 1, 2, 4], (1, 1), ("tiny", "abc")).digest

    unpickled = pickle.loads(pickle.dumps(text))
    assert type(unpickled) is TokenText
    assert unpickled == "a b"
    assert unpickled.token_ids == (0, 1, 2, 3)
    assert unpickled.special_tokens == (1, 1)
    assert unpickled.tokenizer == ("tiny", "abc")
    assert unpickled.digest == text.digest

    with pytest.raises(DuelError, match="A row of 2 ids cannot have 2 and 1 special tokens"):
        TokenText("a", [1, 2], (2, 1))


@pytest.fixture(scope="module")
def dit(tmp_path_factory):
    return tiny_mdlm(tmp_path_factory.mktemp("dit"))


def test_the_ids_are_scored_as_they_stand(dit):
    lm = DuelMDM(pretrained=dit, device="cpu", rule="greedy", block=2, grid="row")
    mine = (dit, lm.text.fingerprint)
    row = [0, 3, 1, 2, 0]
    text = TokenText("letters that the tokenizer does not know", row, (1, 1), mine)
    [value] = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,), doc={"duel_tokens": 4}))
    [score] = Duel(lm.denoiser, "greedy", 2, "row").log_prob([Window((0,), (3, 1, 2, 0))])
    assert value == pytest.approx(score.log_prob, abs=1e-4)
    for wrong, message in (
        (TokenText("x", row, (1, 1), ("gpt2", "0123")), r"come from the tokenizer gpt2 \(0123\), but this model's is"),
        (TokenText("x", row * 99, (1, 1), mine), "rows of a wrapped task are not cut again"),
    ):
        with pytest.raises(DuelError, match=message):
            lm.loglikelihood_rolling(ask("loglikelihood_rolling", (wrong,)))
    with pytest.raises(DuelError, match=r"counted 5 tokens .* has 4.* --metadata bos=given"):
        lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,), doc={"duel_tokens": 5}))
