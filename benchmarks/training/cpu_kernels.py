"""CPU time of bmforge's GELU and RMS norm kernels compared with torch's, and of fused products.

    python -m benchmarks.training.cpu_kernels

The first table compares the kernels, forward and backward: GELU (tanh form) of 2048 x 3072 and the
RMS norm of 2048 x 768. The second table compares one matrix product for q, k and v with three, and
the in-place accumulation of a weight gradient with an addition after the product. Times are the
CPU time of one thread (lower quartile of 9 rounds), so that other processes matter little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import header, make_parser, paired_ratio, table, time_in_turns
from bmforge.device import default_device
from bmforge.host_tuning import tune_host
from bmforge.nn.host_rows import host_gelu, host_rms_norm

Work = Callable[..., object]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the RMS norm with torch's operations."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * (wide * scale).to(weight.dtype)


def time_pair(first: Work, second: Work) -> list[str]:
    """Return the milliseconds of both functions and the ratio of their speeds."""
    seconds = time_in_turns({"first": first, "second": second}, 9, time.thread_time)
    quartiles = [1e3 * statistics.quantiles(times, n=4)[0] for times in seconds.values()]
    return [*(f"{ms:.2f}" for ms in quartiles), f"{paired_ratio(seconds, 'first', 'second'):.2f}"]


def both_ways(name: str, kernel: Work, reference: Work, *inputs: Tensor) -> list[list[str]]:
    """Return the rows of a function, forward and backward."""
    grad = torch.randn_like(inputs[0])
    inputs = tuple(x.requires_grad_() for x in inputs)

    def back(work: Work) -> Work:
        out = work(*inputs)
        return lambda: torch.autograd.grad([out], inputs, [grad], retain_graph=True)

    dtype = str(inputs[0].dtype).removeprefix("torch.")
    forward = time_pair(lambda: kernel(*inputs), lambda: reference(*inputs))
    return [
        [f"{name}, forward", dtype, *forward],
        [f"{name}, backward", dtype, *time_pair(back(kernel), back(reference))],
    ]


def products(dtype: torch.dtype) -> list[list[str]]:
    """Return the rows of fused and separate products, and of in-place accumulation."""
    x, grad = torch.randn(2048, 768).to(dtype), torch.randn(2048, 2304).to(dtype)
    weight, wide = torch.randn(2304, 768).to(dtype), torch.randn(2048, 3072).to(dtype)
    weights, grads = weight.chunk(3), [part.contiguous() for part in grad.chunk(3, 1)]
    total = torch.zeros(3072, 768, dtype=dtype)

    def separate_products() -> Tensor:
        parts: Sequence[Tensor] = [g @ w for g, w in zip(grads, weights, strict=True)]
        return parts[0] + parts[1] + parts[2]

    pairs: dict[str, tuple[Work, Work]] = {
        "q, k, v: output": (lambda: x @ weight.t(), lambda: [x @ w.t() for w in weights]),
        "q, k, v: gradient of the input": (lambda: grad @ weight, separate_products),
        "q, k, v: gradient of the weights": (
            lambda: grad.t() @ x,
            lambda: [g.t() @ x for g in grads],
        ),
        "weight gradient, accumulated in place": (
            lambda: total.addmm_(wide.t(), x),
            lambda: total.add_(wide.t() @ x),
        ),
    }
    kind = str(dtype).removeprefix("torch.")
    return [[name, kind, *time_pair(*pair)] for name, pair in pairs.items()]


def main() -> None:
    """Print both tables."""
    make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    print(header(1, ["torch"]) + "\n", flush=True)
    kernels, fused = [], []
    with tune_host(default_device()):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(2048, 768).to(dtype), torch.randn(768).to(dtype)
            wide = torch.randn(2048, 3072).to(dtype)
            kernels += both_ways("GELU", host_gelu, lambda x: F.gelu(x, approximate="tanh"), wide)
            kernels += both_ways(
                "RMS norm", lambda x, w: host_rms_norm(x, w, 1e-5), plain_norm, x, weight
            )
            fused += products(dtype)
    print(
        table(["kernel", "dtype", "bmforge, ms", "torch, ms", "speed, bmforge / torch"], kernels)
        + "\n"
    )
    print(
        table(["products", "dtype", "fused, ms", "separate, ms", "speed, fused / separate"], fused)
    )


if __name__ == "__main__":
    main()
