"""Shared layers, independent of config files, device meshes and other libraries.

Start reading at `block.py`; every model family in `models/` is built from these layers.
"""

from bmforge.nn.attention import Attention, AttentionSpec, build_mask
from bmforge.nn.block import Block, BlockSpec
from bmforge.nn.distillation import HeadInput, linear_distillation
from bmforge.nn.head import LMHead, Measure
from bmforge.nn.load_balance import balance_loads, count_loads, load_balancing_loss
from bmforge.nn.logprobs import linear_logprobs
from bmforge.nn.losses import linear_cross_entropy
from bmforge.nn.mlp import MLP, MLPSpec
from bmforge.nn.moe import MoE, MoESpec
from bmforge.nn.norm import NormSpec, build_norm
from bmforge.nn.position import RopeSpec, apply_rope, rope_frequencies, rope_table

__all__ = [
    "MLP",
    "Attention",
    "AttentionSpec",
    "Block",
    "BlockSpec",
    "HeadInput",
    "LMHead",
    "MLPSpec",
    "Measure",
    "MoE",
    "MoESpec",
    "NormSpec",
    "RopeSpec",
    "apply_rope",
    "build_mask",
    "build_norm",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_logprobs",
    "balance_loads",
    "count_loads",
    "load_balancing_loss",
    "rope_frequencies",
    "rope_table",
]
