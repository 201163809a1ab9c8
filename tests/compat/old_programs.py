"""Models in the shape of programs for BMTrain, and their twins in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt

DIM, VOCAB, LENGTH = 16, 32, 6


class PlainLinear(nn.Module):
    """Drawn in its constructor, as torch programs do it."""

    def __init__(self, width: int, out: int, dtype: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width, dtype=dtype))
        nn.init.xavier_normal_(self.weight)
        self.bias = nn.Parameter(torch.zeros(out, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OldLinear(bmt.DistributedModule):
    """The same as a distributed module, drawn by init_parameters."""

    def __init__(self, width: int, out: int, dtype: Any = None) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out, width, dtype=dtype), init_method=nn.init.xavier_normal_
        )
        self.bias = bmt.DistributedParameter(
            torch.empty(out, dtype=dtype), init_method=nn.init.zeros_
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Feed(nn.Module):
    """The inside of a block, from either kind of linear layer."""

    def __init__(self, linear: Any, dtype: Any = None) -> None:
        super().__init__()
        self.up = linear(DIM, 2 * DIM, dtype)
        self.down = linear(2 * DIM, DIM, dtype)

    def forward(self, x: Tensor, mask: Tensor, factor: float = 1.0) -> Tensor:
        return x + factor * self.down(F.gelu(self.up(x))) * mask


class PlainGPT(nn.Module):
    """Embedding by a product, blocks, head tied to nothing."""

    def __init__(self, layers: int = 3, dtype: Any = None) -> None:
        super().__init__()
        self.embed = PlainLinear(VOCAB, DIM, dtype)
        self.blocks = nn.ModuleList([Feed(PlainLinear, dtype) for _ in range(layers)])
        self.head = PlainLinear(DIM, VOCAB, dtype)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(F.one_hot(ids, VOCAB).to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x, mask, factor=0.5)
        return self.head(x)


class OldGPT(bmt.DistributedModule):
    """The same for BMTrain: `form` says how its blocks are held."""

    def __init__(
        self,
        layers: int = 3,
        dtype: Any = None,
        form: str = "list",
        recompute: bool = True,
        zero_level: int = 3,
    ) -> None:
        super().__init__()
        self.form = form
        self.embed = OldLinear(VOCAB, DIM, dtype)
        inner = [Feed(OldLinear, dtype) for _ in range(layers)]
        mode = "PIPE" if form == "pipe" else "BLOCK"
        if form == "normal":
            self.blocks: Any = nn.ModuleList(inner)
        else:
            made = [bmt.Block(m, recompute, zero_level, mode=mode) for m in inner]
            kinds = {"list": bmt.TransformerBlockList, "pipe": bmt.PipelineTransformerBlockList}
            self.blocks = kinds.get(form, nn.ModuleList)(made)
        self.head = OldLinear(DIM, VOCAB, dtype)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(F.one_hot(ids, VOCAB).to(self.embed.weight.dtype))
        if self.form in ("list", "pipe"):
            return self.head(self.blocks(x, mask, factor=0.5))
        for block in self.blocks:
            x = block(x, mask, factor=0.5)
        return self.head(x)


def wrapped(dtype: Any = None) -> nn.Module:
    """The fourth form: the plain model, wrapped."""
    return bmt.BMTrainModelWrapper(PlainGPT(dtype=dtype))


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask and targets of which some are ignored; the same for the same step."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=draw)
    mask = (torch.rand(rows, LENGTH, 1, generator=draw) > 0.2).float()
    # As many of them in each row, so that the mean of means is the mean.
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    return ids, mask, targets


def loss_of(model: nn.Module, data: tuple[Tensor, ...], loss_func: Any) -> Tensor:
    ids, mask, targets = data
    logits = model(ids, mask.to(next(model.parameters()).dtype))
    return loss_func(logits.view(-1, VOCAB), targets.reshape(-1))


def own_rows(data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This process's rows."""
    return tuple(t.chunk(bmt.world_size())[bmt.rank()] for t in data)
