"""Boxes of plain and sharded tensors; on 2 to 4 processes they are checked by their contents."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bmforge.shards import Box, is_first_replica, local_box, local_tensor
from bmforge.testing import run_distributed

PAIRS = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.lists(PAIRS, min_size=2, max_size=2), st.lists(PAIRS, min_size=2, max_size=2))
def test_intersection_against_a_mask(first, second) -> None:
    a, b = (Box(tuple(o for o, _ in p), tuple(n for _, n in p)) for p in (first, second))
    marks = torch.zeros(12, 12, dtype=torch.int8)
    marks[a.slices] += 1
    marks[b.slices] += 1
    common = a.intersect(b)
    if common is None:
        assert not (marks == 2).any()
        return
    assert (marks[common.slices] == 2).all()
    assert common.numel == int((marks == 2).sum())
    inside = marks[a.slices][common.relative_to(a).slices]
    assert inside.shape == common.lengths
    assert (inside == 2).all()


def test_plain_tensors() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert local_box(tensor) == Box((0, 0), (2, 3))
    assert local_tensor(tensor) is tensor
    assert local_box(torch.tensor(1.0)) == Box((), ())
    assert Box((), ()).numel == 1
    assert is_first_replica(tensor, True)
    assert not is_first_replica(tensor, False)


def count(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def describe(tensors: dict[str, torch.Tensor], wholes: dict[str, torch.Tensor]):
    """Check each box by its contents; return what this process would write of each tensor."""
    written = {}
    for name, tensor in tensors.items():
        box, whole = local_box(tensor), wholes[name]
        local = local_tensor(tensor).detach()
        assert torch.equal(whole[box.slices], local), (name, box)
        assert tuple(local.shape) == box.lengths
        assert local.numel() == box.numel
        before = local.clone()
        with torch.no_grad():
            local.add_(1)  # a view: what is written to it is in the tensor
        assert torch.equal(local_tensor(tensor), before + 1)
        if is_first_replica(tensor, dist.get_rank() == 0):
            written[name] = box
    return written


def shard_by_fsdp(replicas: int):
    """Rows 7, 5, 2 and 1: uneven on 2, 3 and 4, fewer rows than processes."""
    world = dist.get_world_size()
    model = nn.Sequential(OrderedDict((f"rows{n}", nn.Linear(3, n)) for n in (7, 5, 2, 1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(count(*parameter.shape))
    wholes = {n: p.detach().clone() for n, p in model.named_parameters()}
    shape, names = (world,), ("dp_shard",)
    if replicas > 1:
        shape, names = (replicas, world // replicas), ("dp_replicate", "dp_shard")
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return describe(dict(model.named_parameters()), wholes)


def shard_by_placement():
    """A tensor cut along either dim, along both, along one, and not at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = count(5, 3)
    cuts = {
        "both": (Shard(0), Shard(1)),
        "columns": (Replicate(), Shard(1)),
        "rows": (Shard(0), Replicate()),
        "none": (Replicate(), Replicate()),
        "twice": (Shard(0), Shard(0)),
    }
    tensors = {name: distribute_tensor(whole, mesh, cut) for name, cut in cuts.items()}
    return describe(tensors, dict.fromkeys(cuts, whole.clone()))


def assert_written_once(shares, shapes) -> None:
    """The boxes that the processes write cover every tensor, each element once."""
    for name, shape in shapes.items():
        marks = torch.zeros(shape, dtype=torch.int8)
        for share in shares:
            if name in share:
                marks[share[name].slices] += 1
        assert (marks == 1).all(), name


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)])
def test_fsdp_and_hsdp_boxes(world: int, replicas: int) -> None:
    shares = run_distributed(shard_by_fsdp, world, replicas)
    shapes = {f"rows{rows}.weight": (rows, 3) for rows in (7, 5, 2, 1)}
    shapes |= {f"rows{rows}.bias": (rows,) for rows in (7, 5, 2, 1)}
    assert_written_once(shares, shapes)


def test_boxes_of_other_placements() -> None:
    shares = run_distributed(shard_by_placement, 4)
    names = ("both", "columns", "rows", "none", "twice")
    assert_written_once(shares, dict.fromkeys(names, (5, 3)))
