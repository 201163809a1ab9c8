"""Triton kernels for accelerators: packed products, dequantization, norms and paged attention.

Triton is optional (CUDA and ROCm builds of torch include it); only `language` imports it. Start
reading at `load`: without Triton, or if a kernel's results differ from the CPU's, torch computes
instead. The kernels read the packed layout of `bmforge.nn.packing`: four rows of a panel of 16 rows
are a 128-bit load, whose 32-bit words are operands of dp4a.
"""

from bmforge.nn.triton_kernels.load import load_triton

__all__ = ["load_triton"]
