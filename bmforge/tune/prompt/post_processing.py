"""Text functions that a template may apply to an example, by name; code is never evaluated.

Old template files have lambdas. Those that only chain text methods with constants on their
argument, such as ``lambda x: x.rstrip(string.punctuation)``, are parsed; others are refused.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Callable

from bmforge.errors import ConfigError

__all__ = [
    "list_post_processing",
    "read_lambda",
    "register_post_processing",
    "take_post_processing",
]

Process = Callable[[str], str]

_METHODS = {
    *("strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold"),
    *("replace", "removeprefix", "removesuffix", "swapcase"),
}
_BUILT_IN: dict[str, Process] = {
    "strip": str.strip,
    "lower": str.lower,
    "upper": str.upper,
    "capitalize": str.capitalize,
    "strip_punctuation": lambda text: text.strip().strip(string.punctuation),
    "strip_end_punctuation": lambda text: text.rstrip(string.punctuation),
    "join_lines": lambda text: " ".join(text.split()),
}


def register_post_processing(name: str, process: Process) -> None:
    """Register a text function under a name for use in templates.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _BUILT_IN and _BUILT_IN[name] is not process:
        raise ConfigError(f"post-processing {name!r} is taken: choose another name.")
    _BUILT_IN[name] = process


def list_post_processing() -> tuple[str, ...]:
    """Return the names a template may use."""
    return tuple(sorted(_BUILT_IN))


def take_post_processing(name: str) -> Process | None:
    """Return the function registered under a name, or None."""
    return _BUILT_IN.get(name)


def read_lambda(node: ast.Lambda) -> Process:
    """Return a function equivalent to a chain of text methods, without evaluating the code.

    Raises:
        ValueError: any other lambda; the message says why.
    """
    spec = node.args
    names = [arg.arg for arg in spec.args]
    if len(names) != 1 or spec.defaults or spec.vararg or spec.kwarg or spec.kwonlyargs:
        raise ValueError("a lambda of one argument is needed")
    steps: list[tuple[str, tuple[object, ...]]] = []
    body: ast.expr = node.body
    while isinstance(body, ast.Call):
        method = body.func
        if not isinstance(method, ast.Attribute) or method.attr not in _METHODS:
            raise ValueError(f"only {', '.join(sorted(_METHODS))} of the argument can be read")
        if body.keywords:
            raise ValueError(f"{method.attr} has arguments by name")
        steps.append((method.attr, tuple(_constant(arg) for arg in body.args)))
        body = method.value
    if not isinstance(body, ast.Name) or body.id != names[0]:
        raise ValueError("a chain of text methods on the argument is needed")
    steps.reverse()

    def process(text: str) -> str:
        for method, arguments in steps:
            text = getattr(text, method)(*arguments)
        return text

    try:
        process("probe")
    except TypeError as error:
        raise ValueError(str(error)) from None
    return process


def _constant(node: ast.expr) -> object:
    """Return a constant argument: a string, a number, string.punctuation or string.whitespace."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, type(None))):
        return node.value
    is_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    if is_module and node.value.id == "string" and node.attr in ("punctuation", "whitespace"):  # type: ignore[attr-defined]
        return string.punctuation if node.attr == "punctuation" else string.whitespace  # type: ignore[attr-defined]
    raise ValueError("arguments must be constants")
