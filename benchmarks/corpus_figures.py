"""How much text is read right: encodings, wrongly read text, languages, main texts, PDF.

``python benchmarks/corpus_figures.py DATA [PART ...]`` prints one line a case. DATA is as in
`prepare_speed.py`, with ``eprstmt`` beside. Languages are those of translated messages of programs
(``--locale``, gettext's ``*.mo``).
"""

from __future__ import annotations

import argparse
import csv
import gettext
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prepare_speed import measure_pages, read_texts

from bmforge.data import PrepareConfig, prepare
from bmforge.data.clean.repair import repair_text
from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

LEAST_BYTES = 200
LANGUAGES = ("de", "es", "fr", "it", "nl", "pl", "ru", "sv", "ja", "zh_CN")
DOMAINS = ("coreutils", "glib20", "gtk30", "software-properties")
SENTENCES = 50


def read_reviews(data: Path) -> list[str]:
    """Return Chinese reviews, in simplified characters."""
    lines = [line for path in sorted((data / "eprstmt").glob("*.json*"))
             for line in path.read_text("utf-8").splitlines()]  # fmt: skip
    return list(dict.fromkeys(json.loads(line)["sentence"] for line in lines if line.strip()))


def read_news(data: Path) -> list[str]:
    """Return English news items."""
    with (data / "ag_news" / "test.csv").open(newline="") as file:
        return [row[2] for row in csv.reader(file)]


def read_messages(locale: Path, language: str, domains: Iterable[str] = DOMAINS) -> list[str]:
    """Return translated messages that are sentences, without values and markup."""
    found: list[str] = []
    for domain in domains:
        for name in sorted((locale / language / "LC_MESSAGES").glob(f"{domain}.mo")):
            with name.open("rb") as file:
                catalogue: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for said, meant in sorted(catalogue.items(), key=str):
                text = " ".join(meant.split())
                is_long = len(text) >= (20 if language in ("ja", "zh_CN") else 50)
                if (
                    is_long
                    and meant != said
                    and not set("%<>{}|\\=") & set(text)
                    and "--" not in text
                ):
                    found.append(text)
    return list(dict.fromkeys(found))


def make_long(texts: Iterable[str], encoding: str) -> Iterator[str]:
    """Yield texts of at least 200 bytes, put together of what the encoding can write."""
    parts: list[str] = []
    for text in texts:
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            continue
        parts.append(text)
        if len("\n".join(parts).encode(encoding)) >= LEAST_BYTES:
            yield "\n".join(parts)
            parts = []


def measure_encodings(options: argparse.Namespace) -> None:
    """Print how many texts without any mark or label are read right."""
    kinds = {
        "poems": read_texts(options.data)[1],
        "reviews": read_reviews(options.data),
        "news": read_news(options.data),
        "Japanese messages": read_messages(options.locale, "ja"),
    }
    encodings = ("gb18030", "big5", "utf-16-le", "utf-16-be", "utf-16", "shift_jis", "euc-kr")
    all_right = total = 0
    for kind, texts in kinds.items():
        for encoding in encodings:
            if kind == "news" and not encoding.startswith("utf"):
                continue  # ASCII in all of them
            if encoding == "euc-kr" or (encoding == "big5" and kind.startswith("Jap")):
                continue  # written by nobody so
            found = [(text, text.encode(encoding)) for text in make_long(texts, encoding)]
            right = sum(_reads(raw) == text for text, raw in found)
            all_right, total = all_right + right, total + len(found)
            print(f"{kind} as {encoding}: {right} of {len(found)} right", flush=True)
    print(f"all: {all_right} of {total}, {all_right / total:.4%}")


def _reads(raw: bytes) -> str:
    try:
        return decode(raw, "a text")
    except DataError as error:
        return f"no text: {error}"


def _sloppy(data: bytes, page: str = "1252") -> str:
    return data.decode(f"sloppy-windows-{page}")


WRONG: dict[str, Callable[[str], str]] = {
    "UTF-8 as Latin-1": lambda text: text.encode().decode("latin-1"),
    "UTF-8 as Windows-1252": lambda text: _sloppy(text.encode()),
    "UTF-8 as Windows-1252, twice": lambda text: _sloppy(_sloppy(text.encode()).encode()),
    "UTF-8 as Windows-1251": lambda text: _sloppy(text.encode(), "1251"),
    "UTF-8 as GB18030": lambda text: text.encode().decode("gb18030"),
    "GB18030 as Latin-1": lambda text: text.encode("gb18030").decode("latin-1"),
    "GB18030 as Windows-1252": lambda text: _sloppy(text.encode("gb18030")),
    "Big5 as Latin-1": lambda text: text.encode("big5").decode("latin-1"),
}


def measure_mojibake(options: argparse.Namespace) -> None:
    """Print how many wrongly read texts are put right, and how many sound ones are changed."""
    poems, reviews = read_texts(options.data)[1], read_reviews(options.data)
    repair_text("é")  # which registers the sloppy pages
    texts = [*poems[::12], *reviews]
    for kind, spoil in WRONG.items():
        spoilt = [(text, wrong) for text in texts if (wrong := _spoil(spoil, text)) is not None]
        right = sum(repair_text(wrong) == text for text, wrong in spoilt)
        share = right / max(len(spoilt), 1)
        print(f"{kind}: {right} of {len(spoilt)} repaired, {share:.2%}", flush=True)
    for name, sound in (
        ("poems", poems),
        ("reviews", reviews),
        ("news", read_news(options.data)),
        *((f"messages, {one}", read_messages(options.locale, one)) for one in LANGUAGES),
    ):
        changed = sum(repair_text(text) != text for text in sound)
        print(f"sound {name}: {changed} of {len(sound)} changed", flush=True)


