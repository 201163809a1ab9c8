"""Fingerprints of base models, which are independent of layout and float dtype."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from bmforge.shards import digest_samples, is_streamed, is_torchao, sample_places, whole_tensor

__all__ = ["fingerprint_of", "library_of"]


def fingerprint_of(model: nn.Module, but: Collection[str] = ()) -> str | None:
    """Return a hash of sampled values from every base parameter; adapters are excluded.

    Args:
        model: any model; if it is parallelized, every process must call this.
        but: names of parameters to exclude, because an adapter trains them in full.

    Returns:
        16 hexadecimal digits; None if some parameters are on the meta device, streamed, quantized
        (quantized weights differ from the original ones), or on another pipeline stage.

    Comm: on a parallelized model, an all-gather of each parameter.
    """
    full = getattr(model, "whole", None)
    if callable(full) and full() is not model:
        return None
    adapter_ids = {
        id(parameter)
        for module in model.modules()
        if getattr(module, "is_delta", False)
        for parameter in module.parameters()
    }
    samples = []
    for name, parameter in model.named_parameters():
        if id(parameter) in adapter_ids or name in but:
            continue
        if parameter.is_meta or is_streamed(parameter):
            return None
        if is_torchao(parameter) or not parameter.is_floating_point():
            return None
        full = whole_tensor(parameter.detach())
        values = full.flatten()
        index = torch.tensor(sample_places(name, values.numel()), device=values.device)
        samples.append((name, tuple(parameter.shape), values[index]))
    return digest_samples(samples)


def library_of(model: nn.Module) -> str:
    """Return the package of a model's class, such as "bmforge" or "transformers".

    Classes of different packages name the parameters of one model differently, so their
    fingerprints cannot be compared. Classes that torch derives for FSDP are skipped.
    """
    modules = (cls.__module__ for cls in type(model).__mro__)
    package = next(name for name in modules if name.partition(".")[0] != "torch")
    return "transformers" if "transformers" in package.split(".") else package.partition(".")[0]
