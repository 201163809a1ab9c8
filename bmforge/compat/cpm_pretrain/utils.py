"""Megatron's helpers for masks, positions and losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.compat.cpm_pretrain.program import print_rank_0

__all__ = ["get_ltor_masks_and_position_ids", "print_rank_0", "reduce_losses"]


def reduce_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over all processes."""
    total = torch.stack([loss.detach().float().reshape(()) for loss in losses])
    dist.all_reduce(total)
    return total / dist.get_world_size()


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention mask, the loss mask and the position ids of a batch.

    Args:
        data: token ids.
        eod_token: id of the end-of-document token.
        reset_position_ids: True to restart positions after this token.
        reset_attention_mask: True to prevent attention across this token.
        eod_mask_loss: True to exclude this token from the loss.

    Shape:
        data: (B, T) -> (B or 1, 1, T, T) booleans (True is masked), (B, T), (B, T)
    """
    rows, length = data.shape
    places = torch.arange(length, device=data.device)
    hidden = (places[None, :] > places[:, None])[None]
    ends = data == eod_token
    # Document index of each token; an end token belongs to the document that it ends.
    document = ends.cumsum(1) - ends.long()
    if reset_attention_mask:
        hidden = hidden | (document[:, :, None] != document[:, None, :])
    counts = (~ends if eod_mask_loss else torch.ones_like(ends)).float()
    position_ids = places.expand(rows, length)
    if reset_position_ids:
        begins = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), 1)
        position_ids = position_ids - (places * begins).cummax(1).values
    return hidden[:, None], counts, position_ids
