"""Every recipe parses, says what its name says, and one of each kind runs, with demo networks and made-up text."""

import re
from dataclasses import fields
from pathlib import Path

import dit_reference
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

import benchmarks
from lm_eval_duel.cli.where import where
from lm_eval_duel.options import Options
from lm_eval_duel.tasks import task_folder

FOLDER = Path(where("recipes"))
NAMES = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))
METADATA = {"length", "insert_eos", "framed", "remainder"}  # beside those that name a model or a local copy
STOCK = {"wikitext"}  # a task of the harness itself


def recipe(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def test_every_recipe_says_its_conventions_with_names_that_are_known():
    known = {*TaskManager(include_path=task_folder(), include_defaults=False).all_tasks, *STOCK}
    for name in NAMES:
        found = recipe(name)
        assert set(found) <= {field.name for field in fields(EvaluatorConfig)} and set(found["tasks"]) <= known, name
        wrapped = all(task.endswith(("_wrapped", "_in_domain")) for task in found["tasks"])
        assert set(found.get("metadata", {})) == (METADATA if wrapped else set()), name
        if found["model"] != "hf":
            options = Options.parse(found["model_args"])
            block = re.search(r"block(?:_size)?(\d+)$", options.pretrained)
            assert not block or options.block in (int(block[1]), "auto", None), name


# ---------------------------------------------------------------- one of each kind, end to end


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return benchmarks.write(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def tiny_sedd(tmp_path_factory):
    """SEDD's files with random weights, and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("sedd")
    dit_reference.tiny_mdlm(folder)
    (folder / "model.safetensors").unlink()
    return dit_reference.write(folder, "sedd")[0]


def demo(name, found, pretrained, copies, length=64):
    """The recipe with a bundled network, local text, short rows and no more than two of them."""
    arguments = {**found["model_args"], "pretrained": pretrained, "dtype": "float32"}
    arguments.pop("tokenizer", None)
    if "mc_samples" in arguments:
        arguments["mc_samples"] = 2
    if "max_length" in arguments:
        arguments["max_length"] = length
    if pretrained == "demo-bd":
        arguments |= {key: 4 for key in ("block", "elbo_block") if key in arguments}
    metadata = {**found.get("metadata", {}), "data_dir": str(copies), "rows": 12}
    if "length" in metadata:
        metadata["length"] = length
    kept = [task for task in found["tasks"] if task not in STOCK]
    return {**found, "model_args": arguments, "metadata": metadata, "tasks": kept, "limit": 2, "device": "cpu"}


KINDS = {
    "owt/ar": "demo-ar",
    "owt/mdlm_elbo": "demo-mdm",
    "owt/sedd_elbo": "sedd",
    "lm1b/bd3lm_block4_duel": "demo-bd",
    "8b/llada_elbo_1028": "demo-mdm",
    "8b/llama3_windows": "demo-ar",
}


@pytest.mark.parametrize(("name", "network"), KINDS.items())
def test_one_of_each_kind_runs(name, network, copies, tiny_sedd, tmp_path):
    pretrained = tiny_sedd if network == "sedd" else network
    length = dit_reference.LENGTH if network == "sedd" else 64
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(demo(name, recipe(name), pretrained, copies, length)))
    config = EvaluatorConfig.from_config(file)
    options = {name: getattr(config, name) for name in ("model", "model_args", "tasks", "metadata", "limit")}
    manager = TaskManager(include_path=task_folder(), include_defaults=False, metadata=config.metadata)
    results = simple_evaluate(**options, task_manager=manager, device="cpu", bootstrap_iters=0)
    if network == "sedd":  # its words are all unknown; what counts is that it runs
        length = None
    metric = "word_perplexity,none" if name.startswith("8b") else "token_perplexity,none"
    values = [result[metric] for result in results["results"].values() if metric in result]
    assert values and all(1 < value < 1e12 for value in values)
    if config.model == "duel-mdm" and length and not name.startswith("8b"):
        positions = {"scored": 64, "given": 63, "official": 63}[config.model_args["bos"]]
        for task in results["config"]["duel"]["tasks"].values():
            assert task["tokens"] == positions * task["documents"]
