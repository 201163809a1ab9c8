"""Position embeddings with ModelCenter's arguments: relative, segment, and rotary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.compat.bmtrain.module import DistributedModule
from bmforge.compat.model_center.layer.basic import normal_parameter
from bmforge.errors import ShapeError
from bmforge.nn.position import RopeSpec, apply_rope, rope_table
from bmforge.nn.relative import find_buckets

__all__ = [
    "RelativePositionEmbedding", "RotaryEmbedding", "RotaryEmbeddingESM",
    "SegmentPositionEmbedding",
]  # fmt: skip


class RelativePositionEmbedding(DistributedModule):
    """T5's relative position bias.

    Args:
        num_heads: number of heads N.
        num_buckets: number of distance buckets.
        max_distance: distance from which all distances share the last bucket.
        bidirectional: use separate buckets for later keys.
        dtype: parameter dtype (default: torch's).
        init_mean: mean of the initialization.
        init_std: standard deviation of the initialization.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        dtype: torch.dtype | None = None,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_buckets = num_heads, num_buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional
        shape = (num_buckets, num_heads)
        self.relative_attention_bias = normal_parameter(shape, dtype, init_mean, init_std)

    def forward(self, query: int | Tensor, key: int | Tensor) -> Tensor:
        """Return the position bias of attention scores.

        Args:
            query: number of queries, or their positions.
            key: number of keys, or their positions.

        Shape:
            query: (T,) or (B, T); key: (S,) or (B, S); returns (N, T, S) or (B, N, T, S)
        """
        table = self.relative_attention_bias
        query, key = (_positions(x, table.device) for x in (query, key))
        distance = key[..., None, :] - query[..., :, None]
        rows = find_buckets(distance, self.bidirectional, self.num_buckets, self.max_distance)
        return F.embedding(rows, table).movedim(-1, -3).contiguous()


class SegmentPositionEmbedding(DistributedModule):
    """CPM-3's position bias: by distance within a segment, by segment types across segments.

    Args:
        num_segments: number of segment types.
        absolute_inner_segment: within a segment, use the distance instead of the segment types.
        num_heads, num_buckets, max_distance, bidirectional, dtype, init_mean, init_std: as in
            `RelativePositionEmbedding`.
    """

    def __init__(
        self,
        num_heads: int,
        num_segments: int = 1,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        dtype: torch.dtype | None = None,
        absolute_inner_segment: bool = True,
        init_mean: float = 0.0,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_segments, self.num_buckets = num_segments, num_buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.absolute_inner_segment = absolute_inner_segment
        shape = (num_segments**2 + num_buckets, num_heads)
        self.relative_attention_bias = normal_parameter(shape, dtype, init_mean, init_std)

    def forward(
        self,
        key_pos: Tensor | int | None = None,
        query_pos: Tensor | int | None = None,
        key_segment: Tensor | None = None,
        query_segment: Tensor | None = None,
    ) -> Tensor:
        """Return the position bias of attention scores.

        Args:
            key_pos, query_pos: positions, or the number of positions (default: the length of
                `key_segment`, `query_segment`).
            key_segment, query_segment: segment types (default: 0).

        Shape:
            key_pos, key_segment: (B, S); query_pos, query_segment: (B, T); returns (B, N, T, S)

        Raises:
            ShapeError: neither positions nor segments are given for the queries, or for the keys.
        """
        keys_at, key_segment = self._side("key", key_pos, key_segment)
        queries_at, query_segment = self._side("query", query_pos, query_segment)
        ask, key_segments = query_segment[:, :, None], key_segment[:, None, :]
        rows = self.num_buckets + ask * self.num_segments + key_segments
        if self.absolute_inner_segment:
            distance = keys_at[:, None, :] - queries_at[:, :, None]
            near = find_buckets(distance, self.bidirectional, self.num_buckets, self.max_distance)
            rows = torch.where(ask == key_segments, near, rows)
        return F.embedding(rows, self.relative_attention_bias).movedim(-1, -3).contiguous()

    def _side(
        self, name: str, position: Tensor | int | None, segment: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions and the segment types of the queries or keys.

        Shape:
            both: (1 or B, length)
        """
        if position is None and segment is None:
            raise ShapeError(f"{name}_pos and {name}_segment are both None. Pass one of them.")
        if position is None:
            assert segment is not None
            position = segment.shape[-1]
        index = _positions(position, self.relative_attention_bias.device)
        index = index[None] if index.dim() == 1 else index
        return index, torch.zeros_like(index) if segment is None else segment


class _Rotary(nn.Module):
    """Rotary embedding of queries and keys; queries are at the last positions of the keys."""

    distance_scale: int | float = 1

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, h_q: Tensor, h_k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions.

        Shape:
            h_q: (B, heads, T, H); h_k: (B, KV heads, S, H); returns tensors of these shapes
        """
        count, pairs = h_k.shape[-2], self.spec.interleaved
        position = torch.arange(count, device=h_k.device)[None] * self.distance_scale
        table = rope_table(self.spec, position, h_k.dtype)
        cos, sin = (part[..., count - h_q.shape[-2] :, :] for part in table)
        return apply_rope(h_q, (cos, sin), pairs), apply_rope(h_k, table, pairs)


class RotaryEmbedding(_Rotary):
    """GPT-J's rotary embedding of interleaved pairs.

    Args:
        rotary_dim: number of features per head to rotate.
    """

    def __init__(self, rotary_dim: int) -> None:
        super().__init__(RopeSpec(rotary_dim, interleaved=True))
        self.rotary_dim = rotary_dim


class RotaryEmbeddingESM(_Rotary):
    """Llama's rotary embedding of the two halves of a head.

    Args:
        dim: head size.
        base: rotary base.
        distance_scale: factor that positions are multiplied by.
        dtype: accepted and ignored; angles are fp32.
    """

    def __init__(
        self,
        dim: int,
        base: int | float = 10000,
        distance_scale: int | float = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(RopeSpec(dim, float(base)))
        self.distance_scale = distance_scale


def _positions(positions: int | Tensor, device: torch.device) -> Tensor:
    return torch.arange(positions, device=device) if isinstance(positions, int) else positions
