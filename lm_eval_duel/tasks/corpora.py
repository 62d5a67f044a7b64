"""The paper's data sets: for each, one file of a pinned revision, with its number of rows.

`datasets` 4 and 5 do not run loading scripts, and whole repositories have up to 24 GB, so only the parquet or JSON file
of the split is fetched. `data_dir` names a folder of local copies. Too few or too many rows are an error, because they
would be another benchmark.

PTB, WikiText, LM1B and LAMBADA are published with spaces around punctuation and with placeholders for numbers. The
models were trained on plain text, so the official evaluation of MDLM, BD3-LM and SEDD, which the DUEL paper follows,
undoes that by fixed lists of replacements (`DETOKENIZERS`), and published perplexities are of the result. The lists are
unchanged, with the replacements that never match or do harm: better ones would be another benchmark. WikiText's is part
of lm_eval.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from lm_eval_duel.errors import DuelError, first_line, require_known
from lm_eval_duel.tasks import files as copies

CONVERTED = "refs/convert/parquet"  # the branch with the hub's conversion of repositories that have loading scripts
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A data set as a benchmark uses it.

    `file` of `repo` at `revision` has the split; a text is its `columns`, joined by a space. `rows`: their number, or
    with `last`, how many are taken from the end. `detokenize`: the detokenizer of wrapped rows; with `tidied` also of
    documents, whose words and bytes are counted before it, as the harness does with WikiText.
    """

    repo: str
    revision: str = CONVERTED
    file: str
    split: str = "test"
    columns: tuple[str, ...] = ("text",)
    rows: int
    licence: str = "not stated"
    detokenize: str | None = None
    last: bool = False
    size: int | None = None  # UTF-8 bytes of all texts
    pages: bool = False  # rows are lines, and a text is an article of several
    tidied: bool = False
    sha256: str | None = None


WIKITEXT2 = Corpus(
    repo="Salesforce/wikitext",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    file="wikitext-2-raw-v1/validation-00000-of-00001.parquet",
    split="validation",
    rows=3760,
    licence="CC BY-SA 3.0, GFDL",
    detokenize="wikitext",
)
WIKITEXT103 = dataclasses.replace(WIKITEXT2, file="wikitext-103-raw-v1/validation-00000-of-00001.parquet")
PUBMED = Corpus(
    repo="armanc/scientific_papers",
    file="pubmed/validation/0000.parquet",
    split="validation",
    columns=("article",),
    rows=6633,
    detokenize="scientific",
)
OPENWEBTEXT = Corpus(
    repo="Skylion007/openwebtext",
    revision="79d93d786212f7344586290adb811d4ae6a1762c",
    file="plain_text/train-00079-of-00080.parquet",  # the last of 80: the end of the set without its 24 GB
    split="train",
    rows=100_000,
    licence="CC0 (the packaging)",
    last=True,
)
CORPORA = {
    "ptb": Corpus(
        repo="ptb-text-only/ptb_text_only",
        file="penn_treebank/validation/0000.parquet",
        split="validation",
        columns=("sentence",),
        rows=3370,
        licence="LDC User Agreement for Non-Members",
        detokenize="ptb",
        size=389_672,
    ),
    "wikitext2": WIKITEXT2,
    "wikitext2_pages": Corpus(
        repo="EleutherAI/wikitext_document_level",
        revision="647234772b9554e208af6c826f23b99e3cac88c8",
        file="wikitext-2-raw-v1/wikitext-2-raw-v1-test.parquet",
        columns=("page",),
        rows=62,
        licence="CC BY-SA 3.0",
        detokenize="wikitext",
        tidied=True,
        sha256="e7fc7d4c385d027e0360f7eb320866df61adb68f385986e5c7f4f3911d62f4eb",
    ),
    "wikitext103": WIKITEXT103,
    "wikitext103_pages": dataclasses.replace(WIKITEXT103, pages=True, tidied=True),
    "lm1b": Corpus(
        repo="billion-word-benchmark/lm1b",
        revision="8d52bfd3cc2819fc1166dbb8144c328e2690de3e",
        file="plain_text/test/0000.parquet",
        rows=306_688,
        detokenize="lm1b",
        sha256="d3c7b4b2a48c24e9ae8353d6316dbac1453b08f2d870da9fa096c941e8f4cc8a",
    ),
    "lambada": Corpus(
        repo="EleutherAI/lambada_openai",
        revision="900124bf3b8235c6daf21033af9948b3f07346c4",
        file="data/lambada_test.jsonl",
        rows=5153,
        licence="MIT, modified (OpenAI)",
        detokenize="lambada",
        sha256="4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
    ),
    "lambada_plain": Corpus(
        repo="cimec/lambada",
        revision="main",
        file="plain_text/test-00000-of-00001.parquet",
        rows=5153,
        licence="CC BY 4.0",
    ),
    "ag_news": Corpus(
        repo="fancyzhx/ag_news",
        revision="eb185aade064a813bc0b7f42de02595523103ca4",
        file="data/test-00000-of-00001.parquet",
        rows=7600,
        licence="not stated (non-commercial use)",
        size=1_788_274,
    ),
    "ag_news_parts": Corpus(
        repo="sh0416/ag_news",
        revision="70e3fa1915be9a8daebec5e840f20df9a8e18793",
        file="test.jsonl",
        columns=("title", "description"),
        rows=7600,
    ),
    "pubmed": PUBMED,
    "arxiv": dataclasses.replace(PUBMED, file="arxiv/partial-validation/0000.parquet", rows=6436),
    "openwebtext": OPENWEBTEXT,
    "openwebtext_1k": dataclasses.replace(OPENWEBTEXT, rows=1000),
}


