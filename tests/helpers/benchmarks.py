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


def spaced(sentence):
    """A sentence as newswire corpora have it: marks by themselves."""
    for mark in (",", ";", "?", "!", "'s"):
        sentence = sentence.replace(mark, f" {mark}")
    return sentence.removesuffix(".") + " ." if sentence.endswith(".") else sentence


def ptb():
    """Lower case, rare words <unk>, numbers N, no final mark."""
    plain = [spaced(sentence).lower().replace(" .", "").replace("did not", "did n't") for sentence in SENTENCES]
    swaps = {"1 ,250": "N", "17.5": "N", "clerk": "<unk>", "harbour": "<unk>"}
    for old, new in swaps.items():
        plain = [sentence.replace(old, new) for sentence in plain]
    return [{"sentence": sentence} for sentence in plain]


def wikitext():
    """A line a row, blank ones "" and others with a space before and one before the line's end."""
    body = [spaced(sentence).replace("1 ,250", "1 @,@ 250").replace("17.5", "17 @.@ 5") for sentence in SENTENCES]
    body = [line.replace("-", " @-@ ") for line in body]
    lines = [
        "",
        "= Harbour =",
        "",
        body[0],
        body[2],
        "= = Trade = =",
        "",
        body[7],
        "= Governor =",
        "",
        body[10],
        body[6],
    ]
    return [{"text": f" {line} \n" if line else ""} for line in lines]


def pages():
    lines = "".join(row["text"] for row in wikitext())
    return [{"page": lines.replace("Harbour", f"Harbour {number}")} for number in range(ROWS)]


def lm1b():
    return [{"text": f"{spaced(sentence)} It cost $ 5 , he wrote ."} for sentence in SENTENCES]


def lambada():
    """OpenAI's: typed text with curly quotes and line breaks."""
    return [{"text": f"\N{LEFT DOUBLE QUOTATION MARK}{s}\N{RIGHT DOUBLE QUOTATION MARK}\n\n{s}"} for s in SENTENCES]


def lambada_plain():
    """The authors': lower case, marks by themselves, quotes ``like this ''."""
    return [{"text": f"`` {spaced(s).lower()} '' {spaced(s).lower()}", "domain": None} for s in SENTENCES]


def ag_news():
    joined = [f"{row['title']} {row['description']}" for row in ag_news_parts()]
    return [{"text": text, "label": number % 4} for number, text in enumerate(joined)]


def ag_news_parts():
    pairs = zip(SENTENCES, SENTENCES[::-1], strict=True)
    return [{"label": n % 4 + 1, "title": a.rstrip("."), "description": f"{b} #39;"} for n, (a, b) in enumerate(pairs)]


def papers():
    """Paragraphs joined by line breaks, formulas and citations as @xmath and @xcite."""
    rows = []
    for n in range(ROWS):
        a, b, c = (spaced(SENTENCES[(n + step) % ROWS]).lower() for step in (0, 3, 5))
        rows.append({"article": f"{a}\n{b} we set @xmath{n} ( @xcite ) .\n{c}", "abstract": a, "section_names": "one"})
    return rows


def openwebtext(rows=ROWS):
    """Pages of several paragraphs."""
    return [
        {"text": "\n\n".join(" ".join(SENTENCES[(n + step) % ROWS] for step in range(k, k + 3)) for k in (0, 3))}
        for n in range(rows)
    ]


RECORDS = {
    "ptb": ptb,
    "wikitext2": wikitext,
    "wikitext2_pages": pages,
    "wikitext103": wikitext,
    "wikitext103_pages": wikitext,
    "lm1b": lm1b,
    "lambada": lambada,
    "lambada_plain": lambada_plain,
    "ag_news": ag_news,
    "ag_news_parts": ag_news_parts,
    "pubmed": papers,
    "arxiv": papers,
    "openwebtext": openwebtext,
    "openwebtext_1k": openwebtext,
}


def as_lines(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def as_parquet(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)


def write(folder):
    """A copy of every data set of CORPORA in `folder`, in each of the ways in which a person may have one."""
    assert RECORDS.keys() == CORPORA.keys()
    for name, make in RECORDS.items():
        records, corpus = make(), CORPORA[name]
        if name == "lm1b":  # a folder of shards
            as_lines(folder / name / "test-0.jsonl", records[:7])
            as_lines(folder / name / "test-1.jsonl", records[7:])
        elif name == "wikitext2":
            datasets.Dataset.from_list(records).save_to_disk(folder / name)
        elif name == "ag_news":
            datasets.DatasetDict({corpus.split: datasets.Dataset.from_list(records)}).save_to_disk(folder / name)
        elif name in ("wikitext2_pages", "openwebtext"):
            as_parquet(folder / f"{name}.parquet", records)
        elif name.startswith("wikitext103"):  # a clone of the repository
            as_parquet(folder / corpus.repo / corpus.file, records)
        elif name in (
            "lambada",
            "ag_news_parts",
        ):  # without the owner's name: its folder may be another set's
            as_lines(folder / corpus.repo.split("/")[-1] / corpus.file, records)
        elif name == "pubmed":  # one list
            (folder / f"{name}.json").write_text(json.dumps(records))
        else:
            as_lines(folder / f"{name}.jsonl", records)
    return str(folder)
