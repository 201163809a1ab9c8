"""Requests made from the server's own schema, right ones and wrong ones: none breaks it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from test_serve_sockets import is_idle, until

from bmforge.infer import Engine

pytestmark = pytest.mark.long


def test_requests_from_the_schema(start: Any, engine: Engine) -> None:
    """The status is one that is meant, and what comes back is JSON."""
    schemathesis = pytest.importorskip("schemathesis")
    modes = schemathesis.GenerationMode
    seen: set[int] = set()
    with start(request_s=2.0, max_rate_per_min=10**9, max_new_tokens=8) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (modes.POSITIVE, modes.NEGATIVE):
                try:
                    cases = operation.as_strategy(generation_mode=mode)
                    send(cases, server, seen)
                except Unsatisfiable:
                    assert mode is modes.NEGATIVE  # where nothing is said, nothing is wrong
        assert {200, 400, 404} <= seen
        assert until(lambda: is_idle(engine))


def send(cases: Any, server: Any, seen: set[int]) -> None:
    @settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def one(case: Any) -> None:
        answer = case.call(base_url=server.url)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 403, 404, 405, 413), answer.text
        kind = answer.headers["content-type"][0]
        if "json" in kind and answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    one()
