"""What a process takes besides tensors once a model runs, which a budget has to hold as well.

Figures were measured with `benchmarks/engine_memory.py` (docs/results/2026-11-23-runtime.md). Pages
of library files that are run for the first time are not counted: the system takes them back
whenever memory is short.
"""

from __future__ import annotations

import torch
from torch import nn

from bmforge.device import is_host
from bmforge.memory.direct_read import BUFFER_BYTES, READ_THREADS
from bmforge.memory.packed import packed_bytes
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.quantized import PackedStore

__all__ = ["runtime_bytes"]

MIB = 1 << 20
# The description of a small model, threads, what Python keeps.
_LEAST_BYTES = 7 * MIB // 2
# Descriptions grow with models, and the allocator's holes with what is allocated.
_SHARE, _MOST_BYTES = 0.1, 36 * MIB
# Buffers of the libraries that multiply matrices of floats.
_PRODUCTS_BYTES = 8 * MIB
# They also keep code for every shape of half precision that they have seen.
_HALF_BYTES = 96 * MIB
_ACCELERATOR_BYTES = 52 * MIB


def runtime_bytes(model: nn.Module, work_bytes: int, device: torch.device) -> int:
    """Return what a process needs besides a model's tensors.

    Args:
        model: on meta, or as it is.
        work_bytes: of keys and values and the largest step.
        device: where it computes.
    """
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    if not is_host(device):
        return _ACCELERATOR_BYTES
    sizes = [packed_bytes(tensor) for tensor in tensors]
    found = _LEAST_BYTES + READ_THREADS * min(BUFFER_BYTES, max(sizes, default=0))
    found += min(_MOST_BYTES, int(_SHARE * (sum(sizes) + work_bytes)))
    if any(_multiplies_floats(module) for module in model.modules()):
        found += _PRODUCTS_BYTES
    has_half = any(t.is_floating_point() and t.element_size() == 2 for t in tensors)
    return found + has_half * _HALF_BYTES


def _multiplies_floats(module: nn.Module) -> bool:
    if isinstance(module, PackedStore):
        return module.spec.activations == "float" or module.spec.outlier_ratio > 0
    return isinstance(module, Experts) or linear_sizes(module) is not None
