from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bmforge.data import (
    END_OF_TEXT,
    Document,
    TokenStore,
    encode_to_store,
    load_tokenizer,
    python_topics,
    train_bpe,
)
from bmforge.errors import ConfigError, DataError
from bmforge.host_memory import find_glibc
from bmforge.tokenizers import FastTokenizer

TEXTS = [d.text for d in python_topics()][:12]
# Prints by how much the memory of a process grows while it prepares the second file.
GROWTH = """
import sys
from bmforge.data import PrepareConfig, prepare
from bmforge.host_memory import resident_bytes
small, large, out = sys.argv[1:]
prepare(small, out + "-small", PrepareConfig(vocab_size=300, workers=1))
before = resident_bytes()
prepare(large, out + "-large", PrepareConfig(vocab_size=300, workers=1))
print(resident_bytes() - before)
"""
SAMPLES = [*TEXTS[:2], "Grüße, 世界! 🦉\n\n  tab\tend ", "", f"a{END_OF_TEXT}b"]


def test_transformers_opens_it_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 600)
    tokenizer.save_pretrained(tmp_path / "t")
    ours = load_tokenizer(tmp_path / "t")
    assert ours.vocab_size == 600
    assert ours.token_to_id(END_OF_TEXT) == 0
    for cls in (PreTrainedTokenizerFast, AutoTokenizer):
        theirs = cls.from_pretrained(tmp_path / "t")
        assert (len(theirs), theirs.eos_token_id, theirs.eos_token) == (600, 0, END_OF_TEXT)
        for text in SAMPLES:
            ids = ours.encode(text)
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids) == text


def test_training_is_deterministic(tmp_path: Path) -> None:
    for folder, texts in (("a", TEXTS), ("b", iter(TEXTS))):
        train_bpe(texts, 500).save_pretrained(tmp_path / folder)
    files = [(tmp_path / folder / "tokenizer.json").read_bytes() for folder in "ab"]
    assert files[0] == files[1]


def test_store_holds_the_text_back_and_forth(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 400)
    samples = SAMPLES * 150  # several batches
    count = encode_to_store((Document(t, "x") for t in samples), tokenizer, tmp_path / "s")
    store = TokenStore(tmp_path / "s")
    assert (count.documents, count.tokens) == (len(samples), store.num_tokens)
    assert count.text_bytes == sum(len(t.encode()) for t in samples)
    assert store.dtype.name == "uint16"
    for (start, end), text in zip(store.documents(), samples, strict=True):
        ids = store.tokens[start:end].tolist()
        assert ids.count(0) == 1  # a text cannot forge the end of a document
        assert ids[-1] == 0
        assert tokenizer.decode(ids[:-1]) == text
    assert tokenizer.encode(END_OF_TEXT) == [0]  # the setting is put back


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=256"):
        train_bpe(TEXTS, 256)
    with pytest.raises(DataError, match=r"no tokenizer in .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_limits_inside_the_file_cut_nothing(tmp_path: Path) -> None:
    """A tokenizer.json keeps truncation and padding from its last use; texts are encoded whole."""
    trained = train_bpe(TEXTS, 400)
    whole = trained.encode(TEXTS[0])
    trained.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=1 << 16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == whole
    opened = FastTokenizer.from_pretrained(tmp_path)
    assert opened.encode(TEXTS[0]) == whole
    opened.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == content


@pytest.mark.skipif(find_glibc() is None, reason="the allocator is not glibc's")
def test_memory_of_the_training_is_returned(tmp_path: Path) -> None:
    """Otherwise 80 MB of 100,000 words stay in the parent process while the workers encode."""
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=8)) for _ in range(100_000)]
    lines = [json.dumps({"text": " ".join(words[i : i + 100])}) for i in range(0, len(words), 100)]
    for name, count in (("small.jsonl", 3), ("large.jsonl", len(lines))):
        (tmp_path / name).write_text("\n".join(lines[:count]))
    paths = [str(tmp_path / name) for name in ("small.jsonl", "large.jsonl", "out")]
    command = [sys.executable, "-c", GROWTH, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 40_000_000
