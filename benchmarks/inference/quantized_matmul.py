"""Speed of matrix products with packed weights compared with memory reads, torch's ops and fp32.

    python -m benchmarks.inference.quantized_matmul [--threads 1 2] [--rounds 9]

The first table has the products of one token with weights that are in no cache: copies with a total
of 192 MiB are multiplied one after the other. Their rate in GB of weights per second is compared
with a plain read. The second table has the products of 512 tokens, compared with fp32. All rows of
a table are measured once per round.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import header, make_parser, paired_ratio, table, time_in_turns
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


def size_of(tensors: Any) -> int:
    """Return the bytes of tensors; None counts as empty."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def copies_of(tensors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return as many copies of tensors as exceed the caches."""
    count = -(-COLD_BYTES // size_of(tensors))
    return [tuple(None if t is None else t.clone() for t in tensors) for _ in range(count)]


def cold(multiply: Callable[..., Any], tensors: tuple[Any, ...]) -> tuple[Run, int]:
    """Return a function that multiplies with many copies of the weights, and the bytes it reads."""
    copies = copies_of(tensors)

    def run() -> None:
        for weights in copies:
            multiply(*weights)

    return run, len(copies) * size_of(tensors)


def packed(dense: torch.Tensor, spec: QuantSpec) -> PackedMatrix:
    """Quantize and pack a matrix."""
    return pack_matrix(quantize_groups(dense, spec), spec)


def one_token(kernels: list[Kernels], dense: torch.Tensor, threads: int) -> dict[str, Any]:
    """Return the products of one token and the reads: name -> (function, bytes)."""
    library = load_native("read", READ)
    assert library is not None
    plain = torch.ones(COLD_BYTES // 8, dtype=torch.int64)
    pointer, count = ctypes.c_void_p(plain.data_ptr()), ctypes.c_int64(plain.numel())
    runs: dict[str, Any] = {
        "read": (lambda: library.read_all(pointer, count, threads), COLD_BYTES, plain),
        "read with prefetching": (lambda: library.read_ahead(pointer, count, threads), COLD_BYTES),
    }
    x = torch.randn(1, COLUMNS)
    half = x.bfloat16()
    for scheme, spec in PRESETS.items():
        matrix = packed(dense, spec)
        for kernel in kernels:

            def multiply(*tensors: Any, kernel: Kernels = kernel, spec: QuantSpec = spec) -> None:
                kernel.multiply(x, PackedMatrix(*tensors), ROWS, spec, None)

            runs[f"{scheme} {kernel.name}"] = cold(multiply, matrix)
    values = quantize_groups(dense, PRESETS["int8-dynamic"]).values
    scales = torch.ones(ROWS, dtype=torch.bfloat16)
    runs["torch int8 (bf16)"] = cold(
        lambda w, s: torch._weight_int8pack_mm(half, w, s), (values, scales)
    )
    nibbles = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.int32)
    weight = torch._convert_weight_to_int4pack_for_cpu(nibbles, 2)
    both = torch.ones(COLUMNS // GROUP, ROWS, 2, dtype=torch.bfloat16)
    runs["torch int4 (bf16)"] = cold(
        lambda w, s: torch._weight_int4pack_mm_for_cpu(half, w, GROUP, s), (weight, both)
    )
    return runs


def many_tokens(kernels: list[Kernels], dense: torch.Tensor) -> dict[str, Run]:
    """Return the products of 512 tokens by name."""
    x = torch.randn(TOKENS, COLUMNS)

    def fast() -> None:
        with fast_products():
            F.linear(x, dense)

    runs: dict[str, Run] = {
        "fp32 linear": lambda: F.linear(x, dense),
        "fp32 linear, oneDNN": fast,
    }
    values = quantize_groups(dense, PRESETS["int8-dynamic"]).values.t()
    of_x = torch.randint(-127, 128, (TOKENS, COLUMNS), dtype=torch.int8)
    runs["torch._int_mm alone"] = lambda: torch._int_mm(of_x, values)
    for scheme, spec in PRESETS.items():
        matrix = packed(dense, spec)
        for kernel in kernels:
            runs[f"{scheme} {kernel.name}"] = lambda kernel=kernel, matrix=matrix, spec=spec: (
                kernel.multiply(x, matrix, ROWS, spec, None)
            )
    return runs


def show_one_token(kernels: list[Kernels], dense: torch.Tensor, threads: int, rounds: int) -> None:
    """Print the rates of the products of one token, compared with the faster read."""
    runs = one_token(kernels, dense, threads)
    times = time_in_turns({name: entry[0] for name, entry in runs.items()}, rounds)
    # Seconds per byte: the copies of different schemes differ in size.
    per_byte = {name: [s / runs[name][1] for s in seconds] for name, seconds in times.items()}
    reference = min(list(runs)[:2], key=lambda name: statistics.median(per_byte[name]))
    print(f"\n{threads} thread(s), one token, {ROWS} x {COLUMNS}, out of cache")
    rows = [
        [
            name,
            f"{1e-9 / statistics.median(seconds):.1f}",
            f"{paired_ratio(per_byte, name, reference):.2f}",
        ]
        for name, seconds in per_byte.items()
    ]
    print(table(["product", "GB/s", f"speed, product / {reference}"], rows))


def show_many_tokens(
    kernels: list[Kernels], dense: torch.Tensor, threads: int, rounds: int
) -> None:
    """Print the rates of the products of 512 tokens, compared with fp32."""
    times = time_in_turns(many_tokens(kernels, dense), rounds)
    references = list(times)[:2]
    billions = 2 * TOKENS * ROWS * COLUMNS / 1e9
    print(f"\n{threads} thread(s), {TOKENS} tokens")
    rows = [
        [
            name,
            f"{billions / statistics.median(seconds):.0f}",
            *(f"{paired_ratio(times, name, reference):.2f}" for reference in references),
        ]
        for name, seconds in times.items()
    ]
    print(table(["product", "GOP/s", *(f"speed, product / {name}" for name in references)], rows))


def main() -> None:
    """Print both tables for each number of threads."""
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    dense = torch.randn(ROWS, COLUMNS) * 0.02
    variants = [load_variant(name) for name in runnable_variants() if name != "plain"]
    kernels = [variant for variant in variants if variant is not None]
    print(header(max(options.threads), ("torch",)))
    print(f"kernel variants: {', '.join(runnable_variants())}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        show_one_token(kernels, dense, threads, options.rounds)
        show_many_tokens(kernels, dense, threads, options.rounds)


if __name__ == "__main__":
    main()
