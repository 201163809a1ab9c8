"""Memory and health-check latency of a server that refuses large prompts.

    python -m benchmarks.serving.large_prompts MODEL [--context 1024] [--counts 1 16 64]
        [--decoding 8]

Starts `bmforge serve`, and sends COUNT prompts of 2 MB or conversations of 3,000 messages at once.
Prints the peak growth of the resident memory, and the latency of `/health` before and during the
requests. A process of its own checks the health, on a new connection each time: in the process that
sends the prompts, the checks would also wait for that process. With `--decoding`, that many answers
are generated all the time. Linux only.

The last column is the latency without the time in which the server's event loop or the checking
process waits for a core, which depends on the other jobs of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.harness import make_parser

TEXT = "a" * 2_000_000
MESSAGES = [{"role": role, "content": "a" * 40} for role in ("user", "assistant")] * 1500
# (name, endpoint, fields)
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("completions", "completions", {"prompt": TEXT}),
    ("chat/completions", "chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ("3,000 messages", "chat/completions", {"messages": MESSAGES}),
]


def memory(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the resident memory of a process and its peak, in MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS")))
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


async def latency_ms(client: httpx.AsyncClient, url: str) -> float:
    """Return the latency of one health check in milliseconds."""
    begin = time.perf_counter()
    (await client.get(f"{url}/health")).raise_for_status()
    return 1000 * (time.perf_counter() - begin)


def core_wait_ms(pid: int) -> float:
    """Return the time in ms that a process's main thread was runnable, but had no core."""
    fields = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(fields[1]) / 1e6


def check_health(url: str, pid: int, pipe: Connection) -> None:
    """Measure health checks until a message arrives.

    Sends the latencies in milliseconds, and the same without the waits for a core.
    """
    address, latencies_ms, own_ms = urlsplit(url), [], []
    pipe.send("started")
    while not pipe.poll(0.01):
        waited_ms = core_wait_ms(pid) + core_wait_ms(os.getpid())
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=300)
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        latencies_ms.append(1000 * (time.perf_counter() - begin))
        waited_ms = core_wait_ms(pid) + core_wait_ms(os.getpid()) - waited_ms
        own_ms.append(max(0.0, latencies_ms[-1] - waited_ms))
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"/health answered with status {response.status}.")
    pipe.send((latencies_ms, own_ms))


async def decode(client: httpx.AsyncClient, url: str, tokens: int) -> None:
    """Generate answers one after the other, until the task is cancelled."""
    fields = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    while True:
        response = await client.post(f"{url}/v1/completions", json={"model": "served", **fields})
        response.raise_for_status()


async def measure(process: subprocess.Popen[bytes], url: str, options: argparse.Namespace) -> None:
    """Print a row for every endpoint and number of requests."""
    counts = options.counts
    limits = httpx.Limits(max_connections=max(counts) + options.decoding + 8)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        while True:
            try:
                await latency_ms(client, url)
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    raise RuntimeError("The server has ended. Its error is above.") from None
                await asyncio.sleep(0.3)
        answers = [
            asyncio.create_task(decode(client, url, options.context // 2))
            for _ in range(options.decoding)
        ]
        print("| endpoint | requests | status | MiB | /health before | during: median, maximum "
              "| without waits for a core |")  # fmt: skip
        print("|---|---|---|---|---|---|---|")
        for name, path, fields in BODIES:
            data = json.dumps({"model": "served", **fields}).encode()
            for count in counts:
                row = await measure_row(process, client, f"{url}/v1/{path}", data, count)
                print(f"| {name} {row}", flush=True)
        failed = [task.exception() for task in answers if task.done()]
        if failed:
            raise RuntimeError(f"{len(failed)} streams have ended: {failed[0]!r}.")
        for task in answers:
            task.cancel()


async def measure_row(
    process: subprocess.Popen[bytes],
    client: httpx.AsyncClient,
    url: str,
    data: bytes,
    count: int,
) -> str:
    """Send `count` bodies to a URL at once; return the row without its first cell."""
    server = url.partition("/v1/")[0]
    alone = sorted([await latency_ms(client, server) for _ in range(30)])
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # reset the peak
    before = memory(process)["VmRSS"]
    headers = {"content-type": "application/json"}
    spawn = multiprocessing.get_context("spawn")
    pipe, far_end = spawn.Pipe()
    checker = spawn.Process(target=check_health, args=(server, process.pid, far_end), daemon=True)
    checker.start()
    far_end.close()  # an error of the checker ends the wait for its message
    await asyncio.to_thread(pipe.recv)
    posts = (client.post(url, content=data, headers=headers) for _ in range(count))
    responses = await asyncio.gather(*posts)
    pipe.send("finished")
    during_ms, own_ms = map(sorted, await asyncio.to_thread(pipe.recv))
    checker.join()
    growth = memory(process)["VmHWM"] - before
    status = {response.status_code for response in responses}
    return (
        f"| {count} | {status} | {growth:.1f} | {alone[15]:.0f} ms | "
        f"{during_ms[(len(during_ms) - 1) // 2]:.0f} ms, {during_ms[-1]:.0f} ms | "
        f"{own_ms[(len(own_ms) - 1) // 2]:.0f} ms, {own_ms[-1]:.0f} ms |"
    )


def main() -> None:
    """Start the server and measure."""
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decoding", type=int, default=0, help="number of running answers")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bmforge", "serve", options.model, "--port", str(port)]
    command += ["--name", "served", "--context", str(options.context), "--no-log-requests"]
    with subprocess.Popen(command) as process:
        try:
            asyncio.run(measure(process, f"http://127.0.0.1:{port}", options))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
