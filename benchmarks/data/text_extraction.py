"""Correctness of the text that `bmforge prepare` reads: encodings, languages, web pages and PDF.

    python -m benchmarks.data.text_extraction DATA [PART ...] [--locale /usr/share/locale]

- encodings: texts in nine encodings without a declaration.
- mojibake: repaired texts that were decoded wrongly, and sound texts that are changed.
- languages: detected languages of 50 sentences in each of eleven languages.
- pages: main texts of the generated pages of `web_pages.py`, with both readers.
- pdf: order of the lines of generated PDFs, with one and two columns.
- tokens: bytes per token of an English and a Chinese corpus, and the speed of the preparation.

DATA is described in `texts.py`. Sentences in other languages are translated messages of installed
programs (gettext's ``*.mo`` files).
"""

from __future__ import annotations

import argparse
import gettext
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.data.texts import read_news, read_reviews, read_texts
from benchmarks.data.web_pages import make_pages
from benchmarks.harness import make_parser
from bmforge.data import PrepareConfig, prepare
from bmforge.data.clean.repair import repair_text
from bmforge.data.dedup.tokens import split_tokens
from bmforge.data.sources.document import Document
from bmforge.data.sources.encoding import decode
from bmforge.data.sources.files import read_records
from bmforge.data.sources.record import ReadOptions
from bmforge.errors import DataError

LEAST_BYTES = 200
LANGUAGES = ("de", "es", "fr", "it", "nl", "pl", "ru", "sv", "ja", "zh_CN")
DOMAINS = ("coreutils", "glib20", "gtk30", "software-properties")
SENTENCES = 50


def read_messages(locale: Path, language: str, domains: Iterable[str] = DOMAINS) -> list[str]:
    """Return translated messages that are sentences without placeholders and markup."""
    sentences: list[str] = []
    for domain in domains:
        for name in sorted((locale / language / "LC_MESSAGES").glob(f"{domain}.mo")):
            with name.open("rb") as file:
                catalogue: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for source, translation in sorted(catalogue.items(), key=str):
                text = " ".join(translation.split())
                is_long = len(text) >= (20 if language in ("ja", "zh_CN") else 50)
                if (
                    is_long
                    and translation != source
                    and not set("%<>{}|\\=") & set(text)
                    and "--" not in text
                ):
                    sentences.append(text)
    return list(dict.fromkeys(sentences))


def make_long(texts: Iterable[str], encoding: str) -> Iterator[str]:
    """Join texts that an encoding can represent to texts of at least 200 bytes."""
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
    """Print the share of correctly decoded texts, without a byte order mark or a declaration."""
    kinds = {
        "poems": read_texts(options.data)[1],
        "reviews": read_reviews(options.data),
        "news": read_news(options.data),
        "Japanese messages": read_messages(options.locale, "ja"),
    }
    encodings = ("gb18030", "big5", "utf-16-le", "utf-16-be", "utf-16", "shift_jis", "euc-kr")
    all_correct = total = 0
    for kind, texts in kinds.items():
        for encoding in encodings:
            if kind == "news" and not encoding.startswith("utf"):
                continue  # ASCII in all other encodings
            if encoding == "euc-kr" or (encoding == "big5" and kind.startswith("Jap")):
                continue  # the encoding is not used for this language
            pairs = [(text, text.encode(encoding)) for text in make_long(texts, encoding)]
            correct = sum(_decode(raw) == text for text, raw in pairs)
            all_correct, total = all_correct + correct, total + len(pairs)
            print(f"{kind} as {encoding}: {correct} of {len(pairs)} correct", flush=True)
    print(f"all: {all_correct} of {total}, {all_correct / total:.4%}")


def _decode(raw: bytes) -> str:
    try:
        return decode(raw, "a text")
    except DataError as error:
        return f"error: {error}"


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
    """Print the share of repaired texts, and of changed texts that had no fault."""
    poems, reviews = read_texts(options.data)[1], read_reviews(options.data)
    repair_text("é")  # registers the sloppy codecs
    texts = [*poems[::12], *reviews]
    for kind, spoil in WRONG.items():
        pairs = [(text, wrong) for text in texts if (wrong := _apply(spoil, text)) is not None]
        repaired = sum(repair_text(wrong) == text for text, wrong in pairs)
        share = repaired / max(len(pairs), 1)
        print(f"{kind}: {repaired} of {len(pairs)} repaired, {share:.2%}", flush=True)
    for name, sound in (
        ("poems", poems),
        ("reviews", reviews),
        ("news", read_news(options.data)),
        *((f"messages, {one}", read_messages(options.locale, one)) for one in LANGUAGES),
    ):
        changed = sum(repair_text(text) != text for text in sound)
        print(f"sound {name}: {changed} of {len(sound)} changed", flush=True)


def _apply(spoil: Callable[[str], str], text: str) -> str | None:
    """Return the wrongly decoded text; None if characters are lost."""
    try:
        return spoil(text)
    except UnicodeError:
        return None


