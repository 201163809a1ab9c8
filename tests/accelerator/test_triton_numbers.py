"""The Triton kernels compute the CPU's numbers, in Triton's interpreter.

Triton reads the switch of its interpreter at import, so a process of its own runs the checks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")


def run_checks(name: str, examples: int) -> None:
    path = Path(__file__).with_name(name)
    variables = {"TRITON_INTERPRET": "1", "KERNEL_EXAMPLES": str(examples), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(path), "--durations=5"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    print(result.stdout[-1500:])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


def test_kernels_in_the_interpreter() -> None:
    run_checks("interpreted_kernels.py", 8)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter_at_length() -> None:
    run_checks("interpreted_kernels.py", 150)
