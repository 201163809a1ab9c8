"""Error messages for mistakes that users of common clients make."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def refuse(start: Any) -> Any:
    """Function that posts a request, and returns the error of the response."""
    with start() as server:

        def post(path: str, **fields: Any) -> dict[str, Any]:
            body = {"model": server.serving.name, **fields}
            response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
            assert response.status_code == 400, response.text
            return dict(response.json()["error"])

        yield post


def test_unknown_paths_show_where_the_api_is(start: Any) -> None:
    with start() as server:
        for path in ("/v1/v1/chat/completions", "/chat/completions", "/x" * 500, "/v1/messages/x"):
            response = httpx.post(f"{server.url}{path}", json={})
            error = response.json()["error"]
            assert response.status_code == 404
            assert f"path={path[:200]!r}. The API is under /v1; the base_url" in error["message"]
            assert "Anthropic's client has no /v1." in error["message"]
    with start(root_path="/llm") as server:
        message = httpx.get(f"{server.url}/llm/models").json()["error"]["message"]
        assert "path='/llm/models'. The API is under /llm/v1;" in message


def test_a_wrong_method_shows_the_allowed_method(start: Any) -> None:
    with start() as server:
        response = httpx.get(f"{server.url}/v1/chat/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        message = response.json()["error"]["message"]
        assert message == (
            "GET is not allowed for path='/v1/chat/completions' (allowed: POST). Use POST."
        )


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [("/v1/chat/completions", {"prompt": "a"},
      "prompt is not supported. Use messages, or /v1/completions."),
     ("/v1/completions", {"messages": USER},
      "messages is not supported. Use prompt, or /v1/chat/completions."),
     ("/v1/responses", {"messages": USER},
      "messages is not supported. Use input, or /v1/chat/completions."),
     ("/v1/chat/completions", {"messages": USER, "foo": 1},
      "foo is not supported. Leave it out."),
     ("/v1/chat/completions", {"messages": USER, "topk": 1},
      "topk is not supported. Did you mean 'top_k'?"),
     ("/v1/responses", {"input": "a", "max_tokens": 1},
      "max_tokens is not supported. Did you mean 'max_output_tokens'?")],
)  # fmt: skip
def test_unknown_fields(refuse: Any, path: str, fields: Any, message: str) -> None:
    error = refuse(path, **fields)
    assert error["message"] == message
    assert error["param"] == message.split()[0]


def test_a_missing_key_names_both_headers(start: Any) -> None:
    with start(keys="the-key-of-this-test") as server:
        response = httpx.post(f"{server.url}/v1/messages", json={})
        assert response.status_code == 401
        message = response.json()["error"]["message"]
        assert "Authorization: Bearer KEY" in message
        assert "x-api-key: KEY" in message


def test_min_tokens_above_max_tokens(refuse: Any) -> None:
    for path, prompt in (
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        error = refuse(path, **prompt, min_tokens=20, max_tokens=5)
        assert error["message"].startswith("min_tokens=20 is above max_tokens=5. Reduce")
        assert error["param"] == "min_tokens"


def test_numbers_out_of_range_show_the_value(refuse: Any) -> None:
    for path, fields, start in (
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens=0: Input should"),
        ("/v1/completions", {"prompt": "a", "top_p": 1.5}, "top_p=1.5: Input should be less"),
    ):
        error = refuse(path, **fields)
        assert error["message"].startswith(start)
        assert error["param"] == start.split("=")[0]
    # A string may be private, so it is not repeated.
    assert refuse("/v1/completions", prompt="a", n="secret")["message"].startswith("n: Input")


def test_a_tool_of_an_unsupported_type(refuse: Any) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    remote = {"type": "mcp", "server_label": "a", "allowed_tools": ["b"]}
    for tools, place, kind in (
        ([{"type": "web_search"}], 0, "web_search"),
        ([function, {"type": "web_search", "search_context_size": "low"}], 1, "web_search"),
        ([remote], 0, "mcp"),
    ):
        error = refuse("/v1/responses", input="a", tools=tools)
        where = f"tools.{place}.type"
        assert error["message"] == f"{where}={kind!r} is not supported (supported: function)."
        assert error["param"] == where
    error = refuse("/v1/chat/completions", messages=USER, tools=[{"type": "web_search"}])
    assert error["message"] == "tools.0.type='web_search' is not supported (supported: function)."
