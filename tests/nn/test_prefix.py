"""Trained keys and values before a layer's own, against a softmax written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.nn import Attention, AttentionSpec, build_mask
from bmforge.nn.attention import compute_attention
from bmforge.nn.position import RopeSpec, apply_rope, rope_table
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.nn.prompt import ExtraEmbeddings, count_ids, look_up
from bmforge.nn.relative import RelativeBias
from bmforge.nn.window import WindowAttention
from bmforge.nn.window_mask import build_window_mask
from bmforge.testing import assert_close

WIDTH, LENGTH, BEFORE = 24, 7, 3
DEVICE = torch.device("cpu")


def make(kind: type[Attention] = Attention, **fields: Any) -> Attention:
    """Attention with a prefix, all drawn."""
    torch.manual_seed(1)
    spec = AttentionSpec(**{"num_heads": 4, "num_kv_heads": 4, "head_dim": 6, **fields})
    attn = kind(WIDTH, spec).double()
    attn.prefix = KeyValuePrefix(spec.num_kv_heads, BEFORE, spec.head_dim).double()
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return attn


def heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def write_out(
    attn: Attention,
    x: Tensor,
    allowed: Tensor,
    bias: Tensor | None = None,
    rope: Any = None,
    memory: Tensor | None = None,
) -> Tensor:
    """One head after the other: the prefix in front, always allowed, without position or bias."""
    source = x if memory is None else memory
    query = heads(attn.q_proj(x), attn.head_dim)
    key, value = (heads(p(source), attn.head_dim) for p in (attn.k_proj, attn.v_proj))
    if rope is not None:
        query, key = apply_rope(query, rope), apply_rope(key, rope)
    prefix: Any = attn.prefix
    allowed = allowed.expand(x.shape[0], 1, x.shape[1], source.shape[1])
    scale = attn.head_dim**-0.5 if attn.scale is None else attn.scale
    out = []
    for head in range(query.shape[1]):
        group = head // (query.shape[1] // key.shape[1])
        own = query[:, head] @ key[:, group].transpose(1, 2) * scale
        own = own if bias is None else own + bias[:, head]
        own = own.masked_fill(~allowed[:, 0], -torch.inf)
        first = query[:, head] @ prefix.key[group].T * scale
        weights = torch.cat((first, own), -1).softmax(-1)
        out.append(
            weights[..., :BEFORE] @ prefix.value[group] + weights[..., BEFORE:] @ value[:, group]
        )
    return attn.o_proj(torch.cat(out, -1))


def padding() -> Tensor:
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    seen[0, -2:] = 0
    return seen


def compare(attn: Attention, got: Tensor, want: Tensor, x: Tensor) -> None:
    """Results, and gradients of the input and all parameters."""
    assert_close(got, want)
    wanted = [x, *attn.parameters()]
    pull = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(3))
    grads = [
        torch.autograd.grad(y, wanted, pull, retain_graph=True, allow_unused=True)
        for y in (got, want)
    ]
    for mine, theirs in zip(*grads, strict=True):
        if mine is not None and theirs is not None:
            assert_close(mine, theirs)
        assert (mine is None) == (theirs is None)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, LENGTH, WIDTH, generator=generator).double().requires_grad_()


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal(masked: bool, kv_heads: int) -> None:
    """Rotary positions are the tokens' alone; grouped heads share their prefix."""
    attn, x = make(num_kv_heads=kv_heads), tokens()
    rope = rope_table(RopeSpec(6), torch.arange(LENGTH)[None], torch.float64)
    seen = padding() if masked else None
    mask = build_mask((2, LENGTH), DEVICE, attention_mask=seen)
    allowed = CAUSAL if mask is None else mask
    compare(attn, attn(x, mask, rope), write_out(attn, x, allowed, rope=rope), x)


