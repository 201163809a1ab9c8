"""Schemas, regular expressions and grammars compile in a process of their own first.

A short schema can ask for more time and memory than there is (many patterns that must hold
together), its compiler cannot be stopped, and its limits do not hold it. A process can be.

This file is also the program of that process: it imports nothing of ours, and a parent that is
killed does not leave it behind, as its own time is short.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

__all__ = ["compile_rule", "main"]


def main() -> int:
    """Read a rule and its limits as JSON, and write ``{"error": text or null}``."""
    asked = json.load(sys.stdin)
    _limit_process(asked["cpu_s"], asked["memory_bytes"], asked["wall_s"])
    json.dump({"error": compile_rule(asked["kind"], asked["source"])}, sys.stdout)
    return 0


def _limit_process(cpu_s: int, memory_bytes: int, wall_s: float) -> None:
    """Let the system end this process when it takes too much, whatever it is doing."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


class _Bytes:
    """A tokenizer of bytes: what is compiled does not depend on whose it is."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def compile_rule(kind: str, source: str) -> str | None:
    """Return what is wrong with a rule, None where it can be kept.

    Args:
        kind: "json", "regex" or "lark".
        source: the rule.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    makers: dict[str, Any] = {
        "json": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }
    try:
        grammar = makers[kind](source)
    except ValueError as error:
        return str(error)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if is_error or messages:  # what is not kept is not left out silently
        return "; ".join(messages)
    matcher = LLMatcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()  # much is put off until the first token
    return matcher.get_error() or None


if __name__ == "__main__":
    sys.exit(main())
