"""Attaches hard concrete gates to a model, reads their probabilities, and removes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from bmforge.compress.prune.block_hooks import (
    blend_part_,
    restore_,
    scale_input_,
    scale_output_,
)
from bmforge.compress.prune.hidden_gates import CHILD, attach_hidden_gate_
from bmforge.compress.prune.plan import blocks_of, query_order
from bmforge.errors import ConfigError
from bmforge.nn import Block
from bmforge.nn.gates import HardConcrete, HeadDims, HiddenWidth
from bmforge.nn.mlp import MLP
from bmforge.nn.position import RopeSpec
from bmforge.nn.random_init import init_from_note_

__all__ = ["Gates", "attach_gates_", "gate_probabilities", "detach_gates_", "find_gates"]

# (block name, or "" for the whole model; kind) -> gate
Gates = dict[tuple[str, str], HardConcrete]

# Names of the gates of a block, by kind; the attentions of a decoder layer share their gates.
_NAMES = {
    "heads": "attn.thin",
    "dims": "attn.thin_dims",
    "features": "mlp.thin",
    "attn": "attn_share",
    "mlp": "mlp_share",
    "block": "block_share",
}


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
        raise ConfigError(f"{type(model).__name__} already has gates. Call detach_gates_ first.")
    gates: Gates = {}
    blocks, turned = blocks_of(model), getattr(model.spec, "rope", None)
    for name, block in blocks.items():
        for kind in kinds:
            gate = _gate_of(name, block, kind, turned)
            if gate is None:
                continue
            like = next(block.parameters())
            gate.to(device=like.device, dtype=like.dtype)
            gates[name, kind] = gate.train(block.training)
    for kind in kinds:
        if kind != "hidden" and not any(gate_kind == kind for _, gate_kind in gates):
            raise ConfigError(
                f"gates={kind!r} has no effect, because no layer of this {type(model).__name__} "
                f"has {kind}. Remove {kind!r} from gates."
            )
    hidden: Gates = {("", "hidden"): _put_hidden(model, seed)} if "hidden" in kinds else {}
    for (name, kind), gate in gates.items():
        for owner in _owners_of(blocks[name], kind):
            owner.add_module(_NAMES[kind].rpartition(".")[2], gate)
        if not gate.delta.is_meta:
            note = gate.tensor_notes()["delta"]
            init_from_note_(gate.delta, f"{name}.{_NAMES[kind]}.delta", note, 0.0, seed)
    for name, kind in sorted(gates):  # "heads" after "dims": the last input hook runs first
        _apply_(gates[name, kind], kind, blocks[name])
    return gates | hidden


def _put_hidden(model: Any, seed: int) -> HiddenWidth:
    """Attach the gate of hidden features to a model, and return it."""
    like = next(model.parameters())
    gate = HiddenWidth("hidden", model.config.hidden_size).to(device=like.device, dtype=like.dtype)
    attach_hidden_gate_(model, gate.train(model.training))
    if not gate.delta.is_meta:
        init_from_note_(gate.delta, f"{CHILD}.delta", gate.tensor_notes()["delta"], 0.0, seed)
    return gate


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


def _owners_of(block: Block, kind: str) -> list[Any]:
    """Return the modules of a block to which a gate of this kind is attached as a child."""
    if kind in ("heads", "dims"):
        return [attn for attn in (block.attn, block.cross_attn) if attn is not None]
    return [block.mlp if kind == "features" else block]


def _apply_(gate: Any, kind: str, block: Block) -> None:
    """Make a gate scale the units of a block."""
    if kind in ("attn", "mlp", "block"):
        blend_part_(block, kind, gate)
    for owner in _owners_of(block, kind):
        if kind in ("heads", "dims"):
            scale_input_(owner.o_proj, gate)
        elif kind == "features":
            scale_input_(owner.down_proj, gate)
        for name in ("q_proj", "q_global_proj") if kind == "dims" else ():
            if hasattr(owner, name):
                scale_output_(getattr(owner, name), partial(gate, for_queries=True))


def detach_gates_(model: nn.Module) -> None:
    """Remove all gates from a model, in place."""
    restore_(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, HardConcrete):
                delattr(module, name)


def find_gates(model: nn.Module) -> list[HardConcrete]:
    """Return the gates of a model."""
    return [module for module in model.modules() if isinstance(module, HardConcrete)]


def gate_probabilities(gates: Gates) -> dict[tuple[str, str], Tensor]:
    """Return the probability that each unit of a gate is open, by (block, kind of gate).

    The probabilities are differentiable, and do not depend on the parallel layout.

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


def fix_gates_(chosen: Mapping[tuple[str, str], Sequence[int]], gates: Gates) -> None:
    """Fix the gates to 1 for the chosen units and to 0 for all other units; stop training them."""
    for key, gate in gates.items():
        mask = torch.zeros(gate.units)
        mask[list(chosen[key])] = 1.0
        gate.mask = mask
        gate.delta.requires_grad_(False)
