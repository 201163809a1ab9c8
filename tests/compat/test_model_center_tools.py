"""Corpora and datasets under ModelCenter's names: its own files, and what is written here."""

from __future__ import annotations

import pickle
import random
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.model_center import dataset as old
from bmforge.compat.model_center.tools import indexed_dataset, preprocess_cpm1_lm
from bmforge.data import TokenStore
from bmforge.data.store.blocks import BlockDataset
from bmforge.errors import ConfigError, DataError
from bmforge.testing.pool import run_distributed

# As Megatron's code wrote these items: [1, 2, 3], [4, 5], end, [29999], end; uint16.
GOLDEN_INDEX = (
    "4d4d49444944580000010000000000000008030000000000000003000000000000000300000002000000010000"
    "00000000000000000006000000000000000a000000000000000000000000000000020000000000000003000000"
    "00000000"
)


def test_builder_writes_megatrons_bytes(tmp_path: Path) -> None:
    builder = indexed_dataset.make_builder(f"{tmp_path}/x.bin", "mmap", np.uint16)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item(torch.tensor([4, 5]))
    builder.end_document()
    builder.add_item([29999])
    builder.end_document()
    with pytest.raises(ConfigError, match="is not the index file of this token file"):
        builder.finalize(f"{tmp_path}/y.idx")
    builder.finalize(indexed_dataset.index_file_path(f"{tmp_path}/x"))
    assert (tmp_path / "x.bin").read_bytes().hex() == "010002000300040005002f75"
    index = (tmp_path / "x.idx").read_bytes()
    assert index[9:] == bytes.fromhex(GOLDEN_INDEX)[9:]
    assert index[:9] == b"MMIDIDX\0\0"
    assert indexed_dataset.infer_dataset_impl(f"{tmp_path}/x") == "mmap"
    more = indexed_dataset.make_builder(f"{tmp_path}/more.bin", "lazy", np.int32)
    more.add_item([7])
    more.merge_file_(f"{tmp_path}/x")
    more.finalize(f"{tmp_path}/more.idx")
    found = indexed_dataset.make_dataset(f"{tmp_path}/more")
    assert [list(found[i]) for i in range(4)] == [[7], [1, 2, 3], [4, 5], [29999]]
    with pytest.raises(ConfigError, match="already exist"):
        indexed_dataset.make_builder(f"{tmp_path}/x.bin", "mmap", np.uint16)
    (tmp_path / "old.bin").touch()
    (tmp_path / "old.idx").write_bytes(b"TNTIDX\0\0" + bytes(8))
    with pytest.raises(DataError, match="TNTIDX"):
        indexed_dataset.make_dataset(f"{tmp_path}/old")


class Letters:
    """A tokenizer whose tokens are letters; z is unknown."""

    def encode(self, text: str) -> list[int]:
        return [0 if c == "z" else 100 + ord(c) for c in text]

    def token_to_id(self, token: str) -> int:
        return {"<unk>": 0, "<eod>": 7}[token]


def test_documents_are_cut_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 512, the last of 32 at least; short and unknown ones are left out."""
    monkeypatch.setattr(preprocess_cpm1_lm, "_tokenizers", {"v": Letters()})
    lines = ["a" * 31, "b" * 40 + "<n>z", "c" * 600, "d" * 530]
    (tmp_path / "in_3.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    where = ["--input", f"{tmp_path}/in_", "--uid", "3", "--tokenizer_path", "v"]
    prefix = preprocess_cpm1_lm.main([*where, "--output_path", str(tmp_path)])
    assert prefix == tmp_path / "cpm1_lm_document_context_3"
    b, c, d = (100 + ord(letter) for letter in "bcd")
    wanted = [[1, *[b] * 40, 110, 7], [1, *[c] * 511], [*[c] * 89, 7], [1, *[d] * 511]]
    assert [list(row) for row in TokenStore(prefix)] == wanted


def test_rows_of_pretraining() -> None:
    ctx = [np.arange(10, 20, dtype=np.int32), np.arange(40, dtype=np.int32), np.array([5, 6, 4])]
    tgt = [row + 1 for row in ctx]
    one = old.CPM1_Dataset(ctx, tgt, max_length=12)
    row = one[0]
    assert row["len_ctx"] == 10
    assert row["ctx"].tolist() == [*range(10, 20), 0, 0]
    assert row["tgt"].tolist() == [*range(11, 21), -100, -100]
    both = one[0:3]
    assert both["ctx"].shape == (2, 12)  # the longer one is left out
    assert both["len_ctx"].tolist() == [10, 3]
    random.seed(0)
    merged = old.CPM1_Dataset_Merge([np.arange(100, 140), np.array([9, 9, 9, 4])], max_length=64)
    ids, target, length, context = merged[0]
    shown = np.flatnonzero(~context)
    assert (length, shown[0] in range(5, 11), shown[-1] in range(29, 40)) == (40, True, True)
    assert (target[shown - 1] == ids[shown]).all()
    assert (np.delete(target, shown - 1) == -100).all()
    assert not merged[1][3][-1]  # <sep> at the end is predicted
    pair = old.CPM2_Dataset([np.array([3, 26240])], [np.array([26245, 8, 9])], 4, 2)[0]
    assert pair is not None
    assert pair["ctx"].tolist() == [3, 26050, 0, 0]
    assert pair["tgt"].tolist() == [26055, 8, -100]
    assert (pair["len_ctx"], pair["len_tgt"]) == (2, 2)


def theirs(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], name: str) -> None:
    """Write a dataset as ModelCenter's code does: its class in a pickle, records without length."""
    module = ModuleType("model_center.dataset.distributed_dataset")

    class FileInfo:
        def __init__(self, *row: Any) -> None:
            self.row = row

        @classmethod
        def _load_from_state(cls, version: int, row: tuple[Any, ...]) -> FileInfo:
            return cls(*row)

        def __reduce__(self) -> Any:
            return FileInfo._load_from_state, (1, self.row)

    FileInfo.__module__, FileInfo.__qualname__ = module.__name__, "FileInfo"
    module.FileInfo = FileInfo  # type: ignore[attr-defined]
    for part in ("model_center", "model_center.dataset"):
        monkeypatch.setitem(__import__("sys").modules, part, ModuleType(part))
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    size, blocks, block = 64, [], b""
    for row in rows:
        record = b"\x1f" + pickle.dumps(row)
        if len(block) + len(record) > size:
            blocks.append(block)
            block = b""
        block += record
    blocks.append(block)
    (folder / name).write_bytes(b"".join(b.ljust(size, b"\0") for b in blocks))
    info = [FileInfo(name, 0, len(blocks), sum(map(len, blocks)), len(rows), False)]
    (folder / "meta.bin").write_bytes(pickle.dumps(info))


