"""The benchmark of one GPU runs on the CPU: rows, limits, records and page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "benchmarks.gpu.run"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LIMITED = """
from benchmarks.gpu.run import ROWS, run_row
row = next(row for row in ROWS if row.name == "model")
print(run_row(row, True, 0.01)["status"])
"""


def rehearse(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with tiny sizes."""
    command = [sys.executable, "-m", SCRIPT, "--rehearse", "--output", str(output), *options]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def read_records(output: Path) -> list[dict[str, Any]]:
    """Return the rows of the JSONL file, after a check that the page has the same ones."""
    lines = output.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    page = output.read_text(encoding="utf-8")
    for record in records:
        (cells,) = [line for line in page.splitlines() if line.startswith(f"| {record['row']} |")]
        assert cells.endswith(f"| {record['status']} |")
    return records


@pytest.mark.timeout(200)
def test_two_rehearsed_rows(tmp_path: Path) -> None:
    """Both have values; an existing page is kept."""
    output = tmp_path / "page.md"
    done = rehearse(output, "--only", "copies", "model")
    assert done.returncode == 0, done.stdout + done.stderr
    exact, speeds = read_records(output)
    assert (exact["row"], speeds["row"]) == ("model", "copies")
    assert exact["status"] == speeds["status"] == "ok"
    # On the CPU both sides are the same computation.
    assert exact["values"]["equal tokens"] == exact["values"]["tried"] == 3
    assert exact["values"]["largest difference"] == 0.0
    assert all(value > 0 for name, value in speeds["values"].items() if "GB/s" in name)
    before = output.read_text(encoding="utf-8")
    again = rehearse(output, "--only", "copies")
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert output.read_text(encoding="utf-8") == before


def test_row_out_of_time() -> None:
    """A row whose limit passes is killed and says so."""
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.strip() == "out of time after 0 s", done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_rehearsed_rows(tmp_path: Path) -> None:
    """Every row ends well, or names what is not installed."""
    done = rehearse(tmp_path / "page.md")
    records = read_records(tmp_path / "page.md")
    assert len(records) > 30
    for record in records:
        assert record["status"] == "ok" or record["status"].endswith("is not installed"), record
        failed = [v for v in record["values"].values() if str(v).startswith("failed")]
        # Int4 weights of torchao need a GPU.
        assert not failed or "int4" in record["row"], record
    assert done.returncode == 0
