"""Segments: positions within one, relations between them, and who sees whom (CPM-Ant, CPM-Bee).

A text is cut into segments. Two tokens of the same one are as far apart as they are, in T5's
buckets; two of different ones stand in a relation, whatever their distance. Both are rows of one
table of trained biases. What describes tokens comes for all S keys; the T queries are the last.
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
# Far enough apart for neighbouring sub ids to differ in every pair of dims but the slowest.
_SUB_SPACING = 16


class BucketBias(nn.Module):
    """A trained number per head and row of a table, to be added to attention scores.

    Args:
        num_heads: N.
        num_rows: rows of the table.

    Shape:
        rows: (B or 1, T, S), integers; returns (B or 1, N, T, S)

    Memory: the result, made once for all layers.
    """

    def __init__(self, num_heads: int, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, num_heads))

    def forward(self, rows: Tensor) -> Tensor:
        """Look the biases up."""
        return F.embedding(rows, self.weight).permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        """Show the sizes."""
        rows, heads = self.weight.shape
        return f"heads={heads}, rows={rows}"


def find_distances(
    length: int, device: torch.device, past: int = 0, position: Tensor | None = None
) -> Tensor:
    """Return how far every key is behind (or, below 0, before) every query.

    Args:
        length: T.
        device: of the result.
        past: number of keys before the first query's own.
        position: of all keys; None counts them.

    Shape:
        position: (B, past + T); returns (B or 1, T, past + T)
    """
    if position is None:
        position = torch.arange(past + length, device=device)[None]
    return position[:, None, :] - position[:, past:, None]


def segment_rows(
    segment: Tensor, distance: Tensor, num_segments: int, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the rows of CPM-Ant's table: buckets, then a row for every pair of segment kinds.

    Args:
        segment: kind of segment of every key.
        distance: see `find_distances`.
        num_segments: kinds there are.
        num_buckets: of distances within one kind.
        max_distance: see `find_buckets`.

    Shape:
        segment: (B, S); distance: (B or 1, T, S); returns (B, T, S)
    """
    mine, other = segment[:, -distance.shape[1] :, None].long(), segment[:, None, :].long()
    near = find_buckets(distance, True, num_buckets, max_distance)
    return torch.where(mine == other, near, num_buckets + mine * num_segments + other)


def relation_rows(
    relation: Tensor, distance: Tensor, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the rows of CPM-Bee's table: buckets, then a row for every relation from 1 on.

    Shape:
        relation: (B or 1, T, S), 0 within a segment; distance: (B or 1, T, S); returns (B, T, S)
    """
    near = find_buckets(distance, True, num_buckets, max_distance)
    return torch.where(relation == 0, near, num_buckets - 1 + relation)


def find_relations(
    segment: Tensor, num_segments: Tensor, offset: Tensor, relations: Tensor, together: Tensor
) -> Tensor:
    """Look up how the segment of every query is related to that of every key.

    Args:
        segment: number of every key's segment in its sample.
        num_segments: how many segments that sample has.
        offset: where that sample's relations begin in `relations`.
        relations: a (n, n) table per sample, one after the other.
        together: whether query and key are of one sample and span; else the relation is 1.

    Shape:
        segment, num_segments, offset: (B, S); relations: (B, R); together: (B, T, S);
        returns (B, T, S)
    """
    _, length, width = together.shape
    start = segment[:, -length:] * num_segments[:, -length:] + offset[:, -length:]
    index = (start[:, :, None] + segment[:, None, :]).long() * together
    found = relations.long().gather(1, index.flatten(1)).unflatten(1, (length, width))
    return torch.where(together, found, _OTHER_SAMPLE)


def see_context(
    context: Tensor, distance: Tensor, allowed: Tensor | None, real: Tensor | None
) -> Tensor:
    """Return which keys every query sees: all context, and what is written up to itself.

    Context sees context alone. Every token sees itself, padding too, so that no softmax is empty.

    Args:
        context: which tokens are given rather than written.
        distance: see `find_distances`.
        allowed: more that must hold of a pair, such as being of one span.
        real: which tokens are no padding.

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
    """Turn embeddings by their sub ids, so that one row of a table stands for many tokens.

    Shape:
        x: (B, T, D); sub: (B, T), integers, 0 leaves as it is; returns (B, T, D)

    Source: ``EmbeddingExt`` of OpenBMB/CPM-Bee: rotary over all of D, at position 16 x sub.
    """
    table = rope_table(RopeSpec(x.shape[-1]), sub * _SUB_SPACING, x.dtype)
    return apply_rope(x[:, None], table)[:, 0]
