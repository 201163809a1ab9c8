"""Schedules against closed forms written again here, and against torch and transformers."""

import math

import pytest
import torch
import transformers

from bmforge.errors import ConfigError
from bmforge.train.schedule import ScheduleConfig, build_schedule, set_learning_rate_


def closed_form(kind, s, w, n, m, d=None, shape=None):
    """The multiplier of 0-based step s, written without looking at the implementation."""
    if s < w:
        return (s + 1) / w
    if kind == "constant":
        return 1.0
    if kind == "noam":
        return max(m, (s + 1) ** -0.5 / w**-0.5)
    if kind == "wsd":
        if s < n - d:
            return 1.0
        w, kind = n - d, shape
    p = min(1.0, (s - w) / (n - w)) if n > w else 1.0
    if kind == "exponential":
        return math.exp(p * math.log(m))
    if kind == "linear":
        return 1 - p + m * p
    if kind == "cosine":
        return m + (1 - m) * math.cos(math.pi * p / 2) ** 2
    return 1 - (1 - m) * p**0.5


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "exponential", "noam"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_closed_forms(kind, warmup, floor):
    if (kind == "noam" and not warmup) or (kind == "exponential" and not floor):
        pytest.skip("not a valid setting for this kind")
    if kind == "constant":
        floor = 0.0
    schedule = build_schedule(ScheduleConfig(kind, warmup, floor), 40)
    for step in range(50):
        assert schedule(step) == pytest.approx(
            closed_form(kind, step, warmup, 40, floor), rel=1e-12, abs=1e-15
        )


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("decay", [0, 1, 12, 35])
def test_wsd_closed_form(shape, decay):
    config = ScheduleConfig("wsd", 5, 0.05, decay_steps=decay, decay_kind=shape)
    schedule = build_schedule(config, 40)
    for step in range(45):
        expected = closed_form("wsd", step, 5, 40, 0.05, decay, shape)
        assert schedule(step) == pytest.approx(expected, rel=1e-12)


def test_wsd_takes_a_tenth_and_one_minus_sqrt_by_default():
    schedule = build_schedule(ScheduleConfig("wsd", 5), 100)
    assert [schedule(89), schedule(90)] == [1.0, 1.0]
    assert schedule(91) == pytest.approx(1 - math.sqrt(0.1))


def factors(make, steps, **settings):
    """Return the learning rates that a library's scheduler sets."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **settings)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


THEIRS = {
    "linear": (transformers.get_linear_schedule_with_warmup, 0.0),
    "cosine": (transformers.get_cosine_schedule_with_warmup, 0.0),
    "cosine floor": (transformers.get_cosine_with_min_lr_schedule_with_warmup, 0.2),
}


@pytest.mark.parametrize("name", THEIRS)
def test_against_transformers(name):
    """Theirs begins with a step at rate 0: ours is one step ahead while it warms up."""
    make, floor = THEIRS[name]
    extra = {"min_lr_rate": floor} if floor else {}
    theirs = factors(make, 40, num_warmup_steps=6, num_training_steps=40, **extra)
    ours = build_schedule(ScheduleConfig(name.split()[0], 6, floor), 40)
    after = [ours(s) for s in range(6, 40)]
    torch.testing.assert_close(after, theirs[6:], rtol=1e-12, atol=1e-15)
    if not floor:
        assert [ours(s) for s in range(5)] == pytest.approx(theirs[1:6])


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_wsd_against_transformers(shape):
    theirs = factors(
        transformers.get_wsd_schedule,
        40,
        num_warmup_steps=6,
        num_stable_steps=20,
        num_decay_steps=14,
        decay_type=shape,
        min_lr_ratio=0.1,
    )
    config = ScheduleConfig("wsd", 6, 0.1, decay_steps=14, decay_kind=shape)
    ours = build_schedule(config, 40)
    assert [ours(s) for s in range(6, 40)] == pytest.approx(theirs[6:], rel=1e-12)


def test_against_torch():
    schedulers = torch.optim.lr_scheduler
    cosine = factors(schedulers.CosineAnnealingLR, 30, T_max=30, eta_min=0.1)
    ours = build_schedule(ScheduleConfig("cosine", 0, 0.1), 30)
    assert [ours(s) for s in range(30)] == pytest.approx(cosine, rel=1e-9)
    exponential = factors(schedulers.ExponentialLR, 30, gamma=0.01 ** (1 / 30))
    ours = build_schedule(ScheduleConfig("exponential", 0, 0.01), 30)
    assert [ours(s) for s in range(30)] == pytest.approx(exponential, rel=1e-9)
    linear = factors(schedulers.LinearLR, 30, start_factor=1.0, end_factor=0.3, total_iters=30)
    ours = build_schedule(ScheduleConfig("linear", 0, 0.3), 30)
    assert [ours(s) for s in range(30)] == pytest.approx(linear, rel=1e-9)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScheduleConfig("cosin"), "Did you mean 'cosine'"),
        (ScheduleConfig("cosine", warmup_steps=41), "warmup_steps=41.*total_steps=40"),
        (ScheduleConfig("cosine", warmup_steps=-1), "warmup_steps=-1"),
        (ScheduleConfig("cosine", min_lr_ratio=-0.1), "min_lr_ratio=-0.1"),
        (ScheduleConfig("cosine", min_lr_ratio=1.5), "min_lr_ratio=1.5"),
        (ScheduleConfig("cosine", total_steps=0), "total_steps=0"),
        (ScheduleConfig("cosine", decay_steps=3), "decay_steps=3 has no effect"),
        (ScheduleConfig("linear", decay_kind="linear"), "decay_kind='linear' has no effect"),
        (ScheduleConfig("constant", min_lr_ratio=0.1), "min_lr_ratio=0.1 has no effect"),
        (ScheduleConfig("noam", 4, total_steps=9), "total_steps=9 has no effect"),
        (ScheduleConfig("noam"), "schedule.warmup_steps=0 must be at least 1"),
        (ScheduleConfig("exponential"), "above 0"),
        (ScheduleConfig("wsd", 10, decay_steps=31), "decay_steps=31"),
        (ScheduleConfig("wsd", decay_steps=-1), "decay_steps=-1"),
        (ScheduleConfig("wsd", decay_kind="sqrt"), "Did you mean '1-sqrt'"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(config, 40)


def test_own_length_and_negative_step():
    schedule = build_schedule(ScheduleConfig("linear", total_steps=10), 40)
    assert schedule(5) == pytest.approx(0.5)
    assert schedule(20) == 0.0
    with pytest.raises(ConfigError, match="step=-1"):
        schedule(-1)


def test_each_group_keeps_its_own_base():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5, "base_lr": 2.0}, {"params": [b]}], lr=4)
    for multiplier in (0.5, 0.25, 0.25):
        set_learning_rate_([optimizer], multiplier)
        assert [g["lr"] for g in optimizer.param_groups] == [2.0 * multiplier, 4.0 * multiplier]
