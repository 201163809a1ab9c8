"""What every family can do: the columns of docs/capabilities.md, and the mark of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["CAPABILITIES", "capability", "find_capabilities"]

# In the order of the page's columns. A new column is a line here and one marked test in a suite.
CAPABILITIES = (
    "logits",
    "gradients",
    "conversion",
    "generate",
    "recompute",
    "zero-2",
    "zero-3",
    "tensor",
    "sequence",
    "pipeline",
    "context",
    "expert",
    "combined",
    "stream",
    "offload",
    "meta init",
    "compile",
    "low-rank",
    "int8",
    "changed: save",
    "changed: checkpoint",
    "changed: generate",
    "changed: recompute",
    "changed: stream",
    "changed: compile",
    "changed: zero-2",
    "changed: zero-3",
    "changed: tensor",
    "changed: sequence",
    "changed: pipeline",
    "changed: context",
    "changed: combined",
)
_Test = TypeVar("_Test", bound=Callable[..., None])


def capability(*names: str) -> Callable[[_Test], _Test]:
    """Mark a test method as the proof of capabilities; a cell of the page then names it."""
    unknown = set(names) - set(CAPABILITIES)
    assert not unknown, f"{unknown} are not in CAPABILITIES"

    def mark(test: _Test) -> _Test:
        test.capabilities = names  # type: ignore[attr-defined]
        return test

    return mark


def find_capabilities(suite: type) -> dict[str, str]:
    """Return capability -> name of the test method that proves it, of one test class."""
    found: dict[str, str] = {}
    for attribute in sorted(dir(suite)):
        test = getattr(suite, attribute)
        if attribute.startswith("test_") and callable(test):
            found.update(dict.fromkeys(getattr(test, "capabilities", ()), attribute))
    return found
