"""What `prepare` writes stays what it was: against figures of its first form, and a plain one."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import zstandard

from bmforge.data import PrepareConfig, load_tokenizer, open_store, prepare
from bmforge.errors import ConfigError, DataError

# BLAKE2b of the files that the one-process form of `prepare` wrote for `write_corpus`.
FIRST_FORM = {
    "tokenizer/tokenizer.json": "87501d8369e0ba7d",
    "tokenizer/tokenizer_config.json": "6e435273a56b3cfa",
    "train/tokens.bin": "bbf48fe0f14a0394",
    "train/tokens.idx": "6d6ced72261e568b",
    "validation/tokens.bin": "a6d97d8484c03625",
    "validation/tokens.idx": "03fa26baca7f1431",
}
# The record of a corpus as it was written then.
FORMAT_1 = """\
format = 1

[counts]
documents = 2
duplicates = 1
empty = 0
skipped = 0
vocab_size = {vocab_size}
eos_id = 0

[settings]
vocab_size = 300
validation_fraction = 0.0
seed = 0
skip_bad = false
skip_unread = false
text_field = "text"
tokenizer = ""

[train]
documents = 2
text_bytes = {text_bytes}
tokens = {tokens}

[validation]
documents = 0
text_bytes = 0
tokens = 0

[[inputs]]
path = {path}
size_bytes = {size_bytes}
modified_ns = {modified_ns}
digest = {digest}
"""


def write_corpus(folder: Path) -> Path:
    """Five hundred texts of three scripts in four files: copies, empty ones, marks, odd spaces."""
    draw = random.Random(22)
    words = [
        "the",
        "sea",
        "Über",
        "naïve",
        "e\u0301tude",
        "春眠",
        "不觉",
        "晓，",
        "42",
        "\u3000x",
        "a\u200bb",
    ]

    def text() -> str:
        lines = [
            " ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(draw.randint(1, 9))
        ]
        return draw.choice(["\n", "\r\n", "\n\n\n\n"]).join(lines) + draw.choice(["", " ", "\n \n"])

    texts = [text() for _ in range(460)]
    texts += draw.choices(texts, k=25) + [" ", "\n\t", ""] + [texts[7] + "  \r\n"] * 12
    draw.shuffle(texts)
    folder.mkdir()
    for number, part in enumerate((texts[:200], texts[200:203], texts[203:])):
        lines = (json.dumps({"text": one}, ensure_ascii=number == 0) + "\n" for one in part)
        (folder / f"{number}.jsonl").write_text("".join(lines), "utf-8")
    (folder / "own.md").write_bytes(("\ufeff" + texts[0] + "\x0c" + texts[1]).encode())
    return folder


def digests(out: Path) -> dict[str, str]:
    """Return the digest of every file of a corpus but its record, which names paths and times."""
    files = sorted(p for p in out.rglob("*") if p.is_file() and p.parent != out)
    return {
        p.relative_to(out).as_posix(): blake2b(p.read_bytes(), digest_size=8).hexdigest()
        for p in files
    }


def test_bytes_are_those_of_the_first_form(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "in")
    config = PrepareConfig(vocab_size=400, validation_fraction=0.1)
    report = prepare(corpus, tmp_path / "out", config)
    assert (report.documents, report.duplicates, report.empty, report.skipped) == (458, 40, 3, 0)
    assert (report.train.tokens, report.validation.tokens) == (20797, 2315)
    found = digests(tmp_path / "out")
    assert {name: one for name, one in found.items() if not name.endswith(".doc")} == FIRST_FORM


def test_a_record_of_the_first_form_is_read(tmp_path: Path) -> None:
    """As it was written before shards and stages, without a funnel, steps and newer settings."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    texts = ["one sea, two seas " * 20, "three lakes, four lakes " * 20]
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in (*texts, texts[0])))
    config = PrepareConfig(vocab_size=300, validation_fraction=0.0)
    now = prepare(source, out, config)
    status = source.stat()
    record = FORMAT_1.format(
        text_bytes=sum(len(text.rstrip()) for text in texts),
        tokens=now.train.tokens,
        vocab_size=now.vocab_size,
        path=json.dumps(str(source)),
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        digest=json.dumps(blake2b(source.read_bytes()).hexdigest()[:32]),
    )
    (out / "prepared.toml").write_text(record)
    report = prepare(source, out, config)
    assert report == replace(now, reused=True, funnel=None, summary=None, outputs=())
    assert (report.documents, report.duplicates, report.train.documents) == (2, 1, 2)
    with pytest.raises(ConfigError, match=r"rules='none' in that corpus, 'english' now"):
        prepare(source, out, replace(config, rules="english"))
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(ConfigError, match="other input text"):
        prepare(source, out, config)
    (out / "prepared.toml").write_text(record.replace("format = 1", "format = 3"))
    with pytest.raises(DataError, match="format 3"):
        prepare(source, out, config)


