"""CPU kernels for GELU, gated activations and RMSNorm: one memory pass in each direction.

Torch's tanh GELU takes four times as long as a pass over its data, and its RMSNorm is several
operations with a memory pass each. For a gated activation, autograd saves the activation's output,
a fifth of a Llama block's activations; here backward recomputes this output in the same pass. Under
`torch.compile`, or without a C++ compiler, torch's operations are used; see
`kernels/host_rows.cpp`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmforge.native import load_kernels_of

__all__ = [
    "FEWEST_VALUES",
    "GATES",
    "host_gated",
    "host_gelu",
    "host_rms_norm",
    "supports_host_gated",
    "supports_host_rms_norm",
    "can_use_host_gated",
    "can_use_host_gelu",
    "can_use_host_rms_norm",
]

# Activations that the gated kernel supports, and their codes in the kernel.
GATES = {"gelu_tanh": 0, "silu": 1}

_FOLDER = Path(__file__).with_name("kernels")
_SOURCES = ("floats.hpp", "host_rows.cpp")
# As in `host_attention`: results need not be bit-identical on all processors.
_FLAGS = "-march=native -ffp-contract=fast"
_DTYPES = (torch.float32, torch.bfloat16)
_VECTOR = 16
# Fewer values fit in the L1 cache, where torch's passes over them cost almost nothing.
FEWEST_VALUES = 1 << 14


def can_use_host_gelu(x: Tensor) -> bool:
    """Return True if `host_gelu` supports the tensor and its kernel is available."""
    return _are_plain(x) and _are_alike(x) and _kernel() is not None


def can_use_host_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Return True if `host_rms_norm` supports the tensors and its kernel is available."""
    return _are_plain(x, weight) and supports_host_rms_norm(x, weight)


def can_use_host_gated(gate: Tensor, up: Tensor) -> bool:
    """Return True if `host_gated` supports the tensors and its kernel is available."""
    return _are_plain(gate, up) and supports_host_gated(gate, up)


def supports_host_gated(gate: Tensor, up: Tensor) -> bool:
    """Return True if `host_gated` supports ordinary CPU tensors of this size and dtype."""
    return gate.shape == up.shape and _are_alike(gate, up) and _kernel() is not None


def supports_host_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Return True if `host_rms_norm` supports ordinary CPU tensors of these shapes and dtypes.

    The memory planner calls this function with fake tensors.
    """
    return x.shape[-1] % _VECTOR == 0 and _are_alike(x, weight) and _kernel() is not None


def _are_alike(*tensors: Tensor) -> bool:
    """Return True if all tensors have the same supported dtype and are large enough for the
    kernels.
    """
    dtype = tensors[0].dtype
    is_worth = dtype in _DTYPES and tensors[0].numel() >= FEWEST_VALUES
    return is_worth and all(x.dtype == dtype for x in tensors)


def _are_plain(*tensors: Tensor) -> bool:
    """Return True for CPU tensors (not of a subclass) in calls that torch does not compile."""
    if torch.compiler.is_compiling():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu for x in tensors)


def host_gelu(x: Tensor) -> Tensor:
    """Return GELU (Hendrycks and Gimpel 2016) in its tanh form, with fp32 arithmetic.

    Args:
        x: fp32 or bf16 tensor on the CPU.

    Shape:
        x: (...) -> (...)
    """
    out: Tensor = _GELU.apply(x)
    return out


def host_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, rounded as in `nn.norm.RMSNorm`.

    Shape:
        x: (..., D) -> (..., D), D a multiple of 16; weight: (D,)
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def host_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up``; backward needs only the two inputs.

    Args:
        gate: input of the activation, fp32 or bf16, on the CPU.
        up: tensor that is multiplied by the activated gate.
        activation: a name in `GATES`.

    Shape:
        gate, up: (...) -> (...)
    """
    out: Tensor = _Gated.apply(gate, up, activation)
    return out


class _GELU(torch.autograd.Function):
    """GELU that saves only its input for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _run_gelu(x.contiguous(), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _run_gelu(x.contiguous(), grad.contiguous())


def _run_gelu(x: Tensor, grad: Tensor | None) -> Tensor:
    """Run the GELU kernel: return the output or, given its gradient, the gradient of `x`."""
    out = torch.empty_like(x)
    _load().gelu(*_settings(x), x.numel(), *_at(x, grad, out))
    return out


class _Gated(torch.autograd.Function):
    """Gated activation that saves only its inputs, and recomputes the activation in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.kind = GATES[activation]
        ctx.save_for_backward(gate, up)
        # Torch's SiLU and product, which are as fast as one pass of a kernel.
        out = F.silu(gate) if activation == "silu" else _run_gelu(gate.contiguous(), None)
        return out.mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        is_narrow, threads = _settings(gate)
        places = _at(gate, up, grad.contiguous(), of_gate, of_up)
        _load().gate_backward(is_narrow, ctx.kind, threads, gate.numel(), *places)
        return of_gate, of_up, None


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and weight, and recomputes the row statistics in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        x, weight = x.contiguous(), weight.contiguous()
        out, scratch = torch.empty_like(x), _scratch(x)
        places = _at(x, weight, out, scratch)
        _load().norm_forward(*_settings(x), *_sizes(x), eps, *places)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (tensor.contiguous() for tensor in ctx.saved_tensors)
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)
        grad, scratch = grad.contiguous(), _scratch(x)
        places = _at(x, weight, grad, of_x, of_weight, scratch)
        _load().norm_backward(*_settings(x), *_sizes(x), ctx.eps, *places)
        return of_x, of_weight.to(weight.dtype), None


def _settings(x: Tensor) -> tuple[int, int]:
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()


def _sizes(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width if width else 0, width


def _scratch(x: Tensor) -> Tensor:
    return torch.empty(_load().norm_scratch(*_sizes(x), torch.get_num_threads()))


def _at(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def _load() -> ctypes.CDLL:
    library = _kernel()
    assert library is not None  # callers have checked `takes_...`
    return library


@cache
def _kernel() -> ctypes.CDLL | None:
    """Return the kernels compiled for this processor; None if there is no compiler."""
    return _compile(_FLAGS)


def _compile(flags: str) -> ctypes.CDLL | None:
    library = load_kernels_of("host_rows", _FOLDER, _SOURCES, flags)
    if library is None:
        return None
    word, size, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.gelu.argtypes = [word, word, size, *[pointer] * 3]
    library.gate_backward.argtypes = [word, word, word, size, *[pointer] * 5]
    library.norm_forward.argtypes = [word, word, size, size, ctypes.c_float, *[pointer] * 4]
    library.norm_backward.argtypes = [word, word, size, size, ctypes.c_float, *[pointer] * 6]
    library.norm_scratch.argtypes = [size, size, word]
    for name in ("gelu", "gate_backward", "norm_forward", "norm_backward"):
        getattr(library, name).restype = None
    library.norm_scratch.restype = size
    return library
