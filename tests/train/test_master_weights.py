"""No trained 16-bit parameter without a fp32 master, against a plain loop on the upcast model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from bmforge.errors import ConfigError
from bmforge.parallel import Layout, parallelize
from bmforge.testing import run_distributed
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer

LR, STEPS, WIDTH = 1e-5, 4, 8  # so small that bf16 weights of size 1 never change
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(self.norm(x) + self.shift.to(x.dtype))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


def build(dtype: torch.dtype, frozen: str) -> Net:
    torch.manual_seed(3)
    net = Net().to(dtype)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return net


def loss_of(model: Any, batch: Any, num_items: float) -> torch.Tensor:
    logits = model(batch["input_ids"]).float()
    return (
        nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        / num_items
    )


class Rows:
    """The same rows on every process and in every step."""

    def __next__(self) -> Any:
        ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": ids, "labels": ids}]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def train(
    dtype: torch.dtype, precision: str, frozen: str, master_weights: bool, laid_out: bool
) -> Any:
    """Train a net; return the error, or its parameters and the dtypes of Adam's states."""
    net = build(dtype, frozen)
    config = TrainConfig(
        steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        master_weights=master_weights,
        grad_clip=None,
        optim=OptimConfig(lr=LR, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
    )
    try:
        if laid_out:
            parallelize(net, Layout(), precision=precision, master_weights=master_weights)
        trainer = Trainer(net, Rows(), config, objective=loss_of).fit()
    except ConfigError as error:
        return str(error)
    states = {s["exp_avg"].dtype for o in trainer.optimizers for s in o.state.values()}
    return {n: whole(p) for n, p in net.named_parameters()}, states


def by_hand(dtype: torch.dtype, frozen: str) -> dict[str, torch.Tensor]:
    """AdamW in plain torch on the upcast net; labels of all positions but the first are counted."""
    net = build(dtype, frozen).float()
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.95), weight_decay=0.0
    )
    (batch,) = next(Rows())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch, 4 * 5).backward()
        optimizer.step()
    return {n: p.detach() for n, p in net.named_parameters()}


def check(world: int, dtype: str, precision: str, frozen: str, laid_out: bool) -> str:
    """Check one combination; return "trained" or "refused"."""
    case = (HALF[dtype], precision, frozen, True, laid_out)
    for result in run_distributed(train, world, *case):
        if isinstance(result, str):
            assert frozen
            assert precision == "fp32"
            assert f"{frozen}.weight is frozen" in result or f"{frozen}." in result
            assert f"precision={dtype!r}" in result
            outcome = "refused"
            continue
        outcome, (parameters, states) = "trained", result
        assert states == {torch.float32}
        want = by_hand(HALF[dtype], frozen)
        begin = dict(build(HALF[dtype], frozen).named_parameters())
        for name, value in parameters.items():
            if frozen and name.startswith(frozen):
                assert value.dtype == HALF[dtype]
                assert torch.equal(value, begin[name])
                continue
            assert value.dtype == torch.float32
            if precision == "fp32":
                torch.testing.assert_close(value, want[name], rtol=1e-6, atol=2e-7)
            assert not torch.equal(value, begin[name].float()), name
    return outcome


FEW = [
    (1, "bf16", "fp32", "", True),
    (1, "bf16", "fp32", "", False),
    (1, "fp16", "fp32", "embed", False),
    (2, "bf16", "fp32", "", True),
    (2, "bf16", "fp32", "embed", True),
    (2, "bf16", "bf16", "embed", True),
]
ALL = [
    (world, dtype, precision, frozen, laid_out)
    for world, dtype, precision, frozen, laid_out in itertools.product(
        (1, 2, 3), HALF, ("fp32", "bf16", "fp16"), ("", "embed", "blocks.0", "head"), (True, False)
    )
    if laid_out or (world == 1 and precision == "fp32")
]


@pytest.mark.parametrize(("world", "dtype", "precision", "frozen", "laid_out"), FEW)
def test_trained_parameters_have_fp32_masters(
    world: int, dtype: str, precision: str, frozen: str, laid_out: bool
) -> None:
    wanted = "refused" if frozen and precision == "fp32" else "trained"
    assert check(world, dtype, precision, frozen, laid_out) == wanted


@pytest.mark.long
def test_all_combinations_have_fp32_masters() -> None:
    outcomes = [check(*case) for case in ALL]
    assert len(outcomes) == len(ALL)
    assert outcomes.count("trained") > len(ALL) / 2


def test_16_bit_training_is_asked_for() -> None:
    (result,) = run_distributed(train, 1, torch.bfloat16, "fp32", "", False, True)
    parameters, states = result
    assert states == {torch.bfloat16}
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}


def unfreeze_late() -> str:
    net = build(torch.bfloat16, "embed")
    parallelize(net, Layout(), precision="bf16")
    net.embed.requires_grad_(True)
    try:
        Trainer(net, Rows(), TrainConfig(precision="bf16"), objective=loss_of)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_parameter_unfrozen_too_late_is_named() -> None:
    for said in run_distributed(unfreeze_late, 2):
        assert "embed.weight" in said
        assert "before parallelize" in said
