"""Window attention against one plain mask over the whole row."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn import AttentionSpec
from bmforge.nn.low_rank import LowRank, LowRankOptions
from bmforge.nn.part import attach_part_
from bmforge.nn.window import WindowAttention
from bmforge.nn.window_mask import WindowMask, build_window_mask
from bmforge.testing.tolerance import assert_close

D, N = 24, 4


def make_attention(dtype: torch.dtype = torch.float64, **fields: object) -> WindowAttention:
    spec = AttentionSpec(N, N, D // N, causal=False, global_tokens=True, **fields)  # type: ignore[arg-type]
    return WindowAttention(D, spec).to(dtype)


def plain(
    attn: WindowAttention,
    x: Tensor,
    window: int,
    real: Tensor | None,
    chosen: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """The paper's attention with T x T masks: local rows and global rows, one picked per token."""
    length = x.shape[1]
    place = torch.arange(length)
    everything = torch.ones(x.shape[0], length, length, dtype=torch.bool)
    if real is not None:
        everything &= real[:, None, :] > 0
    if documents is not None:
        everything &= documents[:, :, None] == documents[:, None, :]
    local = (place[:, None] - place).abs() <= window // 2
    is_global = torch.zeros(x.shape[:2], dtype=torch.bool) if chosen is None else chosen > 0
    if real is not None:
        is_global = is_global & (real > 0)
    local = (local | is_global[:, None, :]) & everything

    def attend(suffix: str, allowed: Tensor) -> Tensor:
        q, k, v = (
            getattr(attn, f"{name}{suffix}_proj")(x).unflatten(-1, (N, -1)).transpose(1, 2)
            for name in "qkv"
        )
        scores = q @ k.transpose(-1, -2) * (attn.scale or q.shape[-1] ** -0.5)
        weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1).nan_to_num()
        return (weights @ v).transpose(1, 2).flatten(2)

    mixed = torch.where(is_global[..., None], attend("_global", everything), attend("", local))
    return attn.o_proj(mixed if real is None else mixed * (real > 0)[..., None])


