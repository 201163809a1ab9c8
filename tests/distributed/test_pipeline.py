"""Pipelined runs against the same stages chained in one process: losses and all gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from bmforge.errors import ConfigError, DistributedError, ShapeError
from bmforge.parallel.pipeline.messages import MAX_TENSORS, Link
from bmforge.parallel.pipeline.run import Pipeline
from bmforge.parallel.pipeline.schedules import SCHEDULES, write_schedule
from bmforge.testing import assert_close, run_distributed

WIDTH, VOCAB, ROWS = 6, 11, 3
STAGES = {  # stages per rank
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "interleaved-zero-bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


class Part(nn.Module):
    """A stage through which every kind of tensor goes.

    Carry: hidden (B, T, D); memory (B, D), made by the first stage and used by all; table (T, D),
    weights of the second stage that later stages use; positions int; keep bool; a float without
    gradient; None.
    """

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.is_first, self.is_second, self.is_last = number == 0, number == 1, number == count - 1
        self.mix, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if self.is_first:
            self.embed, self.remember = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        if self.is_second:
            self.table = nn.Parameter(torch.empty(8, WIDTH))
        if self.is_last:
            self.head = nn.Linear(WIDTH, VOCAB)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, carry, micro_batch):
        if carry is None:
            ids = micro_batch["ids"]
            hidden = self.embed(ids)
            memory = torch.tanh(self.remember(hidden.mean(1)))
            positions, keep = torch.arange(ids.shape[1]), ids != 0
            spread = hidden.detach().std()
            table = None
        else:
            hidden, memory, table, positions, keep, spread, nothing = carry
            assert nothing is None
            assert (positions.dtype, keep.dtype) == (torch.int64, torch.bool)
            assert not spread.requires_grad
        if self.is_second:
            table = torch.sin(self.table)[positions]
        if table is not None:
            hidden = hidden + table
        hidden = hidden + torch.tanh(self.mix(self.norm(hidden))) * keep.unsqueeze(-1) / spread
        hidden = hidden + self.use(memory).unsqueeze(1)
        hidden = hidden + 0.5 * torch.tanh(self.mix(hidden))  # tied within the stage
        if not self.is_last:
            return hidden, memory, table, positions, keep, spread, None
        logits = self.head(hidden)
        if "labels" not in micro_batch:
            return logits, keep
        loss = F.cross_entropy(
            logits.flatten(0, 1), micro_batch["labels"].flatten(), reduction="sum"
        )
        return loss / micro_batch["items"]


def batches(count: int, step: int, labels: bool = True) -> list[dict]:
    """Micro-batches of the step's own length; the last one is short."""
    generator = torch.Generator().manual_seed(100 + step)
    length = 4 + step
    found = []
    for index in range(count):
        rows = 1 if index == count - 1 else ROWS
        ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
        found.append({"ids": ids, "items": 10.0} | ({"labels": ids.roll(1, 1)} if labels else {}))
    return found


def gradients(parts: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": parameter.grad.clone()
        for number, part in parts.items()
        for name, parameter in part.named_parameters()
    }


def reference(stages: int, count: int, steps: int):
    """The same stages one after the other, in this process."""
    parts = {n: Part(n, stages) for n in range(stages)}
    found = []
    for step in range(steps):
        losses = []
        for micro_batch in batches(count, step):
            carry = None
            for part in parts.values():
                carry = part.forward(carry, micro_batch)
            carry.backward()
            losses.append(carry.detach())
        found.append((torch.stack(losses), gradients(parts)))
    return found


def train(name, count, steps, link=None, **options):
    """Gradients add up from step to step, so that each step's must be right."""
    link = link or Link()
    schedule = write_schedule(name, link.size, count, STAGES[name])
    parts = {n: Part(n, schedule.num_stages) for n in schedule.stages_of(link.rank)}
    pipeline = Pipeline(schedule, parts, link, **options)
    found = []
    for step in range(steps):
        losses = pipeline.step(batches(count, step))
        found.append((torch.stack(losses) if losses else None, gradients(parts)))
    return found


def compare(got, want, last_rank):
    """Each rank's losses and gradients against one process's."""
    for step, (losses, grads) in enumerate(want):
        assert_close(got[last_rank][step][0], losses)
        found = {}
        for rank, steps in enumerate(got):
            assert (steps[step][0] is None) == (rank != last_rank)
            found |= steps[step][1]
        assert_close(found, grads)


def last_rank(name, world):
    return write_schedule(name, world, 2 * world * STAGES[name], STAGES[name]).stage_ranks[-1]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_one_process(name, world):
    count = 8 if world == 4 else 4
    got = run_distributed(train, world, name, count, 2)
    compare(got, reference(world * STAGES[name], count, 2), last_rank(name, world))


@pytest.mark.parametrize("name", ["interleaved-zero-bubble", "zbv", "dualpipev"])
def test_without_splitting_backwards(name):
    got = run_distributed(train, 2, name, 4, 1, split=())
    compare(got, reference(2 * STAGES[name], 4, 1), last_rank(name, 2))


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 12])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_any_number_of_micro_batches(name, world, count):
    got = run_distributed(train, world, name, count, 2)
    compare(got, reference(world * STAGES[name], count, 2), last_rank(name, world))


