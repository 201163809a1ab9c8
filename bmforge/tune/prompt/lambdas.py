"""Parses the lambdas in old template files without evaluating code.

A lambda is compiled to nested Python functions if it uses only string methods, `+` of strings,
constant indices and slices, f-strings, `"...".join(...)`, and comprehensions over its argument,
also with `enumerate`. Any other syntax is refused, so a template file cannot run code.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["read_lambda"]

# Values of the names in scope: the argument and the variables of comprehensions.
Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]

_METHODS = {
    *("strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold", "join"),
    *("replace", "removeprefix", "removesuffix", "swapcase"),
}
_STRING_CONSTANTS = {"punctuation": string.punctuation, "whitespace": string.whitespace}


def read_lambda(node: ast.Lambda) -> Callable[[Any], str]:
    """Return a function that is equivalent to a lambda of one argument.

    Raises:
        ValueError: the lambda uses unsupported syntax; the message names it.
    """
    spec = node.args
    names = [argument.arg for argument in spec.args]
    if len(names) != 1 or spec.defaults or spec.vararg or spec.kwarg or spec.kwonlyargs:
        raise ValueError("a lambda needs exactly one argument")
    body = _compile(node.body, {*names})

    def process(value: Any) -> str:
        try:
            result = body({names[0]: value})
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{ast.unparse(node)} does not apply to {value!r:.60} ({error})"
            ) from error
        if not isinstance(result, str):
            raise ValueError(f"{ast.unparse(node)} returns {result!r:.60}, which is not a str")
        return result

    return process


def _compile(node: ast.expr, names: set[str]) -> Expression:
    """Compile an expression to a function whose argument is a dict from variable name to value."""
    match node:
        case ast.Name(id=name) if name in names:
            return lambda scope: scope[name]
        case ast.Constant(value=value) if isinstance(value, str | int | None):
            return lambda scope: value
        case ast.Attribute(value=ast.Name(id="string"), attr=name) if name in _STRING_CONSTANTS:
            return lambda scope: _STRING_CONSTANTS[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _compile(left, names), _compile(right, names)
            return lambda scope: _text(first(scope)) + _text(second(scope))
        case ast.JoinedStr(values=parts):
            pieces = [_compile(_piece(part), names) for part in parts]
            return lambda scope: "".join(str(piece(scope)) for piece in pieces)
        case ast.Subscript(value=value, slice=index):
            of, at = _compile(value, names), _index(index)
            return lambda scope: of(scope)[at]
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args, keywords=[]):
            return _compile_method(name, _compile(value, names), [_compile(a, names) for a in args])
        case ast.ListComp(elt=element, generators=[loop]):
            return _compile_loop(element, loop, names)
        case ast.GeneratorExp(elt=element, generators=[loop]):
            return _compile_loop(element, loop, names)
    raise ValueError(f"{ast.unparse(node)!r} is not one of the supported text operations")


def _compile_method(name: str, owner: Expression, arguments: list[Expression]) -> Expression:
    if name not in _METHODS:
        raise ValueError(f"{name!r} is not a supported method ({', '.join(sorted(_METHODS))})")
    return lambda scope: getattr(_text(owner(scope)), name)(*(a(scope) for a in arguments))


def _compile_loop(element: ast.expr, loop: ast.comprehension, names: set[str]) -> Expression:
    """Compile a comprehension to a function; conditions are not supported."""
    if loop.ifs or loop.is_async:
        raise ValueError("a comprehension with conditions is not supported")
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    variables = [target.id for target in targets if isinstance(target, ast.Name)]
    source, is_numbered = loop.iter, False
    match source:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner], keywords=[]):
            source, is_numbered = inner, True
    if len(variables) != 1 + is_numbered:
        raise ValueError("a comprehension supports only the element and its index as variables")
    items = _compile(source, names)
    result = _compile(element, {*names, *variables})

    def scopes(scope: Scope) -> Iterator[Scope]:
        for number, item in enumerate(items(scope)):
            bound = (number, item) if is_numbered else (item,)
            yield {**scope, **dict(zip(variables, bound, strict=True))}

    return lambda scope: [result(inner) for inner in scopes(scope)]


def _piece(part: ast.expr) -> ast.expr:
    """Return the expression inside one field of an f-string."""
    if not isinstance(part, ast.FormattedValue):
        return part
    if part.format_spec is not None or part.conversion != -1:
        raise ValueError("an f-string with a format specification is not supported")
    return part.value


def _index(node: ast.expr) -> Any:
    """Evaluate a constant index, key or slice."""
    if isinstance(node, ast.Slice):
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if part is None else ast.literal_eval(part) for part in parts))
    index = ast.literal_eval(node)
    if not isinstance(index, str | int):
        raise ValueError(f"the index {index!r} is neither an integer nor a string")
    return index


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got {type(value).__name__}: {value!r:.40}")
    return value
