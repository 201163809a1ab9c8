from __future__ import annotations

import tempfile
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.data import TokenStore, TokenStoreWriter, check_vocabulary, merge_stores
from bmforge.data.store.token_store import HEADER, MAGIC
from bmforge.errors import ConfigError, DataError

# Made by the original code of CPM-1-Pretrain (reference/bm_tools.md, 6.2).
GOLDEN_IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000200000001000000"
    "000000000000000006000000000000000a00000000000000000000000000000002000000000000000300000000000000"
)
GOLDEN_BIN = bytes.fromhex("010002000300040005002f75")


def write_golden(prefix: Path, **settings: object) -> None:
    with TokenStoreWriter(prefix, vocab_size=30000, **settings) as writer:  # type: ignore[arg-type]
        writer.add_item([1, 2, 3])
        writer.add_item(np.array([4, 5]))
        writer.end_document()
        writer.add_item([29999])
        writer.end_document()


def test_golden_bytes(tmp_path: Path) -> None:
    write_golden(tmp_path / "deep" / "g")
    assert (tmp_path / "deep" / "g.idx").read_bytes() == GOLDEN_IDX
    assert (tmp_path / "deep" / "g.bin").read_bytes() == GOLDEN_BIN
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["g.bin", "g.idx"]


def test_reading_the_golden_store(tmp_path: Path) -> None:
    (tmp_path / "g.idx").write_bytes(GOLDEN_IDX)
    (tmp_path / "g.bin").write_bytes(GOLDEN_BIN)
    store = TokenStore(tmp_path / "g")
    assert len(store) == 3
    assert store.sizes.tolist() == [3, 2, 1]
    assert store.doc_idx.tolist() == [0, 2, 3]
    assert store.get(0, offset=1, length=2).tolist() == [2, 3]
    assert store[-1].tolist() == [29999]
    assert [part.tolist() for part in store[0:2]] == [[1, 2, 3], [4, 5]]
    assert list(store.documents()) == [(0, 5), (5, 6)]
    assert (store.num_tokens, store.num_documents) == (6, 2)
    assert store.map_for_random_access().tolist() == store.tokens.tolist()
    with pytest.raises(IndexError, match="step 2"):
        store[0:3:2]
    for bad in ({"i": 3}, {"i": -4}, {"i": 0, "offset": 2, "length": 2}, {"i": 0, "offset": -1}):
        with pytest.raises(IndexError):
            store.get(**bad)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64"]),
    st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=4), max_size=6),
)
def test_round_trip(dtype: str, documents: list[list[list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "s")
        with TokenStoreWriter(prefix, dtype) as writer:
            for document in documents:
                for item in document:
                    writer.add_item(item)
                writer.end_document()
        store = TokenStore(prefix)
        items = [item for document in documents for item in document]
        assert store.dtype == np.dtype(dtype)
        assert [part.tolist() for part in store[:]] == items
        assert store.num_documents == len(documents)
        flat = store.tokens.tolist()
        spans = [flat[a:b] for a, b in store.documents()]
        assert spans == [[t for item in document for t in item] for document in documents]


def test_dtype_follows_vocabulary(tmp_path: Path) -> None:
    for vocab_size, name in ((65499, "uint16"), (65500, "int32"), (None, "int32")):
        writer = TokenStoreWriter(tmp_path / "x", vocab_size=vocab_size)
        assert writer.dtype.name == name
        writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses(tmp_path: Path) -> None:
    write_golden(tmp_path / "g")
    with pytest.raises(ConfigError, match=r"g\.bin.*overwrite=True"):
        write_golden(tmp_path / "g")
    write_golden(tmp_path / "g", overwrite=True)
    for item in ([-1], [65536]):
        with (
            pytest.raises(DataError, match=r"out of range for uint16"),
            TokenStoreWriter(tmp_path / "new", vocab_size=10) as writer,
        ):
            writer.add_item(item)
    with (
        pytest.raises(DataError, match="float64"),
        TokenStoreWriter(tmp_path / "new", vocab_size=10) as writer,
    ):
        writer.add_item([0.5])  # type: ignore[list-item]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.bin", "g.idx"]
    with pytest.raises(ConfigError, match="float32"):
        TokenStoreWriter(tmp_path / "f", "float32")


def test_an_open_last_document_is_ended(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "s", vocab_size=10) as writer:
        writer.add_item([1])
    assert list(TokenStore(tmp_path / "s").documents()) == [(0, 1)]


def changed(offset: int, value: bytes) -> bytes:
    return GOLDEN_IDX[:offset] + value + GOLDEN_IDX[offset + len(value) :]


DAMAGED = {
    "other file": (b"PK\x03\x04" * 9, GOLDEN_BIN, "not a token store"),
    "legacy": (changed(0, b"TNTIDX\0\0\0"), GOLDEN_BIN, "legacy"),
    "empty": (b"", GOLDEN_BIN, "not a token store"),
    "half a header": (GOLDEN_IDX[:20], GOLDEN_BIN, "truncated inside its header"),
    "newer": (changed(9, b"\x02"), GOLDEN_BIN, "version 2"),
    "unknown dtype": (changed(17, b"\x09"), GOLDEN_BIN, "dtype code 9"),
    "floats": (changed(17, b"\x06"), GOLDEN_BIN, "floats"),
    "cut idx": (GOLDEN_IDX[:-1], GOLDEN_BIN, "truncated or damaged"),
    "longer idx": (GOLDEN_IDX + b"\0", GOLDEN_BIN, "truncated or damaged"),
    "cut bin": (GOLDEN_IDX, GOLDEN_BIN[:-2], "10 bytes.*12"),
    "longer bin": (GOLDEN_IDX, GOLDEN_BIN + b"\0", "13 bytes.*12"),
    "wrong dtype": (changed(17, b"\x04"), GOLDEN_BIN, "12 bytes.*14"),
    "wrong pointer": (changed(46, b"\x02"), GOLDEN_BIN, "begins at byte 2"),
    "wrong doc_idx": (GOLDEN_IDX[:-8] + b"\x09" + GOLDEN_IDX[-7:], GOLDEN_BIN, "doc_idx"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_seen(tmp_path: Path, name: str) -> None:
    idx, content, message = DAMAGED[name]
    (tmp_path / "g.idx").write_bytes(idx)
    (tmp_path / "g.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        TokenStore(tmp_path / "g")


def test_missing_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"g\.bin.*does not exist"):
        TokenStore(tmp_path / "g")


def test_merging_maps_one_store_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a mapped file counts as memory, of all stores as much as the corpus."""
    for name in "abc":
        write_golden(tmp_path / name)
    mapped: weakref.WeakSet[TokenStore] = weakref.WeakSet()
    add = TokenStoreWriter.add_store

    def add_and_count(writer: TokenStoreWriter, store: TokenStore) -> None:
        mapped.add(store)
        assert len(mapped) == 1
        add(writer, store)

    monkeypatch.setattr(TokenStoreWriter, "add_store", add_and_count)
    merge_stores([tmp_path / name for name in "abc"], tmp_path / "d")
    assert TokenStore(tmp_path / "d").num_documents == 6


def test_merge(tmp_path: Path) -> None:
    write_golden(tmp_path / "a")
    with TokenStoreWriter(tmp_path / "b", "int16") as writer:
        writer.add_item([7, 8])
        writer.end_document()
        writer.end_document()
    merge_stores([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "c")
    store = TokenStore(tmp_path / "c")
    assert store.dtype == np.int32
    expected = [[1, 2, 3], [4, 5], [29999], [7, 8], [1, 2, 3], [4, 5], [29999]]
    assert [part.tolist() for part in store[:]] == expected
    assert list(store.documents()) == [(0, 5), (5, 6), (6, 8), (8, 8), (8, 13), (13, 14)]
    with pytest.raises(ConfigError, match="also an input"):
        merge_stores([tmp_path / "a"], tmp_path / "a", overwrite=True)
    with pytest.raises(ConfigError, match="at least one"):
        merge_stores([], tmp_path / "d")


def test_check_vocabulary(tmp_path: Path) -> None:
    write_golden(tmp_path / "g")
    assert check_vocabulary(TokenStore(tmp_path / "g"), 30000) == 29999
    with pytest.raises(DataError, match=r"g'.*29999.*vocab_size=29999.*at least 30000"):
        check_vocabulary(TokenStore(tmp_path / "g"), 29999)
    with TokenStoreWriter(tmp_path / "n", "int32") as writer:
        writer.add_item([3, -1])
    with pytest.raises(DataError, match="id -1"):
        check_vocabulary(TokenStore(tmp_path / "n"), 10)


@pytest.mark.parametrize("documents", [4, 1_000_000])
def test_opening_a_billion_tokens_allocates_little(tmp_path: Path, documents: int) -> None:
    size = 1_000_000_000 // documents
    sizes = np.full(documents, size, dtype="<i4")
    with (tmp_path / "big.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        file.write(sizes.tobytes())
        file.write((np.arange(documents, dtype="<i8") * size * 2).tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(2_000_000_000)
    tracemalloc.start()
    store = TokenStore(tmp_path / "big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert store.num_tokens == 1_000_000_000
    assert len(store) == store.num_documents == documents
    assert store.get(documents - 1, size - 2).tolist() == [0, 0]
    spans = store.documents()
    assert next(spans) == (0, size)
