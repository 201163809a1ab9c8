"""A tuned model, written as GGUF, answers in llama.cpp's server as it was trained to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from test_adapter_runs import write_qwen3
from test_tune_and_serve import ANSWERS, write_chats

from bmforge.cli import main

SERVER = os.environ.get("BMFORGE_LLAMA_SERVER", "")
TRAIN = (
    "--adapter lora --adapter.rank 16 --seq-len 64 --batch-size 2 --micro-batch-size 1 --lr 0.02 "
    "--train.schedule.kind constant --steps 70"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not SERVER, reason="BMFORGE_LLAMA_SERVER is the path of llama-server"),
]


def request(address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(address, data, headers), timeout=60
    ) as reply:
        return json.load(reply)


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None
        try:
            request(f"{address}/health")
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("llama-server did not start")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_answers(kind: str, tmp_path: Path) -> None:
    base, chats = write_qwen3(tmp_path / "base"), write_chats(tmp_path / "chats.jsonl")
    run, file = tmp_path / "run", tmp_path / "model.gguf"
    command = f"train conversations --model {base} --data {chats} --run-dir {run} {TRAIN}"
    assert main(command.split()) == 0
    assert main(["convert", str(run), str(file), "--type", kind]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-m", str(file), "--port", str(port), "-t", "1", "-c", "256", "--jinja"]
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([SERVER, *options], stdout=log, stderr=log)
        try:
            wait_for(address, process)
            for question, answer in ANSWERS.items():
                messages = [{"role": "user", "content": question}]
                body = {"messages": messages, "temperature": 0, "max_tokens": 24}
                reply = request(f"{address}/v1/chat/completions", body)
                assert reply["choices"][0]["message"]["content"] == answer
        finally:
            process.kill()
            process.wait()
