"""`bmforge prepare` and its dry run with files and folders that the user must not read or write.

The command runs in its own process; root runs it without the capabilities to ignore permissions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SETPRIV = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
PREPARE = [sys.executable, "-m", "bmforge", "prepare", "--vocab-size", "300", "--out"]
TEXT = "The ferry leaves at six in the morning and comes back late at night. " * 9
pytestmark = pytest.mark.skipif(
    os.name != "posix" or (os.geteuid() == 0 and shutil.which("setpriv") is None),
    reason="needs POSIX permissions, and setpriv for root",
)


def run(out: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*PREPARE, str(out), *map(str, options)]
    drop = SETPRIV if os.geteuid() == 0 else []
    return subprocess.run([*drop, *command], capture_output=True, text=True)


def errors(ran: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in ran.stderr
    return [line for line in ran.stderr.splitlines() if line.startswith("error: ")]


@pytest.fixture
def texts(tmp_path: Path) -> Iterator[Path]:
    """A folder with a sound file, which is readable again after the test."""
    folder = tmp_path / "in"
    (folder / "part").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "part/c.txt"):
        (folder / name).write_text(f"{name} {TEXT}")
    yield folder
    for path in (tmp_path, folder, folder / "part", *tmp_path.rglob("*")):
        path.chmod(0o700)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("b.txt", "b.txt' cannot be read"),
        ("part", "part' cannot be listed"),
        ("", "in' cannot be listed"),
    ],
)
def test_an_unreadable_input_is_one_sentence(texts: Path, name: str, words: str) -> None:
    (texts / name).chmod(0)
    out = texts.parent / "out"
    for switches in ([], ["--dry-run"]):
        ran = run(out, texts, *switches)
        assert ran.returncode == 2
        (error,) = errors(ran)
        assert words in error
    assert not out.exists()


def test_a_folder_without_access_to_its_files_is_one_sentence(texts: Path) -> None:
    (texts / "part").chmod(0o400)
    for switches in ([], ["--dry-run"]):
        ran = run(texts.parent / "out", texts, *switches)
        assert ran.returncode == 2
        (error,) = errors(ran)
        assert "part" in error


def test_an_unreadable_file_is_counted_if_bad_files_are_skipped(texts: Path) -> None:
    """It is read after its permissions have changed, though its time has not."""
    bad, out = texts / "b.txt", texts.parent / "out"
    bad.chmod(0)
    for switches in (["--dry-run"], []):
        assert run(out, texts, "--skip-bad", *switches).returncode == 0
    funnel = tomllib.loads((out / "prepared.toml").read_text())["funnel"]
    assert funnel["kept"]["documents"] == 2
    assert funnel["dropped"]["unreadable"] == {"documents": 1, "text_bytes": bad.stat().st_size}
    assert "b.txt" in (out / "dropped.jsonl").read_text()
    assert run(out, texts, "--skip-bad").returncode == 0
    bad.chmod(0o600)
    ran = run(out, texts, "--skip-bad")
    assert ran.returncode == 2
    assert "b.txt" in errors(ran)[0]
    assert run(out, texts, "--skip-bad", "--overwrite").returncode == 0
    funnel = tomllib.loads((out / "prepared.toml").read_text())["funnel"]
    assert funnel["kept"]["documents"] == 3


@pytest.mark.parametrize("has_folder", [True, False])
def test_an_output_that_cannot_be_written_is_one_sentence(texts: Path, has_folder: bool) -> None:
    place = texts.parent / "place"
    place.mkdir()
    if has_folder:
        (place / "out").mkdir(mode=0o500)
    place.chmod(0o500)
    for switches in ([], ["--dry-run"]):
        ran = run(place / "out", texts, *switches)
        assert ran.returncode == 2
        (error,) = errors(ran)
        assert "no permission to write in" in error
    assert not (place / "out" / "preparing.tmp").exists()
