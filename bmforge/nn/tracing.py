"""Detects whether torch is tracing, compiling or transforming the current call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["is_tracing"]


def is_tracing() -> bool:
    """Return True while torch traces or compiles the call, or runs it in a functorch transform.

    bmforge's native kernels, which torch cannot trace, are then not called.
    """
    if torch.compiler.is_compiling():
        return True
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    follows = forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None
    return bool(modes) or transforms or follows
