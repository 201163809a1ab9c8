"""Estimates the process's memory other than tensors, which counts toward the memory budget.

The constants were measured with `benchmarks/inference/engine_memory.py` (docs/results/runtime.md).
Pages of library files are not counted: the system reclaims them whenever memory is short.
"""

from __future__ import annotations

import torch
from torch import nn

from bmforge.device import is_host
from bmforge.memory.direct_read import BUFFER_BYTES, READ_THREADS
from bmforge.memory.packed import packed_bytes
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.products import lacks_optimized_product
from bmforge.nn.quantized import PackedStore

__all__ = ["runtime_bytes"]

MIB = 1 << 20
# A small model's modules, threads, Python's own memory.
_LEAST_BYTES = 7 * MIB // 2
# Modules grow with the model, allocator fragmentation with the allocations.
_SHARE, _MOST_BYTES = 0.1, 36 * MIB
# Buffers of the BLAS libraries.
_PRODUCTS_BYTES = 8 * MIB
# If no library supports 16-bit products, some rows of a weight at a time are converted to fp32.
_WIDENED_BYTES = 7 * MIB // 2
# A library for 16 bits caches about 0.65 MiB of generated code for every shape of a product.
_HALF_BYTES = 96 * MIB
_ACCELERATOR_BYTES = 52 * MIB


def runtime_bytes(model: nn.Module, work_bytes: int, device: torch.device) -> int:
    """Return the number of bytes that the process needs besides the model's tensors.

    Args:
        model: model, possibly on the meta device.
        work_bytes: bytes of the KV cache and the largest step.
        device: compute device.
    """
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    if not is_host(device):
        return _ACCELERATOR_BYTES
    sizes = [packed_bytes(tensor) for tensor in tensors]
    total = _LEAST_BYTES + READ_THREADS * min(BUFFER_BYTES, max(sizes, default=0))
    total += min(_MOST_BYTES, int(_SHARE * (sum(sizes) + work_bytes)))
    if not any(_multiplies_floats(module) for module in model.modules()):
        return total
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    halves = dtypes & {torch.float16, torch.bfloat16}
    if halves and all(lacks_optimized_product(dtype) for dtype in halves):
        return total + (_WIDENED_BYTES if halves == dtypes else _PRODUCTS_BYTES)
    return total + _PRODUCTS_BYTES + bool(halves) * _HALF_BYTES


def _multiplies_floats(module: nn.Module) -> bool:
    if isinstance(module, PackedStore):
        return module.spec.activations == "float" or module.spec.outlier_ratio > 0
    return isinstance(module, Experts) or linear_sizes(module) is not None
