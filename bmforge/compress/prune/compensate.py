"""Mean compensation: the mean output of removed neurons and heads goes into the bias behind them.

A neuron of an MLP or an attention head that is removed no longer adds its mean to the residual
stream. Folding this mean, over calibration tokens, into the bias of the last linear layer removes
the constant part of the error for no parameter and no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.compress.prune.plan import Kept, Plan, blocks_of
from bmforge.nn import MLP, Block
from bmforge.surgery import evaluating

__all__ = ["fold_means_"]


@torch.no_grad()
def fold_means_(
    model: Any, plan: Plan, batches: Iterable[Any]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Add the mean output of removed units to biases; return the biases and their old values.

    Layers without a bias (Llama's, T5's) are skipped.

    Args:
        model: full model, before the plan is applied.
        plan: pruning plan.
        batches: calibration batches.
    """
    removed: dict[str, Tensor] = {}
    blocks = blocks_of(model)
    for name, kept_part in plan.layers.items():
        removed |= {
            f"{name}.{part}": lost for part, lost in _removed_inputs(blocks[name], kept_part)
        }
    if not removed:
        return []
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in removed}
    with evaluating(model), _summing_inputs(linears) as sums:
        for batch in prepare_batches(model, list(batches)):
            model(**batch)
    changed = []
    for name, (total, count) in sums.items():
        linear, lost = linears[name], removed[name].to(total.device)
        mean = total[lost] / max(count, 1)
        shift = linear.weight[:, lost].to(total.dtype) @ mean
        changed.append((linear.bias, linear.bias.detach().clone()))
        linear.bias.add_(shift.to(linear.bias.dtype))
    return changed


def _removed_inputs(block: Block, kept_part: Kept) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each linear layer with a bias that loses inputs, and their numbers."""
    mlp = block.mlp
    is_narrower = kept_part.features is not None and kept_part.mlp
    if is_narrower and type(mlp) is MLP and mlp.down_proj.bias is not None:
        stay = torch.tensor(kept_part.features, dtype=torch.int64)
        yield "mlp.down_proj", _others(stay, mlp.down_proj.weight.shape[1])
    for part, heads in (("attn", kept_part.heads), ("cross_attn", kept_part.cross_heads)):
        attn: Any = getattr(block, part)
        if heads is None or attn is None or not kept_part.attn or kept_part.value_dims is not None:
            continue
        if attn.o_proj.bias is not None:
            width = getattr(block.spec, part).head_dim
            stay = (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
            yield f"{part}.o_proj", _others(stay, attn.o_proj.weight.shape[1])


def _others(stay: Tensor, count: int) -> Tensor:
    """Return the numbers below `count` that are not in `stay`."""
    is_lost = torch.ones(count, dtype=torch.bool)
    is_lost[stay] = False
    return is_lost.nonzero()[:, 0]


@contextmanager
def _summing_inputs(
    linears: dict[str, nn.Module],
) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Sum the input tokens of linear layers inside the context: name -> (sum, tokens)."""
    sums: dict[str, tuple[Tensor, int]] = {}

    def add(name: str, args: tuple[Any, ...]) -> None:
        tokens = args[0].detach().double().flatten(0, -2)
        total, count = sums.get(name, (torch.zeros_like(tokens[0]), 0))
        sums[name] = total + tokens.sum(0), count + tokens.shape[0]

    handles = [
        module.register_forward_pre_hook(lambda own, args, name=name: add(name, args))
        for name, module in linears.items()
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
