"""Segment-based attention of CPM-Ant and CPM-Bee: position bias, segment relations, masks.

A text is split into segments. The bias of two tokens of one segment depends on their distance (in
T5's buckets); that of tokens of different segments depends on the segments' relation. Both are rows
of one trained table. Per-token inputs cover all S keys; the queries are the last T of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.nn.position import RopeSpec, apply_rope, rope_table
from bmforge.nn.relative import find_buckets

__all__ = [
    "BucketBias",
    "find_distances",
    "find_relations",
    "relation_rows",
    "context_mask",
    "segment_rows",
    "rotate_by_sub_id",
]

_OTHER_SAMPLE = 1
# Rotary positions per sub id: adjacent sub ids then differ in all but the slowest pairs of dims.
_SUB_SPACING = 16


class BucketBias(nn.Module):
    """Trained table of biases per head, added to attention scores.

    Args:
        num_heads: number N of heads.
        num_rows: number of rows of the table.

    Shape:
        rows: (B or 1, T, S), integers; returns (B or 1, N, T, S)

    Memory: the bias, computed once for all layers.
    """

    def __init__(self, num_heads: int, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, num_heads))

    def forward(self, rows: Tensor) -> Tensor:
        """Look up the biases of all (query, key) pairs."""
        return F.embedding(rows, self.weight).permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        """Return the sizes as text."""
        rows, heads = self.weight.shape
        return f"heads={heads}, rows={rows}"


def find_distances(
    length: int, device: torch.device, past: int = 0, position: Tensor | None = None
) -> Tensor:
    """Return key position minus query position for all (query, key) pairs.

    Args:
        length: number T of queries.
        device: device of the result.
        past: number of keys before the first query.
        position: positions of all keys; None means 0, 1, 2, ...

    Shape:
        position: (B, past + T); returns (B or 1, T, past + T)
    """
    if position is None:
        position = torch.arange(past + length, device=device)[None]
    return position[:, None, :] - position[:, past:, None]


def segment_rows(
    segment: Tensor, distance: Tensor, num_segments: int, num_buckets: int, max_distance: int
) -> Tensor:
    """Return row indices into CPM-Ant's bias table for all (query, key) pairs.

    Distance buckets come first, then one row per pair of segment types.

    Args:
        segment: segment type of every key.
        distance: key position minus query position, see `find_distances`.
        num_segments: number of segment types.
        num_buckets: number of buckets of distances within one type.
        max_distance: see `find_buckets`.

    Shape:
        segment: (B, S); distance: (B or 1, T, S); returns (B, T, S)
    """
    query, key = segment[:, -distance.shape[1] :, None].long(), segment[:, None, :].long()
    near = find_buckets(distance, True, num_buckets, max_distance)
    return torch.where(query == key, near, num_buckets + query * num_segments + key)


def relation_rows(
    relation: Tensor, distance: Tensor, num_buckets: int, max_distance: int
) -> Tensor:
    """Return row indices into CPM-Bee's bias table for all (query, key) pairs.

    Distance buckets come first, then one row per relation, starting with relation 1.

    Shape:
        relation: (B or 1, T, S), 0 within a segment; distance: (B or 1, T, S); returns (B, T, S)
    """
    near = find_buckets(distance, True, num_buckets, max_distance)
    return torch.where(relation == 0, near, num_buckets - 1 + relation)


def find_relations(
    segment: Tensor, num_segments: Tensor, offset: Tensor, relations: Tensor, together: Tensor
) -> Tensor:
    """Look up the relation of every query's segment to every key's segment.

    Args:
        segment: index of every key's segment in its sample.
        num_segments: number of segments in the key's sample.
        offset: start of the sample's relation table in `relations`.
        relations: concatenated (n, n) relation tables of the samples.
        together: True if query and key are in the same sample and span; otherwise the relation
            is 1.

    Shape:
        segment, num_segments, offset: (B, S); relations: (B, R); together: (B, T, S);
        returns (B, T, S)
    """
    _, length, width = together.shape
    start = segment[:, -length:] * num_segments[:, -length:] + offset[:, -length:]
    index = (start[:, :, None] + segment[:, None, :]).long() * together
    related = relations.long().gather(1, index.flatten(1)).unflatten(1, (length, width))
    return torch.where(together, related, _OTHER_SAMPLE)


def context_mask(
    context: Tensor, distance: Tensor, allowed: Tensor | None, real: Tensor | None
) -> Tensor:
    """Build the mask of CPM-Ant and CPM-Bee: bidirectional context, causal answers.

    Context tokens attend to all context tokens; answer tokens also to earlier answer tokens. Every
    token, even padding, attends to itself, so that no softmax is empty.

    Args:
        context: True for context tokens, which are not predicted.
        distance: see `find_distances`.
        allowed: further condition on a (query, key) pair, such as the same span; None for no
            condition.
        real: True for tokens, False for padding; None without padding.

    Shape:
        context, real: (B, S) boolean; distance: (B or 1, T, S); allowed: (B, T, S);
        returns (B, 1, T, S)
    """
    length, width = distance.shape[1:]
    mask = context[:, None, :] | (~context[:, -length:, None] & (distance <= 0))
    mask = mask if allowed is None else mask & allowed
    mask = mask if real is None else mask & real[:, None, :]
    own = torch.arange(width - length, width, device=mask.device)[:, None]
    return (mask | (own == torch.arange(width, device=mask.device)))[:, None]


def rotate_by_sub_id(x: Tensor, sub: Tensor) -> Tensor:
    """Rotate embeddings by their sub ids, so that one embedding row serves many tokens.

    Shape:
        x: (B, T, D); sub: (B, T), integers (0: unchanged); returns (B, T, D)

    Source: ``EmbeddingExt`` of OpenBMB/CPM-Bee, a rotary embedding over all D dims at position 16 x
    sub.
    """
    table = rope_table(RopeSpec(x.shape[-1]), sub * _SUB_SPACING, x.dtype)
    return apply_rope(x[:, None], table)[:, 0]
