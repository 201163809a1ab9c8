"""Compiling on first use, and the folder that nothing is loaded from unless it is safe."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bmforge import native
from bmforge.logging import get_logger
from bmforge.native import load_native

SOURCE = 'extern "C" int add_three(int x) { return x + 3; }'
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler here")
needs_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.say_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    get_logger().addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield caplog
    get_logger().removeHandler(caplog.handler)


def files_in(home: Path) -> list[Path]:
    return sorted((home / "bmforge" / "native").glob("*.so"))


def add_three(library: ctypes.CDLL | None, x: int) -> int:
    assert library is not None
    return library.add_three(x)


@needs_compiler
def test_compiled_once(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert add_three(load_native("add", SOURCE), 4) == 7
    (built,) = files_in(cache_home)
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert add_three(load_native("add", SOURCE), 5) == 8
    assert files_in(cache_home) == [built]


@needs_compiler
def test_another_source_flags_or_compiler_is_compiled_anew(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_native("add", SOURCE)
    assert add_three(load_native("add", SOURCE.replace("+ 3", "+ 30")), 4) == 34
    load_native("add", SOURCE, "-DMORE")
    monkeypatch.setenv("CXX", f"{shutil.which('c++')} -DLESS")
    load_native("add", SOURCE)
    monkeypatch.setattr(native, "_processor", lambda: "flags: another")
    load_native("add", SOURCE)
    assert len(files_in(cache_home)) == 5


@needs_owners
@needs_compiler
def test_a_folder_that_others_may_write(cache_home: Path, said) -> None:
    """Even a sound kernel in it is not loaded, and that is said once."""
    assert load_native("add", SOURCE) is not None
    folder = cache_home / "bmforge" / "native"
    for mode in (0o777, 0o770):
        native.say_once.cache_clear()
        said.clear()
        folder.chmod(mode)
        assert load_native("add", SOURCE) is None
        assert load_native("add", SOURCE) is None
        (line,) = said.messages
        assert "writable by others" in line
        assert f"chmod go-w {folder}" in line
    folder.chmod(0o700)
    assert load_native("add", SOURCE) is not None


@needs_owners
@needs_compiler
def test_a_folder_in_one_that_everybody_may_write(cache_home: Path, said) -> None:
    cache_home.mkdir(mode=0o777)
    cache_home.chmod(0o777)
    assert load_native("add", SOURCE) is None
    assert "writable by all users" in said.text
    cache_home.chmod(0o1777)  # as /tmp: nobody moves what is another's
    assert load_native("add", SOURCE) is not None


@needs_owners
@needs_compiler
def test_a_file_that_others_may_write(cache_home: Path, said) -> None:
    load_native("add", SOURCE)
    (built,) = files_in(cache_home)
    built.chmod(0o702)
    assert load_native("add", SOURCE) is None
    assert str(built) in said.text


@needs_owners
@needs_compiler
def test_a_folder_of_another_user(cache_home: Path, said, monkeypatch: pytest.MonkeyPatch) -> None:
    load_native("add", SOURCE)
    monkeypatch.setattr(native.os, "getuid", lambda: os.stat(cache_home).st_uid + 1)
    assert load_native("add", SOURCE) is None
    assert "not by you" in said.text


@needs_owners
@needs_compiler
def test_a_link_is_not_followed(cache_home: Path, tmp_path: Path, said) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache_home / "bmforge").mkdir(parents=True)
    (cache_home / "bmforge" / "native").symlink_to(tmp_path / "elsewhere")
    assert load_native("add", SOURCE) is None
    assert "is a symbolic link" in said.text


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, said) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert load_native("add", SOURCE) is None
    assert load_native("other", SOURCE) is None
    (line,) = said.messages
    assert "Install g++" in line


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++"])
def test_a_compiler_that_fails(
    compiler: str, cache_home: Path, monkeypatch: pytest.MonkeyPatch, said
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert load_native("add", SOURCE) is None
    assert not files_in(cache_home)
    assert "'add' is replaced by torch" in said.text


@needs_compiler
def test_a_source_that_does_not_compile(cache_home: Path, said) -> None:
    """The compiler's own words are in the message, and nothing is left behind."""
    assert load_native("add", SOURCE.replace("x + 3", "y + 3")) is None
    assert "error" in said.text
    assert [p.name for p in (cache_home / "bmforge" / "native").iterdir()] == [".lock"]


@needs_compiler
def test_two_processes_at_once(cache_home: Path, tmp_path: Path) -> None:
    """Both get the kernel, and the compiler ran once."""
    log, compiler = tmp_path / "runs", tmp_path / "noted-c++"
    compiler.write_text(f'#!/bin/sh\necho run >> {log}\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    code = (
        "from bmforge.native import load_native\n"
        f"assert load_native('add', {SOURCE!r}).add_three(1) == 4"
    )
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(cache_home)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for run in runs:
        _, words = run.communicate(timeout=120)
        assert run.returncode == 0, words.decode()
    assert log.read_text().split() == ["run"]
    assert len(files_in(cache_home)) == 1
