"""Triton's language for the files of kernels, which can be imported without Triton too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["jit", "tl"]

jit: Any
tl: Any
try:
    import triton.language as tl
    from triton import jit
except ImportError:  # `load_triton` then returns no kernels, so that these are never called

    def jit(function: Any) -> Any:
        """Return a kernel unchanged."""
        return function

    # The annotation of arguments that are known at compile time.
    tl = SimpleNamespace(constexpr=None)
