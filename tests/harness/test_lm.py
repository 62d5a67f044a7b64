"""The harness's model: every kind of request has a defined answer, in order, and every wrong one a clear error."""

import itertools
import json
from types import SimpleNamespace

import pytest
from harness_requests import ask
from lm_eval.api.task import Task

from lm_eval_duel import Duel
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.text.text import Gap


@pytest.fixture(scope="module")
def demo():
    return DuelMDM(rule="greedy", block=32, device="cpu")


def by_hand(lm, context, target):
    window = Window((2, *lm.tok_encode(context)), lm.tok_encode(target), (3,))
    [score] = Duel(lm.denoiser, "greedy", 4).log_prob([window])
    return pytest.approx(score.log_prob, abs=5e-4), score.is_greedy


def rolling(*texts):
    """Requests for the log-likelihood of whole texts."""
    return ask("loglikelihood_rolling", *[(text,) for text in texts])


def test_loglikelihood_in_request_order(lm):
    requests = [("a b c", " d e"), ("b", " the of and a b c d"), ("a b c", " e d"), ("z", " q")]
    expected = [by_hand(lm, *request) for request in requests]
    assert lm.loglikelihood(ask("loglikelihood", *requests)) == expected
    backwards = lm.loglikelihood(ask("loglikelihood", *requests[::-1]))
    assert backwards[::-1] == expected


def test_empty_context_empty_continuation_trailing_spaces(lm):
    def answer(context, continuation):
        [value_and_greedy] = lm.loglikelihood(ask("loglikelihood", (context, continuation)))
        return value_and_greedy

    assert answer("", "a b") == by_hand(lm, "", "a b"), "special tokens alone are in view"
    assert answer("  ", "a b") == by_hand(lm, "", "a b")
    for context in ("a b", "", "a "):
        assert answer(context, "") == (0.0, True)
    assert answer("a ", "b") == by_hand(lm, "a", "b"), "trailing spaces belong to the continuation"
    assert answer("a", " b") == by_hand(lm, "a", "b")


def test_the_scored_ids_always_spell_the_continuation(demo):
    """Where a merge crosses the border, the continuation is encoded by itself: it is neither lost nor changed."""
    before = demo.text.merged_borders
    for context, continuation in [("th", "e"), ("gov", "ernment"), ("the", "re"), ("the people", " of"), ("w", "e ")]:
        ids, target = demo.text.encode_pair(context, continuation)
        assert target
        assert demo.tokenizer.decode(target) == continuation
        assert demo.tokenizer.decode(ids) == context
    for context, continuation in [("the ", "people"), ("the people  ", "of"), ("  ", "of"), ("", "the")]:
        ids, target = demo.text.encode_pair(context, continuation)
        spelled = demo.tokenizer.decode(ids) + demo.tokenizer.decode(target)
        assert spelled == context + continuation
    assert demo.text.merged_borders - before >= 3
    [(value, _)] = demo.loglikelihood(ask("loglikelihood", ("th", "e")))
    assert value < 0


def test_each_part_of_a_gap_is_spelled_by_its_own_ids(demo):
    """No text is lost, doubled or moved where a token spans a border, and such a continuation counts once."""
    for merged, *texts in [
        (1, "The peo", "ple of the Uni", "ted States"),  # at both borders
        (1, "the gov", "ernment", " of the people"),
        (1, "the people", " of the Uni", "ted States"),
        (0, "the people", " of", " the United States"),
    ]:
        context, inside, suffix = texts
        before = demo.text.merged_borders
        parts = demo.text.encode_gap(context, Gap(inside, suffix))
        assert [demo.tokenizer.decode(ids) for ids in parts] == texts
        assert demo.text.merged_borders - before == merged
        if not merged:
            assert list(itertools.chain(*parts)) == demo.text.encode(context + inside + suffix)


