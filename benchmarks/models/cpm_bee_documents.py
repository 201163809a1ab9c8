"""Quality of a small CPM-Bee trained on three tasks at once, compared with simple baselines.

    python -m benchmarks.models.cpm_bee_documents DATA [--out DIR] [--steps 500] [--threads 1]
        [--held-out 150]

The tasks are documents with blanks and continuations, from poems, and sentiment questions, from
reviews. `bmforge train cpm-bee-train` trains one model on all tasks, and
`bmforge generate --document` fills held-out documents. The baselines are the most frequent answer
and the unigram counts of the training answers. DATA has tang_poetry.jsonl and eprstmt/.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import header, make_parser, table
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

COUPLET = re.compile(r"([^，。\s]{5}|[^，。\s]{7})，([^，。\s]{5}|[^，。\s]{7})。")
SPECIALS = "<pad> <unk> <mask> <sep> </n> </_> <s> </s> <root> <ans> <option>"
KEYS = "input prompt question"
ASK = {"question": "評價"}
TASKS = ("blanks", "continuation", "sentiment")
LONGEST_REVIEW = 60
Document = dict[str, Any]


def read_poems(folder: Path) -> list[list[str]]:
    """Return the regular couplets of each poem with at least two of them."""
    poems = []
    for line in (folder / "tang_poetry.jsonl").open(encoding="utf-8"):
        couplets = [m.group() for m in COUPLET.finditer(json.loads(line)["text"])]
        couplets = [c for c in couplets if len(c) in (12, 16) and c.index("，") == len(c) // 2 - 1]
        if len(couplets) > 1:
            poems.append(couplets)
    return poems


def read_reviews(folder: Path) -> list[tuple[str, str]]:
    """Return (text, label) of the distinct reviews of all files."""
    reviews: dict[str, str] = {}
    for file in sorted((folder / "eprstmt").glob("*.json")):
        for line in file.open(encoding="utf-8"):
            row = json.loads(line)
            reviews.setdefault(row["sentence"], row["label"])
    return sorted(reviews.items())


def find_words(poems: Iterable[Sequence[str]]) -> set[str]:
    """Return the pairs of adjacent characters that occur at least forty times."""
    counts = Counter(
        couplet[i : i + 2]
        for poem in poems
        for couplet in poem
        for i in range(len(couplet) - 1)
        if not set(couplet[i : i + 2]) & set("，。")
    )
    return {word for word, count in counts.items() if count >= 40}


def make_blanks(poem: Sequence[str], words: set[str], draw: random.Random) -> list[Document]:
    """Replace the second character of a frequent word by a blank in each couplet that has one."""
    made = []
    for couplet in poem:
        places = [i + 1 for i in range(len(couplet) - 1) if couplet[i : i + 2] in words]
        if places:
            place = draw.choice(places)
            text = couplet[:place] + "<mask_0>" + couplet[place + 1 :]
            made.append({"input": text, "<ans>": {"<mask_0>": couplet[place]}})
    return made


def make_continuation(poem: Sequence[str], draw: random.Random) -> Document:
    """Return a document with a couplet, whose answer is the next couplet."""
    at = draw.randrange(len(poem) - 1)
    return {"input": poem[at], "prompt": "續", "<ans>": poem[at + 1]}


def make_record(review: tuple[str, str]) -> Document:
    """Return the text and the label of a review, for the transform of the mixture."""
    text, label = review
    text = text[:LONGEST_REVIEW].replace("<", "<<")
    return {"text": text, "label": "好" if label == "Positive" else "差"}


def split(items: Sequence[Any], every: int) -> tuple[list[Any], list[Any]]:
    """Hold out each `every`-th item."""
    return [x for i, x in enumerate(items) if i % every], list(items[::every])


def answers_of(document: Document) -> list[str]:
    """Return the answers of a document."""
    answers = document["<ans>"]
    return list(answers.values()) if isinstance(answers, dict) else [answers]


def build_vocabulary(texts: Iterable[str], folder: Path) -> CPMBeeTokenizer:
    """Write a vocabulary: special tokens, and characters that occur at least six times."""
    counts = Counter(c for text in texts for c in text if not c.isspace() and c not in "<>")
    characters = sorted(c for c, n in counts.items() if n >= 6)
    tokenizer = CPMBeeTokenizer([*SPECIALS.split(), *KEYS.split(), *characters])
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_lines(path: Path, rows: Iterable[Document]) -> None:
    """Write a JSON Lines file."""
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def prepare(data: Path, out: Path, held_out_each: int) -> dict[str, dict[str, list[Document]]]:
    """Write documents, mixture and vocabulary; return task -> split -> documents."""
    draw = random.Random(0)
    poems, held_poems = split(read_poems(data), 20)
    reviews, held_reviews = split(read_reviews(data), 4)
    sentiment = {"input": "$text", **ASK, "<ans>": "$label"}
    words = find_words(poems)
    records = {
        "blanks": [d for p in poems for d in make_blanks(p, words, draw)],
        "continuation": [make_continuation(p, draw) for p in poems],
        "sentiment": [make_record(r) for r in reviews],
    }
    held = {
        "blanks": [d for p in held_poems for d in make_blanks(p, words, draw)],
        "continuation": [make_continuation(p, draw) for p in held_poems],
        "sentiment": [make_record(r) for r in held_reviews],
    }
    texts = [couplet for poem in poems for couplet in poem] + [text for text, _ in reviews]
    tokenizer = build_vocabulary([*texts, "續評價好差"], out / "tokenizer")
    can_spell = set(tokenizer._ids)
    weights = {"blanks": 1.0, "continuation": 0.2, "sentiment": 12.0}
    mixture, held_mixture, documents = [], [], {}
    for task in TASKS:
        rule = {"transforms": [sentiment]} if task == "sentiment" else {}
        fit = [r for r in held[task] if task == "sentiment" or spells(answers_of(r), can_spell)]
        write_lines(out / f"{task}.jsonl", records[task])
        write_lines(out / f"{task}_held.jsonl", fit[:held_out_each])
        entry = {"task_name": task, "path": f"{task}.jsonl", "weight": weights[task], **rule}
        mixture.append(entry)
        held_mixture.append({"task_name": task, "path": f"{task}_held.jsonl", **rule})
        shaped = [
            rows if task != "sentiment" else [fill(sentiment, row) for row in rows]
            for rows in (records[task], fit[:held_out_each])
        ]
        documents[task] = {"train": shaped[0], "held": shaped[1]}
    (out / "train.json").write_text(json.dumps(mixture, ensure_ascii=False), "utf-8")
    (out / "held.json").write_text(json.dumps(held_mixture, ensure_ascii=False), "utf-8")
    return documents


def fill(shape: Document, record: Document) -> Document:
    """Apply the transform of the mixture to a record."""
    return {**shape, "input": record["text"], "<ans>": record["label"]}


def spells(answers: Iterable[str], known: set[str]) -> bool:
    """Return True if the vocabulary has all characters of the answers."""
    return all(c in known for answer in answers for c in answer)


def run(*words: str, threads: int) -> str:
    """Run a bmforge command in a new process; return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "bmforge", *words]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(out: Path, vocab_size: int, steps: int, threads: int) -> float:
    """Train with the recipe; return the seconds."""
    options = {
        "run-dir": out / "run", "data.paths": out / "train.json", "data.validation":
        out / "held.json", "data.tokenizer": out / "tokenizer", "data.seq-len": 128,
        "data.global-batch-size": 16, "data.micro-batch-size": 16, "data.skip-bad": True,
        "model.vocab-size": vocab_size, "model.hidden-size": 128, "model.intermediate-size": 352,
        "model.num-layers": 2, "model.num-heads": 4, "model.head-dim": 32,
        "model.max-seq-len": 256, "model.num-buckets": 64, "model.num-relations": 128,
        "model.dropout": 0.05, "train.steps": steps,
        "train.save-every-steps": 200, "train.optim.lr": 0.01, "train.optim.weight-decay": 0.01,
        "train.schedule.warmup-steps": min(40, steps // 4), "train.log-every-steps": 20,
    }  # fmt: skip
    words = [w for name, value in options.items() for w in (f"--{name}", str(value))]
    begun = time.perf_counter()
    run("train", "cpm-bee-train", *words, threads=threads)
    return time.perf_counter() - begun


def fill_held_out(out: Path, documents: Sequence[Document], task: str, threads: int) -> list[Any]:
    """Fill the answers of held-out documents with `bmforge generate`."""
    file = out / f"{task}_questions.jsonl"
    write_lines(file, [blank(document) for document in documents])
    words = ("--document", str(file), "--num-beams", "1", "--max-new-tokens", "17")
    printed = run("generate", str(out / "run" / "export"), *words, threads=threads)
    return [json.loads(line) for line in printed.splitlines()]


def blank(document: Document) -> Document:
    """Return a document without its answers."""
    answers = document["<ans>"]
    return {**document, "<ans>": dict.fromkeys(answers, "") if isinstance(answers, dict) else ""}


def unigram_loss(train: Iterable[Document], held: Iterable[Document], classes: int) -> float:
    """Return the loss in nats per token of held-out answers under add-one unigram counts."""
    counts: Counter[str] = Counter()
    for document in train:
        for answer in answers_of(document):
            counts.update([*answer, "</s>"])
    total = sum(counts.values()) + classes
    tokens = [t for d in held for answer in answers_of(d) for t in [*answer, "</s>"]]
    return sum(-math.log((counts[t] + 1) / total) for t in tokens) / len(tokens)


def count_right(documents: Sequence[Document], filled: Sequence[Document]) -> float:
    """Return the share of correct answers."""
    pairs = [
        pair
        for known, got in zip(documents, filled, strict=True)
        for pair in zip(answers_of(known), answers_of(got), strict=True)
    ]
    return sum(known == got for known, got in pairs) / len(pairs)


def best_constant(train: Iterable[Document], held: Sequence[Document]) -> float:
    """Return the accuracy of the most frequent training answer."""
    common = Counter(a for d in train for a in answers_of(d)).most_common(1)[0][0]
    answers = [a for d in held for a in answers_of(d)]
    return sum(answer == common for answer in answers) / len(answers)


def keeps_form(documents: Sequence[Document], filled: Sequence[Document]) -> float:
    """Return the share of continuations that are couplets of the same length as the input."""
    good = [
        COUPLET.fullmatch(f["<ans>"]) is not None and len(f["<ans>"]) == len(d["input"])
        for d, f in zip(documents, filled, strict=True)
    ]
    return sum(good) / len(good)


def main() -> None:
    """Train the model and print its quality on each task."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=150)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="cpm-bee-"))
    out.mkdir(parents=True, exist_ok=True)
    print(header(options.threads, ["torch"]))
    documents = prepare(options.data, out, options.held_out)
    vocab_size = len(CPMBeeTokenizer.from_pretrained(out / "tokenizer"))
    seconds = train(out, vocab_size, options.steps, options.threads)
    losses = json.loads((out / "run" / "results.json").read_text())["validation loss"]
    print(f"trained {options.steps} steps in {seconds:.0f} s; vocabulary {vocab_size}\n")
    rows = []
    for task in TASKS:
        train_docs, held = documents[task]["train"], documents[task]["held"]
        filled = fill_held_out(out, held, task, options.threads)
        right, constant = count_right(held, filled), best_constant(train_docs, held)
        rows.append([task, len(held), f"{losses[task]:.2f}",
                     "" if task == "sentiment" else
                     f"{unigram_loss(train_docs, held, vocab_size):.2f}",
                     f"{right:.3f}", f"{constant:.3f}"])  # fmt: skip
        if task == "continuation":
            print(f"couplets of the correct form: {keeps_form(held, filled):.3f}\n")
        print("\n".join(json.dumps(d, ensure_ascii=False) for d in filled[:2]), "\n")
    names = ["task", "held out", "nats per token", "unigram", "accuracy", "most frequent answer"]
    print(table(names, rows))


if __name__ == "__main__":
    main()
