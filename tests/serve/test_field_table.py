"""Each field of each endpoint is kept, has no effect, or is refused by its name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import jsonschema
import pytest

from bmforge.serve.fields import ENDPOINTS, treatment_of

SAID = [{"role": "user", "content": "hi"}]
# A valid request of each endpoint.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3, "temperature": 0},
    "/v1/completions": {"prompt": "a", "max_tokens": 3, "temperature": 0},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3, "temperature": 0},
    "/v1/messages": {"messages": SAID, "max_tokens": 3, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [70]},
}
VALUES: dict[str, Any] = {
    "metadata": {"a": "b"}, "store": True, "prediction": {"type": "content", "content": "x"},
    "cache_control": {"type": "ephemeral"}, "include": ["reasoning.encrypted_content"],
    "cache_prompt": False,
}  # fmt: skip
VARYING = {"id", "created", "created_at", "metadata"}


def answer_of(found: httpx.Response) -> Any:
    """The answer without ids and times."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in VARYING}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(found.json())


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_field(start: Any, endpoint: str) -> None:
    with start() as server, httpx.Client(timeout=60) as client:
        body = {"model": server.serving.name, **BODIES[endpoint]}

        def ask(**fields: Any) -> httpx.Response:
            return client.post(server.url + endpoint, json={**body, **fields})

        ask()  # the prompt is in the cache from now on
        plain = ask()
        assert plain.status_code == 200, plain.text
        refused = ask(an_unknown_field=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "an_unknown_field")
        for name, field in ENDPOINTS[endpoint].model_fields.items():
            shown = field.alias or name
            if treatment_of(endpoint, name) == "no effect":
                found = ask(**{shown: VALUES.get(name, "x")})
                assert found.status_code == 200, (name, found.text)
                assert answer_of(found) == answer_of(plain), name
                continue
            found = ask(**{shown: [[{}]]})
            error = found.json()["error"]
            assert found.status_code == 400, name
            assert str(error["param"]).split(".")[0] == shown, (name, error)
            if treatment_of(endpoint, name) == "neutral value only":
                statuses = {ask(**{shown: value}).status_code for value in (7, "x", {"a": 1})}
                assert statuses == {400}, name


# What the playgrounds and SDKs of vLLM and llama.cpp send if nothing is set.
DEFAULTS = {
    "spaces_between_special_tokens": True, "detokenize": True, "priority": 0, "mirostat": 0,
    "length_penalty": 1.0, "allowed_token_ids": None, "mm_processor_kwargs": None, "n_predict": -1,
    "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0.0, "dynatemp_range": 0.0,
    "timings_per_token": False, "return_progress": False, "n_keep": 0, "cache_prompt": True,
    "request_id": "r", "include_stop_str_in_output": False, "truncate_prompt_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_defaults_of_other_servers_do_not_change_the_answer(start: Any, endpoint: str) -> None:
    with start() as server, httpx.Client(timeout=60) as client:
        body = {"model": server.serving.name, **BODIES[endpoint]}
        plain, found = (
            client.post(server.url + endpoint, json=body | fields) for fields in ({}, DEFAULTS)
        )
        assert found.status_code == 200, found.text
        assert found.json()["choices"] == plain.json()["choices"]
        refused = client.post(server.url + endpoint, json=body | {"priority": 3})
        assert refused.status_code == 400
        assert "priority" in refused.json()["error"]["message"]


def test_the_page_is_what_the_program_writes() -> None:
    command = [sys.executable, "dev/serve_fields.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_schema_tells_what_is_sent(start: Any) -> None:
    with start(keys="the-key-of-the-schema") as server:
        headers = {"authorization": "Bearer the-key-of-the-schema"}
        schema = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
        paths = schema["paths"]
        assert set(ENDPOINTS) <= set(paths)
        for path, operations in paths.items():
            for operation in operations.values():
                assert "422" not in operation["responses"]
                assert bool(operation.get("security")) == (path not in ("/health", "/ready"))
        assert "text/event-stream" in paths["/v1/responses"]["post"]["responses"]["200"]["content"]
        for path, method, given, status in (
            ("/v1/models", "get", {}, 401), ("/v1/completions", "post", headers, 400),
            ("/v1/models/x", "get", headers, 404), ("/metrics", "get", headers, 200),
        ):  # fmt: skip
            found = httpx.request(method, server.url + path, headers=given)
            shown = "/v1/models/{name}" if path == "/v1/models/x" else path
            told = paths[shown][method]["responses"]
            assert found.status_code == status
            kind = found.headers["content-type"].partition(";")[0]
            assert kind in told[str(status)]["content"]
            if status >= 400:
                error = {**schema["components"]["schemas"]["Error"]}
                jsonschema.validate(found.json(), error)
