"""Triton's language for the files of kernels, which can be imported without Triton too."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

__all__ = ["jit", "tl"]


def _import_language() -> tuple[Any, Any]:
    """Return `triton.jit` and `triton.language`, or what kernels need to be defined without them.

    Kernels are never called without Triton, as `load_triton` then returns none.
    """
    try:
        return import_module("triton").jit, import_module("triton.language")
    except ImportError:
        # The annotation of arguments that are known at compile time is all that a definition reads.
        return (lambda function: function), SimpleNamespace(constexpr=None)


jit, tl = _import_language()
