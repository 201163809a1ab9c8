"""Speed of bmforge's CPU attention kernel compared with torch's, forward and backward.

    python -m benchmarks.training.attention [--rounds 7]

Prints one row per shape and dtype: the median times in milliseconds, and the ratio of the speeds.
Query, key and value are slices of tensors of shape (B, T, H * D), as projections return them. The
process has the host settings of a bmforge run. Needs a C++ compiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import header, make_parser, paired_ratio, table, time_in_turns
from bmforge.host_tuning import tune_host
from bmforge.nn.host_attention import can_use_host_attention, host_attention

# batch size, heads, KV heads, tokens, head dim, causal, dropout
Shape = tuple[int, int, int, int, int, bool, float]
SHAPES: tuple[Shape, ...] = (
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
Attend = Callable[[list[Tensor], bool, float], Tensor]


def attend_bmforge(heads: list[Tensor], causal: bool, dropout: float) -> Tensor:
    """Compute attention with bmforge's kernel."""
    query, key, value = heads
    return host_attention(query, key, value, None, causal, None, dropout)


def attend_torch(heads: list[Tensor], causal: bool, dropout: float) -> Tensor:
    """Compute attention with torch's kernel."""
    query, key, value = heads
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, None, dropout, causal, enable_gqa=is_grouped
    )


def run(attend: Attend, inputs: list[Tensor], grad: Tensor, shape: Shape) -> None:
    """Run one forward and backward pass."""
    head_dim, causal, dropout = shape[4:]
    heads = [x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in inputs]
    out = attend(heads, causal, dropout).transpose(1, 2).flatten(2)
    torch.autograd.grad(out, inputs, grad)


def main() -> None:
    """Print a row for every shape and dtype."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    assert can_use_host_attention(torch.empty(1, 1, 64, 64)), "no C++ compiler here"
    print(header(torch.get_num_threads(), ["torch"]))
    rows = []
    with tune_host(torch.device("cpu")):
        for shape in SHAPES:
            batch_size, num_heads, num_kv_heads, tokens, head_dim, *_ = shape
            for dtype in DTYPES:
                sizes = (num_heads, num_kv_heads, num_kv_heads, num_heads)
                *inputs, grad = (
                    torch.randn(batch_size, tokens, n * head_dim).to(dtype) for n in sizes
                )
                for x in inputs:
                    x.requires_grad_()
                runs = {
                    "bmforge": partial(run, attend_bmforge, inputs, grad, shape),
                    "torch": partial(run, attend_torch, inputs, grad, shape),
                }
                seconds = time_in_turns(runs, options.rounds)
                medians = (f"{1e3 * statistics.median(times):.1f}" for times in seconds.values())
                ratio = paired_ratio(seconds, "bmforge", "torch")
                rows.append([shape, dtype, *medians, f"{ratio:.2f}"])
    shapes = "batch, heads, KV heads, tokens, head dim, causal, dropout"
    print(table([shapes, "dtype", "bmforge, ms", "torch, ms", "speed, bmforge / torch"], rows))


if __name__ == "__main__":
    main()
