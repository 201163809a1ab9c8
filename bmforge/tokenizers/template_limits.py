"""How long a chat template may run, and how much it may write.

A template is a program, and one that came with a model need not come to an end.
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
    """What a template may take for one conversation.

    Args:
        seconds: of time.
        characters: of text.
    """

    seconds: float
    characters: int


def run_template(template: Any, given: Mapping[str, Any], limits: TemplateLimits | None) -> str:
    """Return what a compiled template writes.

    Args:
        template: of Jinja.
        given: its variables.
        limits: None sets none.

    Raises:
        TimeoutError: it ran too long.
        ValueError: it wrote too much.
        Exception: what the template raises.
    """
    if limits is None:
        return template.render(**given)
    pieces, length = [], 0
    with _stopping_after(limits.seconds):
        for piece in template.generate(**given):
            pieces.append(piece)
            length += len(piece)
            if length > limits.characters:
                raise ValueError(f"it writes more than {limits.characters} characters")
    return "".join(pieces)


@contextmanager
def _stopping_after(seconds: float) -> Iterator[None]:
    """Stop Python code of this thread in whatever line it is when its time is over.

    A loop of a template that writes nothing can be stopped in no other way.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, value: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it runs longer than {seconds} s")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
