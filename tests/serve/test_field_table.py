"""Each field of each endpoint is kept, has no effect, or is refused by its name."""

from __future__ import annotations

import subprocess
import sys
from threading import current_thread
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
    "/v1/responses/input_tokens": {"input": "hi"},
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
    "prompt_cache_options": {"ttl": "24h"},
    "cache_control": {"type": "ephemeral"}, "include": ["reasoning.encrypted_content"],
    "cache_prompt": False,
}  # fmt: skip
# Default values of fields of vLLM's and llama.cpp's endpoints, as clients send them.
DEFAULTS: dict[str, Any] = {
    "priority": 0, "detokenize": True, "include_stop_str_in_output": False,
    "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "logits_processors": None, "allowed_token_ids": None,
    "return_token_ids": None, "kv_transfer_params": None, "vllm_xargs": None,
    "request_id": "cmpl-7", "session_id": None,
    "cache_prompt": True, "n_predict": -1, "n_probs": 0, "n_keep": 0, "id_slot": -1,
    "timings_per_token": False, "return_progress": False, "samplers": None, "min_keep": 0,
    "typical_p": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "dynatemp_range": 0.0,
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "repeat_penalty": 1.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "dry_penalty_last_n": 64, "repeat_last_n": 64, "speculative.n_max": 3, "seed": -1,
    "adaptive_target": -1.0, "adaptive_decay": 0.9, "sse_ping_interval": 30,
    "reasoning_budget_tokens": -1, "repetition_detection": None, "stream_interval": None,
}  # fmt: skip
CHAT_DEFAULTS: dict[str, Any] = {
    "modalities": ["text"], "verbosity": "medium", "store": False, "service_tier": "auto",
    "safety_identifier": "a", "prompt_cache_key": "a", "echo": False, "add_special_tokens": False,
    "mm_processor_kwargs": None, "documents": None, "chat_template": None,
    "reasoning_format": "auto", "thinking_token_budget": -1, "reasoning_control": False,
}  # fmt: skip
OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**DEFAULTS, **CHAT_DEFAULTS},
    "/v1/completions": {**DEFAULTS, "best_of": 1, "suffix": None, "thinking_token_budget": None},
    "/v1/responses": {
        "priority": 0, "truncation": "disabled", "background": False, "top_logprobs": 0,
        "previous_response_id": None, "mm_processor_kwargs": None, "request_id": "resp_7",
        "include_stop_str_in_output": False, "enable_response_messages": False,
        "image": None, "stop": [], "ignore_eos": False, "top_k": None, "skip_special_tokens": None,
    },
    "/v1/messages": {"container": None, "context_management": None, "speed": "standard",
                     "mcp_servers": [], "inference_geo": None, "workspace_id": "a"},
    "/v1/embeddings": {"truncate_prompt_tokens": None, "padding": None, "priority": 0,
                       "add_special_tokens": True, "embed_dtype": "float32",
                       "endianness": "native", "use_activation": None, "request_id": "a"},
    "/v1/rerank": {"top_n": 0, "use_activation": True, "priority": 0, "request_id": "a"},
    "/v1/score": {"use_activation": True, "truncation_side": None},
    "/tokenize": {"return_token_strs": None, "add_special_tokens": None, "chat_template": None},
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
        found = ask(**OTHER_DEFAULTS.get(endpoint, {}))
        assert (found.status_code, answer_of(found)) == (200, answer_of(plain)), found.text
        for name, neutral in getattr(ENDPOINTS[endpoint], "neutral_fields", {}).items():
            found = ask(**{name: None})
            assert (found.status_code, answer_of(found)) == (200, answer_of(plain)), name
            for value in (7, "x", {"a": 1}, [{"a": 1}]):
                found = ask(**{name: value})
                if neutral.is_hint:
                    assert (found.status_code, answer_of(found)) == (200, answer_of(plain)), name
                    continue
                error = found.json()["error"]
                assert (found.status_code, error["param"]) == (400, name)
                assert error["message"].startswith(f"{name} must be "), error
                assert error["message"].endswith(f", because {neutral.reason}."), error


