"""Builds and runs stacks of blocks, for all families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import reads_without_sync
from bmforge.errors import ShapeError
from bmforge.nn import AttentionSpec, Block, BlockSpec, MoE, rope_table
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.shard_hooks import TokenAssignment, TokenCut
from bmforge.records import Span, Stack

__all__ = [
    "StackSpec",
    "build_layers",
    "check_ids",
    "find_differing_layers",
    "expert_names",
    "find_block",
    "find_heads",
    "given_inputs",
    "assign_cache_indices_",
    "rope_tables",
    "run_block",
    "run_layers",
    "span_of",
    "width_into",
]


@dataclass(frozen=True)
class StackSpec:
    """Specs of the blocks in a stack, which are equal except for those in `blocks`.

    Args:
        block: spec of all blocks that are not in `blocks`.
        blocks: mapping from layer index to spec, for blocks that differ from `block`.
    """

    block: BlockSpec
    blocks: Mapping[int, BlockSpec] = field(default_factory=dict)


def span_of(layers: Stack) -> Span:
    """Return the range of blocks to run: all, or those of this pipeline stage."""
    return layers.span or Span(0, len(layers), len(layers))


def find_differing_layers(block: BlockSpec, specs: Iterable[BlockSpec]) -> dict[int, BlockSpec]:
    """Return a dict from layer index to spec, for the specs that differ from `block`."""
    return {layer: spec for layer, spec in enumerate(specs) if spec != block}


def build_layers(
    block: BlockSpec, num_layers: int, blocks: Mapping[int, BlockSpec] | None = None
) -> Stack:
    """Build a stack of `num_layers` blocks with the keys "0", "1", ..."""
    specs = [(blocks or {}).get(layer, block) for layer in range(num_layers)]
    layers = Stack({str(i): Block(spec, i) for i, spec in enumerate(specs)})
    assign_cache_indices_(layers)
    return layers


def assign_cache_indices_(layers: nn.ModuleDict) -> None:
    """Assign KV cache indices to the layers that have self-attention.

    They get the highest indices: writing to the cache's last index advances its length, so the last
    layer with self-attention must have that index.
    """
    storing = [layer.attn for layer in layers.values() if layer.attn is not None]
    for index, attn in enumerate(storing, len(layers) - len(storing)):
        attn.layer_index = index


def find_heads(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (N, K)) with the unsharded head counts of every attention module."""
    for name, block in model.named_modules():
        if isinstance(block, Block):
            for part in ("attn", "cross_attn"):
                spec: AttentionSpec | None = getattr(block.spec, part)
                if spec is not None:
                    yield f"{name}.{part}", (spec.num_heads, spec.num_kv_heads)


def width_into(model: nn.Module, name: str) -> int:
    """Return the input width of the output projection (of attention or MLP) with this weight."""
    spec = find_block(model, name).spec
    if "o_proj" not in name:
        assert spec.mlp is not None
        return spec.mlp.intermediate_size
    attn = spec.cross_attn if ".cross_attn." in name else spec.attn
    assert attn is not None
    return attn.out_width


def expert_names(model: nn.Module) -> set[str]:
    """Return the parameter names of experts and their routers."""
    moe_names = (name for name, module in model.named_modules() if isinstance(module, MoE))
    return {
        f"{name}.{key}"
        for name in moe_names
        for key, _ in model.get_submodule(name).named_parameters()
    }


def find_block(model: nn.Module, name: str) -> Block:
    """Return the block that contains the named parameter."""
    module: Any = model
    for part in name.split("."):
        module = getattr(module, part) if not isinstance(module, nn.ModuleDict) else module[part]
        if isinstance(module, Block):
            return module
    raise ValueError(f"the module {name!r} is not in a Block.")


