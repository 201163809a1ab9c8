"""Structures that describe blocks to the C++ decoding step, as declared in its .cpp files."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = [
    "AttentionPart",
    "Experts",
    "FeedPart",
    "Layer",
    "LowRankUpdate",
    "LowRankUpdates",
    "Matrix",
    "Norm",
    "PrefixPair",
    "Vector",
]


def _structure(name: str, fields: dict[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_POINTER, _SIZE, _NUMBER, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
)
Vector = _structure("Vector", {"data": _POINTER, "kind": _SIZE})
Norm = _structure("Norm", {"weight": Vector, "bias": Vector, "eps": _FLOAT, "kind": _NUMBER})
Matrix = _structure(
    "Matrix",
    {
        **dict.fromkeys(("weight", "scales", "minima"), _POINTER),
        "bias": Vector,
        **dict.fromkeys(("rows", "columns", "group"), _SIZE),
        **dict.fromkeys(("kind", "bits", "has_wide_scales", "keeps_floats"), _NUMBER),
        "adapters": _NUMBER,
    },
)
AttentionPart = _structure(
    "AttentionPart",
    {
        **dict.fromkeys(("norm", "query_norm", "key_norm"), Norm),
        **dict.fromkeys(("query", "key", "value", "out"), Matrix),
        **dict.fromkeys(("heads", "shared_heads", "width"), _SIZE),
        **dict.fromkeys(("scale", "in_scale", "add_scale"), _FLOAT),
        **dict.fromkeys(("exists", "causal", "interleaved", "mask", "prefix"), _NUMBER),
    },
)
FeedPart = _structure(
    "FeedPart",
    {
        "norm": Norm,
        **dict.fromkeys(("gate", "up", "down"), Matrix),
        **dict.fromkeys(("in_scale", "add_scale"), _FLOAT),
        **dict.fromkeys(("exists", "gated", "activation"), _NUMBER),
    },
)
Experts = _structure(
    "Experts",
    {
        **dict.fromkeys(("router", "shared_gate"), Matrix),
        **dict.fromkeys(("gates", "ups", "downs"), _POINTER),
        "per_token": _SIZE,
        **dict.fromkeys(("normalizes", "weighs"), _NUMBER),
    },
)
LowRankUpdate: Any = _structure(
    "LowRankUpdate",
    {
        **dict.fromkeys(("down", "up", "tokens"), _POINTER),
        **dict.fromkeys(("rank", "kind"), _SIZE),
        "scale": _FLOAT,
    },
)
PrefixPair: Any = _structure("PrefixPair", {"keys": _POINTER, "values": _POINTER, "count": _SIZE})
LowRankUpdates: Any = _structure("LowRankUpdates", {"data": _POINTER, "count": _SIZE})
Layer: Any = _structure(
    "Layer",
    {
        **dict.fromkeys(("attn", "cross"), AttentionPart),
        "feed": FeedPart,
        "experts": _POINTER,
        "sum_scale": _FLOAT,
        **dict.fromkeys(("norm_place", "bias"), _NUMBER),
    },
)
