"""lm-eval is changed only by harness/patches.py, only when a model is loaded, and once."""

import math
import subprocess
import sys

import pytest
from harness_requests import IS_0_5
from lm_eval.api.task import Task

from lm_eval_duel.harness import patches
from lm_eval_duel.tasks.metrics import log_likelihood

UNTOUCHED = """
import importlib, pkgutil, sys, types
import lm_eval.api.model, lm_eval.api.task, lm_eval.caching.cache, lm_eval.evaluator, lm_eval.models, lm_eval.utils
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

from lm_eval.utils import make_table  # as the command has it, before it makes a model

lm_eval_duel.harness.patches.apply()
lm_eval_duel.harness.patches.apply()
results = {"results": {"toy": {"m,none": 1.0}}, "versions": {"toy": 1}, "n-shot": {"toy": 0}}
print(make_table({**results, "config": {"duel": {"errors": ["mine"]}}}, sort_results=True))
"""
IMPORTED = "IMPORTED = {'__builtins__'}\n"


@pytest.mark.slow
def test_importing_our_modules_leaves_lm_eval_untouched():
    done = subprocess.run([sys.executable, "-c", IMPORTED + UNTOUCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("set()\n")
    assert done.stdout.rstrip().endswith("|\n\nmine"), "errors stand under the table of results"


@pytest.mark.skipif(not IS_0_5, reason="lm-eval 0.4.13 takes the first answer itself")
def test_answers_to_padding_requests_are_not_scored():
    """The harness repeats a rank's last request until all ranks have equally many; the answers are appended to it."""
    patches.apply()
    task = Task.from_config(
        {
            "task": "toy",
            "output_type": "loglikelihood_rolling",
            "test_split": "test",
            "doc_to_text": "",
            "doc_to_target": "text",
            "process_results": lambda doc, results: {"bits_per_byte": (log_likelihood(results), len(doc["text"]))},
            "metric_list": [{"metric": "bits_per_byte"}],
        }
    )
    task.dataset = {"test": [{"text": "ab"}, {"text": "cd"}]}
    task.build_all_requests()
    for request, copies in zip(task.instances, (1, 3), strict=True):
        request.resps += [(-2 * math.log(2), False)] * copies
    task.process_instances()
    assert task.aggregate(bootstrap_iters=0)[0]["bits_per_byte,none"] == pytest.approx(1)


def test_functions_of_a_yaml_file_are_imported(tmp_path):
    """0.5.0.dev1 reads `!function metrics.mine` in a file that --tasks names as the text FOLDER/metrics.mine."""
    (tmp_path / "metrics.py").write_text("def mine(doc, results):\n    return 7\n")
    text = str(tmp_path / "metrics.mine")
    config = {"process_results": text, "metric_list": [{"metric": "acc", "aggregation": text}], "dataset_path": text}
    read = patches._with_functions({**config, "custom_dataset": "lm_eval_duel.tasks.sotu"})
    assert read["process_results"](None, None) == read["metric_list"][0]["aggregation"](None, None) == 7
    assert read["dataset_path"] == text, "a path, not a function"
    assert read["metric_list"][0]["metric"] == "acc"
    assert read["custom_dataset"] == "lm_eval_duel.tasks.sotu"


@pytest.mark.skipif(not IS_0_5, reason="lm-eval 0.4.13 calls the model's own gather_object")
def test_statistics_of_all_ranks_are_gathered():
    """0.5.0.dev1 gathers itself, past the model, whose statistics travel along with what is gathered."""
    from lm_eval import evaluator

    class Model:
        def gather_object(self, obj, dst=0):
            return [obj, "and statistics"]

    patches.apply()
    model = Model()
    patches.answering.add(model)
    assert evaluator.torch_gather_object({}, rank=0, world_size=2, dst=0) == [{}, "and statistics"]
    del model  # another model's evaluation
    assert evaluator.torch_gather_object({}, rank=0, world_size=1, dst=0) == [{}]
