"""A tiny model with a tokenizer of bytes, an engine over it, and a server in a thread."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from bmforge.infer import Engine, EngineConfig
from bmforge.models import Llama, LlamaConfig
from bmforge.serve.app import create_app
from bmforge.serve.auth import ApiKeys, load_keys
from bmforge.serve.lifecycle import GracefulServer, bind_address, make_server
from bmforge.serve.serving import Serving
from bmforge.serve.settings import ServeConfig

CHROMIUM = Path(os.environ.get("BMFORGE_CHROMIUM", "/usr/bin/chromium-headless-shell"))
MARKS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# ChatML with Qwen's form of calls.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, **sizes: Any) -> Path:
    """A Llama with random weights over 256 bytes and ChatML's marks; returns its directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*MARKS, *alphabet])}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(MARKS)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {**roles, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_layers": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), **{"max_seq_len": 2048, **shape, **sizes})
    Llama.from_config(config, seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; where CI runs it must be there."""
    if not CHROMIUM.exists() and os.environ.get("CI") != "true":
        pytest.skip("needs Debian's chromium-headless-shell")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def engine(model_directory: Path) -> Iterator[Engine]:
    with Engine(model_directory, config=EngineConfig(max_tokens=1024)) as engine:
        yield engine


class Running:
    """A server that runs in a thread.

    Attributes:
        port: where it listens.
        serving: what it serves with.
    """

    def __init__(self, port: int, server: GracefulServer) -> None:
        self.port, self._server = port, server
        self.serving: Serving = server.serving
        self.url = f"http://127.0.0.1:{port}"

    def keep_open(self) -> None:
        """Go on after a failure of the engine, so that the answers can be read."""
        self._server.stops_at_failure = False

    def connections(self) -> set[Any]:
        """All that are open."""
        return self._server.server_state.connections


Start = Callable[..., Any]


@pytest.fixture
def start(engine: Engine, model_directory: Path) -> Start:
    """Start a server for a `with` block; it has stopped when the block ends."""

    @contextmanager
    def begin(
        keys: str = "",
        send_buffer: int = 0,
        other: Any = None,
        place: Path | None = None,
        embedder: Any = None,
        deltas: Any = None,
        admin: str = "",
        **limits: Any,
    ) -> Iterator[Running]:
        config = ServeConfig(**{"port": 0, "grace_s": 5.0, "log_requests": False, **limits})
        place = place if other else model_directory
        given = load_keys(config, {"BMFORGE_API_KEYS": keys})
        app = create_app(
            other or engine,
            config,
            directory=place,
            keys=given,
            embedder=embedder,
            deltas=deltas,
            admin=ApiKeys([admin]) if admin else None,
        )
        listener = bind_address(config)
        server = make_server(app, listener)
        if send_buffer:  # of the connections too, so that little is enough to fill one
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield Running(listener.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()

    return begin