def test_long_contexts_are_cut_from_the_left_and_counted(folder, caplog):
    lm = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_length=8)
    long = "a b c d e f g h"
    with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        answers = lm.loglikelihood(ask("loglikelihood", (long, " x y"), ("a", " b"), (long, " z")))
    assert answers[0] == by_hand(lm, "e f g h", "x y")
    messages = [record.message for record in caplog.records]
    assert messages.count("2 of 3 contexts were longer than max_length=8 and truncated from the left") == 1
    assert lm.get_model_info()["duel"]["cut_contexts"] == {"toy": 2}
    with caplog.at_level("WARNING", logger="lm_eval.duel_mdm"):
        lm.loglikelihood([*ask("loglikelihood", (long, " x y")), *ask("loglikelihood", (long, " z"), task="other")])
    assert caplog.records[-1].message.endswith("truncated from the left: 1 of toy, 1 of other")
    assert lm.get_model_info()["duel"]["cut_contexts"] == {"toy": 3, "other": 1}
    with pytest.raises(DuelError, match="Request of task toy, document 1: A continuation of 7 tokens does not fit"):
        lm.loglikelihood(ask("loglikelihood", ("a", " b"), ("a", " b c d e f g h")))


@pytest.mark.parametrize("bos", ["given", "none", "scored", "official"])
def test_conventions_of_framing(folder, bos):
    lm = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", bos=bos)
    ids = lm.tok_encode("a b c d")
    with_bos = Window((), (2, *ids), (3,))
    expected = {"given": Window((2,), ids, (3,)), "none": Window((), ids), "scored": with_bos, "official": with_bos}
    assert lm.text.document(ids) == [expected[bos]]
    assert f"bos={bos}" in lm.spec["special_tokens"]
    if bos in ("scored", "official"):
        with pytest.raises(DuelError, match=f"bos={bos} scores the row from its first position on"):
            lm.loglikelihood(ask("loglikelihood", ("a", " b")))


def test_model_info_is_for_the_results_file(folder):
    lm = DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu", max_length=8)
    lm.loglikelihood_rolling(rolling("a b c d e f g h i", "", "the of and", "the of and"))
    lm.loglikelihood(ask("loglikelihood", ("a b c d e f g h", " i")))
    info = lm.get_model_info()
    json.dumps(info)
    assert info["fingerprint"] == lm.fingerprint
    assert info["spec"]["rule"] == "greedy:k=1"
    assert info["spec"]["denoiser"] == "BertForMaskedLM"

    expected = {
        **{"estimator": "duel", "rule": "greedy:k=1", "block": 4, "ranks": 1},
        **{"windows": 4, "tokens": 13, "nfe": 13, "mean_nfe": 13 / 4},  # equal windows count once
        **{
            "cut_contexts": {"toy": 1},
            "empty_requests": 1,
            "longest_document": 9,
            "row_capacity": 6,
            "all_mask_starts": 0,
        },
        "weights": info["spec"]["weights"],
    }
    cost = info["duel"]
    for name, value in expected.items():
        assert cost[name] == value, name
    assert cost["rows"] >= cost["forwards"] > 0
    assert cost["near_tie_windows"] <= cost["near_ties"]
    assert cost["seconds"] > 0
    assert cost["tokens_per_second"] == pytest.approx(13 / cost["seconds"])
    assert cost["peak_memory_bytes"] > 1e7
    assert cost["versions"]["torch"].startswith("2.")

    task = cost["tasks"]["toy"]
    assert task["documents"] == 4
    assert task["requests"] == 5
    assert task["windows"] == 5
    assert task["tokens"] == 16
    assert task["longest_document"] == 9
    assert task["values"]["duel"]["nfe"] == 16
    assert task["values"]["duel"]["stderr"] is None


@pytest.mark.parametrize("estimator", ["elbo", "oracle"])
def test_an_estimator_that_decodes_nothing_says_so_and_states_its_error(folder, estimator, caplog):
    lm = DuelMDM(pretrained=folder, block=4, device="cpu", estimator=estimator)
    pairs = ask("loglikelihood", ("a b", " c"), ("a b", " c d e f g"))
    with caplog.at_level("INFO", logger="lm_eval.duel_mdm"):
        (of_one_token, first_is_greedy), (_, second_is_greedy) = lm.loglikelihood(pairs)
        value = lm.get_model_info()["duel"]["tasks"]["toy"]["values"][estimator]
    assert first_is_greedy is False
    assert second_is_greedy is False
    assert f"estimator={estimator} cannot decode, so is_greedy is always False" in caplog.text
    assert (f"{value['log_prob']:.2f} ± {value['stderr'] or 0:.2f} nats" in caplog.text) == (estimator == "elbo")

    [(exact, _)] = DuelMDM(pretrained=folder, block=4, device="cpu").loglikelihood(pairs[:1])
    assert of_one_token == pytest.approx(exact, abs=1e-4)  # law 12