def make_masks(length: int, num_globals: int, kind: str) -> dict[str, Tensor | None]:
    chosen = real = documents = None
    if num_globals:
        chosen = torch.zeros(3, length, dtype=torch.long)
        for row in range(3):
            chosen[row, torch.randperm(length)[: max(0, num_globals - row)]] = 1
    if "padding" in kind:
        real = torch.ones(3, length, dtype=torch.long)
        real[1, length // 2 :], real[2, : length // 3] = 0, 0
    if "documents" in kind:
        documents = (torch.arange(length) * 4 // length).expand(3, length)
    return {"real": real, "chosen": chosen, "documents": documents}


def build(x: Tensor, window: int, masks: dict[str, Tensor | None], **more: int) -> WindowMask:
    return build_window_mask(
        (x.shape[0], x.shape[1]),
        x.device,
        window,
        attention_mask=masks["real"],
        global_mask=masks["chosen"],
        document_ids=masks["documents"],
        **more,
    )


@pytest.mark.parametrize("kind", ["", "padding", "documents", "padding and documents"])
@pytest.mark.parametrize("num_globals", [0, 1, 2, 13])
@pytest.mark.parametrize(
    ("length", "window"), [(7, 4), (200, 2), (256, 16), (330, 150), (300, 400)]
)
def test_outputs_and_gradients(length: int, window: int, num_globals: int, kind: str) -> None:
    """Blocks, short rows and both ways of global attention have the plain numbers."""
    attn = make_attention()
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(3, length, D, dtype=torch.float64, requires_grad=True)
    masks = make_masks(length, min(num_globals, length), kind)
    weight = torch.randn_like(x)
    got: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    for into, out in (
        (got, attn(x, build(x, window, masks))),
        (want, plain(attn, x, window, **masks)),
    ):
        into["out"] = out.detach()
        leaves = {"x": x, **dict(attn.named_parameters())}
        grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            into[name] = torch.zeros_like(leaf) if grad is None else grad
    # A bias of keys moves no softmax: its gradient is 0 up to rounding.
    assert_close(got, want, atol=1e-11)


def test_cost_is_linear() -> None:
    """Nothing that is kept for backward, and no mask, grows faster than the length."""

    def kept_bytes(length: int) -> int:
        attn = make_attention(torch.float32)
        x = torch.randn(1, length, D, requires_grad=True)
        chosen = torch.zeros(1, length)
        chosen[0, 3] = 1
        mask = build_window_mask((1, length), x.device, 16, global_mask=chosen)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attn(x, mask)
        return sum(storages.values()) + sum(t.nbytes for t in mask if isinstance(t, Tensor))

    assert kept_bytes(4096) < 4.1 * kept_bytes(1024)


def test_limit_of_global_tokens() -> None:
    """More places than global tokens change nothing; fewer are refused."""
    attn = make_attention()
    x = torch.randn(3, 100, D, dtype=torch.float64)
    masks = make_masks(100, 3, "padding")
    want = attn(x, build(x, 8, masks))
    assert_close(attn(x, build(x, 8, masks, max_global_tokens=3)), want)
    assert_close(attn(x, build(x, 8, masks, max_global_tokens=100)), want)
    with pytest.raises(ShapeError, match="max_global_tokens=2"):
        build(x, 8, {**masks, "real": None}, max_global_tokens=2)


def test_another_projection_module_is_called() -> None:
    """A projection that someone replaced is called, not reached into; the numbers are the same."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x)

    attn = make_attention()
    x = torch.randn(3, 100, D, dtype=torch.float64)
    mask = build(x, 8, make_masks(100, 2, "padding"))
    want = attn(x, mask)
    wrapped = Wrapped(attn.v_global_proj)
    attn.v_global_proj = wrapped  # type: ignore[assignment]
    assert_close(attn(x, mask), want)
    assert wrapped.calls == 1


def test_dropout_keeps_the_mean() -> None:
    """Weights are dropped in training, local and global ones, and their mean stays."""
    attn = make_attention(torch.float64, dropout=0.3)
    x = torch.randn(1, 90, D, dtype=torch.float64)
    chosen = torch.zeros(1, 90)
    chosen[0, 5] = 1
    mask = build_window_mask((1, 90), x.device, 8, global_mask=chosen)
    with torch.no_grad():
        want = attn.eval()(x, mask)
        attn.train()
        drawn = torch.stack([attn(x, mask) for _ in range(400)])
    assert drawn.std(0).min() > 0
    error = (drawn.mean(0) - want).abs() / (drawn.std(0) / 20)
    assert error.mean() < 1.0
    assert error[0, 5].mean() < 1.5


def test_half_precision() -> None:
    """bf16 stays close to fp32, global rows included."""
    attn = make_attention(torch.float32)
    x = torch.randn(2, 150, D)
    masks = {"real": None, "chosen": (torch.arange(150) == 70).expand(2, 150), "documents": None}
    want = attn(x, build(x, 16, masks))
    got = attn.bfloat16()(x.bfloat16(), build(x, 16, masks))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.02 * want.abs().max() + 0.01


def test_arguments_that_do_not_fit() -> None:
    """Masks of another shape and what an encoder has not are refused."""
    x = torch.randn(2, 9, D)
    with pytest.raises(ShapeError, match=r"global_attention_mask has the shape \(2, 8\)"):
        build_window_mask((2, 9), x.device, 4, global_mask=torch.ones(2, 8))
    with pytest.raises(ConfigError, match="cross-attention"):
        make_attention(torch.float32)(x, build_window_mask((2, 9), x.device, 4), memory=x)


def test_whole_window_is_plain_attention() -> None:
    """A window wider than the row is attention to everything."""
    attn = make_attention()
    x = torch.randn(2, 50, D, dtype=torch.float64)
    q, k, v = (
        proj(x).unflatten(-1, (N, -1)).transpose(1, 2)
        for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    want = attn.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    assert_close(attn(x, build_window_mask((2, 50), x.device, 200)), want)


def test_what_stands_beside_a_global_projection_counts() -> None:
    """Few global tokens take their products with the weights alone; parts beside them join in."""
    attn, x = make_attention(), torch.randn(3, 100, D, dtype=torch.float64)
    mask = build(x, 8, make_masks(100, 1, ""))
    whole = copy.deepcopy(attn)
    for name in ("k_global_proj", "v_global_proj"):
        proj = getattr(attn, name)
        part = LowRank.for_module(proj, LowRankOptions(2))
        for side in part.parameters():
            torch.nn.init.normal_(side, std=0.4)
        attach_part_(proj, "low_rank", part)
        with torch.no_grad():
            getattr(whole, name).weight += part.up @ part.down
    assert_close(attn(x, mask), whole(x, mask))