@pytest.mark.parametrize("window", [None, 2])
def test_both_sides_and_windows(window: int | None) -> None:
    """A window does not hide the prefix; nor is anything hidden where all see all."""
    attn, x = make(causal=window is not None), tokens()
    mask = build_mask((2, LENGTH), DEVICE, causal=attn.causal, window=window)
    allowed = torch.ones_like(CAUSAL) if mask is None else mask
    compare(attn, attn(x, mask), write_out(attn, x, allowed), x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_trained_bias(causal: bool, kv_heads: int) -> None:
    """The bias of the prefix is 0, and the table's gradient is that of the tokens."""
    attn, x = make(causal=causal, scale=1.0, num_kv_heads=kv_heads), tokens()
    attn.table = RelativeBias(4, 8, 16, causal).double()  # beside the others, for its gradient
    torch.nn.init.normal_(attn.table.weight)
    bias = attn.table(LENGTH, LENGTH)
    mask = build_mask((2, LENGTH), DEVICE, attention_mask=padding(), causal=causal)
    assert mask is not None
    compare(attn, attn(x, mask, bias=bias), write_out(attn, x, mask, bias), x)


def test_memory() -> None:
    """Attention to a source has a prefix of its own."""
    attn, x = make(causal=False), tokens()
    memory = torch.randn(2, 5, WIDTH).double()
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    seen[1, ..., 3:] = False
    got = attn(x, seen, memory=memory)
    compare(attn, got, write_out(attn, x, seen, memory=memory), x)


@pytest.mark.parametrize("length", [7, 150])
@pytest.mark.parametrize("has_globals", [False, True])
def test_windows_with_global_tokens(length: int, has_globals: bool) -> None:
    """In whole rows and in blocks: near and global tokens see the prefix alike."""
    attn: Any = make(WindowAttention, causal=False, window=4, global_tokens=True)
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    x.requires_grad_()
    real = torch.ones(2, length, dtype=torch.long)
    real[0, -2:] = 0
    chosen = torch.zeros_like(real)
    chosen[:, 0] = chosen[1, 4] = 1
    mask = build_window_mask(
        (2, length),
        DEVICE,
        4,
        attention_mask=real,
        global_mask=chosen if has_globals else None,
    )
    place = torch.arange(length)
    near = ((place[:, None] - place).abs() <= 2)[None]
    is_global = chosen.bool() if has_globals else torch.zeros_like(chosen, dtype=torch.bool)
    allowed = (near | is_global[:, None]) & real[:, None].bool()
    allowed = allowed | torch.eye(length, dtype=torch.bool)
    want = write_out_bare(attn, x, allowed[:, None], "")
    if has_globals:
        everything = real[:, None, None].bool().expand(-1, 1, length, -1)
        of_globals = write_out_bare(attn, x, everything, "_global")
        want = torch.where(is_global[..., None], of_globals, want)
    want = attn.o_proj(want * real[..., None])
    got = attn(x, mask)
    assert_close(got[real.bool()], want[real.bool()])
    shown = real.double()[..., None]
    wanted = [attn.prefix.key, attn.prefix.value, x]
    for mine, theirs in zip(
        *(torch.autograd.grad((y * shown).pow(2).sum(), wanted) for y in (got, want)), strict=True
    ):
        assert_close(mine, theirs)


def write_out_bare(attn: Any, x: Tensor, allowed: Tensor, suffix: str) -> Tensor:
    """The same before the last projection, with the tokens' or the global tokens' projections."""

    class Bare:
        """What `write_out` asks of attention."""

        q_proj, k_proj, v_proj = (getattr(attn, f"{n}{suffix}_proj") for n in "qkv")
        head_dim, scale, prefix = attn.head_dim, attn.scale, attn.prefix

        @staticmethod
        def o_proj(mixed: Tensor) -> Tensor:
            return mixed

    return write_out(Bare, x, allowed)  # type: ignore[arg-type]


def test_ids_behind_the_table() -> None:
    """Rows of the prompt are looked up and trained as rows of one longer table."""
    table, longer = torch.nn.Embedding(5, 4), torch.nn.Embedding(8, 4)
    table.prompt = ExtraEmbeddings(3, 4)
    with torch.no_grad():
        table.weight.copy_(longer.weight[:5])
        table.prompt.weight.copy_(longer.weight[5:])
    ids = torch.tensor([[0, 5, 7], [7, 4, 5]])
    assert count_ids(table) == 8
    assert torch.equal(look_up(table, ids), longer(ids))
    for each in (look_up(table, ids), longer(ids)):
        (each * torch.arange(1.0, 5)).sum().backward()
    assert_close(
        torch.cat((table.weight.grad, table.prompt.weight.grad)),
        longer.weight.grad,  # type: ignore[arg-type]
    )
    assert torch.equal(look_up(longer, ids), longer(ids))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_one_token_needs_no_copies(heads: int, masked: bool) -> None:
    """Without gradients what one token gets is the same, keys and values as they lie in a cache."""
    generator = torch.Generator().manual_seed(heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, front = draw(3, 1, 4, 8).transpose(1, 2), (draw(heads, 5, 8), draw(heads, 5, 8))
    key, value = (draw(3, heads, 20, 8)[:, :, :11] for _ in range(2))
    mask = None
    if masked:
        mask = torch.ones(3, 1, 1, 11, dtype=torch.bool)
        mask[1, ..., :4] = mask[2] = False  # of the last row only what stands in front is seen
    given = (query, key, value, mask, None, True, 0.3 if masked else None, 0.0, front)
    want = compute_attention(*given)
    with torch.no_grad():
        got = compute_attention(*given)
    assert_close(got, want)
