"""CPM-Pretrain's own tests of mpu, in our own words: what is cut is as what is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.compat.cpm_pretrain import mpu
from bmforge.compat.cpm_pretrain.pipe import PipeModelDataParallelTopology
from bmforge.errors import ConfigError, DataError, DistributedError
from bmforge.testing import run_distributed

WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.long)]


def sizes() -> Iterator[int]:
    """Set up every number of processes that can share a model, one after the other."""
    size = 1
    while size <= int(dist.get_world_size()):
        assert not mpu.model_parallel_is_initialized()
        mpu.initialize_model_parallel(size)
        yield size
        mpu.destroy_model_parallel()
        size *= 2


class Identity(nn.Module):
    """Returns a weight, so that the gradient of an input is one of a parameter."""

    def __init__(self, *size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(*size))

    def forward(self) -> Tensor:
        return self.weight


def own_part(whole: Tensor, dim: int = -1) -> Tensor:
    return whole.chunk(mpu.get_model_parallel_world_size(), dim)[mpu.get_model_parallel_rank()]


def groups() -> None:
    """test_initialize.py."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.raises(DistributedError, match="initialize_model_parallel"):
        mpu.get_model_parallel_group()
    for size in sizes():
        assert mpu.model_parallel_is_initialized()
        assert not mpu.is_unitialized()
        own = mpu.get_model_parallel_group()
        assert (own.size(), own.rank()) == (size, rank % size)
        assert mpu.get_model_parallel_world_size() == size
        assert mpu.get_model_parallel_rank() == rank % size
        other = mpu.get_data_parallel_group()
        assert (other.size(), other.rank()) == (world // size, rank // size)
        assert mpu.get_data_parallel_world_size() == world // size
        assert mpu.get_data_parallel_rank() == rank // size
        assert mpu.get_model_parallel_src_rank() == rank - mpu.get_model_parallel_rank()
        assert mpu.get_topology() is None
        mpu.set_model_parallel_rank(7)
        mpu.set_model_parallel_world_size(9)
        assert (mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()) == (7, 9)
        with pytest.raises(DistributedError, match="already"):
            mpu.initialize_model_parallel(1)


def stages() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=dist.get_world_size() // 2)
    mpu.initialize_model_parallel(1, topology=topology)
    rank = dist.get_rank()
    here = topology.get_coord(rank)
    assert mpu.get_topology() is topology
    assert mpu.get_pipe_parallel_world_size() == topology.get_dim("pipe") == 2
    assert mpu.get_pipe_parallel_rank() == here.pipe
    assert mpu.get_data_parallel_rank() == here.data
    members = dist.get_process_group_ranks(mpu.get_pipe_parallel_group())
    assert members in topology.get_axis_comm_lists("pipe")
    assert rank in members
    assert mpu.get_io_parallel_group().size() == dist.get_world_size()


def cross_entropy() -> None:
    """test_cross_entropy.py: logits of thousands, as an untrained model never has them."""
    for size in sizes():
        torch.manual_seed(1234)
        identity = Identity(13, 17, 11 * size, scale=1000.0)
        target = torch.randint(11 * size, (13, 17))
        logits = identity()
        wanted = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        wanted.backward()
        wanted_grad, identity.weight.grad = identity.weight.grad, None
        parallel = mpu.scatter_to_model_parallel_region(identity())
        before = parallel.clone()
        losses = mpu.vocab_parallel_cross_entropy(parallel, target)
        assert losses.shape == target.shape
        assert torch.equal(parallel, before)
        losses.mean().backward()
        torch.testing.assert_close(losses.mean(), wanted, rtol=0, atol=1e-3)
        torch.testing.assert_close(identity.weight.grad, wanted_grad, rtol=0, atol=1e-6)


def broadcast() -> None:
    """test_data.py."""
    shapes = {"key1": (7, 11), "key2": (8, 2, 1), "key3": (13,), "key4": (5, 1, 2), "key5": ()}
    for _size in sizes():
        torch.manual_seed(1234 + mpu.get_data_parallel_rank())
        sent = {key: torch.randint(1000, shape) for key, shape in shapes.items()}
        data: Any = {**sent, "keyX": torch.rand(5)}
        if mpu.get_model_parallel_rank():
            data = None
        found = mpu.broadcast_data(list(shapes), data, torch.int64)
        assert list(found) == list(shapes)
        assert all(torch.equal(found[key], sent[key]) for key in shapes)
        with pytest.raises(DataError, match="keyX is"):
            mpu.broadcast_data(["key1", "keyX"], data, torch.int64)
        with pytest.raises(DataError, match="lacks keyY"):
            mpu.broadcast_data(["keyY"], data, torch.int64)


def embedding() -> None:
    """test_layers.py: a table cut by its rows."""
    for _size in sizes():
        torch.manual_seed(123)
        ids, weight = torch.randint(48, (17, 23)), torch.randn(17, 23, 16)
        torch.manual_seed(1236)
        whole = nn.Embedding(48, 16)
        (whole(ids) * weight).sum().backward()
        torch.manual_seed(1236)
        parallel = mpu.VocabParallelEmbedding(48, 16, init_method=nn.init.normal_)
        assert torch.equal(parallel.weight, own_part(whole.weight, 0))
        assert torch.equal(parallel(ids), whole(ids))
        (parallel(ids) * weight).sum().backward()
        assert whole.weight.grad is not None
        torch.testing.assert_close(parallel.weight.grad, own_part(whole.weight.grad, 0))


def linear(kind: str) -> None:
    """test_layers.py: a matrix cut by its outputs or its inputs."""
    dim = 0 if kind == "ColumnParallelLinear" else 1
    for size in sizes():
        torch.manual_seed(12345)
        inputs = Identity(7, 13 * size)
        layer = getattr(mpu, kind)(13 * size, 17 * size, keep_master_weight_for_test=True)
        upstream = torch.randn(7, 17 * size)
        out, bias = layer(inputs())
        assert bias is None
        (out * upstream).sum().backward()
        master = layer.master_weight
        assert torch.equal(layer.weight, own_part(master, dim))
        for weight in (layer.weight, copy.deepcopy(layer).weight):
            assert (weight.model_parallel, weight.partition_dim) == (True, dim)
        x = inputs.weight.detach()
        torch.testing.assert_close(out, x @ master.t())
        torch.testing.assert_close(layer.weight.grad, own_part(upstream.t() @ x, dim))
        wanted = upstream.sum(0)
        torch.testing.assert_close(layer.bias.grad, own_part(wanted) if dim == 0 else wanted)
        torch.testing.assert_close(inputs.weight.grad, upstream @ master)
        skipping = getattr(mpu, kind)(13 * size, 17 * size, skip_bias_add=True)
        out, bias = skipping(inputs())
        assert bias is skipping.bias
    if dist.get_world_size() > 1:
        mpu.initialize_model_parallel(2)
        with pytest.raises(ConfigError, match="3 is not divisible by 2"):
            getattr(mpu, kind)(3, 3)


class Attention(nn.Module):
    """Self-attention of which each process has some of the heads; a product with a mask added."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = mpu.divide(heads, mpu.get_model_parallel_world_size())
        hidden = heads * width
        self.query_key_value = mpu.ColumnParallelLinear(
            hidden, 3 * hidden, gather_output=False, stride=3
        )
        self.dense = mpu.RowParallelLinear(hidden, hidden, input_is_parallel=True)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mixed, _ = self.query_key_value(hidden)
        parts = mpu.split_tensor_along_last_dim(mixed, 3)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.dense(seen.transpose(1, 2).flatten(2))[0]


def attention() -> None:
    """test_layers.py: self-attention, as one process has it and as several share it."""
    results = []
    for size in sizes():
        torch.manual_seed(12345)
        inputs = Identity(5, 13, 4 * 7)
        layer = Attention(4, 7)
        upstream, mask = torch.randn(5, 13, 28), torch.randn(5, 1, 1, 13)
        loss = (layer(inputs(), mask) * upstream).sum()
        loss.backward()
        grad = layer.query_key_value.weight.grad
        parts = grad.chunk(3)
        if size > 1:
            pieces = [torch.empty_like(parts[0]) for _ in range(3 * size)]
            for n, part in enumerate(parts):
                own = pieces[n * size : (n + 1) * size]
                dist.all_gather(own, part.contiguous(), group=mpu.get_model_parallel_group())
            grad = torch.cat(pieces)
        results.append((loss.detach(), inputs.weight.grad, grad))
    for found in results[1:]:
        for value, wanted in zip(found, results[0], strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=5e-5)


def clipping() -> None:
    for size in sizes():
        torch.manual_seed(0)
        whole = nn.Parameter(torch.randn(4, 8))
        plain = nn.Parameter(torch.randn(5))
        twin = nn.Parameter(plain.detach().clone())
        part = nn.Parameter(own_part(whole.detach(), 0).clone())
        part.model_parallel = True  # type: ignore[attr-defined]
        for kind in (2, 3.0, float("inf")):
            for param in (whole, part, plain, twin):
                param.grad = param.detach().clone()
            found = mpu.clip_grad_norm([part, plain], 0.5, kind)
            wanted = nn.utils.clip_grad_norm_([whole, twin], 0.5, kind)
            assert found == pytest.approx(wanted.item(), rel=1e-6), size
            assert whole.grad is not None
            torch.testing.assert_close(part.grad, own_part(whole.grad, 0))


def random_states() -> None:
    """test_random.py: streams side by side, and what each process draws for itself."""
    tracker = mpu.get_cuda_rng_tracker()
    for _size in sizes():
        tracker.reset()
        torch.manual_seed(1234)
        wanted = [torch.randn(12), torch.randn(12)]
        torch.manual_seed(4321)
        others = [torch.randn(12), torch.randn(12)]
        torch.manual_seed(1234)
        tracker.add("test", 4321)
        for row in range(2):
            assert torch.equal(torch.randn(12), wanted[row])
            with tracker.fork("test"):
                assert torch.equal(torch.randn(12), others[row])
        with pytest.raises(ConfigError, match="already exists"):
            tracker.add("test", 5)
        with pytest.raises(ConfigError, match="no random generator 'else'"), tracker.fork("else"):
            pass
        kept = tracker.get_states()
        with tracker.fork("test"):
            first = torch.randn(3)
        tracker.set_states(kept)
        with tracker.fork("test"):
            assert torch.equal(torch.randn(3), first)
        mpu.model_parallel_cuda_manual_seed(12345)
        assert torch.initial_seed() == 12345
        alike = torch.randn(3)
        with tracker.fork():
            assert torch.initial_seed() == 12345 + 2718 + mpu.get_model_parallel_rank()
            apart = torch.randn(3)
        torch.manual_seed(12345)
        assert torch.equal(torch.randn(3), alike)
        torch.manual_seed(12345 + 2718 + mpu.get_model_parallel_rank())
        assert torch.equal(torch.randn(3), apart)


def recomputing() -> None:
    for _size in sizes():
        mpu.model_parallel_cuda_manual_seed(5)
        calls = []

        def part(x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())  # noqa: B023
            with mpu.get_cuda_rng_tracker().fork():
                x = F.dropout(x * x, 0.5)
            return F.dropout(x.sin(), 0.5)

        x = torch.randn(50, requires_grad=True)
        state, kept = torch.get_rng_state(), mpu.get_cuda_rng_tracker().get_states()
        out = part(x)
        (wanted,) = torch.autograd.grad(out.sum(), x)
        torch.set_rng_state(state)
        mpu.get_cuda_rng_tracker().set_states(kept)
        again = mpu.checkpoint(part, x)
        later = mpu.get_cuda_rng_tracker().get_states()
        assert torch.equal(again, out)
        again.sum().backward()
        assert len(calls) == 3
        assert x.grad is not None
        assert torch.equal(x.grad, wanted)
        now = mpu.get_cuda_rng_tracker().get_states()
        assert all(torch.equal(now[n][k], later[n][k]) for n in later for k in later[n])


CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (groups, ()),
    (cross_entropy, ()),
    (broadcast, ()),
    (embedding, ()),
    (linear, ("ColumnParallelLinear",)),
    (linear, ("RowParallelLinear",)),
    (attention, ()),
    (clipping, ()),
    (random_states, ()),
    (recomputing, ()),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("case", "args"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_mpu(case: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    run_distributed(case, world, *args)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_groups_of_a_pipeline(world: int) -> None:
    run_distributed(stages, world)
