"""Program that compiles a schema, regular expression or grammar in a separate process.

A short schema can need more time and memory than available, for example if many patterns must match
at once. The compiler cannot be interrupted and does not respect its own limits, but a process can
be killed. This file is the program that runs in that process. It imports nothing of bmforge. If the
parent process is killed, this process ends soon, because its time is limited.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

__all__ = ["compile_rule", "main"]


def main() -> int:
    """Read a constraint and limits from standard input; write ``{"error": text or null}``."""
    job = json.load(sys.stdin)
    _limit_process(job["cpu_s"], job["memory_bytes"], job["wall_s"])
    json.dump({"error": compile_rule(job["kind"], job["source"])}, sys.stdout)
    return 0


def _limit_process(cpu_s: int, memory_bytes: int, wall_s: float) -> None:
    """Set resource limits at which the operating system kills this process."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


class _Bytes:
    """Byte-level tokenizer; compilation does not depend on the model's tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def compile_rule(kind: str, source: str) -> str | None:
    """Compile a constraint; return the error message, or None if it is valid.

    Args:
        kind: "json", "regex" or "lark".
        source: the constraint.
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
    if is_error or messages:  # warnings are about parts that would be silently ignored
        return "; ".join(messages)
    matcher = LLMatcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()  # much of the work is deferred to the first token
    return matcher.get_error() or None


if __name__ == "__main__":
    sys.exit(main())
