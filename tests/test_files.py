"""Replacing a file: the old or the new one, and nothing left beside it."""

from __future__ import annotations

import os

import pytest

from bmforge.files import replace_file


def test_replaces_and_leaves_nothing_beside(tmp_path):
    file = tmp_path / "run.toml"
    replace_file(file, "a = 1\n")
    replace_file(file, "a = 中\n")
    assert file.read_text(encoding="utf-8") == "a = 中\n"
    assert os.listdir(tmp_path) == ["run.toml"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    replace_file(file, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"new")
    assert file.read_bytes() == b"old"


def test_the_same_content_is_not_written_again(tmp_path):
    file = tmp_path / "run.toml"
    replace_file(file, b"same")
    before = file.stat().st_ino
    replace_file(file, b"same")
    assert file.stat().st_ino == before
