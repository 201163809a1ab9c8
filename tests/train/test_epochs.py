"""Loaders that end: the training ends well, saves its last step and resumes, epoch after epoch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError
from bmforge.parallel import Layout, parallelize
from bmforge.testing import run_distributed
from bmforge.train import TrainConfig, Trainer, read_metrics
from bmforge.train.checkpoint.checkpointer import find_checkpoints


class Rows:
    """A loader of some steps per epoch; the rows tell the epoch's position."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self

    def __next__(self) -> list[Any]:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        rows = torch.full((2, 3), float(self.position))
        return [{"x": rows, "labels": torch.zeros(2, dtype=torch.int64)}]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Once(Rows):
    """The same without a further epoch."""

    __iter__ = None  # type: ignore[assignment]


def objective(model: Any, batch: Any, num_items: float) -> torch.Tensor:
    return model(batch["x"]).square().sum() / num_items


def fit(loader: Any, folder: Path, steps: int, epochs: int, every: int | None) -> Trainer:
    torch.manual_seed(0)
    model = parallelize(torch.nn.Linear(3, 2), Layout())
    config = TrainConfig(steps=steps, num_epochs=epochs, save_every_steps=every, keep_last=1)
    return Trainer(model, loader, config, run_dir=folder, objective=objective).fit()


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 4),
    epochs=st.integers(1, 3),
    more=st.integers(0, 2),
    steps=st.integers(1, 9),
    every=st.sampled_from((None, 1, 2)),
)
def test_every_row_of_every_epoch_is_trained_once(
    length: int, epochs: int, more: int, steps: int, every: int | None
) -> None:
    with tempfile.TemporaryDirectory() as name:
        for count in (epochs, epochs + more):  # goes on with further epochs
            done = min(steps, length * count)
            trainer = fit(Rows(length), Path(name), steps, count, every)
            assert trainer.step == done
            assert trainer.ended == (length * count < steps)
            assert not trainer.stopped
            assert find_checkpoints(Path(name) / "checkpoints")[0].name == f"step-{done:08d}"
        losses = [row["loss"] for row in read_metrics(Path(name) / "metrics.jsonl")]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    whole = [i % length + 1 for i in range(len(losses))]
    assert len(losses) == done
    first = objective(model, {"x": torch.full((2, 3), float(whole[0]))}, 2).item()
    assert losses[0] == pytest.approx(first, rel=1e-5)


def test_a_loader_that_cannot_begin_again(tmp_path: Path) -> None:
    assert fit(Once(2), tmp_path / "one", 5, 1, None).ended
    with pytest.raises(ConfigError, match=r"num_epochs=2.*no __iter__"):
        fit(Once(2), tmp_path / "two", 5, 2, None)


def end_unequally(folder: str) -> tuple[int, bool]:
    trainer = fit(Rows(2 + dist.get_rank()), Path(folder), 9, 2, None)
    return trainer.step, trainer.ended


def test_a_loader_that_ends_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    assert run_distributed(end_unequally, 2, str(tmp_path)) == [(4, True)] * 2
