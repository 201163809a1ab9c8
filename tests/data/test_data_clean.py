from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.data import CleanCount, Document, drop_duplicates, normalize_text
from bmforge.data.clean.normalize import normalize_documents


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
    assert normalize_text(raw) == clean


@given(st.text(alphabet=st.sampled_from("ab \t\n\r\x0b\x0c\x85\u2029\u00a0e\u0301\ufeff\x01")))
def test_normalise_twice_is_once(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in once)


def test_drop_duplicates() -> None:
    texts = ["a", "b\r\n", "a ", "", "b", "c", "\n"]
    count = CleanCount()
    documents = (Document(text, "x", str(i)) for i, text in enumerate(texts))
    kept = list(drop_duplicates(normalize_documents(documents, count), count))
    assert [(d.text, d.place) for d in kept] == [("a", "0"), ("b", "1"), ("c", "5")]
    assert (count.duplicates, count.empty) == (2, 2)
