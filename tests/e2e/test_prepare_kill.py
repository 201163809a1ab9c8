"""`bmforge prepare` killed by SIGKILL within one large file, and started again: the same bytes.

Real processes and real signals, over and over, until a preparation is left to end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

_TEXT = "the river bridge council met on Monday to talk about work steel road 春眠 不觉 晓 闻 鸟"
WORDS = _TEXT.split()
LOOK_EVERY_S = 0.02
RULES = ["--text-repairs", "repair", "--mask-private", "--near-duplicates", "0.8", "--skip-bad"]


@dataclass(frozen=True)
class Work:
    """One large file, how it is prepared, and what comes of it without a kill."""

    options: list[str]
    shards: int
    expected: dict[str, bytes]


def write_large(path: Path, documents: int) -> None:
    """Write a file of JSON lines: texts of many lengths, copies, near copies and damaged lines."""
    draw = random.Random(documents)
    with path.open("w", encoding="utf-8") as file:
        text = ""
        for number in range(documents):
            kind = draw.random()
            if kind > 0.15:
                text = " ".join(draw.choices(WORDS, k=draw.randrange(20, 200)))
                text += f" {number} anna{number}@example.org"
            elif kind > 0.08:
                text += " again"
            line = json.dumps({"text": text}, ensure_ascii=number % 2 == 0)
            file.write((line[:-3] if number % 97 == 5 else line) + "\n")


def start(options: list[str]) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own, so that its workers can be found.

    Its folder for temporary files is used by no other process.
    """
    temporary = find_temporary(Path(options[options.index("--out") + 1]))
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "bmforge", "prepare", *options],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def find_temporary(out: Path) -> Path:
    """Return a folder for one output; its path must be short enough for sockets of the workers."""
    return Path(tempfile.gettempdir()) / f"kill-{zlib.crc32(str(out).encode()):08x}"


def check_nothing_is_left(out: Path) -> None:
    """Neither the output nor the folder for temporary files has a file or folder of a run."""
    temporary = find_temporary(out)
    left = [str(path) for path in temporary.iterdir()]
    shutil.rmtree(temporary)
    assert left == []
    assert [path for path in out.rglob("*") if "tmp" in path.name] == []
    assert [path for path in out.rglob("*") if path.is_dir() and not any(path.iterdir())] == []


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors.decode()


def done(out: Path) -> int:
    """Return how many parts of stages are done, as the journal says."""
    path = out / "preparing.tmp" / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def written(out: Path) -> dict[str, bytes]:
    """Return what was written but the record."""
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "prepared.toml"]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


def make_work(folder: Path, documents: int, shard_bytes: int) -> Work:
    path = folder / "large.jsonl"
    write_large(path, documents)
    options = [str(path), "--vocab-size", "300", *RULES, "--shard-bytes", str(shard_bytes)]
    finish(start([*options, "--out", str(folder / "whole"), "--workers", "1"]))
    shards = -(-path.stat().st_size // shard_bytes)
    assert shards > 4
    return Work(options, shards, written(folder / "whole"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return make_work(tmp_path_factory.mktemp("large"), 1500, 150_000)


def kill_when(process: subprocess.Popen[bytes], out: Path, parts: int, seconds: float) -> bool:
    """Kill all processes so many seconds after so many parts are done; False if it ends before."""
    while done(out) < parts:
        if _ended(process, LOOK_EVERY_S):
            return False
    if _ended(process, seconds):
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return True


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill_in_chain(work: Work, out: Path, kills: int, seed: int) -> None:
    """Kill the command within the file, start it again, and compare what it makes at last."""
    draw, options = random.Random(seed), [*work.options, "--out", str(out), "--workers", "2"]
    hits = 0
    for number in range(kills):
        before = done(out)
        process = start(options)
        last = before + 1 if number else draw.randrange(work.shards - 2)
        if not kill_when(process, out, last, draw.random() / 5):
            finish(process)
            break
        hits += 1
        assert done(out) >= before  # nothing that was done is done again
        assert not (out / "prepared.toml").exists()
    if not (out / "prepared.toml").exists():
        finish(start(options))
    assert hits >= min(kills, 2)
    check_nothing_is_left(out)
    assert written(out) == work.expected


@pytest.mark.long
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    """One kill with two workers, after the first part is done, and a run that goes on."""
    out, path = tmp_path / "out", tmp_path / "small.jsonl"
    write_large(path, 150)
    options = [str(path), "--vocab-size", "300", "--skip-bad", "--shard-bytes", "20000"]
    options += ["--out", str(out), "--workers", "2"]
    assert kill_when(start(options), out, 1, 0.0)
    assert (out / "preparing.tmp").is_dir()
    finish(start(options))
    check_nothing_is_left(out)


@pytest.mark.long
def test_killed_within_a_large_file(work: Work, tmp_path: Path) -> None:
    kill_in_chain(work, tmp_path / "out", kills=2, seed=1)


@pytest.mark.long
def test_the_parent_alone_is_killed(work: Work, tmp_path: Path) -> None:
    """Its workers see that it is gone, and what they still write does no harm."""
    out = tmp_path / "out"
    options = [*work.options, "--out", str(out), "--workers", "2"]
    process = start(options)
    while done(out) < 2:
        assert not _ended(process, LOOK_EVERY_S)
    process.kill()
    process.communicate()  # until the last of them has closed its end of the pipe
    assert not (out / "prepared.toml").exists()
    finish(start(options))
    check_nothing_is_left(out)
    assert written(out) == work.expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_killed_ten_times_within_a_larger_file(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, seed: int
) -> None:
    work = make_work(tmp_path_factory.mktemp("larger"), 30_000, 1_500_000)
    kill_in_chain(work, tmp_path / "out", kills=10, seed=seed)
