"""The loss scale against torch.amp.GradScaler, and its state."""

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.train.precision import LossScaler


def theirs(overflows, interval):
    """The scales that GradScaler goes through for this row of overflows."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    scales = []
    for overflow in overflows:
        scaler.scale(parameter.sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_same_sequence_as_gradscaler():
    draw = torch.Generator().manual_seed(3)
    overflows = (torch.rand(120, generator=draw) < 0.15).tolist()
    scaler = LossScaler(growth_interval_steps=4)
    ours = []
    for overflow in overflows:
        scaler.update(overflow)
        ours.append(scaler.current_scale)
    assert ours == theirs(overflows, 4)
    assert len(set(ours)) > 5


def test_a_scaled_loss_unscaled_gives_the_gradient():
    parameter = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    unused = torch.nn.Parameter(torch.zeros(1))
    scaler = LossScaler()
    (parameter.square().sum() * scaler.current_scale).backward()
    assert parameter.grad.tolist() == [6.0 * 2**16, -4.0 * 2**16]
    scaler.unscale_([parameter, unused])
    assert parameter.grad.tolist() == [6.0, -4.0]


def test_it_never_falls_below_the_least_nor_grows_to_infinity():
    scaler = LossScaler(init_scale=4.0, min_scale=2.0, growth_interval_steps=1)
    for _ in range(3):
        scaler.update(overflow=True)
    assert scaler.current_scale == 2.0
    for _ in range(200):
        scaler.update(overflow=False)
    assert scaler.current_scale == 2.0**127


def test_state_goes_on_where_it_was():
    first = LossScaler(growth_interval_steps=3)
    for overflow in (False, True, False, False):
        first.update(overflow)
    second = LossScaler(growth_interval_steps=3)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.update(overflow=False)
    assert second.current_scale == first.current_scale == 2.0**16
    with pytest.raises(ConfigError, match="sound_steps"):
        second.load_state_dict({"scale": 1.0})
    with pytest.raises(ConfigError, match="nan"):
        second.load_state_dict({"scale": float("nan"), "sound_steps": 0})


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 0.5},
        {"min_scale": 0.0},
        {"growth_interval_steps": 0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"init_scale": float("inf")},
    ],
)
def test_bad_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LossScaler(**settings)


def test_half_precision_gradients_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        LossScaler().unscale_([parameter])
