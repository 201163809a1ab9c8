"""Decoding and prefill of one request against llama.cpp and CTranslate2, on the same weights.

    python benchmarks/decode.py prepare FOLDER
    python benchmarks/decode.py run FOLDER --peer PYTHON [--only q8_0] [--threads 1 2] [--rounds 5]

`prepare` writes a model of TinyLlama's shape and a GPT-2 small, drawn at random, as GGUF files that
both sides open. PYTHON is an interpreter with llama-cpp-python and ctranslate2. Every round times
one side and then the other; ratios are medians over rounds of theirs / ours in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_peer import IDS
from harness import header, paired_ratio, table

from bmforge.infer.decoder import Decoder
from bmforge.models import GPT2, AutoModel, GPT2Config, Llama, LlamaConfig
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.pack import find_targets, quantize_
from bmforge.native import load_native
from bmforge.nn.products import load_kernels
from bmforge.surgery import persistent_tensors

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_layers": 22,
    "num_heads": 32,
    "num_kv_heads": 4,
    "max_seq_len": 2048,
}
CASES = {
    "q4_0": "llama-q4_0.gguf",
    "q8_0": "llama-q8_0.gguf",
    "f16": "llama-f16.gguf",
    "gpt2": "gpt2-q8_0.gguf",
}
PROMPT = 32
READ = r"""
#include <cstdint>
extern "C" int64_t read_ahead(const int64_t* from, int64_t count, int threads) {
  int64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
  for (int64_t i = 0; i < count; i += 8) {
    __builtin_prefetch(from + i + 256);
    for (int64_t j = i; j < i + 8; j++) sum += from[j];
  }
  return sum;
}
"""


def prepare(folder: Path) -> None:
    """Write the models."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama.from_config(LlamaConfig(**SHAPE), dtype=torch.float16)
    for kind in ("q4_0", "q8_0", "f16"):
        export_gguf(llama, folder / f"llama-{kind}.gguf", kind, overwrite=True)
    gpt2 = GPT2.from_config(GPT2Config.preset("gpt2-small"))
    export_gguf(gpt2, folder / "gpt2-q8_0.gguf", "q8_0", overwrite=True)
    pack(folder)


def pack(folder: Path) -> None:
    """Write what the quantised files hold as packed models of ours: the same integers."""
    for name in ("llama-q8_0", "gpt2-q8_0"):
        quantize_(AutoModel.from_pretrained(folder / f"{name}.gguf"), "int8").save_pretrained(
            folder / name
        )
    model = AutoModel.from_pretrained(folder / "llama-q4_0.gguf")
    rules = [name for name in find_targets(model) if name != "lm_head"]
    quantize_(model, "int4", where=rules)
    quantize_(model, "int8", where=["lm_head"])  # as in the file
    model.save_pretrained(folder / "llama-q4_0")


class Ours:
    """A model of ours, opened from the file."""

    def __init__(self, path: Path) -> None:
        if "f16" in path.name:
            self.model: Any = AutoModel.from_pretrained(path, dtype=torch.float16).eval()
        else:
            self.model = AutoModel.from_pretrained(path.with_suffix("")).eval()
        self.bytes = sum(t.nbytes for n, t in persistent_tensors(self.model).items())
        embed = {n: t for n, t in persistent_tensors(self.model).items() if n.startswith("embed")}
        if not self.model.config.tie_word_embeddings:
            self.bytes -= sum(t.nbytes for t in embed.values())  # one row of it is read

    @torch.no_grad()
    def decode(self, count: int, native: bool = True) -> float:
        """Return the seconds of so many tokens after a prompt."""
        ids = torch.tensor([IDS[: PROMPT + count]])
        decoder = Decoder(self.model, None, PROMPT + count)
        if not native:
            decoder.cache.step = None
        decoder.run(ids[:, :PROMPT])
        start = time.perf_counter()
        for n in range(PROMPT, PROMPT + count):
            decoder.run(ids[:, n : n + 1])
        return time.perf_counter() - start

    @torch.no_grad()
    def prefill(self, count: int) -> float:
        """Return the seconds until the scores after a prompt."""
        decoder, ids = Decoder(self.model, None, count), torch.tensor([IDS[:count]])
        start = time.perf_counter()
        decoder.run(ids)
        return time.perf_counter() - start


class Peer:
    """A peer in an interpreter of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("decode_peer.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, *words: object) -> float:
        """Return the seconds that it says."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def read_speed(threads: int) -> float:
    """Return bytes a second of a plain read of 512 MiB, the median of some."""
    library, memory = load_native("read", READ), torch.ones(512 << 17, dtype=torch.int64)
    assert library is not None
    library.read_ahead.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    found = []
    for _ in range(5):
        start = time.perf_counter()
        library.read_ahead(memory.data_ptr(), memory.numel(), threads)
        found.append(memory.nbytes / (time.perf_counter() - start))
    return statistics.median(found)


def compare(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, str]:
    """Return median seconds of both, and the ratio with its interval."""
    ours(), theirs()
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        found[0].append(ours())
        found[1].append(theirs())
    ratio, low, high = paired_ratio(*found)
    medians = [statistics.median(part) for part in found]
    return medians[0], medians[1], f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def run_case(name: str, options: argparse.Namespace) -> None:
    """Print the rows of one file."""
    path = options.folder / CASES[name]
    ours = Ours(path)
    count = options.tokens
    for threads in options.threads:
        torch.set_num_threads(threads)
        peer = Peer(options.peer, "llama", str(path), str(threads), str(options.flash))
        mine, other, ratio = compare(
            lambda: ours.decode(count),
            lambda peer=peer: peer.ask("decode", PROMPT, count),  # type: ignore[misc]
            options.rounds,
        )
        share = ours.bytes * count / mine / read_speed(threads)
        torch_way = statistics.median(ours.decode(8, native=False) for _ in range(3)) / 8
        cells = [name, threads, f"{count / mine:.1f}", f"{count / other:.1f}", ratio]
        print(table_row([*cells, f"{share:.2f}", f"{torch_way * count / mine:.2f}"]), flush=True)
        if options.prefill:
            mine, other, ratio = compare(
                lambda: ours.prefill(512),
                lambda peer=peer: peer.ask("prefill", 512),  # type: ignore[misc]
                options.rounds,
            )
            cells = [f"{name}, prefill 512", threads, f"{512 / mine:.1f}", f"{512 / other:.1f}"]
            print(table_row([*cells, ratio, "", ""]), flush=True)
        peer.close()


def table_row(cells: list[Any]) -> str:
    """Return a line of a markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["prepare", "pack", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--only", nargs="+", default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--flash", type=int, default=1)
    parser.add_argument("--prefill", action="store_true")
    options = parser.parse_args()
    if options.what != "run":
        {"prepare": prepare, "pack": pack}[options.what](options.folder)
        return
    kernels = load_kernels()
    print(header(" ".join(["python", *sys.argv]), max(options.threads), ("torch",)))
    print(f"- kernels: {kernels.name if kernels else 'none'}\n")
    columns = ["weights", "threads", "ours, tokens/s", "theirs", "ours / theirs", "of a read"]
    print(table([*columns, "of torch's way"], []))
    for name in options.only:
        run_case(name, options)


if __name__ == "__main__":
    main()