def run_layers(
    layers: Stack,
    x: Tensor,
    masks: dict[int | None, Tensor | None],
    keep_states: bool,
    routed: list[Tensor] | None = None,
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Run the blocks; return the last output, and a list of all outputs (or of the last one).

    Args:
        layers: stack of blocks.
        x: input of the first block, (B, T, D).
        masks: mapping from window size to attention mask.
        keep_states: list the input and the outputs of all blocks, not only the last output.
        routed: list to which the router logits of each layer with experts are appended.
        inputs: further arguments of `Block.forward`.

    A layout that shards tokens sets `token_cut` on the stack; it is not applied with a KV cache.
    """
    cut: TokenCut | None = layers.token_cut
    cache: KeyValueCache | None = inputs.get("cache")
    length = x.shape[1]
    share = None if cut is None or cache is not None else cut(length)
    inputs["bias"] = _find_biases(layers, inputs.get("bias"))
    if share is not None:
        x, masks, inputs = share.shard_inputs(x, masks, inputs)
    states: list[Tensor] = [x]
    router_logits: list[Tensor] = []
    span, biases = span_of(layers), inputs.pop("bias")
    if cache is not None and cache.step is not None and not keep_states and layers.span is None:
        out = cache.step(layers, x, masks, biases, inputs)
        if out is not None:
            return out, [out]
    for layer in (layers[str(i)] for i in range(span.first, span.last)):
        x = run_block(layer, x, masks, biases, inputs, router_logits)
        states = [*states, x] if keep_states else [x]
    if cache is not None and not _stores_keys(layers) and str(span.last - 1) == list(layers)[-1]:
        cache.skip(length)
    if share is not None:
        states = [share.gather(state) for state in states]
        router_logits = _gather_logits(share, router_logits, x.shape[0])
    if routed is not None:
        routed += router_logits
    return states[-1], states


def run_block(
    layer: Any,
    x: Tensor,
    masks: Mapping[int | None, Tensor | None],
    biases: Mapping[int, Tensor],
    inputs: dict[str, Any],
    routed: list[Tensor],
) -> Tensor:
    """Run one block with the mask for its window, its rotary table and the bias for its heads.

    Router logits are appended to `routed`.
    """
    mask = bias = None
    if layer.attn is not None:
        mask, bias = masks[layer.attn.window], biases.get(layer.attn.num_heads)
        inputs = _pick_rope(inputs, getattr(layer.attn, "rotary", "model"))
    out = layer(x, mask=mask, bias=bias, **inputs)
    if not isinstance(out, tuple):
        return out
    routed.append(out[1])
    return out[0]


def rope_tables(spec: Any, position_ids: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return a dict with the rotary tables: "rope", and "local_rope" if the model has one.

    Args:
        spec: `DecoderSpec` of the model.
        position_ids: positions, (B or 1, T).
        dtype: dtype of the tables, whose shape `nn.rope_table` describes.
    """
    tables: dict[str, Any] = {"rope": None}
    if spec.rope is not None:
        tables["rope"] = rope_table(spec.rope, position_ids, dtype)
    if spec.local_rope is not None:
        tables["local_rope"] = rope_table(spec.local_rope, position_ids, dtype)
    return tables


def _pick_rope(inputs: dict[str, Any], rotary: str) -> dict[str, Any]:
    """Return a block's inputs with the rotary table that its `AttentionSpec.rotary` selects."""
    if rotary == "model" and "local_rope" not in inputs:
        return inputs
    tables = {"model": inputs.get("rope"), "local": inputs.get("local_rope"), "none": None}
    others = {name: value for name, value in inputs.items() if name != "local_rope"}
    return {**others, "rope": tables[rotary]}


def _find_biases(layers: nn.ModuleDict, bias: Tensor | None) -> dict[int, Tensor]:
    """Return a dict from head count to position bias, for each head count in the layers."""
    if bias is None:
        return {}
    attentions = (layer.attn for layer in layers.values() if layer.attn is not None)
    return {attn.num_heads: attn.pick_heads(bias) for attn in attentions}


def _stores_keys(layers: nn.ModuleDict) -> bool:
    """Return True if any of these layers stores keys and values in the cache."""
    return any(layer.attn is not None for layer in layers.values())


def _gather_logits(share: TokenAssignment, logits: list[Tensor], rows: int) -> list[Tensor]:
    """All-gather all layers' router logits over the ranks of `share`; return (B * T, E) each."""
    if not logits:
        return []
    joined = share.gather(torch.cat(logits, -1).unflatten(0, (rows, -1))).flatten(0, 1)
    return list(joined.split([part.shape[-1] for part in logits], -1))


def given_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, name: str = "inputs_embeds"
) -> Tensor:
    """Return the input that the caller passed: token ids (B, T) or embeddings (B, T, D).

    Raises:
        ShapeError: both or neither are passed.
    """
    ids = name.replace("inputs_embeds", "input_ids")
    if (input_ids is None) == (inputs_embeds is None):
        what = "neither was passed" if input_ids is None else "both were passed"
        raise ShapeError(f"exactly one of {ids} and {name} must be passed, but {what}.")
    inputs = inputs_embeds if input_ids is None else input_ids
    assert inputs is not None
    return inputs


def check_ids(
    input_ids: Tensor, vocab_size: int, name: str = "input_ids", limit: str = "vocab_size"
) -> None:
    """Raise `ShapeError` for ids outside the vocabulary, unless the check needs a device sync.

    `name` and `limit` are the names of the ids and of the vocabulary size in the error message.
    """
    if not input_ids.numel() or not reads_without_sync(input_ids):
        return
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ShapeError(
            f"{name} has ids from {low} to {high} (allowed: at least 0 and below "
            f"{limit}={vocab_size}). Use the tokenizer of the model."
        )
