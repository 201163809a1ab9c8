"""Starts requests in the engine and waits for their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from bmforge.errors import BmforgeError
from bmforge.infer.engine.request import Completion
from bmforge.infer.engine.request import Request as EngineRequest
from bmforge.serve.errors import RequestError, overload_error
from bmforge.serve.live_requests import GoneError, LiveRequest, unless_gone
from bmforge.serve.metrics import TokenTimes
from bmforge.serve.serving import Serving

__all__ = ["check_engine", "start", "whole_answers"]


async def check_engine(engine: Any) -> None:
    """Raise an error if an engine is closed or has failed.

    This distinguishes a failed engine from a working engine that refuses a request.

    Raises:
        RequestError: the engine was closed or has failed (status 503).
    """
    try:
        await run_in_threadpool(engine.call, lambda: None)
    except BmforgeError as error:
        raise RequestError(
            "the engine was closed or has failed. The server's log has the details.",
            status=503,
            code="engine_failed",
        ) from error


async def start(
    serving: Serving, requests: Sequence[EngineRequest], prompt_tokens: int, begin_s: float
) -> LiveRequest:
    """Submit the requests for all prompts to the engine.

    Args:
        serving: server state.
        requests: one request per prompt.
        prompt_tokens: total number of prompt tokens.
        begin_s: arrival time of the request on the monotonic clock.

    Raises:
        RequestError: the engine refuses a request.
    """
    handles = []
    try:
        for request in requests:
            handles.append(await run_in_threadpool(serving.engine.submit, request))
    except BmforgeError as error:
        for handle in handles:
            handle.cancel()
        await check_engine(serving.engine)
        raise RequestError(str(error), code="invalid_value") from error
    times = TokenTimes(serving.metrics, begin_s)
    key = requests[0].cache_salt
    live = LiveRequest(handles, serving.config.load.max_unread_bytes, prompt_tokens, times, key)
    serving.live.add(live)
    return live


async def whole_answers(
    serving: Serving, live: LiveRequest, request: Request
) -> list[list[Completion]] | None:
    """Wait until all answers are finished; return None if the client has disconnected.

    Raises:
        RequestError: the engine failed, or the server is stopping.
    """
    try:
        answers = await unless_gone(request.receive, live.whole(), live.cancel)
    except GoneError:
        return None
    serving.metrics.note_answers(answers, live.key)
    if any(
        answer.finish_reason == "cancelled" for completions in answers for answer in completions
    ):
        raise overload_error("the server is stopping.", serving.config.timeouts.grace_s)
    return answers
