"""Registration: the name is known after installation, nothing heavy is imported for it, and nothing else is lost."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from lm_eval_duel.harness import autoload


def python(code, *flags):
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_hook_registers_the_model_by_name_only():
    out = python(
        "import sys\n"
        "assert 'lm_eval' not in sys.modules and 'torch' not in sys.modules\n"
        "import lm_eval.models\n"
        "from lm_eval.api.registry import model_registry\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert 'lm_eval_duel.harness.lm' not in sys.modules\n"
        "print('duel-mdm' in model_registry, 'hf' in model_registry, 'vllm' in model_registry)\n"
    )
    assert out.split() == ["True", "True", "True"]


def test_interpreter_start_imports_small_modules_alone():
    out = python("import sys; print(sorted(m for m in sys.modules if m.startswith('lm_eval')))")
    assert out.strip() == "['lm_eval_duel', 'lm_eval_duel.harness', 'lm_eval_duel.harness.autoload']"


def test_hook_and_entry_points_name_the_same_models():
    declared = {ep.name: ep.value for ep in entry_points(group="lm_eval.models") if ep.value.startswith("lm_eval_duel")}
    assert declared == autoload.MODELS


@pytest.mark.parametrize("before", ["", "import lm_eval.models; "])
def test_without_the_site_hook_it_can_be_installed_by_hand(before):
    """`-S` keeps site hooks from running; site-packages then has to be named."""
    paths = [p for p in sys.path if p]
    out = python(
        f"import sys; sys.path[:0] = {paths!r}; {before}"
        "import lm_eval_duel.harness.autoload as a; a.install(); a.install()\n"
        "import lm_eval.models\n"
        "from lm_eval.api.registry import model_registry\n"
        "left = any(type(finder).__module__ == a.__name__ for finder in sys.meta_path)\n"
        "print('duel-mdm' in model_registry, 'hf' in model_registry, left)\n",
        "-S",
    )
    assert out.split() == ["True", "True", "False"]
