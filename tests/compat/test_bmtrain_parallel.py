"""Layers cut over tensor-parallel processes, collectives with gradients, and pipelines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import old_programs as old
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.parameter import whole
from bmforge.errors import ConfigError, ShapeError
from bmforge.testing import run_distributed


def reference(layer: Any) -> nn.Linear:
    """Torch's layer with the saved values of one that is cut."""
    folder = bmt.store.broadcast_object(tempfile.mkdtemp())
    bmt.save(layer, Path(folder, "linear.pt"))
    plain = nn.Linear(8, 8)
    plain.load_state_dict(torch.load(Path(folder, "linear.pt"), weights_only=True))
    return plain


def column(gathers: bool, is_block: bool) -> None:
    layer: Any = bmt.nn.ColumnParallelLinear(8, 8, gather_output=gathers)
    layer = bmt.Block(layer) if is_block else layer
    bmt.init_parameters(layer)
    plain, x = reference(layer), torch.randn(8, 3, 8)
    own = x.chunk(2)[bmt.config["tp_rank"]].clone().requires_grad_()
    x.requires_grad_()
    y, want = layer(own), plain(x)
    y.sum().backward()
    want.sum().backward()
    part = bmt.config["tp_rank"]
    torch.testing.assert_close(y, want if gathers else want.chunk(2, -1)[part])
    got = layer._parameters
    torch.testing.assert_close(got["weight"].grad, plain.weight.grad.chunk(2)[part])
    torch.testing.assert_close(got["bias"].grad, plain.bias.grad.chunk(2)[part])
    torch.testing.assert_close(own.grad, x.grad.chunk(2)[part], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(got["weight"]), plain.weight.detach())
    assert "in_features=8" in repr(layer)


def column_of_all_rows() -> None:
    layer = bmt.nn.ColumnParallelLinear(8, 8, gather_input=False, gather_output=True)
    bmt.init_parameters(layer)
    plain, x = reference(layer), torch.randn(4, 8)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def row(splits: bool, reduces: bool, is_block: bool) -> None:
    layer: Any = bmt.nn.RowParallelLinear(8, 8, split_input=splits, all_reduce_output=reduces)
    layer = bmt.Block(layer) if is_block else layer
    bmt.init_parameters(layer)
    part = bmt.config["tp_rank"]
    plain, x = reference(layer), torch.randn(8, 8)
    own = x.chunk(2, 0 if splits else 1)[part].clone().requires_grad_()
    x.requires_grad_()
    y, want = layer(own), plain(x)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(y, want if reduces else want.chunk(2)[part], atol=1e-5, rtol=0)
    got = layer._parameters
    torch.testing.assert_close(got["weight"].grad, plain.weight.grad.chunk(2, 1)[part])
    bias = got["bias"]
    torch.testing.assert_close(whole(bias, bias.grad), plain.bias.grad)
    wanted = x.grad.chunk(2, 0 if splits else 1)[part]
    torch.testing.assert_close(own.grad, wanted, rtol=1e-4, atol=1e-4)


def all_layers() -> None:
    bmt.init_distributed(seed=1, tp_size=2)
    for is_block in (False, True):
        for gathers in (False, True):
            column(gathers, is_block)
        for splits in (False, True):
            for reduces in (False, True):
                row(splits, reduces, is_block)
    column_of_all_rows()
    with pytest.raises(ConfigError, match="out_features=7"):
        bmt.nn.ColumnParallelLinear(8, 7)


def test_cut_layers_are_torchs() -> None:
    run_distributed(all_layers, 2)


class CutGPT(bmt.DistributedModule):
    """Rows (of the batch) are divided between layers, as BMTrain's example does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = bmt.nn.VPEmbedding(old.VOCAB, old.DIM, dtype=torch.float32)
        self.blocks = bmt.TransformerBlockList([CutBlock() for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(self.blocks(self.embed(ids)), projection=True)


class CutBlock(bmt.DistributedModule):
    """A norm that all have and two layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.ones(old.DIM))
        self.up = bmt.nn.ColumnParallelLinear(old.DIM, 32)
        self.down = bmt.nn.RowParallelLinear(32, old.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x * self.scale)))


