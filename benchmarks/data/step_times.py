"""CPU time of each step of `bmforge prepare` on one document of 10 MB, in English and Chinese.

    python -m benchmarks.data.step_times DATA [--megabytes 10] [--steps NAME ...]

- read NAME: the document in a file of a format, read and parsed. Web pages have 7 MiB of text.
  `read .pdf` includes the child process that reads PDF files.
- other rows: one text step, or one rule set.
- prepare: the whole command with most steps, for one file.

DATA is described in `texts.py`. The texts are repeated, with shuffled words, until they have the
size. Each step runs once, in a new process, after a run on 2,000 characters, which loads libraries
and models. The CPU time of all threads is measured.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from html import escape
from pathlib import Path

from benchmarks.data.texts import read_docstrings, read_news, read_poems, read_reviews
from benchmarks.harness import make_parser, rerun_command, table, table_row

WARM_UP = 2000  # characters
UNCLEAR = "qzx wvk jpf bnm ghrt plokm zzxx qwy " * 9
MOST_SECONDS = 10.0
LINE = 50  # paragraphs per chapter of a book, and lines per page of a PDF


def read_language(data: Path, language: str, size: int) -> str:
    """Return one text of `size` bytes: paragraphs separated by blank lines, without copies.

    After the first round, the words or Chinese characters of each paragraph are shuffled.
    """
    if language == "English":
        plays = (data / "tinyshakespeare.txt").read_text("utf-8").split("\n\n")
        paragraphs = [*read_news(data), *read_docstrings(), *plays]
    else:
        paragraphs = [*read_reviews(data), *read_poems(data)]
    draw, raw = random.Random(0), "\n\n".join(paragraphs).encode()
    gap = " " if language == "English" else ""
    parts = [paragraph.split() if gap else list(paragraph) for paragraph in paragraphs]
    while len(raw) < size:
        for part in parts:
            draw.shuffle(part)
        raw += "\n\n".join(["", *map(gap.join, parts)]).encode()
    return raw[:size].decode("utf-8", "ignore")


def _zip(members: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def _paragraphs(text: str, before: str, after: str) -> str:
    return "".join(f"{before}{escape(part)}{after}" for part in text.split("\n\n"))


def _docx(text: str) -> bytes:
    body = _paragraphs(text, "<w:p><w:r><w:t>", "</w:t></w:r></w:p>")
    xml = f'<w:document xmlns:w="w"><w:body>{body}</w:body></w:document>'
    return _zip({"word/document.xml": xml})


def _epub(text: str) -> bytes:
    parts = text.split("\n\n")
    chapters = [parts[at : at + LINE] for at in range(0, len(parts), LINE)]
    names = [f"c{number}" for number in range(len(chapters))]
    items = "".join(
        f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>'
        for name in names
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    container = '<container><rootfiles><rootfile full-path="c.opf"/></rootfiles></container>'
    package = f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>"
    members = {"META-INF/container.xml": container, "c.opf": package}
    for name, chapter in zip(names, chapters, strict=True):
        body = _paragraphs("\n\n".join(chapter), "<p>", "</p>")
        members[f"{name}.xhtml"] = f"<html><body>{body}</body></html>"
    return _zip(members)


def _pdf(text: str) -> bytes:
    """Return a PDF with 50 lines of 90 characters per page; other letters than ASCII are "?"."""
    plain = text.encode("ascii", "replace").decode()
    for sign in "\\()":
        plain = plain.replace(sign, " ")
    words = " ".join(plain.split())
    lines = [words[at : at + 90] for at in range(0, len(words), 90)]
    pages = [lines[at : at + LINE] for at in range(0, len(lines), LINE)]
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, page in enumerate(pages):
        content = "".join(
            f"1 0 0 1 50 {800 - 15 * n} Tm ({line}) Tj " for n, line in enumerate(page)
        )
        packed = zlib.compress(f"BT /F 9 Tf {content}ET".encode())
        box = "/MediaBox[0 0 600 850]/Resources<</Font<</F 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R{box}/Contents {5 + 2 * number} 0 R>>".encode())
        head = f"<</Filter/FlateDecode/Length {len(packed)}>>stream\n".encode()
        objects.append(head + packed + b"\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, item)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    )
    return out + end % (len(objects) + 1, rows, len(objects) + 1, len(out))


def _page(text: str) -> bytes:
    """Return a page of at most 8 MB, as larger pages are dropped."""
    text = text.encode()[: 7 << 20].decode("utf-8", "ignore")
    body = _paragraphs(text, "<p>", "</p>")
    head = "<!DOCTYPE html><html><head><meta charset=utf-8><title>a</title></head>"
    return f"{head}<body><article>{body}</article></body></html>".encode()


def _warc(text: str) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + _page(text)
    head = "WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
    return f"{head}Content-Length: {len(http)}\r\n\r\n".encode() + http + b"\r\n\r\n"


FILES: dict[str, Callable[[str], bytes]] = {
    ".txt": str.encode,
    ".txt, GB18030": lambda text: text.encode("gb18030"),
    ".txt, one line": lambda text: " ".join(text.split()).encode(),
    ".txt.gz, one line": lambda text: gzip.compress(" ".join(text.split()).encode()),
    ".jsonl": lambda text: json.dumps({"text": text}).encode(),
    ".csv": lambda text: b'text\n"%s"\n' % text.replace('"', '""').encode(),
    ".html": _page,
    ".warc": _warc,
    ".docx": _docx,
    ".epub": _epub,
    ".pdf": _pdf,
}


def read_file(name: str, text: str) -> Callable[[], object]:
    """Write a file of a format; return a function that reads and parses it."""
    from bmforge.data.sources.document import Document
    from bmforge.data.sources.files import parse_record, read_records
    from bmforge.data.sources.record import ReadOptions

    folder = tempfile.mkdtemp()
    path = Path(folder, f"a{name.partition(',')[0]}")
    path.write_bytes(FILES[name](text))

    def run() -> None:
        for record in read_records(path, ReadOptions()):
            parsed = parse_record(record)
            assert isinstance(parsed, Document), parsed

    return run


def text_steps() -> dict[str, Callable[[str], object]]:
    """Return a function for each text step of `prepare`."""
    from bmforge.data.clean.languages import CutParagraphs, DetectLanguage
    from bmforge.data.clean.lists import WordBlocklist
    from bmforge.data.clean.normalize import normalize_text
    from bmforge.data.clean.private import MaskPrivate
    from bmforge.data.clean.rules import RULE_SETS
    from bmforge.data.clean.statistics import TextStatistics
    from bmforge.data.clean.text_repairs import RepairText
    from bmforge.data.clean.words import split_chinese_words, split_words
    from bmforge.data.sources.document import Document

    def apply_rules(name: str, text: str) -> None:
        split = split_chinese_words if name == "chinese" else split_words
        statistics = TextStatistics(text, split)
        for rule in RULE_SETS[name].rules:  # as `check_text`, which stops at the first violation
            high = RULE_SETS[name].bounds_of(rule, statistics).high
            if not (rule.is_within and high is not None and rule.is_within(statistics, high)):
                rule.measure(statistics)
        if rewrite := RULE_SETS[name].rewrite:
            rewrite(statistics)

    def on_document(step: Callable[[Document], object]) -> Callable[[str], object]:
        return lambda text: step(Document(text, "x", "x"))

    tidy = {
        "repair": RepairText(),
        **{
            name: RepairText(repair=False, **{name: True})
            for name in ("invisible", "width", "boilerplate", "wrapped")
        },
        "simplified": RepairText(repair=False, chinese="Hans"),
    }
    return {
        "normalize": normalize_text,
        "languages": on_document(DetectLanguage(("en", "zh"))),
        "by paragraph": on_document(CutParagraphs(("en", "zh"))),
        **{name: on_document(step) for name, step in tidy.items()},
        **{f"rules {name}": lambda text, name=name: apply_rules(name, text) for name in RULE_SETS},
        "bad words": on_document(WordBlocklist(("council", "forbidden", "禁词"))),
        "mask private": on_document(MaskPrivate()),
        "mask private, four phone regions": on_document(
            MaskPrivate(regions=("US", "DE", "GB", "FR"))
        ),
    }


def corpus_steps() -> dict[str, Callable[[str], object]]:
    """Return a function for each step that compares, scores or encodes documents."""
    from bmforge.data.clean.scores import train_linear, train_perplexity
    from bmforge.data.dedup.exact import find_copies, find_repeated_paragraphs
    from bmforge.data.dedup.near import find_near_duplicates
    from bmforge.data.dedup.overlap import Decontaminate, OverlapIndex
    from bmforge.data.dedup.spans import find_repeated_spans
    from bmforge.data.prepare.tokenize import encode_to_store, train_bpe
    from bmforge.data.sources.document import Document

    def pair(text: str) -> list[Document]:
        return [Document(text, "x", "1"), Document(f"{text} more", "x", "2")]

    def encode(text: str) -> None:
        tokenizer = train_bpe([text[: WARM_UP * 50]], 1000)
        with tempfile.TemporaryDirectory() as folder:
            encode_to_store([Document(text, "x", "1")], tokenizer, Path(folder, "tokens"))

    examples = [
        (str(n), f"example {n} " + " ".join(map(str, range(n, n + 30)))) for n in range(500)
    ]
    small = "a text of some words " * 9
    return {
        "decontaminate": lambda text: Decontaminate(OverlapIndex(examples))(pair(text)[0]),
        "quality score": lambda text: train_linear([small], ["b"])([text]),
        "perplexity": lambda text: train_perplexity([small])([text]),
        "exact duplicates": lambda text: find_copies(pair(text)),
        "near duplicates, two documents": lambda text: find_near_duplicates(lambda: pair(text)),
        "repeated paragraphs": lambda text: find_repeated_paragraphs(lambda: pair(text)[:1]),
        "repeated spans": lambda text: find_repeated_spans(lambda: pair(text)[:1]),
        "train the tokenizer": lambda text: train_bpe([text], 8192),
        "encode": encode,
    }


def prepare_file(text: str) -> None:
    """Run `prepare` on one text file with most steps."""
    from bmforge.data import PrepareConfig, prepare

    config = PrepareConfig(
        languages=("any",),
        text_repairs=("repair", "invisible", "width", "boilerplate", "wrapped"),
        mask_private=True,
        near_duplicates=0.8,
        repeated_paragraphs=50,
        repeated_spans=50,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_text(text, "utf-8")
        prepare([Path(folder, "a.txt")], Path(folder, "out"), config)


def list_steps() -> list[str]:
    """Return the names of all steps."""
    reads = (f"read {name}" for name in FILES)
    return [*reads, *text_steps(), *corpus_steps(), "prepare"]


def time_step(name: str, path: str) -> None:
    """Print the CPU seconds of one step, in a new process."""
    text = Path(path).read_text("utf-8")
    if name.startswith("read "):
        run = read_file(name.removeprefix("read "), text)
        read_file(name.removeprefix("read "), text[:WARM_UP])()
    else:
        steps = {**text_steps(), **corpus_steps(), "prepare": prepare_file}
        steps[name](text[:WARM_UP])
        steps[name](UNCLEAR)  # loads the second language model
        run = lambda: steps[name](text)  # noqa: E731
    begin = time.process_time()
    run()
    seconds = time.process_time() - begin
    if name == "read .pdf":
        from bmforge.data.sources.pdf_process import shared_pdf_process

        shared_pdf_process().close()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds += usage.ru_utime + usage.ru_stime
    print(seconds)


def main() -> None:
    """Print a row for each step, and the number of steps above the limit."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--steps", nargs="*", help="default: all")
    options = parser.parse_args()
    print(table(["step", "English, CPU s", "Chinese, CPU s"], []))
    slow = 0
    with tempfile.TemporaryDirectory() as folder:
        for language in ("English", "Chinese"):
            text = read_language(options.data, language, int(options.megabytes * 1e6))
            Path(folder, language).write_text(text, "utf-8")
        for name in options.steps or list_steps():
            seconds = [measure(name, Path(folder, one)) for one in ("English", "Chinese")]
            slow += sum(value > MOST_SECONDS for value in seconds)
            print(table_row([name, *(f"{value:.2f}" for value in seconds)]), flush=True)
    print(f"above {MOST_SECONDS} s: {slow}")


def measure(name: str, path: Path) -> float:
    """Return the CPU seconds of one step."""
    command = rerun_command("--step", name, str(path))
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    if process.returncode:
        sys.exit(process.stderr)
    return float(process.stdout.split()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        time_step(*sys.argv[2:])
    else:
        main()
