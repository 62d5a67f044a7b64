"""README and docs: Python runs, commands parse, links resolve, and tables are those of the code."""

import importlib
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import results
from lm_eval._cli import HarnessCLI
from pages import PAGES, ROOT, anchors, blocks, read

from benchmarks import options
from benchmarks.__main__ import main as measure
from lm_eval_duel.cli import listing
from lm_eval_duel.cli.main import COMMANDS, main
from lm_eval_duel.demo import FOLDER as BUNDLED
from lm_eval_duel.denoisers import checkpoint, recognition
from lm_eval_duel.denoisers.hf import families
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.rules import RULES

GENERATED = [("docs/model_args.md", "args"), ("docs/rules.md", "rules"), ("docs/estimators.md", "estimators")]
GENERATED += [("docs/checkpoints.md", "refused"), ("task_configs/benchmarks/README.md", "metadata")]
RUN_ELSEWHERE = {"adding.md": "test_adding.py"}  # pages whose code is followed step by step
TRIED = [page for page in PAGES if page.name not in RUN_ELSEWHERE]
OTHER_PROGRAMS = ("pip", "pytest", "accelerate", "torchrun")
HUB = r"(GSAI-ML|airkingbd|facebook|s-sahoo)/|examples/paper"  # what needs the hub
SMALLER = {  # more arguments, for a short run
    "lm-eval-duel run": ["--limit", "1", "--device", "cpu"],
    "lm-eval-duel inspect": ["--limit", "1", "--device", "cpu"],
    "lm-eval-duel audit": ["--device", "cpu"],
    "python examples/generation_quality.py": ["--samples", "2", "--length", "16"],
}


def page_id(page):
    return str(page.relative_to(ROOT)) if isinstance(page, Path) else None


# ---------------------------------------------------------------- Python


def has_python(page):
    return bool(blocks(page.read_text(encoding="utf-8"), "python"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(has_python, TRIED)], ids=page_id)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "page"}
    for n, code in enumerate(blocks(page.read_text(encoding="utf-8"), "python")):
        exec(compile(code, f"{page.name}, Python block {n}", "exec"), space)


# ---------------------------------------------------------------- commands


def unrolled(block):
    """The lines of a block of commands, those in a `for` loop with the first and with the last values."""
    return re.sub(r"\bfor .*?\bdone(; done)*", first_and_last, block, flags=re.DOTALL).strip().splitlines()


def first_and_last(loop):
    heads = re.findall(r"for (\w+) in (.*?); do", loop[0])
    body = re.sub(r"for \w+ in .*?; do|(; )?\bdone\b", "", loop[0]).strip()
    lines = []
    for end in (0, -1):
        values = {name: words.split()[end] for name, words in heads}
        lines.append(re.sub(r"\$(\w+)", lambda name, values=values: values[name[1]], body))
    return "\n".join(lines)


def command_lines(page):
    lines = []
    for block in blocks(page.read_text(encoding="utf-8"), "bash"):
        lines += unrolled(block.replace("\\\n", " "))
    return lines


