"""Named text functions that a template may apply to an example; code is never evaluated.

The lambdas in old template files are parsed by `lambdas.py`.
"""

from __future__ import annotations

import string
from collections.abc import Callable

from bmforge.errors import ConfigError

__all__ = [
    "list_post_processing",
    "register_post_processing",
    "take_post_processing",
]

Process = Callable[[str], str]

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
        ConfigError: the name is already registered.
    """
    if name in _BUILT_IN and _BUILT_IN[name] is not process:
        raise ConfigError(f"post-processing {name!r} is already registered. Choose another name.")
    _BUILT_IN[name] = process


def list_post_processing() -> tuple[str, ...]:
    """Return the names of all registered text functions."""
    return tuple(sorted(_BUILT_IN))


def take_post_processing(name: str) -> Process | None:
    """Return the text function registered under a name; None if there is none."""
    return _BUILT_IN.get(name)
