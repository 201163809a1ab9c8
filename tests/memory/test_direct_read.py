"""Direct reads: the bytes of a usual read, whatever place, size, file system and thread."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from bmforge.errors import CheckpointError
from bmforge.memory import direct_read
from bmforge.memory.direct_read import DirectReader
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import run_reads, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes.bin"
    path.write_bytes(random.Random(0).randbytes(3_000_001))
    return path


def read(reads: DirectReader, path: Path, start: int, size: int) -> bytes:
    found = bytearray(size)
    descriptor = reads.open(path)
    try:
        reads.read_into(descriptor, memoryview(found), start)
    finally:
        os.close(descriptor)
    return bytes(found)


def check_places(reads: DirectReader, path: Path) -> None:
    """Places and sizes around pages, buffers and the end of the file."""
    whole, draw = path.read_bytes(), random.Random(1)
    edges = [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, len(whole) - 1, len(whole)]
    places = [(a, b) for a in edges for b in edges if a <= b]
    places += [tuple(sorted(draw.sample(range(len(whole)), 2))) for _ in range(50)]
    for start, stop in places:
        assert read(reads, path, start, stop - start) == whole[start:stop], (start, stop)


def test_any_place(file: Path) -> None:
    check_places(DirectReader(), file)


def test_many_threads(file: Path) -> None:
    """One reader for all of them."""
    reads, problems = DirectReader(), []

    def work() -> None:
        try:
            check_places(reads, file)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(reads._free) <= 4


@pytest.fixture(params=["open", "read"])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list:
    """A file system that refuses direct reads, when a file is opened or when it is read."""
    refused: list[str] = []
    own_open, own_read = os.open, os.preadv

    def refuse_open(path: object, flags: int, *rest: int) -> int:
        if request.param == "open" and flags & os.O_DIRECT:
            refused.append("open")
            raise OSError(errno.EINVAL, "no direct reads here")
        return own_open(path, flags, *rest)  # type: ignore[arg-type]

    def refuse_read(descriptor: int, buffers: list, offset: int) -> int:
        if direct_read._is_direct(descriptor):
            refused.append("read")
            raise OSError(errno.EINVAL, "no direct reads here")
        return own_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_read)
    return refused


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct reads on this system")
def test_where_it_is_refused(file: Path, refusing: list) -> None:
    """Files are read as usual then."""
    check_places(DirectReader(), file)
    assert refused_in(refusing)


def refused_in(refusing: list) -> bool:
    return len(set(refusing)) == 1


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds, by mincore(2)."""
    import ctypes
    import mmap

    libc, size = ctypes.CDLL(None, use_errno=True), path.stat().st_size
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), size) as view:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        holder = ctypes.c_char.from_buffer(view)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(holder)), ctypes.c_size_t(size), found):
            pytest.skip("this system does not tell what is cached")
        del holder
        return sum(page & 1 for page in found) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing empties the cache here")
def test_the_cache_stays_empty(file: Path) -> None:
    """A usual read leaves the file in the cache, a direct one does not."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(file):
        pytest.skip("the cache cannot be emptied here")
    size = file.stat().st_size
    read(DirectReader(), file, 0, size)
    assert cached_bytes(file) < size // 10
    file.read_bytes()
    assert cached_bytes(file) >= size


def test_files_that_end_early_or_are_gone(file: Path) -> None:
    reads = DirectReader()
    with pytest.raises(OSError, match="ends at byte 3000001, 9 bytes early"):
        read(reads, file, 3_000_000, 10)
    with pytest.raises(FileNotFoundError):
        read(reads, file.with_name("other"), 0, 1)


def test_weights(tmp_path: Path) -> None:
    """Tensors of a checkpoint, in another dtype and turned, as without direct reads."""
    tensors = {"a": torch.randn(700, 900), "b": torch.randn(3), "c": torch.randn(5, 4).bfloat16()}
    write_file(tmp_path / "model.safetensors", tensors)
    files = WeightFiles(tmp_path, DirectReader())
    targets = {
        "a": torch.empty(900, 700, dtype=torch.bfloat16).t(),
        "b": torch.empty(3),
        "c": torch.empty(5, 4),
    }
    whole = {name: tuple(slice(0, n) for n in tensor.shape) for name, tensor in tensors.items()}
    plans = [files.plan_read(name, whole[name], target) for name, target in targets.items()]
    run_reads(plans, threads=3)
    for name, target in targets.items():
        assert torch.equal(target, tensors[name].to(target.dtype))


def test_a_directory_that_changes(tmp_path: Path) -> None:
    """Gone, cut short or written anew between two reads is said, with what to do."""
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(10_000.0)}
    write_file(path, tensors)
    files = WeightFiles(tmp_path, DirectReader())
    assert torch.equal(files.read("a"), tensors["a"])
    os.truncate(path, 20_000)
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        files.read("a")
    write_file(path, {"a": torch.zeros(10_000)})
    with pytest.raises(CheckpointError, match="was changed while it was being read"):
        files.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match="was removed after"):
        files.read("a")