def test_a_window_of_penalties_is_accepted_without_penalties(start: Any) -> None:
    with start() as server, httpx.Client(timeout=60) as client:
        body = {"model": server.serving.name, **BODIES["/v1/completions"], "repeat_last_n": 64}
        for fields, status in (
            ({}, 200), ({"presence_penalty": 0.0, "repetition_penalty": 1}, 200),
            ({"presence_penalty": 0.5}, 400), ({"repetition_penalty": 1.1}, 400),
            ({"presence_penalty": 0.5, "repeat_last_n": -1}, 200), ({"repeat_last_n": 32}, 400),
        ):  # fmt: skip
            found = client.post(f"{server.url}/v1/completions", json={**body, **fields})
            assert found.status_code == status, fields
            if status == 400:
                assert found.json()["error"]["param"] == "repeat_last_n"


def test_sampling_fields_have_their_effects(start: Any, engine: Any) -> None:
    """Compare with greedy decoding, and with answers whose end is made certain by a bias."""
    end = engine.tokenizer.eos_id
    ends = {"logit_bias": {str(end): 100}}
    with start() as server, httpx.Client(timeout=60) as client:

        def ask(**fields: Any) -> tuple[list[str], str, int, int]:
            body = {"model": server.serving.name, "prompt": "hello", "max_tokens": 12, **fields}
            answer = client.post(f"{server.url}/v1/completions", json=body).json()
            choices, usage = answer["choices"], answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            texts = [choice["text"] for choice in choices]
            return texts, choices[0]["finish_reason"], usage["completion_tokens"], cached

        (greedy,), reason, count, _ = ask(temperature=0)
        assert (reason, count) == ("length", 12)
        for fields in ({"top_p": 0}, {"top_k": 1}, {"temperature": 1e-6}, {"min_p": 1}):
            assert ask(seed=3, **{"temperature": 1, **fields})[0] == [greedy], fields
        assert ask(temperature=0, n=3)[0] == [greedy] * 3
        assert ask(seed=5)[0] == ask(seed=5)[0] != ask(seed=6)[0]
        assert ask(**ends)[1:3] == ("stop", 1)
        assert ask(**ends, min_tokens=7)[1:3] == ("stop", 8)  # the end follows seven tokens
        assert ask(**ends, ignore_eos=True)[1:3] == ("length", 12)
        first = engine.tokenizer.encode("a")[0]
        forced = {"logit_bias": {str(first): 100}}
        assert ask(**forced)[0] == ["a" * 12]
        assert ask(**forced, stop_token_ids=[first])[1:3] == ("stop", 1)
        assert ask(**forced, bad_words=["a"])[0][0].count("a") == 0


def test_salts_separate_the_prefix_cache(start: Any) -> None:
    with start() as server, httpx.Client(timeout=60) as client:

        def cached(**fields: Any) -> int:
            body = {"model": server.serving.name, "prompt": "salted " * 30, "max_tokens": 1}
            answer = client.post(f"{server.url}/v1/completions", json={**body, **fields}).json()
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [cached(), cached() > 100] == [0, True]
        assert [cached(cache_salt="a"), cached(cache_salt="a") > 100] == [0, True]
        assert cached(cache_salt="b") == 0


def test_true_and_false_are_not_numbers(start: Any) -> None:
    with start() as server:
        body = {"model": server.serving.name, **BODIES["/v1/completions"]}
        for name, value in (("n_probs", False), ("detokenize", 1), ("typical_p", True)):
            found = httpx.post(f"{server.url}/v1/completions", json={**body, name: value})
            assert (found.status_code, found.json()["error"]["param"]) == (400, name)


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
        loaded = paths["/v1/load_lora_adapter"]["post"]["responses"]["200"]
        assert list(loaded["content"]) == ["text/plain"]
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


def test_the_schema_of_a_server_behind_a_prefix_and_without_keys(start: Any) -> None:
    with start(root_path="/llm") as server:
        for _ in range(2):
            schema = httpx.get(f"{server.url}/llm/openapi.json", timeout=60).json()
            assert schema["servers"] == [{"url": "/llm"}]
        secured = {path for path, routes in schema["paths"].items()
                   if any(route.get("security") for route in routes.values())}  # fmt: skip
        assert secured == {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}


def test_the_schema_is_built_once_and_off_the_event_loop(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def describe(app: Any, has_keys: bool, root_path: str) -> dict[str, Any]:
        threads.append(current_thread().name)
        return {"paths": {}}

    monkeypatch.setattr("bmforge.serve.app.describe_api", describe)
    with start() as server:
        for _ in range(2):
            found = httpx.get(f"{server.url}/openapi.json", timeout=60)
            assert (found.status_code, found.json()) == (200, {"paths": {}})
    assert [name.startswith("AnyIO worker") for name in threads] == [True]
