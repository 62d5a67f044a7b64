"""lm-eval is changed only by harness/patches.py, only when a model is loaded, and once."""

import subprocess
import sys

import pytest

UNTOUCHED = """
import importlib, pkgutil, sys, types
import lm_eval.api.model, lm_eval.api.task, lm_eval.caching.cache, lm_eval.evaluator, lm_eval.models, lm_eval.loggers
import lm_eval.tasks

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "lm_eval":
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__.split(".")[0] == "lm_eval":
                    found |= {(name, key, part): id(member) for part, member in vars(value).items()}
    return found

before = attributes()
import lm_eval_duel
names = [module.name for module in pkgutil.walk_packages(lm_eval_duel.__path__, "lm_eval_duel.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert "lm_eval_duel.harness.patches" in sys.modules and len(names) > 80, names
after = attributes()
print({key for key, value in before.items() if after.get(key) != value and key[-1] not in IMPORTED})

from lm_eval.loggers import EvaluationTracker  # as the command has it, before it makes a model

lm_eval_duel.harness.patches.apply()
lm_eval_duel.harness.patches.apply()
tracker = EvaluationTracker()
tracker.save_results_aggregated(results={"results": {}}, samples=None)
arguments = {"system_instruction": None, "chat_template": None, "fewshot_as_multiturn": False}
for model_args in ({"rule": "greedy"}, {"pretrained": "a/b"}):
    tracker.general_config_tracker.log_experiment_args(model_source="duel-mdm", model_args=model_args, **arguments)
    print(tracker.general_config_tracker.model_name_sanitized)
"""
IMPORTED = "IMPORTED = {'__builtins__'}\n"


@pytest.mark.slow
def test_importing_our_modules_leaves_lm_eval_untouched():
    done = subprocess.run([sys.executable, "-c", IMPORTED + UNTOUCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("set()\n")
    assert done.stdout.splitlines()[1:] == ["demo-mdm", "a__b"]


def test_git_is_not_asked_outside_a_repository(tmp_path, monkeypatch, capfd):
    from lm_eval import evaluator

    from lm_eval_duel.harness import patches

    patches.apply()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert evaluator.get_git_commit_hash() is None
    assert capfd.readouterr().err == ""
    subprocess.run(["git", "init", "-q"], check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "First"]
    subprocess.run(commit, check=True)
    described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
    assert evaluator.get_git_commit_hash() == described.stdout.strip()
