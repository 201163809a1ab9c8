from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.data import CleanCount, Document, drop_duplicates, normalise, split_documents
from bmforge.data.clean.normalise import normalise_documents, text_digest
from bmforge.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne"),
        ("e\u0301", "\u00e9"),
        ("a\x00b\x07\ufeffc\x7f", "abc"),
        ("a  \nb\t \n", "a\nb"),
        ("a\n\n\n\n \n\nb", "a\n\nb"),
        ("\n\n    indented\n", "    indented"),
        ("e\x07\u0301", "\u00e9"),
        ("a\u3000\n\u3000b", "a\n\u3000b"),
        (" \n\t\n", ""),
    ],
)
def test_normalise(raw: str, clean: str) -> None:
    assert normalise(raw) == clean


@given(st.text(alphabet=st.sampled_from("ab \t\n\r\x0b\x0c\x85\u2029\u00a0e\u0301\ufeff\x01")))
def test_normalise_twice_is_once(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in once)


def test_drop_duplicates() -> None:
    texts = ["a", "b\r\n", "a ", "", "b", "c", "\n"]
    count = CleanCount()
    documents = (Document(text, "x", i) for i, text in enumerate(texts))
    kept = list(drop_duplicates(normalise_documents(documents, count), count))
    assert [(d.text, d.line) for d in kept] == [("a", 0), ("b", 1), ("c", 5)]
    assert (count.duplicates, count.empty) == (2, 2)


@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_split_has_two_sides_and_the_asked_bytes(
    sizes: list[int], fraction: float, seed: int
) -> None:
    digests = [text_digest(str(i)) for i in range(len(sizes))]
    held_out = split_documents(digests, sizes, fraction, seed)
    assert held_out.any()
    assert not held_out.all()
    taken = int(np.array(sizes)[held_out].sum())
    assert abs(taken - fraction * sum(sizes)) <= max(sizes)
    order = np.random.default_rng(seed).permutation(len(sizes))
    again = split_documents([digests[i] for i in order], [sizes[i] for i in order], fraction, seed)
    if len(set(sizes)) == len(sizes):  # no tie between sizes
        assert (again == held_out[order]).all()


def test_split_edges() -> None:
    digests = [text_digest(str(i)) for i in range(1000)]
    assert not split_documents(digests[:1], [5], 0.5, 0).any()
    assert not split_documents(digests, [5] * 1000, 0.0, 0).any()
    first, second = (split_documents(digests, [5] * 1000, 0.1, seed) for seed in (0, 1))
    assert first.sum() == second.sum() == 100
    assert (first != second).any()
    with pytest.raises(ConfigError, match=r"validation_fraction=1\.0"):
        split_documents(digests, [5] * 1000, 1.0, 0)
