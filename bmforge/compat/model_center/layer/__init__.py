"""ModelCenter's layers, for programs that build their own models.

Start at `basic.py`, then `attention.py`, `blocks.py` and `transformer.py`; `positions.py` has
position embeddings. The classes in `model` do not use these layers.
"""

from __future__ import annotations

from bmforge.compat.model_center.layer.attention import (
    Attention,
    DenseACT,
    DenseGatedACT,
    FeedForward,
    SparseSelfAttention,
)
from bmforge.compat.model_center.layer.basic import (
    Conv2d,
    Embedding,
    LayerNorm,
    Linear,
    PatchEmbedding,
)
from bmforge.compat.model_center.layer.blocks import (
    CrossAttentionBlock,
    FFNBlock,
    SelfAttentionBlock,
    TransformerBlock,
)
from bmforge.compat.model_center.layer.positions import (
    RelativePositionEmbedding,
    RotaryEmbedding,
    RotaryEmbeddingESM,
    SegmentPositionEmbedding,
)
from bmforge.compat.model_center.layer.transformer import Decoder, Encoder

__all__ = [
    "Attention",
    "Conv2d",
    "CrossAttentionBlock",
    "Decoder",
    "DenseACT",
    "DenseGatedACT",
    "Embedding",
    "Encoder",
    "FFNBlock",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "PatchEmbedding",
    "RelativePositionEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingESM",
    "SegmentPositionEmbedding",
    "SelfAttentionBlock",
    "SparseSelfAttention",
    "TransformerBlock",
]
