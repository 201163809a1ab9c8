"""Segments of CPM-Ant and CPM-Bee: relative position bias, segment relations and masks.

A text is split into segments. Two tokens of one segment have a bias by their distance, in T5's
buckets; tokens of different segments have a bias by the segments' relation. Both biases are rows of
one trained table. Per-token inputs cover all S keys; the T queries are the last of them.
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
    "see_context",
    "segment_rows",
    "turn_by_sub",
]

_OTHER_SAMPLE = 1
# Distance at which adjacent sub ids differ in all pairs of dims but the slowest.
_SUB_SPACING = 16


class BucketBias(nn.Module):
    """Trained table of biases per head, added to attention scores.

    Args:
        num_heads: number N of heads.
        num_rows: rows of the table.

    Shape:
        rows: (B or 1, T, S), integers; returns (B or 1, N, T, S)

    Memory: the result, computed once for all layers.
    """

    def __init__(self, num_heads: int, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, num_heads))

    def forward(self, rows: Tensor) -> Tensor:
        """Look up the biases."""
        return F.embedding(rows, self.weight).permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        """Show the sizes."""
        rows, heads = self.weight.shape
        return f"heads={heads}, rows={rows}"


def find_distances(
    length: int, device: torch.device, past: int = 0, position: Tensor | None = None
) -> Tensor:
    """Return key position minus query position for all pairs.

    Args:
        length: number T of queries.
        device: device of the result.
        past: number of keys before the first query.
        position: positions of all keys; None is 0, 1, 2, ...

    Shape:
        position: (B, past + T); returns (B or 1, T, past + T)
    """
    if position is None:
        position = torch.arange(past + length, device=device)[None]
    return position[:, None, :] - position[:, past:, None]


def segment_rows(
    segment: Tensor, distance: Tensor, num_segments: int, num_buckets: int, max_distance: int
) -> Tensor:
    """Return row indices of CPM-Ant's bias table: buckets, then one row per pair of segment types.

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
    """Return row indices of CPM-Bee's bias table: buckets, then one row per relation from 1 on.

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
        together: True if query and key are in the same sample and span; else the relation is 1.

    Shape:
        segment, num_segments, offset: (B, S); relations: (B, R); together: (B, T, S);
        returns (B, T, S)
    """
    _, length, width = together.shape
    start = segment[:, -length:] * num_segments[:, -length:] + offset[:, -length:]
    index = (start[:, :, None] + segment[:, None, :]).long() * together
    related = relations.long().gather(1, index.flatten(1)).unflatten(1, (length, width))
    return torch.where(together, related, _OTHER_SAMPLE)


def see_context(
    context: Tensor, distance: Tensor, allowed: Tensor | None, real: Tensor | None
) -> Tensor:
    """Return the mask in which queries see all context, and answer tokens up to themselves.

    Context attends to context only. Every token, padding too, attends to itself, so that no softmax
    is empty.

    Args:
        context: True for given (not predicted) tokens.
        distance: see `find_distances`.
        allowed: further condition on a pair, such as being in the same span.
        real: True for tokens that are no padding.

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


def turn_by_sub(x: Tensor, sub: Tensor) -> Tensor:
    """Rotate embeddings by their sub ids, so that one row of the table encodes many tokens.

    Shape:
        x: (B, T, D); sub: (B, T), integers, 0 leaves as it is; returns (B, T, D)

    Source: ``EmbeddingExt`` of OpenBMB/CPM-Bee: rotary over all of D, at position 16 x sub.
    """
    table = rope_table(RopeSpec(x.shape[-1]), sub * _SUB_SPACING, x.dtype)
    return apply_rope(x[:, None], table)[:, 0]
