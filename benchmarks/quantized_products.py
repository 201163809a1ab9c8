"""Products of packed weights against plain reads of memory, torch's packed ops and fp32.

    python benchmarks/quantized_products.py [--threads 1 2] [--rounds 9]

One token is multiplied with weights that are in no cache: as many copies as fill 200 MB take turns.
All contenders of a row run once in every round; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import header

from bmforge.device import fast_products
from bmforge.native import load_native
from bmforge.nn.packing import PRESETS, PackedMatrix, QuantSpec, pack_matrix, quantize_groups
from bmforge.nn.products import Kernels, load_variant, runnable_variants

ROWS, COLUMNS, TOKENS, GROUP = 5632, 2048, 512, 32
COLD_BYTES = 192 << 20
READ = r"""
#include <cstdint>
extern "C" int64_t read_all(const int64_t* from, int64_t count, int threads) {
  int64_t sum = 0;
#pragma omp parallel for simd num_threads(threads) reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += from[i];
  return sum;
}
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
Run = Callable[[], Any]


def time_once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(contenders: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of every contender; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            seconds = time_once(run)
            if number:
                found[name].append(seconds)
    return found


def size_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def copies_of(tensors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    count = -(-COLD_BYTES // size_of(tensors))
    return [tuple(None if t is None else t.clone() for t in tensors) for _ in range(count)]


def cold(multiply: Callable[..., Any], tensors: tuple[Any, ...]) -> tuple[Run, int]:
    """Return a product with each of many copies, and the bytes that it reads."""
    copies = copies_of(tensors)

    def run() -> None:
        for one in copies:
            multiply(*one)

    return run, len(copies) * size_of(tensors)


def packed(dense: torch.Tensor, spec: QuantSpec) -> PackedMatrix:
    return pack_matrix(quantize_groups(dense, spec), spec)


def one_token(kernels: list[Kernels], dense: torch.Tensor, threads: int) -> dict[str, Any]:
    """Return name -> (run, bytes) of the products of one token, and of the read."""
    library = load_native("read", READ)
    assert library is not None
    plain = torch.ones(COLD_BYTES // 8, dtype=torch.int64)
    place, count = ctypes.c_void_p(plain.data_ptr()), ctypes.c_int64(plain.numel())
    found: dict[str, Any] = {
        "read": (lambda: library.read_all(place, count, threads), COLD_BYTES, plain),
        "read, asking ahead": (lambda: library.read_ahead(place, count, threads), COLD_BYTES),
    }
    x = torch.randn(1, COLUMNS)
    half = x.bfloat16()
    for scheme, spec in PRESETS.items():
        matrix = packed(dense, spec)
        for one in kernels:

            def multiply(*tensors: Any, one: Kernels = one, spec: QuantSpec = spec) -> None:
                one.multiply(x, PackedMatrix(*tensors), ROWS, spec, None)

            found[f"{scheme} {one.name}"] = cold(multiply, matrix)
    values = quantize_groups(dense, PRESETS["int8-dynamic"]).values
    scales = torch.ones(ROWS, dtype=torch.bfloat16)
    found["torch int8 (bf16)"] = cold(
        lambda w, s: torch._weight_int8pack_mm(half, w, s), (values, scales)
    )
    nibbles = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.int32)
    weight = torch._convert_weight_to_int4pack_for_cpu(nibbles, 2)
    both = torch.ones(COLUMNS // GROUP, ROWS, 2, dtype=torch.bfloat16)
    found["torch int4 (bf16)"] = cold(
        lambda w, s: torch._weight_int4pack_mm_for_cpu(half, w, GROUP, s), (weight, both)
    )
    return found


def many_tokens(kernels: list[Kernels], dense: torch.Tensor) -> dict[str, Run]:
    x = torch.randn(TOKENS, COLUMNS)

    def fast() -> None:
        with fast_products():
            F.linear(x, dense)

    found: dict[str, Run] = {
        "fp32 linear": lambda: F.linear(x, dense),
        "fp32 linear, oneDNN": fast,
    }
    values = quantize_groups(dense, PRESETS["int8-dynamic"]).values.t()
    of_x = torch.randint(-127, 128, (TOKENS, COLUMNS), dtype=torch.int8)
    found["torch._int_mm alone"] = lambda: torch._int_mm(of_x, values)
    for scheme, spec in PRESETS.items():
        matrix = packed(dense, spec)
        for one in kernels:
            found[f"{scheme} {one.name}"] = lambda one=one, matrix=matrix, spec=spec: one.multiply(
                x, matrix, ROWS, spec, None
            )
    return found


def median_ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(of, to, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.manual_seed(0)
    dense = torch.randn(ROWS, COLUMNS) * 0.02
    found = [load_variant(name) for name in runnable_variants() if name != "plain"]
    kernels = [one for one in found if one is not None]
    command = "python benchmarks/quantized_products.py"
    print(header(command, max(given.threads), ("torch",)))
    print(f"variants here: {', '.join(runnable_variants())}")
    for threads in given.threads:
        torch.set_num_threads(threads)
        runs = one_token(kernels, dense, threads)
        times = in_turns({name: entry[0] for name, entry in runs.items()}, given.rounds)
        rates = {n: [runs[n][1] / s for s in seconds] for n, seconds in times.items()}
        print(f"\n{threads} thread(s), one token, {ROWS} x {COLUMNS}, out of cache")
        print("| product | GB/s | share of the faster read |\n|---|---|---|")
        base = max(list(rates)[:2], key=lambda name: statistics.median(rates[name]))
        for name, rate in rates.items():
            share = median_ratio(rates[base], rate)
            print(f"| {name} | {statistics.median(rate) / 1e9:.1f} | {share:.2f} |")
        del runs
        lines = in_turns(many_tokens(kernels, dense), given.rounds)
        work = 2 * TOKENS * ROWS * COLUMNS / 1e9
        print(f"\n{threads} thread(s), {TOKENS} tokens")
        print("| product | GOP/s | of fp32 linear | of it by oneDNN |\n|---|---|---|---|")
        for name, seconds in lines.items():
            ratios = [median_ratio(seconds, lines[base]) for base in list(lines)[:2]]
            rate = work / statistics.median(seconds)
            print(f"| {name} | {rate:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
