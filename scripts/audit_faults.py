"""Planted faults of what computes a number, and what finds each: `audit`, `verify=N`, or the laws.

    python scripts/audit_faults.py            all faults, as a Markdown table (about half an hour)
    python scripts/audit_faults.py elbo.py    those with this text in an entry

A fault of audit_faults.txt is one line of the package, changed in a copy of the tree. `audit` runs on a small
checkpoint of random weights, or on a bundled one, with the model args of the fault; a window that differs is what
`verify=N` finds. The laws are the files of `LAWS`. The exit code is 1 if neither audit nor a law finds a fault, or if
something is found without one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "helpers")]

from faults import ALL, Fault, plant, table
from mutants import HEAVY, NOT_COPIED, failed

LAWS = [
    "tests/audit/test_recompute.py",
    "tests/audit/test_estimates.py",
    "tests/estimators/test_every_estimator.py",
    "tests/audit/test_sizes.py",
    "tests/test_laws.py",
]
OUTSIDE = ("harness/", "tasks/", "text/", "denoisers/hf/", "denoisers/self_tests.py", "estimators/totals.py")  # of laws
TABLE = Path(__file__).with_suffix(".txt")
TIMEOUT = 900  # seconds
BERT = "bert"
LLADA = "llada"
SDAR = "sdar"
BUNDLED = ("demo-mdm", "demo-bd")


def make_checkpoints(folder: Path) -> dict[str, str]:
    """Small checkpoints of random weights, by name, and the folder of each."""
    import own
    import tiny

    for name in (BERT, LLADA, SDAR):
        (folder / name).mkdir()
    long = {"max_position_embeddings": 640}
    own.write(folder / LLADA, own.LLADA, "LLaDAModelLM", own.llada(), own.LLADA_SIZE)
    own.write(folder / SDAR, own.SDAR, "SDARForCausalLM", own.decoder(norms=True), block_size=4, **long)
    tiny.tokenizer(length=640).save_pretrained(folder / SDAR)
    return {
        BERT: tiny.checkpoint(folder / BERT, "bert"),
        LLADA: str(folder / LLADA),
        SDAR: str(folder / SDAR),
        **{name: name for name in BUNDLED},
    }


def write_texts(folder: Path, count: int, letters: bool) -> Path:
    """A folder of two texts: of letters, which the small checkpoints know, or of words."""
    chance = random.Random(count)
    known = "abcdefghijklmnopqrstuvwxyz" if letters else ["the", "people", "of", "America", "and", "this", "year", "we"]
    folder.mkdir(exist_ok=True)
    for n, words in enumerate((count, count // 2)):
        (folder / f"{n}.txt").write_text(" ".join(chance.choices(known, k=words)) + "\n", encoding="utf-8")
    return folder


def audit(root: Path, fault: Fault, checkpoints: dict[str, str]) -> tuple[bool, bool]:
    """Whether `audit` fails, and whether a window differs, by the package below `root`."""
    name, arguments, words = fault.audit
    texts = write_texts(root / f"texts{words}", int(words), letters=name not in BUNDLED)
    log = root / "audit.log"
    log.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        sys.path.insert(0, str(root))
        for module in [module for module in sys.modules if module.split(".")[0] == "lm_eval_duel"]:
            del sys.modules[module]
        given = f"pretrained={checkpoints[name]},{arguments},trust_remote_code=true"
        code = 0
        out = io.StringIO()
        with contextlib.redirect_stdout(out), log.open("w") as err, contextlib.redirect_stderr(err):
            try:
                from lm_eval_duel.cli.main import main

                main(["audit", "--model_args", given, "--tasks", f"{texts}/", "--device", "cpu"])
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException as error:
                err.write(repr(error))
                code = 99
        with log.open("a") as file:
            file.write(out.getvalue())
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        raise RuntimeError(log.read_text()[-2000:])
    differing = re.search(r"; differences beyond float32 noise in ([\d,]+) window", log.read_text())  # as verify=N says
    return code == 1, differing is not None and differing[1] != "0"


def main() -> None:
    """Print a row for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the faults whose entry holds one of these texts")
    parser.add_argument("--only", choices=["audit", "laws"], help="run the audits alone, or the laws alone")
    options = parser.parse_args()
    chosen = [
        fault for fault in table([TABLE]) if not options.words or any(word in str(fault) for word in options.words)
    ]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    for name in HEAVY:
        importlib.import_module(name)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = make_checkpoints(Path(folder))
        root = Path(folder) / "tree"
        shutil.copytree(Path.cwd(), root, ignore=NOT_COPIED, symlinks=True)
        for fault in {} if options.only == "laws" else {tuple(fault.audit): fault for fault in chosen}.values():
            if any(audit(root, fault, checkpoints)):
                sys.exit(f"without any fault, {fault.audit}: {(root / 'audit.log').read_text()[-2000:]}")
        print("| fault | file | `audit` | `verify=N` | laws |\n|---|---|---|---|---|", flush=True)
        for fault in chosen:
            outside = options.only == "audit" or fault.file.startswith(OUTSIDE)
            with plant(root, fault):
                found = (False, False) if options.only == "laws" else audit(root, fault, checkpoints)
                law = None if outside else failed(root, [*ALL, *LAWS], TIMEOUT)
            by_law = re.sub(r"^FAILED tests/(audit/)?|\[.*", "", law).replace(".py::", ": ") if law else "-"
            missed += not (found[0] or law)
            finds = " | ".join("yes" if each else "-" for each in found)
            print(f"| {fault.what} | `{fault.file}` | {finds} | {by_law} |", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
