"""MinHash keys of many documents at a time: equal to Python integers, one document at a time."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data.dedup.minhash import DedupConfig, MinHasher, hash_shingles
from bmforge.data.dedup.near import read_sketches
from bmforge.data.dedup.tokens import digest_string, split_tokens
from bmforge.data.sources.document import Document

PRIME = (1 << 61) - 1
TOKEN = regex.compile(
    r"(?V1)[[\p{L}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\uff70]--\p{LineBreak=SA}]"
    r"[[\p{L}\p{N}\p{M}]--[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\uff70]--\p{LineBreak=SA}]*"
    r"|[[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\uff70]&&[\p{L}\p{N}]][\p{M}\uff9e\uff9f]*"
    r"|(?=[\p{LineBreak=SA}&&\p{L}])\X"
)
CHARACTERS = st.one_of(
    st.sampled_from("aB3 _-'.\n\t\x1c\u2028\u00a0"),
    st.sampled_from("你好、ｱﾞカนี้နမस्ते가\u0301\u200b\u00adﬁÉ²٣"),
    st.characters(exclude_categories=["Cs"]),
)


def plain_signature(hasher: MinHasher, ngrams: list[int]) -> list[int]:
    """The smallest (a x + b) mod 2^61 - 1, on 64-bit words as datasketch computes it."""
    pairs = zip(hasher._a[:, 0].tolist(), hasher._b[:, 0].tolist(), strict=True)
    return [min((a * x + b) % (1 << 64) % PRIME for x in ngrams) for a, b in pairs]


@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300), min_size=1, max_size=6)
)
@settings(max_examples=20, deadline=None)
def test_signatures_of_many_documents_equal_python_integers(documents):
    hasher = MinHasher(DedupConfig(hashes=16))
    arrays = [np.array(ngrams, np.uint64) for ngrams in documents]
    signatures = hasher.sign_all(arrays)
    assert signatures.tolist() == [plain_signature(hasher, ngrams) for ngrams in documents]
    keys = hasher.sketch_all(arrays)
    for array, signature, row in zip(arrays, signatures, keys, strict=True):
        assert (hasher.sign(array) == signature).all()
        assert (hasher.sketch(array) == row).all()


@pytest.mark.parametrize("size", [255, 256, 257, 512, 600])
def test_documents_that_fill_blocks_exactly(size):
    hasher, draw = MinHasher(DedupConfig(hashes=8)), np.random.default_rng(size)
    documents = [draw.integers(0, 2**64, n, np.uint64) for n in (size, 1, size, 256 - size % 256)]
    expected = [plain_signature(hasher, ngrams.tolist()) for ngrams in documents]
    assert hasher.sign_all(documents).tolist() == expected


def test_hashes_above_the_prime_wrap_around():
    """Of a x + b from 2^61 - 1 on, the remainder is the smallest value, not the largest."""
    hasher = MinHasher(DedupConfig(hashes=4))
    inverse = [pow(int(a), -1, 1 << 64) if a % 2 else None for a in hasher._a[:, 0].tolist()]
    for k, (factor, b) in enumerate(zip(inverse, hasher._b[:, 0].tolist(), strict=True)):
        for value in (PRIME - 1, PRIME, PRIME + 1, 2 * PRIME, (1 << 64) - 1):
            if factor is not None:
                x = (value - b) * factor % (1 << 64)
                assert hasher.sign(np.array([x, 12345], np.uint64))[k] == min(
                    value % PRIME, plain_signature(hasher, [12345])[k]
                )


@given(st.lists(st.text(CHARACTERS, max_size=40), max_size=8))
@settings(max_examples=60, deadline=None)
def test_sketches_are_those_of_each_text(texts):
    documents = [Document(text, "f", str(number)) for number, text in enumerate(texts)]
    hasher = MinHasher(DedupConfig(hashes=24))
    made = read_sketches(iter(documents), hasher)
    assert made.keys.shape == (len(texts), hasher.bands)
    for document, row in zip(documents, made.keys, strict=True):
        shingles = hash_shingles(document.text, 5)
        id = np.frombuffer(digest_string(document.id), np.uint64)
        expected = hasher.sketch(shingles) if len(shingles) else np.resize(id, hasher.bands)
        assert (row == expected).all()


def test_keys_do_not_depend_on_which_texts_are_signed_together():
    words = [f"w{number % 977}" for number in range(60_000)]
    texts = [" ".join(words[start : start + 700]) for start in range(0, 60_000, 700)]
    documents = [Document(text, "f", str(number)) for number, text in enumerate(texts)]
    hasher = MinHasher(DedupConfig())
    together = read_sketches(documents, hasher).keys
    alone = [read_sketches([document], hasher).keys[0] for document in documents]
    assert (together == np.array(alone)).all()


@given(st.text(CHARACTERS, max_size=80))
@settings(max_examples=200, deadline=None)
def test_tokens_equal_one_search_of_the_whole_text(text):
    if not text.isascii():
        visible = regex.sub(r"[\p{Default_Ignorable_Code_Point}\p{Cf}]+", "", text)
        text = unicodedata.normalize("NFKC", visible)
    assert split_tokens(text) == TOKEN.findall(text.lower())
