"""Adapters that are loaded and removed while the server runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from test_serve_sockets import is_idle, until
from tiny_chat_model import write_model

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import AutoModel
from bmforge.serve.auth import load_admin_key
from bmforge.serve.settings import ServeConfig
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.delta import Lora, list_deltas, load_delta

ADMIN = "an-admin-key-of-24-signs"
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("loras")
    for number in range(2):
        delta = Lora(AutoModel.from_pretrained(model_directory))
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for tensor in delta.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.5)
        delta.save(folder / str(number))
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module")
def own_engine(model_directory: Path) -> Iterator[Engine]:
    model: Any = AutoModel.from_pretrained(model_directory)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    config = EngineConfig(max_tokens=512)
    with Engine(model.eval(), tokenizer=tokenizer, config=config) as engine:
        yield engine


def written(model_directory: Path, adapter: Path | None, count: int) -> str:
    """Greedy text of a model that had the adapter from the start, generated alone."""
    model: Any = AutoModel.from_pretrained(model_directory)
    if adapter is not None:
        load_delta(model, adapter)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    ids = torch.tensor([tokenizer.encode_prompt("a")])
    output = generate(model.eval(), ids, max_new_tokens=count, eos_token_id=())
    return tokenizer.decode_written(output[0, ids.shape[1] :].tolist())


def admin(server: Any, path: str, key: str = ADMIN, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=fields, headers=headers,
                      timeout=60)  # fmt: skip


def ask(server: Any, name: str, **fields: Any) -> httpx.Response:
    body = {"model": name, "prompt": "a", "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def names(server: Any) -> list[str]:
    data = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    return [model["id"] for model in data]


def open_server(start: Any, engine: Engine, place: Path) -> Any:
    return start(other=engine, place=place, name="tiny", admin=ADMIN,
                 allow_runtime_lora_updating=True)  # fmt: skip


def test_adapters_are_loaded_and_removed_while_answers_are_streamed(
    start: Any, own_engine: Engine, model_directory: Path, adapters: list[Path]
) -> None:
    whole = {
        None: written(model_directory, None, 200),
        0: written(model_directory, adapters[0], 200),
    }
    assert whole[None][:8] != whole[0][:8]
    with open_server(start, own_engine, model_directory) as server:
        assert admin(server, "load", lora_name="ann", lora_path=str(adapters[0])).status_code == 200
        assert names(server) == ["tiny", "ann"]
        for name, text in (("ann", whole[0]), ("tiny", whole[None])):
            assert ask(server, name, **LONG).json()["choices"][0]["text"] == text
        body = {"model": "ann", "prompt": "a", "temperature": 0, "stream": True, **LONG}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            text = next(lines)
            # A second adapter takes the first one's name while an answer is written with it.
            assert admin(server, "unload", lora_name="ann").status_code == 200
            assert ask(server, "ann").status_code == 404
            other = {"lora_name": "ann", "lora_path": str(adapters[1])}
            assert admin(server, "load", **other).status_code == 200
            found = ask(server, "ann").json()["choices"][0]["text"]
            assert found == written(model_directory, adapters[1], 8)
            events = [text, *lines]
        pieces = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole[0]
        # The removed adapter's tensors are gone after its last request.
        assert until(lambda: len(list_deltas(own_engine.model)) == 1)
        assert admin(server, "unload", lora_name="ann").status_code == 200
        assert list_deltas(own_engine.model) == {}
        assert names(server) == ["tiny"]
        assert ask(server, "tiny", **LONG).json()["choices"][0]["text"] == whole[None]
        assert is_idle(own_engine)


def test_only_the_admin_loads_adapters_and_errors_change_nothing(
    start: Any, own_engine: Engine, model_directory: Path, adapters: list[Path], tmp_path: Path
) -> None:
    path = str(adapters[0])
    with start(other=own_engine, place=model_directory) as server:
        refused = admin(server, "load", lora_name="ann", lora_path=path)
        assert refused.status_code == 403
        assert "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
    with open_server(start, own_engine, model_directory) as server:
        for key in ("another-key-of-24-signs!", ""):
            for action in ("load", "unload"):
                assert admin(server, action, key or "-", lora_name="ann").status_code == 401
        (tmp_path / "empty").mkdir()
        (tmp_path / "wrong").mkdir()
        (tmp_path / "wrong" / "adapter_config.json").write_text("[]")
        shutil.copytree(adapters[0], tmp_path / "cut")
        (weights,) = (tmp_path / "cut").glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-7])
        (tmp_path / "stopped").mkdir()
        (tmp_path / "stopped" / "run.toml").write_text("")
        wider = AutoModel.from_pretrained(write_model(tmp_path / "model", hidden_size=64))
        Lora(wider).save(tmp_path / "wider")
        for fields, status in (
            ({"lora_name": "ann", "lora_path": str(tmp_path / "none")}, 404),
            ({"lora_name": "ann", "lora_path": str(tmp_path / "empty")}, 400),
            ({"lora_name": "ann", "lora_path": str(tmp_path / "wrong")}, 400),
            ({"lora_name": "ann", "lora_path": str(tmp_path / "stopped")}, 400),
            ({"lora_name": "ann", "lora_path": str(tmp_path / "cut")}, 400),
            ({"lora_name": "ann", "lora_path": str(tmp_path / "wider")}, 400),
            ({"lora_name": "ann", "lora_path": "a\x00b"}, 404),
            ({"lora_name": "tiny", "lora_path": path}, 400),
            ({"lora_name": "", "lora_path": path}, 400),
            ({"lora_name": "ann", "lora_path": path, "load_inplace": True}, 400),
            ({"lora_name": "ann"}, 400),
        ):
            answer = admin(server, "load", **fields)
            assert (answer.status_code, "error" in answer.json()) == (status, True), fields
        assert admin(server, "unload", lora_name="ann").status_code == 404
        assert names(server) == ["tiny"]
        assert list_deltas(own_engine.model) == {}


def test_the_directory_of_a_run_is_loaded_as_its_export(
    start: Any, own_engine: Engine, model_directory: Path, adapters: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(adapters[0], tmp_path / "export")
    (tmp_path / "run.toml").write_text("")
    with open_server(start, own_engine, model_directory) as server:
        assert admin(server, "load", lora_name="ann", lora_path=str(tmp_path)).status_code == 200
        fields = {"ignore_eos": True}
        text = ask(server, "ann", **fields).json()["choices"][0]["text"]
        assert text == written(model_directory, adapters[0], 8)
        assert admin(server, "unload", lora_name="ann").status_code == 200


def test_the_option_needs_an_admin_key() -> None:
    with pytest.raises(ConfigError, match="BMFORGE_ADMIN_KEY"):
        load_admin_key(ServeConfig(allow_runtime_lora_updating=True), {})
    assert not load_admin_key(ServeConfig(), {"BMFORGE_ADMIN_KEY": ADMIN})
