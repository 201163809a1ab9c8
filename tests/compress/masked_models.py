"""Plans for tiny models of every family, and the whole models in which what they lose is silent."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny_models import build, make_inputs
from torch import Tensor, nn

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.block_hooks import blend_part_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan, blocks_of
from bmforge.nn import MoESpec
from bmforge.nn.norm import RMSNorm
from bmforge.surgery import persistent_tensors

__all__ = ["KINDS", "has_kind", "mostly_long", "plan_of", "run", "silence_", "stir"]

SEQ2SEQ = ["t5", "cpm2", "eva"]
FIXED_WIDTH = ["cpm_bee"]


def stir(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model whose biases and norms are not those of a fresh one."""
    model = build(name, dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def run(model: nn.Module, name: str) -> Tensor:
    """What the model's last layer makes of the inputs, or its head."""
    out = model(**make_inputs(name))
    found: Tensor = out.logits if out.logits is not None else out.last_hidden_state
    return found.detach()


def plan_of(model: Any, name: str, *kinds: str) -> PruningPlan:
    """Return a plan with some kinds of parts lost, unevenly where the family allows it."""
    layers: dict[str, dict[str, Any]] = {block: {} for block in blocks_of(model)}
    shared = name in (*SEQ2SEQ, "cpm_ant", "cpm_bee")
    for number, (block_name, block) in enumerate(blocks_of(model).items()):
        mine, spec = layers[block_name], block.spec
        groups = spec.attn.num_kv_heads
        each = spec.attn.num_heads // groups
        if "heads" in kinds:
            picked = [0, 3] if shared or number % 2 == 0 else [1, 2]
            if each > 1:  # of every group one, or one whole group
                picked = [1, 2] if number % 2 else [2, 3]
            mine["heads"] = tuple(picked)
            if spec.cross_attn is not None:
                mine["cross_heads"] = (1, 2)
        if "dims" in kinds:
            left = len(dict.fromkeys(h // each for h in mine.get("heads", range(groups * each))))
            kept = (0, 1, 4, 5) if name in ("llama", "qwen", "minicpm", "mixtral") else (0, 1, 2, 3)
            mine["query_dims"] = (kept,) * left
            mine["value_dims"] = tuple((0, 2 + g % 2, 4, 5) for g in range(left))
        if "features" in kinds:
            wide = tuple(range(number, spec.mlp.intermediate_size, 3))
            is_stack = isinstance(spec.mlp, MoESpec)
            mine["features"] = (wide, wide[::-1], wide) if is_stack else wide
            if is_stack and "experts" in kinds:
                mine["features"] = (wide, wide[::-1])
        if "experts" in kinds:
            mine["experts"] = (2, 0)
        if "halves" in kinds and number % 3 == 0:
            mine.clear()
            mine["attn"] = False
        if "halves" in kinds and number % 3 == 1:
            mine.pop("features", None)
            mine["mlp"] = False
    hidden = tuple(range(1, model.config.hidden_size, 2)) if "hidden" in kinds else None
    gone = ()
    if "blocks" in kinds:
        gone = tuple(n for n in layers if n.endswith(".1"))
    kept_layers = {n: KeptIndices(**o) for n, o in layers.items() if o and n not in gone}
    return PruningPlan(kept_layers, gone, hidden)


@torch.no_grad()
def silence_(model: Any, plan: PruningPlan) -> None:
    """Let what a plan loses add nothing, without changing any size."""
    for name, block in blocks_of(model).items():
        kept = plan.layers.get(name, KeptIndices())
        if name in plan.gone:
            blend_part_(block, "block", pass_before)
        if not kept.attn:
            blend_part_(block, "attn", pass_before)
        if not kept.mlp:
            blend_part_(block, "mlp", pass_before)
        for part, heads in (("attn", kept.heads), ("cross_attn", kept.cross_heads)):
            attn = getattr(block, part)
            if attn is not None:
                silence_heads_(attn, getattr(block.spec, part), heads, kept)
        silence_features_(block, kept)
    if plan.hidden is not None:
        silence_hidden_(model, plan.hidden)


def pass_before(before: Tensor, after: Tensor) -> Tensor:
    return before


def silence_heads_(attn: Any, spec: Any, heads: Any, kept: KeptIndices) -> None:
    each = spec.num_heads // spec.num_kv_heads
    heads = range(spec.num_heads) if heads is None else heads
    columns = torch.zeros(spec.num_heads, spec.head_dim)
    order = list(dict.fromkeys(h // each for h in heads))
    for head in heads:
        dims = (
            slice(None) if kept.value_dims is None else kept.value_dims[order.index(head // each)]
        )
        columns[head, list(dims) if isinstance(dims, tuple) else dims] = 1
    attn.o_proj.weight *= columns.flatten().to(attn.o_proj.weight)
    if kept.query_dims is not None:
        for group, dims in zip(order, kept.query_dims, strict=True):
            lost = [d for d in range(spec.head_dim) if d not in dims]
            for projection in ("q_proj", "q_global_proj"):
                for parameter in getattr(attn, projection, nn.Module()).parameters():
                    rows = parameter.unflatten(0, (spec.num_kv_heads, each, spec.head_dim))
                    rows[group, :, lost] = 0


def silence_features_(block: Any, kept: KeptIndices) -> None:
    if block.mlp is None or not kept.mlp:
        return
    spec = block.spec.mlp
    if isinstance(spec, MoESpec):
        down = block.mlp.experts.down_proj
        numbers = range(spec.num_experts) if kept.experts is None else kept.experts
        mask = torch.zeros(spec.num_experts, spec.intermediate_size)
        for place, expert in enumerate(numbers):
            chosen = slice(None) if kept.features is None else list(kept.features[place])
            mask[expert, chosen] = 1
        down *= mask[:, None].to(down)
        if kept.experts is not None:  # nobody is sent to an expert that is gone
            lost = [e for e in range(spec.num_experts) if e not in kept.experts]
            router = block.mlp.router
            router.register_forward_hook(lambda m, a, out: hide_columns(out, lost))
    elif kept.features is not None:
        mask = torch.zeros(spec.intermediate_size)
        mask[list(kept.features)] = 1
        block.mlp.down_proj.weight *= mask.to(block.mlp.down_proj.weight)


def hide_columns(out: Tensor, lost: list[int]) -> Tensor:
    out = out.clone()
    out[:, lost] = -torch.inf
    return out


def silence_hidden_(model: Any, hidden: Iterable[int]) -> None:
    """Zero hidden features everywhere; norms see those that stay."""
    width, kept = model.config.hidden_size, list(hidden)
    lost = [d for d in range(width) if d not in kept]
    small = copy.deepcopy(model)
    apply_plan_(small, PruningPlan(hidden=tuple(kept)))
    shapes = {n: t.shape for n, t in persistent_tensors(small).items()}
    for name, tensor in persistent_tensors(model).items():
        for dim, (a, b) in enumerate(zip(tensor.shape, shapes[name], strict=True)):
            if a != b:
                tensor.index_fill_(dim, torch.tensor(lost), 0.0)
    for module in model.modules():
        if isinstance(module, (RMSNorm, nn.LayerNorm)) and module.weight.shape[0] == width:
            module.forward = narrow_norm(module, kept, width)  # type: ignore[method-assign]


def narrow_norm(module: Any, kept: list[int], width: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        some = x[..., kept].double()
        if isinstance(module, nn.LayerNorm):
            some = some - some.mean(-1, keepdim=True)
        some = some / (some.pow(2).mean(-1, keepdim=True) + module.eps).sqrt()
        some = some * module.weight[kept]
        if getattr(module, "bias", None) is not None:
            some = some + module.bias[kept]
        return torch.zeros_like(x).index_copy(-1, torch.tensor(kept), some.to(x))

    return forward


KINDS = ["heads", "dims", "features", "halves", "blocks", "hidden", "experts"]


def mostly_long(values: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Return cases of which all but some are left to `make test-all`."""
    soon = list(quick)
    return [v if v in soon else pytest.param(v, marks=pytest.mark.long) for v in values]


def has_kind(name: str, kind: str) -> bool:
    if kind == "experts":
        return name == "mixtral"
    if kind == "dims" and name in ("qwen", "mixtral"):
        return True
    return not (kind == "hidden" and name in FIXED_WIDTH)
