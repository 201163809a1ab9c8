"""CPU kernel for AdamW in one memory pass, bit-identical to torch's fused kernel.

A step on the host is limited by memory bandwidth. torch's kernel needs an fp32 gradient and writes
fp32 weights, so bf16 tensors would need two more passes over memory; this kernel reads and writes
bf16 in the same pass. It is compiled on first use (`native.py`), and used only if its results are
bit-identical to torch's on this CPU and with this torch version.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from bmforge.logging import get_logger
from bmforge.native import load_native

__all__ = ["AdamKernel", "load_adam_kernel", "step_plain"]

# Same operations in the same order as torch (FusedAdamKernel.cpp, 2.13), including the two FMAs.
_SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float widen(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static inline float widen(float value) { return value; }

static inline uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)rounded;
}

struct Numbers {
  float scale, decay, mean_share, beta2, square_share, rate, correction, eps;
};

template <typename G, bool writes_narrow>
static void step(int64_t count, int threads, const Numbers n, float* __restrict weights,
                 const G* __restrict gradient, float* __restrict mean, float* __restrict square,
                 uint16_t* __restrict narrow_weights) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    float grad = widen(gradient[i]) * n.scale;
    float first = std::fma(n.mean_share, grad - mean[i], mean[i]);
    float second = std::fma(n.square_share * grad, grad, square[i] * n.beta2);
    float divisor = std::sqrt(second) / n.correction + n.eps;
    float stepped = weights[i] * n.decay + n.rate * first / divisor;
    weights[i] = stepped;
    mean[i] = first;
    square[i] = second;
    if (writes_narrow) narrow_weights[i] = narrow(stepped);
  }
}

template <typename G>
static void choose(int64_t count, int threads, const Numbers& n, float* weights,
                   const void* gradient, float* mean, float* square, uint16_t* out) {
  const G* g = (const G*)gradient;
  if (out) step<G, true>(count, threads, n, weights, g, mean, square, out);
  else step<G, false>(count, threads, n, weights, g, mean, square, out);
}

extern "C" void adamw(int64_t count, int threads, const Numbers* n, float* weights,
                      const void* gradient, int is_narrow, float* mean, float* square,
                      uint16_t* out) {
  if (is_narrow) choose<uint16_t>(count, threads, *n, weights, gradient, mean, square, out);
  else choose<float>(count, threads, *n, weights, gradient, mean, square, out);
}
"""
_VECTOR_ELEMENTS = 64


def step_plain(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, group: Any, step: float
) -> None:
    """Run one step of torch's fused AdamW on flat host tensors of the same dtype.

    Args:
        weights: parameters, updated in place.
        gradient: gradient of the loss.
        mean: first moment, updated in place.
        square: second moment, updated in place.
        group: parameter group with lr, betas, eps, weight_decay.
        step: index of the step, starting at 1.
    """
    adamw(
        [weights],
        [gradient],
        [mean],
        [square],
        [],
        [torch.tensor(step - 1)],  # the kernel increments it
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


class AdamKernel:
    """Compiled AdamW step.

    Args:
        library: library compiled by `load_adam_kernel`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.adamw
        self._run.restype = None

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        group: Any,
        step: float,
        *,
        scale: float = 1.0,
        narrow: Tensor | None = None,
    ) -> None:
        """Run one step of AdamW on flat, contiguous host tensors.

        Args:
            weights: fp32 parameters, updated in place.
            gradient: fp32 or bf16 gradient.
            mean: fp32 first moment, updated in place.
            square: fp32 second moment, updated in place.
            group: parameter group with lr, betas, eps, weight_decay.
            step: index of the step, starting at 1.
            scale: factor applied to the gradient first.
            narrow: bf16 output for the updated weights.
        """
        num_vectorized = weights.numel() // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS
        if num_vectorized < weights.numel():  # torch uses other operations for an incomplete vector
            scaled = gradient[num_vectorized:].float() * scale
            step_plain(
                weights[num_vectorized:],
                scaled,
                mean[num_vectorized:],
                square[num_vectorized:],
                group,
                step,
            )
            if narrow is not None:
                narrow[num_vectorized:].copy_(weights[num_vectorized:])
        beta1, beta2 = group["betas"]
        numbers = (ctypes.c_float * 8)(
            scale,
            1 - group["lr"] * group["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            -group["lr"] / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            group["eps"],
        )
        self._run(
            ctypes.c_int64(num_vectorized),
            ctypes.c_int(torch.get_num_threads()),
            numbers,
            ctypes.c_void_p(weights.data_ptr()),
            ctypes.c_void_p(gradient.data_ptr()),
            ctypes.c_int(gradient.dtype == torch.bfloat16),
            ctypes.c_void_p(mean.data_ptr()),
            ctypes.c_void_p(square.data_ptr()),
            ctypes.c_void_p(None if narrow is None else narrow.data_ptr()),
        )
        increment_version([weights] if narrow is None else [weights, narrow])


@cache
def load_adam_kernel() -> AdamKernel | None:
    """Compile the kernel or load it from the cache; return None if this fails."""
    library = load_native("adamw", _SOURCE)
    if library is None:
        return None
    kernel = AdamKernel(library)
    if not _matches_torch(kernel):
        get_logger().debug(
            "the fused AdamW kernel is not used, because its results differ from torch's"
        )
        return None
    return kernel


def _matches_torch(kernel: AdamKernel) -> bool:
    """Return True if the kernel matches torch bit for bit over several steps and magnitudes."""
    generator = torch.Generator().manual_seed(0)
    count = 4099  # not a multiple of any vector length
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    start, sizes = torch.randn(count, generator=generator), torch.logspace(-9, 3, count)
    draws = torch.randn(5, count, generator=generator) * sizes
    want = start.clone(), torch.zeros(count), torch.zeros(count)
    got = start.clone(), torch.zeros(count), torch.zeros(count)
    narrow = torch.empty(count, dtype=torch.bfloat16)
    for number, gradient in enumerate(draws.bfloat16()):
        weights, mean, square = want
        step_plain(weights, gradient.float(), mean, square, group, number + 1.0)
        weights, mean, square = got
        kernel.step(weights, gradient, mean, square, group, number + 1.0, narrow=narrow)
        pairs = [*zip(want, got, strict=True), (want[0].bfloat16(), narrow)]
        if not all(torch.equal(first, other) for first, other in pairs):
            return False
    return True
