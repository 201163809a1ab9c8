"""Context parallelism: all blocks run on sequences whose tokens are sharded over processes.

Before a stack of blocks every process selects its share of the tokens (`token_share.py`); after the
stack the tokens are all-gathered. Only attention needs the tokens of other processes, and gets them
by one of three methods. A causal sequence is cut into twice as many chunks as there are processes,
and each process takes an early and a late chunk, so that all have the same work (zigzag).

The backward of each process computes a partial gradient, and ZeRO sums these. So selecting tokens
needs no collective in backward; the all-gather needs a reduce-scatter. For a language model, each
process computes the loss of some tokens. Any other loss is computed in full by every process, each
contributing a fraction of it.

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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmforge.nn.alibi import alibi_bias
from bmforge.nn.attention import compute_attention
from bmforge.parallel.collectives import exchange_rows, sum_backward, sum_forward
from bmforge.parallel.context.ring import attend_causally, ring_attention
from bmforge.parallel.context.token_share import MaskWithShare, TokenCut, TokenShare
from bmforge.records import as_stack_, fill_slot_
from bmforge.surgery import wrap_forward_

__all__ = ["METHODS", "apply_context_parallel_", "context_problems"]

# (queries, keys, values, mask, bias, causal, scale, dropout, prefix), the last being optional;
# see `nn.attention.compute_attention`.
AttentionFn = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]


def apply_context_parallel_(
    model: nn.Module,
    stacks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    method: str = "gather",
    unit: int = 1,
) -> None:
    """Shard the tokens of every stack of blocks over the axis `cp`, in place.

    Args:
        model: model whose layout rules list the stacks, already sharded by tensor parallelism.
        stacks: containers of blocks (a stack runs its blocks one after the other).
        mesh: one-dimensional mesh.
        method: attention method: "gather", "ring" or "ulysses".
        unit: number that must divide each process's number of tokens: the tensor-parallel size if
            sequence parallelism shards the tokens further, otherwise 1.

    Comm: per stack an all-gather of the hidden states forward and a reduce-scatter backward. Per
        attention, "gather": an all-gather of keys and values forward, a reduce-scatter backward;
        "ring": keys and values are passed to every process, in backward together with their
        gradients; "ulysses": an all-to-all before it and one after it, forward and backward.
    """
    group = mesh.get_group()
    for stack in stacks:
        is_causal = any(getattr(module, "causal", False) for module in stack.modules())
        by_heads = method == "ulysses"
        # Read by `models.stack.run_layers`.
        as_stack_(stack).token_cut = TokenCut(group, is_causal and not by_heads, unit, by_heads)
        for attn in _attentions(stack):
            if _is_window(attn):
                _gather_window_attention_(attn)
            else:
                attn.attention_fn = _shard_attention_fn(attn, method, group.rank())
                if method == "gather" and getattr(attn, "softcap", None) is not None:
                    attn.attention_fn = partial(attn.attention_fn, is_plain=False)
        for block in stack.children():
            if getattr(block, "layer_drop", 0.0):
                fill_slot_(block, "sync_random", partial(_take_first, group))
    for module in model.modules():
        if hasattr(module, "pick_tokens"):
            fill_slot_(module, "pick_tokens", partial(_pick_tokens, group))
        if hasattr(module, "join_tokens"):
            fill_slot_(module, "join_tokens", partial(_join_tokens, group))


def _shard_attention_fn(attn: Any, method: str, rank: int) -> AttentionFn:
    """Return the function that computes an attention module's `attention_fn` on sharded tokens."""
    if not getattr(attn, "alibi", False):
        return partial(METHODS[method], attn.attention_fn)
    if method == "ulysses":
        return partial(
            _ulysses_attention, partial(compute_attention, slopes=partial(_own_slopes, attn, rank))
        )
    return partial(_alibi_attention, METHODS[method], attn)


def _own_slopes(attn: Any, rank: int, query: Tensor) -> Tensor:
    """Return the ALiBi slopes of the heads in `query`, which has all heads or this rank's."""
    slopes, heads = attn.slopes(query), query.shape[1]
    return slopes if slopes.shape[0] == heads else slopes[rank * heads :][:heads]


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo with this module
def _take_first(group: dist.ProcessGroup, drawn: Tensor) -> Tensor:
    """Broadcast a random number from the group's first process to the others.

    Comm: a broadcast of one number.
    """
    drawn = drawn.clone()
    dist.broadcast(drawn, group=group, group_src=0)
    return drawn


