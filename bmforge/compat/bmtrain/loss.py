"""Cross-entropy in fp32 for logits of any dtype, over a full or a sharded vocabulary."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError, ShapeError
from bmforge.parallel.collectives import split_softmax, sum_forward

__all__ = ["FusedCrossEntropy", "has_inf_nan"]


class FusedCrossEntropy(nn.Module):
    """Cross-entropy loss like torch.nn.CrossEntropyLoss, but 0 if all targets are ignored.

    Args:
        weight: weight per class.
        ignore_index: target value that is ignored.
        reduction: "mean" (weighted by the targets' class weights), "sum" or "none".
        label_smoothing: smoothing as in torch, for every dtype.
        parallel: True if each tensor-parallel process has the logits of its part of the classes
            for the same rows; all get the same loss.

    Shape:
        input: (rows, C), with `parallel` (rows, C / tp); target: (rows,) of any integer dtype
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ConfigError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'.")
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.parallel = label_smoothing, parallel

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss in fp32, or in the logits' dtype if that is wider."""
        if input.dim() != 2 or target.shape != input.shape[:1]:
            raise ShapeError(
                f"logits have shape {tuple(input.shape)} and targets {tuple(target.shape)} "
                "(needed: (M, C) and (M,)). Flatten them with .view(-1, C) and .view(-1)."
            )
        logits = input.to(torch.promote_types(input.dtype, torch.float32))
        target = target.long()
        weight = None if self.weight is None else self.weight.to(logits)
        if self.parallel and config["tp_size"] > 1:
            losses = self._over_parts(logits, target, weight)
        else:
            losses = F.cross_entropy(
                logits,
                target,
                weight,
                ignore_index=self.ignore_index,
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
        if self.reduction == "none":
            return losses
        total = losses.sum()
        if self.reduction == "sum":
            return total
        counts = target != self.ignore_index
        count = (counts if weight is None else weight[target * counts] * counts).sum()
        return total / count.to(total).masked_fill(count == 0, 1.0)

    def _over_parts(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Return the loss of each row for a sharded vocabulary.

        Comm: two all-reduces, of one and of two scalars per row; one more for label smoothing.
        """
        group, width, counted = config["tp_comm"], logits.shape[1], target != self.ignore_index
        first, classes = config["tp_rank"] * width, width * config["tp_size"]
        shifted, log_mass, picked = split_softmax(logits, target * counted, group)
        of_class = 1.0 if weight is None else weight[target * counted]
        loss = (log_mass - picked) * of_class * (1.0 - self.label_smoothing)
        if self.label_smoothing:
            own = shifted if weight is None else shifted * weight[first : first + width]
            all_weights = classes if weight is None else weight.sum()
            spread = (log_mass * all_weights - sum_forward(own.sum(1), group)) / classes
            loss = loss + self.label_smoothing * spread
        return loss * counted


def has_inf_nan(g_half: Tensor, out: Tensor) -> None:
    """Set `out` to 1 if a tensor has an infinite or NaN element, else to 0.

    Args:
        g_half: tensor of any floating-point dtype.
        out: scalar of dtype uint8.
    """
    out.fill_(int(not torch.isfinite(g_half).all()))
