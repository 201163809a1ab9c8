"""Throughput of streams over HTTP compared with the engine, and the latency of /health.

    python -m benchmarks.serving.http_overhead [--clients 8] [--tokens 128] [--rounds 9]
        [--size small]

Threads read the same greedy requests from `Engine.submit`, and as server-sent events of `bmforge
serve` in another process; the two alternate. Then a prompt of 4,096 tokens is sent, and /health is
requested until the first token arrives.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender, header, make_parser, paired_ratio, run_in_turns, table
from tests.serve.tiny_chat_model import write_model

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {"hidden_size": 768, "intermediate_size": 2048, "num_heads": 12, "num_layers": 12},
}
LONG = 4096
THREADS = 2  # of each side


def options(tokens: int) -> dict[str, Any]:
    """Return the fields of a request that generates all its tokens."""
    return {"max_tokens": tokens, "temperature": 0, "logit_bias": {"2": -100, "4": -100}}


def prompt(number: int) -> str:
    """Return a prompt; no two prompts share a prefix."""
    return f"{number}: once upon a time there was a machine that wrote"


def build_engine(folder: str, clients: int, tokens: int) -> Callable[[], float]:
    """Return a step that reads the answers of an engine, each in a thread."""
    from bmforge.infer import Engine, EngineConfig, GenerationConfig
    from bmforge.infer.engine import Request

    engine = Engine(folder, config=EngineConfig(max_tokens=2 * LONG))
    config = GenerationConfig(max_new_tokens=tokens, logit_bias={2: -100.0, 4: -100.0})

    def one(number: int) -> int:
        handle = engine.submit(Request(prompt(number), config))
        return sum(len(piece.ids) for piece in handle)

    pool = ThreadPoolExecutor(clients)
    return lambda: float(sum(pool.map(one, range(clients))))


class Server:
    """A server in another process."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "bmforge", "serve", folder, "--port", "0", "--name", "m"]
        command += ["--context", str(2 * LONG), "--no-log-requests"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        messages = []
        for line in self.process.stderr:
            messages.append(line)
            if match := re.search(r"http://[^ ]*:(\d+)/", line):
                self.port = int(match[1])
                break
        else:
            raise RuntimeError(f"The server did not start:\n{''.join(messages)}")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, connection: http.client.HTTPConnection, **body: Any) -> Any:
        """Send a streaming request; return the response."""
        data = json.dumps({"model": "m", "stream": True, **body})
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        return connection.getresponse()


def build_server(folder: str, clients: int, tokens: int) -> Callable[[], float]:
    """Return a step that reads the streams of a server, each in a thread with its connection."""
    server = Server(folder)
    Finalize(None, server.process.terminate, exitpriority=1)  # when this process ends
    connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(clients)]

    def one(number: int) -> int:
        usage = {"stream_options": {"include_usage": True}}
        answer = server.post(connections[number], prompt=prompt(number), **options(tokens), **usage)
        count = 0
        for line in answer:
            if line.startswith(b"data: {"):
                match = json.loads(line[6:])
                count = match["usage"]["completion_tokens"] if match["usage"] else count
        return count

    pool = ThreadPoolExecutor(clients)
    return lambda: float(sum(pool.map(one, range(clients))))


def measure_health(folder: str) -> tuple[float, float, int]:
    """Return the slowest answer of /health, the time to first token, and the number of answers."""
    server = Server(folder)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    health = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"prompt": "a" * LONG, **options(2)}
    first: list[float] = []
    begin = time.perf_counter()

    def read() -> None:
        answer = server.post(connection, **body)
        answer.readline()
        first.append(time.perf_counter() - begin)
        answer.read()

    reader = threading.Thread(target=read)
    reader.start()
    taken = []
    while not first:
        start = time.perf_counter()
        health.request("GET", "/health")
        health.getresponse().read()
        taken.append(time.perf_counter() - start)
    reader.join()
    server.process.terminate()
    return max(taken), first[0], len(taken)


def main() -> None:
    """Print both measurements."""
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", choices=SIZES, default="small")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(
            write_model(Path(temporary) / "model", max_seq_len=2 * LONG, **SIZES[arguments.size])
        )
        print(header(THREADS, ("torch", "fastapi", "uvicorn")), "\n")
        contenders = {
            "engine": Contender(build_engine, THREADS, folder, arguments.clients, arguments.tokens),
            "server": Contender(build_server, THREADS, folder, arguments.clients, arguments.tokens),
        }
        for contender in contenders.values():
            assert contender.step().loss == arguments.clients * arguments.tokens
        steps = run_in_turns(contenders, arguments.rounds, 600)
        rows = []
        for name, taken in steps.items():
            rates = sorted(step.loss / step.seconds for step in taken)
            rows.append([name, f"{rates[len(rates) // 2]:.1f}"])
        print(table(["side", "tokens/s (median)"], rows))
        times = {name: [step.seconds for step in taken] for name, taken in steps.items()}
        ratio = paired_ratio(times, "server", "engine")
        print(f"\nspeed, {ratio.sides}: {ratio:.3f}")
        for contender in contenders.values():
            contender.close()
        slowest, first, count = measure_health(folder)
        print(
            f"/health during a prompt of {LONG} tokens: {count} answers, the slowest after "
            f"{slowest * 1000:.1f} ms; first token after {first:.2f} s"
        )


if __name__ == "__main__":
    main()
