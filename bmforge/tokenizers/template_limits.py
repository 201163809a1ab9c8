"""Limits the run time and the output length of a chat template.

A template is a program; a template from an untrusted source may never terminate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["TemplateLimits", "run_template"]


@dataclass(frozen=True)
class TemplateLimits:
    """Limits for rendering one conversation.

    Args:
        seconds: maximum run time in seconds.
        characters: maximum length of the output in characters.
    """

    seconds: float
    characters: int


def run_template(template: Any, variables: Mapping[str, Any], limits: TemplateLimits | None) -> str:
    """Render a compiled template within limits.

    Args:
        template: Jinja template.
        variables: mapping from variable name to value.
        limits: limits; None for no limits.

    Raises:
        TimeoutError: the time limit is exceeded.
        ValueError: the output limit is exceeded.
        Exception: any error that the template itself raises.
    """
    if limits is None:
        return template.render(**variables)
    chunks, length = [], 0
    with _stopping_after(limits.seconds):
        for chunk in template.generate(**variables):
            chunks.append(chunk)
            length += len(chunk)
            if length > limits.characters:
                raise ValueError(f"the output is longer than {limits.characters} characters")
    return "".join(chunks)


@contextmanager
def _stopping_after(seconds: float) -> Iterator[None]:
    """Context manager: interrupt this thread's Python code after a time limit.

    A loop in a template that writes no output cannot be interrupted in any other way.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"the template runs longer than {seconds} s")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
