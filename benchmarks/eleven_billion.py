"""Models in 8 bits under a limit that the kernel enforces: of 11B parameters, and of experts.

    python benchmarks/eleven_billion.py prepare FOLDER --model llama [--scheme int8]
    python benchmarks/eleven_billion.py gguf FOLDER --model llama
    python benchmarks/eleven_billion.py run FOLDER --model llama [--gib 6] [--rounds 3]
        [--peer PYTHON]

`prepare` draws a model directly in the packed form, a tensor at a time. `run` joins a control group
whose limit is the budget and 2 %, and writes; every round also reads the files plainly, past the
page cache, by as many threads. The bound is that speed over the bytes a token has to read. `--model
experts --gib 0.8` is a model of experts four times its budget, of which a token reads some.

PYTHON is an interpreter with llama-cpp-python: it runs the file that `gguf` writes, the same
integers, mapped, in a group of its own with the same limit. `--layers` takes fewer, to try it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from decode import Peer  # noqa: E402
from engine_speed import read_plainly  # noqa: E402
from harness import header, table  # noqa: E402

from bmforge.host_memory import peak_resident_bytes, resident_bytes  # noqa: E402
from bmforge.infer import Engine, EngineConfig  # noqa: E402
from bmforge.memory.direct_read import DirectReads  # noqa: E402
from bmforge.memory.streamed_experts import ExpertStreamer, find_experts  # noqa: E402
from bmforge.models import CPM2, CPM2Config, Llama, LlamaConfig, Mixtral, MixtralConfig  # noqa: E402
from bmforge.models.formats.gguf_export import export_gguf  # noqa: E402
from bmforge.models.quantize import quantize_, write_packed  # noqa: E402
from bmforge.surgery import persistent_tensors  # noqa: E402
from bmforge.testing.limited_engine import ALLOWANCE  # noqa: E402
from bmforge.testing.memory_group import limit_memory  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
# Llama's 7B with 54 blocks for 32, and the published CPM-2.
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LlamaConfig(num_layers=54)),
    "cpm2": (CPM2, CPM2Config.preset("cpm2-2.1")),
    # 3.1B, of which a token uses 0.9.
    "experts": (
        Mixtral,
        MixtralConfig(
            hidden_size=2048, intermediate_size=3584, num_layers=16, num_heads=16, num_kv_heads=4
        ),
    ),
}
PROMPT, TOKENS = 16, 128


def describe(name: str, layers: int | None) -> Any:
    """Return a model on meta in 16 bits."""
    family, config = MODELS[name]
    if layers is not None:
        config = dataclasses.replace(config, num_layers=layers)
    return family.from_config(config, device="meta", dtype=torch.float16)


def count_bytes(model: Any) -> int:
    """Return the bytes of all that is kept."""
    return sum(t.numel() * t.element_size() for t in persistent_tensors(model).values())


def prepare(folder: Path, name: str, scheme: str, layers: int | None) -> None:
    """Write a model whose integers and scales are drawn."""
    plain = describe(name, layers)
    before, parameters = count_bytes(plain), sum(p.numel() for p in plain.parameters())
    model = quantize_(plain, scheme)
    tensors = persistent_tensors(model)
    linears = sum(t.numel() for n, t in tensors.items() if n.endswith("packed"))
    scale = 0.02 * 3**0.5 / 127  # spreads uniform integers as weights are drawn

    def draw(key: str) -> Tensor:
        described = tensors[key]
        if key.endswith("packed"):
            return torch.randint(-127, 128, described.shape, dtype=torch.int8).view(described.dtype)
        if key.endswith("scales"):
            kind = torch.float16 if scheme == "int8" else torch.float32
            count = described.numel() // kind.itemsize
            return torch.full((count,), scale, dtype=kind).view(torch.uint8).view(described.shape)
        return torch.ones(described.shape, dtype=described.dtype)

    begin, stood = time.perf_counter(), resident_bytes()
    after = write_packed(model, draw, folder / f"{name}-{scheme}")
    seconds, peak = time.perf_counter() - begin, peak_resident_bytes() - stood
    print(
        f"{name}, {scheme}: {parameters / 1e9:.2f}B parameters, {linears / parameters:.2%} in "
        f"layers that are packed; {before / 1e9:.2f} GB in 16 bits, {after / 1e9:.2f} packed; "
        f"written in {seconds:.0f} s with {peak / MIB:.0f} MiB"
    )


class Counter:
    """Counts the bytes that are read from files, by everybody, and those of experts that worked."""

    def __init__(self) -> None:
        self.bytes, self.used, counter = 0, 0, self
        inner, work = DirectReads.read_into, ExpertStreamer._work

        def read_into(self: DirectReads, descriptor: int, target: memoryview, offset: int) -> None:
            inner(self, descriptor, target, offset)
            counter.bytes += len(target)

        def run(self: ExpertStreamer, key: Any, x: Tensor) -> Tensor:
            counter.used += sum(t.nbytes for t in self._layers[key.layer].one.module.parameters())
            return work(self, key, x)

        DirectReads.read_into = read_into  # type: ignore[method-assign]
        ExpertStreamer._work = run  # type: ignore[method-assign]


def write_tokens(engine: Engine, counter: Counter, count: int) -> tuple[float, float, float]:
    """Return seconds, bytes read and bytes of experts used, of each token behind the first one."""
    marks: list[tuple[float, int, int]] = []
    engine.generate(
        torch.arange(10, 10 + PROMPT)[None],
        max_new_tokens=count + 1,
        eos_token_id=(),
        # Any token may come: one that repeats itself would want the same experts again.
        do_sample=True,
        temperature=100.0,
        on_token=lambda _: marks.append((time.perf_counter(), counter.bytes, counter.used)),
    )
    seconds, read, used = ((b - a) / count for a, b in zip(marks[0], marks[-1], strict=True))
    return seconds, read, used


def run(folder: Path, chosen: argparse.Namespace) -> list[str]:
    """Return the row of the engine."""
    path = folder / f"{chosen.model}-{chosen.scheme}"
    files = sorted(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    file, size = files[-1], sum(file.stat().st_size for file in files)
    budget, counter = int(chosen.gib * GIB), Counter()
    group = limit_memory(int(ALLOWANCE * budget))
    begin = time.perf_counter()
    config = EngineConfig(max_tokens=TOKENS, stream_experts=chosen.model == "experts")
    with Engine(path, device_budget_bytes=budget, config=config) as engine:
        opened = time.perf_counter() - begin
        print(engine.plan.line(), flush=True)
        write_tokens(engine, counter, 1)
        found, disk = [], []
        for _ in range(chosen.rounds):
            disk.append(read_plainly(file, chosen.plain_gib * GIB))
            found.append(write_tokens(engine, counter, chosen.tokens))
        peak = group.peak_bytes()
        stays = _what_stays(engine)
    group.leave()
    seconds, read, used = (statistics.median(part) for part in zip(*found, strict=True))
    plain = statistics.median(disk)
    shares = [own[1] / own[0] / speed for own, speed in zip(found, disk, strict=True)]
    print(f"{path.name}: {used / 1e9:.3f} GB of experts worked for a token", flush=True)
    return [
        path.name,
        f"{size / 1e9:.2f}",
        stays,
        f"{opened:.0f}",
        f"{read / 1e9:.3f}",
        f"{1 / seconds:.3f}",
        f"{plain / read:.3f}",
        f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
        f"{peak / GIB:.2f}",
        group.kind,
    ]


def _what_stays(engine: Engine) -> str:
    """Say how many blocks, or experts, have room."""
    streamer = next(iter(engine._streamers), None)
    if isinstance(streamer, ExpertStreamer):
        layers = find_experts(engine.model)
        every = sum(next(module.parameters()).shape[0] for _, module in layers)
        return f"{streamer.num_slots} experts of {every}"
    plan = engine.plan
    return f"{len(plan.resident)} blocks of {len(plan.resident + plan.on_disk)}"


def _leave_cache(path: Path) -> None:
    """Have a file out of the page cache, where another group would have paid for it."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_peer(folder: Path, chosen: argparse.Namespace) -> list[str]:
    """Return the row of llama.cpp, whose process is born into a group of its own."""
    path = folder / f"{chosen.model}-{chosen.scheme}.gguf"
    _leave_cache(path)
    group = limit_memory(int(ALLOWANCE * chosen.gib * GIB))
    begin = time.perf_counter()
    peer = Peer(chosen.peer, "llama", str(path), str(torch.get_num_threads()), "1")
    opened = time.perf_counter() - begin
    peer.ask(f"decode {PROMPT} 1")
    found, disk = [], []
    for _ in range(chosen.rounds):
        disk.append(read_plainly(path, chosen.plain_gib * GIB))
        found.append(peer.ask(f"decode {PROMPT} {chosen.tokens}")[0] / chosen.tokens)
    peak = group.peak_bytes()
    peer.close()
    group.leave()
    size, rate = path.stat().st_size, f"{1 / statistics.median(found):.3f}"
    cells = [f"llama.cpp, {path.name}", f"{size / 1e9:.2f}", "", f"{opened:.0f}", "", rate]
    return [*cells, "", "", f"{peak / GIB:.2f}", group.kind]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "gguf", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--scheme", choices=["int8", "int8-dynamic"], default="int8")
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--plain-gib", type=int, default=2)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--peer")
    chosen = parser.parse_args()
    if chosen.what == "prepare":
        prepare(chosen.folder, chosen.model, chosen.scheme, chosen.layers)
        return
    if chosen.what == "gguf":
        path = chosen.folder / f"{chosen.model}-{chosen.scheme}"
        export_gguf(path, path.with_suffix(".gguf"), "q8_0")
        return
    print(header(" ".join(["python", *sys.argv]), torch.get_num_threads(), ("torch",)))
    rows = [run(chosen.folder, chosen)]
    if chosen.peer:
        rows.append(run_peer(chosen.folder, chosen))
    titles = ["model", "GB", "what stays", "opened in, s", "GB read a token", "tokens/s"]
    more = ["bound of the disk", "share", "peak, GiB", "counted by"]
    print(table([*titles, *more], rows))


if __name__ == "__main__":
    main()
