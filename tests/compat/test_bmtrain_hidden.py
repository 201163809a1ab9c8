"""Losses on hidden states and of what lies around the blocks, as BMTrain's own tests train them."""

from __future__ import annotations

from typing import Any

import old_programs as old
import pytest
import torch
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmtrain.block_layer import Block, TransformerBlockList
from bmforge.compat.bmtrain.parameter import whole
from bmforge.testing import run_distributed

LAYERS, WIDTH = 3, 6
FORMS = ("list", "blocks", "modules")
LOSSES = ("last", "middle", "mix")


class Around(nn.Module):
    """Something before the blocks and something behind them; hidden states on request."""

    def __init__(self, linear: Any, form: str) -> None:
        super().__init__()
        self.pre = linear(WIDTH, WIDTH)
        inner = [linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.is_list = form == "list"
        if form == "list":
            self.ms: Any = TransformerBlockList([Block(m) for m in inner])
        else:
            self.ms = nn.ModuleList([Block(m) for m in inner] if form == "blocks" else inner)
        self.post = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.pre(x)
        if self.is_list:
            y, hidden = self.ms(x, return_hidden_states=True)
            return self.post(y), list(hidden)
        hidden = []
        for module in self.ms:
            hidden.append(x)
            x = module(x)
        return self.post(x), hidden


def gradients(model: nn.Module, kind: str, rows: Tensor, world: int) -> dict[str, Tensor]:
    """Of a loss on the output, on the hidden states, or on both; None counts as zeros."""
    model.zero_grad()
    out, hidden = model(rows)
    draw = torch.Generator().manual_seed(7)
    weights = torch.randn(LAYERS + 1, WIDTH, generator=draw)
    loss = (out * weights[0]).sum() if kind != "middle" else 0.0 * out.sum()
    if kind != "last":
        loss = loss + sum((h * w).square().sum() for h, w in zip(hidden, weights[1:], strict=True))
    (loss / world).backward()
    return {
        name: whole(p, torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }


def train(form: str) -> dict[tuple[str, bool], dict[str, Tensor]]:
    bmt.init_distributed(seed=33)
    torch.manual_seed(33)
    model = Around(old.OldLinear, form)
    bmt.init_parameters(model)
    return of_all_kinds(model, bmt.world_size())


def of_all_kinds(model: nn.Module, world: int) -> dict[tuple[str, bool], dict[str, Tensor]]:
    """Every kind of loss, with all parameters and with those around the blocks alone."""
    rows, found = torch.ones(2, WIDTH) + torch.arange(2.0)[:, None], {}
    for frozen in (False, True):
        for name, param in model.named_parameters():
            param.requires_grad_(not (frozen and name.startswith("ms")))
        found.update({(kind, frozen): gradients(model, kind, rows, world) for kind in LOSSES})
    return found


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_hidden_states_and_of_what_lies_around(form: str) -> None:
    torch.manual_seed(33)
    want = of_all_kinds(Around(old.PlainLinear, "modules"), 1)
    for found in run_distributed(train, 2, form):
        for case, tensors in want.items():
            assert list(found[case]) == list(tensors)
            for name, value in tensors.items():
                torch.testing.assert_close(found[case][name], value, rtol=1e-5, atol=1e-6)
