"""Local copies of the benchmarks' data sets, a dozen rows each: true file formats and columns, sentences of our own."""

import json

import datasets
import pyarrow
import pyarrow.parquet

from lm_eval_duel.tasks.corpora import CORPORA

ROWS = 12
SENTENCES = [
    "The harbour froze early that year, and the boats stayed in.",
    "Nobody in the village could remember a winter like it.",
    "She counted 1,250 crates before the light was gone.",
    "A third of them were empty; the rest held salt.",
    "Who had packed them, and for whom?",
    "The old clerk said that he did not know.",
    "He wrote down the number 17.5 and closed the book.",
    "Two well-known merchants came over the pass in March.",
    "They asked for the key, the list and the seals.",
    "By noon the square was full of people!",
    "The governor's letter was read aloud, twice.",
    "Then the ice broke, and the boats went out again.",
]


WIKITEXT = ["", "= Harbour =", "", 0, 2, "= = Trade = =", "", 7, "= Governor =", "", 10, 6]  # numbers: of sentences


def spaced(sentence):
    """A sentence as newswire corpora have it: marks by themselves."""
    for mark in (",", ";", "?", "!", "'s"):
        sentence = sentence.replace(mark, f" {mark}")
    return sentence.removesuffix(".") + " ." if sentence.endswith(".") else sentence


def wikitext():
    """A line a row, blank ones "" and others with a space before and one before the line's end."""
    rows = []
    for entry in WIKITEXT:
        line = spaced(SENTENCES[entry]) if isinstance(entry, int) else entry
        for typed, split in {"1 ,250": "1 @,@ 250", "17.5": "17 @.@ 5", "-": " @-@ "}.items():
            line = line.replace(typed, split)
        rows.append({"text": f" {line} \n" if line else ""})
    return rows


def wikitext_page(number):
    """A page of WikiText in one text, with a number in its title."""
    lines = "".join(row["text"] for row in wikitext())
    return lines.replace("Harbour", f"Harbour {number}")


def newswire(sentence):
    """A sentence as the Penn Treebank has it: lower case, rare words <unk>, numbers N, no final mark."""
    text = spaced(sentence).lower()
    swaps = {" .": "", "did not": "did n't", "1 ,250": "N", "17.5": "N", "clerk": "<unk>", "harbour": "<unk>"}
    for old, new in swaps.items():
        text = text.replace(old, new)
    return text


def typed(sentence):
    """Text with curly quotes and line breaks."""
    return f"\N{LEFT DOUBLE QUOTATION MARK}{sentence}\N{RIGHT DOUBLE QUOTATION MARK}\n\n{sentence}"


def web_page(number):
    """Two paragraphs of three sentences."""
    sentences = SENTENCES * 3
    first = " ".join(sentences[number : number + 3])
    second = " ".join(sentences[number + 3 : number + 6])
    return f"{first}\n\n{second}"


def article(sentence):
    text = spaced(sentence)
    return f"{text}\nIt cost $ 5 , he wrote ( @xcite ) . {text.lower()}"


def records(name):
    """The rows of a data set, in its columns: texts with what its detokenizer looks for."""
    if name == "wikitext2_pages":
        texts = map(wikitext_page, range(ROWS))
    elif name.startswith("wikitext"):
        return wikitext()
    elif name == "ptb":
        texts = map(newswire, SENTENCES)
    elif name == "lambada":
        texts = map(typed, SENTENCES)
    elif name.startswith("openwebtext"):
        texts = map(web_page, range(ROWS))
    else:
        texts = map(article, SENTENCES)
    return [dict.fromkeys(CORPORA[name].columns, text) for text in texts]


def as_lines(file, records):
    lines = [json.dumps(record) + "\n" for record in records]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


def as_parquet(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)


def write(folder):
    """A copy of every data set of CORPORA in `folder`, in each of the ways in which a person may have one."""
    for name, corpus in CORPORA.items():
        rows = records(name)
        if name == "lm1b":  # a folder of shards
            as_lines(folder / name / "test-0.jsonl", rows[:7])
            as_lines(folder / name / "test-1.jsonl", rows[7:])
        elif name == "wikitext2":
            datasets.Dataset.from_list(rows).save_to_disk(folder / name)
        elif name == "ag_news":
            datasets.DatasetDict({corpus.split: datasets.Dataset.from_list(rows)}).save_to_disk(folder / name)
        elif name in ("wikitext2_pages", "openwebtext"):
            as_parquet(folder / f"{name}.parquet", rows)
        elif name.startswith("wikitext103"):  # a clone of the repository
            as_parquet(folder / corpus.repo / corpus.file, rows)
        elif name in ("lambada", "ag_news_parts"):  # without the owner's name: its folder may be another set's
            as_lines(folder / corpus.repo.split("/")[-1] / corpus.file, rows)
        elif name == "pubmed":  # one list
            (folder / f"{name}.json").write_text(json.dumps(rows))
        else:
            as_lines(folder / f"{name}.jsonl", rows)
    return str(folder)
