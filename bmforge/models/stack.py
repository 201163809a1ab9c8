"""Blocks one after the other: what every family does with its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.device import reads_are_free
from bmforge.errors import ShapeError
from bmforge.nn import AttentionSpec, Block, BlockSpec, MoE
from bmforge.nn.attention import KeyValueCache
from bmforge.nn.cuts import TokenCut, TokenShare
from bmforge.records import Span, Stack

__all__ = [
    "StackSpec",
    "build_layers",
    "check_ids",
    "differing",
    "expert_names",
    "find_block",
    "find_heads",
    "given_inputs",
    "number_places_",
    "run_block",
    "run_layers",
    "span_of",
    "width_into",
]


@dataclass(frozen=True)
class StackSpec:
    """Blocks that are all the same but for some.

    Args:
        block: data of the blocks.
        blocks: data of those that differ from it, by layer.
    """

    block: BlockSpec
    blocks: Mapping[int, BlockSpec] = field(default_factory=dict)


def span_of(layers: Stack) -> Span:
    """Return which blocks run: those that a layout says, or all."""
    return layers.span or Span(0, len(layers), len(layers))


def differing(block: BlockSpec, specs: Iterable[BlockSpec]) -> dict[int, BlockSpec]:
    """Return those of all layers' specs that are not `block`, by layer: a `StackSpec.blocks`."""
    return {layer: spec for layer, spec in enumerate(specs) if spec != block}


def build_layers(
    block: BlockSpec, num_layers: int, blocks: Mapping[int, BlockSpec] | None = None
) -> Stack:
    """Return `num_layers` blocks keyed "0", "1", ..., of `block` or, where it says so, `blocks`."""
    specs = [(blocks or {}).get(layer, block) for layer in range(num_layers)]
    layers = Stack({str(i): Block(spec, i) for i, spec in enumerate(specs)})
    number_places_(layers)
    return layers


def number_places_(layers: nn.ModuleDict) -> None:
    """Give the layers that store keys and values their places in a cache, in place.

    They are the cache's last ones, so that whatever layers lack attention, the last of all places
    is that of the last layer to store, which moves the cache on.
    """
    storing = [layer.attn for layer in layers.values() if layer.attn is not None]
    for place, attn in enumerate(storing, len(layers) - len(storing)):
        attn.layer_index = place


def find_heads(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of every attention and its numbers of heads, (N, K), whatever cuts them."""
    for name, block in model.named_modules():
        if isinstance(block, Block):
            for part in ("attn", "cross_attn"):
                spec: AttentionSpec | None = getattr(block.spec, part)
                if spec is not None:
                    yield f"{name}.{part}", (spec.num_heads, spec.num_kv_heads)


def width_into(model: nn.Module, name: str) -> int:
    """Return the width of what goes into a projection out of attention or MLP, by its name."""
    spec = find_block(model, name).spec
    if "o_proj" not in name:
        assert spec.mlp is not None
        return spec.mlp.intermediate_size
    attn = spec.cross_attn if ".cross_attn." in name else spec.attn
    assert attn is not None
    return attn.num_heads * attn.head_dim


def expert_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of experts and their routers."""
    found = (name for name, module in model.named_modules() if isinstance(module, MoE))
    return {
        f"{name}.{key}" for name in found for key, _ in model.get_submodule(name).named_parameters()
    }


def find_block(model: nn.Module, name: str) -> Block:
    """Return the block that a parameter is in."""
    module: Any = model
    for part in name.split("."):
        module = getattr(module, part) if not isinstance(module, nn.ModuleDict) else module[part]
        if isinstance(module, Block):
            return module
    raise ValueError(f"{name} is in no block")


def run_layers(
    layers: Stack,
    x: Tensor,
    masks: dict[int | None, Tensor | None],
    keep_states: bool,
    routed: list[Tensor] | None = None,
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Run blocks one after the other.

    Args:
        layers: the blocks.
        x: what goes into the first, (B, T, D).
        masks: window -> mask of the layers that have it.
        keep_states: return what goes into and comes out of every block.
        routed: gets the router's logits of every layer with experts.
        inputs: further arguments of `Block.forward`.

    A layout that divides tokens gives the blocks a `token_cut`. With a cache all processes have all
    tokens.
    """
    cut: TokenCut | None = layers.token_cut
    cache: KeyValueCache | None = inputs.get("cache")
    length = x.shape[1]
    share = None if cut is None or cache is not None else cut(length)
    inputs["bias"] = _find_biases(layers, inputs.get("bias"))
    if share is not None:
        x, masks, inputs = share.enter(x, masks, inputs)
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
    if cache is not None and not _stores(layers) and str(span.last - 1) == list(layers)[-1]:
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
    """Run one block with the mask of its window and the bias of its number of heads.

    `routed` gets the router's logits where it has experts.
    """
    mask = bias = None
    if layer.attn is not None:
        mask, bias = masks[layer.attn.window], biases.get(layer.attn.num_heads)
    out = layer(x, mask=mask, bias=bias, **inputs)
    if not isinstance(out, tuple):
        return out
    routed.append(out[1])
    return out[0]


def _find_biases(layers: nn.ModuleDict, bias: Tensor | None) -> dict[int, Tensor]:
    """Return number of heads -> the bias of layers that have so many, of one that all share."""
    if bias is None:
        return {}
    found = (layer.attn for layer in layers.values() if layer.attn is not None)
    return {attn.num_heads: attn.pick_heads(bias) for attn in found}


def _stores(layers: nn.ModuleDict) -> bool:
    """Tell whether any layer here puts keys and values into a cache."""
    return any(layer.attn is not None for layer in layers.values())


def _gather_logits(share: TokenShare, logits: list[Tensor], rows: int) -> list[Tensor]:
    """Return the router's logits of all tokens, of all layers at once: (B * T, E) each."""
    if not logits:
        return []
    joined = share.gather(torch.cat(logits, -1).unflatten(0, (rows, -1))).flatten(0, 1)
    return list(joined.split([part.shape[-1] for part in logits], -1))


def given_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, name: str = "inputs_embeds"
) -> Tensor:
    """Return which of the two was given: token ids (B, T) or embeddings (B, T, D).

    Raises:
        ShapeError: both or neither.
    """
    ids = name.replace("inputs_embeds", "input_ids")
    if (input_ids is None) == (inputs_embeds is None):
        what = "neither was given" if input_ids is None else "both were given"
        raise ShapeError(f"pass either {ids} or {name}: {what}.")
    given = inputs_embeds if input_ids is None else input_ids
    assert given is not None
    return given


def check_ids(
    input_ids: Tensor, vocab_size: int, name: str = "input_ids", limit: str = "vocab_size"
) -> None:
    """Raise `ShapeError` for ids outside the vocabulary, where looking costs no waiting.

    `name` and `limit` are what the message calls the ids and the number of them there can be.
    """
    if not input_ids.numel() or not reads_are_free(input_ids):
        return
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ShapeError(
            f"{name} has ids from {low} to {high}, but the model has {limit}={vocab_size}. "
            "Use the tokenizer that belongs to the model."
        )
