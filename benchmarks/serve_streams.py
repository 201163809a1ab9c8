"""Streams over HTTP beside the engine they come from, and /health beside a long prompt.

    python benchmarks/serve_streams.py [--clients 8] [--tokens 128] [--rounds 9] [--size small]

The same greedy requests are read by threads, once from `Engine.submit` and once as server-sent
events from `bmforge serve` in a process of its own; they take turns. Then a prompt of 4,096 tokens
is sent, and /health is asked until its first token comes.
"""

from __future__ import annotations

import argparse
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

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent / "tests" / "serve"),
]
from harness import Contender, header, paired_ratio, run_in_turns, table  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {"hidden_size": 768, "intermediate_size": 2048, "num_heads": 12, "num_layers": 12},
}
LONG = 4096
THREADS = 2  # of either side


def options(tokens: int) -> dict[str, Any]:
    """A request that goes on to its last token."""
    return {"max_tokens": tokens, "temperature": 0, "logit_bias": {"2": -100, "4": -100}}


def prompt(number: int) -> str:
    """Of which no two begin alike."""
    return f"{number}: once upon a time there was a machine that wrote"


def build_engine(folder: str, clients: int, tokens: int) -> Callable[[], float]:
    """Read the engine's own handles, each by a thread."""
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
    """A server in a process of its own."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "bmforge", "serve", folder, "--port", "0", "--name", "m"]
        command += ["--context", str(2 * LONG), "--no-log-requests"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://[^ ]*:(\d+)/", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("the server did not begin")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, connection: http.client.HTTPConnection, **body: Any) -> Any:
        """Send a request for a stream."""
        data = json.dumps({"model": "m", "stream": True, **body})
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        return connection.getresponse()


def build_server(folder: str, clients: int, tokens: int) -> Callable[[], float]:
    """Read a server's events, each stream by a thread over a connection that stays."""
    server = Server(folder)
    Finalize(None, server.process.terminate, exitpriority=1)  # when this process ends
    connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(clients)]

    def one(number: int) -> int:
        usage = {"stream_options": {"include_usage": True}}
        answer = server.post(connections[number], prompt=prompt(number), **options(tokens), **usage)
        count = 0
        for line in answer:
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                count = found["usage"]["completion_tokens"] if found["usage"] else count
        return count

    pool = ThreadPoolExecutor(clients)
    return lambda: float(sum(pool.map(one, range(clients))))


def measure_health(folder: str) -> tuple[float, float, int]:
    """Return the slowest answer of /health and the first token of a long prompt, in seconds."""
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
    """Print both."""
    from conftest import write_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", choices=SIZES, default="small")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = str(write_model(Path(place) / "model", **SIZES[given.size]))
        print(
            header(" ".join(["python", *sys.argv]), THREADS, ("torch", "fastapi", "uvicorn")), "\n"
        )
        contenders = {
            "engine": Contender(build_engine, THREADS, folder, given.clients, given.tokens),
            "server": Contender(build_server, THREADS, folder, given.clients, given.tokens),
        }
        for contender in contenders.values():
            assert contender.step().loss == given.clients * given.tokens
        steps = run_in_turns(contenders, given.rounds, 600)
        rows = []
        for name, taken in steps.items():
            rates = sorted(step.loss / step.seconds for step in taken)
            rows.append([name, f"{rates[len(rates) // 2]:.1f}"])
        print(table(["contender", "tokens/s (median)"], rows))
        times = {name: [step.seconds for step in taken] for name, taken in steps.items()}
        ratio, low, high = paired_ratio(times["server"], times["engine"])
        print(f"\nserver / engine, tokens/s: {ratio:.3f} ({low:.3f} to {high:.3f})")
        for contender in contenders.values():
            contender.close()
        slowest, first, count = measure_health(folder)
        print(
            f"/health beside a prompt of {LONG} tokens: {count} answers, the slowest after "
            f"{slowest * 1000:.1f} ms; first token after {first:.2f} s"
        )


if __name__ == "__main__":
    main()