def train_sliced(name, count):
    """Two pipelines side by side that hold the same activations, as tensor parallel ranks do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    link = Link(mesh.get_group("pp"), slice_group=mesh.get_group("tp"))
    sizes, isend = [], dist.isend
    dist.isend = lambda tensor, **kw: (
        sizes.append((tensor.dtype, tensor.numel())),
        isend(tensor, **kw),
    )[1]
    try:
        return train(name, count, 2, link), sizes
    finally:
        dist.isend = isend


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_sliced_sending(name):
    got = run_distributed(train_sliced, 4, name, 4)
    want = reference(2 * STAGES[name], 4, 2)
    for tp in (0, 1):
        compare([got[tp][0], got[2 + tp][0]], want, last_rank(name, 2))
    floats = {numel for dtype, numel in got[0][1] if dtype == torch.float64}
    # Step 0: whole hidden (3, 4, 6) and (1, 4, 6), memory (3, 6) and (1, 6); half of each crosses.
    assert {36, 12, 9, 3} <= floats
    assert not {72, 24, 18, 6} & floats
    assert 1 in floats  # the scalar does not divide
    assert {numel for dtype, numel in got[0][1] if dtype == torch.bool} >= {12, 4}


def train_recorded(name, count):
    """The payload operations of this rank, in the order in which they were posted."""
    posted: dict[int, list] = {}
    isend, irecv = dist.isend, dist.irecv

    def send(tensor, group_dst, tag, **kw):
        posted.setdefault(group_dst, []).append(("send", tag, tuple(tensor.shape)))
        return isend(tensor, group_dst=group_dst, tag=tag, **kw)

    def receive(tensor, group_src, tag, **kw):
        posted.setdefault(group_src, []).append(("receive", tag, tuple(tensor.shape)))
        return irecv(tensor, group_src=group_src, tag=tag, **kw)

    dist.isend, dist.irecv = send, receive
    try:
        train(name, count, 1)
    finally:
        dist.isend, dist.irecv = isend, irecv
    # Headers go another way on accelerators; theirs is the first tag of every message.
    return {peer: [op for op in ops if op[1] % (1 + MAX_TENSORS)] for peer, ops in posted.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_ends_post_in_the_same_order(name):
    """So a backend that runs the operations of a pair one after the other cannot hang either."""
    got = run_distributed(train_recorded, 2 if name == "dualpipev" else 4, name, 4)
    flipped = {"send": "receive", "receive": "send"}
    seen = 0
    for rank, peers in enumerate(got):
        for peer, ops in peers.items():
            assert [(flipped[kind], *rest) for kind, *rest in got[peer][rank]] == ops
            seen += len(ops)
    assert seen


def count_kept(name, count):
    """The most sent tensors that are alive at once, and how many are sent in all."""
    sent: list[weakref.ref] = []
    most, isend = 0, dist.isend

    def send(tensor, **kw):
        nonlocal most
        sent.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in sent))
        return isend(tensor, **kw)

    dist.isend = send
    try:
        train(name, count, 1)
    finally:
        dist.isend = isend
    return most, len(sent)


def test_what_has_arrived_is_let_go():
    """Three micro-batches in flight at most (one of them just being sent), eight tensors each."""
    for most, total in run_distributed(count_kept, 2, "1f1b", 16):
        assert total > 32
        assert most <= 3 * 8


def evaluate(name, count, share):
    link = Link()
    schedule = write_schedule(name, link.size, 4, STAGES[name])
    parts = {n: Part(n, schedule.num_stages) for n in schedule.stages_of(link.rank)}
    pipeline = Pipeline(schedule, parts, link)
    before = pipeline.step(batches(4, 0))
    outputs = pipeline.run_forward_only(batches(count, 1, labels=False), share=share)
    losses = pipeline.run_forward_only(batches(count, 1))
    after = pipeline.step(batches(4, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return outputs, losses


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv"])
def test_forward_only(name, share):
    count, stages = 3, 2 * STAGES[name]
    parts = [Part(n, stages) for n in range(stages)]
    want, want_losses = [], []
    for found, labels in ((want, False), (want_losses, True)):
        for micro_batch in batches(count, 1, labels):
            carry = None
            for part in parts:
                carry = part.forward(carry, micro_batch)
            found.append(carry)
    for rank, (outputs, losses) in enumerate(run_distributed(evaluate, 2, name, count, share)):
        has_losses = rank == last_rank(name, 2)
        assert len(outputs) == (count if share or has_losses else 0)
        for (logits, keep), (want_logits, want_keep) in zip(outputs, want, strict=False):
            assert_close(logits, want_logits.detach())
            assert torch.equal(keep, want_keep)
            assert not logits.requires_grad
        assert len(losses) == (count if has_losses else 0)
        for (loss,), want_loss in zip(losses, want_losses, strict=False):
            assert_close(loss, want_loss.detach())


class Freezing(nn.Module):
    """A stage of which some carry no gradient at all."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(WIDTH, WIDTH).double().requires_grad_(number != 0)
        nn.init.eye_(self.layer.weight)

    def forward(self, carry, micro_batch):
        (x,) = carry or (micro_batch["x"],)
        x = self.layer(x)
        return x.sum() if self.number == 3 else (x.detach() if self.number == 1 else x,)


