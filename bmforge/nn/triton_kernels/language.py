"""Imports Triton's language for the kernel files, so that they can be imported without Triton."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

__all__ = ["jit", "tl"]


def _import_language() -> tuple[Any, Any]:
    """Return `triton.jit` and `triton.language`, or stubs with which kernels can be defined.

    Without Triton the kernels are never called, because `load_triton` returns None.
    """
    try:
        return import_module("triton").jit, import_module("triton.language")
    except ImportError:
        # Defining a kernel reads only `tl.constexpr`, the annotation of compile-time arguments.
        return _leave_undecorated, SimpleNamespace(constexpr=None)


def _leave_undecorated(function: Any = None, **options: Any) -> Any:
    """Stand-in for the decorator `triton.jit`: return the function unchanged."""
    return _leave_undecorated if function is None else function


jit, tl = _import_language()
