"""What stood below BMTrain's surface: nccl, storing by parts, messages, measurements, methods."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import threading
from pathlib import Path
from typing import Any

import old_programs as old
import pytest
import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain import nccl, store
from bmforge.compat.bmtrain.parameter import whole as values_of
from bmforge.errors import ConfigError, ShapeError
from bmforge.testing import run_distributed


def collectives() -> None:
    """As BMTrain's own code called them: storages, into other ones or in place."""
    bmt.init_distributed()
    comm, rank, world = bmt.config["comm"], bmt.rank(), bmt.world_size()
    assert (nccl.commCount(comm), nccl.commRank(comm)) == (world, rank)
    assert isinstance(comm, nccl.NCCLCommunicator)
    rows = torch.stack([torch.arange(4.0) * (r + 1) + r for r in range(world)])
    whole = {"sum": rows.sum(0), "avg": rows.mean(0), "prod": rows.prod(0)}
    whole |= {"max": rows.amax(0), "min": rows.amin(0)}
    for op, want in whole.items():
        given, found = rows[rank].clone(), torch.zeros(4)
        nccl.allReduce(given.storage(), found.storage(), op, comm)
        assert torch.equal(found, want)
        assert torch.equal(given, rows[rank])
        part = torch.zeros(4 // world)
        nccl.reduceScatter(given.storage(), part, op, comm)
        assert torch.equal(part, want.chunk(world)[rank])
        found = torch.zeros(4)
        nccl.reduce(given.storage(), found.storage(), op, world - 1, comm)
        assert torch.equal(found, want if rank == world - 1 else torch.zeros(4))
        nccl.allReduce(given.storage(), given.storage(), op, comm)
        assert torch.equal(given, want)
    every = torch.zeros(4 * world)
    nccl.allGather(rows[rank].clone().storage(), every.storage(), comm)
    assert torch.equal(every, rows.flatten())
    own = rows[rank].clone()
    nccl.broadcast(own.storage(), own.storage(), world - 1, comm)
    assert torch.equal(own, rows[-1])
    with pytest.raises(ShapeError, match="needed: 8 elements"):
        nccl.allGather(torch.zeros(8 // world), torch.zeros(3), comm)
    with pytest.raises(ConfigError, match="mean"):
        nccl.allReduce(own, own, "mean", comm)
    if world > 1:
        ring = torch.zeros(4)
        nccl.groupStart()  # both send first, which would hang one by one
        nccl.send(rows[rank].clone().storage(), (rank + 1) % world, comm)
        nccl.recv(ring.storage(), (rank - 1) % world, comm)
        assert not ring.any()
        nccl.groupEnd()
        assert torch.equal(ring, rows[rank - 1])


@pytest.mark.parametrize("world", [1, 2])
def test_collectives_between_storages(world: int) -> None:
    run_distributed(collectives, world)


def messages() -> None:
    bmt.init_distributed(pipe_size=2)
    topology, comm = bmt.config["topology"], bmt.config["pipe_comm"]
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    sent = [torch.ones(2, 1, 3).mul(topology.pp_zero_id + 1).to(kind) for kind in kinds]
    sent += [torch.tensor(3.0), torch.zeros(0, 4), torch.randn(3, 4).t()]
    for tensor in sent[:-1]:
        if topology.stage_id == 0:
            bmt.distributed.send_activations(tensor, 1, comm)
        else:
            found = bmt.distributed.recv_activations(0, comm)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found, tensor)
    if topology.stage_id == 0:
        bmt.distributed.send_activations(sent[-1], 1, comm)
    else:
        assert bmt.distributed.recv_activations(0, comm).shape == (4, 3)
    with pytest.raises(ShapeError, match="complex"):
        bmt.distributed.send_activations(torch.zeros(1, dtype=torch.complex64), 1, comm)


def test_activations_are_sent_with_their_shapes() -> None:
    run_distributed(messages, 2)


class Engine:
    """An inference engine that takes a model part by part."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []

    def load_layer_state_dict(self, part: dict[str, Any]) -> None:
        self.parts.append(dict(part))


def stored_parts() -> None:
    bmt.init_distributed(seed=0)
    torch.manual_seed(33)
    want = old.PlainGPT().state_dict()
    torch.manual_seed(33)
    model = old.OldGPT()
    bmt.init_parameters(model)
    state = store._save_to_rank0(model)
    assert (list(state) == list(want)) == (bmt.rank() == 0)
    assert all(torch.equal(value, want[key]) for key, value in state.items())
    into: dict[str, Any] = {}
    assert store._save_to_local_rank0(model.head, into, "head.") is into
    assert list(into) == (["head.weight", "head.bias"] if bmt.config["local_rank"] == 0 else [])
    engine = Engine()
    store._save_to_infer_model(model, engine)
    if bmt.config["local_rank"] == 0:
        blocks, rest = engine.parts[:-1], engine.parts[-1]
        assert [len(part) for part in blocks] == [4, 4, 4]
        assert all(key.startswith(f"blocks.{n}.") for n, part in enumerate(blocks) for key in part)
        found = {key: value for part in (*blocks, rest) for key, value in part.items()}
        assert sorted(found) == sorted(want)
        assert all(torch.equal(found[key], want[key]) for key in want)
    else:
        assert engine.parts == []
    assert store.allgather_object(bmt.rank(), bmt.config["comm"]) == list(range(bmt.world_size()))


@pytest.mark.parametrize("world", [1, 2])
def test_states_are_gathered_by_parts(world: int) -> None:
    run_distributed(stored_parts, world)


def save_meanwhile(folder: str) -> None:
    """What is written is what was there when `save` was called."""
    bmt.init_distributed(seed=0)
    model = old.OldGPT(layers=1)
    bmt.init_parameters(model)
    want = {key: value.clone() for key, value in model.state_dict().items()}
    go = threading.Event()
    writes = store._write

    def write_late(*args: Any) -> None:
        assert go.wait(60)
        writes(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_write", write_late)
        bmt.save(model, Path(folder, "one.pt"), non_blocking=True)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        if bmt.rank() == 0:
            assert not bmt.config["finish_save"]
            assert not Path(folder, "one.pt").exists()
        go.set()
    bmt.save(model, Path(folder, "two.pt"))  # waits for the first
    assert bmt.config["finish_save"]
    one, two = (torch.load(Path(folder, f"{name}.pt")) for name in ("one", "two"))
    assert all(torch.equal(one[key], want[key]) for key in want)
    assert not any(value.any() for value in two.values())
    bmt.synchronize()
    bmt.save(model, Path(folder, "none", "three.pt"), non_blocking=True)
    with pytest.raises(FileNotFoundError):
        bmt.save(model, Path(folder, "four.pt"))
    bmt.save(model, Path(folder, "four.pt"))


@pytest.mark.parametrize("world", [1, 2])
def test_saving_goes_on_meanwhile(world: int, tmp_path: Path) -> None:
    run_distributed(save_meanwhile, world, str(tmp_path))


def methods_of_parameters(tp_size: int) -> None:
    bmt.init_distributed(seed=0, tp_size=tp_size)
    values = torch.arange(12.0).view(6, 2)
    param = bmt.DistributedParameter(values, group="some")
    assert param.group == "some"
    whole = param.gather()
    assert torch.equal(whole, values)
    (whole * bmt.rank()).sum().backward()
    total = sum(range(bmt.world_size()))
    assert torch.equal(values_of(param, param.grad), torch.full((6, 2), float(total)))
    part = bmt.utils.tp_split_tensor(values.t(), 1)
    cut = bmt.DistributedParameter(part, tp_mode=True, tp_split_dim=1)
    assert cut.group == "tp"
    assert torch.equal(cut.gather(), part)
    assert torch.equal(cut.gather_all(), values.t())
    assert torch.equal(cut.tp_gather(), values.t())
    with pytest.raises(ConfigError, match="a copy"):
        copy.deepcopy(param.gather)()
    if bmt.world_size() == 1:
        index = torch.zeros(6, 1, dtype=torch.long)
        assert torch.equal(param.gather(1, index), values.gather(1, index))
    block = bmt.Block(old.OldLinear(4, 4))
    bmt.init_parameters(block)
    weight = block.state_dict()["weight"]
    assert torch.equal(next(block.parameters()).gather(), weight)


@pytest.mark.parametrize(("world", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_parameters_gather_themselves(world: int, tp_size: int) -> None:
    run_distributed(methods_of_parameters, world, tp_size)


def measure() -> str:
    bmt.init_distributed()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for act in (
            bmt.benchmark.all_gather,
            bmt.benchmark.reduce_scatter,
            bmt.benchmark.send_recv,
        ):
            act([1024, 2047])
    return out.getvalue()


def test_wires_are_measured() -> None:
    first, second = run_distributed(measure, 2)
    assert second == ""
    found = re.findall(r"^(.+?):\tsize +([\d,]+) B\ttime: \S+ ms\tbw: \S+ GiB/s$", first, re.M)
    names = ["All gather", "Reduce Scatter", "Send Recv"]
    assert found == [(name, size) for name in names for size in ("1,024", "2,048")]


def overflow() -> None:
    bmt.init_distributed()
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 6.0)
    groups = [{"params": [param]}]
    bmt.optim.optim_manager.check_overflow(groups)
    bmt.optim.optim_manager.grad_rescale(groups, 2.0)
    assert torch.equal(param.grad, torch.full((3,), 3.0))
    param.grad[bmt.rank()] = float("inf")
    with pytest.raises(OverflowError):
        bmt.optim.optim_manager.check_overflow(groups)


def test_gradients_are_looked_at_and_divided() -> None:
    run_distributed(overflow, 1)
