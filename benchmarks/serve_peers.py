"""Compare `bmforge serve` with llama.cpp's server, or adapters with their base model.

    python benchmarks/serve_peers.py FOLDER --peer PROGRAM [--clients 1 4 16 64] [--rounds 3]
    python benchmarks/serve_peers.py FOLDER --adapters 8 [--clients 16] [--rounds 5]

PROGRAM is llama.cpp's llama-server, or a Python interpreter that has llama-cpp-python with its
server. FOLDER gets a Llama of 85M parameters with random weights over bytes, and its GGUF file,
which both servers read (q8_0). Both servers run all the time and are asked in turns, so that a
change of the machine's speed affects both. Prompts and answers have lengths of a log-normal
distribution, and half of the prompts begin with the same 128 tokens. Ratios are medians over
rounds with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "tests" / "serve")]
from harness import header, paired_ratio  # noqa: E402

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
    """Return greedy requests; no two rounds share a prompt, apart from the common prefix."""
    draw = random.Random(seed)
    common = "".join(random.Random(0).choices(LETTERS, k=SHARED))
    requests = []
    for number in range(count):
        length = min(512, max(16, round(draw.lognormvariate(4.8, 0.7))))
        tokens = min(128, max(8, round(draw.lognormvariate(3.7, 0.6))))
        own = "".join(draw.choices(LETTERS, k=length))
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
    """Run a server on a free port until the block ends; yields the port once it answers."""
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
    from conftest import write_model

    from bmforge.models.formats.gguf_export import export_gguf

    path = folder / "q8_0.gguf"
    if not path.exists():
        model = write_model(folder / "model", **SHAPE)
        # llama.cpp reads no vocabulary without merges. Byte 255 is in no UTF-8 text.
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
    """Measure two sides in turns; returns the row of the table.

    Args:
        sides: name -> (port, model names that the requests take in turns).
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
    ours, theirs = ([load.seconds for load in loads[name]] for name in names)
    ratio, low, high = paired_ratio(ours, theirs)
    row: list[Any] = [clients, f"{ratio:.2f} ({low:.2f} to {high:.2f})"]
    for name in names:
        row.append(f"{statistics.median(x.tokens / x.seconds for x in loads[name]):.0f}")
    for kind, percent in (("first_s", 50), ("first_s", 99), ("gaps_s", 50), ("gaps_s", 99)):
        values = [[v for load in loads[name] for v in getattr(load, kind)] for name in names]
        row.append(" / ".join(f"{percentile(each, percent):.0f}" for each in values))
    return row


def print_row(cells: Sequence[Any]) -> None:
    """Print a row of a Markdown table at once, so that a run that is cut off has its first rows."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", help="llama-server, or Python with llama-cpp-python")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", choices=REQUESTS, default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if bool(given.peer) == bool(given.adapters):
        parser.error("give either --peer or --adapters")
    path, most = prepare(given.folder), max(16, *given.clients)
    print(header(" ".join(["python", *sys.argv]), given.threads, ("torch", "uvicorn")), "\n")
    with ExitStack() as stack:
        if given.peer:
            port = stack.enter_context(served(serve_ours(path, most), given.folder / "ours.log"))
            command = serve_peer(given.peer, path, most, given.threads)
            other = stack.enter_context(served(command, given.folder / "peer.log"))
            sides = {"bmforge": (port, ["m"]), "llama.cpp": (other, ["m"])}
        else:
            adapters = write_adapters(given.folder, given.folder / "model", given.adapters)
            command = serve_ours(given.folder / "model", most, *adapters)
            port = stack.enter_context(served(command, given.folder / "ours.log"))
            names = [f"a{number}" for number in range(given.adapters)]
            sides = {"adapters": (port, names), "base": (port, ["m"])}
        both = " / ".join(sides)
        times = [f"{name}, ms, {both}" for name in TIMES]
        rates = [f"{name}, tokens/s" for name in sides]
        print_row(["clients", f"throughput, {both}", *rates, *times])
        print_row(["---"] * (4 + len(times)))
        for clients in given.clients:
            print_row(compare(sides, clients, given.rounds))


if __name__ == "__main__":
    main()
