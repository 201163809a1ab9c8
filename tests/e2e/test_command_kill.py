"""Merging and quantizing an adapter, killed at changes of files and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from real_runs import environment
from test_adapter_runs import train, write_qwen3


def read_directory(directory: Path) -> dict[str, Any]:
    """Return the weights and the texts of a model directory, without the header's order."""
    return {
        file.name: load_file(file) if file.suffix == ".safetensors" else file.read_bytes()
        for file in sorted(directory.iterdir())
    }


def assert_same(directory: Path, expected: dict[str, Any]) -> None:
    files = read_directory(directory)
    assert files.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, bytes):
            assert files[name] == value, name
        else:
            assert files[name].keys() == value.keys()
            assert all(torch.equal(files[name][key], value[key]) for key in value), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forks")
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("words", "stride"), [("merge RUN --out {}", 2), ("quantize RUN {} --scheme int4", 9)]
)
def test_killed_at_changes_of_files(words: str, stride: int, tmp_path: Path) -> None:
    """The repeated command writes the same model and leaves no temporary files."""
    run = train(write_qwen3(tmp_path / "base"), tmp_path, "--lr", "0.01")
    (root := tmp_path / "killed").mkdir()
    program = str(Path(__file__).with_name("killed_commands.py"))
    command = [sys.executable, program, str(root), str(stride)]
    command += words.replace("RUN", str(run)).split()
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    kills = int(found.stdout.splitlines()[-1])
    assert kills >= 4
    expected = read_directory(root / "whole" / "m")
    for number in range(kills):
        assert_same(root / str(number) / "m", expected)