WITH_COMMANDS = [*filter(command_lines, TRIED)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that the commands name."""
    (tmp_path / "task_configs").symlink_to(ROOT / "task_configs")
    for folder in ("results", "results_ar"):
        results.hf(tmp_path / folder)
    results.trace(tmp_path / "demo-bd.jsonl", results.ours(tmp_path / "other"), [])
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "notes.txt").write_text("The state of the union is strong.")
    (tmp_path / "articles").mkdir()
    (tmp_path / "articles" / "one.jsonl").write_text('{"text": "We the people."}\n{"text": "My fellow citizens,"}\n')
    (tmp_path / "gaps.jsonl").write_text(
        '{"prefix": "The state of", "target": " the union is", "suffix": " strong."}\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=page_id)
def test_commands_parse(page, place, monkeypatch, subtests):
    for line in command_lines(page):
        with subtests.test(line):
            parse(line, monkeypatch)


def folder(match):
    """The path that `lm-eval-duel list folders NAME` prints."""
    return dict(listing.folder_list())[f"`{match[1]}`"]


def parse(line, monkeypatch):
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: None)
    line = re.sub(r"\$\(lm-eval-duel list folders ([\w-]+)\)", folder, line)
    assert "$(" not in line
    for command in line.split(" && "):
        words = shlex.split(command, comments=True)
        if "-m" in words:  # python -m, accelerate launch ... -m
            words = words[words.index("-m") + 1 :]
        if words[0] == "lm_eval":
            importlib.import_module("lm_eval_duel.cli.run").main(words[1:])
        elif words[0] in ("lm_eval_duel", "lm-eval-duel"):
            module = importlib.import_module(f"lm_eval_duel.{COMMANDS[words[1]][0]}")
            getattr(module, "parse" if hasattr(module, "parse") else "main")(words[2:])
        elif words[0] == "benchmarks":
            options.parse(words[1:])
        elif words[0] == "python":
            monkeypatch.syspath_prepend(str((ROOT / words[1]).parent))  # as `python FILE` does
            runpy.run_path(str(ROOT / words[1]))["parse"](words[2:])
        else:
            assert words[0] in OTHER_PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=page_id)
def test_commands_run(page, place, monkeypatch, subtests):
    """On one document, where the model is bundled; CI runs the README's commands as they are printed."""
    shutil.rmtree("results")
    if "--output_path results" not in page.read_text(encoding="utf-8"):
        shutil.copytree(BUNDLED / "results", "results")
    for line in command_lines(page):
        if re.search(HUB, line) or line.split()[0] in OTHER_PROGRAMS:
            continue
        line = re.sub(r"\$\(lm-eval-duel list folders ([\w-]+)\)", folder, line)
        words = shlex.split(line, comments=True)
        if words[0] == "lm_eval":
            words = ["lm-eval-duel", "run", *words[1:]]
        small = SMALLER.get(" ".join(words[:2]), [])
        if traced := re.search(r"trace=([\w.-]+)", line):
            Path(traced[1]).unlink(missing_ok=True)
        with subtests.test(line):
            if "-m" in words:
                assert words[:3] == ["python", "-m", "benchmarks"]
                measure([*words[3:], "--windows", "1", "--length", "16"])
            elif words[0] == "python":
                monkeypatch.setattr("sys.argv", [*words[1:], *small])
                monkeypatch.syspath_prepend(str((ROOT / words[1]).parent))
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            else:
                main([*words[1:], *small])


# ---------------------------------------------------------------- links


def test_links_resolve():
    for page in PAGES:
        resolve_links(page)


def resolve_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: no heading {target}"


def test_the_index_names_every_page():
    linked = set(re.findall(r"^\| \[\w+\]\(docs/([\w.]+\.md)\)", read("README.md"), re.MULTILINE))
    assert linked == {page.name for page in PAGES if page.parent == ROOT / "docs"}


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(("page", "command"), GENERATED)
def test_generated_tables_are_those_of_the_declarations(page, command):
    """Write them again with `lm-eval-duel list WHAT --markdown`."""
    _, _, rest = read(page).partition(f"<!-- lm-eval-duel list {command} --markdown -->\n\n")
    table, _, _ = rest.partition("\n\n<!-- end -->")
    assert table == listing.markdown(command)


ATTENTION = {"bidirectional": "bidirectional", "block_causal": "block-causal", "causal_prefix": "causal prefix"}


def family_rows():
    """The names, the words on config.json, and the attention with the block in each line of the table of families."""
    for line in read("docs/checkpoints.md").splitlines():
        if line.startswith("| `"):
            names, config, _, attention = line.split("|")[1:5]
            yield re.findall(r"`([\w-]+)`", names), config, attention


def test_every_family_has_a_line_with_its_attention_and_its_block():
    attention_of = {}
    for names, _, attention in family_rows():
        attention_of |= dict.fromkeys(names, attention)

    for name, family in families.NAMED.items():
        assert ATTENTION[family.attention] in attention_of[name], name
        without_link = re.sub(r"\]\(.*?\)", "", attention_of[name])
        block = family.published_block or family.block
        expected = [] if block is None else [str(block)]
        assert re.findall(r"\d+", without_link) == expected, name


def test_every_family_has_a_line_with_its_classes():
    config_of = {}
    for names, config, _ in family_rows():
        config_of |= dict.fromkeys(names, config)

    for name, family in families.NAMED.items():
        classes = {*re.findall(r"`(\w+)`", config_of[name])}
        assert {*family.architectures} <= classes, name


def test_a_config_with_the_class_of_a_line_is_of_its_family():
    for names, config, _ in family_rows():
        for kind in re.findall(r"`([A-Z]\w+)`", config):
            named = {"architectures": [kind]}
            if kind in families.PLAIN:  # an autoregressive class, which names no family
                continue
            if names[0] in families.NAMED:
                assert checkpoint.find_family(named, LoadOptions("a", "cpu"), None).name in names, kind
            else:
                assert recognition.is_dit(named, "a") or recognition.is_diffusion_gemma(named), kind


def test_concepts_name_the_rules_that_are_not_state_only():
    [sentence] = re.findall(r"All built-in rules are, except (.*?)\.", read("docs/concepts.md"), re.DOTALL)
    named = {*re.findall(r"`(\w+)`", sentence)}
    assert named == {name for name, rule in RULES.items() if not rule.state_only}


# ---------------------------------------------------------------- the README


def test_ci_runs_commands_of_the_readme_with_the_tools_of_the_dev_extra():
    script = read(".ci/run")
    commands = re.findall(r"# README: begin.*?\n(.*?)\n# README: end", script, re.DOTALL)
    lines_of_readme = "".join(blocks(read("README.md"), "bash")).splitlines()
    assert len(commands) == 2
    for command in commands:
        assert command in lines_of_readme

    dev = re.search(r"^dev = \[(.*)\]", read("pyproject.toml"), re.MULTILINE)[1]
    installed = re.findall(r"\w+==[\d.]+", script)
    for tool in re.findall(r"\w+==[\d.]+", dev):
        assert tool in installed
