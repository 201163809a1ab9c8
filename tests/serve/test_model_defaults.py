"""Fields that a request leaves out have the values of the model's generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_chat_model import write_model

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig
from bmforge.serve.app import create_app

DEFAULTS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.4,
    "top_p": 0.9,
    "top_k": 7,
    "repetition_penalty": 1.3,
    "eos_token_id": [2, 4, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50],
}
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def write_with_defaults(folder: Path, defaults: dict[str, Any]) -> Path:
    write_model(folder)
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_defaults(tmp_path_factory.mktemp("defaults") / "own", DEFAULTS)


@pytest.fixture(scope="module")
def own(directory: Path) -> Iterator[Engine]:
    with Engine(directory, config=EngineConfig(max_tokens=256)) as engine:
        yield engine


def ask(url: str, endpoint: str, seed: int, **fields: Any) -> str:
    """Return the answer's text for one prompt and seed."""
    body: dict[str, Any] = {"model": "tiny", "seed": seed, **fields}
    if endpoint == "completions":
        body |= {"prompt": "one two three", "max_tokens": 24}
    else:
        body |= {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 24}
    path = "completions" if endpoint == "completions" else "chat/completions"
    response = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if endpoint == "completions" else choice["message"]["content"])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_missing_fields_have_the_models_values(
    start: Any, engine: Engine, own: Engine, directory: Path, endpoint: str
) -> None:
    """The same weights without the file give the same answers if each value is sent."""
    explicit = {name: DEFAULTS[name] for name in SAMPLING}
    explicit["stop_token_ids"] = DEFAULTS["eos_token_id"]
    with start(name="tiny") as server:
        wanted = [ask(server.url, endpoint, seed, **explicit) for seed in range(6)]
        plain = [ask(server.url, endpoint, seed) for seed in range(6)]
        hot = [ask(server.url, endpoint, s, **{**explicit, "temperature": 1.7}) for s in range(6)]
    with start(other=own, place=directory, name="tiny") as server:
        assert [ask(server.url, endpoint, seed) for seed in range(6)] == wanted
        changed = [ask(server.url, endpoint, seed, temperature=1.7) for seed in range(6)]
    assert changed == hot
    assert len({tuple(wanted), tuple(plain), tuple(hot)}) == 3
    assert min(map(len, wanted)) < 24 <= max(map(len, plain))  # the model's end tokens ended some


@pytest.mark.parametrize(
    ("defaults", "problem"),
    [
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"do_sample": True, "top_p": 3.0}, "top_p"),
    ],
)
def test_values_that_cannot_be_kept_are_refused_at_the_start(
    tmp_path: Path, defaults: dict[str, Any], problem: str
) -> None:
    """Otherwise every request would fail."""
    folder = write_with_defaults(tmp_path / "model", defaults)
    with Engine(folder) as engine, pytest.raises(ConfigError, match=problem):
        create_app(engine)
