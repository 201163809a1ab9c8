"""Decoding of models that do not fit into an enforced memory limit compared with llama.cpp.

    python -m benchmarks.inference.weight_streaming prepare FOLDER --model llama [--scheme int8]
    python -m benchmarks.inference.weight_streaming gguf FOLDER --model llama
    python -m benchmarks.inference.weight_streaming run FOLDER --model llama [--gib 6] [--rounds 3]
        [--tokens 4] [--peer PYTHON]

`llama` and `cpm2` have 11B parameters; `experts` is a mixture of experts for `--gib 0.8`, of which
a token reads a part. `prepare` writes a model with random integers, one tensor at a time. `run`
joins a control group with the limit of the budget plus 2 %, and generates tokens. Between the
rounds, it reads the file directly, past the page cache and with as many threads. The bound is
the speed of this read divided by the bytes that a token reads. PYTHON is an interpreter with
llama-cpp-python; it runs the GGUF file with the same integers that `gguf` writes, mapped, in a
control group with the same limit. `--layers` uses fewer layers, to test the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import header, make_parser, paired_ratio, table
from benchmarks.inference.decode import Peer
from bmforge.host_memory import peak_resident_bytes, resident_bytes
from bmforge.infer import Engine, EngineConfig
from bmforge.memory.direct_read import READ_THREADS, DirectReader
from bmforge.memory.streamed_experts import ExpertStreamer, find_experts
from bmforge.models import CPM2, CPM2Config, Llama, LlamaConfig, Mixtral, MixtralConfig
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.quantize import quantize_, write_packed
from bmforge.surgery import persistent_tensors
from bmforge.testing.limited_engine import ALLOWANCE
from bmforge.testing.memory_group import limit_memory

MIB, GIB = 1 << 20, 1 << 30
# Llama 7B with 54 layers instead of 32, and the published CPM-2.
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LlamaConfig(num_layers=54)),
    "cpm2": (CPM2, CPM2Config.preset("cpm2-2.1")),
    # 3.1B parameters; a token uses 0.9B.
    "experts": (
        Mixtral,
        MixtralConfig(
            hidden_size=2048, intermediate_size=3584, num_layers=16, num_heads=16, num_kv_heads=4
        ),
    ),
}
PROMPT, TOKENS, CHUNK = 16, 128, 1 << 20


def describe(name: str, layers: int | None) -> Any:
    """Return a model on the meta device in fp16."""
    family, config = MODELS[name]
    if layers is not None:
        config = dataclasses.replace(config, num_layers=layers)
    return family.from_config(config, device="meta", dtype=torch.float16)


def count_bytes(model: Any) -> int:
    """Return the bytes of all parameters and persistent buffers."""
    return sum(t.numel() * t.element_size() for t in persistent_tensors(model).values())


def prepare(folder: Path, name: str, scheme: str, layers: int | None) -> None:
    """Write a model with random integers."""
    plain = describe(name, layers)
    before, parameters = count_bytes(plain), sum(p.numel() for p in plain.parameters())
    model = quantize_(plain, scheme)
    tensors = persistent_tensors(model)
    linears = sum(t.numel() for n, t in tensors.items() if n.endswith("packed"))
    scale = 0.02 * 3**0.5 / 127  # gives uniform integers the usual standard deviation

    def sample(key: str) -> Tensor:
        described = tensors[key]
        if key.endswith("packed"):
            return torch.randint(-127, 128, described.shape, dtype=torch.int8).view(described.dtype)
        if key.endswith("scales"):
            kind = torch.float16 if scheme == "int8" else torch.float32
            count = described.numel() // kind.itemsize
            return torch.full((count,), scale, dtype=kind).view(torch.uint8).view(described.shape)
        return torch.ones(described.shape, dtype=described.dtype)

    begin, resident = time.perf_counter(), resident_bytes()
    after = write_packed(model, sample, folder / f"{name}-{scheme}")
    seconds, peak = time.perf_counter() - begin, peak_resident_bytes() - resident
    print(
        f"{name}, {scheme}: {parameters / 1e9:.2f}B parameters, {linears / parameters:.2%} in "
        f"packed layers; {before / 1e9:.2f} GB in 16 bits, {after / 1e9:.2f} packed; "
        f"written in {seconds:.0f} s with {peak / MIB:.0f} MiB"
    )


def read_directly(path: Path, most: int) -> float:
    """Return the speed of a direct read of the first `most` bytes of a file, in bytes per second.

    The threads of the engine's reader read the file past the page cache.
    """
    size = min(path.stat().st_size // CHUNK * CHUNK, most)
    descriptor, local = DirectReader().open(path), threading.local()

    def read(start: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, CHUNK)
        assert os.preadv(descriptor, [local.buffer], start) == CHUNK

    begin = time.perf_counter()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read, range(0, size, CHUNK)))
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    return size / seconds


class Counter:
    """Counts the bytes of direct reads, and of the experts that computed.

    Attributes:
        bytes: bytes read from files.
        used: bytes of the weights of experts that computed.
    """

    def __init__(self) -> None:
        self.bytes, self.used, counter = 0, 0, self
        inner, work = DirectReader.read_into, ExpertStreamer._work

        def read_into(self: DirectReader, descriptor: int, target: memoryview, offset: int) -> None:
            inner(self, descriptor, target, offset)
            counter.bytes += len(target)

        def run(self: ExpertStreamer, key: Any, x: Tensor) -> Tensor:
            counter.used += sum(t.nbytes for t in self._layers[key.layer].one.module.parameters())
            return work(self, key, x)

        DirectReader.read_into = read_into  # type: ignore[method-assign]
        ExpertStreamer._work = run  # type: ignore[method-assign]


def write_tokens(engine: Engine, counter: Counter, count: int) -> tuple[float, float, float]:
    """Return the mean seconds, bytes read and bytes of experts of the tokens after the first."""
    marks: list[tuple[float, int, int]] = []
    engine.generate(
        torch.arange(10, 10 + PROMPT)[None],
        max_new_tokens=count + 1,
        eos_token_id=(),
        # A high temperature: repeated tokens would need the same experts again.
        do_sample=True,
        temperature=100.0,
        on_token=lambda _: marks.append((time.perf_counter(), counter.bytes, counter.used)),
    )
    seconds, read, used = ((b - a) / count for a, b in zip(marks[0], marks[-1], strict=True))
    return seconds, read, used


def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the row of bmforge."""
    path = folder / f"{options.model}-{options.scheme}"
    files = sorted(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    file, size = files[-1], sum(file.stat().st_size for file in files)
    budget, counter = int(options.gib * GIB), Counter()
    group = limit_memory(int(ALLOWANCE * budget))
    begin = time.perf_counter()
    config = EngineConfig(max_tokens=TOKENS, stream_experts=options.model == "experts")
    with Engine(path, device_budget_bytes=budget, config=config) as engine:
        opened = time.perf_counter() - begin
        print(engine.plan.line(), flush=True)
        write_tokens(engine, counter, 1)
        tokens, disk = [], []
        for _ in range(options.rounds):
            disk.append(read_directly(file, options.plain_gib * GIB))
            tokens.append(write_tokens(engine, counter, options.tokens))
        peak = group.peak_bytes()
        resident = _describe_resident(engine)
    group.leave()
    seconds, read, used = (statistics.median(part) for part in zip(*tokens, strict=True))
    # Seconds per byte of both sides.
    times = {
        "streaming": [own[0] / own[1] for own in tokens],
        "direct read": [1 / speed for speed in disk],
    }
    print(f"{path.name}: {used / 1e9:.3f} GB of experts computed a token", flush=True)
    return [
        path.name,
        f"{size / 1e9:.2f}",
        resident,
        f"{opened:.0f}",
        f"{read / 1e9:.3f}",
        f"{1 / seconds:.3f}",
        f"{statistics.median(disk) / read:.3f}",
        f"{paired_ratio(times, 'streaming', 'direct read'):.2f}",
        f"{peak / GIB:.2f}",
        group.kind,
    ]


def _describe_resident(engine: Engine) -> str:
    """Return the number of blocks, or of experts, that stay in memory."""
    streamer = next(iter(engine._streamers), None)
    if isinstance(streamer, ExpertStreamer):
        layers = find_experts(engine.model)
        total = sum(next(module.parameters()).shape[0] for _, module in layers)
        return f"{streamer.num_slots} experts of {total}"
    plan = engine.plan
    return f"{len(plan.resident)} blocks of {len(plan.resident + plan.on_disk)}"


def _leave_cache(path: Path) -> None:
    """Drop a file from the page cache, which is charged to the group that read it first."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_peer(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the row of llama.cpp, which is started in its own control group."""
    path = folder / f"{options.model}-{options.scheme}.gguf"
    _leave_cache(path)
    group = limit_memory(int(ALLOWANCE * options.gib * GIB))
    begin = time.perf_counter()
    peer = Peer(options.peer, "llama", str(path), str(torch.get_num_threads()), "1")
    opened = time.perf_counter() - begin
    peer.ask(f"decode {PROMPT} 1")
    tokens_s = []
    for _ in range(options.rounds):
        tokens_s.append(peer.ask(f"decode {PROMPT} {options.tokens}")[0] / options.tokens)
    peak = group.peak_bytes()
    peer.close()
    group.leave()
    size, rate = path.stat().st_size, f"{1 / statistics.median(tokens_s):.3f}"
    cells = [f"llama.cpp, {path.name}", f"{size / 1e9:.2f}", "", f"{opened:.0f}", "", rate]
    return [*cells, "", "", f"{peak / GIB:.2f}", group.kind]


def main() -> None:
    """Prepare a model, or measure."""
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=["prepare", "gguf", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--scheme", choices=["int8", "int8-dynamic"], default="int8")
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--plain-gib", type=int, default=2)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--peer")
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(options.folder, options.model, options.scheme, options.layers)
        return
    if options.action == "gguf":
        path = options.folder / f"{options.model}-{options.scheme}"
        export_gguf(path, path.with_suffix(".gguf"), "q8_0")
        return
    print(header(torch.get_num_threads(), ("torch",)))
    rows = [run(options.folder, options)]
    if options.peer:
        rows.append(run_peer(options.folder, options))
    titles = ["model", "GB", "in memory", "loading, s", "GB read per token", "tokens/s"]
    more = ["bound, tokens/s", "speed, streaming / direct read", "peak, GiB", "measured by"]
    print(table([*titles, *more], rows))


if __name__ == "__main__":
    main()
