"""Time attention's forward and backward by bmforge's CPU kernel against torch's, in turns.

    python benchmarks/attention.py [--rounds 7]

Tensors lie as projections leave them, (B, T, N * H); the process is asked for what a run asks for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, paired_ratio, table  # noqa: E402

from bmforge.host_tuning import tuned_host  # noqa: E402
from bmforge.nn.host_attention import host_attention, takes_host_attention  # noqa: E402

# rows, heads, shared heads, tokens, width, causal, dropout
SHAPES = (
    (4, 12, 12, 512, 64, True, 0.0),
    (4, 12, 12, 512, 64, False, 0.0),
    (8, 12, 12, 256, 64, True, 0.0),
    (16, 12, 12, 128, 64, False, 0.0),
    (16, 12, 12, 128, 64, False, 0.1),
    (2, 12, 12, 1024, 64, True, 0.0),
    (1, 12, 12, 2048, 64, True, 0.0),
    (4, 16, 4, 512, 64, True, 0.0),
    (2, 32, 8, 512, 128, True, 0.0),
)
DTYPES = (torch.float32, torch.bfloat16)
Mix = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]


def ours(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> Tensor:
    """Attention by our kernel."""
    return host_attention(query, key, value, None, causal, None, dropout)


def torchs(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> Tensor:
    """Attention by torch's kernel."""
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, None, dropout, causal, enable_gqa=shared
    )


def run(mix: Mix, given: list[Tensor], grad: Tensor, shape: tuple[object, ...]) -> float:
    """Return the seconds of one forward and backward."""
    width, causal, dropout = shape[4:]
    start = time.perf_counter()
    heads = [x.unflatten(-1, (-1, width)).transpose(1, 2) for x in given]
    out = mix(*heads, causal, dropout).transpose(1, 2).flatten(2)
    torch.autograd.grad(out, given, grad)
    return time.perf_counter() - start


def main() -> None:
    """Print a row for every shape and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    assert takes_host_attention(torch.empty(1, 1, 64, 64)), "no C++ compiler here"
    print(header("python benchmarks/attention.py", torch.get_num_threads(), ["torch"]))
    rows = []
    with tuned_host(torch.device("cpu")):
        for shape in SHAPES:
            batch, num_heads, shared, tokens, width, *_ = shape
            for dtype in DTYPES:
                sizes = (num_heads, shared, shared, num_heads)
                *inputs, grad = (torch.randn(batch, tokens, n * width).to(dtype) for n in sizes)
                for x in inputs:
                    x.requires_grad_()
                times: dict[Mix, list[float]] = {ours: [], torchs: []}
                for number in range(given.rounds + 1):
                    for mix in (ours, torchs) if number % 2 else (torchs, ours):
                        times[mix].append(run(mix, inputs, grad, shape))
                mine, theirs = (found[1:] for found in times.values())
                ratio, low, high = paired_ratio(mine, theirs)
                seconds = (f"{1e3 * statistics.median(found):.1f}" for found in (mine, theirs))
                rows.append([shape, dtype, *seconds, f"{ratio:.2f} ({low:.2f} to {high:.2f})"])
    columns = ["rows, heads, shared, tokens, width, causal, dropout", "dtype", "ms", "torch ms"]
    print(table([*columns, "torch / ours"], rows))


if __name__ == "__main__":
    main()