def train_frozen(name):
    link = Link()
    schedule = write_schedule(name, link.size, 4, 2)
    parts = {n: Freezing(n) for n in schedule.stages_of(link.rank)}
    micro_batch = {"x": torch.ones(2, WIDTH, dtype=torch.float64)}
    Pipeline(schedule, parts, link).step([micro_batch] * 4)
    return {n: part.layer.weight.grad is not None for n, part in parts.items()}


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv"])
def test_gradients_that_do_not_exist_are_none(name):
    first, second = run_distributed(train_frozen, 2, name)
    assert first | second == {0: False, 1: False, 2: True, 3: True}


def train_sharded(name, split, zero3):
    """Two data-parallel replicas of a pipeline, sharded; each sees half of the rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    link = Link(mesh.get_group("pp"))
    schedule = write_schedule(name, 2, 4, STAGES[name])
    parts = {n: Part(n, schedule.num_stages) for n in schedule.stages_of(link.rank)}
    for part in parts.values():
        for unit in (part.mix, part.use):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=zero3)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=zero3)

    def sync(stage: int, is_last: bool) -> None:
        parts[stage].set_is_last_backward(is_last)
        parts[stage].set_reshard_after_backward(is_last)
        parts[stage].set_requires_gradient_sync(is_last)

    stages = {n: Calling(part) for n, part in parts.items()}
    pipeline = Pipeline(schedule, stages, link, sync=sync, split=None if split else ())
    dp = mesh.get_local_rank("dp")
    pipeline.step([b if dp == 0 else {**b, "ids": b["ids"].flip(0)} for b in batches(4, 0)])
    return {
        f"{n}.{name}": p.grad.full_tensor() * 2
        for n, part in parts.items()
        for name, p in part.named_parameters()
    }


class Calling:
    """Calls a module as a module, so that its hooks run."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        self.module = module

    def forward(self, carry, micro_batch):
        return self.module(carry, micro_batch)


@pytest.mark.parametrize(
    ("name", "split", "zero3"), [("1f1b", True, True), ("zbv", False, True), ("zbv", True, False)]
)
def test_sharded_stages_reduce_once(name, split, zero3):
    got = run_distributed(train_sharded, 4, name, split, zero3)
    stages = 2 * STAGES[name]
    parts = {n: Part(n, stages) for n in range(stages)}
    for flip in (False, True):
        for micro_batch in batches(4, 0):
            carry, ids = None, micro_batch["ids"]
            for part in parts.values():
                carry = part(carry, {**micro_batch, "ids": ids.flip(0) if flip else ids})
            carry.backward()
    assert_close(got[0] | got[2], gradients(parts))
    assert_close(got[1] | got[3], gradients(parts))


def fail(kind):
    """One rank goes wrong; the other must be told where and by whom."""
    link = Link()
    schedule = write_schedule("1f1b", 2, 2)
    part = Part(link.rank, 2)
    if kind == "wrong stages":
        Pipeline(schedule, {5: part}, link)
    pipeline = Pipeline(schedule, {link.rank: part}, link)
    if kind == "too few":
        pipeline.step(batches(1, 0))
    if kind == "silent" and link.rank == 0:
        link.connect([(0, 1)])
        return
    if kind == "loss" and link.rank == 1:
        part.forward = lambda carry, micro_batch: carry[0]
    if kind == "too many" and link.rank == 0:
        part.forward = lambda carry, micro_batch: (torch.ones(1),) * 17
    if kind == "dims" and link.rank == 0:
        part.forward = lambda carry, micro_batch: (torch.ones([1] * 7), {"no": "tensor"})
    pipeline.step(batches(2, 0))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrong stages", [ConfigError, "stages [5]", "assigns [1] to this rank"]),
        ("too few", [ConfigError, "the batch has 1 micro-batches"]),
        (
            "silent",
            [
                DistributedError,
                "rank 1 lost the connection to rank 0 at the forward message of stage 0",
            ],
        ),
        (
            "loss",
            [ShapeError, "the last stage (1) returned (3, 4, 6)", "lost the connection to rank 1"],
        ),
        ("too many", [ShapeError, "17 tensors", "lost the connection to rank 0"]),
        ("dims", [ShapeError, "7 dims", "lost the connection to rank 0"]),
    ],
)
def test_what_goes_wrong_is_named(kind, words):
    with pytest.raises(DistributedError) as caught:
        run_distributed(fail, 2, kind)
    for word in words:
        assert (word if isinstance(word, str) else word.__name__) in str(caught.value)
