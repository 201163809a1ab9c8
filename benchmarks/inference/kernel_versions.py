"""Speed of products of a few tokens with unquantized weights, with the kernels of two commits.

    python -m benchmarks.inference.kernel_versions COMMIT [--threads 1] [--rounds 5]

Prints the GB of weights per second with the kernels of COMMIT and of this checkout, medians over
rounds that alternate, and the ratio of the speeds. The weights are in no cache; 16 tokens pass over
the weights several times and use two copies. The results must be bit-identical.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import header, make_parser, paired_ratio, table, time_in_turns
from benchmarks.inference.quantized_matmul import COLD_BYTES, Run
from bmforge.native import load_kernels_of
from bmforge.nn import product_kernels
from bmforge.nn.products import Kernels, load_kernels

SIZES = ((2048, 5632), (4096, 11008), (2048, 4096), (5632, 2048))
TOKENS = (1, 4, 16)


class Before:
    """`multiply_rows` with the kernels of another commit.

    Args:
        commit: commit of the kernels.
        variant: instruction set, a name of `product_kernels._VARIANTS`.
    """

    def __init__(self, commit: str, variant: str) -> None:
        folder = Path(product_kernels.__file__).with_name("kernels")
        parts = product_kernels._SOURCES
        with tempfile.TemporaryDirectory() as place:
            for part in parts:
                shown = ["git", "show", f"{commit}:./{part}"]
                text = subprocess.run(shown, check=True, capture_output=True, cwd=folder).stdout
                Path(place, part).write_bytes(text)
            flags = product_kernels._VARIANTS[variant][0]
            library = load_kernels_of(f"before-{variant}", Path(place), parts, flags)
        assert library is not None
        self._rows = library.multiply_rows

    multiply_rows = Kernels.multiply_rows


def multiply_all(kernels: Any, x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Multiply tokens with all weights."""
    for weight in weights:
        kernels.multiply_rows(x, weight)


def compare(rows: int, columns: int, dtype: torch.dtype, before: Before, rounds: int) -> list[str]:
    """Return the row of a shape: the rates and the ratio for every number of tokens."""
    now = load_kernels()
    assert now is not None
    weight = (torch.randn(rows, columns) * 0.02).to(dtype)
    copies = [weight.clone() for _ in range(-(-COLD_BYTES // weight.nbytes))]
    cells = [f"{rows} x {columns}", str(dtype).removeprefix("torch.")]
    for tokens in TOKENS:
        x, some = torch.randn(tokens, columns), copies if tokens < 16 else copies[:2]
        assert torch.equal(before.multiply_rows(x, weight), now.multiply_rows(x, weight))
        runs: dict[str, Run] = {
            name: partial(multiply_all, kernels, x, some)
            for name, kernels in (("before", before), ("now", now))
        }
        times = time_in_turns(runs, rounds)
        for seconds in times.values():
            cells.append(f"{len(some) * weight.nbytes / statistics.median(seconds) / 1e9:.1f}")
        cells.append(f"{paired_ratio(times, 'now', 'before'):.2f}")
    return cells


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("commit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load_kernels()
    assert kernels is not None
    print(header(options.threads, ("torch",)), flush=True)
    before = Before(options.commit, kernels.name)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    rows = [compare(*size, dtype, before, options.rounds) for size in SIZES for dtype in dtypes]
    sides = ("before, GB/s", "now, GB/s", "speed, now / before")
    titles = [f"{tokens} tokens: {side}" for tokens in TOKENS for side in sides]
    print(table(["weights", "dtype", *titles], rows))


if __name__ == "__main__":
    main()
