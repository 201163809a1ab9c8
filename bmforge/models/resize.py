"""Resizes layers: fewer heads, other widths, removed sublayers, experts instead of an MLP.

Blocks are rebuilt from their `BlockSpec` and keep the weights that fit the new size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest
from bmforge.models.init import SkipInit, init_tensor_
from bmforge.models.sizes import LayerSizes, Sizes, sizes_of
from bmforge.models.split import fill_split_
from bmforge.models.stack import assign_cache_indices_
from bmforge.nn import AttentionSpec, Block, BlockSpec, MLPSpec, MoE, MoESpec
from bmforge.shards import is_distributed
from bmforge.surgery import persistent_tensors

__all__ = ["kept_dims", "resize_", "resize_block"]

# Container of blocks -> field of the model's spec that contains the specs of differing blocks.
_FIELDS = {
    "layers": "blocks",
    "encoder.layers": "encoder_blocks",
    "decoder.layers": "decoder_blocks",
}


def resize_(model: Any, names: Sequence[str], sizes: Sizes) -> None:
    """Resize layers of a model in place; the model may be on the meta device.

    Leading weights are kept: the first key-value heads and the first query heads of each group, the
    first dims of a head (with RoPE the first pairs), the first features of an MLP and of every
    expert, and the first experts. (Pruning sorts the weights first.) New weights, in wider
    layers and in experts that replace an MLP, are initialized as by `init_weights_` with seed 0.

    Self- and cross-attention of an encoder-decoder layer get the same heads; `attn=False` removes
    only self-attention. A position bias that layers share (T5, CPM-Ant, CPM-Bee) keeps all heads; a
    layer with fewer heads uses the first ones. Scales that depend on a width (muP) are adjusted to
    the new width. Experts that replace an MLP have no biases.

    Args:
        model: model of any family, not yet parallelized.
        names: names of blocks, such as ``"layers.1"`` or ``"encoder.layers.0"``.
        sizes: new sizes of the layers.

    Raises:
        ConfigError: a block is unknown, the sizes do not fit a layer or do not change it, or a
            layer already has another change. The model is then unchanged.
    """
    if not names:
        raise ConfigError("names=[] selects no layer to resize. Pass at least one layer name.")
    old = {name: _find(model, name) for name in names}
    specs = {name: resize_block(block.spec, sizes, name) for name, block in old.items()}
    _check(model, old, specs)
    for name, spec in specs.items():
        stack, _, number = name.rpartition(".")
        with torch.device("meta"), SkipInit():
            new = Block(spec, int(number))
        _take_after_(new, old[name])
        model.get_submodule(stack)[number] = new
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in names):
        assign_cache_indices_(model.get_submodule(stack))
        blocks = dict(getattr(model.spec, _FIELDS[stack]))
        for number, block in model.get_submodule(stack).named_children():
            if f"{stack}.{number}" in specs:
                blocks[int(number)] = block.spec
        model.spec = replace(model.spec, **{_FIELDS[stack]: blocks})
    rotary_dim = _rotary_dim(model)
    for name, block in old.items():
        _fill_(model, name, block, rotary_dim)


def resize_block(block: BlockSpec, sizes: Sizes, name: str = "a layer") -> BlockSpec:
    """Return the spec of a block after resizing.

    Raises:
        ConfigError: see `resize_`.
    """
    new = sizes_of(block).resized(sizes, name)
    try:
        return replace(
            block,
            attn=_resize_attention(block.attn, new) if new.attn else None,
            cross_attn=_resize_attention(block.cross_attn, new),
            mlp=_split_feed(block.mlp, new, sizes) if sizes.split else _resize_feed(block.mlp, new),
        )
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be resized: {error}") from None


def _resize_attention(spec: AttentionSpec | None, new: LayerSizes) -> AttentionSpec | None:
    if spec is None:
        return None
    if spec.global_tokens and new.num_kv_heads != new.num_heads:
        raise ConfigError(
            f"num_kv_heads={new.num_kv_heads} must equal num_heads={new.num_heads} if attention "
            "has global tokens."
        )
    return replace(
        spec,
        num_heads=new.num_heads,
        num_kv_heads=new.num_kv_heads,
        head_dim=new.head_dim,
        out_scale=_rescale(
            spec.out_scale, spec.num_heads * spec.head_dim, new.num_heads * new.head_dim
        ),
    )


def _resize_feed(spec: MLPSpec | MoESpec | None, new: LayerSizes) -> MLPSpec | MoESpec | None:
    if spec is None or not new.intermediate_size:
        return None
    size = new.intermediate_size
    out_scale = _rescale(spec.out_scale, spec.intermediate_size, size)
    if not new.num_experts:
        return replace(spec, intermediate_size=size, out_scale=out_scale)
    counts: dict[str, Any] = {
        "num_experts": new.num_experts,
        "experts_per_token": new.experts_per_token,
    }
    if isinstance(spec, MoESpec):
        return replace(spec, intermediate_size=size, out_scale=out_scale, **counts)
    return MoESpec(
        **counts,
        intermediate_size=size,
        activation=spec.activation,
        gated=spec.gated,
        in_scale=spec.in_scale,
        out_scale=out_scale,
    )


def _split_feed(spec: Any, new: LayerSizes, sizes: Sizes) -> MoESpec:
    """Return the spec of the experts into which an MLP is split; the total width is unchanged."""
    return MoESpec(
        new.num_experts,
        new.experts_per_token,
        new.intermediate_size,
        spec.activation,
        spec.gated,
        shared_size=new.shared_size,
        shared_gate=False,
        choice=sizes.choice or "top_k",
        in_scale=spec.in_scale,
        out_scale=spec.out_scale,
        weighs=False,
        bias=spec.bias,
        router=sizes.router or "linear",
        split=True,
    )


def _rescale(scale: float, before: int, after: int) -> float:
    """Return a muP scale, proportional to 1/sqrt(width), after a width changed; 1 stays 1."""
    return scale if scale == 1.0 else scale * math.sqrt(before / after)


def _find(model: Any, name: str) -> Block:
    """Return the block with this name; raise `ConfigError` if it cannot be resized."""
    block_names = [n for n, m in model.named_modules() if isinstance(m, Block)]
    if name not in block_names:
        raise ConfigError(f"{name!r} is not a layer of this model.{suggest(name, block_names)}")
    block: Block = model.get_submodule(name)
    tensors = persistent_tensors(block)
    with torch.device("meta"), SkipInit():
        own = set(persistent_tensors(Block(block.spec, 0)))
    if unexpected := sorted(set(tensors) ^ own):
        raise ConfigError(
            f"{name} was already modified, not only resized ({', '.join(unexpected[:3])}). "
            "Resize layers first, then apply other changes."
        )
    if any(is_distributed(tensor) for tensor in tensors.values()):
        raise ConfigError(f"{name} is already parallelized. Resize the layer before parallelize().")
    return block


def _check(model: Any, old: dict[str, Block], specs: dict[str, BlockSpec]) -> None:
    """Raise `ConfigError` if new specs do not fit the position encoding or leave no attention."""
    rotary_dim = _rotary_dim(model)
    for name, spec in specs.items():
        stack = name.rpartition(".")[0]
        owner = model.get_submodule(stack.rpartition(".")[0])
        table, attn = getattr(owner, "rel_bias", None), spec.attn
        if attn is None:
            continue
        if table is not None and attn.num_heads > table.weight.shape[1]:
            raise ConfigError(
                f"{name} cannot be resized: num_heads={attn.num_heads} exceeds the "
                f"{table.weight.shape[1]} heads of the position bias that all layers share. Use at "
                "most this number of heads."
            )
        former = old[name].spec.attn
        if attn.alibi and former is not None and attn.num_heads != former.num_heads:
            raise ConfigError(
                f"{name} cannot be resized: num_heads={attn.num_heads} would change the ALiBi "
                f"slopes of its {former.num_heads} heads. Resize the MLP instead."
            )
        if attn.head_dim < rotary_dim and attn.head_dim % 2:
            raise ConfigError(
                f"{name} cannot be resized: head_dim={attn.head_dim} is odd, but rotary positions "
                "rotate pairs of dims. Use an even number."
            )
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in specs):
        blocks = model.get_submodule(stack).named_children()
        left = [specs.get(f"{stack}.{number}", block.spec) for number, block in blocks]
        if all(spec.attn is None for spec in left):
            raise ConfigError(
                f"attn=False would remove the attention of all layers of {stack}. Keep the "
                "attention of at least one layer."
            )


def _rotary_dim(model: Any) -> int:
    """Return the number of a head's dims to which RoPE is applied; 0 for none."""
    rope = getattr(model.spec, "rope", None)
    return 0 if rope is None else rope.rotary_dim


