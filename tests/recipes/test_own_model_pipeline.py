"""The example of a model of one's own: on every layout the losses of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bmforge.testing import run_distributed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import own_model_pipeline as example  # noqa: E402


@pytest.fixture(scope="module")
def alone() -> list[float]:
    losses = run_distributed(example.main, 1, 6)[0]
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize(
    ("world", "tp", "pp", "zero"),
    [
        (4, 2, 2, 3),
        pytest.param(2, 1, 1, 3, marks=pytest.mark.long),
        pytest.param(2, 2, 1, 3, marks=pytest.mark.long),
        pytest.param(2, 1, 2, 3, marks=pytest.mark.long),
        pytest.param(4, 1, 2, 2, marks=pytest.mark.long),
        pytest.param(8, 2, 2, 3, marks=pytest.mark.long),
    ],
)
def test_equals_one_process(alone: list[float], world: int, tp: int, pp: int, zero: int) -> None:
    for losses in run_distributed(example.main, world, 6, tp, pp, zero):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_the_loss_is_the_weighted_mean(alone: list[float]) -> None:
    """The first step's loss by hand, one text at a time, on the same weights."""
    with torch.device("meta"):
        model = example.ByteModel()
    example.init_weights_(model, seed=0, device="cpu")
    total, count = 0.0, 0
    for batch in next(example.Texts(0, 1)):
        for row in range(batch["ids"].shape[0]):
            size = int(batch["is_text"][row].sum())
            one = {n: t[row : row + 1] for n, t in batch.items()}
            short = {n: t[:, :size] for n, t in one.items() if n in ("ids", "is_text")}
            logits = model(**short, weights=one["weights"]).logits[0]
            picked = logits.log_softmax(-1)[range(size), one["labels"][0, :size]]
            total -= float(picked.detach().sum() * one["weights"][0])
            count += size
    assert alone[0] == pytest.approx(total / count, rel=1e-5)
