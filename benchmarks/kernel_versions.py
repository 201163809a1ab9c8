"""A few tokens times plain weights, by the kernels of another commit and by those that are here.

    python benchmarks/kernel_versions.py COMMIT [--threads 1] [--rounds 5]

Weights are in no cache; with 16 tokens, which pass them several times, two copies take turns. The
results of both are compared to the bit. The table has GB of weights a second, medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402
from quantized_products import COLD_BYTES, Run, in_turns  # noqa: E402

from bmforge.native import load_kernels_of  # noqa: E402
from bmforge.nn import product_kernels  # noqa: E402
from bmforge.nn.products import Kernels, load_kernels  # noqa: E402

SIZES = ((2048, 5632), (4096, 11008), (2048, 4096), (5632, 2048))
TOKENS = (1, 4, 16)


class Before:
    """`multiply_rows` as a commit had it: compiled without what was measured since."""

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
    """Multiply tokens by all weights."""
    for weight in weights:
        kernels.multiply_rows(x, weight)


def compare(rows: int, columns: int, dtype: torch.dtype, before: Before, rounds: int) -> list[str]:
    """Return a row of the table: GB a second of both for every number of tokens."""
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
        for seconds in in_turns(runs, rounds).values():
            cells.append(f"{len(some) * weight.nbytes / statistics.median(seconds) / 1e9:.1f}")
    return cells


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernels = load_kernels()
    assert kernels is not None
    print(header(" ".join(["python", *sys.argv]), given.threads, ("torch",)), flush=True)
    before = Before(given.commit, kernels.name)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    found = [compare(*size, dtype, before, given.rounds) for size in SIZES for dtype in dtypes]
    titles = [f"{n} at once, {side}" for n in TOKENS for side in ("before", "now")]
    print(table(["weights", "dtype", *titles], found))


if __name__ == "__main__":
    main()