def test_modelcenters_own_dataset_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"ids": [n, n + 1]} for n in range(9)]
    theirs(tmp_path, monkeypatch, rows, "part")
    assert list(old.SimpleDataset(str(tmp_path), block_size=64)) == rows
    assert list(BlockDataset(tmp_path, block_bytes=64)) == rows
    for evil in (eval, pickle.loads):
        (tmp_path / "meta.bin").write_bytes(pickle.dumps([evil]))
        with pytest.raises(DataError, match="refused"):
            old.SimpleDataset(str(tmp_path))
    call = b"\x80\x02cbuiltins\ngetattr\n(cos\nsystem\nX\x01\x00\x00\x00ate."
    (tmp_path / "meta.bin").write_bytes(call)
    with pytest.raises(DataError, match="refused"):
        old.SimpleDataset(str(tmp_path))


def write(folder: Path, name: str, rows: list[Any]) -> None:
    with old.build_dataset(str(folder), name, block_size=64) as writer:
        for row in rows:
            writer.write(row)


def test_dataset_goes_on_where_it_was(tmp_path: Path) -> None:
    """Written, read, begun again, with a file that comes later and one that is masked."""
    write(tmp_path, "a", list(range(20)))
    read = old.DistributedDataset(str(tmp_path))
    first = [read.read() for _ in range(7)]
    state = read.state_dict()
    rest = [read.read() for _ in range(13)]
    assert first + rest == list(range(20))
    assert read.read() == 0  # from the beginning again
    again = old.DistributedDataset(str(tmp_path))
    again.load_state_dict(state)
    assert [again.read() for _ in range(13)] == rest
    write(tmp_path, "b", [100, 101])
    assert [again.read() for _ in range(2)] == [100, 101]  # what was read least
    assert list(old.SimpleDataset(str(tmp_path))) == [*range(20), 100, 101]
    old.mask_dataset(str(tmp_path), "a")
    assert list(old.SimpleDataset(str(tmp_path))) == [100, 101]
    with pytest.raises(ConfigError, match="already exists"):
        old.build_dataset(str(tmp_path), "b")
    with pytest.raises(DataError, match="could run arbitrary code"):
        write(tmp_path, "c", [struct.Struct])
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match="2 processes"):
        again.load_state_dict({**state, "block": torch.zeros(2, 2, dtype=torch.long)})


def read_share(folder: str) -> tuple[list[int], list[int], list[list[int]]]:
    """What this process reads, before a state and behind it."""
    bmt.init_distributed()
    read = old.DistributedDataset(folder, bmt.rank(), bmt.world_size())
    first = [read.read() for _ in range(4)]
    state = read.state_dict()
    second = [read.read() for _ in range(4)]
    again = old.DistributedDataset(folder, bmt.rank(), bmt.world_size())
    again.load_state_dict(state)
    assert [again.read() for _ in range(4)] == second
    return first, second, state["block"].tolist()


def test_processes_read_blocks_in_turn(tmp_path: Path) -> None:
    write(tmp_path, "a", list(range(40)))
    blocks = [[r for _, r in BlockDataset(tmp_path).read_block(n)] for n in range(4)]
    found = run_distributed(read_share, 2, str(tmp_path))
    for rank, (first, second, _) in enumerate(found):
        assert first + second == [*blocks[rank], *blocks[rank + 2]][:8]
    assert found[0][2] == found[1][2]
