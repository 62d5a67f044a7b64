"""Registration: the name is known after installation, nothing heavy is imported for it, and nothing else is lost."""

import copy
import functools
import json
import subprocess
import sys
from importlib.metadata import entry_points

import lm_eval.tasks
import lm_eval.utils
import pytest
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.api import registry
from lm_eval.config.evaluate_config import EvaluatorConfig

from lm_eval_duel import demo
from lm_eval_duel.harness import autoload


def python(code, *flags):
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        "from lm_eval.api.registry import get_model\n"
        "from lm_eval.config.evaluate_config import EvaluatorConfig\n"
        "from lm_eval.utils import make_table\n"
        "print(*(hasattr(each, '__wrapped__') for each in (get_model, EvaluatorConfig.process_tasks, make_table)))\n"
    )
    assert out.split() == ["True"] * 6, "the name is known, and three functions are wrapped"


def test_interpreter_start_imports_small_modules_alone():
    out = python("import sys; print(sorted(m for m in sys.modules if m.startswith('lm_eval')))")
    assert out.strip() == "['lm_eval_duel', 'lm_eval_duel.harness', 'lm_eval_duel.harness.autoload']"


def test_hook_and_entry_points_name_the_same_models():
    declared = {ep.name: ep.value for ep in entry_points(group="lm_eval.models") if ep.value.startswith("lm_eval_duel")}
    assert declared == autoload.MODELS


@pytest.mark.parametrize("before", [pytest.param("", marks=pytest.mark.slow), "import lm_eval.models; "])
def test_without_the_site_hook_it_can_be_installed_by_hand(before):
    """`-S` keeps site hooks from running; site-packages then has to be named."""
    paths = [p for p in sys.path if p]
    out = python(
        f"import sys; sys.path[:0] = {paths!r}; {before}"
        "import lm_eval_duel.harness.autoload as a; a.install(); a.install()\n"
        "import lm_eval.models\n"
        "from lm_eval.api.registry import model_registry\n"
        "import lm_eval.utils, lm_eval.config.evaluate_config, lm_eval._cli.utils\n"
        "left = any(type(finder).__module__ == a.__name__ for finder in sys.meta_path)\n"
        "print('duel-mdm' in model_registry, 'hf' in model_registry, left)\n",
        "-S",
    )
    assert out.split() == ["True", "True", "False"]


@pytest.mark.parametrize("name", ["demo-mdm", "GSAI-ML/LLaDA-8B-Base"])
def test_a_model_name_alone_is_answered_with_what_to_write(name):
    with pytest.raises(ValueError, match=f"pretrained={name},"):
        key_val_to_dict(f"{name},rule=greedy")


@pytest.mark.parametrize("pairs", ["greedy", "rule=greedy,demo-mdm", "data_dir=a/b,lines"])
def test_other_words_without_a_value_keep_lm_evals_error(pairs):
    with pytest.raises(ValueError, match="key=value") as caught:
        key_val_to_dict(pairs)
    assert "pretrained=" not in str(caught.value)


# ---------------------------------------------------------------- releases that read entry points

LOADER = """
import importlib.metadata, sys
from lm_eval.api import registry

skipped, loaded = [], set()

def load_plugins(group, known):
    if group not in loaded:
        loaded.add(group)
        for entry_point in importlib.metadata.entry_points(group=group):
            if entry_point.name in known:
                skipped.append(entry_point.name)
            else:
                known.register(entry_point.name, target=entry_point)

def get_model(name):
    if not len(registry.model_registry):
        import lm_eval.models
    load_plugins("lm_eval.models", registry.model_registry)
    return registry.model_registry.get(name)

registry.load_plugins = load_plugins
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
def test_where_lm_eval_reads_entry_points_the_hook_leaves_it_to_it(by_hand):
    """`lm-eval-duel run` registers by hand, where entry points may not be found; the loader then skips the name."""
    out = python(
        f"{LOADER}\n"
        "import lm_eval.models\n"
        "print('duel-mdm' in registry.model_registry)\n"
        f"if {by_hand}:\n"
        "    from lm_eval_duel.harness import autoload\n"
        "    autoload.register()\n"
        "import lm_eval.utils, lm_eval.config.evaluate_config, lm_eval._cli.utils\n"
        "names = list(registry.model_registry)\n"
        "print(get_model('duel-mdm').__name__, get_model('hf').__name__, names.count('duel-mdm') <= 1)\n"
        "print(skipped, any(type(finder).__module__ == 'lm_eval_duel.harness.autoload' for finder in sys.meta_path))\n"
    )
    skipped = ["duel-mdm"] if by_hand else []
    assert out.splitlines() == ["False", "DuelMDM HFLM True", f"{skipped} False"]


# ---------------------------------------------------------------- lm-eval's errors that can say more


WRAPPED = [(registry, "get_model"), (EvaluatorConfig, "process_tasks"), (lm_eval.utils, "make_table")]


@pytest.fixture
def wrapped_anew(monkeypatch):
    """lm-eval's functions, wrapped by those of this module, as the start of this interpreter has done once."""
    for owner, name in WRAPPED:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    autoload.explain_models()
    autoload.prepare_tasks()
    autoload.add_our_table()


def tasks_of(name, folder):
    return EvaluatorConfig(tasks=[name], include_path=folder).process_tasks()


CALLS = {  # by what the error says
    "Did you mean 'duel-mdm'?": lambda folder: registry.get_model("duel_mdm"),
    "Supported model names": lambda folder: registry.get_model("nothing-like-it"),
    "--include_path $(lm-eval-duel": lambda folder: tasks_of("sotu", folder),
    "no-such-folder": lambda folder: tasks_of("other", "no-such-folder"),
    "no_such_file.yaml": lambda folder: tasks_of("mine", folder),
    "Did you mean my_answers?": lambda folder: tasks_of("my_answer", folder),
}


def test_lm_evals_own_errors_name_what_is_ours(wrapped_anew, tmp_path, monkeypatch, subtests):
    (tmp_path / "mine.yaml").write_text("include: no_such_file.yaml\ntask: mine")
    (tmp_path / "answers.yaml").write_text("task: my_answers\noutput_type: loglikelihood")
    manager = functools.partialmethod(lm_eval.tasks.TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks.TaskManager, "__init__", manager)  # its own 14,000 tasks take seconds to index
    for part, call in CALLS.items():
        with subtests.test(part):
            with pytest.raises(ValueError) as error:
                call(str(tmp_path))
            message = str(error.value)
            assert part in message
            assert ("Did you mean" in message) == ("Did you mean" in part), "other errors are what they were"


# ---------------------------------------------------------------- the table of results


def test_lm_evals_table_is_followed_by_one_of_kinds_and_errors(wrapped_anew):
    """For results of our models, below the last table that lm-eval prints."""
    path, *_ = sorted((demo.FOLDER / "results").glob("demo-bd/results_*.json"))
    mine = json.loads(path.read_text())
    config = mine["config"]
    stranger = copy.deepcopy(mine)
    del stranger["config"]["duel"]
    broken = {**mine, "config": {**config, "duel": {**config["duel"], "tasks": 3}}}
    grouped = {**mine, "groups": {"all": mine["results"]["sotu"]}}

    make_table = lm_eval.utils.make_table
    plain = make_table(stranger)
    assert "fingerprint" not in plain
    assert make_table(broken) == plain
    assert make_table(grouped) == plain, "below the last table only"
    for last in (make_table(mine), make_table(grouped, "groups")):
        assert last.count("| kind") == 1
        assert last.index("fingerprint") > last.index("| kind") > last.index("n-shot")
