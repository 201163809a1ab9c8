"""Lines that programs of CPM-Live and BMTrain's own tests contain besides the documented API."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import bmforge.compat.bmtrain as bmt
from bmforge.testing import run_distributed


@torch.jit.script
def scripted_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * weight


class Layer(bmt.DistributedModule):
    """A norm as a scripted function, and a product."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = bmt.DistributedParameter(torch.ones(8))
        self.weight = bmt.DistributedParameter(torch.randn(8, 8, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return scripted_norm(x, self.scale) @ self.weight


def gradients(recompute: bool) -> list[Tensor]:
    bmt.init_distributed()
    blocks = [bmt.Block(Layer(), use_checkpoint=recompute) for _ in range(2)]
    x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
    out = x
    for block in blocks:
        out = block(out)
    out.square().sum().backward()
    parameters = [p for block in blocks for p in block.parameters()]
    return [bmt.parameter.whole(p, p.grad) for p in parameters]


@pytest.mark.parametrize("world", [1, 2])
def test_scripted_functions_are_recomputed(world: int) -> None:
    for got in run_distributed(gradients, world, True):
        for a, b in zip(got, run_distributed(gradients, 1, False)[0], strict=True):
            torch.testing.assert_close(a / world, b)  # summed over processes with equal inputs


def values_before_init() -> tuple[int, int, int, bool]:
    bmt.print_rank("printed")
    return bmt.rank(), bmt.world_size(), bmt.config["local_rank"], bmt.is_initialized()


def test_a_program_may_ask_for_its_rank_while_it_imports() -> None:
    before = bmt.config._group
    bmt.config._group = None
    try:
        assert values_before_init() == (0, 1, 0, False)
        bmt.config["load_stream"].wait_event(bmt.config["load_event"])
        with pytest.raises(bmt.runtime.DistributedError, match="init_distributed"):
            bmt.config["topology"]
    finally:
        bmt.config._group = before


def test_streams_of_the_config_can_be_waited_for() -> None:
    bmt.init_distributed()
    for key in ("load_stream", "calc_stream", "barrier_stream", "tp_comm_stream", "pp_comm_stream"):
        bmt.config["calc_stream"].wait_stream(bmt.config[key])
        bmt.config[key].record_event(bmt.config["load_event"]).synchronize()
        bmt.config[key].synchronize()
    assert bmt.config["gradient_inspect"] is False
    with pytest.raises(KeyError, match="local_size"):
        bmt.config["locl_size"]


def copied_parameters() -> tuple[Tensor, Tensor, Tensor]:
    bmt.init_distributed()
    model = nn.Sequential(Layer(), Layer())
    model(torch.ones(2, 8)).sum().backward()
    original = [*model.parameters()][1]
    duplicate = copy.deepcopy([original])[0]
    assert isinstance(duplicate, bmt.DistributedParameter)
    with torch.no_grad():
        original.zero_()
    gradient = bmt.parameter.whole(duplicate, duplicate.grad)
    return bmt.parameter.whole(duplicate), gradient, bmt.parameter.whole(original)


@pytest.mark.parametrize("world", [1, 2])
def test_a_deep_copy_of_a_parameter_is_distributed_alike(world: int) -> None:
    expected = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    one_process = run_distributed(copied_parameters, 1)[0]
    for values, gradient, original in run_distributed(copied_parameters, world):
        assert torch.equal(values, expected)
        assert not original.any()
        torch.testing.assert_close(gradient / world, one_process[1])


@torch.jit.script
def _rms_used_everywhere(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)) * weight


class _Normed(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + _rms_used_everywhere(x, self.weight, 1e-6)


def test_a_scripted_function_inside_and_outside_of_blocks() -> None:
    bmt.init_distributed(seed=0)
    blocks = bmt.TransformerBlockList([bmt.CheckpointBlock(_Normed()) for _ in range(3)])
    last = _Normed()
    for _ in range(3):
        x = torch.randn(2, 4, 8, requires_grad=True)
        last(blocks(x)).square().sum().backward()
        got, y = x.grad, x.detach().clone().requires_grad_()
        h = y
        for weight in [*(block.weight for block in blocks), last.weight]:
            h = h + h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.detach()
        h.square().sum().backward()
        torch.testing.assert_close(got, y.grad, rtol=1e-4, atol=1e-5)


def detect_anomalies() -> str:
    bmt.init_distributed(seed=1)
    model = bmt.BMTrainModelWrapper(nn.Linear(4, 4))
    with torch.autograd.set_detect_anomaly(True):
        model(torch.ones(2, 4)).sum().backward()
        try:
            (model(torch.ones(2, 4)) * float("inf")).sub(float("inf")).sqrt().sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:Error detected", "ignore:Anomaly Detection")
def test_anomaly_detection_on_two_processes() -> None:
    """It checks sharded gradients, and still finds NaNs."""
    assert all("returned nan values" in text for text in run_distributed(detect_anomalies, 2))
