"""Which steps are skipped, when the guard gives up, and its state."""

import json
import math
import statistics

import pytest

from bmforge.errors import ConfigError
from bmforge.train.spike import DivergenceError, SpikeGuard

NAN, INF = math.nan, math.inf


def test_non_finite_is_always_skipped():
    guard = SpikeGuard()
    assert guard.check(2.0, 1.0) is None
    assert "loss" in guard.check(NAN, 1.0)
    assert "loss" in guard.check(INF, 1.0)
    assert "gradient" in guard.check(2.0, NAN)
    assert "gradient" in guard.check(2.0, INF)
    assert (guard.skipped_steps, guard.consecutive_skips) == (4, 4)
    assert guard.check(1e9, 1e9) is None
    assert (guard.skipped_steps, guard.consecutive_skips) == (4, 0)


def test_spikes_follow_mean_and_deviation_of_the_applied_losses():
    guard = SpikeGuard(spike_sigmas=3.0, window_steps=8)
    losses = [5.0, 4.0, 4.5, 4.2, 3.9, 4.1, 4.0, 3.8]
    assert [guard.check(loss, 1.0) for loss in losses] == [None] * 8
    limit = statistics.fmean(losses) + 3.0 * statistics.pstdev(losses)
    assert "spike" in guard.check(limit + 1e-6, 1.0)
    assert guard.check(limit - 1e-6, 1.0) is None
    window = [*losses[1:], limit - 1e-6]
    limit = statistics.fmean(window) + 3.0 * statistics.pstdev(window)
    assert "spike" in guard.check(limit + 1e-6, 1.0)
    assert guard.check(0.0, 1.0) is None


def test_no_spike_is_judged_before_the_window_is_full():
    guard = SpikeGuard(spike_sigmas=1.0, window_steps=4)
    assert [guard.check(loss, 1.0) for loss in (1.0, 1.0, 1.0, 50.0)] == [None] * 4


def test_it_gives_up():
    guard = SpikeGuard(max_consecutive_skips=3)
    for _ in range(2):
        guard.check(NAN, 1.0)
    guard.check(1.0, 1.0)
    for _ in range(2):
        guard.check(NAN, 1.0)
    with pytest.raises(DivergenceError, match=r"3 steps in a row.*lower learning"):
        guard.check(1.0, INF)


def test_state_is_plain_and_goes_on_alike():
    first = SpikeGuard(spike_sigmas=2.0, window_steps=4)
    for loss in (3.0, 2.9, NAN, 3.1, 2.8, 3.0):
        first.check(loss, 1.0)
    second = SpikeGuard(spike_sigmas=2.0, window_steps=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in (3.05, 9.0, 3.2, 2.7, NAN):
        assert first.check(loss, 1.0) == second.check(loss, 1.0)
    assert first.state_dict() == second.state_dict()
    with pytest.raises(ConfigError, match="window"):
        second.load_state_dict({"skipped_steps": 0, "consecutive_skips": 0})


@pytest.mark.parametrize(
    "settings", [{"spike_sigmas": 0.0}, {"window_steps": 1}, {"max_consecutive_skips": 0}]
)
def test_bad_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SpikeGuard(**settings)
