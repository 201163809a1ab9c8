"""What `prepare` writes stays what it was: against figures of its first form, and a plain one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest

from bmforge.data import PrepareConfig, prepare
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