def _take_after_(new: Block, old: Block) -> None:
    """Give a new block on the meta device the devices, dtypes and flags of the old block."""
    before = dict(old.named_parameters())
    usual = next(iter(before.values()), None)
    for name, parameter in list(new.named_parameters()):
        model = before.get(name, usual)
        if model is None:
            continue
        data = torch.empty(parameter.shape, dtype=model.dtype, device=model.device)
        owner, _, leaf = name.rpartition(".")
        wants = before[name].requires_grad if name in before else True
        new.get_submodule(owner)._parameters[leaf] = nn.Parameter(data, requires_grad=wants)
    sources = dict(old.named_buffers())
    for name, buffer in list(new.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        source = sources[name]
        data = torch.zeros(buffer.shape, dtype=source.dtype, device=source.device)
        box = tuple(slice(min(pair)) for pair in zip(data.shape, source.shape, strict=True))
        data[box] = source[box]
        new.get_submodule(owner)._buffers[leaf] = data
    new.train(old.training)


@torch.no_grad()
def _fill_(model: Any, name: str, old: Block, rotary_dim: int) -> None:
    """Copy the weights that a new block keeps from the old one, and initialize the others."""
    new: Block = model.get_submodule(name)
    before = dict(old.named_parameters())
    for key, parameter in new.named_parameters():
        source = before.get(key)
        if parameter.is_meta:
            continue
        if source is None or any(a > b for a, b in zip(parameter.shape, source.shape, strict=True)):
            full_name = f"{name}.{key}"
            init_tensor_(model, parameter, full_name, 0)
        if source is None:
            continue
        part, _, leaf = key.partition(".")
        if part in ("attn", "cross_attn"):
            specs = getattr(new.spec, part), getattr(old.spec, part)
            if specs[0] == specs[1]:
                parameter.copy_(source)
                continue
            _keep_heads_(parameter, source, leaf, specs, rotary_dim)
        else:
            box = tuple(slice(min(p)) for p in zip(parameter.shape, source.shape, strict=True))
            parameter[box] = source[box]
    old_spec, feed = old.spec.mlp, new.mlp
    is_new = isinstance(old_spec, MLPSpec) and not any(p.is_meta for p in new.parameters())
    if is_new and isinstance(feed, MoE) and feed.is_split:
        fill_split_(feed, old.mlp)


def _keep_heads_(
    new: Tensor,
    old: Tensor,
    leaf: str,
    specs: tuple[AttentionSpec, AttentionSpec],
    rotary_dim: int,
) -> None:
    """Copy the heads of the parameter `leaf` that exist in the old and the new attention."""
    module, _, kind = leaf.partition(".")
    if module == "sinks":  # one per head
        groups = [(s.num_kv_heads, s.num_heads // s.num_kv_heads) for s in specs]
        box = tuple(slice(min(pair)) for pair in zip(*groups, strict=True))
        new.view(groups[0])[box] = old.view(groups[1])[box]
        return
    if module == "o_proj":
        if kind == "bias":
            new.copy_(old)
            return
        new, old = new.t(), old.t()
    dims = [_dims(spec, module) for spec in specs]
    common = tuple(slice(min(pair)) for pair in zip(*(d[:-1] for d in dims), strict=True))
    into, source = (t.unflatten(0, d)[common] for t, d in zip((new, old), dims, strict=True))
    widths = specs[0].head_dim, specs[1].head_dim
    dim_pairs = kept_dims(*widths, rotary_dim, specs[0].rope_interleaved)
    target, chosen = (torch.tensor(p, device=new.device) for p in zip(*dim_pairs, strict=True))
    axis = len(common)
    into.index_copy_(axis, target, source.index_select(axis, chosen))


def _dims(spec: AttentionSpec, module: str) -> tuple[int, ...]:
    """Return the shape to unflatten a parameter's first dim to, such as (heads, head_dim)."""
    if module in ("q_norm", "k_norm") and not spec.qk_norm_whole:
        return (spec.head_dim,)
    if module in ("k_proj", "v_proj", "k_norm"):
        return (spec.num_kv_heads, spec.head_dim)
    return (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)


def kept_dims(new: int, old: int, rotary_dim: int, interleaved: bool) -> list[tuple[int, int]]:
    """Return pairs (index in the new head, index in the old head) of the kept dims.

    Rotary pairs in half layout (dims i and i + H / 2) remain pairs with the same frequency; see
    `nn.narrow_rope`.
    """
    rotated = [min(width, rotary_dim) // 2 for width in (new, old)]
    if interleaved or rotated[0] == rotated[1]:
        return [(i, i) for i in range(min(new, old))]
    count = min(rotated)
    pairs = [(i, i) for i in range(count)]
    return pairs + [(rotated[0] + i, rotated[1] + i) for i in range(count)]
