"""Names of reward sources in metrics and logs, and their weights, from their specifications."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bmforge.align.verifiers import VERIFIERS
from bmforge.errors import ConfigError

__all__ = ["name_of", "name_rewards", "read_weight"]

# Directory of the model in a run directory.
_EXPORT = "export"


def read_weight(spec: str) -> tuple[str, float]:
    """Split a specification into its name and its weight (default: 1).

    Raises:
        ConfigError: the weight is not finite.
    """
    match = re.fullmatch(r"(.+)=([-+]?[\d.]+(?:[eE][-+]?\d+)?|[-+]?inf|nan)", spec)
    if match is None:
        return spec, 1.0
    try:
        weight = float(match[2])
    except ValueError:
        return spec, 1.0
    if not math.isfinite(weight):
        raise ConfigError(f"the weight of --reward {spec} must be a finite number.")
    return match[1], weight


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a Python function or callable object."""
    return getattr(function, "__name__", type(function).__name__)


def name_rewards(specs: Sequence[str]) -> list[str]:
    """Return a unique name for each reward.

    The name is that of the function, verifier, host or model directory. Rewards of equal names get
    longer ones, such as ``file.function``; a number is appended to names that are still equal.

    Args:
        specs: specifications without weights.
    """
    names = [_short_name(spec) for spec in specs]
    counts = Counter(names)
    names = [_long_name(s) if counts[n] > 1 else n for s, n in zip(specs, names, strict=True)]
    unique: list[str] = []
    for name in names:
        unique.append(name if name not in unique else f"{name}_{len(unique)}")
    return unique


def _short_name(spec: str) -> str:
    """Return the function, verifier or host of a reward, or the name of its model or run."""
    if spec.startswith(("http://", "https://")):
        return spec.split("://", 1)[1].split("/")[0]
    kind, _, argument = spec.partition(":")
    if kind == "dir":
        path = Path(argument)
        return path.parent.name if path.name == _EXPORT and path.parent.name else path.name
    return kind if kind in VERIFIERS else spec.rpartition(":")[2]


def _long_name(spec: str) -> str:
    """Return a name that also has the path, file or argument of a reward."""
    if spec.startswith(("http://", "https://")):
        return spec.split("://", 1)[1]
    kind, _, argument = spec.partition(":")
    if kind == "dir":
        return argument.strip("/")
    if kind in VERIFIERS:
        return spec
    origin, _, function = spec.rpartition(":")
    return f"{Path(origin).stem}.{function}" if origin else function
