"""Steps on an accelerator: their numbers, kernels, copies and waits, on a simulated one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_steps_on_a_simulated_accelerator() -> None:
    """Torch allows one simulated backend for the life of a process, so this is another one."""
    path = Path(__file__).with_name("simulated_steps.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(path), "--durations=5"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
