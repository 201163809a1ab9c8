"""`dev/new_family` writes a family that works as written when it is shaped like Llama."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "new_family"


def write(name: str, hf: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a person would."""
    command = [sys.executable, str(SCRIPT), name, "--hf", hf, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_copy_of_llama_passes_its_tests(tmp_path: Path) -> None:
    """Outputs, gradients and conversion of the written family are transformers'."""
    assert write("Clone", "llama", tmp_path).returncode == 0
    models = tmp_path / "bmforge" / "models"
    test = tmp_path / "tests" / "parity" / "test_clone.py"
    # It is no part of the package here, so its module is found by path.
    test.write_text(test.read_text("utf-8").replace("bmforge.models.clone", "clone"), "utf-8")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(
        [*pytest, "-k", "outputs or gradients or conversion or cached"],
        env={**os.environ, "PYTHONPATH": str(models)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout


@pytest.mark.long
def test_what_has_no_place_is_said(tmp_path: Path) -> None:
    """Weights of another shape of block are left to the author; nothing is overwritten."""
    assert write("Olmo", "olmo2", tmp_path).returncode == 0
    file = tmp_path / "bmforge" / "models" / "olmo.py"
    assert '# left: WeightRule("", "model.layers.{i}.post_feedforward' in file.read_text("utf-8")
    before = file.read_bytes()
    again = write("Olmo", "olmo2", tmp_path)
    assert again.returncode != 0
    assert "is there already" in again.stderr
    assert file.read_bytes() == before
