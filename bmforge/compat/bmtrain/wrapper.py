"""Converts any model: its parameters are sharded, and repeated layers become blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
from torch import nn

from bmforge.compat.bmtrain.block import Block
from bmforge.compat.bmtrain.module import make_distributed_
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.surgery import find_repeated_blocks

__all__ = ["BMTrainModelWrapper"]

Model = TypeVar("Model", bound=nn.Module)


def BMTrainModelWrapper(model: Model) -> Model:  # noqa: N802
    """Shard an ordinary model, such as a Hugging Face model, in place; return the model.

    Every child of a ModuleList, and every other repeated layer, becomes a `Block`. Tied parameters
    stay tied; a layer that shares a parameter with another module is all-gathered separately. A
    model on the meta device gets uninitialized shards, which `load` fills. Buffers that no
    checkpoint contains (position tables) are computed by the model itself if it can, as
    transformers' models do.

    Raises:
        ConfigError: neither a checkpoint nor the model provides the values of a buffer on the meta
            device.

    Memory: one shard of a model on the meta device.
    """
    config.need("BMTrainModelWrapper")
    blocks = _find_blocks(model)
    _fill_tables_(model)
    make_distributed_(model)
    for name, block in blocks.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = Block(block)
    if blocks:
        _switch_caches_off_(model)
    return model


@torch.no_grad()
def _fill_tables_(model: nn.Module) -> None:
    """Compute the buffers that checkpoints do not contain, for a model created on meta."""
    fill = getattr(model, "_init_weights", None)
    missing = []
    for name, module in model.named_modules():
        buffers: dict[str, Any] = module._buffers
        keys = [k for k in module._non_persistent_buffers_set if buffers[k] is not None]
        own = {key: torch.empty_like(buffers[key], device=config.device) for key in keys}
        own = {key: buffer for key, buffer in own.items() if buffers[key].is_meta}
        buffers.update(own)
        before = {key: buffer._version for key, buffer in own.items()}
        if own and callable(fill):
            fill(module)  # parameters are still on meta: nothing to initialize
        missing += [f"{name}.{k}" for k in own if buffers[k]._version == before[k]]
    if missing:
        raise ConfigError(
            f"the buffers {', '.join(missing)} of the model are on the meta device and not in "
            "the checkpoint. Create the model with only its parameters on the meta device: "
            "accelerate.init_empty_weights(include_buffers=False)."
        )


def _switch_caches_off_(model: nn.Module) -> None:
    """Disable the KV cache of a Hugging Face model, since recomputation would fill it twice."""
    settings: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for own in settings:
        if getattr(own, "use_cache", False):
            own.use_cache = False
            get_logger().info("use_cache is disabled, because blocks are recomputed in backward")


def _count_uses(model: nn.Module) -> Counter[int]:
    """Return a dict from parameter id to the number of modules that use the parameter."""
    parameters = (p for module in model.modules() for p in module._parameters.values())
    return Counter(id(p) for p in parameters if p is not None)


def _find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated layers that share no parameter with other modules."""
    blocks = dict(find_repeated_blocks(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and type(module).forward is nn.ModuleList.forward:
            prefix = f"{name}." if name else ""
            blocks.update({prefix + key: child for key, child in module.named_children()})
    uses = _count_uses(model)
    outer: dict[str, nn.Module] = {}
    for name in sorted(blocks, key=lambda name: name.count(".")):
        block = blocks[name]
        if any(name.startswith(f"{other}.") for other in outer) or isinstance(block, Block):
            continue
        own = _count_uses(block)
        if own and all(uses[key] == count for key, count in own.items()):
            outer[name] = block
    return outer
