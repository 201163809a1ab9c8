"""One thread's CPU time of GELU and the RMS norm, and of products joined or apart.

Run: python benchmarks/rows.py

GELU's tanh form of 2048 x 3072, the norm of 2048 x 768, forward and backward; q, k, v of 2048 x 768
in three products or one; a weight's gradient made anew and added, or added to in place. CPU time
and lower quartiles of 9 turns, so that what else the machine does counts little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge.device import default_device  # noqa: E402
from bmforge.host_tuning import tuned_host  # noqa: E402
from bmforge.nn.host_rows import host_gelu, host_rms_norm  # noqa: E402

Work = Callable[..., object]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm as torch's operations make it."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * (wide * scale).to(weight.dtype)


def time_pair(ours: Work, theirs: Work) -> list[str]:
    """Return both sides' milliseconds and their ratio."""
    found: dict[Work, list[float]] = {ours: [], theirs: []}
    for turn in range(11):
        for work in (ours, theirs) if turn % 2 else (theirs, ours):
            start = time.thread_time()
            work()
            found[work].append(1e3 * (time.thread_time() - start))
    one, other = (statistics.quantiles(found[work][2:], n=4)[0] for work in (ours, theirs))
    return [f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"]


def both_ways(name: str, ours: Work, theirs: Work, *given: Tensor) -> list[list[str]]:
    """Return the rows of a function, forward and backward."""
    grad = torch.randn_like(given[0])
    given = tuple(x.requires_grad_() for x in given)

    def back(work: Work) -> Work:
        out = work(*given)
        return lambda: torch.autograd.grad([out], given, [grad], retain_graph=True)

    dtype = str(given[0].dtype).removeprefix("torch.")
    forward = time_pair(lambda: ours(*given), lambda: theirs(*given))
    return [
        [f"{name}, forward", dtype, *forward],
        [f"{name}, backward", dtype, *time_pair(back(ours), back(theirs))],
    ]


def products(dtype: torch.dtype) -> list[list[str]]:
    """Return the rows of products that are joined or added in place."""
    x, grad = torch.randn(2048, 768).to(dtype), torch.randn(2048, 2304).to(dtype)
    weight, wide = torch.randn(2304, 768).to(dtype), torch.randn(2048, 3072).to(dtype)
    weights, grads = weight.chunk(3), [part.contiguous() for part in grad.chunk(3, 1)]
    total = torch.zeros(3072, 768, dtype=dtype)

    def join_apart() -> Tensor:
        parts: Sequence[Tensor] = [g @ w for g, w in zip(grads, weights, strict=True)]
        return parts[0] + parts[1] + parts[2]

    pairs: dict[str, tuple[Work, Work]] = {
        "q, k, v: values": (lambda: x @ weight.t(), lambda: [x @ w.t() for w in weights]),
        "q, k, v: gradient of what goes in": (lambda: grad @ weight, join_apart),
        "q, k, v: of weights": (lambda: grad.t() @ x, lambda: [g.t() @ x for g in grads]),
        "weight gradient, added to": (
            lambda: total.addmm_(wide.t(), x),
            lambda: total.add_(wide.t() @ x),
        ),
    }
    kind = str(dtype).removeprefix("torch.")
    return [[name, kind, *time_pair(*pair)] for name, pair in pairs.items()]


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print(header("python benchmarks/rows.py", 1, ["torch"]) + "\n", flush=True)
    kernels, joined = [], []
    with tuned_host(default_device()):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(2048, 768).to(dtype), torch.randn(768).to(dtype)
            wide = torch.randn(2048, 3072).to(dtype)
            kernels += both_ways("GELU", host_gelu, lambda x: F.gelu(x, approximate="tanh"), wide)
            kernels += both_ways(
                "RMS norm", lambda x, w: host_rms_norm(x, w, 1e-5), plain_norm, x, weight
            )
            joined += products(dtype)
    print(table(["kernel", "dtype", "ms", "torch, ms", "torch / ours"], kernels) + "\n")
    print(table(["products", "dtype", "joined, ms", "apart, ms", "apart / joined"], joined))


if __name__ == "__main__":
    main()
