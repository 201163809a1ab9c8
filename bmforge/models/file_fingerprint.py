"""Computes the fingerprint of a model from its weight files, without loading the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.models.load import WeightReader, weight_reader
from bmforge.shards import digest_samples, sample_places

__all__ = ["fingerprint_of_files"]


def fingerprint_of_files(
    model: Any, directory: str | Path, excluded: Collection[str] = ()
) -> str | None:
    """Return the fingerprint that the model would have if loaded without quantization.

    A fingerprint is a hash of some values of every parameter; only these are read. Adapter files
    contain the fingerprint of their base model.

    Args:
        model: model that was loaded from the directory, possibly quantized or streamed.
        directory: directory of the weights, or a GGUF file.
        excluded: names of parameters to exclude, because an adapter trains them in full.

    Returns:
        16 hexadecimal digits; None if the files contain integer weights, or lack a parameter.
    """
    head = getattr(model.config, "head", None)
    options = {} if head is None else {"head": head}
    plain, files = type(model).describe_pretrained(directory, **options)
    reader = weight_reader(plain, files, threads=1, new_head=head is not None)
    parameters = {n: p for n, p in plain.named_parameters() if n not in excluded}
    is_plain = all(p.is_floating_point() and reader.is_stored(n) for n, p in parameters.items())
    return digest_samples(_sample(reader, parameters)) if is_plain else None


def _sample(
    reader: WeightReader, parameters: dict[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield the name and shape of each parameter, and the values that the fingerprint hashes."""
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        places = sample_places(name, math.prod(shape))
        values = torch.empty(len(places), dtype=parameter.dtype, device="cpu")
        index = torch.unravel_index(torch.tensor(places), shape)
        rows = torch.stack(index, dim=1).tolist() if shape else [[]] * len(places)
        reader.read_elements(name, rows, values)
        yield name, shape, values
