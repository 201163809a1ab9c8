"""Pauses of the event loop: the settings of the interpreter while a server runs."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import CapacityLimiter

from bmforge.serve.pauses import collect_all, short_pauses
from bmforge.serve.serving import Serving


class Cycle:
    """Object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    gc.unfreeze()


def test_collections_do_not_visit_what_is_loaded() -> None:
    """`gc.get_objects` returns what a full collection visits: it stops all threads meanwhile."""
    before, switch_s = len(gc.get_objects()), sys.getswitchinterval()
    assert before > 100_000  # torch, transformers, pydantic
    with short_pauses():
        assert len(gc.get_objects()) < before / 100
        assert sys.getswitchinterval() <= 0.001
    assert sys.getswitchinterval() == switch_s
    assert len(gc.get_objects()) > 100_000


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_unloaded_model_is_freed(is_frozen: bool) -> None:
    cycle = Cycle()
    reference = weakref.ref(cycle)
    if is_frozen:
        gc.freeze()
    del cycle
    collect_all()
    assert reference() is None
    assert (gc.get_freeze_count() > 0) == is_frozen
    gc.unfreeze()


def test_one_body_is_parsed_at_a_time() -> None:
    """A second parser would only compete with the event loop for the global lock."""
    running = most = 0

    def parse() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        sum(range(200_000))  # longer than the time after which threads are switched
        running -= 1

    async def parse_all() -> None:
        serving: Any = SimpleNamespace(_parsing=CapacityLimiter(1))
        await asyncio.gather(*(Serving.parse(serving, parse) for _ in range(16)))

    with short_pauses():
        asyncio.run(parse_all())
    assert most == 1
