"""The notes below the tables of a task: which ELBO was used, unknown tokens, low precision, how documents were cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lm_eval_duel.errors import counted
from lm_eval_duel.results import match, order, stats
from lm_eval_duel.results.doubts import FULL_PRECISION
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.spec_entries import lost_distinctions
from lm_eval_duel.results.table import Note, number

LOWEST_FIRST = "in a row of masks alone, all positions tie, and the lowest is revealed first"

SameOfTasks = Mapping[str, Mapping[Row, list[Row]]]


def about_elbo(elbo: Row, why: str) -> str:
    """A description of an ELBO with its standard error. `why`: how its spec differs from the row's."""
    spec = elbo.run.spec
    if elbo.entry.lattice:
        text = f"exact, the mean over all orders in blocks of {elbo.block} (elbo_exact)"
    else:
        text = f"Monte Carlo, mc_samples={spec.get('mc_samples', '?')}"
        if "elbo_form" in spec:
            text += f", elbo_form={spec['elbo_form']}"
        text += f", elbo_block={elbo.block}"
        if elbo.eps:
            text += f", elbo_eps={elbo.eps:g} (above 0: NO bound)"
        text += ", no standard error" if elbo.stderr is None else f", standard error {number(elbo.stderr, '.2g')}"
    variant = f" ({elbo.variant})" if elbo.variant else ""
    remark = f" ({why})" if why else ""
    return f"ELBO of {elbo.model}{variant}: {text}{remark}"


def all_mask_starts(runs: Iterable[Run]) -> Note:
    """A note on the models whose values depend on the position that a row of nothing but masks reveals first."""
    labels = dict.fromkeys(run.label for run in runs if run.config.duel.get("all_mask_starts"))
    if not labels:
        return Note()
    return Note(f"{', '.join(labels)}: {LOWEST_FIRST}.")


def shown_once(same: SameOfTasks, same_averages: SameOfTasks) -> Note:
    """The number of rows that several results hold; empty without any. Both are of each task: rows and the others."""
    listed = []
    for name, of_task in same.items():
        count = 0
        differing = 0
        for row, others in of_task.items():
            count += bool(others)
            differing += not all(order.are_equal(row.metrics, other.metrics) for other in others)
        another = f" ({differing} with ANOTHER value)" if differing else ""
        if count:
            listed.append(f"{counted(count, 'value')} of {name}{another}")
    for name, of_task in same_averages.items():
        count = sum(map(bool, of_task.values()))
        if count:
            listed.append(f"the averages of {counted(count, 'row')} of {name}")
    if not listed:
        return Note()
    return Note(
        advice=f"Shown once, although several results hold them: {', '.join(listed)}. report.md names the files."
    )


def tokenizers(name: str, compared: Sequence[Run]) -> list[str]:
    """Notes on tokenizers that do not tell all texts apart, each once."""
    notes: dict[str, None] = {}
    for run in compared:
        lost = lost_distinctions(run.spec, run.tasks[name].unknown)
        if lost:
            what = " and ".join(lost.values())
            note = f"{run.label} {what}: its bits per byte, byte and word perplexity are not a likelihood of the text"
            notes[note] = None
    return list(notes)


def precision(compared: Sequence[Run]) -> list[str]:
    """Notes on networks in low precision, whose orders and sums are coarser."""
    notes = []
    for run in compared:
        if run.config.dtype not in FULL_PRECISION:
            remedy = "" if run.config.ours else " (the default of --model hf; dtype=float32 changes it)"
            notes.append(f"{run.label} ran in {run.config.dtype}{remedy}: {run.short_name}")
    return notes


def contexts(name: str, compared: Sequence[Run]) -> list[str]:
    """Notes on contexts that were cut, each once."""
    notes: dict[str, None] = {}
    for run in compared:
        if run.cut_contexts(name):
            notes[f"{run.label}: {match.cut_contexts(run, name)}"] = None
    return list(notes)


def copies(shown: Sequence[Row]) -> list[str]:
    """A note on documents that are copies of others, or none."""
    for row in shown:
        note = stats.about_copies(row.texts)
        if note:
            return [note]
    return []


def windows(name: str, compared: Sequence[Run]) -> str:
    """A note on how the documents of a task were cut, and whether alike in all runs."""
    cuts: dict[str, dict[str, None]] = {}
    for run in compared:
        cuts.setdefault(run.label, {})[match.windows_of(run)] = None
    listed = []
    for label, of_label in cuts.items():
        listed.append(f"{label}: {' and '.join(of_label)}")
    every_cut = "; ".join(listed)

    first, *others = compared
    if not (others and first.tasks[name].rolling):
        return f"windows: {every_cut}"
    if not all(match.are_cut_alike(first, other, name) for other in others):
        are_known = all(run.capacity is not None and run.longest(name) is not None for run in compared)
        return f"windows: not {'' if are_known else 'known to be '}the same ({every_cut})"
    sizes = {(run.windows, run.capacity) for run in compared}
    if len(sizes) > 1:
        return f"windows: the same, since each document is one window ({every_cut})"
    derived = dict.fromkeys(run.label for run in compared if not run.config.ours)
    derived_for = f", derived for {', '.join(derived)}" if derived else ""
    return f"windows: the same in all results ({match.size_of_windows(first)}{derived_for})"
