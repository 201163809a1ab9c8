"""Selects rows and columns of a layer's tensors, and folds changed scales into weights.

The pruned model must compute the same as the masked full model. Scales that depend on a width
(1/sqrt(H), muP scales, the scale of a head) differ in the smaller model, so the weights are
multiplied by the ratio of the old to the new scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.plan import KeptIndices, heads_per_group, kept_groups
from bmforge.nn import AttentionSpec, Block, BlockSpec, MoESpec

__all__ = ["fold_block", "kept_indices_of_block", "take_slices"]

# List of (dim, kept indices along the dim); for stacked experts the indices are (E, n), one row per
# expert.
Picks = list[tuple[int, Tensor]]


def take_slices(tensor: Tensor, picks: Picks) -> Tensor:
    """Return a copy of the selected rows and columns of a tensor.

    Shape:
        tensor: any shape; indices in `picks`: (n,), or (E, n) for a tensor (E, ...)
    """
    for dim, numbers in picks:
        numbers = numbers.to(tensor.device)
        if numbers.dim() == 1:
            tensor = tensor.index_select(dim, numbers)
            continue
        shape = list(tensor.shape)
        shape[dim] = numbers.shape[1]
        view = [1] * tensor.dim()
        view[0], view[dim] = numbers.shape
        tensor = tensor.gather(dim, numbers.view(view).expand(shape))
    return tensor.clone()


def kept_indices_of_block(block: Block, kept_part: KeptIndices) -> dict[str, Picks]:
    """Return a dict from the name of each parameter to slice in a block to the kept indices."""
    picks: dict[str, Picks] = {}
    for part, heads in (("attn", kept_part.heads), ("cross_attn", kept_part.cross_heads)):
        spec = getattr(block.spec, part)
        if spec is not None:
            for key, numbers in _attention_rows(spec, heads, kept_part).items():
                # For the output projection the indices select input columns.
                dims = {"weight": 1} if key == "o_proj" else {"weight": 0, "bias": 0}
                for kind, dim in dims.items():
                    picks[f"{part}.{key}.{kind}"] = [(dim, numbers)]
    spec = block.spec.mlp
    if isinstance(spec, MoESpec):
        return picks | _expert_picks(kept_part)
    if spec is not None and kept_part.features is not None:
        numbers = torch.tensor(kept_part.features)
        for key in ("gate_proj", "up_proj"):
            picks[f"mlp.{key}.weight"] = picks[f"mlp.{key}.bias"] = [(0, numbers)]
        picks["mlp.down_proj.weight"] = [(1, numbers)]
    return picks


def _attention_rows(
    spec: AttentionSpec, heads: Sequence[int] | None, part: KeptIndices
) -> dict[str, Tensor]:
    """Return a dict from projection name to kept output rows (for `o_proj`, input columns)."""
    if heads is None and part.query_dims is None:
        return {}
    heads = tuple(range(spec.num_heads)) if heads is None else heads
    groups, width = kept_groups(spec, heads), spec.head_dim
    all_dims = (tuple(range(width)),) * len(groups)
    query, value = part.query_dims or all_dims, part.value_dims or all_dims
    position = {group: number for number, group in enumerate(groups)}
    per_head = [position[head // heads_per_group(spec)] for head in heads]

    def rows(units: Sequence[int], dims: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(
            [u * width + d for u, own_dims in zip(units, dims, strict=True) for d in own_dims]
        )

    of_heads = rows(heads, [query[number] for number in per_head])
    kept_rows = {
        "q_proj": of_heads,
        "k_proj": rows(groups, query),
        "v_proj": rows(groups, value),
        "o_proj": rows(heads, [value[number] for number in per_head]),
    }
    if spec.sinks:
        kept_rows["sinks"] = torch.tensor(heads)
    kept_rows |= {f"{key[0]}_global_proj": kept_rows[key] for key in ("q_proj", "k_proj", "v_proj")}
    if spec.qk_norm_whole:  # the norms are over all heads together
        kept_rows |= {"q_norm": kept_rows["q_proj"], "k_norm": kept_rows["k_proj"]}
    elif part.query_dims is not None:
        norm = torch.tensor(query[0])
        kept_rows |= {"q_norm": norm, "k_norm": norm}
    return kept_rows


def _expert_picks(part: KeptIndices) -> dict[str, Picks]:
    """Return a dict from the name of each MoE tensor to the kept experts and features."""
    first: Picks = [] if part.experts is None else [(0, torch.tensor(part.experts))]
    inside = None if part.features is None else torch.tensor(part.features)
    per_expert = ("router.weight", "router.bias", "router.choice_bias", "down_bias")
    picks: dict[str, Picks] = {f"mlp.{name}": list(first) for name in per_expert}
    dims = {"gate_proj": 1, "up_proj": 1, "down_proj": 2, "gate_bias": 1, "up_bias": 1}
    for key, dim in dims.items():
        width: Picks = [] if inside is None else [(dim, inside)]
        picks[f"mlp.experts.{key}"] = first + width
    return picks


def fold_block(old: BlockSpec, new: BlockSpec, key: str, has_norm: bool) -> float:
    """Return the factor by which a parameter absorbs scales that change with the new spec.

    Args:
        old: spec of the original block.
        new: spec of the smaller block.
        key: parameter name, such as ``"attn.q_proj.weight"``.
        has_norm: whether q and k have per-head norms, which cancel any factor on q.
    """
    part, _, leaf = key.partition(".")
    specs: Any = getattr(old, part, None), getattr(new, part, None)
    if part not in ("attn", "cross_attn", "mlp") or None in specs:
        return 1.0
    module, _, kind = leaf.rpartition(".")
    module = module or kind  # stacked experts are parameters, not modules
    factor = 1.0
    is_last = module.endswith(("o_proj", "down_proj")) or leaf.endswith("experts.down_proj")
    # Cross-attention has no Tensor Programs scales; see `Block`.
    scaled = part != "cross_attn"
    if is_last:
        factor *= old.residual_scale / new.residual_scale
        factor *= specs[0].out_scale / specs[1].out_scale if scaled else 1.0
    elif kind != "bias" and not module.endswith("_norm") and scaled:
        factor *= specs[0].in_scale / specs[1].in_scale
    asks = ("q_norm",) if has_norm else ("q_proj", "q_global_proj")
    if part != "mlp" and module in asks:
        factor *= _score_scale(specs[0]) / _score_scale(specs[1])
    return factor


def _score_scale(spec: AttentionSpec) -> float:
    return float(spec.head_dim**-0.5) if spec.scale is None else spec.scale
