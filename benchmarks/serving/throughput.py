"""Throughput and latency of `bmforge serve` compared with llama.cpp's server, or of LoRA adapters.

    python -m benchmarks.serving.throughput FOLDER --peer PROGRAM [--clients 1 4 16 64]
        [--rounds 3] [--threads 2]
    python -m benchmarks.serving.throughput FOLDER --adapters 8 [--clients 16] [--rounds 5]

PROGRAM is llama.cpp's llama-server, or a Python interpreter with llama-cpp-python and its server.
FOLDER receives a byte-level Llama with 85M random parameters and its GGUF file, which both servers
read (q8_0). With `--adapters`, requests for that many adapters are compared with requests for the
base model. Both servers run all the time and receive the requests alternately. Prompts and
answers have log-normally distributed lengths, and half of the prompts share a prefix of 128 tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import header, make_parser, paired_ratio, table_row

ROOT = Path(__file__).resolve().parents[2]

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_heads": 12, "num_layers": 12}
SHARED, CONTEXT, LETTERS = 128, 1024, "abcdefghijklmnopqrstuvwxyz     "
TIMES = ("first p50", "first p99", "between p50", "between p99")
REQUESTS = {1: 3, 4: 8, 16: 16, 64: 64}  # by the number of clients


@dataclass
class Load:
    """Times of one round.

    Attributes:
        seconds: duration of the round.
        tokens: generated tokens.
        first_s: time to first token of each request, in seconds.
        gaps_s: time between two events of one answer, in seconds.
    """

    seconds: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def draw_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Return greedy requests; different seeds share only the common prefix."""
    generator = random.Random(seed)
    common = "".join(random.Random(0).choices(LETTERS, k=SHARED))
    requests = []
    for number in range(count):
        length = min(512, max(16, round(generator.lognormvariate(4.8, 0.7))))
        tokens = min(128, max(8, round(generator.lognormvariate(3.7, 0.6))))
        own = "".join(generator.choices(LETTERS, k=length))
        prompt = common + own if number % 2 else own
        requests.append({"prompt": f"{prompt} {seed} {number}", "max_tokens": tokens})
    return requests


