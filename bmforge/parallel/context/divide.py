"""Context parallelism: the tokens of a row divided over processes, all the way through the blocks.

In front of a stack of blocks every process takes its share of the tokens (`token_share.py`), after
it all get all of them back; only attention looks beyond a share, by one of three methods. A causal
row is cut into twice as many chunks as processes, of which each takes an early and a late one: all
have the same work (zigzag).

Every process's backward is a part of the gradient, which ZeRO then adds up: cutting needs no
collective backward, gathering a reduce-scatter. A language model's loss is divided by tokens. Any
other is computed whole by all, and counts a part of it each.

Source: Llama Team, "The Llama 3 herd of models" (2024) for "gather"; Liu et al., "Ring attention"
(2023) and Brandon et al., "Striped attention" (2023) for "ring" and the balance; Jacobs et al.,
"DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.parallel.collectives import exchange_rows
from bmforge.parallel.context.ring import attend_causally, attend_in_ring
from bmforge.parallel.context.token_share import Rows, TokenCut, TokenShare
from bmforge.records import as_stack_, fill_slot_
from bmforge.surgery import wrap_forward_

__all__ = ["METHODS", "apply_context_parallel_", "context_problems"]

# (queries, keys, values, mask, bias, causal, scale, dropout, prefix), of which the last may be left
# out; see `nn.attention.mix_values`.
Mix = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]


def apply_context_parallel_(
    model: nn.Module,
    stacks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    method: str = "gather",
    unit: int = 1,
) -> None:
    """Cut the tokens of every stack of blocks over the axis `cp`, in place.

    Args:
        model: any model with rules, after tensor parallelism.
        stacks: containers of blocks that run one after the other.
        mesh: of one dim.
        method: how attention sees all keys: "gather", "ring" or "ulysses".
        unit: shares are multiples of it: tp, where that divides them further.

    Comm: per stack an all-gather of the hidden states forward and a reduce-scatter backward. Per
        attention, "gather": the same of keys and values; "ring": they go round, to every process,
        and backward their gradients with them; "ulysses": an all-to-all before it and one after it,
        each way.
    """
    group = mesh.get_group()
    for stack in stacks:
        is_causal = any(getattr(module, "causal", False) for module in stack.modules())
        by_heads = method == "ulysses"
        # Found by `models.stack.run_layers`.
        as_stack_(stack).token_cut = TokenCut(group, is_causal and not by_heads, unit, by_heads)
        for attn in _attentions(stack):
            if _is_window(attn):
                _see_everything_(attn)
            else:
                attn.mix = partial(METHODS[method], attn.mix)
        for block in stack.children():
            if getattr(block, "layer_drop", 0.0):
                fill_slot_(block, "agree", partial(_take_first, group))
    for module in model.modules():
        if hasattr(module, "pick_tokens"):
            fill_slot_(module, "pick_tokens", partial(_pick_tokens, group))


@torch.compiler.disable
def _take_first(group: dist.ProcessGroup, drawn: Tensor) -> Tensor:
    """Return what the first process drew.

    Comm: a broadcast of one number.
    """
    drawn = drawn.clone()
    dist.broadcast(drawn, group=group, group_src=0)
    return drawn


def context_problems(
    model: nn.Module, stacks: Sequence[nn.Module], size: int, method: str, tp: int
) -> list[str]:
    """Return everything that keeps a model's tokens from being cut into `size`."""
    if size == 1:
        return []
    name = type(model).__name__
    attentions = [attn for stack in stacks for attn in _attentions(stack)]
    if not stacks:
        return [f"cp={size}: {name} has no rules that say where its stacks of blocks are"]
    if not attentions:
        return [f"cp={size}: {name} has stacks, but no block in them has its attention as `attn`"]
    if any(not hasattr(attn, "mix") for attn in attentions):
        return [f"cp={size}: {name} has attention that cannot look beyond its own tokens"]
    if method != "ulysses":
        return []
    heads = {a.q_proj.out_features // a.head_dim // tp for a in attentions if not _is_window(a)}
    return [
        f"cp_method='ulysses': cp={size} does not divide the {count} heads that tp={tp} leaves; "
        "take 'gather' or 'ring'"
        for count in heads
        if count % size
    ]


def _attentions(stack: nn.Module) -> list[Any]:
    """Return the attentions of tokens to themselves; what looks at a memory has all of it."""
    found = [getattr(block, "attn", None) for block in stack.children()]
    return [attn for attn in found if attn is not None]


def _is_window(attn: nn.Module) -> bool:
    return hasattr(attn, "pick_own")


def _mix_gathered(
    inner: Mix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    *prefix: Pair,
) -> Tensor:
    """Gather all keys and values; each process weighs them for its own queries.

    Plain causal attention has no mask, but where it drops weights.
    """
    if not isinstance(mask, Rows):
        return inner(query, key, value, mask, bias, causal, scale, dropout, *prefix)
    share, rows = mask.share, mask.mask
    pair = share.gather(torch.cat((key, value), -1), 2)
    if causal and rows is None and bias is None:
        if not dropout:
            return attend_causally(query, _behind(pair, *prefix), share, scale)
        rows = _causal_rows(share, query.device)
    return inner(query, *pair.chunk(2, -1), rows, bias, False, scale, dropout, *prefix)


def _behind(pair: Tensor, *prefix: Pair) -> Tensor:
    """Put keys and values side by side, (B, K, T, 2 H), behind those of a prefix."""
    parts = [
        torch.cat(each, -1).to(pair.dtype).expand(pair.shape[0], -1, -1, -1) for each in prefix
    ]
    return torch.cat((*parts, pair), 2) if parts else pair


def _heads_here(prefix: Pair, times: int, share: TokenShare) -> Pair:
    """Return a prefix for the heads that this process weighs, repeated as the keys are."""
    count = prefix[0].shape[0] * times // share.size
    key, value = (t.repeat_interleave(times, 0)[share.rank * count :][:count] for t in prefix)
    return key, value


def _causal_rows(share: TokenShare, device: torch.device) -> Tensor:
    """Return the mask of this process's queries, (1, 1, T here, T)."""
    place = torch.arange(share.length, device=device)
    return (place <= share.take(place, 0)[:, None])[None, None]


def _mix_in_ring(
    inner: Mix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    *prefix: Pair,
) -> Tensor:
    """Let keys and values go round; weights that are dropped need all of them at once."""
    if dropout or not isinstance(mask, Rows):
        return _mix_gathered(inner, query, key, value, mask, bias, causal, scale, dropout, *prefix)
    is_plain = mask.mask is None and bias is None
    first = torch.cat(prefix[0], -1).to(key.dtype)[None] if prefix else None
    return attend_in_ring(
        query, key, value, mask.mask, bias, mask.share, causal and is_plain, scale, first
    )


def _mix_by_heads(
    inner: Mix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    *prefix: Pair,
) -> Tensor:
    """Exchange tokens for heads: each process weighs whole rows for some of the heads."""
    if not isinstance(mask, Rows):
        return inner(query, key, value, mask, bias, causal, scale, dropout, *prefix)
    share, size = mask.share, mask.share.size
    one = [1] * size
    times = _repeat_for(key.shape[1], query.shape[1], size)
    key, value = (t.repeat_interleave(times, 1) if times > 1 else t for t in (key, value))
    heads = [t.shape[1] // size for t in (query, key, value)]
    parts = torch.cat([t.unflatten(1, (size, -1)) for t in (query, key, value)], 2)
    parts = exchange_rows(share.pad(parts, 3).movedim(1, 0), share.group, one, one)
    whole = share.order(parts.movedim(0, 2).flatten(2, 3), 2)
    here = [_heads_here(pair, times, share) for pair in prefix]
    mixed = inner(*whole.split(heads, 1), mask.mask, bias, causal, scale, dropout, *here)
    parts = share.spread(mixed, 2).unflatten(2, (size, share.width)).movedim(2, 0)
    parts = exchange_rows(parts, share.group, one, one).narrow(3, 0, query.shape[2])
    return parts.movedim(0, 1).flatten(1, 2)


def _repeat_for(kv_heads: int, heads: int, size: int) -> int:
    """Return how often key-value heads must be repeated for every process to have equally many."""
    groups = heads // kv_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and kv_heads * n % size == 0)


METHODS: dict[str, Mix] = {
    "gather": _mix_gathered,
    "ring": _mix_in_ring,
    "ulysses": _mix_by_heads,
}


def _see_everything_(attn: Any) -> None:
    """Let attention within a window work on all tokens, and each process keep what is its own.

    Its blocks and global tokens reach across shares in ways of their own. Not divided: a projection
    and a window's width per token, beside the MLP's work, which is.
    """
    wrap_forward_(attn, partial(_on_all_tokens, attn), "window")


def _on_all_tokens(
    attn: Any, inner: Callable[..., Any], /, x: Tensor, mask: Any, *more: Any, **named: Any
) -> Tensor:
    if not isinstance(mask, Rows):
        return inner(x, mask, *more, **named)
    enter, pick_own = attn.enter, attn.pick_own
    attn.enter, attn.pick_own = (lambda own: mask.share.gather(enter(own))), mask.share.take
    try:
        return inner(x, mask.mask, *more, **named)
    finally:
        attn.enter, attn.pick_own = enter, pick_own


def _pick_tokens(
    group: dist.ProcessGroup, x: Tensor, labels: Tensor, num_items: float | Tensor
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Pick the tokens whose loss this process computes: an equal part, whoever worked on them.

    Each counts as often as there are processes, so that the mean over these is the loss, as it is
    where all compute the same; and so is the mean of their gradients, which ZeRO takes.

    Shape:
        x: (M, D); labels: (M,)
    """
    size, rank, total = group.size(), group.rank(), x.shape[0]
    mine = slice(total * rank // size, total * (rank + 1) // size)
    return x[mine], labels[mine], num_items / size
