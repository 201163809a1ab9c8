"""Rows by their keys: through files as in memory, and as `sorted` has them."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from bmforge.data.dedup.sort import ROW, SortedRows, make_rows


def rows_of(keys: list[bytes], start: int = 0) -> np.ndarray:
    positions = np.arange(start, start + len(keys))
    return make_rows(keys, positions, positions * 3 + 1)


@pytest.mark.parametrize("bound_rows", [0, 10, 299, 300, 10_000])
def test_order_does_not_depend_on_the_bound(tmp_path: Path, bound_rows: int) -> None:
    """Equal keys stay in the order of their positions, and it may be read twice."""
    keys = [blake2b(bytes([i % 77]), digest_size=16).digest() for i in range(300)]
    sorted_rows = SortedRows(tmp_path / "rows", bound_rows * ROW.itemsize)
    for start in range(0, 300, 7):
        sorted_rows.add(rows_of(keys[start : start + 7], start))
    expected = sorted(range(300), key=lambda i: (keys[i], i))
    for _ in range(2):
        found = np.concatenate(list(sorted_rows))
        assert found["position"].tolist() == expected
        assert found["size_bytes"].tolist() == [3 * i + 1 for i in expected]
    assert (tmp_path / "rows").exists() == (bound_rows < 300)
    sorted_rows.close()
    assert not (tmp_path / "rows").exists()


def test_no_rows(tmp_path: Path) -> None:
    assert list(SortedRows(tmp_path / "rows", 0)) == []