def find(name: str) -> Corpus:
    """A data set, by name."""
    require_known("data set", [name], CORPORA)
    return CORPORA[name]


def source(name: str, data_dir: str | None = None) -> str:
    """The file or folder of a data set: a local copy in `data_dir`, or else in the hub's cache.

    Raises DuelError if there is none; the message names the places that were searched.
    """
    corpus = find(name)
    if data_dir:
        return _local(name, corpus, Path(data_dir))
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(corpus.repo, corpus.file, repo_type="dataset", revision=corpus.revision)
    except Exception as error:  # of the hub client: no connection, no file, no permission
        reason, *_ = first_line(error).split(". ")  # the hub's advice follows
        raise DuelError(
            f"Cannot load {name} ({corpus.repo}, {corpus.file} at {corpus.revision}): {reason.rstrip('.')}. "
            f"{needs_hub()} Or name a folder with a local copy: --metadata "
            "data_dir=FOLDER."
        ) from None


def needs_hub() -> str:
    """A sentence on what a data set of the hub needs."""
    from huggingface_hub import constants

    offline = ", and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    return f"A data set of the hub needs a connection or a cached copy{offline}."


def texts(name: str, data_dir: str | None = None, rows: int | None = None) -> list[str]:
    """The texts of a data set, from the hub or from a local copy; `rows`: how many the copy has, if not all.

    Raises DuelError if there is no copy, a column is missing, or the number of rows is wrong.
    """
    corpus = find(name)
    place = source(name, data_dir)
    if rows is None:
        _check_whole(name, corpus, Path(place))
    records = copies.records(Path(place))
    expected = corpus.rows if rows is None else rows
    may_have_more = corpus.last and rows is None
    if len(records) < expected or (len(records) > expected and not may_have_more):
        raise DuelError(
            f"{place} has {len(records)} rows, but {name} has {expected}: a part of a data set is a different "
            f"benchmark. Load it again, or say how many rows your copy should have: --metadata rows={len(records)}."
        )
    lines = []
    for number, record in enumerate(records[len(records) - expected :]):
        parts = [record.get(column) for column in corpus.columns]
        if not all(isinstance(part, str) for part in parts):
            raise DuelError(
                f"{place}: row {number} has no text in {' or '.join(corpus.columns)}; its columns are "
                f"{', '.join(record)}. Use the unchanged split of the hub: {corpus.repo}, {corpus.file}."
            )
        lines.append(" ".join(parts))
    if rows is None and corpus.size is not None:
        size = sum(len(line.encode("utf-8")) for line in lines)
        if size != corpus.size:
            raise DuelError(f"{place} has {size} bytes of text, but {name} has {corpus.size}: the texts differ.")
    return articles(lines) if corpus.pages else lines


def articles(lines: list[str]) -> list[str]:
    """The articles of WikiText's lines: each begins at a heading of one level, ` = Title = `."""
    parts: list[list[str]] = []
    for line in lines:
        words = line.split()
        is_title = len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=" and words[-2] != "="
        if is_title or not parts:
            parts.append([])
        parts[-1].append(line)
    texts = ["".join(part) for part in parts]
    return [text for text in texts if text.strip()]


