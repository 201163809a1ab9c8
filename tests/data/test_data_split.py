"""What is held out: about the asked bytes, of many documents and of one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmforge.data import Split, split_documents
from bmforge.data.clean.normalize import text_digest
from bmforge.data.prepare.split import cut_end
from bmforge.errors import ConfigError


def held_out_bytes(split: Split, sizes: list[int]) -> int:
    return int(np.array(sizes)[split.held_out].sum()) + split.cut_bytes


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_split_is_by_bytes(sizes: list[int], fraction: float, seed: int) -> None:
    """Within a tenth, or a byte, of what was asked, whatever the documents' sizes."""
    digests = [text_digest(str(i)) for i in range(len(sizes))]
    split = split_documents(digests, sizes, fraction, seed)
    asked = fraction * sum(sizes)
    assert abs(held_out_bytes(split, sizes) - asked) <= max(0.1 * asked, 1)
    assert not split.held_out.all()
    if split.cut is not None:
        assert not split.held_out[split.cut]
        assert 0 < split.cut_bytes < sizes[split.cut]
    order = np.random.default_rng(seed).permutation(len(sizes))
    again = split_documents([digests[i] for i in order], [sizes[i] for i in order], fraction, seed)
    assert (again.held_out == split.held_out[order]).all()
    assert (again.cut is None) == (split.cut is None)
    assert again.cut is None or order[again.cut] == split.cut


def test_split_edges() -> None:
    digests = [text_digest(str(i)) for i in range(1000)]
    assert not split_documents(digests, [5] * 1000, 0.0, 0).held_out.any()
    assert split_documents(digests[:1], [500], 0.0, 0).cut is None
    first, second = (split_documents(digests, [5] * 1000, 0.1, seed) for seed in (0, 1))
    assert first.held_out.sum() == second.held_out.sum() == 100
    assert first.cut is second.cut is None
    assert (first.held_out != second.held_out).any()
    with pytest.raises(ConfigError, match=r"validation_fraction=1\.0"):
        split_documents(digests, [5] * 1000, 1.0, 0)


@given(
    st.text(st.sampled_from("ab \n.\u00e9\u3002\U0001f600"), min_size=2, max_size=80),
    st.integers(1, 200),
)
def test_any_text_is_cut_in_two(text: str, size: int) -> None:
    """Nothing is lost but spaces and line ends at the cut, and no character is torn."""
    text = f"x{text}y"
    size = min(size, len(text.encode()) - 1)
    head, tail = cut_end(text, size)
    assert head
    assert tail
    assert text.startswith(head)
    assert text.endswith(tail)
    assert not text[len(head) : len(text) - len(tail)].strip(" \n")
    # Half more or less, a character of four bytes, and what was left out at the cut.
    left_out = len(text.encode()) - len(head.encode()) - len(tail.encode())
    assert abs(len(tail.encode()) - size) <= size // 2 + 4 + left_out


@pytest.mark.parametrize(
    ("text", "size", "tail"),
    [
        ("one two.\n\nthree four\nfive six", 15, "three four\nfive six"),  # a paragraph first
        ("one two three\nfour five six", 12, "four five six"),  # then a line
        ("one two. three four five six", 18, "three four five six"),  # then a sentence
        ("one two three four", 9, "three four"),  # then a word
        ("\u4e00\u4e8c\u3002\u4e09\u56db", 5, "\u4e09\u56db"),
        ("abcdef", 2, "ef"),
    ],
)
def test_a_text_is_cut_where_something_ends(text: str, size: int, tail: str) -> None:
    assert cut_end(text, size)[1] == tail
