"""LoRA with a different adapter per sample, computed as two batched products per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.nn.adapter_selection import AdapterChoice
from bmforge.nn.low_rank import LowRank
from bmforge.nn.part import AdapterModule

__all__ = ["BatchedLowRank", "batch_choices"]


class BatchedLowRank:
    """Low-rank factors of every sample of a batch; used in calls without gradients.

    Args:
        parts: LoRA modules attached to one layer.
        samples: per module, indices of the samples to which it is applied.
        weights: per module, factor on its output.
        batch_size: number of samples.

    Memory: two thin matrices per sample, padded to the largest rank.
    """

    def __init__(
        self,
        parts: Sequence[LowRank],
        samples: Sequence[Sequence[int]],
        weights: Sequence[float],
        batch_size: int,
    ) -> None:
        first, rank = parts[0], max(part.down.shape[0] for part in parts)
        self.down = first.down.new_zeros(batch_size, first.down.shape[1], rank)
        self.up = first.up.new_zeros(batch_size, rank, first.up.shape[0])
        for part, own, weight in zip(parts, samples, weights, strict=True):
            index = torch.tensor(own, device=first.down.device)
            size = part.down.shape[0]
            self.down[index, :, :size] = part.down.detach().t() * (part.scale * weight)
            self.up[index, :size] = part.up.detach().t()

    def join(self, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Add each sample's low-rank product to the layer's output."""
        low = torch.bmm(inputs[0].to(self.down.dtype), self.down)
        if out.dtype == low.dtype:
            return torch.baddbmm(out, low, self.up)
        return out + torch.bmm(low, self.up).to(out.dtype)


class _InBatch:
    """Placeholder for a LoRA module whose product the layer's `BatchedLowRank` already adds."""

    @staticmethod
    def join(inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Return the layer's output unchanged."""
        return out


def batch_choices(
    choices: dict[AdapterModule, AdapterChoice],
    samples: dict[AdapterModule, list[int]],
    batch_size: int,
) -> dict[AdapterModule, AdapterChoice]:
    """Return the `AdapterChoice`s of a layer.

    Two or more choices are batched if all are LoRAs without DoRA.

    Args:
        choices: `AdapterChoice` of every active module, in the order of application.
        samples: indices of the samples to which each module is applied.
        batch_size: number of samples.
    """
    plain = [part for part in choices if _is_plain(part)]
    if len(plain) < 2 or len(plain) < len(choices):
        return choices
    weights = [choices[part].weight for part in plain]
    batched = BatchedLowRank(plain, [samples[part] for part in plain], weights, batch_size)  # type: ignore[arg-type]
    first, *others = plain
    batched_choices = {first: choices[first]._replace(batched=batched)}
    return batched_choices | {part: choices[part]._replace(batched=_InBatch) for part in others}


def _is_plain(part: AdapterModule) -> bool:
    return (
        type(part) is LowRank
        and part.magnitude is None
        and part.bias is None
        and not (part.dropout and part.training)
        and type(part.down) is torch.nn.Parameter
    )
