"""Replaces layers with quantized layers, optionally with precomputed integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from bmforge.compress.matrices import Matrix
from bmforge.models.changes import Change, apply_change_
from bmforge.nn.packing import Integers, QuantSpec, pack_matrix
from bmforge.surgery import match_glob

__all__ = ["as_globs", "by_spec", "record_quantization_", "store_block_"]


def store_block_(
    model: nn.Module,
    matrices: Sequence[Matrix],
    specs: Mapping[str, QuantSpec],
    integers: Mapping[str, Integers] | None = None,
) -> None:
    """Pack the matrices of a block in place; call `record_quantization_` after the last block.

    Args:
        model: model that contains the matrices.
        matrices: all matrices of the modules to replace.
        specs: dict from module name to scheme.
        integers: dict from matrix name to precomputed integers; None to round to nearest.
    """
    own_specs = {matrix.owner: specs[matrix.owner] for matrix in matrices}
    for spec, names in by_spec(own_specs).items():
        apply_change_(model, Change("quantize", tuple(names), asdict(spec)))
    for matrix in matrices if integers is not None else ():
        assert integers is not None
        store: Any = model.get_submodule(matrix.owner)
        packed = pack_matrix(integers[matrix.name], own_specs[matrix.owner])
        if matrix.index is None:
            store.take_packed_(packed)
        else:
            store.put_(f"{matrix.key}_", packed, number=matrix.index)


def by_spec(specs: Mapping[str, QuantSpec]) -> dict[QuantSpec, list[str]]:
    """Group module names by their scheme."""
    names_of_spec: dict[QuantSpec, list[str]] = {}
    for name, spec in specs.items():
        names_of_spec.setdefault(spec, []).append(name)
    return names_of_spec


def record_quantization_(model: Any, specs: Mapping[str, QuantSpec]) -> None:
    """Record the quantization of layers in the config of a bmforge model."""
    if hasattr(model, "record_part_"):
        for spec, names in by_spec(specs).items():
            model.record_part_("quantize", as_globs(model, names), asdict(spec), "")


def as_globs(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return a short list of globs that match exactly the modules `names`."""
    all_names, chosen = [name for name, _ in model.named_modules() if name], set(names)
    globs: dict[str, None] = {}
    for name in names:
        glob = ".".join("*" if part.isdigit() else part for part in name.split("."))
        fits = all(other in chosen for other in all_names if match_glob(other, glob))
        globs[glob if fits else name] = None
    return list(globs)
