"""Base weights that checkpoints omit; a resumed run reads them again from their source.

The manifest contains the names, the source, and a fingerprint of the values, which is the same on
any layout and in any float dtype. Loading compares the fingerprint with that of the model's
weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from bmforge.shards import sample_places, sample_values
from bmforge.train.checkpoint.peers import Peers
from bmforge.train.checkpoint.state import named_tensors

__all__ = ["Base", "describe_base", "find_other_base"]


@dataclass(frozen=True)
class Base:
    """Frozen base weights, which checkpoints omit because they can be read from their source.

    Args:
        source: display name of the source.
        names: parameter names, in the order of the model.
    """

    source: str
    names: tuple[str, ...]


def describe_base(model: nn.Module, base: Base, peers: Peers) -> dict[str, Any]:
    """Return the manifest entry for omitted base weights. Collective."""
    mark, _ = _take_fingerprint(model, base.names, peers)
    return {"source": base.source, "fingerprint": mark, "names": list(base.names)}


def find_other_base(manifest: dict[str, Any], model: nn.Module, peers: Peers) -> str | None:
    """Describe how base weights of model and checkpoint differ; return None if they are equal.

    Collective.
    """
    base = manifest.get("base")
    if base is None:
        return None
    mark, missing = _take_fingerprint(model, base["names"], peers)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return f"the base model lacks the parameters {', '.join(missing[:5])}{more}"
    if mark != base["fingerprint"]:
        return (
            f"the base model has changed: its fingerprint is {mark}, but the run was "
            f"started with {base['source']!r}, whose fingerprint was {base['fingerprint']}. "
            "Checkpoints do not contain the base model, so restore its original weights."
        )
    return None


def _take_fingerprint(
    model: nn.Module, names: Sequence[str], peers: Peers
) -> tuple[str, list[str]]:
    """Return the fingerprint of the named parameters, and the names that no process has."""
    tensors = named_tensors(model)
    own_samples = {
        name: (tuple(tensors[name].shape), sample_values(name, tensors[name]))
        for name in names
        if name in tensors
    }
    samples: dict[str, tuple[tuple[int, ...], dict[int, bytes]]] = {}
    for part in peers.gather(own_samples):
        for name, (shape, values) in part.items():
            samples.setdefault(name, (shape, {}))[1].update(values)
    digest, missing = hashlib.sha256(), [name for name in names if name not in samples]
    for name in names:
        if name in samples:
            shape, values = samples[name]
            count = 1
            for size in shape:
                count *= size
            digest.update(f"{name} {shape}".encode())
            digest.update(b"".join(values[offset] for offset in sample_places(name, count)))
    return digest.hexdigest()[:16], missing