def context_problems(
    model: nn.Module, stacks: Sequence[nn.Module], size: int, method: str, tp: int
) -> list[str]:
    """Return the reasons why a model's tokens cannot be sharded over `size` processes."""
    if size == 1:
        return []
    name = type(model).__name__
    attentions = [attn for stack in stacks for attn in _attentions(stack)]
    if not stacks:
        return [f"cp={size}: {name} has no layout rules that list its stacks of blocks"]
    if not attentions:
        return [
            (
                f"cp={size}: {name} has stacks of blocks, but no block has an attention module "
                "named `attn`"
            )
        ]
    if any(not hasattr(attn, "attention_fn") for attn in attentions):
        return [
            (
                f"cp={size}: the attention of {name} does not support keys and values of other "
                "processes"
            )
        ]
    if method == "ring" and any(getattr(attn, "softcap", None) for attn in attentions):
        return [f"cp_method='ring': {name} uses logit soft-capping; use 'gather' or 'ulysses'"]
    if method != "ulysses":
        return []
    heads = {a.q_proj.out_features // a.head_dim // tp for a in attentions if not _is_window(a)}
    return [
        (
            f"cp_method='ulysses': cp={size} does not divide the {count} heads per process that "
            f"tp={tp} leaves; use 'gather' or 'ring'"
        )
        for count in heads
        if count % size
    ]


def _attentions(stack: nn.Module) -> list[Any]:
    """Return the self-attention modules of a stack; cross-attention is not sharded by tokens."""
    attentions = [getattr(block, "attn", None) for block in stack.children()]
    return [attn for attn in attentions if attn is not None]


def _is_window(attn: nn.Module) -> bool:
    return hasattr(attn, "pick_own")


def _gathered_attention(
    inner: AttentionFn,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    *prefix: Pair,
    is_plain: bool = True,
) -> Tensor:
    """Compute attention, with `inner`, of this rank's queries over all-gathered keys and values.

    Causal attention needs an explicit mask only with dropout or logit soft-capping (`is_plain` is
    False); otherwise it is computed in tiles.
    """
    if not isinstance(mask, MaskWithShare):
        return inner(query, key, value, mask, bias, causal, scale, dropout, *prefix)
    share, rows = mask.share, mask.mask
    # Keys and values in one collective.
    pair = share.gather(torch.cat((key, value), -1), 2)
    if causal and rows is None and bias is None:
        if is_plain and not dropout:
            return attend_causally(query, _join_with_prefix(pair, *prefix), share, scale)
        rows = _causal_rows(share, query.device)
    return inner(query, *pair.chunk(2, -1), rows, bias, False, scale, dropout, *prefix)


def _join_with_prefix(pair: Tensor, *prefix: Pair) -> Tensor:
    """Prepend a prefix to `pair`, the keys and values concatenated to (B, K, T, 2 H)."""
    parts = [
        torch.cat(each, -1).to(pair.dtype).expand(pair.shape[0], -1, -1, -1) for each in prefix
    ]
    return torch.cat((*parts, pair), 2) if parts else pair


def _heads_here(prefix: Pair, times: int, share: TokenShare) -> Pair:
    """Return this rank's heads of a prefix, after repeating each KV head `times` times."""
    count = prefix[0].shape[0] * times // share.size
    key, value = (t.repeat_interleave(times, 0)[share.rank * count :][:count] for t in prefix)
    return key, value


def _causal_rows(share: TokenShare, device: torch.device) -> Tensor:
    """Return the causal mask of this rank's queries, (1, 1, local T, T)."""
    positions = torch.arange(share.length, device=device)
    return (positions <= share.take(positions, 0)[:, None])[None, None]


def _ring_attention(
    inner: AttentionFn,
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
    """Compute ring attention or, with attention dropout, attention over gathered keys."""
    if dropout or not isinstance(mask, MaskWithShare):
        return _gathered_attention(
            inner, query, key, value, mask, bias, causal, scale, dropout, *prefix
        )
    is_plain = mask.mask is None and bias is None
    first = torch.cat(prefix[0], -1).to(key.dtype)[None] if prefix else None
    return ring_attention(
        query, key, value, mask.mask, bias, mask.share, causal and is_plain, scale, first
    )


def _alibi_attention(
    method: AttentionFn,
    attn: Any,
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
    """Compute gathered or ring attention with the ALiBi bias of this rank's tokens."""
    if not isinstance(mask, MaskWithShare):
        inner: AttentionFn = partial(compute_attention, slopes=attn.slopes)
        return inner(query, key, value, mask, bias, causal, scale, dropout, *prefix)
    share = mask.share
    if mask.mask is None and causal:
        mask = mask._replace(mask=_causal_rows(share, query.device))
    # The keys of a prefix are the first tokens; ring attention adds no bias to them.
    before = prefix[0][0].shape[1] if prefix else 0
    own = share.take(torch.arange(share.length, device=query.device), 0) + before
    bias = alibi_bias(attn.slopes(query), own, share.length + before).to(query.dtype)
    method = _gathered_attention if prefix else method
    return method(compute_attention, query, key, value, mask, bias, False, scale, dropout, *prefix)


def _ulysses_attention(
    inner: AttentionFn,
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
    """Compute Ulysses attention: all-to-all from token shards to head shards and back."""
    if not isinstance(mask, MaskWithShare):
        return inner(query, key, value, mask, bias, causal, scale, dropout, *prefix)
    share, size = mask.share, mask.share.size
    one_each = [1] * size
    times = _repeat_for(key.shape[1], query.shape[1], size)
    key, value = (t.repeat_interleave(times, 1) if times > 1 else t for t in (key, value))
    heads = [t.shape[1] // size for t in (query, key, value)]
    parts = torch.cat([t.unflatten(1, (size, -1)) for t in (query, key, value)], 2)
    # Equal parts for each process, so the tokens are padded; `order` drops the padding.
    parts = exchange_rows(share.pad(parts, 3).movedim(1, 0), share.group, one_each, one_each)
    by_head = share.order(parts.movedim(0, 2).flatten(2, 3), 2)
    own_heads = [_heads_here(pair, times, share) for pair in prefix]
    mixed = inner(*by_head.split(heads, 1), mask.mask, bias, causal, scale, dropout, *own_heads)
    parts = share.spread(mixed, 2).unflatten(2, (size, share.width)).movedim(2, 0)
    parts = exchange_rows(parts, share.group, one_each, one_each).narrow(3, 0, query.shape[2])
    return parts.movedim(0, 1).flatten(1, 2)


def _repeat_for(kv_heads: int, heads: int, size: int) -> int:
    """Return the smallest repetition factor of KV heads for which `size` divides their number."""
    groups = heads // kv_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and kv_heads * n % size == 0)


METHODS: dict[str, AttentionFn] = {
    "gather": _gathered_attention,
    "ring": _ring_attention,
    "ulysses": _ulysses_attention,
}


def _gather_window_attention_(attn: Any) -> None:
    """Make sliding-window attention run on the full sequence; each process keeps its own tokens.

    The blocks and global tokens of window attention reach across the shards. The replicated work, a
    projection and one window per token, is small compared to the sharded work of the MLP.
    """
    wrap_forward_(attn, partial(_on_all_tokens, attn), "window")


def _on_all_tokens(
    attn: Any, inner: Callable[..., Any], /, x: Tensor, mask: Any, *more: Any, **named: Any
) -> Tensor:
    if not isinstance(mask, MaskWithShare):
        return inner(x, mask, *more, **named)
    input_fn, pick_own = attn.input_fn, attn.pick_own
    attn.input_fn, attn.pick_own = (lambda own: mask.share.gather(input_fn(own))), mask.share.take
    try:
        return inner(x, mask.mask, *more, **named)
    finally:
        attn.input_fn, attn.pick_own = input_fn, pick_own


def _pick_tokens(
    group: dist.ProcessGroup, x: Tensor, labels: Tensor, num_items: float | Tensor
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Select the tokens for which this process computes the loss: an equal number per process.

    The loss of each token is scaled by the number of processes, so that the mean over processes,
    like ZeRO's mean of gradients, equals the loss over all tokens.

    Shape:
        x: (M, D); labels: (M,)
    """
    own = _own_tokens(group, x.shape[0])
    return x[own], labels[own], num_items / group.size()


def _own_tokens(group: dist.ProcessGroup, total: int) -> slice:
    """Return the slice of the tokens for which this process computes the loss."""
    size, rank = group.size(), group.rank()
    return slice(total * rank // size, total * (rank + 1) // size)


def _join_tokens(group: dist.ProcessGroup, scores: Tensor, total: int) -> Tensor:
    """All-gather the scores of all tokens; every process computed those of its share.

    All processes then compute the same loss over all tokens, and their gradients of a token's
    scores are summed, which scales them by the number of processes.

    Shape:
        scores: (K, m); returns (K, M)

    Comm: an all-reduce of K x M numbers, forward and backward.
    """
    own = _own_tokens(group, total)
    return sum_backward(sum_forward(F.pad(scores, (own.start, total - own.stop)), group), group)
