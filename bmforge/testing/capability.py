"""Marks the tests of capabilities, from which docs/reference/capabilities.md is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["CAPABILITIES", "ROOMS", "capability", "find_capabilities"]

# Package -> capabilities, in the order of the page's tables and columns. A new column needs a name
# in this table and a marked test in a suite. "changed: " means a model with resized layers, LoRA
# modules and int8 weights.
ROOMS: dict[str, tuple[str, ...]] = {
    "nn": ("low-rank", "int8", "int4", "resize"),
    "models": (
        "logits",
        "gradients",
        "conversion",
        "meta init",
        "compile",
        "changed: save",
        "changed: compile",
    ),
    "infer": (
        "generate",
        "native step",
        "engine",
        "budget",
        "devices",
        "serve",
        "adapters per request",
        "changed: generate",
    ),
    "memory": (
        "recompute",
        "stream",
        "offload",
        "changed: recompute",
        "changed: stream",
        "changed: offload",
    ),
    "parallel": (
        "zero-2",
        "zero-3",
        "tensor",
        "sequence",
        "pipeline",
        "context",
        "expert",
        "combined",
        "changed: zero-2",
        "changed: zero-3",
        "changed: tensor",
        "changed: sequence",
        "changed: pipeline",
        "changed: context",
        "changed: expert",
        "changed: combined",
    ),
    "train": ("changed: checkpoint",),
    "tune": (
        "lora",
        "adapter",
        "low-rank-adapter",
        "compacter",
        "parallel-adapter",
        "bitfit",
        "ia3",
        "prefix",
        "soft-prompt",
        "prompt",
        "delta rows",
        "deltas: zero-3",
        "deltas: tensor",
        "deltas: pipeline",
        "deltas: context",
        "deltas: stream",
    ),
    "compress": ("distill", "qat", "sparse", "structured", "experts", "cook"),
}
CAPABILITIES = tuple(name for names in ROOMS.values() for name in names)
_Test = TypeVar("_Test", bound=Callable[..., None])


def capability(*names: str) -> Callable[[_Test], _Test]:
    """Decorator that marks a test method as the test of the named capabilities."""
    unknown = set(names) - set(CAPABILITIES)
    assert not unknown, f"unknown capabilities: {unknown} (supported: {CAPABILITIES})"

    def mark(test: _Test) -> _Test:
        test.capabilities = names  # type: ignore[attr-defined]
        return test

    return mark


def find_capabilities(suite: type) -> dict[str, str]:
    """Return a dict from capability to the name of its test method in a test class."""
    methods: dict[str, str] = {}
    for attribute in sorted(dir(suite)):
        test = getattr(suite, attribute)
        if attribute.startswith("test_") and callable(test):
            methods.update(dict.fromkeys(getattr(test, "capabilities", ()), attribute))
    return methods
