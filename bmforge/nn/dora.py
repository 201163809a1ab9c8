"""DoRA: LoRA with trained magnitudes (norms) of the rows of the adapted weight.

The norms of quantized layers are those of the dequantized weights, as in PEFT (QDoRA).

Source: Liu et al., "DoRA: Weight-decomposed low-rank adaptation" (2024).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.dense_weight import has_weight, local_weight, whole_weight
from bmforge.shards import local_box, local_tensor, whole_tensor

__all__ = ["check_layer", "join_with_magnitude", "init_magnitude_"]


def check_layer(module: nn.Module) -> None:
    """Raise `ConfigError` for a layer without a weight, which DoRA cannot adapt."""
    if not has_weight(module):
        raise ConfigError(
            f"DoRA (use_dora) needs a weight, but a {type(module).__name__} has none. Leave "
            "use_dora out, or choose other targets."
        )


def join_with_magnitude(
    part: Any, module: Any, x: Tensor, out: Tensor, adapter_weight: float
) -> Tensor:
    """Return the layer's output under DoRA: weight rows are rescaled to the trained magnitudes.

    The current norms of the rows are treated as constants, as in the paper (section 4.3).

    Args:
        part: `LowRank` with a magnitude.
        module: linear layer, quantized or not.
        x: input of the layer.
        out: output of the layer.
        adapter_weight: factor on the change of the output.
    """
    low, up, down, magnitude = part(x, "all")
    bias = None if module.bias is None else local_tensor(module.bias)
    with torch.no_grad():
        weight = local_weight(module, down.dtype)
        if weight.shape[0] != up.shape[0]:
            raise ConfigError(
                "DoRA (use_dora) needs all rows of a layer, but with more processes than "
                f"key-value heads this process has only {up.shape[0]} of {weight.shape[0]} "
                "rows. Use a smaller layout.tp."
            )
        length = torch.linalg.vector_norm(weight + part.scale * (up @ down), dim=1)
    factor = magnitude / length
    plain = out if bias is None else out - bias
    changed = (factor * (plain.to(low.dtype) + F.linear(low, up))).to(out.dtype)
    changed = changed if bias is None else changed + bias
    return changed if adapter_weight == 1 else out + adapter_weight * (changed - out)


@torch.no_grad()
def init_magnitude_(module: nn.Module, part: Any) -> None:
    """Set DoRA magnitudes to the norms of the layer's rows, which leaves outputs unchanged.

    Does nothing if the adapter has no magnitude, or if layer or adapter are on the meta device.

    Comm: an all-gather of each sharded parameter of layer and adapter.
    """
    magnitude = getattr(part, "magnitude", None)
    if magnitude is None or magnitude.is_meta:
        return
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        update = part.scale * (whole_tensor(part.up) @ whole_tensor(part.down))
        lengths = torch.linalg.vector_norm(whole_weight(module, magnitude.dtype) + update, dim=1)
        local_tensor(magnitude).copy_(lengths[local_box(magnitude).slices])
