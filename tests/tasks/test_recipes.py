"""Every recipe parses, says what its name says, and one of each kind runs, with demo networks and made-up text."""

import csv
import json
import re
from dataclasses import fields
from pathlib import Path

import dit_reference
import pytest
import yaml
from harness_runs import lm_eval, read
from lm_eval import simple_evaluate
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from lm_eval_duel import tasks
from lm_eval_duel.cli.main import main
from lm_eval_duel.cli.where import where
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import Options
from lm_eval_duel.tasks import corpora, metadata, task_folder

FOLDER = Path(where("recipes"))
NAMES = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))
METADATA = {"length", "insert_eos", "framed", "remainder"}  # beside those that name a model or a local copy
STOCK = {"wikitext"}  # a task of the harness itself
NAMED = re.compile(r"(left_to_right|greedy|margin|threshold)_(k|mu)([\d.]+)$")


def recipe(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def known():
    """The names of our tasks and groups."""
    return set(TaskManager(include_path=task_folder(), include_defaults=False).all_tasks)


def test_every_recipe_is_what_its_name_says(known, subtests):
    for name in NAMES:
        with subtests.test(name):
            is_what_its_name_says(name, recipe(name), known)
            has_the_convention_of_the_published_figure(name, recipe(name))


def is_what_its_name_says(name, found, known):
    assert set(found) <= {field.name for field in fields(EvaluatorConfig)}
    assert set(found["tasks"]) <= known | STOCK
    metadata = found.get("metadata", {})
    assert set(metadata) <= METADATA
    wrapped = all(task.endswith(("_wrapped", "_in_domain")) for task in found["tasks"])
    assert wrapped == (set(metadata) == METADATA)  # conventions are said, not left to defaults
    if found["model"] == "hf":
        assert name == "8b/llama3"
        return
    assert found["model"] == "duel-mdm"
    options = Options.parse(found["model_args"])
    table, last = name.split("/")[0], name.split("/")[-1]
    said = options.pretrained.lower()
    assert "lm1b" in said if table == "lm1b" else "/" in said
    if table == "samplers":
        assert said.endswith("bd3lm-owt-block_size16")
    elif table == "8b":
        length = 2048 if last == "llama3_windows" else int(last.rsplit("_", 1)[1])
        assert last.split("_")[0] in said.replace("-", "") and options.max_length == length
    else:
        assert last.split("_")[0] in said
    if block := re.search(r"block(\d+)", last):
        assert said.endswith(block.group(1))
    trained = int(re.search(r"block(?:_size)?(\d+)$", said).group(1)) if "bd3lm" in said else None
    kind = (
        "oracle" if table == "oracle" else next((k for k in ("elbo", "ar", "llama3") if k in last.split("_")), "duel")
    )
    assert options.estimator == {"llama3": "ar"}.get(kind, kind)
    if kind == "duel":
        rule, parameter, value = NAMED.search(last).groups() if table == "samplers" else ("greedy", "k", "1")
        assert str(options.rule) == str(Options.parse({"rule": rule, parameter: value}).rule)
        assert options.block == (trained or (32 if table == "8b" else 4))
        assert trained or options.grid == ("target" if table == "8b" else "row")
    if kind == "elbo":
        assert options.estimator_args["mc_samples"] == (128 if table == "8b" else 1)
        assert options.estimator_args["elbo_block"] == trained
        form = "count" if table == "8b" else "score_entropy" if "sedd" in said else "ratio"
        assert (options.estimator_args["elbo_form"], options.estimator_args["elbo_eps"]) == (
            form,
            0.0 if table == "8b" else 0.001,
        )
    if kind == "oracle":
        assert options.block == trained == 4
        assert (
            "+".join(map(str, options.estimator_args["lattice_rules"]))
            == "left_to_right:k=1+greedy:k=1+margin:k=1+threshold:mu=0.95"
        )
    assert options.dtype == ("bfloat16" if table == "8b" else "float32")


def has_the_convention_of_the_published_figure(name, found):
    arguments, metadata = found["model_args"], found.get("metadata", {})
    table, last = name.split("/")[0], name.split("/")[-1]
    if table == "8b":
        assert found["tasks"] == ["wikitext", "duel_lambada", "duel_ag_news"]
        assert arguments.get("bos") == {"llama3": None, "llama3_windows": "first"}.get(last, "none")
        return
    assert metadata == {
        "length": 128 if table == "lm1b" else 1024,
        "insert_eos": table in ("owt", "lm1b"),
        "framed": not (table == "owt" and "bd3lm" in last),
        "remainder": "official",
    }
    scored = table == "owt" and last.split("_")[0] in ("mdlm", "sedd")
    published = "scored" if scored else "given" if last.endswith(("ar", "elbo")) else "official"
    if "/given/" not in name:
        assert arguments["bos"] == published
        assert published == "given" or f"{table}/given/{last}" in NAMES
        return
    beside = recipe(name.replace("/given/", "/"))
    assert beside["model_args"]["bos"] == published != "given"
    assert found == {**beside, "model_args": {**beside["model_args"], "bos": "given"}}


def test_every_recipe_begins_with_its_table_and_measures_a_published_figure():
    for name in NAMES:
        first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# The corrected convention" if "/given/" in name else "# ")
    with (FOLDER / "published.csv").open(encoding="utf-8") as file:
        figures = list(csv.DictReader(file))
    measured = {name for figure in figures for name in figure["recipes"].split()}
    assert measured == {name for name in NAMES if "/given/" not in name} and len(figures) > 100


def test_metadata_is_what_the_tasks_read():
    assert set(metadata.READERS) == METADATA | {"data_dir", "rows", "bos", "files", "field", "lines", "scoring"}


def test_where_the_recipes_are(capsys):
    main(["tools", "where", "recipes"])
    assert Path(capsys.readouterr().out.strip()) == FOLDER and len(NAMES) > 80
    assert not Path(task_folder()).is_relative_to(FOLDER) and not FOLDER.is_relative_to(task_folder())


# ---------------------------------------------------------------- one of each kind, end to end


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A made-up local copy of every data set: 12 rows each, with the columns that it has."""
    folder = tmp_path_factory.mktemp("copies")
    text = "The state of the union is strong , and the people of this Nation are free to say so ."
    words = text.split()
    for name, corpus in corpora.CORPORA.items():
        lines = [" ".join(words[n % 5 :] + words[: n % 7]) for n in range(12)]
        rows = [dict.fromkeys(corpus.columns, f" = Page {n} = \n {line}") for n, line in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


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
    "owt/mdlm_duel": "demo-mdm",
    "owt/bd3lm_block4_elbo": "demo-bd",
    "owt/given/bd3lm_block4_duel": "demo-bd",
    "owt/sedd_elbo": "sedd",
    "owt/sedd_duel": "sedd",
    "lm1b/bd3lm_block4_duel": "demo-bd",
    "zero_shot/sedd_duel": "sedd",
    "samplers/threshold_mu0.15": "demo-bd",
    "samplers/given/margin_k2": "demo-bd",
    "oracle/bd3lm_block4": "demo-bd",
    "8b/llada_elbo_1028": "demo-mdm",
    "8b/llada_duel_1028": "demo-mdm",
    "8b/llama3": "demo-ar",
    "8b/llama3_windows": "demo-ar",
}


@pytest.mark.parametrize(("name", "network"), KINDS.items())
def test_one_of_each_kind_runs(name, network, copies, tiny_sedd, tmp_path):
    pretrained = tiny_sedd if network == "sedd" else where(network) if name == "8b/llama3" else network
    length = dit_reference.LENGTH if network == "sedd" else 64
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(demo(name, recipe(name), pretrained, copies, length)))
    config = EvaluatorConfig.from_config(file)
    manager = TaskManager(include_path=task_folder(), include_defaults=False, metadata=config.metadata)
    results = simple_evaluate(
        model=config.model,
        model_args=config.model_args,
        tasks=config.tasks,
        task_manager=manager,
        metadata=config.metadata,
        limit=config.limit,
        batch_size=config.batch_size,
        device=config.device,
        bootstrap_iters=0,
    )
    if network == "sedd":  # its words are all unknown; what counts is that it runs
        length = None
    metric = "word_perplexity,none" if name.startswith("8b") else "token_perplexity,none"
    values = [result[metric] for result in results["results"].values() if metric in result]
    assert values and all(1 < value < 1e12 for value in values)
    if config.model == "duel-mdm" and length and not name.startswith("8b"):
        positions = {"scored": 64, "given": 63, "official": 63}[config.model_args["bos"]]
        for task in results["config"]["duel"]["tasks"].values():
            assert task["tokens"] == positions * task["documents"]


def test_a_misspelt_convention_is_refused(copies):
    found = demo("owt/ar", recipe("owt/ar"), "demo-ar", copies)
    with pytest.raises(DuelError, match="Did you mean official"):
        tasks.wrapped("ag_news", **found["model_args"], **{**found["metadata"], "remainder": "oficial"})


@pytest.mark.slow
def test_the_command_line_takes_a_recipe(copies, tmp_path):
    """`run --config`, as docs/paper_tables.md has it, with the tasks known."""
    name = "oracle/bd3lm_block4"
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(demo(name, recipe(name), "demo-bd", copies)))
    out = tmp_path / "out"
    lm_eval("run", "--config", str(file), "--output_path", str(out), "--log_samples", module="lm_eval_duel")
    results, samples = read(out, "duel_ag_news_wrapped")
    (task,) = results["config"]["duel"]["tasks"].values()
    assert len(samples) == 2 and task["tokens"] == 126
    assert results["configs"]["duel_ag_news_wrapped"]["metadata"]["remainder"] == "official"