async def ask(port: int, body: Mapping[str, Any], load: Load) -> None:
    """Stream one answer and add its times to a load."""
    options = {"stream": True, "temperature": 0, "logit_bias": {"2": -100, "4": -100}}
    data = json.dumps({**body, **options}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    times, lines = [], []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            lines.append(line[6:])
    writer.close()
    choices = [choice for line in lines[-2:] for choice in json.loads(line)["choices"]]
    ends = {choice["finish_reason"] for choice in choices}
    if "length" not in ends:  # the answer has fewer tokens, or the request was refused
        raise RuntimeError(f"port={port} ended an answer with {ends}: {lines[-1:]}.")
    load.tokens += body["max_tokens"]
    load.first_s.append(times[0] - begin)
    load.gaps_s += [after - before for before, after in pairwise(times)]


async def run_round(port: int, requests: Sequence[dict[str, Any]], clients: int) -> Load:
    """Send requests from several clients, each one after the other, and return their times."""
    load, waiting = Load(), iter(requests)

    async def client() -> None:
        for body in waiting:
            await ask(port, body, load)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.seconds = time.perf_counter() - begin
    return load


@contextmanager
def served(command: list[str], log: Path) -> Iterator[int]:
    """Run a server until the block ends; yields its port when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("OMP_NUM_THREADS", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, env=environment
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended: {log} has its messages.")
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def prepare(folder: Path) -> Path:
    """Write the model and its GGUF file once; returns the file."""
    from bmforge.models.formats.gguf_export import export_gguf
    from tests.serve.tiny_chat_model import write_model

    path = folder / "q8_0.gguf"
    if not path.exists():
        model = write_model(folder / "model", **SHAPE)
        # llama.cpp does not read a vocabulary without merges. UTF-8 text has no byte 255.
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["~~"] = vocabulary.pop("\u00ff")
        tokenizer["model"]["merges"] = [["~", "~"]]
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        export_gguf(model, path, "q8_0")
    return path


def write_adapters(folder: Path, model: Path, count: int) -> list[str]:
    """Write LoRA adapters with random weights; returns the options that serve them."""
    import torch

    from bmforge.models import AutoModel
    from bmforge.tune.delta import Lora

    options = []
    for number in range(count):
        directory = folder / f"adapter-{number}"
        if not directory.exists():
            adapter = Lora(AutoModel.from_pretrained(model), rank=8)
            generator = torch.Generator().manual_seed(number)
            for parameter in adapter.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.02 * noise)
            adapter.save(directory)
        options += ["--adapter", f"a{number}={directory}"]
    return options


def serve_ours(model: Path, most: int, *options: str) -> list[str]:
    """Return the command that serves the model with bmforge."""
    command = [sys.executable, "-m", "bmforge", "serve", str(model), "--name", "m", *options]
    command += ["--context", str(CONTEXT), "--max-num-seqs", str(most), "--no-log-requests"]
    return [*command, "--max-requests-per-key", "128"]


def serve_peer(program: str, model: Path, most: int, threads: int) -> list[str]:
    """Return the command that serves the model with llama.cpp."""
    if Path(program).name.startswith("python"):
        command = [program, "-m", "llama_cpp.server", "--model", str(model)]
        command += ["--n_ctx", str(CONTEXT), "--interrupt_requests", "false"]
        return [*command, "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command = [program, "-m", str(model), "-np", str(most), "-c", str(most * CONTEXT // 2)]
    return [*command, "--kv-unified", "-t", str(threads), "-tb", str(threads), "--no-webui"]


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of times in seconds, in milliseconds."""
    return 1000 * statistics.quantiles(values, n=100)[percent - 1]


def compare(sides: Mapping[str, tuple[int, list[str]]], clients: int, rounds: int) -> list[Any]:
    """Measure two sides alternately; returns the row of the table.

    Args:
        sides: name -> (port, names of the models of the requests, in turn).
        clients: number of clients.
        rounds: number of rounds.
    """
    loads: dict[str, list[Load]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1, rounds):  # the first round is a warm-up
        for name in names if number % 2 else names[::-1]:
            port, models = sides[name]
            requests = [
                {"model": models[n % len(models)], **body}
                for n, body in enumerate(draw_requests(1000 * clients + number, REQUESTS[clients]))
            ]
            load = asyncio.run(run_round(port, requests, clients))
            if number >= 0:
                loads[name].append(load)
    seconds = {name: [load.seconds for load in loads[name]] for name in names}
    row: list[Any] = [clients, f"{paired_ratio(seconds, *names):.2f}"]
    for name in names:
        row.append(f"{statistics.median(x.tokens / x.seconds for x in loads[name]):.0f}")
    for kind, percent in (("first_s", 50), ("first_s", 99), ("gaps_s", 50), ("gaps_s", 99)):
        values = [[v for load in loads[name] for v in getattr(load, kind)] for name in names]
        row.append(" / ".join(f"{percentile(each, percent):.0f}" for each in values))
    return row


def print_row(cells: Sequence[Any]) -> None:
    """Print a row of a Markdown table immediately."""
    print(table_row(cells), flush=True)


def main() -> None:
    """Start the servers and print a row for every number of clients."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", help="llama-server, or Python with llama-cpp-python")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", choices=REQUESTS, default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if bool(arguments.peer) == bool(arguments.adapters):
        parser.error("Give either --peer or --adapters.")
    path, most = prepare(arguments.folder), max(16, *arguments.clients)
    print(header(arguments.threads, ("torch", "uvicorn")), "\n")
    with ExitStack() as stack:
        if arguments.peer:
            port = stack.enter_context(
                served(serve_ours(path, most), arguments.folder / "ours.log")
            )
            command = serve_peer(arguments.peer, path, most, arguments.threads)
            other = stack.enter_context(served(command, arguments.folder / "peer.log"))
            sides = {"bmforge": (port, ["m"]), "llama.cpp": (other, ["m"])}
        else:
            adapters = write_adapters(
                arguments.folder, arguments.folder / "model", arguments.adapters
            )
            command = serve_ours(arguments.folder / "model", most, *adapters)
            port = stack.enter_context(served(command, arguments.folder / "ours.log"))
            names = [f"a{number}" for number in range(arguments.adapters)]
            sides = {"adapters": (port, names), "base": (port, ["m"])}
        both = " / ".join(sides)
        times = [f"{name}, ms, {both}" for name in TIMES]
        rates = [f"{name}, tokens/s" for name in sides]
        print_row(["clients", f"speed, {both}", *rates, *times])
        print_row(["---"] * (4 + len(times)))
        for clients in arguments.clients:
            print_row(compare(sides, clients, arguments.rounds))


if __name__ == "__main__":
    main()
