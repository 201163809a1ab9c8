"""Minimal interpreter of CPM-Pretrain's start scripts, which extracts their commands.

Nothing is executed. It supports assignments, `export`, `if` with one comparison, integer arithmetic
and quotes, which is what such scripts contain. Other lines are skipped and reported.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Script", "read_script"]

_NAME = re.compile(r"(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_TEST = re.compile(r"\[\[?\s+(.*?)\s+(==?|!=)\s+(.*?)\s+\]\]?$", re.DOTALL)
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNREAD = ("for", "while", "until", "case", "function", "select")


@dataclass
class Script:
    """State and result of interpreting a script.

    Args:
        variables: values at the end of the script.
        commands: expanded commands, in order.
        unread: line number and text of lines that were not understood.
    """

    variables: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    unread: list[tuple[int, str]] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Interpret one statement."""
        match = _NAME.fullmatch(text)
        if match is None:
            self.commands.append(self.expand(text))
            return
        name, more, value = match.groups()
        previous = self.variables.get(name, "") if more else ""
        self.variables[name] = previous + _unquote(self.expand(value))

    def expand(self, text: str) -> str:
        """Expand the variables in a text, except inside single quotes."""
        out, at, quote = [], 0, ""
        while at < len(text):
            char = text[at]
            if char == "\\" and quote != "'" and at + 1 < len(text):
                out.append(text[at : at + 2])
                at += 2
            elif char in "'\"" and quote in ("", char):
                quote = "" if quote else char
                out.append(char)
                at += 1
            elif char == "$" and quote != "'":
                value, at = self._value(text, at)
                out.append(value)
            else:
                out.append(char)
                at += 1
        return "".join(out)

    def _value(self, text: str, at: int) -> tuple[str, int]:
        """Return the value of the expansion whose "$" is at index `at`, and the index after it."""
        tail = text[at:]
        if tail.startswith("$((") and "))" in tail:
            end = tail.index("))")
            return self._count(tail[3:end]), at + end + 2
        for pattern in (r"\$\{(\w+)(?::-([^}]*))?\}", r"\$(\w+)()"):
            match = re.match(pattern, tail)
            if match:
                name, usual = match.groups()
                value = self.variables.get(name, os.environ.get(name, usual or ""))
                return value, at + match.end()
        return ("", at + 2) if re.match(r"\$[@*#?]", tail) else ("$", at + 1)

    def _count(self, text: str) -> str:
        """Evaluate an integer expression."""
        text = self.expand(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", text))
        try:
            return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return ""

    def holds(self, line: int, condition: str) -> bool:
        """Return True if a condition is true; an unknown condition counts as false."""
        match = _TEST.fullmatch(condition.strip())
        if match is None:
            self.unread.append((line, f"if {condition}"))
            return False
        left, sign, right = match.groups()
        is_equal = _unquote(self.expand(left)) == _unquote(self.expand(right))
        return is_equal is (sign != "!=")


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("the expression is not arithmetic on integers.")


def _unquote(text: str) -> str:
    """Remove the quotes from a value."""
    return re.sub(r"""(?<!\\)["']""", "", text.strip())


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each statement; continued lines are joined."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " \x00")
    line = start = 1
    quote, words = "", ""
    for char in text + "\n":
        if char == "\x00":
            line += 1
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        is_comment = char == "#" and not quote and (not words or words[-1].isspace())
        if is_comment or (quote == "#" and char != "\n"):
            quote = "#"
            continue
        if quote == "#":
            quote = ""
        if char in "\n;" and not quote:
            if words.strip():
                yield start, words.strip()
            words, start = "", line + (char == "\n")
        else:
            words += char
        line += char == "\n"


def read_script(text: str) -> Script:
    """Interpret a script; return its variables and commands."""
    script = Script()
    taken: list[list[bool]] = []  # per open `if`: is this branch taken, was any taken
    for line, statement in _statements(text):
        word, _, arguments = statement.partition(" ")
        if word in ("then", "do") and arguments:
            word, _, arguments = arguments.strip().partition(" ")
            statement = f"{word} {arguments}".strip()
        if word == "if" or statement.startswith("if["):
            is_open = all(branch[0] for branch in taken)
            holds = is_open and script.holds(line, statement[2:].strip())
            taken.append([holds, holds])
        elif word == "elif" and taken:
            holds = not taken[-1][1] and script.holds(line, arguments)
            taken[-1] = [holds, taken[-1][1] or holds]
        elif word == "else" and taken:
            taken[-1] = [not taken[-1][1], True]
            if arguments and taken[-1][0]:
                script.run(arguments.strip())
        elif word == "fi" and taken:
            taken.pop()
        elif word in ("then", "done", "esac"):
            continue
        elif word in _UNREAD:
            script.unread.append((line, statement.splitlines()[0]))
        elif all(branch[0] for branch in taken):
            script.run(statement)
    return script
