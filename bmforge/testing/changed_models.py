"""Builds models with LoRA, int8 or resized layers, and equivalent models without these changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.models import Change
from bmforge.models.sizes import sizes_of
from bmforge.nn import Block, LMHead
from bmforge.nn.int8 import Int8Experts, RowStore
from bmforge.nn.low_rank import ExpertsLowRank, LowRank
from bmforge.nn.moe import Experts
from bmforge.testing.batches import Batch

__all__ = [
    "change_everything",
    "list_outputs",
    "list_parts",
    "list_stored",
    "low_rank_everywhere",
    "merge_parts_",
    "resize_changes",
    "run_step_of",
    "zero_removed_units_",
    "randomize_parts_",
    "stored_as_int8",
    "value_of",
    "to_float64",
]

_RANK = 2
# Layers with LoRA modules, and layers with int8 weights; some are in both lists, some in neither.
_PARTS_BESIDE = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_STORED = ("k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def resize_changes(model: nn.Module) -> list[Change]:
    """Return a `Change` per stack that halves the heads and MLP width of its last block.

    Heads are not halved if one norm is over all heads, because its mean square would change,
    or with ALiBi, whose slopes depend on the number of heads.
    """
    last = {name.rpartition(".")[0]: name for name, m in model.named_modules() if is_block(m)}
    changes = []
    for name in last.values():
        spec: Any = model.get_submodule(name).spec
        sizes, options = sizes_of(spec), {}
        depends_on_count = spec.attn is not None and (spec.attn.qk_norm_whole or spec.attn.alibi)
        if (
            sizes.num_heads
            and not (depends_on_count or sizes.latent)
            and (sizes.num_heads > sizes.num_kv_heads or sizes.num_heads >= 4)
        ):
            options["num_heads"] = sizes.num_heads // 2
        if sizes.intermediate_size:
            options["intermediate_size"] = sizes.intermediate_size // 2
        changes.append(Change("resize", (name,), options))
    return changes


def is_block(module: nn.Module) -> bool:
    """Return True if a module is a transformer block."""
    return isinstance(module, Block)


def low_rank_everywhere(model: nn.Module) -> Change:
    """Return a `Change` that adds LoRA to the projections, the experts and the LM head."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (LMHead, Experts))
        or (isinstance(module, nn.Linear) and name.endswith(_PARTS_BESIDE))
    ]
    return Change("low_rank", tuple(names), {"rank": _RANK, "alpha": 3.0})


def stored_as_int8(model: nn.Module) -> Change:
    """Return a `Change` that stores projections, experts, embedding and LM head as int8."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (LMHead, Experts))
        or (isinstance(module, nn.Linear) and name.endswith(_STORED))
        or (isinstance(module, nn.Embedding) and name == "embed")
    ]
    return Change("int8", tuple(names))


def to_float64(batch: Batch) -> dict[str, Tensor]:
    """Return the batch with its floating-point tensors converted to float64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def change_everything(model: Any) -> tuple[Change, ...]:
    """Return `Change`s of every kind for a model: resized layers, LoRA and int8 weights."""
    narrowed = copy.deepcopy(model)
    for change in resize_changes(model):
        narrowed.change_(change)
    parts, rows = low_rank_everywhere(narrowed), stored_as_int8(narrowed)
    return *narrowed.config.changes, parts, rows


def list_parts(model: nn.Module) -> list[nn.Module]:
    """Return the LoRA modules of a model."""
    return [part for part in model.modules() if isinstance(part, (LowRank, ExpertsLowRank))]


def randomize_parts_(model: nn.Module, std: float = 0.1) -> None:
    """Set the `up` matrices of the LoRA modules, which are initially zero, to random values."""
    generator = torch.Generator().manual_seed(7)
    for part in list_parts(model):
        for name, parameter in part.named_parameters():
            if name.endswith("up"):
                parameter.data.normal_(0.0, std, generator=generator)


