"""What every room understands by a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["IGNORE_INDEX", "Batch"]

# A label that asks for nothing.
IGNORE_INDEX = -100

# The arguments of a model by name.
Batch = Mapping[str, Tensor]
