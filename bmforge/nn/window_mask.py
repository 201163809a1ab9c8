"""Masks for sliding-window attention with global tokens (`window.py`), built once per call."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ShapeError

__all__ = ["WindowMask", "build_window_mask"]

# Blocks as long as the reach compute 1.5 times the band. Smaller ones compute less, but copy the
# global tokens more often, and their products are too small to be fast.
_SMALLEST_BLOCK = 64


class WindowMask(NamedTuple):
    """Attention mask shared by all layers with the same window.

    Args:
        reach: number of tokens on each side to which a token attends.
        block: queries per block; 0 if the sequences are too short for blocks.
        allowed: True where a query attends; with blocks (B * blocks, 1, block, G + block + 2 *
            reach), global tokens first, otherwise (B, 1, T, T).
        real: 1 for tokens, 0 for padding, (B, T); None without padding.
        chosen: positions of the global tokens, (B, G), padded with other positions.
        is_chosen: True for entries of `chosen` that are global tokens, (B, G).
        seen_by_chosen: keys that the global tokens attend to, (B, 1, G, T).
    """

    reach: int
    block: int
    allowed: Tensor
    real: Tensor | None
    chosen: Tensor | None
    is_chosen: Tensor | None
    seen_by_chosen: Tensor | None


def build_window_mask(
    batch: tuple[int, int],
    device: torch.device,
    window: int,
    *,
    attention_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    max_global_tokens: int | None = None,
) -> WindowMask:
    """Build the mask for layers in which tokens see `window` / 2 tokens on each side.

    Args:
        batch: (B, T).
        device: device of the mask.
        window: window size (even).
        attention_mask: 1 for tokens, 0 for padding.
        global_mask: 1 for global tokens; padding is never global.
        document_ids: document of each token in packed sequences; tokens attend within a document.
        max_global_tokens: maximum number of global tokens per sequence; if None, they are counted.
            A compiled graph cannot count them and assumes T, which makes the cost quadratic.

    Shape:
        attention_mask, global_mask, document_ids: (B, T)

    Raises:
        ShapeError: a mask has a different shape, or there are more than `max_global_tokens`.
    """
    masks = {
        "attention_mask": attention_mask,
        "global_attention_mask": global_mask,
        "document_ids": document_ids,
    }
    for name, tensor in masks.items():
        if tensor is not None and tuple(tensor.shape) != batch:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)} (expected: {batch}, the shape of "
                "input_ids)."
            )
    real = None if attention_mask is None else attention_mask > 0
    chosen = is_chosen = seen = None
    near = torch.ones(batch, dtype=torch.bool, device=device) if real is None else real
    if global_mask is not None:
        is_global = (global_mask > 0) & near
        # At least one, so that all ranks of a layout use the same weights (and gather them).
        count = max(1, _count_globals(is_global, max_global_tokens))
        chosen = is_global.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        is_chosen = is_global.gather(1, chosen)
        seen = _seen_by_chosen(near, chosen, is_chosen, document_ids)
    reach = window // 2
    block = max(_SMALLEST_BLOCK, reach)
    block = 0 if batch[1] <= block + 2 * reach else block
    inputs = _MaskInputs(reach, block, real, near, chosen, is_chosen, document_ids)
    allowed = _allow_in_blocks(inputs) if block else _allow_whole(inputs)
    return WindowMask(reach, block, allowed, real, chosen, is_chosen, seen)


class _MaskInputs(NamedTuple):
    """Inputs of the functions that build `WindowMask.allowed`; see `WindowMask` for the fields."""

    reach: int
    block: int
    real: Tensor | None
    near: Tensor
    chosen: Tensor | None
    is_chosen: Tensor | None
    documents: Tensor | None


def _count_globals(is_global: Tensor, limit: int | None) -> int:
    """Return how many global tokens a sequence may have: `limit`, or the most that occur.

    A compiled graph cannot count the tokens; without a limit it assumes the sequence length.

    Raises:
        ShapeError: a sequence has more than `limit` global tokens.
    """
    length = is_global.shape[1]
    if torch.compiler.is_compiling():
        return length if limit is None else min(limit, length)
    count = int(is_global.sum(1).max())
    if limit is not None and count > limit:
        raise ShapeError(
            f"a sequence has {count} global tokens, more than max_global_tokens={limit}. Mark "
            "fewer tokens, or increase max_global_tokens."
        )
    return count if limit is None else min(limit, length)


def _seen_by_chosen(
    near: Tensor, chosen: Tensor, is_chosen: Tensor, documents: Tensor | None
) -> Tensor:
    """Return a mask of the keys to which global tokens attend; unused entries attend to all keys.

    An unused entry of `chosen` without keys would result in NaN.
    """
    seen = near[:, None, :]
    if documents is not None:
        seen = seen & (documents.gather(1, chosen)[:, :, None] == documents[:, None, :])
    return (seen | ~is_chosen[:, :, None])[:, None]


def _allow_whole(p: _MaskInputs) -> Tensor:
    """Build the mask for short sequences, without blocks: (B, 1, T, T)."""
    position = torch.arange(p.near.shape[1], device=p.near.device)
    allowed = ((position[:, None] - position).abs() <= p.reach)[None]
    if p.chosen is not None and p.is_chosen is not None:
        is_global = torch.zeros_like(p.near).scatter(1, p.chosen, p.is_chosen)
        allowed = allowed | is_global[:, None, :]
    allowed = allowed & p.near[:, None, :]
    if p.documents is not None:
        allowed = allowed & (p.documents[:, :, None] == p.documents[:, None, :])
    # A padding query has no key; attending to itself keeps its softmax finite.
    allowed = allowed if p.real is None else allowed | (position[:, None] == position)
    return allowed[:, None]


def _allow_in_blocks(p: _MaskInputs) -> Tensor:
    """Build the mask for each block of queries: (B * blocks, 1, block, G + block + 2 * reach).

    G is the number of global tokens, and `reach` the number of visible tokens on each side.
    """
    length = p.near.shape[1]
    padding = -length % p.block
    span = p.block + 2 * p.reach

    def cut(flags: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """Split a tensor with one value per token by query block, and by the keys of each block.

        Positions outside of the sequence get the value `fill`.

        Shape:
            flags: (B, T); returns (B, blocks, block) and (B, blocks, span)
        """
        own = F.pad(flags, (0, padding), value=fill)
        wide = F.pad(own, (p.reach, p.reach), value=fill)
        return own.unflatten(1, (-1, p.block)), wide.unfold(1, span, p.block)

    near = p.near
    if p.chosen is not None and p.is_chosen is not None:
        near = near & ~torch.zeros_like(near).scatter(1, p.chosen, p.is_chosen)
    query = torch.arange(p.block, device=near.device)[:, None]
    key = torch.arange(span, device=near.device)[None, :] - p.reach
    allowed = (key - query).abs() <= p.reach
    allowed = allowed & cut(near, 0)[1][:, :, None, :]
    if p.documents is not None:
        own, reached = cut(p.documents, -1)
        allowed = allowed & (own[..., None] == reached[:, :, None, :])
    is_real, _ = cut(torch.ones_like(near) if p.real is None else p.real, 0)
    # Padding attends to itself here too, and so does the padding of the last block.
    allowed = allowed | ((key == query) & ~is_real[..., None])
    if p.chosen is not None and p.is_chosen is not None:
        first = p.is_chosen[:, None, None, :].expand(*allowed.shape[:3], -1)
        if p.documents is not None:
            global_documents = p.documents.gather(1, p.chosen)[:, None, None, :]
            first = first & (cut(p.documents, -1)[0][..., None] == global_documents)
        allowed = torch.cat((first, allowed), dim=-1)
    return allowed.flatten(0, 1)[:, None]