def _check_whole(name: str, corpus: Corpus, place: Path) -> None:
    """Raise DuelError if the hub's file has another SHA-256, or a shard (`...-00003-of-00080`) is missing.

    For the end of a data set the last shard is enough.
    """
    if place.is_file():
        is_pinned = corpus.sha256 is not None and place.name == Path(corpus.file).name
        if is_pinned and _sha256(place) != corpus.sha256:
            raise DuelError(f"{place} is not the pinned file of {name} (another SHA-256): delete it and load it again.")
        return

    numbers: dict[int, set[int]] = {}  # the shards that are here, by how many there should be
    for file in copies.tables(place):
        shard = SHARD.search(file.stem)
        if shard:
            numbers.setdefault(int(shard[2]), set()).add(int(shard[1]))
    for count, present in numbers.items():
        expected = {count - 1} if corpus.last else {*range(count)}
        missing = expected - present
        if missing:
            raise DuelError(f"{place} lacks shard {min(missing)} of the {count} of {name}: load it again.")


def _local(name: str, corpus: Corpus, folder: Path) -> str:
    """A local copy in `folder`.

    That is NAME.parquet (.jsonl, .json), the hub's own layout, or a folder NAME of such files or saved by `datasets`.
    """
    repo = corpus.repo.split("/")[-1]
    places = [folder / f"{name}{ending}" for ending in copies.TABLES]
    places += [folder / corpus.repo / corpus.file, folder / repo / corpus.file]
    places += [folder / name / corpus.split, folder / name]  # `save_to_disk` gives each split of a dict a folder
    if name == "openwebtext_1k":  # the last rows of the same file
        places += [folder / f"openwebtext{ending}" for ending in copies.TABLES]
        places.append(folder / "openwebtext")
    for place in places:
        if place.is_file():
            return str(place)
        if place.is_dir() and ((place / copies.SAVED).exists() or copies.tables(place)):
            return str(place)
    raise DuelError(
        f"No copy of {name} in {folder}: expected {name}.parquet, .jsonl or .json there, a folder {name} of such files "
        f"or saved by `datasets`, or {repo}/{corpus.file}."
    )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------- detokenizers


Rule = tuple[str | re.Pattern[str], str]  # (pattern, replacement)


def _one_space_inside(opening: str, closing: str) -> Rule:
    """Remove the space after an opening and before a closing mark; of nested pairs, only of the inner one."""
    marks = "".join(re.escape(mark) for mark in dict.fromkeys(opening + closing))
    pair = re.compile(rf"{re.escape(opening)} ([^{marks}]+) {re.escape(closing)}")
    return pair, rf"{opening}\1{closing}"


PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    (r"\/", "/"),
    # Ten passes, as in the authors' code. Neighbours share a space, so one pass leaves every other N of a run.
    *[(" N ", " 1 ")] * 10,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

LM1B: tuple[Rule, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    _one_space_inside('"', '"'),
    _one_space_inside("'", "'"),
    _one_space_inside("(", ")"),
    _one_space_inside("[", "]"),
    ("$ ", "$"),
    ("£ ", "£"),
)


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    """Apply each rule once to the whole text, in order."""
    for pattern, replacement in rules:
        if isinstance(pattern, str):
            pattern = re.escape(pattern)
        text = re.sub(pattern, replacement, text)
    return text


def wikitext(text: str) -> str:
    """A line of WikiText-2 or -103 (raw), by lm_eval's own rules, which it applies to a page."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    return wikitext_detokenizer({"page": text})


def ptb(text: str) -> str:
    """A sentence of Penn Treebank. Every number is N there and becomes 1, every rare word <unk> and becomes ?."""
    return _apply(PTB, text)


def lm1b(text: str) -> str:
    """A sentence of the One Billion Word benchmark."""
    return _apply(LM1B, text)


def lambada(text: str) -> str:
    """A passage of OpenAI's LAMBADA: straight double quotes, and a line break before each passage."""
    curly_quotes = "[\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]"
    return "\n" + re.sub(curly_quotes, '"', text).strip()


def scientific(text: str) -> str:
    """An article of PubMed or arXiv (scientific_papers)."""
    return lm1b(wikitext(text))


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "wikitext": wikitext,
    "ptb": ptb,
    "lm1b": lm1b,
    "lambada": lambada,
    "scientific": scientific,
}
