"""Old block datasets: plain records come back, nothing else runs, damage is named."""

from __future__ import annotations

import codecs
import functools
import json
import os
import pickle
import pickletools
import struct
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmforge.data import TokenStore
from bmforge.data.store.blocks import BlockDataset, blocks_to_store
from bmforge.data.store.safe_pickle import load_plain
from bmforge.errors import ConfigError, DataError

BLOCK = 256
RECORDS: list[Any] = [
    {"input": "今天天气好", "<ans>": {"<mask_0>": "好"}, "n": [1, -2, 2**70], "x": 0.5},
    [1, 2, 3],
    "text",
    b"bytes",
    True,
    None,
    (1, ("a", [None])),
    {1, 2},
]


def write_blocks(folder: Path, name: str, payloads: list[bytes], block: int = BLOCK) -> None:
    """Append a data file as the original's writer does, and its line in meta.bin."""
    folder.mkdir(exist_ok=True)
    blocks = [b""]
    for payload in payloads:
        record = b"\x1f" + struct.pack("<I", len(payload)) + payload
        if len(blocks[-1]) + len(record) + 1 > block:
            blocks.append(b"")
        blocks[-1] += record
    (folder / name).write_bytes(b"".join(part.ljust(block, b"\0") for part in blocks))
    meta = folder / "meta.bin"
    lines = meta.read_text().splitlines() if meta.exists() else []
    begin = json.loads(lines[-1])["block_end"] if lines else 0
    info = {
        "file_name": name,
        "block_begin": begin,
        "block_end": begin + len(blocks),
        "nbytes": sum(map(len, payloads)) + 4 * len(payloads),
        "nlines": len(payloads),
        "mask": False,
    }
    meta.write_text("\n".join([*lines, json.dumps(info)]) + "\n")


def edit_meta(folder: Path, **changes: Any) -> None:
    info = json.loads((folder / "meta.bin").read_text())
    (folder / "meta.bin").write_text(json.dumps({**info, **changes}) + "\n")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_records_come_back_in_order(tmp_path, protocol):
    write_blocks(tmp_path, "a", [pickle.dumps(r, protocol) for r in RECORDS])
    write_blocks(tmp_path, "b", [pickle.dumps([i] * 20, protocol) for i in range(40)])
    dataset = BlockDataset(tmp_path, block_bytes=BLOCK)
    assert list(dataset) == RECORDS + [[i] * 20 for i in range(40)]
    assert len(dataset) == len(RECORDS) + 40
    assert dataset.files[1].block_begin == dataset.files[0].block_end > 0


def test_masked_files_are_left_out_even_when_they_are_gone(tmp_path):
    write_blocks(tmp_path, "a", [pickle.dumps(1)])
    write_blocks(tmp_path, "b", [pickle.dumps(2)])
    first, second = (tmp_path / "meta.bin").read_text().splitlines()
    masked = json.dumps({**json.loads(first), "mask": True})
    (tmp_path / "meta.bin").write_text(f"{masked}\n{second}\n")
    (tmp_path / "a").unlink()
    assert list(BlockDataset(tmp_path, block_bytes=BLOCK)) == [2]


def test_the_block_size_in_meta_goes_before_the_argument(tmp_path):
    write_blocks(tmp_path, "a", [pickle.dumps(i) for i in range(50)], block=64)
    edit_meta(tmp_path, block_size=64)
    assert list(BlockDataset(tmp_path)) == list(range(50))


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.zeros((0, 3), np.uint16),
        np.array(3.5, np.float16),
    ],
    ids=str,
)
def test_arrays_of_plain_numbers(array, protocol):
    found = load_plain(pickle.dumps({"ids": [array, array]}, protocol))["ids"]
    for one in found:
        assert isinstance(one, np.ndarray)
        assert one.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(one, array)


def test_arrays_named_by_numpy_1():
    content = pickle.dumps(np.arange(3, dtype=np.int64), 2)
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != content
    np.testing.assert_array_equal(load_plain(old), np.arange(3))


