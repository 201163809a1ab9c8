"""Builds boolean attention masks from padding, documents, windows and prefixes."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.errors import ShapeError

__all__ = ["build_mask"]


def build_mask(
    batch: tuple[int, int],
    device: torch.device,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    prefix_lengths: Tensor | None = None,
) -> Tensor | None:
    """Build the attention mask for T new tokens after `past` cached tokens; None if not needed.

    None means causal attention or, with `causal` off, attention to all tokens.

    Args:
        batch: (B, T).
        device: device of the mask.
        past: number of cached tokens.
        attention_mask: 1 for real tokens, 0 for padding.
        document_ids: document of each token in packed sequences; tokens attend within a document.
        causal: a token attends only to earlier tokens and itself.
        window: number of tokens that a token attends to, itself included; without `causal`, this
            many tokens on each side.
        prefix_lengths: length of the prefix that every token attends to; needs `causal`.

    Shape:
        attention_mask: (B, past + T)
        document_ids: (B, T), only without a past
        prefix_lengths: (B,)
        returns: (B or 1, 1, T or 1, past + T), True where a query attends
    """
    _, length = batch
    narrow = window is not None and past + length > window
    is_plain = attention_mask is None and document_ids is None and prefix_lengths is None
    if is_plain and not narrow and (not causal or past == 0 or length == 1):
        return None
    _check_mask_shapes(batch, past, attention_mask, document_ids)
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)[None, :]
    mask = key <= query if causal else torch.ones_like(key, dtype=torch.bool)
    if narrow and window is not None:
        mask = mask & (key > query - window)
        mask = mask if causal else mask & (key < query + window)
    mask = mask[None, None]
    if prefix_lengths is not None:
        mask = mask | (key < prefix_lengths[:, None, None, None])
    if attention_mask is not None:
        seen = attention_mask[:, None, None, :].bool()
        # A padding query has no key; attending to itself keeps its softmax finite.
        mask = mask & seen | (key == query)[None, None] if causal else mask & seen
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    # A query without any key (a sequence of padding) attends to all keys, for the same reason.
    return mask if causal else mask | ~mask.any(-1, keepdim=True)


def _check_mask_shapes(
    batch: tuple[int, int], past: int, attention_mask: Tensor | None, document_ids: Tensor | None
) -> None:
    """Raise `ShapeError` for masks whose shape would broadcast to an unintended mask."""
    batch_size, length = batch
    shapes = {"attention_mask": (batch_size, past + length), "document_ids": (batch_size, length)}
    for name, tensor in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if tensor is not None and tuple(tensor.shape) != shapes[name]:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)} (expected for {length} new and {past} "
                f"cached tokens: {shapes[name]})."
            )
    if document_ids is not None and past:
        raise ShapeError(
            "document_ids separates the documents of a packed training sequence and cannot be "
            "used with a KV cache. Leave document_ids or the cache out."
        )
