"""Tables of tensor names in GGUF files: one for most decoders, others for T5, BERT and so on.

Most names are the same in all architectures, so families share tables.

Source: ``constants.py`` of the ``gguf`` package (MODEL_TENSORS, TENSOR_NAMES).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmforge.models.weights import WeightRule, linear_rules

__all__ = ["ROPE_TENSORS", "find_rules", "is_norm", "is_permuted", "permute_rows", "restore_rows"]

# Factors on rotary frequencies: config values stored as tensors.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_ATTENTION = {
    **{f"{name}_proj": name for name in ("q", "k", "v")},
    **{f"{name}_norm": f"{name}_norm" for name in ("q", "k")},
}
_LAYER = {
    "attn_norm": "attn_norm",
    **{f"attn.{name}": f"attn_{short}" for name, short in _ATTENTION.items()},
    "attn.o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_ffw_norm",
    **{f"mlp.{name}": f"ffn_{short}" for name, short in _MLP.items()},
    "mlp.router": "ffn_gate_inp",
    **{f"mlp.shared_expert.{name}": f"ffn_{short}_shexp" for name, short in _MLP.items()},
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
_KINDS = ("weight", "bias")
_ENDS = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}


def _in_layers(names: Mapping[str, str], stack: str = "layers", prefix: str = "blk") -> list:
    return linear_rules({f"{stack}.{{i}}.{a}": f"{prefix}.{{i}}.{b}" for a, b in names.items()})


_DECODER = [
    *linear_rules(_ENDS),
    *_in_layers(_LAYER),
    *(
        WeightRule(f"layers.{{i}}.mlp.experts.{name}", f"blk.{{i}}.ffn_{short}_exps.weight")
        for name, short in _MLP.items()
    ),
]
_FUSED = [
    WeightRule(f"layers.{{i}}.attn.{part}_proj.{kind}", f"blk.{{i}}.attn_qkv.{kind}", False, index)
    for kind in ("weight", "bias")
    # (index, count) instead of row ranges: the row counts depend on the layer, the order does not.
    for part, index in (("q", (0, 3)), ("k", (1, 3)), ("v", (2, 3)))
]
_SPLIT = re.compile(r"layers\.\{i\}\.attn\.[qkv]_proj\.")
_FUSED_DECODER = [*(rule for rule in _DECODER if not _SPLIT.match(rule.parameter)), *_FUSED]
_GPT2 = [WeightRule("embed_positions.weight", "position_embd.weight"), *_FUSED_DECODER]
_BERT = [
    *linear_rules(
        {
            "embed": "token_embd",
            "embed_positions": "position_embd",
            "embed_segments": "token_types",
            "embed_norm": "token_embd_norm",
            "pooler": "cls",
            "classifier": "cls.output",
        }
    ),
    *_in_layers({**_LAYER, "attn_norm": "attn_output_norm", "mlp_norm": "layer_output_norm"}),
]


def _t5_stack(stack: str, prefix: str) -> list[WeightRule]:
    layer = {**_LAYER, "attn.o_proj": "attn_o", "cross_attn_norm": "cross_attn_norm"}
    layer |= {f"cross_attn.{name}_proj": f"cross_attn_{name}" for name in "qkvo"}
    return [
        *linear_rules({f"{stack}.norm": f"{prefix}.output_norm"}),
        WeightRule(f"{stack}.rel_bias.weight", f"{prefix}.blk.0.attn_rel_b.weight"),
        *_in_layers(layer, f"{stack}.layers", f"{prefix}.blk"),
    ]


_T5 = [
    *linear_rules({"embed": "token_embd", "lm_head": "output"}),
    *_t5_stack("encoder", "enc"),
    *_t5_stack("decoder", "dec"),
]
_OUTPUT_NORMS = _in_layers({"attn_norm": "post_attention_norm", "mlp_norm": "post_ffw_norm"})
_NORMS = {f"layers.{{i}}.{part}_norm.{kind}" for part in ("attn", "mlp") for kind in _KINDS}
_OLMO2 = [*(rule for rule in _DECODER if rule.parameter not in _NORMS), *_OUTPUT_NORMS]
_GPT_OSS = [
    *(rule for rule in _DECODER if not rule.parameter.startswith("layers.{i}.mlp_norm.")),
    *_in_layers({"mlp_norm": "post_attention_norm"}),
    WeightRule("layers.{i}.attn.sinks.bias", "blk.{i}.attn_sinks.weight"),
    WeightRule("layers.{i}.mlp.experts.gate_bias", "blk.{i}.ffn_gate_exps.bias"),
    WeightRule("layers.{i}.mlp.experts.up_bias", "blk.{i}.ffn_up_exps.bias"),
    WeightRule("layers.{i}.mlp.down_bias", "blk.{i}.ffn_down_exps.bias"),
]
_UP = "layers.{i}.mlp.%s_proj.weight"
_GLM4 = [
    *(rule for rule in _DECODER if rule.parameter not in (_UP % "gate", _UP % "up")),
    # (index, count) instead of row ranges: the row counts depend on the layer, the order does not.
    WeightRule(_UP % "gate", "blk.{i}.ffn_up.weight", part=(0, 2)),
    WeightRule(_UP % "up", "blk.{i}.ffn_up.weight", part=(1, 2)),
]
_TABLES = {
    **{"gpt2": _GPT2, "bert": _BERT, "t5": _T5},
    **{"olmo2": _OLMO2, "olmo3": _OLMO2, "glm4": _GLM4, "gpt-oss": _GPT_OSS},
    **{"gptneox": _FUSED_DECODER, "falcon": _FUSED_DECODER},
    "bloom": [*linear_rules({"embed_norm": "token_embd_norm"}), *_FUSED_DECODER],
}
# Falcon with two norms in a block: llama.cpp's attention reads the second one.
_TWO_NORMS = [
    *(rule for rule in _FUSED_DECODER if rule.parameter not in _NORMS),
    *_in_layers({"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}),
]


def find_rules(architecture: str, model: Any) -> list[WeightRule]:
    """Map a model's parameter names to the tensor names in GGUF files of an architecture.

    Parameters of a head that GGUF does not define get names that no such file contains.
    """
    rules = _TABLES.get(architecture, _DECODER)
    if architecture == "falcon" and model.config.parallel_norms:
        rules = _TWO_NORMS
    own_names = {rule.parameter for rule in rules}
    head = model.config.heads[model.config.head].names
    head_rules = [WeightRule(name, f"bmforge.{name}") for name in head if name not in own_names]
    return model.expand([*rules, *head_rules])


_NORM = re.compile(r"(blk\.\d+\.)?\w+_norm(_2)?\.weight")


def is_norm(name: str) -> bool:
    """Return True for the weight of a norm."""
    return _NORM.fullmatch(name) is not None


_PERMUTED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


def is_permuted(name: str) -> bool:
    """Return True for Llama's query and key, whose rows some architectures permute.

    In files of these architectures, the two dims of a rotary pair are adjacent.
    """
    return _PERMUTED.fullmatch(name) is not None


def restore_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Map row indices of a bmforge tensor to row indices in a file with adjacent rotary pairs.

    Shape:
        rows: (...), row indices; returns (...)
    """
    head, inner = rows // head_dim, rows % head_dim
    half = head_dim // 2
    return head * head_dim + inner % half * 2 + inner // half


def permute_rows(tensor: Tensor, head_dim: int) -> Tensor:
    """Return a bmforge tensor with its rows in the file's order.

    Shape:
        tensor: (heads * head_dim, ...); returns the same shape
    """
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return torch.transpose(halves, 1, 2).reshape(tensor.shape)
