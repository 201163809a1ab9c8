"""A single training example of a task, before it is batched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

__all__ = ["Example", "fingerprint_of"]

# Dict from the name of a model argument to its token ids or numbers.
Example = Mapping[str, Sequence[int]]


def fingerprint_of(*parts: object) -> str:
    """Return a hexadecimal hash of the arguments, computed from their `repr`."""
    return blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
