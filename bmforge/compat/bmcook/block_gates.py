"""Structured pruning of user-defined blocks that contain ModelCenter's submodules.

Such a block has `self_att.self_attention` (with `num_heads` and `attention_out`), `ffn.ffn` (with
`w_in` and `w_out`), or both, as the layers of CPM-Live do. The gates, their costs and the training
are those of `StructureMethod`. A user-defined forward may depend on the layer sizes, so
the weights of pruned units are set to zero instead of being removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bmforge.compat.bmtrain.param_init import sum_plain_gradients_
from bmforge.compat.bmtrain.parameter import origin_of, set_values_, whole
from bmforge.compat.bmtrain.runtime import is_initialized
from bmforge.compress.prune.binarize import SelectedUnits
from bmforge.compress.prune.block_hooks import scale_input_
from bmforge.compress.prune.costs import Costs, SublayerCost
from bmforge.compress.prune.gates import detach_gates_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan
from bmforge.compress.prune.structure import StructureMethod
from bmforge.errors import ConfigError
from bmforge.nn.gates import HardConcrete
from bmforge.nn.random_init import init_from_note_

__all__ = ["OwnBlocksMethod"]

# Kind of gate -> layer that it scales; "" is the block.
_LAYERS = {
    "heads": "self_att.self_attention.attention_out",
    "features": "ffn.ffn.w_out",
    "attn": "self_att",
    "mlp": "ffn",
    "block": "",
}


class OwnBlocksMethod(StructureMethod):
    """Structured pruning, with trained gates, of blocks that contain ModelCenter's submodules.

    `finish_` sets columns of output projections to zero: those that read a pruned head or feature,
    or all columns if the sublayer or block is pruned.

    Attributes:
        handles: hooks by which the gates act.
    """

    handles: list[RemovableHandle]

    def attach_(self, model: nn.Module) -> None:
        """Attach gates to the blocks of a model.

        Raises:
            ConfigError: the model has no such blocks, or the target cannot be reached.
        """
        blocks = _find_blocks(model)
        if not blocks:
            raise ConfigError(
                "mask_method='sprune' supports models of bmforge and of ModelCenter's classes, "
                "and blocks with the submodules self_att.self_attention and ffn.ffn, which this "
                f"{type(model).__name__} does not have. Use another mask_method."
            )
        options = (getattr(module, "options", None) for module in model.modules())
        if any(getattr(o, "post_layer_norm", False) for o in options):
            raise ConfigError(
                "mask_method='sprune' does not support post_layer_norm=True, with which a sublayer "
                "without weights still changes the hidden states. Use another mask_method."
            )
        self.handles = []
        self.costs = Costs({name: _count_costs(block) for name, block in blocks.items()})
        for name, block in blocks.items():
            for kind in self.config.gates:
                if _has(block, _LAYERS[kind]):
                    self.gates[name, kind] = self._attach_gate(name, block, kind)
        if is_initialized():
            sum_plain_gradients_(model)
        try:
            self._start_(model)
        except ConfigError:
            self._drop_hooks()
            raise

    def _attach_gate(self, name: str, block: nn.Module, kind: str) -> HardConcrete:
        """Create a gate as a child module of a block, and register the hook that applies it."""
        layer: Any = block.get_submodule(_LAYERS[kind])
        attention: Any = block.get_submodule("self_att.self_attention") if kind == "heads" else None
        width = layer.weight.shape[1] if kind in ("heads", "features") else 1
        units = width if attention is None else int(attention.num_heads)
        gate = HardConcrete(f"{name}.{kind}", units, width).to(next(block.parameters()).device)
        note = gate.tensor_notes()["delta"]
        init_from_note_(gate.delta, f"{name}.{kind}.delta", note, 0.0, self.config.seed)
        block.add_module(f"{kind}_gate", gate.train(block.training))
        if kind in ("heads", "features"):
            self.handles.append(scale_input_(layer, gate))
        else:
            hook = partial(_blend, gate)
            self.handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        return gate

    def _plan(self, model: nn.Module, chosen: SelectedUnits) -> PruningPlan:
        layers: dict[str, dict[str, Any]] = {}
        for (name, kind), units in chosen.items():
            value = units if kind in ("heads", "features") else bool(units)
            layers.setdefault(name, {})[kind] = value
        gone = tuple(name for name, parts in layers.items() if not parts.pop("block", True))
        return PruningPlan({name: KeptIndices(**parts) for name, parts in layers.items()}, gone)

    @torch.no_grad()
    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Remove the gates, and set the weights of pruned units to zero; return the plan."""
        if not self.gates:
            return {}
        if self.plan is None:
            self._fix_(model)
        for (name, kind), gate in self.gates.items():
            assert gate.mask is not None
            block, closed = model.get_submodule(name), gate.mask == 0
            kinds = {"attn": ("heads",), "mlp": ("features",), "block": ("heads", "features")}
            for layer in (_LAYERS[part] for part in kinds.get(kind, (kind,))):
                if _has(block, layer) and bool(closed.any()):
                    _clear_(block.get_submodule(layer), closed)
        self._drop_hooks()
        detach_gates_(model)
        self.gates = {}
        assert self.plan is not None
        return {"is_shrunk": False, "plan": self.plan.to_json()}

    def _drop_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()


def _find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if any(_has(module, _LAYERS[kind]) for kind in ("heads", "features"))
    }


def _has(module: nn.Module, name: str) -> bool:
    return name in dict(module.named_modules())


def _count_costs(block: nn.Module) -> dict[str, SublayerCost]:
    """Return the parameter counts of a block's sublayers, each with a norm (one vector)."""
    halves = {}
    if _has(block, _LAYERS["heads"]):
        layer: Any = block.get_submodule("self_att.self_attention")
        (width, columns), heads = layer.attention_out.weight.shape, int(layer.num_heads)
        halves["attn"] = SublayerCost(width, 4 * width * columns / heads, heads)
    if _has(block, _LAYERS["features"]):
        ffn: Any = block.get_submodule("ffn.ffn")
        width, columns = ffn.w_out.weight.shape
        halves["mlp"] = SublayerCost(width, (3 if _has(ffn, "w_in.w_1") else 2) * width, columns)
    return halves


def _blend(
    gate: HardConcrete, module: nn.Module, args: Sequence[Any], kwargs: Any, out: Any
) -> Any:
    """Forward hook: interpolate between the hidden states before and after a module."""
    before: Tensor = args[0] if args else next(iter(kwargs.values()))
    if isinstance(out, tuple):
        return (gate(before, out[0]), *out[1:])
    return gate(before, out)


def _clear_(layer: Any, closed: Tensor) -> None:
    """Set the weight columns of pruned heads or features to zero, in place.

    Args:
        layer: output projection of a sublayer.
        closed: (units,), True for pruned units, each of which has the same number of adjacent
            columns. With a single unit, which is the whole sublayer, the bias is set to zero too.
    """
    bias = layer._parameters.get("bias") if len(closed) == 1 else None
    for parameter in (layer._parameters["weight"], bias):
        if parameter is None:
            continue
        value = whole(parameter).clone()
        columns = closed.to(value.device).repeat_interleave(value.shape[-1] // len(closed))
        value[..., columns] = 0
        if origin_of(parameter) is None:
            parameter.copy_(value)
        else:
            set_values_(parameter, value)