@pytest.mark.parametrize("protocol", range(6))
def test_scalars_and_old_bytes(protocol):
    assert load_plain(pickle.dumps([np.int32(7), np.float64(0.25)], protocol)) == [7, 0.25]
    assert load_plain(pickle.dumps(b"\x00\xffA", protocol)) == b"\x00\xffA"


class Runs:
    """Its pickle calls `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {}"),
        (subprocess.check_output, ["touch", "{}"]),
        (eval, "open('{}', 'w')"),
        (exec, "open('{}', 'w')"),
        (open, "{}", "w"),
        (functools.partial, Path.touch),
        (codecs.decode, "7061", "hex"),
        (getattr, "a", "upper"),
        (bytearray, 10),
        (np.load, "{}"),
        (np.dtype, "O"),
    ],
    ids=lambda call: getattr(call[0], "__name__", str(call[0])),
)
def test_what_would_run_code_is_refused_and_named(tmp_path, call, protocol):
    mark = tmp_path / "ran"
    arguments = [
        [part.replace("{}", str(mark)) for part in a] if isinstance(a, list) else a
        for a in (a.replace("{}", str(mark)) if isinstance(a, str) else a for a in call[1:])
    ]
    payloads = [pickle.dumps(1), pickle.dumps({"x": [Runs(call[0], *arguments)]}, protocol)]
    if call[0] is bytearray and protocol == 5:
        pytest.skip("protocol 5 writes a bytearray without a name")
    write_blocks(tmp_path / "data", "part_1", payloads, block=4096)
    records = iter(BlockDataset(tmp_path / "data", block_bytes=4096))
    assert next(records) == 1
    with pytest.raises(DataError, match=r"part_1', block 0, record 1"):
        next(records)
    assert not mark.exists()


def test_objects_and_plain_looking_classes_are_refused():
    for record in (OrderedDict(a=1), Path("a"), 1j, np.array([{}]), np.array(["a"]), range(3)):
        with pytest.raises(DataError):
            load_plain(pickle.dumps(record))
    with pytest.raises(DataError, match="arrays of numbers"):
        load_plain(pickle.dumps(np.zeros(2, dtype=[("a", "i4")])))


HOSTILE = {
    "a name for a value": b"cnumpy\nndarray\n.",
    "a name inside": b"(lcnumpy\ndtype\na.",
    "change of a name": b"cnumpy\ndtype\n(dS'order'\nS'>'\nsb.",
    "slots of a name": b"cnumpy\ndtype\n(N(dS'__call__'\nI1\nstb.",
    "instance of a name": b"cnumpy\nndarray\n)\x81.",
    "array never filled": b"cnumpy.core.multiarray\n_reconstruct\n(NNNtR.",
    "buffer of a length": b"cnumpy.core.numeric\n_frombuffer\n(J\xff\xff\xff\x7fNNNtR.",
    "call of a value": b"(lI1\n\x85R.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tobytes\x93.",
    "persistent id": b"Pabc\n.",
    "extension": b"\x80\x02\x82\x01.",
    "instance": b"(S'touch'\nios\nsystem\n.",
    "contains itself": b"]q\x00(h\x00cnumpy\nndarray\ne.",
    "cut off": pickle.dumps([1, 2, 3])[:-3],
    "empty": b"",
    "noise": b"\xff\xfe\x00 not a pickle",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_raise_our_error(name):
    with pytest.raises(DataError):
        load_plain(HOSTILE[name])


def test_names_are_the_same_after_hostile_pickles():
    for content in HOSTILE.values():
        with pytest.raises(DataError):
            load_plain(content)
    array = np.arange(5)
    np.testing.assert_array_equal(load_plain(pickle.dumps(array)), array)


def test_a_wrong_shape_of_an_array_is_refused():
    content = pickle.dumps(np.arange(4, dtype=np.int8), 2)
    opcodes = [(op.name, at) for op, _, at in pickletools.genops(content)]
    at = next(at for name, at in opcodes if name == "BININT1" and content[at + 1] == 4)
    with pytest.raises(DataError, match="bytes"):
        load_plain(content[: at + 1] + b"\x05" + content[at + 2 :])


def test_shared_parts_do_not_blow_up():
    record: Any = np.arange(2)
    for _ in range(60):
        record = [record, record]
    found = load_plain(pickle.dumps(record))
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: (d / "part").write_bytes((d / "part").read_bytes()[:-1]), "has 511 bytes"),
        (lambda d: (d / "part").unlink(), "is missing"),
        (lambda d: (d / "meta.bin").unlink(), "cannot read"),
        (lambda d: (d / "meta.bin").write_text("{}\n"), "line 1.*KeyError"),
        (lambda d: (d / "meta.bin").write_text("[1]\n"), "line 1"),
        (lambda d: (d / "meta.bin").write_text("no json\n"), "line 1"),
        (lambda d: edit_meta(d, nlines=99), "99"),
        (lambda d: edit_meta(d, block_begin=1), "end at block 0"),
        (lambda d: edit_meta(d, file_name="../part"), "the name of a file"),
        (lambda d: edit_meta(d, block_size=0), "size"),
        (lambda d: flip(d / "part", 0, 0x1E), "block 0, record 0 begins with byte 0x1e"),
        (lambda d: flip(d / "part", 4, 0xFF), "block 0, record 0 extends"),
        (lambda d: flip(d / "part", BLOCK, 0x00), "records"),
    ],
)
def test_damage_is_named(tmp_path, damage, match):
    folder = tmp_path / "data"
    write_blocks(folder, "part", [pickle.dumps("a" * 60) for _ in range(5)])
    damage(folder)
    with pytest.raises(DataError, match=match):
        list(BlockDataset(folder, block_bytes=BLOCK))


def flip(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(bytes(content))


def test_other_forms_and_a_wrong_one(tmp_path):
    write_blocks(tmp_path / "json", "a", [json.dumps({"a": "好"}).encode()])
    write_blocks(tmp_path / "raw", "a", [b"\x00\x01"])
    assert list(BlockDataset(tmp_path / "json", block_bytes=BLOCK, form="json")) == [{"a": "好"}]
    assert list(BlockDataset(tmp_path / "raw", block_bytes=BLOCK, form="raw")) == [b"\x00\x01"]
    with pytest.raises(DataError, match="not JSON"):
        list(BlockDataset(tmp_path / "raw", block_bytes=BLOCK, form="json"))
    with pytest.raises(ConfigError, match="pickle"):
        BlockDataset(tmp_path / "raw", form="marshal")


def test_conversion_of_token_ids(tmp_path):
    rows = [[1, 2, 3], [], [65000], list(range(30))]
    payloads = [pickle.dumps(row) for row in rows] + [pickle.dumps(np.array([7, 8], np.int32))]
    write_blocks(tmp_path / "data", "a", payloads)
    assert blocks_to_store(tmp_path / "data", tmp_path / "s", vocab_size=65001, block_bytes=BLOCK)
    store = TokenStore(tmp_path / "s")
    assert [store[i].tolist() for i in range(len(store))] == [*rows, [7, 8]]
    assert store.dtype == np.uint16
    assert store.num_documents == 5


def test_conversion_with_encode_and_without(tmp_path):
    write_blocks(tmp_path / "data", "a", [pickle.dumps({"text": "abc"}), pickle.dumps("x")])
    with pytest.raises(DataError, match="record 0 is a dict"):
        blocks_to_store(tmp_path / "data", tmp_path / "s", block_bytes=BLOCK)
    assert not list(tmp_path.glob("s*"))
    count = blocks_to_store(
        tmp_path / "data",
        tmp_path / "s",
        encode=lambda record: [ord(c) for c in (record if isinstance(record, str) else "abc")],
        block_bytes=BLOCK,
    )
    assert count == 2
    store = TokenStore(tmp_path / "s")
    assert [store[i].tolist() for i in range(2)] == [[97, 98, 99], [120]]
