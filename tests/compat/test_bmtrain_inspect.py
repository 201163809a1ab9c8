"""Tables, recorded tensors, printing and the small helpers."""

from __future__ import annotations

from typing import Any

import old_programs as old
import pytest
import torch
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.testing import run_distributed


def tables(form: str, pipes: int) -> list[dict[str, Any]]:
    bmt.init_distributed(seed=5, pipe_size=pipes, num_micro_batches=2 * pipes)
    torch.manual_seed(5)
    model = old.OldGPT(form=form)
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager()
    assert all(row["grad_std"] is None for row in bmt.inspect.inspect_model(model, "*"))
    manager.backward(old.loss_of(model, old.own_rows(old.batch(0)), bmt.loss.FusedCrossEntropy()))
    assert bmt.inspect.inspect_model(model, "*.up.w*")[0]["name"] == "blocks.0.up.weight"
    return bmt.inspect.inspect_model(model, "*")


@pytest.mark.parametrize(
    ("form", "world", "pipes"), [("list", 1, 1), ("modules", 2, 1), ("list", 2, 1), ("pipe", 2, 2)]
)
def test_tables_are_those_of_one_process(form: str, world: int, pipes: int) -> None:
    torch.manual_seed(5)
    plain = old.PlainGPT()
    old.loss_of(plain, old.batch(0), nn.CrossEntropyLoss()).backward()
    for rows in run_distributed(tables, world, form, pipes):
        assert [row["name"] for row in rows] == [name for name, _ in plain.named_parameters()]
        for row, param in zip(rows, plain.parameters(), strict=True):
            assert row["shape"] == tuple(param.shape)
            for key, want in {
                "std": param.std(),
                "mean": param.mean(),
                "max": param.max(),
                "min": param.min(),
            }.items():
                assert row[key] == want.item()
            torch.testing.assert_close(row["grad_std"], param.grad.std().item(), rtol=1e-4, atol=0)
            torch.testing.assert_close(
                row["grad_mean"], param.grad.mean().item(), rtol=1e-3, atol=1e-7
            )


class Records(bmt.DistributedModule):
    """A layer that records what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = old.OldLinear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        bmt.inspect.record_tensor(y, "y", group="layer")
        return y


def recorded() -> list[dict[str, Any]]:
    bmt.init_distributed(seed=2)
    layers = [Records() for _ in range(2)]
    blocks = bmt.TransformerBlockList(layers)
    bmt.init_parameters(blocks)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    bmt.inspect.record_tensor(x, "outside")  # nobody listens
    with bmt.inspect.inspect_tensor() as inspector:
        blocks(x.chunk(bmt.world_size())[bmt.rank()]).square().sum().backward()
    assert inspector.get_tensor("y", "layer", 1) is inspector.summary[1]["tensor"]
    assert inspector.get_tensor("z") is None
    return inspector.get_summary()


def test_tensors_are_recorded_once_with_their_gradients() -> None:
    (want,) = run_distributed(recorded, 1)
    assert [row["name"] for row in want] == ["y", "y.1"]
    assert all(row["grad_std"] > 0 for row in want)
    for rows in run_distributed(recorded, 2):
        for got, row in zip(rows, want, strict=True):
            for key in ("std", "mean", "max", "min", "grad_std", "grad_mean"):
                assert got[key] == pytest.approx(row[key], rel=1e-4, abs=1e-6)


class RecordsInside(bmt.DistributedModule):
    """Two layers; the tensor between them is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = old.OldLinear(8, 8), old.OldLinear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        bmt.inspect.record_tensor(y, "y")
        return self.second(y)


def gradients_of_recorded() -> list[torch.Tensor]:
    bmt.init_distributed(seed=2)
    block = bmt.Block(RecordsInside())
    bmt.init_parameters(block)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with bmt.inspect.inspect_tensor() as inspector:
        block(x)
    inspector.summary[0]["tensor"].square().sum().backward()
    row = bmt.inspect.inspect_model(block, "first.weight")[0]
    return [x.grad, torch.tensor([row["grad_std"], row["grad_mean"]])]


def test_backward_may_begin_at_a_recorded_tensor() -> None:
    """The block's output has no gradient, so FSDP does not gather the weights by itself."""
    ((grad, row),) = run_distributed(gradients_of_recorded, 1)
    assert grad.abs().sum() > 0
    for got, got_row in run_distributed(gradients_of_recorded, 2):
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_row, 2 * row, rtol=1e-4, atol=1e-6)  # summed over processes


class Recording(nn.Module):
    """Two layers with a residual connection; records a hidden state, its norm and its sign."""

    def __init__(self, linear: Any, record: Any) -> None:
        super().__init__()
        self.first, self.second = linear(8, 8), linear(8, 8)
        self.record = record

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.record(y, "y", group="layer")
        self.record(y.square().sum(), "square")
        self.record(y.detach() > 0, "positive")
        return x + self.second(y.tanh())


def weigh_records(records: list[torch.Tensor], out: torch.Tensor, with_out: bool) -> torch.Tensor:
    loss = out.square().sum() if with_out else out.new_zeros(())
    return loss + sum(k * x.sum() for k, x in enumerate(records, 1) if x.requires_grad)


