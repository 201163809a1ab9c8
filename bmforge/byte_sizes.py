"""Parses sizes in bytes, such as 2GiB."""

from __future__ import annotations

import re

from bmforge.errors import ConfigError

__all__ = ["parse_size"]

# Unit of a size, in lower case -> bytes.
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1 << (10 * n) for n, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}


def parse_size(text: str, name: str = "size") -> int:
    """Parse a size such as ``2GiB``, ``500 MB`` or ``123456`` into bytes.

    Args:
        text: number and unit: B, KB, MB, GB, TB (powers of 1000), KiB, ... TiB (powers of 1024).
        name: name of the option, for the error message.

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"invalid size: {name}={text!r} (expected: a number and a unit, such as 2GiB or "
            "800MiB)."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])
