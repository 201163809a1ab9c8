"""BMTrain, ModelCenter, OpenDelta, BMCook and BMInf in one program."""

from __future__ import annotations

from pathlib import Path

import five_tools_program as program
import pytest

from bmforge.parallel import shutdown_distributed


def test_a_model_counts_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts count on, and the loss of the distilled student begins low."""
    monkeypatch.chdir(tmp_path)
    try:
        (first, second), texts = program.main()
    finally:
        shutdown_distributed()
    assert first[-1] < 0.5 * first[0]
    assert max(second) < 0.5 * first[0]
    assert texts == [[*range(3, 14)]] * 2
