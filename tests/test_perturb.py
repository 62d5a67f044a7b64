"""LM_EVAL_DUEL_PERTURB changes what it says it changes, so that a green run of that leg means something."""

import re

import perturb
import pytest
import torch
from pages import ROOT

from lm_eval_duel.denoisers.cached import steering


@pytest.fixture
def installed():
    before = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
    perturb.install()
    yield
    torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention = before


def test_last_bits_change_with_the_shape(installed):
    x, weight = torch.randn(2, 9, 32), torch.randn(16, 32)
    right = perturb.LINEAR(x, weight)
    found = torch.nn.functional.linear(x, weight)
    assert 1e-7 < ((found - right) / right).abs().max() < 4e-7 and (found != right).all()
    assert torch.equal(found, torch.nn.functional.linear(x, weight)), "one machine's rounding"
    signs, alone = (found > right) == (right > 0), perturb.factors((1, 9, 16)) > 1
    assert not torch.equal(signs[:1], alone), "a row alone is rounded as in a batch"
    assert torch.equal(
        torch.nn.functional.linear(x.double(), weight.double()), perturb.LINEAR(x.double(), weight.double())
    )
    assert torch.nn.Linear(4, 3)(torch.randn(2, 4)).requires_grad


def test_attention_is_changed_and_still_recognised(installed):
    q = torch.randn(1, 2, 5, 4)
    with steering._Listening() as heard:
        found = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert len(heard.own) == 1 and not torch.equal(found, perturb.ATTENTION(q, q, q))


def test_the_leg_names_what_exists():
    legs = re.findall(
        r"pytest tests/\{(.+)\}", (ROOT / ".ci" / "run").read_text().split("export LM_EVAL_DUEL_PERTURB=1")[1]
    )
    assert len(legs) == 3
    for name in ",".join(legs).split(","):
        assert (ROOT / "tests" / name).exists()
