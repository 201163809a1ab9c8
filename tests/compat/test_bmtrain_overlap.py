"""Blocks of a model have one root, and the next one is gathered before the end of this one."""

from __future__ import annotations

from typing import Any

import old_programs as old
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import bmforge.compat.bmtrain as bmt
from bmforge.testing import run_distributed
from bmforge.testing.traffic import Traffic

BLOCKS = 3


class Ordered(Traffic):
    """Traffic with the order of the calls, among marks of the test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.calls.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.calls.total() > before:
            self.order.append("gather" if "gather" in func._schema.name else "reduce")
        return result


class Marking(bmt.DistributedModule):
    """A block that says when it begins and ends, forward and in the gradient of its output."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.inner, self.log = old.OldLinear(4, 4), log

    def forward(self, x: Tensor) -> Tensor:
        self.log("begin")
        y = self.inner(x)
        if y.requires_grad:  # its gradient is there once that of the output has come in
            y.register_hook(lambda grad: self.log("back"))
        self.log("end")
        return torch.tanh(y)


class Loops(nn.Module):
    """A plain module that goes through its blocks by itself."""

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Called(Loops, bmt.DistributedModule):
    """The same as a distributed module, of which nothing is drawn or loaded as a whole."""


def build(form: str, blocks: list[Any]) -> Any:
    if form == "list":
        return bmt.TransformerBlockList(blocks)
    model = Called(blocks) if form == "called" else Loops(blocks)
    if form == "drawn":
        bmt.init_parameters(model)
    return model


def steps(form: str, level: int) -> list[list[str]]:
    """What happens in the second of two steps, and in a forward after them."""
    bmt.init_distributed(seed=0)
    found: list[list[str]] = []
    order: list[str] = []
    made = [Marking(lambda mark: order.append(mark)) for _ in range(BLOCKS)]
    model = build(form, [bmt.Block(m, use_checkpoint=False, zero_level=level) for m in made])
    x = torch.ones(2, 4)
    for kind in ("first", "second", "no backward"):
        with Ordered() as traffic, torch.set_grad_enabled(kind != "no backward"):
            traffic.order = order
            y = model(x)
            if y.requires_grad:
                y.sum().backward()
        found.append(list(order))
        order.clear()
    states = [m._get_fsdp_state() for m in made]
    assert all(isinstance(m, FSDPModule) for m in made)
    assert len({id(state._comm_ctx) for state in states}) == 1
    assert not any(state._is_root for state in states)
    for param in model.parameters():
        assert bmt.parameter.origin_of(param).in_block
    return found


FORWARD = ["gather", "gather", "begin", "end", "gather", "begin", "end", "begin", "end"]
BACK = {
    3: ["gather", "gather", "back", "reduce", "gather", "back", "reduce", "back", "reduce"],
    2: ["back", "reduce"] * BLOCKS,
}


@pytest.mark.parametrize(("form", "level"), [("list", 3), ("called", 3), ("drawn", 3), ("list", 2)])
def test_the_next_block_is_gathered_before_the_end_of_this_one(form: str, level: int) -> None:
    for found in run_distributed(steps, 2, form, level):
        for order in found[:2]:
            assert order == FORWARD + BACK[level]
        assert found[2] == FORWARD


def leave_out() -> None:
    """A block that was gathered ahead and not run has the new values when it is run."""
    bmt.init_distributed(seed=0)
    model = Loops([bmt.Block(old.OldLinear(4, 4)) for _ in range(2)])
    bmt.init_parameters(model)
    first, second = model.blocks
    x = torch.ones(2, 4)
    with torch.no_grad():
        model(x)
        first(x)
        state = {key: value * 2 for key, value in model.state_dict().items()}
        model.load_state_dict(state)
        want = nn.functional.linear(x, state["blocks.1.weight"], state["blocks.1.bias"])
        torch.testing.assert_close(second(x), want)


def test_a_block_that_is_left_out_is_not_stale() -> None:
    run_distributed(leave_out, 2)


def part_then_all() -> list[float]:
    """A model of which a part has run before, and one that has gone, train as they should."""
    bmt.init_distributed(seed=5)
    torch.manual_seed(5)
    model = old.OldGPT(form="modules")
    bmt.init_parameters(model)
    with torch.no_grad():
        model.blocks[1](torch.ones(2, 3, old.DIM), torch.ones(2, 3, 1))
    return [old.loss_of(model, old.batch(n), nn.CrossEntropyLoss()).item() for n in range(2)]


def test_a_part_may_run_first() -> None:
    torch.manual_seed(5)
    plain = old.PlainGPT()
    want = [old.loss_of(plain, old.batch(n), nn.CrossEntropyLoss()).item() for n in range(2)]
    for found in run_distributed(part_then_all, 2):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
