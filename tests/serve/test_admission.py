"""How much is let in at a time, by a clock of ours."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.serve.errors import RequestError
from bmforge.serve.limits import Admission
from bmforge.serve.settings import ServeConfig


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(admission: Admission, key: str) -> RequestError:
    with pytest.raises(RequestError) as caught, admission.enter(key):
        pass
    assert int(caught.value.headers["retry-after"]) >= 1  # type: ignore[index]
    return caught.value


def test_at_once() -> None:
    admission = Admission(ServeConfig(max_requests=3, max_requests_per_key=2))
    with ExitStack() as stack:
        stack.enter_context(admission.enter("a"))
        stack.enter_context(admission.enter("a"))
        assert refusal(admission, "a").status_code == 429
        assert admission.has_room
        stack.enter_context(admission.enter("b"))
        assert not admission.has_room
        assert refusal(admission, "b").status_code == 503
    assert admission.count == 0
    with pytest.raises(ZeroDivisionError), admission.enter("a"):
        raise ZeroDivisionError
    assert admission.count == 0
    admission.is_closing = True
    assert "stopping" in refusal(admission, "a").message


@settings(max_examples=30)
@given(st.lists(st.floats(0, 30), max_size=200), st.integers(1, 20))
def test_in_a_minute(waits: list[float], most: int) -> None:
    """No stretch of a minute has more than twice what is allowed, and waiting always helps."""
    clock = Clock()
    admission = Admission(ServeConfig(max_rate_per_min=most), clock)
    times, statuses = [], set()
    for wait in waits:
        clock.now += wait
        try:
            with admission.enter("a"):
                times.append(clock.now)
        except RequestError as error:
            statuses.add(error.status_code)
            clock.now += int(error.headers["retry-after"]) + 0.5  # type: ignore[index]
            with admission.enter("a"):
                times.append(clock.now)
    for begin in times:
        assert sum(begin <= time < begin + 60 for time in times) <= 2 * most
    assert statuses <= {429}
    with admission.enter("b"):  # whose minute is its own
        pass
