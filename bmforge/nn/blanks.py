"""Where the contents of blanks stand: GLM's two-dimensional positions, found in the token ids.

Source: Du et al., "GLM" (ACL 2022); the rules for rows that break the pattern are ModelCenter's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["blank_positions"]


def blank_positions(
    input_ids: Tensor, start_id: int, mask_id: int, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the positions of all tokens and the length of part A, the text with the blanks.

    Part A ends at the first start token (without one it is everything). The contents of the n-th
    blank have the position of the n-th mask token, the last contents that of the last one; beside
    it, tokens of part B count their place in their contents from 1.

    Args:
        input_ids: token ids.
        start_id: the token that begins the contents of a blank.
        mask_id: the token that stands for a blank.
        attention_mask: 0 for padding, which does not count.

    Shape:
        input_ids, attention_mask: (B, T); returns (B, 2, T) and (B,)
    """
    length = input_ids.shape[1]
    place = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    count = place if attention_mask is None else (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    starts, masks = input_ids == start_id, input_ids == mask_id
    span = starts.cumsum(1)
    inside = torch.where(span > 0, place - (place * starts).cummax(1).values + 1, 0)
    # Column n of the table is the position of blank n; the last column takes what is no blank.
    table = F.pad(torch.zeros_like(input_ids), (0, 1))
    table = table.scatter(1, torch.where(masks, masks.cumsum(1) - 1, length), count)
    blanks = masks.sum(1, keepdim=True)
    wanted = torch.where(span == span[:, -1:], blanks, span).minimum(blanks) - 1
    filled = table.gather(1, wanted.clamp(min=0))
    positions = torch.where((span > 0) & (blanks > 0), filled, count)
    return torch.stack((positions, inside), 1), (span == 0).sum(1)
