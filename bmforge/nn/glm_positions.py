"""Two-dimensional positions of GLM's blank infilling, computed from token ids.

Source: Du et al., "GLM" (ACL 2022); irregular sequences are treated as in ModelCenter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["blank_positions"]


def blank_positions(
    input_ids: Tensor, start_id: int, mask_id: int, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two-dimensional positions of all tokens and the length of part A.

    Part A, the text with the mask tokens, ends at the first start token or at the end of the
    sequence. Part B consists of spans. The first position of a token in the n-th span is the
    position of the n-th mask token (for surplus spans, of the last mask token); the second position
    counts from 1 within the span.

    Args:
        input_ids: token ids.
        start_id: token that begins a span of part B.
        mask_id: mask token, which replaces a span in part A.
        attention_mask: 1 for tokens, 0 for padding, which gets no position.

    Shape:
        input_ids, attention_mask: (B, T); returns (B, 2, T) and (B,)
    """
    length = input_ids.shape[1]
    index = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    count = index if attention_mask is None else (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    starts, masks = input_ids == start_id, input_ids == mask_id
    span = starts.cumsum(1)
    inside = torch.where(span > 0, index - (index * starts).cummax(1).values + 1, 0)
    # Column n of the table is the position of blank n; tokens that are not masks write to the last
    # column.
    table = F.pad(torch.zeros_like(count), (0, 1))
    table = table.scatter(1, torch.where(masks, masks.cumsum(1) - 1, length), count)
    blanks = masks.sum(1, keepdim=True)
    blank = torch.where(span == span[:, -1:], blanks, span).minimum(blanks) - 1
    filled = table.gather(1, blank.clamp(min=0))
    positions = torch.where((span > 0) & (blanks > 0), filled, count)
    return torch.stack((positions, inside), 1), (span == 0).sum(1)
