"""Backward in two halves against the whole backward, on the graphs that are hard to split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from bmforge.parallel.pipeline.split_backward import backward_input
from bmforge.testing import assert_close

WIDTH = 6


class Square(torch.autograd.Function):
    """A node that is written in Python."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return scale * x * x

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return 2 * grad * scale * x, (grad * x * x).sum_to_size(scale.shape)


class Graphs(nn.Module):
    """Parameters and one method per kind of graph: (x, y) -> outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.low, self.high = (
            nn.Parameter(torch.randn(WIDTH, 2)),
            nn.Parameter(torch.randn(2, WIDTH)),
        )
        self.table = nn.Parameter(torch.randn(3, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def chain(self, x, y):
        return (self.second(torch.tanh(self.norm(self.first(x)))) + y,)

    def tied(self, x, y):
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.second(h)) * y
        return (torch.tanh(self.first(h)) + self.second(h),)

    def shared_bias_that_leaves(self, x, y):
        bias = torch.sin(self.table[torch.tensor([0, 2, 0, 1])])
        h = torch.tanh(self.first(x) + bias)
        h = torch.tanh(self.second(h) + bias)
        return h * y, bias, self.scale * 2

    def low_rank(self, x, y):
        weight = self.first.weight + self.low @ self.high
        return (torch.tanh(x @ weight) @ weight.T * self.scale, y @ self.low)

    def passed_through(self, x, y):
        return self.first(x) * y, y, self.scale

    def python_node(self, x, y):
        return (self.second(Square.apply(Square.apply(self.first(x), self.scale), self.scale)) * y,)

    def unused_input(self, x, y):
        return (self.first(x),)

    def weights_alone(self, x, y):
        return (torch.tanh(self.table[:2]), self.scale * 3)


KINDS = [n for n in vars(Graphs) if not n.startswith("_")]


def gradients(kind, run, with_inputs=True):
    """Gradients of the inputs before the second half, and of the parameters after it."""
    torch.manual_seed(1)
    model = Graphs()
    x, y = (torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(2))
    x.requires_grad_(with_inputs)
    y.requires_grad_(with_inputs)
    outputs = getattr(model, kind)(x, y)
    inputs = run(
        [get_gradient_edge(o) for o in outputs if o.requires_grad],
        [torch.cos(o.detach()) for o in outputs if o.requires_grad],
        [x, y] if with_inputs else [],
    )
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {f"input/{i}": g for i, g in enumerate(inputs) if g is not None} | named


def in_one(edges, grads, inputs):
    torch.autograd.backward(edges, grads)
    return [t.grad for t in inputs]


def in_halves(edges, grads, inputs, whole=False):
    second = backward_input(edges, grads, inputs)
    found = [t.grad for t in inputs]
    for tensor in inputs:
        tensor.grad = None
    second.run(all_groups=whole)
    if not whole:
        assert all(t.grad is None for t in inputs)
    return found


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_both_halves_are_the_whole(kind, with_inputs):
    want = gradients(kind, in_one, with_inputs)
    assert any(name.startswith("input/") for name in want) == (
        with_inputs and kind != "weights_alone"
    )
    assert_close(gradients(kind, in_halves, with_inputs), want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_half_can_run_whole(kind):
    def run(edges, grads, inputs):
        return in_halves(edges, grads, inputs, whole=True)

    assert_close(gradients(kind, run), gradients(kind, in_one))


def test_the_first_half_leaves_the_weights_and_the_second_the_products_alone():
    """A linear layer's weights wait, and the second half does not redo the input's gradient."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    out = layers(x)
    counts = []
    for part in ("first", "second"):
        with torch.profiler.profile() as profile:
            if part == "first":
                second = backward_input([get_gradient_edge(out)], [torch.ones_like(out)], [x])
                assert all(p.grad is None for p in layers.parameters())
            else:
                second.run()
        counts.append(sum(e.count for e in profile.key_averages() if e.key == "aten::mm"))
    assert counts == [5, 5]


def test_the_graph_is_freed_after_the_second_half():
    freed = []

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.witness = Note()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Note:
        def __del__(self):
            freed.append(True)

    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    second = backward_input(
        [get_gradient_edge(layer(Witness.apply(layer(x))))], [torch.ones(4, WIDTH)], [x]
    )
    assert not freed
    second.run()
    assert freed