PIECES = (
    *(
        "word ",
        "\u4e2d\u6587\u3002",
        "a\r\nb",
        "\x00",
        "\ufeff",
        "  \n",
        "\n\n\n\n",
        "e\u0301",
        "\u2028",
        "tail   ",
    ),
    *("\u3000\n", "\U0001f642", "\x85", "    indented ", "All men are equal before the law. "),
)
OPTIONS = ({}, {"repeated_paragraphs": 50}, {"near_duplicates": 0.7}, {"mask_private": True})


@pytest.mark.parametrize("seed", range(16))
def test_counts_are_those_of_the_decoded_texts(tmp_path: Path, seed: int) -> None:
    """Few documents, so that one is cut in two; the blanks at the cut are in neither part."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(4, 40))) for _ in range(1 + seed % 7)]
    texts += [f"{texts[0]}\n\n{'The same long paragraph. ' * 4}\n\n{n} end" for n in range(2)]
    lines = [json.dumps({"text": text, "license": "MIT"}) for text in texts]
    broken = [json.dumps({"text": "half \ud800 a pair"}), '{"text": 3}']
    (tmp_path / "a.jsonl").write_text("\r\n".join([*lines, *broken]) + "\n")
    config = PrepareConfig(
        vocab_size=300, skip_bad=True, validation_fraction=0.2, **OPTIONS[seed % len(OPTIONS)]
    )
    report = prepare(tmp_path / "a.jsonl", tmp_path / "out", config)
    tokenizer, total = load_tokenizer(report.tokenizer_dir), 0
    for prefix, count in (
        (report.train_prefix, report.train),
        (report.validation_prefix, report.validation),
    ):
        if prefix is not None:
            store = open_store(prefix)
            decoded = [
                tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in store.documents()
            ]
            text_bytes = sum(len(text.encode()) for text in decoded)
            assert (count.documents, count.text_bytes) == (len(decoded), text_bytes)
            total += text_bytes
    assert report.summary is not None
    assert report.funnel is not None
    tables = (report.summary.licenses, report.summary.languages, report.summary.lengths)
    tables += tuple(report.summary.origins.values())
    for table in tables:
        assert sum(counts[1] for counts in table.values()) == total
    read = sum(len(text.encode()) for text in texts) + sum(map(len, broken)) + len("\r\n\n")
    assert (report.funnel.read.documents, report.funnel.read.text_bytes) == (len(texts) + 2, read)
    assert report.skipped == report.funnel.dropped["unreadable"].documents == 2
    assert report.funnel.missing().documents == report.funnel.missing().text_bytes == 0


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("size", [5_000, 500_000])
def test_lines_in_front_of_a_truncation_are_kept(tmp_path: Path, packing: str, size: int) -> None:
    draw = random.Random(size)
    lines = [json.dumps({"text": str(draw.random())}) + "\n" for _ in range(size // 30)]
    path = tmp_path / f"a.jsonl.{packing}"
    packed = {"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}[packing].compress(
        "".join(lines).encode()
    )
    path.write_bytes(packed[: -len(packed) // 8])
    config = PrepareConfig(vocab_size=300, skip_bad=True, validation_fraction=0.0)
    (tmp_path / "b.txt").write_text("a sound file")
    report = prepare(tmp_path, tmp_path.parent / f"{tmp_path.name} out", config)
    assert report.funnel is not None
    lost = report.funnel.dropped["unreadable"]
    assert lost.documents == 1
    # A block of bzip2 has 900 kB, and zstd's has 128 kB, so a small file has no sound block.
    if packing in ("gz", "xz") or (packing == "zst" and size > 1 << 18):
        assert (lost.text_bytes, report.documents > len(lines) // 2) == (0, True)
    else:
        assert (lost.text_bytes, report.documents) == (len(packed) * 7 // 8, 1)