def merge_parts_(model: nn.Module, target: nn.Module) -> dict[str, tuple[str, str, float]]:
    """Merge the model's LoRA updates into the weights of `target`; untie tied weights.

    Returns:
        dict from the name of each merged weight to (name of `down`, name of `up`, scale) of its
        LoRA module.
    """
    merged: dict[str, tuple[str, str, float]] = {}
    for name, part in model.named_modules():
        if not isinstance(part, (LowRank, ExpertsLowRank)):
            continue
        owner = name.rpartition(".")[0]
        keys = {"weight": ""} if isinstance(part, LowRank) else {k: f"{k}_" for k in part.keys}
        for key, prefix in keys.items():
            down, up = f"{name}.{prefix}down", f"{name}.{prefix}up"
            module = target.get_submodule(owner)
            added = part.scale * value_of(model, up) @ value_of(model, down)
            plain = getattr(module, key).detach()
            setattr(module, key, nn.Parameter(plain + added))
            merged[f"{owner}.{key}"] = down, up, part.scale
    return merged


def value_of(model: nn.Module, name: str) -> Tensor:
    """Return the named parameter, detached from the autograd graph."""
    return model.get_parameter(name).detach()


def list_stored(model: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Return the name, int8 values and scales of every int8 weight."""
    stored = []
    for name, module in model.named_modules():
        if isinstance(module, RowStore):
            stored.append((f"{name}.weight", module.weight, module.scale))
        elif isinstance(module, Int8Experts):
            stored += [
                (f"{name}.{key}", getattr(module, key), getattr(module, f"{key}_scale"))
                for key in ("gate_proj", "up_proj", "down_proj")
                if getattr(module, key) is not None
            ]
    return stored


@torch.no_grad()
def zero_removed_units_(full_model: nn.Module, narrow: nn.Module) -> None:
    """Set the output projections of heads and MLP units that the narrower model lacks to zero."""
    for name, block in narrow.named_modules():
        if not is_block(block):
            continue
        old: Any = full_model.get_submodule(name)
        new_spec, old_spec = block.spec.attn, old.spec.attn
        if new_spec is not None and new_spec.num_heads < old_spec.num_heads:
            for attn in (old.attn, old.cross_attn):
                if attn is not None:
                    _zero_removed_heads_(attn.o_proj.weight, new_spec, old_spec)
                    _rescale_(attn.o_proj.weight, new_spec.out_scale, old_spec.out_scale)
        if old.mlp is not None:
            size, experts = block.spec.mlp.intermediate_size, getattr(old.mlp, "experts", None)
            weight = old.mlp.down_proj.weight if experts is None else experts.down_proj
            weight[..., size:] = 0
            _rescale_(weight, block.spec.mlp.out_scale, old.spec.mlp.out_scale)


def _zero_removed_heads_(weight: Tensor, new: Any, old: Any) -> None:
    """Set all columns to zero, except those of the query heads that the narrower model keeps."""
    groups = weight.unflatten(1, (old.num_kv_heads, -1, old.head_dim))
    groups[:, new.num_kv_heads :] = 0
    groups[:, :, new.num_heads // new.num_kv_heads :] = 0


def _rescale_(weight: Tensor, new: float, old: float) -> None:
    """Multiply a weight by new / old, to compensate for a scale that depends on a width (muP)."""
    weight *= new / old


def run_step_of(model: Any, batch: Batch, owner: Any = None) -> dict[str, Tensor]:
    """Run a forward and a backward pass; return a dict with the loss and all gradients."""
    owner = model if owner is None else owner
    owner.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    grads = {f"grad/{n}": p.grad for n, p in owner.named_parameters() if p.grad is not None}
    assert grads
    return {"loss": loss.detach(), **grads}


def list_outputs(output: Any) -> dict[str, Tensor]:
    """Return a dictionary from name to tensor with a model's outputs."""
    tensors = {name: value for name, value in output._asdict().items() if torch.is_tensor(value)}
    assert tensors
    return tensors