def train_cut(tp_size: int) -> tuple[list[float], list[float]]:
    bmt.init_distributed(seed=6, tp_size=tp_size)
    model = CutGPT()
    bmt.init_parameters(model)
    optim = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(grad_scale=bmt.config["tp_zero_size"])
    manager.add_optimizer(optim)
    loss_func = bmt.loss.FusedCrossEntropy(parallel=True)
    losses, norms = [], []
    for step in range(3):
        ids, _, targets = old.batch(step)
        own = ids.chunk(bmt.world_size())[bmt.rank()]
        of_group = targets.chunk(bmt.config["tp_zero_size"])[bmt.config["tp_zero_rank"]]
        scores = model(own)
        loss = loss_func(scores.reshape(-1, scores.shape[-1]), of_group.flatten())
        manager.zero_grad()
        manager.backward(loss)
        norms.append(manager.clip_grad_norm(optim.param_groups, 0.5).item())
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    return losses, norms


@pytest.mark.parametrize(("world", "tp_size"), [(2, 2), (4, 2)])
def test_a_cut_model_trains_as_a_whole_one(world: int, tp_size: int) -> None:
    want = run_distributed(train_cut, 1, 1)[0]
    for got in run_distributed(train_cut, world, tp_size):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def collectives() -> None:
    bmt.init_distributed()
    rank, size = bmt.rank(), bmt.world_size()
    every = [torch.arange(1.0, 5.0) + 10 * r for r in range(size)]

    def own() -> torch.Tensor:
        return every[rank].clone().requires_grad_()

    x = own()
    y = bmt.distributed.all_gather(x)
    (y * (rank + 1)).sum().backward()  # each process uses it in its own way
    assert torch.equal(y, torch.stack(every))
    assert torch.equal(x.grad, torch.full((4,), size * (size + 1) / 2.0))
    reduced = {
        "sum": sum(every),
        "avg": sum(every) / size,
        "max": every[-1],
        "min": every[0],
        "prod": torch.stack(every).prod(0),
    }
    for op, want in reduced.items():
        x = own()
        y = bmt.distributed.all_reduce(x, op)
        torch.testing.assert_close(y, want)
        leaf = torch.stack(every).requires_grad_()
        wanted = {
            "sum": leaf.sum(0),
            "avg": leaf.mean(0),
            "max": leaf.amax(0),
            "min": leaf.amin(0),
            "prod": leaf.prod(0),
        }[op]
        (y * 2).sum().backward()
        (wanted * 2).sum().backward()
        torch.testing.assert_close(x.grad, leaf.grad[rank])
    for op in ("sum", "avg"):
        x = own()
        y = bmt.distributed.reduce_scatter(x, op)
        (y * (rank + 1)).sum().backward()
        torch.testing.assert_close(y, reduced[op].chunk(size)[rank])
        share = torch.arange(1.0, size + 1).repeat_interleave(4 // size)
        torch.testing.assert_close(x.grad, share / (1 if op == "sum" else size))
    x = own()
    y = bmt.distributed.broadcast(x, 1)
    (y * (rank + 1)).sum().backward()
    assert torch.equal(y, every[1])
    assert torch.equal(x.grad, torch.full((4,), 3.0 * (rank == 1)))
    with pytest.raises(ShapeError, match="is not divisible by the"):
        bmt.distributed.reduce_scatter(torch.ones(3))
    rows = torch.arange(12.0).view(size * 2, -1)
    assert torch.equal(bmt.gather_result(rows.chunk(size)[rank][:, 1:]), rows[:, 1:])
    assert torch.equal(bmt.gather_result(torch.tensor(float(rank))), torch.arange(float(size)))
    uneven = [torch.full((n + 1, 2), float(n)) for n in range(size)]  # a last batch that is shorter
    assert torch.equal(bmt.gather_result(uneven[rank]), torch.cat(uneven))
    zero = torch.zeros(2, requires_grad=True)
    bmt.distributed.all_reduce(zero, "prod").sum().backward()
    assert torch.isfinite(zero.grad).all()


def test_collectives_with_gradients() -> None:
    run_distributed(collectives, 2)


class Carries(bmt.DistributedModule):
    """Two values through, a batch-related one, a table, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = old.OldLinear(8, 8)

    def forward(self, a: Any, b: Any, mask: Any, table: Any, factor: float) -> Any:
        return self.linear(a) * mask + table, b * factor + a.mean((1, 2), keepdim=True)


def piped(form: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    pipes = {"pipe_size": 2, "num_micro_batches": 4} if form == "pipe" else {}
    bmt.init_distributed(seed=8, **pipes)
    kind = bmt.PipelineTransformerBlockList if form == "pipe" else bmt.TransformerBlockList
    blocks = kind([Carries() for _ in range(3)], num_hidden=2)
    bmt.init_parameters(blocks)
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 3, 8, generator=draw).requires_grad_() for _ in range(2))
    mask = torch.rand(8, 3, 1, generator=draw) > 0.3
    table = torch.randn(3, 8, generator=draw).requires_grad_()
    size, rank = bmt.world_size(), bmt.rank()
    given = [t.chunk(size)[rank] for t in (a, b, mask)]
    with torch.no_grad():
        quiet = blocks(*given, table, 0.5)
    *out, seen_a, seen_b = blocks(*given, table, 0.5, return_hidden_states=True)
    assert torch.equal(out[0], quiet[0])
    loss = out[0].square().sum() + out[1].sum() + seen_a.sin().sum() + seen_b[1].square().sum()
    loss.backward()
    everything = [*out, seen_a.movedim(1, 0), seen_b.movedim(1, 0), a.grad, b.grad, table.grad]
    whole_rows = [bmt.gather_result(t.detach()) for t in everything[:4]]
    sums = [bmt.distributed.all_reduce(t) for t in everything[4:]]
    grads = {}
    for name, param in blocks.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads[name] = whole(param, grad)
    return [*whole_rows, *sums], grads


@pytest.mark.parametrize("world", [2, 4])
def test_a_pipeline_carries_what_a_list_carries(world: int) -> None:
    want, gradients = run_distributed(piped, 1, "list")[0]
    for got, found in run_distributed(piped, world, "pipe"):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def stages() -> tuple[Any, ...]:
    bmt.init_distributed(pipe_size=2, num_micro_batches=2)
    blocks = bmt.PipelineTransformerBlockList([old.OldLinear(8, 8) for _ in range(5)])
    bmt.init_distributed(pipe_size=2, num_micro_batches=3)
    with pytest.raises(ShapeError, match="num_micro_batches=3"):
        blocks(torch.ones(2, 8))
    with pytest.raises(ConfigError, match="pipe_size=2 stages"):
        bmt.PipelineTransformerBlockList([old.OldLinear(8, 8)])
    here = [n for n, p in blocks.named_parameters() if not p.is_meta]
    return here, blocks.get_part_len_by_stage_id(0), list(blocks.get_range_by_stage_id(1))


def test_stages_have_even_parts() -> None:
    first, second = run_distributed(stages, 2)
    assert first[0] == [f"{i}.{n}" for i in (0, 1, 2) for n in ("weight", "bias")]
    assert second[0] == [f"{i}.{n}" for i in (3, 4) for n in ("weight", "bias")]
    assert first[1:] == second[1:] == (3, [3, 4])


def topology() -> tuple[int, ...]:
    bmt.init_distributed(pipe_size=2, tp_size=2)
    place, config = bmt.config["topology"], bmt.config
    assert (config["zero_size"], config["tp_zero_size"], config["pipe_enabled"]) == (2, 1, True)
    names = ("pipe", "zero", "tp", "tp_zero")
    return tuple(f(name) for name in names for f in (place.get_group_id, place.get_group_rank))


def test_where_processes_stand() -> None:
    want = [
        (0, 0, 0, 0, 0, 0, 0, 0),
        (1, 0, 0, 1, 0, 1, 1, 0),
        (0, 1, 1, 0, 1, 0, 2, 0),
        (1, 1, 1, 1, 1, 1, 3, 0),
    ]
    assert run_distributed(topology, 4) == want
