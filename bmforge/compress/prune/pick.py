"""Which rows and columns of a layer's tensors stay, and what scales their numbers take over.

The masked model, in which the rest is silent, and the small one compute the same: scales that
follow from a width (1/sqrt(H), Tensor Programs', a head's) are another in a smaller model, and what
they lose goes into the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune.plan import Kept, heads_per_group, kept_groups
from bmforge.nn import AttentionSpec, Block, BlockSpec, MoESpec

__all__ = ["fold_block", "pick_block", "take"]

# (dim, numbers along it that stay; of a stack, (E, n) different ones for every entry)
Picks = list[tuple[int, Tensor]]


def take(tensor: Tensor, picks: Picks) -> Tensor:
    """Return what stays of a tensor, with memory of its own.

    Shape:
        tensor: any; numbers: (n,), or (E, n) for a tensor (E, ...)
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


def pick_block(block: Block, kept: Kept) -> dict[str, Picks]:
    """Return what stays of a block's own parameters, by their names; of others all does."""
    picks: dict[str, Picks] = {}
    for part, heads in (("attn", kept.heads), ("cross_attn", kept.cross_heads)):
        spec = getattr(block.spec, part)
        if spec is not None:
            for key, numbers in _attention_rows(spec, heads, kept).items():
                # Of the last projection it is what goes in.
                dims = {"weight": 1} if key == "o_proj" else {"weight": 0, "bias": 0}
                for kind, dim in dims.items():
                    picks[f"{part}.{key}.{kind}"] = [(dim, numbers)]
    spec = block.spec.mlp
    if isinstance(spec, MoESpec):
        return picks | _expert_picks(kept)
    if spec is not None and kept.features is not None:
        numbers = torch.tensor(kept.features)
        for key in ("gate_proj", "up_proj"):
            picks[f"mlp.{key}.weight"] = picks[f"mlp.{key}.bias"] = [(0, numbers)]
        picks["mlp.down_proj.weight"] = [(1, numbers)]
    return picks


def _attention_rows(
    spec: AttentionSpec, heads: Sequence[int] | None, kept: Kept
) -> dict[str, Tensor]:
    """Return module -> rows that stay of its result (of o: columns of what it takes)."""
    if heads is None and kept.query_dims is None:
        return {}
    heads = tuple(range(spec.num_heads)) if heads is None else heads
    groups, width = kept_groups(spec, heads), spec.head_dim
    whole = (tuple(range(width)),) * len(groups)
    query, value = kept.query_dims or whole, kept.value_dims or whole
    place = {group: number for number, group in enumerate(groups)}
    per_head = [place[head // heads_per_group(spec)] for head in heads]

    def rows(units: Sequence[int], dims: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(
            [u * width + d for u, mine in zip(units, dims, strict=True) for d in mine]
        )

    of_heads = rows(heads, [query[number] for number in per_head])
    found = {
        "q_proj": of_heads,
        "k_proj": rows(groups, query),
        "v_proj": rows(groups, value),
        "o_proj": rows(heads, [value[number] for number in per_head]),
    }
    found |= {f"{key[0]}_global_proj": found[key] for key in ("q_proj", "k_proj", "v_proj")}
    if kept.query_dims is not None:
        norm = torch.tensor(query[0])
        found |= {"q_norm": norm, "k_norm": norm}
    return found


def _expert_picks(kept: Kept) -> dict[str, Picks]:
    """Return what stays of stacked experts and of their router."""
    first: Picks = [] if kept.experts is None else [(0, torch.tensor(kept.experts))]
    inside = None if kept.features is None else torch.tensor(kept.features)
    picks: dict[str, Picks] = {"mlp.router.weight": list(first)}
    for key, dim in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        width: Picks = [] if inside is None else [(dim, inside)]
        picks[f"mlp.experts.{key}"] = first + width
    return picks


def fold_block(old: BlockSpec, new: BlockSpec, key: str, has_norm: bool) -> float:
    """Return the factor that a parameter of a block takes over from the scales that are another.

    Args:
        old: what the block was built of, and
        new: what the smaller one is.
        key: of the parameter, such as ``"attn.q_proj.weight"``.
        has_norm: q and k are normed per head, after which a factor on q has no effect.
    """
    part, _, leaf = key.partition(".")
    specs: Any = getattr(old, part, None), getattr(new, part, None)
    if part not in ("attn", "cross_attn", "mlp") or None in specs:
        return 1.0
    module, _, kind = leaf.rpartition(".")
    module = module or kind  # stacked experts are parameters themselves
    factor = 1.0
    is_last = module.endswith(("o_proj", "down_proj")) or leaf.endswith("experts.down_proj")
    # Attention to a memory has no scales of Tensor Programs; see `Block`.
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
