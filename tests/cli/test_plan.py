"""`plan`: its figures are those of the counts, of the task's windows and of the documentation."""

import json
import shlex

import pages
import pytest
from decoder_reference import CASES, write

from lm_eval_duel.cli.main import main
from lm_eval_duel.cli.plan import parse, plan, table
from lm_eval_duel.errors import UsageError

LLADA = "pretrained=GSAI-ML/LLaDA-8B-Base,max_length=2048"


def figures(text):
    return plan(parse(shlex.split(text)))


def test_the_documented_table_is_what_the_command_prints(capsys):
    page = pages.read("docs/running.md")
    words, [text] = shlex.split(pages.blocks(page, "bash")[1]), pages.blocks(page, "text")
    assert words[:2] == ["lm-eval-duel", "plan"]
    main(words[1:])
    assert capsys.readouterr().out == text


def test_estimates_are_aligned_like_numbers():
    got = figures(f"--model_args {LLADA},rule=threshold:mu=0.9 --tokens 2048") | {"upper_bound": False}
    head, exact = [line for line in table(got).splitlines() if line.startswith(("method", "exact"))]
    assert exact[: head.index("NFE") + len("NFE")].endswith(" ~ 2,048")


def test_a_published_setting_by_hand():
    """LLaDA-8B at block 32: 2 x 7.0 B products a position, and attention to 2,048 keys."""
    got = figures(f"--model_args {LLADA} --tokens 20480 --documents 10")
    assert (got["windows"], got["tokens"], got["blocks"], got["upper_bound"]) == (10, 20480, 640, False)
    exact, dual, prefix = (got["methods"][name] for name in ("exact", "dual", "prefix"))
    assert exact["nfe"] == exact["rows"] == 20480 and exact["token_rows"] == 20480 * 2048
    assert dual["token_rows"] == 640 * (2048 + 31 * 32)
    assert prefix["token_rows"] == 10 * sum(2048 + 31 * (2048 - start) for start in range(0, 2048, 32))
    layer = 4 * 4096**2 + 3 * 4096 * 12288
    head = 126464 * 4096 * 640 * 32 * 33 // 2
    assert exact["flops"] == 2 * (exact["token_rows"] * (32 * layer + 2 * 2048 * 32 * 4096) + head)
    assert exact["hours"] == pytest.approx(exact["flops"] / (0.5 * 989e12) / 3600)
    assert dual["kept_bytes"] == 2 * 32 * 4096 * 2048 * 2 and exact["kept_bytes"] == 0


def test_an_adapter_may_make_another_network():
    got = figures(f"--model_args {LLADA},peft=SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --tokens 2048")
    assert (got["family"], got["block"], set(got["methods"])) == ("d2f-llada", 32, {"exact", "elbo 128"})
    assert got["methods"]["exact"]["token_rows"] == 2016 + 2048 * 32  # clean blocks once, then 32 positions a step


def test_a_sampler_that_reveals_first_tokens_alone(tmp_path):
    """One block of 4 takes 1 + 3 steps under k=1 and 1 + 2 under k=2; its bound needs the other sampler."""
    path = write(tmp_path, CASES["nemotron-labs-diffusion"])[0]
    for k, steps in ((1, 4), (2, 3)):
        got = figures(f"--model_args pretrained={path},rule=greedy,k={k} --tokens 4")
        assert (got["rule"], set(got["methods"])) == (f"greedy:k={k}:seed_first=True", {"exact"})
        assert got["methods"]["exact"]["nfe"] == steps
    other = figures(f"--model_args pretrained={path},first_token=block --tokens 4")
    assert set(other["methods"]) == {"exact", "elbo 128"} and other["rule"] == "greedy:k=1"


def test_documents_of_equal_length_are_cut_like_texts():
    """Dream has one visible token in each window: 100 tokens are 31 + 31 + 31 + 7."""
    got = figures("Dream-org/Dream-v0-Base-7B --model_args max_length=32 --tokens 205 --documents 2")
    assert (got["windows"], got["tokens"], got["length"], got["seed_first"]) == (8, 205, 32, True)


def test_a_task_is_counted_with_its_tokenizer(capsys):
    main(["plan", "--model_args", "pretrained=demo-mdm,rule=greedy,k=2,block=32", "--tasks", "sotu", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert (got["documents"], got["tokens"], got["windows"]) == (36, 4053, 36)
    assert got["methods"]["exact"]["nfe"] == got["methods"]["exact"]["rows"] < 4053 / 2 + 141
    assert set(got["methods"]) == {"exact", "prefix", "dual", "two_phase 0.05", "elbo 128"}


def test_what_a_rule_makes_of_the_plan(capsys):
    got = figures(f"--model_args {LLADA},rule=klass,mu=0.9,nu=0.1,kl=authors,across=true --tokens 2048")
    assert set(got["methods"]) == {"exact", "elbo 128"}  # its history outlives blocks: no caches
    main(["plan", *shlex.split(f"--model_args {LLADA},rule=quota,steps=16,block=32 --tokens 2048")])
    printed = capsys.readouterr().out
    assert "1,024" in printed and "<=" not in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--tokens 5 --tasks sotu", "--tasks NAMES, or --tokens N"),
        ("--tokens 3 --documents 4", "--documents 4"),
        ("--tasks none/*.txt", "matches no file"),
    ],
)
def test_wrong_arguments(words, named):
    with pytest.raises(UsageError, match=named):
        parse(shlex.split(words))
