"""The bodies that are received at the same time stay within their memory budget."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.serve.body_budget import BodyBudget
from bmforge.serve.settings import ServeConfig

TOTAL = 100
BODIES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 130)), max_size=30)


@settings(max_examples=50, deadline=None)
@given(BODIES, st.data())
def test_bodies_stay_within_the_budget_and_none_waits_forever(
    bodies: list[tuple[str, int]], data: st.DataObject
) -> None:
    async def receive_all() -> None:
        budget, running = BodyBudget(TOTAL), []

        async def receive(client: str, size: int) -> None:
            await budget.reserve(client, size)
            running.append((client, size))

        tasks = [asyncio.create_task(receive(*body)) for body in bodies]
        for _ in range(len(bodies)):
            for _ in range(3):  # let every task that has room go on
                await asyncio.sleep(0)
            assert running  # at least one body is always received
            used = sum(size for _, size in running)
            assert used == budget.reserved_bytes
            assert used <= TOTAL or len(running) == 1
            for client in "abc":
                own = [size for name, size in running if name == client]
                assert sum(own) <= TOTAL // 2 or len(own) == 1
            number = data.draw(st.integers(0, len(running) - 1))
            budget.release(*running.pop(number))
        await asyncio.gather(*tasks)
        assert budget.reserved_bytes == 0

    asyncio.run(receive_all())


def test_many_large_bodies_at_once(start: Any) -> None:
    limits = ServeConfig().body
    text = "a" * (limits.max_body_bytes - 1000)
    with start() as server:
        reserved = []
        budget = server.serving.bodies
        release = budget.release

        def watched(client: str, size: int) -> None:
            reserved.append(budget.reserved_bytes)
            release(client, size)

        budget.release = watched

        def ask(_: int) -> int:
            body = {"model": server.serving.name, "prompt": text}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            return answer.status_code

        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(ask, range(12))) == {400}
        assert len(reserved) == 12
        assert max(reserved) <= 4 * limits.max_body_bytes
        assert budget.reserved_bytes == 0
        # Bodies that are refused while they are received return their memory too.
        for content in (b"[" * 100_000, b"\xff" * 100_000, b" " * 100_000):
            headers = {"content-type": "application/json"}
            url = f"{server.url}/v1/completions"
            answer = httpx.post(url, content=content, headers=headers, timeout=60)
            assert answer.status_code == 400
        assert budget.reserved_bytes == 0


def test_a_body_without_room_is_refused_before_the_deadline_of_its_client(start: Any) -> None:
    """Not with status 408: it is the server that did not read the body."""
    with start(receive_s=1.0) as server:
        server.serving.bodies.reserved_bytes = 4 * ServeConfig().body.max_body_bytes
        body = {"model": server.serving.name, "prompt": "a" * 100_000}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        assert httpx.get(f"{server.url}/health").status_code == 200
