"""Attaches hard concrete gates to a model, reads their probabilities, and removes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from bmforge.compress.prune.hidden_gates import SLOT, attach_hidden_gate_, detach_hidden_gate_
from bmforge.compress.prune.plan import blocks_of, query_order
from bmforge.errors import ConfigError
from bmforge.nn import Block
from bmforge.nn.gates import HardConcrete, HeadDims, HiddenWidth
from bmforge.nn.mlp import MLP
from bmforge.nn.position import RopeSpec
from bmforge.nn.random_init import draw_tensor_
from bmforge.nn.shard_hooks import pass_on

__all__ = ["Gates", "attach_gates_", "densities", "detach_gates_", "find_gates"]

# (block name, or "" for the whole model; kind) -> gate
Gates = dict[tuple[str, str], HardConcrete]


def attach_gates_(model: Any, kinds: Sequence[str], seed: int = 0) -> Gates:
    """Attach gates to a model; return the gates.

    Args:
        model: bmforge model of any family, not parallelized yet.
        kinds: kinds of gates, of `GATE_KINDS`. Heads that share keys and values share a gate. Self-
            and cross-attention of a layer share the gates of heads and dims, and "attn" gates only
            the self-attention. All layers and the embeddings share the gate of hidden features.
        seed: random seed of the gates' initialization.

    Raises:
        ConfigError: no layer has units of a requested kind, or the model already has gates.
    """
    if find_gates(model):
        raise ConfigError(f"{type(model).__name__} already has gates. Remove them first.")
    gates: Gates = {}
    turned = getattr(model.spec, "rope", None)
    for name, block in blocks_of(model).items():
        for kind in kinds:
            gate = _gate_of(name, block, kind, turned)
            if gate is None:
                continue
            like = next(block.parameters())
            gate.to(device=like.device, dtype=like.dtype)
            gates[name, kind] = gate.train(block.training)
    if "hidden" in kinds:
        gates["", "hidden"] = _put_hidden(model, seed)
    for kind in kinds:
        if not any(gate_kind == kind for _, gate_kind in gates):
            raise ConfigError(
                f"gates: no layer of this {type(model).__name__} has {kind}. Leave this kind of "
                "gates out."
            )
    for (name, kind), gate in gates.items():
        if kind == "hidden":
            continue
        places = _slots(model.get_submodule(name), kind)
        for owner, slot in places:
            if slot in owner.__dict__:
                delattr(owner, slot)
            setattr(owner, slot, gate)
            if kind == "dims":
                query_gate: Any = gate
                owner.thin_query = partial(query_gate, asks=True)
        if not gate.delta.is_meta:
            owner, slot = places[0]
            owner_name = name if isinstance(owner, Block) else f"{name}.{_part_of(kind)}"
            note = gate.tensor_notes()["delta"]
            draw_tensor_(gate.delta, f"{owner_name}.{slot}.delta", note, 0.0, seed)
    return gates


def _put_hidden(model: Any, seed: int) -> HiddenWidth:
    """Attach the gate of hidden features to a model, and return it."""
    like = next(model.parameters())
    gate = HiddenWidth("hidden", model.config.hidden_size).to(device=like.device, dtype=like.dtype)
    attach_hidden_gate_(model, gate.train(model.training))
    if not gate.delta.is_meta:
        draw_tensor_(gate.delta, f"{SLOT}.delta", gate.tensor_notes()["delta"], 0.0, seed)
    return gate


def _part_of(kind: str) -> str:
    return "attn" if kind in ("heads", "dims") else "mlp"


def _gate_of(name: str, block: Block, kind: str, rope: RopeSpec | None) -> HardConcrete | None:
    """Create a gate of one kind for a block; None if the block has no such units."""
    spec = block.spec
    if kind == "heads" and spec.attn is not None and not spec.attn.qk_norm_whole:
        width = spec.attn.num_heads * spec.attn.head_dim
        return HardConcrete(f"{name}.heads", spec.attn.num_kv_heads, width)
    if kind == "dims" and spec.attn is not None and spec.attn.qk_norm is None:
        order = query_order(spec.attn, rope)
        sizes = spec.attn.num_kv_heads, spec.attn.num_heads, spec.attn.head_dim
        return HeadDims(f"{name}.dims", *sizes, order)
    if kind == "features" and isinstance(block.mlp, MLP):
        assert spec.mlp is not None
        return HardConcrete(f"{name}.features", spec.mlp.intermediate_size)
    specs = {"attn": spec.attn, "mlp": spec.mlp, "block": spec}
    return None if specs.get(kind) is None else HardConcrete(f"{name}.{kind}", 1)


def _slots(block: Block, kind: str) -> list[tuple[Any, str]]:
    """Return (module, attribute name) pairs where gates of a kind are attached."""
    if kind == "heads":
        return [(part, "thin") for part in (block.attn, block.cross_attn) if part is not None]
    if kind == "dims":
        parts = (block.attn, block.cross_attn)
        return [(part, "thin_dims") for part in parts if part is not None]
    if kind == "features":
        return [(block.mlp, "thin")]
    return [(block, f"{kind}_share")]


def detach_gates_(model: Any, gates: Gates) -> None:
    """Remove gates from a model, in place."""
    for name, kind in gates:
        if kind == "hidden":
            detach_hidden_gate_(model)
            continue
        for owner, slot in _slots(model.get_submodule(name), kind):
            delattr(owner, slot)
            setattr(owner, slot, pass_on if slot.startswith("thin") else None)
            if slot == "thin_dims":
                owner.thin_query = pass_on


def find_gates(model: nn.Module) -> list[HardConcrete]:
    """Return the gates of a model."""
    return [module for module in model.modules() if isinstance(module, HardConcrete)]


def densities(gates: Gates) -> dict[tuple[str, str], Tensor]:
    """Return the open probabilities of each gate's units, differentiable and equal on all layouts.

    Comm: for sharded parameters, an all-gather per gate, and a reduce-scatter in the backward pass.
    """
    return {key: gate.density(_whole(gate.delta)) for key, gate in gates.items()}


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.count, None


def _whole(delta: Tensor) -> Tensor:
    """All-gather a sharded parameter; its gradient is averaged over processes."""
    if not isinstance(delta, DTensor):
        return delta
    mesh = delta.device_mesh
    full = delta.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    return _Average.apply(full, mesh.size())


def masks_of(chosen: Mapping[tuple[str, str], Sequence[int]], gates: Gates) -> None:
    """Fix every gate to 1 for the chosen units and 0 for the others, and stop its training."""
    for key, gate in gates.items():
        mask = torch.zeros(gate.units)
        mask[list(chosen[key])] = 1.0
        gate.mask = mask
        gate.delta.requires_grad_(False)
