"""The text side of the harness works without lm-eval: the library uses it."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules["lm_eval"] = None  # importing it raises ImportError
from lm_eval_duel import denoisers
from lm_eval_duel import Duel
from lm_eval_duel.harness.generation import key_of
from lm_eval_duel.text.generation import Generator, Settings
from lm_eval_duel.text.text import Text

tokenizer = denoisers.load_tokenizer({"tokenizer": "demo-mdm"})
duel = Duel(denoisers.load("demo-mdm", device="cpu", tokenizer=tokenizer), "greedy", 8)
for scheme in ("independent", "harness"):
    text = Text(tokenizer, duel.denoiser, scheme, duel.block)
    (window,) = text.windows("We the people")
    assert duel.log_prob([window])[0].log_prob < 0
generator = Generator(duel.estimator, text, Settings.from_arguments({"max_gen_toks": 4}), seed=0)
((_, generated, _, sample),) = generator.stream([generator.context("We the")], [key_of("t", 0, 0, 0)])
assert isinstance(generated, str) and len(sample.tokens) == 4
"""


@pytest.mark.slow  # library/test_library.py blocks lm_eval, too
def test_text_and_generation_need_no_lm_eval():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
