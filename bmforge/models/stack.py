"""Blocks one after the other: what every family does with its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bmforge.device import reads_are_free
from bmforge.errors import ShapeError
from bmforge.nn import Block, BlockSpec, MLPSpec, MoESpec
from bmforge.nn.cuts import TokenCut, TokenShare
from bmforge.records import Span, Stack

__all__ = ["build_layers", "check_ids", "run_layers", "span_of"]


def span_of(layers: Stack) -> Span:
    """Return which blocks run: those that a layout says, or all."""
    return layers.span or Span(0, len(layers), len(layers))


def build_layers(
    spec: BlockSpec,
    num_layers: int,
    windows: tuple[int | None, ...] = (),
    mlps: tuple[MLPSpec | MoESpec, ...] = (),
) -> Stack:
    """Return `num_layers` blocks keyed "0", "1", ...

    `windows` gives each its own window, `mlps` its own feed-forward part.
    """
    specs = [replace(spec, mlp=mlp) for mlp in mlps] or [spec] * num_layers
    layers = Stack({str(i): Block(s, i) for i, s in enumerate(specs)})
    for layer, window in zip(layers.values(), windows, strict=bool(windows)):
        layer.attn.window = window
    return layers


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
    share = None if cut is None or inputs.get("cache") is not None else cut(x.shape[1])
    if share is not None:
        x, masks, inputs = share.enter(x, masks, inputs)
    states, router_logits = [x], []
    span = span_of(layers)
    for layer in (layers[str(i)] for i in range(span.first, span.last)):
        window = None if layer.attn is None else layer.attn.window
        x = layer(x, mask=masks[window], **inputs)
        if isinstance(x, tuple):
            x, logits = x
            router_logits.append(logits)
        states = [*states, x] if keep_states else [x]
    if share is not None:
        states = [share.gather(state) for state in states]
        router_logits = _gather_logits(share, router_logits, x.shape[0])
    if routed is not None:
        routed += router_logits
    return states[-1], states


def _gather_logits(share: TokenShare, logits: list[Tensor], rows: int) -> list[Tensor]:
    """Return the router's logits of all tokens, of all layers at once: (B * T, E) each."""
    if not logits:
        return []
    joined = share.gather(torch.cat(logits, -1).unflatten(0, (rows, -1))).flatten(0, 1)
    return list(joined.split([part.shape[-1] for part in logits], -1))


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
