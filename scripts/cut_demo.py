"""Cut the sample tasks from the corpus: held-out addresses only, a fixed list for a fixed seed.

    python scripts/cut_demo.py --corpus sotu.jsonl.xz --tokenizer lm_eval_duel/demo/demo-mdm/tokenizer.json \\
        --out lm_eval_duel/demo/text

Writes `sotu.jsonl` (whole-sentence passages), `sotu_choice.jsonl` (which sentence comes next) and
`sotu_full.jsonl.xz` (all held-out addresses). Transcript marks such as (Applause.) are taken out and typographic
quotes and dashes are written as the older addresses write them; nothing else is changed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FIRST_YEAR = 2001
MARKS = re.compile(r"\s*\((?:Applause|Laughter)[^)]*\)")
PLAIN = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-", "\u2011": "-"}
)
BORDER = re.compile(r"[.!?][\"']? (?=[\"']?[A-Z])")
ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Sgt|Gen|Lt|Col|Sen|Rep|[A-Z])\.$")


def read_held_out(path: str) -> list[dict[str, Any]]:
    """The addresses from `FIRST_YEAR` on, cleaned."""
    addresses = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["year"] < FIRST_YEAR:  # the checkpoints are trained on these
                continue
            text = MARKS.sub("", record["text"])
            text = text.translate(PLAIN).strip()
            addresses.append({"year": record["year"], "president": record["president"], "text": text})
    return addresses


def sentences(text: str) -> list[str]:
    """Whole sentences, in order; a border is not taken after an abbreviation or an initial."""
    parts = []
    start = 0
    for match in BORDER.finditer(text):
        with_period = text[start : match.start() + 1]
        if ABBREVIATION.search(with_period):
            continue
        parts.append(text[start : match.end() - 1])  # without the space
        start = match.end()
    parts.append(text[start:])
    return parts


class Cutter:
    """Draws spans of consecutive sentences that fit a number of tokens; no sentence is used twice."""

    def __init__(self, addresses: list[dict[str, Any]], tokenizer: Tokenizer, seed: int):
        self.addresses = addresses
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.sentences = [sentences(address["text"]) for address in addresses]
        self.used: set[tuple[int, int]] = set()  # (address, sentence)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def span(self, a: int, least: int, most: int, extra: int = 0) -> tuple[str, int]:
        """(text, number of the sentence after it) of an unused span of address `a` with `least`..`most` tokens."""
        lines = self.sentences[a]
        for _ in range(10_000):
            start = self.rng.randrange(len(lines) - 1 - extra)
            text, end = self._longest(lines[: len(lines) - extra], start, most)
            places = {(a, i) for i in range(start, end + extra)}
            if not text or self.count(text) < least or places & self.used:
                continue
            self.used |= places
            return text, end
        raise RuntimeError(f"no unused span of {least} to {most} tokens left in address {a}")

    def _longest(self, lines: list[str], start: int, most: int) -> tuple[str, int]:
        """The most sentences from `start` on that have at most `most` tokens, and the number of the next one."""
        text = ""
        end = start
        while end < len(lines):
            longer = " ".join(lines[start : end + 1])
            if self.count(longer) > most:
                break
            text = longer
            end += 1
        return text, end


def cut_passages(cutter: Cutter, count: int, most: int) -> list[dict[str, Any]]:
    """Passages of at most `most` tokens, the addresses in turn."""
    records = []
    for n in range(count):
        a = n % len(cutter.addresses)
        address = cutter.addresses[a]
        text, _ = cutter.span(a, least=int(0.75 * most), most=most)
        records.append({"year": address["year"], "president": address["president"], "text": text})
    return sorted(records, key=lambda record: record["year"])


def cut_choices(cutter: Cutter, count: int) -> list[dict[str, Any]]:
    """Questions: a passage, the sentence that follows it, and three of about its length from other addresses."""
    records = []
    while len(records) < count:
        a = len(records) % len(cutter.addresses)
        passage, following = cutter.span(a, least=40, most=80, extra=1)
        answer = cutter.sentences[a][following]
        length = cutter.count(answer)
        if not 8 <= length <= 40:
            continue

        others: list[str] = []
        while len(others) < 3:
            b = cutter.rng.randrange(len(cutter.addresses))
            i = cutter.rng.randrange(len(cutter.sentences[b]))
            other = cutter.sentences[b][i]
            if b == a or other in others:
                continue
            if 0.7 <= cutter.count(other) / length <= 1.4:
                others.append(other)

        label = cutter.rng.randrange(4)
        options = [*others[:label], answer, *others[label:]]
        records.append({"year": cutter.addresses[a]["year"], "passage": passage, "options": options, "label": label})
    return sorted(records, key=lambda record: record["year"])


def json_lines(records: list[dict[str, Any]]) -> str:
    """The text of a JSONL file."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main() -> None:
    p = argparse.ArgumentParser(prog="python scripts/cut_demo.py", description=__doc__.splitlines()[0])
    p.add_argument("--corpus", required=True, help="sotu.jsonl.xz")
    p.add_argument("--tokenizer", required=True, help="tokenizer.json of the demo checkpoints, which sets the lengths")
    p.add_argument("--out", required=True, help="folder for the three files")
    p.add_argument("--passages", type=int, default=36)
    p.add_argument("--tokens", type=int, default=128, help="longest passage")
    p.add_argument("--questions", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    addresses = read_held_out(args.corpus)
    cutter = Cutter(addresses, Tokenizer.from_file(args.tokenizer), args.seed)
    passages = cut_passages(cutter, args.passages, args.tokens)  # first: questions take what these leave
    questions = cut_choices(cutter, args.questions)

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sotu.jsonl").write_text(json_lines(passages), encoding="utf-8")
    (out / "sotu_choice.jsonl").write_text(json_lines(questions), encoding="utf-8")
    with lzma.open(out / "sotu_full.jsonl.xz", "wt", preset=9, encoding="utf-8") as file:
        file.write(json_lines(addresses))

    sizes = [cutter.count(record["text"]) for record in passages]
    tokens = sum(cutter.count(address["text"]) for address in addresses)
    print(
        f"{len(passages)} passages, {sum(sizes)} tokens (longest {max(sizes)}); {len(questions)} questions; "
        f"{len(addresses)} addresses, {tokens} tokens"
    )


if __name__ == "__main__":
    main()
