"""Optimizers and clipping on FSDP2's sharded parameters against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from bmforge.errors import DistributedError
from bmforge.testing import run_distributed
from bmforge.train.optim.build import OptimConfig, build_optimizers, clip_grad_norm_
from bmforge.train.optim.muon import Muon

CONFIGS = {
    "adamw": OptimConfig("adamw", lr=0.01),
    "muon": OptimConfig("muon", lr=0.01),
    "sgd": OptimConfig("sgd", lr=0.01),
}


def build(dtype):
    """Rows that 2, 3 and 4 processes do not divide, and one parameter smaller than the world."""
    torch.manual_seed(0)
    layers = {
        "embed": nn.Linear(5, 7),
        "up": nn.Linear(7, 10, bias=False),
        "down": nn.Linear(10, 3),
        "out": nn.Linear(3, 1),
    }
    return nn.Sequential(*layers.values()).to(dtype)


def shard(model, mesh, plain_last):
    for layer in list(model)[: 3 if plain_last else 4]:
        fully_shard(layer, mesh=mesh)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 5, generator=draw, dtype=torch.float64)


def train(model, optimizers, steps=3):
    """Three clipped steps on batches that every process sees alike: their mean is one's."""
    norms = []
    for step in range(steps):
        (10 * model(batch(step)).square().mean()).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.7))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(norms)


def train_sharded(name, dtype, shape, plain_last):
    axes = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = build(dtype)
    shard(model, mesh, plain_last)
    norms = train(model, build_optimizers(model, CONFIGS[name]))
    return norms, [full(p).detach() for p in model.parameters()]


def reference(name, dtype):
    """The same on one process; its first norm is torch's."""
    model = build(dtype)
    (10 * model(batch(0)).square().mean()).backward()
    first = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    model.zero_grad()
    norms = train(model, build_optimizers(model, CONFIGS[name]))
    torch.testing.assert_close(norms[0], first, rtol=1e-12, atol=0)
    return norms, [p.detach() for p in model.parameters()]


LAYOUTS = [((1,), False), ((2,), False), ((3,), True), ((4,), False), ((2, 2), False)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("shape", "plain_last"), [*LAYOUTS, ((2, 2), True)])
def test_same_numbers_as_one_process(name, shape, plain_last):
    world = torch.Size(shape).numel()
    expected_norms, expected = reference(name, torch.float64)
    results = run_distributed(train_sharded, world, name, torch.float64, shape, plain_last)
    for norms, parameters in results:
        torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=1e-12)
        assert torch.equal(norms, results[0][0])
        for actual, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


def muon_step_sharded(shape):
    """One Muon step from given float32 gradients: gathering is exact, so bits must agree."""
    axes = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = nn.Sequential(*[build(torch.float32)[i] for i in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    whole = build(torch.float32)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizers = [Muon(matrices, lr=0.01, weight_decay=0.1, ns_dtype="bf16")]
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        for parameter, like in zip(model.parameters(), whole.parameters(), strict=False):
            parameter.grad = scatter(torch.randn(like.shape, generator=draw), parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [full(p).detach() for p in model.parameters()]


def scatter(whole, like):
    return distribute_tensor(whole, like.device_mesh, like.placements)


def muon_step_by_torch():
    model = nn.Sequential(*[build(torch.float32)[i] for i in range(3)])
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Muon(
        matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_sharded_muon_is_torchs_muon_of_the_whole_matrix(shape):
    torch.set_num_threads(1)
    expected = muon_step_by_torch()
    for parameters in run_distributed(muon_step_sharded, torch.Size(shape).numel(), shape):
        for actual, wanted in zip(parameters, expected, strict=True):
            if wanted.dim() == 2:
                assert torch.equal(actual, wanted)


def norm_of_partial_gradient():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    clip_grad_norm_([parameter], 1.0)


def test_a_gradient_that_is_not_summed_up_is_refused():
    with pytest.raises(DistributedError, match="has not been reduced"):
        run_distributed(norm_of_partial_gradient, 2)