def test_equal_windows_have_one_monte_carlo_error(folder):
    """They have the same draws, so n of them have n times the error, not sqrt(n) times."""

    def stderr(*texts):
        lm = DuelMDM(pretrained=folder, device="cpu", estimator="elbo", mc_samples=16)
        lm.loglikelihood_rolling(rolling(*texts))
        return lm.get_model_info()["duel"]["tasks"]["toy"]["values"]["elbo"]["stderr"]

    one = stderr("a b c d e")
    assert one > 0
    assert stderr(*["a b c d e"] * 5) == pytest.approx(5 * one)
    assert one < stderr("a b c d e", "e d c b a") < 5 * one


def test_accounts_of_ranks_add_up(folder):
    """What one model computes on all requests is the sum of two accounts of its halves."""
    requests = rolling("a b c", "z", "d e f g", "a b c", "the of")
    for more in (
        {"estimator": "elbo", "mc_samples": 16},
        {"estimator": "oracle", "block": 4},
        {"estimator": "sampled_confidence", "block": 4},
    ):
        arguments = {"pretrained": folder, "device": "cpu", **more}
        one = DuelMDM(**arguments)
        one.loglikelihood_rolling(requests)
        ranks = [DuelMDM(**arguments), DuelMDM(**arguments)]
        for rank, lm in enumerate(ranks):
            lm.loglikelihood_rolling(requests[rank::2])
        ranks[0].evaluation.gathered = [lm.evaluation.summary() for lm in ranks]

        info = ranks[0].get_model_info()["duel"]
        assert info["ranks"] == 2
        of_ranks = info["tasks"]["toy"]
        values_of_ranks = of_ranks.pop("values")
        of_one = one.get_model_info()["duel"]["tasks"]["toy"]
        values_of_one = of_one.pop("values")
        assert of_ranks == of_one
        for name, figures in values_of_one.items():
            for figure, value in figures.items():
                expected = value if value is None else pytest.approx(value, abs=1e-4)
                assert values_of_ranks[name][figure] == expected, (name, figure)


def test_token_counts_of_another_tokenizer_are_refused(lm):
    request = ask("loglikelihood_rolling", ("a b c",), doc={"text": "a b c", "duel_tokens": 4})
    with pytest.raises(DuelError, match=r"counted 4 tokens .* this model's tokenizer has 3.*--metadata tokenizer="):
        lm.loglikelihood_rolling(request)


# ---------------------------------------------------------------- whose evaluation is running


def build(*texts, kind="loglikelihood_rolling"):
    """Requests as the harness builds them for one task."""
    task = SimpleNamespace(config=SimpleNamespace(task="toy"), eval_docs=texts, _instances=ask(kind, *texts))
    Task.build_all_requests(task)
    return task._instances


def test_requests_that_are_built_later_belong_to_the_next_evaluation(folder, monkeypatch):
    """Two models at once, each with its own; a failure, or results that nobody asked for, end none."""
    monkeypatch.setattr(Task, "build_all_requests", lambda task, **options: None)
    one = DuelMDM(pretrained=folder, block=4, device="cpu")
    other = DuelMDM(pretrained=folder, block=4, device="cpu")
    texts = build(("a b c",), ("d e",))
    pairs = build(("a", " b"), kind="loglikelihood")
    one.loglikelihood_rolling(texts)
    first = one.evaluation
    one.loglikelihood(pairs)
    assert one.evaluation is first
    assert first.stats.tasks["toy"].requests == 3

    other.loglikelihood_rolling(texts)
    later = build(("a b c",))
    other.loglikelihood(pairs)
    assert other.evaluation.stats.tasks["toy"].requests == 3  # they were built before

    one.loglikelihood_rolling(later)
    assert one.evaluation is not first
    assert one.evaluation.stats.tasks["toy"].requests == 1
    assert one.evaluation.summary().counts["windows"] == 1
    assert first.summary().counts["windows"] == 3
