"""Memory and speed of offloading: optimizer states on disk, streamed weights, the AdamW kernel.

    python -m benchmarks.training.offload states|weights|kernel [--directory DIR]

- states: a GPT-2 with 63 million parameters trains with its optimizer states on disk. The limit of
  the process's data (RLIMIT_DATA) is the peak without optimizer states plus a quarter of them.
- weights: a Llama with 1e9 frozen parameters (4.1 GB) runs forward and backward under a limit of a
  quarter of its weights. The bytes read per second are compared with a sequential read of the same
  file; the page cache is dropped before both.
- kernel: one-pass AdamW with bf16 gradients and weights, compared with torch's fused AdamW and two
  casts.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import (
    header,
    make_parser,
    paired_ratio,
    rerun_command,
    table,
    time_in_turns,
)
from bmforge.host_memory import resident_bytes
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import (
    GPT2,
    GPT2Config,
    Llama,
    LlamaConfig,
    load_weights_,
    weight_reader,
)
from bmforge.parallel import OffloadConfig
from bmforge.train import OptimConfig, build_optimizers, clip_grad_norm_
from bmforge.train.offload.states import StateOffload
from bmforge.train.optim.adam_kernel import AdamKernel, load_adam_kernel, step_plain

MIB = 1 << 20
GPT = GPT2Config(vocab_size=8192, hidden_size=768, num_layers=8, num_heads=12, max_seq_len=128)
LLAMA = LlamaConfig(
    vocab_size=1000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=20,
    num_heads=16,
    num_kv_heads=16,
    max_seq_len=64,
)


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def limit_data(more_bytes: int) -> None:
    """Limit the data of this process to its present size plus `more_bytes`."""
    most = status_bytes("VmData") + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def train_gpt(mode: str, limit_bytes: int, directory: str) -> dict[str, Any]:
    """Train for four steps.

    Args:
        mode: "none" (no optimizer), "plain" or "disk".
        limit_bytes: limit of additional data in bytes; 0 for none.
        directory: directory of the states on disk.
    """
    base = resident_bytes()
    if limit_bytes:
        limit_data(limit_bytes)
    model = GPT2.from_config(GPT, seed=0)
    optimizers, state_offload = [], None
    if mode == "plain":
        optimizers = build_optimizers(model, OptimConfig())
    if mode == "disk":
        offload = OffloadConfig(1.0, target="disk", directory=Path(directory))
        optimizers = build_optimizers(model, OptimConfig(), offloaded=True)
        state_offload = StateOffload(model, optimizers, offload)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(4):
        ids = torch.randint(0, GPT.vocab_size, (2, 128), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    if state_offload is not None:
        state_offload.wait()
    count = sum(p.numel() for p in model.parameters())
    return {"losses": losses, "peak": status_bytes("VmHWM") - base, "parameters": count}


def drop_cache(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path) -> float:
    """Return the seconds of a sequential read of a file that is not in the page cache."""
    drop_cache(path)
    buffer = memoryview(bytearray(4 * MIB))
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def save_llama(directory: str) -> None:
    """Write a checkpoint of repeated random numbers, because sampling 1e9 takes long."""
    model = Llama.from_config(LLAMA, device="meta").to_empty(device="cpu")
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), numbers.numel()):
                part = flat[start : start + numbers.numel()]
                part.copy_(numbers[: part.numel()])
    model.save_pretrained(directory)


def run_llama(mode: str, limit_bytes: int, directory: str) -> dict[str, Any]:
    """Run forward and backward on a few tokens.

    Args:
        mode: "plain" or "streamed".
        limit_bytes: limit of additional data in bytes; 0 for none.
        directory: directory of the checkpoint.
    """
    base, files = resident_bytes(), sorted(Path(directory).glob("*.safetensors"))
    if limit_bytes:
        limit_data(limit_bytes)
    if mode == "plain":
        model = Llama.from_pretrained(directory)
        read = None
    else:
        model = Llama.from_config(LLAMA, device="meta")
        reader = weight_reader(model, directory)
        streamer = stream_blocks_(model, reader, device=torch.device("cpu"))
        load_weights_(model, directory)
        read = streamer.blocks
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("layers."))
    ids = torch.arange(4)[None]
    times = []

    def timed(function: Callable[[], Any]) -> Any:
        for file in files:
            drop_cache(file)
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
        return result

    loss = timed(lambda: model(input_ids=ids, labels=ids).loss)
    timed(loss.backward)
    read_bytes = 0 if read is None else sum(block.size_bytes for block in read)
    gradients = {
        n: p.grad.double().norm().item() for n, p in model.named_parameters() if p.grad is not None
    }
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "peak": status_bytes("VmHWM") - base,
        "forward_s": times[0],
        "backward_s": times[1],
        "forward_bytes": read_bytes,
        # Two blocks are still in memory when the backward pass begins.
        "backward_bytes": read_bytes * (LLAMA.num_layers - 2) // LLAMA.num_layers,
    }


def in_a_child(task: str, *arguments: Any) -> dict[str, Any]:
    """Run one of the functions above in a new process; return its result."""
    command = rerun_command("child", json.dumps([task, *arguments]))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def show_states(directory: str) -> None:
    """Print the memory and the losses with optimizer states in memory and on disk."""
    none = in_a_child("train_gpt", "none", 0, directory)
    plain = in_a_child("train_gpt", "plain", 0, directory)
    states = 8 * none["parameters"]
    limit = none["peak"] + states // 4
    disk = in_a_child("train_gpt", "disk", limit, directory)
    rows = [
        ["no optimizer", f"{none['peak'] / MIB:.0f}", "", ""],
        ["AdamW, states in memory", f"{plain['peak'] / MIB:.0f}", "", f"{plain['losses'][-1]:.6f}"],
        [
            "AdamW, states on disk",
            f"{disk['peak'] / MIB:.0f}",
            f"{limit / MIB:.0f}",
            f"{disk['losses'][-1]:.6f}",
        ],
    ]
    print(f"\n{none['parameters'] / 1e6:.1f} million parameters, states {states / MIB:.0f} MiB\n")
    print(table(["run", "peak above imports, MiB", "limit, MiB", "loss of step 4"], rows))
    print(f"\n- losses equal: {disk['losses'] == plain['losses']}")
    print(f"- within the limit: {disk['peak'] <= limit}")


def show_weights(directory: str) -> None:
    """Print the memory and the speed of streamed weights."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        in_a_child("save_llama", folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        plain = in_a_child("run_llama", "plain", 0, folder)
        # Seconds per byte of each side and round.
        seconds: dict[str, list[float]] = {"forward": [], "backward": [], "sequential read": []}
        for _ in range(3):
            seconds["sequential read"].append(sum(read_through(file) for file in files) / size)
            streamed = in_a_child("run_llama", "streamed", size // 4, folder)
            for way in ("forward", "backward"):
                seconds[way].append(streamed[f"{way}_s"] / streamed[f"{way}_bytes"])
    print(f"\nweights {size / 1e9:.2f} GB, limit {size / 4 / MIB:.0f} MiB\n")
    peaks = [run["peak"] / MIB for run in (streamed, plain)]
    print(f"- peak above imports: {peaks[0]:.0f} MiB (all in memory: {peaks[1]:.0f})")
    print(f"- loss equal: {streamed['loss'] == plain['loss']} ({streamed['loss']:.6f})")
    print(f"- norms of gradients equal: {streamed['gradients'] == plain['gradients']}")
    print(f"- sequential read: {1e-6 / statistics.median(seconds['sequential read']):.0f} MB/s")
    for way in ("forward", "backward"):
        print(f"- {paired_ratio(seconds, way, 'sequential read')}, target 0.8")


def time_kernel(kernel: AdamKernel, count: int) -> dict[str, list[float]]:
    """Return the seconds of AdamW on `count` weights with the kernel and with torch."""
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    weights, mean, square = torch.randn(count), torch.zeros(count), torch.zeros(count)
    gradient, narrow = torch.randn(count).bfloat16(), torch.empty(count, dtype=torch.bfloat16)
    wide, numbers = torch.empty(count), itertools.count(1)

    def step_kernel() -> None:
        number = float(next(numbers))
        kernel.step(weights, gradient, mean, square, group, number, narrow=narrow)

    def step_torch() -> None:
        wide.copy_(gradient)
        step_plain(weights, wide, mean, square, group, float(next(numbers)))
        narrow.copy_(weights)

    return time_in_turns({"kernel": step_kernel, "torch": step_torch}, 21)


def show_kernel() -> None:
    """Print the speed of the AdamW kernel."""
    torch.set_num_threads(1)
    kernel = load_adam_kernel()
    if kernel is None:
        print("no kernel: there is no compiler, or its results differ from torch's")
        return
    rows = []
    for count in (1 << 20, 1 << 24):
        ratio = paired_ratio(time_kernel(kernel, count), "kernel", "torch")
        rows.append([f"{count:,}", f"{ratio:.2f}", "1.5"])
    print("\n" + table(["elements", "speed, kernel / torch", "target"], rows))


def main() -> None:
    """Run one part."""
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=["states", "weights", "kernel", "child"])
    parser.add_argument("task", nargs="?")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    options = parser.parse_args()
    if options.part == "child":
        name, *arguments = json.loads(options.task)
        print(json.dumps(globals()[name](*arguments)))
        return
    print("# Offloading\n")
    print(header(torch.get_num_threads(), ["torch"]))
    if options.part == "kernel":
        show_kernel()
    else:
        {"states": show_states, "weights": show_weights}[options.part](options.directory)


if __name__ == "__main__":
    main()