def recorded_in_a_pipeline(with_out: bool) -> list[Any]:
    bmt.init_distributed(seed=5, pipe_size=2, num_micro_batches=4)
    torch.manual_seed(5)
    blocks = bmt.PipelineTransformerBlockList(
        [Recording(old.OldLinear, bmt.inspect.record_tensor) for _ in range(3)]
    )
    bmt.init_parameters(blocks)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).chunk(2)[bmt.rank()]
    with torch.no_grad(), bmt.inspect.inspect_tensor() as evaluated:
        blocks(x)
    with bmt.inspect.inspect_tensor() as inspector:
        out = blocks(x.requires_grad_())
    records = [row["tensor"] for row in inspector.summary]
    for row, again in zip(inspector.summary, evaluated.summary, strict=True):
        assert torch.equal(row["tensor"], again["tensor"])
    weigh_records(records, out, with_out).backward()
    names = [(row["name"], row["group"]) for row in inspector.summary]
    weights = bmt.inspect.inspect_model(blocks, "*.first.weight")
    return [names, [t.detach() for t in records], [t.grad for t in records], x.grad, weights]


@pytest.mark.parametrize("with_out", [True, False])
def test_records_of_a_pipeline_are_those_of_plain_layers(with_out: bool) -> None:
    """Values, total gradients, and backward from the records; each process has its own rows."""
    torch.manual_seed(5)
    records: list[torch.Tensor] = []
    blocks = nn.Sequential(
        *(Recording(old.PlainLinear, lambda x, *_, **__: records.append(x)) for _ in range(3))
    )
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = blocks(x)
    for record in records:
        if record.requires_grad:
            record.retain_grad()
    weigh_records(records, out, with_out).backward()
    for rank, got in enumerate(run_distributed(recorded_in_a_pipeline, 2, with_out)):
        names, tensors, grads, x_grad, weights = got
        assert names == 3 * [("y", "layer"), ("square", None), ("positive", None)]
        for index, record in enumerate(records):
            if names[index][0] == "square":  # one sum per micro-batch of two rows
                rows = records[index - 1].detach().square().sum(1).unflatten(0, (4, 2)).sum(1)
                torch.testing.assert_close(tensors[index], rows.chunk(2)[rank])
                assert torch.equal(grads[index], torch.full((2,), index + 1.0))
                continue
            torch.testing.assert_close(tensors[index], record.detach().chunk(2)[rank])
            if record.grad is None:
                assert grads[index] is None
            else:
                torch.testing.assert_close(grads[index], record.grad.chunk(2)[rank])
        torch.testing.assert_close(x_grad, x.grad.chunk(2)[rank])
        for row, block in zip(weights, blocks, strict=True):
            want = block.first.weight.grad
            assert row["grad_std"] == pytest.approx(want.std().item(), rel=1e-4)
            assert row["grad_mean"] == pytest.approx(want.mean().item(), rel=1e-3, abs=1e-5)


def test_a_summary_has_the_old_columns() -> None:
    row = {"name": "w", "shape": (3, 5), "max": 1.0, "min": -1.0, "std": 0.5, "mean": 0.0}
    text = bmt.inspect.format_summary([{**row, "grad_std": None, "grad_mean": None}])
    head, line = text.split("\n")
    assert head.split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    assert line.split("  ")[0] == "w"
    assert line.split()[-6:] == ["1.0000", "-1.0000", "0.5000", "0.0000", "0.0000", "0.0000"]


def helpers() -> None:
    bmt.init_distributed()
    rank, size = bmt.rank(), bmt.world_size()
    assert bmt.sum_loss(torch.tensor(float(rank))).item() == (size - 1) / 2
    assert bmt.store.broadcast_object({"a": rank}) == {"a": 0}
    assert bmt.store.allgather_objects(rank) == list(range(size))
    bmt.wait_loader()
    groups = dict(bmt.grouped_parameters(old.OldLinear(4, 4)))
    assert len(groups[None]) == 2
    bmt.debug.set("x", torch.ones(2))
    bmt.debug.append("l", 1)
    bmt.debug.extend("l", [2])
    assert bmt.debug.get("l") == [1, 2]
    assert torch.equal(bmt.debug.get("x"), torch.ones(2))
    bmt.debug.clear()
    assert bmt.debug.get("x", "gone") == "gone"
    assert bmt.utils.round_up(5, 4) == 8
    average = bmt.utils.AverageRecorder(alpha=0.5)
    average.record(2.0)
    assert average.value == 2.0
    average.record(5.0)
    assert average.value == pytest.approx((0.5 * 0.5 * 2.0 + 0.5 * 5.0) / 0.75)


@pytest.mark.parametrize("world", [1, 2])
def test_helpers(world: int) -> None:
    run_distributed(helpers, world)


def printed() -> str:
    import contextlib
    import io

    bmt.init_distributed()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bmt.print_rank("first")
        bmt.print_rank("second", rank=1)
        bmt.print_dict("title", {"name": 1})
        bmt.see_memory("now")
    return out.getvalue()


def test_printing() -> None:
    first, second = run_distributed(printed, 2)
    assert "first\n" in first
    assert "name : 1" in first
    assert "now: host" in first
    assert "second\n" in second
    assert "first" not in second
    assert "now" not in second