def measure_languages(options: argparse.Namespace) -> None:
    """Print the share of sentences whose language is detected, by language."""
    from bmforge.data.clean.languages import detect_language

    generator, all_correct, total = random.Random(0), 0, 0
    news = [text for text in read_news(options.data) if len(text) > 50]
    for name in (*LANGUAGES, "en"):
        texts = news if name == "en" else read_messages(options.locale, name)
        if len(texts) < SENTENCES:
            print(f"{name}: only {len(texts)} sentences")
        code = name.partition("_")[0]
        sentences = generator.sample(texts, min(SENTENCES, len(texts)))
        detected = [detect_language(text).code for text in sentences]
        others = sorted(set(detected) - {code})
        correct, total = detected.count(code), total + len(detected)
        all_correct += correct
        note = f", otherwise {' '.join(others)}" if others else ""
        print(f"{code}: {correct} of {len(detected)} correct{note}")
    print(f"all: {all_correct} of {total}, {all_correct / total:.2%}")


def count_tokens(text: str) -> Counter[str]:
    """Count words and Chinese characters."""
    return Counter(split_tokens(text))


def measure_pages(options: argparse.Namespace) -> None:
    """Print the F1 of words and characters, and the share of boilerplate, for both readers."""
    texts = read_texts(options.data)
    for reader in ("resiliparse", "trafilatura"):
        scores, boilerplate, lowest = [], [], (1.0, 0)
        for template, page, wanted, others in make_pages(texts, random.Random(0)):
            text = read_page(page, reader)
            extracted, expected = count_tokens(text), count_tokens(wanted)
            common = sum((extracted & expected).values())
            scores.append(2 * common / (sum(extracted.values()) + sum(expected.values())))
            lowest = min(lowest, (scores[-1], template))
            extra = sum(sum(count_tokens(part).values()) for part in others if part in text)
            boilerplate.append(extra / max(sum(extracted.values()), 1))
        print(
            f"{reader}: F1 {sum(scores) / len(scores):.4f}, lowest {lowest[0]:.3f} (template "
            f"{lowest[1]}), boilerplate {100 * sum(boilerplate) / len(boilerplate):.2f} %"
        )


def read_page(page: str, reader: str) -> str:
    """Return the main text of a page; "" if the page is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, "utf-8")
        (record,) = read_records(path, ReadOptions("text", reader))
        document = record.parse()
        return document.text if isinstance(document, Document) else ""


def measure_pdf(options: argparse.Namespace) -> None:
    """Print the share of PDFs that are read in order, written in order or shuffled."""
    generator = random.Random(0)
    words = [word for word in " ".join(read_news(options.data)[:400]).split() if len(word) < 20]
    for columns in (1, 2):
        for shuffled in (False, True):
            correct, count = 0, 20
            for _ in range(count):
                wanted = _cut_lines(generator, words, 3 * columns * 30, 80 // columns - 4)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "a.pdf"
                    write_pdf(path, wanted, columns, generator if shuffled else None)
                    correct += _read_pdf(path) == join_hyphenated(wanted)
            order = "shuffled" if shuffled else "in order"
            print(
                f"{columns} columns, lines {order}: {correct} of {count} PDFs correct", flush=True
            )


def _cut_lines(generator: random.Random, words: list[str], count: int, width: int) -> list[str]:
    """Return lines of at most `width` characters, some with a hyphenated word at the end."""
    at, lines = generator.randrange(len(words)), []
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


def join_hyphenated(lines: list[str]) -> str:
    """Join lines to a text without hyphenated words."""
    text = ""
    for line in lines:
        hyphenated = text.endswith("-") and text[-2:-1].isalpha() and line[:1].islower()
        text = text[:-1] + line if hyphenated else f"{text}\n{line}"
    return text.strip()


def write_pdf(path: Path, lines: list[str], columns: int, generator: random.Random | None) -> None:
    """Write three pages of 30 rows with headers and page numbers, shuffled by `generator`."""
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    with PdfPages(path) as file:
        for page in range(3):
            figure = Figure(figsize=(8.3, 11.7))
            own = lines[page * 30 * columns : (page + 1) * 30 * columns]
            positions = [
                (0.08 + 0.45 * (at // 30), 0.92 - 0.028 * (at % 30), line)
                for at, line in enumerate(own)
            ]
            positions += [(0.4, 0.97, "Collected News"), (0.5, 0.03, str(page + 1))]
            if generator is not None:
                generator.shuffle(positions)
            for x, y, line in positions:
                figure.text(x, y, line, fontsize=9, parse_math=False)
            file.savefig(figure)


def _read_pdf(path: Path) -> str:
    (record,) = read_records(path, ReadOptions("text"))
    document = record.parse()
    return document.text if isinstance(document, Document) else ""


def measure_tokens(options: argparse.Namespace) -> None:
    """Print the bytes per token of a corpus in each language, and the speed of its preparation."""
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
                    f"per token, {size / cores:.2f} MB/s of CPU time, {size / wall:.2f} MB/s"
                )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "encodings": measure_encodings,
    "mojibake": measure_mojibake,
    "languages": measure_languages,
    "pages": measure_pages,
    "pdf": measure_pdf,
    "tokens": measure_tokens,
}


def main() -> None:
    """Measure the parts, by default all."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument(
        "--locale", type=Path, default=Path("/usr/share/locale"), help="folder of the messages"
    )
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}")
    for part in options.parts or PARTS:
        print(f"-- {part}", flush=True)
        PARTS[part](options)


if __name__ == "__main__":
    main()
