"""Objectives with a count, metrics and prepared batches; runs without dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bmforge.models import GPT2, GPT2Config, init_weights_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    mesh_of,
    parallelize,
)
from bmforge.testing import assert_close, run_distributed
from bmforge.train import EvalResult, LossAndMetrics, TrainConfig, Trainer, evaluate, read_metrics
from bmforge.train.metric_sums import MetricSums

ROWS, LENGTH = 8, 6


class RowObjective:
    """Mean over rows of a row's summed loss, with one metric of every kind."""

    def __init__(self) -> None:
        self.metrics = {"row/id": "mean", "rows": "sum", "max/id": "max", "min/id": "min"}
        self.metrics["never"] = "mean"

    def count(self, batch: Any) -> int:
        return batch["input_ids"].shape[0]

    def prepare(self, model: nn.Module, micro_batches: Any) -> Any:
        return [{**b, "factor": torch.tensor(2.0)} for b in micro_batches]

    def __call__(self, model: nn.Module, batch: Any, num_items: float) -> Any:
        ids = batch["input_ids"]
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=num_items).loss
        if loss is None:
            return None
        first = ids[:, 0].double()
        metrics = {
            "row/id": (first.sum(), ids.shape[0]),
            "rows": torch.tensor(float(ids.shape[0])),
            "max/id": first.max(),
            "min/id": first.min(),
            "never": (0.0, 0.0),
        }
        return LossAndMetrics(loss * batch["factor"].to(loss.dtype), metrics)


class Rows:
    """A loader of the same rows at every step."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def make_model(layout: Layout, dropout: float = 0.0) -> GPT2:
    config = GPT2Config(
        vocab_size=29,
        hidden_size=20,
        num_layers=2,
        num_heads=2,
        max_seq_len=8,
        dropout=dropout,
        attn_dropout=dropout,
    )
    model = GPT2.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout)
    init_weights_(model, seed=3)
    return model


def make_rows() -> torch.Tensor:
    return torch.randint(0, 29, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))


def train_rows(layout: Layout, micro: int, run_dir: str) -> tuple[dict[str, Any], Any]:
    """One step and an evaluation; returns the metrics row of the first process."""
    world = init_distributed()
    model = make_model(layout)
    mesh = mesh_of(model)
    ids = make_rows().chunk(data_parallel_size(mesh))[data_parallel_rank(mesh)]
    batches = [{"input_ids": part} for part in ids.chunk(micro)]
    objective = RowObjective()
    trainer = Trainer(
        model,
        Rows(batches),
        TrainConfig(steps=1, save_every_steps=None),
        objective=objective,
        run_dir=run_dir,
        evaluator=lambda m: evaluate(m, batches, objective=objective),
    )
    trainer.fit()
    result = evaluate(model, batches, objective=objective)
    row = read_metrics(Path(run_dir) / "metrics.jsonl")[-1] if world.rank == 0 else {}
    return row, (result.loss, result.tokens, dict(result.metrics))


@pytest.mark.parametrize(
    ("world", "layout", "micro"),
    [
        (1, Layout(), 1),
        (1, Layout(), 4),
        (2, Layout(zero=3), 2),
        (2, Layout(tp=2), 2),
        (2, Layout(pp=2), 2),
        (2, Layout(cp=2), 1),
    ],
)
def test_metrics_on_layouts(tmp_path: Path, world: int, layout: Layout, micro: int) -> None:
    """Loss per row and metrics of the whole batch, however it is cut."""
    results = run_distributed(train_rows, world, layout, micro, str(tmp_path / "run"))
    row, ids = results[0][0], make_rows()
    model = GPT2.from_config(make_model(Layout()).config, dtype=torch.float64)
    init_weights_(model, seed=3)
    with torch.no_grad():
        mean = model(input_ids=ids, labels=ids).loss.item() * (LENGTH - 1)
    first = ids[:, 0].tolist()
    assert row["loss"] == pytest.approx(2 * mean, rel=1e-9)
    for prefix in ("", "val_"):
        assert row[f"{prefix}row/id"] == pytest.approx(sum(first) / ROWS, rel=1e-12)
        assert (row[f"{prefix}max/id"], row[f"{prefix}min/id"]) == (max(first), min(first))
        assert row[f"{prefix}rows"] == ROWS
        assert f"{prefix}never" not in row
    for _, (loss, items, metrics) in results:
        assert loss == pytest.approx(row["val_loss"], rel=1e-9)
        assert items == ROWS
        assert metrics["rows"] == ROWS


def test_plain_objectives_have_no_metrics() -> None:
    """An objective that returns a loss has an evaluation without metrics."""
    model, ids = make_model(Layout()), make_rows()
    result = evaluate(model, [{"input_ids": ids, "labels": ids}])
    assert isinstance(result, EvalResult)
    assert result.metrics == {}
    assert result.tokens == ROWS * (LENGTH - 1)


def test_unknown_metric_is_an_error() -> None:
    """A metric that the objective does not declare would be lost on the other ranks."""
    with pytest.raises(KeyError):
        MetricSums({"a": "mean"}).add({"b": 1.0})


def test_disable_dropout_equals_no_dropout() -> None:
    """The gradient is that of a model without dropout; the config keeps its dropout."""
    grads = []
    for dropout, disabled in ((0.0, False), (0.5, True), (0.5, False)):
        model, ids = make_model(Layout(), dropout), make_rows()
        loader = Rows([{"input_ids": ids, "labels": ids}])
        config = TrainConfig(steps=1, disable_dropout=disabled)
        Trainer(model, loader, config).fit()
        grads.append({n: p.detach().clone() for n, p in model.named_parameters()})
        assert model.config.dropout == dropout
    assert_close(grads[1], grads[0])
    assert any(not torch.equal(grads[2][n], grads[0][n]) for n in grads[0])