def _spoil(spoil: Callable[[str], str], text: str) -> str | None:
    """Return the text read wrongly, None where characters are lost on the way."""
    try:
        return spoil(text)
    except UnicodeError:
        return None


def measure_languages(options: argparse.Namespace) -> None:
    """Print how many sentences' languages are told, 50 in each of 10 and in English."""
    from bmforge.data.clean.languages import detect_language

    draw, all_right, total = random.Random(0), 0, 0
    news = [text for text in read_news(options.data) if len(text) > 50]
    for name in (*LANGUAGES, "en"):
        given = news if name == "en" else read_messages(options.locale, name)
        if len(given) < SENTENCES:
            print(f"{name}: only {len(given)} sentences are there")
        code = name.partition("_")[0]
        sentences = draw.sample(given, min(SENTENCES, len(given)))
        told = [detect_language(text).code for text in sentences]
        wrong = sorted({one for one in told if one != code})
        right, all_right, total = told.count(code), all_right + told.count(code), total + len(told)
        print(f"{code}: {right} of {len(told)} right{', else ' + ' '.join(wrong) if wrong else ''}")
    print(f"all: {all_right} of {total}, {all_right / total:.2%}")


def measure_pdf(options: argparse.Namespace) -> None:
    """Print how many PDFs are read in their order, drawn in it or with their lines shuffled."""
    draw = random.Random(0)
    words = [word for word in " ".join(read_news(options.data)[:400]).split() if len(word) < 20]
    for columns in (1, 2):
        for shuffled in (False, True):
            right, count = 0, 20
            for _ in range(count):
                wanted = _cut_lines(draw, words, 3 * columns * 30, 80 // columns - 4)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "a.pdf"
                    write_pdf(path, wanted, columns, draw if shuffled else None)
                    right += _read_pdf(path) == join_torn(wanted)
            drawn = "shuffled" if shuffled else "in their order"
            print(
                f"{columns} columns, lines drawn {drawn}: {right} of {count} PDFs right", flush=True
            )


def _cut_lines(draw: random.Random, words: list[str], count: int, width: int) -> list[str]:
    """Return lines of text as long as they may be, some with a word torn at their end."""
    at, lines = draw.randrange(len(words)), []
    rest = ""
    while len(lines) < count:
        line, rest = rest, ""
        while True:
            word = words[at % len(words)]
            if len(line) + len(word) + 1 > width:
                break
            line, at = f"{line} {word}".strip(), at + 1
        word = words[at % len(words)]
        if word.isalpha() and word.islower() and len(word) > 7 and len(line) + 5 < width:
            line, rest, at = f"{line} {word[:4]}-", word[4:], at + 1
        lines.append(line)
    lines[-1] = lines[-1].rstrip("-")
    return lines


def join_torn(lines: list[str]) -> str:
    """Return lines as a text, its torn words whole."""
    text = ""
    for line in lines:
        torn = text.endswith("-") and text[-2:-1].isalpha() and line[:1].islower()
        text = text[:-1] + line if torn else f"{text}\n{line}"
    return text.strip()


def write_pdf(path: Path, lines: list[str], columns: int, draw: random.Random | None) -> None:
    """Write three pages of 30 rows with a running head and numbers, shuffled by `draw`."""
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    with PdfPages(path) as file:
        for page in range(3):
            figure = Figure(figsize=(8.3, 11.7))
            own = lines[page * 30 * columns : (page + 1) * 30 * columns]
            places = [
                (0.08 + 0.45 * (at // 30), 0.92 - 0.028 * (at % 30), line)
                for at, line in enumerate(own)
            ]
            places += [(0.4, 0.97, "Collected News"), (0.5, 0.03, str(page + 1))]
            if draw is not None:
                draw.shuffle(places)
            for x, y, line in places:
                figure.text(x, y, line, fontsize=9, parse_math=False)
            file.savefig(figure)


def _read_pdf(path: Path) -> str:
    (record,) = read_records(path, ReadOptions("text"))
    found = record.parse()
    return found.text if isinstance(found, Document) else ""


def measure_tokens(options: argparse.Namespace) -> None:
    """Print bytes per token of a corpus of each language with a tokenizer of its own, and MB/s."""
    for language, texts in zip(("English", "Chinese"), read_texts(options.data), strict=True):
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "texts.jsonl"
            source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            for name, settings in (
                ("default settings", PrepareConfig()),
                ("all rules, near duplicates", PrepareConfig(rules="mixed", near_duplicates=0.8)),
            ):
                begin = time.process_time(), time.perf_counter()
                report = prepare(source, Path(place) / name, settings)
                cores, wall = time.process_time() - begin[0], time.perf_counter() - begin[1]
                sides = report.train, report.validation
                kept = sum(side.text_bytes for side in sides)
                size = sum(len(text.encode()) for text in texts) / 1e6
                print(
                    f"{language}, {name}: {size:.1f} MB, {kept / 1e6:.1f} kept, vocabulary of "
                    f"{report.vocab_size}, {kept / sum(side.tokens for side in sides):.2f} bytes "
                    f"a token, {size / cores:.2f} MB a second of a core, {size / wall:.2f} MB/s"
                )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "encodings": measure_encodings,
    "mojibake": measure_mojibake,
    "languages": measure_languages,
    "pages": lambda options: measure_pages(read_texts(options.data)),
    "pdf": measure_pdf,
    "tokens": measure_tokens,
}


def main() -> None:
    """Measure the parts that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--locale", type=Path, default=Path("/usr/share/locale"))
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}")
    for part in options.parts or PARTS:
        print(f"-- {part}", flush=True)
        PARTS[part](options)


if __name__ == "__main__":
    main()
