"""Parameters of any module: drawn by every process for itself, or of a kind that is not sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmforge.errors import ConfigError, DistributedError
from bmforge.parallel import Layout, parallelize
from bmforge.testing import assert_close, run_distributed


def draw(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)), nn.BatchNorm1d(5))
    model[3].running_mean.normal_()
    model[1].weight = nn.Parameter(model[1].weight.detach().t())  # as it lies in other frameworks
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def lay_out(layout: Layout, alike: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Lay out a module that every process draws for itself; train two steps on the same rows."""
    model = draw(1 if alike else dist.get_rank() + 1)
    parallelize(model, layout)
    begin = {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.eye(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return begin, [str(whole(p.detach()).tolist()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, Layout()), (2, Layout(zero=0)), (2, Layout()), (4, Layout(dp_replicate=2))],
    ids=str,
)
def test_all_go_on_with_rank_0s(world: int, layout: Layout) -> None:
    want = draw(1).state_dict()
    results = run_distributed(lay_out, world, layout, world == 1)
    for begin, end in results:
        assert begin.keys() == want.keys()
        for name in want:
            assert torch.equal(begin[name], want[name]), name
        assert end == results[0][1]


def build_wider() -> None:
    parallelize(nn.Linear(4, 4 + dist.get_rank()), Layout(zero=0))


def test_other_models_are_refused() -> None:
    said = "(?s)rank 0.*ConfigError: the processes have.*rank 1.*ConfigError: the processes have"
    with pytest.raises(DistributedError, match=said):
        run_distributed(build_wider, 2)


class Block(nn.Module):
    """A layer with a factor that is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x)) * self.scale + x


def train_scalars(layout: Layout | None, passes: int) -> dict[str, Tensor]:
    """Gradients of a net with scalars, of 8 rows in micro-batches; of all rows on one process."""
    torch.manual_seed(5)
    model = nn.Sequential(Block(), Block(), Block()).double()
    rows = torch.randn(8, 4, dtype=torch.float64)
    parts = rows[None]
    if layout is not None:
        model = parallelize(model, layout)
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = rows.view(passes, world, -1, 4)[:, rank]
    for part in parts:
        # FSDP averages over the processes, so each scales its sum by their number.
        scale = 1 if layout is None else dist.get_world_size()
        (model(part).square().sum() * scale).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "layout", "passes"),
    [
        (1, Layout(), 2),
        (2, Layout(), 1),
        (2, Layout(zero=2), 2),
        (2, Layout(zero=0), 2),
        (4, Layout(dp_replicate=2), 2),
    ],
)
def test_scalars_stay_whole(world: int, layout: Layout, passes: int) -> None:
    want = train_scalars(None, 1)
    for got in run_distributed(train_scalars, world, layout, passes):
        assert_close(got, want)


def with_two_dtypes() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)]
    for block in blocks:
        block[0].to(torch.bfloat16)
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 4))


def with_transposed_twin() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(6, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    return model


def refuse(build: Callable[[], nn.Module]) -> str:
    try:
        parallelize(build(), Layout(), master_weights=False)
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            with_two_dtypes,
            [
                "unit 0.0 has trained parameters of several dtypes",
                "bfloat16 (0.0.0.weight), float32 (0.0.1.",
            ],
        ),
        (with_transposed_twin, ["parameter 1.weight is a view of the memory of 0.weight"]),
    ],
)
def test_what_cannot_be_sharded_is_said(build: Callable[[], nn.Module], words: list[str]) -> None:
    """All at once, with the names; one process takes them."""
    (alone,) = run_distributed(refuse, 1, build)
    assert alone == "taken" or words[0] in alone
    for said in run_distributed(refuse, 2, build):
        for word in words:
            assert word in said


class Outside(nn.Module):
    """Reads a part of its first block outside of that block's call, as diffusers' DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].proj(x)


def call_outside() -> str:
    try:
        parallelize(Outside(), Layout())(torch.ones(2, 4))
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_part_called_outside_of_its_block_is_named() -> None:
    assert run_distributed(call_outside, 1) == ["taken"]
    for said in run_distributed(call_outside, 2):
        assert "parameter blocks.0.proj.weight is sharded" in said
        assert "Do not make blocks.0 a ZeRO unit" in said
